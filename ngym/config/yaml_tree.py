"""Reads YAML files and `key=value` overrides with the line of each key, and parses them into typed records."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from ngym.did_you_mean import did_you_mean, near_file, nearest
from ngym.errors import ConfigError
from ngym.option_names import option

Model = TypeVar("Model", bound=BaseModel)
COMMAND_LINE = "command line"
MAX_NODES = 100_000  # per YAML file
MAX_DIGITS = 100
SURE, LIKELY = 0.85, 0.8  # similarity of a misspelled key: beside other candidates, and in another section
MAX_SUGGESTED = 2  # keys; a last part that more keys have, such as `name`, says too little
MAX_KEYS = 5  # in the message about a section that is not a mapping
DEEPEST = 8  # levels of keys
EXPECTED = {"model_type": "a mapping", "dict_type": "a mapping", "list_type": "a list", "tuple_type": "a list"}
"""pydantic's type of an error -> the form that the value must have."""
REFERENCE = re.compile(r"\$\{\.*([^:{}]+)\}")  # ${a.b} and the relative ${.b}, not ${oc.env:A}


@dataclass(frozen=True)
class ConfigTree:
    """A resolved configuration, and the place where each of its keys was written.

    values: plain dicts, lists and scalars. lines: dotted key -> `file.yaml:12`. root: the first file's folder.
    environment: dotted key -> the text, such as `${oc.env:TOKEN}`, of a value from an environment variable; shown
    instead of the value, which may be a secret.
    """

    values: dict[str, Any]
    lines: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path()
    default_where: str = "config"
    environment: Mapping[str, str] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """`file.yaml:12` of this key, of a key below it, or of the nearest key above."""
        below = next((line for written, line in self.lines.items() if written.startswith(f"{key}.")), None)
        if key and key not in self.lines and below:
            return below
        while key:
            if key in self.lines:
                return self.lines[key]
            key = key.rpartition(".")[0]
        return self.default_where


