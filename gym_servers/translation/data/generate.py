"""English sentences with their German and Spanish, from one small grammar: gender, case and verb forms are right. Seeded.

python data/translation/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from ngym.files.task_rows import draw_distinct, output_folder, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 240, 60, 5

PROMPT = "Translate into {language}. Write the translation only.\n\n{source}"
LANGUAGES = {"de": "German", "es": "Spanish"}


class Noun(NamedTuple):
    en: str
    de: str
    de_gender: str  # m, f, n
    es: str
    es_gender: str  # m, f


class Adjective(NamedTuple):
    en: str
    de: str  # without ending
    es: str  # masculine


class Verb(NamedTuple):
    """First person, third person; none of them parts in German."""

    en: tuple[str, str]
    de: tuple[str, str]
    es: tuple[str, str]


NOUNS = (
    Noun("tower", "Turm", "m", "torre", "f"),
    Noun("bridge", "Brücke", "f", "puente", "m"),
    Noun("house", "Haus", "n", "casa", "f"),
    Noun("garden", "Garten", "m", "jardín", "m"),
    Noun("street", "Straße", "f", "calle", "f"),
    Noun("boat", "Boot", "n", "barco", "m"),
    Noun("tree", "Baum", "m", "árbol", "m"),
    Noun("church", "Kirche", "f", "iglesia", "f"),
    Noun("window", "Fenster", "n", "ventana", "f"),
    Noun("table", "Tisch", "m", "mesa", "f"),
    Noun("school", "Schule", "f", "escuela", "f"),
    Noun("car", "Auto", "n", "coche", "m"),
    Noun("river", "Fluss", "m", "río", "m"),
    Noun("lamp", "Lampe", "f", "lámpara", "f"),
    Noun("book", "Buch", "n", "libro", "m"),
    Noun("key", "Schlüssel", "m", "llave", "f"),
)
ADJECTIVES = (
    Adjective("old", "alt", "viejo"),
    Adjective("small", "klein", "pequeño"),
    Adjective("white", "weiß", "blanco"),
    Adjective("new", "neu", "nuevo"),
    Adjective("red", "rot", "rojo"),
    Adjective("beautiful", "schön", "bonito"),
    Adjective("quiet", "ruhig", "tranquilo"),
    Adjective("black", "schwarz", "negro"),
)
VERBS = (
    Verb(("see", "sees"), ("sehe", "sieht"), ("veo", "ve")),
    Verb(("buy", "buys"), ("kaufe", "kauft"), ("compro", "compra")),
    Verb(("paint", "paints"), ("male", "malt"), ("pinto", "pinta")),
    Verb(("look for", "looks for"), ("suche", "sucht"), ("busco", "busca")),
    Verb(("photograph", "photographs"), ("fotografiere", "fotografiert"), ("fotografío", "fotografía")),
)
SUBJECTS = (
    ("I", "ich", "yo", 0),
    ("Maria", "Maria", "Maria", 1),
    ("the teacher", "die Lehrerin", "la profesora", 1),
    ("my brother", "mein Bruder", "mi hermano", 1),
)
TIMES = (
    ("today", "heute", "hoy"),
    ("every morning", "jeden Morgen", "cada mañana"),
    ("sometimes", "manchmal", "a veces"),
    ("in summer", "im Sommer", "en verano"),
)
LINKS = (("and", "und", "y"), ("but", "aber", "pero"))
NOMINATIVE = {"m": "der", "f": "die", "n": "das"}
ACCUSATIVE = {"m": "den", "f": "die", "n": "das"}
DATIVE = {"m": "dem", "f": "der", "n": "dem"}
SPANISH = {"m": "el", "f": "la"}


class Clause(NamedTuple):
    en: str
    de: str
    es: str


def agreeing(adjective: Adjective, noun: Noun) -> str:
    return adjective.es if noun.es_gender == "m" else adjective.es[:-1] + "a"


def spanish(noun: Noun, adjective: Adjective) -> str:
    return f"{SPANISH[noun.es_gender]} {noun.es} {agreeing(adjective, noun)}"


def of_spanish(noun: Noun) -> str:
    return f"del {noun.es}" if noun.es_gender == "m" else f"de la {noun.es}"


def is_so(rng: random.Random) -> Clause:
    """The old tower is white."""
    noun, (one, other) = rng.choice(NOUNS), rng.sample(ADJECTIVES, 2)
    return Clause(
        f"the {one.en} {noun.en} is {other.en}",
        f"{NOMINATIVE[noun.de_gender]} {one.de}e {noun.de} ist {other.de}",
        f"{spanish(noun, one)} es {agreeing(other, noun)}",
    )


def stands(rng: random.Random) -> Clause:
    """The old tower is next to the bridge."""
    (noun, near), adjective = rng.sample(NOUNS, 2), rng.choice(ADJECTIVES)
    return Clause(
        f"the {adjective.en} {noun.en} is next to the {near.en}",
        f"{NOMINATIVE[noun.de_gender]} {adjective.de}e {noun.de} ist neben {DATIVE[near.de_gender]} {near.de}",
        f"{spanish(noun, adjective)} está al lado {of_spanish(near)}",
    )


def does(rng: random.Random) -> Clause:
    """Today I see the old tower. German puts the verb before its subject then."""
    en, de, es, person = rng.choice(SUBJECTS)
    verb, noun, adjective = rng.choice(VERBS), rng.choice(NOUNS), rng.choice(ADJECTIVES)
    when = rng.choice(TIMES)
    ending = "en" if noun.de_gender == "m" else "e"
    return Clause(
        f"{when[0]} {en} {verb.en[person]} the {adjective.en} {noun.en}",
        f"{when[1]} {verb.de[person]} {de} {ACCUSATIVE[noun.de_gender]} {adjective.de}{ending} {noun.de}",
        f"{when[2]} {'' if person == 0 else es + ' '}{verb.es[person]} {spanish(noun, adjective)}",
    )


def sentence(rng: random.Random) -> Clause:
    clause = rng.choice((is_so, stands, does))(rng)
    if rng.random() < 0.6:
        link, second = rng.choice(LINKS), rng.choice((is_so, stands))(rng)
        comma = "," if link[0] == "but" else ""
        clause = Clause(
            f"{clause.en}{comma} {link[0]} {second.en}",
            f"{clause.de}{comma} {link[1]} {second.de}",
            f"{clause.es}{comma} {link[2]} {second.es}",
        )
    return Clause(*(f"{text[0].upper()}{text[1:]}." for text in clause))


def row(made: Clause, code: str) -> dict[str, Any]:
    prompt = PROMPT.format(language=LANGUAGES[code], source=made.en)
    references = [made.de if code == "de" else made.es]
    return task_row("translation_agent", {"input": prompt}, source=made.en, references=references)


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    rows = draw_distinct(
        TRAIN + VALIDATION, lambda _: row(sentence(rng), rng.choice(list(LANGUAGES))), lambda task: task["source"]
    )
    write_splits(folder, rows, VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
