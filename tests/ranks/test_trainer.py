"""The trainer at its limits: low precision, overflow, unused parameters, wrong input, accumulation, the user's own
loss."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equality import anatomy_of, make_batch, make_model, make_optimizer
from pool import unchecked
from torch import nn
from torch.nn import functional as F
from world_group import between_hosts

from meshwright.core.errors import InputError
from meshwright.runtime.comm import timers
from meshwright.runtime.comm.timers import WaitTimer
from meshwright.spec.plan import parse_plan
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.trainer import parallelize


def losses(plan: str, precision: str, steps: int) -> Any:
    trainer = parallelize(
        make_model("llama"), make_optimizer, plan, precision=precision, clip=1.0, anatomy=anatomy_of("llama")
    )
    return [trainer.step(make_batch("llama", 0)).loss for _ in range(steps)], trainer.bytes()


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        ("dp2.z3", "bf16"),
        *(
            pytest.param(plan, precision, marks=pytest.mark.soak)
            for plan in ("dp2", "dp2.z1", "dp2.z3", "tp2.sp.pp2.mb4")
            for precision in ("bf16", "fp16")
            if (plan, precision) != ("dp2.z3", "bf16")
        ),
    ],
)
def test_low_precision_with_master_weights_follows_float32(ranks: Any, plan: str, precision: str) -> None:
    world = parse_plan(plan).world
    low, held = ranks.run(world, unchecked, losses, plan, precision, 6)[0]
    high, _ = ranks.once(world, unchecked, losses, plan, "fp32", 6)[0]
    assert low[-1] < low[0] - 0.03
    assert max(abs(a / b - 1) for a, b in zip(low, high, strict=True)) < 0.01
    shards = parse_plan(plan).dp_shard
    held_whole = held["parameters"] * (shards if parse_plan(plan).zero == 3 else 1)
    assert held["optimizer"] == held_whole // 2 * 12 // shards


def poisoned(plan: str) -> Any:
    trainer = parallelize(
        make_model("llama"), make_optimizer, plan, precision="fp16", clip=1.0, anatomy=anatomy_of("llama")
    )
    before = trainer.full_state_dict()
    records = []
    if trainer.mesh.rank == 0:
        unit = trainer.engine.zero.units[-1]
        parameter = next(iter(unit.parameters.values()))
        handle = parameter.register_hook(lambda gradient: gradient * float("inf"))  # in the checks before the step too
    records.append(trainer.step(make_batch("llama", 0)))
    after = trainer.full_state_dict()
    if trainer.mesh.rank == 0:
        handle.remove()
    records.append(trainer.step(make_batch("llama", 0)))
    return [(r.skipped, r.loss_scale) for r in records], before, after


@pytest.mark.parametrize(
    "plan", ["dp2.z2", "pp2.mb4", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2", "pp2", "tp2"))]
)
def test_a_non_finite_gradient_on_one_rank_is_skipped_by_all(ranks: Any, plan: str) -> None:
    results = ranks.run(2, poisoned, plan)
    for steps, *_ in results:
        assert steps == [(True, 2.0**16), (False, 2.0**15)]
    _, before, after = results[0]
    assert all(torch.equal(before[key], after[key]) for key in before)


class Half(nn.Module):
    """Only one of its two layers is ever used, and the loss is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.unused = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.used(x) - y[:, None]


def own_loss(plan: str) -> Any:
    torch.manual_seed(0)
    trainer = parallelize(
        Half(),
        lambda p: torch.optim.SGD(p, lr=0.1),
        plan,
        precision="fp64",
        loss=lambda output, batch: output.square().mean(),
    )
    generator = torch.Generator().manual_seed(5)
    batch = {"x": torch.randn(8, 4, generator=generator), "y": torch.randn(8, generator=generator)}
    return [trainer.step(batch).loss for _ in range(4)], trainer.gradients(batch)[2]


