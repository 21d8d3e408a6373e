"""Plans selective recompute: the smallest cut between what cannot be recomputed and what autograd asks to save.

[Note: least bytes] What is saved is a minimum cut: of all sets of storages from which every requested tensor can be
recomputed, the one of fewest bytes; of equal ones the one that leaves least to recompute. Inputs of the block, weights
and buffers are resident anyway and cost nothing. Source: what torch.compile does for compiled graphs (H. He, Min-cut
optimal recomputation with AOTAutograd, 2022), here for eager blocks, with one vertex for each storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import networkx  # type: ignore[import-untyped]
import torch

STEPS_PER_BYTE = 4096
"""Steps of recomputation that count as much as a byte: they decide between cuts of equal bytes."""
MAX_CACHED_PLANS = 64
"""Forms of blocks whose plans are cached."""

RematPlanCache = dict[Any, tuple[tuple[int, ...], dict[int, tuple[int, ...]]]]
"""For each form of block, as indices in the order of values: what is saved, and what is recomputed for each of the
others.
"""


class RematValue:
    """One storage in the forward of a block.

    `function` made it, as result number `place`, from `args` and `kwargs`, in which views replace tensors; None where
    it cannot be recomputed. `free`: it is resident anyway. `entered`: an input of the block. `gathered`: a weight,
    whose storage is freed and filled with the same values again. `saved`: what is saved of it. `recomputed`: its
    recomputed tensor, which `pending_tensors` saved tensors still need. `pending_values`: recomputed values that still
    read it.
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
        """Makes it not recomputable."""
        self.function: Any = None
        self.args: Any = ()
        self.kwargs: Any = {}
        self.place, self.sources = 0, list[StorageView]()

    @property
    def reads(self) -> dict[RematValue, None]:
        """The values it is made of, each once."""
        return {view.value: None for view in self.sources}

    @property
    def is_written(self) -> bool:
        """Whether it was written since it was made, first read, or saved."""
        return self.probe._version != self.version

    @property
    def is_recomputable(self) -> bool:
        """Whether its function and unmodified inputs are known."""
        return (
            self.function is not None
            and not self.is_written
            and all(view.version == view.value.probe._version for view in self.sources)
        )

    @property
    def is_resident(self) -> bool:
        """Whether it is in memory without being saved."""
        return self.free and self.storage() is not None


class StorageView(NamedTuple):
    """A tensor: its layout in the storage of a value, and the version that was read."""

    value: RematValue
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    version: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this part of the storage of `whole`."""
        part: Any = torch.empty(0, dtype=self.dtype, device=whole.device)
        return part.set_(whole.untyped_storage(), self.offset, self.size, self.stride)  # type: ignore[no-any-return]


class RematPlan(NamedTuple):
    """What is saved; what is resident and must stay referenced; what is recomputed of both, in the order in which it
    was made.

    `recomputed_for` has, for each requested value that is not saved, the values to recompute.
    """

    saved: list[RematValue]
    needed: list[RematValue]
    recomputed: list[RematValue]
    recomputed_for: dict[RematValue, list[RematValue]]


def plan_remat(requested: dict[RematValue, None], cuts: RematPlanCache, stay: Collection[RematValue] = ()) -> RematPlan:
    """Returns how all of `requested` is obtained ([Note: least bytes]). Values in `stay` are not recomputed although
    they could be.
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
    """Returns `requested` and everything they are made of, sources first. It stops at `known` and at resident
    values.
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
    """Returns the indices in `order` of what is saved."""
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
    """Returns a tensor that shares the version counter of `tensor` and has no memory."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe
