"""Text from ids as they come: a character is told when all its bytes are there, a stop string never."""

from __future__ import annotations

from collections.abc import Iterable

from ngym.dialogue.template import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """One answer's text. Decodes the last few ids only, with those before them, which decide about spaces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # of what is decoded again
        self._told = 0  # up to here the text was told

    def take(self, ids: Iterable[int]) -> str:
        """What these further ids say."""
        self._ids.extend(ids)
        return self._more(final=False)

    def end(self) -> str:
        """What was held back for want of its last bytes."""
        return self._more(final=True)

    def _more(self, *, final: bool) -> str:
        before = self._decoded(self._ids[self._start : self._told])
        text = self._decoded(self._ids[self._start :])
        if len(text) <= len(before) or (text.endswith(UNFINISHED) and not final):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return text[len(before) :]

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class Stops:
    """Looks for stop strings in text that comes in pieces; holds back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.met: str | None = None

    def take(self, text: str) -> str:
        """What may be told. Once `met` is set, nothing more is."""
        if self.met is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            place, self.met = min(found)
            self._held = ""
            return text[:place]
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        text, self._held = self._held, ""
        return text


def held_back(text: str, markers: Iterable[str]) -> int:
    """The length of the longest end of the text with which one of the markers begins."""
    return max(
        (length for marker in markers for length in range(1, len(marker)) if text.endswith(marker[:length])), default=0
    )
