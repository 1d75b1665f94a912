"""The names of `import ngym`, each with its signature and docstring, and the modules that authors use."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

import ngym

from .fields import keys, keys_table
from .markup import code, fence, table, words
from .specimen import Specimen

# Modules of functions that are used by their module's name.
MODULES = (
    "ngym.grading.answers",
    "ngym.grading.text_match",
    "ngym.grading.number_match",
    "ngym.grading.reward_parts",
    "ngym.grading.llm_judge",
    "ngym.grading.reward_model",
    "ngym.stats",
    "ngym.sandbox",
    "ngym.workers",
    "ngym.trl",
)
WIDE = 100
SECTIONS = re.compile(r"^(Args|Raises|Returns|Yields):$", re.MULTILINE)
INTRO = """\
# Python

Every public name of `ngym`, with its own docstring. A name is imported when it is first used: `import ngym` costs nothing.
"""


def text(specimen: Specimen) -> str:
    names = [name for name in ngym.__all__ if not name.startswith("__")]
    parts = [INTRO, "## ngym {#ngym}\n"]
    parts += [_name(name, getattr(ngym, name)) for name in sorted(names, key=str.lower)]
    parts += [_module(importlib.import_module(name)) for name in MODULES]
    return "\n".join(parts)


def _module(module: ModuleType) -> str:
    said = inspect.cleandoc(module.__doc__ or "").splitlines()
    public = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and (inspect.isfunction(value) or inspect.isclass(value))
    ]
    rows = [
        (code(name + _arguments(getattr(module, name))), words(_first(getattr(module, name))))
        for name in public
        if callable(getattr(module, name))
    ]
    return f"## {module.__name__} {{#{module.__name__.replace('.', '-')}}}\n\n{words(said[0] if said else '')}\n\n{table(('Name', ''), rows)}"


def _name(name: str, value: Any) -> str:
    head = f"### {name} {{#{name}}}\n"
    if not inspect.isroutine(value) and not inspect.isclass(value):
        plain = get_args(value)[0].__name__ if get_origin(value) is Annotated else repr(value)
        return f"{head}\n{fence('python', f'{name} = {plain}')}"
    parts = [head, fence("python", _declared(name, value)), *_doc(inspect.cleandoc(_own_doc(value)))]
    if inspect.isclass(value):
        parts.append(keys_table(list(keys(value))) if issubclass(value, BaseModel) else "")
        parts += _members(value)
    return "\n".join(part for part in parts if part)


def _declared(name: str, value: Any) -> str:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        plain = issubclass(value, BaseModel | Exception | dict) or not value.__dict__.get("__init__")
        return (
            f"class {name}({bases})"
            if plain and bases
            else f"class {name}" + ("" if plain else _signature(value, False))
        )
    return f"{'async ' if inspect.iscoroutinefunction(value) else ''}def {name}{_signature(value, True)}"


def _own_doc(value: Any) -> str:
    return (value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__) or ""


def _signature(value: Any, returns: bool) -> str:
    """As one would write it, an argument a line where it is long."""
    signature = inspect.signature(value)
    parameters = [each for name, each in signature.parameters.items() if name not in ("self", "cls")]
    shown, kind = [], None
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            shown.append("*")
        kind = each.kind
        shown.append(_parameter(each))
    has_return = returns and signature.return_annotation is not signature.empty
    tail = f" -> {_annotation(signature.return_annotation)}" if has_return else ""
    flat = f"({', '.join(shown)}){tail}"
    return flat if len(flat) <= WIDE else "(\n" + "".join(f"    {each},\n" for each in shown) + f"){tail}"


def _parameter(each: inspect.Parameter) -> str:
    star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    kind = "" if each.annotation is each.empty else f": {_annotation(each.annotation)}"
    if each.default is each.empty:
        return f"{star}{each.name}{kind}"
    default = each.default.__name__ if inspect.isclass(each.default) else repr(each.default)
    return f"{star}{each.name}{kind}{' = ' if kind else '='}{default}"


def _annotation(annotation: Any) -> str:
    """As in the source, without the names of modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+([A-Z]\w*)", r"\1", text)


def _arguments(value: Any) -> str:
    if inspect.isclass(value):
        return ""
    try:
        return f"({', '.join(str(each).split(':')[0].split('=')[0].strip() for each in inspect.signature(value).parameters.values())})"
    except (TypeError, ValueError):
        return ""


def _first(value: Any) -> str:
    return (inspect.cleandoc(_own_doc(value)).split("\n\n")[0]) if _own_doc(value) else ""


def _doc(doc: str) -> list[str]:
    """Paragraphs, and Args and the like as lists."""
    parts = SECTIONS.split(doc)
    found = [_paragraphs(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        found.append(f"**{title}**\n\n{_entries(body)}")
    return [each for each in found if each.strip()]


def _paragraphs(text: str) -> str:
    found = []
    for each in re.split(r"\n\s*\n", text.strip()):
        indented = all(line.startswith("    ") for line in each.splitlines())
        found.append(fence("python", inspect.cleandoc(each)) if indented and each.strip() else words(each) + "\n")
    return "\n".join(found)


def _entries(body: str) -> str:
    """`name: words` of an Args section, a list item each."""
    lines: list[str] = []
    for line in inspect.cleandoc("\n" + body).splitlines():
        if line and not line.startswith(" "):
            name, colon, rest = line.partition(": ")
            lines.append(f"- {', '.join(map(code, name.split(', ')))}: {words(rest)}" if colon else f"- {words(line)}")
        elif line.strip():
            lines.append(f"  {words(line)}")
    return "\n".join(lines) + "\n"


def _members(value: type) -> list[str]:
    """The public methods and properties that a class has itself and that say something."""
    rows = []
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if any("validator" in type(mark).__name__.lower() for mark in (member, function)):
            continue
        shown = (
            name
            if isinstance(member, property)
            else f"{name}{_arguments(function)}".replace("(self, ", "(").replace("(self)", "()")
        )
        rows.append(
            (code(f"await {shown}" if inspect.iscoroutinefunction(function) else shown), words(_first(function)))
        )
    return [table(("Member", ""), rows)]
