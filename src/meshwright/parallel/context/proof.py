"""Proves with numbers that a model can work on a piece of the sequence, and learns what its blocks are given along the sequence.

Rule: the model runs once on a whole short text, every attention noted with its queries, keys, values and result. Then it runs on one piece of
the same text, attention answering with that piece of the noted result, if it is asked with that piece of the noted queries, keys and values.
When logits too are a piece of the whole ones, everything beside attention works on each position alone, or with what the whole model gave
it; attention over all pieces is exact by its own formulas, so the whole is. A convolution or a cumulative sum along the sequence, positions counted inside a
block, attention by other means than torch's: all of them show, and the plan is refused instead of being silently wrong.

The piece is that of rank 0, whose two chunks are not neighbours. Constant parameters (zeros, ones) get noise for the while, lest what
multiplies by zero today is not seen. What changes with the length of the text lies along the sequence: two lengths are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.anatomy import Anatomy
from meshwright.parallel.context.blocks import SEQUENCE, Context, Places, is_mask, tensors_of
from meshwright.parallel.context.call import Attending, Call, attend_plainly
from meshwright.parallel.context.pieces import Pieces
from meshwright.parallel.gates import hidden_of, with_hidden
from meshwright.parallel.objective import logits_of

ROWS = 2
CHUNKS = ((3, 2), (2, 1))
"""Positions in a chunk, of the text that is compared and of a second one; shorter ones where a model has few positions."""

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Relative. Rounding stays far below, another position is of the order of 1."""


class Objection(Exception):
    """Why the model cannot work on pieces. Caught where the plan is refused."""


class Noted:
    """What one run on the whole text showed."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, length: int) -> None:
        self.length = length
        self.calls: list[tuple[Call, torch.Tensor]] = []
        self.given: dict[tuple[int, tuple[int | str, ...]], torch.Size] = {}
        self.hidden: dict[int, torch.Size] = {}
        device = next(model.parameters()).device
        ids = torch.arange(ROWS * length, device=device).mul(31).remainder(max(anatomy.vocabulary, 1)).view(ROWS, length)
        self.ids = ids
        handles = [
            model.get_submodule(anatomy.block(index)).register_forward_pre_hook(self._note(index), with_kwargs=True)
            for index in range(anatomy.count)
        ]
        try:
            with Attending(self._attend):
                self.logits = logits_of(model(ids))
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


def prove(model: nn.Module, anatomy: Anatomy, ranks: int) -> Places:
    """Where the sequence lies in what blocks are given. Raises Objection. Leaves the model as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), unsettled(model):
            noted, other = _noted(model, anatomy, ranks)
            places = _places(noted, other)
            _compare(model, anatomy, ranks, noted, places)
            return places
    finally:
        for module, training in modes:
            module.training = training


def _noted(model: nn.Module, anatomy: Anatomy, ranks: int) -> tuple[Noted, Noted]:
    reason = ""
    for chunks in CHUNKS:
        try:
            first, second = (Noted(model, anatomy, 2 * ranks * chunk) for chunk in chunks)
            return first, second
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
    raise Objection(f"it does not run on {2 * ranks * CHUNKS[-1][0]} token ids alone ({reason})")


def _places(noted: Noted, other: Noted) -> Places:
    places: Places = {}
    for index, shape in noted.hidden.items():
        if len(shape) < 3 or shape[SEQUENCE] != noted.length or other.hidden[index][SEQUENCE] != other.length:
            raise Objection(f"the hidden state at block {index}, {list(shape)}, is not (rows, sequence, ...)")
    for key, shape in noted.given.items():
        after = other.given.get(key, shape)
        dims = [dim for dim, (one, two) in enumerate(zip(shape, after, strict=False)) if (one, two) == (noted.length, other.length)]
        if len(shape) != len(after) or any(one != two for dim, (one, two) in enumerate(zip(shape, after, strict=True)) if dim not in dims):
            raise Objection(f"block {key[0]} is given {list(shape)} of {noted.length} positions and {list(after)} of {other.length}")
        if len(dims) == 1 and not is_mask(torch.empty(shape, device="meta"), noted.length):
            places[key] = dims[0]
        elif dims and not is_mask(torch.empty(shape, device="meta"), noted.length):
            raise Objection(f"block {key[0]} is given {list(shape)}, along the sequence twice, which is no mask")
    return places


