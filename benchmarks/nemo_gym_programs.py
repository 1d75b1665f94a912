"""Runs NeMo Gym's programs and ours against each other.

    python benchmarks/nemo_gym_programs.py VENV

VENV is an environment with nemo_gym (0.7). Its `ng_run` starts its servers and, through `ng_serve`, ours; both
collectors then run rollouts through mixed chains. The rewards are known; with a wrong one the exit code is 1.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ngym.runtime.event_loop import signals_as_keyboard_interrupt

Row = dict[str, Any]
BIN = Path(sys.executable).parent
WAIT_S = 300
TOKENS = "simple_tokens"  # the agent whose model gives token ids
# The counter of example_session_state_mgmt, and games
COUNTER = [
    {"question": "start at 3, add 4 and 5", "initial_count": 3, "expected_count": 12},  # the scripted model is right
    {"question": "start at 3, add 4 and 5", "initial_count": 4, "expected_count": 12},  # the counter starts elsewhere
]
TOOL = {"type": "function", "name": "increment_counter", "strict": True, "description": ""}
PARAMETERS = {
    "type": "object",
    "properties": {"count": {"type": "integer"}},
    "required": ["count"],
    "additionalProperties": False,
}
REPLIES = [
    *(
        {"turn": turn, "match": pattern, "tool_calls": [{"name": "increment_counter", "arguments": '{"count": {1}}'}]}
        for turn, pattern in ((1, r"add (\d)"), (2, r"and (\d)"))
    ),
    {"contains": "card", "text": "stand"},
    {"text": "<action>stand</action>"},
]
OURS: Row = {
    "policy": {"kind": "model", "app": "models/scripted", "tokens": True, "replies": REPLIES},
    "counter": {"kind": "gym_server", "app": "gym_servers/counter/nemo_gym.py"},
    "games": {"kind": "gym_server", "app": "gym_servers/games"},
    "counter_agent": {"kind": "agent", "app": "agents/simple", "gym": "counter", "model": "policy"},
    "games_agent": {"kind": "agent", "app": "agents/gymnasium", "gym": "games", "model": "policy"},
}
WRAPPER = """import os
from omegaconf import OmegaConf

stanza = OmegaConf.create(os.environ["NEMO_GYM_CONFIG_DICT"])[os.environ["NEMO_GYM_CONFIG_PATH"]]
port = next(iter(next(iter(stanza.values())).values())).port
env = {{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}}
os.execve({serve!r}, ["ng_serve", {name!r}, "--config", {config!r}, "--port", str(port)], env)
"""
TYPES = {"model": "responses_api_models", "gym_server": "resources_servers", "agent": "responses_api_agents"}
REFERENCES = {"gym": ("resources_server", "gym_server"), "model": ("model_server", "model")}
MODEL_OF_OURS = {"return_token_id_information": True, "uses_reasoning_parser": False, "api_key": "none", "model": "m"}


def stanza(kind: str, implementation: str, **options: Any) -> Row:
    """One of their servers; the value of `gym` and `model` is a server's name."""
    for option, (reference, type_) in REFERENCES.items():
        if kind == "agent":
            options[reference] = {"type": TYPES[type_], "name": options.pop(option)}
    return {TYPES[kind]: {implementation: {"entrypoint": "app.py", **options}}}


def relay(agent: str) -> Row:
    """The environment server that their collector needs for an agent."""
    reference = {"type": TYPES["agent"], "name": agent}
    return {"environment_servers": {"legacy_agent": {"entrypoint": "app.py", "agent_server": reference}}}


def nemo_gym_config(policy_url: str, head: int, venvs: Path) -> Row:
    """Their config: their servers, and ours under names of their own."""
    config = {
        "our_policy": stanza("model", "ngym_policy"),
        "our_counter": stanza("gym_server", "ngym_counter", domain="agent"),
        "our_games": stanza("gym_server", "ngym_games", domain="games"),
        "simple": stanza("agent", "simple_agent", gym="our_counter", model="our_policy"),
        "gymnasium": stanza("agent", "gymnasium_agent", gym="our_games", model="our_policy"),
        "their_counter": stanza("gym_server", "example_session_state_mgmt", domain="agent"),
        "their_blackjack": stanza("gym_server", "blackjack", domain="games"),
        "their_model": stanza("model", "vllm_model", base_url=f"{policy_url}/v1", **MODEL_OF_OURS),
        "simple_environment_server": relay("simple"),
        "gymnasium_environment_server": relay("gymnasium"),
    }
    return config | {
        "head_server": {"host": "127.0.0.1", "port": head},
        "skip_venv_if_present": True,
        "uv_venv_dir": str(venvs),
    }


