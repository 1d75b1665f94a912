"""`ng_init`: creates a folder with a runnable environment as a starting point."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from string import Template

import click
import orjson

from ngym.cli.shell.main import DISK_FULL, command, writing
from ngym.errors import UsageError
from ngym.files.atomic import check_writable

NAME = re.compile(r"[a-z][a-z0-9_]*")
TAKEN = ("ngym", "policy")  # keys of CONFIG, and of every config
SCHEMAS = Path(__file__).parents[1] / "schemas"
WORDS = ("stone", "river", "cloud", "bread", "light")
GOLD = (
    {"case": "the word backwards", "task": {"word": "stone"}, "text": "It is enots.", "expect": {"reward": 1.0}},
    {"case": "the word as it was", "task": {"word": "stone"}, "text": "It is stone.", "expect": {"reward": 0.0}},
    {"case": "another word", "task": {"word": "river"}, "text": "It is enots.", "expect": {"reward": 0.0}},
)

CONFIG = Template("""\
# yaml-language-server: $$schema=schemas/global_config.json
# Every service of the project, by name. Any key can be set on the command line: ng_run policy.latency_s=0.5

# A model with fixed answers, so that everything runs without a GPU.
# A real one: {kind: model, app: models/vllm, model: Qwen/Qwen3-0.6B}
policy:
  kind: model
  app: models/scripted
  replies:
    - {turn: 1, match: "word '(\\\\w+)'", tool_calls: [{name: mirror, arguments: {word: "{1}"}}]}
    - {turn: 2, text: "It is {tool_output}."}

$name:
  kind: gym_server
  app: gym_servers/$name

${name}_agent:
  kind: agent
  app: agents/simple
  gym: $name
  model: policy
""")

APP = Template('''\
"""$name: a tool and a check. Reward 1 when the answer has the row's word in it, written backwards."""

from pydantic import BaseModel, Field

from ngym import VerifyRequest, gym_server


class Word(BaseModel):
    word: str = Field(description="The word to turn around.")


class Task(VerifyRequest):
    word: str  # a field of the row; a row without it is refused


async def mirror(body: Word) -> str:
    """Write a word backwards."""
    return body.word[::-1]


async def verify(task: Task) -> float:
    return float(task.word[::-1] in task.text)


app = gym_server(tools=[mirror], verify=verify)
''')

README = Template("""\
# $name

- `gym_servers/$name/app.py`: the environment, a tool and `verify`.
- `gym_servers/$name/README.md`: what it is; `ng_list` shows the lines between the `---`.
- `gym_servers/$name/data/example.jsonl`: tasks. `verify` gets the fields next to `responses_create_params`.
- `gym_servers/$name/data/gold.jsonl`: answers whose reward is known.
- `global_config.yaml`: the services: a model, this environment, an agent that brings them together.
- `schemas/`: JSON Schemas of the config and of recipes, for completion in editors (VS Code: the YAML extension).

In one terminal:

    ng_run

In another one, in the same folder:

    ng_collect_rollouts --agent ${name}_agent --input gym_servers/$name/data/example.jsonl \\
        --output results/out.jsonl --repeats 2

Training needs a policy with weights. This trains one with live rollouts of this environment (a GPU is faster; on a
CPU, the tiny policy of `ng_quickstart` is trained in minutes: `model.path=runs/quickstart/sft/policy`):

    ng_train --environment $name model.path=Qwen/Qwen3-0.6B

`ng_train --help` and the guide "Training" say more. Write a few hundred tasks into `gym_servers/$name/data/train.jsonl`
first: it is used instead of `example.jsonl`, and `validation.jsonl` beside it is used for evaluation.

- `ng_validate` checks the config.
- `ng_validate --environment $name` tests the environment on its `gold.jsonl`: answers, and the reward that each must
  get. `pytest` does the same.
- `ng_status` shows what runs; `.ngym/logs/` has the services' output.
""")

FACTS = Template("""\
---
description: Turns a word around.
domain: other # math, coding, agent, knowledge, instruction_following, long_context, safety, games, translation, e2e, rlhf
kind: tools # or single_turn (only answers), steps (plays turn by turn)
license: Apache-2.0 # of its data
---
# $name

- **Row**: `word`.
- **Reward**: 1 if the answer has the word in it, written backwards, else 0.
""")

TEST = Template('''\
"""Tests $name without a model: its gold answers get their rewards, and corrupted ones get less."""

