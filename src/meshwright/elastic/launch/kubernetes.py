"""Generates the Kubernetes objects that start a run, for `meshwright launch`: a JobSet with an indexed job for each set
of equal nodes, and a pod for each node. A ConfigMap has the job file, and a Secret has the token with which nodes
authenticate.

Kubernetes recreates a pod that has ended, with an unchanged index, and the pod rejoins the run. Meanwhile the other
pods continue without it, if the job allows fewer nodes. The end of a pod counts as a failure, unless the pod was
disrupted or its exit code was 75 (the run can continue). After exit code 2 (invalid input) or 3 (no plan fits), the job
fails at once. /dev/shm is a memory volume, since the ranks of a pod communicate through it. Source:
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and
https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import InputError, Interrupted
from meshwright.core.messages import Message
from meshwright.elastic.launch.quoting import check_single_line
from meshwright.elastic.launch.submission import (
    DEFAULT_PORT,
    DEVICE_PLUGIN_RESOURCES,
    JOB_FILE,
    NODE_RANK_COMMAND,
    JobSubmission,
    NodeSet,
    check_distinguishable,
    check_resource_name,
)

REPLICATED_JOB_NAME, RUN_MOUNT_PATH, CONFIG_MOUNT_PATH = "nodes", "/run/meshwright", "/etc/meshwright"
BACKOFF_LIMIT = 100
"""A job fails after this number of failed pods."""

GRACE_MARGIN_SECONDS = 30
MEMORY_REQUEST_FRACTION = 0.8
"""By default a pod requests this fraction of a node's host memory, since the system and its daemons need memory too."""

