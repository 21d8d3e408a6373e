"""`meshwright emulate`: a described cluster on this machine, real ranks behind shaped links; one command runs on all of them."""

from __future__ import annotations

import os
import sys
from shutil import which
from typing import Annotated

from cyclopts import Parameter

from meshwright.cli.options import note


def emulate(
    cluster: Annotated[str, Parameter(name="CLUSTER", help="a file, or NODESxDEVICES:device[@LINK] joined by +, as for --cluster")],
    /,
    *command: Annotated[str, Parameter(name="COMMAND", allow_leading_hyphen=True, help="what every rank runs, behind --")],
) -> int:
    """Run a command on every rank of a described cluster, emulated on this machine: nodes are network namespaces whose links have the described
    rates and delays, devices are shares of the cores; all in slow motion by one factor, which is said. Linux and root only.

    Try: meshwright emulate 2x2:cpu@1Gb -- meshwright probe --save measured.json
    """
    from meshwright.base.errors import InputError
    from meshwright.base.units import parse_quantity, show_rate, show_seconds
    from meshwright.catalog.read import devices
    from meshwright.emulate.run import emulated, run
    from meshwright.emulate.scale import scaled
    from meshwright.intake.clusters import read_cluster
    from meshwright.intake.local import cores

    words = [word for at, word in enumerate(command) if at or word != "--"]
    if not words:
        raise InputError("emulate: no command; write it behind --, such as: meshwright emulate 2x2:cpu@1Gb -- meshwright probe")
    if words[0] == "meshwright" and not which("meshwright"):  # in an environment that was not activated
        words[:1] = [sys.executable, "-m", "meshwright"]
    described = read_cluster(cluster, measured=False)
    found = scaled(described, cores(), parse_quantity(devices()["cpu"]["peak"]["fp32"], "FLOP/s"))
    where = f"{len(found.wires)} nodes of {cores()} cores" if len(found.wires) > 1 else f"1 node of {cores()} cores"
    shares = ", ".join(f"{share:.0%}" for share in dict.fromkeys(round(share, 3) for share in found.shares))
    with emulated(found) as there:
        note(
            f"{there.world} ranks on {where}: {shares.replace('%', ' %')} of a core each, "
            f"{show_rate(min(found.wires))} and {show_seconds(found.delay)} between nodes; slower than described by {found.motion:,.3g}"
        )
        return run(there, words, os.environ)
