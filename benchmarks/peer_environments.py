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
    """The Python of an environment with TRL in this folder."""
    import torch
    import transformers

    wanted = [f"torch=={torch.__version__}", f"transformers=={transformers.__version__}", f"trl=={TRL}"]
    return _made(folder, [sys.executable, "-m", "venv", "--clear", str(folder)], wanted)


def nemo_gym_python(folder: Path) -> Path:
    """The Python of an environment with NeMo Gym in this folder.

    Raises:
        SystemExit: there is no Python 3.13, and it cannot be downloaded.
    """
    make = [sys.executable, "-m", "uv", "venv", "--quiet", "--clear", "--seed", "--python", "3.13", str(folder)]
    return _made(folder, make, ["--ignore-requires-python", f"nemo-gym=={NEMO_GYM}"])


def _made(folder: Path, make: list[str], wanted: list[str]) -> Path:
    python = folder.absolute() / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making {folder}", flush=True)
        if subprocess.run(make, check=False).returncode:
            sys.exit(f"{folder}: not made, see above; for NeMo Gym, put a python3.13 on PATH, or let uv download one")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / "made").touch()
    return python
