"""Verifies how stacked experts can be distributed: over expert-parallel ranks, over tensor ranks that shard each
expert, and over both. experts.py calls `verify_expert_splits` for each module of experts.

The expert module runs separately in training conditions (run_conditions.py). The full run uses all experts. Further
runs simulate each rank as in runtime/expert_parallel/token_dispatcher.py, which sends pairs of token and expert:

| ranks | what each rank computes | how the results are combined |
|---|---|---|
| expert ranks | pairs of its experts, numbered from 0, with weights of 1 | weighted sum on the rank of the token |
| tensor ranks | every pair, with its slice of each expert's inner features | sum over ranks |

The check compares the output and the gradients of the hidden states, of the routing weights and of every parameter. In
float64 they must agree up to a relative difference of 1e-10. The forward must also write the same values to parameters
and buffers. In eval mode only the output is compared. The batches differ in their contents and numbers of tokens, and
leave different ranks with few pairs or none. So the check detects any dependence on the number of tokens, on other
tokens, or on the size of a slice.

Meta parameters get random values, and constant parameters get noise. If a module has more than MAX_FULL_SIZE_NUMEL
parameter elements, a smaller copy is checked. The copy runs the same code with fewer experts and with all feature sizes
divided by one factor. Experts that draw random numbers outside of dropout are not distributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.analysis.dry_run import in_eval_mode
from meshwright.analysis.expert_modules import local_expert_counts, replaced_parameters, set_expert_count
from meshwright.analysis.graph import StackedExperts, TpSplit, shard_view
from meshwright.analysis.run_comparison import ModuleSnapshot
from meshwright.analysis.run_conditions import (
    MAX_RANDOM_PARAMS,
    NOISE_SCALE,
    check_parameters,
    cotangent,
    is_constant,
    leaf_copy,
    relative_difference,
    set_seed,
    training_conditions,
)
from meshwright.analysis.simulated_ranks import add_shard_gradient

MAX_FULL_SIZE_NUMEL = 1 << 20
"""Maximum number of parameter elements of a module that is checked at full size."""
REDUCED_EXPERTS = 4
"""Number of experts of a reduced copy."""
MIN_REDUCED_FEATURES = 8
"""Minimum number of features of a reduced copy."""
OUTPUT_KEY = "the output"


@dataclass(frozen=True)
class ExpertTpSplit:
    """A split of each expert over tensor ranks. Parameter names are relative to the expert module.

    Each of tp ranks adds 1 / tp of the `replicated` parameters. `width` is the number of inner features of an expert.
    """

    splits: dict[str, TpSplit]
    replicated: tuple[str, ...]
    width: int

    def with_fewer_features(self, factor: int) -> ExpertTpSplit:
        """Returns this split for experts with 1 / `factor` of the features."""
        splits = {
            name: replace(split, parts=tuple(part // factor for part in split.parts))
            for name, split in self.splits.items()
        }
        return replace(self, splits=splits, width=self.width // factor)


class ExpertSplitCase(NamedTuple):
    """A distribution of experts over `ep` expert-parallel ranks. `split` shards each expert over `tp` tensor ranks."""

    ep: int = 1
    tp: int = 1
    split: ExpertTpSplit | None = None


class ExpertRunResult(NamedTuple):
    """The result of one run. `tensors` has the output and the gradients by name. `writes` has the tensors that the
    forward of each rank wrote, by name.
    """

    tensors: dict[str, torch.Tensor]
    writes: list[dict[str, torch.Tensor]]


class ExpertBatch(NamedTuple):
    """A batch of N tokens: hidden (N, C); chosen (N, K), the expert indices; weights (N, K), the routing weights.

    `trains`: whether the batch runs with gradients, in the module's training modes. If False, it runs in eval mode.
    """

    hidden: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    trains: bool = True


def verify_expert_splits(
    module: nn.Module,
    experts: StackedExperts,
    width: int,
    ways: Sequence[ExpertTpSplit],
    modes: Mapping[nn.Module, bool],
) -> tuple[str | None, ExpertTpSplit | None]:
    """Returns why `experts` cannot be distributed over ranks, None if they can. Also returns the first of `ways` that
    shards each expert correctly, None if none does. `width` is the number of input features.

    Exceptions that the module raises when it runs separately propagate.
    """
    failed: Exception | None = None
    for few, factor in _reduced_sizes(module, experts):
        for exact in (True, False):
            try:
                with _reduced_module(module, experts, few, factor, exact, modes) as smaller:
                    proof = ExpertCheck(module, smaller, width // factor)
                    why = proof.expert_parallel_error()
                    if why is not None:
                        return why, None
                    return None, next(
                        (way for way in ways if proof.tensor_parallel_works(way.with_fewer_features(factor))), None
                    )
            except Exception as error:
                failed = failed or error
    if failed is None:
        return f"even its smallest copy has more than {MAX_RANDOM_PARAMS:,} elements, too many to verify", None
    raise failed


# --- sizes and values


def _reduced_sizes(module: nn.Module, experts: StackedExperts) -> Iterator[tuple[int, int]]:
    """Yields pairs (number of experts, divisor of their features) to check, cheapest first.

    The full size comes last, for code with hard-coded sizes, which fails in a smaller copy. Pairs with more than
    MAX_RANDOM_PARAMS parameter elements are left out.
    """
    shapes = [parameter.shape for parameter in module.parameters()]
    sizes = _feature_sizes(module, experts)
    count, factor = experts.count, 1
    if sum(shape.numel() for shape in shapes) > MAX_FULL_SIZE_NUMEL:
        count = min(count, REDUCED_EXPERTS)
        while _reduced_numel(shapes, experts.count, count, factor) > MAX_FULL_SIZE_NUMEL and all(
            size % (2 * factor) == 0 and size >= 2 * factor * MIN_REDUCED_FEATURES for size in sizes
        ):
            factor *= 2
    for pair in dict.fromkeys(((count, factor), (count, 1), (experts.count, 1))):
        if _reduced_numel(shapes, experts.count, *pair) <= MAX_RANDOM_PARAMS:
            yield pair


def _feature_sizes(module: nn.Module, experts: StackedExperts) -> set[int]:
    """Returns the numbers of features in the shapes of the parameters: all sizes except the number of experts."""
    shapes = [parameter.shape for parameter in module.parameters()]
    return {size for shape in shapes for size in (shape[0] // experts.count, *shape[1:]) if size > 1}


def _reduced_shape(shape: torch.Size, whole: int, count: int, factor: int) -> tuple[int, ...]:
    """Returns `shape` with `count` instead of `whole` experts and with 1 / `factor` of the features."""
    first = shape[0] // whole
    return count * (first // factor if first > 1 else 1), *(size // factor if size > 1 else 1 for size in shape[1:])


def _reduced_numel(shapes: Sequence[torch.Size], whole: int, count: int, factor: int) -> int:
    return sum(torch.Size(_reduced_shape(shape, whole, count, factor)).numel() for shape in shapes)


@contextmanager
def _reduced_module(
    module: nn.Module, experts: StackedExperts, count: int, factor: int, exact: bool, modes: Mapping[nn.Module, bool]
) -> Iterator[StackedExperts]:
    """Changes `module` to `count` experts with 1 / `factor` of the features, in training conditions. Yields a
    description of these experts. Restores the module on exit.
    """
    features = _feature_sizes(module, experts)
    own = (
        exact
        and (count, factor) == (experts.count, 1)
        and not any(parameter.is_meta for parameter in module.parameters())
    )
    random = torch.Generator().manual_seed(0)
    kind = torch.float64 if exact else torch.float32
    with ExitStack() as stack:
        stack.enter_context(training_conditions(module, exact, modes))
        stack.enter_context(check_parameters(module, lambda path: own or path not in experts.names, 0, exact))
        if exact:
            stack.enter_context(GroupedMmFallback())
        if not own:
            state = {}
            for name, parameter in module.named_parameters():
                shape = _reduced_shape(parameter.shape, experts.count, count, factor)
                device = "cpu" if parameter.is_meta else parameter.device
                numbers = torch.randn(shape, generator=random, dtype=kind) * (
                    shape[-1] ** -0.5 if len(shape) > 2 else 1.0
                )
                state[name] = nn.Parameter(numbers.to(device))
            stack.enter_context(replaced_parameters(module, state))
        for inside in module.modules():
            for name, buffer in inside._buffers.items():
                inside._buffers[name] = None if buffer is None else _random_buffer(buffer, kind, random)
        smaller = replace(experts, count=count)
        set_expert_count(module, smaller, count)
        if factor > 1:
            _set_reduced_sizes(module, experts, features, factor)
        yield smaller


def _random_buffer(buffer: torch.Tensor, kind: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Returns a copy of `buffer`. A meta or constant buffer is filled with noise."""
    found = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.detach().clone()
    if found.is_floating_point() and found.numel():
        found = found.to(kind)
        if is_constant(found):
            found += NOISE_SCALE * torch.randn(found.shape, generator=random).to(found)
    return found


