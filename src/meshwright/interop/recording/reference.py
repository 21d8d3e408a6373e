"""Repeats recorded steps on one device.

Each micro-batch of each replica runs through the full model with the recorded inputs, random state and dropout masks.
The loss of a step is the sum of all micro-batches' losses divided by the number of all their valid labels. This is what
one device computes for the whole batch, except for layers that depend on other rows, such as batch norm: these see the
rows of one micro-batch, as in the recording.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.recording.digest import Digest, Digester
from meshwright.interop.recording.intercept import observe
from meshwright.interop.recording.layout import region_key, slice_region
from meshwright.interop.recording.loaded import LoadedModel
from meshwright.interop.recording.optimizer import OptimizerReplay
from meshwright.interop.recording.topology import OutputNeed, RecordedTopology, Source
from meshwright.interop.recording.tree import first_tensor
from meshwright.train.proof.reference_run import use_float64

LossFunction = Callable[[Any, dict[str, Any]], Any]
"""A loss of the model's output and the batch: a mean over the valid labels, or the pair (sum, number of labels)."""


NORMALIZERS = frozenset({"num_items_in_batch"})
"""Arguments by which a model of transformers divides the sum of its losses. Without them it returns the mean."""


class SliceDigest(NamedTuple):
    """The digest of a part of a full tensor. `part` is the index of a chunk, or 0."""

    part: int
    digest: Digest


class OutputSlices(NamedTuple):
    """The candidates for one local tensor. `exact`: whether the slice of the rank is known. `bias`: the digest of the
    module's bias, expanded to the output."""

    exact: bool
    outputs: list[SliceDigest]
    gradients: list[SliceDigest]
    bias: Digest | None
    partial: Digest | None


@dataclass
class StepReference:
    """One step on one device. Gradients are those of the sum of losses, by source, parameter and region."""

    order: list[tuple[str, int]] = field(default_factory=list)
    outputs: dict[tuple[Source, str, int, OutputNeed], OutputSlices] = field(default_factory=dict)
    losses: dict[Source, tuple[float, float]] = field(default_factory=dict)
    gradients: dict[tuple[Source, str, Any], Digest] = field(default_factory=dict)
    batch_labels: dict[Source, torch.Tensor] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    norm: float = 0.0
    before: dict[tuple[str, Any], Digest] = field(default_factory=dict)
    after: dict[tuple[str, Any], Digest] | None = None

    @property
    def labels(self) -> float:
        """Returns the number of valid labels of the step."""
        return sum(count for _, count in self.losses.values())

    @property
    def loss(self) -> float:
        """Returns the mean loss over the valid labels of the step."""
        return sum(total for total, _ in self.losses.values()) / max(self.labels, 1e-300)


class Precision(NamedTuple):
    """How one device computes: the dtype of the weights, of autocast ('' for none), and whether the weights are changed
    by one rounding, which measures rounding."""

    weights: torch.dtype
    autocast: str = ""
    perturbed: bool = False


