"""Numbers over many rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from ngym.schema import Json


def aggregate(rows: Sequence[Json]) -> Json:
    """wire.md: POST /aggregate_metrics (over verify responses)."""
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return {"group_level_metrics": [], "agent_metrics": {"mean/reward": mean}, "key_metrics": {"mean/reward": mean}}
