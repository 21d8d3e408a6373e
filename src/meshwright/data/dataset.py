"""Opens the data set of a job for the ranks. The module finds the files, chooses or trains the tokenizer, encodes the
text once, separates validation data, and packs tokens into rows. A row is one element of a data set: a sequence of
tokens, or an image. Sample n is the n-th row that training reads, counted over all epochs.

Masked-language labels: 15 % of the tokens are predicted. Of these tokens, 80 % are replaced by the mask token, 10 % by
a random token, and 10 % remain unchanged. Special tokens are never masked. At least one token of a row is predicted,
unless the row has only special tokens, since a row without labels contributes nothing. Source: Devlin, Chang, Lee,
Toutanova, BERT, NAACL 2019, section 3.1 and appendix A.1.

Guarantees:
- The same files and settings give the same rows on every machine. `digest` identifies the rows, so that ranks and
  checkpoints can compare them.
- The masked positions are a pure function of (seed, sample number). The masks of a row differ between epochs, but not
  between plans.
- Slow work is done once per user and cached. Later runs only read the names and modification times of the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.units import show_bytes
from meshwright.data import packing
from meshwright.data.cache import cached_folder
from meshwright.data.corpus import ARRAY_SUFFIXES, STDLIB_SOURCE, DocumentChunk, find_files, iter_document_chunks
from meshwright.data.images import ShapeImages
from meshwright.data.instructions import (
    CONVERSATION_FORMS,
    IGNORED_LABEL,
    InstructionDataset,
    open_instructions,
)
from meshwright.data.preferences import ANSWER_FIELDS, PreferenceDataset, encode_pair
from meshwright.data.record_form import PREFERENCE_FORMS, form_of_records
from meshwright.data.records import first_record
from meshwright.data.sampler import derive_key, random_uniform, random_words
from meshwright.data.token_arrays import (
    DIGESTS_FILE,
    INDEX_SUFFIX,
    ChecksummedArray,
    has_block_digests,
    open_token_arrays,
    write_block_digests,
)
from meshwright.data.tokens import (
    MIN_BPE_VOCABULARY,
    ByteTokenizer,
    LibraryTokenizer,
    Tokenizer,
    has_tokenizers_library,
    open_tokenizer,
    train_bpe,
)
from meshwright.spec.workload import DataConfig

MASKED_FRACTION, MASK_TOKEN_FRACTION, RANDOM_TOKEN_FRACTION = 0.15, 0.8, 0.1

SampleIndices = NDArray[np.int64]


def mask_tokens(
    tokens: SampleIndices, numbers: SampleIndices, seed: int, mask: int, special: list[int], vocabulary: int
) -> tuple[SampleIndices, SampleIndices]:
    """Returns the inputs and the labels of masked-language training, both (rows, sequence) like `tokens`. `tokens[i]`
    is sample `numbers[i]`. Labels are IGNORED_LABEL except at the predicted tokens.

    `mask` is the id of the mask token, `special` are the ids that are never masked, and random tokens are below
    `vocabulary`.
    """
    length = tokens.shape[1]
    chance = random_uniform(derive_key(seed, 1), numbers, length)
    chance[np.isin(tokens, special)] = 1.0
    smallest = chance.min(axis=1, keepdims=True)
    chosen = ((chance < MASKED_FRACTION) | (chance == smallest)) & (chance < 1.0)
    action = random_uniform(derive_key(seed, 2), numbers, length)
    other = (random_words(derive_key(seed, 3), numbers, length) % np.uint64(vocabulary)).astype(np.int64)
    inputs = np.where(chosen & (action < MASK_TOKEN_FRACTION), mask, tokens)
    inputs = np.where(
        chosen & (action >= MASK_TOKEN_FRACTION) & (action < MASK_TOKEN_FRACTION + RANDOM_TOKEN_FRACTION), other, inputs
    )
    return inputs, np.where(chosen, tokens, IGNORED_LABEL)


DataObjective = Literal["causal", "masked", "pairs", "images", "preference"]
LogFunction = Callable[[str], None]
Int64Array = NDArray[np.int64]

DEFAULT_BPE_VOCABULARY = 8192
# BPE training reads less than twice this number of bytes. From a larger corpus it reads only every n-th chunk.
_BPE_TRAINING_BYTES = 2**26
SHAPES_SOURCE = "shapes"
_CACHE_VERSION = 1  # version of the cache format


class Dataset(Protocol):
    """Rows for training and rows for validation, as the loader reads them. Data sets with equal digests have equal
    rows.
    """

    rows: int
    validation_rows: int
    vocabulary: int
    digest: str

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer, or None if the data set has none, such as images."""

    @property
    def labels_per_row(self) -> int | None:
        """Returns the number of labels of a row that count in the loss, or None if this number differs between rows."""

    def describe(self) -> str:
        """Returns one line about the source and the number of rows."""

    def training(self, rows: Int64Array, numbers: Int64Array, seed: int) -> dict[str, torch.Tensor]:
        """Returns the batch of the training rows with indices `rows`. `rows[i]` is read as sample `numbers[i]`, which
        determines its mask.
        """

    def validation(self, rows: Int64Array) -> dict[str, torch.Tensor]:
        """Returns the batch of the validation rows with indices `rows`."""


