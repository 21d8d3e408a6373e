"""What fits: models without a name have the size that was asked for, charts grow with the devices, the two wrong claims
are refuted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import answering_once, cluster, small_job

from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.model_parser import (
    model_title,
    parse_model_size,
    read_model,
    read_sizes,
    scalable_sizes,
    sizes_for_parameters,
)
from meshwright.planner.search import fit, infeasible, ranking
from meshwright.planner.search.advice import rank_improvements
from meshwright.planner.search.fit import (
    ANY_PLAN,
    STRATEGIES,
    bytes_per_parameter,
    device_counts,
    fit_chart,
    largest_model,
    smallest_cluster,
    split_by_node_type,
    sub_cluster,
)
from meshwright.planner.search.ranking import search_plans
from meshwright.report.text import TEXT_COLUMNS, display_width
from meshwright.spec.estimate import FitStatus
from meshwright.spec.job import Job
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import Workload

GB = 1e9
WORK = Workload(sequence=2048, precision="bf16", reduce="bf16")
"""With the bytes per parameter of the ZeRO paper."""


@pytest.fixture(scope="module", autouse=True)
def searched_once() -> Iterator[None]:
    """Text and JSON in both languages, and several charts, ask the same."""
    with (
        answering_once(ranking, "search_plans"),
        answering_once(fit, "find_best_plan"),
        answering_once(infeasible, "find_best_plan"),
    ):
        yield


@given(st.floats(8.0, 13.5))
@settings(max_examples=40, deadline=None)
def test_a_model_of_a_size_has_that_size_within_7_percent_and_its_sizes_divide(exponent: float) -> None:
    parameters = 10.0**exponent
    sizes = sizes_for_parameters(parameters)
    assert read_model(f"{parameters / 1e6:.3f}m").parameters == pytest.approx(parameters, rel=0.07)
    assert sizes.hidden == sizes.heads * (sizes.hidden // sizes.heads) and sizes.ffn == 4 * sizes.hidden
    assert sizes.heads % 8 == 0 or sizes.hidden < 4096


def test_a_name_of_the_catalog_stands_before_a_size() -> None:
    assert model_title("gpt-1t") == "gpt-1t" and read_sizes("gpt-1t").layers == 128
    assert model_title("200b") == "gpt-200b (gpt3-175b scaled)"
    assert parse_model_size("gpt2") is None and parse_model_size("llama2-7b") is None


@pytest.mark.parametrize("name", ["1m", "0.5m", "9999999t"])
def test_a_size_that_no_model_has_is_refused_with_the_range(name: str) -> None:
    with pytest.raises(InputError, match=r"the number must be between 4\.00 M and 1000\.0 T"):
        read_sizes(name)


def test_ddp_stops_near_4_billion_and_zero_3_on_64_devices_near_175_billion() -> None:
    on, known = read_cluster("8x8:a100-80gb"), scalable_sizes()
    few, many = largest_model("DDP", sub_cluster(on, 8), WORK, known), largest_model("ZeRO-3", on, WORK, known)
    assert few is not None and 3.5 * GB < few.parameters < 4.5 * GB
    assert many is not None and 165 * GB < many.parameters < 190 * GB


@pytest.mark.soak
def test_the_chart_of_80_gigabytes_is_that_of_the_requirements() -> None:
    """DDP stops near 3.5 B however many devices; ZeRO-3 on 64 reaches some 175 B."""
    rows = {(row.strategy, row.devices): row for row in fit_chart(read_cluster("8x8:a100-80gb"), WORK)}
    ddp = {row.parameters for (strategy, _), row in rows.items() if strategy == "DDP"}
    assert len(ddp) == 1 and 3.5 * GB < min(ddp) < 4.5 * GB
    assert 165 * GB < rows["ZeRO-3", 64].parameters < 190 * GB
    for strategy in STRATEGIES:
        sizes = [rows[strategy, count].parameters for count in device_counts(read_cluster("8x8:a100-80gb"))]
        assert sizes == sorted(sizes)
    for (_, devices), row in rows.items():
        assert row.parameters <= rows[ANY_PLAN, devices].parameters * 1.02
        assert row.reserved < 80 * 2**30


def test_a_tenth_more_than_the_chart_says_does_not_fit_with_a_margin() -> None:
    wide = read_cluster("1x2:a100-80gb")
    rows = list(itertools.takewhile(lambda row: row.strategy != ANY_PLAN, fit_chart(wide, WORK)))
    assert len(rows) == 4 * 2
    for row in rows:
        model = read_model(f"{row.parameters * 1.1 / 1e6:.3f}m")
        job = Job(model=model, cluster=sub_cluster(wide, row.devices), workload=WORK.but(batch=row.devices))
        assert estimate(job, parse_plan(row.plan)).verdict != FitStatus.fits, row


@pytest.mark.parametrize(
    ("strategy", "per_parameter"), [("DDP", 16.0), ("ZeRO-1", 4.75), ("ZeRO-2", 2.875), ("ZeRO-3", 1.0)]
)
def test_a_rank_of_16_holds_what_the_paper_says(strategy: str, per_parameter: float) -> None:
    assert bytes_per_parameter(strategy, WORK, 16) == per_parameter


def test_the_smallest_cluster_fits_and_one_node_less_does_not() -> None:
    model, on = read_model("llama-65b"), read_cluster("1x8:a100-80gb")
    found = {strategy: smallest_cluster(strategy, model, on, WORK) for strategy in STRATEGIES}
    assert [found[name].devices for name in ("DDP", "ZeRO-1", "ZeRO-2")] == [0, 0, 0]
    assert found["ZeRO-1"].floor > found["ZeRO-2"].floor > on.memory
    nodes = found["ZeRO-3"].nodes
    verdicts = []
    for count in (nodes, nodes - 1):
        job = Job(
            model=model,
            cluster=sub_cluster(on.but(groups=(on.groups[0].but(nodes=64),)), count * 8),
            workload=WORK.but(batch=count * 8),
        )
        verdicts.append(estimate(job, parse_plan(f"dp{count * 8}.z3.rc-full")).verdict)
    assert verdicts[0] == FitStatus.fits and verdicts[1] != FitStatus.fits


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    "asked",
    [
        ["--cluster", "2x1:a100-80gb"],
        pytest.param(["--cluster", "1x8:h100", "--model", "200b"], marks=pytest.mark.soak),
    ],
)
def test_the_chart_fits_100_columns_in_both_languages(
    asked: list[str], language: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *asked, "--lang", language]) == 0
    assert max(map(display_width, capsys.readouterr().out.splitlines())) <= TEXT_COLUMNS
    assert main(["fit", *asked, "--json"]) == 0
    assert {row["strategy"] for row in json.loads(capsys.readouterr().out)["rows"]} == set(STRATEGIES)


@pytest.mark.soak
def test_200b_on_64_devices_as_pp4_tp2_dp8_does_not_fit_without_zero(capsys: pytest.CaptureFixture[str]) -> None:
    ask = [
        "plan",
        "--runnable",
        "--model",
        "200b",
        "--cluster",
        "8x8:a100-80gb",
        "--batch",
        "512",
        "--seq",
        "2048",
        "--pin",
    ]
    assert main([*ask, "pp=4,tp=2,dp=8,z=0"]) == 3
    said = capsys.readouterr().err
    assert (
        " of 80.0 GiB; optimizer states are 28" in said and "without the pin zero=0 would fit (dp8.tp2.sp.pp4.z" in said
    )
    assert main([*ask, "pp=4,tp=2,dp=8", "--why"]) == 0
    assert "tensor + pipeline + data" in capsys.readouterr().out


@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=pytest.mark.soak) for each in range(3)), 3])
def test_65b_does_not_fit_on_one_device_whatever_the_zero_stage(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What one rank calls z3 is weights that wait on the host."""
    ask = ["--model", "llama-65b", "--cluster", "1x1:a100-80gb", "--batch", "8", "--seq", "2048"]
    assert main(["plan", *ask, "--runnable", "--pin", f"z={stage}"]) == 3
    assert ("needs 1.08 TiB" if stage == 3 else "needs 1.2") in capsys.readouterr().err


