"""Compressed gradients: what one process gets that compresses each host's sum, kept back and sent later, the same on
all ranks and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import anatomy_of, make_batch, make_model, make_optimizer
from hosts import hosts
from pool import Pool

from meshwright.core.errors import InputError
from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.comm.compression import CODECS, PowerSGDReducer, compressible_matrices
from meshwright.runtime.comm.group import wrap_process_group
from meshwright.runtime.comm.shm.collectives import rank_slice
from meshwright.runtime.loss import LossHead
from meshwright.spec.plan import parse_plan
from meshwright.spec.precision import GradientCompression, recipe
from meshwright.spec.workload import Workload
from meshwright.train.trainer import Trainer, parallelize

CALLS = 6
LONGER = [
    pytest.param(*case, marks=pytest.mark.soak)
    for case in [("dp4", 2), ("dp4.z2", 2), ("dp2x2.z1", 1), ("dp2.tp2.z2.mb2", 1)]
]


def trainer_of(plan: str, kind: str, each: int) -> Trainer:
    with hosts(each):
        asked = recipe("fp64").but(compression=GradientCompression(kind=kind) if kind else None)  # type: ignore[arg-type]
        return parallelize(
            make_model("llama"), make_optimizer, plan, precision=asked, clip=1.0, anatomy=anatomy_of("llama")
        )


def gradients(plan: str, kind: str, each: int, other: int = 1) -> list[Any]:
    """The gradients of CALLS batches (`other` 0: of one batch as often) without an update, and where parameters lie in
    each buffer."""
    trainer = trainer_of(plan, kind, each)
    found = [trainer.gradients(make_batch("llama", step * other))[2] for step in range(CALLS)]
    return [found, [(unit.layout.numel, unit.layout.offsets) for unit in trainer.engine.zero.units]]


def simulated(code: str, parts: int, each: int, units: list[Any]) -> list[dict[str, torch.Tensor]]:
    """The same in one process: the sum of each host's replicas, its slices coded with what was kept, added in order of
    host."""
    model = make_model("llama").double()
    objective = LossHead(model, None, None)
    kept: dict[tuple[int, int, int], torch.Tensor] = {}
    coder, found = CODECS[code](), []
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
                    piece = flat[rank_slice(flat, rank, each)]
                    here = kept.setdefault((number, host, rank), torch.zeros_like(piece))
                    here += piece
                    bytes_of, before = torch.empty(coder.size(here.numel()), dtype=torch.uint8), here.clone()
                    coder.encode(here, bytes_of)
                    coder.decode(bytes_of, said := torch.empty_like(here), add=False)
                    assert torch.allclose(here, before - said, rtol=0, atol=1e-15)
                    whole[rank_slice(flat, rank, each)] += said
            for name, offset in offsets.items():
                total[name] = whole[offset : offset + sums[0][name].numel()].view(sums[0][name].shape)
        found.append(total)
    return found


def off(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def lost(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of the whole gradient: a small tensor that shares a block with a large one loses more of itself."""
    return (
        float(
            sum((ours[name] - theirs[name]).square().sum() for name in theirs)
            / sum(one.square().sum() for one in theirs.values())
        )
        ** 0.5
    )


@pytest.mark.parametrize(
    ("world", "each", "code"), [(2, 1, "int8"), pytest.param(4, 2, "int8", marks=pytest.mark.soak), (2, 1, "bf16")]
)
def test_compressed_gradients_are_those_of_one_process_that_compresses_alike(
    ranks: Pool, world: int, each: int, code: str
) -> None:
    ours, units = ranks.run(world, gradients, f"dp{world}", code, each)[0]
    for mine, theirs in zip(ours, simulated(code, world, each, units), strict=True):
        assert off(mine, theirs) < 1e-10


def powersgd(units: list[Any]) -> list[dict[str, torch.Tensor]]:
    """Two hosts' low-rank sums in one process, matrix by matrix as the paper has them."""
    model = make_model("llama").double()
    objective = LossHead(model, None, None)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    kept: list[dict[str, torch.Tensor]] = [{}, {}]
    factors = {}
    for numel, offsets in units:
        held = compressible_matrices([(offset, shapes[name]) for name, offset in offsets.items()], [(0, numel)], 4)
        first = PowerSGDReducer(held, numel, 4, torch.zeros(0, dtype=torch.float64)).initial_factors
        names = {offset: name for name, offset in offsets.items()}
        factors |= {
            names[at.start]: q.view(-1, 4)
            for at, q in zip(held, first.split([4 * at.columns for at in held]), strict=True)
        }
    found = []
    for step in range(CALLS):
        batch, total = make_batch("llama", step), {}
        tokens = objective.count(batch)
        for part, mine in enumerate(kept):
            model.zero_grad()
            rows = {name: value[part * 4 : (part + 1) * 4] for name, value in batch.items()}
            (objective.sum(model(**objective.inputs(rows)), rows) / tokens).backward()
            for name, value in model.named_parameters():
                assert value.grad is not None
                mine[name] = mine.get(name, 0) + value.grad.clone()
        for name in shapes:
            one, other = kept[0][name], kept[1][name]
            if name not in factors:
                total[name], kept[0][name], kept[1][name] = one + other, torch.zeros_like(one), torch.zeros_like(one)
                continue
            left = torch.linalg.qr(one @ factors[name] + other @ factors[name])[0]
            rights = one.T @ left, other.T @ left
            kept[0][name], kept[1][name] = one - left @ rights[0].T, other - left @ rights[1].T
            factors[name] = rights[0] + rights[1]
            total[name] = left @ factors[name].T
        found.append(total)
    return found


