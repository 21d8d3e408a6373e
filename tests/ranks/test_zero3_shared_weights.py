"""Whole weights of ZeRO 3 lie once on a host: the numbers are those of gathered ones, and what is closed cannot be
read."""

from __future__ import annotations

import os
import resource
from contextlib import closing
from typing import Any

import pytest
import torch
from equality import alone, anatomy_of, check, made, make_batch, make_optimizer, train, train_between_hosts
from test_plans import SAMPLE, parse
from torch import nn
from torch.nn import functional as F
from world_group import between_hosts

from meshwright.core.errors import InputError
from meshwright.train.trainer import Trainer, parallelize

GATHERED = [(model, plan) for model, plan in SAMPLE if parse(plan).zero == 3 and parse(plan).shards > 1][::2]


def trainer_of(plan: str, precision: str = "fp32") -> Trainer:
    return parallelize(made("llama", precision), make_optimizer, plan, precision=precision, anatomy=anatomy_of("llama"))


@pytest.mark.soak
@pytest.mark.parametrize(("model", "plan"), GATHERED)
def test_a_plan_that_gathers_computes_what_one_device_computes(ranks: Any, model: str, plan: str) -> None:
    check(alone(model, "fp64", 2), ranks.run(parse(plan).world, train_between_hosts, model, plan, "fp64", 2), "fp64")


def test_weights_are_those_of_gathered_ones_bit_for_bit(ranks: Any) -> None:
    """Two ranks: their sums are the same in either order, over gloo too."""
    here, apart = (ranks.run(2, run, "llama", "dp2.z3.mb2", "fp32", 3)[0] for run in (train, train_between_hosts))
    assert here["losses"] == apart["losses"] and here["evaluated"] == apart["evaluated"]
    assert all(torch.equal(here["weights"][name], apart["weights"][name]) for name in apart["weights"])


def others_write() -> list[list[float]]:
    """Of every unit the first element of each rank's shard, as this rank reads it, when each has written its number
    there."""
    trainer, found = trainer_of("dp2.z3"), []
    for unit in trainer.engine.zero.units:
        unit.weights.storages[0].fill_(trainer.mesh.rank + 1.0)
        unit.weights.unshard()
        found.append([float(unit.weights.full[0]), float(unit.weights.full[-1])])
        unit.weights.reshard()
    trainer.close()
    return found


def test_what_a_rank_writes_the_others_read_where_it_lies(ranks: Any) -> None:
    assert all(found == [[1.0, 2.0]] * len(found) for found in ranks.run(2, others_write))


def with_few_files() -> float:
    """A step's loss where the process may have twelve descriptors more than it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    limit = [number for number in range(len(taken) + 13) if number not in taken][12]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with closing(trainer_of("dp2.z3")) as trainer:
            return trainer.step(make_batch("llama", 0)).loss
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_low_limit_of_open_files_is_raised_as_far_as_the_system_lets(ranks: Any) -> None:
    assert ranks.run(2, with_few_files)[0] > 0


def closed() -> list[str]:
    """What a product with a closed weight ends in, for each of a unit."""
    trainer, said = trainer_of("dp2.z3"), []
    for parameter in trainer.engine.zero.units[1].parameters.values():
        try:
            said.append(f"{parameter.detach().flatten().dot(parameter.detach().flatten())}")
        except InputError as error:
            said.append(str(error))
    trainer.close()
    return said


def test_closed_weights_cannot_be_read(ranks: Any) -> None:
    for said in ranks.run(2, closed):
        assert said and all("is used outside of the forward of its module" in each for each in said)


class Later(torch.autograd.Function):
    """Its backward reads a weight of a block that is through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: nn.Sequential) -> torch.Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(gradient, ctx.block[0].weight), None


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = (
            nn.Embedding(16, 8),
            nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)),
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = Later.apply(self.table(input_ids), self.layers[0])
        for layer in self.layers:
            x = layer(x)
        return x


def read_late(apart: bool) -> str:
    with between_hosts(apart):
        trainer = parallelize(Reading(), make_optimizer, "dp2.z3", loss=lambda output, batch: output.mean())
    try:
        trainer.step({"input_ids": torch.arange(16).view(4, 4)})
    except InputError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_custom_backward_that_reads_resharded_weights_ends_in_one_line(ranks: Any, apart: bool) -> None:
    """A rank was killed by SIGSEGV, and only where the weight lay in the first page of its unit."""
    for said in ranks.run(2, read_late, apart):
        assert said.startswith(
            "plan dp2.z3: layers.0.0.weight (8, 8) is used outside of the forward"
        ) and said.endswith("use z2 at most")


def held_once(plan: str) -> bool:
    trainer = trainer_of(plan)
    found = {unit.weights.shared is not None for unit in trainer.engine.zero.units}
    trainer.close()
    return found == {True}


@pytest.mark.parametrize(("plan", "once"), [("dp2.z3", True), ("dp2.z2", False), ("dp2.z3.off-parameters", False)])
def test_only_weights_that_would_be_gathered_lie_once(ranks: Any, plan: str, once: bool) -> None:
    assert set(ranks.run(2, held_once, plan)) == {once}
