"""Generates the script that starts a node of a run with torchrun, for `meshwright launch`. All machines run this
script; only the node index in its arguments differs.

torchrun starts and watches only the process that manages the ranks of the node. Its restarts are off, because it would
end all nodes when one rank fails. A run on one node does not need torchrun. Source:
https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from meshwright.elastic.launch.quoting import comment_line, shell_command
from meshwright.elastic.launch.submission import DEFAULT_PORT, JobSubmission


def node_script(start: JobSubmission, job: str) -> str:
    """Returns the script. `job`: the path of the job file, which is equal on all machines."""
    command, head = shell_command(start.command(job)), ["#!/bin/bash", *start.comments()]
    if not start.is_several:
        return "\n".join([*head, "set -euo pipefail", *start.exports(), f"exec {command}"]) + "\n"
    lines = [
        *head,
        f"# On each of {start.nodes} machines, with one secret for all of them:",
        (
            f"#   MESHWRIGHT_TOKEN=SECRET bash torchrun.sh NUMBER FIRST    NUMBER: 0 to {start.nodes - 1}, FIRST: "
            "host name of machine 0"
        ),
        *(_node_number_comments(start) if len(start.sets) > 1 else ()),
        "set -euo pipefail",
        "NUMBER=${1:?number of this machine} FIRST=${2:?host name of machine 0}",
        ': "${MESHWRIGHT_TOKEN:?the same secret on all machines, such as from: openssl rand -hex 32}"',
        "export MESHWRIGHT_NODE=1 MESHWRIGHT_TOKEN",
        *start.exports(),
        (
            f'exec torchrun --nnodes={start.nodes} --nproc-per-node=1 --node-rank="$NUMBER" --master-addr="$FIRST" '
            f"--master-port={DEFAULT_PORT} \\"
        ),
        f"    --max-restarts=0 --no-python {command}",
    ]
    return "\n".join(lines) + "\n"


def _node_number_comments(start: JobSubmission) -> list[str]:
    """Returns comment lines that state the node indices of each set, for machines with different devices."""
    return [
        comment_line(f"NUMBER {each.first} to {each.first + each.nodes - 1}: machines of {each.words}")
        for each in start.sets
    ]
