"""The tiny policy's tokenizer: byte-level BPE of 1,024 tokens, learnt from rendered demonstrations, always the same.

    python data/calculator/generate.py demonstrations --output runs/corpus.jsonl --count 4000 --seed 1 --larger 0 \\
        --wrong 0.05
    python data/tiny_policy/generate.py runs/corpus.jsonl           # rewrites tokenizer/ beside this script

Digits stand alone, so that numbers are spelt. A line ends a piece, so that a prompt's ids never depend on what is said
after it. Within a line pieces may span words: the policy reads a system prompt as one token.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
VOCABULARY = 1024
CONTEXT = 1024

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
# Not special: an inference server strips special tokens before it looks for tool calls and reasoning.
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    "<think>",
    "</think>",
)

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<|pad|>",
    "eos_token": "<|im_end|>",
    "model_max_length": CONTEXT,
    "clean_up_tokenization_spaces": False,
}


def rendered(corpus: Path, template: str) -> Iterator[str]:
    """The demonstrations as the chat template writes them."""
    # the `generation` tag marks the assistant's words for transformers; plain jinja2 does not know it
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "{#- -#}", template)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    write = environment.from_string(plain).render
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            yield write(json.loads(line))


def learn(texts: Iterator[str]) -> Tokenizer:
    """A tokenizer whose length is exactly VOCABULARY."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    between_marks = re.compile("|".join(map(re.escape, SPECIAL + MARKS)))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in between_marks.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the corpus is too small: {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus", type=Path, help="a JSONL file of demonstrations")
    parser.add_argument("--folder", type=Path, default=HERE / "tokenizer")
    arguments = parser.parse_args()
    template = (HERE / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer = learn(rendered(arguments.corpus, template))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.folder / "tokenizer.json"))
    (arguments.folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    (arguments.folder / "chat_template.jinja").write_text(template, encoding="utf-8")


if __name__ == "__main__":
    main()
