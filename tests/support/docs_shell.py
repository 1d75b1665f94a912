"""The command lines of a shell snippet, checked: commands, options, files, recipes, targets."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from docs_project import PORTS
from documents import ROOT

from ngym.cli.shell.main import COMMANDS
from ngym.config.service_config import load_config
from ngym.errors import NgymError

# Commands of others: that they exist is not for us to say.
FOREIGN = frozenset(
    {
        "apt-get",
        "cd",
        "cp",
        "curl",
        "deactivate",
        "docker",
        "export",
        "git",
        "jq",
        "kill",
        "less",
        "nvidia-smi",
        "pytest",
    }
)
FOREIGN |= {"python", "rm", "scontrol", "source", "split", "ulimit", "ssh", "tee", "uvicorn", "uvx", "wait", "."}
# Run as they are.
HARMLESS = frozenset({"cat", "curl", "done", "echo", "for", "head", "ls", "mkdir", "sed", "tail", "tr"})
LAUNCHERS = frozenset({"torchrun", "deepspeed", "srun", "nohup", "time"})
ENDS = frozenset({"|", "&&", "||", ";", "&", "(", ")"})
REDIRECTS = frozenset({">", ">>", "<", "2>", ">&", "&>"})
ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
QUICK = frozenset({"export", "init", "list", "plot", "profile", "reverify", "status", "validate"})
REHEARSED = frozenset({"quickstart", "run", "serve", "train"})  # what takes minutes is given with --dry-run


class Line(NamedTuple):
    """One command with its words. number: of the line in the snippet, from 0."""

    number: int
    words: tuple[str, ...]

    @property
    def ours(self) -> tuple[str, tuple[str, ...]] | None:
        """The name of our command and its arguments, for any launcher."""
        for place, word in enumerate(self.words):
            if word.startswith("ng_") and word.removeprefix("ng_") in COMMANDS:
                return word.removeprefix("ng_"), self.words[place + 1 :]
            if word in ("ng", "ngym") and place == 0 and len(self.words) > 1 and not self.words[1].startswith("-"):
                return self.words[1].removeprefix("ng_").replace("-", "_"), self.words[2:]
            if place == 0 and word not in LAUNCHERS:
                return None
        return None


def lines(text: str) -> Iterator[Line]:
    """The commands of a snippet; comments, assignments and redirections left out. ValueError: a quote is never closed."""
    pending, began = "", 0
    for number, line in enumerate(text.splitlines()):
        began = number if not pending else began
        pending = (
            f"{pending.removesuffix(chr(92))} {line.strip()}"
            if pending.endswith("\\")
            else f"{pending}\n{line}"
            if pending
            else line
        )
        if pending.endswith("\\"):
            continue
        try:
            words = _words(pending)
        except ValueError:
            continue
        yield from (Line(began, each) for each in _commands(words))
        pending = ""
    if pending.strip():
        raise ValueError(f"a quote or a line is not ended: {pending[:80]}")


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    return list(lexer)


def _commands(words: list[str]) -> Iterator[tuple[str, ...]]:
    found: list[str] = []
    skipped = False
    for word in [*words, ";"]:
        if word in ENDS:
            if found:
                yield tuple(found)
            found, skipped = [], False
        elif word in REDIRECTS:
            skipped = True
        elif skipped:
            skipped = False
        elif found or not (ASSIGNED.match(word) or word in ("do", "then")):
            found.append(word)


def problem(line: Line, folder: Path) -> str | None:
    """The reason why this command cannot be given in this folder (the working directory), or None."""
    first, *rest = line.words
    if first == "make":
        return next(
            (f"make has no target {word!r}" for word in rest if "=" not in word and word not in _targets()), None
        )
    if first == "ng" and (not rest or rest[0].startswith("-")):
        return None
    if line.ours is not None:
        return _ours(*line.ours, folder)
    if first in ("uv", "pip"):
        extras = {extra for word in rest for extra in re.findall(r"ngym\[([\w,]+)\]", word)}
        extras |= {rest[place + 1] for place, word in enumerate(rest[:-1]) if word == "--extra"}
        missing = {extra for each in extras for extra in each.split(",")} - _extras()
        return f"there is no extra {sorted(missing)}" if missing else None
    if first == "python" and rest and rest[0].endswith(".py") and "/" in rest[0]:
        return None if (ROOT / rest[0]).is_file() or (folder / rest[0]).is_file() else f"there is no {rest[0]}"
    if first == "curl":
        return _body(rest)
    return (
        None
        if first in FOREIGN | HARMLESS | LAUNCHERS
        else f"{first}: an unknown command; or mark the snippet `not run`"
    )


def unknown_words(line: Line) -> str | None:
    """The reason why a command in running text, where arguments may be left out, names a command or option that does
    not exist.
    """
    if line.words[0] == "make":
        return problem(line, ROOT)
    if line.words[0] in FOREIGN | HARMLESS or line.words == ("ng",):
        return None
    if line.ours is None:
        return f"{line.words[0]}: an unknown command"
    if line.ours[0] in ("help", "completion"):
        return None
    name, arguments = line.ours
    if name not in COMMANDS:
        return f"there is no command {name!r}"
    command: click.Command = importlib.import_module(COMMANDS[name][0]).main
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    unknown = [word for word in arguments if word.startswith("--") and word.partition("=")[0] not in known]
    return f"{line.words[0]} has no option {unknown[0]}" if unknown else None


def rehearse(line: Line) -> tuple[str, ...]:
    """The words after `ng` that give this command without its effects: as a dry run, or as an exported page."""
    assert line.ours is not None
    name, words = line.ours
    if name == "view":
        return (name, *words, "--export", "viewed.html")
    return (name, *words, *(("--config", "global_config.yaml") if name == "collect_rollouts" else ()), "--dry-run")


def _ours(name: str, arguments: tuple[str, ...], folder: Path) -> str | None:
    if name not in COMMANDS:
        return f"there is no command {name!r}"
    command: click.Command = importlib.import_module(COMMANDS[name][0]).main
    if {"--help", "-h"} & set(arguments):
        return None
    try:
        with command.make_context(f"ng_{name}", list(arguments)) as context:
            _deeper(name, context)
    except click.exceptions.Exit:  # an option that only shows something
        return None
    except (click.ClickException, NgymError) as error:
        return f"ng_{name}: {error.format_message() if isinstance(error, click.ClickException) else error}"
    return None


def _deeper(name: str, context: click.Context) -> None:
    """The refusal of the command itself after its options: a recipe, an override, a service's name."""
    params = context.params
    if name == "train" and not params.get("sweeps"):
        words = params["recipe"]
        from ngym.trainer.recipe import recipe_reader

        if params.get("environment"):
            words = ("grpo.yaml", *words)  # the rest comes from the config of a project

        recipe_reader.read_recipe([w for w in words if "=" not in w], [w for w in words if "=" in w])
    if name in ("run", "validate", "collect_rollouts") and params.get("configs"):
        config = load_config(params["configs"], params["overrides"])
        for service in params.get("only") or params.get("names") or filter(None, [params.get("agent")]):
            config.stanza(service)


