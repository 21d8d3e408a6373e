"""From a job's data section to batches: opening, ranges of ranks, going on, reading ahead, drawn images."""

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import InputError
from meshwright.data import loader as prefetch
from meshwright.data.dataset import TextDataset, open_dataset
from meshwright.data.images import ShapeImages
from meshwright.data.loader import BatchLoader, Prefetcher, TensorBatch
from meshwright.data.tokens import train_bpe
from meshwright.spec.workload import DataConfig

few = settings(max_examples=40, deadline=None)
SEQUENCE = 16


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("MESHWRIGHT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 120 documents, each of its own numbers."""
    folder = tmp_path_factory.mktemp("books")
    for number in range(120):
        (folder / f"{number:03}.txt").write_text(" ".join(f"{number}:{word}" for word in range(20 + number % 7)))
    return folder


@pytest.fixture(scope="module")
def dataset(books: Path) -> TextDataset:
    found = open_dataset(DataConfig(source=str(books), tokenizer="bytes", held_out=0.05), SEQUENCE)
    assert isinstance(found, TextDataset)
    return found


@pytest.fixture(scope="module")
def masked(books: Path) -> TextDataset:
    found = open_dataset(DataConfig(source=str(books), tokenizer="bytes"), SEQUENCE, objective="masked")
    assert isinstance(found, TextDataset)
    return found


def equal(one: TensorBatch, other: TensorBatch) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def joined(parts: list[TensorBatch]) -> TensorBatch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def refusal(data: DataConfig, **more: object) -> str:
    with pytest.raises(InputError) as caught:
        open_dataset(data, SEQUENCE, **more)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the order
# ----------------------------------------------------------------------------------------------------------------------


@few
@given(
    replicas=st.sampled_from([1, 2, 3, 4, 6]),
    micro_batch=st.sampled_from([1, 2, 4]),
    passes=st.integers(1, 3),
    step=st.integers(0, 10**6),
    seed=st.integers(0, 2**31),
)
def test_every_world_and_micro_batch_size_reads_the_same_rows_in_order(
    dataset: TextDataset, masked: TextDataset, replicas: int, micro_batch: int, passes: int, step: int, seed: int
) -> None:
    batch = replicas * micro_batch * passes
    for source in (dataset, masked, ShapeImages(side=8)):
        loader = BatchLoader(source, batch, seed)
        read = [
            loader.rows(step, (replica * passes + number) * micro_batch, micro_batch)
            for replica in range(replicas)
            for number in range(passes)
        ]
        assert equal(joined(read), loader.rows(step))


@few
@given(batch=st.integers(1, 40), larger=st.integers(2, 5), step=st.integers(0, 1000))
def test_a_larger_batch_reads_the_rows_of_several_smaller_ones(
    dataset: TextDataset, batch: int, larger: int, step: int
) -> None:
    small, large = BatchLoader(dataset, batch, 1), BatchLoader(dataset, batch * larger, 1)
    assert equal(joined([small.rows(step * larger + part) for part in range(larger)]), large.rows(step))


def test_where_the_loss_does_not_shift_labels_a_label_is_the_next_token(dataset: TextDataset) -> None:
    shifting, beside = BatchLoader(dataset, 4, 1), BatchLoader(dataset, 4, 1, next_token=True)
    for one, other in ((shifting.rows(3), beside.rows(3)), (shifting.validation(2), beside.validation(2))):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["labels"][:, 1:], other["labels"][:, :-1])
        assert (other["labels"][:, -1] == -100).all()


def test_an_epoch_of_batches_reads_every_row_exactly_once(dataset: TextDataset) -> None:
    loader = BatchLoader(dataset, 1, seed=5)
    seen = torch.cat([loader.rows(step)["input_ids"] for step in range(dataset.rows)])
    every = dataset.training(np.arange(dataset.rows), np.arange(dataset.rows), 0)["input_ids"]
    assert sorted(seen.tolist()) == sorted(every.tolist())


def test_two_seeds_read_in_different_orders(dataset: TextDataset) -> None:
    assert not equal(BatchLoader(dataset, 8, 1).rows(0), BatchLoader(dataset, 8, 2).rows(0))


def test_a_run_that_goes_on_at_a_step_reads_what_the_uninterrupted_one_read(books: Path, dataset: TextDataset) -> None:
    whole = list(BatchLoader(dataset, 6, 3).prefetch([(0, 6)], 0, 9))
    opened_again = open_dataset(DataConfig(source=str(books), tokenizer="bytes", held_out=0.05), SEQUENCE)
    assert opened_again.digest == dataset.digest
    rest = list(BatchLoader(opened_again, 6, 3).prefetch([(0, 6)], 4, 9))
    assert all(equal(one[0], other[0]) for one, other in zip(whole[4:], rest, strict=True))


