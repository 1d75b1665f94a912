"""The options of every algorithm, by name. A name stands for a published setting; each key can be overridden.

| name | paper | setting |
|---|---|---|
| sft | - | negative log-likelihood of demonstrations |
| dpo | 2305.18290 | preference pairs; also IPO and hinge |
| robust_dpo | 2403.00409 | loss robust, label_smoothing 0.1 |
| wpo | 2406.11827 | DPO, pairs weighted by the policy's own likelihood |
| cpo | 2401.08417 | DPO without a reference, plus the likelihood of the chosen side |
| simpo | 2405.14734 | mean log p without a reference, beta 2, target margin 1 |
| orpo | 2403.07691 | odds ratio without a reference, plus the likelihood of the chosen side |
| kto | 2402.01306 | single answers with a label |
| reward_model | 2203.02155 | a scalar head, on pairs (Bradley-Terry) or labels (cross-entropy) |
| grpo | 2402.03300 | advantage group_std; its aggregation is DAPO's (token), and it has no reference |
| dr_grpo | 2503.20783 | group_mean, aggregation fixed (needs loss.fixed_length) |
| dapo | 2503.14476 | clip_high 0.28, truncated rollouts are not trained |
| gspo | 2507.18071 | one ratio per sequence, narrow bounds |
| cispo | 2506.13585 | a clipped weight instead of a clipped objective |
| sapo | 2511.20347 | a smooth gate instead of a clip |
| rloo | 2402.14740 | leave_one_out, one ratio per rollout, KL in the reward |
| reinforce_pp | 2501.03262 | whitened rewards, KL in the reward |
| reinforce_pp_baseline | 2501.03262 | group_mean, whitened over the step, KL in the loss |
| gdpo | 2601.05242 | each component of the reward normalized separately |
| ppo | 1707.06347 | GAE with a critic |
| distillation | 2306.13649 | reverse KL to a teacher on each sampled token; or a divergence of whole distributions |
| online_dpo | 2402.04792 | DPO on the best and the worst rollout of each live group |

`name: my_package.my_module:MyOptions` or `name: my_file.py:MyOptions` is a custom algorithm: a subclass of one of these
classes. Does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, model_validator

from ngym.config.import_path import import_class
from ngym.did_you_mean import did_you_mean

from .objective import (
    UNCOMPARED,
    Advantage,
    Beta,
    Correction,
    Critic,
    FrozenOptions,
    InvalidSetting,
    Kl,
    LabelSmoothing,
    LengthNormalised,
    NotNegative,
    Objective,
    PairLoss,
    PolicyLoss,
    Positive,
    Preference,
    ReferenceFree,
    SftAggregation,
    SftWeight,
    Supervision,
    TargetMargin,
    Teacher,
    Weighted,
    invalid_preferences,
    invalid_settings,
)


class AlgorithmOptions(FrozenOptions):
    """The base class of every algorithm's options.

    implementation: the module of trainer.algorithms whose `create(setup)` returns the algorithm.
    """

    implementation: ClassVar[str]
    name: str = Field(description="Which algorithm, or the import path of one: my_file.py:MyOptions.")

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, options: Any) -> Any:
        """A group of keys overrides those keys of this algorithm's setting and keeps the others."""
        if not isinstance(options, dict):
            return options
        defaults = {key: field.default for key, field in cls.model_fields.items()}
        return {key: _merge(defaults.get(key), value) for key, value in options.items()}

    @property
    def task_fields(self) -> frozenset[str]:
        """The fields of tasks that the algorithm reads."""
        return frozenset()

    def create(self, setup: Any) -> Any:
        """The algorithm with these options. Override it for a custom algorithm.

        Args:
            setup: what it may need, a `trainer.algorithms.Setup`. That module imports PyTorch, so its types are not named
                here; neither is that of the result, a `trainer.algorithms.Algorithm`.
        """
        module = importlib.import_module(f"..algorithms.{self.implementation}", __package__)
        return module.create(setup)

    def invalid_settings(self) -> list[InvalidSetting]:
        """Every invalid combination, with its key below `algorithm` and the reason."""
        return []


