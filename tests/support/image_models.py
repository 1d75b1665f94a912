"""Tiny checkpoints of models that read images, with random weights, and the images of their tests.

Their processors are those that need no torchvision, but for the families of NEEDS.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from vllm_service import TAGS, write_tokenizer

from ngym.trainer.data import images, samples
from ngym.trainer.model.images import ImageReader

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<image>", "<|vision_start|>", "<|vision_end|>", "<video>"]
SPECIAL += ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>", "<|im_end|>"]
IMAGE = SPECIAL.index("<image>")
SIDE = 56  # pixels
TEMPLATE = r"""{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}
{%- if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": len(SPECIAL) - 1,
}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": SIDE, "patch_size": 14}
TILES = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
QWEN = {"image_token_id": IMAGE, "video_token_id": SPECIAL.index("<video>")}
QWEN |= {"vision_start_token_id": IMAGE + 1, "vision_end_token_id": IMAGE + 2}


def _qwen2_vl(text: dict[str, Any]) -> Any:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14}
    return transformers.Qwen2VLConfig(text_config=text | {"rope_parameters": ROPE}, vision_config=vision, **QWEN)


def _qwen2_5_vl(text: dict[str, Any]) -> Any:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision["fullatt_block_indexes"] = [1]
    return transformers.Qwen2_5_VLConfig(text_config=text | {"rope_parameters": ROPE}, vision_config=vision, **QWEN)


def _qwen3_vl(text: dict[str, Any]) -> Any:
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0, 1], "patch_size": 14, "num_position_embeddings": 256}
    text = text | {"rope_parameters": ROPE | {"mrope_interleaved": True}}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN)


def _qwen3_vl_moe(text: dict[str, Any]) -> Any:
    config = _qwen3_vl(text)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = text | experts | {"rope_parameters": ROPE | {"mrope_interleaved": True}}
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=config.vision_config.to_dict(), **QWEN)


def _glm4v(text: dict[str, Any]) -> Any:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"image_size": 2 * SIDE, "patch_size": 14}
    rope = ROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
    ids = {"image_token_id": IMAGE, "image_start_token_id": IMAGE + 1, "image_end_token_id": IMAGE + 2}
    ids |= {"video_token_id": IMAGE + 3, "video_start_token_id": IMAGE + 4, "video_end_token_id": IMAGE + 5}
    return transformers.Glm4vConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision, **ids)


def _llava(text: dict[str, Any]) -> Any:
    vision = VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
    fields = {"image_token_id": IMAGE, "vision_feature_layer": -1, "image_seq_length": 16}
    return transformers.LlavaConfig(text_config=text | {"model_type": "llama"}, vision_config=vision, **fields)


def _llava_next(text: dict[str, Any]) -> Any:
    vision = VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
    fields = {"image_token_id": IMAGE, "vision_feature_layer": -1, "image_grid_pinpoints": TILES}
    return transformers.LlavaNextConfig(text_config=text | {"model_type": "llama"}, vision_config=vision, **fields)


def _llava_onevision(text: dict[str, Any]) -> Any:
    vision = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
    fields = {"image_token_id": IMAGE, "video_token_id": SPECIAL.index("<video>"), "vision_feature_layer": -1}
    fields |= {"image_grid_pinpoints": TILES, "vision_feature_select_strategy": "full"}
    return transformers.LlavaOnevisionConfig(text_config=text | {"model_type": "qwen2"}, vision_config=vision, **fields)


def _mistral3(text: dict[str, Any]) -> Any:
    vision = VISION | {"model_type": "pixtral", "head_dim": 16, "image_size": 2 * SIDE}
    fields = {"image_token_id": IMAGE, "spatial_merge_size": 2, "tie_word_embeddings": False}
    return transformers.Mistral3Config(text_config=text | {"model_type": "mistral"}, vision_config=vision, **fields)


def _internvl(text: dict[str, Any]) -> Any:
    vision = VISION | {"image_size": [SIDE, SIDE], "patch_size": [14, 14]}
    fields = {"image_token_id": IMAGE, "downsample_ratio": 0.5, "image_seq_length": 4}
    return transformers.InternVLConfig(text_config=text | {"model_type": "qwen2"}, vision_config=vision, **fields)


def _idefics2(text: dict[str, Any]) -> Any:
    heads = {"resampler_n_heads": 2, "resampler_head_dim": 32, "num_key_value_heads": 1}
    perceiver = heads | {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1}
    fields = {"image_token_id": IMAGE, "perceiver_config": perceiver, "tie_word_embeddings": False}
    return transformers.Idefics2Config(text_config=text | {"model_type": "mistral"}, vision_config=VISION, **fields)


