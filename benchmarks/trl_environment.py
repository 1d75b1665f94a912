"""A virtual environment with TRL, made once; torch and transformers are those of the Python that asks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import transformers

TRL = "1.16.0"


def trl_python(folder: Path) -> Path:
    """The Python of the environment in this folder."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        wanted = [f"torch=={torch.__version__}", f"transformers=={transformers.__version__}", f"trl=={TRL}"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / "made").touch()
    return python
