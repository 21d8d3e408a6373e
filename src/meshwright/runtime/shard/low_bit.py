"""Stochastic rounding of float32 to bfloat16: up or down, with the probabilities that make the mean exact.

Rule: the lower 16 bits of a float32 are what bfloat16 drops; 16 random bits are added to them before they are dropped,
so that the carry
rounds away from zero with probability (dropped bits) / 2^16. Infinities and NaN stay what they are.

[Note: random bits of an element] The bits are a hash of (seed, step, name of the tensor, place of the element in the
whole tensor), so that
an element is rounded alike under every plan: whoever holds it, on whatever rank, in whatever order. No generator has a
state to save.
The hash is MurmurHash3's finalizer, twice; 32-bit words in int64, whose products wrap.

Source: Gupta et al., Deep Learning with Limited Numerical Precision, 2015; Zamirai et al., Revisiting BFloat16
Training, arXiv 2010.06192.

Weights and states of a flat unit in fewer bytes than their update is computed in.

Between two steps they are kept so: `bf16` (rounded stochastically, [Note: random bits of an element]) or, states alone,
`8bit` (a byte an
element and a scale for each BLOCK of them, by torchao's dynamic map). For its update a few runs at a time are float32:
the optimizer is any
of torch's and never sees another type. What it leaves is kept again.

Blocks of 8-bit states are as long as flat buffers align ([Note: flat layout]), so that no block lies on two ranks: ZeRO
and pipelines keep the
same numbers as one device. Tensor ranks cut matrices across their rows, so that other elements share a scale there:
alike within its rounding.
Checkpoints hold 8-bit states as float32: making them 8-bit again gives the same bytes.

Sources: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861; torchao's optim package for
the map.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from meshwright.core.errors import InputError
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
"""Elements rounded at a time on a CPU: their hashes stay in the cache."""


class GlobalIndex(NamedTuple):
    """Where a run of a flat buffer lies in its whole tensor `name`: `length` elements of the local tensor from `start`
    on.

    Along one dimension the local tensor holds `rows` (indices in the whole one) of `size`, with `inner` elements behind
    each;
    `rows` None: the local tensor is a run of the whole one that begins at `before`.
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
        """Places in the whole tensor of the elements [first, last) of this run."""
        local = torch.arange(self.start + first, self.start + last, dtype=torch.int64, device=device)
        if self.rows is None:
            return local.add_(self.before)
        block, row = self.inner * len(self.rows), torch.div(local, self.inner, rounding_mode="floor")
        outer, inside = torch.div(local, block, rounding_mode="floor"), local % self.inner
        return (outer * self.size + self.rows.to(device)[row % len(self.rows)]) * self.inner + inside + self.before


