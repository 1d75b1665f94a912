"""The training objective of a policy as a value, and the checks of its combinations. Does not import torch.

    rewards -> advantage -> surrogate x correction + kl - entropy -> aggregation -> one number per optimizer step

| name in the literature | here |
|---|---|
| GRPO (2402.03300)      | advantage.estimator group_std, loss.aggregation sequence |
| Dr. GRPO (2503.20783)  | group_mean, aggregation fixed |
| DAPO (2503.14476)      | group_std, clip_high 0.28, aggregation token (its filters and length penalty: shaping) |
| GSPO (2507.18071)      | loss.ratio sequence, aggregation sequence, clip_low 3e-4, clip_high 4e-4 |
| CISPO (2506.13585)     | loss.surrogate cispo |
| SAPO (2511.20347)      | loss.surrogate sapo, aggregation sequence |
| RLOO (2402.14740)      | leave_one_out, ratio product, aggregation sequence, kl.where reward |
| REINFORCE++ (2501.03262) | estimator reward, whiten; its baseline variant: group_mean, whiten |
| GDPO (2601.05242)      | group_std, components normalise_then_sum |
| PPO (1707.06347)       | estimator gae, whiten, critic |
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ngym.config.shipped_files import PACKAGE, shipped_path
from ngym.did_you_mean import near_file
from ngym.files.hub_download import HUB, local_copy
from ngym.files.model_checkpoint import policy_below

from .extensions import Estimator


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number")  # noqa: TRY004
    return value


Positive = Annotated[int, BeforeValidator(_refuse_bool), Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Word = Annotated[str, BeforeValidator(str)]  # a YAML number may be a word of a command
UNCOMPARED = ("reward", "gae")  # they do not compare rewards within a group
Aggregation = Literal["token", "sequence", "fixed", "prompt"]
KlEstimator = Literal["k1", "k2", "k3"]
Discount = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
_BOUNDS = {  # defaults of SkyRL, SkyRL, OpenRLHF and NeMo RL, NeMo RL
    "none": (0.0, float("inf")),
    "token": (0.0, 2.0),
    "sequence": (0.0, 5.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
    "product_mask": (0.0, 3.0),  # TRL
}
_UNDIVIDED = {"group_std": "group_mean", "leave_one_out_std": "leave_one_out"}


class FrozenOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def find_path(path: str) -> Path | None:
    """A file or folder in the working directory, else among the files that ship with ngym; an `hf://` file's copy."""
    if path.startswith(HUB):
        path = str(local_copy(Path(path)))
    return next(
        (candidate for candidate in (Path(path), shipped_path(path), PACKAGE / path) if candidate.exists()), None
    )


def existing(path: str) -> str:
    """The absolute path of a file or folder; a ValueError if it does not exist."""
    file = find_path(path)
    if file is None:
        near = near_file(Path(path))
        raise ValueError(f"there is no {path} in {Path.cwd()}, nor among the files that ship with ngym{near}")
    return os.path.abspath(file)


def _local_or_hub(name: str) -> str:
    """A folder's absolute path; a name of the Hugging Face hub stays unchanged."""
    folder = find_path(name)
    if folder is not None:
        if policy := policy_below(folder):
            raise ValueError(f"{folder} is the folder of a run (did you mean {str(policy)!r}?)")
        return os.path.abspath(folder)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"there is no folder {name} in {Path.cwd()}, and it is not an owner/name of the Hugging Face hub"
        )
    return name


ExistingPath = Annotated[str, AfterValidator(existing)]
ModelName = Annotated[str, AfterValidator(_local_or_hub)]


