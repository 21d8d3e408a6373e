"""Trackers: what each receives of a run, what a resumed run sends, and what a tracker that fails costs (nothing)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.start_checks import check_before_ranks
from meshwright.core.errors import InputError
from meshwright.report.run import read_records
from meshwright.spec.job import LaunchSpec, ModelSource, RunConfig
from meshwright.spec.plan import Plan
from meshwright.spec.record import RECORDS_FILE_NAME, StepRecord
from meshwright.spec.workload import DataConfig, Workload
from meshwright.train.metrics import RecordWriter
from meshwright.train.trackers import TRACKERS, follow_records

CALLS = "calls.jsonl"
RECORDER = f"""
import json
class Recorded:
    id = "r1"
    info = property(lambda self: type("Info", (), dict(run_id="r1")))
def note(call, *given, **more):
    open({CALLS!r}, "a").write(json.dumps([call, given, more]) + chr(10))
    return Recorded()
"""
FAKES = {
    "wandb": """
def init(*, project, name, id, resume, dir, config, mode):
    return note("begin", name, id, mode)
Recorded.log = lambda self, values, *, step: note("log", step, values) and None
Recorded.finish = lambda self: note("end") and None
""",
    "mlflow": """
def set_tracking_uri(uri): assert uri.startswith("file://")
def set_experiment(name): pass
def start_run(*, run_id, run_name): return note("begin", run_name, run_id, "offline")
def log_dict(value, name): pass
def log_metrics(values, *, step): note("log", step, values)
def end_run(): note("end")
""",
    "swanlab": """
def init(*, project, experiment_name, logdir, config, mode): return note("begin", experiment_name, None, mode)
Recorded.log = lambda self, values, *, step: note("log", step, values) and None
def finish(): note("end")
""",
}
"""What the trackers call of the packages, with the parameters of their documentation; each call is a line of a file."""


def record(step: int) -> StepRecord:
    fields = {"gradient_norm": 1.0, "lr": 0.1, "seconds": 0.5, "exposed": {"data": 0.1}}
    return StepRecord.model_validate({"step": step, "loss": 3.0 - step, "tokens": 64, **fields}).with_rates(2, 0.1)


def send(name: str, folder: Path, *paths: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, paths), *sys.path])}
    command = [sys.executable, "-m", "meshwright.train.trackers", name, str(folder)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def write(folder: Path, steps: range) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / RECORDS_FILE_NAME).open("a") as file:
        file.writelines(record(step).to_json(indent=None) + "\n" for step in steps)
    return folder


@pytest.mark.parametrize("name", FAKES)
def test_a_tracker_gets_each_record_once_and_a_resumed_run_goes_on_in_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / f"{name}.py").write_text(RECORDER + FAKES[name])
    folder = tmp_path / "run"
    for steps in (range(1, 3), range(3, 5)):
        send(name, write(folder, steps), tmp_path / "fake")
    calls = [json.loads(line) for line in (folder / CALLS).read_text().splitlines()]
    logged = {given[0]: given[1] for call, given, _ in calls if call == "log"}
    assert [call for call, _, _ in calls] == ["begin", "log", "log", "end"] * 2
    assert list(logged) == [1, 2, 3, 4]
    values = logged[4]
    assert (values["loss/train"], values["exposed/data"], values["rates/mfu"]) == (-1.0, 0.1, 0.2)
    assert [given for call, given, _ in calls if call == "begin"][1][:2] == ["run", None if name == "swanlab" else "r1"]


@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "prometheus"])
def test_the_package_of_a_tracker_writes_its_files_into_the_run_folder(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    folder = write(tmp_path / "run", range(1, 4))
    send(name, folder)
    place = {"tensorboard": "tb", "mlflow": "mlruns", "swanlab": "swanlog"}.get(name, name)
    files = [path for path in (folder / place).rglob("*") if path.is_file()]
    assert files and sum(path.stat().st_size for path in files) > 200
    if name == "mlflow":
        (losses,) = (path for path in files if path.parts[-2:] == ("loss", "train"))
        assert [line.split()[1:] for line in losses.read_text().splitlines()] == [
            ["2.0", "1"],
            ["1.0", "2"],
            ["0.0", "3"],
        ]


def test_prometheus_reads_the_last_step_while_the_run_goes_on_and_after_it(tmp_path: Path) -> None:
    records = RecordWriter(tmp_path, ("prometheus",), pytest.fail)
    records.write(record(1))
    records.write(record(2))
    records.close()
    text = (tmp_path / "metrics.prom").read_text()
    assert f'meshwright_loss_train{{run="{tmp_path.name}"}} 1.0\n' in text and text.count("# TYPE") > 5


def test_a_tracker_that_starts_before_the_first_step_waits_for_records_and_for_whole_lines(tmp_path: Path) -> None:
    lines = [record(step).to_json(indent=None) + "\n" for step in (1, 2)]
    growth, polls = ["", lines[0] + lines[1][:20], lines[1][20:]], list[str]()

    def is_ended(seconds: float) -> bool:
        if text := growth[len(polls)]:
            with (tmp_path / RECORDS_FILE_NAME).open("a") as file:
                file.write(text)
        polls.append((tmp_path / "metrics.prom").read_text() if len(polls) > 1 else "")
        return len(polls) == len(growth)

    follow_records("prometheus", tmp_path, is_ended)
    assert 'meshwright_step{run="' in polls[2] and "} 1\n" in polls[2]
    assert "} 2\n" in (tmp_path / "metrics.prom").read_text()


def test_a_tracker_that_fails_is_one_line_and_costs_no_record(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "metrics.prom").mkdir()
    (tmp_path / "metrics.prom" / "in the way").touch()
    records = RecordWriter(tmp_path, ("prometheus",), said.append)
    for step in (1, 2, 3):
        records.write(record(step))
    records.close()
    assert len(said) == 1 and said[0].startswith("tracker prometheus failed: IsADirectoryError")
    assert [each.step for each in read_records(tmp_path / RECORDS_FILE_NAME)[0]] == [1, 2, 3]


@pytest.mark.parametrize("name", FAKES)
def test_a_tracker_whose_package_is_missing_is_refused_before_ranks_start(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    run = RunConfig.model_validate({"track": f"prometheus,{name}"})
    model = ModelSource(name="tiny", module="a:b")
    launch = LaunchSpec(model=model, workload=Workload(), data=DataConfig(), plan=Plan(), run=run)
    with pytest.raises(
        InputError, match=rf"^run.track={name} needs the package {name}: pip install 'meshwright\[{name}\]'"
    ):
        check_before_ranks(launch, None, True, 0)
