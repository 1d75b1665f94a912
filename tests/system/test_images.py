"""Images in conversations with models/vllm: each call gets its images, and its log-probabilities are the
checkpoint's."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from vllm_service import TAGS, Server, Servers, user, write_tokenizer

pytest.importorskip("vllm")

CONTEXT = 512
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<fake_token_around_image>",
    "<global-img>",
    "<image>",
    "<end_of_utterance>",
]
SPECIAL += ["<row_1_col_1>", "<|im_end|>"]
IMAGE, TOKENS, SIDE = SPECIAL.index("<image>"), 4, 56
BIAS = -100.0  # a random policy would sometimes sample the placeholder
TEMPLATE = r"""{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}
{%- if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_model(folder: Path) -> Any:
    """A random Idefics3, one of the families that need no torchvision; the network."""
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    ids = write_tokenizer(folder, TEMPLATE, SPECIAL, TAGS)
    transformers.set_seed(0)
    text = {**SIZE, "max_position_embeddings": CONTEXT, "model_type": "llama", "vocab_size": ids}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": SIDE, "patch_size": 14, "initializer_range": 0.2}
    fields = {"image_token_id": IMAGE, "scale_factor": 2, "tie_word_embeddings": False, "pad_token_id": 0}
    ends = {"bos_token_id": 0, "eos_token_id": len(SPECIAL) - 1}
    config = transformers.Idefics3Config(text_config=text | ends, vision_config=vision, **fields)
    network = transformers.Idefics3ForConditionalGeneration(config)
    network.generation_config.eos_token_id = len(SPECIAL) - 1
    network.save_pretrained(folder)
    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.Idefics3Processor(images, tokenizer, image_seq_len=TOKENS, chat_template=TEMPLATE).save_pretrained(
        folder
    )
    return network.eval()


def picture(colour: str) -> dict[str, Any]:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), colour).save(out, "PNG")
    return {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"}


def logprobs(network: Any, folder: Path, colours: list[str], ids: list[int], first: int) -> list[float]:
    import torch
    from PIL import Image
    from transformers import AutoProcessor

    images = [Image.new("RGB", (SIDE, SIDE), colour) for colour in colours]
    pixels = AutoProcessor.from_pretrained(folder).image_processor(images, return_tensors="pt")
    with torch.no_grad():
        logits_TV = network(input_ids=torch.tensor([ids]), **pixels).logits[0, first - 1 : -1]
    logits_TV[:, IMAGE] += BIAS
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0].tolist()


def test_images_reach_the_model_in_every_turn_and_after_calls_that_do_not_generate(tmp_path: Path, root: Path) -> None:
    folder = tmp_path / "policy"
    network = write_model(folder)
    with Servers(tmp_path, root, {"policy": {"options": {"model": str(folder)}}}) as servers:
        server = servers["policy"]
        sampling = {"max_output_tokens": 12, "ignore_eos": True, "logit_bias": {str(IMAGE): BIAS}}
        history, colours = [], ["red", "green", "blue"]
        for turn, colour in enumerate(colours):
            history.append(user([picture(colour), {"type": "input_text", "text": "what is this?"}]))
            answer = server.answer(input=history, **sampling)
            said = answer["output"][-1]
            prompt, sampled = said["prompt_token_ids"], said["generation_token_ids"]
            assert prompt.count(IMAGE) == TOKENS * (turn + 1)
            exact = logprobs(network, folder, colours[: turn + 1], prompt + sampled, len(prompt))
            assert said["generation_log_probs"] == pytest.approx(exact, abs=1e-4)
            history += answer["output"]
        _after_calls_that_do_not_generate(server)


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
