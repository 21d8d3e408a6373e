"""What the generator of odd models found, one named case each: equal to one device under these plans, or refused where
that is what is demanded."""

from __future__ import annotations

from typing import Any

import pytest
from odd_jobs import EQUAL, REFUSED, run
from odd_models import Job

# Only `make soak` runs the plans after the bar.
RUNS = {
    "attention and a gated perceptron that read the same input": ("body:parallel", "tp2.mb8 | tp2.sp.mb8 dp2.tp2.mb4"),
    "dropout inside a block that is recomputed": (
        "inner:dropout-all",
        "dp1.mb2.rc-full | dp1.mb8 dp2.z3.mb2.rc-full pp2.mb2.rc-full",
    ),
    "one norm that all blocks hold": (
        "stack:shared-module body:attention",
        "dp1.mb8 tp2.mb8 | dp2 dp2.z1 dp2.z2.mb2 cp2.mb8",
    ),
    "one norm that all blocks hold, gathered once for all": (
        "stack:shared-module",
        "dp2.z3.mb4.rc-full | dp2.z3 dp2.z3.mb4",
    ),
    "a parameter without elements beside one that is updated": (
        "front:empty between:layer-embedding",
        "dp2.z1.mb4 | dp1 dp2.z3",
    ),
    "a counter between blocks, where a rank runs several stages": ("once:counter", "pp2.mb8.zbv | pp2.mb8"),
    "a counter behind the blocks": ("back:counter", "pp2.mb8.zbv"),
    "a hook on a weight that several stages of a rank use": (
        "between:weight-hook",
        "pp2.mb8.zbv | pp2.mb2.interleaved2",
    ),
    "a loss that counts its calls": ("loss:grows", "| tp2.mb8 pp2.mb8"),
    "a loss that reads what hooks keep of each block": ("loss:captured", "dp2.z3.mb4.rc-full | dp1.mb2 dp2 tp2.mb8"),
    "a block that differentiates a gradient, which recomputes it twice": (
        "block:slope inner:dropout-all",
        "dp1.mb8.rc-full | tp2.mb4.rc-full dp2.z3.mb4.rc-full",
    ),
    "hooks that recompute calls again": ("loss:captured-inside", "dp2.z3.mb4.rc-full | dp1.mb4.rc-sac"),
    "TorchScript in a block that is recomputed": ("block:scripted", "pp2.mb2.rc-full | dp2.z3.mb4.rc-full"),
    "hooks on all weights where a gradient is deferred": ("hook:weights", "pp2.mb8.zbh1 | pp2.mb4.zbv"),
    "hooks on accumulated gradients where one is deferred": ("hook:accumulated", "pp2.mb4.zbv | pp2.mb8.zbh1"),
    "a last batch of fewer rows that depend on each other, in one pass": (
        "batch:odd-last once:rows",
        "dp1.mb8 | tp2.mb8.sp",
    ),
    "a change in place of what ranks have gathered": ("back:in-place-input", "tp2.sp | tp2.pp2.sp.mb2.zbv"),
    "dropout of everything in a layer that the model checkpoints": ("flow:checkpoint inner:dropout-all", "dp1.mb2"),
    "blocks that run backwards, read by Python code between them": ("between:tolist stack:reversed", "dp2.z3.mb4"),
    "a reentrant checkpoint, whose first forward has no gradients": (
        "block:clipped-gradient flow:reentrant",
        "dp2.z3.mb4 | dp2.z3.mb4.off-parameters",
    ),
    "a dict that the blocks of two lists write to": ("flow:store stack:two", "dp1.mb8 | dp2.z3.mb4 dp1.mb4.rc-full"),
}
REFUSALS = {
    "a capacity of image patches, which one micro-batch does not reach": ("input:image once:capacity", "dp1.mb2 | dp2"),
    "code for few rows behind a head of zeros": ("head:zero once:few-rows", "dp1.mb2 | dp2.mb2 pp2.mb2.gpipe"),
    "a norm that reentrant checkpoints share": ("flow:reentrant stack:shared-module", "dp1 | dp2.z3 tp2"),
    "one norm that all blocks hold": ("stack:shared-module", "pp2.mb2 | pp2.mb2.z3"),
    "reused blocks between which lists are made": ("back:tolist stack:reused", "pp2.mb2"),
    "a counter that two stages increment": ("between:counter", "pp2.mb8.zbv | pp2.mb8"),
    "a teacher whose weights are freed between the layers": ("block:moving-teacher", "dp2.z3.mb4.off-parameters"),
    "a maximum over the rows that moves the loss by 2e-9": ("back:item block:detach", "dp2.tp2.z3.mb4"),
    "a backward hook of blocks": ("hook:block-backward", "pp2.mb4.zbv | pp2.mb8"),
    "a loss that reads parts of the sequence, which hooks keep": ("loss:captured", "tp2.mb8.sp"),
    "a loss that reads parts of the features, which hooks keep": (
        "loss:captured-inside",
        "tp2.mb8 | tp2.mb8.sp pp2.mb4",
    ),
    "a capacity of tokens in front of the blocks": ("front:capacity head:first", "dp2.z3"),
    "code for a number of rows, in a model that makes tensors without a device": (
        "block:row-factor inner:features",
        "dp1.mb2 | pp2.mb2",
    ),
    "code for a number of rows before the dry run of the stages": ("flow:dict front:many-rows", "pp2.mb2"),
    "a weight of a block that the model reads behind the blocks too": ("between:borrowed", "tp2.sp | tp2.mb8.sp"),
    "a branch on values next to dropout of everything": ("back:branch block:dropout-call", "dp1.mb2"),
}
PROVEN = {
    "a loss that counts its calls": ("loss:grows", "pp2.mb8 | tp2.mb8"),
    "a teacher between blocks that the forward moves": ("between:moving-teacher", "dp2.mb4 | dp2.z1.mb4"),
    "a teacher in blocks that the forward moves": ("block:moving-teacher", "| dp2.mb4 dp2.z2.mb4"),
}


def listed(cases: dict[str, tuple[str, str]]) -> list[Any]:
    found: list[Any] = []
    for name, (features, plans) in cases.items():
        every_time, _, soaked = plans.partition("|")
        found += [pytest.param(features, plan, id=f"{name}, {plan}") for plan in every_time.split()]
        found += [pytest.param(features, plan, id=f"{name}, {plan}", marks=pytest.mark.soak) for plan in soaked.split()]
    return found


@pytest.mark.parametrize(("features", "plan"), listed(RUNS))
@pytest.mark.covering(7)
def test_a_model_that_was_trained_wrong_is_equal_to_one_device(ranks: Any, features: str, plan: str) -> None:
    assert run(ranks, Job(1, tuple(sorted(features.split()))), plan) == (EQUAL, "")


@pytest.mark.parametrize(("features", "plan"), listed(PROVEN))
def test_a_model_whose_state_moves_from_step_to_step_is_proven(ranks: Any, features: str, plan: str) -> None:
    assert run(ranks, Job(1, tuple(sorted(features.split()))), plan, prove="start") == (EQUAL, "")


@pytest.mark.parametrize(("features", "plan"), listed(REFUSALS))
@pytest.mark.covering(4)
def test_a_model_that_crashed_or_stood_still_is_refused_in_one_line(ranks: Any, features: str, plan: str) -> None:
    outcome, line = run(ranks, Job(1, tuple(sorted(features.split()))), plan)
    assert outcome == REFUSED, line
