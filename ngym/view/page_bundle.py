"""The page as one file: its styles, its modules and what it shows, with a policy that lets nothing else run."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from pathlib import Path

ENTRY = "main.js"
_IMPORT = re.compile(r'import (?:{[^}]*} from )?"\./([\w.-]+)";')
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)
_OTHER = re.compile(r"^\s*(?:import|export)\b.*$|\bimport\(", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", re.MULTILINE)
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([\w.-]+)">\n?')
_SCRIPT = re.compile(r'<script type="module" src="/static/[\w.-]+"></script>')
_TITLE = re.compile(r"<title>[^<]*</title>")
_POLICY_GOES = '<meta charset="utf-8">'


def bundle(folder: Path, data: bytes, title: str) -> bytes:
    """A page that needs no server and no network, and loads nothing.

    Args:
        folder: index.html, its styles, and modules that import each other by name.
        data: JSON for `#ngym-data`.
    """
    page = (folder / "index.html").read_text(encoding="utf-8")
    styles = [(folder / name).read_text(encoding="utf-8") for name in _STYLE.findall(page)]
    style, script = "".join(styles), joined(folder)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'{_POLICY_GOES}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace(_POLICY_GOES, meta, 1)
    page = _TITLE.sub(lambda _: f"<title>{escape(title)}</title>", page, count=1)
    page = _STYLE.sub("", page).replace("</head>", f"<style>{style}</style>\n</head>", 1)
    before, _, after = _SCRIPT.sub("\0", page, count=1).partition("\0")
    tail = f'<script type="module">{script}</script>{after}'
    opening = '<script type="application/json" id="ngym-data">'
    return b"".join([before.encode(), opening.encode(), in_html(data), b"</script>\n", tail.encode()])


def in_html(data: bytes) -> bytes:
    """JSON that ends no script element: `<` stands only in strings, where it may be escaped."""
    return data.replace(b"<", b"\\u003c")


def joined(folder: Path) -> str:
    """All modules as one, each after those that it imports.

    Raises:
        ValueError: what the modules say cannot be joined; tests keep them so that it can.
    """
    modules = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.js"))}
    order: dict[str, None] = {}
    _visit(ENTRY, modules, order, ())
    text = "\n".join(_bare(name, modules[name]) for name in order)
    names = _TOP_LEVEL.findall(text)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"modules share the top-level names {', '.join(twice)}")
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a module has a text that would end its script element")
    return text


def _visit(name: str, modules: Mapping[str, str], order: dict[str, None], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"modules import each other in a circle: {' -> '.join([*above, name])}")
    for imported in _IMPORT.findall(modules[name]):
        if imported not in order:
            _visit(imported, modules, order, (*above, name))
    order[name] = None


def _bare(name: str, text: str) -> str:
    text = _EXPORT.sub("", _IMPORT.sub("", text))
    if other := _OTHER.search(text):
        raise ValueError(f"{name}: {other.group().strip()!r} is no import or export that can be joined")
    return text


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
