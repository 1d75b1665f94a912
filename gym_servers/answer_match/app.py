"""answer_match: an extracted answer compared with a field of the row. Fields, extractors and comparison are options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.grading.answers import without_reasoning
from ngym.grading.reward_parts import Shaping, shaped
from ngym.schema import Json
from ngym.stats import means_by
from ngym.workers import WorkerPool

from .matching import COMPARISONS, EXTRACTORS, WITH_ARGUMENT, check_extractor, unusable

pool = WorkerPool(Path(__file__).with_name("matching.py"), "score", deadline_s=10.0, memory_mib=512)
MISSING = object()
Extractor = Annotated[str, AfterValidator(check_extractor)]
Comparison = Literal[
    "exact", "verbatim", "numeric", "closeness", "letter", "label", "starts", "contains_all", "contains_any",
    "soft_all", "soft_any", "set_f1", "same_list", "similarity", "weighted_similarity", "rouge_l", "grid", "schedule",
    "truth", "ndcg",
]  # fmt: skip


class Rule(BaseModel):
    model_config = ConfigDict(extra="forbid")
    expected: str | None = Field(default=None, description="The row's field with the answer; `a.b`: b of the object a.")
    extract: list[Extractor] | None = Field(default=None, min_length=1, description="Tried in this order.")
    compare: Comparison | None = Field(default=None, description="How the answer is compared.")
    choices: str | None = Field(default=None, description="The row's field with the possible answers.")
    prefix: str | None = Field(default=None, description="The row's field with a text that the answer must begin with.")


class MatchOptions(ServiceOptions):
    expected: str = Field(default="expected_answer", description="The row's field with the answer; `a.b`: b of a.")
    extract: list[Extractor] = Field(
        default=["short"],
        min_length=1,
        description=f"Tried in this order: {', '.join(EXTRACTORS)}, {', '.join(f'{name}:...' for name in WITH_ARGUMENT)}.",
    )
    compare: Comparison = Field(default="exact", description="How the answer is compared; see the README.")
    choices: str | None = Field(default=None, description="The row's field with the possible answers.")
    prefix: str | None = Field(default=None, description="The row's field with a text that the answer must begin with.")
    by: str | None = Field(default=None, description="A field of the row; `rules` has other options for its values.")
    rules: dict[str, Rule] = Field(default_factory=dict, description="Value of the field `by` -> options for its rows.")
    shaping: Shaping = Shaping()

    @model_validator(mode="after")
    def _rules_need_a_field(self) -> MatchOptions:
        if bool(self.rules) != (self.by is not None):
            raise ValueError("by and rules belong together: the name of a field, and options for its values")
        return self

    def rule_of(self, row: Json) -> Rule:
        """The options for a row."""
        base = {name: getattr(self, name) for name in Rule.model_fields}
        special = self.rules.get(str(field(row, self.by))) if self.by else None
        return Rule(**{**base, **(special.model_dump(exclude_none=True) if special else {})})


def field(row: Json, path: str) -> Any:
    """The value at `a.b.c`, or MISSING."""
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return MISSING
        value = value[name]
    return value


def choices_of(value: Any) -> list[str]:
    """`["x", "y"]`, `{"A": "x"}` or `[{"A": "x"}, {"B": "y"}]` as texts."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [str(text) for part in parts for text in (part.values() if isinstance(part, dict) else [part])]


async def verify(task: VerifyRequest, options: MatchOptions) -> dict[str, Any]:
    row = task.model_extra or {}
    rule = options.rule_of(row)
    names = {"expected": rule.expected, "choices": rule.choices, "prefix": rule.prefix}
    values = {option: field(row, path) for option, path in names.items() if path is not None}
    choices = choices_of(values.get("choices"))
    for option, value in values.items():
        if problem := _unusable(option, value, str(rule.compare), choices):
            reason = f"the row's field {names[option]!r}, which the option {option!r} names, {problem}"
            return {"reward": None, "outcome": "unverifiable", "reason": reason}
    checked = await pool.run(
        without_reasoning(task.text),
        rule.extract,
        rule.compare,
        values["expected"],
        choices,
        values.get("prefix", ""),
    )
    if checked.kind != "ok":
        return shaped(checked.failure(), task.response, options.shaping)
    reward, found = checked.value
    fields = {"reward": reward, "extracted_answer": found, "expected": values["expected"], "compared_by": rule.compare}
    return shaped(fields, task.response, options.shaping)


def _unusable(option: str, value: Any, compare: str, choices: list[str]) -> str | None:
    """The reason why a field of the row cannot be used, or None. Such a fault is not one of the answer."""
    if option == "choices":
        return None
    if value is MISSING:
        return "is missing"
    if option == "prefix":
        return None if isinstance(value, str) else "is not a text"
    return unusable(compare, value, choices)


def compute_metrics(rows: list[Json]) -> dict[str, float]:
    """The share of rows without an answer, and the reward by comparison."""
    if not rows:
        return {}
    silent = sum(row.get("extracted_answer") is None for row in rows) / len(rows)
    return {"no_answer": silent, **means_by(rows, "compared_by")}


assert set(Comparison.__args__) == set(COMPARISONS)  # type: ignore[attr-defined]
app = gym_server(verify=verify, options=MatchOptions, lifespan=pool.lifespan, compute_metrics=compute_metrics)
