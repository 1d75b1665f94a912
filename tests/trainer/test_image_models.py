"""Models that read images: log-probabilities and gradients are those of Hugging Face's forward, and what cannot be
trained is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import (
    IMAGE,
    READ,
    SIDE,
    SPECIAL,
    TEMPLATE,
    TEXT,
    data_url,
    hugging_face_logprobs,
    png,
    segment_with,
    write_image_model,
)
from transformers import AutoTokenizer
from vllm_service import TAGS, write_tokenizer

from ngym.errors import ConfigError, UsageError
from ngym.rollout import image_digest
from ngym.schema import Json
from ngym.trainer.data import chat_dataset, images, samples
from ngym.trainer.engine import engine
from ngym.trainer.model import images as network_images
from ngym.trainer.model import lora, packing, policy
from ngym.trainer.recipe import recipe

CPU = torch.device("cpu")
RED, BLUE, WIDE = png("red"), png("blue"), png("green", (2 * SIDE, SIDE))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    return {}


@pytest.fixture
def checkpoint(
    request: pytest.FixtureRequest, checkpoints: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """The folder of a family's checkpoint, and its network with Hugging Face's own attention."""
    family = getattr(request, "param", "idefics3")
    if family not in checkpoints:
        folder = tmp_path_factory.mktemp(family)
        checkpoints[family] = folder, write_image_model(folder, family)
    found: tuple[Path, Any] = checkpoints[family]
    return found


def load(folder: Path, **options: Any) -> policy.Policy:
    model = recipe.ModelOptions(path=str(folder), **options)
    return policy.load_policy(model, policy.load_tokenizer(model), 0)


def reader_of(trained: policy.Policy) -> network_images.ImageReader:
    assert not isinstance(trained.images, str), trained.images
    return trained.images


@pytest.mark.parametrize("checkpoint", READ, indirect=True)
def test_packed_segments_with_images_have_the_logprobs_and_gradients_of_hugging_faces_forward(
    checkpoint: tuple[Path, Any],
) -> None:
    folder, reference = checkpoint
    ours = load(folder)
    reader = reader_of(ours)
    segments = [
        segment_with(reader, [RED], [50, 51, 52]),
        segment_with(reader, [RED], [60, 61]),  # with the prompt of the first one, which is computed once
        segment_with(reader, [BLUE], [50, 51, 52]),  # equal ids, another image
        segment_with(reader, [RED, WIDE], [70, 71, 72, 73]),
        samples.Segment([40, 41, 42, 80, 81], [(2, 5)]),
    ]
    packed = packing.pack([samples.Sample((segment,)) for segment in segments], CPU)
    assert len(packed.images) == 3  # red once
    together = ours.logprobs(packed)
    alone = torch.cat([hugging_face_logprobs(reference, reader, segment) for segment in packed.segments])
    torch.testing.assert_close(together, alone, atol=5e-5, rtol=1e-4)
    reference.zero_grad()
    together.sum().backward()
    alone.sum().backward()
    own = dict(ours.network.named_parameters())
    trained = {name for name, parameter in own.items() if parameter.grad is not None}
    decoder = {id(each) for each in ours.network.get_decoder().parameters()} | {id(ours.network.lm_head.weight)}
    assert trained == {name for name, parameter in own.items() if id(parameter) in decoder}
    for name, parameter in reference.named_parameters():
        if name in trained:
            assert torch.allclose(own[name].grad, parameter.grad, atol=5e-4, rtol=1e-3), name


def test_images_of_a_family_whose_decoder_reads_them_in_another_way_are_refused_and_its_text_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3: the tokens of an image see each other. Its own processor needs torchvision."""

    class Processor:
        def __init__(self, tokenizer: Any) -> None:
            from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

            self.image_processor = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})

        def __call__(self, **inputs: Any) -> Json:
            return {"input_ids": torch.full((1, 4), IMAGE)}

    reference = write_image_model(tmp_path, "gemma3")
    assert str(load(tmp_path).images).startswith(f"the image processor of {tmp_path} cannot be loaded: ")
    monkeypatch.setattr(network_images, "_load_processor", lambda path, images_only: Processor(path))
    trained = load(tmp_path)
    assert trained.images == "images of gemma3 are not supported: its decoder reads them in another way than text"
    segment = samples.Segment([40, 41, 42, 80, 81, 82, 83, 84, 85], [(2, 9)])
    ids = torch.tensor([segment.token_ids])
    exact = reference(input_ids=ids).logits[0, 1:-1].log_softmax(-1).gather(1, ids[0, 2:, None]).squeeze(1)
    packed = packing.pack([samples.Sample((segment,))], CPU)
    torch.testing.assert_close(trained.logprobs(packed), exact, atol=5e-5, rtol=1e-4)