def test_held_out_text_never_appears_in_training(dataset: TextDataset) -> None:
    """Every word of the books names its document, so documents can be told from rows."""

    def documents(rows: torch.Tensor) -> set[str]:
        words = [
            word for row in rows.tolist() for word in dataset.tokenizer.decode(row).split(" ")[1:-1] if ":" in word
        ]  # type: ignore[union-attr]
        return {word.split(":")[0] for word in words if len(word.split(":")) == 2}

    training = documents(BatchLoader(dataset, dataset.rows, 1).rows(0)["input_ids"])
    held_out = documents(BatchLoader(dataset, 1, 1).validation(dataset.validation_rows)["input_ids"])
    assert dataset.validation_rows >= 32 and len(held_out) > 4 and len(training) > 90 and not training & held_out


def test_labels_are_the_inputs_for_causal_models_and_shared_with_nobody(dataset: TextDataset) -> None:
    batch = BatchLoader(dataset, 4, 1).rows(0)
    assert (
        batch["input_ids"].shape == (4, SEQUENCE) and batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    )
    assert torch.equal(batch["input_ids"], batch["labels"])
    batch["labels"][:] = -100
    assert batch["input_ids"].min() >= 0
    assert BatchLoader(dataset, 4, 1).labels_per_step == 4 * (SEQUENCE - 1)


def test_pairs_are_a_row_and_the_row_behind_it(books: Path, dataset: TextDataset) -> None:
    pairs = open_dataset(DataConfig(source=str(books), tokenizer="bytes", held_out=0.05), SEQUENCE, objective="pairs")
    assert isinstance(pairs, TextDataset)
    assert (pairs.sequence, pairs.labels_per_row) == (dataset.sequence, dataset.sequence)
    for read, rows, single in (
        (pairs.training, np.arange(3), dataset.training),
        (pairs.training, np.array([7]), dataset.training),
    ):
        two, one = (
            read(rows, rows, 1),
            single(np.repeat(2 * rows, 2) + np.tile([0, 1], len(rows)), np.repeat(rows, 2), 1)["input_ids"],
        )
        assert torch.equal(two["input_ids"], one[0::2])
        assert torch.equal(two["labels"], one[1::2])


def test_masked_labels_change_from_epoch_to_epoch_and_held_out_ones_never(masked: TextDataset) -> None:
    loader = BatchLoader(masked, masked.rows, 1)
    first, second = (loader.rows(epoch) for epoch in (0, 1))
    hidden = [(batch["labels"] != -100).sum(dim=1).float().mean() / SEQUENCE for batch in (first, second)]
    assert all(0.13 < float(share) < 0.18 for share in hidden) and not equal(first, second)
    assert equal(loader.validation(8), loader.validation(8)) and equal(
        loader.validation(4, 4), {k: v[4:] for k, v in loader.validation(8).items()}
    )
    assert loader.labels_per_step is None


def test_rows_outside_the_batch_are_refused(dataset: TextDataset) -> None:
    loader = BatchLoader(dataset, 8, 1)
    for wrong in ((0, 7, 2), (0, -1, 2), (0, 0, 0), (-1, 0, 1)):
        with pytest.raises(InputError, match="has rows 0 to 7"):
            loader.rows(*wrong)
    with pytest.raises(InputError, match=f"the data set has {dataset.validation_rows}"):
        loader.validation(dataset.validation_rows + 1)


# --- reading ahead
# ------------------------------------------------------------------------------------------------------------------


BEFORE: list[threading.Thread] = []


@pytest.fixture(autouse=True)
def threads_before() -> None:
    BEFORE[:] = threading.enumerate()


def threads() -> list[threading.Thread]:
    """Those that this test has started."""
    return [thread for thread in threading.enumerate() if thread.name == "prefetch" and thread not in BEFORE]


def comes(what: Callable[[], bool]) -> bool:
    """Whether it does, however busy the machine is."""
    end = time.monotonic() + 600.0
    while not what() and time.monotonic() < end:
        time.sleep(0.001)
    return what()


def test_reading_ahead_gives_the_same_as_reading_directly(dataset: TextDataset) -> None:
    loader = BatchLoader(dataset, 8, 1)
    ranges = [(2, 2), (6, 1)]
    with loader.prefetch(ranges, 3, 12) as ahead:
        found = list(ahead)
    assert len(found) == 9 and not threads()
    for step, parts in enumerate(found, 3):
        assert all(equal(part, loader.rows(step, *place)) for part, place in zip(parts, ranges, strict=True))


def test_no_more_than_depth_steps_are_read_ahead() -> None:
    read: list[int] = []
    with Prefetcher(lambda step: read.append(step) or step, 0, 100, depth=3) as ahead:
        assert comes(lambda: len(read) >= 3)
        time.sleep(0.05)
        assert read == [0, 1, 2]
        assert next(ahead) == 0 and next(ahead) == 1
        assert comes(lambda: len(read) >= 5)
        time.sleep(0.05)
        assert read == [0, 1, 2, 3, 4]
    assert not threads()