class Advantage(FrozenOptions):
    """The way from rewards to advantages; the formulas are in losses/advantages.py."""

    estimator: Estimator = Field(
        default="group_std",
        description="What a reward is compared with, or the import path of a function: my_file.py:my_estimator.",
    )
    components: Literal["sum", "normalise_then_sum"] = Field(
        default="sum",
        description="With several rewards per rollout, add them up, or first normalize each within its group (GDPO).",
    )
    whiten: bool = Field(
        default=False,
        description="Subtract the mean and divide by the deviation over all tokens of the rollouts that are "
        "prepared together: those of a live step, before it is split into updates, or those of the "
        "whole file; with a critic, of a batch of it.",
    )
    eps: NotNegative = Field(default=1e-6, description="Added to a deviation before dividing by it.")
    gamma: Discount = Field(default=1.0, description="Discount per sampled token.")
    lam: Discount = Field(default=1.0, description="Trace decay of GAE, per sampled token.")

    @property
    def is_custom(self) -> bool:
        """Whether the estimator is a function of the user's, named by its import path."""
        return ":" in self.estimator

    @property
    def by_token(self) -> bool:
        """Whether a reward, with its KL penalty, is spread over a rollout's tokens before it becomes an advantage."""
        return self.whiten or self.estimator in UNCOMPARED


class PolicyLoss(FrozenOptions):
    """The surrogate loss of one token, and the aggregation over tokens."""

    surrogate: Literal["clipped", "cispo", "sapo", "reinforce"] = Field(
        default="clipped", description="The term that is multiplied by the advantage."
    )
    ratio: Literal["token", "sequence", "product"] = Field(
        default="token",
        description="p(token) now / p(token) then, `token` by token; `sequence`: the rollout's geometric mean "
        "(GSPO); `product`: over the whole rollout (RLOO).",
    )
    anchor: Literal["trainer", "sampler"] = Field(
        default="trainer",
        description='Source of the logprobs "then": the trainer at the start of the step, or the sampler.',
    )
    clip_low: NotNegative = Field(
        default=0.2,
        description="Offset: the ratio stays in [1 - clip_low, 1 + clip_high]. Also for CISPO: an absolute bound "
        "of 5 on the weight is clip_low 1, clip_high 4.",
    )
    clip_high: NotNegative = Field(
        default=0.2,
        description="Offset: the ratio stays in [1 - clip_low, 1 + clip_high]. Also for CISPO: an absolute bound "
        "of 5 on the weight is clip_low 1, clip_high 4.",
    )
    tau_positive: float = Field(default=1.0, gt=0, description="Of sapo: sharpness of its gate, advantage above 0.")
    tau_negative: float = Field(default=1.05, gt=0, description="Of sapo: sharpness of its gate, other advantages.")
    dual_clip: float | None = Field(default=None, description="Bound on the ratio where the advantage is negative.")
    aggregation: Aggregation = Field(
        default="token",
        description="A mean over all tokens; over rollouts of the mean over their tokens; over rollouts of the "
        "sum of their tokens / fixed_length; over tasks of the mean over their tokens. Always over "
        "the whole optimizer step.",
    )
    fixed_length: int | None = Field(default=None, gt=0, description="Divisor of the aggregation fixed.")
    entropy_coef: NotNegative = Field(
        default=0.0, description="Weight of the bonus for the exact entropy of each distribution that was sampled from."
    )


class Kl(FrozenOptions):
    """The pull towards the reference policy; with coef 0, no reference is needed."""

    coef: NotNegative = Field(default=0.0, description="Weight of the penalty.")
    where: Literal["loss", "reward"] = Field(
        default="loss", description="Where the penalty counts: in the loss, or subtracted from the rewards."
    )
    estimator: KlEstimator = Field(default="k3", description="Estimator of the KL divergence from one sample.")
    gradient: Literal["exact", "pathwise"] = Field(
        default="exact",
        description="`exact` is that of the KL divergence itself; `pathwise` differentiates the estimator, as "
        "GRPO's paper does.",
    )


class Correction(FrozenOptions):
    """Importance weights w = p(trainer) / p(sampler), which correct differences between the two."""

    kind: Literal["none", "token", "sequence", "icepop", "sequence_mask", "product_mask"] = Field(
        default="none",
        description="`token`: w of each token, clipped to [low, high]; `sequence`: the rollout's product, "
        "clipped; `icepop`: w, or 0 outside; `sequence_mask`: w, or 0 for a whole rollout whose "
        "geometric mean is outside; `product_mask`: the rollout's product, or 0 outside (sequence_mask of TRL).",
    )
    low: NotNegative | None = Field(default=None, description="Lower bound on w; null: the kind's own.")
    high: NotNegative | None = Field(default=None, description="Upper bound on w; null: the kind's own.")

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = _BOUNDS[self.kind]
        return (low if self.low is None else self.low, high if self.high is None else self.high)


