"""Images in conversations with models/vllm: each call gets its images, and its log-probabilities are the
checkpoint's."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vllm_service import Server, Servers, user

pytest.importorskip("vllm")

from image_models import IMAGE, SPECIAL, data_url, png, write_image_model
from trainer_service import metrics_of, train

from ngym.rollout import image_digest
from ngym.trainer.model.images import FORMATS, open_image

TOKENS = 4  # of an image
CONTEXT = 512
BIAS = -100.0  # a random policy would sometimes sample the placeholder or the end of a turn
NO_SPECIAL = {str(token): BIAS for token in range(len(SPECIAL))}


def picture(colour: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(png(colour))}


def logprobs(
    network: Any, folder: Path, colours: list[str], ids: list[int], first: int, bias: float = BIAS
) -> list[float]:
    import torch
    from transformers import AutoProcessor

    images = [open_image(png(colour)) for colour in colours]
    prepare = AutoProcessor.from_pretrained(folder).image_processor
    pixels = prepare(images, return_tensors="pt") if images else {}
    with torch.no_grad():
        logits_TV = network(input_ids=torch.tensor([ids]), **pixels).logits[0, first - 1 : -1]
    logits_TV[:, : len(SPECIAL)] += bias
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0].tolist()


def test_images_reach_the_model_in_every_turn_and_after_calls_that_do_not_generate(tmp_path: Path, root: Path) -> None:
    folder = tmp_path / "policy"
    network = write_image_model(folder, "idefics3", std=0.2)
    with Servers(tmp_path, root, {"policy": {"options": {"model": str(folder)}}}) as servers:
        server = servers["policy"]
        sampling = {"max_output_tokens": 12, "logit_bias": NO_SPECIAL}
        history, colours, known = [], ["red", "green", "blue"], []
        for turn, colour in enumerate(colours):
            history.append(user([picture(colour), {"type": "input_text", "text": "what is this?"}]))
            answer = server.answer(input=history, **sampling)
            said = answer["output"][-1]
            prompt, sampled = said["prompt_token_ids"], said["generation_token_ids"]
            assert prompt.count(IMAGE) == TOKENS * (turn + 1) and prompt[: len(known)] == known
            known = prompt + sampled
            exact = logprobs(network, folder, colours[: turn + 1], prompt + sampled, len(prompt))
            assert said["generation_log_probs"] == pytest.approx(exact, abs=1e-4)
            assert answer["ng"]["images"] == [digest(colour) for colour in colours[: turn + 1]]
            history += answer["output"]
        _captured_calls(server, sampling)
        _after_calls_that_do_not_generate(server)
        _files_that_cannot_be_read(server)


def test_the_trainer_opens_each_file_that_vllm_opens_with_the_same_pixels() -> None:
    """Also damaged ones: a model that has seen them is trained on what it has seen."""
    from vllm.multimodal.image import ALLOWED_IMAGE_FORMATS
    from vllm.multimodal.media.image import ImageMediaIO

    assert set(FORMATS) == set(ALLOWED_IMAGE_FORMATS)
    files = odd_files()
    assert len(files) > 10
    for name, content in files.items():
        assert open_image(content).tobytes() == ImageMediaIO().load_bytes(content).media.tobytes(), name


def test_a_pushed_encoder_is_used_for_images_that_were_computed_before(tmp_path: Path, root: Path) -> None:
    """vLLM keeps the vectors of images that it has seen, and the keys and values of their placeholders."""
    from ngym.trainer.weights import push, replica

    folder, text = tmp_path / "policy", [40, 41, 42, 50, 51, 52]
    network = write_image_model(folder, "idefics3", std=0.2)
    encoder = [parameter for name, parameter in network.named_parameters() if "text_model" not in name]
    asked = {"input": [user([picture("red"), {"type": "input_text", "text": "what is this?"}])], "ignore_eos": True}
    asked |= {"max_output_tokens": 12, "logit_bias": NO_SPECIAL}
    stanza = {"options": {"model": str(folder)}, "admin_token": "a token for this test only"}
    with Servers(tmp_path, root, {"policy": stanza}) as servers:
        url, token, sent = servers["policy"].url, stanza["admin_token"], list[int]()
        pushers = [push.Pusher([url], token, transport=transport) for transport in ("http", "delta")]
        for pusher in (*pushers, pushers[1]):  # the first delta is a whole checkpoint
            said = servers["policy"].answer(**asked)["output"][-1]
            prompt, sampled = said["prompt_token_ids"], said["generation_token_ids"]
            before = logprobs(network, folder, ["red"], prompt + sampled, len(prompt))
            assert said["generation_log_probs"] == pytest.approx(before, abs=1e-4)
            change(encoder)
            after = logprobs(network, folder, ["red"], prompt + sampled, len(prompt))
            assert after != pytest.approx(before, abs=0.1)
            proof = replica.LogprobProof(text, logprobs(network, folder, [], text, 1, bias=0.0))
            done = pusher.push(pusher.prepare() + 1, network.state_dict(), proof)
            assert done.difference < 1e-4
            sent.append(done.bytes)
        assert sent[2] < sent[1] / 2
        said = servers["policy"].answer(**asked)["output"][-1]
        ids = said["prompt_token_ids"] + said["generation_token_ids"]
        exact = logprobs(network, folder, ["red"], ids, len(said["prompt_token_ids"]))
        assert said["generation_log_probs"] == pytest.approx(exact, abs=1e-4)
        for pusher in pushers:
            pusher.finish()


def odd_files() -> dict[str, bytes]:
    """Image files of many formats and modes, two of them damaged."""
    noise = Image.effect_noise((40, 30), 80).convert("RGB")
    tags = Image.Exif()
    tags[0x0112], tags[0x010F] = 6, "maker"  # lies on its side

    def file(image: Image.Image, kind: str, **options: Any) -> bytes:
        image.save(out := io.BytesIO(), kind, **options)
        return out.getvalue()

    files = {kind: file(noise, kind, exif=tags) for kind in ("PNG", "JPEG", "WEBP")}
    files |= {kind: file(noise, kind) for kind in ("BMP", "TIFF", "TGA", "ICO", "JPEG2000")}
    files |= {mode: file(noise.convert(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGBA", "I;16")}
    files["CMYK"] = file(noise.convert("CMYK"), "JPEG")
    files["animated"] = file(noise, "GIF", save_all=True, append_images=[noise.rotate(90)])
    files["transparent colour"] = file(noise, "PNG", transparency=noise.getpixel((0, 0)))
    files["wrong type in EXIF"] = files["JPEG"].replace(b"\x01\x0f\x00\x02", b"\x01\x0f\x00\x07")
    half = len(files["PNG"]) // 2
    files["damaged"] = (
        files["PNG"][:half] + bytes(99 ^ each for each in files["PNG"][half : half + 9]) + files["PNG"][half + 9 :]
    )
    assert files["wrong type in EXIF"] != files["JPEG"]
    return files


def change(parameters: list[Any]) -> None:
    """Add noise to a part of each parameter: a delta carries few values."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            parameter[::4] += 0.2 * torch.randn_like(parameter[::4])