def write_project(folder: Path, venv: Path, policy_url: str, head: int) -> None:
    """Their config, and a server of theirs for each service of ours."""
    config = nemo_gym_config(policy_url, head, folder / "venvs")
    (folder / "theirs.yaml").write_text(yaml.safe_dump(config))
    (folder / "serve.yaml").write_text(yaml.safe_dump(OURS))
    for type_, implementation in write_venvs(folder, venv, config):
        if implementation.startswith("ngym_"):
            app = folder / type_ / implementation / "app.py"
            app.parent.mkdir(parents=True)
            (app.parent / "requirements.txt").touch()
            names = {"serve": str(BIN / "ng_serve"), "config": str(folder / "serve.yaml")}
            app.write_text(WRAPPER.format(name=implementation.removeprefix("ngym_"), **names))


def write_venvs(folder: Path, venv: Path, config: Row) -> list[tuple[str, str]]:
    """A venv for each of their servers: links to one. Returns the type and implementation of each."""
    servers = []
    for server in config.values():
        if not isinstance(server, dict) or "host" in server:
            continue
        ((type_, implementations),) = server.items()
        (implementation,) = implementations
        servers.append((type_, implementation))
        place = folder / "venvs" / type_ / implementation
        place.mkdir(parents=True, exist_ok=True)
        if not (place / ".venv").is_symlink():
            (place / ".venv").symlink_to(venv.absolute())
    return servers


