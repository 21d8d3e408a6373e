"""Reads preference data for `open_dataset`: pairs of a chosen and a rejected answer to one prompt, for DPO and ORPO.

Records have the forms of TRL:

    {"prompt": "Add 1 and 2.", "chosen": "3", "rejected": "12"}             text
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}    messages
    {"chosen": [messages], "rejected": [messages]}                          messages; the prompt is what both begin with

Messages are rendered by the chat template of the tokenizer, as for instructions. The answers are the labels: text with
the end-of-text token, or the assistant's messages after the prompt.

[Note: a pair is a row] A row has two documents: the prompt with the chosen answer, then the prompt with the rejected
one. `position_ids` restart with each, which prevents attention between them. So a pair is never divided, whatever the
plan, and short and long answers share the room of a row. If a pair is longer than a row, its documents are truncated at
the end: each has at least half of the row. A pair without a label of each answer within the row is left out.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.data.instructions import (
    IGNORED_LABEL,
    ChatTemplate,
    Int64Array,
    TokenizedConversation,
    encode_completion,
    split_by_digest,
)
from meshwright.data.records import SourceRecord
from meshwright.data.tokens import Tokenizer

ANSWERS = ("chosen", "rejected")
_DIGEST_VERSION = 1
ANSWER_FIELDS = {"instruction": "output", "preference": "chosen"}
"""The field that trains a BPE tokenizer, for forms of records with another field than `completion`."""


def encode_pair(
    record: SourceRecord, tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[TokenizedConversation]:
    """Returns the documents of a pair: the prompt with the chosen answer, and the prompt with the rejected answer.
    `template` renders messages; None for text.

    Raises:
        InputError: an answer is missing, empty or of another form, both answers are equal, or the template refuses the
            record.
    """
    fields = record.fields
    _check_answers(record, str if template is None else list)
    if template is None:
        if not isinstance(fields.get("prompt"), str):
            raise InputError(
                Message("{place}: a preference pair of text needs its 'prompt' as text", place=record.place)
            )
        return [
            encode_completion(
                record._replace(fields={"prompt": fields["prompt"], "completion": fields[name]}), tokenizer
            )
            for name in ANSWERS
        ]
    prompt = _prompt_messages(record)
    answers = [fields[name][0 if "prompt" in fields else len(prompt) :] for name in ANSWERS]
    for name, answer in zip(ANSWERS, answers, strict=True):
        if not any(isinstance(each, dict) and each.get("role") == "assistant" for each in answer):
            raise InputError(
                Message(
                    "{place}: {name} has no assistant message after the prompt: leave the record out",
                    place=record.place,
                    name=name,
                )
            )
    return [
        template.encode(record._replace(fields={**fields, "messages": [*prompt, *answer]}), first=len(prompt))
        for answer in answers
    ]


def _check_answers(record: SourceRecord, kind: type) -> None:
    """Raises InputError if an answer of a pair is missing, empty or no `kind`, or if both are equal."""
    fields = record.fields
    for name in ANSWERS:
        if name not in fields:
            raise InputError(
                Message(
                    "{place}: a preference pair has no {name!r}: give each record a prompt, chosen and rejected",
                    place=record.place,
                    name=name,
                )
            )
        if not isinstance(fields[name], kind):
            raise InputError(
                Message(
                    "{place}: {name} is {type}, but that of the first record is {kind}: all records need the same form",
                    place=record.place,
                    name=name,
                    type=type(fields[name]).__name__,
                    kind=kind.__name__,
                )
            )
        if not fields[name] or (kind is str and not fields[name].strip()):
            raise InputError(
                Message("{place}: the {name} answer is empty: leave the record out", place=record.place, name=name)
            )
    if fields["chosen"] == fields["rejected"]:
        raise InputError(Message("{place}: chosen and rejected are equal: leave the record out", place=record.place))


def _prompt_messages(record: SourceRecord) -> list[Any]:
    """Returns the messages of the prompt: those of the field, or those with which both answers begin."""
    fields = record.fields
    if "prompt" in fields:
        given = fields["prompt"]
        return given if isinstance(given, list) else [{"role": "user", "content": given}]
    chosen, rejected = (fields[name] for name in ANSWERS)
    common = itertools.takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
    return [message for message, _ in common]


class PreferenceDataset:
    """Rows of {"input_ids", "position_ids", "chosen_labels", "rejected_labels"}, int64 (rows, sequence). Each row is a
    pair. Labels are IGNORED_LABEL except at the tokens of the answer.

    Raises:
        InputError: no pair has a label of each answer within the row.
    """

    def __init__(
        self, name: str, folder: Path, tokenizer: Tokenizer, sequence: int, validation_fraction: float
    ) -> None:
        self.name, self.tokenizer, self.sequence = name, tokenizer, sequence
        self.vocabulary = tokenizer.vocabulary
        self._ids, self._learned = (np.load(folder / f"{what}.npy", mmap_mode="r") for what in ("ids", "learned"))
        ends, digests = np.load(folder / "ends.npy"), np.load(folder / "digests.npy")[::2]
        self._starts = np.append(0, ends[:-1]).astype(np.int64).reshape(-1, 2)
        whole = np.diff(ends, prepend=0).astype(np.int64).reshape(-1, 2)
        self._lengths = np.minimum(whole, np.maximum(sequence // 2, sequence - whole[:, ::-1]))
        self.cut = int((self._lengths < whole).any(1).sum())
        fits = np.array([all(self._document(pair, which)[1].any() for which in (0, 1)) for pair in range(len(whole))])
        if not fits.any():
            raise InputError(
                Message(
                    "data source {name}: no pair has a token of each answer within its first {sequence:,} tokens: "
                    "increase workload.sequence",
                    name=name,
                    sequence=sequence,
                )
            )
        self._training, self._validation = split_by_digest(np.flatnonzero(fits), digests, validation_fraction)
        self.rows, self.validation_rows = len(self._training), len(self._validation)
        parts = [_DIGEST_VERSION, sequence, self.rows, self.validation_rows, digests.tolist(), tokenizer.digest]
        self.digest = xxhash.xxh3_128_hexdigest(repr([*parts, xxhash.xxh3_128_hexdigest(self._learned)]).encode())
        self.labels_per_row: int | None = 1  # a mean over pairs

    def describe(self) -> str:
        """Returns one line about the source and the number of pairs."""
        return Message(
            "{source} ({tokenizer}): {rows:,} pairs in rows of {sequence:,} to train on, {cut:,} of all pairs "
            "truncated, {validation_rows:,} pairs held out",
            source=self.name,
            tokenizer=self.tokenizer.name,
            rows=self.rows,
            sequence=self.sequence,
            cut=self.cut,
            validation_rows=self.validation_rows,
        )

    def training(self, rows: Int64Array, numbers: Int64Array, seed: int) -> dict[str, torch.Tensor]:
        """Returns the batch of the training rows with indices `rows`. It does not depend on `numbers` or `seed`."""
        return self._read(self._training[rows])

    def validation(self, rows: Int64Array) -> dict[str, torch.Tensor]:
        """Returns the batch of the validation rows with indices `rows`."""
        return self._read(self._validation[rows])

    def _document(self, pair: int, which: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the tokens of a document, and for each token whether it is a label. No earlier token predicts the
        first token, so it is none."""
        start = int(self._starts[pair, which])
        where = slice(start, start + int(self._lengths[pair, which]))
        learned = np.array(self._learned[where])
        learned[:1] = False
        return self._ids[where].astype(np.int64), learned

    def _read(self, pairs: Int64Array) -> dict[str, torch.Tensor]:
        shape = (len(pairs), self.sequence)
        ids, places = np.full(shape, self.tokenizer.end_of_text, np.int64), np.zeros(shape, np.int64)
        labels = [np.full(shape, IGNORED_LABEL, np.int64) for _ in ANSWERS]
        for row, pair in enumerate(pairs.tolist()):
            at = 0
            for which in (0, 1):
                tokens, learned = self._document(pair, which)
                here = slice(at, at + len(tokens))
                ids[row, here], places[row, here] = tokens, np.arange(len(tokens))
                labels[which][row, here] = np.where(learned, tokens, IGNORED_LABEL)
                at += len(tokens)
            places[row, at:] = np.arange(self.sequence - at)
        found = {"input_ids": ids, "position_ids": places}
        found |= {f"{name}_labels": each for name, each in zip(ANSWERS, labels, strict=True)}
        return {name: torch.from_numpy(value) for name, value in found.items()}
