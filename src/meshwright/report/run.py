"""Reads a run folder for `meshwright report`, and compares predicted with measured values.

RUN/records.jsonl has one `StepRecord` per line. RUN/plan.json, job.json, estimate.json and launch.json were written at
the start of the training run, or at its last change of plan. Without these files, the report has only measured values.
RUN/checkpoints has a folder for each checkpoint. A step that was repeated after a restart counts once, with its last
record. A record without tokens has only the validation loss before the first step. Incomplete lines are skipped and
counted. Times are medians over all steps after the first, which is a warm-up.

Sample accounting checks that every sample was read once. The batch indices of steps 1, 2, ... must be 0, 1, ..., except
for batches skipped because of a loss spike (events.jsonl). In each step, all ranks together must have read the whole
batch. If ranks that restarted after a step wrote its record, the record has the batch index but no digest of the read
samples.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pydantic import Field

from meshwright.core import storage
from meshwright.core.codec import StrictModel, TranslatableText, read_run_file, validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.core.units import show_count
from meshwright.planner.cost.constants import CPU_HEAP_OVERHEAD, CPU_RUN_BYTES
from meshwright.report.faults import Goodput, compute_goodput, read_events
from meshwright.spec.estimate import Estimate, MemoryBreakdown, TimeBreakdown
from meshwright.spec.job import Job, LaunchSpec
from meshwright.spec.plan import Plan
from meshwright.spec.record import EVENTS_FILE_NAME, RunEvent, StepRecord, digest_batch


class SampleBalance(StrictModel):
    """The result of the sample accounting. `proven` is the number of steps whose record has a digest of the samples.
    `left_out` is the number of skipped batches. `problems` has a sentence for each step that read the wrong samples."""

    steps: int
    proven: int
    samples: int
    left_out: int = 0
    missing: int = Field(
        default=0, description="number of completed steps without a record of the samples that they read"
    )
    problems: tuple[TranslatableText, ...] = ()


def check_sample_balance(
    records: Sequence[StepRecord], rows: int, events: Sequence[RunEvent], last: int = 0
) -> SampleBalance | None:
    """Returns the sample accounting of a training run, or None if no record has a batch index.

    `records` has the last record of each step. `rows` is the batch size of the job. `last` is the last step that is
    known to have ended.
    """
    steps = [record for record in records if record.batch is not None]
    if not steps:
        return None
    left_out = {batch for event in events if event.kind == "spike" and event.batches for batch in range(*event.batches)}
    problems: list[str] = []
    expected, before = 0, 0
    for record in steps:
        for step in range(before, record.step):
            expected += step > before  # counts the batch of a step whose record is lost
            while expected in left_out:
                expected += 1
        if record.batch != expected:
            missed = (record.batch or 0) - expected
            problems.append(
                Message(
                    "step {step} read batch {batch} again, not batch {expected}"
                    if missed < 0
                    else "step {step} read batch {batch} and missed {missed}, not batch {expected}",
                    step=record.step,
                    batch=record.batch,
                    expected=expected,
                    missed=missed,
                )
            )
        expected, before = (record.batch or 0) + 1, record.step
        whole = digest_batch(record.batch or 0, rows)
        if record.samples and record.samples != whole.text:
            problems.append(
                Message(
                    "step {step} read {samples} samples that are not the {rows} of batch {batch}",
                    step=record.step,
                    samples=record.samples.partition(":")[0],
                    rows=rows,
                    batch=record.batch,
                )
            )
    proven = [record for record in steps if record.samples]
    return SampleBalance(
        steps=len(steps), proven=len(proven), samples=rows * len(steps), left_out=len(left_out),
        problems=tuple(problems),
        missing=max(last, steps[-1].step) - len(steps),
    )  # fmt: skip


def sample_balance_text(found: SampleBalance) -> str:
    """Returns the sample accounting as one line.

    >>> sample_balance_text(SampleBalance(steps=10, proven=9, samples=80, left_out=4))
    '80 samples in 10 steps, each once; proven for 9 of them; 4 batches left out'
    >>> problems = ("step 4 read batch 2 again, not batch 3",)
    >>> sample_balance_text(SampleBalance(steps=10, proven=10, samples=80, problems=problems))
    'steps read the wrong samples: step 4 read batch 2 again, not batch 3'
    >>> sample_balance_text(SampleBalance(steps=25, proven=25, samples=200, missing=35))
    '200 samples in 25 steps, each once; 35 more steps have no record of the samples that they read'
    """
    if found.problems:
        more = len(found.problems) - 1
        return Message(
            "steps read the wrong samples: {problem} (and {more} more)"
            if more
            else "steps read the wrong samples: {problem}",
            problem=found.problems[0],
            more=more,
        )
    parts = [
        Message("{samples} samples in {steps} steps, each once", samples=show_count(found.samples), steps=found.steps)
    ]
    if found.proven < found.steps:
        parts.append(Message("proven for {proven} of them", proven=found.proven))
    if found.missing:
        parts.append(
            Message(
                "{missing} more steps have no record of the samples that they read"
                if found.missing > 1
                else "{missing} more step has no record of the samples that it read",
                missing=found.missing,
            )
        )
    if found.left_out:
        parts.append(Message("{left_out} batches left out", left_out=found.left_out))
    return Message("{parts}", parts=parts)


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run folder. `repeated` is the number of records of steps that were repeated later. `cut` is the
    number of incomplete lines."""

    folder: str
    records: tuple[StepRecord, ...]
    plan: Plan | None
    job: Job | None
    estimate: Estimate | None
    launch: LaunchSpec | None
    checkpoints: tuple[int, ...]
    repeated: int
    cut: int
    events: tuple[RunEvent, ...] = ()
    again: float = 0.0
    """The total seconds of the records of steps that were repeated later, including the time before each of these
    steps."""

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """Returns the records of optimizer steps."""
        return tuple(record for record in self.records if record.tokens or record.skipped)

    @property
    def steps_of_plan(self) -> tuple[StepRecord, ...]:
        """Returns the records of optimizer steps since the number of ranks last changed. `plan` and `estimate` describe
        these steps."""
        changed = max((event.step for event in self.events if event.kind == "resize"), default=0)
        return tuple(record for record in self.steps if record.step > changed) or self.steps

    @property
    def last(self) -> int:
        """Returns the last step that is known to have ended, by the records, checkpoints and events."""
        saves = (event.step for event in self.events if event.kind == "save")
        return max((*self.checkpoints, *saves, *(record.step for record in self.records)), default=0)

    @property
    def model(self) -> str | None:
        """Returns the name of the model, or None if no file of the folder names it."""
        return self.job.model.name if self.job else self.launch.model.name if self.launch else None

    @property
    def planned_steps(self) -> int | None:
        """Returns the number of steps of the job, or None if no file of the folder names it."""
        job = self.launch or self.job
        return job.workload.steps if job else None


