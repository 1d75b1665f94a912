"""Renders Kubernetes manifests: a Secret, a NetworkPolicy, and KubeRay's RayJob, or RayCluster without a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngym.cluster.target import Target, secret_values, shell_text
from ngym.errors import UsageError
from ngym.net.auth import ADMIN_TOKEN, RUN_TOKEN, new_token

Json = dict[str, Any]
RAY_VERSION = "2.60.0"
LABEL = "app.kubernetes.io/instance"
HEAD = {"cpu": "4", "memory": "8Gi"}  # the command itself; services and ranks run on the workers
SECRET_PLACEHOLDER = "(made when it is submitted)"


def render(target: Target, command: Sequence[str], values: Mapping[str, str] | None = None) -> list[Json]:
    """The manifests. values: of the Secret; None: placeholders. Raises UsageError: there is no image."""
    if target.image is None:
        raise UsageError("the settings have no image: Kubernetes needs one with ngym and the project (docker/)")
    names = (RUN_TOKEN, ADMIN_TOKEN, *target.secrets)
    secrets = values or dict.fromkeys(names, SECRET_PLACEHOLDER)
    secret = {**_resource("v1", "Secret", target), "type": "Opaque", "stringData": dict(secrets)}
    cluster = _cluster(target)
    if not command:
        return [secret, _policy(target), {**_resource("ray.io/v1", "RayCluster", target), "spec": cluster}]
    job = {
        "entrypoint": shell_text(command),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "backoffLimit": 0,  # a lost rank is restarted by the command itself, from its last checkpoint
        "rayClusterSpec": cluster,
    }
    return [secret, _policy(target), {**_resource("ray.io/v1", "RayJob", target), "spec": job}]


def secrets(target: Target) -> dict[str, str]:
    """The values of the Secret: tokens of this run, and the variables that the settings name."""
    return {RUN_TOKEN: new_token(), ADMIN_TOKEN: new_token()} | secret_values(target)


def _resource(version: str, kind: str, target: Target) -> Json:
    labels = {LABEL: target.name}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": target.name, "namespace": target.namespace, "labels": labels},
    }


def _cluster(target: Target) -> Json:
    """A head without room for services, and the nodes of the settings. KubeRay adds Ray's probes to each container."""
    workers = {"cpu": str(target.cpus), "memory": f"{target.memory_gb}Gi"}
    if target.gpus:
        workers["nvidia.com/gpu"] = str(target.gpus)
    started = {"resources": f'"{{\\"{target.pool}\\": 1}}"'} if target.pool else {}
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _pod(target, "ray-head", HEAD)},
        "workerGroupSpecs": [
            {
                "groupName": target.pool or "workers",
                "replicas": target.nodes,
                "minReplicas": target.nodes,
                "maxReplicas": target.nodes,
                "rayStartParams": started,
                "template": _pod(target, "ray-worker", workers),
            }
        ],
    }


def _pod(target: Target, container: str, resources: Mapping[str, str]) -> Json:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Json] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if target.claim:
        mounts.append({"name": "runs", "mountPath": f"{target.workdir}/runs"})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": target.claim}})
    return {
        "metadata": {"labels": {LABEL: target.name}},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": container,
                    "image": target.image,
                    "workingDir": target.workdir,
                    "envFrom": [{"secretRef": {"name": target.name}}],
                    "resources": {"requests": dict(resources), "limits": dict(resources)},
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }


def _policy(target: Target) -> Json:
    """Only pods of this run reach its pods."""
    own = {"matchLabels": {LABEL: target.name}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    submitter = {"podSelector": {"matchLabels": {"job-name": target.name}}}
    ingress = [{"from": [{"podSelector": own}, submitter, operator]}]
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": ingress}
    return {**_resource("networking.k8s.io/v1", "NetworkPolicy", target), "spec": spec}
