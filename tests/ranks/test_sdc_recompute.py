"""Gradients that are computed again: a bit that flips in one is found, the step is made with the right one, and the run
ends as if nothing had been."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fault_runs import STEPS, events, launch, losses, state, train

from meshwright.elastic.local_agent import LocalAgent

TOP = 30
"""The highest bit of the exponent: a small number becomes a huge one."""


def flips(bits: dict[int, int], world: int) -> list[dict[str, Any]]:
    """The bit that flips in each step, on one rank after the other."""
    return [
        {"rank": step % world, "step": step, "phase": "gradient", "how": "flip", "bit": bit}
        for step, bit in bits.items()
    ]


PLANS = ["dp2.z1.mb2", "dp4", "dp2.tp2.z3", "dp2.pp2.z2.mb2"]


@pytest.mark.parametrize("plan", [PLANS[0], *(pytest.param(plan, marks=pytest.mark.soak) for plan in PLANS[1:])])
def test_a_bit_flip_in_a_gradient_is_found_if_recomputed_or_large(
    agent: LocalAgent, tmp_path: Path, text: Path, plan: str
) -> None:
    """Every other step is computed twice, so that bits of any place are found there; step 13 is suspected."""
    whole, hurt = (
        launch(text, tmp_path / name, plan, sdc_check_every=every, hang_timeout=0.0)
        for name, every in (("whole", 0), ("hurt", 2))
    )
    train(agent, whole, [])
    train(agent, hurt, flips({4: 16, 8: 31, 10: 23, 13: TOP}, whole.plan.world))
    assert [(event.kind, event.step) for event in events(tmp_path / "hurt")] == [
        ("divergence", step) for step in (4, 8, 10, 13)
    ]
    assert all("a bit had flipped" in event.cause for event in events(tmp_path / "hurt"))
    assert (
        losses(tmp_path / "hurt") == losses(tmp_path / "whole")
        and state(tmp_path / "hurt") == state(tmp_path / "whole") != {}
    )


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS)
def test_a_flipped_sign_in_a_step_that_is_computed_once_is_not_seen(
    agent: LocalAgent, tmp_path: Path, text: Path, plan: str
) -> None:
    """Only every second step is computed twice. The fault is in step 15, which is computed once."""
    whole, missed = (
        launch(text, tmp_path / name, plan, sdc_check_every=2, hang_timeout=0.0) for name in ("whole", "missed")
    )
    train(agent, whole, [])
    train(agent, missed, flips({15: 31}, whole.plan.world))
    assert events(tmp_path / "missed") == [] and state(tmp_path / "missed", STEPS) != state(tmp_path / "whole")


RESULTS = Path(__file__).parents[2] / "bench" / "results" / "gradients.md"
HEAD = """# Bits that flip in gradients

Three flips of each bit of a float32, each in one number of the gradient of one rank before it is summed, in 96 steps \
of one run (dp2). Found when only what looks wrong is computed again, and when every step is computed twice; where that
found less than three, the sum over ranks had rounded the bit away. Written by `make soak` \
(tests/ranks/test_sdc_recompute.py).

| bit | what it is | found by suspicion | found where computed twice |
|---|---|---|---|
"""


@pytest.mark.soak
def test_what_is_found_of_flips_of_every_bit_is_written_down(agent: LocalAgent, tmp_path: Path, text: Path) -> None:
    """Where every step is computed twice the end is the undisturbed one, to the bit."""
    last, first, each = 110, 12, 3
    steps = random.Random(19).sample(range(first, first + 32 * each), 32 * each)
    bits = {step: number // each for number, step in enumerate(steps)}
    runs = {
        name: launch(text, tmp_path / name, "dp2", last, sdc_check_every=every)
        for name, every in (("whole", 0), ("suspected", 0), ("twice", 1))
    }
    for name, work in runs.items():
        train(agent, work, [] if name == "whole" else flips(bits, 2))
    found = {name: {event.step for event in events(tmp_path / name)} for name in ("suspected", "twice")}
    assert state(tmp_path / "twice", last) == state(tmp_path / "whole", last) != {}
    assert losses(tmp_path / "twice") == losses(tmp_path / "whole")
    lines = []
    for bit in reversed(range(32)):
        mine = {step for step, flipped in bits.items() if flipped == bit}
        kind = "sign" if bit == 31 else "exponent" if bit >= 23 else "mantissa"
        lines.append(
            f"| {bit} | {kind} | {len(mine & found['suspected'])} of {each} | {len(mine & found['twice'])} of {each} |"
        )
        assert bit != TOP or mine <= found["suspected"]
    RESULTS.write_text(HEAD + "\n".join(lines) + "\n")
