r"""Extracts the final answer from a model's text. The last answer counts, and a hedge ("A or B") is not an answer.

All functions share these rules: text up to `</think>` is reasoning and has no answer; among several answers of one kind
the last one wins; a `\boxed{...}` outranks an "answer is ..." phrase, which outranks unmarked text; a box that is never
closed was cut off, and is not an answer. Boxes are searched in the last BOX_WINDOW characters, everything else in the
last WINDOW. The time is linear in the length of any text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from ngym.grading.text_match import signed, visible

TEXT_LIMIT = 1_000_000
WINDOW = 2000
BOX_WINDOW = 50_000
TEXT_TYPES = ("output_text", "refusal")  # the types of an assistant's parts
RELATIVE_TOLERANCE = Decimal("1e-5")

_BOX_TOKENS = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_PHRASE = re.compile(
    r"answer\b[^\n:.=]{0,60}?(?:\bis\b|[:=\uff1a])[*_]*:?[*_]*[ \t]*\n?[ \t]*([^\n]+)|####[ \t]*([^\n]+)", re.IGNORECASE
)
_AGAIN = re.compile(
    r"(?:so,? |thus,? )?(?:the |my )?(?:final |correct )?answer(?:\s+is\b:?|[:=])\s*(?=\S)", re.IGNORECASE
)
_DELIMITED = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(((?:[^\\]|\\[^()])+)\\\)|\\\[((?:[^\\]|\\[^\[\]])+)\\\]")
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![)\]}])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}\b)?"
    r"|(?<![\w.])(?:(?<![)\]}])[-+])?\.[0-9]+"
)
_CONTEXT = 60  # characters on each side of a number that decide whether it is part of a formula
_OPERAND_BEFORE = re.compile(
    r"(?:[0-9)\]}]|(?<![A-Za-z])[A-Za-z])\s*(?:[-+*/^\u00d7\u00f7\u00b7\u2044\u2010-\u2014]|\\(?:times|cdot|div|pm|over)\b)\s*$"
    r"|[0-9][:(]$|[0-9]\*\*$|[\^_]\s*\{?$|[\u221a\u221b]\s*\(?$|(?:[\u00b1\u2213]|\\(?:pm|mp)|\+\s?/\s?-)\s*$"
    r"|[0-9]\s?[xX]\s?$|[0-9]\s+(?i:times|plus|over|divided by|multiplied by|to the power of)\s+$"
    r"|\\(?:[dt]?frac|[dt]?binom|sqrt)\s*(?:\[[^\]]*\])?\s*(?:\{[^{}]*\}\s*)?\{?[^{}\s=]*$"
    r"|\\?(?:log|ln|exp|sin|cos|tan)(?![A-Za-z])\s*(?:_\s*\{?\w+\}?)?\s*[{(]?$"
)
_SIGN_AFTER_OPERAND = re.compile(r"[0-9)\]}]\s*$")
_OPERAND_AFTER = re.compile(
    r"[eE][-+]?[0-9]|[xyz](?![\w-])(?!\s+[a-z])|\.[0-9]|\s*[xX]\s*[0-9]|\s?[\u00bc-\u00be\u2150-\u215e]|\s+(?i:squared|cubed|factorial)\b(?!\s+[a-z])"
    r"|\s*[\^_]|\s*[\u221a\u03c0]|\s*\\(?:times|cdot|div|pm|over|sqrt|pi|[dt]?frac)\b"
    r"|\s*[-+*/\u00d7\u00f7\u00b7]\s*(?:[A-Za-z](?![A-Za-z])|[(\\\u221a])"
)
_MINUS = re.compile(r"\b(?:minus|negative)\s+(?=\.?\d)", re.IGNORECASE)
_SCALE = re.compile(
    r"\s*-?\s*\b(?i:(hundred|thousand|million|billion|trillion|dozen|lakh|crore)s?\b)"
    r"|\s?((?i:k|mln|mn|bn|tn)|[MBT])(?![\w&'\u2019-])"
)
_SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "lakh": 10**5, "crore": 10**7, "k": 10**3, "m": 10**6, "mn": 10**6, "mln": 10**6, "b": 10**9, "bn": 10**9,
    "t": 10**12, "tn": 10**12,
}  # fmt: skip
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b|per cent\b|pct\b|\N{PER MILLE SIGN})", re.IGNORECASE)
_PERCENT_WORDS = re.compile(r"%|\bper ?cent", re.IGNORECASE)
_FRACTION = re.compile(
    r"[\s-]*(?:halves|thirds|fifths|sixths|sevenths|eighths|ninths|tenths|hundredths|thousandths|millionths)\b"
    r"|\s+and\s+(?:a|one|two|three)[\s-]+(?:half|thirds?|quarters?|fourths?|fifths?|eighths?|tenths?)\b",
    re.IGNORECASE,
)
_HEDGE = r"(?:or|and|and/or|maybe|perhaps|possibly|alternatively)"
_ALTERNATIVE = re.compile(  # `8 or 7`, `8 apples and/or 7`, `8, maybe 7`
    rf"[0-9]\W*(?:[^\W\d]+\W+){{0,2}}?{_HEDGE}\W+"
    r"(?:(?:or|else|maybe|perhaps|possibly|probably|even|rather|just|about|also)\W+){0,2}$",
    re.IGNORECASE,
)
_DENIED = re.compile(  # `not 7`, `cannot be 7`, `x > 7`; but `> 7` is a quotation in Markdown
    r"(?:\bnot|\bcannot|\bnever|n['\u2019]t|!=|\N{NOT EQUAL TO}|\\neq?)(?:\s+(?:be|equal\s+to|the\s+number))?[\s*_]*$"
    r"|\b(?:at\s+(?:least|most)|(?:more|less|fewer|greater|larger|smaller|higher|lower|bigger)\s+than)[\s*_]*$"
    r"|\b(?:except|anything\s+but)[\s*_]*$|[\w)\]}]\s*[<>]=?\s*$|(?:[\u2264\u2265\u2a7d\u2a7e]|\\[lg]e(?:q|qslant)?|\\[lg]t)\s*$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[\s*_]*(?:is|was)\s+(?:wrong|incorrect|false|not\s+(?:the\s+|my\s+)?(?:right|correct|final|answer|solution))\b",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ\b|\{\s*\\circ\s*\})")
_UNIT_POWER = re.compile(
    r"([0-9](?:\s|\\[ ,;])*(?:\\(?:text|textrm|mathrm)\s*\{\s*)?(?:[mcdk]?m|ft|in|yd|mi|feet|inches|met(?:er|re)s?)\s*\}?)"
    r"\s*\^\s*(?:[23]|\{\s*[23]\s*\})(?![0-9])"
)
_CURRENCY_BEHIND_SIGN = re.compile(r"(?<![\w)\]}])-(?:\\?\$|[\u20ac\u00a3\u00a5])(?=\.?[0-9])")
_CURRENCY = re.compile(r"\\?\$|[\u20ac\u00a3\u00a5]")
_SIGNED_BRACKET = re.compile(r"(?<![\w)\]}])-\s?\(\s*([0-9.,]+)\s*\)")
_SIGN_OF_A_BOX = re.compile(r"^\s*-\s*(?:\\(?:text|mathrm|mathbf)\s*\{\s*)?(?=\.?[0-9])")
_GROUPED_BOX = re.compile(r"\s*[-+]?[0-9]{1,3}(?: [0-9]{3})+\s*")
_THIN_SPACE = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_ONLY_NUMBERS = re.compile(r"[\s*_]*[-+]?[0-9][0-9.]*(?:\s*[,;/|]\s+[-+]?[0-9.]+)+[\s.*_]*")
_TAG = re.compile(r"</?[A-Za-z][\w-]{0,20}>")
_BOXED_LIST = re.compile(r"[0-9]\s*(?:[,;|&]|\\(?:quad\b|[ &])|\\text\s*\{\s*(?:or|and|to)\s*\})|[0-9]\s+$")
_STATED = re.compile(r"\bis\s+(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)$")  # ... the largest $n$ is 34
_WORD = re.compile(r"\S+")
_COMMAND = re.compile(r"\S*\\[A-Za-z]\S*")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"[^A-Za-z]*([A-Za-z])(?![A-Za-z])(.*)", re.DOTALL)
_ANOTHER = re.compile(
    r"[\s)\].:\-\u2013\u2014]*(?:[,/&+]|or\b|and\b)\s*(?:or\b|and\b)?[\s(\[]*[A-Za-z](?![A-Za-z])"
    r"|[)\].:][\s(\[]*[A-Z][)\].:]"  # (A) (B)
    r"|[\s)\].]*[-\u2013\u2014~][\s(\[]*[A-Z][\s)\].]*$"  # A - B
)
_OPTION = re.compile(r"^[\s*_]*(?:option|choice|letter|answer)\s+(?=\W*[A-Za-z](?![A-Za-z]))", re.IGNORECASE)
_LABEL = re.compile(r"\s*(?:[):.\]\-\u2013\u2014]|,?\s*(?:because|since|as|for|which)\b)")
_CLOSERS = " \t\n()[]{}.:;,!*$_`"


def last_text(response: Mapping[str, Any]) -> str:
    """The text of the last assistant message of a Responses-API response; "" if it has none.

    Only the end of a text longer than TEXT_LIMIT characters is returned, so that no verifier blocks its event loop.
    """
    for item in reversed(response.get("output") or []):
        if item.get("type", "message") == "message" and item.get("role") == "assistant":
            content = item.get("content") or ""
            if isinstance(content, str):
                return _end(content)
            return _end("".join(part.get("text") or "" for part in content if part.get("type") == "output_text"))
    return ""


def response_problem(response: Mapping[str, Any]) -> str | None:
    """The reason why the text of this Response cannot be read; None if it can. An empty object is an empty answer."""
    output = response.get("output")
    if not isinstance(output, list):
        if not response:
            return None
        if "choices" in response:
            return "this is a Chat Completion; send a Response, whose `output` is a list of items"
        return f"output must be a list of items, not {type(output).__name__}"
    for place, item in enumerate(output):
        if not isinstance(item, dict):
            return f"output[{place}] must be an object, not {type(item).__name__}"
        if item.get("type", "message") == "message" and (problem := _message_problem(item)):
            return f"output[{place}].{problem}"
    return None


def _message_problem(message: Mapping[str, Any]) -> str | None:
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str):
        return "role is missing: assistant, user, system or developer"
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text", ""), str | None) for part in content
    ):
        return "content must be text, or a list of parts whose text is text"
    for place, part in enumerate(content):
        if role == "assistant" and part.get("text") and part.get("type") not in TEXT_TYPES:
            return f"content[{place}].type is {part.get('type')!r:.40}; the text of an assistant is output_text"
    return None


def _end(text: str) -> str:
    """The last TEXT_LIMIT characters. Reasoning that begins before them and does not end is marked as reasoning."""
    cut = len(text) - TEXT_LIMIT
    if cut <= 0:
        return text
    opened = text.rfind("<think>", 0, cut + len("<think>") - 1)
    unclosed = opened >= 0 and text.find("</think>", opened) < 0
    return "<think>" * unclosed + text[cut:]


def without_reasoning(text: str) -> str:
    """The text after the last `</think>`; "" after a `<think>` that is never closed."""
    _, _, rest = text.rpartition("</think>")
    return rest.partition("<think>")[0] if "<think>" in rest else rest


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`; a box that only contains a box is unwrapped."""
    text = text[-BOX_WINDOW:]
    span: tuple[int, int] | None = None
    opened: list[tuple[bool, int]] = []
    for token in _BOX_TOKENS.finditer(text):
        mark = token.group()
        if mark.startswith("\\boxed") or mark == "{":
            opened.append((mark != "{", token.end()))
        elif mark == "}" and opened:
            is_box, start = opened.pop()
            if is_box:
                span = start, token.start()
    if span is None:
        return None
    content = text[span[0] : span[1]].strip()
    inner = re.fullmatch(r"\\boxed\s*\{([^{}]*)\}", content)
    return inner.group(1).strip() if inner else content


