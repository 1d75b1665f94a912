"""What a policy is trained on, as a value, and which of its combinations make no sense. Imports no torch.

    rewards -> advantage -> surrogate x correction + kl - entropy -> aggregation -> one number per optimiser step

| name in the literature | here |
|---|---|
| GRPO (2402.03300)      | advantage.estimator group_std, loss.aggregation sequence |
| Dr. GRPO (2503.20783)  | group_mean, aggregation fixed |
| DAPO (2503.14476)      | group_std, clip_high 0.28, aggregation token (its filters and length penalty: shaping) |
| GSPO (2507.18071)      | loss.ratio sequence, aggregation sequence, clip_low 3e-4, clip_high 4e-4 |
| CISPO (2506.13585)     | loss.surrogate cispo |
| RLOO (2402.14740)      | leave_one_out, ratio product, aggregation sequence, kl.where reward |
| REINFORCE++ (2501.03262) | estimator reward, whiten; its baseline variant: group_mean, whiten |
| GDPO (2601.05242)      | group_std, components normalise_then_sum |
| PPO (1707.06347)       | estimator gae, whiten, critic |
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Estimator = Literal["group_std", "group_mean", "leave_one_out", "leave_one_out_std", "reward", "gae"]
UNCOMPARED: tuple[Estimator, ...] = ("reward", "gae")
"""Those that compare no rewards within a group."""
Aggregation = Literal["token", "sequence", "fixed", "prompt"]
KlEstimator = Literal["k1", "k2", "k3"]
Discount = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Advantage(_Record):
    """How rewards become advantages; the formulas are in advantages.py and gae.py.

    estimator: what a reward is compared with. eps: added to a deviation before it divides.
    gamma, lam: discount and trace of GAE, by sampled token.
    whiten: subtract the mean and divide by the deviation over all tokens of the rollouts that are prepared together: those of a
    live step, before it is cut into updates, or those of the whole file; with a critic, of a batch of it.
    components: of several rewards per rollout, add them up, or first normalise each within its group (GDPO).
    """

    estimator: Estimator = "group_std"
    components: Literal["sum", "normalise_then_sum"] = "sum"
    whiten: bool = False
    eps: NotNegative = 1e-6
    gamma: Discount = 1.0
    lam: Discount = 1.0

    @property
    def by_token(self) -> bool:
        """Whether a reward is laid out over a rollout's tokens (its KL penalty with it) before it is an advantage."""
        return self.whiten or self.estimator in UNCOMPARED


class PolicyLoss(_Record):
    """The surrogate of one token and how tokens are added up.

    surrogate: what is multiplied with the advantage. fixed_length: of the aggregation fixed.
    entropy_coef: of the bonus for the exact entropy of each distribution that was sampled from.
    ratio: p(token) now / p(token) then, `token` by token; `sequence`: the rollout's geometric mean (GSPO); `product`: of
    the whole rollout (RLOO).
    anchor: whose logprobs are "then": the trainer's own at the start of the step, or the sampler's.
    clip_low, clip_high: offsets, the ratio stays in [1 - clip_low, 1 + clip_high]. Also for CISPO: an absolute bound of
    5 on the weight, as others write it, is clip_low 1, clip_high 4.
    dual_clip: bound on the ratio where the advantage is negative.
    aggregation: a mean over all tokens; over rollouts of the mean over their tokens; over rollouts of the sum of their
    tokens / fixed_length; over tasks of the mean over their tokens. Always over the whole optimiser step.
    """

    surrogate: Literal["clipped", "cispo", "reinforce"] = "clipped"
    ratio: Literal["token", "sequence", "product"] = "token"
    anchor: Literal["trainer", "sampler"] = "trainer"
    clip_low: NotNegative = 0.2
    clip_high: NotNegative = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token"
    fixed_length: int | None = Field(default=None, gt=0)
    entropy_coef: NotNegative = 0.0


