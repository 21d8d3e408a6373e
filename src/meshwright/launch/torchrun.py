"""A script that starts one node with torchrun: the same line on every machine, with the number of the node.

torchrun starts and watches the node's supervisor and nothing else; its own restarts are off, since they would end every node for the fault of
one rank. Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from meshwright.launch.quoting import shell_command
from meshwright.launch.start import PORT, Start


def script(start: Start, job: str) -> str:
    lines = [
        "#!/bin/bash",
        *start.comments(),
        f"# On each of {start.nodes} machines, with one secret for all of them:",
        f"#   MESHWRIGHT_TOKEN=SECRET bash torchrun.sh NUMBER FIRST    NUMBER: 0 to {start.nodes - 1}, FIRST: host name of machine 0",
        "set -euo pipefail",
        "NUMBER=${1:?number of this machine} FIRST=${2:?host name of machine 0}",
        ': "${MESHWRIGHT_TOKEN:?the same secret on all machines, such as from: openssl rand -hex 32}"',
        "export MESHWRIGHT_NODE=1 MESHWRIGHT_TOKEN",
        *start.exports(),
        f'exec torchrun --nnodes={start.nodes} --nproc-per-node=1 --node-rank="$NUMBER" --master-addr="$FIRST" --master-port={PORT} \\',
        f"    --max-restarts=0 --no-python {shell_command(start.command(job))}",
    ]
    return "\n".join(lines) + "\n"
