"""Objects for Kubernetes: a JobSet of one indexed job, a pod for each node, with the job file and the token that admits nodes.

A pod that ends is made again with the same number and joins again; until then the others go on without it, if the run may. Only pods that
were disrupted or can go on (exit code 75) are made again without being counted. /dev/shm is memory: ranks of a pod exchange through it.
Source: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from __future__ import annotations

import math
import re
import secrets
from typing import Any

from meshwright.base.errors import InputError, Interrupted
from meshwright.launch.quoting import line
from meshwright.launch.start import JOB, PORT, Start

NODES, MOUNT, CONFIG = "nodes", "/run/meshwright", "/etc/meshwright"
RETRIES = 100
"""Pods that may fail before the job has."""

MARGIN = 30

IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A DNS subdomain name, which the name of a volume claim has to be."""


def objects(start: Start, job: str, image: str, claim: str, mount: str) -> list[dict[str, Any]]:
    """`job`: the job file as text. `claim`: the volume that all nodes share, for runs, data and models; it lies at `mount`."""
    if not IMAGE.fullmatch(image):
        raise InputError(f"--image {image!r}: is not the name of a container image; write it like registry.example/meshwright:1.0")
    if not CLAIM.fullmatch(claim):
        raise InputError(f"--claim {claim!r}: is not the name of a volume claim; it has small letters, digits, '-' and '.' alone")
    if not line("--mount", mount).startswith("/") or ":" in mount:
        raise InputError(f"--mount {mount!r}: is not an absolute path without ':'; write it like /data")
    name = start.label
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{name}-token"},
            "type": "Opaque",
            "stringData": {"token": secrets.token_hex(32)},
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-job"}, "data": {JOB: job}},
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "meshwright"}},
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": 3},
                "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": _job(start, image, claim, mount)}}],
            },
        },
    ]


def _job(start: Start, image: str, claim: str, mount: str) -> dict[str, Any]:
    return {
        "parallelism": start.nodes,
        "completions": start.nodes,
        "completionMode": "Indexed",
        "backoffLimit": RETRIES,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {"containerName": "node", "operator": "In", "values": [Interrupted.exit_code]}},
                {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2, 3]}},
            ]
        },
        "template": {"spec": _pod(start, image, claim, mount)},
    }


def _pod(start: Start, image: str, claim: str, mount: str) -> dict[str, Any]:
    name = start.label
    number = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    first = f"{name}-{NODES}-0-0.{name}"
    environment: list[dict[str, Any]] = [
        {"name": "MESHWRIGHT_NODE", "value": "1"},
        {"name": "RANK", "valueFrom": number},
        {"name": "WORLD_SIZE", "value": str(start.nodes)},
        {"name": "MASTER_ADDR", "value": first},
        {"name": "MASTER_PORT", "value": str(PORT)},
        {"name": "MESHWRIGHT_TOKEN", "valueFrom": {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}},
        *({"name": each.name, "value": each.value} for each in start.settings if each.value),
    ]
    container: dict[str, Any] = {
        "name": "node",
        "image": image,
        "workingDir": mount,
        "command": start.command(f"{CONFIG}/{JOB}"),
        "env": environment,
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "volumeMounts": [
            {"name": "job", "mountPath": CONFIG, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "shared", "mountPath": mount},
        ],
    }
    if start.accelerator:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(start.devices)}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(start.grace) + MARGIN,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_apart(name)]}},
        "containers": [container],
        "volumes": [
            {"name": "job", "configMap": {"name": f"{name}-job"}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
        ],
    }


def _apart(name: str) -> dict[str, Any]:
    """Two pods of one run never share a machine."""
    return {"labelSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}, "topologyKey": "kubernetes.io/hostname"}
