"""Predicts published measurements with the cost model and scores the predictions by family. A family is the rows of one
source (column `family`).

`meshwright validate` prints the scores, and a test checks that they do not change. Memory is predicted in the quantity
that the source measures (`MemoryMeter`):

| meter | measured quantity | predicted quantity |
|---|---|---|
| first | torch's peak of reserved bytes on the first rank | see [Note: nanotron's figure] in memory_meters.py |
| last | torch's peak of allocated bytes on the last rank | total bytes of this pipeline rank |
| peak rank | torch's peak of allocated bytes on the peak rank | total bytes of the peak rank |
| reserved | torch's peak of reserved bytes on the peak rank | reserved bytes of the peak rank, without the context |
| device | nvidia-smi: reserved bytes, context, communication buffers | reserved bytes of the peak rank |

The scores:

- error: |predicted / measured - 1| for the seconds of a step, on rows with `core` 1. The score is the median and the
  90th percentile.
- scaling: let the speed be tokens per second and device. Rows that differ only in the number of data ranks form a set.
  Its ratio is the speed on the most devices divided by the speed on the fewest devices. The score is |predicted ratio /
  measured ratio - 1|.
- compiled: the step time with torch.compile divided by the step time without, as measured and as predicted, over pairs
  of rows that differ only in compilation.
- correlation: Spearman's rank correlation of predicted and measured seconds in a group of plans with equal model,
  number of devices and batch.
- regret: the planner's choice in a group is the plan that it would rank first. The regret is the measured seconds of
  this choice, divided by the measured seconds of the fastest plan of the group, minus 1.
- memory: the error by meter on rows with `core` 1 and `trust` A; how many plans of these rows are predicted not to fit;
  and how many plans ran out of memory although they are predicted to fit.

The columns `core` and `trust` of the table select rows: `core` is 1 for rows that count for errors, and `trust` is the
reliability of a row, from A (highest) to C. If a table has no such columns, all its rows count. Scaling, correlation
and regret exclude rows with `trust` C. Groups have at least MIN_GROUP_PLANS plans. Each score is computed for one
family, or for one meter of a family, so errors of different sources are not mixed. Measured collectives are compared
with the times of `cost.links`. The errors are reported by operation, number of nodes (one or several) and message size
(small or large).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.catalog import read as catalog
from meshwright.core.errors import InputError
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.links import all_to_all_seconds, collective_rates, link_model
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.step import estimate_grid
from meshwright.planner.inputs.cluster_syntax import parse_cluster, parse_link
from meshwright.planner.search.best_plans import risk_adjusted_seconds
from meshwright.planner.search.trials import TrialCandidate, largest_expected_gain, plan_degrees
from meshwright.planner.validation.benchmark_cases import EFA_LINK, BenchmarkCase, benchmark_case
from meshwright.planner.validation.frameworks import CHUNKED_LOSS_PATTERN
from meshwright.planner.validation.memory_meters import predicted_memory
from meshwright.planner.validation.tables import MeasurementRow
from meshwright.spec.estimate import Estimate, FitStatus
from meshwright.spec.plan import Plan


class StepPrediction(NamedTuple):
    """The prediction for one case: the plan that the case is assumed to have used, and the estimate of this plan."""

    case: BenchmarkCase
    plan: Plan
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """Returns the predicted seconds of a step."""
        return self.estimate.time.step

    @property
    def memory(self) -> float:
        """Returns the predicted bytes, in the quantity that the source of the case measures."""
        return predicted_memory(self.case.meter, self.case.job, self.plan, self.estimate)

    @property
    def fits(self) -> bool:
        """Returns whether the plan is expected to fit."""
        return self.estimate.fits

    @property
    def refused(self) -> bool:
        """Returns whether the plan is predicted not to fit, even at the lower end of the interval of its memory."""
        return self.estimate.verdict == FitStatus.no


def predict_case(case: BenchmarkCase) -> StepPrediction | str:
    """Returns the prediction for the fastest plan of the case whose allocated bytes fit in the device's memory. If no
    plan fits, returns the prediction for the plan with the lowest memory. If a plan cannot be estimated, returns the
    reason."""
    pricer = CostModel(case.job, case.practice)
    found = []
    for plan in case.plans:
        try:
            found.append(
                StepPrediction(
                    case,
                    plan,
                    estimate_grid(pricer, grid_of_plan(plan, case.job.workload.batch, case.job.model.blocks)),
                )
            )
        except InputError as error:
            return str(error)[:90]
    device = case.job.cluster.groups[0].device
    fitting = [each for each in found if each.estimate.memory.total + device.context <= device.memory]
    return (
        min(fitting, key=lambda each: each.seconds)
        if fitting
        else min(found, key=lambda each: each.estimate.memory.reserved)
    )


TRIALS = 5
"""Number of trials after which the regret is scored."""

MIN_GROUP_PLANS = 5
"""Minimum number of plans of a group. The ranking of fewer plans is not meaningful."""


class RelativeErrors(NamedTuple):
    """Statistics of relative errors of `rows` predictions: median and 90th percentile of the absolute errors, and the
    median of the signed errors (`signed`)."""

    rows: int
    median: float
    ninetieth: float
    signed: float


class FamilyScore(NamedTuple):
    """The scores of one family. A score is None if too few rows have the needed values. `groups` is the number of
    groups with at least MIN_GROUP_PLANS plans. `after_trials` is the largest regret of a group after TRIALS trials of
    `plan --trials`. `chosen` is the errors of the plan that the planner would rank first in
    each group: the best of many estimates is more often too low than too high."""

    name: str
    rows: int
    time: RelativeErrors | None
    scaling: float | None
    correlation: float | None
    regret: float | None
    worst_regret: float | None
    groups: int
    after_trials: float | None
    chosen: RelativeErrors | None


class MemoryScore(NamedTuple):
    """The memory scores of one meter in one family. `ran` is the number of plans that ran, `refused` how many of these
    plans are predicted not to fit."""

    family: str
    meter: str
    errors: RelativeErrors
    refused: int
    ran: int


class CompiledRatio(NamedTuple):
    """The median step time with compiled blocks, divided by that without, over `pairs` pairs of rows of one family."""

    family: str
    pairs: int
    measured: float
    predicted: float


class ValidationReport(NamedTuple):
    """The result of `meshwright validate`. `median_of_medians` is the median over the families of the median time
    error. `median_regret` and `worst_regret` are over the groups of all families. `out_of_memory` is the number of
    plans that ran out of memory, `false_fits` how many of these plans are predicted to fit. `left` is the number of
    rows without a prediction, by family and reason."""

    families: tuple[FamilyScore, ...]
    memory: tuple[MemoryScore, ...]
    compiled: tuple[CompiledRatio, ...]
    median_of_medians: float
    median_regret: float | None
    worst_regret: float | None
    false_fits: int
    out_of_memory: int
    left: tuple[tuple[str, str, int], ...]


def validation_report(
    found: dict[str, list[StepPrediction]], left: Counter[tuple[str, str]] | None = None
) -> ValidationReport:
    """Returns the scores of the predictions `found` by family. `left` is the number of rows without a prediction by
    family and reason (`predict_rows`)."""
    families = tuple(_family_score(name, each) for name, each in sorted(found.items()))
    memory = tuple(_memory_scores(found))
    medians = [family.time.median for family in families if family.time is not None]
    regrets = [regret for each in found.values() for regret in _ranking_regrets(each)]
    every = [each for part in found.values() for each in part]
    oom = [each for each in every if each.case.row.text("status") == "oom"]
    return ValidationReport(
        families,
        memory,
        tuple(each for name, part in sorted(found.items()) for each in _compiled_ratios(name, part)),
        float(np.median(medians)) if medians else 0.0,
        float(np.median(regrets)) if regrets else None,
        max(regrets, default=None),
        sum(each.fits for each in oom),
        len(oom),
        tuple((family, reason, count) for (family, reason), count in sorted((left or {}).items())),
    )


def predict_rows(rows: Iterable[MeasurementRow]) -> tuple[dict[str, list[StepPrediction]], Counter[tuple[str, str]]]:
    """Returns the predictions of all rows by family, and the number of rows without a prediction by family and
    reason."""
    found: dict[str, list[StepPrediction]] = defaultdict(list)
    left: Counter[tuple[str, str]] = Counter()
    for row in rows:
        family = row.text("family") or "table"
        made: BenchmarkCase | str = benchmark_case(row)
        predicted = made if isinstance(made, str) else predict_case(made)
        if isinstance(predicted, str):
            left[family, predicted] += 1
        else:
            found[family].append(predicted)
    return found, left


def core_rows(found: Iterable[StepPrediction]) -> list[StepPrediction]:
    """Returns the predictions that count for errors: those of successful rows with `core` 1. In a table without this
    column, all successful rows count."""
    return [each for each in found if each.case.row.text("core") in ("1", "") and each.case.ran]


def _family_score(name: str, found: Sequence[StepPrediction]) -> FamilyScore:
    timed = [each.seconds / each.case.seconds - 1.0 for each in core_rows(found) if each.case.seconds]
    regrets, picked = _ranking_regrets(found), [_ranked_first(group) for group in _comparable_groups(found)]
    scalings = [abs(scaling) for scaling in _scaling_errors(found)]
    correlations = [_rank_correlation(group) for group in _comparable_groups(found)]
    return FamilyScore(
        name,
        len(core_rows(found)),
        relative_errors(timed) if timed else None,
        float(np.median(scalings)) if scalings else None,
        float(np.median(correlations)) if correlations else None,
        float(np.median(regrets)) if regrets else None,
        max(regrets, default=None),
        len(regrets),
        max((_regret_after_trials(group) for group in _comparable_groups(found)), default=None),
        relative_errors([each.seconds / (each.case.seconds or 1.0) - 1.0 for each in picked]) if picked else None,
    )


def relative_errors(signed: Sequence[float]) -> RelativeErrors:
    """Returns the statistics of signed relative errors.

    >>> relative_errors([0.1, -0.2, 0.4])
    RelativeErrors(rows=3, median=0.2, ninetieth=0.36, signed=0.1)
    """
    size = np.abs(signed)
    return RelativeErrors(
        len(signed),
        *(round(float(value), 12) for value in (np.median(size), np.quantile(size, 0.9), np.median(signed))),
    )


def _memory_scores(found: dict[str, list[StepPrediction]]) -> Iterable[MemoryScore]:
    for family, each in sorted(found.items()):
        rows = [one for one in core_rows(each) if one.case.memory and one.case.row.text("trust") in ("A", "")]
        for meter in sorted({str(one.case.meter) for one in rows}):
            of_meter = [one for one in rows if str(one.case.meter) == meter]
            found_errors = relative_errors([one.memory / one.case.memory - 1.0 for one in of_meter if one.case.memory])
            yield MemoryScore(family, meter, found_errors, sum(one.refused for one in of_meter), len(of_meter))


def _certain_predictions(found: Sequence[StepPrediction]) -> list[StepPrediction]:
    """Returns the predictions of successful rows with a measured time. Rows with `trust` C, and rows whose source has
    two results for one plan, are omitted."""
    return [
        each
        for each in found
        if each.case.ran
        and each.case.seconds
        and each.case.row.text("trust") != "C"
        and "AMBIGUOUS" not in each.case.row.text("notes")
    ]


def _group_by(found: Sequence[StepPrediction], key: Callable[[StepPrediction], Any]) -> list[list[StepPrediction]]:
    groups: dict[Any, list[StepPrediction]] = defaultdict(list)
    for each in found:
        groups[key(each)].append(each)
    return list(groups.values())


def _comparable_groups(found: Sequence[StepPrediction]) -> list[list[StepPrediction]]:
    """Returns the groups of plans with equal model, devices, batch and precision. Groups with fewer than
    MIN_GROUP_PLANS different plans are omitted."""
    columns = ("model", "layers", "hidden", "seq", "gpu", "gpus", "global_batch", "prec_class")
    groups = _group_by(_certain_predictions(found), lambda each: tuple(each.case.row.text(name) for name in columns))
    return [group for group in groups if len({each.plan.name for each in group}) >= MIN_GROUP_PLANS]


def _ranking_regrets(found: Sequence[StepPrediction]) -> list[float]:
    return [
        (_ranked_first(group).case.seconds or 0.0) / min(each.case.seconds or 0.0 for each in group) - 1.0
        for group in _comparable_groups(found)
    ]


def _regret_after_trials(group: Sequence[StepPrediction]) -> float:
    """Returns the regret of the fastest of TRIALS plans of a group, which `plan --trials` would try one after another.
    The measured times of the group are the results of the trials. The cluster is not refitted."""
    tried: list[StepPrediction] = []
    rest = sorted(group, key=_planner_key)
    while rest and len(tried) < TRIALS:
        ran = [TrialCandidate.of(each.plan, each.estimate, each.case.seconds or 0.0) for each in tried]
        candidates, per_node = (
            [TrialCandidate.of(each.plan, each.estimate) for each in rest],
            rest[0].case.job.cluster.groups[0].devices,
        )
        at = largest_expected_gain(candidates, ran, per_node) if len(tried) > 1 else 0
        if len(tried) == 1:
            first = plan_degrees(tried[0].plan)
            at = next((index for index, each in enumerate(rest) if plan_degrees(each.plan) != first), 0)
        if at is None:
            break
        tried.append(rest.pop(at))
    return min(each.case.seconds or 0.0 for each in tried) / min(each.case.seconds or 0.0 for each in group) - 1.0


def _ranked_first(group: Sequence[StepPrediction]) -> StepPrediction:
    return min(group, key=_planner_key)


def _planner_key(each: StepPrediction) -> tuple[bool, float]:
    """Returns the sort key of the planner's ranking. Plans that are not expected to fit are last, and RISK_MARGIN
    raises the time of an uncertain plan (best_plans.py)."""
    return not each.fits, risk_adjusted_seconds(each.case.job, each.plan, each.estimate)


def _rank_correlation(group: Sequence[StepPrediction]) -> float:
    """Returns Spearman's rank correlation of predicted and measured seconds. Equal values get different ranks."""
    predicted, measured = (
        np.argsort(np.argsort(values))
        for values in zip(*((each.seconds, each.case.seconds) for each in group), strict=True)
    )
    return float(np.corrcoef(predicted, measured)[0, 1])


def _scaling_errors(found: Sequence[StepPrediction]) -> list[float]:
    """Returns the relative errors of the predicted speed ratio (see `scaling` above) between the largest and the
    smallest number of devices. There is one error for each set of rows that differ only in the number of data ranks."""
    columns = (
        "model",
        "layers",
        "hidden",
        "seq",
        "gpu",
        "tp",
        "pp",
        "vpp",
        "cp",
        "zero_stage",
        "hsdp",
        "micro_batch",
        "prec_class",
        "compile",
    )
    ratios = []
    for group in _group_by(
        _certain_predictions(found), lambda each: tuple(each.case.row.text(name) for name in columns)
    ):
        few, many = (extreme(group, key=lambda each: each.case.job.cluster.devices) for extreme in (min, max))
        if few.case.job.cluster.devices < many.case.job.cluster.devices:
            ratios.append(
                _predicted_speed(many) / _predicted_speed(few) / (_measured_speed(many) / _measured_speed(few)) - 1.0
            )
    return ratios


def _compiled_ratios(family: str, found: Sequence[StepPrediction]) -> list[CompiledRatio]:
    degrees = ["gpus", "dp", "tp", "pp", "cp", "zero_stage", "micro_batch", "global_batch"]
    columns = ["model", "seq", "gpu", "prec_class", "activation_ckpt", *degrees]
    groups = _group_by(
        _certain_predictions(found),
        lambda each: (
            *(each.case.row.text(name) for name in columns),
            re.search(CHUNKED_LOSS_PATTERN, each.case.row.text("notes")) is not None,
        ),
    )
    pairs = [
        (eager, compiled)
        for group in groups
        for eager in group
        for compiled in group
        if eager.case.row.text("compile") == "0" and compiled.plan.compile
    ]
    if not pairs:
        return []
    measured = [(compiled.case.seconds or 0.0) / (eager.case.seconds or 1.0) for eager, compiled in pairs]
    predicted = [compiled.seconds / eager.seconds for eager, compiled in pairs]
    return [CompiledRatio(family, len(pairs), float(np.median(measured)), float(np.median(predicted)))]


