"""Environment cards: the front matter of an environment's README, read without starting the environment.

    ---
    description: A final formula or number, compared by math-verify.
    domain: math
    kind: single_turn
    license: Apache-2.0
    public_sets: {GSM8K: MIT}
    ---

`license` is that of its data. `public_sets` (optional) maps public training sets to their licences.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from ngym.config.yaml_tree import Tree, parse
from ngym.errors import ConfigError

# The names that NeMo Gym uses.
Domain = Literal[
    "math",
    "coding",
    "agent",
    "knowledge",
    "instruction_following",
    "long_context",
    "safety",
    "games",
    "translation",
    "e2e",
    "rlhf",
    "other",
]
EnvironmentKind = Literal["tools", "single_turn", "steps"]
FENCE = "---"
FORM = "---, description, domain, kind, license (a line each, `key: value`), ---"


class Facts(BaseModel):
    """kind: `tools` calls tools, `single_turn` only answers, `steps` plays turn by turn. license: SPDX if possible."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    description: str = Field(min_length=1, max_length=120, pattern=r"^[^\n]*$")
    domain: Domain
    kind: EnvironmentKind
    license: str = Field(min_length=1)
    public_sets: dict[str, str] = {}


def readme_of(app: Path) -> Path:
    """The file with the card of a gym server: README.md in the folder of app.py; my_env.md next to my_env.py."""
    return app.with_name("README.md") if app.name == "app.py" else app.with_suffix(".md")


def facts_in(readme: Path) -> Facts:
    """Read the card of a README; raises a ConfigError with file and line if it is missing or wrong."""
    shown = os.path.relpath(readme) if readme.is_relative_to(Path.cwd()) else str(readme)
    try:
        lines = readme.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{shown}: cannot be read ({reason}); an environment's README begins with {FORM}") from None
    if lines[:1] != [FENCE] or FENCE not in lines[1:]:
        raise ConfigError(f"{shown}:1: the facts of the environment are missing; begin the file with {FORM}")
    return parse(Facts, _tree("\n".join(lines[1 : lines.index(FENCE, 1)]), shown))


def _tree(text: str, shown: str) -> Tree:
    try:
        node, values = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 2}" if mark else shown
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{shown}:2: expected `key: value` lines between the two {FENCE}")
    # The first line is the fence, and yaml counts from 0.
    places = {str(key.value): f"{shown}:{key.start_mark.line + 2}" for key, _ in node.value}
    return Tree(values, places, default_where=f"{shown}:1")
