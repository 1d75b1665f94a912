"""`ng_train --on ray`: the services and the ranks of a run on a Ray cluster.

    driver (ng_train --on ray) -- Supervisor on Ray: the services, for the whole run
                               -- a group of actors: each starts one rank, `ng_train` with RANK, WORLD_SIZE, ...

Any rank that fails, or whose node dies, ends its group; a new group continues after the last checkpoint, while the
services keep running.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ngym.cluster.ray_membership import is_lost, report_silent_nodes, until_cut_off, watch_membership
from ngym.cluster.ray_placement import (
    CHUNK_BYTES,
    RayPlacer,
    RayProcess,
    bundle,
    connect,
    in_group,
    last_line,
    of_actor,
    reserve_group,
)
from ngym.errors import NgymError
from ngym.files.atomic import FileLocked, held_folder
from ngym.net.auth import ADMIN_TOKEN, RUN_TOKEN
from ngym.runtime.event_loop import run_endlessly, run_unless_failed
from ngym.supervise.placement import VISIBLE
from ngym.supervise.service import EXIT_LOST, ReplicaState, describe_exit
from ngym.supervise.service_zygote import PR_SET_PDEATHSIG, prctl
from ngym.supervise.supervisor import Supervisor

from .checkpoints import FOLDER as CHECKPOINTS
from .checkpoints import NAME
from .online.services import HEAD, config_for, config_for_agents, serving_options
from .recipe.recipe import Recipe, TrainerOptions
from .recipe.recipe_reader import environment_names
from .run_folder import METRICS, RESOLVED, summary
from .train import OTHERWISE, agents_of, check_recipe

PLACEMENT_TIMEOUT_S = 600.0
# Until an earlier rank 0 has released the run's folder: on a node that is cut off, Ray ends it after a minute, and a
# network disk keeps the lock of a machine that lost its power for as long as a lease, 90 s for NFS.
FOLDER_TIMEOUT_S = 180
USAGE, TRY_AGAIN, INTERRUPTED = 2, 75, 130  # exit codes that another group of ranks does not change
FIRST_SIGNAL = 128  # exit codes from here on, and negative ones, are of processes that were killed or lost
RANK_VARIABLES = (
    "CUDA",
    "DS",
    "GLOO",
    "HF",
    "MLFLOW",
    "NCCL",
    "NGYM",
    "OMP",
    "OTEL",
    "PYTORCH",
    "WANDB",
)  # variables that they get
OF_THE_NODE = frozenset(  # variables that they keep
    {
        "HOME",
        "HOSTNAME",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "PWD",
        "PYTHONPATH",
        "SHELL",
        "TMPDIR",
        "USER",
        "VIRTUAL_ENV",
    }
)
Say = Callable[[str], None]
Result = TypeVar("Result")


class Rank:
    """The actor beside one rank. It ends the rank when this node is cut off: Ray then starts another one elsewhere."""

    async def address(self) -> tuple[str, int]:
        """This node's address, and a port that is free there."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as sock:
            sock.bind((host, 0))
            return host, sock.getsockname()[1]

    async def start(self, words: Sequence[str], environment: Mapping[str, str], folder: str) -> int:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "ngym", "train", *words, cwd=folder, env={**os.environ, **environment},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            preexec_fn=_set_up_rank,
        )  # fmt: skip
        self._watch = asyncio.create_task(run_endlessly(self._watch_cluster, "the watch of the cluster"))
        return self._process.pid

    async def _watch_cluster(self) -> None:
        """Kill the rank once this node has been cut off. Ray itself would not notice it before the network is back."""
        await until_cut_off()
        await self.signal(signal.SIGKILL)

    async def output(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(CHUNK_BYTES)

    async def exit_code(self) -> int:
        return await self._process.wait()

    async def signal(self, number: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)


def _set_up_rank() -> None:
    """End with the actor; receive all signals, which the actor's threads block."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def main(files: Sequence[str], overrides: Sequence[str], to: str, *, overwrite: bool, resume: bool) -> Path:
    """Run a recipe on the cluster `to`; returns the run's folder. Raises as `train.main`, and SystemExit(130)."""
    recipe, tree = check_recipe(files, overrides, on_ray=True)
    connect(to)
    try:
        return asyncio.run(_Run(recipe, [*files, *overrides], overwrite, resume, environment_names(tree)).run())
    finally:
        if not is_lost():
            ray.shutdown()


class _Run:
    """A run on the cluster. named: variables that the recipe names; ranks get them in arguments of Ray's calls, not in
    runtime_env, which Ray shows and logs.
    """

    def __init__(
        self, recipe: Recipe, words: list[str], overwrite: bool, resume: bool, named: Collection[str] = ()
    ) -> None:
        self._recipe, self._words, self._named = recipe, words, named
        self._first = ["--resume"] * resume + ["--overwrite"] * overwrite
        self._options = recipe.trainer or TrainerOptions()
        self._ranks: list[RayProcess] = []
        self._ended = ""  # the rank that ended the last group
        self._stopping = False
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> Path:
        loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for received, sent in (("USR1", "USR1"), ("INT", "INT"), ("TERM", "INT")):
            number, handled = signal.Signals[f"SIG{sent}"], signal.Signals[f"SIG{received}"]
            loop.add_signal_handler(handled, self._stop, number)
        code = INTERRUPTED
        try:
            async with self._services() as (environment, failure):
                code = await run_unless_failed(failure(), self._run_until_done(environment))
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        if code:
            raise SystemExit(code)
        return self._recipe.output

    def _stop(self, number: signal.Signals) -> None:
        """The ranks end by themselves. Without ranks, while services start or the ranks wait for room, the run ends."""
        if not self._ranks and not self._stopping and self._task is not None:
            self._task.cancel()
        self._stopping = True
        for rank in self._ranks:
            rank.signal(number)

    async def _run_until_done(self, environment: Mapping[str, str]) -> int:
        """Run groups of ranks until one succeeds, another one would not help, or too many have failed.

        Raises:
            NgymError: too many have failed, or two in the same way at the same place.
        """
        continues, earlier = self._first, self._recipe_file()
        failure: tuple[int, object] | None = None
        for remaining in reversed(range(self._options.max_failures + 1)):
            self._ended = "a rank"
            code = await self._group(environment, continues)
            if self._stopping and not 0 <= code <= 255:  # the rank could not handle the signal, or is lost
                return INTERRUPTED
            if code == 0 or self._stopping or code in (USAGE, TRY_AGAIN, INTERRUPTED):
                return code
            previous, failure = failure, (code, self._progress())
            if failure == previous and 0 < code < FIRST_SIGNAL:
                raise NgymError(
                    f"the ranks failed twice in the same way ({describe_exit(code)}), the second time without a new step or "
                    "checkpoint, so they do not start again; their lines above say why"
                )
            if remaining:
                _say(
                    f"{self._ended} ended ({describe_exit(code)}); all start again, after the last checkpoint "
                    f"({remaining} left)"
                )
                await self._wait_for_folder()
            began = self._recipe_file() not in (None, earlier)
            continues = ["--resume"] if began else self._first
        raise NgymError(
            f"the ranks failed {self._options.max_failures + 1} times, the last time: {describe_exit(code)}"
        )

    async def _wait_for_folder(self) -> None:
        """Wait until no earlier rank 0 holds the run's folder.

        Raises:
            FileLocked: one still holds it.
        """
        output = self._recipe.output
        for attempt in range(FOLDER_TIMEOUT_S):
            if not output.is_dir():
                return
            try:
                with held_folder(output, OTHERWISE):
                    return
            except FileLocked:
                if attempt == FOLDER_TIMEOUT_S - 1:
                    raise
                if not attempt:
                    _say(f"waiting for an earlier rank 0, which still holds {output}")
            await asyncio.sleep(1)

    def _recipe_file(self) -> tuple[int, int] | None:
        """Identity of the recipe that a run writes when it begins to train; another one after each beginning."""
        try:
            status = (self._recipe.output / RESOLVED).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _progress(self) -> tuple[list[str], int | None]:
        """The checkpoints of the run, and the step of the last entry of its metrics."""
        output = self._recipe.output
        names = sorted(folder.name for folder in (output / CHECKPOINTS).glob("step-*") if NAME.fullmatch(folder.name))
        return names, summary(output)["last"].get("step") if (output / METRICS).exists() else None

    async def _group(self, environment: Mapping[str, str], continues: Sequence[str]) -> int:
        """Run one group; returns the first exit code that is not 0. EXIT_LOST if Ray loses a rank while it starts.

        Raises:
            NgymError: a node cannot run a rank, such as one without ngym.
        """
        options, size = self._options, self._options.ranks
        of_rank = bundle(options.resources, options.pool)
        group = await reserve_group(["a rank"] * size, [of_rank] * size, PLACEMENT_TIMEOUT_S, _say)
        kind = ray.remote(Rank)
        actors: list[Any] = [
            kind.options(scheduling_strategy=in_group(group, index), **of_actor(of_rank)).remote()
            for index in range(size)
        ]
        try:
            addresses = await asyncio.gather(*(_await(actor.address.remote()) for actor in actors))
            host, port = addresses[0]
            shared = {**environment, "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
            words, folder = [*self._words, *continues], str(Path.cwd())
            for index, actor in enumerate(actors):
                variables = {"RANK": str(index), "LOCAL_RANK": "0"}  # each sees only its own GPUs
                pid = await actor.start.remote(words, shared | variables, folder)
                self._ranks.append(RayProcess(actor, pid, os.dup(1 if index == 0 else 2)))
            failed = await run_unless_failed(
                report_silent_nodes({host for host, _ in addresses}, _say),
                _first_failure([rank.exit_code for rank in self._ranks]),
            )
            exited = [rank for rank in self._ranks if rank.exit_code.done()]
            await asyncio.gather(*(rank.drain() for rank in exited))
            if failed is None:
                return 0
            self._ended = f"rank {failed} on {addresses[failed][0]}"
            return self._ranks[failed].exit_code.result()
        except RayError as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise NgymError(
                    f"a node of the Ray cluster cannot run a rank: {last_line(error)} (docs/scale.md)"
                ) from None
            _say(str(error).partition("\n")[0])
            return 1 if isinstance(error, RayTaskError) else EXIT_LOST  # the actor's own code failed, or Ray lost it
        finally:
            self._ranks = []
            if not is_lost():
                for actor in actors:
                    ray.kill(actor)  # and with it its rank
                ray.util.remove_placement_group(group)

    @asynccontextmanager
    async def _services(self) -> AsyncIterator[tuple[dict[str, str], Callable[[], Any]]]:
        """The variables of all ranks; with those by which rank 0 finds the services, if there are any."""
        environment = rank_environment(os.environ, self._named)
        live = self._recipe.live
        if live is None or live.config is None:
            yield environment, watch_membership
            return
        agents = agents_of(self._recipe, live)
        config = config_for(live.config, live.policy, live.policy_app, serving_options(self._recipe))
        engine = RayPlacer(_say)
        config = engine.reachable(config_for_agents(config, agents, live.policy))
        async with Supervisor(config, _failures, engine=engine) as stack:
            _say(f"services ready after {stack.ready_after_s:.0f} s; status: {stack.head_url}")
            variables = {HEAD: stack.head_url, ADMIN_TOKEN: stack.admin_token, RUN_TOKEN: stack.run_token or ""}
            yield {**environment, **variables}, stack.failure


def rank_environment(environment: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """The variables that ranks get from this environment. named: variables that the recipe names.

    Ranks keep those of their node, also if the recipe names them: with another HOME or PATH, a rank does not find its
    caches and programs.
    """
    kept = OF_THE_NODE | {VISIBLE}  # Ray assigns each rank its GPUs
    names = (name for name in environment if name in named or name.partition("_")[0] in RANK_VARIABLES)
    return {name: environment[name] for name in names if name not in kept}


async def _await(result: Awaitable[Result]) -> Result:
    return await result


async def _first_failure(codes: Sequence[asyncio.Future[int]]) -> int | None:
    """The index of the first that is not 0, or None if all are."""
    running = set(codes)
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for index, code in enumerate(codes):
            if code in done and code.result():
                return index
    return None


def _failures(state: ReplicaState) -> None:
    if state.status in ("restarting", "failed"):
        _say(f"{state.label}: {state.status} {state.detail}".rstrip())


def _say(text: str) -> None:
    print(text, flush=True)
