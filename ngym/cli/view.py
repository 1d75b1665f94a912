"""`ng_view`: shows rollouts and training runs in a browser, or exports them as one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ngym.cli.shell.main import command
from ngym.errors import UsageError

if TYPE_CHECKING:
    from ngym.view.app import ListeningSocket
    from ngym.view.runs import OpenedRuns

EXIT_CODES = """\
Exit codes: 0    stopped by Ctrl-C; with --export: the report is written
            1    the report cannot be written
            2    the command is wrong, or there is nothing to show; the line says which
            130  --export was interrupted; nothing is written"""
ROWS = 200
FILE = click.Path(path_type=Path)


@command("ng_view", epilog=EXIT_CODES)
@click.argument("paths", nargs=-1, type=FILE, metavar="[FILE_OR_FOLDER]...")
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
    help="The address to listen at; other than loopback, readers need a token.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="N", help="0: any free one.  [default: 8770, or the next free one]"
)
@click.option("--open/--no-open", "browse", default=True, help="Open a browser if there is a display.  [default: open]")
@click.option(
    "--tokenizer", type=FILE, metavar="FOLDER", help="The tokenizer that decodes tokens.  [default: the policy's]"
)
@click.option("--title", default="ngym", show_default=True, metavar="TEXT", help="The title of the page.")
@click.option("--export", "report", type=FILE, metavar="FILE", help="Write one self-contained page; serve nothing.")
@click.option(
    "--rows", type=click.IntRange(0, 5000), metavar="N",
    help=f"Complete rollouts of each run in the report, for --export.  [default: {ROWS}]",
)  # fmt: skip
@click.option("--filter", "q", metavar="FILTER", help="Only matching rollouts, for --export.")
@click.option("--json", "as_json", is_flag=True, help="Print the address and the runs as one JSON object.")
def main(
    paths: tuple[Path, ...],
    host: str,
    port: int | None,
    browse: bool,
    tokenizer: Path | None,
    title: str,
    report: Path | None,
    rows: int | None,
    q: str | None,
    as_json: bool,
) -> None:
    """Show rollouts and training runs in a browser: what the policy did and why it got its reward.

    Files may still grow. A folder shows everything in it; without arguments, the current folder. For addresses other
    than loopback, the token is NGYM_TOKEN, or a new one that is printed.

    \b
    Examples: ng_view out.jsonl
              ng_view yesterday.jsonl today.jsonl
              ng_view runs/grpo
              ng_view out.jsonl --export report.html --filter 'reward<0.5 agent:math_agent'
    """
    from ngym.view.growing_index import path_text
    from ngym.view.runs import open_runs

    if q is not None and report is None:
        raise UsageError("--filter needs --export FILE; without a report, filter in the page")
    if rows is not None and report is None:
        raise UsageError("--rows needs --export FILE; the page shows all rows")
    if report is not None and report.suffix not in (".html", ".htm"):
        raise UsageError(f"--export {report}: a report is an .html file")
    if tokenizer is not None:
        from ngym.view.tokens import check

        check(tokenizer)
    title = path_text(title)
    runs = open_runs(paths or (Path(),), tokenizer)
    runs.start()
    try:
        if report is None:
            _serve(runs, host, port, title, browse, as_json)
        else:
            _export(runs, report, ROWS if rows is None else rows, q or "", title, as_json)
    finally:
        runs.close()


def _serve(runs: OpenedRuns, host: str, port: int | None, title: str, browse: bool, as_json: bool) -> None:
    from ngym.view.app import listen, open_browser, serve

    listening = listen(host, port)

    def ready() -> None:
        _print_address(runs, listening, as_json)
        if browse:
            open_browser(listening.url)

    serve(runs, listening, title, ready)


def _print_address(runs: OpenedRuns, listening: ListeningSocket, as_json: bool) -> None:
    if as_json:
        import orjson

        summary = {
            "url": listening.url,
            "address": listening.address,
            "token": listening.token,
            "runs": runs.as_json(),
        }
        click.echo(orjson.dumps(summary))
        return
    for run in runs.rollouts.values():
        click.echo(f"{run.id:<4} {run.path}")
    for trained in runs.training.values():
        click.echo(f"{trained.id:<4} {trained.folder}")
    click.echo(f"{listening.url}  (Ctrl-C ends it)")


def _export(runs: OpenedRuns, report: Path, rows: int, q: str, title: str, as_json: bool) -> None:
    from ngym.view.filter_query import WrongFilter
    from ngym.view.html_report import MAX_BYTES, export

    def tick(text: str) -> None:
        """A line of progress that is overwritten in place."""
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{text}\r", err=True, nl=False)

    try:
        packed = export(runs, report, rows=rows, q=q, title=title, tick=tick)
    except WrongFilter as error:
        raise UsageError(f"--filter: {error.detail}") from None
    if as_json:
        import orjson

        click.echo(orjson.dumps({"report": str(report), **packed._asdict(), "runs": runs.as_json()}))
        return
    click.echo(
        f"{report}: {packed.bytes / 1e6:.1f} MB; {packed.full:,} of {packed.of:,} rollouts in full, "
        f"{packed.listed:,} in the table"
    )
    if packed.left_out:
        click.echo(
            f"{packed.left_out:,} more did not fit or are not JSON: a report holds at most {MAX_BYTES >> 20} MiB of "
            "rollouts in full; choose others with --filter or a smaller --rows"
        )


if __name__ == "__main__":
    main()
