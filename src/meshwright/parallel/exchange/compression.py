"""Gradients in fewer bytes between hosts. It changes the result, so the workload asks for it; ranks of one host send nothing and lose nothing.

Each host adds what it did not send last time to its sum, sends the nearest value that the code can say, and keeps the rest (error feedback: Seide
et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, arXiv 1901.09847). Every host decodes what
all sent, its own included, and adds in order of host: all hold the same sum, the same in every run.

    bf16     2 bytes an element
    int8     1 byte an element, and a float32 for each BLOCK of them: the largest of the block is 127
    low-rank (lowrank.py)

Of h hosts each sends h - 1 times its coded slice for an all-reduce, where a plain one sends 2 (h - 1) / h times the slice; a reduce-scatter
sends (h - 1) / h times its coded buffer, as a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from meshwright.parallel.exchange.exchange import Pending, all_gather, all_to_all
from meshwright.parallel.exchange.lowrank import LowRank, matrices
from meshwright.parallel.exchange.tiers import Tiers
from meshwright.spec.compression import BLOCK, Compression

if TYPE_CHECKING:
    from meshwright.parallel.exchange.group import Group


class Code(Protocol):
    """A vector as bytes and back; equally many bytes for vectors of one length."""

    def encode(self, values: torch.Tensor) -> torch.Tensor: ...

    def decode(self, said: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor: ...


class Bfloat16:
    """
    >>> code, values = Bfloat16(), torch.tensor([1.0, 1.001])
    >>> code.decode(code.encode(values), 2, torch.float32).tolist()
    [1.0, 1.0]
    """

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, said: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return said.view(torch.bfloat16).to(dtype)


class Int8:
    """
    >>> code, values = Int8(), torch.tensor([127.0, -3.4, 0.6])
    >>> code.decode(code.encode(values), 3, torch.float32).tolist()
    [127.0, -3.0, 1.0]
    """

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(values.float(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        scales = padded.abs().amax(1, keepdim=True) / 127
        quantized = (padded / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        return torch.cat([scales.view(-1).view(torch.uint8), quantized.view(-1).view(torch.uint8)])

    def decode(self, said: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        blocks = -(-numel // BLOCK)
        scales, quantized = said[: 4 * blocks].view(torch.float32), said[4 * blocks :].view(torch.int8)
        return (quantized.view(blocks, BLOCK) * scales[:, None]).view(-1)[:numel].to(dtype)


CODES: dict[str, Callable[[], Code]] = {"bf16": Bfloat16, "int8": Int8}


class Coded:
    """How one buffer's sums go between hosts; `kept` is what this host has not sent yet."""

    def __init__(self, code: Code, kept: torch.Tensor) -> None:
        self.code, self.kept = code, kept

    def all_reduce(self, flat: torch.Tensor, group: Group, later: Group) -> Pending:
        said = self._say(flat.view(1, -1)).view(-1)
        heard = said.new_empty(group.size * said.numel())
        return self._then(all_gather(heard, said, group), heard, flat, group)

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, group: Group, later: Group) -> Pending:
        said = self._say(full.view(group.size, -1)).view(-1)
        heard = torch.empty_like(said)
        return self._then(all_to_all(heard, said, group), heard, out, group)

    def _say(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row of `rows` and what was kept of it, as bytes; what they do not say is kept."""
        kept = self.kept.view(rows.shape)
        kept.add_(rows)
        said = torch.stack([self.code.encode(row) for row in kept])
        for row, bytes_of in zip(kept, said, strict=True):
            row.sub_(self.code.decode(bytes_of, row.numel(), row.dtype))
        kept.nan_to_num_(0.0, 0.0, 0.0)  # of a step that all ranks skip
        return said

    def _then(self, work: Pending, heard: torch.Tensor, out: torch.Tensor, group: Group) -> Pending:
        def add() -> None:
            work.wait()
            first, *rest = (self.code.decode(said, out.numel(), out.dtype) for said in heard.view(group.size, -1))
            for each in rest:
                first += each
            out.copy_(first)

        return work.before(add)


class Vector(NamedTuple):
    """What is summed: elements `start` to `stop` of a buffer that holds `tensors` (offset and shape each)."""

    start: int
    stop: int
    like: torch.Tensor
    tensors: Sequence[tuple[int, tuple[int, ...]]]


class Ways(NamedTuple):
    """Of the sums of a flat unit over its shard group and over its copies; None where plainly."""

    shards: Coded | LowRank | None
    copies: Coded | LowRank | None


def coded(asked: Compression | None, group: Group | None, vector: Vector, scattered: bool) -> Coded | LowRank | None:
    """How sums of `vector`, or of slices of it, go over `group`: None where plainly, also because nothing leaves the host."""
    if asked is None or group is None or group.process is None:
        return None
    runs = _runs(group, vector.start, vector.stop, scattered)
    numel = sum(stop - start for start, stop in runs)
    if asked.kind == "low-rank":
        return LowRank(matrices(vector.tensors, runs, asked.rank), numel, asked.rank, vector.like)
    return Coded(CODES[asked.kind](), torch.zeros(numel, dtype=vector.like.dtype, device=vector.like.device))


def _runs(group: Group, start: int, stop: int, scattered: bool) -> list[tuple[int, int]]:
    """What of it this rank hands to other hosts, in the order in which it lies there."""
    tiers = group.lanes
    if not isinstance(tiers, Tiers):
        return [(start, stop)]
    if scattered:
        each = (stop - start) // group.size
        return [(start + row[tiers.index] * each, start + (row[tiers.index] + 1) * each) for row in tiers.table]
    length, ranks = stop - start, len(tiers.ranks)
    return [(start + length * tiers.index // ranks, start + length * (tiers.index + 1) // ranks)]
