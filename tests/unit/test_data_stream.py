"""Data of any size is encoded in bounded memory, and the tokens of a document in pieces are those of the whole."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.data import corpus, records
from meshwright.data.corpus import iter_document_chunks
from meshwright.data.dataset import open_dataset
from meshwright.data.packing import encode_corpus, read_encoded_corpus
from meshwright.data.records import LongJsonLine, chunk_text
from meshwright.data.tokens import ByteTokenizer, LibraryTokenizer, train_bpe
from meshwright.spec.workload import DataConfig

TEXTS = (
    Path(records.__file__).read_text()
    + Path(corpus.__file__).read_text()
    + "\n\n  tabs\t\tand   blanks \n \n x's we'll 12a3 ½1 一二。三 "
)
BPE = LibraryTokenizer(train_bpe([TEXTS], 700), "bpe")
SIGNS = [
    "a",
    "bc",
    "'",
    "'s",
    "'ll",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "1",
    "23",
    ".",
    ",",
    "(",
    "é",
    "一",
    "二。",
    "，",
    "½",
    "\u2028",
    "\x1c",
    "🙂",
    "_",
]


def drawn(seed: int, count: int) -> str:
    chance = random.Random(seed)
    return "".join(chance.choice(SIGNS) for _ in range(count))


@pytest.mark.parametrize("most", [7, 40, 1000])
def test_pieces_have_the_tokens_of_the_whole(most: int) -> None:
    for seed in range(100):
        text = TEXTS[seed * 80 :][:3000] if seed % 4 == 0 else drawn(seed, 400)
        found = list(chunk_text([text[:11], text[11:500], text[500:]], most))
        assert "".join(found) == text and max(map(len, found)) <= most
        whole, parts = BPE.encode([text])[0].tolist(), [int(it) for ids in BPE.encode(found) for it in ids]
        if most == 1000:  # smaller pieces hold runs without a safe boundary
            assert parts == whole, (seed, found)


def test_a_run_without_a_safe_boundary_is_cut_where_a_piece_ends() -> None:
    assert [len(piece) for piece in chunk_text(["a" * 25], 10)] == [10, 10, 5]
    assert list(chunk_text([], 10)) == list(chunk_text([""], 10)) == []


def lines_of(path: Path, monkeypatch: pytest.MonkeyPatch, line: int, field: str = "text") -> list[str]:
    """The documents of a file, where a line is long from `line` bytes on."""
    for module in (corpus, records):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", line)
    documents, text = [], ""
    for passage in iter_document_chunks([path], field):
        text += passage.text
        if passage.ends:
            documents.append(text)
            text = ""
    assert not text
    return documents


def test_a_long_line_is_read_as_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        records, "MAX_CHUNK_CHARS", 16
    )  # blocks that end inside of characters, escapes and pairs of surrogates
    path = tmp_path / "a.jsonl"
    for seed in range(60):
        chance = random.Random(seed)
        words = [drawn(seed + at, chance.randint(1, 60)) + '"\\/\b\f' for at in range(3)]
        others = {"n": -1.5e3, "t": [True, None, {"x": ["]}", {"text": "no"}]}], "e": {}, "l": [], "s": 'a "quoted" \\'}
        rows: list[Any] = [
            {"id": 7, **others, "text": word} if at else {"text": word, **others} for at, word in enumerate(words)
        ]
        path.write_text(
            "\n".join(json.dumps(row, ensure_ascii=seed % 2 == 0) for row in rows) + "\n\n" * (seed % 3),
            encoding="utf-8",
        )
        assert lines_of(path, monkeypatch, 10) == lines_of(path, monkeypatch, 2**24) == words


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"other": "x", "text": 5}', "field 'text' is not text"),
        ('{"other": "xxxxxxxxxxxxxxx"}', "no field 'text'; it has other"),
        ('["text", "xxxxxxxxxxxxx"]', "{ is missing"),
        ('{"text": "xxxxxxxxxxxxxxxxxx', "does not end"),
        ('{"text": "xxxxxxxxxx\\ud800xxxx"}', "lone surrogate"),
        ('{"text": "xxxxxxxxxx\\q"}          ', "invalid escape"),
        ('{"text": "xxxxxxxxxxxxxxxx"} {}', "something follows"),
        ('{"text": "xxxxxxxxxxxxx", "text": "y"}', "written twice"),
        ('{"a": [[[[[[[[[[[[[[[[[[[[[[', "a value is missing"),
        ('{"a": , "text": "xxxxxxxxxxxx"}', "a value is missing"),
        ('{"text" "xxxxxxxxxxxxxxxxxxxx"}', ": is missing"),
        (b'{"text": "xxxxxxxxxxxxxx\xff"}', "not UTF-8 text"),
    ],
)
def test_a_long_line_that_is_wrong_is_one_line(
    row: str | bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(row if isinstance(row, bytes) else row.encode())
    with pytest.raises(InputError, match=words) as error:
        lines_of(path, monkeypatch, 10)
    assert str(error.value).startswith(f"{path}:1: ") and "\n" not in str(error.value)


def test_a_number_of_five_thousand_digits_in_a_line_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "n": ' + "9" * 5000 + "}\n")
    with pytest.raises(InputError, match=r"a\.jsonl:1: not a line of JSON: a whole number of more than 4,300 digits"):
        list(iter_document_chunks([tmp_path / "a.jsonl"], "text"))


def test_the_outline_of_a_long_line_says_its_form() -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "x" * 50}], "n": 1, "text": "y" * 50}).encode()
    assert LongJsonLine(row[:10], io.BytesIO(row[10:]), "a:1").outline() == {"messages": [], "n": None, "text": ""}


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_a_long_document_is_encoded_as_the_whole(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(drawn(seed, 300) + " " for seed in range(30))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    found = list(chunk_text([text], 500))
    monkeypatch.setattr(corpus, "chunk_text", lambda parts: chunk_text(parts, 500))
    assert [passage.text for passage in iter_document_chunks([tmp_path / "a.jsonl"], "text")] == found and len(
        found
    ) > 10
    assert (
        encode_corpus(iter_document_chunks([tmp_path / "a.jsonl"], "text"), tokenizer, tmp_path)
        == len(tokenizer.encode([text])[0]) + 1
    )
    (tokens,), documents = read_encoded_corpus(tmp_path)
    assert tokens[:-1].tolist() == tokenizer.encode([text])[0].tolist() and documents.length.tolist() == [len(tokens)]


def test_rows_that_are_all_empty_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(InputError, match="no row has text in field 'text', all of them are empty"):
            open_dataset(DataConfig(source=str(tmp_path / "a.jsonl"), tokenizer=tokenizer), 16)


def test_a_parquet_file_of_wide_rows_is_decoded_a_few_rows_at_a_time(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for rows, width, expected in ((10, 2**20, range(10, 17)), (5000, 8, range(4096, 4097))):
        chance = np.random.default_rng(1)
        table = pyarrow.table(
            {"text": [chance.integers(33, 126, width, np.uint8).tobytes().decode() for _ in range(rows)]}
        )
        parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
        assert records.rows_per_read(parquet.ParquetFile(tmp_path / "a.parquet")) in expected
        assert "".join(passage.text for passage in iter_document_chunks([tmp_path / "a.parquet"], "text")) == "".join(
            table["text"].to_pylist()
        )


MEASURE = """
import resource, sys
from pathlib import Path
from meshwright.data.corpus import iter_document_chunks
from meshwright.data.packing import encode_corpus
from meshwright.data.records import first_record
from meshwright.data.tokens import ByteTokenizer, open_tokenizer
folder, name = Path(sys.argv[1]), sys.argv[2]
tokenizer = open_tokenizer(str(folder / "tokenizer.json")) if sys.argv[3] == "bpe" else ByteTokenizer()
tokenizer.encode(["some words"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first_record([folder / name])
encode_corpus(iter_document_chunks([folder / name], "text"), tokenizer, folder)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [
        ("line", "bytes"),
        ("documents", "bpe"),
        pytest.param("line", "bpe", marks=pytest.mark.soak),
        pytest.param("documents", "bytes", marks=pytest.mark.soak),
    ],
)
def test_encoding_takes_the_same_memory_whatever_the_size(kind: str, tokenizer: str, tmp_path: Path) -> None:
    """One line of 6 MB, or 120,000 documents of 18 bytes. A line that was held took 84 times its bytes, so many
    documents 1.5 kB each."""
    BPE.save(tmp_path)
    with (tmp_path / "a.jsonl").open("w") as file:
        if kind == "line":
            file.write('{"text": "')
            for number in range(75_000):
                file.write(f"{number} the quick brown fox jumps over the lazy dog, and again it does so: {number % 7}")
            file.write('"}\n')
        else:
            file.writelines(f'{{"text": "word {number % 97}"}}\n' for number in range(120_000))
    given = [sys.executable, "-c", MEASURE, str(tmp_path), "a.jsonl", tokenizer]
    done = subprocess.run(
        given, capture_output=True, text=True, check=True, env={**os.environ, "RAYON_NUM_THREADS": "2"}
    )
    assert int(done.stdout) < (240 if kind == "line" else 90) * 2**20
