"""Where do packages come from? pip's configuration, translated for uv, which does not read it.

Whoever configured pip for a mirror, a folder of wheels, a certificate or a proxy has configured uv too. Only the standard library
is used: scripts/install.py runs this file before anything is installed.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Mapping

# pip's option -> uv's variable. Of uv's two names for an index the older: whoever set the newer one overrides ours.
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
    """What this Python's pip was told: option -> values; nothing where it has none.

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
    """The environment for uv: the caller's, and pip's settings wherever the caller told uv nothing else."""
    translated = {
        variable: ("," if option == "find-links" else " ").join(settings[option])
        for option, variable in UV_VARIABLE.items()
        if settings.get(option)
    }
    # as pip does it: of several indexes the best version of all
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **translated, **environ}


def is_offline(settings: Mapping[str, list[str]]) -> bool:
    """Whether pip asks no index."""
    return settings.get("no-index", ["false"])[0].lower() in ("1", "true", "yes", "on")