def _merge(default: Any, value: Any) -> Any:
    if isinstance(default, BaseModel) and isinstance(value, dict):
        return default.model_dump(exclude_unset=True) | value
    return value


class SftOptions(AlgorithmOptions):
    """Supervised fine-tuning on demonstrations: raises the likelihood of the assistant's turns."""

    implementation = "sft"
    name: Literal["sft"] = "sft"


class PreferenceOptions(Preference, AlgorithmOptions):
    """An algorithm that learns from preference pairs."""

    implementation = "dpo"

    def invalid_settings(self) -> list[InvalidSetting]:
        return invalid_preferences(self)


class DpoOptions(PreferenceOptions):
    """Direct preference optimization (arXiv 2305.18290) on pairs."""

    name: Literal["dpo"] = "dpo"


class RobustDpoOptions(PreferenceOptions):
    """Robust DPO (arXiv 2403.00409): unbiased where label_smoothing is the share of wrong labels."""

    name: Literal["robust_dpo"] = "robust_dpo"
    loss: PairLoss = "robust"
    label_smoothing: LabelSmoothing = 0.1


class WpoOptions(PreferenceOptions):
    """Weighted preference optimization (arXiv 2406.11827): pairs that the policy would sample count more."""

    name: Literal["wpo"] = "wpo"
    weighted: Weighted = True


class CpoOptions(PreferenceOptions):
    """Contrastive preference optimization (arXiv 2401.08417): DPO without a reference, plus the likelihood."""

    name: Literal["cpo"] = "cpo"
    reference_free: ReferenceFree = True
    sft_weight: SftWeight = 1.0
    sft_aggregation: SftAggregation = "token"


class SimpoOptions(PreferenceOptions):
    """SimPO (arXiv 2405.14734): mean log p of each answer, a target margin, no reference."""

    name: Literal["simpo"] = "simpo"
    beta: Beta = 2.0
    target_margin: TargetMargin = 1.0
    length_normalised: LengthNormalised = True
    reference_free: ReferenceFree = True


class OrpoOptions(PreferenceOptions):
    """ORPO (arXiv 2403.07691): the likelihood of the chosen answer, plus beta times a log odds ratio; no reference."""

    name: Literal["orpo"] = "orpo"
    loss: PairLoss = "odds_ratio"
    length_normalised: LengthNormalised = True
    reference_free: ReferenceFree = True
    sft_weight: SftWeight = 1.0
    sft_aggregation: SftAggregation = "token"


class KtoOptions(AlgorithmOptions):
    """Kahneman-Tversky optimization (arXiv 2402.01306): single answers that are labeled good or bad."""

    implementation = "kto"
    name: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0, description="Factor of an answer's gain: the pull to the reference.")
    desirable_weight: NotNegative = Field(default=1.0, description="Weight of answers with the label true.")
    undesirable_weight: NotNegative = Field(default=1.0, description="Weight of answers with the label false.")


class RewardModelOptions(AlgorithmOptions):
    """A reward model (arXiv 2203.02155): a scalar head that scores answers, learned from pairs or labels."""

    implementation = "reward_model"
    name: Literal["reward_model"] = "reward_model"
    supervision: Supervision = Field(
        default="pairs",
        description="What the rows have: chosen and rejected answers, a label for an answer, or one for each of its turns.",
    )
    margin_coef: NotNegative = Field(
        default=0.0,
        description="Factor of a pair's own `margin`, by which the chosen score should be higher; 1 as in TRL.",
    )
    center_coef: NotNegative = Field(
        default=0.0, description="Weight of the squared sum of a pair's scores: keeps scores near 0."
    )

    def invalid_settings(self) -> list[InvalidSetting]:
        coefs = {"margin_coef": self.margin_coef, "center_coef": self.center_coef}
        reason = f"labels have no pairs, which it belongs to; set 0, or supervision pairs, not {self.supervision}"
        return [InvalidSetting(key, reason) for key, coef in coefs.items() if coef and self.supervision != "pairs"]