class LossPoint(StrictModel):
    """A loss and its step."""

    step: int
    loss: float


class LossCurve(StrictModel):
    """The first, last and lowest loss."""

    first: LossPoint
    last: LossPoint
    best: LossPoint


class PredictedMeasured(StrictModel):
    """The predicted and the measured value of one quantity in SI units. `within`: the name of the row whose measured
    value includes this quantity, or ''. `contained`: the sum of the predictions of the quantities that this measured
    value includes in addition to its own. The ratio adds `contained` to the prediction, so that prediction and
    measurement cover the same quantities."""

    name: str
    predicted: float | None = None
    measured: float | None = None
    within: str = ""
    contained: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Returns the measured value divided by the predicted value (with `contained`), or None if a value is
        missing."""
        return (
            self.measured / (self.predicted + self.contained) if self.measured is not None and self.predicted else None
        )


class RunSummary(StrictModel):
    """The figures of a training run. `report --json` prints them."""

    run: str
    model: str | None
    plan: str | None
    devices: int | None
    steps: int
    planned_steps: int | None
    repeated: int
    cut: int
    tokens: int
    loss: LossCurve | None
    held_out: LossCurve | None
    tokens_per_second: PredictedMeasured
    mfu: PredictedMeasured = Field(description="as in step records; empty without devices with a nominal peak")
    time: tuple[PredictedMeasured, ...]
    memory: tuple[PredictedMeasured, ...] = Field(
        description="bytes of each kind on the rank with the most bytes of this kind"
    )
    skipped: tuple[int, ...] = Field(description="steps without an update on any rank")
    checkpoints: tuple[int, ...]
    goodput: Goodput | None = None
    events: tuple[RunEvent, ...] = Field(default=(), description="faults and the reactions to them")
    ledger: SampleBalance | None = Field(
        default=None, description="sample accounting: whether every sample was read exactly once"
    )

    @property
    def waits(self) -> dict[str, float]:
        """Returns the share of a step that the rank with the longest wait waits, by axis. The share of `pipeline`
        includes the bubble."""
        step = self.pair("time", "step").measured
        rows = [row for row in self.time if row.name in _WAITS and row.measured]
        return {row.name: (row.measured or 0.0) / step for row in rows} if step else {}

    def pair(self, kind: str, name: str) -> PredictedMeasured:
        """Returns the row `name` of `time` or `memory`, or an empty row if there is none."""
        rows = self.time if kind == "time" else self.memory
        return next((row for row in rows if row.name == name), PredictedMeasured(name=name))


def read_run(folder: Path | str) -> RunFolder:
    """Reads the run folder `folder`.

    Raises: InputError if `folder` is not a run folder or has an invalid file; StorageFailed if its disk fails.
    """
    path = Path(folder)
    try:
        is_run, exists = storage.is_folder(path), storage.path_exists(path)
        steps = _checkpoint_steps(path / "checkpoints")
        siblings = [] if is_run else [str(path.parent / name) for name in storage.list_names(path.parent)]
    except OSError as error:
        raise storage.StorageFailed(storage.describe_failure(error, path)) from None
    if not is_run:
        raise InputError(
            Message(
                "run {path!r} is a file; name the run's folder{hint}"
                if exists
                else "run {path!r} does not exist; name a folder that `meshwright train` has written{hint}",
                path=str(path),
                hint=did_you_mean(str(path), siblings),
            )
        )
    lines = path / "records.jsonl"
    text = storage.read_text(lines)
    if text is None:
        raise InputError(
            Message(
                "run {path!r} has no records.jsonl; name a folder that `meshwright train` has written", path=str(path)
            )
        )
    records, cut = parse_records(text, lines)
    by_step = {record.step: record for record in records}
    return RunFolder(
        folder=str(path),
        records=tuple(by_step[step] for step in sorted(by_step)),
        plan=read_run_file(Plan, path / "plan.json"),
        job=read_run_file(Job, path / "job.json"),
        estimate=read_run_file(Estimate, path / "estimate.json"),
        launch=read_run_file(LaunchSpec, path / "launch.json"),
        checkpoints=steps,
        repeated=len(records) - len(by_step),
        cut=cut,
        events=read_events(path / EVENTS_FILE_NAME),
        again=sum(map(_spent, records)) - sum(map(_spent, by_step.values())),
    )


def _spent(record: StepRecord) -> float:
    """Returns the seconds of a step and of the time before it."""
    return record.seconds + record.between_seconds


def read_records(path: Path) -> tuple[list[StepRecord], int]:
    """Returns the records in `path`, and the number of incomplete lines. Returns no records if there is no file. Raises
    InputError if the file contains something other than records."""
    return parse_records(storage.read_text(path) or "", path)


def parse_records(text: str, path: Path) -> tuple[list[StepRecord], int]:
    """Returns the records in the lines of `text`, and the number of incomplete lines. Errors name `path`.

    Raises: InputError for a line that is neither a step record nor the beginning of one, or if several lines are
    incomplete and none is a record.
    """
    records: list[StepRecord] = []
    cut: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip("\0 \t")  # a power failure can leave zero bytes at the end of a file
        if not line:
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            cut.append((number, line))
            continue
        records.append(validate_data(StepRecord, data, f"{path}:{number}: $"))
    foreign = [number for number, line in cut if not line.startswith("{")]
    if foreign or (len(cut) > 1 and not records):
        place = foreign[0] if foreign else cut[0][0]
        raise InputError(
            Message(
                '{path}:{place}: not a step record; a line is one JSON object such as {{"step": 0, "loss": 5.5, ...}}',
                path=path,
                place=place,
            )
        )
    return records, len(cut)


def _checkpoint_steps(folder: Path) -> tuple[int, ...]:
    """Returns the steps of the checkpoints in `folder`, from the numbers at the end of folder names. Names of
    unfinished checkpoints do not end in a number."""
    try:
        found = [re.search(r"(\d+)$", name) for name in storage.list_names(folder) if storage.is_folder(folder / name)]
    except NotADirectoryError:
        return ()
    return tuple(sorted(int(match[1]) for match in found if match))


def _loss_curve(points: list[LossPoint]) -> LossCurve | None:
    finite = [point for point in points if math.isfinite(point.loss)]
    if not points:
        return None
    return LossCurve(
        first=points[0], last=points[-1], best=min(finite, key=lambda point: point.loss, default=points[-1])
    )


def summarize_run(run: RunFolder) -> RunSummary:
    """Returns the figures of a training run."""
    steps, of_plan = run.steps, run.steps_of_plan
    settled = of_plan[1:] if len(of_plan) > 1 else of_plan
    speeds = [
        record.tokens_per_second or record.tokens / record.seconds
        for record in settled
        if record.seconds > 0 and not record.skipped
    ]
    utilisations = [record.rates["mfu"] for record in settled if "mfu" in record.rates]
    time = _time_pairs(run.estimate.time if run.estimate else None, settled)
    return RunSummary(
        run=run.folder,
        model=run.model,
        plan=run.plan.name if run.plan else None,
        devices=run.plan.world if run.plan else None,
        steps=len(steps),
        planned_steps=run.planned_steps,
        repeated=run.repeated,
        cut=run.cut,
        tokens=sum(record.tokens for record in steps),
        loss=_loss_curve([LossPoint(step=record.step, loss=record.loss) for record in steps]),
        held_out=_loss_curve(
            [
                LossPoint(step=record.step, loss=record.held_out_loss)
                for record in run.records
                if record.held_out_loss is not None
            ]
        ),
        tokens_per_second=PredictedMeasured(
            name="tokens/s",
            predicted=run.estimate.tokens_per_second if run.estimate else None,
            measured=median(speeds) if speeds else None,
        ),
        mfu=PredictedMeasured(
            name="MFU",
            predicted=run.estimate.mfu if run.estimate and utilisations else None,
            measured=median(utilisations) if utilisations else None,
        ),
        time=(*time, *_first_step_pairs(run)),
        memory=_memory_pairs(run.estimate, of_plan),
        skipped=tuple(record.step for record in steps if record.skipped),
        checkpoints=run.checkpoints,
        goodput=compute_goodput(run.records, run.again, run.events),
        events=run.events,
        ledger=check_sample_balance(steps, job.workload.batch, run.events, run.last)
        if (job := run.launch or run.job)
        else None,
    )


def _time_pairs(predicted: TimeBreakdown | None, records: tuple[StepRecord, ...]) -> tuple[PredictedMeasured, ...]:
    """Returns rows by kind. The measured compute time includes recompute, and the measured pipeline time includes the
    bubble, because these cannot be measured separately."""
    measured: dict[str, float] = {}
    if records:
        kinds = sorted({kind for record in records for kind in record.exposed})
        measured = {kind: median(record.exposed.get(kind, 0.0) for record in records) for kind in kinds}
        measured["batch"] = median(record.data_seconds for record in records)
        measured["compute"] = median(max(0.0, r.seconds - r.data_seconds - sum(r.exposed.values())) for r in records)
        measured["step"] = median(record.seconds for record in records)
    within = {name: at for name, at in _CONTAINING_KIND.items() if name not in measured and at in measured}
    rows = []
    for name in (*(field for field in TimeBreakdown.model_fields if field != "step"), "batch", "step"):
        row = PredictedMeasured(
            name=name,
            predicted=getattr(predicted, name, None),
            measured=measured.get(name),
            within=within.get(name, ""),
            contained=sum(getattr(predicted, part, 0.0) for part, at in within.items() if at == name),
        )
        if row.predicted or row.measured or name == "step":
            rows.append(row)
    return tuple(rows)


def _first_step_pairs(run: RunFolder) -> tuple[PredictedMeasured, ...]:
    """Returns the row of the first step if blocks are compiled, because this step takes longer."""
    if run.estimate is None or not run.estimate.first or not run.steps_of_plan:
        return ()
    return (
        PredictedMeasured(
            name="first step",
            predicted=run.estimate.time.step + run.estimate.first,
            measured=run.steps_of_plan[0].seconds,
        ),
    )


_WAITS = ("tensor", "data", "pipeline", "context", "expert", "offload")
_CONTAINING_KIND = {"recompute": "compute", "bubble": "pipeline"}


def _predicted_peaks(predicted: Estimate) -> dict[str, float]:
    """Returns for each kind of memory the largest predicted bytes of any rank, because step records also have the
    largest value of any rank."""
    return {
        kind: max(getattr(stage, kind) for stage in (predicted.memory, *predicted.per_stage))
        for kind in MemoryBreakdown.model_fields
    }


def _memory_pairs(predicted: Estimate | None, records: tuple[StepRecord, ...]) -> tuple[PredictedMeasured, ...]:
    """Returns rows by kind, each with the maximum bytes over all steps. `total` is the allocated memory at the peak,
    `resident` is the resident memory (RSS) of the process on the host. On a CPU, its prediction is the sum of the
    process itself, its in-memory checkpoints, the allocated total, and the memory that the heap loses."""
    measured: dict[str, float] = {}
    for record in records:
        for kind, size in record.memory.items():
            measured[kind] = max(size, measured.get(kind, 0.0))
    names = [*MemoryBreakdown.model_fields, *(kind for kind in measured if kind not in MemoryBreakdown.model_fields)]
    said = {} if predicted is None else {**_predicted_peaks(predicted), "offloaded": predicted.offloaded}
    if predicted is not None and (process := measured.get("process")):
        lost = CPU_HEAP_OVERHEAD * (said["activations"] + said["buffers"])
        resident = process + measured.get("copies", 0.0) + CPU_RUN_BYTES + said["total"] + lost
        said |= {"resident": resident, "reserved": resident if "reserved" in measured else 0.0}
    rows = [PredictedMeasured(name=name, predicted=said.get(name), measured=measured.get(name)) for name in names]
    return tuple(row for row in rows if row.predicted or row.measured)
