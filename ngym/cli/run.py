"""`ng_run`: starts every service of the config, keeps it running, and stops all of them together; and its --dry-run."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import orjson

from ngym.cli.shell.completion_names import services
from ngym.cli.shell.main import command, config_options, on_option
from ngym.config.shipped_files import app_file
from ngym.errors import ConfigError, UsageError
from ngym.extras import require
from ngym.runtime.live_region import align
from ngym.supervise.head_file import FOLDER

if TYPE_CHECKING:
    from ngym.config.service_config import Config, Stanza
    from ngym.supervise.placement import ProcessPlacer
    from ngym.supervise.status_display import Display
    from ngym.supervise.supervisor import Supervisor
    from ngym.supervise.zygote_client import ZygoteClient

EXIT_CODES = """\
Exit codes: 0  stopped by Ctrl-C (twice: at once), SIGTERM or a closed terminal
            1  a service died repeatedly, or was not ready in time; its last log lines are shown
            2  the command, the config or a service's options are wrong, or no gym server can start;
               the line says where"""


@command("ng_run", epilog=EXIT_CODES)
@config_options
@click.option(
    "--only", "names", multiple=True, metavar="NAME", shell_complete=services(),
    help="Start this service and those that it needs; repeat it.  [default: all]",
)  # fmt: skip
@on_option("Start them on this machine, or on the Ray cluster that it is a node of.")
@click.option(
    "--strict", is_flag=True, help="End the run if a gym server cannot start.  [default: report it, run the rest]"
)
@click.option(
    "--warm/--no-warm",
    default=None,
    help="Keep a process with vLLM's imports for later commands / end it, and start nothing.  [default: use one that "
    "is there]",
)
@click.option("--dry-run", is_flag=True, help="Show what would be started and the resolved config; start nothing.")
@click.option("--plain", is_flag=True, help="Print lines instead of a live display on a terminal.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line for each change of a service.")
def main(
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    names: tuple[str, ...],
    on: str,
    strict: bool,
    warm: bool | None,
    dry_run: bool,
    plain: bool,
    as_json: bool,
) -> None:
    """Start every service of the config, or some with --only, and keep it running.

    A gym server that refuses to start, such as for a missing package, is reported, and the rest runs.
    Services get free ports, unless their stanza sets one; the head (http://127.0.0.1:11000, or a free port) lists
    them. Logs are in .ngym/logs next to the config. Commands in another terminal, in the same folder, find the run.

    \b
    Examples: ng_run
              ng_run --only math_agent
              ng_run --config global_config.yaml --config local.yaml policy.replicas=2
              ng_run --on ray
    """
    if dry_run:
        show_plan(_config(configs, overrides, names), as_json, on)
        return
    if warm is False:
        from ngym.supervise import warm_zygote

        pids = " and ".join(str(each.pid) for each in warm_zygote.end())
        click.echo(f"ended process {pids}" if pids else "no process is kept")
        return
    if warm and (on != "local" or sys.platform != "linux"):
        raise UsageError("--warm works on Linux, and with --on local")
    if on != "local":
        require("ray", "ng_run --on ray", "ray")
        asyncio.run(_run(_config(configs, overrides, names), None, as_json, plain, strict, on))
        return
    from ngym.supervise.zygote_client import ZygoteClient

    launcher = ZygoteClient.start()  # before everything else: its imports take longest
    config = None
    try:
        config = _config(configs, overrides, names)
        asyncio.run(_run(config, launcher, as_json, plain, strict, warm=bool(warm)))
    except ConfigError as error:
        raise ConfigError("\n".join(_all_mistakes(error, config))) from None
    finally:
        launcher.close()


def _all_mistakes(error: ConfigError, config: Config | None) -> list[str]:
    """The error that ended the run, and the other mistakes of its config. config: None if reading it failed."""
    from ngym.cli.validate import mistakes_of
    from ngym.config.service_config import ConfigMistakes
    from ngym.supervise.service import ServiceRefused
    from ngym.supervise.zygote_client import ZygoteClient

    names: Collection[str] = ()
    if isinstance(error, ConfigMistakes):
        config, names = error.config, error.names
    if config is None or isinstance(error, ServiceRefused):
        return [str(error)]
    launcher = ZygoteClient.start()
    try:
        mistakes = asyncio.run(mistakes_of(config, launcher, names))
    finally:
        launcher.close()
    first = str(error).splitlines()
    return first + [line for line in "\n".join(mistakes).splitlines() if line not in first]


def _config(configs: tuple[Path, ...], overrides: tuple[str, ...], names: tuple[str, ...]) -> Config:
    from ngym.config.service_config import load_config

    config = load_config(configs, overrides)
    return config.only(names) if names else config


async def _run(
    config: Config,
    launcher: ZygoteClient | None,
    as_json: bool,
    plain: bool,
    strict: bool,
    on: str = "local",
    warm: bool = False,
) -> None:
    """Run until a signal, or an error that ends the run."""
    from ngym.supervise.placement import LocalPlacer
    from ngym.supervise.status_display import display
    from ngym.supervise.supervisor import Supervisor

    stop = asyncio.Event()
    async with display(as_json, stop.set, plain) as show:
        engine: ProcessPlacer | None = None
        if on != "local":
            from ngym.cluster.ray_placement import RayPlacer

            engine = ray = RayPlacer.connect(on, lambda text: show.say("waiting", text))
            config = ray.reachable(config)
        elif warm and launcher:
            engine = LocalPlacer(launcher, warm=True)
        supervisor = Supervisor(config, show.on_state, launcher, engine, strict)
        _stop_on_signals(supervisor, stop)
        serving = asyncio.create_task(_serve(supervisor, show))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            show.say("stopping", "stopping every service (Ctrl-C again: at once)")
            serving.cancel()
            await asyncio.wait([serving])
        if serving.cancelled():
            note = ""
            if warm:
                from ngym.supervise import warm_zygote

                pids = " and ".join(str(each.pid) for each in warm_zygote.running())
                note = f"; process {pids} is kept for later commands (ng_run --no-warm ends it)"
                if not pids:
                    note = f"; no process is kept: no app has a `preload`, or {warm_zygote.folder()}/*.log says why"
            show.say("stopped", f"every service is stopped{note}")
            return
        if as_json:  # without --json the error goes to stderr
            show.say("failed", str(serving.exception()))
        serving.result()


async def _serve(supervisor: Supervisor, show: Display) -> None:
    from ngym.supervise.status_display import status_line

    async with supervisor:
        seconds = supervisor.ready_after_s or 0.0
        text = f"ready in {seconds:.1f} s; status: {supervisor.head_url}; Ctrl-C stops everything"
        for state in supervisor.states:
            if state.status in ("failed", "not ready") and not state.external:
                text += f"\n{status_line(state)}"
        if supervisor.run_token:
            text += (
                "\nlocked: callers send the token in .ngym/head.json ('Authorization: Bearer ...'; docs/security.md)"
            )
        if supervisor.notice:
            text += f"\n{supervisor.notice}"
        locked = supervisor.run_token is not None
        looks = show.watch(lambda: supervisor.states, supervisor.run_token)
        show.say("ready", text, seconds=round(seconds, 3), head=supervisor.head_url, locked=locked)
        try:
            await supervisor.failure()
        finally:
            if looks:
                looks.cancel()


def _stop_on_signals(supervisor: Supervisor, stop: asyncio.Event) -> None:
    def received() -> None:
        if stop.is_set():
            supervisor.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, received)
    loop.add_signal_handler(signal.SIGTERM, received)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it is
        loop.add_signal_handler(signal.SIGHUP, received)


HEADER = ("NAME", "KIND", "COPIES", "ADDRESS", "APP")


class PlannedService(NamedTuple):
    """A service as it would be started. app: its file; None: an external service at `urls`. port: None: a free one.

    python: that of the service's virtual environment; None: the one that runs ngym. resources: of each process.
    nodes: processes of each replica. gpus: those of each process, on this machine; empty: not assigned.
    """

    name: str
    kind: str
    app: Path | None
    replicas: int | str | dict[str, int]
    nodes: int
    host: str
    port: int | None
    urls: list[str]
    python: Path | None
    resources: dict[str, Any]
    pool: str | None
    gpus: list[list[str]]

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "app": _text(self.app), "python": _text(self.python)}


def show_plan(config: Config, as_json: bool, on: str = "local") -> None:
    """Print the resolved config to standard output, secrets redacted, and the services it starts to standard error.

    Also the models that do not exist yet: `ng_run` would stop at them.
    """
    import yaml

    from ngym.config.service_config import missing_models, redacted_config
    from ngym.supervise.placement import gpu_slices, with_own_gpus

    slices = gpu_slices(with_own_gpus(config)) if on == "local" else {}  # on a cluster, Ray chooses them
    services = [_plan_service(config, stanza, slices) for stanza in config.services.values()]
    logs = config.root / FOLDER / "logs"
    head = config.settings.head
    if on != "local":  # as `RayPlacer.reachable` decides it
        if "host" not in config.settings.model_fields_set:
            services = [each._replace(host="the address of its node") for each in services]
        if "host" not in head.model_fields_set:
            head = head.model_copy(update={"host": "the address of this node"})
    if as_json:
        plan = {"services": [each.as_json() for each in services], "head": head.model_dump(), "logs": str(logs)}
        plan |= {"missing_models": missing_models(config), "config": redacted_config(config)}
        click.echo(orjson.dumps(plan, option=orjson.OPT_INDENT_2))
        return
    click.echo(yaml.safe_dump(redacted_config(config), sort_keys=False), nl=False)
    for line in align([HEADER, *map(_row, services)]):
        click.echo(line, err=True)
    click.echo(f"the head at {_address(head.host, head.port)}, logs in {logs}; nothing was started", err=True)
    for line in missing_models(config):
        click.echo(f"not there yet: {line}", err=True)


def show_service(config: Config, stanza: Stanza, app: str, host: str, port: int, as_json: bool) -> None:
    """Print what `ng_serve` would start. port: 0 for a free one."""
    file = app_file(app, config.root, stanza.where)
    one = _plan_service(config, stanza)._replace(app=file, replicas=1, host=host, port=port or None)
    if as_json:
        click.echo(orjson.dumps(one.as_json(), option=orjson.OPT_INDENT_2))
        return
    for line in align([HEADER, _row(one)]):
        click.echo(line)
    click.echo("nothing was started", err=True)


def _plan_service(
    config: Config, stanza: Stanza, slices: Mapping[tuple[str, int], Sequence[str]] = {}
) -> PlannedService:
    from ngym.supervise.venvs import venv_of

    app = app_file(stanza.app, config.root, stanza.where) if stanza.app and not stanza.external else None
    venv = venv_of(config, stanza)
    return PlannedService(
        stanza.name,
        stanza.kind,
        app,
        stanza.model_dump(include={"replicas"})["replicas"],
        stanza.nodes,
        config.settings.host,
        stanza.port,
        stanza.external_urls,
        venv.python if venv else None,
        stanza.resources.model_dump(exclude_none=True) if stanza.resources else {},
        stanza.pool,
        [list(gpus) for (name, _), gpus in slices.items() if name == stanza.name],
    )


def _row(each: PlannedService) -> tuple[str, ...]:
    if each.app is None:
        return (each.name, each.kind, "", " ".join(each.urls), "external: not started here")
    app = f"{each.app}" + (f", by {each.python}" if each.python else "")
    app += f" ({resources})" if (resources := _resources(each)) else ""
    count = "{min} to {max}".format(**each.replicas) if isinstance(each.replicas, dict) else str(each.replicas)
    count += f" x {each.nodes} nodes" if each.nodes > 1 else ""
    return (each.name, each.kind, count, _address(each.host, each.port), app)


def _resources(each: PlannedService) -> str:
    """Such as `cpus 4, GPUs 0,1 | 2,3`, with the GPUs of each process."""
    parts = [f"{key} {value:g}" for key, value in each.resources.items() if key != "gpus" or not each.gpus]
    if each.gpus:
        parts.append("GPUs " + " | ".join(",".join(gpus) or "none" for gpus in each.gpus))
    return ", ".join(parts + ([f"pool {each.pool}"] if each.pool else []))


def _address(host: str, port: int | None) -> str:
    return f"{host}:{port}" if port else f"{host}, a free port"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
