"""Prompts with one to three instructions, each row with a reference that follows them all. Seeded.

A text is written first and changed until it follows the drawn instructions; their numbers are then read off it. A set
is kept only if the server's own checks find every instruction followed by the reference: so none contradict each other.

python data/instruction_following/generate.py [FOLDER]  # train, validation and example.jsonl; default: here
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngym.config.shipped_files import app_file
from ngym.files.task_rows import draw_distinct, output_folder, prompt_of, task_row, write_splits
from ngym.services.base.app import load

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 130, 30, 5
CHECKS = load(app_file("gym_servers/instruction_following", HERE)).CHECKS

TOPICS = (
    "lighthouse", "bakery", "night train", "beehive", "library", "harbour", "market", "glacier", "orchard", "theatre",
    "desert road", "vineyard", "school garden", "ferry", "workshop", "observatory", "old bridge", "tea house", "canal", "museum",
)  # fmt: skip
REQUESTS = (
    "Write a short text about a {}.",
    "Describe a {} to somebody who has never seen one.",
    "Tell me about a {}.",
)
SENTENCES = (
    "The {t} opens early, and few people notice it.",
    "Every morning a keeper walks around the {t} with a lamp.",
    "In winter the {t} is quiet, cold and a little lonely.",
    "Visitors often ask how old the {t} might be.",
    "Nobody remembers who built the first {t} here.",
    "Children like the {t} because something always moves.",
    "On market days the noise reaches the {t} before noon.",
    "A small sign explains what the {t} is good for.",
    "Rain makes the path to the {t} slippery, so boots help.",
    "At night only one window of the {t} is lit.",
    "Some say that the {t} will close, but it never does.",
    "Its smell, its light and its silence make the {t} special.",
)
NAMED = {"de": "German", "es": "Spanish", "fr": "French", "it": "Italian", "pt": "Portuguese", "ru": "Russian"}
FOREIGN = {
    "de": "Das ist ein ruhiger Ort. Die Leute kommen am Morgen und sie bleiben nicht lange. Es ist auch im Winter offen.",
    "es": "Es un lugar tranquilo. La gente llega por la mañana y no se queda mucho tiempo. También está abierto en el invierno.",
    "fr": "C'est un endroit calme. Les gens viennent le matin et ne restent pas longtemps. Il est ouvert dans la saison froide.",
    "it": "È un luogo tranquillo. La gente arriva la mattina e non rimane per molto tempo. Anche nel freddo il posto è aperto.",
    "pt": "É um lugar tranquilo. As pessoas chegam de manhã e não ficam por muito tempo. O lugar está aberto para todos.",
    "ru": "Это тихое место. Люди приходят утром и не остаются на ночь. Но он открыт и зимой, как и летом.",  # noqa: RUF001
}
ALPHABET = [
    "a", "bright", "cat", "drifted", "eastward", "finding", "green", "hills", "in", "June", "keeping", "low",
    "mountains", "near", "open", "plains", "quietly", "resting", "since", "then",
]  # fmt: skip
GROWING = (
    "stones", "keep", "quiet", "while", "long", "winds", "pass", "over", "old", "roofs", "and",
    "empty", "yards",
)  # fmt: skip
PALINDROMES = ("level", "noon", "radar", "civic", "kayak", "refer")

Draft = tuple[str, dict[str, Any], str]  # the text, the instruction's arguments, its wording
Maker = Callable[[random.Random, str, str], Draft]


def last_word(text: str) -> str:
    words: list[str] = re.findall(r"\w+", text)
    return words[-1]


def keywords(rng: random.Random, text: str, topic: str) -> Draft:
    words = rng.sample(("copper", "velvet", "thunder", "saffron", "compass", "marble"), 2)
    text = f"{text} It has {words[0]} and {words[1]}."
    return text, {"keywords": words}, f"Include the words {words[0]} and {words[1]}"


def frequency(rng: random.Random, text: str, topic: str) -> Draft:
    count = text.lower().count(topic)
    arguments = {"keyword": topic, "frequency": count, "relation": "at least"}
    return text, arguments, f'Use "{topic}" at least {count} times'


def rarely(rng: random.Random, text: str, topic: str) -> Draft:
    count = text.lower().count("the") + 1
    arguments = {"keyword": "the", "frequency": count, "relation": "less than"}
    return text, arguments, f'Let the letters "the" occur less than {count} times'


def forbidden(rng: random.Random, text: str, topic: str) -> Draft:
    words = rng.sample(("very", "beautiful", "really", "nice", "amazing", "quite"), 2)
    return text, {"forbidden_words": words}, f"Do not use the words {words[0]} and {words[1]}"


def letters(rng: random.Random, text: str, topic: str) -> Draft:
    letter = rng.choice("aeorst")
    count = text.lower().count(letter)
    arguments = {"letter": letter, "let_frequency": count, "let_relation": "at least"}
    return text, arguments, f"Let the letter {letter} occur at least {count} times"


def sentence_count(rng: random.Random, text: str, topic: str) -> Draft:
    count = len(re.findall(r"[.!?]", text))
    return text, {"num_sentences": count, "relation": "at least"}, f"Write at least {count} sentences"


def few_sentences(rng: random.Random, text: str, topic: str) -> Draft:
    count = len(re.findall(r"[.!?]", text)) + 1
    return text, {"num_sentences": count, "relation": "less than"}, f"Write fewer than {count} sentences"


def word_count(rng: random.Random, text: str, topic: str) -> Draft:
    count = len(text.split()) // 5 * 5
    return text, {"num_words": count, "relation": "at least"}, f"Write at least {count} words"


def few_words(rng: random.Random, text: str, topic: str) -> Draft:
    count = len(text.split()) // 10 * 10 + 20
    return text, {"num_words": count, "relation": "less than"}, f"Write fewer than {count} words"


def paragraphs(rng: random.Random, text: str, topic: str) -> Draft:
    parts = split(text)
    wording = f"Write {len(parts)} paragraphs, parted by the divider ***"
    return "\n***\n".join(parts), {"num_paragraphs": len(parts)}, wording


def first_word(rng: random.Random, text: str, topic: str) -> Draft:
    parts, word = split(text), rng.choice(("Later", "Meanwhile", "Indeed", "Surely"))
    nth = rng.randint(1, len(parts))
    parts[nth - 1] = f"{word} {parts[nth - 1]}"
    arguments = {"num_paragraphs": len(parts), "nth_paragraph": nth, "first_word": word.lower()}
    wording = (
        f"Write {len(parts)} paragraphs, parted by two line breaks; paragraph {nth} starts with the word {word.lower()}"
    )
    return "\n\n".join(parts), arguments, wording


def split(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?]) ", text) if part]


def placeholders(rng: random.Random, text: str, topic: str) -> Draft:
    names = rng.sample(("name", "address", "date", "price", "phone"), rng.randint(1, 3))
    text = text + "".join(f" Ask for [{name}]." for name in names)
    wording = f"Have at least {len(names)} placeholders in square brackets, such as [address]"
    return text, {"num_placeholders": len(names)}, wording


def postscript(rng: random.Random, text: str, topic: str) -> Draft:
    marker = rng.choice(("P.S.", "P.P.S"))
    wording = f"Add a postscript at the end that starts with {marker}"
    return f"{text}\n{marker} It is worth the walk.", {"postscript_marker": marker}, wording


def bullets(rng: random.Random, text: str, topic: str) -> Draft:
    parts = split(text)
    mark = rng.choice("*-")
    wording = f"Have exactly {len(parts)} bullet points, such as: * A point"
    return "\n".join(f"{mark} {part}" for part in parts), {"num_bullets": len(parts)}, wording


def highlights(rng: random.Random, text: str, topic: str) -> Draft:
    parts = split(text)
    count = rng.randint(1, len(parts))
    marked = [f"*{part}*" if i < count else part for i, part in enumerate(parts)]
    return " ".join(marked), {"num_highlights": count}, f"Highlight at least {count} parts with asterisks, *like this*"


def sections(rng: random.Random, text: str, topic: str) -> Draft:
    parts, marker = split(text), rng.choice(("SECTION", "Part", "Day"))
    numbered = "\n".join(f"{marker} {i}\n{part}" for i, part in enumerate(parts, start=1))
    arguments = {"section_spliter": marker, "num_sections": len(parts)}
    return numbered, arguments, f"Write {len(parts)} sections, each begun by {marker} and its number"


def as_json(rng: random.Random, text: str, topic: str) -> Draft:
    return json.dumps({"topic": topic, "text": text}), {}, "Give the whole answer as JSON"


def titled(rng: random.Random, text: str, topic: str) -> Draft:
    return f"<<The {topic}>>\n{text}", {}, "Give it a title in double angular brackets, such as <<a title>>"


def twice(rng: random.Random, text: str, topic: str) -> Draft:
    other = " ".join(reversed(split(text)))
    return f"{text}\n******\n{other} It stays.", {}, "Give two different answers, parted by six asterisks: ******"


def ending(rng: random.Random, text: str, topic: str) -> Draft:
    phrase = rng.choice(("That is all there is to say.", "Is there anything else?", "And so it goes."))
    return f"{text} {phrase}", {"end_phrase": phrase}, f"End with exactly this phrase and nothing after it: {phrase}"


def quoted(rng: random.Random, text: str, topic: str) -> Draft:
    return f'"{text}"', {}, "Put the whole answer in double quotation marks"


def some_capitals(rng: random.Random, text: str, topic: str) -> Draft:
    count = rng.randint(2, 5)
    words = text.split(" ")
    for i in rng.sample(range(1, len(words)), count):
        words[i] = words[i].upper()
    arguments = {"capital_frequency": count, "capital_relation": "at least"}
    return " ".join(words), arguments, f"Write at least {count} words in capitals"


def capitals(rng: random.Random, text: str, topic: str) -> Draft:
    return text.upper(), {}, "Write in English and in capital letters only"


def lowercase(rng: random.Random, text: str, topic: str) -> Draft:
    return text.lower(), {}, "Write in English and in lowercase letters only"


def commaless(rng: random.Random, text: str, topic: str) -> Draft:
    return text.replace(",", ""), {}, "Do not use any commas"


def in_range(rng: random.Random, text: str, topic: str) -> Draft:
    low = max(1, len(re.findall(r"\w+", text)) - rng.randint(0, 5))
    return text, {"min_words": low, "max_words": low + 10}, f"Write between {low} and {low + 10} words"


def unique(rng: random.Random, text: str, topic: str) -> Draft:
    count = max(1, len({word.lower() for word in re.findall(r"\w+", text)}) // 5 * 5)
    return text, {"N": count}, f"Use at least {count} different words"


def numerals(rng: random.Random, text: str, topic: str) -> Draft:
    count = rng.randint(2, 4)
    sentences = " ".join(f"Count {rng.randint(2, 99)} of them." for _ in range(count))
    return f"{text} {sentences}", {"N": count}, f"Mention exactly {count} numbers, in digits"


def all_marks(rng: random.Random, text: str, topic: str) -> Draft:
    wording = "Use each of these marks at least once, and an interrobang besides: . , ! ? ; : ?!"
    return f"{text} Why? It lives; it stays: that, at least, is sure?!", {}, wording


def palindromes(rng: random.Random, text: str, topic: str) -> Draft:
    words = rng.sample(PALINDROMES, rng.randint(2, 4))
    wording = f"Include at least {len(words)} different palindromes of three letters or more"
    return f"{text} Think of {' and '.join(words)}.", {"N": len(words)}, wording


def title_case(rng: random.Random, text: str, topic: str) -> Draft:
    titled = " ".join(word[:1].upper() + word[1:] for word in text.split(" "))
    return titled, {}, "Start every word with a capital letter"


def line_count(rng: random.Random, text: str, topic: str) -> Draft:
    parts = split(text)
    return "\n".join(parts), {"N": len(parts)}, f"Write exactly {len(parts)} lines"


def alternating(rng: random.Random, text: str, topic: str) -> Draft:
    words = [word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 1]
    mixed = " ".join(w.upper() if i % 2 else w for i, w in enumerate(words))
    return mixed, {}, "Write words in small letters and in capitals by turns"


def no_spaces(rng: random.Random, text: str, topic: str) -> Draft:
    return re.sub(r"\s", "_", text), {}, "Use no spaces and no line breaks at all"


def word_lines(rng: random.Random, text: str, topic: str) -> Draft:
    return "\n".join(text.split()), {}, "Put each word on a line of its own"


def alphabet(rng: random.Random, text: str, topic: str) -> Draft:
    begin, count = rng.randrange(8), rng.randint(6, 12)
    wording = "Write one sentence in which each word starts with the letter that follows that of the word before"
    return " ".join(ALPHABET[begin : begin + count]).capitalize() + ".", {}, wording


def growing(rng: random.Random, text: str, topic: str) -> Draft:
    step = rng.randint(1, 2)
    sizes = [2 + i * step for i in range(rng.randint(3, 4))]
    text = " ".join(" ".join(GROWING[:size]).capitalize() + "." for size in sizes)
    return text, {"small_n": step}, f"Each sentence has exactly {step} word{'s' * (step > 1)} more than the one before"


def chained(rng: random.Random, text: str, topic: str) -> Draft:
    pairs = rng.sample(("light", "water", "stone", "bread", "music", "paper"), 4)
    chain = " ".join(f"{a.capitalize()} leads on to {b}." for a, b in itertools.pairwise(pairs))
    return chain, {}, "Start each sentence with the last word of the one before"


def rare_words(rng: random.Random, text: str, topic: str) -> Draft:
    words = text.lower().split()
    most = max(words.count(word) for word in words) + 1
    return text, {"small_n": most}, f"Use no word more than {most} times"


def foreign(rng: random.Random, text: str, topic: str) -> Draft:
    code = rng.choice(list(FOREIGN))
    return FOREIGN[code], {"language": code}, f"Answer in {NAMED[code]} only"


# Those that write another text come first, then those that add to it, then those that wrap it. The order is theirs here.
MAKERS: dict[str, Maker | list[Maker]] = {
    "language:response_language": foreign,
    "words:alphabet": alphabet,
    "sentence:increment": growing,
    "sentence:last_first": chained,
    "punctuation:no_comma": commaless,
    "keywords:existence": keywords,
    "count:numbers": numerals,
    "count:punctuation": all_marks,
    "words:palindrome": palindromes,
    "detectable_content:number_placeholders": placeholders,
    "startend:end_checker": ending,
    "format:title_case": title_case,
    "change_case:english_capital": capitals,
    "change_case:english_lowercase": lowercase,
    "change_case:capital_word_frequency": some_capitals,
    "words:alternating_case": alternating,
    "detectable_format:number_highlighted_sections": highlights,
    "length_constraints:number_paragraphs": paragraphs,
    "length_constraints:nth_paragraph_first_word": first_word,
    "detectable_format:number_bullet_lists": bullets,
    "detectable_format:multiple_sections": sections,
    "count:lines": line_count,
    "combination:two_responses": twice,
    "detectable_format:title": titled,
    "detectable_content:postscript": postscript,
    "startend:quotation": quoted,
    "detectable_format:json_format": as_json,
    "format:newline": word_lines,
    "format:no_whitespace": no_spaces,
    "keywords:forbidden_words": forbidden,
    "keywords:frequency": [frequency, rarely],
    "keywords:letter_frequency": letters,
    "length_constraints:number_sentences": [sentence_count, few_sentences],
    "length_constraints:number_words": [word_count, few_words],
    "count:word_count_range": in_range,
    "count:unique_word_count": unique,
    "words:repeats": rare_words,
}
ALONE = ("detectable_format:constrained_response", "combination:repeat_prompt")


def task(rng: random.Random, first: str) -> dict[str, Any] | None:
    """A row with the instruction `first` and up to two others; None if the reference does not follow them all."""
    topic, request = rng.choice(TOPICS), rng.choice(REQUESTS)
    request = request.format(topic).replace(" a o", " an o")
    text = " ".join(rng.sample(SENTENCES, rng.randint(3, 5))).format(t=topic)
    if first in ALONE:
        names, all_arguments, wordings, text = special(first, rng, topic, request, text)
    else:
        others = rng.sample([name for name in MAKERS if name != first], rng.randint(0, 2))
        names = [name for name in MAKERS if name in (first, *others)]
        all_arguments, wordings = [], []
        for name in names:
            makers = MAKERS[name]
            maker = rng.choice(makers) if isinstance(makers, list) else makers
            text, arguments, wording = maker(rng, text, topic)
            all_arguments.append(arguments)
            wordings.append(wording)
    if not all(CHECKS[name](text, **arguments) for name, arguments in zip(names, all_arguments, strict=True)):
        return None
    prompt = (
        f"{request} {'. '.join(wordings)}."
        if len(wordings) < 2 or rng.random() < 0.5
        else with_requirements(request, wordings)
    )
    return task_row(
        "instruction_following_agent",
        {"input": prompt},
        instruction_id_list=names,
        kwargs=all_arguments,
        reference=text,
    )


def with_requirements(request: str, wordings: list[str]) -> str:
    return "\n".join([request, "Follow all of these instructions:", *(f"- {wording}." for wording in wordings)])


def special(
    name: str, rng: random.Random, topic: str, request: str, text: str
) -> tuple[list[str], list[dict[str, Any]], list[str], str]:
    """The two instructions that are about the prompt itself."""
    if name == "combination:repeat_prompt":
        wording = f"Before you answer, repeat this sentence word for word: {request}"
        return [name], [{"prompt_to_repeat": request}], [wording], f"{request}\n{text}"
    answer = rng.choice(("yes", "no", "maybe"))
    wording = (
        f"Would you visit the {topic}? Answer with one of these: My answer is yes. My answer is no. My answer is maybe"
    )
    return [name], [{}], [wording], f"{text} My answer is {answer}."


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    names = [*MAKERS, *ALONE]
    rows = draw_distinct(TRAIN + VALIDATION, lambda count: task(rng, names[count % len(names)]), prompt_of)
    rng.shuffle(rows)
    write_splits(folder, rows, VALIDATION, EXAMPLES)


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