def digest(colour: str) -> str:
    return image_digest(picture(colour)["image_url"])


def _captured_calls(server: Server, sampling: dict[str, Any]) -> None:
    """Two calls of an agent that shows the model one image after the other: equal ids, two segments."""
    for colour in ("red", "blue"):
        asked = [user([{"type": "image_url", "image_url": {"url": picture(colour)["image_url"]}}])]
        body = {"model": "m", "messages": asked, "max_tokens": 2, "logit_bias": sampling["logit_bias"]}
        assert server.post("/rollouts/r/v1/chat/completions", **body).status_code == 200
    segments = server.get("/rollouts/r/segments").json()["segments"]
    assert [segment["images"] for segment in segments] == [[digest("red")], [digest("blue")]]


def _after_calls_that_do_not_generate(server: Server) -> None:
    message = [user([picture("cyan")])]
    image = {"type": "base64", "media_type": "image/png", "data": picture("cyan")["image_url"].partition(",")[2]}
    counted = server.post(
        "/v1/messages/count_tokens", model="m", messages=[user([{"type": "image", "source": image}])]
    ).json()["input_tokens"]
    asked = server.answer(input=message, max_output_tokens=2)
    assert asked["usage"]["input_tokens"] == counted

    # With its image the prompt is longer than the context, without it is not.
    def text(words: int) -> dict[str, Any]:
        return {"type": "input_text", "text": "a" * words}

    beside = counted - TOKENS
    full = server.answer(input=[user([picture("pink"), text(CONTEXT - beside - 1)])], max_output_tokens=2)
    assert (full["status"], full["usage"]["input_tokens"]) == ("incomplete", CONTEXT + TOKENS - 1)
    assert server.answer(input=[user([picture("pink")])], max_output_tokens=2)["usage"]["input_tokens"] == counted


