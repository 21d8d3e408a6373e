"""What becomes of the vocabulary's weights and of logits, seen in the run without memory: whether tensor ranks may each hold a share of them.

Rule: a share of an embedding's rows is as good as the whole of them as long as the layer gives each number by itself: scaled at most, by what is no
parameter. A rank gives zeros for rows that it does not hold; a norm inside the layer (Inkling) would learn from this rank's rows alone.
A share of the logits is as good as the whole of them for a loss over the vocabulary as long as each is computed by itself: scaled, capped,
reshaped, or met by a parameter that has a number for each word, which is cut likewise. Whatever needs all words at
once (a softmax, a mean, a slice, a mask, a buffer: BART's bias), or reads the weight past its own layer (`F.linear(x, table.weight)`), would
compute with a share as if it were the whole: then the weight stays whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.anatomy.places import RESHAPES, Call

EACH = frozenset(
    {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "mul", "mul_", "__mul__", "__rmul__",
     "__imul__", "div", "div_", "true_divide", "__truediv__", "__itruediv__", "neg", "__neg__", "tanh", "tanh_", "sigmoid", "clamp", "clamp_", "clip", "float",
     "double", "half", "bfloat16", "to", "type", "type_as", "dropout", "masked_fill", "masked_fill_", "__getitem__"}
)  # fmt: skip
"""Functions that give each number of their own."""
TABLES = ("max_norm", "scale_grad_by_freq")
"""What an embedding does with all rows of its table."""


@dataclass
class Vocabulary:
    """Notes of one run. `embeddings`: weights that token ids chose rows of; `outside`: matrix products outside blocks, weight and output features;
    `problems`: weights that stay whole, and why; `beside`: parameters with a number for each word, by the weight whose logits they meet."""

    embeddings: list[str] = field(default_factory=list)
    outside: list[tuple[str, int]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    beside: dict[str, dict[str, int]] = field(default_factory=dict)
    running: list[nn.Module] = field(default_factory=list)
    logits: dict[int, str] = field(default_factory=dict)

    def attach(self, model: nn.Module) -> list[Any]:
        """Hooks on the layers that may hold a vocabulary."""

        def enter(module: nn.Module, args: Any) -> None:
            self.running.append(module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()

        layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
        hooks = [(layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)) for layer in layers]
        return [handle for pair in hooks for handle in pair]

    def follow(self, call: Call, given: list[torch.Tensor], outputs: list[torch.Tensor], names: dict[int, str]) -> None:
        """One operation. `names`: of parameters."""
        layer = self.running[-1] if self.running else None
        table = next((outer._parameters.get("weight") for outer in self.running if isinstance(outer, nn.Embedding)), None)
        if id(table) in names and not (call.name == "embedding" and any(tensor is table for tensor in given)):
            self._around(call, table, given, names)
        own = {id(tensor) for tensor in layer._parameters.values() if tensor is not None} if layer is not None else set()
        for tensor in given:
            weight = names.get(id(tensor))
            if weight is None or tensor.ndim < 2:
                continue
            if id(tensor) not in own or call.name not in ("linear", "embedding"):
                self.problems.setdefault(weight, f"it is read past its layer ({call.name})")
            elif call.name == "linear":
                self.logits.update({id(output): weight for output in outputs})
            elif any(getattr(layer, name) for name in TABLES):
                self.problems.setdefault(weight, "its rows are scaled by all that were read")
        held = next((self.logits[id(tensor)] for tensor in given if id(tensor) in self.logits), None)
        if held is not None:
            self._met(call, held, given, outputs, names)

    def _around(self, call: Call, table: Any, given: list[torch.Tensor], names: dict[int, str]) -> None:
        """What an embedding does beside the choice of rows. Token ids count from a rank's first row, which the layer does not know."""
        beside = any(id(tensor) in names and tensor is not table for tensor in given)
        ids = any(not tensor.is_floating_point() for tensor in given)
        if beside or ids or call.name not in EACH | RESHAPES:
            self.problems.setdefault(names[id(table)], f"its {'ids' if ids else 'rows'} go through {call.name}")

    def _met(self, call: Call, held: str, given: list[torch.Tensor], outputs: list[torch.Tensor], names: dict[int, str]) -> None:
        size = next(tensor.shape[-1] for tensor in given if id(tensor) in self.logits)
        alone = call.name in EACH | RESHAPES and all(output.ndim and output.shape[-1] == size for output in outputs)
        alone &= call.name not in RESHAPES or size not in torch.utils._pytree.tree_leaves(call.args[1:])
        index = call.args[1] if call.name == "__getitem__" and len(call.args) > 1 else ()
        alone &= not any(isinstance(place, list | torch.Tensor) for place in (index if isinstance(index, tuple) else (index,)))
        for tensor in given:
            if self.logits.get(id(tensor)) == held or (not tensor.requires_grad and (tensor.ndim == 0 or tensor.shape[-1] == 1)):
                continue
            if id(tensor) in names and tensor.ndim and tensor.shape[-1] == size:
                self.beside.setdefault(held, {})[names[id(tensor)]] = tensor.ndim - 1
            else:
                alone = False
        if alone:
            self.logits.update({id(output): held for output in outputs})
        else:
            self.problems.setdefault(held, f"what it gives goes through {call.name}")
