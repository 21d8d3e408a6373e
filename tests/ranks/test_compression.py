"""Compressed gradients: what one process gets that compresses each host's sum, kept back and sent later, the same on all ranks and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality import anatomy_of, make_batch, make_model, make_optimizer
from hosts import hosts
from pool import Pool

from meshwright.base.errors import InputError
from meshwright.parallel.compression import CODES
from meshwright.parallel.lanes import slice_of
from meshwright.parallel.objective import Objective
from meshwright.spec.compression import Compression
from meshwright.spec.plan import parse_plan
from meshwright.spec.precision import recipe
from meshwright.spec.workload import Workload
from meshwright.train.trainer import Trainer, parallelize

CALLS = 6


def trainer_of(plan: str, kind: str, each: int) -> Trainer:
    with hosts(each):
        asked = recipe("fp64").but(compression=Compression(kind=kind) if kind else None)  # type: ignore[arg-type]
        return parallelize(make_model("llama"), make_optimizer, plan, precision=asked, clip=1.0, anatomy=anatomy_of("llama"))


def gradients(plan: str, kind: str, each: int, other: int = 1) -> list[Any]:
    """The gradients of CALLS batches (`other` 0: of one batch as often) without an update, and where parameters lie in each buffer."""
    trainer = trainer_of(plan, kind, each)
    found = [trainer.gradients(make_batch("llama", step * other))[2] for step in range(CALLS)]
    return [found, [(unit.unit.numel, unit.unit.offsets) for unit in trainer.engine.zero.units]]


def simulated(code: str, parts: int, each: int, units: list[Any]) -> list[dict[str, torch.Tensor]]:
    """The same in one process: the sum of each host's replicas, its slices coded with what was kept, added in order of host."""
    model = make_model("llama").double()
    objective = Objective(model, None, None)
    kept: dict[tuple[int, int, int], torch.Tensor] = {}
    coder, found = CODES[code](), []
    for step in range(CALLS):
        batch, sums = make_batch("llama", step), []
        tokens, rows = objective.count(batch), 8 // parts
        for part in range(parts):
            model.zero_grad()
            mine = {name: value[part * rows : (part + 1) * rows] for name, value in batch.items()}
            (objective.sum(model(**objective.inputs(mine)), mine) / tokens).backward()
            if part % each == 0:
                sums.append({name: torch.zeros_like(value) for name, value in model.named_parameters()})
            for name, value in model.named_parameters():
                assert value.grad is not None
                sums[-1][name] += value.grad
        total: dict[str, torch.Tensor] = {}
        for number, (numel, offsets) in enumerate(units):
            whole = torch.zeros(numel, dtype=torch.float64)
            for host, held in enumerate(sums):
                flat = torch.zeros(numel, dtype=torch.float64)
                for name, offset in offsets.items():
                    flat[offset : offset + held[name].numel()] = held[name].view(-1)
                for rank in range(each):
                    piece = flat[slice_of(flat, rank, each)]
                    here = kept.setdefault((number, host, rank), torch.zeros_like(piece))
                    said = coder.decode(coder.encode(here + piece), piece.numel(), piece.dtype)
                    here += piece - said
                    whole[slice_of(flat, rank, each)] += said
            for name, offset in offsets.items():
                total[name] = whole[offset : offset + sums[0][name].numel()].view(sums[0][name].shape)
        found.append(total)
    return found


def off(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def lost(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of the whole gradient: a small tensor that shares a block with a large one loses more of itself."""
    return (
        float(sum((ours[name] - theirs[name]).square().sum() for name in theirs) / sum(one.square().sum() for one in theirs.values()))
        ** 0.5
    )


@pytest.mark.parametrize(("world", "each", "code"), [(2, 1, "int8"), (4, 2, "int8"), (2, 1, "bf16")])
def test_compressed_gradients_are_those_of_one_process_that_compresses_alike(ranks: Pool, world: int, each: int, code: str) -> None:
    ours, units = ranks.run(world, gradients, f"dp{world}", code, each)[0]
    for mine, theirs in zip(ours, simulated(code, world, each, units), strict=True):
        assert off(mine, theirs) < 1e-10


@pytest.mark.parametrize(("plan", "each"), [("dp4.z1", 2), ("dp4.z2", 2), ("dp2x2.z1", 1), ("dp2.z3", 1)])
def test_what_is_lost_once_is_sent_later_at_every_zero_stage(ranks: Pool, plan: str, each: int) -> None:
    world = parse_plan(plan).world
    lossy, plain = ranks.run(world, gradients, plan, "int8", each, 0)[0][0], ranks.run(world, gradients, plan, "", each, 0)[0][0]
    once = lost(lossy[0], plain[0])
    sums = [{name: sum(one[name] for one in calls) for name in plain[0]} for calls in (lossy, plain)]
    assert 1e-6 < once < 0.02
    assert lost(*sums) < once / 2  # without feedback it would be `once`


def test_nothing_is_lost_where_nothing_leaves_the_host(ranks: Pool) -> None:
    assert off(ranks.run(2, gradients, "dp2", "int8", 2)[0][0][0], ranks.run(2, gradients, "dp2", "", 2)[0][0][0]) == 0.0


def stopped(plan: str, folder: str) -> list[Any]:
    """Four steps in one go, and two, a checkpoint and two more; losses, and bytes sent in a step."""
    whole = trainer_of(plan, "int8", 1)
    losses = [whole.step(make_batch("llama", step)).loss for step in range(4)]
    first = trainer_of(plan, "int8", 1)
    for step in range(2):
        first.step(make_batch("llama", step))
    path = first.save(folder)
    second = trainer_of(plan, "int8", 1)
    second.load(path)
    records = [second.step(make_batch("llama", step)) for step in (2, 3)]
    return [losses[2:], [record.loss for record in records], records[-1].sent["data"]]


@pytest.mark.parametrize("plan", ["dp2", "dp2.z1"])
def test_going_on_from_a_checkpoint_sends_what_was_kept(ranks: Pool, plan: str, tmp_path: Path) -> None:
    for whole, resumed, sent in ranks.run(2, stopped, plan, str(tmp_path)):
        assert whole == resumed
        numel = sum(value.numel() for value in make_model("llama").parameters())
        assert sent == pytest.approx(numel * {"dp2": 1.02, "dp2.z1": 0.51 + 4.0}[plan], rel=0.06)  # weights of z1 are gathered as they are


def test_compression_that_cannot_be_is_refused_in_one_line() -> None:
    for changes in ({"precision": "fp16"}, {"exact": 2}):
        with pytest.raises((InputError, ValueError), match="leave compression out"):
            Workload(compression=Compression(kind="int8"), **changes)  # type: ignore[arg-type]
