"""From files to rows of tokens: reading, tokenizers, packing, what is held out, the cache. No torch."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.codec import validate_data
from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder
from meshwright.data import packing
from meshwright.data.cache import cached_folder
from meshwright.data.corpus import DocumentChunk, find_files, iter_document_chunks
from meshwright.data.token_arrays import open_token_arrays
from meshwright.data.tokens import ByteTokenizer, LibraryTokenizer, open_tokenizer, train_bpe
from meshwright.spec.workload import DataConfig

few = settings(max_examples=60, deadline=None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


def refusal(call: object, *arguments: object) -> str:
    """The one line that `call` ends in."""
    with pytest.raises(InputError) as caught:
        result = call(*arguments)  # type: ignore[operator]
        if hasattr(result, "__next__"):
            list(result)
    line = str(caught.value)
    assert "\n" not in line
    return line


def read(path: Path, field: str = "text") -> list[str]:
    return [passage.text for passage in iter_document_chunks(find_files((str(path),)), field)]


# --- the specification
# ---------------------------------------------------------------------------------------------------------------------


def test_the_data_section_takes_one_source_or_several() -> None:
    assert validate_data(DataConfig, {}).sources == ("stdlib",)
    assert validate_data(DataConfig, {"source": ["a.txt", "b.txt"]}).sources == ("a.txt", "b.txt")
    assert "did you mean 'source'?" in refusal(validate_data, DataConfig, {"sorce": "x"})
    assert "no file is named" in refusal(validate_data, DataConfig, {"source": []})


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_standard_library_is_ten_megabytes_without_tests_and_in_a_fixed_order() -> None:
    files = find_files(("stdlib",))
    size = sum(path.stat().st_size for path in files)
    assert 6e6 < size < 30e6 and len(files) > 300
    assert not any({"test", "tests", "idlelib", "lib2to3", "site-packages"} & set(path.parts[-4:]) for path in files)
    assert files == find_files(("stdlib",)) and any(path.name == "argparse.py" for path in files)


def test_a_folder_is_read_by_name_without_hidden_and_empty_files(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    (folder / "inner").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, text in {
        "b.txt": "B",
        "a.txt": "A",
        "inner/c.md": "C",
        "empty.txt": "",
        ".git/x": "hidden",
        ".DS_Store": "hidden",
    }.items():
        (folder / name).write_text(text)
    assert read(folder) == ["A", "B", "C"]
    assert [path.name for path in find_files((str(folder / "*.txt"),))] == ["a.txt", "b.txt"]


def test_what_is_hidden_is_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home may hide more files than one waits for."""
    (tmp_path / "books" / ".cache" / "deep").mkdir(parents=True)
    (tmp_path / "books" / "a.txt").write_text("A")
    entered, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: entered.append(str(path)) or scandir(path))
    assert [path.name for path in find_files((str(tmp_path / "books"),))] == ["a.txt"]
    assert str(tmp_path / "books") in entered and not any(".cache" in path for path in entered)


def test_missing_and_empty_sources_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "books.txt").write_text("x")
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "folder").mkdir()
    assert "does not exist; did you mean 'books.txt'?" in refusal(find_files, (str(tmp_path / "bocks.txt"),))
    assert "none.txt' is empty" in refusal(find_files, (str(tmp_path / "none.txt"),))
    assert "has no non-empty file" in refusal(find_files, (str(tmp_path / "folder"),))
    assert "has no non-empty file" in refusal(find_files, (str(tmp_path / "*.zip"),))
    assert "cannot be read: File name too long" in refusal(find_files, ("x" * 5000,))


def test_text_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    for before in (3, 2**18 - 1, 2**18, 2**19 + 5):
        path.write_bytes(b"a" * before + b"\xe9t\xe9" + b"b" * 10)
        assert refusal(read, path).endswith(f"latin.txt' is not UTF-8 text (byte {before})")
    path.write_bytes(b"abc\xe4\xbd")  # ends inside a character
    assert refusal(read, path).endswith("(byte 3)")


def test_a_long_text_file_comes_in_passages_that_join_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    text = "".join(f"line {number} äöü 語\r\n" for number in range(60_000))
    path.write_bytes(text.encode())
    found = list(iter_document_chunks([path], "text"))
    assert "".join(passage.text for passage in found) == text
    assert len(found) > 2 and [passage.ends for passage in found] == [False] * (len(found) - 1) + [True]
    assert all(passage.text.endswith("\n") for passage in found)