class TokenCorpus(NamedTuple):
    """A corpus as token ids. `tokenizer` is None for token arrays without a given tokenizer."""

    arrays: Sequence[ChecksummedArray]
    documents: packing.DocumentIndex
    tokenizer: Tokenizer | None
    vocabulary: int
    digest: str


class TextDataset:
    """Rows of tokens as {"input_ids", "labels"}, int64 (rows, sequence). With the objective `causal`, labels equal the
    input ids, since causal models shift labels themselves, as in Hugging Face. With `masked`, `mask_tokens` makes the
    input ids and the labels.

    With the objective `pairs`, a row is two consecutive sequences: an encoder reads the first sequence, and a decoder
    predicts the second (prefix language modelling; Raffel et al., Exploring the Limits of Transfer Learning, JMLR 2020,
    section 3.2.1).
    """

    def __init__(
        self,
        name: str,
        training: packing.PackedRows,
        validation: packing.PackedRows,
        tokens: TokenCorpus,
        objective: DataObjective,
        separate_documents: bool = False,
    ) -> None:
        """Makes the data set. `separate_documents`: whether "position_ids" restart with each document. If so, the first
        token of a document is not a label.
        """
        self.name, self.tokenizer, self.objective, self.separate_documents = (
            name,
            tokens.tokenizer,
            objective,
            separate_documents,
        )
        self.vocabulary = tokens.vocabulary
        self._training, self._validation = training, validation
        self.rows, self.validation_rows = len(training), len(validation)
        self.sequence = training.sequence // (2 if objective == "pairs" else 1)
        self.digest = _json_digest(
            tokens.digest,
            self.sequence,
            self.rows,
            self.validation_rows,
            objective,
            *(["apart"] if separate_documents else []),
        )
        labels = {"causal": self.sequence - 1, "pairs": self.sequence}
        self.labels_per_row = None if separate_documents else labels.get(objective)

    def describe(self) -> str:
        """Returns one line about the source and the number of rows."""
        unit = (
            Message("{tokenizer}, {vocabulary:,} tokens", tokenizer=self.tokenizer.name, vocabulary=self.vocabulary)
            if self.tokenizer
            else Message("token arrays")
        )
        return Message(
            "{value} ({unit}): {rows:,} rows of {sequence:,} to train on, {validation_rows:,} held out",
            value=self.name,
            unit=unit,
            rows=self.rows,
            sequence=self.sequence,
            validation_rows=self.validation_rows,
        )

    def training(self, rows: Int64Array, numbers: Int64Array, seed: int) -> dict[str, torch.Tensor]:
        """Returns the batch of the training rows with indices `rows`. `rows[i]` is read as sample `numbers[i]`."""
        return self._labelled(self._training.read(rows), numbers, seed)

    def validation(self, rows: Int64Array) -> dict[str, torch.Tensor]:
        """Returns the batch of the validation rows with indices `rows`."""
        return self._labelled(self._validation.read(rows), rows, 0)

    def _labelled(self, tokens: Int64Array, numbers: Int64Array, seed: int) -> dict[str, torch.Tensor]:
        if self.objective == "masked":
            assert self.tokenizer is not None and self.tokenizer.mask is not None
            special = [self.tokenizer.end_of_text, self.tokenizer.mask]
            inputs, labels = mask_tokens(tokens, numbers, seed, self.tokenizer.mask, special, self.vocabulary)
            return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        ids = torch.from_numpy(tokens)
        if self.objective == "pairs":
            return {"input_ids": ids[:, : self.sequence].clone(), "labels": ids[:, self.sequence :].clone()}
        if not self.separate_documents:
            return {"input_ids": ids, "labels": ids.clone()}
        assert self.tokenizer is not None
        places = packing.document_positions(tokens, self.tokenizer.end_of_text)
        labels = np.where((places == 0) & (np.arange(self.sequence) > 0), IGNORED_LABEL, tokens)
        return {"input_ids": ids, "labels": torch.from_numpy(labels), "position_ids": torch.from_numpy(places)}


