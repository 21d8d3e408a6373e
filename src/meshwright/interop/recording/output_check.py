"""Compares module outputs in the order of one device, and explains the first that differs."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from meshwright.interop.recording import causes
from meshwright.interop.recording.digest import Digest, add_digests, distance
from meshwright.interop.recording.findings import Finding
from meshwright.interop.recording.stale import WrongOutput, find_stale_weight
from meshwright.interop.recording.step_values import DRIFT_FACTOR, StepValues
from meshwright.interop.recording.tolerance import Rounding
from meshwright.interop.recording.topology import Source
from meshwright.interop.recording.trace_format import RecordedOutput


class OutputMismatch(NamedTuple):
    """A recorded output that differs from every slice that it may be."""

    rank: int
    source: Source
    output: RecordedOutput
    amount: float
    limit: float


class OutputCheck:
    """The comparison of the outputs of one step."""

    def __init__(self, judge: StepValues) -> None:
        self.judge, self.topology = judge, judge.topology
        self.partial: list[OutputMismatch] = []

    def run(self) -> list[Finding]:
        """Compares module outputs in the order of one device, up to the first module that differs."""
        recorded: dict[tuple[str, int], list[tuple[int, Source, RecordedOutput]]] = defaultdict(list)
        for rank in range(len(self.topology.traces)):
            for at, micro in enumerate(self.topology.recorded(rank, self.judge.step).micro_batches):
                source = self.topology.source_of(rank, at)
                for each in micro.outputs if source is not None else ():
                    if each.path not in self.topology.divided[rank]:
                        recorded[each.path, each.call].append((rank, source, each))  # type: ignore[arg-type]
        pairs = [
            (found.outputs[0].digest, self.judge.other.outputs[key].outputs[0].digest)
            for key, found in self.judge.truth.outputs.items()
            if found.outputs and key in self.judge.other.outputs and self.judge.other.outputs[key].outputs
        ]
        rounding = Rounding(pairs)
        self.drift = 0.0
        for call in self.judge.truth.order:
            self.drift = max([self.drift, *(off for name, off in self.judge.drift.items() if _reads(call[0], name))])
            mismatches = [
                found for each in recorded[call] if (found := self._output_mismatch(*each, rounding)) is not None
            ]
            if mismatches and not self._is_partial(mismatches, rounding):
                return [self._explain_output(mismatches)]
        return []

    def _output_mismatch(
        self, rank: int, source: Source, output: RecordedOutput, rounding: Rounding
    ) -> OutputMismatch | None:
        key = (source, output.path, output.call, self.topology.need(rank, output))
        truth, other = self.judge.truth.outputs.get(key), self.judge.other.outputs.get(key)
        if truth is None or not truth.outputs:
            return None
        mine, best = self.judge.digest(rank, output.row), None
        for at, each in enumerate(truth.outputs):
            noise = other.outputs[at].digest if other is not None and at < len(other.outputs) else None
            norm = max(float(each.digest[-1]), 1e-300)
            floor = self.judge.floors.output + DRIFT_FACTOR * self.drift
            limit = rounding.limit(each.digest, noise, floor) / norm
            off = distance(mine, each.digest) / norm
            if best is None or off / max(limit, 1e-300) < best[0] / max(best[1], 1e-300):
                best = (off, limit)
        assert best is not None
        self.judge.compared.outputs += 1
        if best[0] <= best[1]:
            self.judge.compared.output = max(self.judge.compared.output, best[0])
            return None
        return OutputMismatch(rank, source, output, *best) if truth.exact else None

    def _is_partial(self, mismatches: list[OutputMismatch], rounding: Rounding) -> bool:
        """Returns whether the outputs are partial sums that add up to the output of one device, and remembers them. The
        loop may add them up after the module."""
        by_source: dict[Source, list[OutputMismatch]] = defaultdict(list)
        for each in mismatches:
            by_source[each.source].append(each)
        for members in by_source.values():
            first = members[0]
            truth = self._truth_of(first)
            if len(members) < 2 or len(members) != len(self.topology.peers(first.rank)) or truth is None:
                return False
            total = add_digests([self.judge.digest(each.rank, each.output.row) for each in members])
            extra = causes.bias_count(total, truth, self._bias_of(first), len(members))
            if (
                distance(total, truth) > 4 * first.limit * float(truth[-1])
                and extra is None
                and not first.output.partial
            ):
                return False
        self.partial += mismatches[:1]
        return True

    def _truth_of(self, found: OutputMismatch) -> Digest | None:
        key = (found.source, found.output.path, found.output.call, self.topology.need(found.rank, found.output))
        outputs = self.judge.truth.outputs[key].outputs
        return outputs[0].digest if len(outputs) == 1 else None

    def _bias_of(self, found: OutputMismatch) -> Digest | None:
        key = (found.source, found.output.path, found.output.call, self.topology.need(found.rank, found.output))
        return self.judge.truth.outputs[key].bias

    def _explain_output(self, mismatches: list[OutputMismatch]) -> Finding:
        first = mismatches[0]
        ranks = sorted({each.rank for each in mismatches})
        size = (max(each.amount for each in mismatches), first.limit)
        truth, bias = self._truth_of(first), self._bias_of(first)
        if self.partial:
            before = self.partial[-1]
            members = [
                self.judge.digest(rank, each.row)
                for rank in self.topology.peers(before.rank)
                for each in self.topology.recorded(rank, self.judge.step).micro_batches[before.source.micro].outputs
                if (each.path, each.call) == (before.output.path, before.output.call)
            ]
            known = self._truth_of(before)
            reduced = self._equal_on_all_ranks(mismatches)
            times = (
                causes.bias_count(add_digests(members), known, self._bias_of(before), len(members))
                if known is not None and reduced
                else None
            )
            cause = causes.partial_output(before.output.path, self.topology.peers(before.rank), times)
            return self.judge.finding("output", before.output.path, ranks, size, cause)
        digests = [self.judge.digest(each.rank, each.output.row) for each in mismatches]
        cause = causes.explain_output(digests[0], truth, bias)
        if cause.name == "unknown":
            chunk = self._other_slice(first)
            cause = causes.wrong_slice(first.rank, chunk) if chunk is not None else self._stale_weight(first) or cause
        return self.judge.finding("output", first.output.path, ranks, size, cause)

    def _stale_weight(self, first: OutputMismatch) -> causes.Cause | None:
        """Returns the cause of an output that is computed with weights from before the last update."""
        need, found = self.topology.need(first.rank, first.output), self.judge.digest(first.rank, first.output.row)
        wrong = WrongOutput(first.source, first.output.path, first.output.call, need, found, first.limit)
        stale = find_stale_weight(self.judge.device, self.judge.step, wrong)
        if stale is None:
            return None
        owners = [
            rank
            for rank, trace in enumerate(self.topology.traces)
            for piece in trace.header.pieces
            if self.topology.canonical[piece.name] == stale.name and piece.region == stale.region
        ]
        return causes.stale_weight(stale.name, None if stale.region.whole else sorted(set(owners)))

    def _equal_on_all_ranks(self, mismatches: list[OutputMismatch]) -> bool:
        """Returns whether the ranks of a replica have equal wrong outputs, so that partial sums were added up."""
        same = [each for each in mismatches if each.source == mismatches[0].source]
        first = self.judge.digest(same[0].rank, same[0].output.row)
        limit = max(4 * same[0].limit, 1e-4) * float(first[-1])
        return all(distance(first, self.judge.digest(each.rank, each.output.row)) <= limit for each in same)

    def _other_slice(self, found: OutputMismatch) -> int | None:
        """Returns a rank whose slice of the output this rank computed, None if there is none."""
        mine, call = self.judge.digest(found.rank, found.output.row), (found.output.path, found.output.call)
        for rank in self.topology.peers(found.rank):
            for each in self.topology.recorded(rank, self.judge.step).micro_batches[found.source.micro].outputs:
                if rank == found.rank or (each.path, each.call) != call:
                    continue
                outputs = self.judge.truth.outputs.get((found.source, *call, self.topology.need(rank, each)))
                if outputs is not None and outputs.outputs:
                    truth = outputs.outputs[0].digest
                    if distance(mine, truth) <= max(4 * found.limit, 1e-3) * float(truth[-1]):
                        return rank
        return None


def _reads(path: str, name: str) -> bool:
    """Returns whether the output of a module may depend on a parameter of the module or of one that contains it."""
    owner = name.rpartition(".")[0]
    return not owner or path == owner or path.startswith(f"{owner}.")
