"""What every part of a recipe is made of: frozen records, and paths that are looked up where the user is, then where ngym is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ngym.config.shipped_files import PACKAGE, shipped


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Word = Annotated[str, BeforeValidator(str)]  # a number in YAML is a word in a command


def find(path: str) -> Path | None:
    """A file or folder in the working directory, else among the shipped ones."""
    return next((found for found in (Path(path), shipped() / path, PACKAGE / path) if found.exists()), None)


def existing(path: str) -> str:
    """The absolute path of a file or folder; a ValueError if there is none."""
    found = find(path)
    if found is None:
        raise ValueError(f"there is no {path} in {Path.cwd()}, nor among the files that travel with ngym")
    return str(found.resolve())


def _local_or_hub(name: str) -> str:
    """A folder's absolute path; a name that can only be one on the Hugging Face hub stays as it is."""
    found = find(name)
    if found is not None:
        return str(found.resolve())
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"there is no folder {name} in {Path.cwd()}, and owner/name of the Hugging Face hub it is not")
    return name


ExistingPath = Annotated[str, AfterValidator(existing)]
ModelName = Annotated[str, AfterValidator(_local_or_hub)]
