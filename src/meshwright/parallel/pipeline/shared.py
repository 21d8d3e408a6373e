"""Parameters that several stages compute with (holding.py): each stage has a copy of its own, also where one rank runs several stages, so that the
gradients of each are whole when its backward is, and are summed over the copies once a step.

A rank runs one stage at a time: before each pass the copies of the running stage stand where the model reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from meshwright.parallel.exchange.group import Group
from meshwright.parallel.mesh import Mesh, tie_group
from meshwright.parallel.place import Layer, copy_of


@dataclass
class Shared:
    """`copies` of this rank, by stage and name; `places` of each name: modules and the names that they know it by."""

    copies: dict[int, dict[str, nn.Parameter]] = field(default_factory=dict)
    places: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, table: Sequence[Layer], stages: Sequence[int]) -> Shared:
        """Of a rank that runs `stages`. The first of them that holds a parameter has the model's own."""
        found = cls()
        own: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        for layer in table:
            here = [stage for stage in stages if layer.also and stage in layer.stages]
            for name in layer.parameters if len(here) > 1 else ():
                first = own[name]
                found.places[name] = [
                    (module, key) for module in model.modules() for key, held in module._parameters.items() if held is first
                ]
                for stage in here:
                    found.copies.setdefault(stage, {})[name] = first if stage == here[0] else copy_of(first, first.detach())
        return found

    def add(self, stage: int, copies: Mapping[str, nn.Parameter]) -> None:
        """Copies of `stage` that stand where only it reads them."""
        self.copies.setdefault(stage, {}).update(copies)

    def put(self, stage: int) -> None:
        """Before a pass of `stage`."""
        for name, copy in self.copies.get(stage, {}).items():
            for module, key in self.places.get(name, ()):
                module._parameters[key] = copy


def ties_of(mesh: Mesh, several: Collection[tuple[int, ...]]) -> dict[tuple[int, ...], Group | None]:
    """The pipeline ranks that hold what several stages share, by these stages: the first's and the last's, all, or this one alone. All ranks call it."""
    plan = mesh.plan
    ends = tie_group(mesh) if (0, plan.stages - 1) in several else None
    found: dict[tuple[int, ...], Group | None] = {}
    for stages in several:
        ranks = {plan.rank_of(stage) for stage in stages}
        found[stages] = None if len(ranks) == 1 else ends if stages == (0, plan.stages - 1) else mesh.group("pp")
    return found
