"""What a run costs: the published figures of LLaMA, objectives, deadlines and wrong input."""

from __future__ import annotations

import datetime
import functools
import json

import pytest
from jobs import named_job

from meshwright.cli.main import main
from meshwright.core.errors import InputError, NothingFits
from meshwright.planner.search.best_plans import RankedPlan, SearchObjective
from meshwright.planner.search.ranking import search_plans, with_used_devices
from meshwright.planner.search.run_cost import run_cost, seconds_until, with_prices
from meshwright.spec.job import Job

PLAN_7B = ("plan", "--model", "llama2-7b", "--cluster", "4x8:h100", "--batch", "256", "--seq", "4096", "--top", "1")


def job() -> Job:
    return named_job("llama2-7b", "4x8:h100", 256, 4096)


def test_energy_and_carbon_of_llama_65b_are_the_published_ones() -> None:
    """arXiv 2302.13971, table 15: 1,022,362 hours of A100-80GB are 449 MWh and 173 t."""
    question = named_job("llama-65b", "256x8:a100-80gb", 2048, 2048)
    priced = search_plans(named_job("llama-65b", "8x8:a100-80gb", 512, 2048), 1).chosen
    cost = run_cost(question, priced, 1.4e12)
    assert cost.energy is not None and cost.carbon is not None
    scale = 1_022_362 / cost.device_hours
    assert scale * cost.energy / 1e3 == pytest.approx(449, abs=1) and scale * cost.carbon / 1e3 == pytest.approx(
        173, abs=1
    )


def test_a_run_costs_steps_times_devices_times_price() -> None:
    question = job().but(cluster=with_prices(job().cluster, 2.0))
    cost = run_cost(question, search_plans(question, 1).chosen, 1e12)
    assert cost.steps == -(-(10**12) // (256 * 4096))
    assert cost.device_hours == pytest.approx(32 * cost.seconds / 3600) and cost.money == pytest.approx(
        2 * cost.device_hours
    )


def test_sharded_states_are_stored_once_and_copies_as_often_as_there_are_replicas() -> None:
    for z, copies in ((0, 32.0), (3, 1.0)):
        pins = {"zero": z, "tp": 1, "pp": 1, "cp": 1, "dp_replicate": 32 if z == 0 else 1}
        question = named_job("gpt2", "4x8:h100", 256, 1024).but(pins=pins)
        found = search_plans(question, 1).chosen
        assert run_cost(question, found, 1e9).copies == pytest.approx(copies, rel=0.02), found.name


def test_own_prices_come_before_those_of_the_catalog() -> None:
    assert with_prices(job().cluster, None).price == pytest.approx(32 * 4.916)
    group = job().cluster.groups[0]
    owned = job().cluster.but(groups=(group.but(device=group.device.but(price=1.5)),))
    assert with_prices(owned, None).price == 32 * 1.5 and with_prices(owned, 2.0).price == 64


@functools.cache
def used(objective: SearchObjective, longest: float = float("inf")) -> tuple[int, RankedPlan]:
    question = job().but(cluster=with_prices(job().cluster, None))
    answer = search_plans(question, 1, objective, longest=longest)
    return with_used_devices(question, answer).cluster.devices, answer.chosen


def test_the_least_energy_and_the_lowest_price_use_no_more_device_hours_than_the_fastest_plan() -> None:
    fastest, found = used(SearchObjective.fastest)
    for objective in (SearchObjective.energy, SearchObjective.cheapest):
        devices, cheap = used(objective)
        assert devices * cheap.estimate.time.step <= fastest * found.estimate.time.step * (1 + 1e-9)


def test_a_run_that_must_end_in_time_takes_the_fewest_devices_that_are_fast_enough() -> None:
    _, fastest = used(SearchObjective.fastest)
    devices, found = used(SearchObjective.fewest, 1.8 * fastest.estimate.time.step)
    assert devices < 32 and found.estimate.time.step <= 1.8 * fastest.estimate.time.step
    with pytest.raises(NothingFits, match="no plan is fast enough"):
        used(SearchObjective.fewest, 0.5 * fastest.estimate.time.step)


def test_a_date_counts_to_its_end() -> None:
    noon = datetime.datetime(2027, 3, 1, 12, tzinfo=datetime.UTC)
    assert seconds_until("2027-03-02", noon) == 1.5 * 86400
    with pytest.raises(InputError, match="is in the past"):
        seconds_until("2027-02-28", noon)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--price", "0"), "--price 0.0 must be above 0"),
        (("--tokens", "many"), "--tokens 'many' is not a number of tokens"),
        (("--tokens", "0"), "--tokens '0' is not a number of tokens"),
        (("--tokens", ""), "--tokens '' is not a number of tokens"),
        (("--price", "nan"), "--price nan must be above 0"),
        (("--tokens", "1T", "--by", "2020-01-01"), "--by 2020-01-01 is in the past: name a day from 20"),
        (("--tokens", "1T", "--by", "2999-01-01", "--objective", "headroom"), "leave --by 2999-01-01 out"),
        (("--tokens", "1T", "--by", "soon"), "--by 'soon' is not a date"),
        (("--by", "2999-01-01"), "needs --tokens"),
    ],
)
def test_a_wrong_length_or_price_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN_7B, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_command_prints_and_writes_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN_7B, "--tokens", "1T", "--price", "2"]) == 0
    out = capsys.readouterr().out.replace("\n    ", " ")
    assert "1.00 T tokens: 953,675 steps" in out and "at 2.000 per device-hour (your price)" in out and "t CO2" in out
    assert main([*PLAN_7B, "--tokens", "1T", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["run"]
    assert cost["money"] == pytest.approx(4.916 * cost["device_hours"])
    assert main([*PLAN_7B, "--tokens", "1T"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert " USD at 4.916 USD per h100-hour: a price of 2024-12 (AWS EC2 Capacity Blocks" in out
    assert "of a run of 200 steps" not in out, "compile time is spread over the run of --tokens"
