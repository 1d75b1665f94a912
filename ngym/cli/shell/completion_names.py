"""Shell completion of service names and of the keys of `key=value` overrides. Never raises an error."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from ngym.config.shipped_files import PACKAGE, shipped

NOT_WRITTEN = {"name", "options", "where", "key_where"}  # fields of a stanza that are not keys in the file
Completer = Callable[[click.Context, click.Parameter, str], list[str]]
DEFAULT = Path("global_config.yaml")


class Definition(NamedTuple):
    """The definition of a name, and its file."""

    file: Path
    node: ast.ClassDef | ast.expr


def of_recipe() -> Iterator[str]:
    """Every key of a training recipe."""
    return of_model(PACKAGE / "trainer" / "recipe" / "recipe.py", "Recipe")


def of_config(stanzas: Mapping[str, Mapping[str, Any]], folder: Path) -> Iterator[str]:
    """Every key of a config with these services. folder: where their apps are looked up first."""
    config = PACKAGE / "config" / "service_config.py"
    house = [key for key in of_model(config, "Stanza") if key not in NOT_WRITTEN]
    for name, stanza in stanzas.items():
        own = _of_app(str(stanza.get("app", "")), folder)
        yield from (f"{name}.{key}" for key in dict.fromkeys([*stanza, *house, *own]))
    yield from (f"ngym.{key}" for key in of_model(config, "Settings"))


def completions(keys: Iterable[str], prefix: str) -> list[str]:
    """The possible next words, up to the next `.` or `=`."""
    stem = prefix[: prefix.rfind(".") + 1]
    rest = (key.removeprefix(stem).partition(".") for key in keys if key.startswith(prefix))
    return list(dict.fromkeys(f"{stem}{word}{dot or '='}" for word, dot, _ in rest))


def of_model(file: Path, name: str) -> Iterator[str]:
    """Every key of a pydantic model and of the models inside it; lists and maps have no keys."""
    definition = _find(file, name)
    return _keys(definition) if definition and isinstance(definition.node, ast.ClassDef) else iter(())


def _of_app(app: str, folder: Path) -> Iterator[str]:
    """The options of a service: those of the class that its app names, or of the class `Options`."""
    places = (
        place for home in (folder, shipped()) for place in (home / app, home / f"{app}.py", home / app / "app.py")
    )
    file = next((place for place in places if place.is_file()), None)
    if not app or file is None:
        return iter(())
    made = _definitions(file).get("app")
    keywords = made.node.keywords if made and isinstance(made.node, ast.Call) else ()
    option_classes = (each.value.id for each in keywords if each.arg == "options" and isinstance(each.value, ast.Name))
    return of_model(file, next(option_classes, "Options"))


def _keys(model: Definition) -> Iterator[str]:
    for name, (file, annotation) in _fields(model).items():
        models = [] if _has_scalars(annotation) else _models(file, annotation)
        inside = [f"{name}.{key}" for each in models for key in _keys(each)]
        yield from dict.fromkeys(inside) if inside else (name,)


def _fields(model: Definition) -> dict[str, tuple[Path, ast.expr]]:
    """Name -> annotation, the inherited ones first."""
    file, node = model
    if not isinstance(node, ast.ClassDef):
        return {}
    bases = [definition for base in node.bases if isinstance(base, ast.Name) and (definition := _find(file, base.id))]
    fields = {name: field for base in bases for name, field in _fields(base).items()}
    own = (each for each in node.body if isinstance(each, ast.AnnAssign) and not _is_class_variable(each.annotation))
    return fields | {each.target.id: (file, each.annotation) for each in own if isinstance(each.target, ast.Name)}


def _is_class_variable(annotation: ast.expr) -> bool:
    return isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "ClassVar"


def _has_scalars(annotation: ast.expr) -> bool:
    """Whether a number or a word is allowed, too: then the key itself is completed, not those inside a model."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _has_scalars(left) or _has_scalars(right)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            return _has_scalars(kind)
        case ast.Subscript(value=ast.Name(id="Literal")) | ast.Name(id="int" | "float" | "str"):
            return True
    return False