class Critic(FrozenOptions):
    """The value of each token, learned next to the policy."""

    lr: float | None = Field(default=None, gt=0, description="The full learning rate; null: optimizer.lr.")
    loss_coef: float = Field(
        default=1.0,
        gt=0,
        description="Weight of its loss. Adam's steps hardly depend on it, except where ZeRO clips the gradients "
        "of policy and critic together.",
    )
    value_clip: float | None = Field(
        default=0.2, gt=0, description="How far a value may move from its value before the step; null: no limit."
    )


PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class TeacherSource(FrozenOptions):
    """A teacher: a checkpoint, a server, or the policy itself with a hint."""

    path: ModelName | None = Field(
        default=None, description="A checkpoint with the policy's tokenizer, loaded on every rank; or give url."
    )
    url: str | None = Field(
        default=None,
        pattern="^https?://",
        description="A server with vLLM's /inference/v1/generate and /tokenize, such as models/vllm.",
    )
    model: str | None = Field(default=None, description="The model's name there; null: the server's only one.")
    api_key_env: str | None = Field(default=None, description="The environment variable with the server's key.")
    current_policy: bool = Field(
        default=False, description="The policy itself, as it is before each step; with a hint (self-distillation)."
    )
    hint: str | None = Field(
        default=None,
        min_length=1,
        description="A user message that only the teacher sees, before the answer, such as 'The answer is "
        "{expected_answer}.'; {field} is a field of the task's row, {a.b} a member of one.",
    )

    @property
    def _origins(self) -> int:
        return (self.path is not None) + (self.url is not None) + self.current_policy

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if self._origins != 1:
            raise ValueError("name a teacher: either path or url, or set current_policy")
        if self.current_policy and self.hint is None:
            raise ValueError("current_policy: without a hint the policy scores its tokens as it sampled them; set hint")
        return self


class TeacherShare(TeacherSource):
    """One of several teachers."""

    weight: float = Field(default=1.0, gt=0, description="Its weight among the teachers of a rollout.")
    agents: tuple[str, ...] = Field(
        default=(), description="It scores the rollouts of these agents; empty: of all agents."
    )