def _set_reduced_sizes(module: nn.Module, experts: StackedExperts, features: set[int], factor: int) -> None:
    """Sets the module's integer attributes to the reduced sizes, because the forward may read them."""
    for path, inside in module.named_modules():
        for name, value in [*vars(inside).items()]:
            if type(value) is int and value in features and (path, name) not in experts.count_attributes:
                setattr(inside, name, value // factor)


class GroupedMmFallback(TorchFunctionMode):
    """Computes `torch.nn.functional.grouped_mm` one group at a time, because torch has no float64 kernel for it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") not in ("grouped_mm", "_grouped_mm") or args[0].dtype != torch.float64:
            return function(*args, **kwargs)
        given, matrices = args[0], args[1]
        stops = kwargs.get("offs", args[2] if len(args) > 2 else None).tolist()
        parts = [given[start:stop] @ matrix for start, stop, matrix in zip([0, *stops], stops, matrices, strict=False)]
        return torch.cat([*parts, given.new_zeros(len(given) - stops[-1], matrices.shape[-1])])


# --- the check


def expert_batches(count: int, width: int, like: torch.Tensor) -> list[ExpertBatch]:
    """Returns four batches for `count` experts with `width` input features:

    - a few tokens for some of the experts, so that each rank has fewer pairs than tokens;
    - many tokens, most of them for the first half of the experts;
    - tokens for the first expert alone;
    - the second batch again, in eval mode.
    """
    random = torch.Generator().manual_seed(0)
    some = torch.tensor(sorted({0, 1 % count, count // 2, count - 1}))
    few = torch.stack([some, some.roll(1)], 1).repeat(2, 1)
    few = torch.cat([few, torch.zeros_like(few[:1])])
    many = torch.stack([torch.arange(48) % ((count + 1) // 2), torch.arange(48) // 5 % count], 1)
    found = []
    for number, index in enumerate((few, many, torch.zeros(5, 1, dtype=torch.long))):
        hidden = (0.5 + number) * torch.randn(len(index), width, generator=random, dtype=torch.float64)
        weights = torch.rand(index.shape, generator=random, dtype=torch.float64) + 0.5
        found.append(ExpertBatch(hidden.to(like), index.to(like.device), weights.to(like)))
    return [*found, found[1]._replace(trains=False)]


class ExpertCheck:
    """Compares runs of an expert module on simulated ranks with a full run of this module, on each batch."""

    def __init__(self, module: nn.Module, experts: StackedExperts, width: int) -> None:
        self.module, self.experts = module, experts
        self.state = {name: parameter.detach() for name, parameter in module.named_parameters()}
        self.before, self.saved_values, self.draws_random = ModuleSnapshot(module), {}, False
        for tensor in self._tensors().values():
            self.saved_values[id(tensor)] = tensor, tensor.detach().clone()
        self.batches = expert_batches(experts.count, width, next(iter(self.state.values())))
        self.whole = [self._run(ExpertSplitCase(), batch) for batch in self.batches]

    def expert_parallel_error(self) -> str | None:
        """Returns why the experts cannot be distributed over expert-parallel ranks, None if they can."""
        count = self.experts.count
        if self.draws_random:
            return "it uses random numbers other than dropout"
        if not any(bool(found.tensors[OUTPUT_KEY].any()) for found in self.whole):
            return "its output is zero"
        ranks = next(n for n in range(2, count + 1) if count % n == 0)
        for case in dict.fromkeys((ExpertSplitCase(ranks), ExpertSplitCase(count))):
            if (why := self.first_error(case)) is not None:
                return why
        passes_by = not self.experts.by_rows and self._adds_skipped_tokens()
        return "for an expert index out of range it returns the token itself" if passes_by else None

    def tensor_parallel_works(self, way: ExpertTpSplit) -> bool:
        """Returns whether tensor ranks that shard every expert by `way` compute the same values and gradients as the
        full run, with and without expert parallelism.
        """
        shares = next((n for n in range(2, way.width + 1) if way.width % n == 0), 0)
        ranks = next(n for n in range(2, self.experts.count + 1) if self.experts.count % n == 0)
        return bool(shares) and all(self.first_error(ExpertSplitCase(n, shares, way)) is None for n in (1, ranks))

    def first_error(self, case: ExpertSplitCase) -> str | None:
        """Returns a description of the first difference between the run of `case` and the full run, None if they
        agree.
        """
        for batch, whole in zip(self.batches, self.whole, strict=True):
            try:
                found = self._run(case, batch)
            except Exception as error:
                return f"it does not run when divided: {(str(error).splitlines() or [type(error).__name__])[0][:100]}"
            for here in found.writes:
                if (name := _first_difference(here, whole.writes[0])) is not None:
                    return f"its forward writes other values to {name} on a rank than in the full run"
            scale = max(
                (float(tensor.norm()) for name, tensor in whole.tensors.items() if name != OUTPUT_KEY), default=0.0
            )
            for name, there in whole.tensors.items():
                if (
                    off := relative_difference(found.tensors[name], there, 0.0 if name == OUTPUT_KEY else scale)
                ) is not None:
                    return f"{name} differs by {off:.1e}"
        return None

    def _run(self, case: ExpertSplitCase, batch: ExpertBatch) -> ExpertRunResult:
        hidden, weights = leaf_copy(batch.hidden), leaf_copy(batch.weights)
        leaves: list[tuple[str, int, int, nn.Parameter]] = []
        writes: list[dict[str, torch.Tensor]] = []
        output = (
            torch.zeros_like(hidden)
            if not self.experts.by_rows
            else hidden.new_zeros(self.experts.count, *hidden.shape)
        )
        for rank in range(case.ep):
            pairs = self._pairs(batch, rank, case.ep)
            if not len(pairs[0]):
                writes.append({})
                continue
            for share in range(case.tp):
                mine = {name: nn.Parameter(self._part(name, case, rank, share)) for name in self.state}
                leaves += [(name, rank, share, leaf) for name, leaf in mine.items()]
                part, wrote = self._on_rank(case, rank, mine, batch._replace(hidden=hidden, weights=weights), pairs)
                output = output + part
                writes.append(wrote)
        if not batch.trains:
            return ExpertRunResult({OUTPUT_KEY: output.detach()}, writes)
        total = (output * cotangent(output.shape, output, len(hidden))).sum()
        found = torch.autograd.grad(
            total, [hidden, weights, *(leaf for *_, leaf in leaves)], allow_unused=True, materialize_grads=True
        )
        gradients = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        for (name, rank, share, _), gradient in zip(leaves, found[2:], strict=True):
            each = len(self.state[name]) // case.ep
            own = gradients[name].narrow(0, rank * each, each)
            if case.split is not None and name in case.split.splits:
                add_shard_gradient(own, gradient, case.split.splits[name], share, case.tp)
            else:
                own += gradient
        tensors = {
            OUTPUT_KEY: output.detach(),
            "the gradient of the hidden states": found[0],
            "the gradient of the weights": found[1],
        }
        return ExpertRunResult(tensors | {f"the gradient of {name}": one for name, one in gradients.items()}, writes)

    def _part(self, name: str, case: ExpertSplitCase, rank: int, share: int) -> torch.Tensor:
        """Returns a copy of the shard of parameter `name` on expert rank `rank` and tensor rank `share`."""
        tensor = self.state[name].tensor_split(case.ep)[rank]
        if case.split is not None and name in case.split.splits:
            tensor = shard_view(tensor, case.split.splits[name], share, case.tp)
        return tensor.clone(memory_format=torch.contiguous_format)

    def _pairs(self, batch: ExpertBatch, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the (token, expert) pairs of expert rank `rank` as two index tensors. They index the dimensions of
        `batch.chosen`: tokens, and experts of a token.

        Pairs of the first half of the batch come last, and each half is sorted by expert. This checks that the result
        does not depend on the order in which ranks send pairs.
        """
        each = self.experts.count // ranks
        if ranks == 1 or self.experts.by_rows:
            return (batch.chosen >= 0).nonzero(as_tuple=True)  # type: ignore[return-value]
        token, place = ((batch.chosen >= rank * each) & (batch.chosen < (rank + 1) * each)).nonzero(as_tuple=True)
        sent = (token < len(batch.chosen) // 2) * self.experts.count + batch.chosen[token, place]
        order = sent.argsort(stable=True)
        return token[order], place[order]

    def _on_rank(
        self,
        case: ExpertSplitCase,
        rank: int,
        mine: Mapping[str, nn.Parameter],
        batch: ExpertBatch,
        pairs: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the rank's contribution to the output (N, C), or to one output per expert (E, N, C). Also returns the
        tensors that the rank's forward wrote, by name.
        """
        replicated = case.split.replicated if case.split is not None else ()
        params = {name: leaf / case.tp if name in replicated else leaf for name, leaf in mine.items()}
        before = {name: tensor.detach().clone() for name, tensor in params.items()}
        (hidden, index, weights, trains), (token, place) = batch, pairs
        each = self.experts.count // case.ep
        set_seed(0)
        state = torch.get_rng_state()
        with (
            replaced_parameters(self.module, params),
            local_expert_counts(self.module, self.experts, case.ep),
            nullcontext() if trains else in_eval_mode(self.module),
        ):
            if self.experts.by_rows:
                rows = self._rows(batch).narrow(0, rank * each, each)
                made = self.module.forward(rows.flatten(0, 1)).view(rows.shape)
                output = nn.functional.pad(made, (0, 0, 0, 0, rank * each, self.experts.count - (rank + 1) * each))
            elif case.ep == 1:
                output = self.module.forward(hidden.clone(), index.clone(), weights.clone()).reshape(hidden.shape)
            else:
                ones = torch.ones_like(weights[token, place, None])
                made = self.module.forward(hidden[token], index[token, place, None] - rank * each, ones).reshape(
                    -1, hidden.shape[1]
                )
                output = torch.zeros_like(hidden).index_add(0, token, made * weights[token, place, None])
            wrote = {
                name: tensor.detach()
                for name, tensor in params.items()
                if not torch.equal(tensor.detach(), before[name])
            }
            wrote |= {
                name: tensor.detach().clone()
                for name, tensor in self._tensors().items()
                if not self._is_as_before(tensor)
            }
        self.draws_random |= not torch.equal(state, torch.get_rng_state())
        self.before.restore()
        for tensor, numbers in self.saved_values.values():
            tensor.data.copy_(numbers)
        return output, wrote

    def _rows(self, batch: ExpertBatch) -> torch.Tensor:
        """Returns the input rows (E, N, C). Row (e, n) is token n times its routing weight for expert e, or zero if the
        token did not choose this expert.
        """
        hidden, index, weights, _ = batch
        times = weights.new_zeros(self.experts.count, len(hidden))
        places = torch.arange(len(hidden), device=hidden.device).unsqueeze(1).expand(index.shape)
        return hidden * times.index_put((index, places), weights, accumulate=True).unsqueeze(2)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns the buffers and other tensor attributes of all submodules by name, without parameters."""
        return {
            f"{path}.{name}".lstrip("."): value
            for path, inside in self.module.named_modules()
            for name, value in (inside._buffers | vars(inside)).items()
            if isinstance(value, torch.Tensor)
        }

    def _is_as_before(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.saved_values and torch.equal(tensor.detach(), self.saved_values[id(tensor)][1])

    def _adds_skipped_tokens(self) -> bool:
        """Returns whether the module adds a token to the output if an expert index of this token is the number of
        experts. Expert ranks do not receive such a pair, so they could not add the token.

        Returns False if the module raises for such an index. The check runs on the CPU, where an index out of range
        raises an exception. On a GPU such an index would abort the device.
        """
        hidden, index, weights = (tensor.cpu() for tensor in self.batches[0][:3])
        beyond = index.clone()
        beyond[::2, 0] = self.experts.count
        skipped = beyond == self.experts.count
        try:
            with (
                torch.no_grad(),
                replaced_parameters(self.module, {name: tensor.cpu() for name, tensor in self.state.items()}),
            ):
                given = self.module.forward(hidden.clone(), beyond, weights.clone()).reshape(hidden.shape)
                without = self.module.forward(hidden.clone(), index, weights.masked_fill(skipped, 0)).reshape(
                    hidden.shape
                )
        except Exception:
            return False
        finally:
            self.before.restore()
        itself = (weights * skipped).sum(1, keepdim=True) * hidden
        return bool((given - without - itself).norm() <= 1e-3 * without.norm())


def _first_difference(here: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor]) -> str | None:
    """Returns a name whose tensor differs or is in only one of `here` and `there`, None if all tensors agree."""
    names = sorted(here.keys() ^ there.keys()) or [
        name for name in here if relative_difference(here[name], there[name]) is not None
    ]
    return next(iter(names), None)