def test_where_the_encoder_must_compute_something_texts_keep_their_logprobs(checkpoint: tuple[Path, Any]) -> None:
    """As on ranks that share all weights (ZeRO-3), of which others may have images in their micro-batches."""
    trained = load(checkpoint[0])
    answers = [[80, 81], [20, 21, 22], [90]]
    segments = [samples.Segment([40, 41, 42, *answer], [(3, 3 + len(answer))]) for answer in answers]
    packed = packing.pack([samples.Sample((segment,)) for segment in segments], CPU)
    alone = trained.logprobs(packed)
    calls: list[Any] = []
    trained.network.model.vision_model.register_forward_hook(lambda *_: calls.append(1))
    trained.always_encodes = True
    torch.testing.assert_close(trained.logprobs(packed), alone, atol=1e-6, rtol=1e-5)
    assert len(calls) == 1


def test_an_image_is_prepared_once_while_there_is_room(
    checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load(checkpoint[0])
    reader = reader_of(trained)
    opened: list[bytes] = []
    open_image = network_images.open_image
    monkeypatch.setattr(network_images, "open_image", lambda content: (opened.append(content), open_image(content))[1])
    packed = packing.pack([samples.Sample((segment_with(reader, [RED, WIDE], [50, 51]),))], CPU)
    assert sorted(opened) == sorted([RED, WIDE])  # their sizes in tokens
    first, again = trained.logprobs(packed), trained.logprobs(packed)
    assert torch.equal(first, again) and len(opened) == 4
    kept = network_images._PreparedImages(100)
    for number in range(3):
        kept.add(bytes([number]), {"pixel_values": torch.zeros(10)})
        assert kept.get(b"\0") is not None
    assert kept.get(b"\1") is None and kept.get(b"\2") is not None  # 40 bytes each; the first one was used


def row(contents: list[bytes], segments: list[Json], output: list[Json] | None = None, reward: float = 1.0) -> Json:
    parts = [{"type": "input_image", "image_url": data_url(content)} for content in contents]
    question = {"role": "user", "content": [*parts, {"type": "input_text", "text": "what is this?"}]}
    return {
        "responses_create_params": {"input": [question]},
        "response": {"output": output or []},
        "reward": reward,
        "ng": {"segments": segments, "turns": len(segments), "policy_version": [0]},
    }


def segment_row(segment: samples.Segment, contents: list[bytes]) -> Json:
    return {
        "token_ids": segment.token_ids,
        "mask": [list(span) for span in segment.spans],
        "logprobs": [-1.0] * segment.trained,
        "policy_version": [[*segment.spans[0], 0]],
        "images": [image_digest(data_url(content)) for content in contents],
    }


def test_a_rollouts_segments_get_their_own_images(checkpoint: tuple[Path, Any]) -> None:
    """The second call of this rollout got only a tool's image, as from an agent that keeps the last screenshot."""
    reader = reader_of(load(checkpoint[0]))
    shown = {"type": "function_call_output", "output": [{"type": "input_image", "image_url": data_url(BLUE)}]}
    both = [(segment_with(reader, [each], [50, 51]), [each]) for each in (RED, BLUE)]
    line = row([RED], [segment_row(*each) for each in both], [shown])
    assert samples.problem(line, 1.0, images=reader) is None
    result = samples.ReadRollouts()
    samples.add_row(line, result, reader)
    [rollout] = result.rollouts
    assert [segment.images for segment in rollout.segments] == [segment.images for segment, _ in both]
    packed = packing.pack([rollout], CPU)
    assert packed.images == tuple(image.content for segment in packed.segments for image in segment.images)


def test_a_segment_ends_with_a_placeholder_that_the_policy_sampled(checkpoint: tuple[Path, Any]) -> None:
    folder, reference = checkpoint
    ours = load(folder)
    reader = reader_of(ours)
    written = segment_with(reader, [RED], [50, IMAGE, 51, 52])
    result = samples.ReadRollouts()
    line = row([RED], [segment_row(written, [RED])])
    assert samples.problem(line, 1.0, images=reader) is None
    samples.add_row(line, result, reader)
    [segment] = result.rollouts[0].segments
    assert segment.token_ids == written.token_ids[:-2] and segment.trained == 2 == len(segment.sampler)
    packed = packing.pack(result.rollouts, CPU)
    before = samples.Segment(segment.token_ids[:-1], [(len(segment.token_ids) - 2, len(segment.token_ids) - 1)])
    exact = hugging_face_logprobs(reference, reader, samples.Segment(before.token_ids, before.spans, segment.images))
    torch.testing.assert_close(ours.logprobs(packed)[:1], exact, atol=5e-5, rtol=1e-4)


def broken(line: Json, **changes: Any) -> Json:
    copy: Json = json.loads(json.dumps(line))
    copy["ng"]["segments"][0] |= changes
    return copy


def test_rows_whose_images_are_not_those_of_the_model_are_refused(checkpoint: tuple[Path, Any]) -> None:
    reader = reader_of(load(checkpoint[0]))
    segment = segment_with(reader, [RED], [50, 51])
    line = row([RED], [segment_row(segment, [RED])])
    where = r"responses_create_params.input[0]"
    url = {"type": "input_image", "image_url": "https://images.example.org/a.png"}
    text = [segment_row(samples.Segment([40, 41, 50], [(2, 3)]), [])]
    remote = row([], text, [{"role": "user", "content": [url]}])
    sound = row([], text, [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}])
    unreadable = row([b"GIF89a"], [segment_row(segment, [b"GIF89a"])])
    script = row([b"%!PS-Adobe-3.0 EPSF-3.0"], [segment_row(segment, [b"%!PS-Adobe-3.0 EPSF-3.0"])])
    found = {
        f"{where} has a part of type 'input_image': the model reads text only": samples.problem(line, 1.0),
        "a segment has 4 image placeholders, and the model server did not record the images of the call": broken(
            line, images=[]
        ),
        "a segment has 2 image placeholders, and the model server did not record": row(
            [], [segment_row(samples.Segment([40, IMAGE, IMAGE, 41, 50], [(4, 5)]), [])]
        ),
        "is not in the row: its agent must return the images": broken(line, images=[image_digest("other")]),
        "a segment has 8 image placeholders, but its images need 4:": broken(
            line, token_ids=[IMAGE] * 4 + segment.token_ids, mask=[[place + 4 for place in segment.spans[0]]]
        ),
        "the trainer fetches nothing: put images into rows as data: URLs": remote,
        "response.output[0] has a part of type 'input_audio'": sound,
        "response.output[0] has the text '<image>', which the model reads as the place of an image: remove it": row(
            [],
            [segment_row(samples.Segment([40, IMAGE, 41, 50], [(3, 4)]), [])],
            [{"type": "function_call_output", "call_id": "c", "output": "an <image> tag"}],
        ),
        "an image of 6 bytes cannot be read": unreadable,
        "an image of 23 bytes cannot be read": script,
    }
    for message, given in found.items():
        problem = given if isinstance(given, str) else samples.problem(given, 1.0, images=reader)
        assert problem is not None and message in problem, problem


