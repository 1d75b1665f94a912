"""structured_outputs: JSON, YAML, XML, CSV or TOML that fits a JSON Schema and has the requested values."""

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.extras import require
from ngym.grading.answers import fenced, without_reasoning
from ngym.grading.reward_parts import Shaping, shaped, weighted
from ngym.rollout import calls_in
from ngym.workers import WorkerOutcome, WorkerPool

from .checker import Format

# Workers import it, which is later.
require("structured", "gym_servers/structured_outputs", "defusedxml", "jsonschema-rs")
MARKED = re.compile(r"<\|BEGIN_CODE\|>\s*(.*?)(?:<\|END_CODE\|>|\Z)", re.DOTALL)  # StructEval's
pool = WorkerPool(Path(__file__).with_name("checker.py"), "check", deadline_s=5.0, memory_mib=1024)


class StructuredOptions(ServiceOptions):
    shape_weight: float = Field(
        default=0.2, ge=0, le=1, description="Reward for a valid document if the row also has values."
    )
    fences: bool = Field(default=True, description="Whether the document may be in a code fence, with prose around it.")
    shaping: Shaping = Shaping()


class StructuredTask(VerifyRequest):
    """Rows of StructEval (`output_type`, `raw_output_metric`) are read, too: any document, with values at the paths."""

    schema_str: str  # the JSON Schema as text, as in NeMo Gym's rows
    schema_type: Format = "json"
    expected_values: dict[str, JsonValue] = Field(default_factory=dict)  # JSON pointer -> value; "" is the document

    expected_paths: list[str] = Field(default_factory=list)  # StructEval's: `a.b[0].*.c`, `csv::column`
    response_mode: Literal["text", "tool_call"] | None = "text"  # tool_call: the document is a call's arguments
    tool_name: str | None = None
    tool_payload_key: str | None = None  # the argument that is the document; without it all of them are

    @model_validator(mode="before")
    @classmethod
    def _struct_eval(cls, row: Any) -> Any:
        if not isinstance(row, dict) or "schema_str" in row or "raw_output_metric" not in row:
            return row
        form = str(row.get("output_type", "")).lower()
        return {**row, "schema_str": "{}", "schema_type": form, "expected_paths": row["raw_output_metric"]}

    @property
    def form(self) -> Format:
        return "json" if self.response_mode == "tool_call" else self.schema_type

    def document(self, fences: bool) -> str:
        """The text of the document, or ""."""
        if self.response_mode == "tool_call":
            calls = calls_in(self.response, exact=True)
            payload = calls[0].arguments if len(calls) == 1 and self.tool_name in (None, calls[0].name) else None
            if self.tool_payload_key is not None:
                payload = payload.get(self.tool_payload_key) if isinstance(payload, dict) else None
            return "" if payload is None else json.dumps(payload)
        text = without_reasoning(self.text)
        marked = MARKED.findall(text)
        return (marked[-1] if marked else fenced(text) if fences else None) or text


async def verify(task: StructuredTask, options: StructuredOptions) -> dict[str, Any]:
    document = task.document(options.fences)
    checked = await pool.run(document, task.form, task.schema_str, task.expected_values, task.expected_paths)
    if checked.kind != "ok":
        return {**await failure(checked, task), "extracted_answer": document or None}
    verdict = checked.value
    shape = options.shape_weight if task.expected_values or task.expected_paths else 1.0
    weights = {"valid": shape, "values": 1.0 - shape}
    paid = weighted({name: verdict[name] for name in weights}, weights, gate="valid")
    return shaped({**verdict, **paid, "extracted_answer": document or None}, task.response, options.shaping)


async def failure(checked: WorkerOutcome, task: StructuredTask) -> dict[str, Any]:
    """0 for a document that was not checked in time; null if the schema alone takes too much."""
    if not checked.infra:
        alone = await pool.run("", task.form, task.schema_str, task.expected_values)
        if alone.kind != "ok" and not alone.infra:
            reason = f"schema_str cannot be used: {alone.kind}: {alone.detail}"
            return {"reward": None, "outcome": "unverifiable", "reason": reason}
    return checked.failure()


app = gym_server(verify=verify, options=StructuredOptions, lifespan=pool.lifespan)
