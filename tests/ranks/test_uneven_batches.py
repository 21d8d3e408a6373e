"""Replicas with unlike numbers of micro-batches: the loss is the loss of one device, and what cannot be so is refused
in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import alone, anatomy_of, check, make_batch, make_model, make_optimizer, train

from meshwright.core.errors import InputError
from meshwright.spec.constraints import batch_violations
from meshwright.spec.grid import first_row, micro_batch_rows
from meshwright.spec.plan import parse_plan
from meshwright.spec.scaled_down import scale_down_plan
from meshwright.train.metrics import agree_on_step
from meshwright.train.straggler import CONFIRMATION_STEPS, MEDIAN_WINDOW_STEPS, WARMUP_STEPS, StragglerMonitor
from meshwright.train.trainer import parallelize

SAMPLE = [
    ("llama", "dp2.ga6-2"), ("llama", "dp2.z1.mb2.ga1-3"), ("llama-tied", "dp2.pp2.z1.ga5-3"),
    ("llama", "dp2x2.z1.ga1-2-4-1"), ("gpt2", "dp2.tp2.z1.mb2.ga3-1"), ("llama", "dp4.rc-full.ga1-1-2-4"),
    ("llama", "dp2.mb3-1.ga2-2"), ("llama-tied", "dp2.z3.mb3-1"), ("gpt2", "dp2.pp2.z1.mb2-1.ga3-2"),
    ("llama", "dp2.tp2.z2.mb3-1"),
]  # fmt: skip
MORE = [(model, plan) for model in ("llama", "bert", "gpt2") for plan in ("dp2.pp2.gpipe.ga7-1", "dp2.pp2.zbh1.ga3-5",
    "dp2.pp2.zbv.ga5-3", "dp2.cp2.z1.ga3-5", "dp3.z1.ga2-5-1",
    "dp2.pp2.z3.mb3-1.interleaved2", "dp2.pp2.z1.mb2-1.zbv.ga3-2", "dp2.cp2.z1.mb1-2.ga4-2",
    "dp2x2.z1.mb4-2-1-1.ga1-1-1-1", "dp2.z2.mb3-1.rc-full")
    if not (model == "bert" and "cp" in plan)]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize(("model", "plan"), SAMPLE)
def test_unlike_shares_train_to_the_loss_of_one_device(ranks: Any, model: str, plan: str) -> None:
    check(alone(model, "fp64", 2), ranks.run(parse_plan(plan).world, train, model, plan, "fp64", 2), "fp64")


@pytest.mark.soak
@pytest.mark.parametrize(("model", "plan"), MORE)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_unlike_shares_of_every_schedule_train_to_the_loss_of_one_device(
    ranks: Any, model: str, plan: str, precision: str
) -> None:
    check(alone(model, precision, 2), ranks.run(parse_plan(plan).world, train, model, plan, precision, 2), precision)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("dp2.z2.ga3-1", "use z0 or z1"),
        ("dp4.z1.ga3-1", "give each of dp(4) replicas at least one"),
        ("dp2.ga3-0", "at least one micro-batch"),
        ("dp2.pp2.interleaved2.ga3-1", "schedule interleaved needs the same number"),
        ("dp2.mb2-2", "if all sizes are equal, write only mb"),
        ("dp3.mb2-1", "give each of dp(3) replicas at least one sequence"),
        ("dp2.z1.ep2.mb2-1", "use ep1"),
    ],
)
def test_shares_that_would_hang_are_refused_in_one_line(plan: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        parse_plan(plan)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_shares_read_back_from_their_name_and_must_sum_to_the_batch() -> None:
    plan = parse_plan("dp2.z1.mb2.ga3-1")
    assert (plan.name, plan.shares) == ("dp2.z1.mb2.ga3-1", (3, 1))
    assert [plan.micro_batches(8, replica) for replica in (0, 1, None)] == [3, 1, 3]
    assert [first_row(plan, 8, replica) for replica in (0, 1)] == [0, 6]
    assert not list(batch_violations(plan, 8))
    assert [fault.message for fault in batch_violations(plan, 16)] == [
        "shares: (3+1) * micro_batch(2) = 8 but the batch is 16"
    ]
    assert scale_down_plan(parse_plan("dp2.tp8.z1.ga30-10")).name == "dp2.tp4.z1.mb1.ga3-2"


def test_sizes_read_back_from_their_name_and_rows_lie_one_replica_behind_the_other() -> None:
    plan = parse_plan("dp2.z1.mb3-1.ga2-4")
    assert (plan.name, plan.micro_batch, plan.micro_batch_sizes) == ("dp2.z1.mb3-1.ga2-4", 3, (3, 1))
    assert micro_batch_rows(plan, 10, 0) == [(0, 3), (3, 3)] and micro_batch_rows(plan, 10, 1) == [
        (6, 1),
        (7, 1),
        (8, 1),
        (9, 1),
    ]
    assert [fault.message for fault in batch_violations(plan, 16)] == ["shares: 2*3+4*1 = 10 but the batch is 16"]
    even = parse_plan("dp2.z3.mb3-1")
    assert micro_batch_rows(even, 8, 1) == [(6, 1), (7, 1)]
    assert [fault.message for fault in batch_violations(even, 9)] == ["batch 9 is not a multiple of 3+1 = 4"]
    assert scale_down_plan(parse_plan("dp2.tp8.z1.mb32-8.ga2-3")).name == "dp2.tp4.z1.mb2-1.ga2-3"


def slowed(each: tuple[float, float], name: str = "dp2.z1") -> tuple[list[float], list[str], str]:
    """Steps of two replicas by a clock on which a sequence takes so many seconds on each, until shares have changed and
    two more: losses, what was said, the
    plan at the end."""
    said: list[str] = []
    passed: list[int] = []
    model, mine = make_model("llama"), each[dist.get_rank()]
    model.register_forward_pre_hook(lambda _, args, inputs: passed.append(len(inputs["input_ids"])), with_kwargs=True)
    trainer = parallelize(model, make_optimizer, name, precision="fp64", clip=1.0, anatomy=anatomy_of("llama"))
    watch, losses = StragglerMonitor(trainer.plan, 8, said.append), []
    for step in range(WARMUP_STEPS + MEDIAN_WINDOW_STEPS + CONFIRMATION_STEPS + 1):
        passed.clear()
        record = trainer.step(make_batch("llama", step))
        losses.append(record.loss)
        seconds = torch.tensor(mine * sum(passed), dtype=torch.float64)
        dist.all_reduce(longest := seconds.clone(), dist.ReduceOp.MAX)
        played = {"seconds": float(longest), "data_seconds": 0.0, "exposed": {"data": float(longest - seconds)}}
        _, _, phases, _ = agree_on_step(record.model_copy(update=played), (0.0,), trainer.mesh.world)
        assert phases is not None
        trainer.plan = watch.heed(phases, step + 1, balance=True) or trainer.plan
    return losses, said, trainer.plan.name


def test_a_straggler_is_named_and_gets_fewer_micro_batches_at_an_equal_loss(
    ranks: Any,
) -> None:
    results = ranks.run(2, slowed, (0.02, 0.1))
    for losses, said, plan in results:
        assert losses == results[0][0]
        assert len(said) == 2 and "rank 1 computes" in said[0] and f"changes to {plan}" in said[1]
        assert plan == "dp2.z1.mb1.ga7-1"
    expected = alone("llama", "fp64", len(results[0][0]))["losses"]
    assert max(abs(ours / theirs - 1.0) for ours, theirs in zip(results[0][0], expected, strict=True)) <= 1e-10


def test_half_micro_batches_move_between_replicas_at_an_equal_loss(ranks: Any) -> None:
    """Of two micro-batches of four sequences neither can be given away; of halves the slow rank keeps one."""
    results = ranks.run(2, slowed, (0.01, 0.03), "dp2.z1.mb4")
    for losses, _, plan in results:
        assert losses == results[0][0]
        assert plan == "dp2.z1.mb3-2.ga2-1"
    expected = alone("llama", "fp64", len(results[0][0]))["losses"]
    assert max(abs(ours / theirs - 1.0) for ours, theirs in zip(results[0][0], expected, strict=True)) <= 1e-10
