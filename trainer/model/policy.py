"""The policy: its network; a critic on a copy of its decoder; and reward models.

The critic starts with a scalar head of zeros, so a new critic returns 0. It shares no weight with the policy, and its
loss does not change the policy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ngym.errors import ConfigError
from ngym.files.model_checkpoint import CLASSIFIER_PROBLEM, check_loaded, is_classifier, suppress_load_report

from ..data.images import TEXT_ONLY
from ..data.samples import Routers, Sample, Segment
from ..recipe.recipe import ModelOptions, Qwen3Shape
from . import attention
from .chunked_logprobs import RequestedScores, Scorer, Scores, logits_limit, states
from .images import ImageReader, UnusableImages, freeze_vision, has_vision, share_decoder, unfreeze_vision
from .layers import fuse_layers
from .lora import add_adapter
from .packing import MicroBatch, pack
from .sequence_parallel import SequenceParallelGroup
from .teacher_divergence import DivergenceScorer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

JUST_LOGPROBS = RequestedScores()
# Weights are data: pickles are not opened, and code that comes with a model does not run.
SAFE = {"use_safetensors": True, "trust_remote_code": False}


class ModelRefused(ConfigError):
    """A model or tokenizer cannot be trained. key: the option of `model` that names it. reason: the message without it."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"model.{key}: {reason}")
        self.reason = reason


ONE_BY_ONE = "ngym_one_by_one"  # of a decoder: `TrainedNetwork.one_by_one`
# The second follows the first in a micro-batch, and shares its prefix.
PROBES = (Segment([1, 2, 3, 4, 8], [(1, 5)]), Segment([1, 2, 3, 6, 5, 7], [(4, 6)]))


class CriticNetwork(nn.Module):
    """A decoder with a scalar head, and with an encoder of images if the policy reads them.

    Args:
        network: the policy's current one; an adapter in it is copied too, and then trained as the policy's is.
        lr: the full learning rate; None for the policy's.
        images: how the policy reads images, or the reason why it does not.
    """

    def __init__(self, network: PreTrainedModel, lr: float | None, images: ImageReader | str = TEXT_ONLY) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(network.get_decoder() if isinstance(images, str) else network.base_model)
        self.images = images
        self.head = nn.Linear(network.get_output_embeddings().in_features, 1, bias=False)
        nn.init.zeros_(self.head.weight)
        self.lr = lr

    def forward(self, packed: MicroBatch, group: SequenceParallelGroup | None = None) -> Tensor:
        """The value of the state in which each trained token was chosen, float32 [N]."""
        values_N: Tensor = self.head(read_states(self.backbone, packed, group, self.images)).squeeze(1).float()
        return values_N if group is None else group.gather(values_N, packed.trained_N, len(packed.token_ids_T))


def read_states(
    network: PreTrainedModel,
    packed: MicroBatch,
    group: SequenceParallelGroup | None,
    images: ImageReader | str,
) -> Tensor:
    """The hidden states that predict the trained tokens, [N, H]; with a group, those of this rank.

    images: how the network reads images, or the reason why it does not.
    """
    if getattr(network.get_decoder(), ONE_BY_ONE, False) and len(packed.segments) > 1:
        device = packed.token_ids_T.device
        alone = (pack([Sample((segment,))], device) for segment in packed.segments)
        return torch.cat([read_states(network, each, group, images) for each in alone])
    if not packed.images:
        return states(network.get_decoder(), packed, group)
    assert not isinstance(images, str), "rows with images are refused"
    with share_decoder(network, group):
        return states(network.base_model, packed, group, images.inputs(network, packed))


@contextmanager
def dropout_off(module: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}  # they may differ: see layers.py
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def unused_dropout(network: PreTrainedModel) -> dict[str, float]:
    """The dropout that the model's own config has, by key. Nothing here uses it: networks are in evaluation mode."""
    settings = network.config.get_text_config().to_dict()
    return {key: value for key, value in settings.items() if "drop" in key and isinstance(value, float) and value > 0}


