"""Fleets that fail: the published table, the formula beside the play, spares, and what a person can get wrong."""

from __future__ import annotations

import json
import math

import pytest
from jobs import quickest

from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.planner.simulate.fleet import (
    SECONDS_PER_HOUR,
    TABLE_DEVICES,
    FleetOutcome,
    FleetSpec,
    RecoveryPolicy,
    expected_fractions,
    fleet_table,
    mean_time_between_failures,
    optimal_save_interval,
    parse_failure_rate,
    simulate_fleet,
    spares_needed,
)

LLAMA3 = 1.973e-5
DAY = 24 * SECONDS_PER_HOUR
PUBLISHED = (
    (76.9, 62.5, 42.3, 28.6),
    (85.4, 77.4, 65.0, 55.0),
    (93.1, 87.2, 76.8, 67.3),
    (96.6, 94.0, 89.3, 84.8),
    (99.2, 98.6, 97.4, 96.1),
    (99.65, 99.4, 99.1, 98.8),
    (99.72, 99.6, 99.4, 99.3),
)
"""Monte Carlo of an independent simulation: the same rate, 54 days, 12 seeds; policies as in TABLE."""
FORMULA = {
    (0, 0): 76.6,
    (0, 1): 62.3,
    (0, 2): 42.3,
    (0, 3): 28.5,
    (1, 0): 85.3,
    (1, 3): 55.1,
    (4, 0): 99.2,
    (4, 3): 96.1,
}


def fleet(devices: int = 16384, rate: float = LLAMA3, **changes: object) -> FleetSpec:
    return FleetSpec.model_validate({"devices": devices, "failures_per_device_hour": rate, **changes})


def plain(save: float, recovery: float) -> RecoveryPolicy:
    return RecoveryPolicy(save=save, durable=0.0, detect=recovery, rebuild=0.0, restore=0.0)


@pytest.fixture(scope="module")
def table() -> list[FleetOutcome]:
    return [cell.outcome for cell in fleet_table(LLAMA3)]


