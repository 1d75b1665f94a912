"""Every snippet of the documentation: Python runs, YAML and JSON are valid, command lines are accepted."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NotRequired, get_origin, get_type_hints

import docs_shell
import pytest
import yaml
from docs_project import AGENTS, copy_world, ngym, replace_addresses, run_to_end, world
from documents import ROOT, Snippet, inline_commands, pages, readmes, snippets
from pydantic import create_model

from ngym.cli import quickstart
from ngym.config.service_config import SETTINGS_KEY, load_config
from ngym.config.shipped_files import app_file
from ngym.errors import ConfigError, NgymError
from ngym.schema import Segment, Trace
from ngym.services.base.app import load
from ngym.services.base.options import parse_options
from ngym.validation import facts_in

ALL = [snippet for page in [*pages(), *readmes()] for snippet in snippets(page)]
PAGES = [page for page in [*pages(), *readmes()] if any(snippet.page == page for snippet in ALL)]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SHOWN = ("text", "http", "svg", "dockerfile", "css", "html", "mermaid", "math")  # nothing to run
HEAVY = ("agents/langgraph", "agents/openai_agents", "agents/openai_sdk")  # their own tests load them
NO_PACKAGE = re.compile(r"logging\.\w+: the package \w+ is not installed")
SECRET = re.compile(r"\b[A-Z][A-Z0-9_]*(?:_KEY|TOKEN)\b")
HINTS = get_type_hints(Segment, include_extras=True).items()
SEGMENT = create_model("Segment", **{name: (kind, ...) for name, kind in HINTS if get_origin(kind) is not NotRequired})  # type: ignore[call-overload]
CUT = "..."  # in JSON: what is left out

PYTHON = """
import ast, asyncio, inspect, json, sys, types
page = sys.modules["page"] = types.ModuleType("page")
with asyncio.Runner() as runner:
    for where, text in json.load(sys.stdin):
        code = compile(text, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        waits = code.co_flags & inspect.CO_COROUTINE
        done = eval(code, page.__dict__)
        if waits:
            runner.run(done)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with world(tmp_path_factory.mktemp("docs") / "project") as folder:
        yield folder


@pytest.fixture(scope="module")
def ground(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with every file that the pages write into it."""
    folder = copy_world(project, tmp_path_factory.mktemp("ground") / "project")
    for snippet in ALL:
        if "file" in snippet.remarks and snippet.language == "python":
            _write(snippet, folder)
    return folder


@pytest.fixture(scope="module")
def page_results(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Future[list[str]]]]:
    """The failures of a page's code, two pages at a time: a line each."""
    base = tmp_path_factory.mktemp("pages")
    with ThreadPoolExecutor(2) as pool:
        yield {page: pool.submit(_run, page, project, base / f"{number}") for number, page in enumerate(PAGES)}


def _run(page: Path, project: Path, folder: Path) -> list[str]:
    """Its commands, files and Python, from top to bottom, in a separate folder; a `cd` holds to the end of its section."""
    page_snippets = [snippet for snippet in ALL if snippet.page == page and "not run" not in snippet.remarks]
    if not any(snippet.language in ("sh", "python") for snippet in page_snippets):
        return []
    here, blocks, wrong, section = copy_world(project, folder), [], [], 0
    for snippet in page_snippets:
        here, section = (here if snippet.section == section else folder), snippet.section
        try:
            if "file" in snippet.remarks:
                _write(snippet, here)
            if snippet.language == "python":
                blocks.append(_block(snippet, folder))
            elif snippet.language == "sh":
                here = _run_commands(snippet, here, folder)
        except (AssertionError, OSError) as error:
            wrong.append(f"{snippet.where}: {error}")
    try:
        run_to_end([sys.executable, "-c", PYTHON], folder, json.dumps(blocks)) if blocks else None
    except AssertionError as error:
        wrong.append(str(error).partition("\n: exit")[2])
    return wrong


def _write(snippet: Snippet, here: Path) -> None:
    file = here / snippet.remarks["file"]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(snippet.text)


def _run_commands(snippet: Snippet, here: Path, folder: Path) -> Path:
    """Give the commands that are quick; where one is then."""
    lines = list(docs_shell.lines(snippet.text))
    text = replace_addresses(snippet.text, folder)
    if docs_shell.is_harmless(lines, snippet.text):
        run_to_end(["bash", "-eu", "-c", text], here)
        return here
    for line in lines:
        if line.words[0] == "cd" and (here / line.words[1]).is_dir():
            here = here / line.words[1]
        elif words := docs_shell.runnable(line, AGENTS):
            run_to_end(ngym(*_expand(words, here)), here)
    return here


def _expand(words: tuple[str, ...], folder: Path) -> list[str]:
    """As a shell expands `*`."""
    found = [
        sorted(str(path.relative_to(folder)) for path in folder.glob(word)) if "*" in word else [] for word in words
    ]
    return [each for word, paths in zip(words, found, strict=True) for each in paths or [word]]


def _block(snippet: Snippet, folder: Path) -> tuple[str, str]:
    """Its position, and its text, after what it is given; line numbers are those of the page."""
    prelude = snippet.remarks.get("given", "")
    above = "\n" * (snippet.line - 1 - prelude.count("\n"))
    return str(snippet.page), replace_addresses(f"{above}{prelude}\n{snippet.text}", folder)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_code_of_a_page_runs(page: Path, page_results: dict[Path, Future[list[str]]]) -> None:
    wrong = page_results[page].result(600)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_snippets_of_a_page_are_what_they_claim(
    page: Path, ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground)
    wrong = []
    for snippet in ALL:
        if snippet.page != page or "not run" in snippet.remarks:
            continue
        for name in SECRET.findall(snippet.text):
            monkeypatch.setenv(name, "a-token-of-the-documentation")
        if reason := _problem(snippet, ground, tmp_path):
            wrong.append(f"{snippet.where}: {reason}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_in_running_text_exist(page: Path) -> None:
    of_others = page.name == "coming-from.md"  # NeMo Gym's commands begin with ng_, too
    wrong = [
        f"{page.relative_to(ROOT)}:{number}: {problem}"
        for number, text in inline_commands(page)
        for line in docs_shell.lines(text)
        if (problem := docs_shell.unknown_words(line)) and not of_others
    ]
    assert not wrong, "\n".join(wrong)


def test_what_ng_init_names_next_can_be_given(tmp_path: Path) -> None:
    output = run_to_end(ngym("init", "fresh"), tmp_path)
    hints = [line for line in docs_shell.lines(output.partition("next:")[2]) if line.ours is not None]
    assert [line.words[0] for line in hints] == ["ng_run", "ng_collect_rollouts", "ng_train"]
    for line in hints:
        run_to_end(ngym(*docs_shell.rehearse(line)), tmp_path / "fresh")


def test_what_the_quickstart_names_next_can_be_given(project: Path, tmp_path: Path) -> None:
    here = copy_world(project, tmp_path / "project")
    folder = here / "runs" / "quickstart"
    stanza = {"engine": "vllm", "more": quickstart.ON_CPU}
    (folder / "global_config.yaml").write_text(quickstart.CONFIG.format(file="global_config.yaml", **stanza))
    text = quickstart.NEXT.format(
        activate="",
        config=folder / "global_config.yaml",
        folder=folder,
        tasks=ROOT / "data/calculator/validation.jsonl",
    )
    hints = [line for each in text.splitlines() for line in docs_shell.lines(each) if line.ours is not None]
    assert [line.words[0] for line in hints] == ["ng_view", "ng_run", "ng_collect_rollouts", "ng_init"]
    copied_run = here / "runs" / "grpo"
    for name in ("metrics.jsonl", "recipe.yaml"):
        (folder / name).write_text((copied_run / name).read_text())
    for line in hints:
        run_to_end(ngym(*docs_shell.rehearse(line)), folder)


def test_what_is_not_run_says_why(record_property: Any, capsys: pytest.CaptureFixture[str]) -> None:
    left_out = [snippet for snippet in ALL if "not run" in snippet.remarks]
    listed = [f"{snippet.where} ({snippet.language}): {snippet.remarks['not run']}" for snippet in left_out]
    record_property("not run", len(left_out))
    with capsys.disabled():
        print(f"\nnot run, of {len(ALL)} snippets: {len(left_out)}\n  " + "\n  ".join(listed))
    assert all(len(snippet.remarks["not run"]) > 10 for snippet in left_out)
    assert len(left_out) < len(ALL) / 5


def _problem(snippet: Snippet, project: Path, scratch: Path) -> str | None:
    """The reason why a snippet is not what it claims to be, or None."""
    try:
        match snippet.language:
            case "sh":
                found = [docs_shell.problem(line, project) for line in docs_shell.lines(snippet.text)]
                return "; ".join(filter(None, found)) or None
            case "yaml":
                return _yaml(snippet, project, scratch)
            case "json" | "jsonl":
                return _json(snippet)
            case "toml":
                import tomllib

                tomllib.loads(snippet.text)
            case "python":
                compile(snippet.text, snippet.where, "exec", flags=0x2000)  # with await
            case language if language not in SHOWN:
                return f"no language {language!r}: one of sh, python, yaml, json, jsonl, toml, {', '.join(SHOWN)}"
    except (NgymError, ValueError, SyntaxError, yaml.YAMLError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _yaml(snippet: Snippet, project: Path, scratch: Path) -> str | None:
    if snippet.text.startswith("---\n"):
        (scratch / "README.md").write_text(snippet.text)
        facts_in(scratch / "README.md")
        return None
    from ngym.trainer.recipe import recipe as trainer_recipe

    recipe = trainer_recipe.Recipe.model_fields
    for text in _alternatives(snippet.text):
        values = yaml.safe_load(text)
        if not isinstance(values, dict):
            return "a mapping is wanted"
        if "part of" in snippet.remarks or values.keys() <= recipe.keys():
            _recipe(snippet.remarks.get("part of"), text, values, scratch)
        elif SETTINGS_KEY in values or all(
            isinstance(value, dict) and value.keys() & {"kind", "app", "url"} for value in values.values()
        ):
            _config(values, project, scratch)
        else:
            return "neither services nor a part of a recipe; say `<!-- not run: ... -->`"
    return None


def _alternatives(text: str) -> list[str]:
    """A block that writes the same key several times shows as many ways to write it."""
    parts = re.split(r"^(?=[\w.]+:)", text, flags=re.MULTILINE)
    head, *chunks = parts
    keys = [chunk.partition(":")[0] for chunk in chunks]
    return [head + chunk for chunk in chunks] if len(set(keys)) < len(keys) else [text]


def _recipe(base: str | None, text: str, values: dict[str, Any], scratch: Path) -> None:
    """A part of a recipe, on top of one that ships."""
    algorithm = (values.get("algorithm") or {}).get("name")
    learns_from_a_file = "data" in (values.get("evaluation") or {})
    base = base or (f"{algorithm}.yaml" if algorithm else "sft.yaml" if learns_from_a_file else "grpo.yaml")
    (scratch / "part.yaml").write_text(text)
    short = ["rollouts.agent=null", "rollouts.tasks=null"] if "environments" in (values.get("rollouts") or {}) else []
    # the project of the tests has no held-out pairs
    without = "evaluation" not in values and (short or base == "reward_model.yaml")
    several = [*short, "evaluation=null"] if without else short
    try:
        from ngym.trainer.recipe import recipe_reader

        recipe_reader.read_recipe([base, str(scratch / "part.yaml")], several)
    except ConfigError as error:  # of sinks that the tests have no package for
        if rest := [line for line in str(error).splitlines() if not NO_PACKAGE.search(line)]:
            raise ConfigError("\n".join(rest)) from None


def _config(values: dict[str, Any], project: Path, scratch: Path) -> None:
    """Stanzas, with those of the project that they name; each service's options, too."""
    known = yaml.safe_load((project / "global_config.yaml").read_text())
    merged = {
        **known,
        **{key: {**known.get(key, {}), **value} if "kind" not in value else value for key, value in values.items()},
    }
    (project / "snippet.yaml").write_text(yaml.safe_dump(merged, sort_keys=False))
    config = load_config([project / "snippet.yaml"])
    for name in values.keys() - {SETTINGS_KEY}:
        stanza = config.stanza(name)
        if stanza.app is not None and stanza.requirements is None and stanza.app not in HEAVY:
            module = load(app_file(stanza.app, config.root))
            model = module.Options if hasattr(module, "serve") else module.app.state.options_model
            parse_options(model, stanza.options, stanza.key_where, stanza.where, config.services)


def _json(snippet: Snippet) -> str | None:
    for value in _values(snippet.text):
        if isinstance(value, dict) and "reward" in value and isinstance(value.get("ng"), dict):
            wrong = sorted(value["ng"].keys() - Trace.__annotations__.keys())
            if wrong:
                return f"`ng` has no {', '.join(wrong)}"
            for segment in _uncut(value["ng"]).get("segments", ()):
                SEGMENT.model_validate(segment)
        if isinstance(value, dict) and "case" in value and not {"task", "expect"} <= value.keys():
            return "a gold case has `task` and `expect`"
    return None


def _values(text: str) -> list[Any]:
    """One value over several lines, or one a line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _uncut(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _uncut(each) for key, each in value.items() if key != CUT}
    return [_uncut(each) for each in value if each != CUT] if isinstance(value, list) else value