def answer_phrase(text: str) -> str | None:
    """The rest of the line after the last "answer is", "answer:" or "####"."""
    matches = _PHRASE.findall(text[-WINDOW:])
    if not matches:
        return None
    answer = "".join(matches[-1]).strip()
    while prefix := _AGAIN.match(answer):  # Final Answer: The final answer is 5
        answer = answer[prefix.end() :].strip()
    return answer


def fenced(text: str) -> str | None:
    """The content of the last closed code fence after the reasoning, without its info string; None if there is none."""
    inside: list[str] | None = None
    content = None
    for line in without_reasoning(text).splitlines(keepends=True):
        if not line.lstrip().startswith("```"):
            if inside is not None:
                inside.append(line)
        elif inside is None:
            inside = []
        else:
            content, inside = "".join(inside), None
    return content


def move(text: str) -> str:
    """A move of a game, after the reasoning: the content of the last box or `<action>`, else the last non-empty line."""
    text = without_reasoning(text)
    if tagged := re.findall(r"<action>([^<]*)</action>", text):
        return str(tagged[-1])
    return boxed(text) or next((line for line in reversed(text.splitlines()) if line.strip()), "")


def short(text: str) -> str | None:
    """A short text answer: the last box, else the text after the last "answer is", else the last line with a word."""
    text = _answering(text)
    marked = boxed(text)
    if marked is None:
        marked = answer_phrase(text)
    if marked is None:
        lines = [line for line in text[-WINDOW:].splitlines() if re.search(r"\w", line)]
        marked = lines[-1] if lines else ""
    return unwrapped(marked).strip(" \t*_`") or None


