"""Sends the records of a run to trackers: TensorBoard, W&B, MLflow, SwanLab, or a text file for Prometheus.

A tracker runs in its own process, which reads RUN/records.jsonl as it grows. So a tracker that fails or hangs costs no
step. RUN/trackers/NAME.json has the identity of the tracker's run and the position up to which records were sent. A
resumed run continues there. A process that is killed may send the records of its last second again.
RUN/logs/tracker-NAME.log has what the tracker prints. The process ends when its standard input is closed, so this sends
the records of a finished run:

    python -m meshwright.train.trackers wandb RUN < /dev/null

Nothing leaves the machine unless the variables of a tracker ask for it: WANDB_MODE=online, SWANLAB_MODE=cloud, or an
MLFLOW_TRACKING_URI. The folders wandb/, mlruns/, swanlog/ and tb/ and the file metrics.prom are in the run folder.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.core.messages import Message
from meshwright.core.storage import (
    close_quietly,
    describe_failure,
    make_folder,
    open_for_append,
    path_exists,
    read_file,
    read_text,
    replace_file,
)
from meshwright.spec.record import RECORDS_FILE_NAME

POLL_SECONDS = 1.0
"""Seconds between two looks for new records."""
END_SECONDS = 5.0
"""Seconds for which the end of a run waits for a tracker. The tracker then goes on by itself."""


class Tracker:
    """The interface of a tracker. Each method may raise any exception, which ends only the tracker's process."""

    def begin(self, folder: Path, settings: dict[str, Any], identity: str) -> str:
        """Begins the tracker's run, or continues the run `identity` unless it is empty. Returns the run's identity.
        `settings`: the launch file of the run."""
        raise NotImplementedError

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends the values of one step."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the tracker's run."""


class TensorBoardTracker(Tracker):
    """Writes event files to RUN/tb."""

    def begin(self, folder: Path, settings: dict[str, Any], identity: str) -> str:
        """Opens a new event file."""
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder / "tb"))
        return "tb"

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes one scalar per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbTracker(Tracker):
    """Writes an offline run to RUN/wandb, which `wandb sync` sends; WANDB_MODE=online sends at once."""

    def begin(self, folder: Path, settings: dict[str, Any], identity: str) -> str:
        """Begins or resumes a run of the project WANDB_PROJECT, by default meshwright."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "meshwright"),
            name=folder.name,
            id=identity or None,
            resume="allow" if identity else None,
            dir=str(folder),
            config=settings,
            mode=os.environ.get("WANDB_MODE", "offline"),
        )
        return str(self._run.id)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs the values."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class MlflowTracker(Tracker):
    """Writes files to RUN/mlruns, or to the server MLFLOW_TRACKING_URI."""

    def begin(self, folder: Path, settings: dict[str, Any], identity: str) -> str:
        """Begins or resumes a run of the experiment MLFLOW_EXPERIMENT_NAME, by default meshwright."""
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # newer versions refuse files otherwise
        import mlflow

        self._mlflow = mlflow
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or (folder.resolve() / "mlruns").as_uri())
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "meshwright"))
        run = mlflow.start_run(run_id=identity or None, run_name=folder.name)
        if not identity:
            mlflow.log_dict(settings, "launch.json")
        return str(run.info.run_id)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs the values as metrics."""
        self._mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()


class SwanlabTracker(Tracker):
    """Writes an offline run to RUN/swanlog, which `swanlab sync` sends; SWANLAB_MODE=cloud sends at once."""

    def begin(self, folder: Path, settings: dict[str, Any], identity: str) -> str:
        """Begins a run of the project SWANLAB_PROJECT, by default meshwright."""
        import swanlab

        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", "meshwright"),
            experiment_name=folder.name,
            logdir=str(folder / "swanlog"),
            config=settings,
            mode=os.environ.get("SWANLAB_MODE", "offline"),
        )
        return folder.name

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs the values."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Finishes the run."""
        import swanlab

        swanlab.finish()


