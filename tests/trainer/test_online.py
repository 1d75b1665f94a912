"""`ng_train grpo.yaml` against services: it learns, counts failures, and is the same on two ranks."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stub_agents import scored_row
from stub_agents import serving as agents_serving
from stub_policy import Stub, serving
from trainer_service import GROUP, TASKS, arguments, free_port, metrics_of, new_policy, train, write_tasks
from transformers import AutoModelForCausalLM
from waiting import until

from ngym.config.service_config import load_config
from ngym.errors import ConfigError, UsageError
from ngym.peers import Peers
from ngym.trainer.data import samples
from ngym.trainer.engine import engine
from ngym.trainer.model import policy as model
from ngym.trainer.online import live_batches, rollout_stream, services, task_sampler
from ngym.trainer.recipe import recipe, rollout_options
from ngym.trainer.weights import push
from ngym.trainer.weights import weight_sync as publish

STEPS = 8
Values = dict[str, Any]


def of_steps(folder: Path) -> list[Values]:
    return [row for row in metrics_of(folder) if "reward/mean" in row]


@pytest.fixture(scope="module")
def policy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_policy(root, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def finished(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, Stub]]:
    """A run to its end, with a policy server that restarts in its sixth step."""
    folder = tmp_path_factory.mktemp("online")
    evaluated = 2 * 2 * 10
    with serving(Stub(policy, restarts_after=evaluated + 5 * TASKS * GROUP + 10)) as stub:
        process = train(folder, arguments(folder, policy, stub, STEPS))
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        yield folder, output, stub


def test_the_reward_rises_on_tasks_and_held_out(finished: tuple[Path, str, Stub]) -> None:
    folder, output, _ = finished
    steps = of_steps(folder)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    # on 30 rollouts a step the sampled reward is noise; what is likeliest is not
    greedy = {row["step"]: row["eval/agent/greedy"] for row in metrics_of(folder) if "eval/agent/greedy" in row}
    assert list(greedy) == [0, 4, 8] and greedy[8] > greedy[0] + 0.3
    assert (
        output.count(" rollouts failed, the first: agent: ") == 1 and ": the tool broke; all failures of the " in output
    )
    assert "held-out after 8 steps: " in output and "step 8/8  reward 0." in output
    assert "reward/mean: " in output and (folder / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_every_held_out_rollout_is_kept_with_its_step(finished: tuple[Path, str, Stub]) -> None:
    lines = (finished[0] / "run" / "eval_rollouts.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    of_greedy = {row["step"]: row for row in metrics_of(finished[0]) if "eval/agent/greedy" in row}
    for step, row in of_greedy.items():
        rewards = [
            each["reward"]
            for each in rows
            if each["_ng_train"]["oldest"] == step
            and each["evaluation"] == "agent/greedy"
            and each["reward"] is not None
        ]
        assert sum(rewards) / len(rewards) == pytest.approx(row["eval/agent/greedy"])


TOO_LONG = {"finish_reasons": ["context"], "stop_reason": "context", "turns": 1}
UNCALLED = {"finish_reasons": [], "stop_reason": "answer", "turns": 0}


@pytest.mark.parametrize("trace", [TOO_LONG, UNCALLED], ids=["too long", "no model call"])
async def test_a_rollout_without_a_sampled_token_does_not_count_as_of_other_weights(
    tmp_path: Path, trace: dict[str, Any]
) -> None:
    """A prompt that does not fit the context, or an agent that does not call the model: no version of the weights."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"responses_create_params": {"input": "a long one"}}) + "\n")
    options = rollout_options.RolloutOptions(agent="agent", tasks=str(tasks), tasks_per_step=1, group_size=2)
    trace = {**trace, "tool_calls": 0, "tool_errors": 0, "segments": []}
    async with agents_serving(lambda row: scored_row(row, 0.0, ng=trace)) as url:
        peers = Peers({"agent": [url]}, owner="the test")
        source, spool = task_sampler.TaskSource(options, seed=0), tmp_path / "rollouts.jsonl"
        stream = rollout_stream.RolloutStream(peers, source, options, 1.0, 0, 1, spool, lambda group: True)
        await stream.open(None)
        stream.announce_version(1, 0)
        stream.record_version(1, 0)
        batch = await stream.take()
        await stream.close()
        await peers.close()
    assert batch is not None and (len(batch.rows), batch.stale, batch.lags) == (2, 0, [0, 0])
    assert [samples.problem(row, 1.0) for row in batch.rows] == [None, None]
    read = samples.read_rollouts(spool, 1.0)
    is_cut = trace["stop_reason"] == "context"
    assert [(rollout.trained, rollout.reward, rollout.truncated) for rollout in read.rollouts] == [(0, 0.0, is_cut)] * 2
    with pytest.raises(UsageError, match="2 have no sampled tokens" + r" \(2 without a model call: let" * (not is_cut)):
        samples.trainable_rollouts(spool, 1.0, frozenset())
    with nullcontext() if is_cut else pytest.raises(UsageError, match="none of 2 rollouts has a model call; let"):
        samples.check_model_calls(read.rollouts)


