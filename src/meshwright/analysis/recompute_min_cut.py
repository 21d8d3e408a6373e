"""Plans selective recompute by a minimum cut between the values that cannot be recomputed and the values that autograd
saves. `RematTape` (recompute_tape.py) records the values of a block and executes the plan.

[Note: minimum cut] From the saved storages, backward must be able to recompute every requested tensor. Of all sets of
storages that allow this, a minimum cut has the fewest bytes. The plan saves a minimum cut. If several cuts have equally
many bytes, it saves one with short chains of recomputed values. Inputs of the block, weights and buffers are resident
anyway and cost nothing. Source: H. He, Min-cut optimal recomputation with AOTAutograd, 2022. torch.compile applies this
method to compiled graphs. This module applies it to eager blocks, with one vertex for each storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import networkx  # type: ignore[import-untyped]
import torch

STEPS_PER_BYTE = 4096
"""Number of recompute steps that cost as much as one byte. It is so high that steps decide only between cuts with equal
bytes.
"""
MAX_CACHED_PLANS = 64
"""Maximum number of cached plans. Each distinct graph of a block has one plan."""

RematPlanCache = dict[Any, tuple[tuple[int, ...], dict[int, tuple[int, ...]]]]
"""Maps each graph of a block to its plan: the saved values, and the values to recompute for each requested value that
is not saved. A value is represented by its index in `ancestors_in_order`.
"""


class RematValue:
    """One storage in the forward of a block.

    - `function` made the storage from `args` and `kwargs`, in which a `StorageView` replaces each tensor. If it returns
      several tensors, `place` is the index of the tensor with this storage. `function` is None if the storage cannot be
      recomputed.
    - `free`: whether the storage is resident anyway, as a block input, a weight or a buffer.
    - `entered`: whether the storage is an input of the block.
    - `gathered`: whether the storage is a weight that ZeRO 3 frees and later fills with the same values again.
    - `saved` is the result of saving the storage, None if it is not saved.
    - `recomputed` is the recomputed tensor. `pending_tensors` is the number of saved tensors that still need it.
    - `pending_values` is the number of recomputed values that still read the storage.
    """

    __slots__ = (
        "args",
        "entered",
        "free",
        "function",
        "gathered",
        "kwargs",
        "nbytes",
        "pending_tensors",
        "pending_values",
        "place",
        "probe",
        "recomputed",
        "saved",
        "sources",
        "storage",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, free: bool = False, entered: bool = False, gathered: bool = False) -> None:
        storage = tensor.untyped_storage()
        self.storage, self.nbytes = weakref.ref(storage), storage.nbytes()
        self.free, self.entered, self.gathered = free, entered, gathered
        self.probe, self.version = version_probe_of(tensor), tensor._version
        self.drop_function()
        self.saved: Any = None
        self.recomputed: torch.Tensor | None = None
        self.pending_tensors = self.pending_values = 0

    def drop_function(self) -> None:
        """Marks the value as not recomputable."""
        self.function: Any = None
        self.args: Any = ()
        self.kwargs: Any = {}
        self.place, self.sources = 0, list[StorageView]()

    @property
    def reads(self) -> dict[RematValue, None]:
        """Returns the distinct values from which this value is computed."""
        return {view.value: None for view in self.sources}

    @property
    def is_written(self) -> bool:
        """Returns whether the storage was written to since the tape first saw it (or since it was saved, if it was)."""
        return self.probe._version != self.version

    @property
    def is_recomputable(self) -> bool:
        """Returns whether the storage can be recomputed: its function is known, and neither the storage nor the inputs
        of the function were written to since.
        """
        return (
            self.function is not None
            and not self.is_written
            and all(view.version == view.value.probe._version for view in self.sources)
        )

    @property
    def is_resident(self) -> bool:
        """Returns whether the storage is in memory even if it is not saved."""
        return self.free and self.storage() is not None


class StorageView(NamedTuple):
    """Describes a tensor as a view of the storage of a value. `version` is the version counter of the storage when the
    tensor was read.
    """

    value: RematValue
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    version: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this view, applied to the storage of the tensor `whole`."""
        part: Any = torch.empty(0, dtype=self.dtype, device=whole.device)
        return part.set_(whole.untyped_storage(), self.offset, self.size, self.stride)  # type: ignore[no-any-return]