def test_the_published_fleet_table_is_reproduced_within_half_a_point(table: list[FleetOutcome]) -> None:
    for at, outcome in enumerate(table):
        published = PUBLISHED[at // len(TABLE_DEVICES)][at % len(TABLE_DEVICES)]
        assert 100 * outcome.shares.progress == pytest.approx(published, abs=0.5)


def test_the_play_is_within_four_tenths_of_a_point_of_the_formula(table: list[FleetOutcome]) -> None:
    for outcome in table:
        assert outcome.shares.progress == pytest.approx(outcome.expected.progress, abs=0.004)


def test_the_formula_is_daly_s(table: list[FleetOutcome]) -> None:
    for (row, column), percent in FORMULA.items():
        assert 100 * table[row * len(TABLE_DEVICES) + column].expected.progress == pytest.approx(percent, abs=0.1)


def test_every_term_of_the_loss_is_played_as_the_formula_says() -> None:
    policy = RecoveryPolicy(save=30.0, durable=90.0, detect=60.0, rebuild=200.0, restore=100.0)
    outcome = simulate_fleet(fleet(65536), policy, 200 * DAY)
    assert sum(outcome.shares) == pytest.approx(1.0) == pytest.approx(sum(outcome.expected))
    for played, formula in zip(outcome.shares, outcome.expected, strict=True):
        assert played == pytest.approx(formula, rel=0.05, abs=0.001)


def test_the_published_times_between_failures_are_those_of_the_rates() -> None:
    hours = {"llama3": (49.5, 3.09, 0.507), "rsc-1": (28.8, 1.80, 0.295), "rsc-2": (80.0, 5.0, 0.82)}
    for name, published in hours.items():
        rate = parse_failure_rate(name).per_device_hour
        for devices, mean in zip((1024, 16384, 100_000), published, strict=True):
            assert mean_time_between_failures(rate, devices) / SECONDS_PER_HOUR == pytest.approx(mean, rel=0.01)


def test_llama_3_has_90_percent_goodput_with_async_saves_and_10_min_recovery() -> None:
    assert simulate_fleet(fleet(16384), RecoveryPolicy(), 54 * DAY).shares.progress > 0.9


@pytest.mark.parametrize(("recovery", "percent"), [(600.0, 55), (180.0, 81)])
def test_eighteen_minutes_between_failures_give_what_was_published(recovery: float, percent: int) -> None:
    mean = 18 * 60.0
    best = expected_fractions(plain(1.0, recovery), mean, optimal_save_interval(1.0, mean)).progress
    assert 100 * best == pytest.approx(percent, abs=0.5)


@pytest.mark.parametrize("save", [0.04, 1.0, 60.0, 600.0])
def test_daly_s_interval_is_the_best_one(save: float) -> None:
    mean = mean_time_between_failures(LLAMA3, 32768)
    policy, best = plain(save, 300.0), optimal_save_interval(save, mean)
    at_best = expected_fractions(policy, mean, best).progress
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert expected_fractions(policy, mean, best * factor).progress < at_best
    exact = max(expected_fractions(policy, mean, best * (0.9 + 0.002 * step)).progress for step in range(101))
    assert at_best == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize(
    ("devices", "hours", "spares"), [(16384, 24, 18), (100_000, 24, 70), (16384, 72, 40), (100_000, 72, 180)]
)
def test_spares_for_999_in_1000_are_the_published_numbers(devices: int, hours: int, spares: int) -> None:
    assert spares_needed(fleet(devices, repair=hours * SECONDS_PER_HOUR)) == spares


def test_enough_spares_cost_nothing_and_too_few_make_all_wait() -> None:
    waits = [
        simulate_fleet(fleet(spares=spares), RecoveryPolicy(), 60 * DAY).shares.waiting for spares in (18, 8, 2, 0)
    ]
    assert waits == sorted(waits) and waits[0] < 0.001 and waits[-1] > 0.5
    assert simulate_fleet(fleet(), RecoveryPolicy(), 60 * DAY).shares.waiting == 0.0


def test_without_a_spare_progress_is_what_one_repair_at_a_time_leaves() -> None:
    """Up for M on average, then down for the repair and the recovery."""
    few = fleet(1024, spares=0, repair=10 * SECONDS_PER_HOUR)
    up = few.mean_between_failures
    outcome = simulate_fleet(few, plain(1.0, 600.0), 3000 * DAY, runs=4)
    assert outcome.shares.waiting == pytest.approx(
        10 * SECONDS_PER_HOUR / (up + 10 * SECONDS_PER_HOUR + 600.0), rel=0.05
    )


def test_the_same_seed_gives_the_same_months_and_another_seed_others() -> None:
    one, again, other = (simulate_fleet(fleet(), RecoveryPolicy(), 30 * DAY, seed=seed).shares for seed in (1, 1, 2))
    assert one == again != other


def test_three_months_of_100000_devices_are_played_in_seconds() -> None:
    seconds, outcome = quickest(lambda: simulate_fleet(fleet(100_000, spares=70), RecoveryPolicy(), 90 * DAY), 3.0)
    assert seconds < 3.0 and outcome.failures > 3000


def test_rates_are_read_as_names_numbers_and_times() -> None:
    assert parse_failure_rate("Llama3").per_device_hour == LLAMA3 == parse_failure_rate("1.973e-5").per_device_hour
    assert parse_failure_rate("50677 h").per_device_hour == pytest.approx(LLAMA3, rel=1e-3)
    assert parse_failure_rate("5.7853 y").per_device_hour == pytest.approx(LLAMA3, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--days", "0"], "--days 0 must be above 0"),
        (["--days", "nan"], "--days nan must be above 0"),
        (["--days", "3", "--failures", "lama3"], "did you mean 'llama3'?"),
        (["--days", "3", "--failures", "0"], "failures '0': must be above 0"),
        (["--days", "3", "--failures", "-2"], "failures '-2': must be above 0"),
        (["--days", "3", "--save", "soon"], "--save 'soon': expected a quantity"),
        (["--days", "3", "--save", "0"], "Daly's optimum is undefined for saves that take 0 s"),
        (["--days", "3", "--interval", "0"], "the interval between saves must be above 0 s"),
        (["--days", "3", "--detect=-1 s"], "--detect '-1 s': a time must be at least 0"),
        (["--days", "3", "--spares", "-1"], "--spares -1 must be at least 0"),
        (["--days", "3", "--slow", "1:2"], "--slow applies to one step: leave out --days"),
        (["--days", "3", "--failures", "100"], "no work is ever saved"),
    ],
)
def test_what_is_wrong_with_a_fleet_is_said_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--cluster", "2048x8:h100", *arguments]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1


def test_the_screen_of_a_fleet_fits_100_columns_and_its_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "--cluster", "2048x8:h100", "--days", "30", "--spares", "4", "--save", "90"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100 and "4 spare nodes" in shown and "waiting for nodes" in shown
    assert main([*asked, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert math.isclose(sum(data["shares"].values()), 1.0) and data["goodput"] == data["shares"]["progress"]


def test_the_fleet_table_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--fleet-table", "--days", "2"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[2:])) <= 100 and shown.count("copy to a peer") == 3
    assert main(["simulate", "--fleet-table", "--days", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 28


def test_a_run_in_which_nothing_can_be_saved_is_refused() -> None:
    with pytest.raises(InputError, match="no work is ever saved"):
        simulate_fleet(fleet(16384, rate=1.0), RecoveryPolicy(), DAY)
