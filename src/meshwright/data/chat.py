"""Instructions as tokens, and which of them are learned: those that the assistant says.

Two forms of a record: `messages`, laid out by the chat template of the tokenizer (jinja, run by transformers in its sandbox), and `prompt`
with `completion`, laid one behind the other and ended by the end-of-text token.
Rule: a template that marks what the assistant says ({% generation %}) is believed. For any other, the assistant's words are what lies between the
conversation before them, ready for an answer, and the conversation with them; where a template rewrites earlier turns, so that this is no
beginning of the whole, the record is refused: nothing is learned from a guess.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.base.errors import InputError
from meshwright.data.records import Record
from meshwright.data.tokens import Tokenizer

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Said(NamedTuple):
    """A conversation: its tokens, and for each whether it is learned."""

    ids: NDArray[np.uint32]
    learned: NDArray[np.bool_]


def form_of(fields: dict[str, Any], field: str) -> str:
    """'messages' or 'prompt' for a record of instructions, '' for one with text in `field`."""
    if isinstance(fields.get("messages"), list) and (field == "messages" or field not in fields):
        return "messages"
    return "prompt" if "prompt" in fields and "completion" in fields and field not in fields else ""


class Template:
    """The chat template of the tokenizer in a folder."""

    def __init__(self, folder: str) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import transformers
        except ImportError:
            raise InputError("chat templates need transformers: pip install 'meshwright[huggingface]'") from None
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (ValueError, OSError) as error:
            raise InputError(f"data.tokenizer {folder!r}: {str(error).strip().splitlines()[0][:200]}") from None
        text = self._tokenizer.chat_template
        if not isinstance(text, str):
            raise InputError(
                f"data.tokenizer {folder!r} has no chat template: put chat_template.jinja beside it, or write prompt and completion"
            )
        if not self._tokenizer.is_fast:
            raise InputError(f"data.tokenizer {folder!r} does not say where its tokens come from: it has no tokenizer.json")
        self.marked = MARKED.search(text) is not None
        self.digest = xxhash.xxh3_128_hexdigest(text.encode())

    def encode(self, record: Record) -> Said:
        """The conversation of `record`."""
        messages = _messages(record)
        more = {"tools": record.fields["tools"]} if record.fields.get("tools") else {}
        if self.marked:
            found = self._render(record, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **more)
            return Said(np.array(found["input_ids"], np.uint32), np.array(found["assistant_masks"], bool))
        whole = self._render(record, messages, tokenize=False, **more)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(record, messages[:index], tokenize=False, add_generation_prompt=True, **more)
                behind = self._render(record, messages[: index + 1], tokenize=False, **more)
                if not (behind.startswith(before) and whole.startswith(behind)):
                    raise InputError(
                        f"{record.place}: the chat template rewrites earlier turns, so that message {index + 1} is not found in the whole; "
                        "mark what is learned by {% generation %} in the template, or keep one answer a conversation"
                    )
                spans.append((len(before), len(behind)))
        tokens = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([start for start, _ in tokens["offset_mapping"]], np.int64)
        learned = np.zeros(len(starts), bool)
        for first, last in spans:
            learned |= (starts >= first) & (starts < last)
        return Said(np.array(tokens["input_ids"], np.uint32), learned)

    def _render(self, record: Record, messages: list[dict[str, Any]], **options: Any) -> Any:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise InputError(f"{record.place}: the chat template refuses it: {str(error).splitlines()[0][:200]}") from None


def _messages(record: Record) -> list[dict[str, Any]]:
    messages = record.fields["messages"]
    if not isinstance(messages, list):
        raise InputError(f"{record.place}: 'messages' is {type(messages).__name__}, not a list")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            raise InputError(f"{record.place}: message {number} needs a role and a content, such as {{'role': 'user', 'content': 'Hello'}}")
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{record.place}: no message of the assistant: nothing would be learned from it")
    return messages


def encode_prompt(record: Record, tokenizer: Tokenizer) -> Said:
    """Prompt, completion and end of text; the completion and its end are learned."""
    texts = [record.fields["prompt"], record.fields["completion"]]
    for name, text in zip(("prompt", "completion"), texts, strict=True):
        if not isinstance(text, str):
            raise InputError(f"{record.place}: field {name!r} is {type(text).__name__}, not text; for lists of messages use 'messages'")
    prompt, completion = tokenizer.encode(texts)
    ids = np.concatenate([prompt, completion, [tokenizer.end_of_text]]).astype(np.uint32)
    return Said(ids, np.arange(len(ids)) >= len(prompt))
