"""Defines the log of one traced forward: products with weights, sharded tensors and their uses. op_trace.py writes the
log, and regions.py builds tensor-parallel regions from it. A region consists of column layers and the row layers that
read their outputs. At its entry every rank has the full input.

Three trackers follow the operations of the forward. `MlaInputTracker` follows outputs of unsharded layers that only
sharded tensors use. `VocabularyTracker` determines whether the vocabulary can be sharded. `ParamDependence` finds
tensors whose values depend on parameters, with or without a gradient. A pipeline stage without these parameters cannot
compute such a tensor.

[Note: MLA inputs] In multi-head latent attention, all heads use one compressed key and one rotary key. An unsharded
layer computes these keys. Its output may reach sharded tensors in two ways:

- Column layers read the output. The entry of these layers sums the gradient of the output over ranks.
- An operation combines the output with a sharded tensor, as for the rotary key. Then each rank has only a partial
  gradient of the output.

In the second case the output of the layer becomes an entry: forward is the identity, and backward sums the gradient
over the ranks once. For this, every tensor that is computed from the output must end in sharded tensors of one region.
Parameters between the entry and the sharded tensors, such as the norm of the latent, get partial gradients. If the
output has any other consumer, such as a residual connection, partial and full gradients would mix. Then the column
layers stay unsharded. Source: DeepSeek-AI, DeepSeek-V2 (2024), section 2.1.

[Note: vocabulary] An embedding can be sharded by rows if its layer computes each output element independently, except
for a constant scale. A rank returns zeros for rows that it does not store. So a norm inside the layer (Inkling) would
read zeros for tokens whose rows other ranks store. Logits can be sharded for a cross-entropy if each logit is computed
independently. Code may scale, cap or reshape them, or combine them with a parameter that has one entry for each token
id. Such a parameter is sharded like the logits. In two cases the code would mistake a shard for the full tensor, so the
weight stays unsharded. First, an operation reads the logits of all token ids (a softmax, a mean, a slice, a mask, a
buffer such as BART's bias). Second, code outside of the layer reads the weight (`F.linear(x, table.weight)`).

[Note: dependence] A tensor depends on a parameter if it is computed from this parameter, directly or through other
tensors. A result that uses only the shape or dtype of a tensor (`zeros_like`, y in `x.to(y)`) does not depend on it.
Dependence does not require a gradient. For example, positions that are read under `no_grad` (RoFormer) and a mask that
marks zeros of an embedding depend on weights.
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

from meshwright.analysis.batch_coupling import BatchCouplingDetector
from meshwright.analysis.propagation import FIRST_INPUT_OPS, RESHAPE_OPS, OpCall, ShardedTensorInfo, tensors_of
from meshwright.analysis.recompute_tape import OWN_CHECKPOINT_REASON
from meshwright.core.messages import Message


@dataclass
class MlaInput:
    """An unsharded layer whose output may be a region entry ([Note: MLA inputs]).

    `consumers` are the column layers of the sharded tensors that the output reaches. `needed` are the consumers that
    need an entry at the output. `parameters` are full parameters that are applied between the output and the sharded
    tensors. `rejected` says why the output cannot be an entry, '' if it can.
    """

    consumers: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    parameters: dict[str, None] = field(default_factory=dict)
    rejected: str = ""


class MlaInputTracker:
    """Follows the outputs of unsharded layers through the operations of a forward ([Note: MLA inputs]). Layers are
    identified by path.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, MlaInput] = defaultdict(MlaInput)
        self.layers_by_tensor: dict[int, frozenset[str]] = {}

    def begin(self, layer: str, output: torch.Tensor) -> None:
        """Records that the unsharded layer at path `layer` computed `output`."""
        if layer in self.inputs:
            self.inputs[layer].rejected = "it runs twice"
        self.inputs[layer]
        self.layers_by_tensor[id(output)] = frozenset({layer})

    def sources(self, tensor: torch.Tensor) -> frozenset[str]:
        """Returns the paths of the unsharded layers that `tensor` is computed from."""
        return self.layers_by_tensor.get(id(tensor), frozenset())

    def follow(
        self,
        name: str,
        given: list[torch.Tensor],
        outputs: list[torch.Tensor],
        shares: dict[int, frozenset[str]],
        made: dict[int, tuple[str, ...]],
    ) -> None:
        """Follows one operation from its inputs to its outputs.

        `shares` has the column layers of each sharded output. `made` has the names of the parameters of each tensor
        that is computed from parameters alone. The keys of both are tensor ids.
        """
        layers = frozenset().union(*(self.sources(tensor) for tensor in given))
        if not layers:
            return
        ends = frozenset().union(*shares.values()) if shares else frozenset()
        for layer in layers:
            self.inputs[layer].consumers |= ends
        whole = [tensor for tensor in outputs if id(tensor) not in shares and tensor.requires_grad]
        begun = frozenset().union(*(self.sources(tensor) for tensor in whole)) - layers
        if begun:
            self.reject(layers, Message("{begun} is not sharded and reads it", begun=min(begun)))
        for tensor in whole if not begun else ():
            self.layers_by_tensor[id(tensor)] = layers
        if not whole:
            return
        if (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))) and not self.sources(given[0]):
            self.reject(layers, Message("it is written into another tensor"))
        for tensor in given:
            if id(tensor) in made:
                for layer in layers:
                    self.inputs[layer].parameters.update(dict.fromkeys(made[id(tensor)]))
            elif tensor.requires_grad and not self.sources(tensor):
                self.reject(layers, Message("it is combined with a replicated tensor"))

    def reject(self, layers: Iterable[str], why: str) -> None:
        """Records the reason `why` the output of `layers` cannot be a region entry."""
        for layer in layers:
            self.inputs[layer].rejected = self.inputs[layer].rejected or why

    def can_serve(self, tensor: torch.Tensor, columns: frozenset[str]) -> bool:
        """Records that `columns` need an entry at the output of the unsharded layers that `tensor` comes from. Returns
        whether there are such layers.
        """
        layers = self.sources(tensor)
        for layer in layers:
            self.inputs[layer].needed |= columns
        return bool(layers)

    def entry_inputs(self) -> dict[str, MlaInput]:
        """Returns, by path, the layers that need a region entry at their output, including rejected layers."""
        return {layer: inflow for layer, inflow in self.inputs.items() if inflow.needed}