def _smolvlm(text: dict[str, Any]) -> Any:
    fields = {"image_token_id": IMAGE, "scale_factor": 2, "tie_word_embeddings": False, "pad_token_id": 0}
    return transformers.SmolVLMConfig(text_config=text | {"model_type": "llama"}, vision_config=VISION, **fields)


def _idefics3(text: dict[str, Any]) -> Any:
    fields = {"image_token_id": IMAGE, "scale_factor": 2, "tie_word_embeddings": False, "pad_token_id": 0}
    return transformers.Idefics3Config(text_config=text | {"model_type": "llama"}, vision_config=VISION, **fields)


def _gemma3(text: dict[str, Any]) -> Any:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    text = text | {"sliding_window": 6, "query_pre_attn_scalar": 32, "layer_types": kinds}
    vision = VISION | {"model_type": "siglip_vision_model"}
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, mm_tokens_per_image=4
    )


def _write_qwen_processor(folder: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": SIDE**2, "longest_edge": 4 * SIDE**2}
    Qwen2VLImageProcessorPil(size=size).save_pretrained(folder)


def _write_glm4v_processor(folder: Path) -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    size = {"shortest_edge": 2 * SIDE**2, "longest_edge": 8 * SIDE**2}  # of two frames
    Glm4vImageProcessorPil(size=size).save_pretrained(folder)


def _write_llava_next_processor(folder: Path) -> None:
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    pictures = LlavaNextImageProcessorPil(image_grid_pinpoints=TILES, **sizes)
    names = {"image_token": "<image>", "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.LlavaNextProcessor(pictures, tokenizer, patch_size=14, **names).save_pretrained(folder)


def _write_llava_onevision_processor(folder: Path) -> None:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor

    size = {"height": SIDE, "width": SIDE}
    pictures = LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=TILES)
    names = {"image_token": "<image>", "video_token": "<video>", "vision_feature_select_strategy": "full"}
    tokenizer, videos = transformers.AutoTokenizer.from_pretrained(folder), LlavaOnevisionVideoProcessor(size=size)
    processor = transformers.LlavaOnevisionProcessor(pictures, tokenizer, videos, num_image_tokens=16, **names)
    processor.save_pretrained(folder)


def _write_mistral3_processor(folder: Path) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    pictures = PixtralImageProcessorPil(size={"longest_edge": 2 * SIDE}, patch_size={"height": 28, "width": 28})
    names = {"image_token": "<image>", "image_break_token": "<|vision_start|>", "image_end_token": "<|vision_end|>"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sizes = {"patch_size": 14, "spatial_merge_size": 2}
    transformers.PixtralProcessor(pictures, tokenizer, **sizes, **names).save_pretrained(folder)


def _write_internvl_processor(folder: Path) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    names = {"context_image_token": "<image>", "video_token": "<video>"}
    names |= {"start_image_token": "<|vision_start|>", "end_image_token": "<|vision_end|>"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)
    size = {"height": SIDE, "width": SIDE}
    pictures = GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=2)
    videos = InternVLVideoProcessor(size=size)
    transformers.InternVLProcessor(pictures, tokenizer, videos, image_seq_length=4).save_pretrained(folder)


def _write_idefics2_processor(folder: Path) -> None:
    from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

    size = {"longest_edge": SIDE, "shortest_edge": SIDE // 2}
    pictures = Idefics2ImageProcessorPil(size=size, do_image_splitting=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.Idefics2Processor(pictures, tokenizer, image_seq_len=4).save_pretrained(folder)


def _write_smolvlm_processor(folder: Path) -> None:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    size = {"longest_edge": SIDE}
    pictures = SmolVLMImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    sampling = {"fps": 1, "max_frames": 4, "video_size": size}
    videos = SmolVLMVideoProcessor(size=size, max_image_size=size, video_sampling=sampling)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.SmolVLMProcessor(pictures, tokenizer, videos, image_seq_len=4).save_pretrained(folder)


def _write_llava_processor(folder: Path) -> None:
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    pictures = LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    names = {"image_token": "<image>", "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.LlavaProcessor(pictures, tokenizer, patch_size=14, **names).save_pretrained(folder)


def _write_idefics3_processor(folder: Path) -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    size = {"longest_edge": SIDE}
    pictures = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(folder)


Family = tuple[Callable[[dict[str, Any]], Any], Callable[[Path], None]]
FAMILIES: dict[str, Family] = {
    "qwen2_vl": (_qwen2_vl, _write_qwen_processor),
    "qwen2_5_vl": (_qwen2_5_vl, _write_qwen_processor),
    "qwen3_vl": (_qwen3_vl, _write_qwen_processor),
    "qwen3_vl_moe": (_qwen3_vl_moe, _write_qwen_processor),
    "glm4v": (_glm4v, _write_glm4v_processor),
    "llava": (_llava, _write_llava_processor),
    "llava_next": (_llava_next, _write_llava_next_processor),
    "llava_onevision": (_llava_onevision, _write_llava_onevision_processor),
    "mistral3": (_mistral3, _write_mistral3_processor),
    "internvl": (_internvl, _write_internvl_processor),
    "idefics2": (_idefics2, _write_idefics2_processor),
    "smolvlm": (_smolvlm, _write_smolvlm_processor),
    "idefics3": (_idefics3, _write_idefics3_processor),
    "gemma3": (_gemma3, lambda folder: None),
}


NEEDS = {family: ["torchvision"] for family in ("llava_onevision", "mistral3", "internvl")}
NEEDS["smolvlm"] = ["torchvision", "num2words"]
READ = [
    pytest.param(
        family,
        marks=[
            pytest.mark.skipif(find_spec(package) is None, reason=f"no {package}") for package in NEEDS.get(family, ())
        ],
    )
    for family in FAMILIES
    if family != "gemma3"
]
"""The families whose images are trained, as parameters of a test."""


def write_image_model(folder: Path, family: str, std: float = 0.1, **text: Any) -> Any:
    """Write a checkpoint with a tokenizer and a processor; returns the network, with Hugging Face's own attention.

    text: fields of the decoder's config.
    """
    make, write_processor = FAMILIES[family]
    ids = write_tokenizer(folder, TEMPLATE, SPECIAL, TAGS)
    transformers.set_seed(0)
    config = make(TEXT | {"vocab_size": ids} | text)
    network = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    network.generation_config.eos_token_id = len(SPECIAL) - 1
    network.save_pretrained(folder)
    write_processor(folder)
    return network.eval()


def png(colour: Any, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """An image file: a gradient with a corner of this colour."""
    picture = Image.linear_gradient("L").resize(size).convert("RGB")
    picture.paste(colour, (0, 0, size[0] // 2, size[1] // 2))
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def segment_with(reader: ImageReader, contents: Sequence[bytes], answer: list[int], first: int = 40) -> samples.Segment:
    """A segment of text, these images with text between them, and an answer, which is trained."""
    ids, placed = [first, 41, 42], list[images.PlacedImage]()
    for content in contents:
        placed.append(images.PlacedImage.at(content, range(len(ids), len(ids) + reader.count(content))))
        ids += [IMAGE] * reader.count(content) + [43]
    return samples.Segment(ids + answer, [(len(ids), len(ids) + len(answer))], tuple(placed))


def hugging_face_inputs(reader: ImageReader, segment: samples.Segment) -> dict[str, Any]:
    """The arguments of the model's own forward for one segment."""
    from ngym.trainer.model.images import GRID, open_image

    inputs: dict[str, Any] = {"input_ids": torch.tensor([segment.token_ids])}
    if segment.images:
        prepare = getattr(reader._processor, "image_processor", reader._processor)
        pixels = prepare(images=[open_image(image.content) for image in segment.images], return_tensors="pt")
        inputs |= {name: pixels[name] for name in pixels if name in reader._accepted}
        if GRID in pixels:
            types = torch.zeros(1, len(segment.token_ids), dtype=torch.int64)
            types[0, [place for image in segment.images for place in image.places]] = 1
            inputs["mm_token_type_ids"] = types
    return inputs


def hugging_face_logprobs(network: Any, reader: ImageReader, segment: samples.Segment) -> torch.Tensor:
    """Log p of the trained tokens of one segment by the model's own forward, [N]."""
    inputs = hugging_face_inputs(reader, segment)
    logprobs_TV = network(**inputs, use_cache=False).logits[0, :-1].log_softmax(-1)
    logprobs_T = logprobs_TV.gather(1, inputs["input_ids"][0, 1:, None]).squeeze(1)
    return torch.cat([logprobs_T[start - 1 : end - 1] for start, end in segment.spans])
