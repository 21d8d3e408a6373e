"""Verifies with real values that a model can run on a piece of the sequence, and finds the block arguments that span
the sequence. `make_context_state` (attention.py) calls `verify_sequence_cut` before the model is changed.

Rule: the model runs once on a whole short text. The check captures the queries, keys, values and result of every
attention call. Then the model runs on the piece of each of two simulated ranks. The queries, keys and values of each
attention call must equal the rank's piece of the captured tensors. The check makes the call return the rank's piece of
the captured result. The logits must equal the rank's piece of the whole logits.

Backward starts from random gradients at the logits, queries, keys and values. It ends at the attention results and at
the parameters. For the attention results each rank must compute its piece of the whole gradient. For the parameters the
gradients of both ranks must add up to the whole gradient. If the model passes, all code outside of attention works on
each position separately. Attention over all pieces is exact by its formulas, so the whole model is exact.

The check detects a convolution or a cumulative sum along the sequence, use of the first token or of the length,
positions counted inside a block, and attention that is not torch's. A model with any of these is refused.

The check runs in training conditions (analysis/run_conditions.py), on two texts of different lengths. It is repeated
with only the required example inputs, with each optional input added to these, and with all inputs. A dimension spans
the sequence if its size changes with the length of the text. In a small model all blocks run. In a larger model only
the first of several identical blocks runs, and the others return their input. Meta parameters that the check needs get
random values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.analysis.block_lists import hidden_of, map_first, with_hidden
from meshwright.analysis.example_inputs import ExampleInputs
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.run_conditions import (
    CHECK_VOCAB_ROWS,
    MAX_PARAMS_CHECK_ALL_BLOCKS,
    MAX_PARAMS_FLOAT64,
    check_parameters,
    cotangent,
    group_identical_blocks,
    leaf_copy,
    relative_difference,
    run_modes,
    set_seed,
    training_conditions,
)
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid
from meshwright.core.printable_text import reason_of
from meshwright.runtime.context_parallel.blocks import (
    SEQUENCE_DIM,
    ArgPath,
    ContextState,
    HeadTailSplit,
    SequenceCut,
    SequenceDims,
    is_attention_mask,
    iter_arg_tensors,
)
from meshwright.runtime.context_parallel.kernels import SdpaCall, SdpaInterceptor, torch_sdpa
from meshwright.runtime.loss import extract_logits

VERIFY_BATCH_SIZE = 3
SIMULATED_RANKS = 2
"""Number of simulated context ranks. Two ranks cover every position, so more ranks would add nothing."""
CHUNK_LENGTHS = ((3, 2), (2, 1))
"""Number of positions in a chunk: (first text, second text). If the model does not run with lengths (3, 2), for example
because it has few positions, the check uses (2, 1)."""
TOKEN_STRIDES = (31, 17)
"""Difference between consecutive token ids: (first text, second text)."""

ForwardFunction = Callable[..., Any]


class CannotCutSequence(Exception):
    """Says why the model cannot run on pieces of the sequence. The caller then refuses the plan."""


def verify_sequence_cut(
    model: nn.Module, anatomy: ModelGraph, example: ExampleInputs | None = None, evaluates: bool = False
) -> SequenceCut:
    """Returns how to cut the block arguments along the sequence. The model is unchanged afterwards.

    `example`: inputs of the model in addition to token ids. `evaluates`: whether the model runs in eval mode, instead
    of the modes in which it trains.

    Raises:
        CannotCutSequence: the model cannot run on pieces of the sequence.
        InputError: the model's own activation checkpointing would recompute attention.
    """
    blocks = [model.get_submodule(anatomy.block(index)) for index in range(anatomy.count)]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    kinds = group_identical_blocks(blocks) if sum(sizes.values()) > MAX_PARAMS_CHECK_ALL_BLOCKS else range(len(blocks))
    first = set(kinds)
    prefix = f"{anatomy.blocks}."

    def needed(name: str) -> bool:
        return not name.startswith(prefix) or int(name.removeprefix(prefix).partition(".")[0]) in first

    exact = sum(size for name, size in sizes.items() if needed(name)) <= MAX_PARAMS_FLOAT64
    with (
        training_conditions(model, exact, run_modes(model, evaluates)),
        check_parameters(model, needed, CHECK_VOCAB_ROWS, exact),
        skipped_blocks(blocks, first),
    ):
        cuts: list[SequenceCut] = []
        for others in _extra_inputs(model, example):
            noted, other = _capture_runs(model, anatomy, others)
            places = _sequence_dims(noted, other)
            before = cuts[-1] if cuts else None
            cuts.append(_find_sequence_cut(model, anatomy, (noted, other), places, before))
    return SequenceCut({key: place for found in cuts for key, place in found.places.items()}, cuts[-1].placed)


def _extra_inputs(model: nn.Module, example: ExampleInputs | None) -> list[dict[str, torch.Tensor]]:
    """Returns the sets of extra inputs with which the check runs: only the required inputs; the required inputs and one
    optional input, for each optional input; and all inputs."""
    requested = inspect.signature(model.forward).parameters
    first = next(iter(requested), "")
    found = {
        name: value
        for name, value in (example or {}).items()
        if name not in ("", first, "input_ids", "labels") and isinstance(value, torch.Tensor) and not value.is_meta
    }
    needed = {
        name: value
        for name, value in found.items()
        if name in requested and requested[name].default is inspect.Parameter.empty
    }
    each = (
        [{**needed, name: value} for name, value in found.items() if name not in needed]
        if len(found) - len(needed) > 1
        else []
    )
    return [needed, *each, *([found] if found != needed else [])]


class CapturedRun:
    """Runs the model on a whole text of `length` tokens. Captures the attention calls, the logits, and the shapes of
    the block arguments. `others`: the other inputs of the model."""

    def __init__(
        self, model: nn.Module, anatomy: ModelGraph, length: int, stride: int, others: dict[str, torch.Tensor]
    ) -> None:
        self.length = length
        self.calls: list[tuple[SdpaCall, torch.Tensor]] = []
        """For every attention: the call, and a leaf copy of its result."""
        self.given: dict[tuple[int, ArgPath], torch.Size] = {}
        self.hidden: dict[int, torch.Size] = {}
        tables = (tensor for tensor in model.parameters() if not tensor.is_meta)
        device = next(tables).device
        self.ids = (
            torch.arange(VERIFY_BATCH_SIZE * length, device=device)
            .mul(stride)
            .remainder(min(anatomy.vocabulary, CHECK_VOCAB_ROWS))
            .view(VERIFY_BATCH_SIZE, length)
        )
        self.others = {name: _resize_input(value, length).to(device) for name, value in others.items()}
        blocks = [model.get_submodule(anatomy.block(index)) for index in range(anatomy.count)]
        handles = [
            block.register_forward_pre_hook(self._note(index), with_kwargs=True) for index, block in enumerate(blocks)
        ]
        set_seed(0)
        try:
            with SdpaInterceptor(self._attend):
                self.logits = extract_logits(model(self.ids, **self.others))
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, index: int) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = hidden_of(args, kwargs)
            self.hidden[index] = hidden.shape
            self.given |= {
                (index, path): tensor.shape for path, tensor in iter_arg_tensors((args, kwargs)) if tensor is not hidden
            }

        return note

    def _attend(self, call: SdpaCall) -> torch.Tensor:
        result = leaf_copy(torch_sdpa(call))
        self.calls.append((call, result))
        return result.clone()

    def gradients(self, model: nn.Module) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor]]:
        """Returns the gradients of the attention results, and the gradients of the parameters by name. Backward starts
        from random gradients at the logits, queries, keys and values."""
        assert self.logits is not None
        terms = [(self.logits, cotangent(self.logits.shape, self.logits, 0))]
        for number, (call, _) in enumerate(self.calls):
            terms += [
                (each, cotangent(each.shape, each, 3 * number + place + 1)) for place, each in enumerate(call.sources)
            ]
        return weighted_gradients(model, terms, [result for _, result in self.calls])


def weighted_gradients(
    model: nn.Module, terms: list[tuple[torch.Tensor, torch.Tensor]], leaves: list[torch.Tensor]
) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor]]:
    """Sums value x weight over `terms`. Returns the gradients of this sum with respect to `leaves`, and with respect to
    the model's parameters by name. The gradient is None for a leaf on which the sum does not depend."""
    total = sum((value * weight).sum() for value, weight in terms if value.requires_grad)
    named = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_meta
    }
    if not isinstance(total, torch.Tensor):
        return [None for _ in leaves], {}
    found = torch.autograd.grad(total, [*leaves, *named.values()], allow_unused=True)
    of_parameters = zip(named, found[len(leaves) :], strict=True)
    return list(found[: len(leaves)]), {name: gradient for name, gradient in of_parameters if gradient is not None}