class RematPlan(NamedTuple):
    """A plan for one block. `saved` are the values to save. `needed` are resident values that must stay referenced.
    `recomputed` are the values to recompute, in the order in which they were made.

    `recomputed_for` maps each requested value that is not saved to the values to recompute for it.
    """

    saved: list[RematValue]
    needed: list[RematValue]
    recomputed: list[RematValue]
    recomputed_for: dict[RematValue, list[RematValue]]


def plan_remat(requested: dict[RematValue, None], cuts: RematPlanCache, stay: Collection[RematValue] = ()) -> RematPlan:
    """Returns the plan that makes all values in `requested` available to backward ([Note: minimum cut]).

    `cuts` caches plans. Values in `stay` are not recomputed, even if they could be.
    """
    order = ancestors_in_order(requested)
    number = {value: at for at, value in enumerate(order)}
    form = tuple(
        (
            *(
                value.function,
                value.nbytes,
                value.is_resident,
                value in requested,
                value.is_recomputable and value not in stay,
                value.storage() is None,
            ),
            *(number[view.value] for view in value.sources),
        )
        for value in order
    )
    if form not in cuts:
        if len(cuts) >= MAX_CACHED_PLANS:
            cuts.clear()
        least = {order[at] for at in _min_cut(order, requested, stay)}
        made = {
            number[value]: tuple(number[each] for each in ancestors_in_order([value], least) if each not in least)
            for value in requested
            if value not in least
        }
        cuts[form] = tuple(number[value] for value in order if value in least), made
    saved = [order[at] for at in cuts[form][0]]
    of = {
        order[at]: [order[each] for each in taken if not order[each].is_resident] for at, taken in cuts[form][1].items()
    }
    taken = sorted({each for group in cuts[form][1].values() for each in group})
    needed, remade = ([order[at] for at in taken if order[at].is_resident is there] for there in (True, False))
    return RematPlan(saved, needed, remade, of)


def ancestors_in_order(requested: Iterable[RematValue], known: Collection[RematValue] = ()) -> list[RematValue]:
    """Returns `requested` and all values from which they are computed, each after its sources. The search stops at
    `known` and at resident values.
    """
    found: dict[RematValue, None] = {}
    ahead = [*requested][::-1]
    while ahead:
        value = ahead[-1]
        sources = (
            []
            if value.is_resident or value in known
            else [view.value for view in value.sources if view.value not in found]
        )
        if sources and value not in found:
            ahead += sources[::-1]
        else:
            found[ahead.pop()] = None
    return [*found]


def _min_cut(
    order: list[RematValue], requested: Collection[RematValue], stay: Collection[RematValue]
) -> tuple[int, ...]:
    """Returns the indices in `order` of the values to save."""
    remade = {value for value in order if value.is_recomputable and value not in stay}
    steps = dict.fromkeys(order, 0)
    for value in reversed(order):
        for view in value.sources:
            steps[view.value] = max(steps[view.value], steps[value] + 1)
    graph = networkx.DiGraph()
    graph.add_nodes_from(("start", "end"))
    for at, value in enumerate(order):
        if value.is_resident:
            continue
        size = {} if value.storage() is None else {"capacity": value.nbytes * STEPS_PER_BYTE + steps[value]}
        graph.add_edge((at, "made"), (at, "used"), **size)
        if value not in remade:
            graph.add_edge("start", (at, "made"))
        for source in {view.value for view in value.sources} if value in remade else ():
            if not source.is_resident:
                graph.add_edge((order.index(source), "used"), (at, "made"))
        if value in requested:
            graph.add_edge((at, "used"), "end")
    before, _ = networkx.minimum_cut(graph, "start", "end")[1]
    return tuple(at for at in range(len(order)) if (at, "made") in before and (at, "used") not in before)


def version_probe_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor with the version counter of `tensor`, which shows later writes to it."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe
