"""`model.train_vision`: the encoder of images and its projection are trained with the decoder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forked import ForkedCommand
from image_models import READ, SIDE, data_url, hugging_face_logprobs, png, segment_with, write_image_model
from paths import SUPPORT
from pydantic import ValidationError
from safetensors.torch import load_file
from trainer_service import new_policy, on_two_ranks, train
from transformers import AutoTokenizer

from ngym.trainer.data import samples
from ngym.trainer.engine import engine
from ngym.trainer.model import packing, policy
from ngym.trainer.recipe import recipe

CPU = torch.device("cpu")
RED, BLUE, WIDE = png("red"), png("blue"), png("green", (2 * SIDE, SIDE))
# Weights on which no vector of an image depends: what LLaVA computes after the layer that it uses.
LAST_NORM = ["model.vision_tower.post_layernorm.weight", "model.vision_tower.post_layernorm.bias"]
UNUSED = {"llava": LAST_NORM, "llava_next": LAST_NORM, "llava_onevision": LAST_NORM}


def load(folder: Path, **options: Any) -> policy.Policy:
    model = recipe.ModelOptions(path=str(folder), train_vision=True, **options)
    return policy.load_policy(model, policy.load_tokenizer(model), 0)


def reader_of(trained: policy.TrainedNetwork) -> Any:
    assert not isinstance(trained.images, str), trained.images
    return trained.images


def packed_with(segments: list[samples.Segment]) -> packing.MicroBatch:
    return packing.pack([samples.Sample((segment,)) for segment in segments], CPU)


@pytest.mark.parametrize("family", READ)
def test_the_gradient_of_an_image_that_several_attempts_share_is_their_sum(family: str, tmp_path: Path) -> None:
    reference = write_image_model(tmp_path, family)
    ours = load(tmp_path)
    unused = UNUSED.get(family, [])
    assert ours.unused_vision == unused
    reader = reader_of(ours)
    segments = [
        segment_with(reader, [RED], [50, 51, 52]),
        segment_with(reader, [RED], [60, 61]),
        segment_with(reader, [RED], [70]),
        segment_with(reader, [BLUE], [50, 51, 52]),
        segment_with(reader, [RED, WIDE], [70, 71, 72, 73]),
        samples.Segment([40, 41, 42, 80, 81], [(2, 5)]),
    ]
    packed = packed_with(segments)
    assert len(packed.images) == 3
    ours.logprobs(packed).sum().backward()
    reference.zero_grad()
    torch.cat([hugging_face_logprobs(reference, reader, segment) for segment in packed.segments]).sum().backward()
    own = dict(ours.network.named_parameters())
    for name, parameter in reference.named_parameters():
        assert (own[name].grad is None) == (name in unused), name
        if own[name].grad is not None:
            scale = max(1.0, float(parameter.grad.abs().max()))
            torch.testing.assert_close(own[name].grad, parameter.grad, atol=1e-4 * scale, rtol=1e-3)


OPTIONS: list[dict[str, Any]] = [{"zero_stage": stage} for stage in range(4)]
OPTIONS += [{"zero_stage": 0, "activation_checkpointing": True}, {"zero_stage": 1, "precision": "bf16"}]
TOGETHER: list[dict[str, Any]] = [{"sequence_parallel": 2, **OPTIONS[place]} for place in (0, 3, 4)]


class Steps(NamedTuple):
    """steps: loss and gradient norm of each."""

    steps: list[list[float]]
    weights: dict[str, torch.Tensor]


def read_steps(folder: Path, place: int) -> Steps:
    weights = load_file(folder / f"{place}.safetensors")
    return Steps(json.loads((folder / f"{place}.json").read_text()), weights)


@pytest.mark.parametrize(
    ("family", "options", "together"), [("idefics3", OPTIONS, TOGETHER), ("qwen3_vl", OPTIONS[:1], TOGETHER[:1])]
)
def test_steps_on_two_ranks_of_which_one_has_no_images_are_those_of_one(
    family: str, options: list[dict[str, Any]], together: list[dict[str, Any]], tmp_path: Path
) -> None:
    """And those of micro-batches with images and without on one rank, with any ZeRO stage; and of two ranks that share
    the tokens.
    """
    write_image_model(tmp_path / "policy", family, num_key_value_heads=2)
    [file] = (tmp_path / "policy").glob("*.safetensors")
    start = load_file(file)
    for ranks in ("one", "two"):
        (tmp_path / ranks).mkdir()
    words = [str(SUPPORT / "vision_steps_on_ranks.py"), str(tmp_path / "policy")]
    every = list(map(json.dumps, options + together))
    alone = [ForkedCommand([*words, str(tmp_path / "one"), *every[: len(options)]], tmp_path, os.environ)]
    for processes in (alone, on_two_ranks(tmp_path, [*words, str(tmp_path / "two"), *every])):
        outputs = [process.communicate(timeout=600)[0][-3000:] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), outputs
    first = read_steps(tmp_path / "one", 0)
    vision = [name for name in start if "vision" in name or "visual" in name or "connector" in name]
    assert len(vision) > 20
    assert not any(torch.equal(first.weights[name], start[name]) for name in vision)
    both = [("one", place, each) for place, each in enumerate(options)]
    both += [("two", place, each) for place, each in enumerate(options + together)]
    for ranks, place, each in both:
        found, bound = read_steps(tmp_path / ranks, place), 2e-2 if "precision" in each else 1e-5
        for actual, expected in zip(found.steps, first.steps, strict=True):
            assert actual == pytest.approx(expected, rel=bound), (ranks, each)
        for name, tensor in first.weights.items():
            assert (found.weights[name] - tensor).abs().max() < bound, (ranks, each, name)


def learner_of(trained: policy.Policy, optimizing: dict[str, Any], **options: Any) -> engine.Engine:
    engine_options = recipe.EngineOptions.model_validate({"zero_stage": 0, "precision": "fp32"} | options)
    return engine.Engine(trained, recipe.Launch(0, 0, 1), engine_options, recipe.OptimizerOptions(**optimizing))


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize(("number", "calls"), [(False, [1, 1]), (True, [2, 2]), (4, [2, 1])])
def test_the_encoders_layers_are_checkpointed_after_the_decoders(
    number: bool | int, calls: list[int], tmp_path: Path
) -> None:
    """This one has two layers, and the decoder three."""
    write_image_model(tmp_path, "idefics3")
    trained = load(tmp_path)
    learner = learner_of(trained, {"lr": 1e-3}, activation_checkpointing=number)
    counts = [0, 0]
    for place, layer in enumerate(trained.network.model.vision_model.encoder.layers):
        # recomputation ends with the last tensor that is needed, within this module
        layer.mlp.register_forward_pre_hook(lambda *_, place=place: counts.__setitem__(place, counts[place] + 1))
    packed = packed_with([segment_with(reader_of(trained), [RED], [50, 51])])
    learner.backward(-learner.logprobs(packed).sum(), 2.0, last=True)
    assert counts == calls


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_a_trained_encoder_is_saved_and_continues_from_a_checkpoint(
    family: str, optimizer: str, tmp_path: Path
) -> None:
    """Muon steps matrices only, and an encoder begins with a convolution."""
    reference = write_image_model(tmp_path / "start", family)
    optimizing = {"name": optimizer, "lr": 1e-2}
    first = learner_of(load(tmp_path / "start"), optimizing)
    reader = reader_of(first.policy)
    packed = packed_with([segment_with(reader, [RED, WIDE], [50, 51]), segment_with(reader, [BLUE], [60])])

    def step(learner: engine.Engine) -> None:
        learner.backward(-learner.logprobs(packed).sum(), 3.0, last=True)
        learner.step(1.0)

    step(first)
    (tmp_path / "state").mkdir()
    state = first.save_state(tmp_path / "state")
    again = learner_of(load(tmp_path / "start"), optimizing)
    again.load_state(tmp_path / "state", state)
    for learner in (first, again):
        step(learner)
    expected = first.logprobs(packed).detach()
    torch.testing.assert_close(again.logprobs(packed).detach(), expected)
    first.save(tmp_path / "end", AutoTokenizer.from_pretrained(tmp_path / "start"))
    saved = load(tmp_path / "end")
    torch.testing.assert_close(saved.logprobs(packed).detach(), expected, atol=1e-5, rtol=1e-4)
    start, end = reference.state_dict(), saved.network.state_dict()
    unchanged = [name for name, parameter in reference.named_parameters() if torch.equal(start[name], end[name])]
    assert unchanged == UNUSED.get(family, [])


def test_a_run_whose_first_batch_has_no_images_trains_the_encoder(tmp_path: Path) -> None:
    """Its check that each weight gets a gradient passes."""
    write_image_model(tmp_path / "policy", "llava")
    parts = [{"type": "image_url", "image_url": {"url": data_url(RED)}}, {"type": "text", "text": "what?"}]
    questions = ["a", "b", parts, parts]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "red"}]}
        for question in questions
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["sft.yaml", "output=run", "model.from_scratch=null", "model.tokenizer=null", "data.made_by=[]"]
    words += [f"model.path={tmp_path / 'policy'}", f"data.path={tmp_path / 'rows.jsonl'}", "batch_size=2", "epochs=2"]
    output, _ = (process := train(tmp_path, [*words, "model.train_vision=true"])).communicate(timeout=600)
    assert process.returncode == 0, output
    assert "no image depends on these weights, which stay as they are: model.vision_tower.post_layernorm" in output
    first, last = (load(tmp_path / name).network.state_dict() for name in ("policy", "run/policy"))
    unchanged = [name for name in first if torch.equal(first[name], last[name])]
    assert [name for name in unchanged if "position_ids" not in name] == UNUSED["llava"]


def test_what_trains_no_encoder_is_refused(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ValidationError, match="an adapter is trained in the decoder only"):
        recipe.ModelOptions(path=str(tmp_path), lora=recipe.LoraOptions(), train_vision=True)
    words = ["sft.yaml", "output=run", "model.train_vision=true"]
    output, _ = (process := train(tmp_path, words)).communicate(timeout=600)
    assert process.returncode == 2 and "a model from scratch reads text only" in output
    text = new_policy(root, tmp_path / "text")
    words += ["model.from_scratch=null", "model.tokenizer=null", f"model.path={text}"]
    output, _ = (process := train(tmp_path, words)).communicate(timeout=600)
    assert process.returncode == 2 and "model.train_vision: the model reads text only; set it to false" in output