def number(text: str, percent: bool = False) -> Decimal | None:
    """The last number of the last box if there is one, else of the text: `1,234`, `-3.5e2`, `minus 7`, `3 million`.

    A last number that is part of a formula (`1-7`, `7\N{SUPERSCRIPT TWO}`, `\\frac{1}{7}`), of a fraction in words
    (`7 tenths`), an alternative (`8 or 7`), a bound (`x > 7`) or denied (`not 7`) is not an answer. The exponent of a unit
    (`7 m^2`) is not a number.

    Args:
        percent: whether the question asks for a percentage, so that `7%` is 7. Otherwise `7%` is not an answer.
    """
    text = _answering(text)
    box = boxed(text)
    plain = _with_signs(_plain((text if box is None else box)[-WINDOW:]), box is not None)
    numbers = list(_NUMBER.finditer(plain))
    if not numbers or not _is_separate(plain, numbers[-1]):
        return None
    if _ONLY_NUMBERS.fullmatch(plain.rstrip().rpartition("\n")[2]):
        return None
    start, end = numbers[-1].span()
    before = plain[max(0, start - _CONTEXT) : start]
    if _ALTERNATIVE.search(before) or _DENIED.search(before) or _DENIED_AFTER.match(plain, end):
        return None
    if _FRACTION.match(plain, end):
        return None
    if (box is not None and _BOXED_LIST.search(plain[:start])) or (_PERCENT.match(plain, end) and not percent):
        return None
    scale = _SCALE.match(plain, end)
    value = Decimal(numbers[-1].group().replace(",", ""))
    return value * _SCALES[(scale[1] or scale[2]).casefold()] if scale else value


