"""The contents of the documentation: pages, snippets, links and anchors, each with its line.

A snippet is run as a reader would run it, unless a comment above it says what else holds:

    <!-- not run: needs a GPU -->             it is only read, and counted
    <!-- given: from ngym import Session -->  Python that runs first, unseen
    <!-- part of: grpo.yaml -->               YAML that goes on top of this recipe
    <!-- file: data/x/gold.jsonl -->          it is written into this file, where the commands before have led
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paths import ROOT

FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*(\S*)")
REMARK = re.compile(r"<!--\s*(not run|given|part of|file):\s*(.*?)\s*-->", re.DOTALL)
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")
NAMED = re.compile(r"\{#([\w-]+)\}\s*$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"(`+)(?:(?!\1).)+\1")


@dataclass(frozen=True)
class Snippet:
    """language: what is behind the fence. remarks: of the comment above it, by kind. section: counts headings of level 2."""

    page: Path
    line: int
    section: int
    language: str
    text: str
    remarks: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Link:
    page: Path
    line: int
    target: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.target}"


def pages() -> list[Path]:
    """README.md and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def readmes() -> list[Path]:
    """Those of the services."""
    return [file for kind in ("gym_servers", "agents", "models") for file in sorted((ROOT / kind).glob("*/README.md"))]


def snippets(page: Path) -> list[Snippet]:
    """Every fenced block of a page."""
    found, above, lines = [], "", page.read_text(encoding="utf-8").splitlines()
    at = section = 0
    while at < len(lines):
        opened = FENCE.match(lines[at])
        if opened is None:
            section += lines[at].startswith("## ")
            above = above + lines[at] + "\n" if lines[at].strip() and (above or "<!--" in lines[at]) else ""
            at += 1
            continue
        indent, ticks, language = opened.groups()
        end = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == ticks)
        body = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end])
        remarks = dict(REMARK.findall(above)) if above.rstrip().endswith("-->") else {}
        found.append(Snippet(page, at + 1, section, language, body + "\n", remarks))
        at, above = end + 1, ""
    return found


def links(page: Path) -> Iterator[Link]:
    """Links and images, those in code left out."""
    for number, line in _prose(page):
        for target in LINK.findall(CODE.sub("", line)):
            yield Link(page, number, target)


def inline_commands(page: Path) -> Iterator[tuple[int, str]]:
    """Commands of ours in running text, such as `ng_run --only NAME`, with their line."""
    for number, line in _prose(page):
        for found in CODE.finditer(line):
            text = found[0].strip("`").strip()
            if text.startswith(("ng_", "ng ", "make ")):
                yield number, text


def anchors(text: str) -> set[str]:
    """The names for `#...` on a page, as GitHub and MkDocs both make them of headings."""
    found: set[str] = set()
    for _, line in _prose_of(text):
        heading = HEADING.match(line)
        if heading is None:
            continue
        named = NAMED.search(heading[2])
        slug = named[1] if named else slugify(NAMED.sub("", heading[2]))
        found.add(slug if slug not in found else f"{slug}_1")
    return found


def slugify(heading: str) -> str:
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    words = re.sub(r"[^\w\s-]", "", words).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def _prose(page: Path) -> Iterator[tuple[int, str]]:
    return _prose_of(page.read_text(encoding="utf-8"))


def _prose_of(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside fenced blocks, numbered from 1."""
    ticks = None
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if ticks is None and fence is None:
            yield number, line
        elif ticks is None and fence is not None:
            ticks = fence[2]
        elif ticks is not None and line.strip() == ticks:
            ticks = None
