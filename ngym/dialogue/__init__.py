"""Conversations over an engine that samples tokens: Chat request to prompt ids, sampled ids to Chat Completion.

Shared by `models/transformers` and `models/sglang`: the chat template, continuation of the ids that were seen,
incremental detokenization, parsing of reasoning and tool calls, stop strings, token data. An engine only returns ids.
(vLLM does all of this itself.) The tokenizer is passed in: nothing heavy is imported here.
"""

from ngym.dialogue.dialogue import Dialogue, Template, Tokenizer, turn_ends
from ngym.dialogue.engine import Generate, Sampled, Sampling

__all__ = ["Dialogue", "Generate", "Sampled", "Sampling", "Template", "Tokenizer", "turn_ends"]
