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
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

BATCH, LENGTH = 2, 7
METADATA = frozenset({"__get__", "size", "dim", "numel", "is_contiguous", "stride", "__len__", "get_device", "is_floating_point", "type"})
PRODUCTS = frozenset({"linear", "addmm", "matmul", "mm", "__matmul__"})
RESHAPES = frozenset(
    {"view", "reshape", "flatten", "unflatten", "contiguous", "transpose", "permute", "squeeze", "unsqueeze", "clone", "movedim", "view_as"}
)
JOINS = frozenset({"view", "reshape", "flatten"})
VIEWS = RESHAPES | {"to", "long", "int"}
REDUCTIONS = frozenset(
    {"mean", "sum", "var", "std", "var_mean", "norm", "vector_norm", "linalg_vector_norm", "layer_norm", "rms_norm", "group_norm",
     "softmax", "log_softmax", "logsumexp", "max", "amax", "min", "amin", "argmax", "topk", "sort", "cumsum", "prod", "normalize"}
)  # fmt: skip


@dataclass
class Product:
    """A matrix product with a weight inside a block."""

    weight: str
    bias: str | None
    owner: str
    dim: int
    """Dimension of the weight that holds output features."""
    size: int
    source: int
    columns: frozenset[str]
    """Weights of the column layers whose shares it reads; empty for a column layer."""
    parts: tuple[int, ...] = ()
    cuts: set[int] = field(default_factory=set)


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
    inputs: dict[str, int] = field(default_factory=dict)
    uses: dict[int, list[tuple[tuple[str, ...], str]]] = field(default_factory=lambda: defaultdict(list))
    """Of each tensor: the modules that were running, and the weight that read it ('' for any other operation)."""
    embeddings: list[str] = field(default_factory=list)
    outside: list[tuple[str, str | None, int]] = field(default_factory=list)
    """Matrix products outside blocks: weight, bias, output features."""
    mixed: dict[str, frozenset[str]] = field(default_factory=dict)
    """Whole parameters that work on shares, with the columns that these come from."""
    first_block: int = -1
    """How many parameters were first used before the blocks."""
    alive: list[Any] = field(default_factory=list)


def trace(model: nn.Module, blocks: str) -> Trace:
    """One run of `model` on meta tensors. Raises whatever the model raises there."""
    real = dict(model.named_parameters(remove_duplicate=False))
    twins = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in real.values()}
    named = {name: twins[id(tensor)] for name, tensor in real.items()}
    names: dict[int, str] = {}
    for name, tensor in model.named_parameters():
        names[id(twins[id(tensor)])] = name
    state = {**named, **{name: torch.empty_like(buffer, device="meta") for name, buffer in model.named_buffers(remove_duplicate=False)}}
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    watch = Watch(names, ids)
    inside = [(name, module) for name, module in model.named_modules() if name.startswith(blocks + ".")]
    handles = [handle for name, module in inside for handle in watch.attach(name, module, blocks)]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), torch.device("meta"), watch:
            functional_call(model, state, (ids,))
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
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


