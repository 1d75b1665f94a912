"""Which services can be meant here? For a shell that completes: read from the config as it is written, and never an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def services(*kinds: str) -> Completer:
    """For `shell_complete=`: the services of these kinds, or all, in the config that the command line names."""

    def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
        files = ctx.params.get("configs") or (Path("global_config.yaml"),)
        stanzas = [stanza for file in files for stanza in _stanzas(file)]
        return [name for name, kind in stanzas if name.startswith(begun) and (not kinds or kind in kinds)]

    return complete


def _stanzas(file: Path) -> Iterator[tuple[str, str]]:
    """Name and kind of each service."""
    import yaml

    try:
        written = yaml.safe_load(file.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return
    for name, stanza in written.items() if isinstance(written, dict) else ():
        if isinstance(stanza, dict) and "kind" in stanza:
            yield str(name), str(stanza["kind"])