class SoftOverlong(FrozenOptions):
    """A penalty on the reward: from 0 at limit - buffer sampled tokens to -weight at the limit."""

    limit: Positive = Field(description="Sampled tokens of a rollout.")
    buffer: Positive = Field(description="Tokens over which the penalty grows.")
    weight: float = Field(default=1.0, gt=0, description="The penalty at the limit.")


class Shaping(FrozenOptions):
    """DAPO's treatment of groups without a learning signal and of overlong rollouts."""

    skip_equal_groups: bool = Field(
        default=True, description="Leave out groups whose rewards are all equal, instead of counting their tokens."
    )
    drop_truncated: bool = Field(
        default=False, description="Truncated rollouts count in their group's statistics but are not trained."
    )
    soft_overlong: SoftOverlong | None = None


class PolicyGradientOptions(AlgorithmOptions):
    """An algorithm that learns from scored rollouts. Its formulas are in docs/algorithms.md."""

    implementation = "policy_gradient"
    advantage: Advantage = Advantage()
    loss: PolicyLoss = PolicyLoss()
    kl: Kl = Kl()
    correction: Correction = Correction()
    critic: Critic | None = None
    teacher: Teacher | None = None
    shaping: Shaping = Shaping()
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature of the rollouts; the trainer's logits are divided by it."
    )
    routing_replay: bool = Field(
        default=False,
        description="Of a mixture of experts: each token goes to the experts that the rollout's model server has recorded.",
    )
    max_mismatch: float = Field(
        default=1.05,
        gt=1,
        description="Limit of token_mult_prob_error of the first batch; raise it to learn from another policy's "
        "rollouts.",
    )

    @property
    def objective(self) -> Objective:
        return Objective(
            advantage=self.advantage, loss=self.loss, kl=self.kl, correction=self.correction, critic=self.critic
        )

    @property
    def task_fields(self) -> frozenset[str]:
        """The fields of tasks that the algorithm reads."""
        return frozenset() if self.teacher is None else self.teacher.task_fields

    def invalid_settings(self) -> list[InvalidSetting]:
        estimator = self.advantage.estimator
        settings = invalid_settings(self.objective)
        if self.shaping.skip_equal_groups and estimator in UNCOMPARED:
            reason = f"estimator {estimator} also learns from groups of equal rewards; set it to false"
            settings.append(InvalidSetting("shaping.skip_equal_groups", reason))
        if self.shaping.soft_overlong is not None and self.advantage.components != "sum":
            reason = "normalise_then_sum uses the components of the reward, which have no length penalty; use sum"
            settings.append(InvalidSetting("advantage.components", reason))
        return [*settings, *self._teacher_settings(self.teacher)] if self.teacher else settings

    def _teacher_settings(self, teacher: Teacher) -> Iterator[InvalidSetting]:
        if self.shaping.skip_equal_groups:
            reason = "a teacher's scores are a learning signal in groups of equal rewards, too; set it to false"
            yield InvalidSetting("shaping.skip_equal_groups", reason)
        if self.loss.ratio != "token" and teacher.beta is None:
            reason = "a teacher makes advantages differ within a rollout; use ratio token"
            yield InvalidSetting("loss.ratio", reason)
        if any(share.url for share in teacher.sources) and self.temperature != 1:
            yield InvalidSetting("temperature", "a teacher's server returns log-probabilities at temperature 1; set 1")
        if teacher.beta is not None and (teacher.several or teacher.hint):
            reason = "whole distributions are those of one teacher, without a hint; set it to null"
            yield InvalidSetting("teacher.beta", reason)


