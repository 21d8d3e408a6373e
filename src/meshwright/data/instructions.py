"""Reads instruction data for `open_dataset`: conversations as tokens, with loss only on the tokens of the assistant,
packed into rows.

A record has one of two forms: `messages`, or `prompt` and `completion`. Records of ShareGPT (`conversations`) and of
Alpaca (`instruction`, `input`, `output`) are converted to these (`usual_record`). Messages are rendered by the chat
template of the tokenizer (jinja, run by transformers in its sandbox). Prompt and completion are concatenated and
followed by the end-of-text token. A template that marks the assistant's text ({% generation %}) is used directly. For
any other template, the assistant's text is the difference between two renderings: the conversation before the answer
with the generation prompt, and the conversation with the answer. If the template changes earlier turns, the first
rendering is not a prefix of the second. Then the labels are unknown, and the record is refused.

[Note: packed rows] Conversations are packed by best fit, longest first. No conversation is split. `position_ids`
restart with each conversation, which prevents attention across conversations in transformers' models. If a model does
not accept `position_ids`, each row has one conversation. So conversations never attend to each other, and the loss of a
packed row equals the loss of its conversations in separate rows. Padding is a separate conversation without labels. A
conversation longer than a row is truncated, and `describe` reports the number of truncated conversations. Source: Ding
et al., Fewer Truncations Improve Language Modeling, ICML 2024 (best-fit packing).
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.data.cache import cached_folder
from meshwright.data.packing import count_validation_rows
from meshwright.data.record_form import PREFERENCE_FORMS
from meshwright.data.records import SourceRecord, iter_records
from meshwright.data.tokens import Tokenizer

CONVERSATION_FORMS = ("messages", "conversations")
"""Forms of records that a chat template renders."""
GENERATION_MARKER_PATTERN = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TokenizedConversation(NamedTuple):
    """The tokens of a conversation, and for each token whether it is a label."""

    ids: NDArray[np.uint32]
    learned: NDArray[np.bool_]


SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "function": "tool"}
"""Names of speakers in ShareGPT records, with the role of a message. Other names are roles already."""
ALPACA_PROMPTS = {
    True: "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:",
    False: "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:",
}
"""The prompts of Alpaca with and without an input. Source: train.py of tatsu-lab/stanford_alpaca, PROMPT_DICT."""


def usual_record(record: SourceRecord, form: str) -> SourceRecord:
    """Returns a record of the form 'conversations' or 'instruction' with the fields of the form 'messages' or 'prompt'.
    Raises InputError if a turn of a ShareGPT record has no speaker or no text."""
    fields = record.fields
    if form == "instruction":
        given = {name: str(fields.get(name) or "") for name in ("instruction", "input")}
        prompt = ALPACA_PROMPTS[bool(given["input"].strip())].format(**given)
        return record._replace(fields={"prompt": prompt, "completion": fields["output"]})
    if form != "conversations" or not isinstance(fields[form], list):
        return record
    messages = []
    for number, turn in enumerate(fields[form], 1):
        speaker, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise InputError(
                Message(
                    "{place}: turn {number} needs 'from' and 'value', such as {{'from': 'human', 'value': 'Hello'}}",
                    place=record.place,
                    number=number,
                )
            )
        messages.append({"role": SHAREGPT_ROLES.get(speaker.lower(), speaker.lower()), "content": text})
    if isinstance(fields.get("system"), str) and fields["system"]:
        messages.insert(0, {"role": "system", "content": fields["system"]})
    return record._replace(fields={"messages": messages, **({"tools": fields["tools"]} if fields.get("tools") else {})})


class ChatTemplate:
    """The chat template of the tokenizer in a folder.

    Raises:
        InputError: transformers is not installed, or the folder has no tokenizer.json or no chat template.
    """

    def __init__(self, folder: str) -> None:
        # Without it, transformers converts other files, and may give a text other ids than the model has learned.
        if not Path(folder, "tokenizer.json").is_file():
            raise InputError(
                Message(
                    "data.tokenizer {folder!r} has no tokenizer.json, which maps tokens to their place in the text",
                    folder=folder,
                )
            )
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import transformers
        except ImportError:
            raise InputError(
                Message("chat templates need transformers: pip install 'meshwright[huggingface]'")
            ) from None
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (ValueError, OSError) as error:
            raise InputError(
                Message(
                    "data.tokenizer {folder!r}: {error}", folder=folder, error=str(error).strip().splitlines()[0][:200]
                )
            ) from None
        text = self._tokenizer.chat_template
        if not isinstance(text, str):
            raise InputError(
                Message(
                    "data.tokenizer {folder!r} has no chat template: put chat_template.jinja beside it, or write "
                    "prompt and completion",
                    folder=folder,
                )
            )
        self.marked = GENERATION_MARKER_PATTERN.search(text) is not None
        self.digest = xxhash.xxh3_128_hexdigest(text.encode())

    def encode(self, record: SourceRecord, first: int = 0) -> TokenizedConversation:
        """Returns the tokens and labels of the conversation in `record`. The messages before `first` have no labels.

        Raises:
            InputError: the record is malformed, or the template does not reveal which text is the assistant's.
        """
        messages = _parse_messages(record)
        more = {"tools": record.fields["tools"]} if record.fields.get("tools") else {}
        if self.marked and not first:
            found = self._render(
                record, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **more
            )
            return TokenizedConversation(
                np.array(found["input_ids"], np.uint32), np.array(found["assistant_masks"], bool)
            )
        whole = self._render(record, messages, tokenize=False, **more)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index >= first:
                before = self._render(record, messages[:index], tokenize=False, add_generation_prompt=True, **more)
                behind = self._render(record, messages[: index + 1], tokenize=False, **more)
                if not (behind.startswith(before) and whole.startswith(behind)):
                    raise InputError(
                        Message(
                            "{place}: the chat template rewrites earlier turns, so message {index} cannot be found in "
                            "the rendered conversation; mark the text to train on with {{% generation %}} in the "
                            "template, or keep one answer per conversation",
                            place=record.place,
                            index=index + 1,
                        )
                    )
                spans.append((len(before), len(behind)))
        tokens = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([start for start, _ in tokens["offset_mapping"]], np.int64)
        learned = np.zeros(len(starts), bool)
        for first, last in spans:
            learned |= (starts >= first) & (starts < last)
        return TokenizedConversation(np.array(tokens["input_ids"], np.uint32), learned)

    def _render(self, record: SourceRecord, messages: list[dict[str, Any]], **options: Any) -> Any:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise InputError(
                Message(
                    "{place}: the chat template refuses this record: {error}",
                    place=record.place,
                    error=str(error).splitlines()[0][:200],
                )
            ) from None


def _parse_messages(record: SourceRecord) -> list[dict[str, Any]]:
    messages = record.fields["messages"]
    if not isinstance(messages, list):
        raise InputError(
            Message("{place}: 'messages' is {type}, not a list", place=record.place, type=type(messages).__name__)
        )
    for number, message in enumerate(messages, 1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str | list)
        ):
            raise InputError(
                Message(
                    "{place}: message {number} needs a role and a content, such as {{'role': 'user', 'content': "
                    "'Hello'}}",
                    place=record.place,
                    number=number,
                )
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(Message("{place}: the conversation has no assistant message to train on", place=record.place))
    return messages


def encode_completion(record: SourceRecord, tokenizer: Tokenizer) -> TokenizedConversation:
    """Returns the tokens of prompt, completion and end of text. The completion and the end of text are labels.

    Raises:
        InputError: the prompt or the completion is not text.
    """
    texts = [record.fields["prompt"], record.fields["completion"]]
    for name, text in zip(("prompt", "completion"), texts, strict=True):
        if not isinstance(text, str):
            raise InputError(
                Message(
                    "{place}: field {name!r} is {type}, not text; for lists of messages use 'messages'",
                    place=record.place,
                    name=name,
                    type=type(text).__name__,
                )
            )
    prompt, completion = tokenizer.encode(texts)
    ids = np.concatenate([prompt, completion, [tokenizer.end_of_text]]).astype(np.uint32)
    return TokenizedConversation(ids, np.arange(len(ids)) >= len(prompt))


IGNORED_LABEL = -100
Int64Array = NDArray[np.int64]
_CACHE_VERSION = 1


class InstructionDataset:
    """Rows of {"input_ids", "labels"}, int64 (rows, sequence), and of "position_ids" if the model accepts them. Labels
    are IGNORED_LABEL except at the assistant's tokens. A conversation without a label in its first `sequence` tokens is
    left out.

    Raises:
        InputError: no conversation has a label in its first `sequence` tokens.
    """

    def __init__(
        self, name: str, folder: Path, tokenizer: Tokenizer, sequence: int, validation_fraction: float, positions: bool
    ) -> None:
        self.name, self.tokenizer, self.sequence, self.positions = name, tokenizer, sequence, positions
        self.vocabulary = tokenizer.vocabulary
        self._ids, self._learned = (np.load(folder / f"{what}.npy", mmap_mode="r") for what in ("ids", "learned"))
        ends, digests = np.load(folder / "ends.npy"), np.load(folder / "digests.npy")
        self._starts, self._lengths = (
            np.append(0, ends[:-1]).astype(np.int64),
            np.diff(ends, prepend=0).astype(np.int64),
        )
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
                Message(
                    "data source {name}: no conversation has a token to train on within its first {sequence:,} "
                    "tokens: increase workload.sequence",
                    name=name,
                    sequence=sequence,
                )
            )
        training, aside = split_by_digest(np.flatnonzero(fits), digests, validation_fraction)
        lengths = np.minimum(self._lengths, sequence)
        self._training, self._validation = (
            pack_conversations(part, lengths[part], sequence) if positions else [[int(one)] for one in part]
            for part in (training, aside)
        )
        self.conversations = len(training)
        self.rows, self.validation_rows = len(self._training), len(self._validation)
        learned = xxhash.xxh3_128_hexdigest(self._learned)
        parts = [
            _CACHE_VERSION,
            sequence,
            positions,
            self.rows,
            self.validation_rows,
            digests.tolist(),
            learned,
            tokenizer.digest,
        ]
        self.digest = xxhash.xxh3_128_hexdigest(repr(parts).encode())
        self.labels_per_row: int | None = None

    def describe(self) -> str:
        """Returns one line about the source, the rows and the fraction of tokens that are labels."""
        share = float(np.mean(self._learned)) if len(self._learned) else 0.0
        cut = f", {self.cut:,} longer conversations truncated" if self.cut else ""
        return (
            f"{self.name} ({self.tokenizer.name}): {self.conversations:,} conversations in {self.rows:,} rows of "
            f"{self.sequence:,}{cut}, "
            f"{self.validation_rows:,} rows held out, {share:.0%} of the tokens learned"
        )

    def training(self, rows: Int64Array, numbers: Int64Array, seed: int) -> dict[str, torch.Tensor]:
        """Returns the batch of the training rows with indices `rows`. It does not depend on `numbers` or `seed`."""
        return self._read([self._training[row] for row in rows.tolist()])

    def validation(self, rows: Int64Array) -> dict[str, torch.Tensor]:
        """Returns the batch of the validation rows with indices `rows`."""
        return self._read([self._validation[row] for row in rows.tolist()])

    def _read(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        shape = (len(rows), self.sequence)
        ids, labels, places = (
            np.full(shape, self.tokenizer.end_of_text, np.int64),
            np.full(shape, IGNORED_LABEL, np.int64),
            np.zeros(shape, np.int64),
        )
        for row, conversations in enumerate(rows):
            at = 0
            for one in conversations:
                start, count = int(self._starts[one]), min(int(self._lengths[one]), self.sequence)
                ids[row, at : at + count] = self._ids[start : start + count]
                learned = np.array(self._learned[start : start + count])
                learned[0] = False  # no earlier token of the conversation predicts the first token
                labels[row, at : at + count] = np.where(learned, ids[row, at : at + count], IGNORED_LABEL)
                places[row, at : at + count] = np.arange(count)
                at += count
            places[row, at:] = np.arange(self.sequence - at)
        found = {"input_ids": ids, "labels": labels, **({"position_ids": places} if self.positions else {})}
        return {name: torch.from_numpy(value) for name, value in found.items()}


def pack_conversations(which: Int64Array, lengths: Int64Array, sequence: int) -> list[list[int]]:
    """Packs the conversations `which` into rows of at most `sequence` tokens. Longer conversations come first. Of all
    rows with enough free space, a conversation goes into the row with the least free space.

    No length in `lengths` exceeds `sequence`.

    >>> pack_conversations(np.array([7, 8, 9, 10]), np.array([6, 5, 4, 3]), 10)
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