@pytest.mark.parametrize(
    "plan", ["dp2.z1.mb2", "dp2.z3", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2", "dp4.z2"))]
)
def test_any_module_trains_with_its_own_loss_and_unused_parameters(ranks: Any, plan: str) -> None:
    alone, gradients = ranks.run(1, own_loss, "dp1")[0]
    shared, others = ranks.run(parse_plan(plan).world, own_loss, plan)[0]
    assert shared == pytest.approx(alone, rel=1e-12)
    assert gradients.keys() == others.keys()
    for name in gradients:
        assert torch.allclose(gradients[name], others[name], rtol=1e-10, atol=1e-14)


def accumulated(share: bool) -> Any:
    trainer = parallelize(make_model("llama"), make_optimizer, "dp2.z1", precision="fp64", anatomy=anatomy_of("llama"))
    batch = make_batch("llama", 0)
    if not share:
        return trainer.step(batch).loss
    first = trainer.mesh.replica * 4
    parts = [{key: value[first + k : first + k + 1] for key, value in batch.items()} for k in range(4)]
    return trainer.step(LocalBatch(parts)).loss


def test_a_share_of_the_batch_is_the_batch(ranks: Any) -> None:
    whole = ranks.run(2, unchecked, accumulated, False)[0]
    assert ranks.run(2, accumulated, True)[0] == pytest.approx(whole, rel=1e-12)


def refused(name: str, plan: str, rows: int) -> str:
    try:
        trainer = parallelize(make_model(name), make_optimizer, plan)
        trainer.step(make_batch(name, 0, rows))
    except InputError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("name", "plan", "world", "rows", "says"),
    [
        ("llama", "dp3", 2, 8, "= 3 ranks, but 2 were started"),
        pytest.param("llama", "tp3", 3, 8, "heads", marks=pytest.mark.soak),
        pytest.param("llama", "pp4.interleaved2", 4, 8, "need at least one block each", marks=pytest.mark.soak),
        ("llama", "dp2.z1.off-parameters", 2, 8, "add z3"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    ranks: Any, name: str, plan: str, world: int, rows: int, says: str
) -> None:
    for message in ranks.run(world, refused, name, plan, rows):
        assert says in message
        assert "\n" not in message


def decayed(plan: str) -> dict[str, torch.Tensor] | None:
    """After two steps of a rule that lets only matrices decay."""
    from meshwright.spec.workload import OptimizerConfig
    from meshwright.train.optimizer import optimizer_factory

    trainer = parallelize(
        make_model("gpt2"),
        optimizer_factory(OptimizerConfig(lr=0.1, weight_decay=0.5)),
        plan,
        precision="fp64",
        anatomy=anatomy_of("gpt2"),
    )
    for step in range(2):
        trainer.step(make_batch("gpt2", step))
    return trainer.full_state_dict()


@pytest.mark.parametrize(
    "plan", ["dp2.tp2.z3.mb4", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp4.z1", "pp2.mb4"))]
)
def test_only_matrices_decay_whatever_the_plan(ranks: Any, plan: str) -> None:
    model = make_model("gpt2").double()
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if (p.ndim > 1) is kind], "weight_decay": 0.5 * kind}
        for kind in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, 0.1, (0.9, 0.95), 1e-8)
    for step in range(2):
        batch = make_batch("gpt2", step)
        loss = F.cross_entropy(
            model(batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = ranks.run(parse_plan(plan).world, unchecked, decayed, plan)[0]
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-8), name


def sent_after(evaluations: int) -> dict[str, float]:
    """What the second of two steps sent, with so many evaluations between them."""
    with between_hosts():
        trainer = parallelize(make_model("llama"), make_optimizer, "dp2.z3", anatomy=anatomy_of("llama"))
        trainer.step(make_batch("llama", 0))
        for _ in range(evaluations):
            trainer.evaluate(make_batch("llama", 1))
        return trainer.step(make_batch("llama", 2)).sent


def test_a_step_behind_an_evaluation_sends_what_any_step_sends(ranks: Any) -> None:
    plain, after = (ranks.run(2, unchecked, sent_after, evaluations)[0] for evaluations in (0, 3))
    assert plain["data"] > 0 and after == plain


def waits(shared: str) -> dict[str, float]:
    """Of this rank in a step in which every block of rank 1 begins late: once rank 0 waits, and by a clock that counts
    these blocks."""
    counts = torch.from_file(
        shared, shared=True, size=2, dtype=torch.int64
    )  # blocks that rank 1 has begun, waits that rank 0 is in
    trainer = parallelize(make_model("llama"), make_optimizer, "dp2.z3", anatomy=anatomy_of("llama"))
    me, enter, leave, end = trainer.mesh.rank, WaitTimer.__enter__, WaitTimer.__exit__, time.monotonic() + 300.0

    def begin(module: nn.Module, given: Any) -> None:
        while not counts[1] and time.monotonic() < end:
            time.sleep(0.001)
        counts[0] += 1

    def entered(own: WaitTimer) -> None:
        enter(own)
        counts[1] += int(me == 0)

    def left(own: WaitTimer, *raised: Any) -> None:
        counts[1] -= int(me == 0)
        leave(own, *raised)

    for index in range(4 * me):
        trainer.engine.model.get_submodule(trainer.engine.anatomy.block(index)).register_forward_pre_hook(begin)
    WaitTimer.__enter__, WaitTimer.__exit__, timers.time = (
        entered,
        left,
        SimpleNamespace(perf_counter=lambda: float(counts[0])),
    )  # type: ignore[assignment, method-assign]
    try:
        return trainer.step(make_batch("llama", 0)).exposed
    finally:
        WaitTimer.__enter__, WaitTimer.__exit__, timers.time = enter, leave, time  # type: ignore[assignment, method-assign]


def test_waiting_for_gathered_weights_is_waiting_for_data(ranks: Any, tmp_path: Path) -> None:
    """The rank that is in time waits for the other's part of the next block, before any gradient is there."""
    (tmp_path / "counts").write_bytes(bytes(16))
    in_time, late = ranks.run(2, unchecked, waits, str(tmp_path / "counts"))
    assert 16 >= in_time["data"] > 8 and late["data"] == 0, "four blocks of each of four micro-batches"


def broken_off(plan: str, breaks: bool) -> list[float]:
    """Losses of two steps; between them an evaluation and steps that fail on all ranks alike, in a forward, in a later
    one, in a backward, and are caught."""
    trainer = parallelize(make_model("llama"), make_optimizer, plan, anatomy=anatomy_of("llama"))
    losses, batch = [trainer.step(make_batch("llama", 0)).loss], make_batch("llama", 1)
    unreadable = {**batch, "input_ids": batch["input_ids"] + 1000}
    half = {**batch, "input_ids": batch["input_ids"] + 1000 * (torch.arange(len(batch["input_ids"])) % 4 > 1)[:, None]}
    model = trainer.engine.model
    for attempt, given in (
        ((trainer.evaluate, unreadable), (trainer.step, unreadable), (trainer.step, half)) if breaks else ()
    ):
        with pytest.raises(IndexError):
            attempt(given)
    if breaks:
        hook = model.get_submodule(anatomy_of("llama").block(1)).register_full_backward_pre_hook(lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.step(batch)
        hook.remove()
    losses += [trainer.step(make_batch("llama", step)).loss for step in (1, 2)]
    trainer.close()
    return losses


@pytest.mark.parametrize(
    "plan",
    [
        "dp2.z3.mb2",
        *(
            pytest.param(plan, marks=pytest.mark.soak)
            for plan in ("dp2.mb2", "dp2.z2.mb2", "dp2.z3.mb2.rc-full.off-activations-disk")
        ),
    ],
)
def test_steps_that_fail_alike_on_all_ranks_can_be_caught_and_the_run_goes_on(ranks: Any, plan: str) -> None:
    assert ranks.run(2, broken_off, plan, True) == ranks.run(2, unchecked, broken_off, plan, False)
