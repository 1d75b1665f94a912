"""The documentation: the site builds without a warning, its links work, and the reference describes every key."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import click
import pytest
import yaml
from browser_pages import Page
from documents import ROOT, anchors, links, pages, readmes

from ngym.cli.shell.main import COMMANDS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DOCS_REPOSITORY": "https://example.com/ngym"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def reference(site: Path) -> dict[str, str]:
    """The generated pages, as they were built: path in docs/ -> HTML."""
    return {f"reference/{file.stem}.md": file.read_text() for file in sorted((site / "reference").glob("*.html"))}


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page(reference: dict[str, str]) -> None:
    written = (ROOT / "mkdocs.yml").read_text()
    nav = set(_entries(yaml.safe_load(written[written.index("\nnav:") :])["nav"]))
    files = {str(page.relative_to(ROOT / "docs")) for page in pages() if page.is_relative_to(ROOT / "docs")}
    assert nav == files | reference.keys()


def test_a_site_on_the_disk_is_searched_without_another_server(site: Path, page: Page) -> None:
    assert not [file for file in site.rglob("*.html") if re.search(r'<script[^>]*src="https?:', file.read_text())]
    page.goto((site / "reference" / "config.html").as_uri())
    box = page.get_by_role("textbox", name="Search")
    box.click()
    box.press_sequentially("exactly once")  # the page listens to keys
    page.locator(".md-search-result__item").first.wait_for(state="attached")


def test_links_within_the_project_lead_somewhere(reference: dict[str, str]) -> None:
    wrong = []
    for page in [*pages(), *readmes()]:
        for link in links(page):
            parts = urlsplit(link.target)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(page.parent / parts.path)) if parts.path else page
            if not _leads_somewhere(target, parts.fragment, reference):
                wrong.append(link.where)
    assert not wrong, "\n".join(wrong)


def _leads_somewhere(target: Path, fragment: str, reference: dict[str, str]) -> bool:
    page = reference.get(str(target.relative_to(ROOT / "docs"))) if target.is_relative_to(ROOT / "docs") else None
    if page is not None:
        return not fragment or f'id="{fragment}"' in page
    if not target.exists():
        return False
    return not fragment or (target.suffix == ".md" and fragment in anchors(target.read_text(encoding="utf-8")))


def test_functions_that_the_architecture_names_are_defined_in_the_linked_files() -> None:
    page = ROOT / "docs" / "architecture.md"
    linked = re.findall(r"\[`([\w.]+)`\]\((\S+\.py)\)", page.read_text())
    assert len(linked) > 30
    wrong = [f"{name} is not in {path}" for name, path in linked if name not in _definitions(page.parent / path)]
    assert not wrong, "\n".join(wrong)


def test_each_answer_of_find_the_code_is_a_file_and_defines_the_names_behind_it() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Find the code")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 40
    wrong = []
    for row in rows:
        paths = re.findall(r"`([a-z_]+/[\w./]+)`", row)
        wrong += (
            [f"there is no {path}" for path in paths if not (ROOT / path).exists()] if paths else [f"no file: {row}"]
        )
        for path, names in re.findall(r"`([a-z_]+/[\w./]+\.py)` \(((?:`[\w.]+`(?:, )?)+)\)", row):
            wrong += [
                f"{name} is not in {path}"
                for name in re.findall(r"`([\w.]+)`", names)
                if name not in (ROOT / path).read_text() and name not in _definitions(ROOT / path)
            ]
    assert not wrong, "\n".join(wrong)


def test_each_test_that_the_page_of_faults_names_exists() -> None:
    sources = {file.stem: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    lines = (ROOT / "docs" / "faults.md").read_text().splitlines()
    parts = [part for line in lines if line.startswith("| ") for part in line.split("|")[-2].split(";")]
    assert len(parts) > 60
    wrong = []
    for part in parts:
        files = re.findall(r"\btest_\w+", part)
        wrong += [f"there is no file {name}.py" for name in files if name not in sources]
        tests = " ".join(re.findall(r"def (test_\w+)", "".join(sources.get(name, "") for name in files)))
        wrong += [f"no test of {files}: {words}" for words in re.findall(r"`(\w+)`", part) if words not in tests]
    assert not wrong, "\n".join(wrong)


def test_every_package_is_described_in_the_architecture() -> None:
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "architecture.md").read_text()))
    packages = {file.parent.name for top in ("ngym", "trainer") for file in (ROOT / top).glob("*/__init__.py")}
    assert packages <= named


def _definitions(file: Path) -> set[str]:
    """The functions and classes of a file, and `Class.method`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def test_nothing_on_the_site_comes_from_another_server(site: Path) -> None:
    fetched = re.compile(
        r"""<(?:script|img|iframe|link rel="(?:stylesheet|preload|preconnect)")[^>]*(?:src|href)="(https?:)?//"""
    )
    found = [file.name for file in site.rglob("*.html") if fetched.search(file.read_text())]
    assert not found


