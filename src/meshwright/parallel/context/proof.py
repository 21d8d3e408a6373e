"""Proves with numbers that a model can work on a piece of the sequence, and learns what its blocks are given along the sequence.

Rule: the model runs once on a whole short text, every attention noted with its queries, keys, values and result. Then it runs on one piece of
the same text, attention answering with that piece of the noted result, if it is asked with that piece of the noted queries, keys and values.
When logits too are a piece of the whole ones, everything beside attention works on each position alone, or with what the whole model gave
it; attention over all pieces is exact by its own formulas, so the whole is. A convolution or a cumulative sum along the sequence, positions
counted inside a block, attention by other means than torch's: all of them show, and the plan is refused instead of being silently wrong.

The piece is that of rank 0, whose two chunks are not neighbours. Constant parameters (zeros, ones) get noise for the while, lest what
multiplies by zero today is not seen. What changes with the length of the text lies along the sequence: two lengths are looked at. Of blocks
that are built alike the first one runs, the others hand their input on. Parameters without memory are lent numbers as far as these need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.anatomy import Anatomy
from meshwright.anatomy.lent import lent
from meshwright.anatomy.observed import observed
from meshwright.base.errors import InputError
from meshwright.parallel.context.blocks import SEQUENCE, Context, Path, Places, Way, is_mask, tensors_of
from meshwright.parallel.context.call import Attending, Call, attend_plainly
from meshwright.parallel.context.pieces import Pieces
from meshwright.parallel.objective import logits_of
from meshwright.parallel.pipeline.absent import hidden_of
from meshwright.parallel.pipeline.gates import map_first, with_hidden

ROWS = 3
CHUNKS = ((3, 2), (2, 1))
"""Positions in a chunk, of the text that is compared and of a second one; shorter ones where a model has few positions."""

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Relative. Rounding stays far below, another position is of the order of 1."""

Forward = Callable[..., Any]


class Objection(Exception):
    """Why the model cannot work on pieces. Caught where the plan is refused."""


def prove(model: nn.Module, anatomy: Anatomy, ranks: int) -> Way:
    """How the model works on pieces. Raises Objection. Leaves it as it was."""
    blocks = [model.get_submodule(anatomy.block(index)) for index in range(anatomy.count)]
    first = set(first_of_kind(blocks))
    prefix = f"{anatomy.blocks}."

    def needed(name: str) -> bool:
        return not name.startswith(prefix) or int(name.removeprefix(prefix).partition(".")[0]) in first

    with torch.no_grad(), observed(model), lent(model, needed), unsettled(model), passing(blocks, first):
        noted, other = _noted(model, anatomy, ranks)
        places = _places(noted, other)
        return _compared(model, anatomy, ranks, noted, places)


class Noted:
    """What one run on the whole text showed."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, length: int) -> None:
        self.length = length
        self.calls: list[tuple[Call, torch.Tensor]] = []
        self.given: dict[tuple[int, Path], torch.Size] = {}
        self.hidden: dict[int, torch.Size] = {}
        device = next(tensor.device for tensor in model.parameters() if not tensor.is_meta)
        self.ids = torch.arange(ROWS * length, device=device).mul(31).remainder(anatomy.vocabulary).view(ROWS, length)
        blocks = [model.get_submodule(anatomy.block(index)) for index in range(anatomy.count)]
        handles = [block.register_forward_pre_hook(self._note(index), with_kwargs=True) for index, block in enumerate(blocks)]
        try:
            with Attending(self._attend):
                self.logits = logits_of(model(self.ids))
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, index: int) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = hidden_of(args, kwargs)
            self.hidden[index] = hidden.shape
            self.given |= {(index, path): tensor.shape for path, tensor in tensors_of((args, kwargs)) if tensor is not hidden}

        return note

    def _attend(self, call: Call) -> torch.Tensor:
        result = attend_plainly(call)
        self.calls.append((call, result))
        return result


def _noted(model: nn.Module, anatomy: Anatomy, ranks: int) -> tuple[Noted, Noted]:
    reason = ""
    for chunks in CHUNKS:
        try:
            first, second = (Noted(model, anatomy, 2 * ranks * chunk) for chunk in chunks)
            return first, second
        except Exception as error:
            reason = said(error)
    raise Objection(f"it does not run on {2 * ranks * CHUNKS[-1][0]} token ids alone ({reason})")


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def _places(noted: Noted, other: Noted) -> Places:
    places: Places = {}
    for index, shape in noted.hidden.items():
        if len(shape) < 3 or shape[SEQUENCE] != noted.length or other.hidden[index][SEQUENCE] != other.length:
            raise Objection(f"the hidden state at block {index}, {list(shape)}, is not (rows, sequence, ...)")
    for key, shape in noted.given.items():
        after = other.given.get(key, torch.Size())
        along = [one == noted.length and two == other.length for one, two in zip(shape, after, strict=False)]
        if len(shape) != len(after) or any(one != two and not moves for one, two, moves in zip(shape, after, along, strict=True)):
            raise Objection(f"block {key[0]} is given {list(shape)} of {noted.length} positions and {list(after)} of {other.length}")
        mask = any(along) and along[-1] and is_mask(shape, noted.length)
        if sum(along) > 1 and not mask:
            raise Objection(f"block {key[0]} is given {list(shape)}, along the sequence twice, which is no mask")
        places[key] = along.index(True) if any(along) and not mask else None
    return places


def _compared(model: nn.Module, anatomy: Anatomy, ranks: int, noted: Noted, places: Places) -> Way:
    """The first of both ways on which a piece gives a piece of the whole."""
    if not noted.calls:
        raise Objection("its blocks do not attend by torch's scaled_dot_product_attention")
    if noted.logits is None:
        raise Objection("it returns no logits")
    if noted.logits.ndim < 3 or noted.logits.shape[SEQUENCE] != noted.length:
        raise Objection(f"its logits {list(noted.logits.shape)} are not (rows, sequence, ...)")
    reason: Objection | None = None
    for placed in (False, True) if anatomy.head is not None else (False,):
        way = Way(places, placed)
        try:
            _compare(model, anatomy, Pieces(ranks, 0), noted, way)
            return way
        except Objection as objection:
            reason = reason or objection
    assert reason is not None
    raise reason


def _compare(model: nn.Module, anatomy: Anatomy, pieces: Pieces, noted: Noted, way: Way) -> None:
    calls = iter(enumerate(noted.calls))

    def attend(call: Call) -> torch.Tensor:
        following = next(calls, None)
        if following is None:
            raise Objection("it attends more often than on the whole")
        number, (whole, result) = following
        if why := call.objection(noted.length):
            raise Objection(why)
        for what, here, there in (("queries", call.query, whole.query), ("keys", call.key, whole.key), ("values", call.value, whole.value)):
            _equal(f"the {what} of attention {number}", here, pieces.cut(there, -2))
        if (call.causal, call.scale, call.mask is None) != (whole.causal, whole.scale, whole.mask is None):
            raise Objection(f"attention {number} is another one")
        if call.mask is not None and whole.mask is not None and not torch.equal(call.mask, whole.mask):
            raise Objection(f"the mask of attention {number} is another one")
        return pieces.cut(result, -2)

    with on_pieces(model, anatomy, Context(pieces, attend, way)):
        try:
            logits = logits_of(model(noted.ids))
        except InputError as error:
            raise Objection(str(error)) from None
        except Objection:
            raise
        except Exception as error:
            raise Objection(f"it does not run on a piece of the sequence ({said(error)})") from None
    if next(calls, None) is not None:
        raise Objection("it attends less often than on the whole")
    assert logits is not None and noted.logits is not None
    _equal("its logits", logits, pieces.cut(noted.logits, SEQUENCE))


def _equal(what: str, here: torch.Tensor, there: torch.Tensor) -> None:
    if here.shape != there.shape:
        raise Objection(f"on a piece of the sequence {what} are {list(here.shape)} instead of {list(there.shape)}")
    difference = float((here - there).double().norm() / there.double().norm().clamp_min(1e-30))
    if not difference <= TOLERANCE.get(there.dtype, 1e-3):
        raise Objection(f"on a piece of the sequence {what} differ from those on the whole by {difference:.1e}")


# --- the model, changed for a while -----------------------------------------------------------------------------------------------


@contextmanager
def forwards(blocks: list[nn.Module], change: Callable[[int, Forward], Forward]) -> Iterator[None]:
    """The forward of each block is what `change(index, forward)` makes of it."""
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
def on_pieces(model: nn.Module, anatomy: Anatomy, context: Context) -> Iterator[None]:
    """The blocks work on this rank's piece."""
    blocks = [model.get_submodule(anatomy.block(index)) for index in range(anatomy.count)]

    def change(index: int, block: Forward) -> Forward:
        inner = context.around(block, index)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if index == 0:
                args, kwargs = with_hidden(args, kwargs, context.cut_hidden(hidden_of(args, kwargs)))
            output = inner(*args, **kwargs)
            return map_first(context.place_hidden, output) if index == len(blocks) - 1 else output

        return forward

    hook = context.cut_before(model.get_submodule(anatomy.head)) if context.placed and anatomy.head is not None else None
    try:
        with forwards(blocks, change):
            yield
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def passing(blocks: list[nn.Module], run: set[int]) -> Iterator[None]:
    """Blocks that are not in `run` hand their hidden state on, in the form in which the others return it."""
    form: list[Any] = [None]

    def change(index: int, block: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if index in run:
                form[0] = block(*args, **kwargs)
                return form[0]
            return map_first(lambda _: hidden_of(args, kwargs), form[0])

        return forward

    with forwards(blocks, change):
        yield


def first_of_kind(blocks: list[nn.Module]) -> list[int]:
    """The first of each kind: blocks are alike that have the same modules and parameters of the same shapes."""
    kinds: dict[Any, int] = {}
    for index, block in enumerate(blocks):
        modules = tuple((path, type(module)) for path, module in block.named_modules())
        shapes = tuple((name, tensor.shape) for name, tensor in block.named_parameters())
        kinds.setdefault((modules, shapes), index)
    return list(kinds.values())


@contextmanager
def unsettled(model: nn.Module) -> Iterator[None]:
    """Constant parameters with noise on them, and matrices so large that what they give is of the size of what they are given: as initialized,
    a convolution over the sequence may add less to the hidden state than a comparison sees."""
    generator = torch.Generator().manual_seed(0)
    there = [tensor for tensor in model.parameters() if tensor.numel() > 1 and not tensor.is_meta]
    constant = [tensor for tensor in there if bool((tensor == tensor.flatten()[0]).all())]
    before = [tensor.detach().clone() for tensor in constant]
    raised = [(tensor, _raise(tensor)) for tensor in there if tensor.ndim > 1 and tensor.is_floating_point()]
    try:
        for tensor, factor in raised:
            tensor.data *= factor
        for tensor in constant:
            tensor.data += 0.1 * torch.randn(tensor.shape, generator=generator).to(tensor)
        yield
    finally:
        for tensor, value in zip(constant, before, strict=True):
            tensor.data.copy_(value)
        for tensor, factor in raised:
            if all(tensor is not one for one in constant):
                tensor.data /= factor


def _raise(tensor: torch.Tensor) -> float:
    """A power of two, so that dividing by it gives the same bits again."""
    size = float(tensor.detach().float().square().mean().sqrt())
    wanted = (tensor.numel() / len(tensor)) ** -0.5
    return 2.0 ** math.ceil(math.log2(wanted / size)) if 0 < size < wanted else 1.0