class Watch(TorchFunctionMode):
    """Sees every torch function while the model runs; see [Note: columns and rows]."""

    def __init__(self, names: dict[int, str], ids: torch.Tensor) -> None:
        super().__init__()
        self.trace = Trace()
        self.names = names
        self.ids = {id(ids)}
        self.stack: list[str] = []
        self.share: dict[int, frozenset[str]] = {}  # tensors that hold a share: the columns it comes from
        self.flat: set[int] = set()  # those whose last dimension is the one that is shared
        self.trace.alive.append(ids)

    def attach(self, name: str, module: nn.Module, blocks: str) -> list[Any]:
        """Hooks that keep the stack of running modules, and what each was given."""
        depth = name.count(".") - blocks.count(".")

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if depth == 1 and self.trace.first_block < 0:
                self.trace.first_block = len(self.trace.order)
            self.stack.append(name)
            first = kwargs.get("hidden_states", next(tensors_in(args), next(tensors_in(kwargs), None)))
            self.trace.inputs[name] = id(first)

        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            for tensor in tensors_in(result):
                if depth == 1:
                    for column in self.share.pop(id(tensor), ()):
                        self.trace.problems[column] = "its output leaves the block"
                elif id(tensor) == self.trace.inputs[name]:
                    self.trace.uses[id(tensor)].append((tuple(self.stack), ""))
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
        result = function(*args, **kwargs)
        if name not in METADATA or isinstance(result, torch.Tensor):
            self.see(name, args, kwargs, result)
        return result

    def see(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given = list(tensors_in((args, kwargs)))
        outputs = list(tensors_in(result))
        self.trace.alive.extend(outputs)
        weights = [self.names[id(tensor)] for tensor in given if id(tensor) in self.names]
        for weight in weights:
            self.trace.order.setdefault(weight, len(self.trace.order))
        if name == "embedding" and weights and any(id(tensor) in self.ids for tensor in given):
            self.trace.embeddings.append(weights[0])
        if name in VIEWS and given and id(given[0]) in self.ids:
            self.ids.update(id(tensor) for tensor in outputs)
        matrix = next((t for t in reversed(given) if id(t) in self.names and t.ndim == 2), None)
        is_product = name in PRODUCTS and matrix is not None and given[0] is not matrix
        if is_product and not self.stack:
            bias = next((weight for weight in weights if weight != self.names[id(matrix)]), None)
            self.trace.outside.append((self.names[id(matrix)], bias, outputs[0].shape[-1]))
        if not self.stack:
            return
        if is_product and matrix is not None:
            self.product(name, given, matrix, weights, outputs[0])
        else:
            for tensor in given:
                self.trace.uses[id(tensor)].append((tuple(self.stack), ""))
            self.carry(name, args, given, weights, outputs)

    def product(self, name: str, given: list[torch.Tensor], matrix: torch.Tensor, weights: list[str], result: torch.Tensor) -> None:
        weight = self.names[id(matrix)]
        owner = weight.rpartition(".")[0]
        read = next(tensor for tensor in given if id(tensor) not in self.names)
        source = self.trace.inputs[owner] if self.stack[-1] == owner else id(read)
        columns = self.share.get(id(read), frozenset())
        if columns and id(read) not in self.flat:
            self.refuse(columns, f"{owner} reads features that were rearranged")
        bias = next((other for other in weights if other != weight), None)
        dim = 0 if name == "linear" else 1
        self.trace.products[self.block].append(Product(weight, bias, owner, dim, result.shape[-1], source, columns))
        self.trace.uses[id(read)].append((tuple(self.stack), weight))
        if not columns:
            self.share[id(result)] = frozenset({weight})
            self.flat.add(id(result))

    @property
    def block(self) -> str:
        return self.stack[0]

    def refuse(self, columns: frozenset[str], why: str) -> None:
        for column in columns:
            self.trace.problems.setdefault(column, why)

    def carry(self, name: str, args: Any, given: list[torch.Tensor], weights: list[str], outputs: list[torch.Tensor]) -> None:
        """What is computed from a share is a share."""
        shares = [tensor for tensor in given if id(tensor) in self.share]
        if not shares:
            return
        columns = frozenset().union(*(self.share[id(tensor)] for tensor in shares))
        is_flat = any(id(tensor) in self.flat for tensor in shares)
        where = self.stack[-1]
        if is_flat and name in REDUCTIONS:
            self.refuse(columns, f"{where} needs all features for {name}")
        for weight in weights:
            if is_flat:
                self.refuse(columns, f"{where} uses {weight} on all features")
            self.trace.mixed[weight] = self.trace.mixed.get(weight, frozenset()) | columns
        self.attention(name, given, columns)
        self.parts(name, args, shares[0], outputs)
        before = shares[0]
        for tensor in outputs:
            self.share[id(tensor)] = columns
            same = tensor.shape[-1:] == before.shape[-1:]
            joined = name in JOINS and tensor.ndim < before.ndim and tensor.shape[-1] > before.shape[-1]
            if joined or (is_flat and (same or name not in RESHAPES)):
                self.flat.add(id(tensor))

    def attention(self, name: str, given: list[torch.Tensor], columns: frozenset[str]) -> None:
        if name == "scaled_dot_product_attention":
            query, key = given[0], given[1]
        elif name in ("matmul", "__matmul__", "bmm") and len(given) > 1 and given[0].ndim == 4 and id(given[1]) in self.share:
            if any(seen.columns & columns for seen in self.trace.attentions[self.block]):
                return
            query, key = given[0], given[1]
        else:
            return
        heads, head_dim = query.shape[-3], query.shape[-1]
        kv_heads = key.shape[-3]
        sizes = [product for product in self.trace.products[self.block] if product.weight in self.share.get(id(key), ())]
        if len(sizes) == 1:  # keys may have been repeated for their group: count them where they were made
            kv_heads = min(kv_heads, min(sizes[0].parts or (sizes[0].size,)) // head_dim)
        self.trace.attentions[self.block].append(Attention(columns, heads, kv_heads, head_dim))

    def parts(self, name: str, args: Any, share: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        """A fused projection is cut into its parts along the features."""
        origin = self.share[id(share)]
        if id(share) not in self.flat or len(origin) != 1:
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
