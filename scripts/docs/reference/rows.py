"""The files of a collection: rows of a real run, and the meaning of their keys."""

from __future__ import annotations

import json

from ngym.schema import AgentRef, Segment, Trace
from ngym.services import VerifyRequest

from .fields import descriptions, docstring_summary
from .markup import code, fence, json_text, shortened, table, words
from .specimen import Specimen

INTRO = """\
# Rows and files

What follows was written by `ng_collect_rollouts --input tasks.jsonl --output out.jsonl --repeats 2` while this page was made, with a scripted
model. Long lists and texts are cut; a cut ends in `...`.
"""
FILES = {
    "out.jsonl": "Rollouts, in order of completion.",
    "out_failures.jsonl": "Attempts that failed, a row each.",
    "out_materialized_inputs.jsonl": "The tasks as they were sent to the agents.",
    "out_aggregate_metrics.json": "The numbers over all rollouts.",
    "out_run.json": "What the run was: its id, digests of config and input, versions, the command.",
}


def text(specimen: Specimen) -> str:
    written = {name: FILES.get(name, "") for name in specimen.files}
    missing = FILES.keys() - written.keys()
    if missing or not all(written.values()):
        raise ValueError(
            f"files of a collection that FILES does not describe, or that were not written: {missing or written}"
        )
    first = min(specimen.rows("out.jsonl"), key=lambda row: (-row["reward"], row["_ng_rollout_index"]))
    return "\n".join(
        [
            INTRO,
            table(("File", ""), [(code(name), what) for name, what in written.items()]),
            "## A task {#task}\n",
            "Only `responses_create_params` is required. `agent_ref` names the agent unless the command does; every other field is the verifier's.\n",
            fence("json", json_text(shortened(specimen.rows("out_materialized_inputs.jsonl")[0]))),
            _keys(AgentRef, "agent_ref."),
            "## A rollout {#rollout}\n",
            "The task, the policy's `response` (a Response of the Responses API), the reward, the verifier's own fields, and `ng`.\n",
            fence("json", json_text(shortened(first))),
            "## The record `ng` {#ng}\n",
            words(docstring_summary(Trace)) + "\n",
            _keys(Trace, ""),
            "## A segment {#segment}\n",
            words(docstring_summary(Segment)) + "\n",
            _keys(Segment, ""),
            "## A failed attempt {#failure}\n",
            "The task, both indices, `attempt`, and `failure` ([its classes](failures.md)).\n",
            fence("json", json_text(shortened(specimen.rows("out_failures.jsonl")[0]))),
            "## What `/verify` is given {#verify}\n",
            words(VerifyRequest.__doc__ or "") + "\n",
            "## out_run.json {#run}\n",
            fence("json", json_text(shortened(json.loads(specimen.files["out_run.json"])))),
            "## out_aggregate_metrics.json {#aggregate}\n",
            fence("json", json_text(shortened(json.loads(specimen.files["out_aggregate_metrics.json"])))),
        ]
    )


def _keys(record: type, prefix: str) -> str:
    described = descriptions(record)
    return table(
        ("Key", ""), [(code(prefix + name), words(described.get(name, ""))) for name in record.__annotations__]
    )
