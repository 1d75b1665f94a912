"""Documents, docstrings, comments and test names: no words of the list in CONTRIBUTING.md, statements, short lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT, pages, readmes

CODE = ("ngym", "trainer", "models", "agents", "gym_servers", "benchmarks", "scripts")
COLUMNS = 120
BANNED = (
    r"(?i:who(m)?ever)",
    r"(?i:anew|lest|of late|to be had|by halves|had no room|in so many words)",
    r"(?i:mend(s|ed|ing)?|spoil(s|t)?)",
    r"(?i:nobody|somebody)",
    r"(?i:(is|are|was|were) told)",
    r"(?i:tells(?!:))",
    r"(?i:hears? of|comes? of it)",
    r"(?i:teach(es)? nothing)",
    r"(?i:go(es)? on with)",
    r"(?i:stands?(?! (in )?for\b| on \d))",
    r"(?<![Tt]here )(is|are) none",
    r"(?<![Tt]here )(is|are) no (?!longer\b|more\b)",
)
WORDS = re.compile("|".join(rf"\b(?:{each})(?:\b|(?<=\s))" for each in BANNED))
SPAN = re.compile(r"(`+)(?:(?!\1).)+\1")
FENCE = re.compile(r"\s*(`{3,}|~{3,})")
GENERATED = ("<!-- measured by", "<!-- end of what was measured")  # of docs/benchmarks.md, as `make bench` writes it


def test_no_word_of_the_list_is_in_a_document() -> None:
    found = []
    for page in _documents():
        for number, line in _lines(page):
            if not (page.name == "CONTRIBUTING.md" and line.startswith("|")):  # the list itself
                found += [f"{_where(page)}:{number}: {hit[0]!r}" for hit in WORDS.finditer(SPAN.sub("", line))]
    assert not found, "\n".join(found)


def test_no_word_of_the_list_is_in_a_docstring_or_comment() -> None:
    found = []
    for file, source in _sources():
        if WORDS.search(source):  # parse only then: it takes a hundred times longer
            found += [
                f"{_where(file)}:{number}: {hit[0]!r}"
                for number, text in [*_docstrings(source), *_comments(source)]
                for hit in WORDS.finditer(SPAN.sub("", text))
            ]
    assert not found, "\n".join(found)


def test_no_word_of_the_list_is_in_the_name_of_a_test() -> None:
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8")):
            if hit := WORDS.search(name.replace("_", " ")):
                found.append(f"{_where(file)}: {name}: {hit[0]!r}")
    assert not found, "\n".join(found)


def test_the_docstring_of_a_module_is_a_statement() -> None:
    questions = []
    for file, source in _sources():
        first = (ast.get_docstring(_parse(source)) or "").partition("\n")[0]
        if "?" in SPAN.sub("", first):
            questions.append(f"{_where(file)}:1: {first}")
    assert not questions, "\n".join(questions)


def test_lines_of_documents_are_short() -> None:
    """Outside of code, tables and front matter; a link or a formula that cannot be broken may be longer."""
    long = []
    for page in _documents():
        for number, line in _lines(page):
            if len(line) > COLUMNS and " " in line.strip() and not line.lstrip().startswith("|"):
                long.append(f"{_where(page)}:{number}: {len(line)} columns")
    assert not long, "\n".join(long)


@pytest.mark.parametrize("text", ["Whoever asks.", "It is no service.", "the file stands there", "A fault was mended."])
def test_a_banned_word_is_found(text: str) -> None:
    assert WORDS.search(text)


@pytest.mark.parametrize("text", ["there is no service", "a name stands for a value", "if there are none", "is None"])
def test_plain_words_are_not_found(text: str) -> None:
    assert not WORDS.search(text)


def _documents() -> list[Path]:
    return [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *pages(), *readmes()]


def _sources() -> Iterator[tuple[Path, str]]:
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file, file.read_text(encoding="utf-8")


def _where(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _lines(page: Path) -> Iterator[tuple[int, str]]:
    """Lines outside of code, front matter and generated parts, numbered from 1."""
    ticks, generated = "", False
    lines = page.read_text(encoding="utf-8").splitlines()
    front = lines.index("---", 1) + 1 if lines[:1] == ["---"] else 0
    for number, line in enumerate(lines[front:], front + 1):
        generated = (generated or line.startswith(GENERATED[0])) and not line.startswith(GENERATED[1])
        fence = FENCE.match(line)
        if fence and (not ticks or line.strip() == ticks):
            ticks = "" if ticks else fence[1]
        elif not ticks and not generated:
            yield number, line


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SystemError:  # CPython 3.11 counts the depth of all threads together (python/cpython#106905)
        return ast.parse(source)


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(_parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield from enumerate(text.split("\n"), node.body[0].lineno)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
