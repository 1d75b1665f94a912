"""Renders a Slurm batch script: Ray over all nodes of the job, the command on the first one, and its continuation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ngym.cluster.target import Target, resume_line, shell_text
from ngym.errors import UsageError

WARNING_S = 180  # before the time limit: the step in progress ends, and a checkpoint is written

SCRIPT = """\
#!/bin/bash
{header}
set -euo pipefail
cd {folder}
logs={logs}
{begin}{setup}
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$logs/ray_token
(umask 077 && [ -s "$RAY_AUTH_TOKEN_PATH" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$RAY_AUTH_TOKEN_PATH")

# Ray: the head on this node, then a worker on each other node. The command waits until the cluster has room for it.
head=$(python -c 'import ray; print(ray.util.get_node_ip_address())')
export RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID RAY_ADDRESS=$head:$((20000 + SLURM_JOB_ID % 10000))
start=(ray start --num-cpus={cpus} --num-gpus={gpus}{pool} --disable-usage-stats --block)
workers=
end_ray() {{ # on the other nodes first, which remove their own folders
    if [ -n "$workers" ]; then
        scancel --signal=TERM "$SLURM_JOB_ID.0" &> /dev/null || true # its exit code says nothing: 225 after success
        for _ in {{1..30}}; do kill -0 "$workers" 2> /dev/null || break; sleep 1; done
    fi
    kill $(jobs -p) 2> /dev/null || true
    wait
    rm -rf "$RAY_TMPDIR"
}}
trap '{end}end_ray' EXIT
"${{start[@]}}" --head --node-ip-address="$head" --port="${{RAY_ADDRESS#*:}}" --include-dashboard=false &> "$logs/ray.log" &
until ray health-check --address "$RAY_ADDRESS" &> /dev/null; do kill -0 $! || exit 1; done
if [ "$SLURM_NNODES" -gt 1 ]; then
    srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$SLURMD_NODENAME" \\
        --cpus-per-task={cpus} --output={node_log} \\
        bash -c '"$@" & trap "kill $!" TERM; wait; wait; rm -rf "$RAY_TMPDIR"' ray "${{start[@]}}" --address="$RAY_ADDRESS" &
    workers=$! # step 0 of the job
fi

# The run continues if an earlier job of this name has begun it.
command=({command})
{resume}
"${{command[@]}}" &
run=$!
cut=
trap 'cut=yes; kill -{signal} "$run"' USR1 # {warning} s before the limit: {ending}
trap 'kill -TERM "$run"' TERM
while kill -0 "$run" 2> /dev/null; do wait "$run" || true; done # a signal ends `wait`, too
code=0
wait "$run" || code=$?
if [ -n "$cut" ] && [ "$code" -ne 0 ]; then
    {again}
fi
exit "$code"
"""
REQUEUE = 'scontrol requeue "$SLURM_JOB_ID" && exit 0'
CHAIN = """\
# The next job of the chain starts after each job that does not end with 0. It is cancelled with the rest of the chain,
# unless this one was cut, killed (128 and more), or ended with {try_again}: "try again later".
continues=
end_chain() {{
    local code=$?
    if [ -z "$continues" ] && [ "$code" -ne {try_again} ] && [ "$code" -lt 128 ]; then
        echo "the command ended with code $code, not by the time limit: the pending jobs of {name} are cancelled"
        scancel --user="$(id -un)" --name={name} --state=PENDING || true
    fi
}}
trap end_chain EXIT
"""
NEXT = 'continues=yes; echo "cut by the time limit; the next job of the chain continues"'
AFTER = "--dependency=afternotok:{previous}"
TRY_AGAIN = 75  # the exit code of a command for which a later repetition may succeed


def render(target: Target, command: Sequence[str], folder: Path, logs: Path) -> str:
    """The script. folder: the project's, on a disk that all nodes share. logs: where all output goes.

    Raises:
        UsageError: the time limit is not longer than the warning before it.
    """
    if _seconds(target.time) <= WARNING_S:
        raise UsageError(
            f"time: {target.time} leaves nothing before Slurm's warning, {WARNING_S} s ahead of it; set more"
        )
    header = {
        "job-name": target.name,
        "nodes": target.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": target.cpus,
        "mem": f"{target.memory_gb}G",
        "gpus-per-node": target.gpus or None,
        "time": target.time,
        "partition": target.partition,
        "account": target.account,
        "signal": f"B:USR1@{WARNING_S}",
        "open-mode": "append",
        "output": _pattern(logs, "%j.log"),
    }
    lines = [shlex.quote(f"--{key}={value}") for key, value in header.items() if value is not None]
    lines += ["--no-requeue" if target.chain else "--requeue", *target.options]
    trains = command[0] == "ng_train"
    return SCRIPT.format(
        header="\n".join(f"#SBATCH {line}" for line in lines),
        folder=shlex.quote(str(folder)),
        logs=shlex.quote(str(logs)),
        node_log=shlex.quote(_pattern(logs, "%j-%N.log")),
        begin=CHAIN.format(name=target.name, try_again=TRY_AGAIN) if target.chain else "",
        end="end_chain; " if target.chain else "",
        setup=target.setup or "# (no setup)",
        cpus=target.cpus,
        gpus=target.gpus,
        pool=" --resources='" + f'{{"{target.pool}": 1}}' + "'" if target.pool else "",
        command=shell_text(command),
        resume=resume_line(command),
        warning=WARNING_S,
        signal="USR1" if trains else "TERM",
        ending="write a checkpoint and end" if trains else "end",
        again=NEXT if target.chain else REQUEUE,
    )


def _pattern(folder: Path, name: str) -> str:
    """The path of a log in sbatch's and srun's filename patterns, in which `%%` is a percent sign of the folder."""
    return str(folder).replace("%", "%%") + "/" + name


def submissions(target: Target, script: Path) -> list[list[str]]:
    """The sbatch commands, in order; in AFTER, `{previous}` is the number of the job before."""
    sbatch = ["sbatch", "--parsable"]
    return [[*sbatch, str(script)], *[[*sbatch, AFTER, str(script)]] * target.chain]


def _seconds(time: str) -> int:
    """time: [DAYS-]HOURS:MINUTES:SECONDS."""
    days, _, clock = time.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
