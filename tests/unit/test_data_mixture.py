"""Several sources with weights: how many samples come from each, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.core.errors import InputError
from meshwright.data.loader import BatchLoader
from meshwright.data.mixture import BLOCK_SAMPLES, MixtureDataset, block_counts, open_mixture, split_samples
from meshwright.spec.workload import DataConfig


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, letter, count in (("a", "a", 40), ("b", "b", 400)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{letter * 15}\n" for _ in range(count)))
    return str(tmp_path / "a.txt"), str(tmp_path / "b.txt")


def opened(data: DataConfig) -> MixtureDataset:
    found = open_mixture(data, 16, 0, "causal", print, False, print)
    assert isinstance(found, MixtureDataset)
    return found


@pytest.mark.parametrize("weights", [(7.0, 3.0), (1.0, 1.0, 1.0), (0.001, 0.999), (5.0, 1.0, 2.0, 0.5)])
def test_every_block_has_the_exact_number_of_samples_of_each_source(weights: tuple[float, ...]) -> None:
    counts = block_counts(weights)
    exact = np.array(weights) / sum(weights) * BLOCK_SAMPLES
    assert counts.sum() == BLOCK_SAMPLES and (abs(counts - exact) < 1).all()
    numbers = np.arange(3 * BLOCK_SAMPLES)
    chosen, places = split_samples(numbers, 1, counts)
    for block in range(3):
        inside = chosen[block * BLOCK_SAMPLES : (block + 1) * BLOCK_SAMPLES]
        assert np.bincount(inside, minlength=len(counts)).tolist() == counts.tolist()
    for source, count in enumerate(counts.tolist()):
        assert sorted(places[chosen == source].tolist()) == list(range(3 * count))
    again = [split_samples(numbers[first : first + 7], 1, counts) for first in range(0, len(numbers), 7)]
    assert np.array_equal(np.concatenate([part[0] for part in again]), chosen)
    assert np.array_equal(np.concatenate([part[1] for part in again]), places)
    assert not np.array_equal(split_samples(numbers, 2, counts)[0], chosen)


def test_batches_have_the_shares_and_are_the_same_however_they_are_read(sources: tuple[str, str]) -> None:
    data = opened(DataConfig(source=sources, weights=(3, 1), tokenizer="bytes", held_out=0.1))
    loader = BatchLoader(data, batch=100, seed=1)
    batches = [loader.rows(step) for step in range(10)]
    letters = torch.cat([batch["input_ids"] for batch in batches]).flatten().bincount(minlength=256)
    assert letters[ord("a")] / (letters[ord("a")] + letters[ord("b")]) == pytest.approx(0.75, abs=0.005)
    parts = [loader.rows(4, first, 25)["input_ids"] for first in range(0, 100, 25)]
    assert torch.equal(torch.cat(parts), batches[4]["input_ids"])
    seen = {tuple(row) for batch in batches for row in batch["input_ids"].tolist() if ord("b") in row}
    assert data.parts[0].rows * 3 < data.parts[1].rows and seen
    held_out = torch.cat([batch["input_ids"] for batch in loader.validation_batches(1000)])
    assert {ord("a"), ord("b")} <= set(held_out.flatten().tolist())


def test_sources_with_weights_share_a_tokenizer_and_change_the_digest(sources: tuple[str, str]) -> None:
    first, other = (opened(DataConfig(source=sources, weights=weights)) for weights in ((3, 1), (1, 3)))
    names = {part.tokenizer.digest for part in first.parts if part.tokenizer}
    assert len(names) == 1 and first.digest != other.digest
    assert "75.0%" in first.describe() and "25.0%" in first.describe()


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        ((1,), "1 weights for 2 sources: write one for each"),
        ((1, 0), "weights must be positive numbers"),
        ((1, -1), "weights must be positive numbers"),
        ((1, float("nan")), "weights must be positive numbers"),
        ((1, 1e-4), "a weight is less than 0.001 of the sum of all"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: tuple[float, ...], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        DataConfig(source=("a", "b"), weights=weights)


def test_text_and_instructions_do_not_mix_by_weight(sources: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"prompt": "one", "completion": "two"}\n' * 50)
    data = DataConfig(source=(sources[0], str(tmp_path / "c.jsonl")), weights=(1, 1), tokenizer="bytes")
    with pytest.raises(InputError, match=r"^data.weights: a.txt and c.jsonl are data of different kinds"):
        opened(data)