def _resize_input(value: torch.Tensor, length: int) -> torch.Tensor:
    """Returns `value` with VERIFY_BATCH_SIZE sequences of `length` positions. Repeats sequences and positions if
    `value` has too few."""
    value = value[torch.arange(VERIFY_BATCH_SIZE) % len(value)] if value.ndim else value
    return value[:, torch.arange(length) % value.shape[1]] if value.ndim > 1 else value


def _capture_runs(
    model: nn.Module, anatomy: ModelGraph, others: dict[str, torch.Tensor]
) -> tuple[CapturedRun, CapturedRun]:
    reason = ""
    for chunks in CHUNK_LENGTHS:
        try:
            first, second = (
                CapturedRun(model, anatomy, 2 * SIMULATED_RANKS * chunk, stride, others)
                for chunk, stride in zip(chunks, TOKEN_STRIDES, strict=True)
            )
            return first, second
        except InputError:
            raise  # the error message explains itself
        except Exception as error:
            reason = reason_of(error)
    inputs = f"{2 * SIMULATED_RANKS * CHUNK_LENGTHS[-1][0]} token ids {f'and {sorted(others)}' if others else 'alone'}"
    raise CannotCutSequence(Message("it does not run on {inputs} ({reason})", inputs=inputs, reason=reason))


