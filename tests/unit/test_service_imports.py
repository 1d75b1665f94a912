"""Imports of service folders: their own files, libraries, and the parts of ngym that services use; no cycles."""

import ast
import gc
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = {"agents": "agents", "gym_servers": "gym", "models": "models"}  # folder -> its package in ngym.services
SERVICES = [(kind, folder) for kind in KINDS for folder in sorted((ROOT / kind).iterdir()) if folder.is_dir()]
# The commands, and what only they use.
NOT_FOR_SERVICES = (
    "cli",
    "collect",
    "export",
    "notebook",
    "plot",
    "prepare",
    "supervise",
    "trainer",
    "validation",
    "view",
)


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Each import as (level, name); level: the dots of a relative import."""
    gc.disable()  # CPython 3.11: a collection within ast.parse can end it with "AST constructor recursion depth mismatch"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    finally:
        gc.enable()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            yield from ((node.level, base + alias.name) for alias in node.names)


@pytest.mark.parametrize(
    ("kind", "folder"), SERVICES, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_a_service_imports_only_its_own_files_libraries_and_the_part_of_ngym_for_its_kind(
    kind: str, folder: Path
) -> None:
    # `import agents` is not forbidden: the project's root is not on sys.path, so that name is the OpenAI Agents SDK.
    others = [f"ngym.services.{name}" for name in KINDS.values() if name != KINDS[kind]]
    forbidden = [*others, *(f"ngym.{name}" for name in NOT_FOR_SERVICES), "data", "gym_servers", "models", "trainer"]
    wrong = []
    for file in folder.rglob("*.py"):
        if (folder / "data") in file.parents:
            continue  # scripts that make the data; the service does not import them
        depth = len(file.relative_to(folder).parts)  # so many dots still lead into the service's folder
        for level, name in imports_of(file):
            leaves = level > depth
            names_another = level == 0 and any(f"{name}.".startswith(f"{other}.") for other in forbidden)
            if leaves or names_another:
                wrong.append(f"{file.relative_to(ROOT)}: {'.' * level}{name}")
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle_not_even_within_functions_or_for_types() -> None:
    folders = ("agents", "gym_servers", "models", "ngym", "trainer")
    modules = {
        _module(file): file for folder in folders for file in (ROOT / folder).rglob("*.py") if "data" not in file.parts
    }
    graph = {}
    for name, file in modules.items():
        package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
        found = (
            _resolve_module(".".join([*package[: len(package) - level + 1], imported]) if level else imported, modules)
            for level, imported in imports_of(file)
        )
        graph[name] = {each for each in found if each and each != name}
    assert len(graph) > 300 and graph["ngym.trainer.train"] > {"ngym.trainer.training_run"}
    TopologicalSorter(graph).prepare()  # CycleError names a circle


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = ("ngym", *parts) if parts[0] == "trainer" else parts  # ngym/trainer is a link
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _resolve_module(name: str, modules: dict[str, Path]) -> str:
    """The module of an imported name: the longest part of it that is one."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name
