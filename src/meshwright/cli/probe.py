"""`meshwright probe`: measure this machine or cluster: devices, links; for --cluster.

Under torchrun, Slurm or the cluster emulation each process is one measured rank. Otherwise this process starts the
ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from meshwright.cli.node_role import stop_together
from meshwright.cli.options import AsJson, Language, check_output_path, print_json, print_note, print_output
from meshwright.core.files import write_atomically

if TYPE_CHECKING:
    from meshwright.planner.cost.calibration import CalibratedCluster
    from meshwright.spec.cluster import Cluster, Link
    from meshwright.spec.measurement import ClusterProfile

PROBE_MODULE = "meshwright.train.probe_main"
RANK_TIMEOUT_SECONDS = 45.0
"""Seconds after which a rank that others wait for counts as lost. No measurement takes as long."""

INTERRUPTED_TEXT = "before all was measured"

MAX_RANKS_PER_CORE = 8


def probe(
    *,
    cluster: Annotated[
        str,
        Parameter(help="what is measured: local, local:N for N ranks, or a description whose names and memory stay"),
    ] = "local",
    save: Annotated[Path | None, Parameter(help="write the measured cluster to this file, for --cluster")] = None,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Measure devices, memory, storage and every link, through the exchange that training uses; say what is odd.

    What it finds on this machine alone is kept: `--cluster local` means that from then on.

    Try: meshwright probe --save cluster.json
    """
    from meshwright.core.errors import InputError
    from meshwright.core.i18n.line_patterns import translate_line
    from meshwright.core.i18n.messages import choose_language
    from meshwright.planner.cost.calibration import UNDESCRIBED_CLUSTER, calibrate
    from meshwright.planner.inputs.clusters import read_cluster, save_local_cluster
    from meshwright.spec.measurement import MAX_BUSY_PROCESSORS
    from meshwright.train.rank_main import read_external_launch

    language = choose_language(lang, os.environ)
    check_output_path("--save", save)
    me = read_external_launch(os.environ)
    known = read_cluster(cluster, measured=False)
    if me is None and sum(group.nodes for group in known.groups) > 1:
        raise InputError(
            f"cluster {cluster!r} has several nodes: start this command on each of them, with torchrun, "
            "Slurm or `python -m bench.emulation`")  # fmt: skip
    if me is None:
        _check_ranks(known)
    if me is not None and known.name.startswith("local"):  # ranks of another launcher without a cluster description
        known = read_cluster(f"local:{me.world}", measured=False).but(name=UNDESCRIBED_CLUSTER)
    found = _probe_this_machine(known, language) if me is None else _probe_as_rank(me.rank, me.world, language)
    if found is None:
        return 0
    result = calibrate(found, known)
    if me is None and known.name.startswith("local"):
        saved = save_local_cluster(result.cluster) if found.busy <= MAX_BUSY_PROCESSORS else None
        why = (
            "other programs were busy meanwhile" if found.busy > MAX_BUSY_PROCESSORS else "the cache cannot be written"
        )
        print_note(f"kept in {saved}: --cluster local is this from now on" if saved else f"not kept: {why}", language)
    if json:
        print_json(
            {
                "cluster": result.cluster.model_dump(mode="json"),
                "odd": list(result.odd),
                "measured": found.model_dump(mode="json"),
            }
        )
    else:
        print_output(translate_line("\n".join(measurement_text(result, found)), language))
    if save is not None:
        write_atomically(save, result.cluster.to_json() + "\n")
        print_note(f"the cluster is in {save}; `--cluster {save}` uses it", language)
    return 0


def _check_ranks(known: Cluster) -> None:
    """Raises InputError if there are more ranks than CPU cores can run while each rank waits for all others."""
    from meshwright.core.errors import InputError
    from meshwright.planner.inputs.local_machine import MIN_CPU_RANKS, available_cpus, cuda_device_names

    most = max(MIN_CPU_RANKS, MAX_RANKS_PER_CORE * available_cpus())
    if not cuda_device_names() and known.devices > most:
        raise InputError(
            f"probe of {known.devices} ranks: this machine has {available_cpus()} cores, and beyond "
            f"{MAX_RANKS_PER_CORE} ranks a core what is measured is waiting for "
            f"each other; use --cluster local:{most}, or start the ranks on more machines"
        )