def test_an_improvement_is_measured_in_tokens_per_second() -> None:
    job = small_job(on=cluster(2, 2), batch=16)
    chosen = search_plans(job, 1).chosen
    step = chosen.estimate.time.step
    found = {it.name: it for it in rank_improvements(job, step, chosen=chosen.plan)}
    lossy = {"int8", "low-rank", "local"}
    assert found.keys() == {"memory", "compute", "links", "network", "batch", "bf16", *lossy}
    narrow = job.but(workload=job.workload.but(reduce="bf16"))  # in bf16 they cross already
    assert {it.name for it in rank_improvements(narrow, step)} >= lossy and "bf16" not in {
        it.name for it in rank_improvements(narrow, step)
    }
    assert all(it.speed >= 1 - 0.05 for it in found.values())
    doubled = search_plans(job.but(workload=job.workload.but(batch=32)), 1).chosen.estimate
    assert found["batch"].speed == pytest.approx(2 * step / doubled.time.step)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(["--model", "llama2-7b", "--cluster", "1x8:a100-80gb", "--batch", "64"], marks=pytest.mark.soak),
        ["--model", "bert-base", "--cluster", "1x1:v100"],
        [],
    ],
)
def test_the_six_questions_are_answered_in_order(
    asked: list[str], language: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *asked, "--advice", "--runnable", "--lang", language]) == 0
    out = capsys.readouterr().out
    assert [out.index(f"\n{number}. ") for number in range(1, 7)] == sorted(
        out.index(f"\n{number}. ") for number in range(1, 7)
    )
    assert max(map(display_width, out.splitlines())) <= TEXT_COLUMNS
    assert main(["plan", *asked, "--advice", "--runnable", "--why", "--lang", language, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["advice"]) == 7 and all(found["outcome"] != "chosen" for found in data["families"])


def test_every_kind_of_node_has_a_chart_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    on = read_cluster("1x2:a100-80gb+1x2:v100-32gb+1x2:a100-80gb")
    assert [(kind.groups[0].device.name, kind.devices) for kind in split_by_node_type(on)] == [
        ("a100-80gb", 4),
        ("v100-32gb", 2),
    ]
    assert (
        main(
            ["fit", "--model", "llama2-7b", "--cluster", "1x8:a100-80gb+1x8:v100-32gb", "--precision", "fp16", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)["kinds"]
    assert [kind["device"] for kind in found] == ["a100-80gb", "v100-32gb"]
    fewest = [{row["strategy"]: row["devices"] for row in kind["rows"]} for kind in found]
    assert fewest[0]["ZeRO-3"] < fewest[1]["ZeRO-3"]
