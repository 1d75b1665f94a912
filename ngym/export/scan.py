"""The first pass of an export: every input line becomes a Candidate, or is counted under the reason why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ngym.errors import UsageError
from ngym.export.conversation import Conversation, NoRollout, Rollout, Unsayable, conversation, fingerprint, parse
from ngym.export.formats import Shapes, check_prompt, sharegpt
from ngym.export.options import Options
from ngym.export.tally import Candidate, Place, Reason, Tally
from ngym.files.jsonl import REPORTED_LINES, Line, read
from ngym.schema import Json


class Scan:
    """One first pass over the inputs.

    Args:
        tally: counts every rollout that is left out here.
        tick: receives the number of lines read, after every line.
    """

    def __init__(self, options: Options, tally: Tally, tick: Callable[[int], None] = lambda lines: None) -> None:
        self.options = options
        self.tally = tally
        self.tick = tick
        self._tasks: dict[tuple[str, int, bytes], int] = {}
        self._conversations: set[bytes] = set()
        self._shapes = Shapes()

    def candidates(self) -> list[Candidate]:
        """The candidates, in the order of the inputs and their lines.

        Raises:
            UsageError: lines are not rollouts; the message names the first 20.
        """
        bad: list[str] = []
        bad_count = 0
        found: list[Candidate] = []
        for number, path in enumerate(self.options.inputs):
            for line in read(path):
                try:
                    outcome = self._outcome(path, number, line)
                except NoRollout as error:
                    bad_count += 1
                    if bad_count <= REPORTED_LINES:
                        bad.append(f"{path}:{line.number}: {error}")
                    continue
                self.tally.read += 1
                self.tick(self.tally.read)
                if isinstance(outcome, Candidate):
                    found.append(outcome)
                elif outcome is not None:
                    self.tally.drop(outcome)
        if bad_count > REPORTED_LINES:
            bad.append(f"... and {bad_count - REPORTED_LINES} more lines")
        if bad:
            raise UsageError("\n".join(bad))
        self.tally.tasks = len({candidate.task for candidate in found})
        return found

    def _outcome(self, path: Path, number: int, line: Line) -> Candidate | Reason | None:
        """The candidate of a line, or the reason to drop it; None if it is already counted."""
        if line.problem is not None:
            if not line.complete:
                return Reason.TORN
            raise NoRollout(line.problem)
        rollout = parse(line.row)
        if isinstance(rollout, Reason):
            return rollout
        if reason := self._unfit(rollout):
            return reason
        try:
            return self._candidate(Place(number, line.start, line.end), rollout, line.row)
        except Unsayable as error:
            self.tally.cannot_say(f"{path}:{line.number}: {error}")
            return None

    def _unfit(self, rollout: Rollout) -> Reason | None:
        """Why the format cannot represent the rollout truthfully, or why it is filtered out."""
        options = self.options
        good = rollout.reward >= options.threshold
        if options.format == "rollouts":
            return None if good else Reason.LOW
        if rollout.ending == "cut":
            return Reason.CUT
        to_be_said = options.imitated or (options.format == "kto" and good)
        if rollout.ending == "step limit" and to_be_said and not options.keep_truncated:
            return Reason.TRUNCATED
        return Reason.LOW if options.imitated and not good else None

    def _candidate(self, place: Place, rollout: Rollout, row: Json) -> Candidate | Reason:
        """The candidate, or DUPLICATE. Raises Unsayable."""
        if self.options.format == "rollouts":  # copied unchanged: needs only an identity
            if self.options.dedupe and self._seen(_identity(rollout)):
                return Reason.DUPLICATE
            return Candidate(place, self._task(rollout), rollout.reward, True, b"", self._shapes.number(row))
        whole = rollout.ending == "whole" or self.options.keep_truncated
        said = self._sayable(rollout)
        prompt = fingerprint(*said.prompt, *said.tools)
        if self.options.dedupe and self._seen(prompt + fingerprint(*said.completion)):
            return Reason.DUPLICATE
        return Candidate(
            place,
            self._task(rollout, prompt),
            rollout.reward,
            exemplary=whole and rollout.reward >= self.options.threshold,
            words=fingerprint(*(message for message in said.completion if message["role"] == "assistant")),
            shape=self._shapes.number([said.prompt, said.completion, said.tools]),
        )

    def _sayable(self, rollout: Rollout) -> Conversation:
        """The conversation; raises Unsayable if Chat or the format cannot represent it."""
        said = conversation(rollout.params, rollout.response, reasoning=self.options.keep_reasoning)
        if self.options.format == "sharegpt":
            sharegpt(said)
        elif self.options.format in ("preferences", "kto"):
            check_prompt(said)
        return said

    def _task(self, rollout: Rollout, prompt: bytes = b"") -> int:
        """The number of its group. Rollouts of one task with different prompts or tools are different groups."""
        return self._tasks.setdefault((*rollout.task, prompt), len(self._tasks))

    def _seen(self, identity: bytes) -> bool:
        known = identity in self._conversations
        self._conversations.add(identity)
        return known


def _identity(rollout: Rollout) -> bytes:
    try:
        said = conversation(rollout.params, rollout.response, reasoning=True)
    except Unsayable:
        return fingerprint(rollout.params, rollout.response)
    return fingerprint(*said.prompt, *said.tools, *said.completion)
