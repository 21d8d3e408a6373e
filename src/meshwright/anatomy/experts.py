"""Finds the experts of a mixture: the module that is given hidden states, the numbers of each token's experts and their weights.

Rule: inside the blocks, a module whose forward takes just these three (or rows of each expert alone), whose parameters are all stacked expert by expert along their first
dimension, and which computes each pair of token and expert by itself. What follows from it is proven with numbers (as in prove.py):
- a rank that holds some of the experts, given the pairs that are theirs, computes its part of the sum (expert parallelism);
- a pair of no expert (a number beyond all) weighs nothing, where the module takes one;
- a weight on the output is a factor, so that it may be applied where the token came from;
- tensor ranks that hold a share of each expert's inner features compute parts of the sum. A bias behind the inner features is whole on every
  rank, and each adds its part of it (`once`).
Which dimension is the inner one, and how a fused projection is cut, is tried until the numbers agree. Models without data (on the meta
device) are lent numbers where ranks are to be shared by what is found, else taken at their shapes. Experts in a plain list that the block itself runs through stay whole, and are said.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.anatomy.lent import LENT, lent
from meshwright.anatomy.nouns import Anatomy, Experts, Split, local_slice

TOLERANCE = 1e-3
"""Relative, in float32: rounding stays below 1e-5, a wrong layout is of the order of 1."""

WHOLE = " stays whole"
"""How a sentence ends that says why sequence parallelism would be wrong: a matrix that may mix places of the sequence."""

TRIALS = 64
"""Ways to cut an expert that are tried at most."""


@dataclass(frozen=True)
class Way:
    """One way that tensor ranks may share an expert; names are relative to the module."""

    splits: dict[str, Split]
    once: tuple[str, ...]
    width: int


def has_experts(model: nn.Module) -> bool:
    """Whether any module of `model` may be one of stacked experts."""
    return any(_count(module) or _count_by_rows(module) for module in model.modules())


def find_experts(
    model: nn.Module, lists: Sequence[str], widths: Mapping[str, int], said: list[str], lend: bool = False
) -> tuple[Experts, ...]:
    """All of them in forward order. `widths`: features of what each module inside the blocks is given. `lend`: modules without numbers are lent some."""
    found: list[Experts] = []
    known: dict[object, Experts | None] = {}
    for path, module in (one for blocks in lists for one in model.get_submodule(blocks).named_modules(prefix=blocks)):
        pairs = _count(module)
        count = pairs or _count_by_rows(module)
        if not count or path not in widths or any(path.startswith(f"{other.path}.") for other in found):
            continue
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
        key = (type(module), count, shapes)
        if key not in known:
            with _with_numbers(module, lend):
                known[key] = _understood(module, path, count, not pairs, widths[path], said)
        like = known[key]
        if like is not None:
            found.append(replace(like, path=path))
    return tuple(found)


def add_experts(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, torch.Tensor], lend: bool = False) -> Anatomy:
    """`anatomy` with the experts of the model. `inputs`: what each module inside the blocks was given in a run."""
    said: list[str] = []
    hidden = model.get_parameter(f"{anatomy.embedding}.weight").shape[1] if anatomy.embedding else 0
    widths = {path: hidden for path, _ in model.named_modules()} if hidden else {}  # where the model cannot be run by shapes
    widths |= {path: tensor.shape[-1] for path, tensor in inputs.items() if tensor.ndim}
    lists = [stack for stack, _ in anatomy.stacks] or ([anatomy.blocks] if anatomy.blocks else [])
    found = find_experts(model, lists, widths, said, lend)
    splits = {f"{experts.path}.{name}": split for experts in found for name, split in experts.splits.items()}
    widths_shared = [experts.width for experts in found if experts.splits]
    divisible = {"moe_ffn": math.gcd(*widths_shared)} if widths_shared else {}
    names = tuple(name for name in anatomy.replicated if name not in splits)
    against = anatomy.against_sequence
    if against.endswith(WHOLE):
        apart = tuple(f"{path}." for path in tokenwise(model, found, widths, lend))
        names_left = (name for name in names if name.startswith(f"{anatomy.blocks}.") and not name.startswith(apart or ("\n",)))
        left = next((name for name in names_left if model.get_parameter(name).ndim > 1), None)
        against = f"{left}{WHOLE}" if left else anatomy.against.get("slices", "")
    return replace(
        anatomy,
        experts=found,
        against={**anatomy.against, "sequence": against},
        splits={**anatomy.splits, **splits},
        divisible={**anatomy.divisible, **divisible},
        partial=(*anatomy.partial, *(f"{experts.path}.{name}" for experts in found for name in experts.once)),
        understood=(*anatomy.understood, *said),
        replicated=names,
    )


def tokenwise(model: nn.Module, found: tuple[Experts, ...], widths: Mapping[str, int], lend: bool = False) -> list[str]:
    """The modules around the experts (router and all) that give for a piece of the sequence that piece of what they give for all of it."""
    known: dict[type, bool] = {}
    paths = [experts.path.rpartition(".")[0] for experts in found]
    for path in paths:
        module = model.get_submodule(path)
        if type(module) not in known:
            with _with_numbers(module, lend):
                known[type(module)] = _is_tokenwise(module, widths.get(path, 0))
    return [path for path in paths if known[type(model.get_submodule(path))]]


def _is_tokenwise(module: nn.Module, width: int) -> bool:
    parameters = list(module.parameters())
    if not width or any(tensor.is_meta for tensor in parameters):
        return bool(width)
    given = torch.randn(2, 6, width, generator=torch.Generator().manual_seed(0)).to(parameters[0].device, parameters[0].dtype)
    try:
        with torch.no_grad():
            whole, *pieces = [
                next(_tensors(module(piece))).float() for piece in (given, given[:, :2].contiguous(), given[:, 2:].contiguous())
            ]
            return bool((torch.cat(pieces, 1) - whole).norm() <= TOLERANCE * whole.norm())
    except Exception:
        return False


def _with_numbers(module: nn.Module, lend: bool) -> AbstractContextManager[None]:
    """Numbers for parameters without memory, where a module of that size may have them for a while."""
    small = sum(parameter.numel() for parameter in module.parameters()) <= LENT
    return lent(module, lambda path: True) if lend and small else nullcontext()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output, which may be a tuple."""
    yield from [output] if isinstance(output, torch.Tensor) else [each for each in output if isinstance(each, torch.Tensor)]