def test_low_rank_gradients_are_those_of_the_paper_in_one_process(ranks: Pool) -> None:
    ours, units = ranks.run(2, gradients, "dp2", "low-rank", 1)[0]
    for mine, theirs in zip(ours, powersgd(units), strict=True):
        assert off(mine, theirs) < 1e-9


@pytest.mark.soak
@pytest.mark.parametrize(("plan", "each"), [("dp4.z1", 2), *LONGER])
def test_low_rank_comes_closer_with_every_call_at_every_zero_stage(ranks: Pool, plan: str, each: int) -> None:
    """Of one batch again and again: what was kept back is sent, and the factors turn to where the gradient lies."""
    world = parse_plan(plan).world
    lossy, plain = (
        ranks.run(world, gradients, plan, "low-rank", each, 0)[0][0],
        ranks.once(world, gradients, plan, "", each, 0)[0][0],
    )
    sums = [{name: sum(one[name] for one in calls) for name in plain[0]} for calls in (lossy, plain)]
    assert lost(*sums) < 0.6 * lost(lossy[0], plain[0])


@pytest.mark.parametrize(("plan", "each"), [("dp4.z1", 2), pytest.param("dp2.z3", 1, marks=pytest.mark.soak), *LONGER])
def test_what_is_lost_once_is_sent_later_at_every_zero_stage(ranks: Pool, plan: str, each: int) -> None:
    world = parse_plan(plan).world
    lossy, plain = (
        ranks.run(world, gradients, plan, "int8", each, 0)[0][0],
        ranks.once(world, gradients, plan, "", each, 0)[0][0],
    )
    once = lost(lossy[0], plain[0])
    sums = [{name: sum(one[name] for one in calls) for name in plain[0]} for calls in (lossy, plain)]
    assert 1e-6 < once < 0.02
    assert lost(*sums) < once / 2  # without feedback it would be `once`


def test_nothing_is_lost_where_nothing_leaves_the_host(ranks: Pool) -> None:
    assert (
        off(ranks.run(2, gradients, "dp2", "int8", 2)[0][0][0], ranks.run(2, gradients, "dp2", "", 2)[0][0][0]) == 0.0
    )


def stopped(plan: str, kind: str, folder: str) -> list[Any]:
    """Four steps in one go, and two, a checkpoint and two more; losses, and bytes sent in a step."""
    whole = trainer_of(plan, kind, 1)
    losses = [whole.step(make_batch("llama", step)).loss for step in range(4)]
    first = trainer_of(plan, kind, 1)
    for step in range(2):
        first.step(make_batch("llama", step))
    path = first.save(folder)
    second = trainer_of(plan, kind, 1)
    second.load(path)
    records = [second.step(make_batch("llama", step)) for step in (2, 3)]
    return [losses[2:], [record.loss for record in records], records[-1].sent["data"]]


@pytest.mark.parametrize(
    ("plan", "kind", "least", "most"),
    [pytest.param("dp2.z1", "int8", 4.5, 4.6, marks=pytest.mark.soak), ("dp2", "low-rank", 0.2, 1.1)],
)
def test_going_on_from_a_checkpoint_sends_what_was_kept(
    ranks: Pool, plan: str, kind: str, least: float, most: float, tmp_path: Path
) -> None:
    """`least` and `most`: bytes sent for two weights; at ZeRO 1 half of them are gathered as they are, in 8 bytes."""
    for whole, resumed, sent in ranks.run(2, stopped, plan, kind, str(tmp_path)):
        assert whole == resumed
        assert least < sent / sum(value.numel() for value in make_model("llama").parameters()) < most


def test_compression_that_cannot_be_is_refused_in_one_line() -> None:
    for changes in ({"precision": "fp16"}, {"exact": 2}):
        with pytest.raises((InputError, ValueError), match="leave compression out"):
            Workload(compression=GradientCompression(kind="int8"), **changes)  # type: ignore[arg-type]


def two_under_way() -> list[list[float]]:
    """Two sums of one buffer, the second begun before the first is waited for: what is no matrix of each."""
    with hosts(1):
        mesh = make_parallel_context(parse_plan("dp2"))
    assert mesh.world is not None
    ways = [group for group in (wrap_process_group(dist.new_group([0, 1])) for _ in range(2)) if group is not None]
    held = compressible_matrices([(0, (16, 16)), (256, (4,))], [(0, 260)], 2)
    code = PowerSGDReducer(held, 260, 2, torch.zeros(0, dtype=torch.float64))
    sums = [torch.full((260,), 10.0**call * (1 + mesh.rank), dtype=torch.float64) for call in range(3)]
    crossings = [code.all_reduce(each, ways[0], ways[1]) for each in sums[:2]]
    for crossing in crossings:
        crossing.wait()
    code.all_reduce(sums[2], ways[0], ways[1]).wait()
    return [each[256:].tolist() for each in sums]


def test_a_reduction_during_another_one_of_its_buffer_sends_nothing_twice(ranks: Pool) -> None:
    for found in ranks.run(2, two_under_way):
        assert found == [[3.0 * 10**call] * 4 for call in range(3)]