class GrpoOptions(PolicyGradientOptions):
    """Group relative policy optimisation (arXiv 2402.03300, section 4.1), averaged over tokens and without a reference.

    The paper's own: loss.aggregation sequence, kl.coef 0.04, kl.gradient pathwise.
    """

    name: Literal["grpo"] = "grpo"


class DrGrpoOptions(PolicyGradientOptions):
    """Dr. GRPO (arXiv 2503.20783, section 3.2): no division by deviations or lengths. Needs loss.fixed_length."""

    name: Literal["dr_grpo"] = "dr_grpo"
    advantage: Advantage = Advantage(estimator="group_mean")
    loss: PolicyLoss = PolicyLoss(aggregation="fixed")


class DapoOptions(PolicyGradientOptions):
    """DAPO (arXiv 2503.14476). Its other parts are rollouts.dynamic_sampling and shaping.soft_overlong."""

    name: Literal["dapo"] = "dapo"
    loss: PolicyLoss = PolicyLoss(aggregation="token", clip_low=0.2, clip_high=0.28)
    shaping: Shaping = Shaping(skip_equal_groups=True, drop_truncated=True)


class GspoOptions(PolicyGradientOptions):
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5 and 7; bounds of section 5.1)."""

    name: Literal["gspo"] = "gspo"
    loss: PolicyLoss = PolicyLoss(ratio="sequence", aggregation="sequence", clip_low=3e-4, clip_high=4e-4)


class CispoOptions(PolicyGradientOptions):
    """CISPO of MiniMax-M1 (arXiv 2506.13585, section 3.1): the weight is at most 5."""

    name: Literal["cispo"] = "cispo"
    loss: PolicyLoss = PolicyLoss(surrogate="cispo", aggregation="token", clip_low=1.0, clip_high=4.0)


class SapoOptions(PolicyGradientOptions):
    """Soft adaptive policy optimization (arXiv 2511.20347): a smooth gate in place of the clip."""

    name: Literal["sapo"] = "sapo"
    loss: PolicyLoss = PolicyLoss(surrogate="sapo", aggregation="sequence")


class RlooOptions(PolicyGradientOptions):
    """REINFORCE leave-one-out (arXiv 2402.14740)."""

    name: Literal["rloo"] = "rloo"
    advantage: Advantage = Advantage(estimator="leave_one_out")
    loss: PolicyLoss = PolicyLoss(ratio="product", aggregation="sequence")
    kl: Kl = Kl(coef=0.05, where="reward", estimator="k1")


class ReinforcePpOptions(PolicyGradientOptions):
    """REINFORCE++ (arXiv 2501.03262): the baseline is the mean over the whole step."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    advantage: Advantage = Advantage(estimator="reward", whiten=True)
    kl: Kl = Kl(coef=1e-3, where="reward", estimator="k1")
    shaping: Shaping = Shaping(skip_equal_groups=False)


class ReinforcePpBaselineOptions(PolicyGradientOptions):
    """REINFORCE++-baseline (arXiv 2501.03262): minus the group's mean, then whitened over the step."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    advantage: Advantage = Advantage(estimator="group_mean", whiten=True)
    kl: Kl = Kl(coef=1e-3, where="loss", estimator="k2")


class GdpoOptions(PolicyGradientOptions):
    """GDPO (arXiv 2601.05242): each component of the reward is normalized within its group."""

    name: Literal["gdpo"] = "gdpo"
    advantage: Advantage = Advantage(estimator="group_std", components="normalise_then_sum")


class DistillationOptions(PolicyGradientOptions):
    """On-policy distillation (arXiv 2306.13649): the reverse KL to a teacher on the policy's own rollouts."""

    name: Literal["distillation"] = "distillation"
    advantage: Advantage = Advantage(estimator="group_mean")
    shaping: Shaping = Shaping(skip_equal_groups=False)

    def invalid_settings(self) -> list[InvalidSetting]:
        missing = [InvalidSetting("teacher", "name one: teacher.path=FOLDER or teacher.url=http://...")]
        return super().invalid_settings() + (missing if self.teacher is None else [])


