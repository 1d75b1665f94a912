"""reward_model: the score of a reward model is the reward, alone or beside the reward of another gym server."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, model_validator

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.errors import ServiceError
from ngym.grading.answers import without_reasoning
from ngym.grading.reward_model import model_score
from ngym.grading.reward_parts import Shaping, shaped, weighted
from ngym.peers import Peers
from ngym.schema import Json
from ngym.services.base.options import GymServerName, ModelName
from ngym.stats import correlation

MODEL, PROGRAM = "reward_model", "programmatic"
QUARTER = 4


class RewardModelOptions(ServiceOptions):
    reward_model: ModelName = Field(description="The model service that scores.")
    scale: Literal["sigmoid", "raw"] = Field(default="sigmoid", description="sigmoid: 0 to 1; raw: the score itself.")
    weight: float = Field(default=1.0, ge=0, description="Weight of the score.")
    beside: GymServerName | None = Field(
        default=None, description="A gym server whose /verify scores the same row without a session: the second part."
    )
    beside_weight: float = Field(default=0.0, ge=0, description="Weight of that reward; 0: it is only monitored.")
    gate: bool = Field(default=False, description="No reward for the score while the reward of `beside` is 0 or less.")
    timeout_s: float = Field(default=120.0, gt=0, description="For one score.")
    shaping: Shaping = Shaping()

    @model_validator(mode="after")
    def _has_a_second_part(self) -> RewardModelOptions:
        if self.beside is None and (self.beside_weight or self.gate):
            raise ValueError("beside_weight and gate need a second reward; name its gym server in beside")
        return self


async def verify(task: VerifyRequest, options: RewardModelOptions, peers: Peers) -> Json:
    params, activation = task.responses_create_params, options.scale == "sigmoid"
    score = await model_score(
        peers, options.reward_model, params, task.response, activation=activation, timeout_s=options.timeout_s
    )
    parts: dict[str, float | None] = {MODEL: score}
    weights = {MODEL: options.weight}
    if options.beside is not None:
        parts[PROGRAM] = await _verify(peers, options.beside, task)
        weights[PROGRAM] = options.beside_weight
    outcome = weighted(parts, weights, gate=PROGRAM if options.gate else None)
    measured = {f"{name}_score": value for name, value in parts.items()}
    length = len(without_reasoning(task.text).strip())
    return shaped({**outcome, **measured, "answer_chars": length, "outcome": "scored"}, task.response, options.shaping)


async def _verify(peers: Peers, gym: str, task: VerifyRequest) -> float | None:
    answer: dict[str, Any] = await peers[gym].post("/verify", task.model_dump(mode="json"))
    reward = answer.get("reward")
    if reward is not None and not isinstance(reward, int | float):
        raise ServiceError(f"{gym} answered /verify with the reward {reward!r:.60}", status=502)
    return reward


def compute_metrics(rows: list[Json]) -> dict[str, float | None]:
    """Monitors of length bias and reward hacking.

    length_correlation: of score and characters. programmatic_correlation: of both rewards. programmatic_of_best: the
    mean programmatic reward of the quarter of rollouts with the highest scores, minus that of all; below 0 the model
    prefers answers that the program rejects.
    """
    scores = [float(row["reward_model_score"]) for row in rows]
    metrics: dict[str, float | None] = {
        "length_correlation": correlation(scores, [row["answer_chars"] for row in rows])
    }
    both = [(score, row["programmatic_score"]) for score, row in zip(scores, rows, strict=True) if _known(row)]
    if both:
        metrics["programmatic_correlation"] = correlation(*map(list, zip(*both, strict=True)))
        metrics["programmatic_of_best"] = _gain_of_best(both)
    return metrics


def _known(row: Json) -> bool:
    return isinstance(row.get("programmatic_score"), int | float)


def _gain_of_best(both: Sequence[tuple[float, float]]) -> float:
    best = sorted(both, key=lambda pair: -pair[0])[: max(1, len(both) // QUARTER)]
    return fmean(reward for _, reward in best) - fmean(reward for _, reward in both)


app = gym_server(verify=verify, options=RewardModelOptions, compute_metrics=compute_metrics)
