"""Detects writes of the user's code to parameters between two steps (`with torch.no_grad(): p.clamp_(-1, 1)`). If the
training result after the write could differ from that of one device, the write is refused. The trainer calls the checks
in each step (train/step/invariants.py).

Under ZeRO 0 to 2 a parameter is a view of the compute weights, so the next step's forward reads the written values. But
the update reads the main weights, and under ZeRO 1 and 2 each rank updates only its shard. So before the update each
rank copies the written elements of its shard into its main weights.

| write | outcome |
|---|---|
| to a full parameter, with the same values on every rank | accepted: the written elements replace their main weights |
| to a full parameter, with different values on some ranks | refused |
| to a sharded parameter (TP, EP), or to any parameter under pipelines | refused: the value may depend on other ranks |
| through `.data`, if there are main weights | refused before steps 1, 2, 3, 10, 100 and 1000 (preflight) |
| a parameter gets another storage (`model.to("cpu:0")`, `parameter.data = other`) | refused |
| under ZeRO 3 | refused at the write itself (shard/access_guard.py) |

Cost: one comparison of version numbers (`Tensor._version`) and one of addresses per parameter and step, 0.3 us. Each
rank sets a flag if its parameters were written to. The flags are summed in the reduction that also sums the loss and
the gradient norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.precision import Recipe

FULL_PARAMETERS_HINT = "write to it on every rank alike inside `with trainer.full_parameters(write=True)`"


class WritableEngine(Protocol):
    """The attributes of an engine that `ExternalWrites` reads."""

    @property
    def mesh(self) -> ParallelContext:
        """Returns the parallel context."""

    @property
    def recipe(self) -> Recipe:
        """Returns the precision recipe."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Returns the full shape of each parameter by name."""

    @property
    def outer(self) -> Any:
        """Returns the outer optimizer of DiLoCo, or None."""


class WrittenSlice(NamedTuple):
    """The elements of the parameter `name` that this rank updates. `main_params` and `weights` are the main and the
    compute weights of these elements. `written` is a mask of the compute weights that differ from the rounded main
    weights."""

    name: str
    main_params: torch.Tensor
    weights: torch.Tensor
    written: torch.Tensor