def _sequence_dims(noted: CapturedRun, other: CapturedRun) -> SequenceDims:
    places: SequenceDims = {}
    for index, shape in noted.hidden.items():
        if len(shape) < 3 or shape[SEQUENCE_DIM] != noted.length or other.hidden[index][SEQUENCE_DIM] != other.length:
            raise CannotCutSequence(
                Message(
                    "the hidden state at block {index} has shape {shape} instead of (batch, sequence, ...)",
                    index=index,
                    shape=list(shape),
                )
            )
    for key, shape in noted.given.items():
        after = other.given.get(key, torch.Size())
        along = [one == noted.length and two == other.length for one, two in zip(shape, after, strict=False)]
        if len(shape) != len(after) or any(
            one != two and not moves for one, two, moves in zip(shape, after, along, strict=True)
        ):
            raise CannotCutSequence(
                Message(
                    "an argument of block {key} has shape {shape} for {length} positions but {after} for "
                    "{other_length}: only dimensions of the sequence length may change",
                    key=key[0],
                    shape=list(shape),
                    length=noted.length,
                    after=list(after),
                    other_length=other.length,
                )
            )
        mask = any(along) and along[-1] and is_attention_mask(shape, noted.length)
        if sum(along) > 1 and not mask:
            raise CannotCutSequence(
                Message(
                    "an argument of block {key} has shape {shape}: two dimensions span the sequence, but it is not a "
                    "mask",
                    key=key[0],
                    shape=list(shape),
                )
            )
        places[key] = along.index(True) if any(along) and not mask else None
    return places


def _find_sequence_cut(
    model: nn.Module,
    anatomy: ModelGraph,
    texts: tuple[CapturedRun, CapturedRun],
    places: SequenceDims,
    before: SequenceCut | None,
) -> SequenceCut:
    """Returns a cut with which the results on every piece match those on the whole sequence. Tries first to pass the
    pieces unchanged to the layers after the blocks, and then to extend them to the full length (`placed`).

    `texts`: the captured runs of both texts. `before`: the cut that was found for the previous set of inputs; its
    `placed` is reused.

    Raises:
        CannotCutSequence: with every cut, some results do not match.
    """
    noted = texts[0]
    if not noted.calls:
        raise CannotCutSequence(Message("its blocks do not call torch's scaled_dot_product_attention"))
    if noted.logits is None:
        raise CannotCutSequence(Message("it returns no logits"))
    if noted.logits.ndim < 3 or noted.logits.shape[SEQUENCE_DIM] != noted.length:
        raise CannotCutSequence(
            Message("its logits {shape} are not (rows, sequence, ...)", shape=list(noted.logits.shape))
        )
    wholes = [(text, *text.gradients(model)) for text in texts]
    reason: CannotCutSequence | None = None
    ways = (before.placed,) if before is not None else (False, True) if anatomy.head is not None else (False,)
    for placed in ways:
        sequence_cut = SequenceCut(places, placed)
        try:
            for text, of_results, of_parameters in wholes:
                total: dict[str, torch.Tensor] = {}
                for rank in range(SIMULATED_RANKS):
                    for name, gradient in _check_piece(
                        model, anatomy, HeadTailSplit(SIMULATED_RANKS, rank), text, of_results, sequence_cut
                    ).items():
                        total[name] = total[name] + gradient if name in total else gradient
                _check_parameter_gradients(total, of_parameters)
            return sequence_cut
        except CannotCutSequence as objection:
            reason = reason or objection
    assert reason is not None
    raise reason