def _models(file: Path, annotation: ast.expr) -> Iterator[Definition]:
    """The models that the annotation allows."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            yield from _models(file, left)
            yield from _models(file, right)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            yield from _models(file, kind)
        case ast.Subscript(value=ast.Name(id="SerializeAsAny"), slice=kind):
            yield from _models(file, kind)
        case ast.Name(id=name) if definition := _find(file, name):
            if isinstance(definition.node, ast.ClassDef):
                yield definition
            else:
                yield from _models(definition.file, definition.node)


def _find(file: Path, name: str) -> Definition | None:
    """The definition of a name that this file uses, following imports; None if it is not in the sources of ngym."""
    definition = _definitions(file).get(name)
    return definition if definition else next((_find(*place) for place in [_imports(file).get(name)] if place), None)


@cache
def _definitions(file: Path) -> dict[str, Definition]:
    """The classes and constants of a file."""
    definitions: dict[str, Definition] = {}
    for node in _statements(file):
        match node:
            case ast.ClassDef(name=name):
                definitions[name] = Definition(file, node)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                definitions[name] = Definition(file, value)
    return definitions


@cache
def _imports(file: Path) -> dict[str, tuple[Path, str]]:
    """Name -> the file of ngym that it is imported from, and its name there."""
    imports: dict[str, tuple[Path, str]] = {}
    for node in _statements(file):
        if isinstance(node, ast.ImportFrom) and (source := _source(file, node)):
            imports |= {each.asname or each.name: (source, each.name) for each in node.names}
    return imports


def _source(file: Path, node: ast.ImportFrom) -> Path | None:
    words = (node.module or "").split(".")
    folder = file.parents[node.level - 1] if node.level else PACKAGE.parent
    if not node.level and words[0] != PACKAGE.name:
        return None
    path = folder.joinpath(*words)
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


@cache
def _statements(file: Path) -> list[ast.stmt]:
    """The statements of a file and of its `if` blocks; none if it cannot be read, which the command itself reports."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [each for node in body for each in (node.body if isinstance(node, ast.If) else [node])]


def services(*kinds: str) -> Completer:
    """A `shell_complete=` function: the services of these kinds, or all, in the config of the command line."""

    def complete(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
        stanzas = [stanza for file in _files(ctx) for stanza in _stanzas(file)]
        return [name for name, stanza in stanzas if name.startswith(prefix) and (not kinds or stanza["kind"] in kinds)]

    return complete


def overrides(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[CompletionItem]:
    """A `shell_complete=` function: the keys of the config of the command line."""

    files = _files(ctx)
    stanzas: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, stanza in _stanzas(file):
            if name.startswith(prefix.partition(".")[0]):
                stanzas[name] = stanzas.get(name, {}) | stanza
    return keys(list(of_config(stanzas, files[0].parent)), ctx, parameter, prefix)


def keys(known: Sequence[str], ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[CompletionItem]:
    """The possible completions of these keys, or a file as the value of one."""

    if is_value(known, ctx, parameter):
        return [CompletionItem(prefix, type="file")]
    return [CompletionItem(word) for word in completions(known, prefix)]


def is_value(known: Sequence[str], ctx: click.Context, parameter: click.Parameter) -> bool:
    """Whether the word follows a key's `=`, which bash treats as a separate word."""
    words = ctx.params.get(parameter.name or "") or ("",)
    return words[-1] == "=" or words[-1] in known


def _files(ctx: click.Context) -> Sequence[Path]:
    return ctx.params.get("configs") or (DEFAULT,)


def _stanzas(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each service of a config file and its stanza."""
    import yaml

    try:
        written = yaml.safe_load(file.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return
    for name, stanza in written.items() if isinstance(written, dict) else ():
        if isinstance(stanza, dict) and "kind" in stanza:
            yield str(name), stanza