async def test_a_run_whose_rollouts_do_not_end_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a service does not answer, and is not known to be down."""
    monkeypatch.setattr(rollout_stream, "SILENCE_S", 0.01)
    tasks = tmp_path / "tasks.jsonl"
    said: list[str] = []
    tasks.write_text(json.dumps({"responses_create_params": {"input": "a slow one"}}) + "\n")
    options = rollout_options.RolloutOptions(agent="agent", tasks=str(tasks), tasks_per_step=1, group_size=2)

    async def answer(row: dict[str, Any]) -> dict[str, Any]:
        await until(lambda: any("; 2 are in flight" in line for line in said))
        return scored_row(row, 0.0, ng={**UNCALLED, "segments": []})

    async with agents_serving(answer) as url:
        peers = Peers({"agent": [url]}, owner="the test")
        source, spool = task_sampler.TaskSource(options, seed=0), tmp_path / "rollouts.jsonl"
        stream = rollout_stream.RolloutStream(peers, source, options, 1.0, 0, 1, spool, lambda group: True, said.append)
        await stream.open(None)
        stream.announce_version(0, 0)
        stream.record_version(0, 0)
        batch = await stream.take()
        await stream.close()
        await peers.close()
    assert batch is not None and len(batch.rows) == 2
    assert all(line.startswith("no rollout has ended for ") for line in said)
    assert any("; 2 are in flight (agent), each for at most 600 s (rollouts.timeout_s)" in line for line in said)


def test_a_step_shows_what_it_saw(finished: tuple[Path, str, Stub]) -> None:
    steps = of_steps(finished[0])
    for row in steps:
        assert row["lag"] == 0 and row["completions/mean_length"] == 6 and row["num_turns"] == 1
        assert row["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
        assert {"loss", "grad_norm", "lr", "tokens_per_s", "approx_entropy", "clip_ratio/region_mean"} <= set(row)
        assert {"time/generation", "time/weight_sync", "time/train", "policy_version"} <= set(row)
    assert any(row["num_unscored"] for row in steps) and any(row["num_failed"] for row in steps)


def test_the_advantages_of_a_step_are_recorded_by_rollout(finished: tuple[Path, str, Stub]) -> None:
    run = finished[0] / "run"
    rows = {row["ng"]["rollout_id"]: row for row in map(json.loads, (run / "rollouts.jsonl").open(encoding="utf-8"))}
    steps = list(map(json.loads, (run / "advantages.jsonl").open(encoding="utf-8")))
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    for entry in steps:
        groups: dict[int, list[tuple[float, float]]] = {}
        for name, advantage in entry["advantages"].items():
            groups.setdefault(rows[name]["_ng_task_index"], []).append((rows[name]["reward"], advantage))
        for group in groups.values():  # the better a rollout, the larger its advantage; their mean is 0
            assert [one for _, one in sorted(group)] == sorted(one for _, one in group)
            assert sum(one for _, one in group) == pytest.approx(0, abs=1e-3)
    assert any(entry["advantages"] for entry in steps)


def test_a_full_disk_loses_advantages_and_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "advantages.jsonl").symlink_to("/dev/full")
    log = live_batches.AdvantageLog(tmp_path / "advantages.jsonl")
    assert "entries are lost: No space left on device; training continues" in (log.append(1, []) or "")
    assert log.append(2, []) is None, "it was said once"
    log.close()


def test_what_a_restarted_server_sampled_is_left_out_and_it_gets_the_weights_again(
    finished: tuple[Path, str, Stub],
) -> None:
    folder, _, stub = finished
    dropped = [row["step"] for row in of_steps(folder) if row["stale_dropped"]]
    assert dropped == [6]
    for row in of_steps(folder):
        total = row["num_valid_samples"] + row["num_unscored"] + row["num_failed"]
        assert total == TASKS * GROUP
        assert row["lag"] == 0
    assert sorted(set(stub.pushes)) == list(range(1, STEPS + 2)) and stub.pushes.count(6) > 1


def test_a_replica_that_came_back_gets_the_weights_again_also_when_another_has_them(
    policy: Path, only_rank: None
) -> None:
    options = recipe.ModelOptions(path=str(policy))
    tokenizer = model.load_tokenizer(options)
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    optimizing = recipe.OptimizerOptions(lr=1e-3)
    learner = engine.Engine(model.load_policy(options, tokenizer, 0), launch, recipe.EngineOptions(), optimizing)
    versions: list[int] = []
    with serving(Stub(policy)) as stays, serving(Stub(policy)) as restarts:
        pusher = push.Pusher([stays.url, restarts.url], "token")
        weight_sync = publish.WeightSync(learner, pusher, publish.probe_ids(tokenizer), learner.weights)
        for restarted in (False, False, True, False):
            if restarted:
                restarts._forget()
            weight_sync.publish(versions.append)
            assert stays._version == restarts._version == weight_sync.version
        pusher.finish()
    assert versions == [1, 2] and stays.pushes == restarts.pushes == versions


def test_a_push_follows_replicas_that_join_and_leave(policy: Path, only_rank: None) -> None:
    options = recipe.ModelOptions(path=str(policy))
    tokenizer = model.load_tokenizer(options)
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    optimizing = recipe.OptimizerOptions(lr=1e-3)
    learner = engine.Engine(model.load_policy(options, tokenizer, 0), launch, recipe.EngineOptions(), optimizing)
    with serving(Stub(policy)) as stays, serving(Stub(policy)) as joins:
        there = [stays.url, "http://127.0.0.1:9"]  # of a node that is lost while the pusher waits for it
        looks = iter([there, there])
        pusher = push.Pusher(lambda: next(looks, [stays.url, joins.url]), "token", patience_s=60)
        weight_sync = publish.WeightSync(learner, pusher, publish.probe_ids(tokenizer), learner.weights)
        weight_sync.publish(lambda version: None)
        pusher.finish()
        assert stays._version == joins._version == weight_sync.version


def test_a_replica_that_joins_gets_the_weights_and_a_proof_before_any_call(
    policy: Path, only_rank: None, tmp_path: Path
) -> None:
    options = recipe.ModelOptions(path=str(policy))
    tokenizer = model.load_tokenizer(options)
    launch = recipe.Launch(rank=0, local_rank=0, ranks=1)
    optimizing = recipe.OptimizerOptions(lr=1e-3)
    learner = engine.Engine(model.load_policy(options, tokenizer, 0), launch, recipe.EngineOptions(), optimizing)
    messages: list[str] = []
    with ExitStack() as stack:
        stays, joins, later, wrong = [stack.enter_context(serving(Stub(policy))) for _ in range(4)]
        arguments(tmp_path, policy, stays, 1)
        later._version = 7  # of another run
        wrong._logprobs = lambda ids: [0.0] * (len(ids) - 1)  # type: ignore[method-assign]
        connect = partial(services.start_services, tmp_path / "services.yaml", ["agent"], "policy", [], messages.append)
        with services.Services(connect) as there:
            membership = services.HeadMembership(there, "policy", messages.append)
            called = partial(there.addresses, "policy")
            pusher = push.Pusher(called, there.ready.token)
            weight_sync = publish.WeightSync(
                learner, pusher, publish.probe_ids(tokenizer), learner.weights, membership=membership
            )
            versions: list[int] = []
            weight_sync.publish(versions.append)
            for waiting in (joins, later, wrong):
                there.call(join(there.ready, waiting.url))
                there.call(wait_for_notice(membership))
                assert membership.waiting() == [waiting.url] and waiting.url not in called()
                weight_sync.publish(versions.append)
                weight_sync.publish(versions.append)  # nothing is left to do
            assert called() == [stays.url, joins.url]
            assert stays.pushes == joins.pushes == versions == [1] and later.pushes == []
            learner.steps += 1
            weight_sync.publish(versions.append)
            assert called() == [stays.url, joins.url, later.url]
            assert stays.pushes == joins.pushes == wrong.pushes == versions == [1, 8] and later.pushes == [8]
            pusher.finish()
    assert (
        f"policy {joins.url} joined with version 1" in messages
        and f"policy {later.url} joined with version 8" in messages
    )
    refusals = [line for line in messages if "gets no calls" in line]
    assert [line.split()[1] for line in refusals] == [later.url, wrong.url, wrong.url]
    assert "it serves version 7 of other weights" in refusals[0] and "not the weights that were trained" in refusals[1]


async def join(reached: services.ReadyServices, url: str) -> None:
    body = json.dumps({"name": "policy", "url": url}).encode()
    opener = {"authorization": f"Bearer {reached.token}"}
    reply = await reached.peers.send("POST", f"{reached.peers.head_url}/servers", body, opener, 30)
    assert reply.status == 202


async def wait_for_notice(membership: services.HeadMembership) -> None:
    joined = asyncio.Event()
    watch = asyncio.create_task(membership.watch(joined.set))
    await joined.wait()
    watch.cancel()


def test_the_saved_policy_is_the_one_that_is_served(finished: tuple[Path, str, Stub]) -> None:
    folder, _, stub = finished
    saved = AutoModelForCausalLM.from_pretrained(folder / "run" / "policy").state_dict()
    served = stub._network.state_dict()
    assert all((saved[name] - served[name]).abs().max() == 0 for name in saved)


def test_two_ranks_learn_what_one_learns(policy: Path, tmp_path: Path, finished: tuple[Path, str, Stub]) -> None:
    port = free_port()
    with serving(Stub(policy)) as stub:
        words = [*arguments(tmp_path, policy, stub, 2), "engine.zero_stage=2", "evaluation=null"]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        ranks = [train(tmp_path, words, **meeting, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
        outputs = [process.communicate(timeout=600)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], outputs
    for two, one in zip(of_steps(tmp_path), of_steps(finished[0]), strict=False):
        for name in ("loss", "grad_norm", "reward/mean", "global_valid_toks"):
            assert two[name] == pytest.approx(one[name], rel=1e-3), name


def test_several_environments_in_their_shares_with_a_curriculum(policy: Path, tmp_path: Path) -> None:
    few = write_tasks(tmp_path / "few.jsonl", 5)
    with serving(Stub(policy)) as stub:
        words = arguments(tmp_path, policy, stub, 2)
        stanza = {"kind": "agent", "url": stub.url, "model": "policy"}
        stanzas = json.loads((tmp_path / "services.yaml").read_text("utf-8"))
        (tmp_path / "services.yaml").write_text(json.dumps({**stanzas, "other": stanza}), "utf-8")
        words += [
            "rollouts.agent=null",
            "rollouts.tasks=null",
            "rollouts.environments=[{agent: agent, tasks: tasks.jsonl, weight: 3}, {agent: other, tasks: few.jsonl}]",
            "rollouts.curriculum={}",
            "evaluation.tasks=null",
            f"evaluation.environments=[{{agent: agent, tasks: tasks.jsonl}}, {{agent: other, name: held_out, tasks: {few}}}]",
            "evaluation.attempts=2",
        ]
        process = train(tmp_path, words)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    for number, row in enumerate(of_steps(tmp_path), 1):
        assert row["reward/mean"] == pytest.approx(
            (3 * row["reward/agent/mean"] + row["reward/other/mean"]) / 4, abs=0.1
        )
        assert row["tasks/agent/unseen"] == pytest.approx(1 - number * 6 / 20, abs=0.16)
        assert row["tasks/other/unseen"] <= 1 - 2 / 5 and row["tasks/other/effective"] <= 5
    first, last = (row for row in metrics_of(tmp_path) if "val/accuracy" in row)
    assert (first["step"], last["step"]) == (0, 2)
    for row in (first, last):
        assert row["val/accuracy"] == pytest.approx((row["eval/agent/avg@2"] + row["eval/held_out/avg@2"]) / 2)
        count = [row[f"eval/held_out/avg@2/{what}"] for what in ("count", "failed", "unscored")]
        assert sum(count) == 10 and count[0] > 0 and "eval/held_out/pass@2" in row
    assert "starting policy, agent, other" in output and "held-out after 2 steps: held_out avg@2 " in output


def test_a_run_whose_groups_have_no_learning_signal_says_so_at_once_and_at_the_end(
    policy: Path, tmp_path: Path
) -> None:
    with serving(Stub(policy, equal_share=8)) as stub:  # of eight: every reward is 0.5
        words = [*arguments(tmp_path, policy, stub, 3), "evaluation=null"]
        output, _ = (process := train(tmp_path, words)).communicate(timeout=600)
        assert process.returncode == 1, output
    assert output.count("nothing was trained: in every group all rewards are equal (their mean is 0.500)") == 1
    assert output.index("step 1: nothing was trained") < output.index("step 2/3")
    assert "warning: 3 of 3 steps trained nothing" in output
    assert "no step changed the weights: the saved policy is the one that the run began with" in output
    assert (tmp_path / "run" / "policy" / "model.safetensors").exists() and "Traceback" not in output


class NoModelCall(Stub):
    """Its agent answers without the model."""

    def _rollout(self, row: dict[str, Any], task: int, index: int) -> dict[str, Any]:
        trace = {"segments": [], "turns": 0, "tool_calls": 0, "tool_errors": 0, "stop_reason": "answer"}
        return {**super()._rollout(row, task, index), "reward": 1.0, "ng": trace}


def test_an_agent_that_does_not_call_the_model_ends_the_run_at_its_first_step(policy: Path, tmp_path: Path) -> None:
    with serving(NoModelCall(policy)) as stub:
        output, _ = (
            process := train(tmp_path, [*arguments(tmp_path, policy, stub, 3), "evaluation=null"])
        ).communicate(timeout=600)
    assert process.returncode == 2 and "Traceback" not in output, output
    assert (
        "rollouts has a model call; let the agent call its model by ngym's URL" in output and "step 1/3" not in output
    )


def test_one_attempt_at_a_task_has_a_learning_signal_where_no_group_is_compared(policy: Path, tmp_path: Path) -> None:
    """REINFORCE++ and the like."""
    with serving(Stub(policy)) as stub:
        words = arguments(tmp_path, policy, stub, 3)
        words += ["rollouts.group_size=1", "rollouts.tasks_per_step=20", "evaluation.every=3"]
        words += ["algorithm.advantage={estimator: reward, whiten: true}", "algorithm.shaping.skip_equal_groups=false"]
        process = train(tmp_path, words)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    for row in of_steps(tmp_path):
        assert row["loss"] != 0 and row["grad_norm"] > 0 and all(map(math.isfinite, row.values()))
    greedy = {row["step"]: row["eval/agent/greedy"] for row in metrics_of(tmp_path) if "eval/agent/greedy" in row}
    assert greedy[3] > greedy[0]


def test_the_algorithm_of_the_documentation_trains_on_live_rollouts_without_advantages(
    root: Path, policy: Path, tmp_path: Path
) -> None:
    page = (root / "docs" / "algorithms.md").read_text("utf-8")
    (tmp_path / "rejection_sampling.py").write_text(page.partition("```python\n")[2].partition("```")[0], "utf-8")
    with serving(Stub(policy)) as stub:
        words = [*arguments(tmp_path, policy, stub, 2), "algorithm.name=rejection_sampling.py:RejectionSampling"]
        process = train(tmp_path, [*words, "algorithm.threshold=0.5"])
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert [row["loss"] > 0 for row in of_steps(tmp_path)] == [True, True]
    assert (tmp_path / "run" / "advantages.jsonl").read_text("utf-8").count('"advantages":{}') == 2


def test_a_model_server_that_takes_no_weights_ends_the_run_with_a_line(policy: Path, tmp_path: Path) -> None:
    """The services are real processes, started and stopped by the command."""
    write_tasks(tmp_path / "tasks.jsonl", 3)
    (tmp_path / "services.yaml").write_text(
        "policy: {kind: model, app: models/scripted, tokens: true}\n"
        "calculator: {kind: gym_server, app: gym_servers/calculator}\n"
        "calculator_agent: {kind: agent, app: agents/simple, gym: calculator, model: policy}\n"
        "weather: {kind: gym_server, app: gym_servers/weather}\n",
        "utf-8",
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    words = [f"model.path={policy}", "rollouts.tasks=tasks.jsonl", "rollouts.services=services.yaml", "output=run"]
    process = train(tmp_path, ["grpo.yaml", "evaluation=null", *words, "--overwrite"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode != 0 and "Traceback" not in output, output
    assert "starting policy, calculator, calculator_agent" in output
    assert "no transport 'http' there; it offers no push at all" in output
    kept = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert kept == [".held", "metrics.jsonl"] and len(metrics_of(tmp_path)) == 1, "the earlier run was replaced"


def test_only_what_the_agent_needs_is_started(root: Path) -> None:
    config = load_config([root / "global_config.yaml"])
    assert set(services.config_for_agents(config, ["math_agent"], "policy").services) == {
        "math_agent",
        "math",
        "policy",
    }
    with pytest.raises(ConfigError, match="'math' is a gym_server, not an agent"):
        services.config_for_agents(config, ["math"], "policy")
    with pytest.raises(ConfigError, match=r"does not lead to the model 'weather'; set rollouts\.policy"):
        services.config_for_agents(config, ["math_agent"], "weather")
