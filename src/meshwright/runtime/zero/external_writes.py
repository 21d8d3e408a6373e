"""What the user's code writes to parameters between two steps (`with torch.no_grad(): p.clamp_(-1, 1)`): equal to one
device, or refused.

Under ZeRO 0 to 2 a parameter is a view of the compute weights, so the passes of the next step read what was written.
The update reads the masters, and
under ZeRO 1 and 2 each rank updates its shard alone. So before the update each rank takes the written elements of its
shard over into its masters.

| written | outcome |
|---|---|
| a whole parameter, alike on every rank | equal: masters take over every element that is not their own rounding |
| a whole parameter, unlike on some rank | refused |
| under tensor or expert parallelism a parameter of which this rank holds a part, under pipelines any | refused: the value may depend on elements of other ranks |
| through `.data`, which no version counts, where masters exist | refused before steps 1, 2, 3, 10, 100 and 1000 (preflight.py), where weights and masters are compared |
| under ZeRO 3 | refused where it is written (closed.py) |

Cost: one comparison of version numbers (`Tensor._version`) a parameter and step. Whether any rank has written goes with
the reduction of the sentinel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from meshwright.core.errors import InputError
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.error_propagation import gather_objects
from meshwright.runtime.zero.param_group import FlatParamGroup, param_shard_range

if TYPE_CHECKING:
    from meshwright.runtime.engine import Engine

FULL_PARAMETERS_HINT = "write to it on every rank alike inside `with trainer.full_parameters(write=True)`"


class WrittenSlice(NamedTuple):
    """Elements of parameter `name` that this rank updates: their masters, their compute weights, and where these are no
    rounding of the masters."""

    name: str
    main_params: torch.Tensor
    weights: torch.Tensor
    written: torch.Tensor


class ExternalWrites:
    """Of one rank. `names`: parameters that the user's code has written to since the last update, in the order of the
    units."""

    def __init__(self, units: Sequence[FlatParamGroup]) -> None:
        open_ones = [unit for unit in units if unit.zero_stage < 3]
        self._parameters = [each for unit in open_ones for each in unit.parameters.items()]
        self._masters = [unit for unit in open_ones if unit.has_main_params]
        self._inside = False
        self.names: dict[str, None] = {}
        self.record_versions()

    def record_versions(self) -> None:
        """Every version until now is known."""
        self._versions = [parameter._version for _, parameter in self._parameters]

    def detect(self) -> None:
        """Add to `names` what was written since versions were recorded."""
        for (name, parameter), before in zip(self._parameters, self._versions, strict=True):
            if parameter._version != before:
                self.names[name] = None

    @contextmanager
    def internal_writes(self, inner: AbstractContextManager[None] | None = None) -> Iterator[None]:
        """Writes inside are the trainer's own, those before it the user's. `inner` is entered too."""
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
        """Whether ranks must meet in `take` before the update, as far as this rank knows. `compares`: weights and
        masters too."""
        return bool(self.names) or (compares and any(run.written.any() for run in self._runs()))

    def sync(self, engine: Engine) -> None:
        """Before masters are read or written by something else than an update. Every rank calls it. Raises InputError
        as `take`."""
        if not self._inside:
            self.detect()
            self.record_versions()
        due = torch.tensor(float(bool(self.names)), dtype=torch.float64, device=engine.mesh.device)
        all_reduce(due, engine.mesh.world).wait()
        if float(due):
            self.apply(engine)

    @torch.no_grad()
    def apply(self, engine: Engine) -> None:
        """Take the written elements over into the masters. Every rank calls it. Raises InputError on every rank as the
        table says."""
        names = list(dict.fromkeys(name for each in gather_objects(list(self.names)) for name in each))
        held = dict(self._parameters)
        plan, replica = engine.mesh.plan, 0 if engine.outer is None else engine.outer.replica
        sums = {name: tensor_checksum(held[name].detach()) for name in names if name in held}
        parts = [name for name in names if name in held and held[name].shape != engine.shapes[name]]
        past = next((run.name for run in self._runs() if run.name not in names and run.written.any()), "")
        found = gather_objects((replica, sums, parts, past))
        for name in names:
            if plan.pp > 1 or any(name in each for _, _, each, _ in found):
                raise InputError(
                    f"plan {plan.name}: {name} was written to between steps, and no rank holds the whole model, so that the value may be another than on one "
                    f"device: {FULL_PARAMETERS_HINT}"
                )
            for rank, (other, theirs, _, _) in enumerate(found):
                first = next(at for at, each in enumerate(found) if each[0] == other)
                if theirs[name] != found[first][1][name]:
                    raise InputError(
                        f"plan {plan.name}: {name} was written to between steps in another way on rank {rank} than on rank {first}: {FULL_PARAMETERS_HINT}"
                    )
        name = next((past for _, _, _, past in found if past), "")
        if name:
            raise InputError(
                f"plan {plan.name}: {name} was written to through .data or by another way around torch's versions, so that its {engine.recipe.master} master "
                f"weights do not have the change and the update would undo it: write to the parameter itself under torch.no_grad(), or {FULL_PARAMETERS_HINT}"
            )
        for run in self._runs():
            run.main_params.copy_(torch.where(run.written, run.weights.to(run.main_params.dtype), run.main_params))
        self.names = {}

    def _runs(self) -> Iterator[WrittenSlice]:
        for unit in self._masters:
            own, first = unit.weights[unit.shard_range], 0
            for part in unit.optim_shard.parts:
                last = first + len(part)
                for name in unit.layout.offsets:
                    run = param_shard_range(unit, name)
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
    """Shape, and the sum of the bits of all elements."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(tensor.element_size(), 8)]
    return tuple(tensor.shape), int(tensor.detach().contiguous().view(-1).view(bits).sum(dtype=torch.int64))
