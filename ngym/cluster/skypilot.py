"""Renders a SkyPilot task: Ray over its nodes, and the command on the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ngym.cluster.target import Target, resume_line, shell_text

PORT = 6379  # SkyPilot's own Ray uses 6380

RUN = """\
{setup}
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_ADDRESS=$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{port}
start=(ray start --num-cpus={cpus} --num-gpus={gpus}{pool} --disable-usage-stats --block)
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  until ray health-check --address "$RAY_ADDRESS" &> /dev/null; do sleep 2; done
  exec "${{start[@]}}" --address="$RAY_ADDRESS"
fi
trap 'kill $(jobs -p); wait' EXIT # never `ray stop`: SkyPilot's own Ray runs on this machine, too
"${{start[@]}}" --head --port={port} --include-dashboard=false &
until ray health-check --address "$RAY_ADDRESS" &> /dev/null; do kill -0 $! || exit 1; done
command=({command})
{resume} # after a recovery
"${{command[@]}}"
"""


def render(target: Target, command: Sequence[str]) -> dict[str, Any]:
    """The task, for `sky launch` or `sky jobs launch`."""
    resources: dict[str, Any] = {"cpus": f"{target.cpus}+", "memory": f"{target.memory_gb}+"}
    if target.gpus:
        resources["accelerators"] = f"{target.accelerator or 'GPU'}:{target.gpus}"
    if target.image:
        resources["image_id"] = f"docker:{target.image}"
    script = RUN.format(
        setup=target.setup or "# (no setup)",
        port=PORT,
        cpus=target.cpus,
        gpus=target.gpus,
        pool=" --resources='" + f'{{"{target.pool}": 1}}' + "'" if target.pool else "",
        command=shell_text(command),
        resume=resume_line(command),
    )
    return {
        "name": target.name,
        "num_nodes": target.nodes,
        "resources": resources,
        "workdir": ".",
        "secrets": dict.fromkeys(("RAY_AUTH_TOKEN", *target.secrets)),
        "run": script,
    }
