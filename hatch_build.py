"""The build: what ships beside the package goes into the wheel, and a release knows its public address.

An editable installation finds the shipped files in the checkout.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# Programs and data, not packages: under `ngym` they travel with it and add no import name.
# The rest of `data` are links to the data of environments, in gym_servers: a wheel would hold these files twice.
SHIPPED = ("agents", "bridges.yaml", "data/tiny_policy", "global_config.yaml", "gym_servers", "models", "nemo_gym.yaml")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
RELATIVE_LINK = re.compile(r"(!?)(\[[^\[\]]*\])\((?![a-z]+:|#|/)([^()\s]+)\)")


class ShippedServices(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: "standard" for a wheel, "editable" for a link to this folder."""
        if version == "standard":
            build_data["force_include"] |= {name: f"ngym/_shipped/{name}" for name in SHIPPED}


class PublicAddress(MetadataHookInterface):
    """Project URLs and a README with absolute links, where GitHub Actions says which repository and tag this is."""

    def update(self, metadata: dict[str, Any]) -> None:
        """A source archive has both fields already: its PKG-INFO has those of the build that made it."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        base, ref = public_address(os.environ)
        metadata.setdefault("urls", project_urls(base, ref) if base else {})
        readme = {"content-type": "text/markdown", "text": with_absolute_links(text, base, ref) if base else text}
        metadata.setdefault("readme", readme)


def public_address(environment: Mapping[str, str]) -> tuple[str, str]:
    """The URL of the repository and the tag or branch; two empty strings outside of GitHub Actions."""
    server, repository, ref = (
        environment.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY", "REF_NAME")
    )
    return (f"{server.rstrip('/')}/{repository}", ref) if server and repository and ref else ("", "")


def project_urls(base: str, ref: str) -> dict[str, str]:
    return {
        "Source": base,
        "Documentation": f"{base}/blob/{ref}/docs/index.md",
        "Changelog": f"{base}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{base}/issues",
    }


def with_absolute_links(text: str, base: str, ref: str) -> str:
    """Markdown whose relative links and pictures lead to this repository; code blocks are left as they are."""

    def absolute(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        return f"{picture}{label}({base}/{'raw' if picture else 'blob'}/{ref}/{target})"

    return "".join(part if part.startswith("```") else RELATIVE_LINK.sub(absolute, part) for part in CODE.split(text))
