"""The figures of run.py -> the measured part of docs/benchmarks.md, and its plot. No figure is written down here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parts import format_figure

from ngym.plot import figure as drawing
from ngym.plot.figure import Line, Panel
from ngym.plot.runs import Series
from ngym.schema import Json


def render_page(results: Json) -> str:
    """The Markdown of all parts that were measured."""
    parts, machine = results["parts"], results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    loads = ", ".join(f"{name} {part['load']}" for name, part in parts.items())
    lines = [
        (
            f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, "
            f"CPython {machine['python']}, commit {machine['commit']}; {versions}."
        ),
        "",
        f"Load average before each part: {loads}. Absolute figures vary between machines; ratios within a run hold.",
    ]
    for name, section in SECTIONS.items():
        if name in parts:
            rows = parts[name]["rows"]
            lines += [
                "",
                *(section(rows) if rows else [f"## {name}", "", "Not measured: it failed, or cannot run here."]),
            ]
    return "\n".join(lines)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [
        heads,
        ["---"] * len(heads),
        *([str(one) if isinstance(one, str) else format_figure(one) for one in row] for row in rows),
    ]
    return ["", *(f"| {' | '.join(line)} |" for line in lines)]


def startup(rows: list[Json]) -> list[str]:
    labels = {
        "ready_s": "command to ready, s",
        "cpu_s": "CPU until then, s",
        "rss_mb": "memory of all processes, RSS, MB",
        "pss_mb": "the same as PSS, MB",
        "largest_rss_mb": "the largest process, RSS, MB",
        "stop_s": "Ctrl-C to gone, s",
    }
    head = ["## Start-up: `benchmarks/startup.py`", "", "Three light services: gym server, scripted model, agent."]
    return head + table(("", "median", "most"), ((labels[row["what"]], row["median"], row["most"]) for row in rows))


def rollouts(rows: list[Json]) -> list[str]:
    head = [
        "## Rollouts: `benchmarks/rollouts.py`",
        "",
        (
            "Through agent, model server, tools and `/verify`, with a model that answers at once, collected by `ngym.collect`. A rollout of T "
            "tool turns is 3 + 2T requests (hops). `bare` are the same requests between bare uvicorn applications, by ngym's own client: no "
            "framework, no check, no record. All rollouts have the same row, and the environment has no session, so that both send "
            "`/seed_session` once. Both run in alternating rounds of a second; the figures are medians of three, the "
            "ratio with its least and most. CPU is that of all processes."
        ),
        "",
        "![Rollouts a second and memory, by how many are in flight](benchmarks.svg)",
    ]
    heads = (
        "tool turns",
        "token ids",
        "in flight",
        "rollouts/s",
        "bare",
        "of bare",
        "p99 s",
        "bare",
        "CPU us a hop",
        "bare",
    )
    cells = (
        (
            *(row["tool_turns"], "with" if row["token_ids"] else "without", row["in_flight"], row["rollouts_s"]),
            *(row["bare_rollouts_s"], of_bare(row), row["p99_s"], row["bare_p99_s"]),
            *(row["cpu_us_a_hop"], row["bare_cpu_us_a_hop"]),
        )
        for row in rows
    )
    names = list(rows[0]["cpu_ms_a_rollout"])
    shares = (
        (row["tool_turns"], "with" if row["token_ids"] else "without", *row["cpu_ms_a_rollout"].values())
        for row in rows
        if row["in_flight"] == 64
    )
    labels = {"policy": "model server", "env": "gym server", "env_agent": "agent"}
    columns = ("tool turns", "token ids", *(labels.get(name, name) for name in names))
    return [*head, *table(heads, cells), "", "CPU ms a rollout at 64 in flight:", *table(columns, shares)]


def of_bare(row: Json) -> str:
    return f"{row['rate_of_bare']:.2f} ({row['rate_of_bare_least']:.2f} to {row['rate_of_bare_most']:.2f})"


def memory(rows: list[Json]) -> list[str]:
    head = [
        "## Memory: `benchmarks/memory.py`",
        "",
        "Resident set in MB at its peak, one tool turn; the model thinks until all rollouts are in flight.",
    ]
    heads = (
        "in flight",
        "model server",
        "gym server",
        "agent",
        "collector",
        "three services for 1,000 more",
        "collector for 1,000 more",
    )
    cells = (
        (
            *(row["in_flight"], *(row["rss_mb"][name] for name in ("policy", "env", "env_agent", "collector"))),
            *(row.get(f"{who}_mb_for_1000_more", "") for who in ("services", "collector")),
        )
        for row in rows
    )
    idle = sum(rows[0]["pss_mb"].values()) - rows[0]["pss_mb"]["collector"]
    shared = (
        f"Idle, the three services together take {format_figure(idle)} MB as PSS: they are forked from one process."
    )
    return [*head, *table(heads, cells), "", shared]


def verify(rows: list[Json]) -> list[str]:
    head = [
        "## `/verify`: `benchmarks/verify.py`",
        "",
        (
            "Right answers of each gold.jsonl over HTTP, 32 in flight, to one process; `empty` is a gym server that checks nothing. CPU is that "
            "of the service with its workers."
        ),
    ]
    heads = ("environment", "verify/s", "of empty", "CPU ms each", "of empty")
    ordered = sorted(rows, key=lambda row: -row["verify_s"])
    cells = (
        (row["environment"], row["verify_s"], f"{row['rate_of_empty']:.2f}", row["cpu_ms"], row["cpu_of_empty"])
        for row in ordered
    )
    return head + table(heads, cells)


def collector(rows: list[Json]) -> list[str]:
    head = [
        "## The collector: `benchmarks/collector.py`",
        "",
        "Against an agent that answers at once; files synced, aggregates kept. CPU is the collector's own.",
    ]
    heads = ("in flight", "bytes a row", "rows/s", "MB/s", "CPU ms a row")
    names = ("in_flight", "row_bytes", "rows_s", "mb_s", "cpu_ms")
    return head + table(heads, ([row[name] for name in names] for row in rows))


def training(rows: list[Json]) -> list[str]:
    head = [
        "## Trainer: `benchmarks/training.py`",
        "",
        (
            "Supervised steps of 32 demonstrations, AdamW, float32, beside a plain loop over transformers (padded, eight at once) with the same "
            "samples, in turns. Tokens are those of the samples, without padding."
        ),
    ]
    heads = ("parameters", "tokens/s", "plain", "x plain", "CPU of plain", "loss", "plain loss")
    names = ("parameters", "tokens_s", "plain_tokens_s", "rate_of_plain", "cpu_of_plain")
    cells = ([*(row[name] for name in names), f"{row['loss']:.4f}", f"{row['plain_loss']:.4f}"] for row in rows)
    return head + table(heads, cells)


def push(rows: list[Json]) -> list[str]:
    head = [
        "## Weight push: `benchmarks/push.py`",
        "",
        (
            "Weights over HTTP to a running vLLM, committed, and proven by log-probabilities: every tensor (`http`), or the "
            "values that changed (`delta`). Before each push every weight moves by up to 1e-6, as by a step of AdamW at that rate."
        ),
    ]
    heads = ("parameters", "dtype", "transport", "MB", "seconds, median", "most", "vLLM ready after, s")
    names = ("parameters", "dtype", "transport", "mb", "push_s", "push_most_s", "vllm_ready_s")
    return head + table(heads, ([row[name] for name in names] for row in rows))


def view(rows: list[Json]) -> list[str]:
    size = next(row for row in rows if "orjson_s" in row)
    head = [
        "## The viewer: `benchmarks/view.py`",
        "",
        (
            f"`ng_view` on {format_figure(size['rows'])} rollouts, {format_figure(size['gigabytes'])} GB in the page cache, from the start of the command. "
            f"To read the file once with orjson in one process took {format_figure(size['orjson_s'])} s."
        ),
    ]
    heads = ("opened for the", "first rows, s", "all indexed, s", "x orjson", "CPU s", "memory, MB")
    names = ("opening", "rows_s", "indexed_s", "of_orjson", "cpu_s", "megabytes")
    openings = table(heads, ([row[name] for name in names] for row in rows if "opening" in row))
    heads = ("the table", "first time, ms", "a page while scrolling, median ms", "most")
    orders = [row for row in rows if "order" in row]
    return (
        head
        + openings
        + table(
            heads,
            ([row["order"], row["first_ms"], row.get("page_ms", ""), row.get("worst_page_ms", "")] for row in orders),
        )
    )


SECTIONS = {
    "startup": startup,
    "rollouts": rollouts,
    "memory": memory,
    "verify": verify,
    "collector": collector,
    "training": training,
    "push": push,
    "view": view,
}


Points = list[tuple[float, float]]


def picture(parts: Json) -> bytes:
    """Rollouts a second by tool turns, and memory, by how many are in flight; an SVG."""
    panels = []
    found = parts.get("rollouts", {}).get("rows") or []
    for tools in sorted({row["tool_turns"] for row in found}):
        points: dict[str, Points] = {}
        for row in found:
            if row["tool_turns"] == tools:
                name = f"{'with' if row['token_ids'] else 'without'} token ids"
                points.setdefault(name, []).append((row["in_flight"], row["rollouts_s"]))
                points.setdefault(f"{name}: bare", []).append((row["in_flight"], row["bare_rollouts_s"]))
        panels.append(panel(f"rollouts/s, {tools} tool turns", points))
    if grown := [row for row in parts.get("memory", {}).get("rows") or [] if row["in_flight"]]:
        labels = {"policy": "model server", "env": "gym server", "env_agent": "agent", "collector": "collector"}
        points = {what: [(row["in_flight"], row["rss_mb"][name]) for row in grown] for name, what in labels.items()}
        panels.append(panel("memory, MB resident at the peak", points))
    return drawing.picture(panels, "svg", across=2)


def panel(title: str, points: dict[str, Points]) -> Panel:
    """Lines whose names begin alike, up to ": ", have one colour, and those after the first of them are dashed."""
    stems = [name.split(": ")[0] for name in points]
    colours = {stem: number for number, stem in enumerate(dict.fromkeys(stems))}
    lines = [
        Line(Series(name, *zip(*some, strict=True)), colours[stem], dashed=name != stem)
        for (name, some), stem in zip(points.items(), stems, strict=True)
    ]
    return Panel(title, lines, x="in flight", x_scale="log4", from_zero=True)
