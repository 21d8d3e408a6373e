"""The order of the data: permutations, sample numbers, counter-based draws, masking. No torch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.dataset import IGNORED_LABEL, mask_tokens
from meshwright.data.sampler import GOLDEN_GAMMA, permute_indices, random_uniform, random_words, sample_rows, splitmix64

few = settings(max_examples=60, deadline=None)


@few
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_visits_every_row_exactly_once(size: int, key: int) -> None:
    rows = permute_indices(np.arange(size), size, key)
    assert np.array_equal(np.sort(rows), np.arange(size))


@few
@given(seed=st.integers(0, 2**40), size=st.integers(1, 500), epoch=st.integers(0, 10**6))
def test_an_epoch_visits_every_row_exactly_once(seed: int, size: int, epoch: int) -> None:
    assert np.array_equal(np.sort(sample_rows(seed, epoch * size, size, size)), np.arange(size))


@few
@given(
    seed=st.integers(0, 2**40),
    size=st.integers(1, 500),
    first=st.integers(0, 10**9),
    counts=st.lists(st.integers(1, 40), max_size=8),
)
def test_any_cut_of_the_sample_numbers_gives_the_same_rows(seed: int, size: int, first: int, counts: list[int]) -> None:
    whole = sample_rows(seed, first, sum(counts), size)
    starts = np.cumsum([first, *counts])
    parts = [sample_rows(seed, int(start), count, size) for start, count in zip(starts, counts, strict=False)]
    assert np.array_equal(np.concatenate(parts) if parts else np.zeros(0), whole)


def test_rows_of_an_empty_set_are_an_error_and_not_an_endless_search() -> None:
    with pytest.raises(AssertionError, match="no row"):
        sample_rows(1, 0, 1, 0)


def test_two_seeds_and_two_epochs_give_different_orders() -> None:
    orders = [tuple(sample_rows(seed, epoch * 1000, 1000, 1000)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4


def test_the_order_is_frozen_so_that_a_run_goes_on_under_a_later_version() -> None:
    assert sample_rows(1, 0, 8, 1000).tolist() == [913, 811, 198, 604, 932, 280, 265, 590]
    assert sample_rows(2**33, 10**12 + 996, 8, 1000).tolist() == [648, 423, 496, 193, 132, 617, 799, 663]
    inputs, labels = mask_tokens(np.full((1, 40), 65), np.array([12345]), 1, MASK, [END, MASK], VOCABULARY)
    assert np.flatnonzero(labels[0] != IGNORED_LABEL).tolist() == [9, 12, 19, 23, 25, 29, 30, 39] and inputs[
        labels != IGNORED_LABEL
    ].tolist() == [
        132,
        257,
        257,
        257,
        257,
        65,
        257,
        257,
    ]


def test_a_permutation_is_uncorrelated_and_scatters_neighbours() -> None:
    size = 100_000
    rows = sample_rows(7, 0, size, size)
    assert abs(np.corrcoef(np.arange(size), rows)[0, 1]) < 0.01  # 3 sigma of chance
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.01
    # how many rows stay where they were is Poisson with mean 1
    assert (rows == np.arange(size)).sum() < 8


@pytest.mark.parametrize("epochs", [1000, pytest.param(4000, marks=pytest.mark.soak)])
def test_each_row_falls_at_each_place_equally_often_over_the_epochs(epochs: int) -> None:
    size = 5
    seen = np.zeros((size, size))
    order = sample_rows(3, 0, size * epochs, size).reshape(epochs, size)
    for place in range(size):
        seen[place] = np.bincount(order[:, place], minlength=size)
    # chi-square with 16 degrees of freedom: 39.3 is its 0.1 % point
    assert ((seen - epochs / size) ** 2 / (epochs / size)).sum() < 39.3


def test_a_set_of_more_rows_than_memory_could_list_answers_at_once() -> None:
    size = 10**15
    rows = sample_rows(1, 10**14, 64, size)
    assert len(set(rows.tolist())) == 64 and rows.min() >= 0 and rows.max() < size


def test_the_mixer_is_splitmix64() -> None:
    state = np.arange(1, 4, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)  # seed 0; the published first three outputs
    assert [int(word) for word in splitmix64(state)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_a_row_of_draws_depends_on_its_own_counter_alone() -> None:
    counters = np.array([5, 6, 7])
    assert np.array_equal(random_words(9, counters, 4)[1:2], random_words(9, np.array([6]), 4))
    values = random_uniform(1, np.arange(20_000), 4)
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.004 and abs(values.var() - 1 / 12) < 0.002


MASK, END, VOCABULARY = 257, 256, 258


def _masked(rows: int, length: int, first: int = 0, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 256, size=(rows, length))
    tokens[:, ::50] = END
    return tokens, *mask_tokens(tokens, np.arange(first, first + rows), seed, MASK, [END, MASK], VOCABULARY)


def test_masking_hides_fifteen_percent_in_the_ratio_eighty_ten_ten() -> None:
    tokens, inputs, labels = _masked(400, 500)
    chosen = labels != IGNORED_LABEL
    ordinary = tokens != END
    assert not chosen[~ordinary].any()
    assert np.array_equal(labels[chosen], tokens[chosen]) and np.array_equal(inputs[~chosen], tokens[~chosen])
    assert chosen[ordinary].mean() == pytest.approx(0.15, abs=0.004)
    assert (inputs[chosen] == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert (inputs[chosen] == tokens[chosen]).mean() == pytest.approx(0.1, abs=0.02)


def test_masking_is_a_pure_function_of_seed_and_sample_number() -> None:
    tokens, inputs, labels = _masked(6, 40)
    again = mask_tokens(tokens[2:4], np.arange(2, 4), 1, MASK, [END, MASK], VOCABULARY)
    assert np.array_equal(again[0], inputs[2:4]) and np.array_equal(again[1], labels[2:4])
    assert not np.array_equal(mask_tokens(tokens, np.arange(6, 12), 1, MASK, [END], VOCABULARY)[1], labels)
    assert not np.array_equal(mask_tokens(tokens, np.arange(6), 2, MASK, [END], VOCABULARY)[1], labels)


def test_every_row_has_a_label_however_short_it_is() -> None:
    labels = mask_tokens(np.full((500, 2), 65), np.arange(500), 1, MASK, [END], VOCABULARY)[1]
    assert (labels != IGNORED_LABEL).any(axis=1).all()
    only_special = mask_tokens(np.full((5, 2), END), np.arange(5), 1, MASK, [END], VOCABULARY)[1]
    assert (only_special == IGNORED_LABEL).all()
