"""A config whose scripted model adds 1 three times, and the task of counting to 3 that it solves."""

from __future__ import annotations

from typing import Any

STEPS = 3
ADD = {
    "type": "function",
    "name": "add",
    "description": "Add to the counter.",
    "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]},
}
TASK = {"responses_create_params": {"input": "Count to 3.", "tools": [ADD]}, "target": STEPS}


def config(latency_s: float = 0.0) -> dict[str, Any]:
    """The model, its environment and its agent."""
    adds = [{"turn": turn, "tool_calls": [{"name": "add", "arguments": {"amount": 1}}]} for turn in (1, 2, 3)]
    replies = [*adds, {"text": "done"}]
    return {
        "policy": {"kind": "model", "app": "models/scripted", "replies": replies, "latency_s": latency_s},
        "counter": {"kind": "gym_server", "app": "gym_servers/counter"},
        "counter_agent": {"kind": "agent", "app": "agents/simple", "gym": "counter", "model": "policy"},
    }