def _files_that_cannot_be_read(server: Server) -> None:
    """400: no client repeats such a request."""
    bomb = png("red")
    side = bomb.index(b"IHDR") + 4
    bomb = bomb[:side] + 2 * (20_000).to_bytes(4) + bomb[side + 8 :]
    bomb = bomb.replace(bomb[side + 13 : side + 17], zlib.crc32(bomb[side - 4 : side + 13]).to_bytes(4))
    refused = {
        data_url(bomb): "Image size (400000000 pixels) exceeds limit",
        data_url(b"GIF"): "cannot identify image file",
        "data:image/svg+xml,<svg/>": "'data:image/svg+xml,<svg/>' cannot be read: Only base64 data URLs are supported",
        "file:///etc/hostname": "this server reads no files; send a data: URL, or set engine.allowed_local_media_path",
        "http://127.0.0.1:1/a.png": "'http://127.0.0.1:1/a.png' cannot be read: this server does not fetch it; send a "
        "data: URL, or add its host to engine.allowed_media_domains",
    }
    for url, message in refused.items():
        answer = server.post("/v1/responses", input=[user([{"type": "input_image", "image_url": url}])])
        assert (answer.status_code, answer.json()["retryable"]) == (400, False), answer.text
        assert message in answer.json()["detail"]


def train_on_live_rollouts(folder: Path, rows: list[dict[str, Any]], gym: str, agent: str, **more: Any) -> None:
    """Four steps of `ng_train letters.yaml` on these tasks; each agrees with vLLM's log-probabilities."""
    write_image_model(folder / "policy", "idefics3", std=0.02, hidden_size=128, num_attention_heads=4)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = {"kind": "model", "app": "models/vllm", "model": str(folder / "policy")}
    services = {"policy": policy, "env": {"kind": "gym_server", "app": gym}}
    services["agent"] = {"kind": "agent", "app": agent, "gym": "env", "model": "policy"}
    (folder / "services.yaml").write_text(json.dumps(services))
    overrides = {
        "output": "run",
        "model.from_scratch": "null",
        "model.tokenizer": "null",
        "model.path": folder / "policy",
        "rollouts.agent": "agent",
        "rollouts.services": folder / "services.yaml",
        "rollouts.policy_app": "null",
        "rollouts.tasks": folder / "tasks.jsonl",
        "rollouts.tasks_per_step": 2,
        "max_steps": 4,
        **more,
    }
    words = ["letters.yaml", *(f"{key}={value}" for key, value in overrides.items())]
    output, _ = (process := train(folder, words, vllm=True)).communicate(timeout=600)
    assert process.returncode == 0, output
    steps = metrics_of(folder)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["lag"] == 0 and row["token_mult_prob_error"] < 1.001 for row in steps)
    assert (folder / "run" / "policy" / "processor_config.json").exists()


@pytest.mark.parametrize("train_vision", [False, True])
def test_a_policy_is_trained_on_live_rollouts_with_images_in_the_task(tmp_path: Path, train_vision: bool) -> None:
    import torch
    from safetensors.torch import load_file

    rows = [
        {
            "responses_create_params": {"input": [user([picture(colour), {"type": "input_text", "text": "say"}])]},
            "letter": letter,
        }
        for letter, colour in {"a": "red", "b": "blue"}.items()
    ]
    more = {"rollouts.max_output_tokens": 8, "model.train_vision": json.dumps(train_vision)}
    train_on_live_rollouts(tmp_path, rows, "gym_servers/letters", "agents/simple", **more)
    first, last = (
        load_file(next(folder.glob("*.safetensors"))) for folder in (tmp_path / "policy", tmp_path / "run" / "policy")
    )
    encoder = [name for name in first if "text_model" not in name and name != "lm_head.weight"]
    assert len(encoder) > 20
    assert all(torch.equal(first[name], last[name]) != train_vision for name in encoder)


EPISODE = """
from PIL.Image import new

from ngym import Image, Session, Step, VerifyRequest, step_server


class Task(VerifyRequest):
    colours: list[str]


async def reset(task: Task, session: Session) -> Image:
    session["turn"] = 0
    return Image(new("RGB", (56, 56), task.colours[0]))


async def step(task: Task, session: Session) -> Step:
    session["turn"] += 1
    reward = float("a" in task.text)
    if session["turn"] == len(task.colours):
        return Step("", reward, terminated=True)
    return Step([Image(new("RGB", (56, 56), task.colours[session["turn"]])), "say"], reward)


app = step_server(task=Task, reset=reset, step=step)
"""


def test_a_policy_is_trained_on_images_that_an_environment_shows_turn_by_turn(tmp_path: Path) -> None:
    (tmp_path / "episode.py").write_text(EPISODE)
    rows = [
        {"responses_create_params": {"input": []}, "colours": colours} for colours in (["red", "blue"], ["blue", "red"])
    ]
    train_on_live_rollouts(tmp_path, rows, "episode.py", "agents/gymnasium", **{"rollouts.max_output_tokens": 200})
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    ends = [[(len(each["mask"]), len(each["images"])) for each in row["ng"]["segments"]] for row in rollouts]
    assert [(2, 2)] in ends, "the second turn continues from the ids of the first"
    assert all(images <= 2 for end in ends for _, images in end)
