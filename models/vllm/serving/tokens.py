"""Token ids, log-probabilities and end-of-turn tokens of vLLM's answers."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from ngym.rollout.token_splice import Ends
from ngym.schema import TOKEN_FIELDS, Json

if TYPE_CHECKING:
    from ..engine import Engine


TURNS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>")
REQUESTS = ("[/INST]", "[/TOOL_RESULTS]", "[/AVAILABLE_TOOLS]")  # Mistral's: the answer follows without a header
recorded: ContextVar[Tokens | None] = ContextVar("ngym_vllm_tokens", default=None)
"""Where the tokens of the current request are recorded; None: nowhere."""


def turn_ends(engine: Engine) -> Ends:
    """The token ids that end a turn of this model."""
    tokenizer = engine.get_tokenizer()
    generation = engine.model_config.try_get_generation_config()
    ends = generation.get("eos_token_id") or []
    of_model = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    special = {token: id for token, id in tokenizer.get_vocab().items() if token in (*TURNS, *REQUESTS)}
    requests = frozenset(id for token, id in special.items() if token in REQUESTS)
    return Ends(frozenset(of_model | set(special.values())), requests)


@dataclass
class Tokens:
    """Tokens of a call: prompt [P], sampled [G], logprobs [G]; versions: spans [start, end, policy version] over [G].

    aborted: a weight push ended the generation (its mode `abort`).
    """

    prompt: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    aborted: bool = False

    def add(self, output: RequestOutput) -> None:
        """Add one output: all tokens of the call or, in a stream, the next few."""
        completion = output.outputs[0]
        self.prompt = output.prompt_token_ids or self.prompt
        self.sampled.extend(completion.token_ids)
        logprobs = completion.logprobs
        if isinstance(logprobs, FlatLogprobs):
            self.logprobs.extend(logprobs.logprobs)  # one per position, that of the sampled token
        elif logprobs is not None:
            self.logprobs.extend(one[token].logprob for one, token in zip(logprobs, completion.token_ids, strict=True))
        self.aborted = completion.finish_reason == "abort"
        self.versions = [[span.start, span.end, int(span.version)] for span in completion.weight_versions or []]

    @property
    def fields(self) -> Json:
        """The token fields of a message; {} if nothing was recorded."""
        if not self.prompt:
            return {}
        return dict(zip(TOKEN_FIELDS, (self.prompt, self.sampled, self.logprobs), strict=True))

    @property
    def trace(self) -> Json:
        """The fields of the whole answer."""
        return {"ng": {"policy_version": self.versions}} if self.prompt else {}


class SampledLogprobs(LogprobsProcessor):
    """vLLM's record of a request's log-probabilities, only for the sampled tokens and without their texts."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        tokens_NK, logprobs_NK, ranks_N, _ = logprobs_lists
        record, logprobs = self.logprobs, logprobs_NK[:, 0].tolist()
        start = len(record.logprobs)
        record.start_indices.extend(range(start, start + len(logprobs)))
        record.end_indices.extend(range(start + 1, start + 1 + len(logprobs)))
        record.token_ids.extend(tokens_NK[:, 0].tolist())
        record.logprobs.extend(logprobs)
        record.ranks.extend(ranks_N.tolist())
        record.decoded_tokens.extend([None] * len(logprobs))
        self.cumulative_logprob += sum(logprobs)
