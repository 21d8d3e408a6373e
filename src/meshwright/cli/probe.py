"""`meshwright probe`: measures the devices of this machine or cluster and the links between them; the planner reads the cluster that it writes.

Started by torchrun, Slurm or `meshwright emulate` each process is one rank of what is measured; else the ranks are started here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from meshwright.cli.options import AsJson, check_place, note, say, say_json

if TYPE_CHECKING:
    from meshwright.cost.calibration import Calibrated
    from meshwright.spec.cluster import Cluster, Link
    from meshwright.spec.measurement import Measurement

TARGET = "meshwright.train.probing"
LOST = 45.0
"""Seconds after which a rank that others wait for is lost; none of what is measured takes as long."""


RANKS_PER_CORE = 8


def probe(
    *,
    cluster: Annotated[
        str, Parameter(help="what is measured: local, local:N for N ranks, or a description whose names and memory stay")
    ] = "local",
    save: Annotated[Path | None, Parameter(help="write the measured cluster to this file, for --cluster")] = None,
    json: AsJson = False,
) -> int:
    """Measure devices, memory, storage and every link, through the exchange that training uses; say what is odd.

    What it finds on this machine alone is kept: `--cluster local` means that from then on.

    Try: meshwright probe --save cluster.json
    """
    from meshwright.base.errors import InputError
    from meshwright.cost.calibration import UNDESCRIBED, calibrated
    from meshwright.intake.clusters import keep_local, read_cluster
    from meshwright.spec.measurement import QUIET
    from meshwright.train.rank import launched

    check_place("--save", save)
    me = launched(os.environ)
    known = read_cluster(cluster, measured=False)
    if me is None and sum(group.nodes for group in known.groups) > 1:
        raise InputError(
            f"cluster {cluster!r} has several nodes: start this command on each of them, with torchrun, Slurm or `meshwright emulate`"
        )
    if me is None:
        _check_ranks(known)
    if me is not None and known.name.startswith("local"):  # nobody described what another launcher started
        known = read_cluster(f"local:{me.world}", measured=False).but(name=UNDESCRIBED)
    found = _here(known) if me is None else _with_others(me.rank, me.world)
    if found is None:
        return 0
    result = calibrated(found, known)
    if me is None and known.name.startswith("local"):
        kept = keep_local(result.cluster) if found.busy <= QUIET else None
        why = "other programs were busy meanwhile" if found.busy > QUIET else "the cache cannot be written"
        note(f"kept in {kept}: --cluster local is this from now on" if kept else f"not kept: {why}")
    if save is not None:
        save.write_text(result.cluster.to_json() + "\n", encoding="utf-8")
        note(f"the cluster is in {save}; `--cluster {save}` uses it")
    if json:
        say_json({"cluster": result.cluster.model_dump(mode="json"), "odd": list(result.odd), "measured": found.model_dump(mode="json")})
    else:
        say("\n".join(lines(result, found)))
    return 0


def _check_ranks(known: Cluster) -> None:
    """InputError where more ranks were started here than take turns on the cores while each waits for all others."""
    from meshwright.base.errors import InputError
    from meshwright.intake.local import FEWEST, cores, cuda_cards

    most = max(FEWEST, RANKS_PER_CORE * cores())
    if not cuda_cards() and known.devices > most:
        raise InputError(
            f"probe of {known.devices} ranks: this machine has {cores()} cores, and beyond {RANKS_PER_CORE} ranks a core what is measured is waiting for "
            f"each other; use --cluster local:{most}, or start the ranks on more machines"
        )


def _here(known: Cluster) -> Measurement:
    """Ranks of this machine, each a child of this process."""
    from meshwright.base.codec import build
    from meshwright.base.errors import MeshwrightError
    from meshwright.elastic.failure import RankFailed
    from meshwright.elastic.supervisor import Supervisor, Work
    from meshwright.spec.measurement import Measurement

    said: list[Any] = []
    note(f"measuring {known.devices} rank{'s' if known.devices > 1 else ''} of this machine")
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as folder:
        work = Work(f"{TARGET}:probe", known.devices, {}, Path(folder), (TARGET,))
        try:
            Supervisor(work, lambda rank, message: said.append(message), note).run()
        except RankFailed as error:  # its log goes with the folder
            raise MeshwrightError(
                f"{str(error).splitlines()[0]}; nothing is saved: start the probe again on the devices that are left"
            ) from None
    return build(Measurement, next(message["measurement"] for message in said if message["kind"] == "measured"))


def _with_others(rank: int, world: int) -> Measurement | None:
    """One of the ranks that a launcher started; only rank 0 has something to say."""
    from meshwright.base.errors import Interrupted, MeshwrightError
    from meshwright.probe.machine import measure
    from meshwright.train.rank import connect

    if rank == 0:
        note(f"measuring {world} ranks and the links between them")
    connection = connect(rank, world, timeout=LOST)
    try:
        found = measure()
    except KeyboardInterrupt:
        if rank:  # rank 0 says it
            raise SystemExit(Interrupted.exit_code) from None
        raise
    except (RuntimeError, TimeoutError) as error:
        raise MeshwrightError(
            f"rank {rank} lost another rank while all measured ({str(error).strip().splitlines()[0][:160]}): nothing is saved; see which rank ended, "
            "and start the probe again on the devices that are left"
        ) from error
    finally:
        connection.close()
    return found if rank == 0 else None


def lines(result: Calibrated, found: Measurement) -> Iterator[str]:
    """The screen."""
    from meshwright.base.units import show_bytes, show_rate, show_seconds

    cluster = result.cluster
    yield f"measured in {show_seconds(found.seconds)}: {cluster.devices} devices on {len(found.hosts)} host{'s' if len(found.hosts) > 1 else ''}"
    for group in cluster.groups:
        device = group.device
        rates = ", ".join(f"{name} {show_rate(rate, 'FLOP/s')}" for name, rate in device.peak.items())
        yield f"  {group.nodes} x {group.devices} {device.name}   {rates}; memory {show_bytes(device.memory)} at {show_rate(device.bandwidth)}"
        yield f"      attention {device.attention:.0%} of its products; storage {show_rate(group.storage_bandwidth)}".replace("%", " %")
        yield f"      link inside {_link(group.link)}" + (f", between {group.link.span} devices each" if group.link.span else "")
    if len(cluster.groups) > 1 or cluster.groups[0].nodes > 1:
        yield f"  network   {_link(cluster.network)}"
    sizes = sorted({each.size for each in found.timings})
    if sizes:
        yield "collectives          " + "".join(f"{show_bytes(size):>12}" for size in sizes)
    for key in dict.fromkeys((each.kind, each.ranks, each.stride) for each in found.timings):
        row = {each.size: each.seconds for each in found.timings if (each.kind, each.ranks, each.stride) == key}
        name = f"{key[0]} {key[1]}" + (f" by {key[2]}" if key[2] > 1 else "")
        yield f"  {name:19}" + "".join(f"{show_seconds(row[size]) if size in row else '':>12}" for size in sizes)
    yield from (f"odd: {line}" for line in result.odd)
    if not result.odd:
        yield "nothing is odd"


def _link(link: Link) -> str:
    from meshwright.base.units import show_rate, show_seconds

    meeting = f", {show_seconds(link.meeting)} to meet after computing" if link.meeting else ""
    return f"{show_rate(link.bandwidth)}, {show_seconds(link.latency)}{meeting}"