def _check_parameter_gradients(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    scale = max((float(gradient.norm()) for gradient in whole.values()), default=0.0)
    for name in whole.keys() | found.keys():
        known = whole[name] if name in whole else torch.zeros_like(found[name])
        _check_equal(f"gradients of {name}", found.get(name, torch.zeros_like(known)), known, scale)


def _check_piece(
    model: nn.Module,
    anatomy: ModelGraph,
    pieces: HeadTailSplit,
    noted: CapturedRun,
    of_results: list[torch.Tensor | None],
    sequence_cut: SequenceCut,
) -> dict[str, torch.Tensor]:
    """Runs the model on the piece of one rank, and returns the gradients of the parameters by name.

    Raises:
        CannotCutSequence: the result is not the rank's piece of the full result.
    """
    calls = iter(enumerate(noted.calls))
    terms: list[tuple[torch.Tensor, torch.Tensor]] = []
    leaves: list[torch.Tensor] = []

    def attend(call: SdpaCall) -> torch.Tensor:
        following = next(calls, None)
        if following is None:
            raise CannotCutSequence(Message("it calls attention more often on a piece than on the whole sequence"))
        number, (whole, result) = following
        if why := call.objection(noted.length):
            raise CannotCutSequence(why)
        for place, what in enumerate(("queries", "keys", "values")):
            here, there = call.sources[place], whole.sources[place]
            _check_equal(f"the {what} of attention {number}", here, pieces.cut(there, -2))
            terms.append((here, pieces.cut(cotangent(there.shape, there, 3 * number + place + 1), -2)))
        if (call.causal, call.scale, call.mask is None) != (whole.causal, whole.scale, whole.mask is None):
            raise CannotCutSequence(Message("attention {number} differs on a piece of the sequence", number=number))
        if call.mask is not None and whole.mask is not None and not torch.equal(call.mask, whole.mask):
            raise CannotCutSequence(Message("the mask of attention {number} differs on a piece", number=number))
        leaves.append(leaf_copy(pieces.cut(result, -2)))
        return leaves[-1].clone()

    set_seed(0)
    with on_sequence_piece(model, anatomy, ContextState(pieces, attend, sequence_cut)):
        try:
            logits = extract_logits(model(noted.ids, **noted.others))
        except InputError as error:
            raise CannotCutSequence(str(error)) from None
        except CannotCutSequence:
            raise
        except Exception as error:
            text = mark_msgid("it does not run on a piece of the sequence ({reason})")
            raise CannotCutSequence(Message(text, reason=reason_of(error))) from None
    if next(calls, None) is not None:
        raise CannotCutSequence(Message("it calls attention less often on a piece than on the whole sequence"))
    assert logits is not None and noted.logits is not None
    _check_equal("its logits", logits, pieces.cut(noted.logits, SEQUENCE_DIM))
    terms.append((logits, pieces.cut(cotangent(noted.logits.shape, noted.logits, 0), SEQUENCE_DIM)))
    gradients, of_parameters = weighted_gradients(model, terms, leaves)
    scale = max((float(known.norm()) for known in of_results if known is not None), default=0.0)
    for number, (gradient, known) in enumerate(zip(gradients, of_results, strict=True)):
        there = torch.zeros_like(leaves[number]) if known is None else pieces.cut(known, -2)
        _check_equal(
            f"gradients of attention {number}", torch.zeros_like(there) if gradient is None else gradient, there, scale
        )
    return of_parameters


def _check_equal(what: str, here: torch.Tensor, there: torch.Tensor, scale: float = 0.0) -> None:
    if here.shape != there.shape:
        raise CannotCutSequence(
            Message(
                "on a piece of the sequence {what} have shape {shape} instead of {expected}",
                what=what,
                shape=list(here.shape),
                expected=list(there.shape),
            )
        )
    if (difference := relative_difference(here.detach(), there.detach(), scale)) is not None:
        raise CannotCutSequence(
            Message(
                "on a piece of the sequence {what} differ from those on the whole by {difference:.1e}",
                what=what,
                difference=difference,
            )
        )


# --- temporary changes to the model


@contextmanager
def replaced_forwards(
    blocks: list[nn.Module], change: Callable[[int, ForwardFunction], ForwardFunction]
) -> Iterator[None]:
    """Replaces the forward of each block by `change(index, forward)`. Restores the forwards on exit."""
    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for index, block in enumerate(blocks):
            block.forward = change(index, block.forward)  # type: ignore[method-assign]
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            if own is None:
                del block.forward
            else:
                block.forward = own


@contextmanager
def on_sequence_piece(model: nn.Module, anatomy: ModelGraph, context: ContextState) -> Iterator[None]:
    """Makes the blocks work on a piece of the sequence inside the context. `context` defines the rank and the cut."""
    blocks = [model.get_submodule(anatomy.block(index)) for index in range(anatomy.count)]

    def change(index: int, block: ForwardFunction) -> ForwardFunction:
        inner = context.around(block, index)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if index == 0:
                args, kwargs = with_hidden(args, kwargs, context.cut_hidden(hidden_of(args, kwargs)))
            output = inner(*args, **kwargs)
            return map_first(context.place_hidden, output) if index == len(blocks) - 1 else output

        return forward

    hook = (
        context.cut_before(model.get_submodule(anatomy.head)) if context.placed and anatomy.head is not None else None
    )
    try:
        with replaced_forwards(blocks, change):
            yield
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def skipped_blocks(blocks: list[nn.Module], run: set[int]) -> Iterator[None]:
    """Makes each block whose index is not in `run` return its input hidden state, in the output structure of the block
    that ran last."""
    form: list[Any] = [None]

    def change(index: int, block: ForwardFunction) -> ForwardFunction:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if index in run:
                form[0] = block(*args, **kwargs)
                return form[0]
            return map_first(lambda _: hidden_of(args, kwargs), form[0])

        return forward

    with replaced_forwards(blocks, change):
        yield
