"""One page to send: every number of the runs, many rows, and the most telling rollouts in full."""

from __future__ import annotations

import random
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from html import escape
from itertools import chain, combinations, islice, zip_longest
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import NamedTuple

import orjson

from ngym.errors import NgymError, UsageError
from ngym.files.atomic import write_whole
from ngym.files.jsonl import BOM
from ngym.schema import Json
from ngym.view import training
from ngym.view.file_scanner import NoRollout, whole
from ngym.view.growing_index import row_name, row_seq
from ngym.view.runs import OpenedRuns, RolloutRun
from ngym.view.stats import compare

ENTRY = "main.js"
_IMPORT = re.compile(r'import (?:{[^}]*} from )?"(\.{1,2}/[\w./-]+)";')
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)
_OTHER = re.compile(r"^\s*(?:import|export)\b.*$|\bimport\(", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", re.MULTILINE)
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([\w./-]+)">\n?')
_SCRIPT = re.compile(r'<script type="module" src="/static/[\w./-]+"></script>')
_TITLE = re.compile(r"<title>[^<]*</title>")
_POLICY_GOES = '<meta charset="utf-8">'
MAX_LISTED = 5000  # rows of a run in the table
MAX_BYTES = 64 << 20  # of rollouts in full, of all runs
MAX_COMPARED = 2000
POLL_S = 0.05


def bundle(folder: Path, data: bytes, title: str) -> bytes:
    """A page that needs no server and no network, and loads nothing.

    Args:
        folder: index.html, its styles, and modules, also in subfolders, that import each other by relative path.
        data: JSON for `#ngym-data`.
    """
    page = (folder / "index.html").read_text(encoding="utf-8")
    styles = [(folder / name).read_text(encoding="utf-8") for name in _STYLE.findall(page)]
    style, script = "".join(styles), join_modules(folder)
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
    # JSON that cannot end a script element: `<` occurs only in strings, where it may be escaped
    return b"".join([before.encode(), opening.encode(), data.replace(b"<", b"\\u003c"), b"</script>\n", tail.encode()])


def join_modules(folder: Path) -> str:
    """All modules as one, each after those that it imports.

    Raises:
        ValueError: what the modules say cannot be joined; tests keep them so that it can.
    """
    files = sorted(folder.rglob("*.js"))
    modules = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}
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
    for path in _IMPORT.findall(modules[name]):
        imported = normpath(join(dirname(name), path))
        if imported not in order:
            _visit(imported, modules, order, (*above, name))
    order[name] = None


def _bare(name: str, text: str) -> str:
    text = _EXPORT.sub("", _IMPORT.sub("", text))
    if other := _OTHER.search(text):
        raise ValueError(f"{name}: {other.group().strip()!r} is not an import or export that can be joined")
    return text


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


STATIC = Path(__file__).parent / "static"


class ReportData(NamedTuple):
    """The contents of the report. of: the rollouts that match the filter; left_out: did not fit, or are not JSON."""

    full: int
    listed: int
    of: int
    left_out: int
    bytes: int


def export(
    runs: OpenedRuns, output: Path, *, rows: int, q: str, title: str, tick: Callable[[str], None] = lambda text: None
) -> ReportData:
    """Write the report; returns what is in it.

    Args:
        rows: rollouts of each run in full. q: only what this filter lets through.
        tick: receives the progress.

    Raises:
        WrongFilter: the filter says nothing. NgymError: a file cannot be read. WriteFailed: the report cannot be written.
    """
    page, packed = report(runs, rows=rows, q=q, title=title, tick=tick)
    write_whole(output, page)
    return packed


def report(
    runs: OpenedRuns, *, rows: int, q: str, title: str, tick: Callable[[str], None] = lambda text: None
) -> tuple[bytes, ReportData]:
    """The report as a page; the arguments and errors are those of `export`."""
    budget = ByteBudget(MAX_BYTES)
    packed: Json = {"title": title, "filter": q, "runs": [], "rows": {}, "full": {}, "stats": {}, "compare": {}}
    of = full = listed = 0
    for run in runs.rollouts.values():
        _wait(run, tick)
        of += _count_matches(run, q, tick)
    packed["compare"] = {
        f"{a.id},{b.id}": compare(a.rows, b.rows, q, "", 0, MAX_COMPARED)
        for a, b in combinations(runs.rollouts.values(), 2)
    }
    contrasts = _most_different_tasks(runs, packed["compare"], rows)
    for id, run in runs.rollouts.items():
        selection = _select_rows(run, q, rows, contrasts[id])
        rollouts = {
            row: orjson.Fragment(line)
            for row in selection
            if (line := budget.browser_json(run.index.line(row_seq(row))))
        }
        table = _table_rows(run, q, selection)
        full, listed = full + len(rollouts), listed + len(table)
        packed["full"][id], packed["rows"][id], packed["stats"][id] = rollouts, table, run.stats.of(q)
    packed["runs"] = runs.as_json()
    packed["training"] = _training(runs)
    page = _page(packed, title)
    return page, ReportData(full, listed, of, budget.refused, len(page))


def single(run: RolloutRun, row: str, title: str) -> bytes:
    """A page with one rollout alone, which it opens with.

    Raises:
        NotFound: there is no such row. UsageError: it does not fit, or is not JSON.
    """
    line = ByteBudget(MAX_BYTES).browser_json(run.index.line(row_seq(row)))
    if line is None:
        raise UsageError(f"row {row} of {run.name} is not JSON, or has more than {MAX_BYTES >> 20} MiB")
    facts = {
        **run.as_json(),
        "rows": 1,
        "failures": 0,
        "failure_classes": [],
        "tool_errors": 0,
        "bad_lines": 0,
        "bad": [],
    }
    packed: Json = {"title": title, "filter": "", "runs": [facts], "rows": {run.id: run.rows.rows([row_seq(row)])}}
    packed |= {"full": {run.id: {row: orjson.Fragment(line)}}, "stats": {}, "compare": {}, "training": None}
    return _page({**packed, "home": f"#/r/{run.id}/row/{row}"}, title)