def _body(words: list[str]) -> str | None:
    for place, word in enumerate(words[:-1]):
        if word in ("-d", "--data", "--json") and not words[place + 1].startswith(("@", "$")):
            try:
                json.loads(words[place + 1])
            except ValueError as error:
                return f"curl {word}: no JSON: {error}"
    return None


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def is_harmless(command_lines: Sequence[Line], text: str) -> bool:
    """Whether a shell may be given all of it: quick commands, and requests to what runs here under a port of its own."""
    words = {line.words[0] for line in command_lines}
    elsewhere = "curl" in words and any(port not in PORTS for port in re.findall(r"\b[\w.-]+:(\d{4,5})\b", text))
    if elsewhere or not HARMLESS & words:
        return False
    return all(line.words[0] in HARMLESS or runnable(line, ()) for line in command_lines)


def runnable(line: Line, agents: Sequence[str]) -> tuple[str, ...] | None:
    """The words after `ng` with which this line is quickly run where these agents are served; None for what takes long or needs more.

    Commands that take long are run with --dry-run, which makes every check that needs nothing loaded; a page of the viewer
    is exported instead of served.
    """
    if line.ours is None:
        return None
    name, words = line.ours
    if {"--help", "--resume", "--environments", "--watch", "--models"} & set(words):
        return None
    if name == "collect_rollouts":
        return _collect_command(words, agents)
    if name == "view":
        return (name, *words, *(() if "--export" in words else ("--export", "viewed.html")))
    if name in REHEARSED:
        return (name, *words, "--dry-run")
    return (name, *words) if name in QUICK and "--config" not in words else None


def _collect_command(words: tuple[str, ...], agents: Sequence[str]) -> tuple[str, ...] | None:
    """One rollout, where its agent is served; a dry run, where it is in a config."""
    agent = dict(itertools.pairwise(words)).get("--agent")
    if "--head" in words:
        return None
    if "--config" in words:
        return ("collect_rollouts", *words, "--dry-run")
    if agent in agents:
        return ("collect_rollouts", *words, "--output", "collected.jsonl", "--limit", "1", "--overwrite")
    known = load_config([ROOT / "global_config.yaml"]).services
    return ("collect_rollouts", *words, "--config", "global_config.yaml", "--dry-run") if agent in known else None
