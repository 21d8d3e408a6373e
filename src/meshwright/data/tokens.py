"""Converts text to token ids and back, for data sets. Byte tokens need no library. Byte-level BPE needs the
`tokenizers` library, and a `tokenizer.model` the library `sentencepiece`. Other libraries convert such a file first,
and the result may give a text other ids.

Guarantees:
- For the tokenizers made here, decode(encode(text)) == text for every text, even for a text that spells a special
  token. Special tokens are never recognised in text. They are only inserted between documents.

A tokenizer from a user's `tokenizer.json` (Hugging Face) has its own rules instead. Source: Sennrich, Haddow, Birch,
Neural machine translation of rare words with subword units, ACL 2016. The alphabet consists of bytes, as in GPT-2.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

END_OF_TEXT_TOKEN, MASK_TOKEN = "<|endoftext|>", "<|mask|>"
_END_OF_TEXT_TOKENS = (END_OF_TEXT_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "[EOS]")
_MASK_TOKENS = (MASK_TOKEN, "<mask>", "[MASK]")
MIN_BPE_VOCABULARY = 512
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""The files of a tokenizer that are read, of the `tokenizers` library and of sentencepiece."""

TokenIds = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """The interface of a tokenizer for data sets. `mask` is the id of the mask token, or None if there is none, which
    excludes masked-language training."""

    name: str
    vocabulary: int
    end_of_text: int
    mask: int | None
    digest: str

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Returns the token ids of each text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`."""

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into `folder`."""


class ByteTokenizer:
    """A tokenizer with one token for each byte of UTF-8, followed by two special tokens."""

    name = "bytes"
    vocabulary = 258
    end_of_text = 256
    mask: int | None = 257
    digest = "bytes"

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Returns the bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`. Special tokens are skipped, and invalid UTF-8 is replaced."""
        return bytes(number for number in map(int, ids) if number < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Writes nothing, since the tokenizer has no state."""


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library, read from its JSON. `declared_end` is the end-of-text token if the
    tokenizer has none of the usual ones."""

    def __init__(self, text: str, name: str, declared_end: str = "") -> None:
        library = _tokenizers_library(name)
        try:
            self._tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises a bare Exception for invalid JSON
            raise InputError(
                Message(
                    "tokenizer {name!r} is not a tokenizer.json: {error}", name=name, error=str(error).splitlines()[0]
                )
            ) from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._text = text
        self.name = name
        self.vocabulary: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.digest: str = xxhash.xxh3_128_hexdigest(text.encode())
        end = self._first_known(_END_OF_TEXT_TOKENS)
        if end is None and (end := self._first_known((declared_end,))) is not None:
            self.digest = xxhash.xxh3_128_hexdigest(f"{self.digest} {end}".encode())
        if end is None:
            raise InputError(
                Message(
                    "tokenizer {name!r} has no end-of-text token: none of {end_of_text_tokens}",
                    name=name,
                    end_of_text_tokens=", ".join(_END_OF_TEXT_TOKENS),
                )
            )
        self.end_of_text: int = end
        self.mask: int | None = self._first_known(_MASK_TOKENS)

    def _first_known(self, words: tuple[str, ...]) -> int | None:
        return next((number for word in words if (number := self._tokenizer.token_to_id(word)) is not None), None)

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Returns the token ids of each text, without special tokens."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, dtype=np.uint32) for item in found]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without special tokens."""
        return str(self._tokenizer.decode([*map(int, ids)], skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json, which `open_tokenizer` and Hugging Face read."""
        file = folder / "tokenizer.json"
        with storage.failures_as_one_line(file):
            if storage.read_text(file) != self._text:  # if the file has not changed, a resumed run writes nothing
                storage.make_folder(folder)
                storage.replace_file(file, self._text)


class SentencePieceTokenizer:
    """A tokenizer of the `sentencepiece` library, read from a tokenizer.model."""

    mask: int | None = None

    def __init__(self, data: bytes, name: str) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise InputError(
                Message(
                    "tokenizer {name!r} is a tokenizer.model, which needs the sentencepiece library: pip install "
                    "'meshwright[sentencepiece]'",
                    name=name,
                )
            ) from None
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(data)
        except RuntimeError:
            raise InputError(Message("tokenizer {name!r} is not a model of sentencepiece", name=name)) from None
        self._data = data
        self.name = name
        self.vocabulary: int = self._processor.vocab_size()
        self.digest: str = xxhash.xxh3_128_hexdigest(data)
        self.end_of_text: int = self._processor.eos_id()
        if self.end_of_text < 0:
            raise InputError(
                Message(
                    "tokenizer {name!r} has no end-of-text token: none of {end_of_text_tokens}",
                    name=name,
                    end_of_text_tokens="</s>",
                )
            )

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Returns the token ids of each text, without special tokens."""
        return [np.array(ids, dtype=np.uint32) for ids in self._processor.EncodeAsIds(list(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without special tokens."""
        return str(self._processor.DecodeIds([*map(int, ids)]))

    def save(self, folder: Path) -> None:
        """Writes tokenizer.model."""
        file = folder / TOKENIZER_FILES[1]
        with storage.failures_as_one_line(file):
            if not storage.is_file(file) or storage.read_file(file) != self._data:
                storage.make_folder(folder)
                storage.replace_file(file, self._data)


def has_tokenizers_library() -> bool:
    """Returns whether `tokenizers` is installed."""
    return importlib.util.find_spec("tokenizers") is not None


def _tokenizers_library(name: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            Message(
                "tokenizer {name!r} needs the tokenizers library: pip install 'meshwright[tokenizers]', or set "
                "data.tokenizer=bytes",
                name=name,
            )
        ) from None
    return tokenizers


def train_bpe(texts: Iterable[str], vocabulary: int) -> str:
    """Returns the JSON of a byte-level BPE with at most `vocabulary` tokens. Equal texts give an equal result.

    Raises:
        InputError: `tokenizers` is not installed.
    """
    library = _tokenizers_library("bpe")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT_TOKEN, MASK_TOKEN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def tokenizer_file(folder: Path) -> Path | None:
    """Returns the file of the tokenizer in `folder`, None if there is none that can be read."""
    return next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)


def _declared_end(folder: Path) -> str:
    """Returns the end-of-text token that the settings of transformers in `folder` declare, or ''."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    token = settings.get("eos_token") if isinstance(settings, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def open_tokenizer(path: str) -> LibraryTokenizer | SentencePieceTokenizer:
    """Opens the tokenizer in a folder, or in a file: a tokenizer.json, or a tokenizer.model of sentencepiece. A folder
    with both has the same tokenizer twice, and the first is read. If a tokenizer.json has none of the usual end-of-text
    tokens, that of the tokenizer_config.json in its folder is used.

    Raises:
        InputError: the file is missing, unreadable or not a tokenizer, the tokenizer has no end-of-text token, or
            its library is not installed.
    """
    place = Path(path).expanduser()
    file = tokenizer_file(place) or place / "tokenizer.json" if place.is_dir() else place
    try:
        if file.suffix == Path(TOKENIZER_FILES[1]).suffix:
            return SentencePieceTokenizer(file.read_bytes(), path)
        return LibraryTokenizer(file.read_text(encoding="utf-8"), path, _declared_end(file.parent))
    except FileNotFoundError:
        raise InputError(
            Message(
                "data.tokenizer {path!r}: {file!r} does not exist; write auto, bytes, bpe, or a folder with a "
                "tokenizer.json or tokenizer.model",
                path=path,
                file=str(file),
            )
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            Message("data.tokenizer {file!r} cannot be read: {error}", file=str(file), error=error)
        ) from None
