"""A config for display, in the form that users write, with its secrets redacted; and the list of its secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ngym.config.service_config import SETTINGS_KEY, Config, Stanza
from ngym.telemetry.redact import redacted, secrets_in


def shown_config(config: Config) -> dict[str, Any]:
    """The resolved config in the form that users write, with secrets redacted."""
    tree: dict[str, Any] = {SETTINGS_KEY: config.settings.model_dump(mode="json")}
    for stanza in config.services.values():
        tree[stanza.name] = _written(stanza) | redacted(stanza.options)
    return tree


def _written(stanza: Stanza) -> dict[str, Any]:
    fields = stanza.model_dump(
        mode="json", include={"kind", "app", "url", "urls", "replicas", "port", "requirements", "token_env"}
    )
    return {key: value for key, value in fields.items() if value and (key, value) != ("replicas", 1)}


def secrets_of(config: Config) -> Iterator[str]:
    """Everything that the run's logs must not show, except the run's own tokens."""
    for stanza in config.services.values():
        yield from secrets_in(stanza.options)
        yield os.environ.get(stanza.token_env or "", "")
