"""Networks beside a policy that reads images, a critic and a teacher: their outputs are those of Hugging Face's forward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import (
    IMAGE,
    SIDE,
    TEXT,
    hugging_face_inputs,
    hugging_face_logprobs,
    png,
    segment_with,
    write_image_model,
)
from torch import Tensor, nn
from transformers import AutoTokenizer

from ngym.errors import ConfigError, UsageError
from ngym.trainer.algorithms import Setup, policy_gradient, teacher
from ngym.trainer.data import samples
from ngym.trainer.engine import engine
from ngym.trainer.model import packing, policy
from ngym.trainer.recipe import objective, recipe, recipe_reader

pytestmark = pytest.mark.usefixtures("only_rank")
CPU = torch.device("cpu")
RED, BLUE, WIDE = png("red"), png("blue"), png("green", (2 * SIDE, SIDE))
READ = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "idefics3"]


def load(folder: Path) -> policy.Policy:
    model = recipe.ModelOptions(path=str(folder))
    return policy.load_policy(model, policy.load_tokenizer(model), 0)


def reader_of(trained: policy.TrainedNetwork) -> Any:
    assert not isinstance(trained.images, str), trained.images
    return trained.images


def conversations(reader: Any) -> list[samples.Segment]:
    """Two share an image and its prompt; one has two images; one has equal ids and another image; one has none."""
    return [
        segment_with(reader, [RED], [50, 51, 52]),
        segment_with(reader, [RED], [60, 61]),
        segment_with(reader, [BLUE], [50, 51, 52]),
        segment_with(reader, [RED, WIDE], [70, 71, 72, 73]),
        samples.Segment([40, 41, 42, 80, 81], [(2, 5)]),
    ]


def packed_with(segments: list[samples.Segment]) -> packing.MicroBatch:
    return packing.pack([samples.Sample((segment,)) for segment in segments], CPU)


def rollout(segment: samples.Segment, reward: float = 0.0) -> samples.RolloutSample:
    sampled = samples.SampledSegment(segment.token_ids, segment.spans, segment.images, sampler=[-1.0] * segment.trained)
    fields = {"components": {}, "truncated": False, "turns": 1, "tool_calls": 0, "tool_errors": 0}
    return samples.RolloutSample(segments=(sampled,), group="a", reward=reward, **fields)


@pytest.mark.parametrize("family", READ)
def test_a_critics_values_and_gradients_are_those_of_hugging_faces_forward(family: str, tmp_path: Path) -> None:
    reference = write_image_model(tmp_path, family)
    trained = load(tmp_path)
    reader = reader_of(trained)
    trained.critic = critic = policy.CriticNetwork(trained.network, None, reader)
    nn.init.normal_(critic.head.weight, std=0.1)
    packed = packed_with(conversations(reader))
    scores = trained(packed, policy.RequestedScores(logprobs=False, values=True))
    exact = torch.cat([hugging_face_values(reference, critic.head, reader, segment) for segment in packed.segments])
    torch.testing.assert_close(scores.values_N, exact, atol=1e-5, rtol=1e-4)
    scores.values_N.sum().backward()
    head = critic.head.weight.grad.clone()
    critic.head.weight.grad = None
    exact.sum().backward()
    torch.testing.assert_close(head, critic.head.weight.grad, atol=1e-5, rtol=1e-4)
    expected = dict(reference.base_model.named_parameters())
    decoder = {id(parameter) for parameter in critic.backbone.get_decoder().parameters()}
    for name, parameter in critic.backbone.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in decoder), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-3)
    assert all(parameter.grad is None for parameter in trained.network.parameters())


def hugging_face_values(network: Any, head: nn.Linear, reader: Any, segment: samples.Segment) -> Tensor:
    hidden_TH = network.base_model(**hugging_face_inputs(reader, segment), use_cache=False).last_hidden_state[0]
    places = [place - 1 for start, end in segment.spans for place in range(start, end)]
    values_N: Tensor = head(hidden_TH[places]).squeeze(1)
    return values_N


def test_a_critic_steps_with_its_policy_on_micro_batches_with_images_and_without(tmp_path: Path) -> None:
    write_image_model(tmp_path, "idefics3")
    found = []
    for changes in ({}, {"activation_checkpointing": True}, {"zero_stage": 2}):
        trained = load(tmp_path)
        reader = reader_of(trained)
        trained.critic = policy.CriticNetwork(trained.network, None, reader)
        nn.init.normal_(trained.critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        options = recipe.EngineOptions.model_validate({"zero_stage": 0, "precision": "fp32"} | changes)
        optimizing = recipe.OptimizerOptions(lr=1e-3, eps=1e-3, max_grad_norm=None)
        learner = engine.Engine(trained, recipe.Launch(0, 0, 1), options, optimizing)
        segments = conversations(reader)
        for part, last in ((segments[:3], False), (segments[4:], True)):
            scores = learner.scores(packed_with(part), policy.RequestedScores(values=True))
            assert scores.values_N is not None
            loss = (scores.values_N - 1).square().sum() - scores.logprobs_N.sum()
            learner.backward(loss, 11.0, last=last)
        learner.step(1.0)
        with torch.no_grad():
            found.append(learner.values(packed_with(segments)))
    for values_N in found[1:]:
        torch.testing.assert_close(values_N, found[0], atol=1e-5, rtol=1e-4)


def setup_of(folder: Path, source: dict[str, Any]) -> Setup:
    options = recipe.EngineOptions(zero_stage=0)
    learner = engine.Engine(load(folder), recipe.Launch(0, 0, 1), options, recipe.OptimizerOptions(lr=1e-3))
    words = [f"model.path={folder}", "evaluation=null", "algorithm.teacher.beta=null"]
    words += [f"algorithm.teacher.{key}={value}" for key, value in source.items()]
    read = recipe_reader.read_recipe(["distillation.yaml"], words)[0]
    return Setup(read, learner, AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    write_image_model(folder, "idefics3")
    return folder


@pytest.mark.parametrize("family", READ)
def test_a_teachers_logprobs_are_those_of_hugging_faces_forward(family: str, tmp_path: Path) -> None:
    write_image_model(tmp_path / "student", family)
    reference = write_image_model(tmp_path / "teacher", family, std=0.15)
    setup = setup_of(tmp_path / "student", {"path": tmp_path / "teacher"})
    algorithm = policy_gradient.create(setup)
    reader = reader_of(setup.engine.policy)
    rollouts = [rollout(segment) for segment in conversations(reader)]
    prepared: Any = algorithm.prepare(rollouts, setup.engine, 100)
    assert len(prepared) == 5
    for each, segment in zip(prepared, conversations(reader), strict=True):
        exact = hugging_face_logprobs(reference, reader, segment).tolist()
        assert each.segments[0].teacher == pytest.approx(exact, abs=1e-5)


def test_a_divergence_is_computed_from_the_teachers_whole_distributions(student: Path, tmp_path: Path) -> None:
    reference = write_image_model(tmp_path, "idefics3", std=0.15)
    setup = setup_of(student, {"path": tmp_path, "beta": 0.0})
    segment = segment_with(reader_of(setup.engine.policy), [RED, BLUE], [50, 51, 52])
    algorithm = policy_gradient.create(setup)
    found = setup.engine.scores(packed_with([segment]), algorithm.asks).divergence_N
    own, of_teacher = (
        network(**hugging_face_inputs(reader_of(setup.engine.policy), segment), use_cache=False).logits[0, -4:-1]
        for network in (write_image_model(tmp_path / "again", "idefics3"), reference)
    )
    expected = nn.functional.kl_div(own.log_softmax(-1), of_teacher.log_softmax(-1), reduction="none", log_target=True)
    assert found is not None
    torch.testing.assert_close(found, expected.sum(-1), atol=1e-5, rtol=1e-4)


def test_rows_with_images_are_refused_with_a_teacher_that_reads_them_in_another_way(tmp_path: Path) -> None:
    student, larger, moved = (tmp_path / name for name in ("student", "larger", "moved"))
    for folder in (student, larger, moved):
        write_image_model(folder, "qwen2_vl")
    change(larger / "preprocessor_config.json", size={"shortest_edge": 4 * SIDE**2, "longest_edge": 4 * SIDE**2})
    change(moved / "config.json", image_token_id=IMAGE + 1)
    expected = {
        larger: "an image of 64x96 has 20 placeholders there, and 6 with the policy",
        moved: f"the token of its images has the id {IMAGE + 1}, the policy's {IMAGE}",
        text_of(student): "the model reads text only",
    }
    for folder, reason in expected.items():
        setup = setup_of(student, {"path": folder})
        policy_gradient.create(setup)
        found = setup.engine.policy.images
        assert found == f"images are not supported with algorithm.teacher.path: {folder}: {reason}"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def text_of(folder: Path) -> Path:
    """A model of text with the same tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = folder.with_name("text")
    Qwen3ForCausalLM(Qwen3Config(**TEXT | {"vocab_size": len(tokenizer)})).save_pretrained(written)
    tokenizer.save_pretrained(written)
    return written


