"""Reinforcement learning on images: a tiny Idefics3 with random weights learns which letter belongs to a color.

The reward is the share of the right letter in its text (gym_servers/letters); only the image shows which it is, so a
policy that ignores the image gets 0.25. `ng_train letters.yaml` with vLLM and the services live; held-out images have
shades that no training image has. The vision encoder keeps its random weights, unless `--train-vision` is given.

With --turns, a task is an episode with an image for each turn, which an environment shows in its observations.

    python benchmarks/learning_images.py [--seeds 0 1 2] [--steps 120] [--turns 2] [--train-vision]
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import time
from pathlib import Path
from typing import Any

import yaml

from ngym.cli.shell.walkthrough import Walkthrough
from ngym.config.shipped_files import RECIPES
from ngym.files.jsonl import read, write_rows
from ngym.schema import Json

SPECIAL = ["<pad>", "<start>", "<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>"]
SPECIAL += ["<row_1_col_1>", "<end>"]
TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<start>assistant {% endif %}"
)
COLORS = {"a": (220, 30, 30), "b": (30, 200, 30), "c": (40, 40, 220), "d": (220, 210, 40)}
SHADES = 31  # of each color channel: even ones for training, odd ones are held out
EPISODES = """
import io

from PIL.Image import new

from ngym import Image, Session, Step, VerifyRequest, step_server


class Task(VerifyRequest):
    letters: str
    shades: list[tuple[int, int, int]]


def picture(task: Task, turn: int) -> Image:
    return Image(new("RGB", (SIDE, SIDE), task.shades[turn]))


async def reset(task: Task, session: Session) -> list[str | Image]:
    session["turn"] = 0
    return [picture(task, 0), "which letter?"]


async def step(task: Task, session: Session) -> Step:
    turn = session["turn"]
    session["turn"] = turn + 1
    share = task.text.count(task.letters[turn]) / max(1, len(task.text)) / len(task.letters)
    if turn + 1 == len(task.letters):
        return Step("", share, terminated=True)
    return Step([picture(task, turn + 1), "which letter?"], share)


app = step_server(task=Task, reset=reset, step=step, reward_range=(0, 1))
"""
SIDE, TRAIN, HELD_OUT, ATTEMPTS = 56, 400, 96, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--turns", type=int, default=0, help="images of an episode; 0: one, in the task")
    parser.add_argument("--train-vision", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning_images"))
    options = parser.parse_args()
    print("| seed | sampled: before | after | greedy: before | after | seconds |\n|---|---|---|---|---|---|")
    for seed in options.seeds:
        folder = options.folder.resolve() / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        write_tasks(folder, random.Random(seed), options.turns)
        write_policy(folder / "policy", seed)
        began = time.monotonic()
        group = 16 if options.turns else 8
        train(folder, seed, options.steps, group=group, train_vision=options.train_vision)
        print(result(folder / "run" / "metrics.jsonl", seed, time.monotonic() - began), flush=True)


def write_tasks(folder: Path, rng: random.Random, turns: int) -> None:
    """train.jsonl, held_out.jsonl and services.yaml."""
    names = sorted(COLORS)

    def tasks(count: int, odd: int) -> list[Json]:
        """odd: 1 for the held-out shades."""
        if turns:
            return [episode(rng, rng.choices(names, k=turns), odd) for _ in range(count)]
        return [task(rng, names[index % 4], odd) for index in range(count)]

    write_rows(folder, {"train": tasks(TRAIN, 0), "held_out": tasks(HELD_OUT, 1)})
    (folder / "episodes.py").write_text(EPISODES.replace("SIDE", str(SIDE)))
    gym, agent = ("episodes.py", "agents/gymnasium") if turns else ("gym_servers/letters", "agents/simple")
    services = {
        "policy": {"kind": "model", "app": "models/vllm", "model": str(folder / "policy")},
        "letters": {"kind": "gym_server", "app": gym},
        "letters_agent": {"kind": "agent", "app": agent, "gym": "letters", "model": "policy"},
    }
    (folder / "services.yaml").write_text(yaml.safe_dump(services))


def task(rng: random.Random, letter: str, odd: int) -> Json:
    """A question about an image of one color."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), shade(rng, letter, odd)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "which letter?"}]
    return {"responses_create_params": {"input": [{"role": "user", "content": parts}]}, "letter": letter}


def episode(rng: random.Random, letters: list[str], odd: int) -> Json:
    shades = [shade(rng, letter, odd) for letter in letters]
    return {"responses_create_params": {"input": []}, "letters": "".join(letters), "shades": shades}


def shade(rng: random.Random, letter: str, odd: int) -> tuple[int, ...]:
    shades = (channel + 2 * (rng.randrange(SHADES) // 2) + odd - SHADES // 2 for channel in COLORS[letter])
    return tuple(max(0, min(255, channel)) for channel in shades)


def write_policy(folder: Path, seed: int) -> None:
    """A random Idefics3 of 0.6 million parameters, with a tokenizer of bytes and a processor."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([], trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet))
    names = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[-1]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **names)
    tokenizer.chat_template = TEMPLATE
    transformers.set_seed(seed)
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": len(SPECIAL) - 1}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 384, **ids}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": SIDE, "patch_size": 14, "initializer_range": 0.2}
    fields = {"image_token_id": SPECIAL.index("<image>"), "scale_factor": 2, "tie_word_embeddings": False}
    config = transformers.Idefics3Config(text_config=text, vision_config=vision, pad_token_id=0, **fields)
    network = transformers.Idefics3ForConditionalGeneration(config)
    torch.nn.init.normal_(network.model.connector.modality_projection.proj.weight, std=0.1)
    network.generation_config.eos_token_id = len(SPECIAL) - 1
    network.save_pretrained(folder)
    pixels = {"longest_edge": SIDE}
    pictures = Idefics3ImageProcessorPil(size=pixels, max_image_size=pixels, do_image_splitting=False)
    processor = transformers.Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    processor.save_pretrained(folder)


def train(folder: Path, seed: int, steps: int, *, group: int, train_vision: bool) -> None:
    words = {
        "output": folder / "run",
        "seed": seed,
        "model.from_scratch": "null",
        "model.tokenizer": "null",
        "model.path": folder / "policy",
        "model.train_vision": str(train_vision).lower(),
        "rollouts.tasks": folder / "train.jsonl",
        "rollouts.services": folder / "services.yaml",
        "rollouts.policy_app": "null",
        "rollouts.max_output_tokens": 16,
        "rollouts.group_size": group,
        "evaluation.tasks": folder / "held_out.jsonl",
        "evaluation.attempts": ATTEMPTS,
        "evaluation.every": steps,
        "max_steps": steps,
    }
    command = ["train", str(RECIPES / "letters.yaml"), *(f"{key}={value}" for key, value in words.items())]
    Walkthrough(step_count=1).ng(*command, "--overwrite")


def result(metrics: Path, seed: int, seconds: float) -> str:
    """A row of the table: rewards on held-out images before and after, with their 95 % intervals."""
    rows = [line.row for line in read(metrics)]
    cells = []
    for way in (f"avg@{ATTEMPTS}", "greedy"):
        key = f"eval/letters_agent/{way}"
        evaluated = [row for row in rows if key in row]
        for row in (evaluated[0], evaluated[-1]):
            mean, low, high = (max(0.0, row[name]) for name in (key, f"{key}/low", f"{key}/high"))
            cells.append(f"{mean:.3f} [{low:.3f}, {high:.3f}]")
    return f"| {seed} | {' | '.join(cells)} | {seconds:.0f} |"


if __name__ == "__main__":
    main()
