"""`ng_push`: uploads a policy or rollouts to the Hugging Face Hub, with a generated card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import orjson

from ngym.cli.shell.main import command, hub_token_option
from ngym.errors import UsageError
from ngym.files.hub_upload import CARD, REPOSITORY, commit_upload, policy_upload, rollouts_upload
from ngym.telemetry.log_format import redact

EXIT_CODES = """\
Exit codes: 0  everything is uploaded, in one commit
            1  the Hub refused it, or cannot be reached
            2  the command is wrong, or a path is neither a policy nor rollouts; the line says which"""


@command("ng_push", epilog=EXIT_CODES)
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--private", is_flag=True, help="Create the repository as a private one.")
@click.option("--branch", default="main", show_default=True, metavar="NAME", help="The branch of the commit.")
@click.option(
    "--hub", envvar="HF_ENDPOINT", show_envvar=True, default="https://huggingface.co", show_default=True, metavar="URL",
    help="The Hugging Face Hub, or a server with its API.",
)  # fmt: skip
@hub_token_option("A token that may write.  [default: that of `hf auth login`]")
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
    if not REPOSITORY.fullmatch(repository):
        raise UsageError(f"{repository}: not a repository of the Hub; name it OWNER/NAME")
    upload = (
        rollouts_upload(sources, repository) if sources[0].is_file() else policy_upload(sources, repository, redact)
    )
    if dry_run and not as_json:
        click.echo(upload.card)
        for name, file in upload.files.items():
            click.echo(f"{name}  {file.stat().st_size:,} bytes", err=True)
        click.echo(f"would upload to the {upload.kind} {repository}; nothing was uploaded", err=True)
    summary: dict[str, Any] = {"kind": upload.kind, "repository": repository, "files": [*upload.files, CARD]}
    if not dry_run:
        result = commit_upload(upload, repository, private, branch, hub, hub_token)
        url = f"{hub.rstrip('/')}/{'datasets/' if upload.kind == 'dataset' else ''}{repository}"
        summary |= {"url": url, "commit": result.oid}
        click.echo(f"uploaded {len(upload.files) + 1} files to {url}, commit {result.oid[:12]}", err=as_json)
    if as_json:
        click.echo(orjson.dumps(summary))