class TrainedNetwork(nn.Module):
    """A network under training: a policy or a reward model.

    one_by_one: whether the sequences of a micro-batch are computed one after another.
    critic: None if values of a policy are not needed. group: the ranks that compute each micro-batch together; None:
    this rank alone. images: how it reads images, or the reason why it does not. routers: if it replays the routing of
    rollouts. trains_vision: whether the encoder of images is trained, but for unused_vision. always_encodes: whether it
    computes something in each micro-batch, because ranks that share all weights (ZeRO-3) must use the same layers, and
    those that train it must have a gradient of each.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        fuse_layers(network)
        self.network = network
        self.one_by_one = mixes_sequences(network)
        setattr(network.get_decoder(), ONE_BY_ONE, self.one_by_one)
        self.critic: CriticNetwork | None = None
        self.group: SequenceParallelGroup | None = None
        self.images: ImageReader | str = TEXT_ONLY
        self.routers: Routers | None = None
        self.trains_vision = False
        self.unused_vision: list[str] = []
        self.always_encodes = False

    def states(self, packed: MicroBatch) -> Tensor:
        """The hidden states that predict the trained tokens, [N, H]; with a group, those of this rank."""
        return read_states(self.network, packed, self.group, self.images)

    def with_images(self, packed: MicroBatch) -> MicroBatch:
        """The micro-batch, with an example that trains no token if the encoder must compute something and has nothing."""
        if packed.images or not self.always_encodes or isinstance(self.images, str):
            return packed
        return pack([*packed.samples, self.images.example], packed.token_ids_T.device)

    @property
    def context(self) -> int:
        """The maximum length of a sequence in tokens."""
        return int(self.network.config.get_text_config().max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        """The number of tokens in its vocabulary."""
        size: int = self.network.config.get_text_config().vocab_size
        return size

    def check_shared(self, key: str, ranks: int, *sizes: str) -> None:
        """Raise ConfigError, with this key of the recipe, if that many ranks cannot share a size of the network."""
        config = self.network.config.get_text_config()
        for name in sizes:
            if getattr(config, name) % ranks:
                size = f"{name} = {getattr(config, name)} of {config.model_type}"
                raise ConfigError(f"{key}: {ranks} ranks cannot share {size}; set it to a divisor of that")


class RewardModel(TrainedNetwork):
    """A decoder with a scalar head, as transformers' AutoModelForSequenceClassification with one label.

    Its outputs are `values_N`: the score after the token before each trained place. The place of a whole conversation
    is one past its last token.
    """

    def forward(self, packed: MicroBatch, asks: RequestedScores, temperature: float | None = None) -> Scores:
        """The score at each trained place, float32."""
        values_N: Tensor = self.network.score(self.states(packed)).squeeze(1).float()
        if self.group is not None:
            values_N = self.group.gather(values_N, packed.trained_N, len(packed.token_ids_T))
        return Scores(torch.empty(0), values_N=values_N)


class Policy(TrainedNetwork):
    """A causal language model that returns logprobs and other requested values of the trained tokens.

    temperature: divides the logits, as when its rollouts were sampled. scale: factor of the head's outputs before that,
    in models that have one (Granite, Cohere). logits_bytes: memory limit of its float32 logits; None: that of the device.
    """

    def __init__(self, network: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__(network)
        self.temperature = temperature
        self.scale = logit_scale(network)
        self.scorer = Scorer()
        self.divergence = DivergenceScorer()
        self.logits_bytes: int | None = None

    def forward(
        self, packed: MicroBatch, asks: RequestedScores = JUST_LOGPROBS, temperature: float | None = None
    ) -> Scores:
        """The outputs for each trained token, given the tokens before it in its sequence."""
        scores, asked = Scores(torch.empty(0)), packed
        packed = self.with_images(packed)
        if asks.logprobs:
            token_ids_N = packed.token_ids_T[packed.trained_N]
            hidden_NH = self.states(packed)
            head = self.network.get_output_embeddings()
            logits_bytes = self.logits_bytes or logits_limit(hidden_NH.device, compiled=self.scorer.compiled)
            divided = (self.temperature if temperature is None else temperature) / self.scale
            scores = self.scorer(
                hidden_NH,
                token_ids_N
                if self.group is None
                else token_ids_N[self.group.local_indices(packed.trained_N, len(packed.token_ids_T))],
                head=head,
                temperature=divided,
                entropy=asks.entropy,
                logits_bytes=logits_bytes,
                collision=asks.collision,
            )
            if self.group is not None:
                gather = partial(self.group.gather, trained_N=packed.trained_N, tokens=len(packed.token_ids_T))
                others = (None if values is None else gather(values) for values in scores[1:])
                scores = Scores(gather(scores.logprobs_N), *others)
            if asks.divergence is not None:  # refused with a group
                divergence_N = self.divergence(
                    hidden_NH,
                    asks.divergence.teacher(asked),
                    head=head,
                    temperature=divided,
                    beta=asks.divergence.beta,
                    logits_bytes=logits_bytes,
                )
                scores = scores._replace(divergence_N=divergence_N)
        if asks.values:
            assert self.critic is not None, "there is no critic to ask for values"
            scores = scores._replace(values_N=self.critic(packed, self.group))
        return scores

    def logprobs(self, packed: MicroBatch) -> Tensor:
        """Log p of each trained token, [N]."""
        scores: Scores = self(packed)
        return scores.logprobs_N

    @torch.no_grad()
    def distributions(self, packed: MicroBatch) -> FullDistributions:
        """The whole distribution of each trained token, without a gradient."""
        head = self.network.get_output_embeddings()
        return FullDistributions(self.states(packed), head, self.temperature / self.scale)


class FullDistributions(NamedTuple):
    """Distributions over the whole vocabulary, computed when asked for."""

    hidden_NH: Tensor
    head: nn.Module
    temperature: float

    @torch.no_grad()
    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Logprobs of these tokens, float32 [C, V]; the None is for token ids."""
        logits_CV: Tensor = self.head(self.hidden_NH[start:end]).float() / self.temperature
        return logits_CV.log_softmax(-1), None