def load_tree(
    paths: Sequence[Path],
    overrides: Sequence[str] = (),
    *,
    named: Collection[str] = (),
    texts: Collection[str] = (),
) -> ConfigTree:
    """Read YAML files and `key=value` overrides into one tree, later ones winning, with `${...}` resolved.

    named: top-level keys whose mapping has a `name`, such as `algorithm`. A later file or override with another name
    replaces the mapping of the files before it, whose keys belong to the thing with the other name.
    texts: top-level keys whose scalars stay as they are written. In YAML 1.1, 12:00:00 is a number in base 60.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    lines: dict[str, str] = {}
    merged: DictConfig = OmegaConf.create({})
    for path in paths:
        data, file_lines = _read_yaml(path, texts)
        for key in named:
            part = data.get(key)
            _rename(merged, lines, key, part.get("name") if isinstance(part, dict) else None)
        lines |= file_lines
        try:
            merged = cast(DictConfig, OmegaConf.merge(merged, data))
        except OmegaConfBaseException as error:
            key = error.full_key or ""
            raise ConfigError(
                f"{ConfigTree({}, file_lines, default_where=str(path)).where(key)}: {key}: {_one_line(error)}"
            ) from None
    names = {f"{key}.name": key for key in named} | {key: key for key in named}
    for override in sorted(overrides, key=lambda each: each.lstrip("+").partition("=")[0] not in names):
        key, equals, value = override.partition("=")
        key = key.lstrip("+")  # the spelling of NeMo Gym and Hydra
        if not equals or not key:
            raise ConfigError(f"{COMMAND_LINE}: {override!r} is not of the form key=value, such as policy.port=8000")
        try:
            parsed = yaml.safe_load(value) if value else None
            if key in texts:
                parsed = _as_written(yaml.compose(value, Loader=yaml.SafeLoader), parsed)
            if key in names:
                _rename(merged, lines, names[key], parsed.get("name") if isinstance(parsed, dict) else parsed)
            OmegaConf.update(merged, key, parsed, merge=True, force_add=True)
        except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
            raise ConfigError(f"{COMMAND_LINE}: {override!r}: {_one_line(error)}") from error
        lines |= dict.fromkeys([key, *_keys_below(key, parsed)], COMMAND_LINE)
    root = paths[0].resolve().parent if paths else Path.cwd()
    unresolved = ConfigTree({}, lines, root, str(paths[0]) if paths else COMMAND_LINE)
    try:
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        raise ConfigError(f"{unresolved.where(key)}: {key}: {_one_line(error)}") from error
    written = OmegaConf.to_container(merged, resolve=False)
    return ConfigTree(cast(dict[str, Any], values), lines, root, unresolved.default_where, _from_environment(written))


def _keys_below(key: str, value: object) -> Iterator[str]:
    """The dotted keys of a mapping that an override gives as a whole, such as `optimizer={lr: 1e-3}`."""
    for name, item in value.items() if isinstance(value, dict) else ():
        yield f"{key}.{name}"
        yield from _keys_below(f"{key}.{name}", item)


def _rename(merged: Any, lines: dict[str, str], key: str, name: object) -> None:
    """Remove the mapping under `key` if its name is not this one. name: None if none is given."""
    from omegaconf import OmegaConf

    previous = cast(dict[str, Any], OmegaConf.to_container(merged, resolve=False)).get(key)
    if name is None or not isinstance(previous, dict) or previous.get("name", name) == name:
        return
    del merged[key]
    for line in [line for line in lines if line == key or line.startswith(f"{key}.")]:
        del lines[line]


def parse(
    model: type[Model], tree: ConfigTree, prefix: str = "", other_names: Mapping[str, Sequence[str]] | None = None
) -> Model:
    """The tree (or its part under `prefix`) as a frozen record; a ConfigError has a line for each mistake.

    other_names: names of a key in other programs -> the keys here, for the suggestion at an unknown key.
    """
    part = subtree(tree, prefix) if prefix else tree
    try:
        return model.model_validate(part.values, context={"root": tree.root})
    except ValidationError as error:
        raise ConfigError(
            "\n".join(_describe(model, part, item, other_names or {}) for item in error.errors())
        ) from None


def _read_yaml(path: Path, texts: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """One YAML file as plain data, and the line of each of its keys. texts: as of `load_tree`."""
    file_name = os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)
    content = b""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_nodes(node, file_name)
        data = yaml.safe_load(text)
    except FileNotFoundError:
        near = near_file(path)
        remedy = near or f"; name one with {option('config')}, or make a project with ng_init"
        raise ConfigError(f"{file_name}: no such file{remedy}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file_name}:{_line(content, error.start)}: not UTF-8: {_one_line(error)}") from None
    except OSError as error:
        raise ConfigError(f"{file_name}: cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(
            f"{file_name}:{line}: not valid YAML: {error.problem or error.context}{_remedy(error)}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = _line(text.encode(), len(text[: error.position].encode()))
        raise ConfigError(f"{file_name}:{line}: not valid YAML: {error.reason}") from None
    except RecursionError:
        raise ConfigError(f"{file_name}:1: not valid YAML: nested too deep to be read") from None
    if node is None:
        return {}, {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file_name}:1: a config is a mapping of names to services, not a {type(data).__name__}")
    lines: dict[str, str] = {}
    _collect_lines(node, "", file_name, lines)
    written = {key.value: value for key, value in node.value if key.value in texts}
    return data | {key: _as_written(value, data[key]) for key, value in written.items()}, lines


def _as_written(node: yaml.Node | None, value: Any) -> Any:
    """The text of a number or a boolean; any other value as it is."""
    is_other = node is None or node.tag.rpartition(":")[2] not in ("int", "float", "bool")
    return value if is_other or not isinstance(node, yaml.ScalarNode) else node.value


def _remedy(error: yaml.MarkedYAMLError) -> str:
    """A hint for two mistakes of indentation, which YAML's own messages lack."""
    message = error.problem or ""
    if message.startswith("expected <block end>"):
        return "; is this line indented as the lines around it?"
    return "; indent with spaces" if r"'\t'" in message else ""


def _line(content: bytes, position: int) -> int:
    return content.count(b"\n", 0, position) + 1


