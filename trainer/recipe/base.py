"""The base of all recipe options: frozen records, and paths that are searched in the working directory, then among
ngym's files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ngym.config.shipped_files import PACKAGE, shipped_path


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Word = Annotated[str, BeforeValidator(str)]  # a YAML number may be a word of a command


def find(path: str) -> Path | None:
    """A file or folder in the working directory, else among the files that ship with ngym."""
    return next((found for found in (Path(path), shipped_path(path), PACKAGE / path) if found.exists()), None)


def existing(path: str) -> str:
    """The absolute path of a file or folder; a ValueError if it does not exist."""
    found = find(path)
    if found is None:
        raise ValueError(f"there is no {path} in {Path.cwd()}, nor among the files that ship with ngym")
    return os.path.abspath(found)


def _local_or_hub(name: str) -> str:
    """A folder's absolute path; a name of the Hugging Face hub stays unchanged."""
    found = find(name)
    if found is not None:
        return os.path.abspath(found)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"there is no folder {name} in {Path.cwd()}, and it is not an owner/name of the Hugging Face hub"
        )
    return name


ExistingPath = Annotated[str, AfterValidator(existing)]
ModelName = Annotated[str, AfterValidator(_local_or_hub)]