def _probe_this_machine(known: Cluster, language: str) -> ClusterProfile:
    """Measures ranks on this machine, each a child of this process."""
    from meshwright.core.codec import validate_data
    from meshwright.core.errors import MeshwrightError
    from meshwright.elastic.attempt import RankJob
    from meshwright.elastic.failure import RankFailed
    from meshwright.elastic.supervisor import Supervisor
    from meshwright.spec.measurement import ClusterProfile

    said: list[Any] = []
    remark = partial(print_note, language=language)
    remark(
        f"measuring {known.devices} ranks of this machine" if known.devices > 1 else "measuring 1 rank of this machine"
    )
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as folder:
        work = RankJob(f"{PROBE_MODULE}:probe", known.devices, {}, Path(folder), (PROBE_MODULE,))
        try:
            Supervisor(work, lambda rank, message: said.append(message), remark, early=INTERRUPTED_TEXT).run()
        except RankFailed as error:  # the log is deleted with the folder
            raise MeshwrightError(
                f"{str(error).splitlines()[0]}; nothing is saved: start the probe again on the devices that are left"
            ) from None
    return validate_data(
        ClusterProfile, next(message["measurement"] for message in said if message["kind"] == "measured")
    )


def _probe_as_rank(rank: int, world: int, language: str) -> ClusterProfile | None:
    """Measures as one of the ranks that a launcher started. Only rank 0 returns a result."""
    from meshwright.core.errors import MeshwrightError
    from meshwright.runtime.profiler.device import measure_cluster
    from meshwright.train.rank_main import join_process_groups

    if rank == 0:
        print_note(f"measuring {world} ranks and the links between them", language)
    with stop_together(rank, INTERRUPTED_TEXT):
        connection = join_process_groups(rank, world, timeout=RANK_TIMEOUT_SECONDS)
        try:
            with connection:
                found = measure_cluster()
        except (RuntimeError, TimeoutError) as error:
            raise MeshwrightError(
                f"rank {rank} lost another rank while all measured ({str(error).strip().splitlines()[0][:160]}): "
                "nothing is saved; see which rank ended, "
                "and start the probe again on the devices that are left"
            ) from error
    return found if rank == 0 else None


def measurement_text(result: CalibratedCluster, found: ClusterProfile) -> Iterator[str]:
    """Yields the lines to print."""
    from meshwright.core.units import show_bytes, show_count, show_rate, show_seconds

    cluster = result.cluster
    where = (
        f"{cluster.devices} devices on {len(found.hosts)} hosts"
        if len(found.hosts) > 1
        else f"{cluster.devices} devices on 1 host"
    )
    yield f"measured in {show_seconds(found.seconds)}: {where}"
    for group in cluster.groups:
        device = group.device
        rates = ", ".join(f"{name} {show_rate(rate, 'FLOP/s')}" for name, rate in device.peak.items())
        yield (
            f"  {group.nodes} x {group.devices} {device.name}   {rates}; memory {show_bytes(device.memory)} at "
            f"{show_rate(device.bandwidth)}"
        )
        yield (
            f"      attention {device.attention:.0%} of its products; storage {show_rate(group.storage_bandwidth)}"
        ).replace("%", " %")
        yield f"      processors of a node update {show_count(group.host_update)} parameters/s"
        yield f"      link inside {_link_line(group.link)}" + (
            f", between {group.link.span} devices each" if group.link.span else ""
        )
    if len(cluster.groups) > 1 or cluster.groups[0].nodes > 1:
        yield f"  network   {_link_line(cluster.network)}"
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


def _link_line(link: Link) -> str:
    from meshwright.core.units import show_rate, show_seconds

    meeting = f", {show_seconds(link.meeting)} to meet after computing" if link.meeting else ""
    return f"{show_rate(link.bandwidth)}, {show_seconds(link.latency)}{meeting}"
