"""Packs the documents of a corpus into the rows of a data set (dataset.py). Each document is followed by the
end-of-text token. All documents are concatenated and cut into rows of `sequence` tokens.

Guarantees:
- The encoded corpus is made once, cached as an array on disk and memory-mapped. It need not fit in memory.
- The encoded corpus depends neither on the sequence length nor on the validation fraction, which are applied later.

[Note: validation split] Validation data are whole documents, chosen in the order of their content digests. The choice
does not depend on a seed, on file names or on the order of files. Documents with equal content are in the same split.
Validation data have at least `fraction` of the rows, and at least 32 rows or a fifth of the rows, whichever is less. If
whole documents would exceed this number by far (as in one long file), the validation data are the end of the corpus,
cut between two tokens. In both splits a remainder of less than one row is dropped.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.data.corpus import DocumentChunk
from meshwright.data.tokens import Tokenizer

Int64Array = NDArray[np.int64]
TokenArray = NDArray[np.integer[Any]]


class ReadableTokens(Protocol):
    """A source of tokens for rows: a token array or a `ChecksummedArray`."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> TokenArray: ...


MIN_VALIDATION_ROWS = 32
_MAX_ENCODE_CHARS, _MAX_ENCODE_CHUNKS = 2**19, 2**12
"""Maximum characters and chunks that are encoded in one call. During the call a tokenizer takes about 100 bytes per
character and 1,000 bytes per chunk.
"""


class CorruptBlock(Exception):
    """A row contains tokens that have changed since the first use of their array (token_arrays.py). The message names
    the block."""


class TokenizedCorpus(StrictModel):
    """Metadata of an encoded corpus. `digest` is the digest of its documents in order."""

    dtype: str
    tokens: int
    documents: int
    characters: int
    digest: str


class DocumentIndex(NamedTuple):
    """The documents of a corpus. The fields have one element per document: the index of its token array, the index of
    its first token in this array, its number of tokens, and the digest of its content."""

    array: Int64Array
    start: Int64Array
    length: Int64Array
    digest: NDArray[np.uint64]


class TokenRuns(NamedTuple):
    """Contiguous segments of tokens. The fields have one element per segment: the index of its token array, the index
    of its first token in this array, and its number of tokens.
    """

    array: Int64Array
    start: Int64Array
    length: Int64Array


