"""Computes `catalog/accuracy.json` from predictions of published measurements: the scale of errors by feature, the
quantiles of scaled errors, and the plan features that were measured (planner/cost/uncertainty.py explains them).

Scales are fitted to |log(measured / predicted)| by non-negative least squares. A family with n rows has the weight
sqrt(n), so that one large sweep does not decide alone. Errors above MAX_ERROR count as MAX_ERROR in the fit, not in the
quantiles.

`left_out_coverage` is the share of rows inside their interval if neither the scales nor the quantiles have seen the
row's family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import log
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.plan_grid import Array
from meshwright.planner.cost.uncertainty import (
    ErrorScale,
    cluster_extent,
    feature_values,
    memory_features,
    time_features,
)
from meshwright.planner.validation.score import StepPrediction, core_rows

MAX_ERROR = log(3.0)
FIT_ROUNDS = 2000
COVERAGE = (0.05, 0.95)
"""The quantiles at which an interval begins and ends."""


class ErrorRow(NamedTuple):
    """One measured value: its family, log(measured / predicted), the features of its plan, and the set of plans whose
    quantiles it belongs to."""

    family: str
    error: float
    features: dict[str, float]
    of: str


def time_errors(found: Iterable[StepPrediction]) -> list[ErrorRow]:
    """Returns the errors of step times on rows that count for errors."""
    return [
        ErrorRow(
            each.case.row.text("family"),
            log(each.case.seconds / each.seconds),
            time_features(each.case.job, each.plan, each.seconds),
            cluster_extent(each.case.job.cluster.groups[0].nodes),
        )
        for each in core_rows(found)
        if each.case.seconds
    ]


def memory_errors(found: Iterable[StepPrediction]) -> list[ErrorRow]:
    """Returns the errors of memory on rows that count for errors and have `trust` A."""
    return [
        ErrorRow(each.case.row.text("family"), log(each.case.memory / each.memory), memory_features(each.plan), "plans")
        for each in core_rows(found)
        if each.case.memory and each.case.row.text("trust") in ("A", "")
    ]


def fit_error_scale(rows: Sequence[ErrorRow]) -> ErrorScale:
    """Returns the scales of the features and the quantiles of each set of plans in `rows`."""
    counts = Counter(row.family for row in rows)
    weights = np.array([counts[row.family] ** -0.5 for row in rows])
    features = tuple(rows[0].features)
    present = np.array([[row.features[name] for name in features] for row in rows])
    errors = np.array([row.error for row in rows])
    scale = _non_negative_fit(
        present * np.sqrt(weights)[:, None], np.minimum(np.abs(errors), MAX_ERROR) * np.sqrt(weights)
    )
    scaled = errors / (present @ scale)
    quantiles = {}
    for of in sorted({row.of for row in rows}):
        part = np.array([row.of == of for row in rows])
        low, high = _weighted_quantiles(scaled[part], weights[part])
        quantiles[of] = (round(low, 3), round(high, 3))
    return ErrorScale({name: round(float(value), 4) for name, value in zip(features, scale, strict=True)}, quantiles)


def _non_negative_fit(matrix: Array, wanted: Array) -> Array:
    """Returns the vector x >= 0 with the least |matrix x - wanted|^2, by multiplicative updates (Lee and Seung, 2001).
    All values of `matrix` and `wanted` are at least 0."""
    found, square, right = np.full(matrix.shape[1], 0.1), matrix.T @ matrix, matrix.T @ wanted
    for _ in range(FIT_ROUNDS):
        found = found * right / np.maximum(square @ found, 1e-12)
    return found


def _weighted_quantiles(values: Array, weights: Array) -> tuple[float, float]:
    order = np.argsort(values)
    total = np.cumsum(weights[order]) / weights.sum()
    low, high = (float(values[order][min(int(np.searchsorted(total, at)), len(order) - 1)]) for at in COVERAGE)
    return low, high


def left_out_coverage(rows: Sequence[ErrorRow]) -> dict[str, float]:
    """Returns, for each family, the share of its rows inside the interval that the other families give. The key '' has
    the share of all rows."""
    inside: dict[str, list[bool]] = {}
    for family in sorted({row.family for row in rows}):
        others = fit_error_scale([row for row in rows if row.family != family])
        for row in rows:
            if row.family == family and row.of in others.quantiles:
                interval = others.interval(1.0, row.features, row.of)
                inside.setdefault(family, []).append(log(interval.low) <= row.error <= log(interval.high))
    every = [each for part in inside.values() for each in part]
    return {"": sum(every) / max(len(every), 1), **{name: sum(part) / len(part) for name, part in inside.items()}}


def interval_coverage(found: Sequence[StepPrediction]) -> dict[str, dict[str, float]]:
    """Returns `left_out_coverage` of step times and of memory. A quantity is omitted if fewer than two families have
    it."""
    every = {"time": time_errors(found), "memory": memory_errors(found)}
    return {name: left_out_coverage(rows) for name, rows in every.items() if len({row.family for row in rows}) > 1}


def measured_features(found: Iterable[StepPrediction]) -> dict[str, dict[str, int]]:
    """Returns the number of rows with a measured step time by plan field and value."""
    counts: dict[str, Counter[str]] = {}
    for each in found:
        if each.case.ran and each.case.seconds:
            for field, values in feature_values(each.plan).items():
                counts.setdefault(field, Counter()).update(values)
    return {field: dict(sorted(values.items())) for field, values in sorted(counts.items())}


def accuracy_data(found: Sequence[StepPrediction]) -> dict[str, Any]:
    """Returns the content of `catalog/accuracy.json`."""

    def data(rows: list[ErrorRow]) -> dict[str, Any]:
        fitted = fit_error_scale(rows)
        return {"scale": fitted.features, "quantiles": {name: list(each) for name, each in fitted.quantiles.items()}}

    return {
        "source": "planner/validation/tables/measurements.csv.gz; `python tests/unit/test_validation.py` writes this",
        "measured": measured_features(found),
        "time": data(time_errors(found)),
        "memory": data(memory_errors(found)),
    }
