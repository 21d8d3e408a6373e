"""Whole weights of ZeRO 3 lie once on a host: the numbers are those of gathered ones, and what is closed cannot be read."""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Any

import pytest
import torch
from equality import alone, anatomy_of, check, made, make_optimizer, train, train_between_hosts
from test_plans import SAMPLE, parse

from meshwright.train.trainer import Trainer, parallelize

GATHERED = [(model, plan) for model, plan in SAMPLE if parse(plan).zero == 3 and parse(plan).shards > 1][::2]


def trainer_of(plan: str, precision: str = "fp32") -> Trainer:
    return parallelize(made("llama", precision), make_optimizer, plan, precision=precision, anatomy=anatomy_of("llama"))


@pytest.mark.parametrize(("model", "plan"), GATHERED)
def test_a_plan_that_gathers_computes_what_one_device_computes(ranks: Any, model: str, plan: str) -> None:
    check(alone(model, "fp64", 2), ranks.run(parse(plan).world, train_between_hosts, model, plan, "fp64", 2), "fp64")


def test_weights_are_those_of_gathered_ones_bit_for_bit(ranks: Any) -> None:
    """Two ranks: their sums are the same in either order, over gloo too."""
    here, apart = (ranks.run(2, run, "llama", "dp2.z3.mb2", "fp32", 3)[0] for run in (train, train_between_hosts))
    assert here["losses"] == apart["losses"] and here["evaluated"] == apart["evaluated"]
    assert all(torch.equal(here["weights"][name], apart["weights"][name]) for name in apart["weights"])


def others_write() -> list[list[float]]:
    """Of every unit the first element of each rank's shard, as this rank reads it, when each has written its number there."""
    trainer, found = trainer_of("dp2.z3"), []
    for unit in trainer.engine.zero.units:
        unit.shard.fill_(trainer.mesh.rank + 1.0)
        unit.open()
        found.append([float(unit.weights[0]), float(unit.weights[-1])])
        unit.close()
    trainer.close()
    return found


def test_what_a_rank_writes_the_others_read_where_it_lies(ranks: Any) -> None:
    assert all(found == [[1.0, 2.0]] * len(found) for found in ranks.run(2, others_write))


def reads_what_is_closed() -> tuple[int, int]:
    """How a process ends that reads an open weight, and one that reads a closed one."""
    trainer = trainer_of("dp2.z3")
    unit, ends = trainer.engine.zero.units[1], []
    for is_open in (True, False):
        unit.open() if is_open else unit.close()
        child = os.fork()
        if not child:
            faulthandler.disable()
            os._exit(0 if float(unit.weights[0]) < 1e30 else 1)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    trainer.close()
    return ends[0], ends[1]


def test_closed_weights_cannot_be_read(ranks: Any) -> None:
    assert set(ranks.run(2, reads_what_is_closed)) == {(0, -signal.SIGSEGV)}


def held_once(plan: str) -> bool:
    trainer = trainer_of(plan)
    found = {unit.once is not None for unit in trainer.engine.zero.units}
    trainer.close()
    return found == {True}


@pytest.mark.parametrize(("plan", "once"), [("dp2.z3", True), ("dp2.z2", False), ("dp2.z3.off-parameters", False)])
def test_only_weights_that_would_be_gathered_lie_once(ranks: Any, plan: str, once: bool) -> None:
    assert set(ranks.run(2, held_once, plan)) == {once}