def encode_corpus(passages: Iterable[DocumentChunk], tokenizer: Tokenizer, folder: Path) -> int:
    """Encodes `passages` and writes three files into `folder`. tokens.bin has the tokens, documents.npy the length and
    the digest of each document, and encoded.json a `TokenizedCorpus`.

    Returns the number of tokens, or 0 if there is no document.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32)
    lengths, digests = array("Q"), array("Q")
    open_length, open_digest, characters = 0, xxhash.xxh3_64(), 0
    end = np.array([tokenizer.end_of_text], dtype=dtype).tobytes()
    with (folder / "tokens.bin").open("wb") as file:
        for group in _encoding_batches(passages):
            for passage, ids in zip(group, tokenizer.encode([passage.text for passage in group])):
                file.write(ids.astype(dtype).tobytes())
                open_length += len(ids)
                open_digest.update(passage.text.encode())
                characters += len(passage.text)
                if passage.ends:
                    file.write(end)
                    lengths.append(open_length + 1)
                    digests.append(open_digest.intdigest())
                    open_length, open_digest = 0, xxhash.xxh3_64()
    table = np.array([np.array(column, dtype=np.uint64) for column in (lengths, digests)])
    np.save(folder / "documents.npy", table)
    digest = xxhash.xxh3_128_hexdigest(table.tobytes())
    entry = TokenizedCorpus(
        dtype=dtype.name, tokens=sum(lengths), documents=len(lengths), characters=characters, digest=digest
    )
    (folder / "encoded.json").write_text(entry.to_json())
    return entry.tokens


def _encoding_batches(passages: Iterable[DocumentChunk]) -> Iterator[list[DocumentChunk]]:
    group: list[DocumentChunk] = []
    size = 0
    for passage in passages:
        group.append(passage)
        size += len(passage.text)
        if size >= _MAX_ENCODE_CHARS or len(group) >= _MAX_ENCODE_CHUNKS:
            yield group
            group, size = [], 0
    if group:
        yield group


def is_encoded_corpus(folder: Path) -> bool:
    """Returns whether `folder` has a complete encoded corpus of the recorded length."""
    try:
        entry = read_corpus_info(folder)
        return (folder / "tokens.bin").stat().st_size == entry.tokens * np.dtype(entry.dtype).itemsize and (
            folder / "documents.npy"
        ).exists()
    except (OSError, ValueError):
        return False


def read_corpus_info(folder: Path) -> TokenizedCorpus:
    """Reads the metadata of the encoded corpus in `folder`."""
    return TokenizedCorpus.model_validate(json.loads((folder / "encoded.json").read_text()))


def read_encoded_corpus(folder: Path) -> tuple[list[TokenArray], DocumentIndex]:
    """Returns the memory-mapped tokens of `folder` and the index of its documents."""
    entry = read_corpus_info(folder)
    lengths, digests = np.load(folder / "documents.npy")
    length = lengths.astype(np.int64)
    tokens = np.memmap(folder / "tokens.bin", dtype=entry.dtype, mode="r")
    return [tokens], DocumentIndex(np.zeros_like(length), np.cumsum(length) - length, length, digests)


def count_validation_rows(rows: int, fraction: float) -> int:
    """Returns the minimum number of validation rows for a corpus of `rows` rows: `fraction` of the rows, but at least
    MIN_VALIDATION_ROWS, or a fifth of the rows if that is less. Returns 0 if `fraction` is 0.

    >>> [count_validation_rows(rows, 0.01) for rows in (10_000, 1_000, 50)], count_validation_rows(50, 0.0)
    ([100, 32, 10], 0)
    """
    if fraction == 0:
        return 0
    share = math.ceil(fraction * rows)
    return max(share, min(MIN_VALIDATION_ROWS, rows // 5), 1)


def split_validation(
    documents: DocumentIndex, sequence: int, fraction: float, name: str
) -> tuple[TokenRuns, TokenRuns]:
    """Returns the training tokens and the validation tokens ([Note: validation split]).

    Raises:
        InputError: one of the splits has less than one row.
    """
    total = int(documents.length.sum())
    needed = count_validation_rows(total // sequence, fraction) * sequence
    if total < needed + sequence:
        rows = Message("one row") if fraction == 0 else Message("one row to train on and one to hold out")
        raise InputError(
            Message(
                "data source {name}: {total:,} tokens are too few for {rows} of {sequence:,}; name more text or "
                "shorten workload.sequence",
                name=name,
                total=total,
                rows=rows,
                sequence=sequence,
            )
        )
    order = np.argsort(documents.digest, kind="stable")
    reached = np.cumsum(documents.length[order])
    count = int(np.searchsorted(reached, needed)) + 1 if needed else 0
    while 0 < count < len(order) and documents.digest[order[count]] == documents.digest[order[count - 1]]:
        count += 1
    taken = int(reached[count - 1]) if count else 0
    bound = max(min(2 * needed, (total + needed) // 2), total // 10)
    if taken > bound or total - taken < sequence:
        return _split_token_runs(documents, total - needed)
    validation = np.zeros(len(order), dtype=bool)
    validation[order[:count]] = True
    return _select_token_runs(documents, ~validation), _select_token_runs(documents, validation)


def _select_token_runs(documents: DocumentIndex, chosen: NDArray[np.bool_]) -> TokenRuns:
    """Returns the segments of the `chosen` documents. Adjacent documents become one segment."""
    holder, start, length = documents.array[chosen], documents.start[chosen], documents.length[chosen]
    follows = (holder[1:] == holder[:-1]) & (start[1:] == start[:-1] + length[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows])) if len(holder) else np.zeros(0, dtype=np.int64)
    return TokenRuns(holder[first], start[first], np.add.reduceat(length, first) if len(first) else length)


def _split_token_runs(documents: DocumentIndex, at: int) -> tuple[TokenRuns, TokenRuns]:
    """Returns the segments of the first `at` tokens, and the segments of all later tokens."""
    whole = _select_token_runs(documents, np.ones(len(documents.length), dtype=bool))
    ends = np.cumsum(whole.length)
    before = np.clip(at - (ends - whole.length), 0, whole.length)
    head = TokenRuns(whole.array, whole.start, before)
    tail = TokenRuns(whole.array, whole.start + before, whole.length - before)
    return tuple(TokenRuns(*(column[part.length > 0] for column in part)) for part in (head, tail))  # type: ignore[return-value]


def document_positions(tokens: Int64Array, end_of_text: int) -> Int64Array:
    """Returns the position of each token in its document. A document that continues from the previous row restarts at
    0.

    >>> document_positions(np.array([[7, 0, 7, 7, 0, 0]]), 0).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    at = np.arange(tokens.shape[1])
    begins = np.zeros_like(tokens)
    begins[:, 1:] = np.where(tokens[:, :-1] == end_of_text, at[1:], 0)
    return at - np.maximum.accumulate(begins, axis=1)


class PackedRows:
    """Rows of `sequence` tokens, cut from the concatenated `segments`. `report_corruption` is called once for each
    corrupt block.
    """

    def __init__(
        self,
        arrays: Sequence[ReadableTokens],
        segments: TokenRuns,
        sequence: int,
        report_corruption: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._arrays = arrays
        self._report_corruption = report_corruption
        self._damaged: set[str] = set()
        self._segments = segments
        self._ends = np.cumsum(segments.length)
        self.sequence = sequence

    def __len__(self) -> int:
        return int(self._ends[-1]) // self.sequence if len(self._ends) else 0

    def read(self, rows: Int64Array) -> Int64Array:
        """Returns the token ids (len(rows), sequence) of `rows`. A row with a corrupt block is replaced by the next row
        without one.

        Raises:
            InputError: every row has a corrupt block.
        """
        result = np.empty((len(rows), self.sequence), dtype=np.int64)
        for place, row in enumerate(rows):
            self._fill_whole(result[place], int(row))
        return result

    def _fill_whole(self, target: Int64Array, row: int) -> None:
        """Fills `target` with `row`, or with the next row that contains no corrupt block."""
        for number in range(len(self)):
            try:
                self._fill(target, (row + number) % len(self) * self.sequence)
                return
            except CorruptBlock as damaged:
                if str(damaged) not in self._damaged:
                    self._damaged.add(str(damaged))
                    self._report_corruption(
                        Message(
                            "{damaged}; rows that contain them are replaced by the next undamaged row", damaged=damaged
                        )
                    )
        raise InputError(
            Message("all {count} rows contain damaged tokens: {damaged}", count=len(self), damaged=min(self._damaged))
        )

    def _fill(self, target: Int64Array, position: int) -> None:
        """Fills `target` with the tokens from `position` of the concatenated segments."""
        segment = int(np.searchsorted(self._ends, position, side="right"))
        filled = 0
        while filled < len(target):
            into = position + filled - int(self._ends[segment] - self._segments.length[segment])
            count = min(len(target) - filled, int(self._segments.length[segment]) - into)
            start = int(self._segments.start[segment]) + into
            target[filled : filled + count] = self._arrays[self._segments.array[segment]][start : start + count]
            filled += count
            segment += 1