def test_no_path_of_this_machine_is_on_the_site(site: Path) -> None:
    own = (str(ROOT), str(Path.home()), sys.prefix)
    files = [file for file in site.rglob("*") if file.suffix in (".html", ".json")]
    assert not [file.name for file in files if any(path in file.read_text() for path in own if len(path) > 1)]


def test_formulas_are_drawn_by_the_browser_itself(site: Path) -> None:
    page = (site / "algorithms.html").read_text()
    assert page.count("<math") == (ROOT / "docs" / "algorithms.md").read_text().count("$$") // 2 > 0
    assert "$$" not in re.sub(r"<code.*?</code>", "", page, flags=re.DOTALL)
    assert [file.name for file in site.rglob("*.html") if "<math" in file.read_text()] == ["algorithms.html"]


def test_every_key_of_a_config_or_recipe_says_what_it_is(reference: dict[str, str]) -> None:
    bare = [
        f"{path}: {key}"
        for path in ("reference/config.md", "reference/recipes.md", "reference/rows.md")
        for key, what in re.findall(
            r"<tr>\s*<td><code>([^<]*)</code></td>(?:.(?!</tr>))*?<td>([^<]*)</td>\s*</tr>", reference[path], re.DOTALL
        )
        if not what.strip()
    ]
    assert not bare, "\n".join(bare)


def test_every_failure_class_and_header_says_what_it_is(reference: dict[str, str]) -> None:
    for path in ("reference/failures.md", "reference/wire.md"):
        rows = re.findall(
            r"<tr>(.*?)</tr>", _section(reference[path], "classes" if "failures" in path else "headers"), re.DOTALL
        )
        assert len(rows) > 5
        assert not [row for row in rows if "<td></td>" in row]


def _section(html: str, anchor: str) -> str:
    return re.split(r"<h2", html.split(f'id="{anchor}"')[1])[0]


def test_every_option_of_every_command_is_on_its_page(reference: dict[str, str]) -> None:
    page = reference["reference/cli.md"]
    for name, (module, _) in COMMANDS.items():
        command: click.Command = importlib.import_module(module).main
        section = _section(page, f"ng_{name}")
        options = [
            each
            for param in command.params
            if isinstance(param, click.Option) and not param.hidden
            for each in param.opts
        ]
        assert [option for option in options if option not in section] == [], name


def test_every_metric_of_the_trainer_is_described() -> None:
    """A dict of its sources that has two known metrics in it has nothing else in it."""
    from ngym.trainer.reporting import metrics

    measured = metrics.MEASURED
    patterns = [re.compile(re.sub(r"\\\{\w+\\\}", r"[^ ]+", re.escape(name))) for name in measured]
    found = [keys for keys in _dicts(ROOT / "trainer") if len(keys & measured.keys()) >= 2]
    assert len(found) > 12
    names = set().union(*found)
    assert not sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))


def _dicts(folder: Path) -> Iterator[set[str]]:
    """The names in each dict in these sources."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                yield {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _entries(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    values = nav if isinstance(nav, list) else list(nav.values()) if isinstance(nav, dict) else []
    return [entry for value in values for entry in _entries(value)]
