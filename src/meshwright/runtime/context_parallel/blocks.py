"""Runs the blocks of a model on one rank's piece of the sequence (`ContextState`). The build pass `wrap_blocks` wraps
the blocks with it.

The hidden state is cut once, before the first block. Other block arguments that span the whole sequence (rotary tables,
positions) are cut when a block is called, along the dimensions in `places`. verify.py finds these dimensions: their
size changes with the length of the sequence. An attention mask (queries x keys) is not cut, because attention selects
the rows and columns that it needs. Most models accept any length after the last block. If a model expects the full
length there, the hidden state is extended with zeros at the positions of other ranks. Before the vocabulary head it is
then cut to this rank's piece again.

`HeadTailSplit` assigns the positions of a sequence to context ranks. Each rank has one chunk from the front and one
from the back, so that all ranks have equal work under a causal mask.

Rule: for c context ranks the sequence is cut into 2c chunks. Rank r has the chunks r and 2c - 1 - r. Under a causal
mask a query attends to all previous positions, so the work of chunk i is proportional to i + 1/2. The work of the two
chunks of a rank, (r + 1/2) + (2c - 1 - r + 1/2) = 2c, is equal for all ranks. Source: Llama 3 (arXiv 2407.21783),
section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.analysis.block_lists import hidden_of, with_hidden
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.context_parallel.kernels import SdpaCall, SdpaInterceptor


@dataclass(frozen=True)
class HeadTailSplit:
    """The cut of a sequence into pieces for `ranks` context ranks. `index` is the index of this rank."""

    ranks: int
    index: int

    def chunk(self, length: int) -> int:
        """Returns the number of positions in one chunk of a sequence of `length` positions.

        Raises:
            InputError: the chunks would be unequal.
        """
        chunk, rest = divmod(length, 2 * self.ranks)
        if rest or not chunk:
            raise InputError(
                Message(
                    "2 * cp({ranks}) = {parts} does not divide sequence({length}): pad to {chunk} with labels of "
                    "-100, or choose another cp",
                    ranks=self.ranks,
                    parts=2 * self.ranks,
                    length=length,
                    chunk=(chunk + 1) * 2 * self.ranks,
                )
            )
        return chunk

    def chunks(self, length: int) -> list[slice]:
        """Returns this rank's two chunks of a sequence of `length` positions, in ascending order.

        >>> HeadTailSplit(2, 0).chunks(8), HeadTailSplit(2, 1).chunks(8)
        ([slice(0, 2, None), slice(6, 8, None)], [slice(2, 4, None), slice(4, 6, None)])
        """
        chunk = self.chunk(length)
        return [slice(at * chunk, (at + 1) * chunk) for at in (self.index, 2 * self.ranks - 1 - self.index)]

    def of(self, rank: int) -> HeadTailSplit:
        """Returns the split of the same sequence for the rank with index `rank`."""
        return HeadTailSplit(self.ranks, rank)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's positions of `whole` along `dim`."""
        return torch.cat(
            [whole.narrow(dim, run.start, run.stop - run.start) for run in self.chunks(whole.shape[dim])], dim
        )

    def place(self, piece: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns a tensor of the full length along `dim`, with `piece` at this rank's positions and zeros at the
        positions of other ranks."""
        length = piece.shape[dim] * self.ranks
        parts, end = [], 0
        for run, chunk in zip((*self.chunks(length), slice(length, length)), (*piece.chunk(2, dim), None), strict=True):
            shape = (*piece.shape[:dim], run.start - end, *piece.shape[dim + 1 :])
            parts += [piece.new_zeros(shape)] + ([] if chunk is None else [chunk])
            end = run.stop
        return torch.cat(parts, dim)

    def in_order(self, stacked: torch.Tensor, dim: int) -> torch.Tensor:
        """Reorders the positions along `dim`, from the pieces of all ranks in order of rank (`stacked`) to sequence
        order."""
        first, second = stacked.unflatten(dim, (self.ranks, 2, -1)).unbind(dim + 1)
        return torch.cat([first.flatten(dim, dim + 1), second.flip(dim).flatten(dim, dim + 1)], dim)

    def stacked(self, ordered: torch.Tensor, dim: int) -> torch.Tensor:
        """Inverts `in_order`: returns the pieces of all ranks in order of rank along `dim`."""
        first, second = ordered.unflatten(dim, (2, self.ranks, -1)).unbind(dim)
        return torch.stack([first, second.flip(dim)], dim + 1).flatten(dim, dim + 2)


ArgPath = tuple[int | str, ...]
SequenceDims = dict[tuple[int, ArgPath], int | None]
"""Maps (block index, path) of each tensor argument of each block to the sequence dimension of the argument, or to None
if the argument is not cut."""

UNSEEN_DIM = -1
"""Marks a block argument that is not in `SequenceDims`."""

SEQUENCE_DIM = 1
"""The sequence dimension of a hidden state (B, T, C)."""


class SequenceCut(NamedTuple):
    """How a model runs on pieces of the sequence. `places`: the dimensions to cut. `placed`: whether the layers between
    the blocks and the head need the full length."""

    places: SequenceDims
    placed: bool


class ContextState:
    """Runs the blocks of one model on this rank's piece.

    `attend` computes each attention call over the pieces of all context ranks. `tensor_ranks`: the number of tensor
    ranks that further split the hidden state (sequence parallelism), otherwise 1.
    """

    def __init__(
        self,
        pieces: HeadTailSplit,
        attend: Callable[[SdpaCall], torch.Tensor],
        sequence_cut: SequenceCut,
        tensor_ranks: int = 1,
    ) -> None:
        self.cuts = pieces.ranks * tensor_ranks
        self.pieces, self.places, self.placed = pieces, sequence_cut.places, sequence_cut.placed
        self.mode = SdpaInterceptor(attend)
        self._cut: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def cut_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece of the hidden state before the first block."""
        return self.pieces.cut(hidden, SEQUENCE_DIM)

    def place_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the hidden state for the layers after the last block. If `placed`, the hidden state is extended to
        the full length, with zeros at the positions of other ranks."""
        return self.pieces.place(hidden, SEQUENCE_DIM) if self.placed else hidden

    def cut_before(self, head: nn.Module) -> Any:
        """Installs a hook that passes only this rank's positions to `head`, and returns the hook's handle. The hook
        runs before all other hooks that change the input of the head."""
        cut = lambda module, args, kwargs: with_hidden(args, kwargs, self.cut_hidden(hidden_of(args, kwargs)))
        return head.register_forward_pre_hook(cut, prepend=True, with_kwargs=True)

    def cut_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the labels (B, T) at the positions of this rank's logits.

        Raises:
            InputError: the labels have fewer than two dimensions, or T is not a multiple of 2 x context ranks.
        """
        if labels.ndim < 2:
            raise InputError(
                Message(
                    "cp splits labels along the sequence and expects the shape (rows, sequence), not {shape}: use cp1",
                    shape=list(labels.shape),
                )
            )
        return self.pieces.cut(labels, SEQUENCE_DIM)

    def around(self, block: Callable[..., Any], index: int) -> Callable[..., Any]:
        """Returns a forward of block `index` that takes this rank's piece of the hidden state, and the other arguments
        in full. Backward may call the returned function again to recompute.

        The returned function raises InputError if an argument spans the sequence, is not a mask, and was not passed to
        the block when verify.py analysed the model.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = hidden_of(args, kwargs)
            length = hidden.shape[SEQUENCE_DIM] * self.cuts
            args, kwargs = map_tensors(
                lambda path, tensor: self._piece(tensor, index, path, hidden, length), (args, kwargs)
            )
            with self.mode:
                return block(*args, **kwargs)

        return forward

    def forget(self) -> None:
        """Frees the cache of cut arguments, which the blocks of one forward share. Called after each forward."""
        self._cut.clear()

    def _piece(
        self, tensor: torch.Tensor, index: int, path: ArgPath, hidden: torch.Tensor, length: int
    ) -> torch.Tensor:
        if tensor is hidden:
            return tensor
        dim = self.places.get((index, path), UNSEEN_DIM)
        if dim == UNSEEN_DIM and length in tensor.shape and not is_attention_mask(tensor.shape, length):
            raise InputError(
                Message(
                    "cp: with this batch, block {index} gets {argument_name} of shape {shape}, which it did not get "
                    "when the model was analysed: leave it out of the batch, or use cp1",
                    index=index,
                    argument_name=_argument_name(path),
                    shape=list(tensor.shape),
                )
            )
        if dim is None or dim == UNSEEN_DIM or tensor.shape[dim] != length:
            return tensor
        key = (id(tensor), dim)
        if key not in self._cut:
            self._cut[key] = tensor, self.pieces.cut(tensor, dim)
        return self._cut[key][1]


def is_attention_mask(shape: torch.Size, length: int) -> bool:
    """Returns whether `shape` may be the shape of an attention mask (queries x keys): (..., length, length) or
    (..., 1, length), with 4 dimensions."""
    return len(shape) == 4 and shape[-1] == length and shape[-2] in (1, length)


def iter_arg_tensors(value: Any, path: ArgPath = ()) -> Iterator[tuple[ArgPath, torch.Tensor]]:
    """Yields (path, tensor) for every tensor in nested arguments."""
    found: list[tuple[ArgPath, torch.Tensor]] = []

    def note(path: ArgPath, tensor: torch.Tensor) -> torch.Tensor:
        found.append((path, tensor))
        return tensor

    map_tensors(note, value, path)
    yield from found


def map_tensors(function: Callable[[ArgPath, torch.Tensor], torch.Tensor], value: Any, path: ArgPath = ()) -> Any:
    """Returns `value` with every nested tensor replaced by `function(path, tensor)`."""
    if isinstance(value, torch.Tensor):
        return function(path, value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item, (*path, key)) for key, item in value.items()}
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(map_tensors(function, item, (*path, at)) for at, item in enumerate(value))
    return value


def _argument_name(path: ArgPath) -> str:
    return f"argument {'.'.join(map(str, path[1:]))!r}"
