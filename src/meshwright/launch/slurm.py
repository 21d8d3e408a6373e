"""A batch script for Slurm: one task on each node, more nodes where there are, requeued when it was preempted.

What is asked for in case of preemption: SIGTERM to every task `grace` seconds before the end, so that the step ends and is saved; exit code
75 says that the same script goes on where this one stopped. A node that fails does not end the others (--kill-on-bad-exit=0, --no-kill).
Source: https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import math

from meshwright.base.errors import InputError
from meshwright.launch.quoting import sbatch_option, shell_command, token
from meshwright.launch.start import Start

MOST = 365 * 24
MARGIN = 30
"""Seconds beyond the grace of the run: Slurm looks at its clock no more often."""


def script(start: Start, job: str, partition: str = "", hours: float = 0.0) -> str:
    """`hours`: the longest time that it may take; 0: what the partition allows."""
    nodes = str(start.nodes) if start.least == start.nodes else f"{start.least}-{start.nodes}"
    if not 0.0 <= hours < MOST:
        raise InputError(f"--hours {hours:g}: must be at least 0 and below {MOST:,.0f}, a year")
    minutes = math.ceil(hours * 60)
    options = [
        f"--job-name={start.label}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        *([f"--gpus-per-node={start.devices}"] if start.accelerator else []),
        *([f"--partition={token('--partition', partition, 'gpu')}"] if partition else []),
        *([f"--time={minutes // 60}:{minutes % 60:02}:00"] if minutes else []),
        f"--signal=TERM@{math.ceil(start.grace) + MARGIN}",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        f"--output={start.label}-%j.out",
    ]
    lines = [
        "#!/bin/bash",
        *start.comments(),
        *(sbatch_option(option) for option in options),
        "set -uo pipefail",
        "export MESHWRIGHT_NODE=1",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "MESHWRIGHT_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')  # who may join: known to this job alone",
        "export MESHWRIGHT_TOKEN",
        *start.exports(),
        f"srun --kill-on-bad-exit=0 --label {shell_command(start.command(job))}",
        "code=$?",
        'if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi  # preempted: it goes on where it stopped',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"
