"""Which ids end a turn for this model? Its own end-of-sequence ids, and the ends that chat templates write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ngym.rollout.token_splice import Ends

if TYPE_CHECKING:
    from ..engine import Engine

TURNS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>")
REQUESTS = ("[/INST]", "[/TOOL_RESULTS]", "[/AVAILABLE_TOOLS]")  # Mistral's: the answer follows without a header


def turn_ends(engine: Engine) -> Ends:
    tokenizer = engine.get_tokenizer()
    generation = engine.model_config.try_get_generation_config()
    ends = generation.get("eos_token_id") or []
    of_model = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    special = {token: id for token, id in tokenizer.get_vocab().items() if token in (*TURNS, *REQUESTS)}
    requests = frozenset(id for token, id in special.items() if token in REQUESTS)
    return Ends(frozenset(of_model | set(special.values())), requests)
