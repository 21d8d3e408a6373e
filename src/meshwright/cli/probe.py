"""`meshwright probe`: measure this machine or cluster: devices, links; for --cluster.

Under torchrun, Slurm or the cluster emulation each process is one measured rank. Otherwise this process starts the
ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from meshwright.cli.joint_stop import stop_together
from meshwright.cli.options import AsJson, Language, check_output_path, print_json, print_note, print_output
from meshwright.core.files import write_atomically
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate

if TYPE_CHECKING:
    from meshwright.planner.cost.calibration import CalibratedCluster
    from meshwright.spec.cluster import Cluster, ClusterProfile, DeviceProfile, Link

PROBE_MODULE = "meshwright.train.measured_runs"
RANK_TIMEOUT_SECONDS = 45.0
"""Seconds that ranks wait for another rank before it counts as lost. Every measurement takes less time."""

INTERRUPTED_TEXT = Message("before all was measured")

MAX_RANKS_PER_CORE = 8


def probe(
    *,
    cluster: Annotated[
        str,
        Parameter(help="cluster to measure: local, local:N (N ranks), or a description; it keeps its names and memory"),
    ] = "local",
    save: Annotated[Path | None, Parameter(help="write the measured cluster to this file, for --cluster")] = None,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Measure devices, memory, storage and every link, with the communication of training; report anomalies.

    The result for this machine alone is stored; from then on `--cluster local` uses it.

    Try: meshwright probe --save cluster.json
    """
    from meshwright.planner.cost.calibration import UNDESCRIBED_CLUSTER, calibrate
    from meshwright.planner.inputs.cluster_parser import read_cluster, save_local_cluster
    from meshwright.spec.cluster import MAX_BUSY_PROCESSORS
    from meshwright.train.rank_main import read_own_launch

    language = choose_language(lang, os.environ)
    check_output_path("--save", save)
    me = read_own_launch()
    known = read_cluster(cluster, measured=False)
    _check_start(cluster, known, me is None)
    if me is not None and known.name.startswith("local"):  # the user has not described the ranks' cluster
        known = read_cluster(f"local:{me.world}", measured=False).but(name=UNDESCRIBED_CLUSTER)
    found = _probe_this_machine(known, language) if me is None else _probe_as_rank(me.rank, me.world, language)
    if found is None:
        return 0
    result = calibrate(found, known)
    if me is None and known.name.startswith("local"):
        saved = save_local_cluster(result.cluster) if found.busy <= MAX_BUSY_PROCESSORS else None
        print_note(_saved_line(saved, found), language)
    if json:
        print_json(
            {
                "cluster": result.cluster.model_dump(mode="json"),
                "odd": list(result.odd),
                "measured": found.model_dump(mode="json"),
            }
        )
    else:
        print_output("\n".join(translate(line, language) for line in measurement_text(result, found)))
    if save is not None:
        write_atomically(save, result.cluster.to_json() + "\n")
        print_note(Message("the cluster is saved in {save}; `--cluster {save}` uses it", save=save), language)
    return 0


def _saved_line(saved: Path | None, found: ClusterProfile) -> Message:
    """Returns the line that states where the measured cluster is stored, or why it is not stored."""
    from meshwright.spec.cluster import MAX_BUSY_PROCESSORS

    if saved:
        return Message("saved in {path}: --cluster local uses this measurement from now on", path=saved)
    if found.busy > MAX_BUSY_PROCESSORS:
        return Message("not used for --cluster local: other programs used the processors during the measurement")
    return Message("not saved: the cache cannot be written")


def _check_start(cluster: str, known: Cluster, is_single: bool) -> None:
    """Raises InputError if the ranks of the cluster `known`, named `cluster`, cannot be measured as this process was
    started. `is_single`: whether it is not one of several ranks."""
    from meshwright.core.errors import InputError

    if os.environ.get("MESHWRIGHT_NODE"):
        raise InputError(
            Message(
                "probe measures ranks, but MESHWRIGHT_NODE starts one process for each node: unset it and start one "
                "process for each device, with `torchrun --no-python meshwright probe` or `srun --ntasks-per-node`"
            )
        )
    if is_single and sum(group.nodes for group in known.groups) > 1:
        raise InputError(
            Message(
                "cluster {cluster!r} has several nodes: start this command on each of them, with torchrun, Slurm or "
                "`python -m bench.emulation`",
                cluster=cluster,
            )
        )
    if is_single:
        _check_ranks(known)


def _check_ranks(known: Cluster) -> None:
    """Raises InputError for more than MAX_RANKS_PER_CORE ranks per CPU core, because the ranks would mostly wait for
    each other. MIN_CPU_RANKS ranks are always allowed. With CUDA devices there is no limit."""
    from meshwright.core.errors import InputError
    from meshwright.planner.inputs.cluster_parser import MIN_CPU_RANKS, available_cpus, cuda_device_names

    most = max(MIN_CPU_RANKS, MAX_RANKS_PER_CORE * available_cpus())
    if not cuda_device_names() and known.devices > most:
        raise InputError(
            Message(
                "probe of {devices} ranks: this machine has {available_cpus} cores, and with more than "
                "{max_ranks_per_core} ranks per core the ranks mostly wait for each other; use --cluster "
                "local:{most}, or start the ranks on more machines",
                devices=known.devices,
                available_cpus=available_cpus(),
                max_ranks_per_core=MAX_RANKS_PER_CORE,
                most=most,
            )
        )


def _probe_this_machine(known: Cluster, language: str) -> ClusterProfile:
    """Measures ranks on this machine, each a child of this process.

    Raises: MeshwrightError if a rank fails.
    """
    from meshwright.core.codec import validate_data
    from meshwright.core.errors import MeshwrightError
    from meshwright.elastic.attempt import RankJob
    from meshwright.elastic.failure import RankFailed
    from meshwright.elastic.supervisor import Supervisor
    from meshwright.spec.cluster import ClusterProfile

    said: list[Any] = []
    remark = partial(print_note, language=language)
    remark(
        Message("measuring {devices} ranks of this machine", devices=known.devices)
        if known.devices > 1
        else Message("measuring 1 rank of this machine")
    )
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as folder:
        work = RankJob(f"{PROBE_MODULE}:probe", known.devices, {}, Path(folder), (PROBE_MODULE,))
        try:
            Supervisor(work, lambda rank, message: said.append(message), remark, early=INTERRUPTED_TEXT).run()
        except RankFailed as error:  # the log that the error names is deleted with the folder
            raise MeshwrightError(
                Message(
                    "{error}; nothing is saved: start the probe again on the devices that are left",
                    error=str(error).splitlines()[0],
                )
            ) from None
    return validate_data(
        ClusterProfile, next(message["measurement"] for message in said if message["kind"] == "measured")
    )


def _probe_as_rank(rank: int, world: int, language: str) -> ClusterProfile | None:
    """Measures as one of the ranks that a launcher started. Only rank 0 returns a result.

    Raises: MeshwrightError if the connection to another rank is lost.
    """
    from meshwright.core.errors import MeshwrightError
    from meshwright.runtime.profiler.device import measure_cluster
    from meshwright.train.rank_main import join_process_groups

    if rank == 0:
        print_note(Message("measuring {world} ranks and the links between them", world=world), language)
    with stop_together(rank, INTERRUPTED_TEXT):
        connection = join_process_groups(rank, world, timeout=RANK_TIMEOUT_SECONDS)
        try:
            with connection:
                found = measure_cluster()
        except (RuntimeError, TimeoutError) as error:
            raise MeshwrightError(
                Message(
                    "rank {rank} lost the connection to another rank during the measurement ({error}): nothing is "
                    "saved; see which rank ended, and start the probe again on the devices that are left",
                    rank=rank,
                    error=str(error).strip().splitlines()[0][:160],
                )
            ) from error
    return found if rank == 0 else None


def measurement_text(result: CalibratedCluster, found: ClusterProfile) -> Iterator[str]:
    """Yields the lines of the output: devices, links, collectives and anomalies."""
    from meshwright.core.units import show_bytes, show_count, show_rate, show_seconds

    cluster = result.cluster
    where = (
        Message("{devices} devices on {count} hosts", devices=cluster.devices, count=len(found.hosts))
        if len(found.hosts) > 1
        else Message("{devices} devices on 1 host", devices=cluster.devices)
    )
    yield Message("measured in {seconds}: {where}", seconds=show_seconds(found.seconds), where=where)
    for group in cluster.groups:
        device = group.device
        yield Message(
            "  {nodes} x {devices} {name}   {rates}; memory {memory} at {bandwidth}",
            nodes=group.nodes,
            devices=group.devices,
            name=device.name,
            rates=", ".join(f"{name} {show_rate(rate, 'FLOP/s')}" for name, rate in device.peak.items()),
            memory=show_bytes(device.memory),
            bandwidth=show_rate(device.bandwidth),
        )
        yield Message(
            "      attention {share:.0f} % of the matrix product rate; storage {storage}",
            share=100 * device.attention,
            storage=show_rate(group.storage_bandwidth),
        )
        yield Message("      processors of a node update {rate} parameters/s", rate=show_count(group.host_update))
        yield Message(
            "      link inside {link}, between {span} devices each" if group.link.span else "      link inside {link}",
            link=_link_line(group.link),
            span=group.link.span,
        )
    yield from _warm_lines([each for each in found.devices if each.warm])
    yield from _connection_lines(found)
    if len(cluster.groups) > 1 or cluster.groups[0].nodes > 1:
        yield Message("  network   {link}", link=_link_line(cluster.network))
    sizes = sorted({each.size for each in found.timings})
    if sizes:
        columns = "".join(f"{show_bytes(size):>12}" for size in sizes)
        yield Message("collectives          {sizes}", sizes=columns)
    for key in dict.fromkeys((each.kind, each.ranks, each.stride) for each in found.timings):
        row = {each.size: each.seconds for each in found.timings if (each.kind, each.ranks, each.stride) == key}
        name = f"{key[0]} {key[1]}" + (f" by {key[2]}" if key[2] > 1 else "")
        yield f"  {name:19}" + "".join(f"{show_seconds(row[size]) if size in row else '':>12}" for size in sizes)
    yield from (Message("anomaly: {line}", line=line) for line in result.odd)
    if not result.odd:
        yield Message("no anomalies found")


def _warm_lines(devices: Sequence[DeviceProfile]) -> Iterator[str]:
    """Yields the rate, the clock and the power of warm accelerators, those of the slowest device."""
    from meshwright.core.units import show_rate

    if devices:
        slowest = min(devices, key=lambda each: each.warm)
        yield Message(
            "      products of a warm device {rate} of a layer, at {clock}, {power} (rank {rank}, the slowest)",
            rate=show_rate(slowest.warm, "FLOP/s"),
            clock=f"{slowest.clock / 1e6:.0f} MHz" if slowest.clock else Message("an unknown clock"),
            power=f"{slowest.power:.0f} W" if slowest.power else Message("unknown power (pip install nvidia-ml-py)"),
            rank=slowest.rank,
        )


def _connection_lines(found: ClusterProfile) -> Iterator[str]:
    """Yields how the devices of a host are connected, with the range of measured bandwidths of each kind, and the ranks
    whose memory network cards read directly."""
    from meshwright.core.units import show_rate

    names = {"nvswitch": "NVSwitch", "nvlink": "NVLink", "pcie": "PCIe"}
    for kind in names:
        rates = sorted(pair.bandwidth for pair in found.pairs if pair.kind == kind)
        if rates:
            yield Message(
                "      {count} pairs of devices over {kind}: {least} to {most}",
                count=len(rates),
                kind=names[kind],
                least=show_rate(rates[0]),
                most=show_rate(rates[-1]),
            )
    if direct := [str(each.rank) for each in found.devices if each.gpudirect]:
        yield Message(
            "      network cards read the memory of ranks {ranks} directly (GPUDirect)", ranks=", ".join(direct)
        )


def _link_line(link: Link) -> str:
    from meshwright.core.units import show_rate, show_seconds

    line = f"{show_rate(link.bandwidth)}, {show_seconds(link.latency)}"
    if not link.meeting:
        return line
    return Message("{link}, {seconds} to synchronize after computing", link=line, seconds=show_seconds(link.meeting))
