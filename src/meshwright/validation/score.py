"""Scores of predictions, by family of rows: what `meshwright validate` prints and what a test freezes.

    error        |predicted / measured - 1| of the seconds of a step, on rows with `core` 1; its median and 90th percentile
    scaling      the same of the ratio of tokens a second a device at the most devices to that at the fewest, of one model and micro-batch
    correlation  of ranks (Spearman), between predicted and measured, among plans for one model, number of devices and batch
    regret       seconds measured of the plan predicted fastest over those of the best measured one, of the same group, less 1
    memory       error by the source's meter, on rows of trust A; plans that ran and are refused, plans out of memory that are let run

Groups have at least GROUP plans. Errors of a source are never mixed with another's: the figures of a table are those of a family or a meter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.search.caution import TIGHT_GAIN, leans
from meshwright.spec.estimate import Fits
from meshwright.validation.cases import Case, case_of
from meshwright.validation.predict import Prediction, predict
from meshwright.validation.tables import Row

GROUP = 5
"""Plans that a group needs, for a rank to say something."""


class Errors(NamedTuple):
    """Of relative errors. `signed` is the median with its sign."""

    rows: int
    median: float
    ninetieth: float
    signed: float


class Family(NamedTuple):
    """Scores of the rows of one source."""

    name: str
    rows: int
    time: Errors | None
    scaling: float | None
    correlation: float | None
    regret: float | None
    worst_regret: float | None
    groups: int


class Memory(NamedTuple):
    """Scores of one meter of one source."""

    family: str
    meter: str
    errors: Errors
    refused: int
    ran: int


class Report(NamedTuple):
    """Everything that `validate` found. `left` says how many rows could not be predicted, by family and reason."""

    families: tuple[Family, ...]
    memory: tuple[Memory, ...]
    median_of_medians: float
    median_regret: float | None
    worst_regret: float | None
    false_fits: int
    out_of_memory: int
    left: tuple[tuple[str, str, int], ...]


def report(rows: Iterable[Row]) -> Report:
    """Scores of all rows that can be predicted."""
    found, left = predictions(rows)
    families = tuple(_family(name, each) for name, each in sorted(found.items()))
    memory = tuple(_memories(found))
    medians = [family.time.median for family in families if family.time is not None]
    regrets = [regret for each in found.values() for regret in _regrets(each)]
    every = [each for part in found.values() for each in part]
    oom = [each for each in every if each.case.row.text("status") == "oom"]
    return Report(
        families,
        memory,
        float(np.median(medians)) if medians else 0.0,
        float(np.median(regrets)) if regrets else None,
        max(regrets, default=None),
        sum(each.fits for each in oom),
        len(oom),
        tuple((family, reason, count) for (family, reason), count in sorted(left.items())),
    )


def predictions(rows: Iterable[Row]) -> tuple[dict[str, list[Prediction]], Counter[tuple[str, str]]]:
    """Every row that can be predicted, by family, and how many cannot, by family and reason."""
    found: dict[str, list[Prediction]] = defaultdict(list)
    left: Counter[tuple[str, str]] = Counter()
    for row in rows:
        family = row.text("family") or "table"
        made: Case | str = case_of(row)
        predicted = made if isinstance(made, str) else predict(made)
        if isinstance(predicted, str):
            left[family, predicted] += 1
        else:
            found[family].append(predicted)
    return found, left


def _core(found: Sequence[Prediction]) -> list[Prediction]:
    """Rows that count for errors. A table without the column counts whole."""
    return [each for each in found if each.case.row.text("core") in ("1", "") and each.case.ran]


def _family(name: str, found: Sequence[Prediction]) -> Family:
    timed = [each.seconds / each.case.seconds - 1.0 for each in _core(found) if each.case.seconds]
    regrets = _regrets(found)
    scalings = [abs(scaling) for scaling in _scalings(found)]
    correlations = [_correlation(group) for group in _groups(found)]
    return Family(
        name,
        len(_core(found)),
        errors(timed) if timed else None,
        float(np.median(scalings)) if scalings else None,
        float(np.median(correlations)) if correlations else None,
        float(np.median(regrets)) if regrets else None,
        max(regrets, default=None),
        len(regrets),
    )


def errors(signed: Sequence[float]) -> Errors:
    """
    >>> errors([0.1, -0.2, 0.4])
    Errors(rows=3, median=0.2, ninetieth=0.36, signed=0.1)
    """
    size = np.abs(signed)
    return Errors(len(signed), *(round(float(value), 12) for value in (np.median(size), np.quantile(size, 0.9), np.median(signed))))


def _memories(found: dict[str, list[Prediction]]) -> Iterable[Memory]:
    for family, each in sorted(found.items()):
        rows = [one for one in _core(each) if one.case.memory and one.case.row.text("trust") in ("A", "")]
        for meter in sorted({str(one.case.meter) for one in rows}):
            of_meter = [one for one in rows if str(one.case.meter) == meter]
            found_errors = errors([one.memory / one.case.memory - 1.0 for one in of_meter if one.case.memory])
            yield Memory(family, meter, found_errors, sum(not one.fits for one in of_meter), len(of_meter))


def _sure(found: Sequence[Prediction]) -> list[Prediction]:
    """Timed rows that ran, without those whose source prints two outcomes for one plan."""
    return [
        each
        for each in found
        if each.case.ran and each.case.seconds and each.case.row.text("trust") != "C" and "AMBIGUOUS" not in each.case.row.text("notes")
    ]


def _by(found: Sequence[Prediction], key: Callable[[Prediction], Any]) -> list[list[Prediction]]:
    groups: dict[Any, list[Prediction]] = defaultdict(list)
    for each in found:
        groups[key(each)].append(each)
    return list(groups.values())


def _groups(found: Sequence[Prediction]) -> list[list[Prediction]]:
    """Unlike plans for one model, number of devices and batch."""
    columns = ("model", "layers", "hidden", "seq", "gpu", "gpus", "global_batch", "prec_class")
    groups = _by(_sure(found), lambda each: tuple(each.case.row.text(name) for name in columns))
    return [group for group in groups if len({each.plan.name for each in group}) >= GROUP]


def _regrets(found: Sequence[Prediction]) -> list[float]:
    chosen = []
    for group in _groups(found):
        best = min(each.case.seconds or 0.0 for each in group)
        pick = min(group, key=_choice)
        chosen.append((pick.case.seconds or 0.0) / best - 1.0)
    return chosen


def _choice(each: Prediction) -> tuple[bool, float]:
    """How the planner ranks: what does not fit last; a plan that is not certain must be TIGHT_GAIN faster."""
    doubts = (each.estimate.verdict == Fits.tight) + leans(each.case.job.cluster, each.plan.offload)
    return not each.fits, each.seconds * (1.0 + TIGHT_GAIN) ** doubts


def _correlation(group: Sequence[Prediction]) -> float:
    """Spearman's, without ties."""
    predicted, measured = (
        np.argsort(np.argsort(values)) for values in zip(*((each.seconds, each.case.seconds) for each in group), strict=True)
    )
    return float(np.corrcoef(predicted, measured)[0, 1])


def _scalings(found: Sequence[Prediction]) -> list[float]:
    """Of plans that differ in their data ranks alone: error of the ratio between the most and the fewest devices."""
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
    for group in _by(_sure(found), lambda each: tuple(each.case.row.text(name) for name in columns)):
        few, many = (extreme(group, key=lambda each: each.case.job.cluster.devices) for extreme in (min, max))
        if few.case.job.cluster.devices < many.case.job.cluster.devices:
            ratios.append(_speed(many) / _speed(few) / (_measured_speed(many) / _measured_speed(few)) - 1.0)
    return ratios


def _speed(one: Prediction) -> float:
    return one.case.job.workload.tokens / one.seconds / one.case.job.cluster.devices


def _measured_speed(one: Prediction) -> float:
    return one.case.job.workload.tokens / (one.case.seconds or 1.0) / one.case.job.cluster.devices
