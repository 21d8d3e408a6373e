"""`meshwright probe`: measures the devices of this machine or cluster and the links between them; the planner reads the cluster that it writes.

Started by torchrun, Slurm or `meshwright emulate` each process is one rank of what is measured; else the ranks are started here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from meshwright.base.files import write_whole
from meshwright.cli.options import AsJson, Language, check_place, note, say, say_json
from meshwright.cli.others import stopped_together

if TYPE_CHECKING:
    from meshwright.cost.calibration import Calibrated
    from meshwright.spec.cluster import Cluster, Link
    from meshwright.spec.measurement import Measurement

TARGET = "meshwright.train.probing"
LOST = 45.0
"""Seconds after which a rank that others wait for is lost; none of what is measured takes as long."""

EARLY = "before all was measured"

RANKS_PER_CORE = 8


def probe(
    *,
    cluster: Annotated[
        str, Parameter(help="what is measured: local, local:N for N ranks, or a description whose names and memory stay")
    ] = "local",
    save: Annotated[Path | None, Parameter(help="write the measured cluster to this file, for --cluster")] = None,
    json: AsJson = False,
    lang: Language = None,
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
    from meshwright.words.lines import translated
    from meshwright.words.say import language_of

    language = language_of(lang, os.environ)
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
    found = _here(known, language) if me is None else _with_others(me.rank, me.world, language)
    if found is None:
        return 0
    result = calibrated(found, known)
    if me is None and known.name.startswith("local"):
        kept = keep_local(result.cluster) if found.busy <= QUIET else None
        why = "other programs were busy meanwhile" if found.busy > QUIET else "the cache cannot be written"
        note(f"kept in {kept}: --cluster local is this from now on" if kept else f"not kept: {why}", language)
    if json:
        say_json({"cluster": result.cluster.model_dump(mode="json"), "odd": list(result.odd), "measured": found.model_dump(mode="json")})
    else:
        say(translated("\n".join(lines(result, found)), language))
    if save is not None:
        write_whole(save, result.cluster.to_json() + "\n")
        note(f"the cluster is in {save}; `--cluster {save}` uses it", language)
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


def _here(known: Cluster, language: str) -> Measurement:
    """Ranks of this machine, each a child of this process."""
    from meshwright.base.codec import build
    from meshwright.base.errors import MeshwrightError
    from meshwright.elastic.failure import RankFailed
    from meshwright.elastic.supervisor import Supervisor, Work
    from meshwright.spec.measurement import Measurement

    said: list[Any] = []
    remark = partial(note, language=language)
    remark(f"measuring {known.devices} ranks of this machine" if known.devices > 1 else "measuring 1 rank of this machine")
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as folder:
        work = Work(f"{TARGET}:probe", known.devices, {}, Path(folder), (TARGET,))
        try:
            Supervisor(work, lambda rank, message: said.append(message), remark, early=EARLY).run()
        except RankFailed as error:  # its log goes with the folder
            raise MeshwrightError(
                f"{str(error).splitlines()[0]}; nothing is saved: start the probe again on the devices that are left"
            ) from None
    return build(Measurement, next(message["measurement"] for message in said if message["kind"] == "measured"))


def _with_others(rank: int, world: int, language: str) -> Measurement | None:
    """One of the ranks that a launcher started; only rank 0 has something to say."""
    from meshwright.base.errors import MeshwrightError
    from meshwright.probe.machine import measure
    from meshwright.train.rank import connect

    if rank == 0:
        note(f"measuring {world} ranks and the links between them", language)
    with stopped_together(rank, EARLY):
        connection = connect(rank, world, timeout=LOST)
        try:
            with connection:
                found = measure()
        except (RuntimeError, TimeoutError) as error:
            raise MeshwrightError(
                f"rank {rank} lost another rank while all measured ({str(error).strip().splitlines()[0][:160]}): nothing is saved; see which rank ended, "
                "and start the probe again on the devices that are left"
            ) from error
    return found if rank == 0 else None


def lines(result: Calibrated, found: Measurement) -> Iterator[str]:
    """The screen."""
    from meshwright.base.units import show_bytes, show_count, show_rate, show_seconds

    cluster = result.cluster
    where = f"{cluster.devices} devices on {len(found.hosts)} hosts" if len(found.hosts) > 1 else f"{cluster.devices} devices on 1 host"
    yield f"measured in {show_seconds(found.seconds)}: {where}"
    for group in cluster.groups:
        device = group.device
        rates = ", ".join(f"{name} {show_rate(rate, 'FLOP/s')}" for name, rate in device.peak.items())
        yield f"  {group.nodes} x {group.devices} {device.name}   {rates}; memory {show_bytes(device.memory)} at {show_rate(device.bandwidth)}"
        yield f"      attention {device.attention:.0%} of its products; storage {show_rate(group.storage_bandwidth)}".replace("%", " %")
        yield f"      processors of a node update {show_count(group.host_update)} parameters/s"
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
