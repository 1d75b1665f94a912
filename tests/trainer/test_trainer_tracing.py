"""The trainer's own spans, in an OTLP/HTTP receiver."""

from __future__ import annotations

from pathlib import Path

import pytest
from otlp_receiver import receiver
from trainer_service import SHAPE
from transformers import AutoTokenizer
from waiting import wait_until

from ngym.telemetry import tracing
from ngym.trainer import loop
from ngym.trainer.algorithms import sft
from ngym.trainer.data import samples
from ngym.trainer.engine import engine, sanity_checks
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import recipe


@pytest.mark.usefixtures("only_rank")
def test_each_step_of_the_trainer_is_a_span_with_its_loss(root: Path) -> None:
    history: list[dict[str, float]] = []
    with receiver() as received:
        tokenizer = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
        shape = recipe.ModelOptions(from_scratch=SHAPE, tokenizer="data/tiny_policy/tokenizer")
        options, optimizing = recipe.EngineOptions(zero_stage=0, precision="fp32"), recipe.OptimizerOptions(lr=1e-2)
        policy = model.load_policy(shape, tokenizer, 0)
        learner = engine.Engine(policy, recipe.Launch(rank=0, local_rank=0, ranks=1), options, optimizing)
        batch = samples.Batch([[samples.Sample((samples.Segment(list(range(5, 35)), [(5, 30)]),))]])
        tracing.begin(tracing.Destination(received.url), "ng_train")
        try:
            loop.train(
                learner,
                sft.Sft(),
                [batch, batch],
                10_000,
                lambda step: 1.0,
                sanity_checks.NanGuard(None, 3),
                lambda step, values: history.append(values),
            )
        finally:
            tracing.end()
        wait_until(lambda: len(received.spans_named("train step")) >= 2)  # it does not wait for a slow receiver
    steps = received.spans_named("train step")
    assert [(span.service, span.parent, span.failed) for span in steps] == [("ng_train", "", False)] * 2
    assert [span.attributes["ngym.step"] for span in steps] == [1, 2]
    assert [span.attributes["ngym.loss"] for span in steps] == pytest.approx([values["loss"] for values in history])
    assert len({span.trace for span in steps}) == 2