class ExternalWrites:
    """Tracks external writes on one rank: writes by the user's code. `names` are the parameters that were written since
    the last update."""

    def __init__(self, units: Sequence[FlatParamGroup]) -> None:
        unsharded = [unit for unit in units if unit.layout.zero_stage < 3]
        self._parameters = [each for unit in unsharded for each in unit.parameters.items()]
        self._unsharded = unsharded
        self._masters = [unit for unit in unsharded if unit.has_main_params]
        self._inside = False
        self.names: dict[str, None] = {}
        self.record_versions()

    def record_versions(self) -> None:
        """Records the current version of every parameter."""
        self._versions = [parameter._version for _, parameter in self._parameters]

    def forget(self) -> None:
        """Discards all recorded writes. Called after a checkpoint has replaced all weights."""
        self.names = {}

    def detect(self) -> None:
        """Adds to `names` the parameters that were written since `record_versions`.

        Raises:
            InputError: a parameter has a storage of its own now, which no update reaches.
        """
        for (name, parameter), before in zip(self._parameters, self._versions, strict=True):
            if parameter._version != before:
                self.names[name] = None
        for unit in self._unsharded:
            first, end = unit.weights.address_range
            with torch._C.DisableTorchFunctionSubclass():  # an address needs no values
                places = {name: parameter.data_ptr() for name, parameter in unit.parameters.items()}
            for name, parameter in unit.parameters.items():
                if not first <= places[name] < end and parameter.numel():
                    raise InputError(
                        Message(
                            "{name} was replaced after parallelize (model.to, .cuda, .half, or an assignment to "
                            ".data), so updates would not reach it: convert the model before parallelize, and write "
                            "values with copy_ inside `with trainer.full_parameters(write=True)`",
                            name=name,
                        )
                    )

    @contextmanager
    def internal_writes(self, inner: AbstractContextManager[None] | None = None) -> Iterator[None]:
        """Inside the context, writes do not count as external. Earlier external writes are detected on entry. Also
        enters the context `inner`."""
        outermost, self._inside = not self._inside, True
        if outermost:
            self.detect()
        try:
            with inner or nullcontext():
                yield
        finally:
            if outermost:
                self._inside = False
                self.record_versions()

    def is_due(self, compares: bool) -> bool:
        """Returns whether a write on this rank requires `apply` before the update. `compares`: whether to also compare
        main weights with the compute weights, which detects writes through `.data`."""
        return bool(self.names) or (compares and any(run.written.any() for run in self._runs()))

    def sync(self, engine: WritableEngine) -> None:
        """Applies external writes. Every rank must call this method before other code reads or writes main weights
        outside of an update. Raises InputError if a write is refused."""
        if not self._inside:
            self.detect()
            self.record_versions()
        due = torch.tensor(float(bool(self.names)), dtype=torch.float64, device=engine.mesh.device)
        all_reduce(due, engine.mesh.world).wait()
        if float(due):
            self.apply(engine)

    @torch.no_grad()
    def apply(self, engine: WritableEngine) -> None:
        """Copies the written elements into the main weights. Every rank must call this method. If a write is refused,
        every rank raises InputError."""
        names = list(dict.fromkeys(name for each in gather_objects(list(self.names)) for name in each))
        parameters = dict(self._parameters)
        plan, replica = engine.mesh.plan, 0 if engine.outer is None else engine.outer.replica
        sums = {name: tensor_checksum(parameters[name].detach()) for name in names if name in parameters}
        parts = [name for name in names if name in parameters and parameters[name].shape != engine.shapes[name]]
        bypassed = next((run.name for run in self._runs() if run.name not in names and run.written.any()), "")
        reports = gather_objects((replica, sums, parts, bypassed))
        for name in names:
            if plan.pp > 1 or any(name in each for _, _, each, _ in reports):
                raise InputError(
                    Message(
                        "plan {plan}: {name} was written to between steps, but no rank holds the whole model, so the "
                        "value may differ from that on one device: {full_parameters_hint}",
                        plan=plan.name,
                        name=name,
                        full_parameters_hint=FULL_PARAMETERS_HINT,
                    )
                )
            for rank, (other, checksums, _, _) in enumerate(reports):
                first = next(at for at, each in enumerate(reports) if each[0] == other)
                if checksums[name] != reports[first][1][name]:
                    raise InputError(
                        Message(
                            "plan {plan}: {name} was written to between steps differently on rank {rank} than on "
                            "rank {first}: {full_parameters_hint}",
                            plan=plan.name,
                            name=name,
                            rank=rank,
                            first=first,
                            full_parameters_hint=FULL_PARAMETERS_HINT,
                        )
                    )
        name = next((bypassed for _, _, _, bypassed in reports if bypassed), "")
        if name:
            raise InputError(
                Message(
                    "plan {plan}: {name} was written to through .data or in another way that torch's version "
                    "counters do not see, so its {master} main weights do not contain the change, and the next "
                    "update would undo it: write to the parameter itself under torch.no_grad(), or "
                    "{full_parameters_hint}",
                    plan=plan.name,
                    name=name,
                    master=engine.recipe.master,
                    full_parameters_hint=FULL_PARAMETERS_HINT,
                )
            )
        for run in self._runs():
            run.main_params.copy_(torch.where(run.written, run.weights.to(run.main_params.dtype), run.main_params))
        self.names = {}

    def _runs(self) -> Iterator[WrittenSlice]:
        for unit in self._masters:
            own, first = unit.weights.full[unit.shard_range], 0
            for part in unit.optim_shard.parts:
                last = first + len(part)
                for name in unit.layout.offsets:
                    run = unit.layout.shard_slice(name)
                    start, stop = max(run.start, first), min(run.stop, last)
                    if start < stop:
                        master, weights = (
                            part[start - first : stop - first].detach(),
                            own[start:stop].detach().to(part.device),
                        )
                        same = torch.isclose(weights, master.to(weights.dtype), rtol=0, atol=0, equal_nan=True)
                        yield WrittenSlice(name, master, weights, ~same)
                first = last


def tensor_checksum(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Returns the shape of the tensor, and the sum of its elements, with the bits of each element read as an
    integer."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(tensor.element_size(), 8)]
    return tuple(tensor.shape), int(tensor.detach().contiguous().view(-1).view(bits).sum(dtype=torch.int64))