class Kl(_Record):
    """The pull towards the reference policy; 0 needs no reference.

    coef: its weight. where: in the loss, or taken off the rewards. estimator: of the KL divergence from one sample.
    gradient: `exact` is that of the KL divergence itself; `pathwise` differentiates the estimator, as GRPO's paper does.
    """

    coef: NotNegative = 0.0
    where: Literal["loss", "reward"] = "loss"
    estimator: KlEstimator = "k3"
    gradient: Literal["exact", "pathwise"] = "exact"


class Correction(_Record):
    """Importance weights w = p(trainer) / p(sampler) for what the two disagree on.

    kind: `token`: w of each token, cut to [low, high]; `sequence`: the rollout's product, cut; `icepop`: w, or 0 outside;
    `sequence_mask`: w, and 0 for all of a rollout whose geometric mean is outside.
    low, high: bounds on w; null: the kind's own.
    """

    kind: Literal["none", "token", "sequence", "icepop", "sequence_mask"] = "none"
    low: NotNegative | None = None
    high: NotNegative | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = _BOUNDS[self.kind]
        return (low if self.low is None else self.low, high if self.high is None else self.high)


_BOUNDS = {  # what others take by default: SkyRL, SkyRL, OpenRLHF and NeMo RL, NeMo RL
    "none": (0.0, float("inf")),
    "token": (0.0, 2.0),
    "sequence": (0.0, 5.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
}


class Critic(_Record):
    """What each token is worth, learned beside the policy. lr: the full learning rate; null: optimizer.lr.

    loss_coef: of its loss. Adam's steps hardly depend on it; where ZeRO clips the gradient of policy and critic together, the
    share of each does.
    value_clip: how far a value may move from the one before the step; null: as far as it likes.
    """

    lr: float | None = Field(default=None, gt=0)
    loss_coef: float = Field(default=1.0, gt=0)
    value_clip: float | None = Field(default=0.2, gt=0)


class Objective(_Record):
    """What the policy, and the critic if there is one, descend on."""

    advantage: Advantage = Advantage()
    loss: PolicyLoss = PolicyLoss()
    kl: Kl = Kl()
    correction: Correction = Correction()
    critic: Critic | None = None


class Preference(_Record):
    """DPO and its kin. loss: of a pair. beta: how much the policy is held to its reference. label_smoothing: the share of pairs taken to be
    labelled the wrong way round. length_normalised: a mean over an answer's tokens in place of the sum."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    beta: float = Field(default=0.1, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    length_normalised: bool = False


_UNDIVIDED = {"group_std": "group_mean", "leave_one_out_std": "leave_one_out"}


class Refusal(NamedTuple):
    """key: the dotted key at fault. reason: why, and what to do."""

    key: str
    reason: str


def refusals(objective: Objective) -> list[Refusal]:
    """Every combination in it that makes no sense; none if it can be trained on."""
    parts = (_of_ratio, _of_bounds, _of_aggregation, _of_advantage, _of_correction, _of_kl)
    return [refusal for part in parts for refusal in part(objective)]


def preference_refusals(preference: Preference) -> list[Refusal]:
    if preference.label_smoothing > 0 and preference.loss != "sigmoid":
        reason = f"the {preference.loss} loss has no label smoothing; use loss sigmoid, or set 0"
        return [Refusal("label_smoothing", reason)]
    return []


def _of_ratio(objective: Objective) -> list[Refusal]:
    loss = objective.loss
    found = []
    if loss.ratio != "token" and loss.surrogate != "clipped":
        found.append(Refusal("loss.ratio", f"{loss.surrogate} weighs tokens one by one; use ratio token"))
    if loss.ratio != "token" and (why := _differ_by_token(objective)):
        found.append(Refusal("loss.ratio", f"{why} makes advantages differ within a rollout; use ratio token"))
    if loss.surrogate == "reinforce" and loss.anchor == "sampler":
        found.append(Refusal("loss.anchor", "reinforce has no ratio; use surrogate clipped, or a correction"))
    return found


def _of_bounds(objective: Objective) -> list[Refusal]:
    loss = objective.loss
    if loss.dual_clip is None:
        return []
    if loss.surrogate != "clipped":
        return [Refusal("loss.dual_clip", f"{loss.surrogate} does not clip its objective; remove dual_clip")]
    if loss.dual_clip <= 1 + loss.clip_high:
        reason = f"{loss.dual_clip:g} would bind before 1 + clip_high = {1 + loss.clip_high:g}; use more, such as 3"
        return [Refusal("loss.dual_clip", reason)]
    return []


def _of_aggregation(objective: Objective) -> list[Refusal]:
    loss = objective.loss
    found = []
    if loss.ratio != "token" and loss.aggregation != "sequence":
        reason = (
            f"with one ratio a rollout, {loss.aggregation} would weigh rollouts by length; use aggregation sequence"
        )
        found.append(Refusal("loss.aggregation", reason))
    if loss.aggregation == "fixed" and loss.fixed_length is None:
        reason = "aggregation fixed divides by it; set the most tokens that a rollout may sample"
        found.append(Refusal("loss.fixed_length", reason))
    if loss.aggregation != "fixed" and loss.fixed_length is not None:
        reason = f"aggregation {loss.aggregation} has no use for it; remove it, or use aggregation fixed"
        found.append(Refusal("loss.fixed_length", reason))
    return found


def _of_advantage(objective: Objective) -> list[Refusal]:
    advantage = objective.advantage
    name = advantage.estimator
    found = []
    if advantage.whiten and name in _UNDIVIDED:
        reason = f"{name} already divides by a deviation; use estimator {_UNDIVIDED[name]}, or no whiten"
        found.append(Refusal("advantage.whiten", reason))
    if advantage.components != "sum" and name != "group_std":
        reason = f"it normalises each reward within its group, {name} does not; use estimator group_std"
        found.append(Refusal("advantage.components", reason))
    if advantage.gamma < 1 and name not in UNCOMPARED:
        reason = f"{name} compares whole rollouts; a discount needs estimator reward or gae, set 1"
        found.append(Refusal("advantage.gamma", reason))
    if advantage.lam < 1 and name != "gae":
        found.append(Refusal("advantage.lam", f"{name} has no values to bootstrap from; set 1, or use estimator gae"))
    if name == "gae" and objective.critic is None:
        found.append(Refusal("critic", "estimator gae needs values; add `critic: {}`"))
    if name != "gae" and objective.critic is not None:
        found.append(Refusal("critic", f"{name} never asks it; remove it, or use advantage.estimator gae"))
    return found


def _of_correction(objective: Objective) -> list[Refusal]:
    correction = objective.correction
    if correction.kind == "none":
        if correction.low is None and correction.high is None:
            return []
        return [Refusal("correction.kind", "bounds without a kind; name one: token, sequence, icepop, sequence_mask")]
    found = []
    if objective.loss.anchor == "sampler":
        reason = "with loss.anchor sampler the ratio has this correction in it already; use none, or anchor trainer"
        found.append(Refusal("correction.kind", reason))
    low, high = correction.bounds
    if low > high:
        found.append(Refusal("correction.low", f"{low:g} is above high {high:g}"))
    elif correction.kind in ("icepop", "sequence_mask") and not low <= 1 <= high:
        reason = f"[{low:g}, {high:g}] drops tokens that trainer and sampler agree on; it must hold 1"
        found.append(Refusal("correction.low" if low > 1 else "correction.high", reason))
    return found


def _of_kl(objective: Objective) -> list[Refusal]:
    kl = objective.kl
    if kl.coef > 0 and (kl.where, kl.estimator, kl.gradient) == ("loss", "k1", "pathwise"):
        reason = "the pathwise gradient of k1 is zero on average: it pulls nowhere; use gradient exact"
        return [Refusal("kl.gradient", reason)]
    return []


def _differ_by_token(objective: Objective) -> str:
    """What makes the advantages of a rollout's tokens differ; empty if nothing does."""
    advantage = objective.advantage
    if advantage.estimator == "gae":
        return "estimator gae"
    if advantage.by_token and advantage.gamma < 1:
        return f"gamma {advantage.gamma:g}"
    if advantage.by_token and objective.kl.coef > 0 and objective.kl.where == "reward":
        return "the KL in the reward of each token"
    return ""