class PrometheusTracker(Tracker):
    """Writes the values of the last step to RUN/metrics.prom, for the textfile collector of node_exporter
    (`--collector.textfile.directory=RUN`)."""

    def begin(self, folder: Path, settings: dict[str, Any], identity: str) -> str:
        """Remembers where to write."""
        self._path = folder / "metrics.prom"
        return folder.name

    def log(self, step: int, values: dict[str, float]) -> None:
        """Replaces the file, so that a reader never sees a part of it."""
        label = json.dumps(self._path.parent.name)
        lines = [
            f"# TYPE {name} gauge\n{name}{{run={label}}} {value!r}\n"
            for name, value in ((_metric_name(name), value) for name, value in {"step": step, **values}.items())
        ]
        replace_file(self._path, "".join(lines))


def _metric_name(name: str) -> str:
    return "meshwright_" + re.sub(r"\W", "_", name)


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
    "prometheus": PrometheusTracker,
}


def tracked_values(record: dict[str, Any]) -> dict[str, float]:
    """Returns the values of a record by their names in trackers. `record`: a line of records.jsonl.

    >>> tracked_values({"step": 1, "loss": 2.5, "tokens": 64, "skipped": False, "memory": {"total": 8.0}})
    {'loss/train': 2.5, 'step/tokens': 64.0, 'step/skipped': 0.0, 'memory/total': 8.0}
    """
    names = {"loss": "loss/train", "held_out_loss": "loss/validation"}
    found: dict[str, float] = {}
    for key, value in record.items():
        if key in ("step", "batch") or (key == "loss" and not record.get("tokens")):
            continue
        if isinstance(value, dict) and key != "experts":
            found |= {f"{key}/{kind}": float(size) for kind, size in value.items()}
        elif isinstance(value, (int, float)):
            found[names.get(key, f"step/{key}")] = float(value)
    return found


def follow_records(name: str, folder: Path, is_ended: Callable[[float], bool]) -> None:
    """Sends the records of `folder` to the tracker `name` until `is_ended(seconds)` returns True. It waits for at most
    `seconds` for the end of the run."""
    path, state_file = folder / RECORDS_FILE_NAME, folder / "trackers" / f"{name}.json"
    make_folder(state_file.parent)
    state = json.loads(read_text(state_file) or "{}")
    tracker, at = TRACKERS[name](), state.get("position", 0)
    identity = tracker.begin(folder, json.loads(read_text(folder / "launch.json") or "{}"), state.get("identity", ""))
    ended = False
    while not ended:
        ended = is_ended(POLL_SECONDS)
        found = read_file(path, at, links=True) if path_exists(path) else b""  # before the first step there is no file
        whole = found.rpartition(b"\n")[0]
        for line in filter(None, whole.split(b"\n")):
            record = json.loads(line)
            tracker.log(record["step"], tracked_values(record))
        if whole:
            at += len(whole) + 1
            replace_file(state_file, json.dumps({"identity": identity, "position": at}))
    tracker.close()


class TrackerProcess:
    """The process of one tracker. Rank 0 starts it."""

    def __init__(self, name: str, folder: Path, say: Callable[[str], None]) -> None:
        self.name, self.say = name, say
        self._log = folder / "logs" / f"tracker-{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            make_folder(self._log.parent)
            output = open_for_append(self._log)
        except OSError as error:
            self._report(describe_failure(error))
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.train.trackers", name, str(folder)],
            stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        close_quietly(output)

    def check(self) -> None:
        """Reports once that the tracker has failed."""
        if self._process is not None and self._process.poll():
            self._process = None
            try:
                lines = read_file(self._log, -4096).decode(errors="replace").split("\n")
            except OSError:
                lines = []
            self._report(next((line for line in reversed(lines) if line.strip()), ""))

    def _report(self, why: str) -> None:
        self.say(
            Message(
                "tracker {name} failed: {why}; training goes on, {log} has more, and the records are complete",
                name=self.name,
                why=why,
                log=self._log,
            )
        )

    def close(self) -> None:
        """Lets the tracker send the last records, and waits for it for at most END_SECONDS."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                return
            self.check()


def main(name: str, folder: str) -> None:
    """Runs the process of a tracker. It ends when the standard input is closed or the parent process has ended."""
    parent = os.getppid()

    def is_ended(seconds: float) -> bool:
        return bool(select.select([sys.stdin], [], [], seconds)[0]) or os.getppid() != parent

    follow_records(name, Path(folder), is_ended)


if __name__ == "__main__":
    main(*sys.argv[1:])