@torch.no_grad()
def mixes_sequences(network: PreTrainedModel) -> bool:
    """Whether a sequence is computed in another way beside others, as by linear attention and state spaces: these carry
    what they have read from one sequence of a micro-batch to the next.
    """
    decoder, device = network.get_decoder(), network.device
    together, alone = (pack([Sample((each,)) for each in probes], device) for probes in (PROBES, PROBES[1:]))
    expected_NH = states(decoder, alone).float()
    actual_NH = states(decoder, together)[-len(expected_NH) :].float()
    tolerance = 1e-4 if network.dtype == torch.float32 else 0.1
    return not torch.allclose(actual_NH, expected_NH, rtol=0, atol=tolerance * float(expected_NH.abs().max()))


@torch.no_grad()
def logit_scale(network: PreTrainedModel) -> float:
    """The factor that a model applies to its head's outputs; measured, because each model family names it differently.

    Raises:
        ConfigError: its logits are not a multiple of them.
    """
    probe = pack([Sample(PROBES[:1])], network.device)
    of_head = network.get_output_embeddings()(states(network.get_decoder(), probe))
    inputs = {"input_ids": probe.token_ids_T[None], "position_ids": probe.positions_T[None], "layout": probe.layout}
    logits = network(**inputs, use_cache=False).logits[0][probe.trained_N - 1]
    scale = float((logits * of_head).sum() / of_head.square().sum())
    if not torch.allclose(logits, scale * of_head, rtol=1e-3, atol=1e-4 * float(logits.abs().max())):
        kind = network.config.model_type
        raise ModelRefused("path", f"{kind}: its logits are soft-capped, which cannot be trained; choose another model")
    return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-4) else scale


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    """The tokenizer of the recipe.

    Raises:
        ConfigError: it cannot be loaded, has no chat template, or differs from that of the model's folder.
    """
    name = options.tokenizer or options.path
    tokenizer = _tokenizer(str(name))
    if tokenizer.chat_template is None:
        raise ModelRefused("tokenizer", f"{name} has no chat template; put a chat_template.jinja into its folder")
    if options.path is not None and name != options.path and _has_tokenizer(options.path):
        _check_tokens(tokenizer, _tokenizer(options.path), options)
    return tokenizer


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        # transformers reports a folder without a tokenizer as one whose tokenizer needs another package
        lacks = Path(name).is_dir() and not _has_tokenizer(name)
        reason = "there is no tokenizer_config.json" if lacks else _first_line(error)
        raise ModelRefused("tokenizer", f"no tokenizer can be loaded from {name}: {reason}") from error
    return tokenizer


def _has_tokenizer(name: str) -> bool:
    """Whether there are tokenizer files: transformers makes an empty tokenizer for a model without one."""
    from transformers.utils.hub import cached_file

    try:
        return cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False) is not None
    except OSError:  # not a folder and not on the hub: loading the model reports it
        return False


def _check_tokens(
    tokenizer: PreTrainedTokenizerBase, own_tokenizer: PreTrainedTokenizerBase, options: ModelOptions
) -> None:
    """Check that all tokens of the model's own tokenizer have the same ids here; additional tokens are allowed."""
    ids = tokenizer.get_vocab()
    mismatch = next((token for token, number in own_tokenizer.get_vocab().items() if ids.get(token) != number), None)
    if mismatch is not None:
        raise ModelRefused(
            "tokenizer",
            f"{options.tokenizer} is not the tokenizer of {options.path} (its token {mismatch!r} has another id "
            "or none); set model.tokenizer=null",
        )


