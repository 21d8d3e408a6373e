"""Records the seconds and the bytes of a plan as formulas of the rates of a cluster, of the tokens of a micro-batch, of
the sequence length and of the number of micro-batches. The formulas are those of the cost model, because the cost model
itself is executed with symbols (symbolic.py).

One recorded plan covers all batches, sequences and micro-batch sizes that it can run. Only the number of layers
with saved activations at each moment is not a formula of the cost model: it comes from the order of the schedule. It is
a piecewise linear function of the number of micro-batches, which `piecewise_linear` records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.compute import LayerTimes, layer_times
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.plan_grid import Array, PlanGrid, ScheduleChoice, grid_of_plan
from meshwright.planner.cost.rank_contents import PeakMoments, RankContents, StoredUntilW
from meshwright.planner.cost.step import compile_seconds, time_by_kind
from meshwright.planner.cost.symbolic import Operand, Program, Symbol, symbolic_array
from meshwright.spec.cluster import ClusterRates
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

RATES = tuple(ClusterRates.model_fields)
INPUTS = (*RATES, "sequence", "tokens", "count")
"""The inputs of the formulas: the rates, the tokens of a sequence, the tokens of a micro-batch on one rank, and the
number of micro-batches."""


class RankBytes(NamedTuple):
    """The bytes of one pipeline rank, as symbols or numbers: by kind of memory, and offloaded to host memory."""

    parameters: Operand
    gradients: Operand
    optimizer: Operand
    activations: Operand
    buffers: Operand
    host: Operand


class PlanFormulas(NamedTuple):
    """The fields of `TimeBreakdown`, and the bytes of each pipeline rank. `driver` is the bytes outside of the
    allocator, `first` the additional seconds of the first step, divided by the number of steps."""

    time: dict[str, Operand]
    ranks: tuple[RankBytes, ...]
    driver: float
    first: float


class SymbolicGrid(PlanGrid):
    """A plan grid of one plan, whose micro-batches are symbols."""

    @property
    def counts(self) -> Any:
        """Returns the number of micro-batches, as a symbol."""
        return symbolic_array(np.array([self.micro_batches[0].number], dtype=object))

    def tokens(self, sequence: Any) -> Any:
        """Returns the tokens of a micro-batch on one rank, as a symbol."""
        return symbolic_array(np.array([self.micro_batches[0].size], dtype=object))


class SymbolicContents(RankContents):
    """The contents of ranks, whose moments are formulas of the number of micro-batches."""

    def peak_moments(self, again: int, micro_batches: Sequence[Any], waits: StoredUntilW = (True, True)) -> PeakMoments:
        """Returns the moments of possible memory peaks for the number of micro-batches, a symbol."""
        (count,) = micro_batches
        numbers = accepted_counts(self.order, self.pp)
        known = with_equal_heads(super().peak_moments(again, numbers, waits))
        return PeakMoments(piecewise_linear(count, numbers, known.layers)[None], known.at_head[:1])


def accepted_counts(order: ScheduleChoice, pp: int) -> list[int]:
    """Returns those numbers of micro-batches that determine the memory of all larger numbers."""
    limit = order.rules.in_flight_limit(pp) or 2 * pp
    most = max(2 * limit + 2, order.rules.ordered_micro_batches)
    return [count for count in range(1, most + 1) if order.rules.accepts(pp, count)]


def with_equal_heads(found: PeakMoments) -> PeakMoments:
    """Returns equal moments for all numbers of micro-batches. If the moments at which the head runs backward differ,
    the result has the moments of each pattern. A number without some moment repeats its first moment of this kind."""
    patterns = list({row.tobytes(): row for row in found.at_head}.values())
    if len(patterns) == 1:
        return found
    rows = []
    for layers, at_head in zip(found.layers, found.at_head, strict=True):
        own, parts = np.arange(at_head.shape[1])[None], []
        for pattern in patterns:
            same = at_head[:, None] == pattern[:, :, None]  # (r, wanted, moments)
            assert same.any(axis=2).all()
            source = np.where(same[:, own[0], own[0]], own, same.argmax(axis=2))
            parts.append(np.take_along_axis(layers, source[..., None], 1))
        rows.append(np.concatenate(parts, axis=1))
    heads = np.concatenate(patterns, axis=1)
    return PeakMoments(np.stack(rows), np.broadcast_to(heads, (len(rows), *heads.shape)))


def piecewise_linear(count: Symbol, numbers: Sequence[int], values: Array) -> Any:
    """Returns the rows of `values`, one for each of `numbers`, as formulas of `count`. Between numbers and above the
    last one, the formulas are linear."""
    found = np.empty(values.shape[1:], dtype=object)
    x = symbolic_array(count)
    for at in np.ndindex(*found.shape):
        found[at] = _piecewise(x, numbers, values[(slice(None), *at)].tolist())
    return symbolic_array(found)


def _piecewise(count: Any, numbers: Sequence[int], values: Sequence[float]) -> Any:
    if len(set(values)) == 1:
        return values[0]
    slopes = [
        (after - before) / (right - left)
        for left, right, before, after in zip(numbers, numbers[1:], values, values[1:], strict=False)
    ]
    result: Any = values[-1] + slopes[-1] * (count - float(numbers[-1]))
    for at in range(len(slopes) - 1, 0, -1):
        if slopes[at] != slopes[at - 1]:
            line = values[at] + slopes[at - 1] * (count - float(numbers[at]))
            result = np.where(count > float(numbers[at]), result, line)
    return np.asarray(result, dtype=object).item()


class SymbolicCostModel(CostModel):
    """The cost model with symbols."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._formulas: dict[Any, LayerTimes] = {}

    def rank_contents(self, order: ScheduleChoice, pp: int, each: bool = False) -> RankContents:
        """Returns the contents of the pipeline ranks of a schedule."""
        key = (order, pp, each)
        if key not in self._rank_contents:
            known = super().rank_contents(order, pp, each)
            self._rank_contents[key] = SymbolicContents(self.flat, order, pp, known.kinds)
        return self._rank_contents[key]

    def work(self, box: PlanGrid) -> LayerTimes:
        """Returns the seconds of one layer of each layer run."""
        key = (box.cut, box.strides["tp"], box.micro_batches[0].compile, box.sequence_parallel)
        if key not in self._formulas:
            self._formulas[key] = layer_times(self.setting, *key[:3], self._tokens(box), np.array(key[3]))
        return self._formulas[key]