def _count(module: nn.Module) -> int:
    """How many experts are stacked in `module`; 0 where it is no such module."""
    shapes = [parameter.shape for parameter in module.parameters()]
    takes = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    if len(shapes) < 2 or takes.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) != 3 or not all(shapes):
        return 0
    counts = {value for path, _, value in _counters(module) if not path}
    stacked = {shape[0] for shape in shapes}
    if len(stacked) == 1 and sum(len(shape) == 3 for shape in shapes) >= 2:
        return max(stacked) if max(stacked) > 1 else 0
    return next((count for count in sorted(counts) if count > 1 and all(size % count == 0 for size in stacked)), 0)


def _count_by_rows(module: nn.Module) -> int:
    """How many experts are stacked in a module that is given rows for each of them, those of one expert behind those of the other (Llama 4: a token's row
    for an expert that it did not choose is zero); 0 where it is no such module."""
    shapes = [parameter.shape for parameter in module.parameters()]
    takes = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    stacked = {shape[0] for shape in shapes if shape}
    if takes != [inspect.Parameter.POSITIONAL_OR_KEYWORD] or len(stacked) != 1 or sum(len(shape) == 3 for shape in shapes) < 2:
        return 0
    said = {value for path, _, value in _counters(module) if not path}
    return max(stacked) if max(stacked) > 1 and stacked <= said else 0