def test_json_lines_are_read_by_field(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two\\n", "id": 2}\n{"text": ""}\n')
    assert read(path) == ["one", "two\n"]
    path.write_text('{"body": "one"}\n')
    assert read(path, "body") == ["one"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut', "some.jsonl:2: not a line of JSON: "),
        (b"[1, 2]", "some.jsonl:2: a line must hold an object with field 'text', but this one holds a list"),
        (b'{"txet": "x"}', "some.jsonl:2: no field 'text'; did you mean 'txet'?"),
        (b'{"content": "x", "id": 1}', "some.jsonl:2: no field 'text'; it has content, id: set data.field"),
        (b'{"text": 5}', "some.jsonl:2: field 'text' is int, not text"),
        (b'{"text": "\\ud800"}', "some.jsonl:2: field 'text' holds half a character"),
        (b'{"text": "\xe9"}', "some.jsonl:2: not UTF-8 text (byte 10 of the line)"),
        (b"[" * 100_000, "some.jsonl:2: not a line of JSON"),
    ],
)
def test_a_bad_json_line_is_refused_with_its_number(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    assert says in refusal(read, path)


def test_parquet_rows_are_documents_and_without_pyarrow_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.parquet"
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "", "two"], "id": [1, 2, 3]}), path)
        assert read(path) == ["one", "two"]
        assert "has no column 'body'; it has text, id" in refusal(read, path, "body")
        assert "row 1: field 'id' is int, not text" in refusal(read, path, "id")
        path.write_bytes(path.read_bytes()[:-20])
        assert "is not a complete Parquet file" in refusal(read, path)
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refusal(read, path).endswith("is Parquet, which needs pyarrow: pip install 'meshwright[parquet]'")


# --- tokenizers
# -------------------------------------------------------------------------------------------------------------------

SAMPLE = ["def f(x):\n    return x + 1\n", "naïve 語 🙂 <|endoftext|> <|mask|>\r\n\t", "", " ", "\x00\ufeff"] * 3
BPE = train_bpe(SAMPLE * 20, 300)


@few
@given(text=st.text())
def test_bytes_and_bpe_read_back_every_text(text: str) -> None:
    for tokenizer in (ByteTokenizer(), LibraryTokenizer(BPE, "bpe")):
        ids = tokenizer.encode([text])[0]
        assert tokenizer.decode(ids.tolist()) == text
        assert not {tokenizer.end_of_text, tokenizer.mask} & set(ids.tolist())
        assert len(ids) == 0 or ids.max() < tokenizer.vocabulary


def test_bpe_is_the_same_for_the_same_texts_and_shorter_than_bytes() -> None:
    assert train_bpe(SAMPLE * 20, 300) == BPE
    tokenizer = LibraryTokenizer(BPE, "bpe")
    assert tokenizer.vocabulary <= 300 and tokenizer.digest == LibraryTokenizer(BPE, "other").digest
    assert len(tokenizer.encode(SAMPLE[:1])[0]) < len(SAMPLE[0].encode())


def test_a_tokenizer_is_read_from_a_folder_and_saved_to_one(tmp_path: Path) -> None:
    LibraryTokenizer(BPE, "bpe").save(tmp_path)
    opened = open_tokenizer(str(tmp_path))
    assert opened.encode(SAMPLE)[0].tolist() == LibraryTokenizer(BPE, "bpe").encode(SAMPLE)[0].tolist()
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).digest == opened.digest


