"""Watches a model run once on the meta device (shapes only, no memory, no arithmetic) and notes how its weights are used.

[Note: columns and rows] Inside a block, a matrix product that reads whole features can be cut by columns: its output then holds a share of
the features on each rank. Whatever is computed from a share is a share. A matrix product that reads a share is cut by rows, and its
output, summed over ranks, is whole again (Shoeybi et al., Megatron-LM, 2019, section 3). So one pass over the operations tells column
layers from row layers for any model, without a name being known. Where an operation on a share would need all features (a norm over
them), or a share leaves the block, the columns that it comes from must stay whole; `problems` says why.

[Note: readers] A region may be entered at a module only if the column layers are the sole readers of that module's input; a residual
inside the module would read it too, and its gradient must not be summed over ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

BATCH, LENGTH = 2, 7
METADATA = frozenset({"size", "dim", "numel", "is_contiguous", "stride", "__len__", "get_device", "is_floating_point", "type"})
PRODUCTS = frozenset({"linear", "addmm", "matmul", "mm", "__matmul__"})
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "contiguous", "squeeze", "unsqueeze", "clone", "view_as"})
TRANSPOSES = frozenset({"t", "transpose", "T", "mT", "swapaxes", "permute", "movedim"})
SCORES = frozenset({"scaled_dot_product_attention", "matmul", "__matmul__", "bmm", "baddbmm"})
VIEWS = RESHAPES | {"to", "long", "int"}
REDUCTIONS = frozenset(
    {"mean", "sum", "var", "std", "var_mean", "norm", "vector_norm", "linalg_vector_norm", "layer_norm", "rms_norm", "group_norm",
     "softmax", "log_softmax", "logsumexp", "max", "amax", "min", "amin", "argmax", "topk", "sort", "cumsum", "prod", "normalize"}
)  # fmt: skip


class Call(NamedTuple):
    """A torch function as it was called; a property goes by its own name."""

    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any


@dataclass
class Product:
    """A matrix product with a weight inside a block."""

    weight: str
    bias: str | None
    owner: str
    dim: int
    """Dimension of the weight that holds output features."""
    size: int
    source: torch.Tensor
    """What it reads: the input of the module that owns the weight, or the tensor itself."""
    columns: frozenset[str]
    """Weights of the column layers whose shares it reads; empty for a column layer."""
    parts: tuple[int, ...] = ()
    cuts: set[int] = field(default_factory=set)

    @property
    def keeps_sequence(self) -> bool:
        """Its input is (batch, sequence, features), so that sequence parallelism can cut it."""
        return self.source.ndim == 3 and self.source.shape[:2] == (BATCH, LENGTH)


@dataclass
class Attention:
    """Seen at the product of queries and keys."""

    columns: frozenset[str]
    heads: int
    kv_heads: int
    head_dim: int


@dataclass
class Trace:
    """What one run showed. Tensors are known by id; `alive` keeps them, so that an id is never used twice."""

    order: dict[str, int] = field(default_factory=dict)
    """Parameters in the order of their first use."""
    products: dict[str, list[Product]] = field(default_factory=lambda: defaultdict(list))
    attentions: dict[str, list[Attention]] = field(default_factory=lambda: defaultdict(list))
    problems: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """What each module inside the blocks was given first."""
    uses: dict[int, list[tuple[tuple[str, ...], str]]] = field(default_factory=lambda: defaultdict(list))
    """Of each tensor: the modules that were running, and the weight that read it ('' for any other operation)."""
    embeddings: list[str] = field(default_factory=list)
    outside: list[tuple[str, int]] = field(default_factory=list)
    """Matrix products outside blocks: weight and output features."""
    mixed: dict[str, frozenset[str]] = field(default_factory=dict)
    """Whole parameters that work on shares, with the columns that these come from."""
    alive: list[Any] = field(default_factory=list)


def trace(model: nn.Module, blocks: str, dtype: torch.dtype | None = None) -> Trace:
    """One run of `model` (in eval mode) on meta tensors, of `dtype` where they are floating. Raises whatever the model raises there."""

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)

    twins = {id(tensor): twin(tensor) for tensor in model.parameters()}
    names = {id(twins[id(tensor)]): name for name, tensor in model.named_parameters()}
    state = {name: twins[id(tensor)] for name, tensor in model.named_parameters(remove_duplicate=False)}
    state |= {name: twin(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    watch = Watch(names, ids)
    inside = [(name, module) for name, module in model.named_modules() if name.startswith(blocks + ".")]
    handles = [handle for name, module in inside for handle in watch.attach(name, module, blocks)]
    try:
        with torch.no_grad(), torch.device("meta"), watch:
            functional_call(model, state, (ids,))
    finally:
        for handle in handles:
            handle.remove()
    return watch.trace


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def moved(call: Call, before: torch.Tensor, after: torch.Tensor, place: int | None) -> int | None:
    """Where the divided dimension `place` of `before` lies in `after`; None when it cannot be told."""
    if place is None:
        return None
    if call.name in TRANSPOSES:  # mark the dimension by its stride and do it again
        marked = before.as_strided(before.shape, [int(dim == place) for dim in range(before.ndim)])
        turned = call.function(marked, *call.args[1:], **call.kwargs)
        return next((dim for dim, stride in enumerate(turned.stride()) if stride), None)
    if call.name in RESHAPES:  # elements keep their order: look for the dimension that begins behind as many
        ahead = math.prod(before.shape[:place])
        return next((dim for dim in reversed(range(after.ndim)) if math.prod(after.shape[:dim]) == ahead), None)
    return place if place < after.ndim else None


class Watch(TorchFunctionMode):
    """Sees every torch function while the model runs; see [Note: columns and rows]."""

    def __init__(self, names: dict[int, str], ids: torch.Tensor) -> None:
        super().__init__()
        self.trace = Trace()
        self.names = names
        self.ids = {id(ids)}
        self.stack: list[str] = []
        self.share: dict[int, frozenset[str]] = {}  # tensors that hold a share: the columns it comes from
        self.place: dict[int, int | None] = {}  # the dimension of a share that is divided; None: it was merged with others
        self.made: dict[int, tuple[str, ...]] = {id_: (name,) for id_, name in names.items()}  # tensors computed from parameters alone
        self.turned: dict[int, str] = {}  # transposed parameters
        self.nothing = torch.empty(0)
        self.trace.alive.append(ids)

    def attach(self, name: str, module: nn.Module, blocks: str) -> list[Any]:
        """Hooks that keep the stack of running modules, and what each was given."""
        depth = name.count(".") - blocks.count(".")

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append(name)
            self.trace.inputs[name] = kwargs.get("hidden_states", next(tensors_in((args, kwargs)), self.nothing))

        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if depth == 1:  # beside the hidden state a block may return attention weights, which stay shares
                hidden = next(tensors_in(result), self.nothing)
                self.refuse(self.share.pop(id(hidden), frozenset()), "its output leaves the block")
            elif any(tensor is self.trace.inputs[name] for tensor in tensors_in(result)):
                self.trace.uses[id(self.trace.inputs[name])].append((tuple(self.stack), ""))
            self.stack.pop()

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True),
        ]

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__bool__":
            return False  # a question about values, such as 'is this batch packed?': there are none, and the plain path is asked for
        is_property = name == "__get__"
        if is_property:
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor) or not (is_property or name in METADATA):
            self.see(Call(name, function, args, kwargs), list(tensors_in(result)))
        return result

    def see(self, call: Call, outputs: list[torch.Tensor]) -> None:
        name = call.name
        given = list(tensors_in((call.args, call.kwargs)))
        self.trace.alive.extend(outputs)
        weights = list(dict.fromkeys(weight for tensor in given for weight in self.made.get(id(tensor), ())))
        for weight in weights:
            self.trace.order.setdefault(weight, len(self.trace.order))
        if weights and all(id(tensor) in self.made for tensor in given):
            self.made.update({id(tensor): tuple(weights) for tensor in outputs})
            if name in TRANSPOSES and id(given[0]) in self.names and given[0].ndim == 2:
                self.turned[id(outputs[0])] = self.names[id(given[0])]
            return
        if name == "embedding" and weights and any(id(tensor) in self.ids for tensor in given):
            self.trace.embeddings.append(weights[0])
        if name in VIEWS and given and id(given[0]) in self.ids:
            self.ids.update(id(tensor) for tensor in outputs)
        matrix = next((t for t in reversed(given) if t.ndim == 2 and (id(t) in self.names or id(t) in self.turned)), None)
        is_product = name in PRODUCTS and matrix is not None and given[0] is not matrix
        if is_product and not self.stack:
            self.trace.outside.append((self._weight(matrix), outputs[0].shape[-1]))
        if not self.stack:
            return
        if is_product and matrix is not None:
            self.product(name, given, matrix, weights, outputs[0])
        else:
            for tensor in given:
                self.trace.uses[id(tensor)].append((tuple(self.stack), ""))
            self.carry(call, given, weights, outputs)

    def _weight(self, matrix: torch.Tensor | None) -> str:
        return self.names.get(id(matrix)) or self.turned[id(matrix)]

    def product(self, name: str, given: list[torch.Tensor], matrix: torch.Tensor, weights: list[str], result: torch.Tensor) -> None:
        weight = self._weight(matrix)
        owner = weight.rpartition(".")[0]
        read = next(tensor for tensor in given if id(tensor) not in self.made)
        source = self.trace.inputs[owner] if self.stack[-1] == owner else read
        columns = self.share.get(id(read), frozenset())
        if self.stack[-1] != owner:
            self.refuse(columns or frozenset({weight}), f"{owner} is read without being called")
        if columns and self.place[id(read)] not in (None, read.ndim - 1):
            self.refuse(columns, f"{owner} reads features that were rearranged")
        bias = next((other for other in weights if other != weight), None)
        dim = int((name == "linear") == (id(matrix) in self.turned))
        self.trace.products[self.block].append(Product(weight, bias, owner, dim, result.shape[-1], source, columns))
        self.trace.uses[id(read)].append((tuple(self.stack), weight))
        if not columns:
            self.share[id(result)] = frozenset({weight})
            self.place[id(result)] = result.ndim - 1

    @property
    def block(self) -> str:
        return self.stack[0]

    def refuse(self, columns: frozenset[str], why: str) -> None:
        for column in columns:
            self.trace.problems.setdefault(column, why)

    def carry(self, call: Call, given: list[torch.Tensor], weights: list[str], outputs: list[torch.Tensor]) -> None:
        """What is computed from a share is a share."""
        shares = [tensor for tensor in given if id(tensor) in self.share]
        if not shares:
            return
        columns = frozenset().union(*(self.share[id(tensor)] for tensor in shares))
        is_flat = any(self.place[id(tensor)] == tensor.ndim - 1 for tensor in shares)
        where = self.stack[-1]
        if is_flat and call.name in REDUCTIONS:
            self.refuse(columns, f"{where} needs all features for {call.name}")
        for weight in weights:
            if is_flat:
                self.refuse(columns, f"{where} uses {weight} on all features")
            self.trace.mixed[weight] = self.trace.mixed.get(weight, frozenset()) | columns
        self.attention(call.name, given, columns)
        self.parts(call, shares[0], outputs)
        for tensor in outputs:
            self.share[id(tensor)] = columns
            self.place[id(tensor)] = moved(call, shares[0], tensor, self.place[id(shares[0])])

    def attention(self, name: str, given: list[torch.Tensor], columns: frozenset[str]) -> None:
        if any(seen.columns & columns for seen in self.trace.attentions[self.block]):
            return
        factors = [tensor for tensor in given if id(tensor) in self.share]
        if name not in SCORES or len(factors) < 2 or factors[0].ndim < 3:
            return
        query, key = factors[:2]
        merged = query.ndim == 3  # (batch x heads, sequence, head_dim)
        heads, kv_heads = (tensor.shape[0] // BATCH if merged else tensor.shape[-3] for tensor in (query, key))
        head_dim = query.shape[-1]
        sizes = [product for product in self.trace.products[self.block] if product.weight in self.share.get(id(key), ())]
        if len(sizes) == 1:  # keys may have been repeated for their group: count them where they were made
            kv_heads = min(kv_heads, min(sizes[0].parts or (sizes[0].size,)) // head_dim)
        self.trace.attentions[self.block].append(Attention(columns, heads, kv_heads, head_dim))

    def parts(self, call: Call, share: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        """A fused projection is cut into its parts along the features."""
        name, args = call.name, call.args
        origin = self.share[id(share)]
        if self.place[id(share)] != share.ndim - 1 or len(origin) != 1:
            return
        product = next(p for p in reversed(self.trace.products[self.block]) if p.weight in origin)
        if share.shape[-1] != product.size:
            return
        if name in ("split", "chunk", "tensor_split", "split_with_sizes") and sum(t.shape[-1] for t in outputs) == product.size:
            product.parts = tuple(tensor.shape[-1] for tensor in outputs)
        elif name == "__getitem__" and outputs and outputs[0].shape[-1] != product.size:
            index = args[1][-1] if isinstance(args[1], tuple) else args[1]
            if not isinstance(index, slice) or index.step not in (None, 1):
                self.refuse(origin, f"{self.stack[-1]} picks single features")
                return
            start, stop, _ = index.indices(product.size)
            product.cuts |= {0, start, stop, product.size}
            cuts = sorted(product.cuts)
            product.parts = tuple(stop - start for start, stop in itertools.pairwise(cuts))
        elif name in ("view", "reshape", "unflatten") and outputs[0].ndim == share.ndim + 2:
            count, second = outputs[0].shape[-3:-1]
            if count in (2, 3) and second not in (2, 3):  # (3, heads, head_dim), not (heads, 3, head_dim)
                product.parts = (product.size // count,) * count
