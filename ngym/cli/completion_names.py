"""Which services and keys can be meant here? For a shell that completes: read from what is written, and never an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], list[str]]
DEFAULT = Path("global_config.yaml")


def services(*kinds: str) -> Completer:
    """For `shell_complete=`: the services of these kinds, or all, in the config that the command line names."""

    def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
        stanzas = [stanza for file in _files(ctx) for stanza in _stanzas(file)]
        return [name for name, stanza in stanzas if name.startswith(begun) and (not kinds or stanza["kind"] in kinds)]

    return complete


def overrides(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """For `shell_complete=`: the keys of the config that the command line names."""
    from ngym.cli.config_keys import of_config

    files = _files(ctx)
    stanzas: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, stanza in _stanzas(file):
            if name.startswith(begun.partition(".")[0]):
                stanzas[name] = stanzas.get(name, {}) | stanza
    return keys(list(of_config(stanzas, files[0].parent)), ctx, parameter, begun)


def keys(known: Sequence[str], ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """What may come next of these keys, or a file as the value of one."""
    from ngym.cli.config_keys import completions

    if is_value(known, ctx, parameter):
        return [CompletionItem(begun, type="file")]
    return [CompletionItem(word) for word in completions(known, begun)]


def is_value(known: Sequence[str], ctx: click.Context, parameter: click.Parameter) -> bool:
    """Whether it comes after a key's `=`, which is a word of its own to bash."""
    given = ctx.params.get(parameter.name or "") or ("",)
    return given[-1] == "=" or given[-1] in known


def _files(ctx: click.Context) -> Sequence[Path]:
    return ctx.params.get("configs") or (DEFAULT,)


def _stanzas(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each service and what is written of it."""
    import yaml

    try:
        written = yaml.safe_load(file.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return
    for name, stanza in written.items() if isinstance(written, dict) else ():
        if isinstance(stanza, dict) and "kind" in stanza:
            yield str(name), stanza
