"""Generates the batch script that starts a run with Slurm, for `meshwright launch`. The script runs one task per node
and requeues the job after preemption. If fewer nodes are allowed, it requests a range of node counts.

Slurm sends SIGTERM to every task `grace` seconds (plus a margin) before it ends the job. In this time the current step
ends and the state is saved. Then the tasks exit with code 75, and the script requeues the job, so that its next start
resumes the run. A failed node does not end the others (--kill-on-bad-exit=0, --no-kill).

[Note: heterogeneous nodes] Each set of equal nodes is a component of a heterogeneous job. Each component has its own
job step, in which Slurm numbers tasks from 0. The index of a node among all nodes is the first index of its set plus
its task number.

Sources: https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/heterogeneous_jobs.html,
https://github.com/NVIDIA/pyxis
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.elastic.launch.quoting import check_single_line, check_token, sbatch_option, shell_command, shell_word
from meshwright.elastic.launch.submission import NODE_RANK_COMMAND, JobSubmission, NodeSet, check_distinguishable

MAX_HOURS = 365 * 24
GRACE_MARGIN_SECONDS = 30
"""Slurm may send the signal before the end of a job late by about this time, so the signal is requested earlier by
it."""

_IMAGE_PATTERN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9._:/@#+~-]{0,1023}")
"""The pattern of a container image in the notation of enroot: REGISTRY#IMAGE:TAG, or a path."""


@dataclass(frozen=True)
class SlurmRequest:
    """The user's request to Slurm. `hours`: the time limit; 0 means the limit of the partition. `image`: a container
    image, run with pyxis, or ''. `mounts`: the folders that are mounted in the container. Raises InputError for invalid
    values."""

    partition: str = ""
    hours: float = 0.0
    account: str = ""
    qos: str = ""
    image: str = ""
    mounts: str = ""

    def __post_init__(self) -> None:
        for option, text, example in (
            ("--partition", self.partition, "gpu"),
            ("--account", self.account, "physics"),
            ("--qos", self.qos, "long"),
        ):
            check_token(option, text, example)
        if not 0.0 <= self.hours < MAX_HOURS:
            raise InputError(
                Message(
                    "--hours {hours:g} must be at least 0 and below {max_hours:,.0f} (one year)",
                    hours=self.hours,
                    max_hours=MAX_HOURS,
                )
            )
        if self.image and not _IMAGE_PATTERN.fullmatch(self.image):
            raise InputError(
                Message(
                    "--image {image!r} is not a valid container image name; example: nvcr.io#nvidia/pytorch:25.10-py3",
                    image=self.image,
                )
            )
        if self.mounts and not self.image:
            raise InputError(
                Message("--mounts {mounts!r} needs a container: name its image with --image", mounts=self.mounts)
            )
        check_single_line("--mounts", self.mounts)


def batch_script(start: JobSubmission, job: str, queue: SlurmRequest = SlurmRequest()) -> str:
    """Returns the batch script. `job`: the path of the job file. Raises InputError if nodes have different devices but
    no selectors, or if a selector is not a word."""
    check_distinguishable(start.sets)
    several = len(start.sets) > 1
    lines = ["#!/bin/bash", *start.comments()]
    for each in start.sets:
        lines += [sbatch_option("hetjob")] if each.first else []
        lines += map(sbatch_option, _sbatch_options(start, each, queue))
    lines += ["set -uo pipefail"]
    if start.is_several:
        nodes = "${SLURM_JOB_NODELIST_HET_GROUP_0}" if several else "$SLURM_JOB_NODELIST"
        lines += [
            "export MESHWRIGHT_NODE=1",
            f'MASTER_ADDR=$(scontrol show hostnames "{nodes}" | head -n 1)',
            "export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
            (
                "MESHWRIGHT_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')  # who may join: known "
                "to this job alone"
            ),
            "export MESHWRIGHT_TOKEN",
        ]
    lines += [*start.exports(), *_srun_lines(start, job, queue)]
    lines += [
        'if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi  # preempted: it goes on where it stopped',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _sbatch_options(start: JobSubmission, each: NodeSet, queue: SlurmRequest) -> list[str]:
    nodes = str(each.nodes) if start.min_nodes == start.nodes else f"{start.min_nodes}-{each.nodes}"
    minutes, kind = math.ceil(queue.hours * 60), f"{each.select}:" if each.select else ""
    if "=" in kind or "/" in kind:
        raise InputError(
            Message(
                "--select {select!r}: Slurm selects nodes by the name of a device type or feature; example: h100",
                select=each.select,
            )
        )
    return [
        f"--job-name={start.label}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        *(
            [f"--gpus-per-node={kind}{each.devices}"]
            if each.accelerator
            else [f"--constraint={each.select}"]
            if kind
            else []
        ),
        f"--mem={math.ceil(each.memory / 2**20)}M" if each.memory else "--mem=0",
        *([f"--partition={queue.partition}"] if queue.partition else []),
        *([f"--account={queue.account}"] if queue.account else []),
        *([f"--qos={queue.qos}"] if queue.qos else []),
        *([f"--time={minutes // 60}:{minutes % 60:02}:00"] if minutes else []),
        f"--signal=TERM@{math.ceil(start.grace) + GRACE_MARGIN_SECONDS}",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        f"--output={start.label}-%j.out",
    ]


def _srun_lines(start: JobSubmission, job: str, queue: SlurmRequest) -> list[str]:
    """Returns the lines that run the command on every node. They set the shell variable `code` to the exit code of the
    job step with the leading node."""
    container = ""
    if queue.image:  # the working folder is always mounted, since relative paths start there
        mounts = f'"$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"{"," + shell_word(queue.mounts) if queue.mounts else ""}'
        container = (
            f" --container-image={shell_word(queue.image)} --container-mounts={mounts} "
            '--container-workdir="$SLURM_SUBMIT_DIR"'
        )
    step, command = f"srun --kill-on-bad-exit=0 --label{container}", shell_command(start.command(job))
    if len(start.sets) == 1:
        return [f"{step} {command}", "code=$?"]
    lines = [f"export WORLD_SIZE={start.nodes}", "steps=()"]
    for at, each in enumerate(start.sets):
        numbered = NODE_RANK_COMMAND.format(first=each.first, number="SLURM_PROCID")
        lines.append(f"{step} --het-group={at} bash -c {shell_word(numbered)} node {command} & steps+=($!)")
    return [
        *lines,
        'for each in "${steps[@]:1}"; do wait "$each"; done',
        'wait "${steps[0]}"  # the node that leads',
        "code=$?",
    ]
