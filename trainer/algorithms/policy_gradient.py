"""GRPO and its family: raises the likelihood of rollouts that beat their group. recipe/objective.py has the objective.

    rollouts -> groups -> advantages, on every token that the policy sampled -> ratio to the policy that sampled -> loss

All segments of a rollout share its advantage. Groups without a learning signal (equal rewards, one rollout) have a
gradient of exactly 0 and are left out, unless `shaping.skip_equal_groups` is false. Credit assignment:

    rewards, components -> one advantage a rollout -> on each of its tokens
    rewards, KL, values -> one reward a token      -> GAE or returns to go -> whitened
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from ngym.errors import UsageError

from ..data.images import TEXT_ONLY, Images
from ..data.samples import (
    RolloutSample,
    Routers,
    Sample,
    SampledSegment,
    group_by_task,
    trainable_rollouts,
    with_values,
)
from ..engine.engine import score
from ..losses.advantages import (
    advantages,
    component_advantages,
    informative,
    informative_components,
    soft_overlong,
    subtract_kl,
)
from ..losses.gae import Moments, explained_variance, gae, returns_to_go, token_rewards, whiten
from ..losses.policy_loss import Loss, TokenRows, Tokens, Totals, kl_estimate, loss_weights, policy_loss
from ..losses.value_loss import Values, value_loss
from ..model.attention import on_device
from ..model.chunked_logprobs import RequestedScores, Scores
from ..model.packing import common_experts
from ..model.policy import load_policy
from ..model.routing_replay import replay_routing
from ..model.teacher_divergence import TeacherDivergence
from ..recipe.algorithms import PolicyGradientOptions
from ..recipe.objective import Teacher
from . import Setup, StepLoss
from .teacher import Teachers, open_teachers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.engine import Engine
    from ..model.packing import MicroBatch


def _with_teacher_advantages(options: Teacher, rollouts: Sequence[RolloutSample]) -> list[RolloutSample]:
    """The rollouts with the teacher's part of their advantages: of each token, minus a sample of the reverse KL. A
    divergence of whole distributions has no part in them.
    """

    def of_segment(segment: SampledSegment) -> list[float]:
        assert segment.teacher is not None and segment.advantages is not None
        if options.beta is not None:
            return [options.reward_coef * advantage for advantage in segment.advantages]
        parts = zip(segment.advantages, segment.teacher, segment.old or segment.sampler, strict=True)
        return [
            options.reward_coef * advantage + options.coef * (teacher - logprob)
            for advantage, teacher, logprob in parts
        ]

    by_rollout = [[of_segment(segment) for segment in rollout.segments] for rollout in rollouts]
    return with_values(rollouts, "advantages", by_rollout)


def _with_reward_advantages(options: PolicyGradientOptions, rollouts: Sequence[RolloutSample]) -> list[RolloutSample]:
    """The rollouts with the `advantages` of their rewards; with estimator gae, which reads `values`, also `returns`."""
    objective, lengths = options.objective, [rollout.trained for rollout in rollouts]
    advantage = objective.advantage
    coef = objective.kl.coef if objective.kl.where == "reward" else 0.0
    kl_N = _kl_estimates(options, rollouts) if coef else torch.zeros(sum(lengths))
    values_B = _rollout_advantages(options, rollouts, kl_N, coef)
    if not advantage.by_token:
        on_all = [
            [[value] * segment.trained for segment in rollout.segments]
            for rollout, value in zip(rollouts, values_B, strict=True)
        ]
        return with_values(rollouts, "advantages", on_all)
    rewards_N = token_rewards(values_B, lengths, kl_N, coef)
    if advantage.estimator == "gae":
        values = [value for rollout in rollouts for segment in rollout.segments for value in segment.values or ()]
        estimates = gae(rewards_N, torch.tensor(values), lengths, advantage.gamma, advantage.lam)
        rollouts = with_values(rollouts, "returns", _split_by_segment(rollouts, estimates.returns_N))
        advantages_N = estimates.advantages_N
    else:
        advantages_N = returns_to_go(rewards_N, lengths, advantage.gamma)
    if advantage.whiten:
        advantages_N = whiten(advantages_N, Moments.of(advantages_N))
    return with_values(rollouts, "advantages", _split_by_segment(rollouts, advantages_N))


def has_learning_signal(options: PolicyGradientOptions, group: Sequence[RolloutSample]) -> bool:
    """Whether a group has a learning signal: its rewards, or one of its separate components, are not all equal."""
    if options.advantage.components == "sum":
        return informative([rollout.reward for rollout in group])
    return informative_components([rollout.components for rollout in group])


def _rollout_advantages(
    options: PolicyGradientOptions, rollouts: Sequence[RolloutSample], kl_N: Tensor, coef: float
) -> list[float]:
    """The advantage of each rollout, or its reward if the estimator spreads it over its tokens later, [B]."""
    groups = [rollout.group for rollout in rollouts]
    if options.advantage.components == "normalise_then_sum":
        names = sorted({name for rollout in rollouts for name in rollout.components})
        components = [[rollout.components.get(name) for name in names] for rollout in rollouts]
        return component_advantages(options.advantage, components, [1.0] * len(names), groups)
    rewards, overlong = [rollout.reward for rollout in rollouts], options.shaping.soft_overlong
    if overlong is not None:
        penalties = [soft_overlong(rollout.trained, overlong.limit, overlong.buffer) for rollout in rollouts]
        rewards = [reward + overlong.weight * penalty for reward, penalty in zip(rewards, penalties, strict=True)]
    if coef and not options.advantage.by_token:
        sums = [float(kl.sum()) for kl in kl_N.split([rollout.trained for rollout in rollouts])]
        rewards = cast(list[float], subtract_kl(rewards, sums, coef))
    return advantages(options.advantage, rewards, groups)


def _kl_estimates(options: PolicyGradientOptions, rollouts: Sequence[RolloutSample]) -> Tensor:
    """The KL estimate of each token, rollout after rollout, [N]."""
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    logprobs = torch.tensor([value for segment in segments for value in segment.old or segment.sampler])
    reference = torch.tensor([value for segment in segments for value in segment.reference or ()])
    return kl_estimate(logprobs, reference, options.kl.estimator)


def _split_by_segment(rollouts: Sequence[RolloutSample], values_N: Tensor) -> list[list[list[float]]]:
    """values_N as nested lists: by rollout, by segment, by token."""
    pieces = iter(values_N.split([segment.trained for rollout in rollouts for segment in rollout.segments]))
    return [[next(pieces).tolist() for _ in rollout.segments] for rollout in rollouts]


def create(setup: Setup) -> PolicyGradient:
    """The policy gradient of a recipe, with a reference policy if its KL needs one."""
    recipe = setup.recipe
    options = recipe.algorithm
    assert isinstance(options, PolicyGradientOptions)
    reference = initial_policy(setup, options.temperature) if options.kl.coef > 0 else None
    teacher = None if options.teacher is None else open_teachers(setup, options.teacher, options.temperature)
    policy = setup.engine.policy
    if teacher is not None and not isinstance(policy.images, str):
        policy.images = teacher.images_problem(policy.images) or policy.images
    updates = 1 if recipe.live and recipe.live.updates_per_step == 1 else None
    return PolicyGradient(options, updates, reference, teacher, policy.images, policy.routers)


def initial_policy(setup: Setup, temperature: float) -> Callable[[MicroBatch], Tensor]:
    """Logprobs [N] of a micro-batch under the policy at the start of the run: without its adapter, or a second network."""
    recipe, engine, tokenizer = setup
    if recipe.model.lora is not None:
        return engine.base_logprobs
    frozen = recipe.model.model_copy(update={"train_vision": False})
    first = load_policy(frozen, tokenizer, recipe.seed, temperature).to(engine.device)
    if engine.policy.routers is not None:
        replay_routing(first.network)
    return first.eval().requires_grad_(False).logprobs


class TokenWeights(NamedTuple):
    """A rollout's weights in the optimizer step: of each of its tokens, and in the divisor."""

    token: float
    share: float