def _check_nodes(root: yaml.Node, file_name: str) -> None:
    """Refuse nodes that cannot be built in bounded memory (nested aliases), and invalid numbers and dates."""
    sizes: dict[int, int] = {}  # of each node with its aliases expanded; 0: being counted

    def size(node: yaml.Node) -> int:
        where = f"{file_name}:{node.start_mark.line + 1}"
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise ConfigError(f"{where}: not a tree: it contains itself by an alias")
            return sizes[id(node)]
        sizes[id(node)] = 0
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for each in inside for part in (each if isinstance(each, tuple) else (each,))]
        total = 1 + sum(map(size, parts))
        if total > MAX_NODES:
            raise ConfigError(f"{where}: more than {MAX_NODES:,} values, with its aliases expanded")
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node, where)
        sizes[id(node)] = total
        return total

    size(root)


def _check_scalar(node: yaml.ScalarNode, where: str) -> None:
    kind = node.tag.rpartition(":")[2]
    if kind == "int" and len(node.value) > MAX_DIGITS:
        raise ConfigError(f"{where}: not valid YAML: a number of {len(node.value)} digits")
    if kind in ("timestamp", "binary"):
        raise ConfigError(f"{where}: {node.value!r:.60} is neither a text nor a number: write it in quotes")
    try:
        if kind in ("int", "float"):
            yaml.SafeLoader("").construct_object(node)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None