def _missing_mask_token(source: str, tokenizer: Tokenizer | None) -> InputError:
    """Returns the error of a masked-language model whose data have no mask token."""
    what = (
        Message("tokenizer {tokenizer!r} has none", tokenizer=tokenizer.name)
        if tokenizer
        else Message("token arrays have no tokenizer")
    )
    return InputError(
        Message(
            "data source {source}: a masked-language model needs a mask token, but {what}; set data.tokenizer to a "
            "tokenizer with a mask token",
            source=source,
            what=what,
        )
    )


def open_dataset(
    data: DataConfig,
    sequence: int,
    vocabulary: int = 0,
    objective: DataObjective = "causal",
    say: LogFunction = lambda line: None,
    positions: bool = False,
    report_corruption: LogFunction = lambda line: None,
) -> TextDataset | ShapeImages | InstructionDataset | PreferenceDataset:
    """Opens the data set that `data` describes.

    `vocabulary` is the number of tokens (or classes) of the model, or 0 if the data determine this number. `objective`
    is the training objective. `say` receives one line for each slow operation whose result is not yet cached.
    `positions`: whether the model accepts `position_ids`. If so, several conversations are packed into a row.
    Preference pairs need it.
    `report_corruption` receives one line for each corrupt block of a token array.

    Raises:
        InputError: the sources, the tokenizer and the model do not fit together.
    """
    if objective == "images" or SHAPES_SOURCE in data.sources:
        return _open_images(data, vocabulary, objective)
    name = ", ".join(data.sources)
    files = find_files(data.sources)
    form = form_of_records(first_record(files) or {}, data.field, name, objective == "preference")
    if form:
        return _open_instruction_dataset(data, files, form, sequence, objective, vocabulary, positions, say)
    files = [path for path in files if path.suffix != INDEX_SUFFIX or not path.with_suffix(".bin").is_file()]
    arrays = [path for path in files if path.suffix.lower() in ARRAY_SUFFIXES]
    if arrays and len(arrays) < len(files):
        other = next(path for path in files if path not in arrays)
        raise InputError(
            Message(
                "data source {name}: token array {arrays!r} and text {other!r} do not mix; name one kind",
                name=name,
                arrays=arrays[0].name,
                other=other.name,
            )
        )
    tokens = (
        _open_array_corpus(data, files, vocabulary) if arrays else _open_text_corpus(data, files, vocabulary, name, say)
    )
    if objective == "masked" and (tokens.tokenizer is None or tokens.tokenizer.mask is None):
        raise _missing_mask_token(name, tokens.tokenizer)
    separate_documents = data.documents == "apart"
    if separate_documents:
        _check_separate_documents(objective, tokens.tokenizer is not None)
    length = 2 * sequence if objective == "pairs" else sequence
    training, validation = packing.split_validation(tokens.documents, length, data.held_out, name)
    rows, validation_rows = (
        packing.PackedRows(tokens.arrays, part, length, report_corruption) for part in (training, validation)
    )
    return TextDataset(name, rows, validation_rows, tokens, objective, separate_documents)


