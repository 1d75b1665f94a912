"""The folder of a model: its kind, its tokenizer, its network and the files of its weights; and a classifier from it."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from ngym.files.model_checkpoint import check_loaded, is_classifier, suppress_load_report
from ngym.runtime.cpu_threads import serving_threads

from .grouped_attention import GROUPED
from .options import Options

DEFAULT_CONTEXT = 1 << 20  # for a model that does not state its context length


def is_classifier_checkpoint(folder: str, options: Options) -> bool:
    """Whether the model is one for sequence classification.

    Raises:
        OSError, ValueError: it has no config that transformers knows.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    return is_classifier(config.architectures)


def load_model(kind: Any, folder: str, options: Options) -> tuple[Any, Any, int]:
    """The tokenizer, the model and its context length. kind: an AutoModel class.

    Raises:
        OSError, ValueError: it cannot be loaded, its weights are incomplete, or its device is not there.
    """
    check_device(options)
    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    model = load_network(kind, folder, options, tokenizer)
    if (device := device_of(options)) == "cpu":
        torch.set_num_threads(serving_threads(options.threads, model.num_parameters()))
    if tokenizer.chat_template is None:
        raise ValueError("its tokenizer has no chat template; take an instruct model")
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT
    return tokenizer, model.to(device), min(options.context or own, own)


def device_of(options: Options) -> str:
    if options.device != "auto":
        return options.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(options: Options) -> None:
    """Raise ValueError if the device of the stanza cannot be used here; a full memory stays a RuntimeError."""
    try:
        torch.empty(0, device=options.device if options.device != "auto" else None)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA; no driver; no such name or number
        if "memory" in str(error):
            raise
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(f"device {options.device!r} cannot be used here: {reason}; write device: auto") from None


def load_network(kind: Any, folder: str, options: Options, tokenizer: Any) -> Any:
    """The model. Raises ValueError if its weights are incomplete, or do not fit its tokenizer."""
    how = {"dtype": getattr(torch, options.dtype), "use_safetensors": True}  # never opens a pickle
    how |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused in one line, with their names
    with suppress_load_report():
        try:
            model, info = kind.from_pretrained(folder, **how, trust_remote_code=options.trust_remote_code)
        except ValueError as error:
            if not str(error).startswith("Unrecognized configuration class"):
                raise
            raise ValueError(
                "it is not a model of text alone, which this server needs; serve it with models/vllm"
            ) from None
        check_loaded(model, info, tokenizer)
    model.eval()
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED)
    if device_of(options) == "cpu" and options.dtype == "float32":
        _transpose_weights(model)
    return model


def _transpose_weights(model: Any) -> None:
    """Store the weights of linear layers in the order of their columns.

    So MKL multiplies the 8 to 64 rows of a decoding step without packing the weights first, in 0.4 to 0.9 of the time; two
    rows take 1.2 to 1.3 times as long. An embedding that is the head, too, keeps its order: a token's vector is a row of it.
    """
    embeddings = [id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    for module in model.modules():
        # A subclass, such as a quantized one, may have weights of another layout.
        if type(module) is nn.Linear and id(module.weight) not in embeddings:
            module.weight.data = module.weight.data.t().contiguous().t()


def checkpoint_folder(folder: str) -> Path:
    """The folder of the checkpoint's files; that of the hub's cache for a name."""
    if Path(folder).is_dir():
        return Path(folder)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(folder, local_files_only=True))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads: a folder may have the weights in another format, too."""
    if (index := folder / "model.safetensors.index.json").is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else []


class Classifier:
    """A loaded model for sequence classification; a reward model has one label.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """

    def __init__(self, folder: str, options: Options) -> None:
        self.tokenizer, self._model, self.context = load_model(AutoModelForSequenceClassification, folder, options)
        self.labels: dict[int, str] = self._model.config.id2label
        self._device = device_of(options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers")

    def close(self) -> None:
        """End the thread after the current text."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def logits(self, ids: list[int]) -> list[float]:
        """One for each label."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._logits, ids)

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> list[float]:
        logits: list[float] = self._model(input_ids=torch.tensor([ids], device=self._device)).logits[0].tolist()
        return logits
