"""What a recipe says about reinforcement learning: the objective, where its rollouts come from, how it is evaluated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .objective import Advantage, Correction, Kl, Objective, PolicyLoss, Refusal, refusals
from .records import ExistingPath, Positive, Record


class SoftOverlong(Record):
    """A penalty on the reward: from 0 at limit - buffer sampled tokens to -weight at the limit."""

    limit: Positive
    buffer: Positive
    weight: float = Field(default=1.0, gt=0)


class Shaping(Record):
    """DAPO's ways with what teaches nothing or runs too long.

    skip_equal_groups: leave out groups whose rewards are all equal, instead of counting their tokens.
    drop_truncated: what was cut off counts in its group's statistics, and is not trained.
    """

    skip_equal_groups: bool = True
    drop_truncated: bool = False
    soft_overlong: SoftOverlong | None = None


class GrpoOptions(Record):
    """The whole family; objective.py says which switches make which member.

    temperature: that of the rollouts; the trainer's logits are divided by it.
    max_mismatch: bound on token_mult_prob_error of the first batch; raise it to learn from another policy's rollouts.
    """

    name: Literal["grpo"]
    advantage: Advantage = Advantage()
    loss: PolicyLoss = PolicyLoss()
    kl: Kl = Kl()
    correction: Correction = Correction()
    shaping: Shaping = Shaping()
    temperature: float = Field(default=1.0, gt=0)
    max_mismatch: float = Field(default=1.05, gt=1)

    @property
    def objective(self) -> Objective:
        return Objective(advantage=self.advantage, loss=self.loss, kl=self.kl, correction=self.correction)


class RolloutOptions(Record):
    """Live rollouts: each step, group_size attempts at each of tasks_per_step tasks.

    services: the config file whose services are started; null uses those that an `ng_run` in this folder started.
    policy: the name of the model service that is trained.
    """

    agent: str
    tasks: ExistingPath
    services: ExistingPath | None = None
    policy: str = "policy"
    tasks_per_step: Positive = 32
    group_size: int = Field(default=8, ge=2)
    updates_per_step: Positive = 1
    max_output_tokens: Positive | None = None
    concurrency: Positive = 256
    timeout_s: float = Field(default=600, gt=0)


class EvaluationOptions(Record):
    """Of live runs: held-out tasks before the first step, after every so many and after the last, sampled and greedy."""

    tasks: ExistingPath
    limit: Positive | None = None
    every: Positive = 10


def grpo_refusals(options: GrpoOptions) -> list[Refusal]:
    """Every combination that makes no sense, with its reason."""
    estimator = options.advantage.estimator
    if estimator == "gae":
        return [Refusal("advantage.estimator", "gae wants the values of a critic, and grpo has none; use group_std")]
    found = refusals(options.objective)
    if options.shaping.skip_equal_groups and estimator == "reward":
        reason = "estimator reward learns from groups of equal rewards, too; set it to false"
        found.append(Refusal("shaping.skip_equal_groups", reason))
    if options.loss.entropy_coef > 0:
        found.append(Refusal("loss.entropy_coef", "the trainer computes no entropies; set it to 0"))
    if options.shaping.soft_overlong is not None and options.advantage.components != "sum":
        reason = "normalise_then_sum looks at the components of the reward, which have no length penalty; use sum"
        found.append(Refusal("advantage.components", reason))
    return found