def _check_separate_documents(objective: DataObjective, has_tokenizer: bool) -> None:
    """Raises InputError if the documents of a row cannot be separated."""
    if objective == "causal" and has_tokenizer:
        return
    what = (
        Message("it needs a causal language model, but the model's objective is {objective}", objective=objective)
        if objective != "causal"
        else Message("token arrays have no tokenizer, so the end-of-text token between documents is unknown")
    )
    raise InputError(
        Message("data.documents=apart: {what}; leave documents joined", what=what)
        + ("" if has_tokenizer else Message(", or set data.tokenizer"))
    )


def _open_instruction_dataset(
    data: DataConfig,
    files: list[Path],
    form: str,
    sequence: int,
    objective: DataObjective,
    vocabulary: int,
    positions: bool,
    say: LogFunction,
) -> InstructionDataset | PreferenceDataset:
    name = ", ".join(data.sources)
    if objective not in ("causal", "preference"):
        raise InputError(
            Message(
                "data source {name}: instruction data needs a causal language model, but this model's objective is "
                "{objective}",
                name=name,
                objective=objective,
            )
        )
    if form in (*CONVERSATION_FORMS, PREFERENCE_FORMS[1]) and data.tokenizer in ("auto", "bytes", "bpe"):
        raise InputError(
            Message(
                "data source {name}: messages need a chat template: set data.tokenizer to the folder of a tokenizer "
                "that has one",
                name=name,
            )
        )
    signatures, answer = _file_signatures(files), ANSWER_FIELDS.get(form, "completion")
    tokenizer = _choose_tokenizer(data.but(field=answer), files, signatures, vocabulary, name, say)
    _check_vocabulary(tokenizer, vocabulary)
    folder = open_instructions(files, form, tokenizer, data.tokenizer, repr(signatures), encode_pair)
    if objective == "preference":
        return PreferenceDataset(name, folder, tokenizer, sequence, data.held_out)
    return InstructionDataset(name, folder, tokenizer, sequence, data.held_out, positions)


def _open_images(data: DataConfig, vocabulary: int, objective: DataObjective) -> ShapeImages:
    if objective != "images":
        raise InputError(Message("data source 'shapes' holds images, the model reads text; set data.source=stdlib"))
    if data.sources not in ((STDLIB_SOURCE,), (SHAPES_SOURCE,)):
        raise InputError(
            Message(
                "data source {sources}: a model that classifies images reads source 'shapes'",
                sources=", ".join(data.sources),
            )
        )
    return ShapeImages(vocabulary) if vocabulary else ShapeImages()