class StepFormulas:
    """Records plans of one job. Jobs with equal models may share a program: equal terms are recorded once."""

    def __init__(self, job: Job, program: Program) -> None:
        """`program` has the inputs INPUTS. The cluster of `job` has `Cluster.rates`."""
        assert job.cluster.rates is not None and program.names == INPUTS
        self.job, self.pricer = job, SymbolicCostModel(job)
        network, link, efficiency, sequence, tokens, count = program.inputs().values()
        self.tokens, self.count = tokens.item(), count.item()
        self.setting = setting = self.pricer.setting
        near = setting.fabric.links[0]  # on one node it is also the outer link
        # `model_copy` does not validate: the new values are symbols.
        links = [
            each.model_copy(update={"bandwidth": link if each is near else network}) for each in setting.fabric.links
        ]
        workload = job.workload.model_copy(update={"sequence": sequence})
        self.pricer.setting = replace(
            setting,
            job=job.model_copy(update={"workload": workload}),
            fabric=setting.fabric._replace(links=tuple(links)),
            device=setting.device.model_copy(update={"efficiency": efficiency}),
        )

    def record(self, plan: Plan) -> PlanFormulas:
        """Returns the formulas of a plan with equal ranks."""
        own = grid_of_plan(plan, plan.rows_per_round, self.job.model.blocks)
        fields = {name: getattr(own, name) for name in own.__dataclass_fields__}
        choice = own.micro_batches[0]._replace(size=self.tokens, number=self.count)
        box = SymbolicGrid(**{**fields, "micro_batches": (choice,)})
        ranks = self.pricer.ranks(box, each=True)
        states = self.pricer.states(box, ranks)
        time = time_by_kind(box, self.pricer.seconds(box, ranks, states))
        footprint = self.pricer.memory(box, ranks, states)
        columns = [
            np.broadcast_to(np.asarray(part, dtype=object), (box.pp, *[1] * 6)).reshape(-1).tolist()
            for part in footprint[: len(RankBytes._fields)]
        ]
        found = tuple(RankBytes(*column) for column in zip(*columns, strict=True))
        first = float(compile_seconds(self.setting, own, ranks.layers).max()) / self.job.workload.steps
        return PlanFormulas(time, found, float(driver_bytes(self.setting, own).max()), first)