class OnlineDpoOptions(PolicyGradientOptions):
    """Online DPO (arXiv 2402.04792): pairs of the best and the worst rollout of each group, live."""

    implementation = "online_dpo"
    name: Literal["online_dpo"] = "online_dpo"
    preference: Preference = Preference()

    def invalid_settings(self) -> list[InvalidSetting]:
        settings = [InvalidSetting(f"preference.{key}", reason) for key, reason in invalid_preferences(self.preference)]
        unused = (
            "advantage",
            "loss",
            "kl",
            "correction",
            "critic",
            "teacher",
            "shaping",
            "max_mismatch",
            "routing_replay",
        )
        default = type(self)()
        return settings + [
            InvalidSetting(key, "online_dpo learns from pairs and does not use it; remove it")
            for key in unused
            if getattr(self, key) != getattr(default, key)
        ]


class PpoOptions(PolicyGradientOptions):
    """Proximal policy optimisation (arXiv 1707.06347, eq. 7) with GAE (arXiv 1506.02438, eq. 16) and a critic."""

    name: Literal["ppo"] = "ppo"
    advantage: Advantage = Advantage(estimator="gae", gamma=1.0, lam=0.95, whiten=True)
    critic: Critic | None = Critic()
    shaping: Shaping = Shaping(skip_equal_groups=False)


BuiltIn = (
    SftOptions | DpoOptions | RobustDpoOptions | WpoOptions | CpoOptions | SimpoOptions | OrpoOptions | KtoOptions
    | RewardModelOptions | GrpoOptions | DrGrpoOptions | DapoOptions | GspoOptions | CispoOptions | SapoOptions
    | RlooOptions | ReinforcePpOptions | ReinforcePpBaselineOptions | GdpoOptions | PpoOptions | DistillationOptions
    | OnlineDpoOptions
)  # fmt: skip
ALGORITHMS: dict[str, type[AlgorithmOptions]] = {
    options.model_fields["name"].default: options for options in get_args(BuiltIn)
}


def options_class(name: str) -> type[AlgorithmOptions]:
    """The options of the algorithm with this name, or custom ones at `module:Class` or `file.py:Class`.

    Raises:
        ValueError: there is no such algorithm.
    """
    if ":" not in name:
        if name not in ALGORITHMS:
            problem = f"there is no algorithm {name!r}" if name else "it needs a name"
            names = "".join(f"\n  {algorithm:22} {_first_line(options)}" for algorithm, options in ALGORITHMS.items())
            raise ValueError(f"{problem}{did_you_mean(name, ALGORITHMS)}; known:{names}")
        return ALGORITHMS[name]
    return import_class(name, AlgorithmOptions)


def _first_line(options: type[AlgorithmOptions]) -> str:
    return (options.__doc__ or "").partition("\n")[0].rstrip(".")


def _parse(value: object) -> object:
    """The options of the named algorithm, so that a mistake in them is one line, not one for each algorithm."""
    if isinstance(value, str):
        raise ValueError(f"expected a mapping; for this algorithm with its defaults write algorithm.name={value}")  # noqa: TRY004
    if not isinstance(value, dict):
        return value
    return options_class(str(value.get("name", ""))).model_validate(value)


AnyAlgorithm = Annotated[SerializeAsAny[BuiltIn | AlgorithmOptions], BeforeValidator(_parse)]


def add_correction(options: PolicyGradientOptions) -> PolicyGradientOptions:
    """Adds importance weights for rollouts of older weights, if the recipe has no correction and no ratio that includes
    them. Online DPO has no ratios.
    """
    is_set = "correction" in options.model_fields_set or options.loss.anchor == "sampler"
    if is_set or isinstance(options, OnlineDpoOptions):
        return options
    return options.model_copy(update={"correction": Correction(kind="token")})