def _with_signs(plain: str, is_box: bool) -> str:
    """A text in which each sign is directly before its digits, and no exponent of a unit is a number."""
    if is_box:
        plain = _SIGN_OF_A_BOX.sub("-", plain)
        plain = plain.replace(" ", "") if _GROUPED_BOX.fullmatch(plain) else plain
    plain = _UNIT_POWER.sub(r"\1", _DEGREES.sub(" ", _MINUS.sub("-", _TAG.sub(" ", plain))))
    plain = _SIGNED_BRACKET.sub(r"-\1", _CURRENCY_BEHIND_SIGN.sub("-", plain))
    return _CURRENCY.sub(" ", plain)


def asks_percent(question: str) -> bool:
    """Whether a question is about a percentage."""
    return _PERCENT_WORDS.search(question) is not None


def same_number(found: Decimal, expected: Decimal) -> bool:
    """Whether two numbers agree: integers must be equal; others may differ in the sixth digit, as printed floats do."""
    if expected == expected.to_integral_value():
        return found == expected
    return abs(found - expected) <= RELATIVE_TOLERANCE * abs(expected)


def formula(text: str) -> str | None:
    r"""The final formula: the last box, else what follows the last "answer is", the last `$...$`, or a number."""
    text = _answering(text)
    box = boxed(text)
    if box is not None:
        return box
    phrase = answer_phrase(text)
    if phrase is not None:
        sentence = re.split(r"[.;!](?:\s|$)", phrase, maxsplit=1)[0].strip(" *_`")
        match = _STATED.search(sentence)
        return (match[1] if match else _delimited(phrase) or sentence) or None
    last = _delimited(text[-WINDOW:])
    if last is not None:
        return last
    plain = _plain(text[-WINDOW:])
    numbers = list(_NUMBER.finditer(plain))
    if not numbers:
        return None
    place = numbers[-1].start()  # in `\frac{10}{9}` without dollars, the answer is not 9
    around = [word.group() for word in _COMMAND.finditer(plain) if word.start() <= place < word.end()]
    if around:
        return around[0].rstrip(".,;")
    if _is_separate(plain, numbers[-1]):
        return numbers[-1].group()
    word = next(word.group() for word in _WORD.finditer(plain) if word.start() <= place < word.end()).strip(".,;:")
    return word if word != numbers[-1].group() else None  # `9/7` is a formula, the 7 of `9 / 7` is not


