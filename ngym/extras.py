"""The optional dependencies of ngym: which extra a missing module belongs to, and which extras are installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from functools import cache

from ngym.errors import UsageError

NOT_FOR_USERS = frozenset({"dev", "docs", "test"})
# Modules whose name is not that of a required distribution.
OF_MODULE = {
    "agents": "agents",  # openai-agents
    "azure": "azure",
    "mlflow": "logging",
    "numpy": "train",
    "opentelemetry": "otel",
    "sympy": "math",
}
ENGINES = ("vllm", "cpu")  # the same module, for GPUs and for CPUs
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[.*?\])?.*extra == ['\"]([\w-]+)['\"]")


@cache
def extras() -> Mapping[str, tuple[str, ...]]:
    """The extras for users, and the distributions that each requires. Empty where ngym is not installed."""
    packages: dict[str, list[str]] = {}
    try:
        requirements = importlib.metadata.requires("ngym") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match and match[2] not in NOT_FOR_USERS:
            packages.setdefault(match[2], []).append(match[1])
    return {extra: tuple(names) for extra, names in packages.items()}


def missing_in(extra: str) -> list[str]:
    """The distributions of an extra that are not installed."""
    return [name for name in extras().get(extra, ()) if version(name) is None]


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(extra: str, who: str, *distributions: str) -> None:
    """Raise a UsageError if one of these distributions of an extra is not installed. who: such as `ng_train`."""
    if missing := [name for name in distributions if version(name) is None]:
        raise UsageError(f"{needs(extra, who)} (missing: {', '.join(missing)})")


def missing_extra(error: ImportError, who: str) -> str | None:
    """One line about the extra of the module that could not be imported; None if it belongs to no extra."""
    module = (error.name or "").partition(".")[0]
    extra = next(_of_module(module, who), None) if isinstance(error, ModuleNotFoundError) else None
    return None if extra is None else needs(extra, who)


def needs(extra: str, who: str) -> str:
    """`ng_train needs ngym[train]: pip install "ngym[train]"`."""
    if extra in ENGINES:
        return f'{who} needs vLLM: pip install "ngym[vllm]" for a GPU, "ngym[cpu]" for a CPU'
    return f'{who} needs ngym[{extra}]: pip install "ngym[{extra}]"'


def _of_module(module: str, who: str) -> Iterator[str]:
    """The extras that have this module; first one that is named as the command is."""
    if module in OF_MODULE:
        yield OF_MODULE[module]
    extra_names = [
        extra
        for extra, names in extras().items()
        if any(name.lower().replace("-", "_") == module.lower() for name in names)
    ]
    yield from sorted(extra_names, key=lambda extra: not who.endswith(extra))