def test_a_teacher_checks_the_placeholders_of_each_image(student: Path) -> None:
    """Sizes of images are compared when it is loaded; those between them, when they come."""
    setup = setup_of(student, {"path": student})
    opened = teacher.open_teacher(setup, objective.TeacherSource(path=str(student)), 1.0)
    segment = segment_with(reader_of(setup.engine.policy), [RED], [50, 51])
    shorter = tuple(replace(image, places=image.places[1:]) for image in segment.images)
    with pytest.raises(UsageError, match="it has 4 placeholders for an image that has 3 in a rollout"):
        opened.logprobs(packed_with([replace(segment, images=shorter)]))


def test_rows_with_images_are_refused_with_a_teacher_on_a_server(student: Path) -> None:
    images = reader_of(load(student))
    server = teacher.Server("http://127.0.0.1:9", None, None)
    expected = "images are not supported with algorithm.teacher.url: http://127.0.0.1:9; name a checkpoint, with path"
    assert server.images_problem(images) == expected


def test_a_hint_moves_the_images_behind_it(student: Path) -> None:
    """Those of a tool's answer; an image of the question stays."""
    trained = load(student)
    reader, tokenizer = reader_of(trained), AutoTokenizer.from_pretrained(student)
    hint = teacher.Hint("look", tokenizer, as_parts=True)
    texts = ["<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|>", "\n<|im_start|>tool\n", "b"]
    asked, opening, answer, tool, last = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    first = range(len(asked), len(asked) + reader.count(RED))
    ids = [*asked, *[IMAGE] * len(first), *opening]
    spans = [(len(ids), len(ids) + len(answer))]
    ids += answer + tool
    second = range(len(ids), len(ids) + reader.count(BLUE))
    ids += [IMAGE] * len(second) + last
    spans.append((len(ids) - len(last), len(ids)))
    images = tuple(samples.PlacedImage.at(*each) for each in ((RED, first), (BLUE, second)))
    seen = hint.insert(rollout(samples.Segment(ids, spans, images))).segments[0]
    assert "look" in tokenizer.decode(seen.token_ids) and len(seen.token_ids) > len(ids)
    assert seen.images[0] == images[0] and seen.images[1].content == BLUE
    places = [place for place, token in enumerate(seen.token_ids) if token == IMAGE]
    assert places == [place for image in seen.images for place in image.places]


def test_a_reward_model_on_a_model_with_images_is_refused(student: Path) -> None:
    model = recipe.ModelOptions(path=str(student))
    with pytest.raises(ConfigError, match="a model of type idefics3 reads images; choose a model of text"):
        policy.load_reward_model(model, policy.load_tokenizer(model), 0)
