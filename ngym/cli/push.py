"""`ng_push`: uploads a policy or rollouts to the Hugging Face Hub, with a generated card."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import orjson

from ngym.cli.shell.main import command
from ngym.errors import NgymError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

POLICY, RECIPE, METRICS, CARD = "policy", "recipe.yaml", "metrics.jsonl", "README.md"
NAME = re.compile(r"[\w.-]+/[\w.-]+")
TOLD = ("loss", "reward/mean", "frac_unscored", "val/loss", "val/accuracy")
EXIT_CODES = """\
Exit codes: 0  everything is uploaded, in one commit
            1  the Hub refused it, or cannot be reached
            2  the command is wrong, or a path is neither a policy nor rollouts; the line says which"""


class Upload(NamedTuple):
    """files: path in the repository -> the file here."""

    kind: str  # model, dataset
    files: dict[str, Path]
    card: str


@command("ng_push", epilog=EXIT_CODES)
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--private", is_flag=True, help="Create the repository as a private one.")
@click.option("--branch", default="main", show_default=True, metavar="NAME", help="The branch of the commit.")
@click.option(
    "--hub", envvar="HF_ENDPOINT", show_envvar=True, default="https://huggingface.co", show_default=True, metavar="URL",
    help="The Hugging Face Hub, or a server with its API.",
)  # fmt: skip
@click.option(
    "--hub-token", envvar="HF_TOKEN", show_envvar=True, metavar="TOKEN",
    help="A token that may write.  [default: that of `hf auth login`]",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the card and the files; upload nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; the rest goes to standard error.")
def main(
    sources: tuple[Path, ...],
    repository: str,
    private: bool,
    branch: str,
    hub: str,
    hub_token: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upload to the Hugging Face Hub: a training run's policy as a model, or rollouts as a dataset.

    PATH is the output folder of ng_train, a folder with a policy, or JSONL files of rollouts. A card (README.md) is
    generated from the recipe and the metrics, or from the rewards; a policy's own README.md is uploaded instead. The
    repository is created if it does not exist. Rows are uploaded whole: look at them first.

    \b
    Examples: ng_push runs/grpo me/my-policy
              ng_push rollouts.jsonl me/my-rollouts --private
              ng_push rollouts.jsonl me/my-rollouts --dry-run
    """
    if not NAME.fullmatch(repository):
        raise UsageError(f"{repository}: not a repository of the Hub; name it OWNER/NAME")
    upload = _rollouts(sources, repository) if sources[0].is_file() else _policy(sources, repository)
    if dry_run and not as_json:
        click.echo(upload.card)
        for name, file in upload.files.items():
            click.echo(f"{name}  {file.stat().st_size:,} bytes", err=True)
        click.echo(f"would upload to the {upload.kind} {repository}; nothing was uploaded", err=True)
    told: dict[str, Any] = {"kind": upload.kind, "repository": repository, "files": [*upload.files, CARD]}
    if not dry_run:
        done = _send(upload, repository, private, branch, hub, hub_token)
        url = f"{hub.rstrip('/')}/{'datasets/' if upload.kind == 'dataset' else ''}{repository}"
        told |= {"url": url, "commit": done.oid}
        click.echo(f"uploaded {len(upload.files) + 1} files to {url}, commit {done.oid[:12]}", err=as_json)
    if as_json:
        click.echo(orjson.dumps(told))


