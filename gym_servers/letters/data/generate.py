"""Tasks of four random letters, which do not matter, and a tokenizer whose tokens are letters; always the same bytes.

python data/letters/generate.py [FOLDER]  # train, validation, example.jsonl and tokenizer/; default: here
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from ngym.files.task_rows import draw_distinct, output_folder, prompt_of, task_row, write_splits

HERE = Path(__file__).resolve().parent
SEED = 2026
TRAIN, VALIDATION, EXAMPLES = 200, 50, 5
LETTER = "a"
PAD, START, END, UNKNOWN = SPECIAL = ("<|pad|>", "<|start|>", "<|end|>", "<|unknown|>")
TEMPLATE = (
    "{%- for message in messages -%}\n"
    '{%- if message.role != "assistant" -%}<|start|>{{ message.content }}<|end|>\n'
    "{%- else -%}<|start|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}<|start|>{%- endif -%}\n"
)


def task(rng: random.Random) -> dict[str, Any]:
    return task_row("letters_agent", {"input": "".join(rng.choices(ascii_lowercase, k=4))}, letter=LETTER)


def write_tokenizer(folder: Path) -> None:
    """A Hugging Face folder: one token a letter, four special ones, everything else unknown."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *ascii_lowercase))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "model_max_length": 128,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    rows = draw_distinct(TRAIN + VALIDATION, lambda _: task(rng), prompt_of)
    write_splits(folder, rows, VALIDATION, EXAMPLES)
    write_tokenizer(folder / "tokenizer")


if __name__ == "__main__":
    main(output_folder(__doc__, HERE))