import subprocess
import sys
from pathlib import Path


def test_the_environment_rewards_what_it_must() -> None:
    command = [sys.executable, "-m", "ngym", "validate", "--environment", "$name"]
    ended = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
''')

EXIT_CODES = """\
Exit codes: 0  the folder was created
            2  the name is not valid, or the folder is not empty or cannot be written; nothing was overwritten"""


@command("ng_init", epilog=EXIT_CODES)
@click.argument("name")
@click.option(
    "--folder", type=click.Path(path_type=Path), metavar="PATH", help="Where to create it.  [default: ./NAME]"
)
@click.option("--dry-run", is_flag=True, help="Show which files would be written, and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: the folder, its files, what to run next.")
def main(name: str, folder: Path | None, dry_run: bool, as_json: bool) -> None:
    """Create a folder with an environment NAME, its config and example tasks; it runs without changes.

    \b
    Examples: ng_init my_env
              ng_init my_env --folder work/first_try
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid name for an environment: use lower-case letters, digits and '_', such as my_env"
        )
    if name in TAKEN:
        raise UsageError(f"{name!r} is another key of global_config.yaml; choose another name, such as my_env")
    folder = folder or Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; nothing was written. Choose another --folder")
    check_writable(folder)
    files = {folder / path: text for path, text in project(name).items()}
    if not dry_run:
        _write(folder, files)
    train = f"ng_train --environment {name} model.path=Qwen/Qwen3-0.6B"
    steps = [f"cd {shlex.quote(str(folder))}", "ng_run", _collect(name), train]
    if as_json:
        click.echo(orjson.dumps({"folder": str(folder), "files": [str(path) for path in files], "next": steps}))
        return
    for path in files:
        click.echo(f"{'would write' if dry_run else 'wrote'} {path}")
    click.echo(
        "\nnext:\n  {}\n  {}\nand in a second terminal, in the same folder:\n  {}\nthen train a policy on it:\n  {}".format(
            *steps
        )
    )


def _write(folder: Path, files: Mapping[Path, str]) -> None:
    """Write all files. On a full disk all are removed again, so that the same command can be repeated."""
    for path, text in files.items():
        try:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            if error.errno in DISK_FULL:
                _remove(folder, files)
                raise
            raise UsageError(f"{path}: cannot be written ({error.strerror}); choose another --folder") from None


def _remove(folder: Path, files: Iterable[Path]) -> None:
    """Remove the files, and the folders in `folder` that are then empty."""
    for path in files:
        path.unlink(missing_ok=True)
    made = {parent for path in files for parent in path.parents if folder in parent.parents}
    for parent in sorted(made, reverse=True):
        with suppress(OSError):
            parent.rmdir()


def project(name: str) -> dict[str, str]:
    """The files of a new project: path -> text."""
    return {
        "global_config.yaml": CONFIG.substitute(name=name),
        f"gym_servers/{name}/app.py": APP.substitute(name=name),
        f"gym_servers/{name}/README.md": FACTS.substitute(name=name),
        f"gym_servers/{name}/data/example.jsonl": "".join(json.dumps(_task(name, word)) + "\n" for word in WORDS),
        f"gym_servers/{name}/data/gold.jsonl": "".join(json.dumps(case) + "\n" for case in GOLD),
        f"tests/test_{name}.py": TEST.substitute(name=name),
        "README.md": README.substitute(name=name),
        "schemas/global_config.json": (SCHEMAS / "global_config.json").read_text(encoding="utf-8"),
        "schemas/recipe.json": (SCHEMAS / "recipe.json").read_text(encoding="utf-8"),
        "results/.gitignore": "*\n!.gitignore\n",
        ".gitignore": ".ngym/\n",
    }


def _task(name: str, word: str) -> dict[str, object]:
    return {
        "responses_create_params": {"input": f"Write the word '{word}' backwards."},
        "agent_ref": {"type": "responses_api_agents", "name": f"{name}_agent"},
        "word": word,
    }


def _collect(name: str) -> str:
    tasks = f"gym_servers/{name}/data/example.jsonl"
    return f"ng_collect_rollouts --agent {name}_agent --input {tasks} --output results/out.jsonl"
