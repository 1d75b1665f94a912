"""structured_outputs: JSON, YAML, XML, CSV or TOML that fits a JSON Schema and has the requested values."""

from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.extras import require
from ngym.grading.answers import fenced, without_reasoning
from ngym.grading.reward_parts import Shaping, shaped, weighted
from ngym.workers import Outcome, WorkerPool

from .checker import Format

require(
    "structured", "gym_servers/structured_outputs", "defusedxml", "jsonschema-rs"
)  # workers import it, which is later
pool = WorkerPool(Path(__file__).with_name("checker.py"), "check", deadline_s=5.0, memory_mib=1024)


class StructuredOptions(ServiceOptions):
    shape_weight: float = Field(
        default=0.2, ge=0, le=1, description="Reward for a valid document if the row also has values."
    )
    fences: bool = Field(default=True, description="Whether the document may be in a code fence, with prose around it.")
    shaping: Shaping = Shaping()


class StructuredTask(VerifyRequest):
    schema_str: str  # the JSON Schema as text, as in NeMo Gym's rows
    schema_type: Format = "json"
    expected_values: dict[str, JsonValue] = Field(default_factory=dict)  # JSON pointer -> value; "" is the document


async def verify(task: StructuredTask, options: StructuredOptions) -> dict[str, Any]:
    text = without_reasoning(task.text)
    document = (fenced(text) if options.fences else None) or text
    checked = await pool.run(document, task.schema_type, task.schema_str, task.expected_values)
    if checked.kind != "ok":
        return {**await failure(checked, task), "extracted_answer": document or None}
    verdict = checked.value
    shape = options.shape_weight if task.expected_values else 1.0
    weights = {"valid": shape, "values": 1.0 - shape}
    paid = weighted({name: verdict[name] for name in weights}, weights, gate="valid")
    return shaped({**verdict, **paid, "extracted_answer": document or None}, task.response, options.shaping)


async def failure(checked: Outcome, task: StructuredTask) -> dict[str, Any]:
    """0 for a document that was not checked in time; null if the schema alone takes too much."""
    if not checked.infra:
        alone = await pool.run("", task.schema_type, task.schema_str, task.expected_values)
        if alone.kind != "ok" and not alone.infra:
            reason = f"schema_str cannot be used: {alone.kind}: {alone.detail}"
            return {"reward": None, "outcome": "unverifiable", "reason": reason}
    return checked.failure()


app = gym_server(verify=verify, options=StructuredOptions, lifespan=pool.lifespan)