class OneDevice:
    """Runs the recorded steps in one precision, in order."""

    def __init__(
        self, topology: RecordedTopology, loaded: LoadedModel, loss: LossFunction | None, precision: Precision
    ) -> None:
        self.topology, self.loss, self.precision = topology, loss, precision
        self.loaded = loaded
        self.model = loaded.build(precision.weights)
        if precision.perturbed:
            _perturb(self.model)
        if precision.weights == torch.float64:
            use_float64(self.model)
        self.digest = Digester()
        self.names = loaded.names(self.model)
        self.update = OptimizerReplay(topology, self.names)
        self.now = StepReference()
        self.observer = ReplayObserver()
        self.weights: list[dict[str, torch.Tensor]] = []
        """The weights before the last two steps, the older first."""

    def run(self, step: int) -> StepReference:
        """Runs step `step` and the update after it."""
        self.now = StepReference()
        stored = self.loaded.load(self.model, step, self.precision.weights)
        if stored and self.precision.perturbed:
            _perturb(self.model)
        self.weights = [*self.weights[-1:], {name: each.detach().clone() for name, each in self.names.items()}]
        regions = self.topology.regions()
        self.now.before = self._weights(regions)
        totals: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            for path, module in [("", self.model), *((p, m) for p, m in self.model.named_modules() if p)]:
                stack.callback(module.register_forward_hook(self._hook(path, step)).remove)
            stack.enter_context(observe(self.observer))
            for source in self.topology.sources(step):
                self._run_source(step, source, regions, totals)
        scale = 1 / max(self.now.labels, 1e-300)
        self.now.norm = float(
            torch.stack([total.double().norm() for total in totals.values()] or [torch.zeros(())]).norm() * scale
        )
        if self.update.step(step, totals, scale, self.now.norm):
            self.now.after = self._weights(regions)
        return self.now

    def _weights(self, regions: Mapping[str, Any]) -> dict[tuple[str, Any], Digest]:
        return {
            (name, region_key(region)): self.digest(slice_region(self.names[name].detach(), region))
            for name, each in regions.items()
            for region in each
        }

    # --- one micro-batch --------------------------------------------------------------------------

    def _run_source(
        self, step: int, source: Source, regions: Mapping[str, Any], totals: dict[str, torch.Tensor]
    ) -> None:
        args, kwargs = self.arguments(step, source)
        batch = self._batch(source, step, args, kwargs)
        if isinstance(labels := batch.get("labels"), torch.Tensor):
            self.now.batch_labels[source] = labels
        self.calls: dict[str, int] = defaultdict(int)
        self.source = source
        self.start(step, source)
        for parameter in self.names.values():
            parameter.grad = None
        kind = next(iter(self.names.values())).device.type
        dtype = getattr(torch, self.precision.autocast) if self.precision.autocast else None
        with torch.autocast(kind, dtype, enabled=dtype is not None), torch.enable_grad():
            output = self.model(*args, **kwargs)
            total, count = self._loss(output, batch, step, source)
        self.now.losses[source] = (float(total.detach()), count)
        if total.requires_grad:
            total.backward()
        for name, each in regions.items():
            gradient = self.names[name].grad
            if gradient is None:
                continue
            self.now.reached.add(name)
            totals[name] = gradient + totals[name] if name in totals else gradient
            for region in each:
                found = self.digest(slice_region(gradient, region))
                self.now.gradients[source, name, region_key(region)] = found

    def arguments(self, step: int, source: Source) -> tuple[Any, Any]:
        """Returns the recorded arguments of the model for a micro-batch, in the precision of this device."""
        args, kwargs = self._cast(self.topology.arguments(step, source))
        for name in NORMALIZERS & kwargs.keys():
            kwargs[name] = None
        return args, kwargs

    def start(self, step: int, source: Source) -> None:
        """Restores the random state and the dropout masks of a micro-batch."""
        torch.set_rng_state(self.topology.traces[source.rank].tensor(self.topology.micro_batch(step, source).random))
        self.observer.begin(lambda number, given: self.topology.mask(step, source, number, given.shape))

    def _cast(self, value: Any) -> Any:
        dtype = torch.float64 if self.precision.weights == torch.float64 else None
        if self.precision.weights in (torch.bfloat16, torch.float16):
            dtype = self.precision.weights
        return torch.utils._pytree.tree_map(
            lambda each: (
                each.to(dtype or torch.float32) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
            ),
            value,
        )

    def _batch(self, source: Source, step: int, args: Any, kwargs: Any) -> dict[str, Any]:
        positional = [
            name
            for name, each in inspect.signature(type(self.model).forward).parameters.items()
            if each.kind < each.VAR_POSITIONAL
        ][1:]
        batch: dict[str, Any] = dict(zip(positional, args, strict=False)) | dict(kwargs)
        batch |= self._cast(self.topology.extra(step, source))
        return batch

    def _loss(self, output: Any, batch: dict[str, Any], step: int, source: Source) -> tuple[torch.Tensor, float]:
        """Returns the sum of the losses over the valid labels, and the number of these labels."""
        rows = float(next((len(each) for each in batch.values() if isinstance(each, torch.Tensor) and each.ndim), 1))
        if self.loss is not None:
            found = self.loss(output, batch)
            if isinstance(found, tuple):
                return found[0], float(found[1])
            labels = batch.get("labels")
            valid = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
            count = float((labels != -100).sum()) if valid else rows  # type: ignore[union-attr]
            return found * count, self.observer.labels or count
        own = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if isinstance(own, torch.Tensor) and own.numel() == 1:
            count = self.observer.labels or rows
            return own.reshape(()) * count, count
        targets = self.topology.targets(step, source)
        logits = first_tensor(output)
        if not targets or logits is None:
            raise InputError(
                Message(
                    "recording: no loss is known: the model returns none, and torch's cross entropy was not called; "
                    "give the "
                    "loss as --loss FILE.py:function or loss="
                )
            )
        return _cross_entropy(logits, *targets[0])

    # --- module outputs ---------------------------------------------------------------------------

    def _hook(self, path: str, step: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is None:
                return
            call = self.calls[path]
            self.calls[path] += 1
            if (path, call) not in self.now.order:
                self.now.order.append((path, call))
            for need in self.topology.needs(step).get((path, call), ()):
                exact, slices = self.slices(tensor.detach(), need)
                bias, partial = self._bias(module, tensor, need)
                found = OutputSlices(
                    exact, [SliceDigest(part, self.digest(each)) for part, each in slices], [], bias, partial
                )
                self.now.outputs[self.source, path, call, need] = found
                if tensor.requires_grad and slices:
                    tensor.register_hook(self._gradient_hook(found, need))

        return hook

    def slices(self, full: torch.Tensor, need: OutputNeed) -> tuple[bool, list[tuple[int, torch.Tensor]]]:
        """Returns the candidates for a local output, of the part of the sequence that its rank has."""
        return candidates(self.topology.sequences.local_part(need.part_of, full, need.shape), need)

    def _bias(self, module: nn.Module, tensor: torch.Tensor, need: OutputNeed) -> tuple[Digest | None, Digest | None]:
        bias = getattr(module, "bias", None)
        if not isinstance(bias, torch.Tensor) or bias.ndim != 1 or not tensor.ndim or tensor.shape[-1] != len(bias):
            return None, None
        slices = self.slices(bias.detach().expand_as(tensor), need)[1]
        return (self.digest(slices[0][1]) if slices else None), None

    def _gradient_hook(self, found: OutputSlices, need: OutputNeed) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            found.gradients[:] = [
                SliceDigest(part, self.digest(each)) for part, each in self.slices(gradient.detach(), need)[1]
            ]

        return hook


class ReplayObserver:
    """Counts the labels of cross entropy, and applies recorded dropout masks."""

    def __init__(self) -> None:
        self.labels, self.number = 0.0, 0
        self.mask: Callable[[int, torch.Tensor], torch.Tensor | None] = lambda number, given: None

    def begin(self, mask: Callable[[int, torch.Tensor], torch.Tensor | None]) -> None:
        """Begins a micro-batch, whose dropouts have the masks `mask(number, input)`."""
        self.labels, self.number, self.mask = 0.0, 0, mask

    def dropout(self, given: torch.Tensor, output: torch.Tensor, rate: float) -> torch.Tensor:
        """Returns the output with the recorded mask."""
        mask = self.mask(self.number, given)
        self.number += 1
        return output if mask is None else given * mask.to(given) / (1 - rate)

    def cross_entropy(self, loss: torch.Tensor, call: dict[str, Any]) -> None:
        """Counts the valid labels."""
        target = call["target"]
        self.labels += float(
            len(target) if target.is_floating_point() else (target != call.get("ignore_index", -100)).sum()
        )

    def backward(self, root: torch.Tensor) -> None:
        """Does nothing: the backward is that of this module."""

    def clip(self, max_norm: float, before: bool) -> None:
        """Does nothing: nothing is clipped here."""

    def pause(self, paused: bool) -> None:
        """Does nothing: no shapes are inferred here."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer, before: bool) -> None:
        """Does nothing: the update is that of this module."""


def candidates(full: torch.Tensor, need: OutputNeed) -> tuple[bool, list[tuple[int, torch.Tensor]]]:
    """Returns the parts of `full` that a local tensor of the needed shape may be, and whether the part is certain. No
    part is returned if none matches."""
    shape = need.shape
    if need.region is not None:
        found = slice_region(full, need.region) if tuple(full.shape) == need.region.shape else None
        return True, [(0, found)] if found is not None and tuple(found.shape) == shape else []
    if need.features and tuple(full.shape[:-1]) == shape[:-1]:
        if full.shape[-1] == shape[-1]:
            return True, [(0, full)]
        found = torch.cat([full[..., start:end] for start, end in need.features], -1)
        return True, [(0, found)] if tuple(found.shape) == shape else []
    if full.numel() == torch.Size(shape).numel():
        return True, [(0, full)]
    if full.ndim != len(shape):
        return False, []
    different = [dim for dim in range(full.ndim) if full.shape[dim] != shape[dim]]
    if len(different) != 1 or not shape[different[0]] or full.shape[different[0]] % shape[different[0]]:
        return False, []
    return False, list(enumerate(full.split(shape[different[0]], different[0])))


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignored: int, smoothing: float
) -> tuple[torch.Tensor, float]:
    classes = logits.shape[-1]
    if target.is_floating_point():
        return F.cross_entropy(logits, target.to(logits), reduction="sum", label_smoothing=smoothing), float(
            len(target)
        )
    flat = target.reshape(-1)
    rows = logits.reshape(-1, classes)
    if len(rows) != len(flat) and logits.ndim == 3 and len(logits) * (logits.shape[1] - 1) == len(flat):
        rows = logits[:, :-1].reshape(-1, classes)
    if len(rows) != len(flat):
        raise InputError(
            Message(
                "recording: the {rows} rows of logits do not fit the {labels} recorded labels; give the loss as --loss "
                "FILE.py:function or loss=",
                rows=len(rows),
                labels=len(flat),
            )
        )
    total = F.cross_entropy(
        rows.to(torch.promote_types(rows.dtype, torch.float32)),
        flat,
        ignore_index=ignored,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total, float((flat != ignored).sum())


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            signs = torch.randint(0, 2, parameter.shape, generator=random).mul_(2).sub_(1)
            parameter.mul_(1 + signs.to(parameter) * torch.finfo(parameter.dtype).eps)
