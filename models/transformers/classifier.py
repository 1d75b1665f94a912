"""Scores of a model for sequence classification, such as a reward model, in a thread next to the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForSequenceClassification

from .loading import device_of, load_model
from .options import Options


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