def load_policy(
    options: ModelOptions, tokenizer: PreTrainedTokenizerBase, seed: int, temperature: float = 1.0
) -> Policy:
    """The network of the recipe, in float32 (master weights); `seed` initializes new weights.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    network = _load_network(AutoModelForCausalLM, options, tokenizer, seed)
    if has_vision(network):
        freeze_vision(network)
    if options.lora is not None:
        add_adapter(network, options.lora)
    policy = Policy(network, temperature)
    if has_vision(network):
        try:
            policy.images = ImageReader(network, str(options.path), tokenizer)
        except UnusableImages as error:
            policy.images = str(error)
    if options.train_vision and not isinstance(policy.images, str):
        policy.trains_vision = True
        policy.unused_vision = unfreeze_vision(network, policy.images)
    return policy


def load_reward_model(options: ModelOptions, tokenizer: PreTrainedTokenizerBase, seed: int) -> RewardModel:
    """The network of the recipe with a scalar head; `seed` initializes the head, unless the folder has one.

    Raises:
        ConfigError: it cannot be loaded, or transformers has no sequence classification for it.
    """
    from transformers import AutoModelForSequenceClassification

    network = _load_network(AutoModelForSequenceClassification, options, tokenizer, seed, num_labels=1)
    if not isinstance(getattr(network, "score", None), nn.Linear):
        raise ModelRefused(
            "path", f"{type(network).__name__} does not score the last token of a text; choose a decoder model"
        )
    network.config.get_text_config().pad_token_id = _pad_id(tokenizer)
    if options.lora is not None:
        add_adapter(network, options.lora)
        network.score.requires_grad_(True)
    return RewardModel(network)


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The pad token's id; None if conversations end with it, because transformers scores the last other token."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    last = tokenizer(text, add_special_tokens=False)["input_ids"][-1]
    pad: int | None = tokenizer.pad_token_id
    return None if pad == last else pad


def _load_network(
    kind: Any, options: ModelOptions, tokenizer: PreTrainedTokenizerBase, seed: int, **config: Any
) -> PreTrainedModel:
    """kind: an AutoModel class. config: keys of the model's config that differ from its folder's."""
    from safetensors import SafetensorError
    from transformers import AutoModelForImageTextToText
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import logging

    logging.disable_progress_bar()
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
    torch.manual_seed(seed)
    base_4bit = options.lora.base_4bit if options.lora else None
    # A base that is quantized need not exist in float32, which is twice the size of most files.
    arguments: dict[str, Any] = {"dtype": "auto" if base_4bit else torch.float32, "attn_implementation": attention.NAME}
    network: PreTrainedModel
    if options.from_scratch is not None:
        network = kind.from_config(_qwen3_config(options.from_scratch, tokenizer, **config), **arguments)
        return network.eval()  # as from_pretrained
    try:
        scores = "num_labels" in config
        stored_config = _trainable_config(str(options.path), scores)
        if _reads_images(stored_config):
            kind = AutoModelForImageTextToText
            del arguments["attn_implementation"]  # that of its vision encoder stays
        # tensors of another size are refused in one line, with their names
        arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        new_head = scores and not is_classifier(stored_config.architectures)
        with suppress_load_report(drop=new_head):
            network, info = kind.from_pretrained(str(options.path), **arguments, **SAFE, **config)
            check_loaded(network, info, tokenizer, new_head=new_head)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelRefused("path", f"no model can be loaded from {options.path}: {_first_line(error)}") from error
    if isinstance(getattr(network.get_decoder(), "lm_head", None), nn.Module):  # Mllama
        kind = stored_config.model_type
        raise ModelRefused("path", f"{kind}: its decoder returns logits, not hidden states; choose another model")
    network.get_decoder().set_attn_implementation(attention.NAME)
    if base_4bit is not None:
        from .quantized import quantize_base

        quantize_base(network, base_4bit)
    return network


def _trainable_config(name: str, scores: bool) -> PreTrainedConfig:
    """The config of this folder or model. scores: it becomes a reward model.

    Raises:
        ConfigError: it is a reward model, and no policy; it would be one, but reads images; it reads other media; or its
            weights are quantized, which only those of gpt-oss may be: transformers turns them into whole ones.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if not scores and is_classifier(config.architectures):
        raise ModelRefused("path", f"{name}: {CLASSIFIER_PROBLEM}")
    if _reads_images(config) and scores:
        raise ModelRefused("path", f"{name}: a model of type {config.model_type} reads images; choose a model of text")
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return config
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = settings.get("quant_method", "an unknown method")
    if method != "mxfp4":
        raise ModelRefused(
            "path",
            f"the weights of {name} are quantized ({method}), and ng_train quantizes whole ones itself; name "
            "the model that it was made from, and set model.lora.base_4bit=nf4",
        )
    return config


def _reads_images(config: PreTrainedConfig) -> bool:
    """Whether transformers loads a model with this config together with an encoder of images. For some types (Qwen 3.5),
    it loads the decoder alone.

    Raises:
        ConfigError: the model reads other media.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    text, network = config.get_text_config(), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if text is config or getattr(network, "config_class", type(config)) is not type(config):
        return False
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or not hasattr(config, "vision_config"):
        raise ModelRefused(
            "path",
            f"a model of type {config.model_type} also reads media other than images, and only models of text and images "
            f"are trained (such as {text.model_type})",
        )
    return True


def _qwen3_config(shape: Qwen3Shape, tokenizer: PreTrainedTokenizerBase, **config: Any) -> object:
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
        **config,
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
