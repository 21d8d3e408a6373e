"""Runs one command on every rank of a described cluster, emulated on this machine. Linux and root only.

Nodes are network namespaces whose links have the described rates and delays. Devices are CPU quotas. All runs slower
than described by one
factor, which the first line names.

    python -m bench.emulation 2x2:cpu@1Gb -- meshwright probe --save measured.json
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from shutil import which

from bench.emulation.emulated_cluster import emulate_cluster, run_on_ranks, scale_to_machine
from meshwright.catalog.read import devices
from meshwright.core.errors import InputError, MeshwrightError, translate_system_error
from meshwright.core.quantities import parse_quantity
from meshwright.core.signals import raise_keyboard_interrupt, stop_signal_handler
from meshwright.core.units import show_rate, show_seconds
from meshwright.planner.inputs.cluster_parser import available_cpus, read_cluster

USAGE = (
    "usage: python -m bench.emulation CLUSTER -- COMMAND, such as: python -m bench.emulation 2x2:cpu@1Gb -- "
    "meshwright probe"
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status, or that of an error, which is one line on standard error."""
    try:
        with stop_signal_handler(raise_keyboard_interrupt):
            return emulate(arguments)
    except (KeyboardInterrupt, MeshwrightError) as error:
        reported = translate_system_error(error, list(arguments))
        print(f"bench.emulation: {reported}", file=sys.stderr)
        return reported.exit_code if isinstance(reported, MeshwrightError) else 1


def emulate(arguments: Sequence[str]) -> int:
    """Raises: InputError for a missing command, an unknown cluster, or a machine that cannot emulate it."""
    if len(arguments) < 3 or arguments[1] != "--":
        raise InputError(USAGE)
    cluster, command = arguments[0], list(arguments[2:])
    if command[0] == "meshwright" and not which("meshwright"):  # in an environment that was not activated
        command[:1] = [sys.executable, "-m", "meshwright"]
    described = read_cluster(cluster, measured=False)
    scaled = scale_to_machine(described, available_cpus(), parse_quantity(devices()["cpu"]["peak"]["fp32"], "FLOP/s"))
    nodes = (
        f"{len(scaled.wires)} nodes of {available_cpus()} cores"
        if len(scaled.wires) > 1
        else f"1 node of {available_cpus()} cores"
    )
    quotas = ", ".join(
        f"{quota:.0%}".replace("%", " %") for quota in dict.fromkeys(round(share, 3) for share in scaled.shares)
    )
    with emulate_cluster(scaled) as running:
        print(
            f"{running.world} ranks on {nodes}: {quotas} of a core each, {show_rate(min(scaled.wires))} and "
            f"{show_seconds(scaled.delay)} between nodes; slower than described by {scaled.motion:,.3g}",
            file=sys.stderr,
        )
        return run_on_ranks(running, command, os.environ)
