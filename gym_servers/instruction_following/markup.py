"""Marks that a row describes itself, as in NeMo Gym's format_verification and citation_if: lines by patterns, citations."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

ANY_ID = re.compile(r"citation_[a-z0-9_:]+", re.IGNORECASE)
# Name of a citation style -> its pattern, in which {} is the pattern of the ids. Some have an opening and a closing tag.
STYLES = {
    "cite_xml": r"<cite>({})</cite>",
    "claim_wrap_xml": r'<cite index="({})">[^<\w]*\w[^<]*</cite>',
    "ascii_brackets": r"\[({})\](?!\()",
    "fullwidth_brackets": r"\u3010({})\u3011",
    "ref_colon": r"\[ref:({})\]",
    "web_brackets": r"\[web:({})\]",
    "markdown_footnote": r"\[\^({})\]",
    "paren_part": r"\(({})\)",
    "double_angle": r"<<({})>>",
    "curly_double": r"\{{\{{({})\}}\}}",
    "angle_pipe": r"<ref\|({})>",
}
LISTS = ("cite_xml", "claim_wrap_xml")  # several ids, separated by commas
NUMBERED = re.compile(r"(?<!\\)(?:\\\\)*(?:\\[1-9]|\(\?\([1-9])")  # `\1` and `(?(1)...)`
TAG = re.compile(r"<cite\b|</cite\s*>", re.IGNORECASE)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a pattern: {error}") from None
    return text


def _inner_pattern(text: str) -> str:
    try:
        re.compile(f"<(?:{text})>")
    except re.error as error:
        raise ValueError(f"{text!r} cannot be part of a citation's pattern: {error} (for flags: '(?i:...)')") from None
    if NUMBERED.search(text):  # the style's own groups come first
        raise ValueError(f"{text!r} cannot be part of a citation's pattern: it refers to a group by number")
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
InnerPattern = Annotated[Pattern, AfterValidator(_inner_pattern)]


def regex(text: str, verify_regex: list[Pattern], verify_min_matches: int = 1, **_: Any) -> bool:
    """At least so many lines match one of the patterns."""
    return sum(any(re.search(p, line) for p in verify_regex) for line in text.split("\n")) >= verify_min_matches


def string_match(text: str, expected_markers: list[str], patterns: list[Pattern] = [], **_: Any) -> bool:  # noqa: B006
    """Every marker occurs, and the patterns match nothing else."""
    matches = {match.group() for pattern in patterns for match in re.finditer(pattern, text)}
    return all(marker in text for marker in expected_markers) and matches <= set(expected_markers)


def _without_tags(text: str) -> str:
    tagged, last, rest = text.rpartition(">")  # a "<" after the last ">" opens no tag, and each would search to the end
    return re.sub(r"<[^>]*>", " ", tagged + last) + rest


def citation_if(
    text: str,
    grammar: Literal[tuple(STYLES)],  # type: ignore[valid-type]
    valid_id_set: list[str] = [],  # noqa: B006
    id_regex: InnerPattern = "citation_[0-9]+(?::snippet_[0-9]+)?",
    mode: Literal["cite", "no_cite"] = "cite",
    min_valid_citations: Annotated[int, Field(ge=0)] = 1,
    expected_ids: list[str] | None = None,
    expected_slack: int = 1,
    **_: Any,
) -> bool:
    """Citations in the row's style: well-formed, of known sources, all expected ones and not many more. no_cite: none."""
    ids = rf"(?:{id_regex})(?:,(?:{id_regex}))*" if grammar in LISTS else rf"(?:{id_regex})"
    style = re.compile(STYLES[grammar].format(ids))
    cited = {name for match in style.finditer(text) for name in match.group(1).split(",")}
    if mode == "no_cite":
        return not ANY_ID.search(text) and not TAG.search(text)
    rest = style.sub(" ", text)
    prose = _without_tags(text) if grammar == "claim_wrap_xml" else rest
    if ANY_ID.search(rest) or TAG.search(rest) or not re.search(r"\w", prose):
        return False
    expected = cited if expected_ids is None else set(expected_ids)
    enough = len(cited) >= min_valid_citations and expected <= cited
    return enough and cited <= set(valid_id_set) and len(cited) <= len(expected) + expected_slack


GROUP: tuple[Callable[..., bool], ...] = (regex, string_match, citation_if)
CHECKS = {f"verifier:{check.__name__}": check for check in GROUP}
