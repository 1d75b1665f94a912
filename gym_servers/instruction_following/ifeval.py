"""IFEval's 25 instructions, written from their descriptions (arXiv 2311.07911, table 1).

Ids and arguments are those of its rows. Each check takes the text and the arguments and returns whether the text
follows the instruction. Loopholes are closed: empty titles, highlights and placeholders do not count, and look-alikes
of a comma are commas.
"""

import json
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from ngym.grading.text_match import unmasked

from .text_analysis import LANGUAGES, is_in, read_words, script_share, sentences, words

Relation = Literal["at least", "less than"]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Letter = Annotated[str, Field(min_length=1, max_length=1)]


def _check_language(language: str) -> str:
    if language not in LANGUAGES:
        raise ValueError(f"unknown language {language!r}; known: {', '.join(sorted(LANGUAGES))}")
    return language


Language = Annotated[str, AfterValidator(_check_language)]
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
MARKUP = re.compile(r"[*`~]|\b_|_\b")
COMMAS = re.compile("[,\u060c\u3001\uff0c\ufe10\ufe50\u201a\u02cc\ufe45]")


def holds(number: int, relation: Relation, bound: int) -> bool:
    return number >= bound if relation == "at least" else number < bound


def existence(text: str, keywords: list[Text]) -> bool:
    return all(word.casefold() in text.casefold() for word in keywords)


def frequency(text: str, keyword: Text, frequency: Count, relation: Relation = "at least") -> bool:
    return holds(text.casefold().count(keyword.casefold()), relation, frequency)


def forbidden_words(text: str, forbidden_words: list[Text]) -> bool:
    return not any(_has_word(unmasked(text), unmasked(word)) for word in forbidden_words)


def _has_word(text: str, word: str) -> bool:
    """Whether the text has the word, within markup or not; signs of markup that the word has are part of it (`f*ck`)."""
    # not \b, which never holds at the edges of `C++` or `$5`
    pattern = rf"(?<!\w){re.escape(word)}(?!\w)"
    kept = MARKUP.sub(lambda sign: sign[0] if sign[0] in word else "", text)
    return any(re.search(pattern, each, re.IGNORECASE) for each in (MARKUP.sub("", text), kept))


def letter_frequency(text: str, letter: Letter, let_frequency: Count, let_relation: Relation = "at least") -> bool:
    return holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, language: Language) -> bool:
    return is_in(text, language)


def number_sentences(text: str, num_sentences: Count, relation: Relation = "at least") -> bool:
    return holds(len(sentences(text)), relation, num_sentences)


def number_words(text: str, num_words: Count, relation: Relation = "at least") -> bool:
    return holds(len(words(text)), relation, num_words)


def number_paragraphs(text: str, num_paragraphs: Count) -> bool:
    """Paragraphs separated by `***`."""
    parts = [part.strip() for part in text.split("***")]
    inner = parts[(not parts[0]) : len(parts) - (not parts[-1])]
    return all(inner) and len(inner) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: Count, nth_paragraph: Count, first_word: Text) -> bool:
    """Paragraphs separated by two line breaks; the nth, counted from 1, starts with the word."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = paragraphs[nth_paragraph - 1].split()[0]
    return re.split(r"[.,?!:;'\"]", first.lstrip("'\""), maxsplit=1)[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: Count) -> bool:
    return len(re.findall(r"\[(?=[^\[\]\n]*\w)[^\[\]\n]+\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: Text) -> bool:
    """The marker (spaces in it are optional) with some text after it."""
    letters = [re.escape(c) for c in postscript_marker.rstrip(".") if not c.isspace()]
    matches = re.findall(r"(?:^|\s)[*_]*" + r"[ ]?".join(letters) + r"[.:]?[*_]*([^\n]*\S)", text, re.IGNORECASE)
    return any(c.isalnum() for rest in matches for c in rest)


def number_bullet_lists(text: str, num_bullets: Count) -> bool:
    return sum(re.match(r"\s*(?:\*(?!\*)|-)[^\w\n]*\w", line) is not None for line in text.splitlines()) == num_bullets


def constrained_response(text: str) -> bool:
    """Exactly one of the three answers."""
    return sum(answer in text for answer in ANSWERS) == 1


def number_highlighted_sections(text: str, num_highlights: Count) -> bool:
    return len(re.findall(r"\*(?=[^\n*]*\w)[^\n*]+\*", text)) >= num_highlights


def multiple_sections(text: str, section_spliter: Text, num_sections: Count) -> bool:
    """`SECTION 1`, `SECTION 2`, ...: the marker with a number, each with something after it."""
    parts = re.split(re.escape(section_spliter) + r"[ \t]?\d{1,4}\b", text)[1:]
    return sum(any(c.isalnum() for c in part) for part in parts) >= num_sections


def json_format(text: str) -> bool:
    """The whole text is one JSON object or array that is not empty; a code fence around it is allowed."""
    inside = re.sub(r"^```(?:json|JSON|Json)?|```$", "", text.strip()).strip()
    try:
        value = json.loads(inside)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list) and bool(value)


def title(text: str) -> bool:
    return re.search(r"<<(?=[^<>\n]*\w)[^<>\n]+>>", text) is not None


def two_responses(text: str) -> bool:
    """Two different answers, separated by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    inner = parts[(not parts[0]) : len(parts) - (not parts[-1])]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def repeat_prompt(text: str, prompt_to_repeat: Text) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: Text) -> bool:
    return text.strip().strip('"').strip().lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, capital_frequency: Count, capital_relation: Relation = "at least") -> bool:
    return holds(sum(word.isupper() for word in read_words(text)), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and script_share(text, "LATIN") > 0.9


def english_lowercase(text: str) -> bool:
    return text.islower() and script_share(text, "LATIN") > 0.9


def no_comma(text: str) -> bool:
    return COMMAS.search(text) is None


def quotation(text: str) -> bool:
    inside = text.strip()
    return len(inside) > 2 and inside[0] == inside[-1] == '"'


GROUPS: dict[str, tuple[Callable[..., bool], ...]] = {
    "keywords": (existence, frequency, forbidden_words, letter_frequency),
    "language": (response_language,),
    "length_constraints": (number_sentences, number_paragraphs, number_words, nth_paragraph_first_word),
    "detectable_content": (number_placeholders, postscript),
    "detectable_format": (
        number_bullet_lists,
        constrained_response,
        number_highlighted_sections,
        multiple_sections,
        json_format,
        title,
    ),
    "combination": (two_responses, repeat_prompt),
    "startend": (end_checker, quotation),
    "change_case": (capital_word_frequency, english_capital, english_lowercase),
    "punctuation": (no_comma,),
}
CHECKS = {f"{group}:{check.__name__}": check for group, checks in GROUPS.items() for check in checks}