def write_rows(folder: Path) -> None:
    counter = [
        {"responses_create_params": {"input": [{"role": "user", "content": task.pop("question")}]}, **task}
        for task in (dict(row) for row in COUNTER)
    ]
    for row in counter:
        row["responses_create_params"]["tools"] = [{**TOOL, "parameters": PARAMETERS}]
    games = [{"responses_create_params": {"input": []}, "game": "blackjack", "seed": seed} for seed in (1, 2)]
    for name, rows in (("counter", counter), ("games", games)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def running(command: list[str], folder: Path, ready: str) -> Iterator[int]:
    """The process id of a program of a project, from the time when `ready` answers with 200 until the block ends."""
    log = folder / f"{Path(command[0]).name}-{time.monotonic_ns()}.log"
    env = {**os.environ, "PATH": f"{Path(command[0]).parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        program = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        until = time.monotonic() + WAIT_S
        while not answers(ready):
            if program.poll() is not None or time.monotonic() > until:
                sys.exit(f"{' '.join(command)} did not start; the end of its log:\n{log.read_text()[-3000:]}")
            time.sleep(1)
        yield program.pid
    finally:
        os.killpg(program.pid, signal.SIGINT)
        try:
            program.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def collect_with_theirs(venv: Path, folder: Path, agent: str, rows: str, head: int) -> list[Row]:
    """The rollouts of their collector."""
    out = f"{agent}_by_theirs.jsonl"
    options = {"agent_name": agent, "input_jsonl_fpath": rows, "output_jsonl_fpath": out, "num_repeats": 2}
    options |= {"head_server.host": "127.0.0.1", "head_server.port": head}
    return run_collector(
        [str(venv / "bin/ng_collect_rollouts"), *(f"+{k}={v}" for k, v in options.items())], folder, out
    )


def by_ours(folder: Path, agent: str, rows: str) -> list[Row]:
    """The rollouts of our collector, with our agents started beside the servers of mixed.yaml."""
    out = f"{agent}_by_ours.jsonl"
    options = ["--config", "mixed.yaml", "--agent", agent, "--input", rows, "--output", out, "--repeats", "2"]
    return run_collector([str(BIN / "ng_collect_rollouts"), *options], folder, out)


def run_collector(command: list[str], folder: Path, out: str) -> list[Row]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S, check=False)
    if done.returncode:
        print(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}", file=sys.stderr)
    return [json.loads(line) for line in (folder / out).read_text().splitlines()] if (folder / out).exists() else []


def write_mixed(folder: Path, policy_url: str, head: str) -> None:
    """Our agents, with the servers that their head lists."""
    with urllib.request.urlopen(f"{head}/global_config_dict_yaml") as reply:
        listed = yaml.safe_load(json.load(reply))

    def url(name: str) -> str:
        (implementations,) = listed[name].values()
        (server,) = implementations.values()
        return f"http://{server['host']}:{server['port']}"

    remote = {name: {"kind": "gym_server", "url": url(name)} for name in ("their_counter", "their_blackjack")}
    models = {"policy": policy_url, "their_model": url("their_model")}
    simple = {"kind": "agent", "app": "agents/simple", "gym": "their_counter"}
    agents = {
        "simple_ours": {**simple, "model": "policy"},
        TOKENS: {**simple, "model": "their_model"},
        "gymnasium_ours": {**simple, "app": "agents/gymnasium", "gym": "their_blackjack", "model": "policy"},
    }
    config = remote | {name: {"kind": "model", "url": at} for name, at in models.items()} | agents
    (folder / "mixed.yaml").write_text(yaml.safe_dump(config | {"ngym": {"head": {"port": 0}}}))


class Chain(NamedTuple):
    """is_reference: their collector runs it, else ours. rewards: the sorted rewards, or those of which each must be one."""

    title: str
    is_reference: bool
    agent: str
    rows: str
    rewards: list[float] | set[float]
    head: str = ""


COUNTED = [0.0, 0.0, 1.0, 1.0]
CARDS, THEIR_CARDS = {0.0, 0.5, 1.0}, {-1.0, 0.0, 1.0}
CHAINS = [
    Chain("simple_agent, our counter, our scripted", True, "simple", "counter.jsonl", COUNTED, "theirs"),
    Chain("gymnasium_agent, our games, our scripted", True, "gymnasium", "games.jsonl", CARDS, "theirs"),
    Chain("our simple, our counter, our scripted", True, "counter_agent", "counter.jsonl", COUNTED, "ours"),
    Chain("our gymnasium, our games, our scripted", True, "games_agent", "games.jsonl", CARDS, "ours"),
    Chain("our simple, their counter, our scripted", False, "simple_ours", "counter.jsonl", COUNTED),
    Chain("our gymnasium, their blackjack, our scripted", False, "gymnasium_ours", "games.jsonl", THEIR_CARDS),
    Chain("our simple, their counter, their vllm_model on our scripted", False, TOKENS, "counter.jsonl", COUNTED),
]


def is_right(chain: Chain, rollouts: list[Row]) -> bool:
    """Whether there are four rollouts with the rewards wanted and, if the model gives tokens, one segment each."""
    rewards = sorted(row["reward"] for row in rollouts)
    right = len(rewards) == 4 and (
        set(rewards) <= chain.rewards if isinstance(chain.rewards, set) else rewards == chain.rewards
    )
    return right and (chain.agent != TOKENS or all(len(row["ng"]["segments"]) == 1 for row in rollouts))


def main(venv: Path) -> int:
    """Run all chains; 0 if each gave the rewards wanted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and its children, ignore it
    heads = {"ours": free_port(), "theirs": free_port()}
    port = free_port()
    policy, their_head = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{heads['theirs']}"
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours = OURS | {"policy": {**OURS["policy"], "port": port}, "ngym": {"head": {"port": heads["ours"]}}}
        (folder / "ours.yaml").write_text(yaml.safe_dump(ours))
        write_project(folder, venv, policy, heads["theirs"])
        write_rows(folder)
        our_run = [str(BIN / "ng_run"), "--config", "ours.yaml"]
        their_run = [str(venv / "bin/ng_run"), "+config_paths=[theirs.yaml]"]
        with running(our_run, folder, f"{policy}/ready"), running(their_run, folder, f"{their_head}/readyz"):
            write_mixed(folder, policy, their_head)
            print("| collector | agent, gym server, model | rewards | |\n|---|---|---|---|")
            for chain in CHAINS:
                rollouts = (
                    collect_with_theirs(venv, folder, chain.agent, chain.rows, heads[chain.head])
                    if chain.is_reference
                    else by_ours(folder, chain.agent, chain.rows)
                )
                right = is_right(chain, rollouts)
                wrong += not right
                rewards = sorted(row["reward"] for row in rollouts)
                who, verdict = "theirs" if chain.is_reference else "ours", "right" if right else "WRONG"
                print(f"| {who} | {chain.title} | {rewards} | {verdict} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    with signals_as_keyboard_interrupt():
        sys.exit(main(Path(sys.argv[1]).absolute()))