def _json_digest(*parts: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


def _file_signatures(files: list[Path]) -> list[list[object]]:
    """Returns path, size and modification time of each file. They reveal changes without reading the files."""
    seen = [(path, path.stat()) for path in files]
    return [[os.path.abspath(path), state.st_size, state.st_mtime_ns] for path, state in seen]


def _open_array_corpus(data: DataConfig, files: list[Path], vocabulary: int) -> TokenCorpus:
    tokenizer = None if data.tokenizer in ("auto", "bytes", "bpe") else open_tokenizer(data.tokenizer)
    bound = min(filter(None, (vocabulary, tokenizer.vocabulary if tokenizer else 0)), default=0)
    indexed = [[path, *filter(Path.is_file, [path.with_suffix(INDEX_SUFFIX)])] for path in files]
    signatures = [seen[0] if len(seen) == 1 else seen for seen in map(_file_signatures, indexed)]
    names = [f"array-{_json_digest(_CACHE_VERSION, signature, bound > 2**16)}" for signature in signatures]
    arrays, documents, largest = open_token_arrays(files, names, bound)
    digest_folders = [
        cached_folder(f"blocks-{name}", partial(write_block_digests, array), has_block_digests)
        for name, array in zip(names, arrays, strict=True)
    ]
    checked = [
        ChecksummedArray(array, np.load(folder / DIGESTS_FILE), str(path))
        for array, folder, path in zip(arrays, digest_folders, files, strict=True)
    ]
    return TokenCorpus(checked, documents, tokenizer, bound or largest + 1, _json_digest(documents.digest.tolist()))


def _open_text_corpus(data: DataConfig, files: list[Path], vocabulary: int, name: str, say: LogFunction) -> TokenCorpus:
    signatures = _file_signatures(files)
    size = sum(path.stat().st_size for path in files)
    tokenizer = _choose_tokenizer(data, files, signatures, vocabulary, f"{name} ({show_bytes(size)})", say)
    _check_vocabulary(tokenizer, vocabulary)

    def make(folder: Path) -> None:
        say(Message("encoding {name} ({size}), once", name=name, size=show_bytes(size)))
        if not packing.encode_corpus(iter_document_chunks(files, data.field), tokenizer, folder):
            raise InputError(
                Message(
                    "data source {name}: no row has text in field {field!r}, all of them are empty; name files with "
                    "text",
                    name=name,
                    field=data.field,
                )
            )
        write_block_digests(packing.read_encoded_corpus(folder)[0][0], folder)

    def is_whole(folder: Path) -> bool:
        return packing.is_encoded_corpus(folder) and has_block_digests(folder)

    folder = cached_folder(
        f"tokens-{_json_digest(_CACHE_VERSION, signatures, data.field, tokenizer.digest)}", make, is_whole
    )
    [array], documents = packing.read_encoded_corpus(folder)
    return TokenCorpus(
        [ChecksummedArray(array, np.load(folder / DIGESTS_FILE), str(folder / "tokens.bin"))],
        documents,
        tokenizer,
        tokenizer.vocabulary,
        _json_digest(packing.read_corpus_info(folder).digest, tokenizer.digest),
    )


def _check_vocabulary(tokenizer: Tokenizer, vocabulary: int) -> None:
    if vocabulary and tokenizer.vocabulary > vocabulary:
        raise InputError(
            Message(
                "tokenizer {tokenizer!r} has {tokens:,} tokens, but the model's vocabulary has {vocabulary:,}: enlarge "
                "the vocabulary, or set data.tokenizer to a smaller tokenizer",
                tokenizer=tokenizer.name,
                tokens=tokenizer.vocabulary,
                vocabulary=vocabulary,
            )
        )


def _choose_tokenizer(
    data: DataConfig, files: list[Path], signatures: list[list[object]], vocabulary: int, source: str, say: LogFunction
) -> Tokenizer:
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer not in ("auto", "bpe"):
        return open_tokenizer(data.tokenizer)
    size = vocabulary or DEFAULT_BPE_VOCABULARY
    if data.tokenizer == "auto" and (size < MIN_BPE_VOCABULARY or not has_tokenizers_library()):
        return ByteTokenizer()
    if size < ByteTokenizer.vocabulary:
        raise InputError(
            Message(
                "a BPE tokenizer has at least {vocabulary} tokens, but the model's vocabulary is {size}: enlarge it",
                vocabulary=ByteTokenizer.vocabulary,
                size=size,
            )
        )

    folder = _bpe_folder(data, files, signatures, size, source, say)
    return LibraryTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"), "bpe")


def choose_tokenizer_name(data: DataConfig, files: list[Path], vocabulary: int, say: LogFunction) -> str:
    """Returns `bytes`, or the folder of a BPE tokenizer that is trained on all `files`, for `data.tokenizer`."""
    signatures, source = _file_signatures(files), ", ".join(data.sources)
    if isinstance(_choose_tokenizer(data, files, signatures, vocabulary, source, say), ByteTokenizer):
        return "bytes"
    return str(_bpe_folder(data, files, signatures, vocabulary or DEFAULT_BPE_VOCABULARY, source, say))


def _bpe_folder(
    data: DataConfig, files: list[Path], signatures: list[list[object]], size: int, source: str, say: LogFunction
) -> Path:
    def make(folder: Path) -> None:
        say(Message("training a BPE of {size:,} tokens on {source}, once", size=size, source=source))
        text = train_bpe(_sample_text(iter_document_chunks(files, data.field), files), size)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")

    return cached_folder(
        f"bpe-{_json_digest(_CACHE_VERSION, signatures, data.field, size)}",
        make,
        lambda folder: (folder / "tokenizer.json").exists(),
    )


def _sample_text(found: Iterator[DocumentChunk], files: list[Path]) -> Iterator[str]:
    """Yields every n-th chunk, so that the BPE is trained on a bounded amount of text from the whole corpus."""
    stride = max(1, sum(path.stat().st_size for path in files) // _BPE_TRAINING_BYTES)
    return (passage.text for number, passage in enumerate(found) if number % stride == 0)
