"""The page of failures: their classes, the tree of errors, and a real problem document."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from pathlib import Path

from ngym import errors
from ngym.collect.rollout_rows import STAGES
from ngym.errors import ServiceError, UsageError
from ngym.schema import Failure

from .markup import code, fence, json_text, shortened, table, words
from .specimen import Specimen

INTRO = """\
# Failures

A rollout that failed is a row of `*_failures.jsonl` and never a reward of 0. Its `failure.class` is one of these.
"""
PROBLEM = """\
Every answer other than a success is an RFC 9457 problem document, `application/problem+json`. `retryable` says whether the same request
may succeed later. The answer to that row, with status {status}:
"""
RAISED = """\
`raise` one of these in a tool, in `verify`, in an agent or a model server; it becomes the problem document. Of a tool's, the model reads
a `ToolError` alone; its document has `for_the_model: true` and the `session` of the call.
"""


def text(specimen: Specimen) -> str:
    failed = specimen.rows("out_failures.jsonl")[0]
    problem = json_text(shortened(specimen.problem.body, characters=300))
    return "\n".join(
        [
            INTRO,
            "## Classes {#classes}\n",
            table(
                ("Class", "Stage", ""), [(code(n), code(STAGES.get(n, "run")), words(w)) for n, w in classes().items()]
            ),  # type: ignore[call-overload]
            f"A real one, of a row without the field that its verifier wants (`{', '.join(Failure.__annotations__)}`):\n",
            fence("json", json_text(shortened(failed["failure"], characters=300))),
            "## Problem documents {#problem}\n",
            PROBLEM.format(status=specimen.problem.status),
            fence("json", problem),
            "## Errors {#errors}\n",
            RAISED,
            table(("Error", "Status", "Title", "Retryable"), _tree()),
            f"`{UsageError.__name__}` is for the user's own mistakes: a command ends with its message, in one line, and exit code 2.\n",
        ]
    )


def classes() -> dict[str, str]:
    """Each failure class, with what is said beside it in ngym/errors.py."""
    source = Path(inspect.getfile(errors)).read_text()
    literal = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FailureClass"
    )
    found = {node.lineno: str(node.value) for node in ast.walk(literal) if isinstance(node, ast.Constant)}
    said = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {name: said.get(line, "") for line, name in found.items()}


def _tree() -> list[tuple[str, str, str, str]]:
    below = [kind for parent in ServiceError.__subclasses__() for kind in (parent, *parent.__subclasses__())]
    found = [ServiceError, *sorted(below, key=lambda kind: (kind.status, kind.__name__))]
    ours = [kind for kind in found if kind.__module__ == errors.__name__]
    return [(code(kind.__name__), str(kind.status), kind.title, "yes" if kind.retryable else "no") for kind in ours]
