"""MkDocs hooks: add the reference pages, draw formulas as MathML, correct links that leave docs/, load no foreign
script.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from formulas import Formulas
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import pages
from reference.specimen import Specimen, specimen

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"^(```|~~~)")
BRANCH = "main"

# The offline plugin lets every page load this script from another server; ours does the same.
FOREIGN_SEARCH = "https://unpkg.com/iframe-worker/shim"
SEARCH = "javascripts/search_from_disk.js"

_made: list[Specimen] = []  # one run serves every build of `mkdocs serve`


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.edit_uri = f"edit/{BRANCH}/docs/" if config.repo_url else None
    config.markdown_extensions.append(Formulas())  # type: ignore[arg-type]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that are read from the code."""
    if not _made:
        _made.append(specimen())
    for path, text in pages(_made[0]).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    return output.replace(FOREIGN_SEARCH, "../" * page.url.count("/") + SEARCH)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    return output_content.replace(FOREIGN_SEARCH, f"/{SEARCH}")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository that are not pages: to the published repository, else only their text."""
    if page.file.generated_by:
        page.edit_url = None
    folder = (ROOT / "docs" / page.file.src_uri).parent
    lines, inside = [], False
    for line in markdown.splitlines():
        inside ^= bool(FENCED.match(line.lstrip()))
        lines.append(line if inside else LINK.sub(lambda found: _mended(found, folder, config, files), line))
    return "\n".join(lines)


def _mended(found: re.Match[str], folder: Path, config: MkDocsConfig, files: Files) -> str:
    image, words, target = found.groups()
    parts = urlsplit(target)
    if image or parts.scheme or not parts.path:
        return found[0]
    path = Path(os.path.normpath(folder / parts.path))
    if path.is_relative_to(ROOT / "docs"):
        return found[0]
    if path.parent.parent == ROOT / "gym_servers" and path.name == "README.md":
        here = os.path.relpath(ROOT / "docs" / "reference" / "environments.md", folder)
        return f"[{words}]({here}#{path.parent.name})"
    kind = "tree" if path.is_dir() else "blob"
    inside = path.relative_to(ROOT)
    return f"[{words}]({config.repo_url}/{kind}/{BRANCH}/{inside})" if config.repo_url else words