def _send(upload: Upload, repository: str, private: bool, branch: str, hub: str, token: str | None) -> CommitInfo:
    """One commit with all files. NgymError if the Hub refuses it."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # huggingface_hub reads it when it is imported
    from huggingface_hub import CommitOperationAdd, HfApi

    from ngym.files.hub_download import errors, first_line

    api = HfApi(endpoint=hub, token=token, library_name="ngym")
    added = [CommitOperationAdd(CARD, upload.card.encode())]
    added += [CommitOperationAdd(name, str(file)) for name, file in upload.files.items()]
    try:
        api.create_repo(repository, repo_type=upload.kind, private=private or None, exist_ok=True)
        if private and not api.repo_info(repository, repo_type=upload.kind).private:
            raise NgymError(f"{repository}: exists and is public; make it private there, or leave --private out")
        if branch != "main":
            api.create_branch(repository, branch=branch, repo_type=upload.kind, exist_ok=True)
        return api.create_commit(
            repository, added, commit_message="Upload by ng_push", repo_type=upload.kind, revision=branch
        )
    except errors() as error:
        raise NgymError(f"{repository}: not uploaded: {first_line(error)}") from None


def _policy(sources: Sequence[Path], repository: str) -> Upload:
    """The files of a policy. UsageError if the folder has no policy."""
    run, *others = sources
    if others:
        raise UsageError(f"{others[0]}: a repository holds one policy; push each to a separate one")
    folder = next((each for each in (run / POLICY, run) if (each / "config.json").is_file()), None)
    if folder is None:
        raise UsageError(
            f"{run}: neither rollouts (a JSONL file) nor a policy (a folder with {POLICY}/ or config.json)"
        )
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    own = files.pop(CARD, None)
    card = (
        own.read_text("utf-8") if own else _model_card(folder.parent if folder.name == POLICY else folder, repository)
    )
    return Upload("model", files, card)


def _model_card(run: Path, repository: str) -> str:
    import yaml

    recipe_file = run / RECIPE
    text = recipe_file.read_text("utf-8").replace(f"{Path.cwd()}/", "") if recipe_file.is_file() else ""
    recipe = yaml.safe_load(text) or {}
    base, name = (recipe.get("model") or {}).get("path"), (recipe.get("algorithm") or {}).get("name")
    facts: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    facts["tags"] = ["ngym", *([name] if name else [])]
    if base and NAME.fullmatch(base) and not Path(base).exists():
        facts["base_model"] = base
    said = f"A policy trained by ngym with `{name}`" if name else "A policy trained by ngym"
    parts = [said + (f", from `{base}`." if base else ".")]
    if last := _last(run / METRICS):
        parts.append(_table(("metric", "last value"), [(f"`{key}`", f"{value:.4g}") for key, value in last.items()]))
    if text:
        parts.append(f"## Recipe\n\n```yaml\n{text.strip()}\n```")
    return _card(facts, repository, parts)


def _last(metrics: Path) -> dict[str, float]:
    """The last values of the metrics that say how a run ended."""
    from ngym.files import jsonl

    found: dict[str, float] = {}
    for line in jsonl.read(metrics) if metrics.is_file() else ():
        known = {key: value for key, value in line.row.items() if isinstance(value, int | float)}
        found |= {key: value for key, value in known.items() if key in ("step", *TOLD) or key.startswith("eval/")}
    return found


def _rollouts(sources: Sequence[Path], repository: str) -> Upload:
    """The files of a dataset. UsageError if a row is not a rollout, or two files have the same name."""
    from ngym.files import jsonl

    def wrong(row: dict[str, Any]) -> str | None:
        return None if "reward" in row or "failure" in row else "not a rollout: it has neither a reward nor a failure"

    rewards, counts = defaultdict[str, list[float]](list), defaultdict[str, Counter[str]](Counter)
    for source in sources:
        for line in jsonl.checked(source, wrong):
            row, reward = line.row, line.row.get("reward")
            agent = str((row.get("agent_ref") or {}).get("name"))
            counts[agent]["failed" if "failure" in row else "unscored" if reward is None else "scored"] += 1
            rewards[agent] += [reward] if isinstance(reward, int | float) else []
    files = {f"data/{source.name}": source for source in sources}
    if len(files) < len(sources):
        raise UsageError("two of the files have the same name, which would be one file of the dataset; rename one")
    configs = [{"config_name": "default", "data_files": [{"split": "train", "path": list(files)}]}]
    lines = [
        (f"`{agent}`", *(f"{count[kind]:,}" for kind in ("scored", "unscored", "failed")), _mean(rewards[agent]))
        for agent, count in sorted(counts.items())
    ]
    text = "Rollouts of language-model agents, collected by ngym: a row has the task, the response and the reward."
    table = _table(("agent", "scored", "unscored", "failed", "mean reward"), lines)
    return Upload(
        "dataset", files, _card({"tags": ["ngym", "rollouts"], "configs": configs}, repository, [text, table])
    )


def _mean(rewards: Sequence[float]) -> str:
    return f"{fmean(rewards):.4g}" if rewards else "-"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows))


def _card(facts: dict[str, Any], repository: str, parts: Sequence[str]) -> str:
    import yaml

    title = f"# {repository.partition('/')[2]}"
    return "\n\n".join([f"---\n{yaml.safe_dump(facts, sort_keys=False)}---\n\n{title}", *parts]) + "\n"
