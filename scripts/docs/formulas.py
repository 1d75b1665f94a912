"""Formulas as GitHub writes them, drawn by the browser itself: TeX becomes MathML when the site is built, and no script runs.

A formula is between two lines of `$$`.
"""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, fromstring

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension

FENCE = "$$"


class Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.parser.blockprocessors.register(_Block(md.parser), "formula", 180)


def mathml(tex: str) -> Element:
    """A <math> element.

    Raises:
        ValueError: it cannot be drawn; the message names the formula.
    """
    try:
        drawn = convert(tex.strip(), display="block")
        element = fromstring(re.sub(r' xmlns="[^"]*"', "", drawn))
    except Exception as error:
        raise ValueError(f"the formula {tex.strip()!r} cannot be drawn: {error}") from error
    element.set("xmlns", "http://www.w3.org/1998/Math/MathML")
    return element


class _Block(BlockProcessor):
    """`$$`, lines, `$$`; without an empty line."""

    def test(self, parent: Element, block: str) -> bool:
        return block.startswith(FENCE) and block.rstrip().endswith(FENCE) and len(block.strip()) > 2 * len(FENCE)

    def run(self, parent: Element, blocks: list[str]) -> None:
        tex = blocks.pop(0).strip().removeprefix(FENCE).removesuffix(FENCE)
        holder = Element("div", {"class": "formula"})
        holder.append(mathml(tex))
        parent.append(holder)