IMAGE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
CLAIM_NAME_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""The pattern of a DNS subdomain name, which the name of a volume claim must match."""

_TAINT_PATTERN = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9./_-]*)(?:=([A-Za-z0-9._-]*))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?"
)
_LABEL_PATTERN = re.compile(r"([A-Za-z0-9][A-Za-z0-9./_-]*)=([A-Za-z0-9._-]*)")


@dataclass(frozen=True)
class PodTemplate:
    """The settings of a pod. `image`: the container image. `claim`: the name of the volume claim with runs, data and
    models, which all pods mount at `mount`. `resource`: the name of the device resource, if the vendor is unknown.
    `rdma`: NAME=COUNT, a resource of an RDMA device plugin. `tolerate`: taints, each KEY[=VALUE][:EFFECT]. Raises
    InputError for invalid values."""

    image: str
    claim: str
    mount: str = "/data"
    resource: str = ""
    rdma: str = ""
    tolerate: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not IMAGE_PATTERN.fullmatch(self.image):
            raise InputError(
                Message(
                    "--image {image!r} is not a valid container image name; example: registry.example/meshwright:1.0",
                    image=self.image,
                )
            )
        if not CLAIM_NAME_PATTERN.fullmatch(self.claim):
            raise InputError(
                Message(
                    "--claim {claim!r} is not a valid volume claim name; use only lower-case letters, digits, '-' "
                    "and '.'",
                    claim=self.claim,
                )
            )
        if not check_single_line("--mount", self.mount).startswith("/") or ":" in self.mount:
            raise InputError(
                Message(
                    "--mount {mount!r} must be an absolute path that contains no ':'; example: /data", mount=self.mount
                )
            )

    def resources(self, nodes: NodeSet) -> dict[str, str]:
        """Returns the quantities by resource name that a pod of `nodes` requests. They are also its limits. Raises
        InputError if `rdma` is invalid or the device resource is unknown."""
        found: dict[str, str] = {}
        if not nodes.accelerator:
            found["cpu"] = str(nodes.devices)
        else:
            found[self.device_resource(nodes)] = str(nodes.devices)
        if self.rdma:
            name, _, count = self.rdma.partition("=")
            if not re.fullmatch(r"[1-9][0-9]{0,3}", count):
                raise InputError(
                    Message("--rdma {rdma!r} is not of the form NAME=COUNT; example: rdma/hca=1", rdma=self.rdma)
                )
            found[check_resource_name("--rdma", name, "rdma/hca=1")] = count
        memory = nodes.memory or MEMORY_REQUEST_FRACTION * nodes.host_memory
        if memory:
            found["memory"] = f"{math.ceil(memory / 2**20)}Mi"
        return found

    def device_resource(self, nodes: NodeSet) -> str:
        """Returns the Kubernetes resource name of the devices of `nodes`. Raises InputError if it is unknown."""
        if self.resource:
            return check_resource_name("--resource", self.resource, "nvidia.com/gpu")
        if not nodes.vendor:
            raise InputError(
                Message(
                    "device {device!r} is not in the catalogue, so the name of its Kubernetes resource is not known: "
                    "name the resource with --resource, such as --resource nvidia.com/gpu",
                    device=nodes.device,
                )
            )
        return DEVICE_PLUGIN_RESOURCES[nodes.vendor]

    def tolerations(self, nodes: NodeSet) -> list[dict[str, str]]:
        """Returns the tolerations of a pod of `nodes`: those that the user requests and, with accelerators, a
        toleration of the taint with the name of the device resource. Raises InputError if `tolerate` is invalid."""
        found = (
            [{"key": self.device_resource(nodes), "operator": "Exists", "effect": "NoSchedule"}]
            if nodes.accelerator
            else []
        )
        for text in self.tolerate:
            match = _TAINT_PATTERN.fullmatch(text)
            if match is None:
                raise InputError(
                    Message(
                        "--tolerate {text!r} is not of the form KEY[=VALUE][:EFFECT]; example: "
                        "dedicated=training:NoSchedule",
                        text=text,
                    )
                )
            key, value, effect = match.groups()
            how = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
            found.append({"key": key, **how, **({"effect": effect} if effect else {})})
        return found


def build_objects(start: JobSubmission, job: str, pods: PodTemplate) -> list[dict[str, Any]]:
    """Returns the Kubernetes objects of a run. `job`: the text of the job file. Raises InputError if nodes have
    different devices but no selectors, or if a setting of `pods` is invalid."""
    check_distinguishable(start.sets)
    name = start.label
    token = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-token"},
        "type": "Opaque",
        "stringData": {"token": secrets.token_hex(32)},
    }
    return [
        *([token] if start.is_several else []),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-job"}, "data": {JOB_FILE: job}},
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "meshwright"}},
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": 3},
                "replicatedJobs": [
                    {
                        "name": _replicated_job_name(start, each),
                        "replicas": 1,
                        "template": {"spec": _job_spec(start, each, pods)},
                    }
                    for each in start.sets
                ],
            },
        },
    ]


def _replicated_job_name(start: JobSubmission, nodes: NodeSet) -> str:
    return REPLICATED_JOB_NAME if len(start.sets) == 1 else f"{REPLICATED_JOB_NAME}-{nodes.first}"


def _job_spec(start: JobSubmission, nodes: NodeSet, pods: PodTemplate) -> dict[str, Any]:
    return {
        "parallelism": nodes.nodes,
        "completions": nodes.nodes,
        "completionMode": "Indexed",
        "backoffLimit": BACKOFF_LIMIT,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "Ignore",
                    "onExitCodes": {"containerName": "node", "operator": "In", "values": [Interrupted.exit_code]},
                },
                {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2, 3]}},
            ]
        },
        "template": {"spec": _pod_spec(start, nodes, pods)},
    }


def _pod_spec(start: JobSubmission, nodes: NodeSet, pods: PodTemplate) -> dict[str, Any]:
    name, resources = start.label, pods.resources(nodes)
    command = start.command(f"{CONFIG_MOUNT_PATH}/{JOB_FILE}")
    if nodes.first:  # Kubernetes numbers the pods of each set from 0, so RANK must be computed
        command = [
            "/bin/sh",
            "-c",
            NODE_RANK_COMMAND.format(first=nodes.first, number="JOB_COMPLETION_INDEX"),
            "node",
            *command,
        ]
    container: dict[str, Any] = {
        "name": "node",
        "image": pods.image,
        "workingDir": pods.mount,
        "command": list(map(_escape_variables, command)),
        "env": _environment(start, nodes),
        "ports": [{"containerPort": DEFAULT_PORT, "protocol": "TCP"}],
        "volumeMounts": [
            {"name": "job", "mountPath": CONFIG_MOUNT_PATH, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "shared", "mountPath": pods.mount},
        ],
        "resources": {"requests": resources, "limits": resources},
        # RDMA needs pinned memory, which a container may lock only with this capability.
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if pods.rdma else {}),
    }
    tolerations = pods.tolerations(nodes)
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(start.grace) + GRACE_MARGIN_SECONDS,
        **({"nodeSelector": _labels(nodes)} if nodes.select else {}),
        **({"tolerations": tolerations} if tolerations else {}),
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_pod_anti_affinity(name)]}},
        "containers": [container],
        "volumes": [
            {"name": "job", "configMap": {"name": f"{name}-job"}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": pods.claim}},
        ],
    }


def _environment(start: JobSubmission, nodes: NodeSet) -> list[dict[str, Any]]:
    name, first = start.label, _replicated_job_name(start, start.sets[0])
    settings = [{"name": each.name, "value": _escape_variables(each.value)} for each in start.settings if each.value]
    if not start.is_several:
        return settings
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    return [
        {"name": "MESHWRIGHT_NODE", "value": "1"},
        *([] if nodes.first else [{"name": "RANK", "valueFrom": index}]),
        {"name": "WORLD_SIZE", "value": str(start.nodes)},
        {"name": "MASTER_ADDR", "value": f"{name}-{first}-0-0.{name}"},
        {"name": "MASTER_PORT", "value": str(DEFAULT_PORT)},
        {"name": "MESHWRIGHT_TOKEN", "valueFrom": {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}},
        *settings,
    ]


def _escape_variables(text: str) -> str:
    """Returns `text` with doubled dollar signs. Kubernetes turns them into single ones, but expands $(NAME) in commands
    and values."""
    return text.replace("$", "$$")


def _labels(nodes: NodeSet) -> dict[str, str]:
    match = _LABEL_PATTERN.fullmatch(nodes.select)
    if match is None:
        raise InputError(
            Message(
                "--select {select!r}: Kubernetes selects nodes by labels of the form KEY=VALUE; example: "
                "nvidia.com/gpu.product=H100",
                select=nodes.select,
            )
        )
    return {match[1]: match[2]}


def _pod_anti_affinity(name: str) -> dict[str, Any]:
    """Returns the anti-affinity term with which each pod of the run `name` gets a machine without another such pod."""
    return {
        "labelSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}},
        "topologyKey": "kubernetes.io/hostname",
    }
