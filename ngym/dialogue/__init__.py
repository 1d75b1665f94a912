"""How does a back end that samples tokens hold a conversation? Chat request -> prompt ids; sampled ids -> Chat Completion.

What `models/transformers` and `models/sglang` share: the chat template, going on from the ids that were seen, text from
ids as they come, reasoning and tool calls found in it, stop strings, token data. An engine gives ids, and knows nothing
of all this. (vLLM does it itself.) The tokenizer is passed in: nothing heavy is imported here.
"""

from ngym.dialogue.dialogue import Dialogue
from ngym.dialogue.engine import Generate, Sampled, Sampling
from ngym.dialogue.template import Template, Tokenizer, turn_ends

__all__ = ["Dialogue", "Generate", "Sampled", "Sampling", "Template", "Tokenizer", "turn_ends"]
