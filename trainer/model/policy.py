"""The policy, and a critic on a copy of its decoder.

The critic starts with a scalar head of zeros, so a new critic returns 0. It shares no weight with the policy, and its
loss does not change the policy.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ngym.errors import ConfigError

from ..data.samples import Sample, Segment
from ..recipe.recipe import ModelOptions, Qwen3Shape
from . import attention, lora
from .chunked_logprobs import LOGITS_BYTES, Asks, Scorer, Scores, states
from .packing import Group, Packed, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


JUST_LOGPROBS = Asks()
# Weights are data: pickles are not opened, and code that comes with a model does not run.
SAFE = {"use_safetensors": True, "trust_remote_code": False}


class CriticNetwork(nn.Module):
    """A decoder with a scalar head.

    Args:
        network: the policy's current one; an adapter in it is copied too, and then trained as the policy's is.
        lr: the full learning rate; None for the policy's.
    """

    def __init__(self, network: PreTrainedModel, lr: float | None) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(network.get_decoder())
        self.head = nn.Linear(network.get_output_embeddings().in_features, 1, bias=False)
        nn.init.zeros_(self.head.weight)
        self.lr = lr

    def forward(self, packed: Packed, group: Group | None = None) -> Tensor:
        """The value of the state in which each trained token was chosen, float32 [N]."""
        values_N: Tensor = self.head(states(self.backbone, packed, group)).squeeze(1).float()
        return values_N if group is None else group.told(values_N, packed)


class Policy(nn.Module):
    """A causal language model that returns logprobs and other requested values of the trained tokens.

    temperature: divides the logits, as when its rollouts were sampled. scale: factor of the head's outputs before that,
    in models that have one (Granite, Cohere). critic: None if values are not needed. logits_bytes: memory limit of its
    float32 logits. group: the ranks that compute each micro-batch together; None: this rank alone.
    """

    def __init__(self, network: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.network = network
        self.temperature = temperature
        self.scale = logit_scale(network)
        self.scorer = Scorer()
        self.logits_bytes = LOGITS_BYTES
        self.critic: CriticNetwork | None = None
        self.group: Group | None = None

    @property
    def context(self) -> int:
        """The maximum length of a sequence in tokens."""
        return int(self.network.config.max_position_embeddings)

    def forward(self, packed: Packed, asks: Asks = JUST_LOGPROBS, temperature: float | None = None) -> Scores:
        """The outputs for each trained token, given the tokens before it in its sequence."""
        scores = Scores(torch.empty(0))
        if asks.logprobs:
            token_ids_N = packed.token_ids_T[packed.trained_N]
            scores = self.scorer(
                states(self.network.get_decoder(), packed, self.group),
                token_ids_N if self.group is None else token_ids_N[self.group.mine(packed)],
                head=self.network.get_output_embeddings(),
                temperature=(self.temperature if temperature is None else temperature) / self.scale,
                entropy=asks.entropy,
                logits_bytes=self.logits_bytes,
            )
            if self.group is not None:
                told = partial(self.group.told, packed=packed)
                entropy_N = None if scores.entropy_N is None else told(scores.entropy_N)
                scores = Scores(told(scores.logprobs_N), entropy_N)
        if asks.values:
            assert self.critic is not None, "there is no critic to ask for values"
            scores = scores._replace(values_N=self.critic(packed, self.group))
        return scores

    def check_shared(self, key: str, ranks: int, *sizes: str) -> None:
        """Raise ConfigError, with this key of the recipe, if that many ranks cannot share a size of the network."""
        described = self.network.config.get_text_config()
        for name in sizes:
            if getattr(described, name) % ranks:
                what = f"{name} = {getattr(described, name)} of {described.model_type}"
                raise ConfigError(f"{key}: {ranks} ranks cannot share {what}; set it to a divisor of that")

    @property
    def vocabulary(self) -> int:
        """The number of tokens in its vocabulary."""
        size: int = self.network.config.get_text_config().vocab_size
        return size

    def logprobs(self, packed: Packed) -> Tensor:
        """Log p of each trained token, [N]."""
        scores: Scores = self(packed)
        return scores.logprobs_N


@torch.no_grad()
def logit_scale(network: PreTrainedModel) -> float:
    """The factor that a model applies to its head's outputs; measured, because each model family names it differently.

    Raises:
        ConfigError: its logits are not a multiple of them.
    """
    probe = pack([Sample((Segment([1, 2, 3, 5, 8], [(1, 5)]),))], network.device)
    of_head = network.get_output_embeddings()(states(network.get_decoder(), probe))
    inputs = {"input_ids": probe.token_ids_T[None], "position_ids": probe.positions_T[None], "layout": probe.layout}
    logits = network(**inputs, use_cache=False).logits[0][probe.trained_N - 1]
    scale = float((logits * of_head).sum() / of_head.square().sum())
    if not torch.allclose(logits, scale * of_head, rtol=1e-3, atol=1e-4 * float(logits.abs().max())):
        kind = network.config.model_type
        raise ConfigError(
            f"model.path: {kind}: its logits are soft-capped, which cannot be trained; choose another model"
        )
    return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-4) else scale


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    """The tokenizer of the recipe.

    Raises:
        ConfigError: it cannot be loaded, has no chat template, or differs from that of the model's folder.
    """
    name = options.tokenizer or options.path
    tokenizer = _tokenizer(str(name))
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.tokenizer: {name} has no chat template; put a chat_template.jinja into its folder")
    if options.path is not None and name != options.path and _has_tokenizer(options.path):
        _check_tokens(tokenizer, _tokenizer(options.path), options)
    return tokenizer


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer: no tokenizer can be loaded from {name}: {_first_line(error)}") from error
    return tokenizer


def _has_tokenizer(name: str) -> bool:
    """Whether there are tokenizer files: transformers makes an empty tokenizer for a model without one."""
    from transformers.utils.hub import cached_file

    try:
        return cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False) is not None
    except OSError:  # not a folder and not on the hub: loading the model reports it
        return False


def _check_tokens(tokenizer: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, options: ModelOptions) -> None:
    """Check that all tokens of the model's own tokenizer have the same ids here; additional tokens are allowed."""
    ids = tokenizer.get_vocab()
    other = next((token for token, number in own.get_vocab().items() if ids.get(token) != number), None)
    if other is not None:
        raise ConfigError(
            f"model.tokenizer: {options.tokenizer} is not the tokenizer of {options.path} (its token {other!r} has another id "
            "or none); set model.tokenizer=null"
        )


def load_policy(
    options: ModelOptions, tokenizer: PreTrainedTokenizerBase, seed: int, temperature: float = 1.0
) -> Policy:
    """The network of the recipe, in float32 (master weights); `seed` initializes new weights.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from safetensors import SafetensorError
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
        network = AutoModelForCausalLM.from_pretrained(str(options.path), **how, **SAFE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model.path: no model can be loaded from {options.path}: {_first_line(error)}") from error
    if options.lora is not None:
        lora.add(network, options.lora)
    return Policy(network, temperature)


def _qwen3(shape: Qwen3Shape, tokenizer: PreTrainedTokenizerBase) -> object:
    from transformers import Qwen3Config

    fields = shape.model_dump(exclude={"rope_theta"})
    return Qwen3Config(
        **fields,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        # the two sizes must agree: an id without a text would be sampled as an empty text
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
