"""Bounds on what recompute and offload bring: no plan takes less, and none is faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from jobs import cluster, decoder, named_job, small_job

from meshwright.planner.cost.bounds import data_floor, lower_bounds, step_floor
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.memory import reserved_bytes
from meshwright.planner.cost.plan_grid import RecomputeChoice
from meshwright.planner.search.space import PlanSpace
from meshwright.spec.enums import Recompute

ROUNDING = 1e-9


@pytest.mark.parametrize("link", [1e9, 1e12], ids=["a slow way to the host", "a fast way to the host"])
@pytest.mark.parametrize(("devices", "pins"), [(1, {}), (2, {"pp": 2}), (4, {"pp": 2, "dp": 2})])
def test_no_number_of_recomputed_blocks_and_no_offload_goes_below_the_bounds(
    link: float, devices: int, pins: dict[str, int]
) -> None:
    on = cluster(1, devices, 1e9)
    on = on.but(groups=(on.groups[0].but(host_bandwidth=link, host_memory=1e9),))
    model = decoder(((6, 64),), hidden=32, heads=2, vocabulary=64, tied=True)
    job = small_job(model, on, 4, sequence=256).but(pins=pins)
    pricer, compared, near = CostModel(job), 0, np.inf
    for region in PlanSpace(job).groups():
        ways = ((), *region.offloads)
        bound = lower_bounds(pricer, region.box, ways)
        each = replace(
            region.box,
            offload=ways,
            recompute=(*region.box.recompute, *(RecomputeChoice(Recompute.full, k, fewer=True) for k in range(1, 6))),
        )
        prices = pricer.price(each)
        legal = np.broadcast_to(each.legal[0], each.shape)
        step, taken = (
            np.broadcast_to(part, each.shape)
            for part in (
                prices.step,
                reserved_bytes(pricer.setting, prices.allocated, driver_bytes(pricer.setting, each))[0],
            )
        )
        seconds = np.maximum(step[:, :, :, :1, :, :1] + bound.more, bound.link)
        assert (taken >= bound.taken * (1 - ROUNDING))[legal].all()
        assert (step >= seconds * (1 - ROUNDING))[legal].all()
        compared += int(legal.sum())
        near = min(near, float((step / seconds)[..., 1:][legal[..., 1:]].min()))
    assert compared > 100 and near < 1.5


@pytest.mark.parametrize(
    ("model", "on", "batch", "changes"),
    [
        ("llama2-7b", "2x4:h100", 64, {}),
        ("llama2-7b", "2x(2x(2x4:h100)@ib)@wan", 64, {}),
        ("llama2-7b", "2x4:h100", 64, {"pins": {"offload": ("optimizer",)}}),
        ("mixtral-8x7b", "2x8:a100-80gb", 64, {}),
        ("gpt2", "2x4:cpu", 16, {"precision": "fp32"}),
    ],
)
def test_no_plan_is_faster_than_the_bound_of_its_cell(
    model: str, on: str, batch: int, changes: dict[str, object]
) -> None:
    """Cells: schedule, micro-batches, sequence parallelism and ZeRO; any recompute, offload as in the box of the group,
    every order of axes."""
    job = named_job(model, on, batch, 1024, **changes)
    pricer, tightness = CostModel(job), []
    for group in PlanSpace(job).groups():
        for box in (group.box, *map(group.other, group.axes)):
            floor = step_floor(pricer, box)
            bound = floor.seconds[..., None] + data_floor(pricer, box, floor)[:, :, None, :]
            step = np.where(box.legal[0], pricer.price(box).step, np.inf).min(axis=(3, 5))
            assert (bound <= step * (1 + ROUNDING)).all()
            tightness += (bound / step)[np.isfinite(step)].tolist()
    assert len(tightness) > 500 and np.median(tightness) > 0.6
