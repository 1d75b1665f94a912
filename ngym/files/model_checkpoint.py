"""Checks of a model's folder in the format of transformers, before and after its weights are loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLASSIFIER_PROBLEM = "this model is one for sequence classification: it scores texts, and generates none"
NAMED = 3  # limit of tensors that a message names
CONFIG, POLICY = "config.json", "policy"  # a training run has its policy in this folder


def checkpoint_problem(folder: Path) -> str | None:
    """The reason why this folder is not that of a model, or None."""
    if (folder / CONFIG).is_file():
        return None
    policy = policy_below(folder)
    near = f" (did you mean {str(policy)!r}?)" if policy else ""
    return f"{folder} has no checkpoint (no {CONFIG}){near}"


def policy_below(folder: Path) -> Path | None:
    """The policy of a training run, if this is the run's folder."""
    policy = folder / POLICY
    return policy if (policy / CONFIG).is_file() and not (folder / CONFIG).is_file() else None


def is_classifier(architectures: Collection[str] | None) -> bool:
    """Whether these are `architectures` of a model for sequence classification, such as a reward model."""
    return any(name.endswith("ForSequenceClassification") for name in architectures or ())


def holds_classifier(folder: str | Path) -> bool:
    """Whether the config.json of this folder is that of a model for sequence classification.

    False if there is no readable one: loading the model reports it.
    """
    try:
        config = json.loads(Path(folder, CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    architectures = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(architectures, list) and is_classifier([str(each) for each in architectures])


@contextmanager
def suppress_load_report(*, drop: bool = False) -> Iterator[None]:
    """Hold back transformers' table of missing and unexpected tensors until the block ends. If the block raises, the table
    is dropped: `check_loaded` names them. drop: in any case.
    """
    logger, records = logging.getLogger("transformers.modeling_utils"), list[logging.LogRecord]()

    def passes(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in record.getMessage()
        if is_report:
            records.append(record)
        return not is_report

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)
    for record in records if not drop else ():
        logger.handle(record)


def check_loaded(model: Any, info: Mapping[str, Any], tokenizer: Any, *, new_head: bool = False) -> None:
    """Check that a model has all weights of its checkpoint, and a row of its embedding for each token.

    Args:
        model: loaded by `from_pretrained` with `ignore_mismatched_sizes=True`.
        info: its second result with `output_loading_info=True`. It lists neither tied tensors nor buffers that are never
            saved.
        new_head: the checkpoint need not have what is outside of the decoder, because it will be trained.

    Raises:
        ValueError: the checkpoint is incomplete, or of another model; in one line.
    """
    decoder = f"{model.base_model_prefix}."
    missing = [name for name in info["missing_keys"] if not new_head or name.startswith(decoder)]
    if missing:
        raise ValueError(f"it lacks {_tensors(missing)}; copy all files of the checkpoint again")
    if info["mismatched_keys"]:
        name, actual, expected = min(info["mismatched_keys"])
        raise ValueError(
            f"its tensor {name} has the shape {list(actual)}, but its config.json needs {list(expected)}; "
            "take both files from the same checkpoint"
        )
    if broken := [name for name, tensor in model.named_parameters() if not _is_finite(tensor)]:
        raise ValueError(f"NaN or infinite values are in {_tensors(broken)}; take an earlier checkpoint")
    try:
        rows = model.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):  # an architecture that does not name its embedding
        return
    _check_tokens(tokenizer, rows)


def _tensors(names: Iterable[str]) -> str:
    ordered = sorted(names)
    listed_names = ", ".join(ordered[:NAMED]) + (", ..." if len(ordered) > NAMED else "")
    return f"{len(ordered):,} tensor{'s' if len(ordered) > 1 else ''} ({listed_names})"


def _is_finite(tensor: Any) -> bool:
    """Without a copy of the tensor. Quantized ones (of 8 bits and less) are not checked."""
    if not tensor.is_floating_point() or tensor.element_size() < 2 or not tensor.numel():
        return True
    least, most = tensor.detach().aminmax()  # a NaN is both
    return bool(least.isfinite() and most.isfinite())


def _check_tokens(tokenizer: Any, rows: int) -> None:
    """Check that no usual token is beyond the rows of the embedding.

    Gemma 3 without images has no row for `<image_soft_token>`: a special token that the chat template does not write.
    """
    if len(tokenizer) <= rows:
        return
    template = str(tokenizer.chat_template)
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    special = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in template and number not in ends
    }
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    if used := beyond.keys() - special:
        raise ValueError(
            f"its tokenizer has {len(tokenizer):,} ids, but its embedding only {rows:,} rows: none for "
            f"{beyond[min(used)]!r} ({min(used)}); take the model's own tokenizer, or resize the embedding"
        )