class Teacher(TeacherSource):
    """On-policy distillation: a teacher scores the tokens that the policy sampled."""

    several: tuple[TeacherShare, ...] = Field(
        default=(),
        description="Several teachers instead of one: the log-probability of a token is the weighted mean of theirs.",
    )
    coef: float = Field(
        default=1.0, gt=0, description="Weight of log p of the teacher - log p of the policy, or of the divergence."
    )
    beta: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Loss on whole distributions: 0 forward KL, 1 reverse KL, between them generalized Jensen-Shannon. "
        "null: the reverse KL of the sampled tokens, as advantages.",
    )
    top_k: Positive = Field(
        default=20, description="With beta and url: the teacher's likeliest tokens; the others count as one."
    )
    reward_coef: NotNegative = Field(
        default=0.0, description="Weight of the advantages of the rewards, which are added; 0: rewards have no effect."
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if not self.several:
            return super()._check_one_source()  # type: ignore[operator, no-any-return]
        if self._origins or self.hint is not None:
            raise ValueError("several: give path, url, current_policy and hint there, or one teacher here")
        return self

    @property
    def sources(self) -> tuple[TeacherShare, ...]:
        """All teachers, with their weights."""
        fields = {name: getattr(self, name) for name in TeacherSource.model_fields}
        return self.several or (TeacherShare.model_construct(**fields),)

    @property
    def task_fields(self) -> frozenset[str]:
        """The fields of task rows that hints name."""
        return frozenset(name for share in self.sources for name in PLACEHOLDER.findall(share.hint or ""))


class Objective(FrozenOptions):
    """The objective of the policy, and of the critic if there is one."""

    advantage: Advantage = Advantage()
    loss: PolicyLoss = PolicyLoss()
    kl: Kl = Kl()
    correction: Correction = Correction()
    critic: Critic | None = None


PairLoss = Annotated[Literal["sigmoid", "ipo", "hinge", "robust", "odds_ratio"], Field(description="Loss of a pair.")]
Beta = Annotated[
    float, Field(gt=0, description="Factor of the margin: the pull to the reference. Weight of the loss odds_ratio.")
]
LabelSmoothing = Annotated[
    float, Field(ge=0, lt=0.5, description="The share of pairs assumed to be labeled the wrong way round.")
]
TargetMargin = Annotated[
    float, Field(ge=0, description="Subtracted from beta times the margin (gamma of SimPO); of the loss sigmoid.")
]
LengthNormalised = Annotated[bool, Field(description="A mean over an answer's tokens instead of the sum.")]
ReferenceFree = Annotated[
    bool, Field(description="Log p of an answer counts, instead of its gain over the policy at the start.")
]
Weighted = Annotated[
    bool, Field(description="Weigh a pair by how likely the policy itself would sample its answers (WPO).")
]
SftWeight = Annotated[float, Field(ge=0, description="Weight of the negative log-likelihood of the chosen side.")]
SftAggregation = Annotated[
    Literal["pair", "token"],
    Field(description="That likelihood is a mean over pairs of the mean over tokens, or a mean over all tokens."),
]

Supervision = Literal["pairs", "outcomes", "steps"]


class Preference(FrozenOptions):
    """DPO and its variants."""

    loss: PairLoss = "sigmoid"
    beta: Beta = 0.1
    label_smoothing: LabelSmoothing = 0.0
    target_margin: TargetMargin = 0.0
    length_normalised: LengthNormalised = False
    reference_free: ReferenceFree = False
    weighted: Weighted = False
    sft_weight: SftWeight = 0.0
    sft_aggregation: SftAggregation = "pair"


class InvalidSetting(NamedTuple):
    """key: the dotted key at fault. reason: why, and what to do."""

    key: str
    reason: str


def invalid_settings(objective: Objective) -> list[InvalidSetting]:
    """Every invalid combination; empty if the objective can be trained."""
    parts = (_check_ratio, _check_aggregation, _check_advantage, _check_correction)
    return [refusal for part in parts for refusal in part(objective)]


def invalid_preferences(preference: Preference) -> list[InvalidSetting]:
    """Every invalid combination; empty if the loss of pairs can be trained."""
    return list(_check_pairs(preference))


def _check_pairs(preference: Preference) -> Iterator[InvalidSetting]:
    loss = preference.loss
    if preference.label_smoothing > 0 and loss not in ("sigmoid", "robust"):
        yield InvalidSetting(
            "label_smoothing", f"the {loss} loss has no label smoothing; use loss sigmoid or robust, or set 0"
        )
    if preference.target_margin > 0 and loss != "sigmoid":
        yield InvalidSetting("target_margin", f"the {loss} loss has no target margin; use loss sigmoid, or set 0")
    if loss == "odds_ratio" and not (preference.reference_free and preference.length_normalised):
        key = "length_normalised" if preference.reference_free else "reference_free"
        yield InvalidSetting(key, "odds are those of an answer's mean probability, without a reference; set it to true")


def _check_ratio(objective: Objective) -> Iterator[InvalidSetting]:
    loss, kl = objective.loss, objective.kl
    if loss.ratio != "token" and loss.surrogate != "clipped":
        yield InvalidSetting("loss.ratio", f"{loss.surrogate} weighs tokens one by one; use ratio token")
    if loss.ratio != "token" and (why := _differ_by_token(objective)):
        yield InvalidSetting("loss.ratio", f"{why} makes advantages differ within a rollout; use ratio token")
    if loss.surrogate == "reinforce" and loss.anchor == "sampler":
        yield InvalidSetting("loss.anchor", "reinforce has no ratio; use surrogate clipped, or a correction")
    if loss.dual_clip is not None and loss.surrogate != "clipped":
        yield InvalidSetting("loss.dual_clip", f"{loss.surrogate} does not clip its objective; remove dual_clip")
    elif loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        reason = f"{loss.dual_clip:g} takes effect before 1 + clip_high = {1 + loss.clip_high:g}; use more, such as 3"
        yield InvalidSetting("loss.dual_clip", reason)
    if loss.surrogate != "sapo" and (loss.tau_positive, loss.tau_negative) != (1.0, 1.05):
        key = "loss.tau_positive" if loss.tau_positive != 1.0 else "loss.tau_negative"
        yield InvalidSetting(key, f"{loss.surrogate} has no gate; remove it, or use surrogate sapo")
    if kl.coef > 0 and (kl.where, kl.estimator, kl.gradient) == ("loss", "k1", "pathwise"):
        reason = "the pathwise gradient of k1 is zero on average, so it has no effect; use gradient exact"
        yield InvalidSetting("kl.gradient", reason)


def _check_aggregation(objective: Objective) -> Iterator[InvalidSetting]:
    loss = objective.loss
    if loss.ratio != "token" and loss.aggregation != "sequence":
        reason = f"with one ratio a rollout, {loss.aggregation} would weigh rollouts by length"
        yield InvalidSetting("loss.aggregation", f"{reason}; use aggregation sequence")
    if loss.aggregation == "fixed" and loss.fixed_length is None:
        reason = "aggregation fixed divides by it; set the maximum number of tokens that a rollout may sample"
        yield InvalidSetting("loss.fixed_length", reason)
    if loss.aggregation != "fixed" and loss.fixed_length is not None:
        reason = f"aggregation {loss.aggregation} does not use it; remove it, or use aggregation fixed"
        yield InvalidSetting("loss.fixed_length", reason)


def _check_advantage(objective: Objective) -> Iterator[InvalidSetting]:
    advantage = objective.advantage
    name = advantage.estimator
    if advantage.whiten and name in _UNDIVIDED:
        reason = f"{name} already divides by a deviation; use estimator {_UNDIVIDED[name]}, or no whiten"
        yield InvalidSetting("advantage.whiten", reason)
    if advantage.components != "sum" and name != "group_std":
        reason = f"it normalises each reward within its group, {name} does not; use estimator group_std"
        yield InvalidSetting("advantage.components", reason)
    if advantage.gamma < 1 and name not in UNCOMPARED:
        reason = f"{name} compares whole rollouts; a discount needs estimator reward or gae, set 1"
        yield InvalidSetting("advantage.gamma", reason)
    if advantage.lam < 1 and name != "gae":
        yield InvalidSetting("advantage.lam", f"{name} has no values to bootstrap from; set 1, or use estimator gae")
    if name == "gae" and objective.critic is None:
        yield InvalidSetting("critic", "estimator gae needs values; add `critic: {}`")
    if name != "gae" and objective.critic is not None:
        yield InvalidSetting("critic", f"{name} does not use it; remove it, or use advantage.estimator gae")


def _check_correction(objective: Objective) -> Iterator[InvalidSetting]:
    correction = objective.correction
    if correction.kind == "none":
        if correction.low is not None or correction.high is not None:
            reason = "bounds without a kind; name one: token, sequence, icepop, sequence_mask, product_mask"
            yield InvalidSetting("correction.kind", reason)
        return
    low, high = correction.bounds
    if objective.loss.anchor == "sampler":
        reason = "with loss.anchor sampler the ratio has this correction in it already; use none, or anchor trainer"
        yield InvalidSetting("correction.kind", reason)
    if low > high:
        yield InvalidSetting("correction.low", f"{low:g} is above high {high:g}")
    elif correction.kind in ("icepop", "sequence_mask", "product_mask") and not low <= 1 <= high:
        reason = f"[{low:g}, {high:g}] drops tokens that trainer and sampler agree on; it must hold 1"
        yield InvalidSetting("correction.low" if low > 1 else "correction.high", reason)


def _differ_by_token(objective: Objective) -> str:
    """The reason why the advantages of a rollout's tokens differ; "" if they do not."""
    advantage = objective.advantage
    if advantage.estimator == "gae":
        return "estimator gae"
    if advantage.by_token and advantage.gamma < 1:
        return f"gamma {advantage.gamma:g}"
    if advantage.by_token and objective.kl.coef > 0 and objective.kl.where == "reward":
        return "the KL in the reward of each token"
    return ""
