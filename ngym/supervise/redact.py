"""A config as it may be shown: secrets replaced, everything else as it is."""

from __future__ import annotations

from typing import Any

from ngym.config import SETTINGS_KEY, Config, Stanza

REDACTED = "<redacted>"
SECRET_WORDS = ("authorization", "credential", "credentials", "passphrase", "passwd", "password", "secret", "token")
SECRET_NAMES = ("api_key", "apikey", "access_key", "private_key", "secret_key", "auth_key", "account_key")


def shown_config(config: Config) -> dict[str, Any]:
    """The resolved config in the form in which one writes it, with secrets redacted."""
    tree: dict[str, Any] = {SETTINGS_KEY: config.settings.model_dump(mode="json")}
    for stanza in config.services.values():
        tree[stanza.name] = _written(stanza) | redacted(stanza.options)
    return tree


def _written(stanza: Stanza) -> dict[str, Any]:
    fields = stanza.model_dump(mode="json", include={"kind", "app", "url", "urls", "replicas", "port"})
    return {key: value for key, value in fields.items() if value and (key, value) != ("replicas", 1)}


def redacted(value: Any, key: str = "") -> Any:
    """The value with every secret leaf replaced. A name that ends in `_env` only names a variable, and is shown."""
    if isinstance(value, dict):
        return {name: redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, key) for item in value]
    if isinstance(value, str) and value and is_secret(key):
        return REDACTED
    return value


def is_secret(key: str) -> bool:
    """Whether a key of this name holds a secret: by whole words, so that `max_tokens` and `primary_key` do not."""
    name = key.lower().replace("-", "_")
    return name.endswith(SECRET_NAMES) or name.rpartition("_")[2] in SECRET_WORDS
