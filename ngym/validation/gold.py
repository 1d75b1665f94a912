"""An environment's rows and gold answers, and the scripted model that stands in for its judge.

A line of gold.jsonl is a case:

    {"case": "in words", "task": {the row's own fields}, "text": "the answer", "expect": {"reward": 1.0, ...}}

with `output` (Responses items) in the place of `text` where more was said than text, `calls` ([tool, arguments], made
in the case's session first) and `worse`: which spoilt forms of the answer must get less than it, of `empty` (nothing
said or called), `garbage` (noise) and `cut` (half of the calls, half of the text); all three where it is left out.

It shows that questions arrive, verdicts are read and rewards computed; nothing about how well any model judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from ngym.config.service_config import Config, Stanza
from ngym.config.shipped_files import shipped_path
from ngym.errors import UsageError
from ngym.files.jsonl import Line, checked
from ngym.schema import Json

Spoilt = Literal["empty", "garbage", "cut"]
ALL_WORSE: tuple[Spoilt, ...] = ("empty", "garbage", "cut")
GOLD = "gold.jsonl"
ROWS = ("train.jsonl", "validation.jsonl", "example.jsonl")
MODEL = "model.jsonl"


class Case(BaseModel):
    """An answer whose reward is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    case: str
    task: Json
    text: str = ""
    output: tuple[Json, ...] | None = None
    calls: tuple[tuple[str, Json], ...] = ()
    expect: Json
    worse: tuple[Spoilt, ...] = ALL_WORSE

    @property
    def items(self) -> list[Json]:
        """What was said, as the items of a response."""
        return says(self.text) if self.output is None else list(self.output)

    @property
    def reward(self) -> float | None:
        found: float | None = self.expect.get("reward")
        return found


class Environment(NamedTuple):
    """A gym server of the config and the folder of its data."""

    name: str
    data: Path

    def cases(self) -> list[Case]:
        """UsageError, with file and line, for one that is none."""
        return [_case(line.row, f"{self.data / GOLD}:{line.number}") for line in _lines(self.data / GOLD)]

    def rows(self, file: str) -> list[Json]:
        """Of train.jsonl, validation.jsonl or example.jsonl; empty if there is no such file."""
        return [line.row for line in _lines(self.data / file)]


def find_environment(config: Config, stanza: Stanza) -> Environment | None:
    """The data of a gym server, from the first of its `data_places` with a gold.jsonl; None if there is none."""
    if stanza.app is None:
        return None
    data = next((place for place in data_places(config.root, stanza.app) if (place / GOLD).is_file()), None)
    return Environment(stanza.name, data) if data is not None else None


def data_places(root: Path, app: str) -> list[Path]:
    """Where the data of `gym_servers/NAME` may be: `data` in the folder of its app or data/NAME beside the config, then the
    shipped data.
    """
    folder = app_folder(app)
    return [root / folder / "data", root / "data" / folder.name, shipped_path(Path("data") / folder.name)]


def app_folder(app: str) -> Path:
    """The folder of `gym_servers/NAME`, also written `gym_servers/NAME/app.py`; its name is that of its data."""
    path = Path(app)
    return path.parent if path.name == "app.py" else path.with_name(path.stem)


def says(text: str) -> list[Json]:
    """An assistant's message."""
    return [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]


def _lines(path: Path) -> list[Line]:
    """None if there is no such file."""
    return list(checked(path, lambda row: None)) if path.is_file() else []


def _case(row: Json, where: str) -> Case:
    try:
        return Case.model_validate(row)
    except ValidationError as error:
        wrong: Any = error.errors()[0]
        raise UsageError(f"{where}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None


def others(config: Config, name: str) -> list[str]:
    """The services that a service's options name, such as a judge."""
    given = config.services[name].options.values()
    return [value for value in given if isinstance(value, str) and value in config.services]


def can_be_alone(config: Config, environment: Environment) -> bool:
    """Whether it asks nobody, or only models that its scripted one can stand in for."""
    asked = others(config, environment.name)
    scripted = (environment.data / MODEL).is_file()
    return not asked or (scripted and all(config.services[name].kind == "model" for name in asked))


def with_stand_ins(config: Config, environments: Sequence[Environment]) -> Config:
    """Of the config: these environments, which `can_be_alone`, and a scripted model for each that asks one."""
    services: dict[str, Stanza] = {}
    for environment in environments:
        stanza = config.services[environment.name]
        asked = others(config, environment.name)
        if asked:
            scripted = f"{environment.name}_scripted_model"
            replies = {"file": str((environment.data / MODEL).resolve())}
            services[scripted] = Stanza(name=scripted, kind="model", app="models/scripted", options=replies)
            options = {key: scripted if value in asked else value for key, value in stanza.options.items()}
            stanza = stanza.model_copy(update={"options": options})
        services[environment.name] = stanza
    return config.model_copy(update={"services": services})
