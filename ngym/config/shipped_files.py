"""Finds the files that ship with ngym. Light to import, because shell completion uses it."""

from __future__ import annotations

from pathlib import Path

from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
RECIPES = PACKAGE / "trainer" / "recipes"


def shipped() -> Path:
    """The folder with the services, recipes and data that ship with ngym (wheel or checkout)."""
    bundled = PACKAGE / "_shipped"
    return bundled if bundled.is_dir() else PACKAGE.parent


def shipped_path(path: str | Path) -> Path:
    """A shipped file or folder. `data/NAME/...` is the data in an environment's folder, gym_servers/NAME/data/...

    A checkout has a link for each; a wheel, which cannot hold links, has only the environments' folders.
    """
    match Path(path).parts:
        case ("data", name, *rest) if (data := shipped() / "gym_servers" / name / "data").is_dir():
            return data.joinpath(*rest)
    return shipped() / path


def app_file(app: str, root: Path, where: str = "config") -> Path:
    """The Python file of `gym_servers/math`: in the user's folder first, then among the shipped services."""
    for base in (root, shipped()):
        for candidate in (base / app, base / f"{app}.py", base / app / "app.py"):
            if candidate.is_file():
                return candidate.resolve()
    known = [
        f"{p.parent.name}/{p.name}" for base in (root, shipped()) for p in base.glob("*/*") if (p / "app.py").is_file()
    ]
    raise ConfigError(
        f"{where}: no service at {app!r}: neither {app}.py nor {app}/app.py exists in {root}{did_you_mean(app, known)}"
    )


def shipped_file(path: str, root: Path, where: str = "config") -> Path:
    """A file that a stanza names, such as `gym_servers/x/requirements.txt`: the user's, else the shipped one."""
    for base in (root, shipped()):
        if (base / path).is_file():
            return (base / path).resolve()
    raise ConfigError(f"{where}: there is no file {path!r} in {root}, nor among what ships with ngym")