def _page(packed: Json, title: str) -> bytes:
    return bundle(STATIC, orjson.dumps(packed, option=orjson.OPT_NON_STR_KEYS), title)


class ByteBudget:
    """A byte budget for the rollouts of all runs. refused: those that did not fit, or are not JSON."""

    def __init__(self, bytes: int) -> None:
        self._bytes = bytes
        self.refused = 0

    def browser_json(self, line: bytes) -> bytes | None:
        """The row as JSON that a browser can read; None if it is not JSON or does not fit."""
        try:
            line = orjson.dumps(whole(line.removeprefix(BOM)))
        except (NoRollout, orjson.JSONEncodeError):  # the index does not look into segments
            self.refused += 1
            return None
        if len(line) > self._bytes:
            self.refused += 1
            return None
        self._bytes -= len(line)
        return line


def _wait(run: RolloutRun, tick: Callable[[str], None]) -> None:
    """Until everything that the files have is indexed."""
    while True:
        extent = run.index.extent()
        if run.index.error:
            raise NgymError(run.index.error)
        if run.index.caught_up:
            return
        tick(f"{run.name}: {extent.rows:,} rollouts read, {extent.indexed_bytes / max(1, extent.bytes):.0%}")
        time.sleep(POLL_S)


def _count_matches(run: RolloutRun, q: str, tick: Callable[[str], None]) -> int:
    """The number of rows that the filter lets through, once its texts are looked for everywhere."""
    while True:
        page = run.rows.page(q, "", 0, 0)
        if page.scanned >= 1:
            return page.total
        tick(f"{run.name}: looking for the text, {page.scanned:.0%}")


def _most_different_tasks(runs: OpenedRuns, compared: dict[str, Json], count: int) -> dict[str, list[str]]:
    """Of the tasks on which two runs differ most, what their page opens with: the best of one and the worst of the other."""
    by_run: dict[str, list[str]] = {id: [] for id in runs.rollouts}
    for names, comparison in compared.items():
        for pair in comparison["rows"][: -(-count // 4)]:
            for id, side, sign in zip(names.split(","), (pair["a"], pair["b"]), (-1, 1), strict=True):
                if not pair["delta"]:
                    continue
                end = max if sign * pair["delta"] > 0 else min
                group = [row for row in runs.rollouts[id].rows.task(side["task"]) if row["row"] in side["rows"]]
                scored = [row for row in group if row["reward"] is not None]
                by_run[id] += [end(scored, key=_reward)["row"]] if scored else []
    return by_run


def _select_rows(run: RolloutRun, q: str, count: int, contrasts: list[str]) -> list[str]:
    """The most telling rows: a failure of each class, then in turn the worst, the best, the ends of groups that differ, what
    differs from another run, any.
    """
    stats = run.stats.of(q)
    failures = [each["example"] for each in stats["failures"]]
    share = -(-count // 4)
    worst = _rows(run, f"{q} -reward:null", "reward,advantage", share)
    best = _rows(run, f"{q} -reward:null", "-reward,-advantage", share)
    differing = _ends(run, q, share)
    turns = chain.from_iterable(zip_longest(worst, best, differing, contrasts, _evenly(run, q, count)))
    allowed = set(run.rows.all(q))
    known = dict.fromkeys(failures)
    for row in islice(turns, 10 * count + 10):
        if row is not None and len(known) < max(count, len(failures)) and row_seq(row) in allowed:
            known.setdefault(row)
    return list(known)


def _ends(run: RolloutRun, q: str, count: int) -> list[str]:
    """The best and the worst rollout of the tasks whose rewards differ most."""
    names = []
    for task in run.rows.tasks(q, "-spread", 0, min(1000, count)).rows:
        if task["task"] is not None and task["spread"]:
            group = [row for row in run.rows.task(task["task"]) if row["reward"] is not None]
            names += [max(group, key=_reward)["row"], min(group, key=_reward)["row"]] if group else []
    return names


def _reward(row: Json) -> float:
    return float(row["reward"])


def _rows(run: RolloutRun, q: str, sort: str, count: int) -> list[str]:
    return [row["row"] for row in run.rows.page(q, sort, 0, count).rows]


def _evenly(run: RolloutRun, q: str, count: int) -> list[str]:
    """Rows from all over the run; so are the first few of them."""
    seqs = run.rows.all(q)
    count = min(count, len(seqs))
    names = [row_name(seqs[place * len(seqs) // count]) for place in range(count)]
    random.Random(0).shuffle(names)
    return names


def _table_rows(run: RolloutRun, q: str, selection: Sequence[str]) -> list[Json]:
    """Rows for the table, in the order of the file: all, or the chosen ones and others evenly."""
    seqs = run.rows.all(q)
    if len(seqs) > MAX_LISTED:
        every = -(-len(seqs) // MAX_LISTED)
        seqs = sorted({*seqs[::every], *map(row_seq, selection)})
    return run.rows.rows(seqs)


def _training(runs: OpenedRuns) -> Json | None:
    """As the page's calls answer it."""
    if not runs.training:
        return None
    packed = training.pack_runs(runs.training.values())
    for id, run in runs.training.items():
        packed["samples"][id] |= {"file": runs.id_of(run.rollouts), "held_out": runs.id_of(run.held_out)}
    return packed