def test_a_bad_tokenizer_folder_is_one_line(tmp_path: Path) -> None:
    assert "does not exist; write auto, bytes, bpe, or a folder" in refusal(open_tokenizer, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    assert "is not a tokenizer.json" in refusal(open_tokenizer, str(tmp_path))
    whole = json.loads(BPE)
    text = json.dumps(whole).replace("<|endoftext|>", "<|unknown|>")
    (tmp_path / "tokenizer.json").write_text(text)
    assert "has no end-of-text token" in refusal(open_tokenizer, str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|gone|>"}')
    assert "has no end-of-text token" in refusal(open_tokenizer, str(tmp_path))


@pytest.mark.parametrize("declared", ["<|unknown|>", {"content": "<|unknown|>", "lstrip": False}])
def test_the_end_of_text_is_the_token_that_the_settings_of_transformers_declare(
    tmp_path: Path, declared: object
) -> None:
    (tmp_path / "tokenizer.json").write_text(BPE.replace("<|endoftext|>", "<|unknown|>"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
    assert open_tokenizer(str(tmp_path)).end_of_text == LibraryTokenizer(BPE, "bpe").end_of_text
    (tmp_path / "tokenizer.json").write_text(BPE)
    assert open_tokenizer(str(tmp_path)).digest == LibraryTokenizer(BPE, "bpe").digest


def test_a_sentencepiece_model_gives_the_ids_of_its_own_library(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    data = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE * 50), model_writer=data, vocab_size=300, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(data.getvalue())
    opened, own = open_tokenizer(str(tmp_path)), library.SentencePieceProcessor(model_proto=data.getvalue())
    for ids, text in zip(opened.encode(SAMPLE), SAMPLE, strict=True):
        assert ids.tolist() == own.EncodeAsIds(text) and opened.decode(ids.tolist()) == own.DecodeIds(ids.tolist())
    assert (opened.vocabulary, opened.end_of_text, opened.mask) == (own.vocab_size(), own.eos_id(), None)
    opened.save(tmp_path / "saved")
    assert open_tokenizer(str(tmp_path / "saved" / "tokenizer.model")).digest == opened.digest
    (tmp_path / "tokenizer.json").write_text(BPE)
    assert isinstance(open_tokenizer(str(tmp_path)), LibraryTokenizer)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\n")  # files of tiktoken have this name too
    assert "is not a model of sentencepiece" in refusal(open_tokenizer, str(tmp_path))


def test_without_sentencepiece_its_model_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert "pip install 'meshwright[sentencepiece]'" in refusal(open_tokenizer, str(tmp_path))


def test_without_the_library_a_bpe_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'meshwright[tokenizers]', or set data.tokenizer=bytes" in refusal(train_bpe, [], 300)


# --- packing
# ----------------------------------------------------------------------------------------------------------------------


def encoded(folder: Path, texts: list[str]) -> tuple[list[packing.TokenArray], packing.DocumentIndex]:
    folder.mkdir(parents=True)
    packing.encode_corpus([DocumentChunk(text, True) for text in texts], ByteTokenizer(), folder)
    assert packing.is_encoded_corpus(folder)
    return packing.read_encoded_corpus(folder)


def all_rows(rows: packing.PackedRows) -> np.ndarray:
    return rows.read(np.arange(len(rows)))


def test_documents_are_joined_with_an_end_and_cut_into_rows(tmp_path: Path) -> None:
    arrays, documents = encoded(tmp_path / "c", ["abc", "defgh", "i"])
    whole, nothing = packing.split_validation(documents, 5, 0.0, "x")
    rows = packing.PackedRows(arrays, whole, 5)
    assert all_rows(rows).tolist() == [[97, 98, 99, 256, 100], [101, 102, 103, 104, 256]]
    assert len(packing.PackedRows(arrays, nothing, 5)) == 0


def test_a_document_in_passages_is_encoded_like_the_whole(tmp_path: Path) -> None:
    for name, parts in {
        "a": [DocumentChunk("abc\ndef", True)],
        "b": [DocumentChunk("abc\n", False), DocumentChunk("def", True)],
    }.items():
        (tmp_path / name).mkdir()
        packing.encode_corpus(parts, ByteTokenizer(), tmp_path / name)
    assert (tmp_path / "a/tokens.bin").read_bytes() == (tmp_path / "b/tokens.bin").read_bytes()
    assert packing.read_corpus_info(tmp_path / "a").digest == packing.read_corpus_info(tmp_path / "b").digest


@few
@given(
    lengths=st.lists(st.integers(1, 400), min_size=2, max_size=60),
    sequence=st.integers(1, 40),
    fraction=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    seed=st.integers(0, 1000),
)
def test_training_and_held_out_share_no_document_and_lose_less_than_a_row_each(
    lengths: list[int], sequence: int, fraction: float, seed: int
) -> None:
    length = np.array(lengths)
    digest = (
        np.random.default_rng(seed).integers(0, 30, len(lengths)).astype(np.uint64)
    )  # equal digests are equal documents
    documents = packing.DocumentIndex(np.zeros_like(length), np.cumsum(length) - length, length, digest)
    total = int(length.sum())
    needed = packing.count_validation_rows(total // sequence, fraction)
    if total < (needed + 1) * sequence:
        assert "too few" in refusal(packing.split_validation, documents, sequence, fraction, "x")
        return
    token = np.arange(total)
    parts = packing.split_validation(documents, sequence, fraction, "x")
    rows = [packing.PackedRows([token], part, sequence) for part in parts]
    seen = [all_rows(part).ravel() for part in rows]
    assert len(rows[0]) >= 1 and len(rows[1]) >= needed and (fraction > 0 or len(rows[1]) == 0)
    assert len(np.unique(np.concatenate(seen))) == len(seen[0]) + len(seen[1])
    assert len(seen[0]) + len(seen[1]) > total - 2 * sequence
    assert all((np.diff(part) > 0).all() for part in seen)  # both keep the order of the corpus
    owner = np.repeat(np.arange(len(length)), length)
    shared = set(owner[seen[0]]) & set(owner[seen[1]])
    if shared:  # too coarse for whole documents: one cut, through one document, near the end
        assert len(shared) == 1 and seen[1].min() > seen[0].max()
    else:
        assert not set(digest[owner[seen[0]]]) & set(digest[owner[seen[1]]]) or seen[1].min() > seen[0].max()


def test_held_out_is_at_least_one_percent_of_the_rows_or_thirty_two(tmp_path: Path) -> None:
    texts = [f"document {number} " * 12 for number in range(4000)]
    arrays, documents = encoded(tmp_path / "c", texts)
    training, held_out = (
        packing.PackedRows(arrays, part, 32) for part in packing.split_validation(documents, 32, 0.01, "x")
    )
    assert 0.01 <= len(held_out) / (len(training) + len(held_out)) < 0.012
    few_training, few_held_out = packing.split_validation(
        packing.DocumentIndex(*(column[:300] for column in documents)), 32, 0.01, "x"
    )
    assert 32 <= len(packing.PackedRows(arrays, few_held_out, 32)) < 40 and few_training.length.sum() > 0


def test_the_choice_of_held_out_documents_follows_content_not_names_or_order(tmp_path: Path) -> None:
    texts = [f"document {number} " * 12 for number in range(600)]
    chosen = []
    for name, order in {"a": texts, "b": texts[::-1]}.items():
        arrays, documents = encoded(tmp_path / name, order)
        held_out = packing.split_validation(documents, 32, 0.05, "x")[1]
        run = np.concatenate([arrays[0][start : start + length] for _, start, length in zip(*held_out)])
        chosen.append(set(ByteTokenizer().decode(run[run != 256]).split("document")))
    assert chosen[0] == chosen[1]


def test_one_long_document_is_held_out_at_its_tail(tmp_path: Path) -> None:
    arrays, documents = encoded(tmp_path / "c", ["".join(f"{number} " for number in range(20_000))])
    training, held_out = packing.split_validation(documents, 64, 0.01, "x")
    assert training.start.tolist() == [0] and held_out.start.tolist() == training.length.tolist()
    assert len(packing.PackedRows(arrays, held_out, 64)) == packing.count_validation_rows(len(arrays[0]) // 64, 0.01)


def test_too_little_text_is_one_line_with_the_numbers(tmp_path: Path) -> None:
    _, documents = encoded(tmp_path / "c", ["abcdefg"])
    assert refusal(packing.split_validation, documents, 8, 0.01, "x.txt") == (
        "data source x.txt: 8 tokens are too few for one row to train on and one to hold out of 8; "
        "name more text or shorten workload.sequence"
    )


# --- token arrays
# -----------------------------------------------------------------------------------------------------------------


def test_token_arrays_are_memory_mapped_and_checked_against_the_vocabulary(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.arange(500, dtype=np.uint32).tofile(tmp_path / "b.uint32.bin")
    np.save(tmp_path / "c.npy", np.arange(300, dtype=np.int64).reshape(3, 100))
    files = [tmp_path / name for name in ("a.bin", "b.uint32.bin", "c.npy")]
    arrays, documents, largest = open_token_arrays(files, ["a", "b", "c"], 1000)
    assert [array.tolist() for array in arrays] == [list(range(1000)), list(range(500)), list(range(300))]
    assert (
        all(isinstance(array, np.memmap) for array in arrays)
        and documents.length.tolist() == [1000, 500, 300]
        and largest == 999
    )
    assert "a.bin' holds token 999, the vocabulary ends at 511" in refusal(
        open_token_arrays, files, ["a", "b", "c"], 512
    )


def test_a_row_runs_over_the_ends_of_arrays(tmp_path: Path) -> None:
    for number in range(3):
        np.arange(number * 10, number * 10 + 10, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    arrays, documents, _ = open_token_arrays([tmp_path / f"{number}.bin" for number in range(3)], ["0", "1", "2"], 0)
    rows = packing.PackedRows(arrays, packing.split_validation(documents, 7, 0.0, "x")[0], 7)
    assert all_rows(rows).tolist() == np.arange(28).reshape(4, 7).tolist()


def test_a_broken_token_array_is_one_line(tmp_path: Path) -> None:
    def opened(name: str) -> str:
        return refusal(open_token_arrays, [tmp_path / name], [name], 100)

    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.save(tmp_path / "float.npy", np.zeros(5))
    np.save(tmp_path / "cut.npy", np.zeros(500, dtype=np.int32))
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object))
    np.save(tmp_path / "minus.npy", np.array([3, -1]))
    np.save(tmp_path / "none.npy", np.zeros(0, dtype=np.int32))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-10])
    assert "3 bytes are not a multiple of 2, the size of uint16" in opened("odd.bin")
    assert "holds float64, not integer tokens" in opened("float.npy")
    assert "is not a complete array" in opened("cut.npy")
    assert "is not a complete array" in opened("object.npy")
    assert "holds token -1" in opened("minus.npy")
    assert "holds no token" in opened("none.npy")


# --- the cache
# --------------------------------------------------------------------------------------------------------------------


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("MESHWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/meshwright")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/meshwright"


def has_file(folder: Path) -> bool:
    return (folder / "x").exists()


def test_what_fails_halfway_leaves_nothing_and_the_next_run_starts_again() -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("thing", interrupted, has_file)
    assert [path.name for path in cache_folder().iterdir()] == [".thing.lock"]
    folder = cached_folder("thing", lambda folder: (folder / "x").write_text("whole") and None, has_file)
    assert [path.name for path in folder.iterdir()] == ["x"]


def test_what_a_killed_run_left_is_removed_and_a_broken_folder_is_made_again() -> None:
    left = cache_folder() / ".thing.12345.partial"
    left.mkdir(parents=True)
    (cache_folder() / "thing").mkdir()
    cached_folder("thing", lambda folder: (folder / "x").write_text("whole") and None, has_file)
    assert not left.exists() and has_file(cache_folder() / "thing")


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert (
        "cannot be written" in (line := refusal(cached_folder, "thing", Path.mkdir, has_file))
        and "MESHWRIGHT_CACHE" in line
    )

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "cache").unlink()
    assert "(No space left on device): set MESHWRIGHT_CACHE to a folder with room" in refusal(
        cached_folder, "thing", full, has_file
    )


MAKER = """
import sys, time
from pathlib import Path
from meshwright.data.cache import cached_folder
def make(folder):
    with open(sys.argv[1], "a") as log: log.write("made\\n")
    (folder / "x").write_text("half")
    if sys.argv[2] == "dies":
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    (folder / "x").write_text("whole")
print(cached_folder("thing", make, lambda folder: (folder / "x").exists()).joinpath("x").read_text())
"""


def started(log: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(log), how], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def test_of_processes_that_start_at_once_one_makes_and_all_read_the_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [started(log, "lives") for _ in range(3)]
    assert [process.communicate()[0].strip() for process in processes] == ["whole"] * 3
    assert log.read_text() == "made\n"


def test_after_a_kill_in_the_middle_the_next_process_makes_it_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert started(log, "dies").communicate()[0] == ""
    assert started(log, "lives").communicate()[0].strip() == "whole"
    assert sorted(path.name for path in cache_folder().iterdir()) == [".thing.lock", "thing"]
