"""The reference pages. Everything on them is read from the code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import commands, configuration, environments, failures, metrics, python, recipes, rows, wire
from .specimen import Specimen


@dataclass(frozen=True)
class Page:
    """path: in docs/. text: its Markdown, given a run of ngym that it may quote."""

    path: str
    title: str
    what: str
    text: Callable[[Specimen], str]


PAGES = (
    Page("reference/cli.md", "Commands", "every command, its arguments and options", commands.text),
    Page("reference/config.md", "Configuration", "every key of `global_config.yaml`", configuration.text),
    Page("reference/recipes.md", "Recipes", "every key of a training recipe", recipes.text),
    Page("reference/wire.md", "Endpoints", "the routes of every kind of service, their headers", wire.text),
    Page("reference/rows.md", "Rows and files", "what a collection writes, with real rows", rows.text),
    Page("reference/failures.md", "Failures", "failure classes, errors, problem documents", failures.text),
    Page("reference/metrics.md", "Metrics", "what `/metrics` and `metrics.jsonl` hold", metrics.text),
    Page("reference/python.md", "Python", "what `import ngym` gives", python.text),
    Page(
        "reference/environments.md",
        "Every environment",
        "what ships: domain, rows, licence, rewards",
        environments.text,
    ),
)


def index() -> str:
    """The page that names the others."""
    rows = "\n".join(f"| [{page.title}]({page.path.removeprefix('reference/')}) | {page.what} |" for page in PAGES)
    return (
        "# Reference\n\nThese pages are made from the code whenever the site is built: from its models, routes and commands, and from"
        f" a small run that the build makes.\n\n| | |\n|---|---|\n{rows}\n"
    )


def pages(specimen: Specimen) -> dict[str, str]:
    """Path in docs/ -> its Markdown."""
    return {"reference/index.md": index(), **{page.path: page.text(specimen) for page in PAGES}}