def _from_environment(written: Any) -> dict[str, str]:
    """The texts that name an environment variable, and those that refer to them directly or through other keys."""
    texts = {key: text for key, text in _texts(written) if "${" in text}
    texts_by_key = {key: text for key, text in texts.items() if "${oc.env:" in text}

    def leads_there(text: str) -> bool:
        references = [f".{to.replace('[', '.').replace(']', '')}." for to in REFERENCE.findall(text)]
        return any(to in f".{key}." or f".{key}." in to for to in references for key in texts_by_key)

    while more := {key: text for key, text in texts.items() if key not in texts_by_key and leads_there(text)}:
        texts_by_key |= more
    return texts_by_key


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Each string of a tree with its dotted key."""
    if isinstance(value, str):
        yield key, value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inside:
        yield from _texts(item, f"{key}.{name}" if key else str(name))


def _collect_lines(node: yaml.Node, prefix: str, file_name: str, lines: dict[str, str], depth: int = 0) -> None:
    if depth > 64:
        raise ConfigError(f"{file_name}:{node.start_mark.line + 1}: nested more than 64 levels deep")
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        where = f"{file_name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode) or (not prefix and not key_node.tag.endswith(":str")):
            raise ConfigError(f"{where}: {str(key_node.value)[:60]!r} is not a name: write it in quotes, with a letter")
        if key in lines:
            raise ConfigError(f"{where}: {key!r} is twice in this file (first at {lines[key]}); keep one")
        lines[key] = where
        _collect_lines(value_node, f"{key}.", file_name, lines, depth + 1)


def subtree(tree: ConfigTree, prefix: str) -> ConfigTree:
    values: Any = tree.values
    for part in prefix.split("."):
        values = values.get(part, {}) if isinstance(values, dict) else {}
    lines = {key[len(prefix) + 1 :]: line for key, line in tree.lines.items() if key.startswith(prefix + ".")}
    environment = {k[len(prefix) + 1 :]: text for k, text in tree.environment.items() if k.startswith(prefix + ".")}
    return ConfigTree(values if values is not None else {}, lines, tree.root, tree.where(prefix), environment)


def _describe(model: type[BaseModel], tree: ConfigTree, item: Any, other_names: Mapping[str, Sequence[str]]) -> str:
    """One pydantic error as `file:line: key: what is wrong`."""
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        return f"{tree.where(key)}: unknown key {key!r}{_suggestion(model, tree, item['loc'], other_names)}"
    if item["type"] == "missing":
        return f"{tree.where(key)}: {key!r} is missing"
    message = _message(model, item)
    if not key:  # a rule about several keys: its input would show everything, including secrets
        return f"{tree.default_where}: {message}"
    # A list ends with its last line.
    if "\n" in message or any(name.startswith(f"{key}.") for name in tree.environment):
        return f"{tree.where(key)}: {key}: {message}"
    text = tree.environment.get(key) or repr(item["input"])
    return f"{tree.where(key)}: {key}: {message}; got {text if len(text) < 80 else text[:77] + '...'}"


def _message(model: type[BaseModel], item: Any) -> str:
    """What is wrong with a value; a value of another form in the words of YAML."""
    form = EXPECTED.get(item["type"])
    if form is None:
        return str(item["msg"].removeprefix("Value error, "))
    keys = list(dict.fromkeys(_fields_at(model, item["loc"]))) if form == "a mapping" else []
    some = ", ".join(keys[:MAX_KEYS]) + (", ..." if len(keys) > MAX_KEYS else "")
    return f"expected {form}" + (f" with keys such as {some}" if keys else "")


def _suggestion(
    model: type[BaseModel], tree: ConfigTree, loc: Sequence[Any], other_names: Mapping[str, Sequence[str]]
) -> str:
    """The suggestion at an unknown key, for did_you_mean: a key of its section, or of another one."""
    word, siblings, known = str(loc[-1]), _fields_at(model, loc[:-1]), list(all_keys(model, tree.values))
    if word in siblings:  # a key of another of the models that may be here
        kind = _at(tree.values, loc[:-1]).get("name", "this one")
        return f": it is a key of other kinds of {'.'.join(map(str, loc[:-1]))}, not of {kind}"
    if nearest(word, siblings, SURE):
        return did_you_mean(word, siblings)
    same = _shallowest([key for key in known if key.rpartition(".")[2] == word])
    candidates = (
        other_names.get(".".join(map(str, loc))),
        other_names.get(word),
        same if len(same) <= MAX_SUGGESTED else (),
    )
    for candidate in candidates:
        if keys := [key for key in candidate or () if key in known]:
            return f" (did you mean {' or '.join(map(repr, keys))}?)"
    if nearest(word, siblings):
        return did_you_mean(word, siblings)
    near = nearest(word, {key.rpartition(".")[2] for key in known}, LIKELY)
    keys = _shallowest([key for key in known if key.rpartition(".")[2] == near])
    return f" (did you mean {keys[0]!r}?)" if len(keys) == 1 else did_you_mean(word, siblings)


def _shallowest(keys: list[str]) -> list[str]:
    least = min((key.count(".") for key in keys), default=0)
    return [key for key in keys if key.count(".") == least]


def all_keys(model: type[BaseModel], values: Any, depth: int = DEEPEST) -> Iterator[str]:
    """The dotted keys that a model allows, without those in lists and mappings.

    values: what was given. Among models that differ by their `name`, only the given one's keys count.
    """
    mapping = values if isinstance(values, dict) else {}
    for name, info in model.model_fields.items():
        yield name
        for part in _of_this_name(_sections(info.annotation), mapping.get(name)) if depth else ():
            yield from (f"{name}.{key}" for key in all_keys(part, mapping.get(name), depth - 1))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The models that a key's value may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) not in (Union, UnionType, Annotated):
        return []
    return [section for part in get_args(annotation) for section in _sections(part)]


def _of_this_name(models: list[type[BaseModel]], value: Any) -> list[type[BaseModel]]:
    name = value.get("name") if isinstance(value, dict) else None
    own = [each for each in models if "name" in each.model_fields and each.model_fields["name"].default == name]
    return own if name is not None and own else models


def _at(values: Any, path: Sequence[Any]) -> dict[str, Any]:
    """The mapping at this path, or an empty one. Skips parts that are not keys: pydantic adds the names of classes."""
    for part in path:
        if isinstance(values, dict) and part in values:
            values = values[part]
    return values if isinstance(values, dict) else {}


def _fields_at(model: Any, loc: Sequence[Any]) -> list[str]:
    """The keys that are allowed at a place in a model, also inside unions and lists."""
    models = [model]
    for part in loc:
        infos = [getattr(current, "model_fields", {}).get(part) for current in models]
        if any(infos):  # else it is the index in a list
            models = [inner for info in infos if info for inner in _models_in(info.annotation)]
    return [name for current in models for name in getattr(current, "model_fields", {})]


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split("\n")[0].split())