def test_several_readers_give_the_same_in_the_same_order_and_read_at_once() -> None:
    together = threading.Barrier(8)

    def read(step: int) -> int:
        if step < 13:
            together.wait(600.0)  # who reads alone waits in vain
        time.sleep(0.01 if step % 4 == 0 else 0.0)
        return step

    with Prefetcher(read, 5, 45, depth=8, readers=8) as ahead:
        assert len(threads()) == 8
        assert list(ahead) == list(range(5, 45))
    assert not threads()


def test_of_several_readers_one_that_fails_fails_in_its_turn() -> None:
    def read(step: int) -> int:
        time.sleep(0.002 * (10 - step))
        if step == 5:
            raise InputError("a bad row")
        return step

    with Prefetcher(read, 0, 10, depth=8, readers=4) as ahead:
        assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(InputError, match="a bad row"):
            next(ahead)
        assert list(ahead) == []
    assert not threads()


def test_a_file_that_cannot_be_read_ends_in_one_line_with_its_name(
    dataset: TextDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise OSError(5, "Input/output error", "/data/part-7.bin")

    monkeypatch.setattr(dataset, "training", gone)
    with BatchLoader(dataset, 8, 1).prefetch([(0, 8)], 3, 9) as ahead, pytest.raises(InputError) as error:
        next(ahead)
    assert "the data of step 4 cannot be read: Input/output error (/data/part-7.bin)" in str(
        error.value
    ) and "\n" not in str(error.value)


def test_what_reading_raises_comes_up_in_its_turn_and_once() -> None:
    def read(step: int) -> int:
        if step == 2:
            raise InputError("a bad row")
        return step

    ahead = Prefetcher(read, 0, 10, depth=5)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(InputError, match="a bad row"):
        next(ahead)
    assert list(ahead) == []
    ahead.close()


def test_waiting_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a step takes two seconds, and comes only once somebody has begun to wait for it."""
    came: list[int] = []
    asked, looks = threading.Semaphore(0), itertools.count()

    def clock() -> float:
        now = 2.0 * len(came)
        if next(looks) % 2 == 0:
            asked.release()
        return now

    def read(step: int) -> int:
        asked.acquire()
        came.append(step)
        return step

    monkeypatch.setattr(prefetch, "time", SimpleNamespace(perf_counter=clock))
    with Prefetcher(read, 0, 3, depth=1) as ahead:
        assert [(next(ahead), ahead.wait_seconds) for _ in range(3)] == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_closing_and_forgetting_end_the_thread() -> None:
    ahead = Prefetcher(lambda step: step, 0, 10**9)
    next(ahead)
    ahead.close()
    assert not threads() and list(ahead) == []
    forgotten = Prefetcher(lambda step: step, 0, 10**9)
    next(forgotten)
    del forgotten
    gc.collect()
    assert not threads()


def test_a_process_that_forgets_to_close_ends_at_once_and_in_silence() -> None:
    script = """
import sys, time
from meshwright.data.loader import Prefetcher
ahead = Prefetcher(lambda step: bytes(1000), 0, 10**9)
next(ahead)
sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


# --- opening
# ----------------------------------------------------------------------------------------------------------------------


def test_what_is_slow_is_said_once_and_kept(books: Path) -> None:
    data, said = DataConfig(source=str(books), tokenizer="bpe"), []
    first = open_dataset(data, SEQUENCE, 300, say=said.append)
    assert [line.split(" ")[0] for line in said] == ["training", "encoding"] and all(
        line.endswith("once") for line in said
    )
    again = open_dataset(data, SEQUENCE, 300, say=said.append)
    assert len(said) == 2 and again.digest == first.digest and first.vocabulary <= 300
    open_dataset(data, 2 * SEQUENCE, 300, say=said.append)
    assert len(said) == 2  # the length of a row changes no token


def test_a_changed_file_is_encoded_again(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("first " * 100)
    data = DataConfig(source=str(path), tokenizer="bytes")
    first = open_dataset(data, SEQUENCE)
    path.write_text("other words " * 100)
    assert open_dataset(data, SEQUENCE).digest != first.digest


def test_the_digest_follows_content_tokens_and_rows_not_the_place(tmp_path: Path) -> None:
    digests = []
    for name, text in {"a": "text " * 200, "b": "text " * 200, "c": "texts" * 200}.items():
        (tmp_path / name).write_text(text)
        digests += [
            open_dataset(DataConfig(source=str(tmp_path / name), tokenizer="bytes"), length).digest
            for length in (8, 16)
        ]
    assert digests[:2] == digests[2:4] and len(set(digests)) == 4


def test_auto_takes_bpe_where_the_vocabulary_has_room_and_bytes_below(
    books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(source=str(books))
    assert open_dataset(data, SEQUENCE, 512).tokenizer.name == "bpe"  # type: ignore[union-attr]
    assert open_dataset(data, SEQUENCE, 260).tokenizer.name == "bytes"  # type: ignore[union-attr]
    monkeypatch.setattr("meshwright.data.dataset.has_tokenizers_library", lambda: False)
    assert open_dataset(data, SEQUENCE, 512).tokenizer.name == "bytes"  # type: ignore[union-attr]


def test_a_given_tokenizer_must_fit_the_model(books: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe(["some text " * 50] * 3, 280))
    data = DataConfig(source=str(books), tokenizer=str(tmp_path))
    fits = open_dataset(data, SEQUENCE, 300)
    assert 258 < fits.vocabulary <= 280 and str(tmp_path) in fits.describe()
    assert "the model's vocabulary has 259" in refusal(data, vocabulary=259)
    assert "at least 258 tokens, but the model's vocabulary is 100" in refusal(
        DataConfig(source=str(books), tokenizer="bpe"), vocabulary=100
    )


def test_token_arrays_train_without_a_tokenizer(tmp_path: Path) -> None:
    np.random.default_rng(0).integers(0, 50, 4000).astype(np.uint16).tofile(tmp_path / "train.bin")
    data = DataConfig(source=str(tmp_path / "train.bin"))
    found = open_dataset(data, SEQUENCE, 64)
    assert found.tokenizer is None and found.vocabulary == 64 and found.rows + found.validation_rows == 250
    assert open_dataset(data, SEQUENCE).vocabulary == 50
    assert "the vocabulary ends at 31" in refusal(data, vocabulary=32)
    assert "token arrays have no tokenizer" in refusal(data, objective="masked")


def test_kinds_that_do_not_go_together_are_refused(tmp_path: Path, books: Path) -> None:
    np.zeros(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    assert "'a.bin' and text '000.txt' do not mix" in refusal(DataConfig(source=(str(books), str(tmp_path / "a.bin"))))
    assert "holds images, the model reads text" in refusal(DataConfig(source="shapes"))
    assert "reads source 'shapes'" in refusal(DataConfig(source=str(books)), objective="images")


def test_one_line_describes_the_rows(dataset: TextDataset) -> None:
    line = dataset.describe()
    assert f"{dataset.rows:,} rows of 16 to train on, {dataset.validation_rows} held out" in line and "\n" not in line


# --- drawn images
# -------------------------------------------------------------------------------------------------------------------


def test_an_image_is_a_pure_function_of_its_number() -> None:
    images = ShapeImages(side=16)
    batch = images.training(np.array([3, 900, 8191]), np.arange(3), 1)
    assert (
        batch["images"].shape == (3, 3, 16, 16)
        and batch["images"].dtype == torch.float32
        and batch["labels"].dtype == torch.int64
    )
    again = images.training(np.array([900]), np.array([77]), 2)
    assert torch.equal(again["images"][0], batch["images"][1]) and again["labels"][0] == batch["labels"][1]


def test_every_kind_is_drawn_about_equally_often_and_held_out_images_are_others() -> None:
    images = ShapeImages(side=8)
    training = images.training(np.arange(images.rows), np.arange(images.rows), 1)
    counts = torch.bincount(training["labels"], minlength=10)
    assert len(counts) == 10 and counts.min() > 700 and counts.max() < 950
    held_out = images.validation(np.arange(64))["images"]
    assert (training["images"][:, None, 0, 0] - held_out[None, :, 0, 0]).abs().sum(dim=-1).min() > 0


def test_kinds_can_be_told_apart_from_the_pixels() -> None:
    """Ridge regression on brightness patterns beats chance clearly; the colours alone tell nothing."""
    images = ShapeImages(side=16)
    batch = images.training(np.arange(4000), np.arange(4000), 1)
    pixels = batch["images"].double()
    pixels = (pixels - pixels[:, :, :1, :1]).abs().sum(dim=1).flatten(1)
    pixels = torch.cat([pixels, torch.ones(len(pixels), 1, dtype=torch.float64)], dim=1)
    target = torch.nn.functional.one_hot(batch["labels"], 10).double()
    train, test = slice(0, 3500), slice(3500, 4000)
    gram = pixels[train].T @ pixels[train] + 10 * torch.eye(pixels.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, pixels[train].T @ target[train])
    right = ((pixels[test] @ weights).argmax(dim=1) == batch["labels"][test]).double().mean()
    assert right > 0.3


def test_a_model_of_one_class_has_nothing_to_learn() -> None:
    assert "needs 2 or more classes, it has 1" in refusal(DataConfig(), vocabulary=1, objective="images")