def hash_key(*parts: object) -> tuple[int, int]:
    """Two 32-bit words of anything that has a text.

    >>> hash_key(1, 2) == hash_key(1, 2), hash_key(1, 2) == hash_key(12)
    (True, False)
    """
    digest = hashlib.blake2b("\\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def random_bits(indices: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """16 random bits for each element of `indices` (int64), as int32."""
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
    """Flat float32 `values` as bfloat16."""
    raw = values.view(torch.int32)
    up = (raw + random).bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.isfinite(), up, values).to(torch.bfloat16)


def slice_index(places: Sequence[GlobalIndex], taken: slice) -> Iterator[GlobalIndex]:
    """What the elements `taken` have of them, counted from there."""
    for place in places:
        first, last = max(place.at, taken.start), min(place.at + place.length, taken.stop)
        if first < last:
            yield place._replace(at=first - taken.start, start=place.start + first - place.at, length=last - first)


def stochastic_round_into(out: torch.Tensor, values: torch.Tensor, places: Sequence[GlobalIndex], *key: object) -> None:
    """Flat bfloat16 `out` becomes the flat float32 `values`, rounded; what lies between the tensors becomes zero."""
    longest = ROUNDING_TILE_ELEMENTS if backend_of(values.device).memory_is_host else max(values.numel(), 1)
    out.zero_()
    for place in places:
        words = hash_key(*key, place.name)
        for first in range(0, place.length, longest):
            last = min(first + longest, place.length)
            taken = slice(place.at + first, place.at + last)
            out[taken] = stochastic_round(values[taken], random_bits(place.indices(first, last, values.device), words))


MIN_SCALE = 1e-30
"""What is less counts as zero: its products with codes would not be exact."""


class Int8State:
    """[Note: eight bits] The scale of a block is its element of the largest magnitude, with its sign, which so has the
    code of 1: making
    the same bytes again of what they say is exact, which torchao's own scale (a magnitude) is not, as its map has no
    -1.

    A flat float32 tensor in 8 bits an element. `signed` False: none of its elements is negative."""

    def __init__(self, numel: int, device: torch.device, signed: bool) -> None:
        """Of `numel` elements, a multiple of BLOCK; zeros at first."""
        self.library = import_torchao()
        self.map = torch.tensor(self.library.create_dynamic_map(signed=signed), dtype=torch.float32, device=device)
        self.codes = torch.full((numel,), int(self.map.abs().argmin()), dtype=torch.uint8, device=device)
        self.scales = torch.ones(numel // BLOCK, device=device)

    def _tiles(self, taken: slice) -> Iterator[tuple[slice, slice, slice]]:
        """Elements, their places among those `taken`, and their scales; as many at a time as stay in the cache."""
        longest = (
            ROUNDING_TILE_ELEMENTS if backend_of(self.codes.device).memory_is_host else max(self.codes.numel(), BLOCK)
        )
        for first in range(taken.start, taken.stop, longest):
            last = min(first + longest, taken.stop)
            yield (
                slice(first, last),
                slice(first - taken.start, last - taken.start),
                slice(first // BLOCK, last // BLOCK),
            )

    def store(self, values: torch.Tensor, taken: slice) -> None:
        """The elements `taken`, whole blocks, become `values`."""
        for here, among, blocks in self._tiles(taken):
            rows = values[among].view(-1, BLOCK)
            scales = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
            scales = torch.where(scales.abs() < MIN_SCALE, 1.0, scales)
            self.codes[here] = self.library.quantize_8bit_with_qmap((rows / scales).view(-1), self.map)
            self.scales[blocks] = scales.view(-1)

    def load(self, taken: slice) -> torch.Tensor:
        """In float32."""
        out = torch.empty(taken.stop - taken.start, device=self.codes.device)
        for here, among, blocks in self._tiles(taken):
            out[among] = self.library.dequant_with_qmap(self.codes[here], self.map, self.scales[blocks])
        return out

    def bytes(self) -> int:
        return self.codes.numel() + self.scales.numel() * self.scales.element_size()


def import_torchao() -> Any:
    """torchao's functions of quantised optimizer states. Raises InputError where it is not installed."""
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it says on import which of its CUDA kernels are not there
    try:
        from torchao.optim import quant_utils
    except ImportError as error:
        raise InputError(
            f"optimizer.state 8bit needs the package torchao ({error}): pip install 'meshwright[lowbit]', or leave state out"
        ) from None
    return quant_utils


class LowBitShard(OptimizerShard):
    """A master whose states, and with `rounds` whose weights, are kept in fewer bytes."""

    def __init__(self, flat: torch.Tensor, stretches: Sequence[ParamRun], rounds: bool) -> None:
        super().__init__(flat, stretches)
        self.compute_dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        self.stochastic = rounds
        self.global_indices: Sequence[GlobalIndex] = ()
        self.seed = self._step = 0
        self._full_range = slice(0, flat.numel())
        self._int8: dict[str, Int8State] = {}
        self._exported: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()

    # --- one update
    # -----------------------------------------------------------------------------------------------------------

    def upcast(self, optimizer: torch.optim.Optimizer, step: int, window: ShardChunk) -> None:
        """Weights and states in float32, for the step that follows. Roundings after it go by the number of the step."""
        self._step, runs = step, self.params[window.runs]
        self._exported = weakref.WeakValueDictionary()
        if self.stochastic:
            for run, part in zip(
                runs, self._split(self.flat[window.elements].to(torch.float32), window.runs), strict=True
            ):
                run.data = part
        if window.elements.stop > self._linked_numel:
            return
        for key, wide in self._values(window.elements).items():
            for run, part in zip(runs, self._split(wide.to(torch.float32), window.runs), strict=True):
                if not run.stateless:
                    optimizer.state[run][key] = part

    def downcast(self, optimizer: torch.optim.Optimizer, window: ShardChunk) -> None:
        """Keep what the step left."""
        runs, places = self.params[window.runs], tuple(slice_index(self.global_indices, window.elements))
        of = next((run for run in runs if not run.has_no_state), runs[0])
        for key, first in [
            (key, value) for key, value in optimizer.state.get(of, {}).items() if is_elementwise(value, of)
        ]:
            wide = torch.cat(
                [
                    torch.zeros_like(run, dtype=first.dtype) if run.has_no_state else optimizer.state[run].pop(key)
                    for run in runs
                ]
            )
            if not self.stochastic:
                self._store_int8(key, wide, window.elements)
                continue
            if key not in self._states:
                self._states[key] = torch.zeros_like(self.flat) if self.isolated else torch.empty_like(self.flat)
            stochastic_round_into(self._states[key][window.elements], wide, places, self.seed, self._step, key)
        if self.stochastic:
            kept = self.flat[window.elements]
            stochastic_round_into(kept, torch.cat([run.data for run in runs]), places, self.seed, self._step, "weight")
            for run, part in zip(runs, self._split(kept, window.runs), strict=True):
                run.data = part
        self._linked_numel = max(self._linked_numel, window.elements.stop)

    def _store_int8(self, key: str, wide: torch.Tensor, taken: slice) -> None:
        if key not in self._int8:
            self._int8[key] = Int8State(self.flat.numel(), self.flat.device, signed=not key.endswith("_sq"))
        self._int8[key].store(wide, taken)

    def _values(self, taken: slice) -> dict[str, torch.Tensor]:
        if self.stochastic:
            return {key: kept[taken] for key, kept in self._states.items()}
        return {key: kept.load(taken) for key, kept in self._int8.items()}

    # --- states
    # ---------------------------------------------------------------------------------------------------------------

    def link_new_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Every window keeps its own."""

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """As they are kept; of 8-bit states their values, which `loaded` keeps as long as somebody holds them."""
        if self.stochastic or self._states:
            return self._states
        values = self._values(self._full_range)
        self._exported = weakref.WeakValueDictionary(values)
        return values

    def init_states(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: dict[str, str],
        scalars: ScalarValues,
        others: ScalarValuesByParam = NO_SCALARS,
    ) -> None:
        super().init_states(optimizer, kinds, scalars, others)
        for run in (run for run in self.params if not run.has_no_state):
            for key in kinds:
                optimizer.state[run].pop(key, None)
        self._linked_numel = self.flat.numel() if kinds else 0

    def commit_loaded_states(self) -> None:
        """Values that were written into what `states` gave are kept."""
        if not self.stochastic:
            for key, values in (*self._states.items(), *self._exported.items()):
                self._store_int8(key, values, self._full_range)
            self._states, self._exported = {}, weakref.WeakValueDictionary()

    def state_bytes(self) -> int:
        """Held for states beside the optimizer's own."""
        return sum(state.numel() * state.element_size() for state in self._states.values()) + sum(
            each.bytes() for each in self._int8.values()
        )