ELEMENTWISE_OPS = frozenset(
    {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "mul",
     "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "true_divide", "__truediv__", "__itruediv__", "neg",
     "__neg__", "tanh", "tanh_", "sigmoid", "clamp", "clamp_", "clip", "float", "double", "half", "bfloat16", "to",
     "type", "type_as", "dropout", "masked_fill", "masked_fill_", "__getitem__"}
)  # fmt: skip
"""Functions that compute each element independently."""
TABLE_WIDE_OPTIONS = ("max_norm", "scale_grad_by_freq")
"""Options of an embedding that scale rows of its table or their gradients. They prevent sharding of the table."""


@dataclass
class VocabularyTracker:
    """Determines in one forward whether the vocabulary can be sharded ([Note: vocabulary]).

    `embeddings` are weights whose rows are selected by token ids. `outside_products` are matrix products outside of
    blocks, with the weight and the number of output features. `problems` are the weights that must stay unsharded, with
    the reason. Logits may be combined with parameters that have one entry for each token id. `per_word_params` maps the
    weight of the logits to these parameters, each with the dimension of the entries.
    """

    embeddings: list[str] = field(default_factory=list)
    outside_products: list[tuple[str, int]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    per_word_params: dict[str, dict[str, int]] = field(default_factory=dict)
    running: list[nn.Module] = field(default_factory=list)
    logits: dict[int, str] = field(default_factory=dict)

    def attach(self, model: nn.Module) -> list[Any]:
        """Registers hooks on all `nn.Linear` and `nn.Embedding` modules, which may be vocabulary layers. Returns the
        hook handles.
        """

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
        """Follows one operation. `names` are parameter names by tensor id."""
        layer = self.running[-1] if self.running else None
        table = next(
            (outer._parameters.get("weight") for outer in self.running if isinstance(outer, nn.Embedding)), None
        )
        if id(table) in names and not (call.name == "embedding" and any(tensor is table for tensor in given)):
            self._check_lookup_output(call, table, given, names)
        own = (
            {id(tensor) for tensor in layer._parameters.values() if tensor is not None} if layer is not None else set()
        )
        for tensor in given:
            weight = names.get(id(tensor))
            if weight is None or tensor.ndim < 2:
                continue
            if id(tensor) not in own or call.name not in ("linear", "embedding"):
                self.problems.setdefault(
                    weight, f"it is read outside of a plain linear or embedding layer ({call.name})"
                )
            elif call.name == "linear":
                self.logits.update({id(output): weight for output in outputs})
            elif any(getattr(layer, name) for name in TABLE_WIDE_OPTIONS):
                self.problems.setdefault(
                    weight, "its layer scales rows or their gradients (max_norm or scale_grad_by_freq)"
                )
        logits_weight = next((self.logits[id(tensor)] for tensor in given if id(tensor) in self.logits), None)
        if logits_weight is not None:
            self._follow_logits(call, logits_weight, given, outputs, names)

    def _check_lookup_output(self, call: OpCall, table: Any, given: list[torch.Tensor], names: dict[int, str]) -> None:
        """Records a problem if the operation `call` inside an embedding module could give different results on a shard
        of the table. This is the case if it reads token ids (which a rank shifts to its shard) or other parameters, or
        if it is not elementwise. `call` is not the lookup itself.
        """
        meets_parameter = any(id(tensor) in names and tensor is not table for tensor in given)
        ids = any(not tensor.is_floating_point() for tensor in given)
        if meets_parameter or ids or call.name not in ELEMENTWISE_OPS | RESHAPE_OPS:
            self.problems.setdefault(names[id(table)], f"its {'ids' if ids else 'rows'} go through {call.name}")

    def _follow_logits(
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
        is_elementwise &= call.name not in RESHAPE_OPS or size not in tuple(
            filter(lambda leaf: isinstance(leaf, int), torch.utils._pytree.tree_leaves(call.args[1:]))
        )
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
            self.problems.setdefault(logits_weight, f"its output goes through {call.name}")


class ParamDependence(TorchFunctionMode):
    """Tracks which parameters a tensor depends on. Use it as a mode, or call `follow` for each function. `names` maps
    tensor ids to parameter names.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = list(names.values())
        self.marks = {id_: 1 << place for place, id_ in enumerate(names)}
        self.alive: list[torch.Tensor] = []  # references the tensors, so that no id is reused

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self.marks

    def parameters_of(self, tensor: torch.Tensor) -> set[str]:
        """Returns the names of the parameters that `tensor` depends on."""
        mark = self.marks.get(id(tensor), 0)
        return {name for place, name in enumerate(self.names) if mark >> place & 1}

    def follow(self, name: str, given: Sequence[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """Propagates the dependence from the inputs of one function to its outputs."""
        mark = 0
        for tensor in given[:1] if name in FIRST_INPUT_OPS else given:
            mark |= self.marks.get(id(tensor), 0)
        if mark and not name.endswith("_like") and not name.startswith("new_"):
            found = given[:1] if name == "__setitem__" else list(outputs)
            self.marks |= {id(tensor): mark | self.marks.get(id(tensor), 0) for tensor in found}
            self.alive.extend(found)

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.follow(getattr(function, "__name__", ""), tensors_of((args, kwargs)), tensors_of(result))
        return result


class ModuleArguments:
    """Stores which tensors modules received as arguments, and the views of these tensors, by tensor id."""

    def __init__(self) -> None:
        self.positions: dict[int, list[tuple[str, int | str]]] = defaultdict(list)
        """Maps each tensor to the modules that received it, each with the position or name of the argument."""
        self.sources: dict[int, torch.Tensor] = {}

    def add_views(self, source: torch.Tensor, views: list[torch.Tensor]) -> None:
        """Records `views` of `source`."""
        self.sources.update({id(tensor): source for tensor in views if tensor is not source})

    def find(self, tensor: torch.Tensor, running: list[str]) -> tuple[torch.Tensor, tuple[str, int | str] | None]:
        """Returns the argument that `tensor` is a view of. Also returns the innermost of the modules `running` that
        received this argument, with its position or name. Returns `tensor` and None if no running module received it.
        """
        source: torch.Tensor | None = tensor
        while source is not None:
            place = next((place for place in reversed(self.positions.get(id(source), ())) if place[0] in running), None)
            if place is not None:
                return source, place
            source = self.sources.get(id(source))
        return tensor, None


OUTSIDE_BLOCKS = "the model's own forward"
"""The name for code outside of all modules inside the blocks."""


@dataclass
class WeightProduct:
    """A product with a weight inside a block, or a lookup in a table (`is_table`) with one entry for each head."""

    weight: str
    bias: str | None
    owner: str
    dim: int
    """Dimension of the weight that indexes the output features."""
    size: int
    source: torch.Tensor
    """The input of the module that owns the weight, or the operand if the weight is read outside of its module."""
    columns: frozenset[str]
    """Column layers whose sharded outputs the product reads. Empty if the product is itself a column layer."""
    is_table: bool = False
    has_sequence_dim: bool = False
    """Whether the input is (batch, sequence, features), so that sequence parallelism can split it."""
    mla_sources: frozenset[str] = frozenset()
    """Unsharded layers that the input is computed from."""
    cuts: set[int] = field(default_factory=set)
    """Offsets in the output features at which the forward slices the product."""
    grains: dict[tuple[int, int], int] = field(default_factory=dict)
    """Maps each slice (start, stop) of the output features to the smallest number of heads that it is reshaped to."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Returns the sizes of the parts of a fused product along the features, () for a product with one part."""
        bounds = sorted({0, self.size, *self.cuts})
        return tuple(stop - start for start, stop in itertools.pairwise(bounds)) if len(bounds) > 2 else ()

    def shard_limits(self) -> tuple[int, ...]:
        """Returns the maximum number of shards of each of `parts` (or of the only part)."""
        bounds = sorted({0, self.size, *self.cuts})
        ways = []
        for start, stop in itertools.pairwise(bounds):
            seen = [grain for (first, last), grain in self.grains.items() if first <= start and stop <= last]
            ways.append(min(seen, default=stop - start))
        return tuple(ways)


@dataclass
class AttentionScores:
    """A product of queries and keys, and the number of heads that its shape shows."""

    columns: frozenset[str]
    heads: int


@dataclass(frozen=True)
class PerHeadInput:
    """A module argument with one entry for each of `size` heads along `dim`. `argument` is its position or name."""

    path: str
    argument: int | str
    dim: int
    size: int


class HiddenStateUse(NamedTuple):
    """Describes how a block uses the hidden state."""

    same_shape: bool
    """Whether the block returns the shape that it receives."""
    from_block: bool
    """Whether the block's input is the output of another block."""
    num_outputs: int
    """Number of values in the tuple or list that the block returns, 0 for a bare tensor."""


@dataclass
class TraceLog:
    """The log of one forward. Tensors are identified by `id`. `alive` references them, so that no id is reused."""

    order: dict[str, int] = field(default_factory=dict)
    """Parameters in the order of their first use."""
    blocks: dict[str, int] = field(default_factory=dict)
    """Paths of the blocks in forward order, with the number of runs of each."""
    products: dict[str, list[WeightProduct]] = field(default_factory=lambda: defaultdict(list))
    attentions: dict[str, list[AttentionScores]] = field(default_factory=lambda: defaultdict(list))
    """Products with weights (`products`), and products of queries and keys (`attentions`), of each block in forward
    order.
    """
    problems: dict[str, str] = field(default_factory=dict)
    """Maps the weights of column layers that must stay unsharded to the reason."""
    problem_times: dict[str, int] = field(default_factory=dict)
    """Maps each weight in `problems` to a number that increases in the order of detection. Weights that one operation
    rejects have equal numbers.
    """
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """The first input of each module inside the blocks."""
    uses: dict[int, list[tuple[tuple[str, ...], str]]] = field(default_factory=lambda: defaultdict(list))
    """Maps each tensor id to the uses of the tensor. A use has the stack of running modules, and the weight of the
    product ('' for other operations).
    """
    partial_params: dict[str, frozenset[str]] = field(default_factory=dict)
    """Full parameters that are applied to sharded tensors, with the column layers of these tensors."""
    following: dict[str, tuple[int, ShardedTensorInfo]] = field(default_factory=dict)
    """The parameters and buffers with one entry for each sharded feature or head. Each comes with the dimension of the
    entries and the sharded tensor that it is applied to.
    """
    grouped: dict[tuple[str, str], tuple[int, frozenset[str]]] = field(default_factory=dict)
    """Modules that process groups of sharded features separately. Maps (path, attribute) to the number of groups and
    the column layers of the features.
    """
    per_head_args: dict[PerHeadInput, frozenset[str]] = field(default_factory=dict)
    """Full arguments with one entry for each head, with the column layers of the heads. Each rank slices them."""
    sharded_args: dict[str, list[tuple[PerHeadInput, frozenset[str]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Maps each block to the arguments that an earlier block has already sharded by heads, with the column layers of
    the heads.
    """
    extra_args: dict[str, str] = field(default_factory=dict)
    """Maps the names of block arguments that depend on parameters, except the hidden state and outputs of blocks, to
    the first block that receives them.
    """
    mla_inputs: dict[str, MlaInput] = field(default_factory=dict)
    """Unsharded layers whose output is a region entry, by path."""
    vocabulary: VocabularyTracker = field(default_factory=VocabularyTracker)
    batch_coupling: BatchCouplingDetector = field(default_factory=BatchCouplingDetector)
    hidden_uses: dict[str, HiddenStateUse] = field(default_factory=dict)
    """Describes how each block uses the hidden state."""
    obstacles: dict[str, str] = field(default_factory=dict)
    """Reasons why a feature is unsupported. Keys and values:

    - 'writes': a parameter that the forward writes to;
    - 'no_grad': a block that runs without recorded gradients, as in a custom autograd function;
    - 'again': a block that the model itself checkpoints, so that it runs again in backward.
    """
    alive: list[Any] = field(default_factory=list)

    def begin(self, block: str, own_checkpoint: bool) -> None:
        """Records the start of a block. `own_checkpoint`: whether the model itself checkpoints the activations of the
        block.
        """
        for what, found in (("no_grad", not torch.is_grad_enabled()), ("again", own_checkpoint)):
            if found:
                self.obstacles.setdefault(what, block)
        self.blocks[block] = self.blocks.get(block, 0) + 1

    @property
    def repeated(self) -> list[str]:
        """Returns the paths of the blocks that run more than once."""
        return [block for block, times in self.blocks.items() if times > 1]

    def stage_obstacle(self, stacks: Sequence[str]) -> str:
        """Returns why the stacks cannot be cut into stages, '' if they can. A stage must begin and end exactly once in
        a forward, at the calls of its blocks.
        """
        if no_grad_block := self.obstacles.get("no_grad"):
            return Message(
                "{no_grad_block} runs inside a custom autograd function or torch.no_grad, where torch records no "
                "gradients",
                no_grad_block=no_grad_block,
            )
        if again := self.obstacles.get("again"):
            return f"{again} {OWN_CHECKPOINT_REASON}"
        twice = next((block for block in self.repeated if block.rpartition(".")[0] in stacks), "")
        return Message("{twice} runs more than once in a pass", twice=twice) if twice else ""

    def follow(
        self,
        call: OpCall,
        given: list[torch.Tensor],
        outputs: list[torch.Tensor],
        names: dict[int, str],
        stack: list[str],
    ) -> None:
        """Follows one operation inside the modules of `stack`. `stack` is empty outside of the blocks."""
        self.vocabulary.follow(call, given, outputs, names)
        where, block = (stack[-1], self.inputs[stack[0]]) if stack else (OUTSIDE_BLOCKS, None)
        self.batch_coupling.follow(call, given, outputs, where, block)