def split_by_digest(which: Int64Array, digests: NDArray[np.uint64], fraction: float) -> tuple[Int64Array, Int64Array]:
    """Returns training and validation conversations, split by the digest of their content.

    Equal conversations are in the same split. If all conversations are equal, none is used for validation.
    """
    count = count_validation_rows(len(which), fraction)
    order = which[np.argsort(digests[which], kind="stable")]
    while 0 < count < len(order) and digests[order[count]] == digests[order[count - 1]]:
        count += 1
    count = count if count < len(order) else 0
    aside = np.sort(order[:count])
    return np.setdiff1d(which, aside), aside


PairEncoder = Callable[[SourceRecord, Tokenizer, ChatTemplate | None], list[TokenizedConversation]]
"""Encodes the two documents of a preference pair."""


def open_instructions(
    files: list[Path], form: str, tokenizer: Tokenizer, place: str, signature: str, encode_pair: PairEncoder
) -> Path:
    """Returns the cached folder with the conversations of `files` as tokens.

    `form` is a result of `record_format`. `place` is the folder of the tokenizer. `signature` is a text that changes
    whenever a file changes. `encode_pair` encodes records of PREFERENCE_FORMS, as two conversations each.

    Raises:
        InputError: a record does not have the form `form`, or cannot be encoded.
    """
    template = ChatTemplate(place) if form in (*CONVERSATION_FORMS, PREFERENCE_FORMS[1]) else None

    def encode(record: SourceRecord) -> list[TokenizedConversation]:
        if form in PREFERENCE_FORMS:
            return encode_pair(record, tokenizer, template)
        record = usual_record(record, form)
        return [template.encode(record) if template else encode_completion(record, tokenizer)]

    def make(folder: Path) -> None:
        ids: list[Any] = []
        learned: list[Any] = []
        digests = []
        for record in iter_records(files):
            if form not in (*record.fields, *PREFERENCE_FORMS):
                raise InputError(
                    Message(
                        "{place}: no field {form!r}, which the first record has; all records of a source must have "
                        "the same form",
                        place=record.place,
                        form=form,
                    )
                )
            for encoded in encode(record):
                ids.append(encoded.ids)
                learned.append(encoded.learned)
                digests.append(xxhash.xxh3_64_intdigest(encoded.ids.tobytes()))
        np.save(folder / "ids.npy", np.concatenate(ids))
        np.save(folder / "learned.npy", np.concatenate(learned))
        np.save(folder / "ends.npy", np.cumsum([len(each) for each in ids]))
        np.save(folder / "digests.npy", np.array(digests, np.uint64))

    key = xxhash.xxh3_128_hexdigest(
        repr([_CACHE_VERSION, signature, form, tokenizer.digest, template.digest if template else ""]).encode()
    )
    return cached_folder(f"instructions-{key}", make, lambda folder: (folder / "digests.npy").exists())
