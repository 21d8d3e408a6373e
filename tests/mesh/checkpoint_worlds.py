"""Worlds of ranks without processes: threads that share texts through a barrier, and layouts of tensors over them."""

from __future__ import annotations

import itertools
import math
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.reshard import slice_shard
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME, dtype_name
from meshwright.checkpoint.save import LocalShard, RankExchange, save_checkpoint
from meshwright.spec.layout import ShardMetadata

Layout = list[list[ShardMetadata]]


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of flushes to a shared disk take minutes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


def run_world(world: int, work: Callable[[RankExchange], Any]) -> list[Any]:
    """`work` on every rank; what each returned or raised."""
    barrier = threading.Barrier(world)
    texts: list[str] = [""] * world
    results: list[Any] = [None] * world

    def rank(index: int) -> None:
        def share(text: str) -> list[str]:
            texts[index] = text
            barrier.wait(300)
            everyone = list(texts)
            barrier.wait(300)
            return everyone

        try:
            results[index] = work(RankExchange(index, world, share))
        except BaseException as error:
            results[index] = error
            if not isinstance(error, Exception):
                barrier.abort()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def raising(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def random_tensor(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Random bytes as `dtype`: every bit pattern, NaNs included."""
    numel = math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    size = DTYPE_BY_NAME[dtype].itemsize
    high = 2 if dtype == "bool" else 256
    flat = torch.randint(0, high, (numel * size,), generator=generator, dtype=torch.uint8)
    return flat.view(DTYPE_BY_NAME[dtype]).view(shape) if numel else torch.empty(shape, dtype=DTYPE_BY_NAME[dtype])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8)
    )


def random_layout(name: str, full: torch.Tensor, world: int, dice: random.Random) -> Layout:
    """Who holds what: tensor ranks split a dimension (fused: several intervals each), shards cut the part into runs,
    the rest are replicas."""
    tensor_ranks = dice.choice([degree for degree in range(1, world + 1) if world % degree == 0])
    shards = dice.choice(
        [degree for degree in range(1, world // tensor_ranks + 1) if (world // tensor_ranks) % degree == 0]
    )
    dimensions = [dimension for dimension in range(full.dim()) if full.shape[dimension] >= tensor_ranks]
    split = dice.choice(dimensions) if dimensions and (tensor_ranks > 1 or dice.random() < 0.3) else None
    parts = _intervals(full.shape[split], tensor_ranks, dice) if split is not None else [()] * tensor_ranks
    layout: Layout = []
    for rank in range(world):
        intervals = parts[rank % tensor_ranks]
        shard = rank // tensor_ranks % shards
        piece = ShardMetadata(name, tuple(full.shape), dtype_name(full.dtype), split, intervals, 0, 0)
        local = math.prod(piece.local_shape)
        dice_of_part = random.Random(f"{name}{intervals}{shards}{world}")
        cuts = [0, *sorted(dice_of_part.randint(0, local) for _ in range(shards - 1)), local]
        layout.append([piece._replace(start=cuts[shard], stop=cuts[shard + 1])])
    return layout


def _intervals(size: int, ranks: int, dice: random.Random) -> list[tuple[tuple[int, int], ...]]:
    """The dimension cut into as many fused blocks as fit, each block cut for every rank."""
    fused = dice.choice([count for count in (1, 2, 3) if size // count >= ranks])
    edges = [size * block // fused for block in range(fused + 1)]
    result = []
    for rank in range(ranks):
        intervals = [
            (first + (last - first) * rank // ranks, first + (last - first) * (rank + 1) // ranks)
            for first, last in itertools.pairwise(edges)
        ]
        result.append(tuple(interval for interval in intervals if interval[0] < interval[1]))
    return result


def held(pieces: list[ShardMetadata], tensors: dict[str, torch.Tensor]) -> list[LocalShard]:
    return [(piece, slice_shard(tensors[piece.name], piece).clone()) for piece in pieces]


def empty(pieces: list[ShardMetadata]) -> list[LocalShard]:
    return [(piece, torch.zeros(piece.stop - piece.start, dtype=DTYPE_BY_NAME[piece.dtype])) for piece in pieces]


def layouts(tensors: dict[str, torch.Tensor], world: int, dice: random.Random) -> Layout:
    """One layout for each tensor, rank by rank."""
    each = [random_layout(name, full, world, dice) for name, full in tensors.items()]
    return [[piece for layout in each for piece in layout[rank]] for rank in range(world)]


def save_world(folder: Path, step: int, tensors: dict[str, torch.Tensor], layout: Layout, **more: Any) -> Path:
    def work(ranks: RankExchange) -> Path:
        return save_checkpoint(folder, step, held(layout[ranks.rank], tensors), {"step": step}, ranks=ranks, **more)

    return raising(run_world(len(layout), work))[0]
