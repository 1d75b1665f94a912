"""Virtual environments of the projects that ngym is compared with, each made once.

TRL has the torch and the transformers of the Python that asks. NeMo Gym asks for Python 3.13.14; uv's newest 3.13 is used.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRL = "1.16.0"
NEMO_GYM = "0.7.0"


def trl_python(folder: Path) -> Path:
    """The Python of an environment with TRL in this folder.

    Raises:
        SystemExit: it cannot be made.
    """
    import torch
    import transformers

    packages = [f"torch=={torch.__version__}", f"transformers=={transformers.__version__}", f"trl=={TRL}"]
    return _make_environment(folder, [sys.executable, "-m", "venv", "--clear", str(folder)], packages, "Python's venv")


def nemo_gym_python(folder: Path) -> Path:
    """The Python of an environment with NeMo Gym in this folder.

    Raises:
        SystemExit: it cannot be made, for example without Python 3.13, which uv may download.
    """
    make = [sys.executable, "-m", "uv", "venv", "--quiet", "--clear", "--seed", "--python", "3.13", str(folder)]
    return _make_environment(
        folder, make, ["--ignore-requires-python", f"nemo-gym=={NEMO_GYM}"], "a python3.13 on PATH"
    )


def _make_environment(folder: Path, make: list[str], packages: list[str], needs: str) -> Path:
    python = folder.absolute() / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making {folder}", flush=True)
        for command in (make, [str(python), "-m", "pip", "install", "--quiet", *packages]):
            if subprocess.run(command, check=False).returncode:
                sys.exit(f"{folder}: not made, see above; it needs {needs} and a package index")
        (folder / "made").touch()
    return python