def _compare(model: nn.Module, anatomy: Anatomy, ranks: int, noted: Noted, places: Places) -> None:
    pieces = Pieces(ranks, 0)
    calls = iter(enumerate(noted.calls))

    def attend(call: Call) -> torch.Tensor:
        number, (whole, result) = next(calls, (-1, (None, call.query)))
        if whole is None:
            raise Objection("it attends more often than on the whole")
        call.check(noted.length)
        for what, here, there in (("queries", call.query, whole.query), ("keys", call.key, whole.key), ("values", call.value, whole.value)):
            _equal(f"the {what} of attention {number}", here, pieces.cut(there, -2))
        if (call.causal, call.scale) != (whole.causal, whole.scale) or (call.mask is None) != (whole.mask is None):
            raise Objection(f"attention {number} is another one")
        if call.mask is not None and whole.mask is not None and not torch.equal(call.mask, whole.mask):
            raise Objection(f"the mask of attention {number} is another one")
        return pieces.cut(result, -2)

    with on_pieces(model, anatomy, Context(pieces, attend, places)):
        logits = logits_of(model(noted.ids))
    if next(calls, None) is not None:
        raise Objection("it attends less often than on the whole")
    if not noted.calls:
        raise Objection("its blocks do not attend by torch's scaled_dot_product_attention")
    if logits is None or noted.logits is None:
        raise Objection("it returns no logits")
    if noted.logits.ndim < 3 or noted.logits.shape[SEQUENCE] != noted.length:
        raise Objection(f"its logits {list(noted.logits.shape)} are not (rows, sequence, ...)")
    _equal("its logits", logits, pieces.cut(noted.logits, SEQUENCE))


def _equal(what: str, here: torch.Tensor, there: torch.Tensor) -> None:
    if here.shape != there.shape:
        raise Objection(f"on a piece of the sequence {what} are {list(here.shape)} instead of {list(there.shape)}")
    difference = float((here - there).double().norm() / there.double().norm().clamp_min(1e-30))
    if not difference <= TOLERANCE.get(there.dtype, 1e-3):
        raise Objection(f"on a piece of the sequence {what} differ from those on the whole by {difference:.1e}")


@contextmanager
def on_pieces(model: nn.Module, anatomy: Anatomy, context: Context) -> Iterator[None]:
    """The blocks work on this rank's piece for a while."""
    blocks = [model.get_submodule(anatomy.block(index)) for index in range(anatomy.count)]
    before = [block.__dict__.get("forward") for block in blocks]

    def entering(forward: Any) -> Any:
        def first(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = with_hidden(args, kwargs, context.cut_hidden(hidden_of(args, kwargs)))
            return forward(*args, **kwargs)

        return first

    try:
        for index, block in enumerate(blocks):
            forward = context.around(block.forward, index)
            block.forward = forward if index else entering(forward)  # type: ignore[method-assign]
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            if own is None:
                del block.forward
            else:
                block.forward = own


@contextmanager
def unsettled(model: nn.Module) -> Iterator[None]:
    """Constant parameters with noise on them, for a while."""
    generator = torch.Generator().manual_seed(0)
    constant = [tensor for tensor in model.parameters() if tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())]
    before = [tensor.detach().clone() for tensor in constant]
    try:
        for tensor in constant:
            tensor.data += 0.1 * torch.randn(tensor.shape, generator=generator).to(tensor)
        yield
    finally:
        for tensor, value in zip(constant, before, strict=True):
            tensor.data.copy_(value)
