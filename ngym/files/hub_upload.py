"""Uploads to the Hugging Face Hub: the files of a policy or of rollouts, and their generated card, in one commit."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from ngym.errors import NgymError, UsageError
from ngym.files import jsonl
from ngym.files.hub_download import CREDENTIALS, first_line, hub_errors
from ngym.schema import agent_name, is_failed_attempt, row_problem

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

SILENT_S = 120.0  # of the Hub, until an upload is given up
POLICY, RECIPE, METRICS, CARD = "policy", "recipe.yaml", "metrics.jsonl", "README.md"
# as huggingface_hub's validate_repo_id
REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))\b[\w.-]+\b/\b[\w.-]{1,96}\b(?<!\.git)", re.ASCII)
CARD_METRICS = ("loss", "reward/mean", "frac_unscored", "val/loss", "val/accuracy")


class Upload(NamedTuple):
    """files: path in the repository -> the file here."""

    kind: str  # model, dataset
    files: dict[str, Path]
    card: str


def commit_upload(
    upload: Upload, repository: str, private: bool, branch: str, hub: str, token: str | None
) -> CommitInfo:
    """One commit with all files. NgymError if the Hub refuses it."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # huggingface_hub reads it when it is imported
    from huggingface_hub import CommitOperationAdd, HfApi, get_session

    get_session().timeout = SILENT_S  # its own waits without end
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
    except hub_errors() as error:
        address = CREDENTIALS.sub("//", hub)
        raise NgymError(f"{repository}: not uploaded to {address}: {first_line(error)}") from None


def policy_upload(sources: Sequence[Path], repository: str, redact: Callable[[Any], Any]) -> Upload:
    """The files of a policy. UsageError if the folder has no policy. redact: removes the secrets of its recipe."""
    run, *others = sources
    if others:
        raise UsageError(f"{others[0]}: a repository holds one policy, or rollouts; push each to a separate one")
    folder = next((each for each in (run / POLICY, run) if (each / "config.json").is_file()), None)
    if folder is None:
        raise UsageError(
            f"{run}: neither rollouts (a JSONL file) nor a policy (a folder with {POLICY}/ or config.json)"
        )
    files = {name: file for file in sorted(folder.rglob("*")) if (name := _public_name(file, folder))}
    own = files.pop(CARD, None)
    card = (
        own.read_text("utf-8")
        if own
        else _model_card(folder.parent if folder.name == POLICY else folder, repository, redact)
    )
    return Upload("model", files, card)


def _public_name(file: Path, folder: Path) -> str | None:
    """The path in the repository; None for folders, and for hidden files, such as .git and .env."""
    name = file.relative_to(folder)
    return name.as_posix() if file.is_file() and not any(part.startswith(".") for part in name.parts) else None


def _model_card(run: Path, repository: str, redact: Callable[[Any], Any]) -> str:
    import yaml

    recipe_file = run / RECIPE
    text = recipe_file.read_text("utf-8").replace(f"{Path.cwd()}/", "") if recipe_file.is_file() else ""
    recipe = redact(yaml.safe_load(text) or {})
    base, name = (recipe.get("model") or {}).get("path"), (recipe.get("algorithm") or {}).get("name")
    facts: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    facts["tags"] = ["ngym", *([name] if name else [])]
    if base and REPOSITORY.fullmatch(base) and not Path(base).exists():
        facts["base_model"] = base
    first_line = f"A policy trained by ngym with `{name}`" if name else "A policy trained by ngym"
    parts = [first_line + (f", from `{base}`." if base else ".")]
    if last := _final_metrics(run / METRICS):
        parts.append(_table(("metric", "last value"), [(f"`{key}`", f"{value:.4g}") for key, value in last.items()]))
    if recipe:
        parts.append(f"## Recipe\n\n```yaml\n{yaml.safe_dump(recipe, sort_keys=False, width=1000).strip()}\n```")
    return _card(facts, repository, parts)


def _final_metrics(metrics: Path) -> dict[str, float]:
    """The last values of the metrics that say how a run ended."""
    last_values: dict[str, float] = {}
    for line in jsonl.read(metrics) if metrics.is_file() else ():
        known = {key: value for key, value in line.row.items() if isinstance(value, int | float)}
        last_values |= {
            key: value for key, value in known.items() if key in ("step", *CARD_METRICS) or key.startswith("eval/")
        }
    return last_values


def rollouts_upload(sources: Sequence[Path], repository: str) -> Upload:
    """The files of a dataset. UsageError if a row is not a rollout, a file is empty, or two have the same name."""

    def wrong(row: dict[str, Any]) -> str | None:
        if "reward" not in row and not is_failed_attempt(row):
            return "not a rollout: it has neither a reward nor a failure"
        return row_problem(row)

    rewards, counts = defaultdict[str, list[float]](list), defaultdict[str, Counter[str]](Counter)
    for source in sources:
        if source.is_dir():
            raise UsageError(
                f"{source} is a folder, and {sources[0]} is a file of rollouts; push each to a separate repository"
            )
        for line in jsonl.check_lines(source, wrong):
            row, reward = line.row, line.row.get("reward")
            agent = str(agent_name(row))
            counts[agent]["failed" if is_failed_attempt(row) else "unscored" if reward is None else "scored"] += 1
            rewards[agent] += [] if reward is None else [reward]
        if not any(True for _ in jsonl.read(source)):
            raise UsageError(f"{source}: no rows in it")
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
