"""The Helm chart of deploy/helm/ngym, as Helm renders it: tests/data/helm/ngym.yaml, which names the chart's digest.

Helm is not needed here. After a change of the chart write the file again: pip install helm-python-sdk, which is Helm 4's
engine, and python tests/unit/test_helm_chart.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "ngym"
RENDERED = ROOT / "tests" / "data" / "helm" / "ngym.yaml"
LONG = "translation_" * 5 + "1"  # run-LONG-0 has 67 characters
VALUES = {
    "existingSecret": "tokens",
    "config": {
        "calculator": {"replicas": 2, "pool": "cpus"},
        "judge": {"kind": "model", "app": "models/openai", "url": "https://judge.example"},
        LONG: {"kind": "gym_server", "app": "gym_servers/calculator", "replicas": 2},
    },
    "env": {"policy": [{"name": "HF_HOME", "value": "/models"}]},
    "secrets": ["keys"],
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"app": "collector"}}}]},
}


def digest() -> str:
    files = sorted(path for path in CHART.rglob("*") if path.is_file())
    content = b"".join(str(path.relative_to(CHART)).encode() + b"\0" + path.read_bytes() for path in files)
    return hashlib.sha256(content + json.dumps(VALUES).encode()).hexdigest()


def read_rendered(kind: str) -> dict[str, Any]:
    objects = filter(None, yaml.safe_load_all(RENDERED.read_text("utf-8")))
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def container(name: str) -> dict[str, Any]:
    (only,) = read_rendered("Deployment")[name]["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def test_the_rendered_file_is_that_of_this_chart() -> None:
    assert RENDERED.read_text("utf-8").splitlines()[0] == f"# {digest()}", __doc__


def test_each_replica_has_a_deployment_and_the_address_that_the_config_names() -> None:
    config = yaml.safe_load(read_rendered("ConfigMap")["run-config"]["data"]["global_config.yaml"])
    urls = {url: name for name, stanza in config.items() for url in stanza.get("urls", ())}
    names = {str(urlsplit(url).hostname): name for url, name in urls.items()}
    assert names.keys() == read_rendered("Service").keys() == read_rendered("Deployment").keys()
    short = sorted(host for host, name in names.items() if name != LONG)
    assert short == ["run-calculator-0", "run-calculator-1", "run-calculator-agent-0", "run-policy-0"]
    for host, name in names.items():
        service, deployment = read_rendered("Service")[host], read_rendered("Deployment")[host]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items() and deployment["spec"]["replicas"] == 1
        assert container(host)["command"][:2] == ["ng_serve", name]
    assert config["judge"]["url"] == "https://judge.example"  # runs elsewhere


def test_a_name_that_is_too_long_is_cut_before_its_index() -> None:
    names = sorted(host for host in read_rendered("Service") if container(host)["command"][1] == LONG)
    digest = hashlib.sha256(f"run-{LONG.replace('_', '-')}".encode()).hexdigest()[:8]  # of what was cut
    assert names == [f"run-{LONG.replace('_', '-')[:47]}-{digest}-{index}" for index in range(2)]
    assert all(len(name) <= 63 for name in names)


def test_only_models_get_the_admin_token_and_no_token_is_in_a_manifest() -> None:
    for name in read_rendered("Deployment"):
        tokens = [each["name"] for each in container(name)["env"] if "valueFrom" in each]
        assert tokens == ["NGYM_TOKEN"] + ["NGYM_ADMIN_TOKEN"] * ("policy" in name)
        assert all(each["valueFrom"]["secretKeyRef"]["name"] == "tokens" for each in container(name)["env"][:1])
    assert not read_rendered("Secret")


def test_resources_pools_and_the_network_policy_follow_the_values() -> None:
    assert container("run-policy-0")["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    pods = {name: each["spec"]["template"]["spec"] for name, each in read_rendered("Deployment").items()}
    assert (
        pods["run-calculator-1"]["nodeSelector"] == {"ngym/pool": "cpus"} and "nodeSelector" not in pods["run-policy-0"]
    )
    (rule,) = read_rendered("NetworkPolicy")["run"]["spec"]["ingress"]
    assert [one["podSelector"]["matchLabels"] for one in rule["from"]] == [
        {"app.kubernetes.io/instance": "run"},
        {"app": "collector"},
    ]


def test_stanzas_with_the_same_name_in_kubernetes_are_refused() -> None:
    chart = pytest.importorskip("helm_python").chart
    gym = {"kind": "gym_server", "app": "gym_servers/calculator"}
    values = {**VALUES, "config": {"a_b": gym, "a-b": gym}}
    with pytest.raises(Exception, match=r"config\.a_b: its name in Kubernetes, run-a-b-0, is also that of config\.a-b"):
        chart.Chart.load(CHART).render(values, name="run", namespace="default")


if __name__ == "__main__":
    from helm_python import chart

    files = chart.Chart.load(CHART).render(VALUES, name="run", namespace="default")
    texts = [files[name].strip().removeprefix("---\n") for name in sorted(files) if files[name].strip()]
    RENDERED.write_text(f"# {digest()}\n" + "\n---\n".join(texts) + "\n", "utf-8")