def option_letter(text: str, options: Mapping[str, str]) -> str | None:
    """The letter of the chosen option: from the last box, else the last "answer is" phrase, else the last line alone.

    Each of the three may have the letter (`B`, `(B)`, `B: Paris`, `B because ...`) or exactly one option's text. If the
    first one that exists does not name a single option, there is no answer.

    Args:
        options: letter -> text of the option.
    """
    text = _answering(text)
    marked = boxed(text)
    if marked is None:
        marked = answer_phrase(text)
    if marked is not None:
        return letter_of(marked, options) or option_of(marked, options)
    line = text[-WINDOW:].rstrip().rpartition("\n")[2]
    return option_of(line, options)


def letter_of(fragment: str, letters: Mapping[str, str]) -> str | None:
    """The letter that is a short text or its leading label; None for a word, a list or a hedge."""
    match = _LETTER.match(_OPTION.sub("", unwrapped(fragment)))
    if match is None or _ANOTHER.match(match.group(2)):
        return None
    letter, rest = match.groups()
    alone = not rest.strip(_CLOSERS)
    labels = letter.isupper() and _LABEL.match(rest) is not None
    return letter.upper() if (alone or labels) and letter.upper() in letters else None


def option_of(fragment: str, options: Mapping[str, str]) -> str | None:
    """The letter of the only option that a short text names, with or without its letter: `Paris`, `B`, `(B) Paris.`"""
    normalized = canonical(fragment)
    hits = [
        letter
        for letter, text in options.items()
        if normalized and normalized in (canonical(text), canonical(letter), canonical(f"{letter} {text}"))
    ]
    return hits[0] if len(hits) == 1 else None


def canonical(text: str) -> str:
    """Normalize a short text: lower case, single spaces, no LaTeX or Markdown wrapping, brackets or end marks."""
    return " ".join(re.sub(r"[()\[\]*_`$]|[.:;,!](?=\s|$)", " ", unwrapped(text)).casefold().split())


def unwrapped(text: str) -> str:
    r"""`\text{B}` -> `B`."""
    return _WRAPPER.sub(r"\1", text)


def _answering(text: str) -> str:
    """The text after the reasoning; "" if its only box was cut off."""
    text = without_reasoning(text)
    return "" if "\\boxed" in text[-BOX_WINDOW:] and boxed(text) is None else text


def _delimited(text: str) -> str | None:
    formulas = [next(part for part in parts if part) for parts in _DELIMITED.findall(text)]
    return formulas[-1].strip() if formulas else None


def _is_separate(text: str, match: re.Match[str]) -> bool:
    """Whether a number is a separate value, not an operand, an exponent, a base or a part of a fraction."""
    before, after = text[max(0, match.start() - _CONTEXT) : match.start()], text[match.end() : match.end() + _CONTEXT]
    if _OPERAND_BEFORE.search(before) or (match.group()[0] in "-+" and _SIGN_AFTER_OPERAND.search(before)):
        return False
    return not (after[:1].isnumeric() or _OPERAND_AFTER.match(after))


def _plain(text: str) -> str:
    r"""Signs, digits and separators as ASCII: a typographic minus -> `-`, `1{,}234` -> `1,234`; no invisible ones."""
    text = (
        signed(_THIN_SPACE.sub("", visible(text)))
        .replace("\N{MINUS SIGN}", "-")
        .replace("{,}", ",")
        .replace("\\,", "")
        .replace("\\!", "")
    )
    return text if text.isascii() else "".join(str(unicodedata.decimal(c, c)) for c in text)
