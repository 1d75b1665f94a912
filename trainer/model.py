"""The network, loaded or new, and the logprobs of the tokens that it is trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngym.errors import ConfigError

from . import attention
from .config import ModelOptions, Qwen3Shape
from .packing import Packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Policy(nn.Module):
    """A causal language model that answers with logprobs.

    temperature: what its logits are divided by, as when its rollouts were sampled.
    """

    def __init__(self, network: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.network = network
        self.temperature = temperature

    @property
    def context(self) -> int:
        """The most tokens that a sequence may have."""
        return int(self.network.config.max_position_embeddings)

    def forward(self, packed: Packed, temperature: float | None = None) -> Tensor:
        """Log p of each trained token given what stands before it in its sequence, float32 [N]."""
        hidden_T = self.network.get_decoder()(
            input_ids=packed.token_ids_T.unsqueeze(0),
            position_ids=packed.positions_T.unsqueeze(0),
            use_cache=False,
            layout=packed.layout,
        ).last_hidden_state[0]
        logits_NV = self.network.get_output_embeddings()(hidden_T[packed.trained_N - 1])
        divisor = self.temperature if temperature is None else temperature
        logits_NV = logits_NV.float() if divisor == 1 else logits_NV.float() / divisor
        return -F.cross_entropy(logits_NV, packed.token_ids_T[packed.trained_N], reduction="none")


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    """The tokenizer of the recipe.

    Raises:
        ConfigError: it cannot be loaded, or has no chat template.
    """
    from transformers import AutoTokenizer

    name = options.tokenizer or options.path
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer: no tokenizer can be loaded from {name}: {_first_line(error)}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.tokenizer: {name} has no chat template; put a chat_template.jinja into its folder")
    return tokenizer


def load_policy(
    options: ModelOptions, tokenizer: PreTrainedTokenizerBase, seed: int, temperature: float = 1.0
) -> Policy:
    """The network of the recipe, in float32 (master weights); `seed` decides new weights.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import logging

    logging.disable_progress_bar()
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
    torch.manual_seed(seed)
    how = {"dtype": torch.float32, "attn_implementation": attention.NAME}
    if options.from_scratch is not None:
        return Policy(AutoModelForCausalLM.from_config(_qwen3(options.from_scratch, tokenizer), **how), temperature)
    try:
        network = AutoModelForCausalLM.from_pretrained(options.path, **how)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: no model can be loaded from {options.path}: {_first_line(error)}") from error
    return Policy(network, temperature)


def _qwen3(shape: Qwen3Shape, tokenizer: PreTrainedTokenizerBase) -> object:
    from transformers import Qwen3Config

    fields = shape.model_dump(exclude={"rope_theta"})
    return Qwen3Config(
        **fields,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        # the two must agree: an id without a text would be sampled as nothing
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