def test_a_task_whose_image_is_not_an_image_file_is_refused_before_it_is_drawn(checkpoint: tuple[Path, Any]) -> None:
    reader = reader_of(load(checkpoint[0]))
    where = "responses_create_params.input[0]"
    cut = data_url(RED)[:-1]
    found = {
        f"{where}: an image of 26 bytes cannot be read: cannot identify image file": [b"<svg xmlns='x' width='9'/>"],
        f"{where}: an image of 0 bytes cannot be read: cannot identify image file": [b""],
        "": [RED, WIDE],
    }
    for message, contents in found.items():
        problem = images.task_media_problem(row(contents, []), reader)
        assert (problem or "") == message
    image = {"type": "input_image", "image_url": cut}
    problem = images.task_media_problem(row([], [], [{"role": "user", "content": [image]}]), reader)
    assert problem is not None and "has a data: URL that cannot be decoded" in problem
    named = row([], [], [{"role": "user", "content": "<image> is a tag"}])["response"]["output"]
    problem = images.task_media_problem({"responses_create_params": {"input": named}}, reader)
    assert problem is not None and problem.startswith(f"{where} has the text '<image>', which the model reads as")
    problem = images.task_media_problem(row([RED], []), images.TEXT_ONLY)
    assert problem is not None and problem.endswith("the model reads text only")


