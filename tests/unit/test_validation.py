"""Published rows against the cost model: the errors of today are frozen, and can only shrink.

`python tests/unit/test_validation.py` writes smaller ones down, and the intervals (catalog/accuracy.json). It refuses
to write larger ones unless it is told `--larger`.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from meshwright.catalog import read as catalog
from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.planner.cost.cost_context import RuntimeModel
from meshwright.planner.validation import score
from meshwright.planner.validation.benchmark_cases import benchmark_case, nanotron_stage_split
from meshwright.planner.validation.chosen import chosen_plans, published_runs
from meshwright.planner.validation.intervals import accuracy_data, interval_coverage
from meshwright.planner.validation.memory_meters import MemoryMeter
from meshwright.planner.validation.score import (
    StepPrediction,
    ValidationReport,
    predict_case,
    predict_rows,
    relative_errors,
    validation_report,
)
from meshwright.planner.validation.tables import MeasurementRow, read_famous_runs, read_measurements
from meshwright.planner.validation.tables import read_collectives as collective_rows

FROZEN = Path(__file__).parent / "golden" / "validation.json"
ACCURACY = Path(catalog.__file__).parent / "accuracy.json"
NOISE = 0.002


@lru_cache(maxsize=2)
def predicted(counted: bool) -> tuple[dict[str, list[StepPrediction]], Counter[tuple[str, str]]]:
    """The predictions of the rows that count for errors, or of the others. Each row is predicted once."""
    return predict_rows(row for row in read_measurements() if (row.text("core") == "1") == counted)


@lru_cache(maxsize=1)
def core() -> ValidationReport:
    """The scores of the rows that count for errors."""
    return validation_report(*predicted(True))


@lru_cache(maxsize=1)
def every_prediction() -> list[StepPrediction]:
    return [each for part in by_family().values() for each in part]


@lru_cache(maxsize=1)
def by_family() -> dict[str, list[StepPrediction]]:
    counted, others = predicted(True)[0], predicted(False)[0]
    return {name: [*counted.get(name, ()), *others.get(name, ())] for name in counted | others}


def now() -> dict[str, float]:
    """Every error that is frozen, by name."""
    found = {"time, median over families": core().median_of_medians}
    for family in core().families:
        if family.time is not None:
            found |= {
                f"time {family.name}, median": family.time.median,
                f"time {family.name}, p90": family.time.ninetieth,
            }
    for memory in core().memory:
        name = f"memory {memory.family} ({memory.meter})"
        found |= {
            f"{name}, median": memory.errors.median,
            f"{name}, p90": memory.errors.ninetieth,
            f"{name}, refused": float(memory.refused),
        }
    for name, each in score.score_collectives(collective_rows()).items():
        found[f"collectives: {name}, median"] = each.median
    return {name: round(value, 4) for name, value in found.items()}


def test_the_gain_of_compiled_blocks_is_that_of_published_pairs_of_runs() -> None:
    found = {each.family: each for each in core().compiled}
    assert {name: each.pairs for name, each in found.items()} == {"torchtitan-8b": 2, "torchtune": 1}
    titan = found["torchtitan-8b"]
    assert titan.measured == pytest.approx(0.862, abs=0.001) and titan.predicted == pytest.approx(0.889, abs=0.001)
    assert found["torchtune"].measured < found["torchtune"].predicted < 0.92  # its loss is compiled too


def test_errors_on_published_rows_are_at_most_the_frozen_ones() -> None:
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    found = now()
    assert found.keys() == frozen.keys()
    assert {name: (found[name], limit) for name, limit in frozen.items() if found[name] > limit + NOISE} == {}


def test_the_median_over_families_of_the_median_time_error_is_below_8_percent() -> None:
    assert core().median_of_medians < 0.08


def test_korthikantis_steps_are_within_four_percent_on_average() -> None:
    rows = [row for row in read_measurements() if row.text("family") == "korthikanti2022"]
    found = [case for case in map(benchmark_case, rows) if not isinstance(case, str) and case.seconds]
    predicted = [predict_case(case) for case in found]
    off = [
        abs(each.seconds / case.seconds - 1)
        for each, case in zip(predicted, found, strict=True)
        if not isinstance(each, str)
    ]
    assert len(off) == 8 and sum(off) / len(off) < 0.04


def test_fewer_than_one_in_a_hundred_plans_that_ran_are_refused() -> None:
    assert sum(memory.refused for memory in core().memory) <= 0.01 * sum(memory.ran for memory in core().memory)
    ran = [each for each in every_prediction() if each.case.ran]
    assert len(ran) > 1500 and sum(each.refused for each in ran) < 0.01 * len(ran)


def test_most_plans_that_did_not_fit_are_refused() -> None:
    failed = [each for each in every_prediction() if each.case.row.text("status") in ("oom", "crash_or_oom")]
    assert len(failed) > 500 and sum(each.refused for each in failed) > 0.6 * len(failed)


def test_famous_runs_are_predicted_within_20_percent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--famous", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) == len(read_famous_runs()) == 13 and all(run["source"] and run["notes"] for run in runs)
    assert all(abs(run["error"]) <= 0.2 and run["inside"] for run in runs)
    assert main(["validate", "--famous"]) == 0
    assert "DeepSeek-V3, 2048 H800" in capsys.readouterr().out


def test_chosen_plans_are_compared_with_the_best_published_utilization() -> None:
    rows = (row for row in read_measurements() if row.text("family") == "korthikanti2022" and row.text("gpus") == "8")
    found = predict_rows(rows)[0]["korthikanti2022"]
    (chosen,) = chosen_plans(found)
    best = max(published_runs(found), key=lambda run: run.mfu)
    assert chosen.best == best and 0.3 < best.mfu < 0.7
    assert chosen.low < chosen.mfu < 1.1 * best.mfu and chosen.verdict != "above"
    low, high = chosen._replace(mfu=0.9 * best.mfu), chosen._replace(low=1.01 * best.mfu, mfu=1.2 * best.mfu)
    assert (low.verdict, high.verdict) == ("below", "above")


def test_five_trials_by_expected_gain_leave_little_regret_in_most_groups() -> None:
    groups = [group for part in by_family().values() for group in score._comparable_groups(part)]
    left = sorted(score._regret_after_trials(group) for group in groups)
    first = sorted(score._ranking_regrets([each for group in groups for each in group]))
    assert len(groups) >= 28 and left[len(left) // 2] <= 0.01 and sum(each <= 0.05 for each in left) >= 27
    assert first[len(first) // 2] <= 0.05 and sum(each > 0.15 for each in first) > 5 * sum(each > 0.15 for each in left)


def test_intervals_cover_nine_of_ten_rows_of_families_that_they_have_not_seen() -> None:
    coverage = interval_coverage(every_prediction())
    assert all(0.85 <= coverage[quantity][""] <= 0.95 for quantity in ("time", "memory"))


def test_the_catalog_has_the_errors_and_features_of_the_published_rows() -> None:
    found, kept = accuracy_data(every_prediction()), catalog.accuracy()
    assert found["measured"] == kept["measured"]
    for quantity in ("time", "memory"):
        assert found[quantity]["scale"] == pytest.approx(kept[quantity]["scale"], abs=0.01)
        for name, limits in kept[quantity]["quantiles"].items():
            assert found[quantity]["quantiles"][name] == pytest.approx(limits, abs=0.1)


def test_every_row_is_predicted_or_has_a_reason() -> None:
    rows = [row for row in read_measurements() if row.text("core") == "1"]
    left = sum(count for _, _, count in core().left)
    found = {family.name: family for family in core().families}
    assert left < 0.4 * len(rows) and all(reason for _, reason, _ in core().left)
    assert found["mosaic-a100-40"].rows == 51


def row(**cells: str) -> MeasurementRow:
    """A row of a plain GPT under Megatron-LM, with changes."""
    given = {
        "system": "Megatron-LM",
        "model": "GPT",
        "layers": "4",
        "hidden": "1024",
        "heads": "16",
        "vocab": "51200",
        "seq": "1024",
        "gpu": "A100",
        "gpu_mem_gb": "80",
        "gpus": "8",
        "gpus_per_node": "8",
        "tp": "2",
        "pp": "2",
        "dp": "2",
        "zero_stage": "0",
        "micro_batch": "1",
        "global_batch": "16",
        "prec_class": "fp16",
        "mlp_type": "gelu",
        "status": "ok",
        "step_time_s": "1.0",
        "activation_ckpt": "none",
    }
    return MeasurementRow({**given, **cells})


def test_a_row_becomes_the_plan_that_it_states() -> None:
    case = benchmark_case(row(activation_ckpt="full", vpp="2"))
    assert not isinstance(case, str)
    assert [plan.name for plan in case.plans] == ["dp2.tp2.pp2.mb1.interleaved2.rc-full"]
    assert case.job.cluster.groups[0].device.name == "a100-80gb"


def test_what_a_source_leaves_out_is_the_fastest_plan_that_fits() -> None:
    case = benchmark_case(row(system="Megatron-Core 0.8", activation_ckpt="", prec_class="bf16"))
    assert not isinstance(case, str)
    assert len(case.plans) > 3
    chosen = predict_case(case)
    assert not isinstance(chosen, str)
    assert "rc" not in chosen.plan.name


def test_an_unknown_framework_is_taken_for_plain_modules_of_torch() -> None:
    case = benchmark_case(row(system="Someone's trainer"))
    assert not isinstance(case, str) and case.practice == RuntimeModel(fleeting=True, once_per_step=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"task": "q-lora"}, "adapters or single layers are not modelled"),
        ({"layers": ""}, "the source does not state the model"),
        ({"micro_batch": "", "global_batch": ""}, "the source states no batch"),
        ({"gpu": "TPUx"}, "Meshwright cannot run this plan: device tpux with 80 GB is not in the catalog"),
        ({"dp": "3"}, "Meshwright has no legal plan with these degrees"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(change: dict[str, str], reason: str) -> None:
    assert benchmark_case(row(**change)) == reason


@pytest.mark.parametrize(
    ("kind", "meter"),
    [
        ("rank-0 peak GiB", MemoryMeter.first),
        ("torch allocated_bytes peak on the LAST rank, GiB", MemoryMeter.last),
        ("max_reserved GiB, max over ranks", MemoryMeter.reserved),
        ("nvidia-smi GB", MemoryMeter.device),
        ("peak allocated GB (torch), hot rank", MemoryMeter.peak_rank),
    ],
)
def test_a_meter_is_read_from_what_the_source_says(kind: str, meter: MemoryMeter) -> None:
    case = benchmark_case(row(mem_kind=kind, mem_gb="10"))
    assert not isinstance(case, str) and case.meter == meter


def test_stages_by_flops_leave_the_head_room() -> None:
    assert nanotron_stage_split(row(layers="28", hidden="3072", ffn="8192", vocab="131072"), 4) == (8, 8, 8, 4)


def test_errors_are_medians_of_sizes_and_keep_their_sign() -> None:
    assert relative_errors([-0.1, -0.3, 0.2]) == pytest.approx((3, 0.2, 0.28, -0.1))


def test_a_table_of_ones_own_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "mine.csv"
    cells = row(family="mine").cells
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(cells))
        writer.writeheader()
        writer.writerow(cells)
    assert main(["validate", "--table", str(table), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["families"][0]["name"] == "mine" and found["families"][0]["time"]["rows"] == 1


def test_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "nobody"]) == 2
    assert "no row of the published table has 'nobody' in its family" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("family,stp_time_s", "column 'stp_time_s' is not a column of the built-in table; did you mean 'step_time_s'?"),
        ("when,what", "column 'when' is not a column of the built-in table"),
        ("family,family,gpus,", "column '' is not a column of the built-in table"),
    ],
)
def test_a_table_with_an_unknown_column_is_refused(
    header: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(f"{header}\n1,2\n", encoding="utf-8")
    assert main(["validate", "--table", str(table)]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_measurements(tmp_path / "none.csv")


if __name__ == "__main__":
    before = json.loads(FROZEN.read_text(encoding="utf-8")) if FROZEN.exists() else {}
    after = now()
    larger = {name: (before[name], value) for name, value in after.items() if value > before.get(name, value) + NOISE}
    if larger and "--larger" not in sys.argv:
        sys.exit("larger than before: " + json.dumps(larger, indent=2))
    FROZEN.write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")
    ACCURACY.write_text(json.dumps(accuracy_data(every_prediction()), indent=2) + "\n", encoding="utf-8")
