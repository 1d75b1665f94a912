"""Translates pip's configuration of package indexes for uv, which does not read it.

A mirror, wheel folder, certificate or proxy that is configured for pip then also applies to uv. Uses only the standard
library: scripts/install.py runs this file before anything is installed.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Mapping

# pip's option -> uv's variable; for indexes uv's older name, so that the user's newer one takes precedence.
UV_VARIABLE = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}


def pip_settings(python: str) -> dict[str, list[str]]:
    """The pip settings of this Python: option -> values; empty without settings.

    A PIP_* variable wins over [install] in a file, and that over [global].
    """
    listing = subprocess.run([python, "-m", "pip", "config", "list"], check=False, capture_output=True, text=True)
    sections: dict[str, dict[str, list[str]]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in sections:
            sections[section][option] = str(ast.literal_eval(value)).split()
    return sections["global"] | sections["install"] | sections[":env:"]


def uv_environment(settings: Mapping[str, list[str]], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for uv: the caller's variables, and pip's settings for what these do not set."""
    translated = {
        variable: ("," if option == "find-links" else " ").join(settings[option])
        for option, variable in UV_VARIABLE.items()
        if settings.get(option)
    }
    # like pip: the best version from all indexes
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **translated, **environ}


def is_offline(settings: Mapping[str, list[str]]) -> bool:
    """Whether pip uses no index."""
    return settings.get("no-index", ["false"])[0].lower() in ("1", "true", "yes", "on")
