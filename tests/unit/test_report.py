"""Run folders as text: whole ones, ones cut off by a kill, and things that are not runs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.planner.cost.constants import CPU_HEAP_OVERHEAD, CPU_RUN_BYTES
from meshwright.report.faults import faults_text
from meshwright.report.page.run_page import MAX_CURVE_POINTS, MEMORY_COLUMNS
from meshwright.report.run import RunFolder, read_run, summarize_run
from meshwright.report.run_text import compare_runs, compare_text, decisions_text, list_decisions, run_text, speed_hint
from meshwright.report.text import align_columns, sparkline
from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup
from meshwright.spec.estimate import Estimate, MemoryBreakdown, TimeBreakdown
from meshwright.spec.job import Job, LaunchSpec, ModelSource
from meshwright.spec.job import RunConfig as RunOptions
from meshwright.spec.model import LayerSpec, ModelSpec, ParameterSpec
from meshwright.spec.plan import parse_plan
from meshwright.spec.record import AllocationEvent, MemoryTimeline, RunEvent, StepRecord
from meshwright.spec.workload import DataConfig, Workload

MIB = 2.0**20


def record(step: int, loss: float, **other: object) -> StepRecord:
    fields = {
        "tokens": 1000,
        "gradient_norm": 1.0,
        "lr": 1e-3,
        "seconds": 0.5,
        "data_seconds": 0.05,
        "exposed": {"data": 0.1, "pipeline": 0.15},
    }
    return StepRecord.model_validate(
        {"step": step, "loss": loss, "memory": {"parameters": 4 * MIB, "total": 30 * MIB}, **fields, **other}
    )


def job() -> Job:
    link = Link(name="shared memory", bandwidth=1e9)
    device = Device(name="core", memory=2**30, bandwidth=1e10, peak={"fp32": 1e11})
    model = ModelSpec(
        name="tiny",
        hidden=8,
        layers=(LayerSpec(name="block", parameters=(ParameterSpec(name="w", shape=(1000, 10)),)),),
    )
    return Job(
        model=model,
        cluster=Cluster(name="local", groups=(NodeGroup(nodes=1, devices=4, device=device, link=link),), network=link),
        workload=Workload(sequence=125, batch=8, steps=40),
    )


def estimate() -> Estimate:
    memory = MemoryBreakdown(
        parameters=4 * MIB,
        gradients=4 * MIB,
        optimizer=8 * MIB,
        activations=8 * MIB,
        buffers=MIB,
        total=25 * MIB,
        reserved=30 * MIB,
    )
    time = TimeBreakdown(compute=0.25, recompute=0.05, bubble=0.05, data=0.05, pipeline=0.1, step=0.4)
    return Estimate(memory=memory, per_stage=(memory,), time=time, tokens_per_second=2500.0, mfu=0.3, fits=True)


def launch(plan: str, batch: int = 8) -> LaunchSpec:
    workload = Workload(sequence=125, batch=batch, steps=40)
    return LaunchSpec(
        model=ModelSource(name="tiny", module="a:b"),
        workload=workload,
        data=DataConfig(),
        plan=parse_plan(plan),
        run=RunOptions(),
    )


def write_run(
    folder: Path, records: list[StepRecord], plan: str = "dp2.pp2.z1", specs: bool = True, batch: int = 8
) -> Path:
    folder.mkdir()
    (folder / "records.jsonl").write_text("".join(line.to_json(indent=None) + "\n" for line in records))
    if specs:
        (folder / "plan.json").write_text(parse_plan(plan).to_json())
        (folder / "job.json").write_text(job().to_json())
        (folder / "launch.json").write_text(launch(plan, batch).to_json())
        (folder / "estimate.json").write_text(estimate().to_json())
    return folder


def losses(count: int) -> list[StepRecord]:
    return [record(step, 6.0 / (1 + 0.1 * step)) for step in range(count)]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = write_run(tmp_path / "a", [*losses(39), record(39, 3.0, held_out_loss=1.5)])
    (folder / "checkpoints" / "step-00000020").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000040").mkdir()
    (folder / "checkpoints" / "step-00000041.partial").mkdir()
    return read_run(folder)


def test_a_summary_says_where_the_loss_began_ended_and_was_lowest(run: RunFolder) -> None:
    loss = summarize_run(run).loss
    assert loss is not None
    assert (loss.first.step, loss.first.loss) == (0, 6.0)
    assert (loss.last.step, loss.last.loss) == (39, 3.0)
    assert (loss.best.step, loss.best.loss) == (38, pytest.approx(6.0 / 4.8))


def test_time_is_shown_predicted_beside_measured_in_the_same_words(run: RunFolder) -> None:
    summary = summarize_run(run)
    assert {row.name: (row.predicted, row.measured) for row in summary.time} == {
        "compute": (0.25, pytest.approx(0.2)),
        "recompute": (0.05, None),
        "bubble": (0.05, None),
        "data": (0.05, 0.1),
        "pipeline": (0.1, 0.15),
        "batch": (None, 0.05),
        "step": (0.4, 0.5),
    }
    assert summary.pair("time", "bubble").within == "pipeline"
    assert summary.pair("time", "recompute").within == "compute"
    assert summary.pair("time", "step").ratio == pytest.approx(1.25)
    assert summary.pair("time", "compute").ratio == pytest.approx(0.2 / (0.25 + 0.05))
    assert summary.pair("time", "pipeline").ratio == pytest.approx(0.15 / (0.1 + 0.05))


def test_measured_times_add_up_to_the_step(run: RunFolder) -> None:
    rows = {row.name: row.measured or 0.0 for row in summarize_run(run).time}
    assert sum(seconds for name, seconds in rows.items() if name != "step") == pytest.approx(rows["step"])


def test_each_kind_of_memory_is_held_against_the_rank_that_holds_most_of_it(run: RunFolder) -> None:
    """As records have it: the fullest rank of a pipeline need not be the one with most parameters."""
    assert run.estimate is not None
    first = run.estimate.memory.model_copy(update={"parameters": 2 * run.estimate.memory.parameters, "total": 1.0})
    several = dataclasses.replace(
        run, estimate=run.estimate.model_copy(update={"per_stage": (first, run.estimate.memory)})
    )
    found = {row.name: row.predicted for row in summarize_run(several).memory}
    assert (found["parameters"], found["total"]) == (first.parameters, run.estimate.memory.total)


def test_memory_is_shown_by_kind_with_its_ratio(run: RunFolder) -> None:
    summary = summarize_run(run)
    assert summary.pair("memory", "parameters").ratio == 1.0
    assert summary.pair("memory", "total").ratio == pytest.approx(1.2)
    assert summary.pair("memory", "gradients").measured is None


def test_the_text_of_a_run_names_plan_losses_checkpoints_and_both_tables(run: RunFolder) -> None:
    text = run_text(run)
    for words in (
        "tiny (10.0 k parameters), plan dp2.pp2.z1.mb1 on 4 ranks, 2.50 k tokens/s predicted",
        "40 of 40 steps, 40.0 k tokens, 2.00 k tokens/s (median)",
        "6.0000 at step 0, 3.0000 at step 39, best 1.2500 at step 38  █",
        "1.5000 at step 39",
        "steps 20, 40",
        "time per step  predicted     measured  measured/predicted",
        "memory of the peak rank",
        "in pipeline",
    ):
        assert words in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_mfu_speed_per_device_and_the_waits_by_axis_are_those_of_the_records(tmp_path: Path) -> None:
    rated = [record(step, 5.0).with_rates(4, 0.15) for step in range(3)]
    run = read_run(write_run(tmp_path / "a", rated))
    summary = summarize_run(run)
    assert rated[0].rates == {"tokens_per_second_per_device": 500.0, "mfu": pytest.approx(0.3)}
    assert (summary.mfu.measured, summary.mfu.predicted) == (pytest.approx(0.3), 0.3)
    assert summary.waits == {name: seconds / 0.5 for name, seconds in rated[0].exposed.items()}
    assert (
        "500 tokens/s per device, MFU 30.0% (30.0% predicted), waiting for data-parallel communication 20.0%"
        in run_text(run)
    )
    assert "waiting for pipeline and bubble" in run_text(run)
    on_cpus = read_run(write_run(tmp_path / "b", [line.with_rates(4, 0.0) for line in losses(3)]))
    assert summarize_run(on_cpus).mfu.measured is None and "MFU" not in run_text(on_cpus)


def test_after_a_resize_only_steps_of_the_new_plan_are_compared_with_its_estimate(tmp_path: Path) -> None:
    steps = [record(step, 3.0) for step in range(1, 11)]
    before = [each.but(seconds=9.0, memory={"activations": 8e9}) for each in steps[:6]]
    after = [each.but(memory={"activations": 1e9}) for each in steps[6:]]
    folder = write_run(tmp_path / "a", before + after)
    (folder / "events.jsonl").write_text(
        RunEvent(kind="resize", at=1.0, step=6, plan="dp2").to_json(indent=None) + "\n"
    )
    summary = summarize_run(read_run(folder))
    assert {row.name: row.measured for row in summary.memory}["activations"] == 1e9
    assert {row.name: row.measured for row in summary.time}["step"] == steps[0].seconds < 9.0
    assert summary.steps == 10


def test_the_first_step_which_warms_up_is_in_no_median(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [record(0, 6.0, seconds=60.0), record(1, 5.0)])
    assert summarize_run(read_run(folder)).pair("time", "step").measured == 0.5


def test_a_last_line_that_a_kill_cut_off_is_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", losses(5))
    whole = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(whole[:-40])
    run = read_run(folder)
    assert (len(run.records), run.cut) == (4, 1)
    assert "1 cut off by a kill and ignored" in run_text(run)


@pytest.mark.parametrize("kept", [1, 10, 60])
def test_a_run_killed_in_its_very_first_record_has_no_step_yet(tmp_path: Path, kept: int) -> None:
    folder = write_run(tmp_path / "a", losses(1))
    whole = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(whole[:kept])
    assert "no step yet" in run_text(read_run(folder))


def test_a_step_that_was_run_again_after_a_restart_counts_once_as_it_was_run_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [record(0, 6.0), record(1, 5.0), record(2, 4.0), record(1, 5.5), record(2, 4.5)])
    run = read_run(folder)
    assert [line.loss for line in run.records] == [6.0, 5.5, 4.5]
    assert "3 of 40 steps, 3.00 k tokens" in run_text(run)
    assert "2 repeated after a restart" in run_text(run)


def test_a_run_without_plan_and_estimate_is_reported_by_what_it_measured(tmp_path: Path) -> None:
    text = run_text(read_run(write_run(tmp_path / "a", losses(3), specs=False)))
    assert "the folder has no plan.json" in text
    assert "500.0 ms" in text


def test_losses_that_are_not_finite_and_skipped_steps_are_told_not_hidden(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [record(0, 6.0), record(1, math.nan, skipped=True), record(2, 5.0)])
    summary = summarize_run(read_run(folder))
    assert summary.skipped == (1,)
    assert summary.loss is not None
    assert summary.loss.best.loss == 5.0
    assert "step 1: a gradient was not finite" in run_text(read_run(folder))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hello\nworld\n", "records.jsonl:1: not a step record"),
        ('{"step": 1}\n', "records.jsonl:1: $: StepRecord needs field 'loss'"),
        ("[1, 2]\n", "records.jsonl:1: $"),
        ('{\n"step": 1\n}\n', "records.jsonl:2: not a step record"),
    ],
)
def test_a_file_that_is_not_records_is_one_line_with_its_place(tmp_path: Path, content: str, words: str) -> None:
    folder = write_run(tmp_path / "a", [])
    (folder / "records.jsonl").write_text(content)
    with pytest.raises(InputError) as caught:
        read_run(folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_field_of_a_record_is_named_with_its_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", losses(2))
    data = json.loads(losses(1)[0].to_json())
    data["lose"] = data.pop("loss")
    with (folder / "records.jsonl").open("a") as stream:
        stream.write(json.dumps(data) + "\n")
    with pytest.raises(InputError, match=r"records.jsonl:3: \$: StepRecord"):
        read_run(folder)


def test_a_run_that_does_not_exist_is_named_with_the_nearest_that_does(tmp_path: Path) -> None:
    write_run(tmp_path / "first", losses(1))
    with pytest.raises(InputError, match=r"does not exist.*; did you mean '.*first'\?"):
        read_run(tmp_path / "frist")


def test_a_folder_that_is_no_run_and_a_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no records\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; name the run's folder"):
        read_run(tmp_path / "file")


def test_runs_of_one_workload_stand_side_by_side_with_the_difference_of_their_losses(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "one", losses(5), plan="dp4"))
    two = read_run(
        write_run(tmp_path / "two", [record(step, 6.0 / (1 + 0.1 * step) * (1 + 1e-7)) for step in range(4)])
    )
    comparison = compare_runs([one, two])
    assert comparison.shared_steps == (5, 4)
    assert comparison.loss_difference == (0.0, pytest.approx(1e-7, rel=1e-6))
    assert comparison.another_job == ("", "")
    text = compare_text(comparison)
    assert "dp4" in text and "dp2.pp2.z1" in text and "1.0e-07 over 4 steps" in text


def test_a_validation_loss_before_step_1_is_not_a_step_of_the_comparison(tmp_path: Path) -> None:
    validation = record(0, 7.0).model_copy(update={"tokens": 0, "held_out_loss": 7.0})
    runs = [read_run(write_run(tmp_path / name, [validation, record(1, 6.0), record(2, 5.0)])) for name in "ab"]
    comparison = compare_runs(runs)
    assert comparison.shared_steps == (2, 2) and "over 2 steps" in compare_text(comparison)


def test_a_step_far_above_the_prediction_gets_one_likely_reason() -> None:
    assert speed_hint(None, 20, 30.0, 2, 2) is speed_hint(2.9, 20, 30.0, 2, 2) is None
    busy, unmeasured, short = (
        speed_hint(28.4, 20, 30.0, 2, 2),
        speed_hint(28.4, 20, 2.3, 2, 2),
        speed_hint(28.4, 2, 30.0, 2, 2),
    )
    assert busy is not None and unmeasured is not None and short is not None
    assert "the first three steps check the plan" in short
    assert busy.startswith("a step took 28.4 times the prediction: other programs use this machine (30.0 processes")
    assert busy.endswith("on 2 cores)") and "`meshwright probe` measures this machine" in unmeasured


def test_runs_of_two_jobs_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "one", losses(2)))
    two = read_run(write_run(tmp_path / "two", losses(2), batch=4))
    assert "compared with one, two is another job: workload.batch is 8 there and 4 here" in compare_text(
        compare_runs([one, two])
    )


def test_the_held_out_loss_before_the_first_step_is_no_step(tmp_path: Path) -> None:
    before = record(0, 6.0, tokens=0, seconds=0.0, memory={}, held_out_loss=6.0)
    folder = write_run(tmp_path / "a", [before, record(1, 5.0), record(2, 4.0, held_out_loss=3.0)])
    summary = summarize_run(read_run(folder))
    assert (summary.steps, summary.loss.first.step if summary.loss else None) == (2, 1)
    assert "2 of 40 steps" in run_text(read_run(folder))
    assert "6.0000 at step 0, 3.0000 at step 2, best 3.0000 at step 2 (50.0% of the first)" in run_text(
        read_run(folder)
    )


def test_the_memory_of_a_cpu_process_is_predicted_from_its_parts(tmp_path: Path) -> None:
    measured = {"process": 300.0 * MIB, "copies": 48.0 * MIB, "resident": 450.0 * MIB}
    run = read_run(write_run(tmp_path / "a", [record(1, 5.0, memory=measured)]))
    rows = {pair.name: pair for pair in summarize_run(run).memory}
    assert rows["resident"].predicted == 300 * MIB + 48 * MIB + 25 * MIB + CPU_RUN_BYTES + CPU_HEAP_OVERHEAD * 9 * MIB
    assert "reserved" not in rows and rows["copies"].predicted is None
    assert "in-memory checkpoints" in run_text(run)


def test_a_run_of_live_code_which_has_no_job_is_named_by_its_launch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", losses(3))
    (folder / "job.json").unlink()
    (folder / "estimate.json").unlink()
    text = run_text(read_run(folder))
    assert "tiny, plan dp2.pp2.z1.mb1 on 4 ranks" in text
    assert "3 of 40 steps" in text


def test_a_loss_that_became_nan_in_one_run_only_is_infinitely_far(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "one", [record(0, 6.0)]))
    two = read_run(write_run(tmp_path / "two", [record(0, math.nan)]))
    assert compare_runs([one, two]).loss_difference == (0.0, math.inf)


def test_the_command_prints_one_run_as_text_and_several_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "one", losses(5))
    two = write_run(tmp_path / "two", losses(5), plan="dp4")
    assert main(["report", str(one)]) == 0
    assert "plan dp2.pp2.z1.mb1 on 4 ranks" in capsys.readouterr().out
    assert main(["report", str(one), str(two)]) == 0
    assert "0.0e+00 over 5" in capsys.readouterr().out


def test_the_command_prints_strict_json_even_of_losses_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "one", [record(0, math.nan), record(1, 2.0)])
    two = write_run(tmp_path / "two", [record(0, 6.0), record(1, 2.0)])

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert main(["report", str(one), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["loss"]["first"] == {"step": 0, "loss": None}
    assert main(["report", str(one), str(two), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["shared_steps"] == [2, 2]


@pytest.mark.parametrize("arguments", [["report"], ["report", "no-such-run"], ["report", "."]])
def test_bad_input_to_the_command_is_one_line_and_exit_code_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_columns_line_up_and_lines_do_not_end_in_blanks() -> None:
    assert align_columns([("a", "1", ""), ("long", "20", "x")]) == "a      1\nlong  20  x"


def test_a_sparkline_of_many_values_keeps_its_width_and_of_equal_ones_its_height() -> None:
    assert len(sparkline(list(range(1000)), width=20)) == 20
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([math.nan, 1.0, 2.0]) == " ▁█"
    assert sparkline([]) == ""


def test_what_of_a_recovery_was_lost_is_one_figure_in_the_table_and_in_goodput(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [record(step, 6.0 / (1 + step)) for step in range(1, 9)])
    events = [
        RunEvent(kind="fault", at=0.0, rank=1, step=6, phase="forward", cause="killed by SIGKILL"),
        RunEvent(kind="recovery", at=9.0, step=3, lost=2, seconds=8.99, source="disk"),
    ]
    (folder / "events.jsonl").write_text("".join(event.to_json(indent=None) + "\n" for event in events))
    run = read_run(folder)
    found = summarize_run(run).goodput
    assert found is not None and found.recovery == pytest.approx(8.99 - 3 * 0.5), (
        "steps 4 and 5 ran again and 6 is new: they count as steps"
    )
    text = run_text(run)
    assert "8.99 s from disk" in text and text.count("7.49 s") == 2 and "lost in restarts 7.49 s" in text


def test_the_memory_of_a_run_as_data_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "one", losses(3))
    (folder / "memory").mkdir()
    peak = AllocationEvent(at=0.1, activations=2 * MIB, buffers=0.0)
    timeline = MemoryTimeline(
        rank=0, step=2, seconds=0.5, resident={"parameters": MIB}, moments=(peak,), peak=peak, place="forward of head"
    )
    (folder / "memory" / "rank-0.json").write_text(timeline.to_json())
    assert main(["report", str(folder), "--memory", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["run"] == str(folder) and data["timelines"][0]["peak"]["activations"] == 2 * MIB and data["ranks"] == []


def test_the_memory_of_a_run_has_a_row_for_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "one", losses(3))
    (folder / "memory").mkdir()
    peak = AllocationEvent(at=0.1, activations=2 * MIB, buffers=0.0)
    for rank in range(7):
        timeline = MemoryTimeline(
            rank=rank, step=2, seconds=0.5, resident={"parameters": MIB}, moments=(peak,), peak=peak
        )
        (folder / "memory" / f"rank-{rank}.json").write_text(timeline.to_json())
        rows = [
            {"step": 1, "parameters": MIB, "reserved": 9 * MIB},
            {"step": 2, "parameters": MIB, "reserved": (10 + rank) * MIB},
        ]
        (folder / "memory" / f"rank-{rank}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "par'
        )
    assert main(["report", str(folder), "--memory"]) == 0
    shown = capsys.readouterr().out.splitlines()
    at = shown.index("the peak of each rank over all steps:")
    assert [line.split() for line in shown[at + 1 :]] == [
        ["rank", "parameters", "reserved"],
        *([str(rank), "1.00", "MiB", f"{10 + rank:.1f}", "MiB"] for rank in range(7)),
    ]
    assert main(["report", str(folder), "--memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][6] == {"rank": 6, "parameters": MIB, "reserved": 16 * MIB}


def test_the_page_of_a_run_shows_the_numbers_of_its_report_and_leads_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(
        tmp_path / "<b>x",
        [record(0, 8.0, tokens=0, held_out_loss=7.5), *(record(step, 6.0 / step) for step in range(1, 9))],
    )
    events = [
        RunEvent(kind="fault", at=0.0, rank=1, step=6, phase="forward", cause="killed by SIGKILL"),
        RunEvent(kind="recovery", at=9.0, step=5, seconds=8.99, source="memory"),
    ]
    (folder / "events.jsonl").write_text("".join(event.to_json(indent=None) + "\n" for event in events))
    (folder / "memory").mkdir()
    moments = (
        AllocationEvent(at=0.1, activations=2 * MIB, buffers=0.0),
        AllocationEvent(at=0.3, activations=0.0, buffers=0.0),
    )
    timeline = MemoryTimeline(
        rank=3,
        step=2,
        seconds=0.4,
        resident={"parameters": MIB},
        moments=moments,
        peak=moments[0],
        place="forward of head",
    )
    (folder / "memory" / "rank-3.json").write_text(timeline.to_json())
    path = tmp_path / "out.html"
    assert main(["report", str(folder), "--page", str(path), "--lang", "zh", "--json"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert f"网页：{path}" in captured.err
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None and text.count("</script>") == 2, "what a person named cannot end the data"
    data = json.loads(found[1])
    assert data["language"] == "zh" and data["plan"] == told["plan"] and data["goodput"] == told["goodput"]
    for kind in ("time", "memory"):
        assert [{name: row[name] for name in pair} for row, pair in zip(data[kind], told[kind], strict=True)] == told[
            kind
        ]
    (curves,) = data["runs"]
    assert curves["loss"] == [[step, pytest.approx(6.0 / step)] for step in range(1, 9)] and curves["held"] == [
        [0, 7.5]
    ]
    assert data["last"] == {"loss": told["loss"]["last"]["loss"], "held": told["held_out"]["last"]["loss"]}
    (event,) = data["events"]
    assert (event["step"], event["seconds"], event["lost"], event["source"]) == (6, 8.99, pytest.approx(8.49), "memory")
    columns = data["timeline"]["columns"]
    assert (
        columns["parameters"] == [MIB] * MEMORY_COLUMNS
        and max(columns["activations"]) == 2 * MIB
        and columns["activations"][-1] == 0
    )
    assert (
        set(re.findall(r"[a-z]+://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"} and "default-src 'none'" in text
    )
    assert not re.search(r"@import|url\(|<iframe|<script src|fetch\(|XMLHttpRequest|import\(", text)
    assert not re.search(r"\{\{\w+[.}]", text)


def test_a_page_of_several_runs_has_their_curves_and_the_last_loss_of_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [record(step, 6.0 / step) for step in range(1, 4 * MAX_CURVE_POINTS)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    runs = [write_run(tmp_path / "a" / "run", long), write_run(tmp_path / "b" / "run", losses(3))]
    page = tmp_path / "out.html"
    assert main(["report", *map(str, runs), "--page", str(page)]) == 0
    shown = re.search(r"last loss +(\S+)", capsys.readouterr().out)
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None and shown is not None
    data = json.loads(found[1])
    assert [each["name"] for each in data["runs"]] == ["a/run", "b/run"]
    assert [len(each["loss"]) for each in data["runs"]] == [MAX_CURVE_POINTS, 3]
    assert f"{data['last']['loss']:.4f}" == shown[1], "not the mean of the last interval of the curve"
    assert page.stat().st_size < 1e6


def test_a_page_is_written_where_a_file_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one", losses(3))
    assert main(["report", str(one), "--page", str(tmp_path / "no" / "out.html")]) == 2
    assert f"folder {tmp_path / 'no'} does not exist; name a file in an existing folder" in capsys.readouterr().err


def test_a_fault_before_a_step_began_is_shown_after_the_last_one() -> None:
    found = faults_text(
        [
            RunEvent(kind="fault", at=0.0, rank=0, step=40, phase="evaluate", cause="killed by SIGKILL: by someone"),
            RunEvent(kind="fault", at=1.0, rank=1, phase="build", cause="killed by SIGKILL: by someone"),
            RunEvent(
                kind="divergence",
                at=2.0,
                step=41,
                cause="step 41: the states of ranks 0, 1, 2 differed: rank 2 held wrong ones",
            ),
        ]
    )
    assert [line.split()[:2] for line in found.splitlines()[1:3]] == [["40", "0"], ["40", "1"]]
    assert found.splitlines()[3].split()[:6] == ["41", "the", "states", "of", "ranks", "0,"]


def test_every_straggler_decision_has_its_predicted_and_measured_gain() -> None:
    plan = "dp4.z1.ga9-9-9-5"
    events = [
        RunEvent(kind="slow", at=0.0, step=41, ranks=(3,), cause="rank 3 computes 2.1 times as long as its peers"),
        RunEvent(kind="rebalanced", at=0.0, step=41, plan=plan, predicted=1.6),
        RunEvent(kind="rebalance_result", at=0.0, step=51, plan=plan, predicted=1.6, measured=1.5),
        RunEvent(
            kind="slow",
            at=0.0,
            step=70,
            ranks=(2,),
            slots=(2,),
            cause="is slow",
            decision="goes on without device 2",
            predicted=1.4,
        ),
        RunEvent(kind="device_readmitted", at=0.0, step=90, slots=(2,), cause="it is well", predicted=1.2),
        RunEvent(kind="rebalance_result", at=0.0, step=99, cause="taking back device 2", predicted=1.2, measured=1.1),
    ]
    assert [(row.step, row.ranks, row.predicted, row.measured) for row in list_decisions(events)] == [
        (41, "3", 0.0, 0.0),
        (41, "", 1.6, 1.5),
        (70, "2", 1.4, 0.0),
        (90, "", 1.2, 1.1),
    ]
    text = decisions_text(events)
    assert f"{plan} from here on" in text and "device 2 comes back: it is well" in text and not faults_text(events)
    assert [line.split()[-2:] for line in text.splitlines()[2:]] == [["1.60", "1.50"], ["2", "1.40"], ["1.20", "1.10"]]