@pytest.mark.parametrize("checkpoint", ["qwen2_5_vl", "llava", "idefics3"], indirect=True)
def test_demonstrations_have_the_placeholders_of_their_images(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = checkpoint
    reader, tokenizer = reader_of(load(folder)), AutoTokenizer.from_pretrained(folder)

    def asked(*contents: bytes) -> Json:
        urls = [{"type": "image_url", "image_url": {"url": data_url(content)}} for content in contents]
        return {"role": "user", "content": [*urls, {"type": "text", "text": "what?"}]}

    turns = [asked(RED), {"role": "assistant", "content": "red"}, asked(WIDE, RED)]
    turns.append({"role": "assistant", "content": "both"})
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    [sample] = chat_dataset.read_demonstrations(path, tokenizer, reader)
    [segment] = sample.segments  # the second turn continues the first
    assert [image.content for image in segment.images] == [RED, WIDE, RED]
    assert [len(image.places) for image in segment.images] == [reader.count(each) for each in (RED, WIDE, RED)]
    assert [tokenizer.decode(segment.token_ids[start:end]) for start, end in segment.spans] == [
        "red<|im_end|>",
        "both<|im_end|>",
    ]
    places = [place for place, token in enumerate(segment.token_ids) if token == IMAGE]
    assert places == [place for image in segment.images for place in image.places]
    whole = tokenizer.apply_chat_template(
        [{**turn, "content": parts_of(turn["content"])} for turn in turns], tokenize=False
    )
    assert segment.token_ids == reader.token_ids(whole, [RED, WIDE, RED])[: len(segment.token_ids)]


def parts_of(content: Any) -> list[Json]:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [{"type": "image"} if part["type"] == "image_url" else part for part in parts]


def test_demonstrations_with_images_that_cannot_be_trained_are_refused(
    checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, _ = checkpoint
    reader, tokenizer = reader_of(load(folder)), AutoTokenizer.from_pretrained(folder)
    image = {"type": "image_url", "image_url": {"url": data_url(RED)}}
    answer = {"role": "assistant", "content": "red"}
    cases: dict[str, tuple[list[Json], images.Images]] = {
        "a part of type 'image_url': the model reads text only": (
            [{"role": "user", "content": [image]}, answer],
            images.TEXT_ONLY,
        ),
        "an image of the assistant: the model writes text only": (
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": [image]}],
            reader,
        ),
        "the assistant's text has the image marker <image>": (
            [{"role": "user", "content": [image]}, {"role": "assistant", "content": "see <image>"}],
            reader,
        ),
        "the chat template writes 1 image markers before it for 0 images": (
            [{"role": "user", "content": "<image>"}, answer],
            reader,
        ),
        "put images into rows as data: URLs": (
            [{"role": "user", "content": [{"type": "image", "image": "http://a.example/b.png"}]}, answer],
            reader,
        ),
    }
    for message, (messages, reads) in cases.items():
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"messages": messages}) + "\n")
        with pytest.raises(UsageError) as caught:
            chat_dataset.read_demonstrations(path, tokenizer, reads)
        assert message in str(caught.value)


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("base_4bit", [None, "nf4"])
def test_a_trained_model_is_saved_with_its_processor_and_an_untouched_encoder(
    checkpoint: tuple[Path, Any], tmp_path: Path, base_4bit: str | None
) -> None:
    if base_4bit is not None:
        pytest.importorskip("bitsandbytes")
    folder, reference = checkpoint
    trained = load(folder, lora=recipe.LoraOptions.model_validate({"rank": 4, "base_4bit": base_4bit}))
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    options = recipe.EngineOptions.model_validate({"zero_stage": 1, "precision": "fp32"})
    learner = engine.Engine(trained, launch, options, recipe.OptimizerOptions(lr=0.1))
    reader = reader_of(trained)
    packed = packing.pack([samples.Sample((segment_with(reader, [RED], [50, 51]),))], CPU)
    before = learner.logprobs(packed).detach()
    learner.backward(-learner.logprobs(packed).sum(), 2.0, last=True)
    learner.step(1.0)
    after = learner.logprobs(packed).detach()
    assert not torch.equal(before, after)
    learner.save(tmp_path / "policy", AutoTokenizer.from_pretrained(folder))
    again = load(tmp_path / "policy")
    torch.testing.assert_close(again.logprobs(packed), after, atol=1e-5, rtol=1e-4)
    assert reader_of(again).count(WIDE) == reader.count(WIDE)
    merged, start = again.network.state_dict(), reference.state_dict()
    changed = {name for name, tensor in start.items() if not torch.equal(merged[name], tensor)}
    assert changed and all(".text_model.layers." in name for name in changed)
    adapted = {name for name, module in trained.network.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {name.removesuffix(".weight") for name in changed}


@pytest.mark.usefixtures("only_rank")
def test_an_adapter_is_read_by_peft_beside_an_encoder_with_layers_of_the_same_names(
    checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    folder, _ = checkpoint
    options = recipe.LoraOptions(rank=4)
    trained = load(folder, lora=options)
    for name, parameter in trained.network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tensors = {tensor.name: tensor.compute() for tensor in lora.adapter_tensors(trained.network)}
    (tmp_path / "adapter").mkdir()
    lora.write_adapter(tmp_path / "adapter", tensors, options, str(folder), whole_names=True)
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    reader = reader_of(trained)
    segment = segment_with(reader, [RED], [50, 51])
    packed = packing.pack([samples.Sample((segment,))], CPU)
    exact = hugging_face_logprobs(adapted, reader, segment)
    torch.testing.assert_close(trained.logprobs(packed), exact, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("only_rank")
def test_activation_checkpointing_and_bf16_leave_the_encoder_alone(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    found = []
    for changes in ({}, {"activation_checkpointing": True}, {"precision": "bf16", "zero_stage": 1}):
        options = recipe.EngineOptions.model_validate({"zero_stage": 0, "precision": "fp32"} | changes)
        learner = engine.Engine(load(folder), launch, options, recipe.OptimizerOptions(lr=1e-3))
        trained = learner.policy
        assert isinstance(trained, policy.Policy)
        packed = packing.pack([samples.Sample((segment_with(reader_of(trained), [RED, WIDE], [50, 51]),))], CPU)
        loss = -learner.logprobs(packed).sum()
        learner.backward(loss, 2.0, last=True)
        found.append((float(loss.detach()), learner.step(1.0).grad_norm))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=0.05)


def test_a_model_whose_decoder_computes_logits_is_refused(tmp_path: Path) -> None:
    """Llama 3.2 Vision: its decoder attends to images in layers of its own."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": SIDE, "patch_size": 14, "max_num_tiles": 2, "vision_output_dim": 64}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}
    ids = write_tokenizer(tmp_path, TEMPLATE, SPECIAL, TAGS)
    text = TEXT | {"vocab_size": ids, "cross_attention_layers": [1]}
    config = MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    MllamaForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^model.path: mllama: its decoder returns logits, not hidden states"):
        load(tmp_path)


def test_a_model_that_reads_other_media_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen2AudioConfig

    tokenizer: Any = None  # not used before
    Qwen2AudioConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a model of type qwen2_audio also reads media other than images"):
        policy.load_policy(recipe.ModelOptions(path=str(tmp_path)), tokenizer, 0)