def _counters(module: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Integers of the module, and of those inside it, that may count experts: path, name, value."""
    for path, inside in module.named_modules():
        for name, value in vars(inside).items():
            if type(value) is int and "expert" in name:
                yield path, name, value


def _understood(module: nn.Module, path: str, count: int, by_rows: bool, width: int, said: list[str]) -> Experts | None:
    """What is known of `module`, or None with the reason said."""
    counters = tuple((where, name) for where, name, value in _counters(module) if value == count)
    plain = Experts(path, count, tuple(name for name, _ in module.named_parameters()), counters, by_rows=by_rows)
    ways = list(itertools.islice(_ways(module, count, width), TRIALS))
    if any(tensor.is_meta for tensor in module.parameters()):
        way: Way | None = ways[0] if ways else None
    else:
        try:
            proof = Proof(module, plain, width)
            if not proof.divides():
                said.append(f"{path}: {count} experts stay whole: what one computes is not its part of the sum")
                return None
            way = next((each for each in ways if proof.shares(each)), None)
        except Exception as error:
            said.append(f"{path} stays whole: it does not run by itself ({(str(error).splitlines() or [''])[0][:100]})")
            return None
    if way is None:
        said.append(f"{count} experts in {path}, each of them whole on a tensor rank")
        return plain
    said.append(f"{count} experts in {path}, each shared by its {way.width} inner features")
    return replace(plain, splits=way.splits, once=way.once, width=way.width)


def _ways(module: nn.Module, count: int, width: int) -> Iterator[Way]:
    """Ways to cut every expert by its inner features, the likeliest first."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    weights = [name for name, shape in shapes.items() if len(shape) == 3 and shape[0] == count]
    if not weights or any(shape[0] != count or len(shape) not in (2, 3) for shape in shapes.values()):
        return
    turned = bool(getattr(module, "is_transposed", False))
    joined = bool(getattr(module, "is_concatenated", True))
    fitting = [
        dims
        for dims in itertools.product((1, 2), repeat=len(weights))
        if all(shapes[name][3 - dim] == width for name, dim in zip(weights, dims, strict=True))
    ]
    expected = (*[2 if turned else 1] * (len(weights) - 1), 1 if turned else 2)
    if expected in fitting and any(tensor.is_meta for tensor in module.parameters()):
        fitting = [expected]
    for dims in fitting:
        inner = {name: shapes[name][dim] for name, dim in zip(weights, dims, strict=True)}
        features = min(inner.values())
        if any(size % features for size in inner.values()):
            continue
        for together in (joined, not joined):
            cuts = {name: _cut(dim, inner[name], features, together) for name, dim in zip(weights, dims, strict=True)}
            options: list[list[Split | None]] = [[cuts[name]] if name in cuts else [] for name in shapes]
            for option, (name, shape) in zip(options, shapes.items(), strict=True):
                if name not in cuts and shape[1] in inner.values():
                    option.append(_cut(1, shape[1], features, together))
                if name not in cuts and shape[1] == width:
                    option.insert(0, None)
            for chosen in itertools.product(*options):
                named = dict(zip(shapes, chosen, strict=True))
                splits = {name: split for name, split in named.items() if split is not None}
                yield Way(splits, tuple(name for name in named if name not in splits), features)


def _cut(dim: int, size: int, features: int, together: bool) -> Split:
    """A projection of `size` features: plain, or `size / features` of them fused, one behind the other (`together`) or alternating."""
    return Split(dim, (features,) * (size // features) if together and size > features else ())


class Proof:
    """A module of experts with a few tokens for some of them."""

    def __init__(self, module: nn.Module, experts: Experts, width: int) -> None:
        self.module, self.experts = module, experts
        self.state = {name: parameter.detach() for name, parameter in module.named_parameters()}
        one = next(iter(self.state.values()))
        random = torch.Generator().manual_seed(0)
        for name, tensor in self.state.items():  # biases begin as zeros, which any cut leaves zeros
            if tensor.ndim == 2 and tensor.shape[0] == experts.count:
                self.state[name] = torch.randn(tensor.shape, generator=random).to(one.device, one.dtype)
        count = experts.count
        some = torch.tensor(sorted({0, 1 % count, count // 2, count - 1}))
        index = torch.stack([some, some.roll(1)], 1).repeat(2, 1)
        index = torch.cat([index, torch.zeros_like(index[:1])])  # on no rank as many pairs as tokens: what depends on their number shows
        self.index = index.to(one.device)
        self.hidden = torch.randn(len(index), width, generator=random).to(one.device, one.dtype)
        weights = torch.ones(index.shape) if experts.by_rows else torch.rand(index.shape, generator=random) + 0.5
        self.weights = weights.to(one.device, one.dtype)
        self.whole = self._run(self.state, self.hidden, self.index, self.weights)

    def _run(self, state: Mapping[str, torch.Tensor], hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), holding(self.module, state):
            if self.experts.by_rows:
                return self._sum_of_rows(len(next(iter(state.values()))), hidden, index)
            return self.module.forward(hidden, index, weights).reshape(hidden.shape).float()

    def _sum_of_rows(self, count: int, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The same of a module that is given a row of each token for each of `count` experts: zeros for those that it has not."""
        times = torch.zeros(count, len(hidden), 1, dtype=hidden.dtype, device=hidden.device)
        places = torch.arange(len(hidden), device=hidden.device).unsqueeze(1).expand(index.shape)
        times.index_put_((index, places), times.new_ones(*index.shape, 1), accumulate=True)
        rows = hidden * (times > 0)
        return (self.module.forward(rows.flatten(0, 1)).view(rows.shape) * times).sum(0).float()

    def _agrees(self, total: torch.Tensor) -> bool:
        return bool((total - self.whole).norm() <= TOLERANCE * self.whole.norm()) and bool(self.whole.norm() > 0)

    def divides(self) -> bool:
        """Whether two or more ranks with some of the experts each, given pairs, compute the whole."""
        count = self.experts.count
        ranks = next(n for n in range(2, count + 1) if count % n == 0)
        each, total = count // ranks, torch.zeros_like(self.whole)
        for rank in range(ranks):
            token, place = ((self.index >= rank * each) & (self.index < (rank + 1) * each)).nonzero(as_tuple=True)
            state = {name: tensor.tensor_split(ranks)[rank] for name, tensor in self.state.items()}
            with counting(self.module, self.experts, ranks):
                pairs = (
                    self.hidden[token],
                    self.index[token, place, None] - rank * each,
                    torch.ones_like(self.weights[token, place, None]),
                )
                part = self._run(state, *pairs) if len(token) else self.whole[:0]
            total.index_add_(0, token, part * self.weights[token, place, None].float())
        return self._agrees(total) and (self.experts.by_rows or self._passes_by())

    def _passes_by(self) -> bool:
        """Whether a pair of no expert, a number beyond all, adds nothing: expert ranks are not sent it. Some modules give the token itself for it; others
        take no such number, and what they answer means nothing. On the host, where one that is not taken is an error and no end of the device."""
        beyond = self.index.clone()
        beyond[::2, 0] = self.experts.count
        skipped = beyond == self.experts.count
        state, hidden = {name: tensor.cpu() for name, tensor in self.state.items()}, self.hidden.cpu()
        try:
            given, without = (
                self._run(state, hidden, index.cpu(), weights.cpu())
                for index, weights in ((beyond, self.weights), (self.index, self.weights.masked_fill(skipped, 0)))
            )
        except Exception:
            return True
        itself = (self.weights * skipped).sum(1, keepdim=True).cpu() * hidden
        return not bool((given - without - itself).norm() <= TOLERANCE * without.norm())

    def shares(self, way: Way) -> bool:
        """Whether two or more tensor ranks that cut every expert this way compute the whole."""
        ranks = next((n for n in range(2, way.width + 1) if way.width % n == 0), 0)
        if not ranks:
            return False
        total = torch.zeros_like(self.whole)
        for rank in range(ranks):
            state = {name: local_slice(tensor, way.splits[name], rank, ranks) for name, tensor in self.state.items() if name in way.splits}
            state |= {name: self.state[name] / ranks for name in way.once}
            try:
                total += self._run(state, self.hidden, self.index, self.weights)
            except (RuntimeError, ValueError, IndexError):
                return False
        return self._agrees(total)


@contextmanager
def holding(module: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """`module` with other tensors for its parameters, for a while."""
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for name, tensor in state.items():
        path, _, short = name.rpartition(".")
        places.append((vars(module.get_submodule(path))["_parameters"], short, tensor))
    before = [held[short] for held, short, _ in places]
    try:
        for held, short, tensor in places:
            held[short] = tensor
        yield
    finally:
        for (held, short, _), parameter in zip(places, before, strict=True):
            held[short] = parameter


@contextmanager
def counting(module: nn.Module, experts: Experts, ranks: int) -> Iterator[None]:
    """`module` with the counts of a rank that holds 1 / `ranks` of the experts, for a while."""
    count_experts(module, experts, experts.count // ranks)
    try:
        yield
    finally:
        count_experts(module, experts, experts.count)


def count_experts(module: nn.Module, experts: Experts, count: int) -> None:
    """`module` holds `count` experts from here on."""
    for where, name in experts.counters:
        setattr(module.get_submodule(where) if where else module, name, count)


@contextmanager
def standing_in(model: nn.Module, weighed: bool = False) -> Iterator[None]:
    """While shapes run through `model` without values, its experts hand on what they are given: how they sort tokens asks for values.

    `weighed`: each token times its weights, so that what computes these gets a gradient.
    """

    def stand_in(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def hand_on(*args: Any, **kwargs: Any) -> Any:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            kinds = [tensor.is_floating_point() for tensor in given]
            if sorted(kinds) != [False, True, True]:
                return forward(*args, **kwargs)
            hidden, index, weights = given[kinds.index(True)], given[kinds.index(False)], given[2 - kinds[::-1].index(True)]
            if not weighed or len(weights) != hidden.flatten(0, -2).shape[0]:
                return hidden.clone()
            times = weights * (index.to(weights.dtype) + 1) if index.shape == weights.shape else weights
            return hidden * times.flatten(1).sum(1).view(*hidden.shape[:-1], 1).to(hidden.dtype)

        return hand_on

    modules = [module for module in model.modules() if "forward" not in vars(module) and _count(module)]
    try:
        for module in modules:
            module.forward = stand_in(module)  # type: ignore[method-assign]
        yield
    finally:
        for module in modules:
            del module.forward
