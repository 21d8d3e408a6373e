"""What a layer that stays whole gives to shares alone: latent attention, where all heads use one compressed key, and a
rotary part of it.

[Note: inflow] A product that stays whole in a block may feed shares in two ways: column layers read it (they sum its
gradient over the ranks when they
are entered), or an operation brings it together with a share, such as the rotary key that every head is given. The
second way gives each rank
only a part of the gradient. Where all that is computed from the product ends in shares of one region, its output is
entered instead:
forward it is what it was, backward its gradient is summed over the ranks once, and parameters on the way, such as the
norm of the latent, get a part
on each rank. Where anything else uses it too, a residual say, part and whole gradients would mix: the columns then stay
whole.

Source of the form: DeepSeek-AI, DeepSeek-V2 (2024), section 2.1.

What becomes of the vocabulary's weights and of logits, seen in the run without memory: whether tensor ranks may each
hold a share of them.

Rule: a share of an embedding's rows is as good as the whole of them as long as the layer gives each number by itself:
scaled at most, by what is no
parameter. A rank gives zeros for rows that it does not hold; a norm inside the layer (Inkling) would learn from this
rank's rows alone.
A share of the logits is as good as the whole of them for a loss over the vocabulary as long as each is computed by
itself: scaled, capped,
reshaped, or met by a parameter that has a number for each word, which is cut likewise. Whatever needs all words at
once (a softmax, a mean, a slice, a mask, a buffer: BART's bias), or reads the weight past its own layer (`F.linear(x,
table.weight)`), would
compute with a share as if it were the whole: then the weight stays whole.

Which tensors have values that come from parameters, with or without a gradient: what a block is given of them no other
stage can make.

Rule: what is computed from a parameter, or from such a tensor, is one; but where only a form is asked for
(`zeros_like`, `x.to(y)`). A table that is read
without recording (RoFormer's positions), or a mask of what is zero in an embedding, has no gradient and depends on
weights all the same.

What one run of a model on the meta device showed: its products, shares and what met them (written by trace.py, read by
regions.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from meshwright.analysis.batch_coupling import BatchCouplingDetector
from meshwright.analysis.propagation import RESHAPE_OPS, OpCall, ShardedTensorInfo
from meshwright.analysis.remat.tape import OWN_CHECKPOINT_REASON


@dataclass
class MlaInput:
    """Of one layer that stays whole: the columns of the shares that its output ends in, those that only an entry at its
    output serves,
    whole parameters on the way, and why it cannot be entered."""

    consumers: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    parameters: dict[str, None] = field(default_factory=dict)
    rejected: str = ""


class MlaInputTracker:
    """Follows the outputs of whole layers through the operations of a run; see [Note: inflow]. Layers go by their
    paths."""

    def __init__(self) -> None:
        self.inputs: dict[str, MlaInput] = defaultdict(MlaInput)
        self.layers_by_tensor: dict[int, frozenset[str]] = {}

    def begin(self, layer: str, output: torch.Tensor) -> None:
        """`layer`, which stays whole, gave `output`."""
        if layer in self.inputs:
            self.inputs[layer].rejected = "it runs twice"
        self.inputs[layer]
        self.layers_by_tensor[id(output)] = frozenset({layer})

    def sources(self, tensor: torch.Tensor) -> frozenset[str]:
        return self.layers_by_tensor.get(id(tensor), frozenset())

    def follow(
        self,
        name: str,
        given: list[torch.Tensor],
        outputs: list[torch.Tensor],
        shares: dict[int, frozenset[str]],
        made: dict[int, tuple[str, ...]],
    ) -> None:
        """An operation: what comes of it comes of the same layers. `shares`: columns of outputs that are shares;
        `made`: of parameters."""
        layers = frozenset().union(*(self.sources(tensor) for tensor in given))
        if not layers:
            return
        ends = frozenset().union(*shares.values()) if shares else frozenset()
        for layer in layers:
            self.inputs[layer].consumers |= ends
        whole = [tensor for tensor in outputs if id(tensor) not in shares and tensor.requires_grad]
        begun = frozenset().union(*(self.sources(tensor) for tensor in whole)) - layers
        if begun:
            self.reject(layers, f"{min(begun)} stays whole and reads it")
        for tensor in whole if not begun else ():
            self.layers_by_tensor[id(tensor)] = layers
        if not whole:
            return
        if (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))) and not self.sources(given[0]):
            self.reject(layers, "it is written into something else")
        for tensor in given:
            if id(tensor) in made:
                for layer in layers:
                    self.inputs[layer].parameters.update(dict.fromkeys(made[id(tensor)]))
            elif tensor.requires_grad and not self.sources(tensor):
                self.reject(layers, "it meets what other ranks have whole")

    def reject(self, layers: Iterable[str], why: str) -> None:
        for layer in layers:
            self.inputs[layer].rejected = self.inputs[layer].rejected or why

    def can_serve(self, tensor: torch.Tensor, columns: frozenset[str]) -> bool:
        """Whether an entry at the output of the layers that `tensor` comes of serves the shares of `columns`, which
        meet it."""
        layers = self.sources(tensor)
        for layer in layers:
            self.inputs[layer].needed |= columns
        return bool(layers)

    def entry_inputs(self) -> dict[str, MlaInput]:
        """The layers whose output is entered, if nothing spoils it."""
        return {layer: inflow for layer, inflow in self.inputs.items() if inflow.needed}


ELEMENTWISE_OPS = frozenset(
    {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "mul", "mul_", "__mul__", "__rmul__",
     "__imul__", "div", "div_", "true_divide", "__truediv__", "__itruediv__", "neg", "__neg__", "tanh", "tanh_", "sigmoid", "clamp", "clamp_", "clip", "float",
     "double", "half", "bfloat16", "to", "type", "type_as", "dropout", "masked_fill", "masked_fill_", "__getitem__"}
)  # fmt: skip
"""Functions that give each number of their own."""
TABLE_WIDE_OPTIONS = ("max_norm", "scale_grad_by_freq")
"""What an embedding does with all rows of its table."""


@dataclass
class VocabularyTracker:
    """Notes of one run. `embeddings`: weights that token ids chose rows of; `outside`: matrix products outside blocks,
    weight and output features;
    `problems`: weights that stay whole, and why; `beside`: parameters with a number for each word, by the weight whose
    logits they meet."""

    embeddings: list[str] = field(default_factory=list)
    outside_products: list[tuple[str, int]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    per_word_params: dict[str, dict[str, int]] = field(default_factory=dict)
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

    def follow(
        self, call: OpCall, given: list[torch.Tensor], outputs: list[torch.Tensor], names: dict[int, str]
    ) -> None:
        """One operation. `names`: of parameters."""
        layer = self.running[-1] if self.running else None
        table = next(
            (outer._parameters.get("weight") for outer in self.running if isinstance(outer, nn.Embedding)), None
        )
        if id(table) in names and not (call.name == "embedding" and any(tensor is table for tensor in given)):
            self._around(call, table, given, names)
        own = (
            {id(tensor) for tensor in layer._parameters.values() if tensor is not None} if layer is not None else set()
        )
        for tensor in given:
            weight = names.get(id(tensor))
            if weight is None or tensor.ndim < 2:
                continue
            if id(tensor) not in own or call.name not in ("linear", "embedding"):
                self.problems.setdefault(weight, f"it is read past its layer ({call.name})")
            elif call.name == "linear":
                self.logits.update({id(output): weight for output in outputs})
            elif any(getattr(layer, name) for name in TABLE_WIDE_OPTIONS):
                self.problems.setdefault(weight, "its rows are scaled by all that were read")
        logits_weight = next((self.logits[id(tensor)] for tensor in given if id(tensor) in self.logits), None)
        if logits_weight is not None:
            self._met(call, logits_weight, given, outputs, names)

    def _around(self, call: OpCall, table: Any, given: list[torch.Tensor], names: dict[int, str]) -> None:
        """What an embedding does beside the choice of rows. Token ids count from a rank's first row, which the layer
        does not know."""
        meets_parameter = any(id(tensor) in names and tensor is not table for tensor in given)
        ids = any(not tensor.is_floating_point() for tensor in given)
        if meets_parameter or ids or call.name not in ELEMENTWISE_OPS | RESHAPE_OPS:
            self.problems.setdefault(names[id(table)], f"its {'ids' if ids else 'rows'} go through {call.name}")

    def _met(
        self,
        call: OpCall,
        logits_weight: str,
        given: list[torch.Tensor],
        outputs: list[torch.Tensor],
        names: dict[int, str],
    ) -> None:
        size = next(tensor.shape[-1] for tensor in given if id(tensor) in self.logits)
        is_elementwise = call.name in ELEMENTWISE_OPS | RESHAPE_OPS and all(
            output.ndim and output.shape[-1] == size for output in outputs
        )
        is_elementwise &= call.name not in RESHAPE_OPS or size not in torch.utils._pytree.tree_leaves(call.args[1:])
        index = call.args[1] if call.name == "__getitem__" and len(call.args) > 1 else ()
        is_elementwise &= not any(
            isinstance(place, list | torch.Tensor) for place in (index if isinstance(index, tuple) else (index,))
        )
        for tensor in given:
            if self.logits.get(id(tensor)) == logits_weight or (
                not tensor.requires_grad and (tensor.ndim == 0 or tensor.shape[-1] == 1)
            ):
                continue
            if id(tensor) in names and tensor.ndim and tensor.shape[-1] == size:
                self.per_word_params.setdefault(logits_weight, {})[names[id(tensor)]] = tensor.ndim - 1
            else:
                is_elementwise = False
        if is_elementwise:
            self.logits.update({id(output): logits_weight for output in outputs})
        else:
            self.problems.setdefault(logits_weight, f"what it gives goes through {call.name}")


FIRST_INPUT_OPS = frozenset({"to", "type", "type_as", "expand_as", "view_as", "reshape_as"})
"""Functions that take values of the first tensor that they are given alone."""


class ParamDependence(TorchFunctionMode):
    """While it is entered, or told of each function, it notes of which parameters tensors are made. `names`: of
    parameters by id."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = list(names.values())
        self.marks = {id_: 1 << place for place, id_ in enumerate(names)}
        self.alive: list[torch.Tensor] = []  # so that an id is never used twice

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self.marks

    def parameters_of(self, tensor: torch.Tensor) -> set[str]:
        """Names of the parameters."""
        mark = self.marks.get(id(tensor), 0)
        return {name for place, name in enumerate(self.names) if mark >> place & 1}

    def follow(self, name: str, given: Sequence[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """One function."""
        mark = 0
        for tensor in given[:1] if name in FIRST_INPUT_OPS else given:
            mark |= self.marks.get(id(tensor), 0)
        if mark and not name.endswith("_like") and not name.startswith("new_"):
            found = given[:1] if name == "__setitem__" else list(outputs)
            self.marks |= {id(tensor): mark | self.marks.get(id(tensor), 0) for tensor in found}
            self.alive.extend(found)

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.follow(getattr(function, "__name__", ""), _tensor_leaves((args, kwargs)), _tensor_leaves(result))
        return result


def _tensor_leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


OUTSIDE_BLOCKS = "the model's own forward"
"""Where code runs that is in no module inside the blocks."""


@dataclass
class WeightProduct:
    """A product with a weight inside a block, or a table of a number for each head."""

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
    is_table: bool = False
    has_sequence_dim: bool = False
    """Its input is (batch, sequence, features), so that sequence parallelism can cut it."""
    mla_sources: frozenset[str] = frozenset()
    """Layers that stay whole, of whose output alone its input is computed."""
    cuts: set[int] = field(default_factory=set)
    grains: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of each part (start, stop): the fewest shares that it was seen laid out in."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes along the features; empty where it is one."""
        bounds = sorted({0, self.size, *self.cuts})
        return tuple(stop - start for start, stop in itertools.pairwise(bounds)) if len(bounds) > 2 else ()

    def shard_limits(self) -> tuple[int, ...]:
        """Into how many shares each part can be cut."""
        bounds = sorted({0, self.size, *self.cuts})
        ways = []
        for start, stop in itertools.pairwise(bounds):
            seen = [grain for (first, last), grain in self.grains.items() if first <= start and stop <= last]
            ways.append(min(seen, default=stop - start))
        return tuple(ways)


@dataclass
class AttentionScores:
    """Seen at the product of queries and keys."""

    columns: frozenset[str]
    heads: int


@dataclass(frozen=True)
class PerHeadInput:
    """An argument of a module that holds a number for each head, along `dim`."""

    path: str
    argument: int | str
    dim: int
    size: int


class HiddenStateUse(NamedTuple):
    """What a block does with the hidden state."""

    same_shape: bool
    """It gives the form that it is given."""
    from_block: bool
    """It is given what another block gave."""
    num_outputs: int
    """Values that it returns; 0 for a bare tensor."""


@dataclass
class TraceLog:
    """What one run showed. Tensors are known by id; `alive` keeps them, so that an id is never used twice."""

    order: dict[str, int] = field(default_factory=dict)
    """Parameters in the order of their first use."""
    blocks: dict[str, int] = field(default_factory=dict)
    """Paths of the blocks in the order in which they ran, and how often each did."""
    products: dict[str, list[WeightProduct]] = field(default_factory=lambda: defaultdict(list))
    attentions: dict[str, list[AttentionScores]] = field(default_factory=lambda: defaultdict(list))
    problems: dict[str, str] = field(default_factory=dict)
    problem_times: dict[str, int] = field(default_factory=dict)
    """When each problem was met; several may be met at once."""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """What each module inside the blocks was given first."""
    uses: dict[int, list[tuple[tuple[str, ...], str]]] = field(default_factory=lambda: defaultdict(list))
    """Of each tensor: the modules that were running, and the weight that read it ('' for any other operation)."""
    partial_params: dict[str, frozenset[str]] = field(default_factory=dict)
    """Whole parameters that work on shares, with the columns that these come from."""
    following: dict[str, tuple[int, ShardedTensorInfo]] = field(default_factory=dict)
    """Parameters and buffers with a number for each divided feature or head: the dimension, and the share that they
    met."""
    grouped: dict[tuple[str, str], tuple[int, frozenset[str]]] = field(default_factory=dict)
    """Modules that treat groups of a share's features apart: the name and the number of the groups."""
    per_head_args: dict[PerHeadInput, frozenset[str]] = field(default_factory=dict)
    """Whole arguments of which each rank takes its heads."""
    sharded_args: dict[str, list[tuple[PerHeadInput, frozenset[str]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Of each block: arguments that are shares already."""
    extra_args: dict[str, str] = field(default_factory=dict)
    """Arguments of blocks, other than the hidden state and what blocks return, that have gradients: of the first block
    that is given each."""
    mla_inputs: dict[str, MlaInput] = field(default_factory=dict)
    """Layers that stay whole and whose output is entered."""
    vocabulary: VocabularyTracker = field(default_factory=VocabularyTracker)
    batch_coupling: BatchCouplingDetector = field(default_factory=BatchCouplingDetector)
    hidden_uses: dict[str, HiddenStateUse] = field(default_factory=dict)
    """By block."""
    obstacles: dict[str, str] = field(default_factory=dict)
    """'writes': a parameter that the forward itself writes to; 'apart': a block that runs where no gradient is
    recorded, as in a backward of the model's
    own; 'again': a block that a checkpoint of the model's own runs once more in backward."""
    alive: list[Any] = field(default_factory=list)

    def begin(self, block: str, own_checkpoint: bool) -> None:
        """A block begins; `kept`: what it keeps for backward is in the hands of the model."""
        for what, found in (("apart", not torch.is_grad_enabled()), ("again", own_checkpoint)):
            if found:
                self.obstacles.setdefault(what, block)
        self.blocks[block] = self.blocks.get(block, 0) + 1

    @property
    def repeated(self) -> list[str]:
        """Blocks that run more than once."""
        return [block for block, times in self.blocks.items() if times > 1]

    def stage_obstacle(self, stacks: Sequence[str]) -> str:
        """Why stages of these lists cannot be entered and left once in a pass, at the calls of their blocks."""
        if no_grad_block := self.obstacles.get("apart"):
            return f"{no_grad_block} runs where torch records no gradient, in a function with a backward of its own"
        if again := self.obstacles.get("again"):
            return f"{again} {OWN_CHECKPOINT_REASON}"
        twice = next((block for block in self.repeated if block.rpartition(".")[0] in stacks), "")
        return f"{twice} runs more than once in a pass" if twice else ""

    def follow(
        self,
        call: OpCall,
        given: list[torch.Tensor],
        outputs: list[torch.Tensor],
        names: dict[int, str],
        stack: list[str],
    ) -> None:
        """One operation, inside the modules of `stack`; outside of all blocks it is empty."""
        self.vocabulary.follow(call, given, outputs, names)
        where, block = (stack[-1], self.inputs[stack[0]]) if stack else (OUTSIDE_BLOCKS, None)
        self.batch_coupling.follow(call, given, outputs, where, block)
