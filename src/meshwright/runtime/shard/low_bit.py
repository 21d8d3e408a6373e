"""Stores weights and optimizer states of a parameter group in fewer bits than their update uses. The updater calls
`LowBitShard` for precision recipes with low-bit states.

With `bf16`, weights and states are stored as bfloat16 between two steps, after stochastic rounding. With `8bit`, only
states are stored in fewer bits: one byte per element and one scale per block, with torchao's dynamic map. The update
converts a few parameters at a time to float32. So the optimizer gets only float32 tensors, and can be any elementwise
optimizer of torch.

Stochastic rounding of float32 to bfloat16 adds 16 random bits to the lower 16 bits, and then drops the lower 16 bits.
So an element rounds away from zero with probability (value of the lower 16 bits) / 2^16, and its expected value is
unchanged. Infinities and NaN are not rounded.

[Note: random bits of an element] The random bits are a hash of (seed, step, name of the tensor, index of the element in
the full tensor). So an element rounds identically under every plan, on any rank and in any order, and no generator
state is saved. The hash applies MurmurHash3's finalizer twice, to 32-bit words in int64. Products wrap to 32 bits.

Blocks of 8-bit states are as long as the alignment of flat buffers ([Note: flat layout]), so each block is on one rank.
With ZeRO and pipelines the stored values are those of one device. Tensor parallelism may cut the rows of matrices, so a
block groups different elements than on one device, and has a different scale. Results therefore differ from those of
one device by the rounding to 8 bits. Checkpoints store 8-bit states as float32. Loading quantises these values to the
same bytes.

Sources: Gupta et al., Deep Learning with Limited Numerical Precision, 2015; Zamirai et al., Revisiting BFloat16
Training, arXiv 2010.06192; Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861; torchao's
optim package for the map.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.shard.optimizer_shard import (
    NO_SCALARS,
    OptimizerShard,
    ParamRun,
    ScalarValues,
    ScalarValuesByParam,
    ShardChunk,
    is_elementwise,
)
from meshwright.spec.workload import STATE_BLOCK_NUMEL as BLOCK

_UINT32_MASK = 0xFFFFFFFF

ROUNDING_TILE_ELEMENTS = 1 << 18
"""Number of elements that are rounded at a time on a CPU, so that their hashes stay in the cache."""


class GlobalIndex(NamedTuple):
    """Maps a segment of this rank's shard to elements of the full tensor `name`. The segment begins at offset `at` of
    the shard. It contains `length` elements of the local tensor (this rank's part of the full tensor), starting at
    element `start`.

    If `rows` is None, the local tensor is a contiguous range of the full tensor. Otherwise tensor ranks split one
    dimension, and the local tensor has only the indices `rows` along it. In the full tensor this dimension has `size`
    indices. `inner` is the product of the sizes of later dimensions. `before` is the number of elements of the full
    tensor that belong to earlier expert ranks.
    """

    name: str
    at: int
    start: int
    length: int
    before: int = 0
    rows: torch.Tensor | None = None
    size: int = 0
    inner: int = 1

    def indices(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Returns the indices (int64) in the full tensor of the elements [first, last) of the segment."""
        local = torch.arange(self.start + first, self.start + last, dtype=torch.int64, device=device)
        if self.rows is None:
            return local.add_(self.before)
        block, row = self.inner * len(self.rows), torch.div(local, self.inner, rounding_mode="floor")
        outer, inside = torch.div(local, block, rounding_mode="floor"), local % self.inner
        return (outer * self.size + self.rows.to(device)[row % len(self.rows)]) * self.inner + inside + self.before


def hash_key(*parts: object) -> tuple[int, int]:
    """Returns a hash of `parts` as two 32-bit integers.

    >>> hash_key(1, 2) == hash_key(1, 2), hash_key(1, 2) == hash_key(12)
    (True, False)
    """
    digest = hashlib.blake2b("\\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def random_bits(indices: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Returns 16 random bits (int32) for each element index in `indices` (int64). `key` is a result of `hash_key`."""
    mixed = _murmur3_finalize(indices & _UINT32_MASK ^ key[0])
    mixed = _murmur3_finalize(mixed.add_(indices >> 32).add_(key[1]).bitwise_and_(_UINT32_MASK))
    return (mixed >> 16).to(torch.int32)


def _murmur3_finalize(word: torch.Tensor) -> torch.Tensor:
    word = word ^ (word >> 16)
    word.mul_(0x85EBCA6B).bitwise_and_(_UINT32_MASK)
    word.bitwise_xor_(word >> 13)
    word.mul_(0xC2B2AE35).bitwise_and_(_UINT32_MASK)
    return word.bitwise_xor_(word >> 16)


def stochastic_round(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Returns flat float32 `values` rounded to bfloat16. Each element of `random` has 16 random bits."""
    raw = values.view(torch.int32)
    rounded = (raw + random).bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def slice_index(indices: Sequence[GlobalIndex], elements: slice) -> Iterator[GlobalIndex]:
    """Yields the parts of the segments `indices` that are inside the range `elements` of the shard. The offsets `at` of
    the results count from the start of `elements`."""
    for index in indices:
        first, last = max(index.at, elements.start), min(index.at + index.length, elements.stop)
        if first < last:
            yield index._replace(at=first - elements.start, start=index.start + first - index.at, length=last - first)


def stochastic_round_into(
    out: torch.Tensor, values: torch.Tensor, indices: Sequence[GlobalIndex], *key: object
) -> None:
    """Rounds flat float32 `values` stochastically into flat bfloat16 `out`. Padding between tensors becomes zero. The
    random bits depend on `key` and on the name and index in `indices`."""
    longest = ROUNDING_TILE_ELEMENTS if backend_of(values.device).memory_is_host else max(values.numel(), 1)
    out.zero_()
    for index in indices:
        words = hash_key(*key, index.name)
        for first in range(0, index.length, longest):
            last = min(first + longest, index.length)
            elements = slice(index.at + first, index.at + last)
            out[elements] = stochastic_round(
                values[elements], random_bits(index.indices(first, last, values.device), words)
            )


MIN_SCALE = 1e-30
"""Scales whose magnitude is below this value are replaced by 1, because products of such a scale with the values of the
map would not be exact."""


class Int8State:
    """Stores a flat float32 tensor in 8 bits per element. `signed`: whether elements may be negative.

    [Note: eight bits] The scale of a block is the element with the largest magnitude, including the sign of the
    element. So this element is stored as the code of 1, and quantising the dequantised values again gives the same
    bytes. torchao's own scale is the magnitude, without the sign. With that scale a negative largest element would have
    to be stored as -1, which torchao's map does not contain, and the bytes could change.
    """

    def __init__(self, numel: int, device: torch.device, signed: bool) -> None:
        """Creates `numel` zeros. `numel` must be a multiple of BLOCK."""
        self.library = import_torchao()
        self.map = torch.tensor(self.library.create_dynamic_map(signed=signed), dtype=torch.float32, device=device)
        self.codes = torch.full((numel,), int(self.map.abs().argmin()), dtype=torch.uint8, device=device)
        self.scales = torch.ones(numel // BLOCK, device=device)

    def _tiles(self, elements: slice) -> Iterator[tuple[slice, slice, slice]]:
        """Yields tiles of `elements` that fit into the cache. Each tile is given by three slices: of the stored
        elements, of the positions relative to the start of `elements`, and of the scales."""
        longest = (
            ROUNDING_TILE_ELEMENTS if backend_of(self.codes.device).memory_is_host else max(self.codes.numel(), BLOCK)
        )
        for first in range(elements.start, elements.stop, longest):
            last = min(first + longest, elements.stop)
            yield (
                slice(first, last),
                slice(first - elements.start, last - elements.start),
                slice(first // BLOCK, last // BLOCK),
            )

    def store(self, values: torch.Tensor, elements: slice) -> None:
        """Quantises `values` and stores them in the range `elements`, which must consist of whole blocks."""
        for tile, relative, blocks in self._tiles(elements):
            rows = values[relative].view(-1, BLOCK)
            scales = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
            scales = torch.where(scales.abs() < MIN_SCALE, 1.0, scales)
            self.codes[tile] = self.library.quantize_8bit_with_qmap((rows / scales).view(-1), self.map)
            self.scales[blocks] = scales.view(-1)

    def load(self, elements: slice) -> torch.Tensor:
        """Returns the stored values in the range `elements` as float32."""
        out = torch.empty(elements.stop - elements.start, device=self.codes.device)
        for tile, relative, blocks in self._tiles(elements):
            out[relative] = self.library.dequant_with_qmap(self.codes[tile], self.map, self.scales[blocks])
        return out

    def bytes(self) -> int:
        """Returns the number of bytes of codes and scales."""
        return self.codes.numel() + self.scales.numel() * self.scales.element_size()


def import_torchao() -> Any:
    """Returns torchao's functions for quantised optimizer states.

    Raises:
        InputError: torchao is not installed.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)  # importing torchao warns about missing CUDA kernels
    try:
        from torchao.optim import quant_utils
    except ImportError as error:
        raise InputError(
            Message(
                "optimizer.state 8bit needs the package torchao ({error}): pip install 'meshwright[lowbit]', or leave "
                "state out",
                error=error,
            )
        ) from None
    return quant_utils


class LowBitShard(OptimizerShard):
    """Stores the states of a shard in fewer bits. `stochastic`: whether states and weights are stored as bfloat16. If
    False, only states are stored in fewer bits, namely 8."""

    def __init__(self, flat: torch.Tensor, runs: Sequence[ParamRun], stochastic: bool) -> None:
        super().__init__(flat, runs)
        self.compute_dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        self.stochastic = stochastic
        self.global_indices: Sequence[GlobalIndex] = ()
        self.seed = self._step = 0
        self._full_range = slice(0, flat.numel())
        self._int8: dict[str, Int8State] = {}
        self._exported: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()

    def set_rounding(self, global_indices: Sequence[GlobalIndex], seed: int) -> None:
        """Sets the index of each element of the shard in its full tensor, and the seed of stochastic rounding."""
        self.global_indices, self.seed = global_indices, seed

    # --- update of a chunk

    def upcast(self, optimizer: torch.optim.Optimizer, step: int, chunk: ShardChunk) -> None:
        """Converts the states of the chunk to float32 for the update, and also weights that are stored as bfloat16. The
        stochastic rounding after the update depends on `step`."""
        self._step, runs = step, self.params[chunk.runs]
        self._exported = weakref.WeakValueDictionary()
        if self.stochastic:
            for run, part in zip(
                runs, self._split(self.flat[chunk.elements].to(torch.float32), chunk.runs), strict=True
            ):
                run.data = part
        if chunk.elements.stop > self._linked_numel:
            return
        for key, upcast_state in self._values(chunk.elements).items():
            for run, part in zip(runs, self._split(upcast_state.to(torch.float32), chunk.runs), strict=True):
                if not run.stateless:
                    optimizer.state[run][key] = part

    def downcast(self, optimizer: torch.optim.Optimizer, chunk: ShardChunk) -> None:
        """Stores the updated weights and states in fewer bits."""
        runs, indices = self.params[chunk.runs], tuple(slice_index(self.global_indices, chunk.elements))
        example = next((run for run in runs if not run.has_no_state), runs[0])
        for key, first in [
            (key, value) for key, value in optimizer.state.get(example, {}).items() if is_elementwise(value, example)
        ]:
            upcast_state = torch.cat(
                [
                    torch.zeros_like(run, dtype=first.dtype) if run.has_no_state else optimizer.state[run].pop(key)
                    for run in runs
                ]
            )
            if not self.stochastic:
                self._store_int8(key, upcast_state, chunk.elements)
                continue
            if key not in self._states:
                self._states[key] = torch.zeros_like(self.flat) if self.isolated else torch.empty_like(self.flat)
            stochastic_round_into(self._states[key][chunk.elements], upcast_state, indices, self.seed, self._step, key)
        if self.stochastic:
            stored = self.flat[chunk.elements]
            stochastic_round_into(
                stored, torch.cat([run.data for run in runs]), indices, self.seed, self._step, "weight"
            )
            for run, part in zip(runs, self._split(stored, chunk.runs), strict=True):
                run.data = part
        self._linked_numel = max(self._linked_numel, chunk.elements.stop)

    def _store_int8(self, key: str, upcast_state: torch.Tensor, elements: slice) -> None:
        if key not in self._int8:
            self._int8[key] = Int8State(self.flat.numel(), self.flat.device, signed=not key.endswith("_sq"))
        self._int8[key].store(upcast_state, elements)

    def _values(self, elements: slice) -> dict[str, torch.Tensor]:
        if self.stochastic:
            return {key: stored[elements] for key, stored in self._states.items()}
        return {key: stored.load(elements) for key, stored in self._int8.items()}

    # --- states
    # ---------------------------------------------------------------------------------------------------------------

    def link_new_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing, because each chunk stores its own states."""

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Returns the stored states by name. 8-bit states are returned as float32 copies. `commit_loaded_states` stores
        the values that the caller has written to these copies, if the caller still references them."""
        if self.stochastic or self._states:
            return self._states
        values = self._values(self._full_range)
        self._exported = weakref.WeakValueDictionary(values)
        return values

    def init_states(
        self,
        optimizer: torch.optim.Optimizer,
        dtypes: dict[str, str],
        scalars: ScalarValues,
        others: ScalarValuesByParam = NO_SCALARS,
    ) -> None:
        """Creates zero states, which a checkpoint then fills. See `OptimizerShard.init_states`."""
        super().init_states(optimizer, dtypes, scalars, others)
        for run in (run for run in self.params if not run.has_no_state):
            for key in dtypes:
                optimizer.state[run].pop(key, None)
        self._linked_numel = self.flat.numel() if dtypes else 0

    def commit_loaded_states(self) -> None:
        """Stores the values that were written to the tensors returned by `states`."""
        if not self.stochastic:
            for key, values in (*self._states.items(), *self._exported.items()):
                self._store_int8(key, values, self._full_range)
            self._states, self._exported = {}, weakref.WeakValueDictionary()

    def state_bytes(self) -> int:
        """Returns the number of bytes of states that the optimizer does not store itself."""
        return sum(state.numel() * state.element_size() for state in self._states.values()) + sum(
            each.bytes() for each in self._int8.values()
        )
