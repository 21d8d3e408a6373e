"""What a layer that stays whole gives to shares alone: latent attention, where all heads use one compressed key, and a rotary part of it.

[Note: inflow] A product that stays whole in a block may feed shares in two ways: column layers read it (they sum its gradient over the ranks when they
are entered), or an operation brings it together with a share, such as the rotary key that every head is given. The second way gives each rank
only a part of the gradient. Where all that is computed from the product ends in shares of one region, its output is entered instead:
forward it is what it was, backward its gradient is summed over the ranks once, and parameters on the way, such as the norm of the latent, get a part
on each rank. Where anything else uses it too, a residual say, part and whole gradients would mix: the columns then stay whole.

Source of the form: DeepSeek-AI, DeepSeek-V2 (2024), section 2.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass
class Inflow:
    """Of one layer that stays whole: the columns of the shares that its output ends in, those that only an entry at its output serves,
    whole parameters on the way, and why it cannot be entered."""

    into: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    parameters: dict[str, None] = field(default_factory=dict)
    spoiled: str = ""


class Inflows:
    """Follows the outputs of whole layers through the operations of a run; see [Note: inflow]. Layers go by their paths."""

    def __init__(self) -> None:
        self.of: dict[str, Inflow] = defaultdict(Inflow)
        self.carried: dict[int, frozenset[str]] = {}

    def begin(self, layer: str, output: torch.Tensor) -> None:
        """`layer`, which stays whole, gave `output`."""
        if layer in self.of:
            self.of[layer].spoiled = "it runs twice"
        self.of[layer]
        self.carried[id(output)] = frozenset({layer})

    def sources(self, tensor: torch.Tensor) -> frozenset[str]:
        return self.carried.get(id(tensor), frozenset())

    def follow(
        self,
        name: str,
        given: list[torch.Tensor],
        outputs: list[torch.Tensor],
        shares: dict[int, frozenset[str]],
        made: dict[int, tuple[str, ...]],
    ) -> None:
        """An operation: what comes of it comes of the same layers. `shares`: columns of outputs that are shares; `made`: of parameters."""
        layers = frozenset().union(*(self.sources(tensor) for tensor in given))
        if not layers:
            return
        ends = frozenset().union(*shares.values()) if shares else frozenset()
        for layer in layers:
            self.of[layer].into |= ends
        whole = [tensor for tensor in outputs if id(tensor) not in shares and tensor.requires_grad]
        begun = frozenset().union(*(self.sources(tensor) for tensor in whole)) - layers
        if begun:
            self.spoil(layers, f"{min(begun)} stays whole and reads it")
        for tensor in whole if not begun else ():
            self.carried[id(tensor)] = layers
        if not whole:
            return
        if (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))) and not self.sources(given[0]):
            self.spoil(layers, "it is written into something else")
        for tensor in given:
            if id(tensor) in made:
                for layer in layers:
                    self.of[layer].parameters.update(dict.fromkeys(made[id(tensor)]))
            elif tensor.requires_grad and not self.sources(tensor):
                self.spoil(layers, "it meets what other ranks have whole")

    def spoil(self, layers: Iterable[str], why: str) -> None:
        for layer in layers:
            self.of[layer].spoiled = self.of[layer].spoiled or why

    def serve(self, tensor: torch.Tensor, columns: frozenset[str]) -> bool:
        """Whether an entry at the output of the layers that `tensor` comes of serves the shares of `columns`, which meet it."""
        layers = self.sources(tensor)
        for layer in layers:
            self.of[layer].needed |= columns
        return bool(layers)

    def entered(self) -> dict[str, Inflow]:
        """The layers whose output is entered, if nothing spoils it."""
        return {layer: inflow for layer, inflow in self.of.items() if inflow.needed}
