"""Calibrates a cluster: measured values replace the described values in a `Cluster`. `meshwright probe` uses it.

- Peak: the best rate of square matrix products, times the fraction of a processor that the rank gets. On CPUs
  `sustained` is 1, because training reaches this rate.
- Efficiency: the fraction of the peak that the products of a layer reach in forward and backward, with their real
  operand layouts.
- Bandwidth: the bandwidth of element-wise work, times the fraction of a processor. The result is divided by
  MEMORY_BANDWIDTH_EFFICIENCY, because the formulas of the cost model multiply by this constant.
- Launch: the seconds of a small operation, divided by the fraction of a processor.
- Link: the bandwidth and latency with which the formulas of planner/cost/links.py best fit the measured times of all
  collectives. `meeting` is the synchronisation overhead: the seconds that a collective between computations takes
  beyond these formulas.

The fit searches the bandwidth and latency with the least mean square of log(formula / measured). The fitted values
depend on the formulas of the cost model, but they are physical quantities and not correction factors. Ranks with equal
host IDs belong to one node. Consecutive equal nodes form a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import exp, log, sqrt
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from meshwright.core.messages import Message
from meshwright.planner.cost import constants
from meshwright.planner.cost.links import LinkModel, all_to_all_seconds, collective_rates
from meshwright.spec.cluster import (
    MAX_BUSY_PROCESSORS,
    Cluster,
    ClusterProfile,
    CollectiveSample,
    Device,
    DeviceProfile,
    Link,
    NodeGroup,
    find_network_tiers,
)

SAME_SPEED_TOLERANCE = 0.15
"""Two speeds are similar if the absolute natural logarithm of their quotient is below this value. This is a difference
of about 15 %."""

STRAGGLER_SPEED_FRACTION = 0.85
"""A device is reported as a straggler if its speed is below this fraction of the median speed of its group. A rank is
also reported if its measured processor time is below this fraction of the expected processor time
(`DeviceProfile.own`)."""

UNDESCRIBED_CLUSTER = "measured"
"""The name of a cluster whose only known property before calibration is the number of ranks."""

LINK_FIT_STEP_FACTORS = (2.0, 1.4, 1.1, 1.03)
MAX_FIT_LOG_ERROR = 0.35


class CalibratedCluster(NamedTuple):
    """The calibrated cluster, and notes for the user about unexpected measurements (`odd`)."""

    cluster: Cluster
    odd: tuple[str, ...]


class UniformNode(NamedTuple):
    """Consecutive ranks of one host with equal devices of similar speed."""

    ranks: tuple[DeviceProfile, ...]

    @property
    def speed(self) -> float:
        """Returns the median speed of the ranks in FLOP/s."""
        return median(map(_device_speed, self.ranks))


def calibrate(measured: ClusterProfile, known: Cluster) -> CalibratedCluster:
    """Returns the cluster `known` with the measured rates, links and nodes in `measured`. If `measured` and `known`
    have equally many devices, the memory size of the devices and the names of accelerators remain those of `known`."""
    devices = _with_core_shares(measured)
    odd = [*_description_mismatches(measured, known), *_disturbance_notes(measured, devices)]
    nodes = [node for host in measured.hosts for node in _split_uniform_nodes([devices[rank] for rank in host])]
    found = find_network_tiers(measured.pairs, len(devices))
    span = min(map(len, measured.hosts))
    span = found.span if found.span and span == 1 else span
    near, far = _fit_links(measured, span, known)
    groups: list[NodeGroup] = []
    for same in _group_equal_nodes(nodes):
        ranks = [rank for node in same for rank in node.ranks]
        odd += _straggler_notes(ranks)
        base = _described_group(known, len(groups))
        link = near.but(span=0 if span == len(same[0].ranks) else span)
        groups.append(
            NodeGroup(
                nodes=len(same),
                devices=len(same[0].ranks),
                device=_fit_device(ranks, base.device, known.devices == len(devices)),
                link=link,
                host_memory=base.host_memory or ranks[0].host_memory,
                storage_bandwidth=median(rank.storage for rank in ranks) * len(same[0].ranks),
                host_bandwidth=median(rank.host_bandwidth * rank.share for rank in ranks),
                host_update=median(rank.update * rank.share for rank in ranks) * len(same[0].ranks),
            )
        )
    odd += found.odd if measured.busy <= MAX_BUSY_PROCESSORS or len(measured.hosts) > 1 else ()
    odd += _misfit_notes(
        measured, LinkModel((span,), (near.but(meeting=0.0), far.but(meeting=0.0)), _gathers_by_all_to_all(measured))
    )
    cluster = Cluster(
        name=known.name,
        groups=tuple(groups),
        network=far.but(span=known.network.span),
        tiers=known.tiers,
        failures_per_device_hour=known.failures_per_device_hour,
    )
    return CalibratedCluster(cluster, tuple(odd))


def _described_group(known: Cluster, index: int) -> NodeGroup:
    return known.groups[min(index, len(known.groups) - 1)]


# --- devices


def _device_speed(device: DeviceProfile) -> float:
    return max(device.peak("fp32"), device.peak("bf16") if device.name != "cpu" else 0.0) * device.share


def _with_core_shares(measured: ClusterProfile) -> list[DeviceProfile]:
    """Returns the device profiles with corrected fractions of a processor (`share`), by which measured rates are
    multiplied.

    The expected fraction (`own`) follows from the number of ranks per processor and from the CPU quota. If other
    programs were busy during the measurement, a rank got less than this, so `share` is the expected fraction.
    Otherwise, ranks of one host with equal expected fractions below 1 get the mean of their measured fractions. (The
    single fractions are random, because they depend on which ranks ran at the same time.)
    """
    if measured.busy > MAX_BUSY_PROCESSORS:
        return [device.but(share=device.own or device.share) for device in measured.devices]
    shares: dict[tuple[str, float], list[float]] = {}
    for device in measured.devices:
        shares.setdefault((device.host, device.own), []).append(device.share)
    return [
        device.but(share=fmean(shares[device.host, device.own])) if 0 < device.own < 1 else device
        for device in measured.devices
    ]


def _description_mismatches(measured: ClusterProfile, known: Cluster) -> Iterable[str]:
    """Yields a note for each contradiction between the description `known` and the measured machine."""
    devices, hosts = len(measured.devices), len(measured.hosts)
    nodes = sum(group.nodes for group in known.groups)
    if known.devices != devices:
        yield Message(
            "the description {known!r} has {devices} devices, but {devices_2} ranks were measured: device names and "
            "memory of the description are not used",
            known=known.name,
            devices=known.devices,
            devices_2=devices,
        )
    elif nodes != hosts and known.name != UNDESCRIBED_CLUSTER:
        yield Message(
            "the description {known!r} has {nodes} nodes, but the ranks ran on {hosts}: the measured number is used",
            known=known.name,
            nodes=nodes,
            hosts=hosts,
        )
    cores = [group.device.name.lower().startswith("cpu") for group in known.groups]
    if devices == known.devices and any(cores) != (measured.devices[0].name == "cpu"):
        said = " and ".join(dict.fromkeys(group.device.name for group in known.groups))
        yield Message(
            "the description {known!r} has {said}, but the ranks ran on {devices}: the memory of the description is "
            "not used",
            known=known.name,
            said=said,
            devices=measured.devices[0].name,
        )


def _disturbance_notes(measured: ClusterProfile, devices: Sequence[DeviceProfile]) -> Iterable[str]:
    if measured.busy > MAX_BUSY_PROCESSORS:
        yield Message(
            "other programs kept {busy:.1f} processors busy during the measurement: links appear slower than they "
            "are; measure again when the machine is idle",
            busy=measured.busy,
        )
    for device in devices:
        if measured.busy <= MAX_BUSY_PROCESSORS and device.own and device.share < STRAGGLER_SPEED_FRACTION * device.own:
            yield Message(
                "rank {rank} got {share:.0f} % of a processor instead of the expected {own:.0f} %",
                rank=device.rank,
                share=100 * device.share,
                own=100 * device.own,
            )


def _split_uniform_nodes(ranks: Sequence[DeviceProfile]) -> list[UniformNode]:
    """Splits the ranks of one host into groups of consecutive ranks with equal devices and similar speed."""
    parts: list[list[DeviceProfile]] = []
    for rank in ranks:
        if parts and parts[-1][0].name == rank.name and _same_speed(_device_speed(parts[-1][0]), _device_speed(rank)):
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return [UniformNode(tuple(part)) for part in parts]


def _group_equal_nodes(nodes: Sequence[UniformNode]) -> list[list[UniformNode]]:
    """Groups consecutive nodes with equally many ranks, equal devices and similar speed."""
    runs: list[list[UniformNode]] = []
    for node in nodes:
        first = runs[-1][0] if runs else None
        if (
            first
            and len(first.ranks) == len(node.ranks)
            and first.ranks[0].name == node.ranks[0].name
            and _same_speed(first.speed, node.speed)
        ):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _same_speed(one: float, other: float) -> bool:
    return abs(log(one / other)) < SAME_SPEED_TOLERANCE


def _straggler_notes(ranks: Sequence[DeviceProfile]) -> list[str]:
    middle = median(map(_device_speed, ranks))
    return [
        Message(
            "the device of rank {rank} reaches {device_speed:.0f} % of the median speed of its device group",
            rank=rank.rank,
            device_speed=100 * _device_speed(rank) / middle,
        )
        for rank in ranks
        if _device_speed(rank) < STRAGGLER_SPEED_FRACTION * middle
    ]


def _fit_device(ranks: Sequence[DeviceProfile], known: Device, same: bool) -> Device:
    """Returns a device with the median of each measured rate over `ranks`. `same`: whether the devices are of the type
    `known`. The memory size of a CPU rank is then that of `known`, because a rank cannot measure it. An accelerator has
    at most the bytes that its driver reports: 79.2 of the 80 GiB of an H100."""
    on_host, share = ranks[0].name == "cpu", min(median(rank.share for rank in ranks), 1.0)
    precisions = {each.precision for each in ranks[0].products}
    trained = "fp32" if on_host else "bf16"
    peak = {name: median(rank.peak(name) * rank.share for rank in ranks) for name in sorted(precisions)}
    changes = {
        "name": ranks[0].name if on_host or not same else known.name,
        "memory": _memory_of(ranks, known) if same else ranks[0].memory,
        "bandwidth": median(rank.bandwidth * rank.share for rank in ranks) / constants.MEMORY_BANDWIDTH_EFFICIENCY,
        "peak": {**({} if on_host else known.peak), **peak},
        "efficiency": min(median(rank.trained / rank.peak(trained) for rank in ranks), 1.0)
        if ranks[0].trained
        else 1.0,
        "sustained": dict.fromkeys(peak, 1.0) if on_host else known.sustained,
        "attention": median(rank.attention / rank.peak("fp32") for rank in ranks)
        if ranks[0].attention
        else known.attention,
        "launch": median(rank.launch / rank.share for rank in ranks),
        "share": share / min(1.0, share * max(Counter(rank.host for rank in ranks).values())),
        "source": "measured by probe",
    }
    return known.but(**changes)


def _memory_of(ranks: Sequence[DeviceProfile], known: Device) -> float:
    """Returns the bytes of a device: those of `known`, or those that the driver of an accelerator reports, if fewer."""
    return min([known.memory, *(rank.memory for rank in ranks if rank.name != "cpu" and rank.memory)])


# --- links


def _fit_links(measured: ClusterProfile, span: int, known: Cluster) -> tuple[Link, Link]:
    """Returns two links: inside a domain of `span` consecutive ranks, and between domains. If only one of the two links
    was measured, both results are this link. Without measurements the links of `known` are returned."""
    inside = [each for each in measured.timings if span % (each.ranks * each.stride) == 0]
    between = [each for each in measured.timings if span % (each.ranks * each.stride)]
    old_near, old_far = known.groups[0].link, known.network
    near_meetings, far_meetings = (
        [each for each in measured.meetings if bool(span % (each.ranks * each.stride)) == far] for far in (False, True)
    )
    within = lambda link: LinkModel((span,), (link, link))
    near = _fit_sync_overhead(near_meetings, _fit_link(inside, old_near, within), within) if inside else None
    across = lambda link: LinkModel((span,), (near or link, link), _gathers_by_all_to_all(measured))
    far = _fit_sync_overhead(far_meetings, _fit_link(between, old_far, across), across) if between else None
    return near or far or old_near, far or near or old_far


def _gathers_by_all_to_all(measured: ClusterProfile) -> bool:
    """Returns whether gathers are all-to-alls, as between CPU ranks on several hosts, which communicate over gloo."""
    return measured.devices[0].name == "cpu" and len(measured.hosts) > 1


def _fit_link(timings: Sequence[CollectiveSample], known: Link, fabric: Callable[[Link], LinkModel]) -> Link:
    """Fits the bandwidth and latency of a link to `timings` by coordinate search. The search starts from the bytes/s of
    the largest collective and the seconds per rank of the fastest collective. `fabric` returns the links of the cluster
    for a candidate link."""
    large, small = max(timings, key=lambda each: each.size), min(timings, key=lambda each: each.seconds)
    bandwidth, latency = large.size / large.seconds, max(small.seconds / max(small.ranks, 2), 1e-7)

    def link(bandwidth: float, latency: float) -> Link:
        return known.but(bandwidth=bandwidth, latency=latency, efficiency=1.0, adding=1.0, meeting=0.0)

    def loss(at: tuple[float, float]) -> float:
        return sum(log(predict_collective_seconds(fabric(link(*at)), each) / each.seconds) ** 2 for each in timings)

    at, least = (bandwidth, latency), loss((bandwidth, latency))
    for step in LINK_FIT_STEP_FACTORS:
        moved = True
        while moved:
            moved = False
            for change in ((step, 1.0), (1 / step, 1.0), (1.0, step), (1.0, 1 / step)):
                trial = (at[0] * change[0], at[1] * change[1])
                if (found := loss(trial)) < least:
                    at, least, moved = trial, found, True
    return link(*at)


def _fit_sync_overhead(meetings: Sequence[CollectiveSample], link: Link, fabric: Callable[[Link], LinkModel]) -> Link:
    """Returns `link` with the synchronisation overhead (`meeting`) that best fits the collectives `meetings`, which ran
    between computations. Predicted seconds are linear in the overhead, so each collective determines one value. The
    result is the median of these values."""
    without, one = (
        [predict_collective_seconds(fabric(link.but(meeting=meeting)), each) for each in meetings]
        for meeting in (0.0, 1.0)
    )
    missing = [(each.seconds - low) / (high - low) for each, low, high in zip(meetings, without, one, strict=True)]
    return link.but(meeting=max(median(missing), 0.0)) if missing else link


def predict_collective_seconds(links: LinkModel, timing: CollectiveSample) -> float:
    """Returns the seconds that the cost model predicts for the measured collective `timing` over `links`."""
    over = collective_rates(links, timing.ranks, timing.stride)
    if timing.kind == "all_reduce":
        return float(over.reduce(timing.size))
    if timing.kind == "all_to_all":
        return float(all_to_all_seconds(links, timing.ranks, timing.stride, np.array(timing.size)))
    return float(over.gather(timing.size))


def _misfit_notes(measured: ClusterProfile, links: LinkModel) -> Iterable[str]:
    """Yields a note if the predicted seconds of large collectives differ from the measured seconds by more than
    MAX_FIT_LOG_ERROR."""
    off = [
        log(predict_collective_seconds(links, each) / each.seconds) for each in measured.timings if each.size >= 2**16
    ]
    if off and (middle := sqrt(sum(each**2 for each in off) / len(off))) > MAX_FIT_LOG_ERROR:
        yield Message(
            "collectives of 64 KiB and more differ from the fitted bandwidth and latency by a factor of {exp:.2f} "
            "(root mean square)",
            exp=exp(middle),
        )
