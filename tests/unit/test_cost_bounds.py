"""Bounds on what recompute and offload bring: no plan takes less, and none is faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from jobs import cluster, decoder, small_job

from meshwright.planner.cost.bounds import lower_bounds
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
            for part in (prices.step, reserved_bytes(pricer.setting, prices.allocated)[0])
        )
        seconds = np.maximum(step[:, :, :, :1, :, :1] + bound.more, bound.link)
        assert (taken >= bound.taken * (1 - ROUNDING))[legal].all()
        assert (step >= seconds * (1 - ROUNDING))[legal].all()
        compared += int(legal.sum())
        near = min(near, float((step / seconds)[..., 1:][legal[..., 1:]].min()))
    assert compared > 100 and near < 1.5
