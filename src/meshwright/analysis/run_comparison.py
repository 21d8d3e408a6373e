"""Records a run that is cut where ranks communicate, and compares the records of simulated ranks with that of a full
run. The numeric checks of the analysis use it (simulated_ranks.py, verified_regions.py, verify_experts.py).

The gradient G of a large weight W (rows, columns) would take as much memory as W. So for large weights the comparison
uses a random projection of G. P is a random matrix with k = PROJECTION_COLUMNS columns. The layer treats W as a
constant and adds a product with a matrix Q of zeros. The output of the layer does not change, and the gradient of Q is
a projection of G:

| sharded dimension of W | zeros Q | added to the layer x W^T | gradient of Q |
|---|---|---|---|
| 0, or none | (rows, k) | (x P) Q^T | G P |
| 1 | (k, columns) | (x Q^T) P^T | P^T G |

The projection of a shard of G is the shard of the projection of G along the sharded dimension. The projection of a sum
of gradients is the sum of their projections. If a further operation uses W, the gradient of W from this operation is
computed in full and then projected. Two different gradients have equal projections with probability 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.analysis.code_state import CodeStateSnapshot, state_places
from meshwright.analysis.dry_run import AttributeSnapshot, snapshot_modules
from meshwright.analysis.graph import TpSplit
from meshwright.analysis.own_generators import GeneratorStates, own_generators
from meshwright.analysis.run_conditions import cotangent, relative_difference

PROJECTION_COLUMNS = 8
RandomMatrices = dict[tuple[str, int], torch.Tensor]
"""Maps (name of a weight, dimension that is split over ranks) to the random matrix of the projection."""


class GradProjection(TorchFunctionMode):
    """A mode in which layers that use a matrix in `weights` compute a projection of the gradient of this matrix.

    `splits` are the splits of these matrices over ranks. `matrices` are the random matrices of earlier runs, to which
    the mode adds new ones.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        splits: Mapping[str, TpSplit],
        matrices: RandomMatrices | None = None,
    ) -> None:
        super().__init__()
        known = {} if matrices is None else matrices
        self.weights = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self.probes = {
            id(weight): _WeightProjection(name, weight, splits[name].dim if name in splits else 0, known)
            for name, weight in self.weights.items()
        }

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = WEIGHT_ARG_INDEX.get(function, len(args))
        probe = self.probes.get(id(args[place])) if place < len(args) else None
        if probe is None or (function is functional.embedding and not probe.looks_up(args, kwargs)):
            return function(*args, **kwargs)
        result = function(*args[:place], probe.weight.detach(), *args[place + 1 :], **kwargs)
        if function is functional.linear:
            return result + probe.of_linear(args[0])
        if function is torch.addmm:
            return result + kwargs.get("alpha", 1) * probe.of_addmm(args[1])
        return result + function(args[0], probe.zeros, *args[2:], **kwargs) @ probe.random.T

    def leaves(self) -> dict[str, torch.Tensor]:
        """Returns, by weight name, the matrices of zeros whose gradients are the projections."""
        return {name: self.probes[id(weight)].zeros for name, weight in self.weights.items()}

    def projection(self, name: str, whole: torch.Tensor | None, projected: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the projection of the gradient of the weight `name`, None if the weight got no gradient.

        `whole` is the gradient of the weight itself. `projected` is the gradient of the matrix of zeros of this weight.
        """
        if whole is None:
            return projected
        probe = self.probes[id(self.weights[name])]
        found = probe.random.T @ whole if probe.dim else whole @ probe.random
        return found if projected is None else found + projected


WEIGHT_ARG_INDEX: dict[Any, int] = {functional.linear: 1, functional.embedding: 1, torch.addmm: 2}
"""For each layer function, the position of the weight among the arguments."""


class _WeightProjection:
    """The matrix of zeros of the weight `name`, which is split along `dim`, and the random matrix of its projection.
    The random matrix is equal for the full weight and for every shard.
    """

    def __init__(self, name: str, weight: torch.Tensor, dim: int, known: RandomMatrices) -> None:
        self.weight, self.dim = weight, dim
        rows, columns = weight.shape
        if (name, dim) not in known:
            random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            size = (rows if dim else columns, PROJECTION_COLUMNS)
            known[name, dim] = torch.randn(size, generator=random, dtype=torch.float64).to(weight)
        self.random = known[name, dim]
        self.zeros = weight.new_zeros(
            (PROJECTION_COLUMNS, columns) if self.dim else (rows, PROJECTION_COLUMNS)
        ).requires_grad_()

    def looks_up(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Returns whether the gradient of a call of `functional.embedding` can be projected. It cannot if the call
        scales rows or has sparse gradients, or if the table is split by features.

        The arguments after the weight are padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse.
        """
        odd = (*args[3:4], *args[5:], *(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")))
        return self.dim == 0 and not any(odd)

    def of_linear(self, given: torch.Tensor) -> torch.Tensor:
        """Returns the zero tensor to add to x W^T for the layer input `given`."""
        first, second = (self.zeros, self.random) if self.dim else (self.random.T, self.zeros)
        return functional.linear(functional.linear(given, first), second)

    def of_addmm(self, given: torch.Tensor) -> torch.Tensor:
        """Returns the zero tensor to add to x W for the layer input `given`. The layer stores the transposed weight."""
        return given @ self.random @ self.zeros if self.dim else given @ self.zeros @ self.random.T


SEQUENCE_DIM = 1
"""The sequence dimension of a hidden state (B, T, C)."""
MAX_COMPARED_NUMEL = 1 << 20
"""Maximum number of elements of a tensor that is copied before a run and compared after the run, to find writes by the
forward.
"""

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
CommPoint = tuple[str, int]
"""A communication point: its description, and how often the run had reached this point before."""
ShardFunction = Callable[[torch.Tensor], torch.Tensor] | None
"""A function that slices the shard of a rank out of a full tensor. None if ranks have partial sums."""


@dataclass
class BlockCall:
    """The inputs and the output of a block in one call. `inputs_require_grad` says for each leaf of the inputs whether
    it requires a gradient in training.
    """

    inputs: CallArguments
    output: Any = None
    inputs_require_grad: tuple[bool, ...] = ()


@dataclass
class RankRunRecord:
    """The record of one run on one rank.

    For each communication point, `contributed` has the tensor that the rank passes to the collective, and `received`
    the tensor that the rank continues with. Each tensor comes with the function that slices it out of the full tensor.
    `gradients` are those of `received`, and `param_grads` those of parameters by name. `written` has the values of
    tensors after the run, by name.
    """

    contributed: dict[CommPoint, tuple[torch.Tensor, ShardFunction]] = field(default_factory=dict)
    received: dict[CommPoint, tuple[torch.Tensor, ShardFunction]] = field(default_factory=dict)
    gradients: dict[CommPoint, torch.Tensor] = field(default_factory=dict)
    param_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    written: dict[str, torch.Tensor] = field(default_factory=dict)


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` itself."""
    return tensor


def find_hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the keyword argument `hidden_states` of a module, or the first tensor among its arguments. Returns None
    if there is no tensor.
    """
    given = (kwargs.get("hidden_states"), *args, *kwargs.values())
    return next((value for value in given if isinstance(value, torch.Tensor)), None)


def sequence_shard(rank: int, ranks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that slices the segment of `rank` along the sequence out of a tensor (B, T, ...).

    The function raises ValueError if `ranks` does not divide T.
    """

    def part(tensor: torch.Tensor) -> torch.Tensor:
        length, rest = divmod(tensor.shape[SEQUENCE_DIM], ranks) if tensor.ndim > SEQUENCE_DIM else (0, 1)
        if rest:
            raise ValueError(f"{tuple(tensor.shape)} is not cut along the sequence by {ranks}")
        return tensor.narrow(SEQUENCE_DIM, rank * length, length)

    return part


def compare_comm_points(
    known: RankRunRecord, ranks: Sequence[RankRunRecord], part: str, is_meta: bool = False
) -> str | None:
    """Compares what `ranks` contribute, and the gradients of what they receive, with the full run `known`. Returns a
    description of the first difference, which begins with `part`. Returns None if there is no difference.

    `is_meta`: whether to compare only the shapes of the contributed tensors and not their values.
    """
    for number, record in enumerate(ranks):
        if record.contributed.keys() != known.contributed.keys():
            (missing, _), *_ = sorted(record.contributed.keys() ^ known.contributed.keys())
            return f"{part} {missing} is not computed as often as in the full run (rank {number})"
    for key, (there, _) in known.contributed.items():
        if (
            why := _describe_difference([record.contributed[key] for record in ranks], there, 0.0, is_meta)
        ) is not None:
            return f"{part} {key[0]} {why}"
    scale = max((float(tensor.norm()) for tensor in known.gradients.values()), default=0.0)
    for key, there in known.gradients.items():
        if any(key not in record.gradients for record in ranks):
            return f"{part} no gradient reaches {key[0]}"
        here = [(record.gradients[key], record.received[key][1]) for record in ranks]
        if (why := _describe_difference(here, there, scale)) is not None:
            return f"{part} the gradient of {key[0]} {why}"
    return None


def _describe_difference(
    here: Sequence[tuple[torch.Tensor, ShardFunction]], there: torch.Tensor, scale: float = 0.0, is_meta: bool = False
) -> str | None:
    there = there.detach()
    if here[0][1] is None and all(tensor.shape == there.shape for tensor, _ in here):
        total = here[0][0].detach().clone()
        for tensor, _ in here[1:]:
            total += tensor.detach()
        pairs = [(total, there)]
    else:
        pairs = [(tensor.detach(), there if own is None else own(there)) for tensor, own in here]
    for one, two in pairs:
        if one.shape != two.shape:
            return f"is {tuple(one.shape)} instead of {tuple(two.shape)}"
        if not is_meta and (off := relative_difference(one, two, scale)) is not None:
            return (
                f"differs by {off:.1e}"
                if here[0][1] is not None
                else f"differs from the full run by {off:.1e} when summed over ranks"
            )
    return None


def compare_param_grads(
    known: RankRunRecord, ranks: Sequence[RankRunRecord], part: str, summed: dict[str, bool] | None = None
) -> str | None:
    """Compares the gradients of parameters on `ranks` with the full run `known`. Returns a description of the first
    difference, None if there is none.

    Every rank must compute the full gradient. If `summed` is not None, the gradients of all ranks may instead add up to
    the full gradient. `summed` records for each parameter whether its gradients add up. This must not change between
    calls.
    """
    scale = max((float(tensor.norm()) for tensor in known.param_grads.values()), default=0.0)
    for name in dict.fromkeys([*known.param_grads, *(name for record in ranks for name in record.param_grads)]):
        like = next(record.param_grads[name] for record in (known, *ranks) if name in record.param_grads)
        there = known.param_grads.get(name, torch.zeros_like(like))
        found = [record.param_grads.get(name, torch.zeros_like(like)) for record in ranks]
        off = next((off for one in found if (off := relative_difference(one, there, scale)) is not None), None)
        if off is None and not (summed and summed.get(name)):
            if summed is not None and there.any():
                summed[name] = False
            continue
        if summed is not None and summed.get(name, True) and _sums_to_full(found, there, scale):
            summed[name] = True
            continue
        return f"{part} the gradient of {name} differs by {off or 1.0:.1e}"
    return None


def _sums_to_full(found: Sequence[torch.Tensor], there: torch.Tensor, scale: float) -> bool:
    return (
        all(one.shape == there.shape for one in found)
        and relative_difference(torch.stack(list(found)).sum(0), there, scale) is None
    )


def run_backward(
    record: RankRunRecord, known: RankRunRecord, parameters: Mapping[str, torch.Tensor], projected: GradProjection
) -> None:
    """Computes the gradients of the run `record` and stores them in `record`.

    Backward begins at every contributed tensor with a random gradient, or with the shard of this gradient that belongs
    to the rank. The random gradient has the shape that the tensor has in the full run `known`. Parameters in
    `projected` get the projection of their gradient.
    """
    terms = []
    for number, (key, (there, _)) in enumerate(known.contributed.items()):
        if key in record.contributed and record.contributed[key][0].requires_grad:
            tensor, own = record.contributed[key]
            weight = cotangent(there.shape, there, number)
            weight = weight if own is None else own(weight)
            if tensor.shape == weight.shape:  # the comparison reports a differing shape
                terms.append((tensor * weight).sum())
    named = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
    leaves = {key: leaf for key, (leaf, _) in record.received.items() if leaf.requires_grad}
    if not terms:
        return
    total = torch.stack([term.to(terms[0]) for term in terms]).sum()
    probes = projected.leaves()
    found = torch.autograd.grad(total, [*leaves.values(), *named.values(), *probes.values()], allow_unused=True)
    gradients = zip(leaves.items(), found, strict=False)
    of_probes = dict(zip(probes, found[len(leaves) + len(named) :], strict=True))
    of_named: dict[str, torch.Tensor | None] = dict(zip(named, found[len(leaves) :], strict=False))
    of_named |= {name: projected.projection(name, of_named[name], one) for name, one in of_probes.items()}
    record.gradients = {key: torch.zeros_like(leaf) if one is None else one for (key, leaf), one in gradients}
    record.param_grads = {name: one for name, one in of_named.items() if one is not None}


def clone_if_small(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a small tensor, because a run may write to the tensor. Returns a large tensor itself."""
    if tensor.numel() > MAX_COMPARED_NUMEL:
        return tensor
    found = tensor.detach().clone()
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


class ModuleSnapshot:
    """Stores what a run of `root` may write: small parameters and buffers, attributes of all modules, shared state of
    their code, and the states of the model's own random generators."""

    def __init__(self, root: nn.Module) -> None:
        tensors_of = [one for module in root.modules() for one in (module._buffers, module._parameters)]
        self.attributes: list[AttributeSnapshot | CodeStateSnapshot] = [
            *snapshot_modules(root.modules()),
            *map(AttributeSnapshot, tensors_of),
            CodeStateSnapshot(state_places(root)),
        ]
        self.generators = GeneratorStates(own_generators(root))
        tensors = (*root.parameters(), *root.buffers())
        self.values = [
            (tensor, tensor.detach().clone())
            for tensor in tensors
            if tensor.numel() <= MAX_COMPARED_NUMEL and not tensor.is_meta
        ]

    def restore(self) -> None:
        """Restores the attributes, the values of the tensors, and the states of the generators."""
        self.generators.restore()
        for attributes in self.attributes:
            attributes.restore()
        for tensor, numbers in self.values:
            if not torch.equal(tensor.detach(), numbers):
                tensor.data.copy_(numbers)


# --- skipped blocks


@contextmanager
def skip_blocks(model: nn.Module, lists: Sequence[str], run: Sequence[str]) -> Iterator[None]:
    """Makes the blocks of `lists` that are not in `run` return their hidden state. The returned structure is that of
    the last output of a block in `run` of the same list, or a bare tensor if none has run. Restores all blocks on exit.
    """
    form: dict[str, Any] = {}
    undo: list[tuple[nn.Module, Any]] = []

    def change(path: str, stack: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if path in run:
                form[stack] = forward(*args, **kwargs)
                return form[stack]
            return (
                replace_first_tensor(form[stack], find_hidden_states(args, kwargs))
                if stack in form
                else find_hidden_states(args, kwargs)
            )

        return call

    try:
        for stack in lists:
            for name, block in model.get_submodule(stack).named_children():
                undo.append((block, vars(block).get("forward")))
                block.forward = change(f"{stack}.{name}", stack, block.forward)  # type: ignore[method-assign]
        yield
    finally:
        for block, own in undo:
            if own is None:
                del block.forward
            else:
                block.forward = own


def replace_first_tensor(form: Any, hidden: torch.Tensor) -> Any:
    """Returns a copy of `form`, the output of a block, with `hidden` as its first tensor."""
    leaves, spec = tree_flatten(form)
    place = next((place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)), None)
    return hidden if place is None else tree_unflatten([*leaves[:place], hidden, *leaves[place + 1 :]], spec)
