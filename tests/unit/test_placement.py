"""The GPUs of a machine's services, and the refusal of services that do not fit."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ngym.config.service_config import Config, Resources, load_config
from ngym.errors import ConfigError
from ngym.runtime import cpu_threads
from ngym.supervise.placement import (
    VISIBLE,
    LocalPlacer,
    Machine,
    asked_cores,
    gpu_slices,
    shared_cores,
    shared_memory,
    spare_gpus,
    this_machine,
    visible_gpus,
    with_own_gpus,
)


def config(folder: Path, **services: dict) -> Config:
    (folder / "x.py").touch()
    file = folder / "c.yaml"
    file.write_text(
        yaml.safe_dump(
            {name: {"kind": "model", "app": "x", **keys} for name, keys in services.items()}, sort_keys=False
        )
    )
    return load_config([file])


def test_each_replica_gets_its_own_slice_and_the_first_gpus_are_left_for_a_trainer(tmp_path: Path):
    services = config(
        tmp_path,
        policy={"replicas": 2, "resources": {"gpus": 2}},
        judge={"resources": {"gpus": 1}},
        cpu_only={"resources": {"gpus": 0}},
        free={},
    )
    slices = gpu_slices(services, Machine(tuple("012345"), 8, 16))
    assert slices == {
        ("policy", 0): ("1", "2"),
        ("policy", 1): ("3", "4"),
        ("judge", 0): ("5",),
        ("cpu_only", 0): (),
    }


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"gpus": 3}, "resources.gpus: this machine has 4, the services ask for 6 (policy 6)"),
        ({"cpus": 5}, "resources.cpus: this machine has 8, the services ask for 10 (policy 10)"),
        ({"memory_gb": 9}, "resources.memory_gb: this machine has 16, the services ask for 18 (policy 18)"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, resources: dict, message: str):
    services = config(tmp_path, policy={"replicas": 2, "resources": resources})
    with pytest.raises(ConfigError) as caught:
        gpu_slices(services, Machine(("0", "1", "2", "3"), 8, 16))
    assert message in str(caught.value) and "\n" not in str(caught.value) and "c.yaml:" in str(caught.value)


def test_a_config_without_resources_asks_for_nothing(tmp_path: Path):
    assert gpu_slices(config(tmp_path, policy={"replicas": 500}), Machine((), 1, 1)) == {}


FULL = {"app": "models/vllm", "model": "a/b"}
SHARING = {**FULL, "engine": {"gpu_memory_utilization": 0.4}}


@pytest.mark.parametrize(
    ("services", "ranks", "slices"),
    [
        ({"policy": {**FULL, "replicas": 2}}, 0, {("policy", 0): ("2",), ("policy", 1): ("3",)}),
        ({"policy": FULL, "judge": FULL}, 1, {("policy", 0): ("2",), ("judge", 0): ("3",)}),
        (
            {"policy": {**FULL, "engine": {"tensor_parallel_size": 2}}, "judge": {"resources": {"gpus": 1}}},
            1,
            {("policy", 0): ("1", "2"), ("judge", 0): ("3",)},
        ),
        ({"policy": {**FULL, "replicas": {"min": 1, "max": 8}}}, 0, {("policy", 0): ("3",)}),
        (
            {"policy": {**FULL, "nodes": 2, "engine": {"tensor_parallel_size": 2}}},
            0,
            {("policy", 0): ("2",), ("policy", 1): ("3",)},
        ),
        ({"policy": FULL}, 1, {("policy", 0): ("3",)}),
        ({"policy": FULL, "judge": SHARING}, 1, {("policy", 0): ("3",)}),
        ({"policy": FULL}, 0, {}),  # nothing shares the first one with it
        ({"policy": {**FULL, "replicas": 4}}, 1, {}),  # too few
        ({"policy": {**SHARING, "replicas": 2}}, 0, {}),
        ({"policy": {**FULL, "engine": {"enable_sleep_mode": True}}}, 1, {}),
        ({"policy": {**FULL, "engine": {"weight_transfer_config": {"backend": "ipc"}}}}, 1, {}),
        ({"policy": {**FULL, "app": "x", "replicas": 2}}, 0, {}),
    ],
)
def test_processes_of_vllm_that_would_share_a_gpu_get_one_each(
    tmp_path: Path, services: dict, ranks: int, slices: dict
):
    machine = Machine(tuple("0123"), 8, 16)
    placed = with_own_gpus(config(tmp_path, **services), ranks, machine)
    assert gpu_slices(placed, machine) == slices


@pytest.mark.process
async def test_replicas_that_are_added_get_the_gpus_that_neither_replicas_nor_ranks_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VISIBLE, "0,1,2")
    services = config(tmp_path, policy={**FULL, "replicas": {"min": 1, "max": 8}})
    placer = LocalPlacer(SimpleNamespace(started=0.0, close=lambda: None), ranks=1)
    try:
        [first] = (await placer.places(services))["policy"]
        second = await placer.more(services, services.stanza("policy"))
        assert [place.environment[VISIBLE] for place in (first, second)] == ["2", "1"]
        assert await placer.more(services, services.stanza("policy")) is None
        await placer.release(first)
        assert (await placer.more(services, services.stanza("policy"))).environment[VISIBLE] == "2"
    finally:
        await placer.close()


@pytest.mark.parametrize(
    ("value", "gpus"), [("2,3", ("2", "3")), ("GPU-a1, GPU-b2", ("GPU-a1", "GPU-b2")), ("", ()), ("0,-1,2", ("0",))]
)
def test_a_visible_devices_variable_decides(value: str, gpus: tuple[str, ...]):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == gpus
    assert this_machine({"CUDA_VISIBLE_DEVICES": value}).gpus == gpus


@pytest.mark.process
def test_else_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$*" = "--query-gpu=index --format=csv,noheader" ] && printf "0\\n1\\n"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_gpus({}) == ("0", "1")
    tool.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert visible_gpus({}) == ()


def test_one_more_replica_gets_the_last_free_gpus_if_the_machine_has_room():
    machine, two = Machine(tuple("0123"), 8, 16), Resources(gpus=2, cpus=3)
    assert spare_gpus(two, [(two, ("2", "3"))], machine) == ("0", "1")
    assert spare_gpus(two, [(two, ("1", "3"))], machine) == ("0", "2")
    assert spare_gpus(two, [(Resources(gpus=3), ("1", "2", "3"))], machine) is None
    assert spare_gpus(two, [(Resources(cpus=6), ())], machine) is None
    assert spare_gpus(Resources(cpus=2), [(Resources(cpus=6), ())], machine) == ()


def test_a_range_of_replicas_starts_with_the_least_and_per_node_with_one(tmp_path: Path):
    services = config(
        tmp_path,
        policy={"replicas": {"min": 2, "max": 9}, "resources": {"gpus": 1}},
        judge={"replicas": "per_node", "resources": {"gpus": 1}},
    )
    slices = gpu_slices(services, Machine(tuple("0123"), 8, 16))
    assert slices == {("policy", 0): ("1",), ("policy", 1): ("2",), ("judge", 0): ("3",)}


@pytest.mark.parametrize(
    "replicas", [0, 1025, True, "each", {"min": 2}, {"min": 3, "max": 2}, {"max": 2, "mim": 1}, []]
)
def test_what_is_not_a_number_of_replicas_is_one_line(tmp_path: Path, replicas: object):
    with pytest.raises(
        ConfigError, match=r"^\S+c.yaml:\d+: replicas: .*per_node, or such as {min: 1, max: 8}"
    ) as error:
        config(tmp_path, policy={"replicas": replicas})
    assert "\n" not in str(error.value)


def test_a_range_is_for_models(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is for models; 'env' is of the kind gym_server, give it a number$"):
        config(tmp_path, env={"kind": "gym_server", "replicas": {"min": 1, "max": 2}})


@pytest.mark.parametrize(("limit", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), (None, 8)])
def test_the_limit_of_a_container_is_the_number_of_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, cores: int
):
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    monkeypatch.setattr(cpu_threads, "own_group", lambda: tmp_path)
    monkeypatch.setattr(cpu_threads.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cpu_threads.usable_cores() == this_machine({"CUDA_VISIBLE_DEVICES": ""}).cpus == cores


@pytest.mark.parametrize(
    ("stanza", "cores"),
    [
        ({}, 8),
        ({"replicas": 3}, 2),
        ({"replicas": 20}, 1),
        ({"replicas": {"min": 2, "max": 8}}, 8),
        ({"replicas": "per_node"}, 8),
        ({"replicas": 2, "resources": {"gpus": 1}}, 4),
        ({"replicas": 2, "resources": {"cpus": 3}}, 3),
        ({"resources": {"cpus": 0.5}}, 1),
        ({"resources": {"cpus": 64}}, 8),
    ],
)
def test_replicas_share_the_cores_and_resources_limit_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stanza: dict, cores: int
):
    monkeypatch.setattr(cpu_threads, "own_group", lambda: tmp_path)
    monkeypatch.setattr(cpu_threads.os, "sched_getaffinity", lambda pid: set(range(8)))
    policy = config(tmp_path, policy=stanza).services["policy"]
    for name, value in (asked_cores(policy) or shared_cores(policy)).items():
        monkeypatch.setenv(name, value)
    assert cpu_threads.usable_cores() == cores


@pytest.mark.parametrize(
    ("stanza", "share_gb"),
    [
        ({}, 16),
        ({"replicas": 2}, 16),
        ({"replicas": 4}, 8),
        ({"replicas": {"min": 1, "max": 8}}, 4),
    ],
)
def test_the_kv_caches_of_replicas_together_take_at_most_half_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stanza: dict, share_gb: int
):
    monkeypatch.setattr(cpu_threads, "free_memory", lambda: 64 << 30)
    for name, value in shared_memory(config(tmp_path, policy=stanza).services["policy"]).items():
        monkeypatch.setenv(name, value)
    assert cpu_threads.cache_memory() == share_gb << 30


@pytest.mark.parametrize("value", ["", "many", "nan", "-3", "inf", "1e400"])
def test_a_wrong_number_of_cores_leaves_at_least_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setattr(cpu_threads, "own_group", lambda: tmp_path)
    monkeypatch.setenv(cpu_threads.CPUS, value)
    assert 1 <= cpu_threads.usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("option", "parameters", "processes", "threads"),
    [
        (None, 500_000, 1, 1),
        (None, 38_000_000, 1, 4),
        (None, 8_000_000_000, 1, 8),
        (None, 8_000_000_000, 2, 4),
        (None, None, 1, 8),
        (3, 500_000, 2, 3),
    ],
)
def test_a_larger_model_is_served_by_more_threads(
    monkeypatch: pytest.MonkeyPatch, option: int | None, parameters: int | None, processes: int, threads: int
):
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 8)
    assert cpu_threads.serving_threads(option, parameters, processes) == threads
