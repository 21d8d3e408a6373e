"""Compares gradients, and finds the likely cause if they differ.

One device computes the gradient of each micro-batch separately. A recorded gradient is compared with sums of these
gradients with other factors: those of a mean of means, of a rank's own micro-batches, of a skipped micro-batch. If no
known factors fit, they are computed by least squares. A gradient that is a partial sum is recognised because the sum
over the ranks of a replica fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from meshwright.core.messages import Message
from meshwright.interop.recording.causes import FIT_TOLERANCE, UNKNOWN, Cause, rank_list, stale_tied_weight
from meshwright.interop.recording.digest import DIRECTIONS, Digest, add_digests, distance, scale_of
from meshwright.interop.recording.findings import Finding, StepComparison
from meshwright.interop.recording.layout import region_key
from meshwright.interop.recording.optimizer import clip_factor
from meshwright.interop.recording.reference import StepReference
from meshwright.interop.recording.tolerance import Floors, Rounding
from meshwright.interop.recording.topology import RecordedTopology, Source

Key = tuple[str, Any]
"""A parameter of the full model and the key of a region."""


class WrongGradient(NamedTuple):
    """A recorded gradient that differs. `found` is None if the rank has no gradient."""

    rank: int
    name: str
    key: Key
    found: Digest | None
    amount: float
    limit: float


class GradientCase:
    """The gradients of one step."""

    def __init__(
        self, topology: RecordedTopology, step: int, truth: StepReference, other: StepReference, floors: Floors
    ) -> None:
        self.topology, self.step, self.truth, self.floors = topology, step, truth, floors
        self.expected = self.sums(truth, self.factors(truth))
        self.noisy = self.sums(other, self.factors(other))

    def factors(self, reference: StepReference) -> dict[Source, float]:
        """Returns the factor of each micro-batch on one device: one over the number of all labels. An engine that clips
        inside its step shows only clipped gradients."""
        header = self.topology.traces[0].header
        inside = header.clip is not None and not header.steps[self.step].clipped
        factor = clip_factor(header.clip if inside else None, self.truth.norm)
        return dict.fromkeys(reference.losses, factor / max(reference.labels, 1e-300))

    def sums(self, reference: StepReference, factors: Mapping[Source, float]) -> dict[Key, Digest]:
        """Returns the digests of the gradients of micro-batches, multiplied by `factors` and added up."""
        parts: dict[Key, list[Digest]] = defaultdict(list)
        for (source, name, key), found in reference.gradients.items():
            if source in factors:
                parts[name, key].append(found * factors[source])
        return {key: add_digests(each) for key, each in parts.items()}

    def recorded(self) -> Iterator[tuple[int, str, Key, Digest | None]]:
        """Yields rank, name, key and digest of each gradient. Partial DTensors are added up over ranks."""
        partial: dict[Key, list[tuple[int, str, Digest]]] = defaultdict(list)
        for rank, trace in enumerate(self.topology.traces):
            step = trace.header.steps[self.step]
            owners = {piece.name for piece, row in zip(trace.header.pieces, step.gradients, strict=False) if row >= 0}
            for at, (piece, row) in enumerate(zip(trace.header.pieces, step.gradients, strict=False)):
                region = step.region(at, piece)
                key = (self.topology.canonical[piece.name], region_key(region))
                if region.flat is not None and region.flat[0] >= region.flat[1]:
                    continue
                if row >= 0 and step.partial and step.partial[at]:
                    partial[key].append((rank, piece.name, trace.digests[row]))
                elif row >= 0 or (
                    piece.trains
                    and piece.name not in owners
                    and piece.before >= 0
                    and "ZeRO" not in trace.header.engine
                ):
                    yield rank, piece.name, key, trace.digests[row] if row >= 0 else None
        for key, members in partial.items():
            replicas = {self.topology.traces[rank].header.replica for rank, _, _ in members}
            yield members[0][0], members[0][1], key, add_digests([found for *_, found in members]) / len(replicas)

    def compare(self, compared: StepComparison) -> list[WrongGradient]:
        """Returns the gradients that differ, and adds the largest difference to `compared`."""
        rounding = Rounding((found, self.noisy[key]) for key, found in self.expected.items() if key in self.noisy)
        extra = self.floors.noise * self.truth.norm
        wrong = []
        for rank, name, key, found in self.recorded():
            truth = self.expected.get(key)
            if truth is None:
                if found is not None and float(found[-1]) > extra:
                    wrong.append(WrongGradient(rank, name, key, found, 1.0, 0.0))
                continue
            norm = max(float(truth[-1]), 1e-300)
            limit = rounding.limit(truth, self.noisy.get(key), self.floors.gradient, extra)
            off = norm if found is None else distance(found, truth)
            compared.gradients += 1
            if not off <= limit:
                wrong.append(WrongGradient(rank, name, key, found, off / norm, limit / norm))
            elif off / norm >= compared.gradient and norm > extra / max(self.floors.gradient, 1e-300):
                compared.gradient, compared.gradient_at = off / norm, name
        return wrong

    def residual(
        self, wrong: list[WrongGradient], factors: Mapping[Source, float], previous: Mapping[Key, Digest] | None = None
    ) -> float:
        """Returns the relative difference of the wrong gradients from the sum of micro-batches with `factors`."""
        known = self.sums(self.truth, factors)
        off = size = 0.0
        for each in wrong:
            if each.found is None:
                return 1.0
            sum_ = known.get(each.key, torch.zeros_like(each.found))
            if previous is not None:
                sum_ = sum_ + previous.get(each.key, torch.zeros_like(each.found))
            weight = 1 / max(float(each.found[:DIRECTIONS].norm()), 1e-300)
            off += float((each.found - sum_)[:DIRECTIONS].norm() * weight) ** 2
            size += 1.0
        return (off / size) ** 0.5 if size else 1.0


def explain_gradients(case: GradientCase, wrong: list[WrongGradient]) -> list[Finding]:
    """Returns one finding about the wrong gradients of a step, with the likely cause."""
    order = _backward_order(case)
    wrong = sorted(wrong, key=lambda each: (order.get(each.key[0], len(order)), each.rank))
    rank = wrong[0].rank
    mine = [each for each in wrong if each.rank == rank]
    everywhere = len({each.key[0] for each in wrong}) >= 0.9 * len({key[0] for key in case.expected})
    limit = max(FIT_TOLERANCE / 10, *(4 * each.limit for each in mine[:1]))
    cause = (
        _missing(case, mine)
        or _tied(case, mine, limit)
        or _known_factors(case, mine, limit)
        or _not_zeroed(case, mine, limit)
        or _partial_sum(case, mine, limit)
        or _fitted_factors(case, mine, limit)
        or (UNKNOWN, "")
    )
    module = "" if everywhere and cause[0].name in GLOBAL_CAUSES else cause[1] or mine[0].name
    ranks = sorted({each.rank for each in wrong})
    return [
        Finding(case.step + 1, "gradient", module, ranks, mine[0].amount, mine[0].limit, cause[0].name, cause[0].why)
    ]


GLOBAL_CAUSES = frozenset(
    {
        "mean of means",
        "skipped micro-batch",
        "scaled gradient",
        "missing gradient all-reduce",
        "not zeroed",
        "weighted micro-batches",
    }
)
"""Causes that have no module if they affect all parameters."""
Explained = tuple[Cause, str]
"""A cause and the name of the module or parameter, '' for the first that differs."""


def _backward_order(case: GradientCase) -> dict[str, int]:
    calls = {path: at for at, (path, _) in enumerate(case.truth.order)}
    names = sorted({key[0] for key in case.expected}, key=lambda name: -calls.get(name.rpartition(".")[0], -1))
    return {name: at for at, name in enumerate(names)}


def _missing(case: GradientCase, wrong: list[WrongGradient]) -> Explained | None:
    none = [each for each in wrong if each.found is None or not float(each.found[-1])]
    if not none:
        return None
    names = {name for _, name, key, _ in case.recorded() if key == none[0].key} - {none[0].name}
    if names:
        return stale_tied_weight(none[0].name, sorted(names)), none[0].name
    why = Message(
        "{count:count parameter} have no gradient on rank {rank}, but one on one device",
        count=len(none),
        rank=none[0].rank,
    )
    return Cause("missing gradient", why), none[0].name


def _known_factors(case: GradientCase, wrong: list[WrongGradient], limit: float) -> Explained | None:
    """Compares with the factors of wrong averages."""
    losses, labels = case.truth.losses, case.truth.labels
    by_rank: dict[int, float] = defaultdict(float)
    by_place: dict[int, float] = defaultdict(float)
    for source, (_, count) in losses.items():
        by_rank[source.rank] += count
        by_place[source.micro] += count
    means = {
        "micro-batches": {source: 1 / (len(losses) * max(count, 1)) for source, (_, count) in losses.items()},
        "ranks": {source: 1 / (len(by_rank) * max(by_rank[source.rank], 1)) for source in losses},
        "steps of accumulation": {source: 1 / (len(by_place) * max(by_place[source.micro], 1)) for source in losses},
    }
    right = case.residual(wrong, case.factors(case.truth))
    for of, factors in means.items():
        for scale in (1.0, float(len(losses)), float(len(by_rank)), float(len(by_place))):
            scaled = {source: factor * scale for source, factor in factors.items()}
            if case.residual(wrong, scaled) < min(limit, right / 4) and not _uniform(factors, labels):
                why = Message(
                    "it is the mean of the mean losses of {of}, which have unequal numbers of labels ({least} to "
                    "{most}): divide the sum of "
                    "all losses by the number of all labels",
                    of=MEANS_OF[of],
                    least=round(min(count for _, count in losses.values())),
                    most=round(max(count for _, count in losses.values())),
                )
                times = Message("{why}; it is also multiplied by {factor}", why=why, factor=f"{scale:g}")
                return Cause("mean of means", why if scale == 1 else times), ""
    return _scaled(case, wrong, limit)


MEANS_OF = {
    "micro-batches": Message("micro-batches"),
    "ranks": Message("ranks"),
    "steps of accumulation": Message("accumulation steps"),
}


def _uniform(factors: Mapping[Source, float], labels: float) -> bool:
    return max(abs(factor * labels - 1) for factor in factors.values()) < 1e-6


def _scaled(case: GradientCase, wrong: list[WrongGradient], limit: float) -> Explained | None:
    fits = [
        scale_of(each.found, case.expected[each.key])
        for each in wrong
        if each.found is not None and each.key in case.expected
    ]
    if not fits or max(rest for _, rest in fits) > max(limit, 1e-3):
        return None
    factors = [factor for factor, _ in fits]
    if max(factors) - min(factors) > 0.01 * abs(factors[0]):
        return None
    ranks, places = len(case.topology.replicas), len({source.micro for source in case.truth.losses})
    known = {
        float(ranks): Message("a sum over the {count} replicas instead of a mean", count=ranks),
        1 / ranks: Message("divided twice by the {count} replicas", count=ranks),
        float(places): Message("not divided by the {count} micro-batches of a step", count=places),
        1 / places: Message("divided twice by the {count} micro-batches of a step", count=places),
    }
    hint = next((text for factor, text in known.items() if factor != 1 and abs(factors[0] / factor - 1) < 0.01), None)
    why = Message("it is {factor} times the gradient of one device", factor=f"{factors[0]:.4g}")
    return Cause("scaled gradient", Message("{why}: {hint}", why=why, hint=hint) if hint else why), ""


def _not_zeroed(case: GradientCase, wrong: list[WrongGradient], limit: float) -> Explained | None:
    if not case.step:
        return None
    rank = wrong[0].rank
    trace = case.topology.traces[rank]
    before = trace.header.steps[case.step - 1]
    rows = before.clipped or before.gradients
    previous = {
        (case.topology.canonical[piece.name], region_key(piece.region)): trace.digests[row]
        for piece, row in zip(trace.header.pieces, rows, strict=False)
        if row >= 0
    }
    if case.residual(wrong, case.factors(case.truth), previous) < limit:
        return Cause(
            "not zeroed", Message("the gradient of the step before is still in it: call zero_grad after every step")
        ), ""
    return None


def _members(case: GradientCase, key: Key) -> list[tuple[int, str, Digest]]:
    return [(rank, name, found) for rank, name, each, found in case.recorded() if each == key and found is not None]


def _partial_sum(case: GradientCase, wrong: list[WrongGradient], limit: float) -> Explained | None:
    """Tests whether the gradients of the ranks of a replica add up to the gradient of one device."""
    first = wrong[0]
    peers = case.topology.peers(first.rank)
    members = [found for rank, _, found in _members(case, first.key) if rank in peers]
    if len(members) < 2 or first.key not in case.expected:
        return None
    factor, rest = scale_of(add_digests(members), case.expected[first.key])
    if rest > limit or abs(factor - 1) > FIT_TOLERANCE:
        return None
    reader = _partial_reader(case, first)
    if reader:
        why = Message(
            "the gradient of the input of {path} is a partial sum on the ranks {ranks}: all-reduce it in backward",
            path=reader,
            ranks=rank_list(peers),
        )
        return Cause("missing input-gradient all-reduce", why), reader
    why = Message(
        "the gradients of the ranks {ranks} are partial sums: all-reduce them over these ranks", ranks=rank_list(peers)
    )
    return Cause("missing gradient all-reduce", why), first.name


def _partial_reader(case: GradientCase, wrong: WrongGradient) -> str:
    """Returns the first sharded layer after the module of a wrong gradient, if the gradient of this module's output is
    a partial sum, else ''."""
    path = wrong.name.rpartition(".")[0]
    topology = case.topology
    for output in topology.recorded(wrong.rank, case.step).micro_batches[0].outputs:
        source = topology.source_of(wrong.rank, 0) or Source(wrong.rank, 0)
        truth = case.truth.outputs.get((source, path, output.call, topology.need(wrong.rank, output)))
        if output.path != path or output.gradient < 0 or truth is None or len(truth.gradients) != 1:
            continue
        if scale_of(topology.traces[wrong.rank].digests[output.gradient], truth.gradients[0].digest)[1] < FIT_TOLERANCE:
            return ""
        paths = [each for each, _ in case.truth.order]
        sharded = {module for rank, module in topology._weights if rank == wrong.rank}
        return next((each for each in paths[paths.index(path) + 1 :] if each in sharded), "")
    return ""


def _tied(case: GradientCase, wrong: list[WrongGradient], limit: float) -> Explained | None:
    """Tests whether two copies of a tied weight have the two parts of its gradient."""
    for each in wrong:
        members = _members(case, each.key)
        names = sorted({name for _, name, _ in members})
        if len(names) < 2 or each.key not in case.expected:
            continue
        firsts = [next(found for _, name, found in members if name == wanted) for wanted in names]
        if distance(add_digests(firsts), case.expected[each.key]) < limit * float(case.expected[each.key][-1]) * 10:
            why = Message(
                "{names} are one tied weight, but their gradients are not added up: all-reduce them over their ranks",
                names=" and ".join(names),
            )
            return Cause("tied weight", why), each.name
    return None


def _fitted_factors(case: GradientCase, wrong: list[WrongGradient], limit: float) -> Explained | None:
    """Computes the factors of all micro-batches by least squares, and explains them."""
    sources = list(case.truth.losses)
    found = [each for each in wrong if each.found is not None]
    if len(found) * DIRECTIONS < 2 * len(sources) or not found:
        return None
    zero = torch.zeros(DIRECTIONS + 1, dtype=torch.float64)
    columns, values = [], []
    for each in found:
        assert each.found is not None
        weight = 1 / max(float(each.found[-1]), 1e-300)
        parts = [case.truth.gradients.get((source, *each.key), zero)[:DIRECTIONS] for source in sources]
        columns.append(torch.stack(parts, 1) * weight)
        values.append(each.found[:DIRECTIONS] * weight)
    matrix, target = torch.cat(columns), torch.cat(values)
    solved = torch.linalg.lstsq(matrix, target.unsqueeze(1)).solution.squeeze(1)
    rest = float((matrix @ solved - target).norm() / target.norm())
    if rest > max(limit, 5e-3):
        return None
    factors = {source: float(value) * case.truth.labels for source, value in zip(sources, solved, strict=True)}
    return _explain_factors(case, found[0], factors)


def _explain_factors(case: GradientCase, wrong: WrongGradient, factors: Mapping[Source, float]) -> Explained:
    largest = max(abs(factor) for factor in factors.values())
    missing = [source for source, factor in factors.items() if abs(factor) < 0.01 * largest]
    own = case.topology.source_of(wrong.rank, 0)
    others = [source for source in factors if own is None or source.rank != own.rank]
    if missing and set(missing) == set(others):
        why = Message(
            "it contains only the micro-batches of rank {rank}: all-reduce it over the replicas", rank=wrong.rank
        )
        return Cause("missing gradient all-reduce", why), wrong.name
    if missing:
        first = missing[0]
        why = Message("micro-batch {micro} of rank {rank} is not in it", micro=first.micro + 1, rank=first.rank)
        return Cause("skipped micro-batch", why), ""
    size, last = len(case.topology.peers(wrong.rank)), max(source.micro for source in factors)
    if size > 1 and last and all(abs(f / size ** (last - source.micro) - 1) < 0.01 for source, f in factors.items()):
        why = Message(
            "it is all-reduced over {count} ranks after every micro-batch, so that the sum of the earlier ones is "
            "multiplied again: reduce it once for each step",
            count=size,
        )
        return Cause("repeated all-reduce", why), wrong.name
    shown = ", ".join(f"{factor:.3g}" for factor in list(factors.values())[:8])
    return Cause(
        "weighted micro-batches", Message("its micro-batches have the factors {shown} instead of 1", shown=shown)
    ), ""
