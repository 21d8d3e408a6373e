"""Conversations become rows: as many whole ones as fit, none cut apart, none seeing another.

[Note: packed rows] Conversations are packed by best fit, longest first. `position_ids` begin anew with each of them, which is how models of
transformers tell that they must not attend across; padding is a conversation of its own without labels. For a model that takes no
positions a row holds one conversation. So a packed row has the loss of its conversations, each by itself. One longer than a row is cut at
its end, and how many were is said.
Source: Ding et al., Fewer Truncations Improve Language Modeling, ICML 2024 (best-fit packing).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from meshwright.base.errors import InputError
from meshwright.data.cache import kept
from meshwright.data.chat import Said, Template, encode_prompt
from meshwright.data.packing import held_out_rows
from meshwright.data.records import Record, records
from meshwright.data.tokens import Tokenizer

IGNORED = -100
Integers = NDArray[np.int64]
_VERSION = 1


class Instructions:
    """Rows of {"input_ids", "labels"}, and "position_ids" where the model takes them."""

    def __init__(self, name: str, folder: Path, tokenizer: Tokenizer, sequence: int, held_out: float, positions: bool) -> None:
        self.name, self.tokenizer, self.sequence, self.positions = name, tokenizer, sequence, positions
        self.vocabulary = tokenizer.vocabulary
        self._ids, self._learned = (np.load(folder / f"{what}.npy", mmap_mode="r") for what in ("ids", "learned"))
        ends, digests = np.load(folder / "ends.npy"), np.load(folder / "digests.npy")
        self._starts, self._lengths = np.append(0, ends[:-1]).astype(np.int64), np.diff(ends, prepend=0).astype(np.int64)
        self.cut = int((self._lengths > sequence).sum())
        fits = np.array(
            [
                self._learned[start + 1 : start + min(length, sequence)].any()
                for start, length in zip(self._starts, self._lengths, strict=True)
            ],
            bool,
        )
        if not fits.any():
            raise InputError(
                f"data source {name}: no conversation has anything to learn within {sequence:,} tokens: lengthen workload.sequence"
            )
        training, aside = _divide(np.flatnonzero(fits), digests, held_out)
        lengths = np.minimum(self._lengths, sequence)
        self._training, self._held_out = (
            pack(part, lengths[part], sequence) if positions else [[int(one)] for one in part] for part in (training, aside)
        )
        self.conversations = len(training)
        self.rows, self.held_out_rows = len(self._training), len(self._held_out)
        learned = xxhash.xxh3_128_hexdigest(self._learned)
        parts = [_VERSION, sequence, positions, self.rows, self.held_out_rows, digests.tolist(), learned, tokenizer.digest]
        self.digest = xxhash.xxh3_128_hexdigest(repr(parts).encode())
        self.labels_per_row: int | None = None

    def describe(self) -> str:
        share = float(np.mean(self._learned)) if len(self._learned) else 0.0
        cut = f", {self.cut:,} longer ones cut" if self.cut else ""
        return (
            f"{self.name} ({self.tokenizer.name}): {self.conversations:,} conversations in {self.rows:,} rows of {self.sequence:,}{cut}, "
            f"{self.held_out_rows:,} rows held out, {share:.0%} of the tokens learned"
        )

    def training(self, rows: Integers, numbers: Integers, seed: int) -> dict[str, torch.Tensor]:
        return self._read([self._training[row] for row in rows.tolist()])

    def held_out(self, rows: Integers) -> dict[str, torch.Tensor]:
        return self._read([self._held_out[row] for row in rows.tolist()])

    def _read(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        shape = (len(rows), self.sequence)
        ids, labels, places = (
            np.full(shape, self.tokenizer.end_of_text, np.int64),
            np.full(shape, IGNORED, np.int64),
            np.zeros(shape, np.int64),
        )
        for row, held in enumerate(rows):
            at = 0
            for one in held:
                start, count = int(self._starts[one]), min(int(self._lengths[one]), self.sequence)
                ids[row, at : at + count] = self._ids[start : start + count]
                learned = np.array(self._learned[start : start + count])
                learned[0] = False  # nothing that belongs to it stands before it
                labels[row, at : at + count] = np.where(learned, ids[row, at : at + count], IGNORED)
                places[row, at : at + count] = np.arange(count)
                at += count
            places[row, at:] = np.arange(self.sequence - at)
        found = {"input_ids": ids, "labels": labels, **({"position_ids": places} if self.positions else {})}
        return {name: torch.from_numpy(value) for name, value in found.items()}


def pack(which: Integers, lengths: Integers, sequence: int) -> list[list[int]]:
    """Rows of members of `which`, none longer than `sequence`: longest first, each into the fullest row that has room.

    >>> pack(np.array([7, 8, 9, 10]), np.array([6, 5, 4, 3]), 10)
    [[7, 9], [8, 10]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        at = bisect.bisect_left(room, (length, -1))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row = sequence, len(rows)
            rows.append([])
        rows[row].append(int(which[place]))
        bisect.insort(room, (free - length, row))
    return rows


def _divide(which: Integers, digests: NDArray[np.uint64], fraction: float) -> tuple[Integers, Integers]:
    """Training and held out, by the digest of their content: equal conversations land on the same side. Of one conversation, however often it
    stands there, nothing is held out."""
    count = held_out_rows(len(which), fraction)
    order = which[np.argsort(digests[which], kind="stable")]
    while 0 < count < len(order) and digests[order[count]] == digests[order[count - 1]]:
        count += 1
    count = count if count < len(order) else 0
    aside = np.sort(order[:count])
    return np.setdiff1d(which, aside), aside


def open_instructions(files: list[Path], form: str, tokenizer: Tokenizer, place: str, look: str) -> Path:
    """The folder of the cache with the conversations of `files` as tokens. `place`: the folder of the tokenizer; `look`: tells unchanged files."""
    template = Template(place) if form == "messages" else None
    encode: Callable[[Record], Said] = template.encode if template else lambda record: encode_prompt(record, tokenizer)

    def make(folder: Path) -> None:
        ids: list[Any] = []
        learned: list[Any] = []
        digests = []
        for record in records(files):
            if form not in record.fields:
                raise InputError(f"{record.place}: no field {form!r}, which the first record has; one form a source")
            said = encode(record)
            ids.append(said.ids)
            learned.append(said.learned)
            digests.append(xxhash.xxh3_64_intdigest(said.ids.tobytes()))
        np.save(folder / "ids.npy", np.concatenate(ids))
        np.save(folder / "learned.npy", np.concatenate(learned))
        np.save(folder / "ends.npy", np.cumsum([len(each) for each in ids]))
        np.save(folder / "digests.npy", np.array(digests, np.uint64))

    key = xxhash.xxh3_128_hexdigest(repr([_VERSION, look, form, tokenizer.digest, template.digest if template else ""]).encode())
    return kept(f"instructions-{key}", make, lambda folder: (folder / "digests.npy").exists())
