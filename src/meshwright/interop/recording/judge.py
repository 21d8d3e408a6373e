"""Compares a recorded step with one device. The checks run in the order of a step: weights, inputs, dropout, outputs,
labels and loss, gradients, clipping, optimizer options, update. The first check that finds a difference ends the
comparison, because later values follow from it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.core.messages import Message
from meshwright.interop.recording import causes
from meshwright.interop.recording.digest import DIRECTIONS, Digest, distance
from meshwright.interop.recording.findings import Finding
from meshwright.interop.recording.gradient_causes import GradientCase, explain_gradients
from meshwright.interop.recording.layout import local_shape, region_key
from meshwright.interop.recording.optimizer import clip_factor, named_options
from meshwright.interop.recording.output_check import OutputCheck
from meshwright.interop.recording.reference import StepReference
from meshwright.interop.recording.step_values import DRIFT_FACTOR, StepValues
from meshwright.interop.recording.tolerance import Rounding, flipped
from meshwright.interop.recording.topology import Source
from meshwright.interop.recording.trace_format import RecordedPiece

MAX_UPDATE_LIMIT = 0.5
"""An update with a larger accepted relative difference is compared only together with all others."""
MAX_UPDATE_NOISE = 0.25
"""Updates with a larger measured rounding are left out of the size of all updates. Adam turns gradients that consist of
rounding errors into full steps."""


class StepJudge(StepValues):
    """Compares one step."""

    def run(self) -> list[Finding]:
        """Returns the findings of the first check that has any."""
        checks: tuple[Callable[[], list[Finding]], ...] = (
            self.check_weights,
            self.check_inputs,
            self.check_dropout,
            OutputCheck(self).run,
            self.check_losses,
            self.check_gradients,
            self.check_clipping,
            self.check_options,
            self.check_update,
        )
        return next((found for check in checks if (found := check())), [])

    # --- weights, inputs, dropout -----------------------------------------------------------------

    def check_weights(self) -> list[Finding]:
        """Compares the first weights of all ranks with each other."""
        if self.step:
            return []
        limit = max(self.floors.stored, 1e-5)
        groups: dict[tuple[str, Any], list[tuple[int, str, Digest]]] = defaultdict(list)
        for rank, trace in enumerate(self.topology.traces):
            for piece in trace.header.pieces:
                if piece.before >= 0 and piece.region.flat != (0, 0):
                    key = (self.topology.canonical[piece.name], region_key(piece.region))
                    groups[key].append((rank, piece.name, trace.digests[piece.before]))
        for (name, key), members in groups.items():
            truth = self.truth.before[name, key]
            for rank, local, digest in members:
                off = distance(digest, truth) / max(float(truth[-1]), float(digest[-1]), 1e-300)
                if off > limit:
                    cause = causes.unequal_weights(local, members[0][1], members[0][0], rank)
                    return [self.finding("weights", local, [rank], (off, limit), cause)]
        return self._equal_shards(groups)

    def _equal_shards(self, groups: dict[tuple[str, Any], list[tuple[int, str, Digest]]]) -> list[Finding]:
        constant = {
            (self.topology.canonical[piece.name], region_key(piece.region))
            for trace in self.topology.traces
            for piece in trace.header.pieces
            if piece.constant
        }
        seen: dict[str, list[tuple[int, Any, Digest]]] = defaultdict(list)
        for (name, key), members in groups.items():
            rank, local, digest = members[0]
            for other, _, known in seen[name]:
                if (name, key) not in constant and bool((known == digest).all()):
                    return [self.finding("weights", local, [rank], (1.0, 0.0), causes.equal_shards(local, other, rank))]
            seen[name].append((rank, key, digest))
        return []

    def check_inputs(self) -> list[Finding]:
        """Compares the structure of the inputs of replicas."""
        sources = self.truth.losses
        first = next(iter(sources))
        expected = skeleton(self.topology.micro_batch(self.step, first).inputs)
        for source in sources:
            found = skeleton(self.topology.micro_batch(self.step, source).inputs)
            if found != expected:
                cause = causes.unequal_inputs(sorted(expected ^ found), first.rank, source.rank)
                return [self.finding("inputs", "", [source.rank], (1.0, 0.0), cause)]
        counts = {
            rank: len(self.topology.recorded(rank, self.step).micro_batches)
            for rank in range(len(self.topology.traces))
        }
        for rank, count in counts.items():
            own = self.topology.source_of(rank, 0)
            if own is not None and count != counts[own.rank]:
                cause = causes.unequal_micro_batches(own.rank, counts[own.rank], rank, count)
                return [self.finding("inputs", "", [rank], (1.0, 0.0), cause)]
        return []

    def check_dropout(self) -> list[Finding]:
        """Compares the masks of ranks that share a micro-batch: equal for equal tensors, different for shards."""
        for (step, source, number), whole in self.topology.mask_forms.items():
            if step != self.step:
                continue
            masks = self.topology.dropout_masks(step, source, number)
            for rank, path, shape, bits in masks[1:]:
                equal = shape == masks[0][2] and bool((bits == masks[0][3]).all())
                if equal != whole and len(bits) > causes.MIN_MASK_BYTES:
                    cause = causes.dropout_masks(whole, masks[0][0], rank)
                    return [self.finding("dropout", path, [rank], (1.0, 0.0), cause)]
        return []

    # --- labels and loss --------------------------------------------------------------------------

    def check_losses(self) -> list[Finding]:
        """Compares the number of labels and the loss of each micro-batch."""
        for source, (total, count) in self.truth.losses.items():
            found = self.recorded_loss(source)
            if found is None or not count or len(self.topology.targets(self.step, source)) != 1:
                continue
            mean, labels, rank = found
            shared = len(self.topology.peers(rank)) > 1 and labels < count
            if labels != count and not shared:
                size = (abs(labels - count) / count, 0.0)
                return [self.finding("labels", "", [rank], size, causes.label_count(round(labels), round(count)))]
            other = self.other.losses[source]
            noise = abs(other[0] / max(other[1], 1e-300) - total / count)
            limit = self.floors.loss + 8 * noise / max(abs(total / count), 1e-300)
            off = abs(mean - total / count) / max(abs(total / count), 1e-300)
            if not off <= limit and not shared:
                return [self.finding("loss", "", [rank], (off, limit), self._explain_loss(source))]
        return []

    def _explain_loss(self, source: Source) -> causes.Cause:
        labels = self.truth.batch_labels.get(source)
        targets = self.topology.targets(self.step, source)
        return causes.label_shift(targets[0][0], labels) if labels is not None and targets else causes.LOSS

    # --- gradients and update ---------------------------------------------------------------------

    def check_gradients(self) -> list[Finding]:
        """Compares the gradients before clipping."""
        floor = self.floors.gradient + DRIFT_FACTOR * max(self.drift.values(), default=0.0)
        case = GradientCase(self.topology, self.step, self.truth, self.other, self.floors._replace(gradient=floor))
        failing = case.compare(self.compared)
        return explain_gradients(case, failing) if failing else []

    def check_clipping(self) -> list[Finding]:
        """Compares the factor by which the gradients were clipped."""
        for rank in range(len(self.topology.traces)):
            step = self.topology.recorded(rank, self.step)
            if step.clip is None or not step.clipped or not step.gradients:
                continue
            rows = [(a, b) for a, b in zip(step.gradients, step.clipped, strict=True) if a >= 0 and b >= 0]
            before = add_norms([self.digest(rank, row) for row, _ in rows])
            after = add_norms([self.digest(rank, row) for _, row in rows])
            if not before:
                continue
            expected, factor = clip_factor(step.clip, self.truth.norm), after / before
            limit = max(self.floors.gradient, 1e-3)
            if abs(factor - expected) > limit * expected:
                cause = causes.wrong_clipping(step.clip, factor, expected, self.truth.norm)
                return [self.finding("clipping", "", [rank], (abs(factor / expected - 1), limit), cause)]
        return []

    def check_options(self) -> list[Finding]:
        """Compares the options of the optimizers of all ranks."""
        seen: dict[str, tuple[int, dict[str, Any]]] = {}
        for rank in range(len(self.topology.traces)):
            for optimizer in self.topology.recorded(rank, self.step).optimizers:
                for name, options in named_options(optimizer):
                    canonical = self.topology.canonical.get(name, name)
                    first, known = seen.setdefault(canonical, (rank, options))
                    for key in known.keys() & options.keys():
                        if known[key] != options[key]:
                            cause = causes.unequal_options(key, first, known[key], rank, options[key])
                            return [self.finding("options", name, [rank], (1.0, 0.0), cause)]
        return []

    def check_update(self) -> list[Finding]:
        """Compares the change of every weight, and the size of all changes of a rank."""
        if self.truth.after is None or self.other.after is None:
            return self._unequal_after()
        truth, other = _changes(self.truth), _changes(self.other)
        rounding = Rounding((truth[key], other[key]) for key in truth if float(truth[key][-1]) > 0)
        for rank in range(len(self.topology.traces)):
            along = size = 0.0
            for piece, change in self._recorded_changes(rank):
                key = (self.topology.canonical[piece.name], region_key(piece.region))
                norm = float(truth[key][-1])
                extra = self.floors.stored * float(self.truth.before[key][-1])
                flips = flipped(math.prod(local_shape(piece.region)), self.floors.flips)
                limit = rounding.limit(truth[key], other[key], self.floors.update + flips, extra)
                off = distance(change, truth[key])
                if norm <= 2 * extra:
                    continue
                if distance(truth[key], other[key]) < MAX_UPDATE_NOISE * norm:
                    along += float(change[:DIRECTIONS] @ truth[key][:DIRECTIONS])
                    size += float(truth[key][:DIRECTIONS] @ truth[key][:DIRECTIONS])
                unchanged = not float(change[-1]) and rounding.usual < MAX_UPDATE_LIMIT
                if unchanged or (off > limit and limit <= MAX_UPDATE_LIMIT * norm):
                    cause = self._explain_update(piece.name, rank, change, truth[key])
                    return [self.finding("update", piece.name, [rank], (off / norm, limit / norm), cause)]
                self.compared.updates += 1
                if limit <= MAX_UPDATE_LIMIT * norm:
                    self.compared.update = max(self.compared.update, off / norm)
            if size and abs(along / size - 1) > self.floors.step:
                cause = causes.scaled_update(along / size)
                return [self.finding("update", "", [rank], (abs(along / size - 1), self.floors.step), cause)]
        return []

    def _recorded_changes(self, rank: int) -> Iterator[tuple[RecordedPiece, Digest]]:
        """Yields the changes of the weights of a rank."""
        header = self.topology.traces[rank].header
        before = header.steps[self.step - 1].after if self.step else [piece.before for piece in header.pieces]
        for piece, first, row in zip(header.pieces, before, header.steps[self.step].after, strict=True):
            if row >= 0 and first >= 0 and piece.trains:
                change = self.digest(rank, row) - self.digest(rank, first)
                change[-1] = change[:DIRECTIONS].norm() / math.sqrt(DIRECTIONS)
                yield piece, change

    def _explain_update(self, name: str, rank: int, change: Digest, truth: Digest) -> causes.Cause:
        canonical = self.topology.canonical[name]
        names = {
            piece.name
            for trace in self.topology.traces
            for piece in trace.header.pieces
            if self.topology.canonical[piece.name] == canonical
        }
        return causes.explain_update(name, sorted(names - {name}), rank, change, truth)

    def _unequal_after(self) -> list[Finding]:
        """Compares the weights of replicas after the step, if one device cannot repeat the update."""
        seen: dict[tuple[str, Any], tuple[int, Digest]] = {}
        for rank, trace in enumerate(self.topology.traces):
            for piece, row in zip(trace.header.pieces, trace.header.steps[self.step].after, strict=True):
                if row < 0:
                    continue
                key = (self.topology.canonical[piece.name], region_key(piece.region))
                first, known = seen.setdefault(key, (rank, self.digest(rank, row)))
                off = distance(known, self.digest(rank, row)) / max(float(known[-1]), 1e-300)
                if off > max(self.floors.stored, 1e-5):
                    cause = causes.unequal_update(first, rank)
                    return [self.finding("update", piece.name, [rank], (off, self.floors.stored), cause)]
        return []


def _changes(reference: StepReference) -> dict[tuple[str, Any], Digest]:
    """Returns the changes of the weights on one device."""
    assert reference.after is not None
    found = {key: after - reference.before[key] for key, after in reference.after.items()}
    for change in found.values():
        change[-1] = change[:DIRECTIONS].norm() / math.sqrt(DIRECTIONS)
    return found


def add_norms(digests: list[Digest]) -> float:
    """Returns the norm of all tensors together."""
    return sum(float(each[-1]) ** 2 for each in digests) ** 0.5


def skeleton(tree: Any, path: str = "") -> set[str]:
    """Returns the names of all tensors in stored arguments."""
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return {path}
    items = content.items() if kind == "map" else enumerate(content) if kind in ("tuple", "list") else ()
    return {name for key, item in items for name in skeleton(item, f"{path}.{key}" if path else str(key))}


UPDATES_NOTE = Message(
    "the update is not repeated: its optimizer is not one of torch, or had states before the recording; later steps "
    "need "
    "tensors=True"
)
