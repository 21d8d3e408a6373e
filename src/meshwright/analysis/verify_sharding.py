"""Verifies numerically that a block can be sharded: its regions over tensor ranks, and its hidden state along the
sequence. verified_regions.py calls it for the regions of every distinct block. A region consists of column-parallel
layers and the row-parallel layers that read their outputs.

The model runs with real values, and `ShardingCheck` captures the inputs of the checked blocks. Simulated tensor ranks
then run these blocks (simulated_ranks.py). A forward in eval mode finds the counts, such as the number of heads, that
the code of a block reads. Then the ranks run forward and backward in training conditions, on two texts of different
lengths, with all optional inputs, with none, and with each alone. A region that differs from the full block stays
unsharded. Examples of causes are an unexpected layout of a fused projection, a count in an unexpected attribute, and
code that runs only in training.

verified_regions.py checks the code between blocks. For a model on the meta device without random values, only shapes
are checked (`ShardingCheck.is_meta`).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from meshwright.analysis.dry_run import in_eval_mode
from meshwright.analysis.example_inputs import (
    TOKEN_INPUT_NAMES,
    DataFreeMode,
    ExampleInputs,
    call_arguments,
    max_integer_value,
    requires_input,
)
from meshwright.analysis.expert_modules import pass_through_experts
from meshwright.analysis.regions import AnalysisState, RegionCandidate
from meshwright.analysis.run_comparison import (
    BlockCall,
    CallArguments,
    ModuleSnapshot,
    RandomMatrices,
)
from meshwright.analysis.run_conditions import (
    CHECK_VOCAB_ROWS,
    MAX_PARAMS_CHECK_ALL_BLOCKS,
    MAX_PARAMS_FLOAT64,
    check_parameters,
    set_seed,
    training_conditions,
)
from meshwright.analysis.simulated_ranks import SimulatedBlockRuns, SplitCase
from meshwright.analysis.trace_log import PerHeadInput, TraceLog
from meshwright.core.messages import Message, mark_msgid
from meshwright.core.printable_text import reason_of

UNCHECKED_CALLS_TEXT = mark_msgid(
    "the splits were not checked with {count} of the test inputs, because the model does not run with them ({reason})"
)
GENERATED_TEXT_LENGTHS = (8, 4)
"""Lengths of the two generated texts in tokens. Both can be split over 2 or 4 ranks."""
MAX_TEXT_LENGTH = 32
"""Maximum length, in tokens, of the texts that are cut from a longer example."""


class StopForward(Exception):
    """Ends a forward when all inputs have been captured. It is not an error."""


class ShardingCheck:
    """Checks the splits of `blocks`, with the inputs that each block receives in its first run in each of `calls`.

    Each of `calls` returns the arguments of one call of the model. The calls may have texts of different lengths. A
    call that raises is left out, and `failures` has its reason. The exception of the first call propagates. `seen` is
    the trace of the model, None without one.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        seen: TraceLog | None,
        calls: Sequence[Callable[[], CallArguments]],
    ) -> None:
        self.model, self.blocks = model, blocks
        self.sharded_args: Mapping[str, list[tuple[PerHeadInput, frozenset[str]]]] = seen.sharded_args if seen else {}
        self.is_meta = any(tensor.is_meta for path in blocks for tensor in model.get_submodule(path).parameters())
        self.calls: list[CallArguments] = []
        self.block_calls: list[dict[str, BlockCall]] = []
        self.failures: list[str] = []
        self.matrices: RandomMatrices = {}
        before = ModuleSnapshot(model)
        for number, call in enumerate(calls):
            given = call()
            try:
                reached = self._run(*given)
                before.restore()
                for path, learnt in self._inputs_with_grad(*given).items():
                    reached[path].inputs_require_grad = learnt
                before.restore()
                self.block_calls.append(reached)
                self.calls.append(given)
            except Exception as error:
                if not number:
                    raise
                before.restore()
                self.failures.append(reason_of(error))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, BlockCall]:
        reached: dict[str, BlockCall] = {}
        handles = [handle for path in self.blocks for handle in self._catch(path, reached)]
        set_seed(0)
        try:
            with self.running(), torch.no_grad():
                self.model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        except StopForward:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return reached

    def _inputs_with_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[bool, ...]]:
        """Returns for each block, and for each leaf of its arguments, whether the leaf requires a gradient."""
        found: dict[str, tuple[bool, ...]] = {}

        def enter(path: str) -> Any:
            def note(module: nn.Module, args: Any, kwargs: Any) -> None:
                leaves = tree_flatten((args, kwargs))[0]
                found.setdefault(path, tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves))
                if len(found) == len(self.blocks):
                    raise StopForward

            return note

        handles = [
            self.model.get_submodule(path).register_forward_pre_hook(enter(path), with_kwargs=True)
            for path in self.blocks
        ]
        set_seed(0)
        try:
            with self.running(), torch.enable_grad():
                self.model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        except StopForward:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _catch(self, path: str, reached: dict[str, BlockCall]) -> list[Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            reached.setdefault(path, BlockCall(copy.deepcopy((args, kwargs))))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            reached[path].output = output
            if len(reached) == len(self.blocks):
                raise StopForward

        module = self.model.get_submodule(path)
        return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Prepares a run of the model inside the context: on the meta device if the blocks have no values."""
        with ExitStack() as stack:
            if self.is_meta:
                stack.enter_context(torch.device("meta"))
                stack.enter_context(DataFreeMode())
            yield

    def check_forward(self, block: str, regions: Sequence[RegionCandidate], *ranks: int) -> str | None:
        """Checks a forward in eval mode with `regions` sharded over each of the given numbers of ranks. Returns the
        first reason why this fails, None if all results are correct.
        """
        if block not in self.block_calls[0]:
            return "its block does not run"
        with self.running(), in_eval_mode(self.model):
            cases = [SplitCase(regions, each) for each in ranks]
            found = self._runs(block, self.block_calls[0]).compare(cases, gradients=False)
        return next((why for why in found if why is not None), None)

    def _runs(self, block: str, reached: dict[str, BlockCall]) -> SimulatedBlockRuns:
        shares = self.sharded_args.get(block, ())
        return SimulatedBlockRuns(self.model, block, reached[block], shares, self.matrices)

    def check_training(
        self, block: str, regions: Sequence[RegionCandidate], sequence: bool
    ) -> tuple[str | None, str | None]:
        """Returns why the block cannot be trained with all of `regions` sharded, None if it can.

        The second result is the reason why the hidden state cannot be split along the sequence as well. It is None if
        the hidden state can be split, or if `sequence` is False. On the meta device, or if no number of ranks is
        possible, nothing is checked and both results are None.
        """
        ranks = min_tp_ranks(regions, 2)
        if self.is_meta or ranks is None:
            return None, None
        cases = [SplitCase(regions, ranks)] if regions else []
        cases += [SplitCase(regions, ranks, sequence=True)] if sequence else []
        why: list[str | None] = [None for _ in cases]
        for reached in self.block_calls:
            if block in reached and cases:
                with self.running():
                    again = self._runs(block, reached).compare(cases, gradients=True)
                    why = [one or other for one, other in zip(why, again, strict=True)]
            if why and why[0] is not None:
                break
        return why[0] if regions and why else None, why[-1] if sequence and why else None


@contextmanager
def open_sharding_check(
    state: AnalysisState,
    blocks: Sequence[str],
    needed: Callable[[str], bool],
    use_random_weights: bool,
    vocabulary: int,
    head: str | None = None,
) -> Iterator[ShardingCheck]:
    """Yields the check of `blocks`. While the context is open, the parameters of the check replace those of the model.

    `needed(name)` returns whether the check needs the parameter or buffer `name`. `use_random_weights`: whether meta
    parameters get random values (in small models they always do). If a needed buffer is a meta tensor, nothing gets
    values, and only shapes are checked. `vocabulary` is the number of rows of the embedding table. Only the first rows
    of this table and of the layer at path `head` get values. Raises the error of the first run if no run succeeds.
    """
    model, example = state.model, state.example
    tensors = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if needed(name)}
    size = sum(tensor.numel() for name, tensor in tensors.items() if vocabulary not in tensor.shape)
    buffers = any(tensor.is_meta for name, tensor in model.named_buffers() if needed(name))
    real = not buffers and (
        use_random_weights
        or size <= MAX_PARAMS_CHECK_ALL_BLOCKS
        or not any(tensor.is_meta for tensor in tensors.values())
    )
    device = next((str(tensor.device) for tensor in tensors.values() if not tensor.is_meta), "cpu") if real else "meta"
    failed: Exception | None = None
    for exact in (True, False) if real and size <= MAX_PARAMS_FLOAT64 else (False,):
        with ExitStack() as stack:
            stack.enter_context(training_conditions(model, exact, state.modes))
            # Expert modules return their input during the check, because their forward needs particular values or
            # dtypes (experts.py).
            stack.enter_context(pass_through_experts(model, weighed=True))
            stack.enter_context(
                check_parameters(
                    model, needed, max(CHECK_VOCAB_ROWS, max_integer_value(example) + 1), exact, real, head
                )
            )
            # If the model fails with texts of other lengths, it is called with the length of the example.
            for lengths in dict.fromkeys((_text_lengths(example), (_sequence_length(example),) * 2)):
                calls = model_calls(
                    model, example, device, min(vocabulary, CHECK_VOCAB_ROWS), torch.float64 if exact else None, lengths
                )
                try:
                    check = ShardingCheck(model, blocks, state.trace, calls)
                except Exception as error:
                    failed = failed or error
                    continue
                if failures := [*([reason_of(failed)] if failed else []), *check.failures]:
                    state.findings.append(Message(UNCHECKED_CALLS_TEXT, count=len(failures), reason=failures[0]))
                yield check
                return
    assert failed is not None
    raise failed


# --- calls to the model


def model_calls(
    model: nn.Module,
    example: ExampleInputs,
    device: str,
    vocabulary: int,
    kind: torch.dtype | None,
    lengths: tuple[int, int],
) -> list[Callable[[], CallArguments]]:
    """Returns the calls of a check, as functions that return the arguments.

    If the example has a sequence, two calls have all inputs and texts of the two `lengths`. Two more calls have all
    inputs and two texts of the length of the example. These two calls are left out if the example has a sequence and
    `lengths` is GENERATED_TEXT_LENGTHS. Further calls have either none or one of the optional inputs.
    """
    length, (first, second) = _sequence_length(example), lengths

    def call(chosen: ExampleInputs, text: int, size: int) -> Callable[[], CallArguments]:
        resized = {name: _resize_sequence(value, length, size) for name, value in chosen.items()}
        return lambda: tree_map(
            _at_least_float32 if kind is None else unchanged_value,
            call_arguments(with_other_text(resized, text), kind, device, vocabulary, text),
        )

    result = [call(example, 0, first), call(example, 1, second)] if length else []
    result += (
        [call(example, 0, length), call(example, 1, length)]
        if not length or (first, second) != GENERATED_TEXT_LENGTHS
        else []
    )
    free = [
        name
        for name, value in example.items()
        if name and isinstance(value, torch.Tensor) and not requires_input(model, name)
    ]
    free = [
        name
        for name in free
        if name not in TOKEN_INPUT_NAMES and name != next(iter(inspect.signature(model.forward).parameters), "")
    ]
    if free:
        bound = {name: value for name, value in example.items() if name not in free}
        result.append(call(bound, 0, first))
        result += [call({**bound, name: example[name]}, 0, first) for name in free if len(free) > 1]
    return result


def unchanged_value(value: Any) -> Any:
    """Returns `value` itself."""
    return value


def with_other_text(example: ExampleInputs, text: int) -> ExampleInputs:
    """Returns `example` for text number `text`. Text 0 is `example` itself.

    For any other text one input changes: the first that has token ids or floating-point values, at least 2 dimensions,
    and is not on the meta device. A floating-point input with at most two values (a mask) stays as it is.
    """
    if not text:
        return example
    found = dict(example)
    for name, value in example.items():
        if (
            isinstance(value, torch.Tensor)
            and not value.is_meta
            and (value.is_floating_point() or name in TOKEN_INPUT_NAMES)
            and value.ndim > 1
        ):
            found[name] = (
                value.roll(1, -1) if name in TOKEN_INPUT_NAMES else value * 0.5 if value.unique().numel() > 2 else value
            )
            break
    return found


def _sequence_length(example: ExampleInputs) -> int:
    """Returns the size of dimension 1 of the first integer input with at least 2 dimensions, or of the first input with
    3 dimensions. Returns 0 if there is no such input.
    """
    tensors = [value for value in example.values() if isinstance(value, torch.Tensor)]
    words = next((value for value in tensors if not value.is_floating_point() and value.ndim > 1), None)
    rows = next((value for value in tensors if value.ndim == 3), None)
    return int(words.shape[1] if words is not None else rows.shape[1] if rows is not None else 0)


def _text_lengths(example: ExampleInputs) -> tuple[int, int]:
    """Returns the lengths in tokens of the two texts of a check."""
    made = any(isinstance(value, torch.Tensor) and value.is_meta for value in example.values())
    return GENERATED_TEXT_LENGTHS if made else _even_lengths(_sequence_length(example))


def _even_lengths(length: int) -> tuple[int, int]:
    """Returns the lengths of the two texts that are cut from an example of `length` tokens. They are even and at most
    MAX_TEXT_LENGTH. The second is half of the first, rounded down to an even number, but at least 2. If `length` is 0
    or 1, both are `length`.

    >>> _even_lengths(16), _even_lengths(2048), _even_lengths(7), _even_lengths(1)
    ((16, 8), (32, 16), (6, 2), (1, 1))
    """
    first = min(length - length % 2, MAX_TEXT_LENGTH)
    return (first, max(2, first // 2 - first // 2 % 2)) if first else (length, length)


def _resize_sequence(value: Any, length: int, size: int) -> Any:
    """Returns `value` with `size` instead of `length` positions along every dimension of size `length`, except the
    first dimension (the batch).
    """
    if not isinstance(value, torch.Tensor) or not length or size == length:
        return value
    for dim in range(1, value.ndim):
        if value.shape[dim] == length:
            value = value.index_select(dim, torch.arange(size, device=value.device) % length)
    return value


def _at_least_float32(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value


# --- head counts
def verify_together(
    check: ShardingCheck, block: str, regions: Sequence[RegionCandidate], counts: Sequence[tuple[Any, ...]]
) -> list[RegionCandidate] | None:
    """Checks all `regions` of a block with their `counts` in one run of the block, instead of one run for each region.

    Returns the regions with their counts. Returns None if there is a difference, or if no number of ranks is possible
    for all regions.
    """
    tried = [_with_counts(found, each) for found, each in zip(regions, counts, strict=True)]
    wanted = {found.region.kv_heads + 1 for found in tried if has_fewer_kv_heads(found)}
    ranks = [number for least in (2, *sorted(wanted)) if (number := min_tp_ranks(tried, least)) is not None]
    is_possible = len(ranks) == 1 + len(wanted)
    return tried if is_possible and check.check_forward(block, tried, *ranks) is None else None


def verify_region(
    check: ShardingCheck, block: str, found: RegionCandidate, guesses: Sequence[tuple[Any, ...]]
) -> tuple[RegionCandidate, str | None]:
    """Returns `found` with the first correct set of `guesses` added to its counts, and None. If no set is correct,
    returns `found` itself and the reason.

    A tp above the number of key-value heads is checked separately. If this check fails, tp must divide that number.
    """
    first: str | None = None
    strict: RegionCandidate | None = None
    for counts in guesses:
        tried = _with_counts(found, counts)
        ranks = min_tp_ranks([tried], 2)
        objection = None if ranks is None else check.check_forward(block, [tried], ranks)
        if objection is None and _runs_with_replicated_kv_heads(check, block, tried):
            return tried, None
        strict = strict or (tried if objection is None else None)
        first = first or objection
    if strict is None:
        return found, first
    whole = {name: replace(split, ways=()) for name, split in strict.splits.items()}
    return strict._replace(splits=whole, sizes={**strict.sizes, "groups of heads": strict.region.kv_heads}), None


def _with_counts(found: RegionCandidate, counts: tuple[Any, ...]) -> RegionCandidate:
    return found._replace(region=replace(found.region, head_counts=(*found.region.head_counts, *counts)))


def has_fewer_kv_heads(found: RegionCandidate) -> bool:
    """Returns whether the region has fewer key-value heads than query heads."""
    return bool(found.region.kv_heads) and found.region.kv_heads != found.region.heads


def _runs_with_replicated_kv_heads(check: ShardingCheck, block: str, found: RegionCandidate) -> bool:
    """Returns whether tp may exceed the number of key-value heads. Then each rank has one key-value head, and several
    ranks have the same one.
    """
    ranks = min_tp_ranks([found], found.region.kv_heads + 1)
    return not has_fewer_kv_heads(found) or ranks is None or check.check_forward(block, [found], ranks) is None


def min_tp_ranks(regions: Sequence[RegionCandidate], least: int) -> int | None:
    """Returns the smallest number of ranks, at least `least`, that divides every size of `regions` except 'kv_heads'.
    Of 'kv_heads' it must be a divisor or a multiple. Returns None if there is no such number.
    """
    sizes: dict[str, int] = {}
    for found in regions:
        for name, size in found.sizes.items():
            sizes[name] = math.gcd(sizes.get(name, 0), size)
    kv_heads = sizes.pop("kv_heads", 0)
    for ranks in range(least, max(sizes.values(), default=least) + 1):
        if all(size % ranks == 0 for size in sizes.values()) and (
            not kv_heads or kv_heads % ranks == 0 or ranks % kv_heads == 0
        ):
            return ranks
    return None