class PolicyGradient:
    """GRPO and its family, configured by the options.

    Args:
        updates: optimizer steps on one batch of rollouts, if known. At the first one, the trainer's logprobs are the
        current ones.
        reference: logprobs [N] of a micro-batch under the reference policy of the KL; needed only with kl.coef above 0.
        teacher: if the options have one.
        images: how the policy reads images, or the reason why it does not.
        routers: of the policy, if it replays the routing of rollouts.
    """

    def __init__(
        self,
        options: PolicyGradientOptions,
        updates: int | None,
        reference: Callable[[MicroBatch], Tensor] | None,
        teacher: Teachers | None = None,
        images: Images = TEXT_ONLY,
        routers: Routers | None = None,
    ) -> None:
        self._options = options
        self._images = images
        self._routers = routers
        self._objective = options.objective
        self._updates = updates
        self._reference = reference
        self._teacher = teacher

    @property
    def asks(self) -> RequestedScores:
        scores = RequestedScores(
            entropy=self._objective.loss.entropy_coef > 0, values=self._objective.critic is not None
        )
        options = self._options.teacher
        if options is None or options.beta is None or self._teacher is None:
            return scores
        return scores._replace(divergence=TeacherDivergence(options.beta, self._teacher.distributions))

    def samples(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """Rollouts with sampled tokens; failed and unscored ones are left out."""
        options = self._options
        return trainable_rollouts(path, options.temperature, options.task_fields, self._images, self._routers)

    def prepare(self, samples: Sequence[Sample], engine: Engine, budget: int) -> list[Sample]:
        """The rollouts that have a learning signal and fit their teachers' contexts, with their advantages.

        Raises:
            UsageError: the rewards have no components, and the recipe normalizes each.
        """
        rollouts = cast(Sequence[RolloutSample], samples)
        if (
            self._options.advantage.components != "sum"
            and rollouts
            and not any(sample.components for sample in rollouts)
        ):
            raise UsageError(
                f"algorithm.advantage.components: {self._options.advantage.components} needs reward_components, which none "
                f"of these {len(rollouts):,} rollouts has; return them from verify, or use sum"
            )
        rollouts = self._with_learning_signal(rollouts)
        if not rollouts:
            return []
        if self._routers is not None:
            rollouts = with_values(rollouts, "experts", common_experts(rollouts))
        score_functions: dict[str, Callable[[MicroBatch], Tensor]] = {}
        if self._needs_trainer_logprobs:
            score_functions["old"] = engine.logprobs
        if self._reference is not None:
            score_functions["reference"] = self._reference
        if self.asks.values:
            score_functions["values"] = engine.values
        for name, compute in score_functions.items():
            rollouts = with_values(rollouts, name, score(rollouts, compute, engine, budget))
        rollouts = _with_reward_advantages(self._options, rollouts)
        if self._options.shaping.drop_truncated:
            rollouts = [rollout for rollout in rollouts if not rollout.truncated]
        if self._teacher is None or self._options.teacher is None:
            return list(rollouts)
        scores = self._teacher.scores(rollouts, engine, budget)
        rollouts = [rollout for rollout, values in zip(rollouts, scores, strict=True) if values is not None]
        rollouts = with_values(rollouts, "teacher", [values for values in scores if values is not None])
        return list(_with_teacher_advantages(self._options.teacher, rollouts))

    def step_loss(self, samples: Sequence[Sample]) -> StepLoss:
        rollouts = cast(Sequence[RolloutSample], samples)
        weights = loss_weights(
            self._objective.loss.aggregation,
            [rollout.trained for rollout in rollouts],
            fixed_length=self._objective.loss.fixed_length,
            tasks_B=[rollout.group for rollout in rollouts],
        )
        weights_by_sample = {
            id(rollout): TokenWeights(token, share)
            for rollout, token, share in zip(rollouts, weights.token_B, weights.share_B, strict=True)
        }
        variance_explained = 0.0 if self._objective.critic is None else _explained_variance(rollouts)

        def loss(scores: Scores, packed: MicroBatch) -> Loss:
            micro = _MicroBatch(packed, [weights_by_sample[id(sample)] for sample in packed.samples], scores.logprobs_N)
            return self._loss(scores, micro, variance_explained)

        return StepLoss(weights.total, loss)

    def _loss(self, scores: Scores, micro: _MicroBatch, variance_explained: float) -> Loss:
        advantages_N = micro.field_values("advantages")
        assert advantages_N is not None, "the samples were not prepared"
        tokens = Tokens(
            logprobs_N=scores.logprobs_N,
            advantages_N=advantages_N,
            rows=micro.rows,
            weight_R=micro.weight_R,
            share=micro.share,
            old_N=micro.field_values("old"),
            sampler_N=micro.field_values("sampler"),
            reference_N=micro.field_values("reference"),
            entropy_N=scores.entropy_N,
        )
        of_policy = policy_loss(self._objective, tokens)
        teacher_N = micro.field_values("teacher")
        if teacher_N is not None:
            logprobs_N = tokens.sampler_N if tokens.old_N is None else tokens.old_N
            assert logprobs_N is not None
            kl = (logprobs_N - teacher_N).sum(), float(len(teacher_N))
            # without a count, the sum of all micro-batches is logged
            teacher_totals: Totals = {"teacher_kl": kl, "teacher_tokens": (micro.tokens, 0.0)}
            of_policy = of_policy._replace(totals={**of_policy.totals, **teacher_totals})
        if scores.divergence_N is not None:
            of_policy = self._with_divergence(of_policy, scores.divergence_N, micro)
        return (
            of_policy
            if self._objective.critic is None
            else self._with_critic(of_policy, scores, micro, variance_explained)
        )

    def _with_divergence(self, of_policy: Loss, divergence_N: Tensor, micro: _MicroBatch) -> Loss:
        """The loss with the teacher's divergence, averaged over tokens as the policy's own loss is."""
        options = self._options.teacher
        assert options is not None
        total = options.coef * (micro.rows.spread(micro.weight_R) * divergence_N).sum()
        total_loss = of_policy.sum + total
        mean = divergence_N.sum(), float(len(divergence_N))
        return Loss(total_loss, {**of_policy.totals, "loss": (total_loss, micro.share), "teacher_divergence": mean})

    def _with_critic(self, of_policy: Loss, scores: Scores, micro: _MicroBatch, variance_explained: float) -> Loss:
        old_N, returns_N, critic = micro.field_values("values"), micro.field_values("returns"), self._objective.critic
        assert scores.values_N is not None and old_N is not None and returns_N is not None and critic is not None
        values = Values(
            values_N=scores.values_N,
            old_N=old_N,
            returns_N=returns_N,
            rows=micro.rows,
            weight_R=micro.weight_R,
            share=micro.share,
        )
        of_critic, count = value_loss(critic, values), float(len(returns_N))
        total_loss = of_policy.sum + critic.loss_coef * of_critic.sum
        totals = {
            **of_policy.totals,
            **of_critic.totals,
            "loss": (total_loss, micro.share),
            "explained_variance": (variance_explained * count, count),
        }
        return Loss(total_loss, totals)

    def sampler_N(self, packed: MicroBatch) -> Tensor:
        """The sampler's logprobs of a micro-batch's tokens."""
        segments = cast(Sequence[SampledSegment], packed.segments)
        logprobs = [value for segment in segments for value in segment.sampler]
        return on_device(torch.tensor(logprobs), packed.token_ids_T.device)

    @property
    def _needs_trainer_logprobs(self) -> bool:
        """Whether the loss needs the trainer's logprobs from before the first of several updates."""
        objective = self._objective
        return self._updates != 1 and (objective.loss.anchor == "trainer" or objective.correction.kind != "none")

    def _with_learning_signal(self, rollouts: Sequence[RolloutSample]) -> list[RolloutSample]:
        groups = group_by_task(rollout for rollout in rollouts if rollout.trained)
        if self._options.shaping.skip_equal_groups:
            groups = [group for group in groups if has_learning_signal(self._options, group)]
        return [rollout for group in groups for rollout in group]


def _explained_variance(rollouts: Sequence[RolloutSample]) -> float:
    """The share of the returns' variance that the critic explained before this optimizer step."""
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    values_N = torch.tensor([value for segment in segments for value in segment.values or ()])
    returns_N = torch.tensor([value for segment in segments for value in segment.returns or ()])
    return explained_variance(values_N, returns_N)


class _MicroBatch:
    """The rollouts of a micro-batch, flat. like: a tensor with the device and dtype to use."""

    def __init__(self, packed: MicroBatch, token_weights: Sequence[TokenWeights], like: Tensor) -> None:
        self.rows = TokenRows(packed.sample_N, len(packed.samples))
        self._like = like
        self.weight_R = self._tensor([weights.token for weights in token_weights])
        self.share = sum(weights.share for weights in token_weights)
        self.tokens = float(sum(len(segment.token_ids) for segment in packed.segments))
        self._segments = packed.segments

    def field_values(self, name: str) -> Tensor | None:
        """A field of the segments, [N]; None if they do not have it."""
        segment_values = [values for segment in self._segments if (values := getattr(segment, name)) is not None]
        return self._tensor([value for values in segment_values for value in values]) if segment_values else None

    def _tensor(self, values: list[float]) -> Tensor:
        return on_device(torch.tensor(values, dtype=self._like.dtype), self._like.device)