def _predicted_speed(one: StepPrediction) -> float:
    return one.case.job.workload.tokens / one.seconds / one.case.job.cluster.devices


def _measured_speed(one: StepPrediction) -> float:
    return one.case.job.workload.tokens / (one.case.seconds or 1.0) / one.case.job.cluster.devices


LARGE_MESSAGE_BYTES = 2**24
"""Messages of at least this number of bytes count as large."""

EQUIVALENT_DEVICES = {"n/s (A100-class NVLink node)": "a100-80gb"}
"""Catalog names of devices of which a source states only a description."""


def score_collectives(rows: Iterable[MeasurementRow]) -> dict[str, RelativeErrors]:
    """Returns the errors of predicted collectives, by operation, number of nodes (one or several) and message size
    (large or small). Rows without a size, a time or a known device are omitted."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        seconds, size = row.number("time_us"), row.number("payload_bytes")
        if seconds and size and (predicted := predict_collective(row, size)) is not None:
            place = "in a node" if row.count("nodes") == 1 else "across nodes"
            found[f"{row.text('collective')} {place}, {'large' if size >= LARGE_MESSAGE_BYTES else 'small'}"].append(
                predicted / (seconds * 1e-6) - 1.0
            )
    return {name: relative_errors(each) for name, each in sorted(found.items())}


def predict_collective(row: MeasurementRow, size: float) -> float | None:
    """Returns the predicted seconds of the row's collective over `size` bytes. Returns None if the operation, the
    device or the network is not known, or if the number of devices is not a multiple of the number of nodes."""
    ranks, nodes = row.count("gpus"), row.count("nodes")
    found = catalog.find_entry(catalog.devices(), EQUIVALENT_DEVICES.get(row.text("gpu"), row.text("gpu")))
    if found is None or ranks % nodes or (nodes > 1 and not row.text("inter")):
        return None
    cluster = parse_cluster(f"{nodes}x{ranks // nodes}:{found['name']}")
    if nodes > 1:
        try:
            cluster = cluster.but(network=parse_link(link_text(row.text("inter")), ranks // nodes))
        except InputError:
            return None
    links = link_model(cluster)
    over = collective_rates(links, ranks, 1)
    match row.text("collective"):
        case "all_reduce":
            return float(over.reduce(size))
        case "all_gather" | "reduce_scatter":
            return float(over.gather(size))
        case "all_to_all":
            return float(all_to_all_seconds(links, ranks, 1, size))  # type: ignore[arg-type]
    return None


def link_text(text: str) -> str:
    """Converts the network `text` of a row to the notation of `@LINK` (inputs/cluster_parser.py)."""
    if "EFA" in text:
        return EFA_LINK if "v2" in text else "efa-p6"
    ports = re.search(r"(\d+)x(\d+)\s*Gb/s", text)
    return f"{ports[1]}x{ports[2]}Gb" if ports else text
