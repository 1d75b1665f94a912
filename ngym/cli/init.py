"""`ng_init`: a new folder with an environment that runs at once, for the author to change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Template

import click

from ngym.cli.main import command
from ngym.errors import UsageError

NAME = re.compile(r"[a-z][a-z0-9_]*")
WORDS = ("stone", "river", "cloud", "bread", "light")
GOLD = (
    {"case": "the word backwards", "task": {"word": "stone"}, "text": "It is enots.", "expect": {"reward": 1.0}},
    {"case": "the word as it was", "task": {"word": "stone"}, "text": "It is stone.", "expect": {"reward": 0.0}},
    {"case": "another word", "task": {"word": "river"}, "text": "It is enots.", "expect": {"reward": 0.0}},
)

CONFIG = Template("""\
# Every service of the project, by name. Any key can be set on the command line: ng_run policy.latency_s=0.5

# A model whose answers are written down, so that everything runs at once.
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
- `data/$name/example.jsonl`: tasks; `gold.jsonl`: answers whose reward is known. What is beside `responses_create_params` is for `verify`.
- `global_config.yaml`: the services: a model, this environment, an agent that brings them together.

In one terminal:

    ng_run

In another one, in the same folder:

    ng_collect_rollouts --agent ${name}_agent --input data/$name/example.jsonl --output results/out.jsonl --repeats 2

`ng_validate` checks the config; `ng_validate --environment $name` tries the environment on `data/$name/gold.jsonl`: answers, and
the reward that each must get (`pytest` does the same). `ng_status` says what runs, `.ngym/logs/` has what the services print.
""")

FACTS = Template("""\
---
description: Turns a word around.
domain: other # math, coding, agent, knowledge, instruction_following, long_context, safety, games, translation, e2e, rlhf
kind: tools # or single_turn (only answers), steps (plays turn by turn)
license: Apache-2.0 # of data/$name
---
# $name

- **Row**: `word`.
- **Reward**: 1 if the answer has the word in it, written backwards, else 0.
""")

TEST = Template('''\
"""Is $name right? Its gold answers get what they must, and spoilt ones less; no model is needed."""

import subprocess
import sys
from pathlib import Path


def test_the_environment_rewards_what_it_must() -> None:
    command = [sys.executable, "-m", "ngym", "validate", "--environment", "$name"]
    ended = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
''')


@command("ng_init")
@click.argument("name")
@click.option("--folder", type=click.Path(path_type=Path), metavar="PATH", help="Where to make it. [default: ./NAME]")
def main(name: str, folder: Path | None) -> None:
    """Make a folder with an environment NAME, its config and example tasks; all of it runs as it stands."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for an environment: use lower-case letters, digits and '_', such as my_env"
        )
    folder = folder or Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; nothing was written. Choose another --folder")
    for path, text in project(name).items():
        target = folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{target}: cannot be written ({error.strerror}); choose another --folder") from None
        click.echo(f"wrote {target}")
    click.echo(f"\nnext:\n  cd {folder}\n  ng_run\nand in a second terminal, in the same folder:\n  {_collect(name)}")


def project(name: str) -> dict[str, str]:
    """The files of a new project: path -> text."""
    return {
        "global_config.yaml": CONFIG.substitute(name=name),
        f"gym_servers/{name}/app.py": APP.substitute(name=name),
        f"gym_servers/{name}/README.md": FACTS.substitute(name=name),
        f"data/{name}/example.jsonl": "".join(json.dumps(_task(name, word)) + "\n" for word in WORDS),
        f"data/{name}/gold.jsonl": "".join(json.dumps(case) + "\n" for case in GOLD),
        f"tests/test_{name}.py": TEST.substitute(name=name),
        "README.md": README.substitute(name=name),
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
    return f"ng_collect_rollouts --agent {name}_agent --input data/{name}/example.jsonl --output results/out.jsonl"
