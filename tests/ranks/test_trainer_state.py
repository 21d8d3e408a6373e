"""Going on from a checkpoint is never having stopped: to the bit under the same plan, to the order of sums under
another."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import anatomy_of, difference, make_batch, make_model, make_optimizer
from fault_runs import launch
from pool import unchecked
from torch import nn

import meshwright.train.recovery as recovery_module
from meshwright.checkpoint.memory_checkpoint import MemoryCheckpoint, MemorySnapshot
from meshwright.core.ipc import Heartbeat, HeartbeatField, open_heartbeats
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import OptimizerConfig
from meshwright.train.memory_checkpointer import PEER_OUT_OF_MEMORY_TEXT, MemoryCheckpointer, newest_memory_checkpoint
from meshwright.train.metrics import agree_on_step
from meshwright.train.optimizer import optimizer_factory
from meshwright.train.rank_main import RankControl, SharedFiles
from meshwright.train.recovery import Recovery
from meshwright.train.trainer import Trainer, parallelize
from meshwright.train.trainer_checkpoint import rank_exchange

LAYOUTS = [
    "dp1",
    "dp4.z1",
    "dp4.z3",
    "tp2.sp.mb4",
    "dp2.tp2.z2.mb2",
    "dp2.pp2.z3",
    "pp2.interleaved2",
    "dp2.tp2.pp2.z1.mb2",
    "dp2x2.z2",
]


def start(name: str, plan: str, precision: str) -> Trainer:
    return parallelize(make_model(name), make_optimizer, plan, precision=precision, clip=1.0, anatomy=anatomy_of(name))


def straight(name: str, plan: str, precision: str, steps: int, folder: str, stop: int) -> Any:
    """`steps` steps with a checkpoint after `stop` of them."""
    trainer = start(name, plan, precision)
    for step in range(steps):
        if step == stop:
            trainer.save(folder, {"note": "kept"})
        trainer.step(make_batch(name, step))
    return trainer.full_state_dict()


def resumed(name: str, plan: str, precision: str, steps: int, path: str) -> Any:
    torch.manual_seed(77)
    trainer = start(name, plan, precision)
    assert trainer.load(path) == {"note": "kept"}
    assert trainer.run_state.samples == trainer.steps * 8
    for step in range(trainer.steps, steps):
        trainer.step(make_batch(name, step))
    return trainer.full_state_dict()


def checkpoint_of(ranks: Any, name: str, plan: str, precision: str, folder: Path) -> tuple[Any, str]:
    weights = ranks.run(parse_plan(plan).world, straight, name, plan, precision, 4, str(folder), 2)[0]
    return weights, str(next(folder.glob("step-*")))


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", ["dp2", "dp2x2.z1", "dp2.z3", "dp2.tp2.pp2.z2.mb2"])
def test_resuming_under_the_same_plan_is_bit_identical(ranks: Any, tmp_path: Path, plan: str, precision: str) -> None:
    whole, path = checkpoint_of(ranks, "llama", plan, precision, tmp_path)
    again = ranks.run(parse_plan(plan).world, resumed, "llama", plan, precision, 4, path)[0]
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[key], again[key]) for key in whole)


def through_an_overflow(plan: str, overflow: int, folder: str) -> Any:
    """Four steps in fp16 of which one overflows; a checkpoint behind the second."""
    trainer = start("llama", plan, "fp16")
    first = next(iter(trainer.engine.zero.trainable[0].parameters.values()))
    records = []
    for step in range(4):
        if step == 2:
            trainer.save(folder, {"note": "kept"})
        poison = first.register_hook(lambda gradient: gradient * float("inf")) if step == overflow else None
        records.append(trainer.step(make_batch("llama", step)))
        if poison is not None:
            poison.remove()
    return [(record.skipped, record.loss_scale) for record in records], trainer.full_state_dict()


def resumed_scaled(plan: str, path: str) -> Any:
    trainer = start("llama", plan, "fp16")
    trainer.load(path)
    records = [trainer.step(make_batch("llama", step)) for step in range(trainer.steps, 4)]
    return [(record.skipped, record.loss_scale) for record in records], trainer.full_state_dict()


@pytest.mark.parametrize("plan", ["dp2", "dp2.z3", "tp2"])
@pytest.mark.parametrize("overflow", [0, 1], ids=["of the first step", "of the second step"])
@pytest.mark.covering(1)
def test_a_run_goes_on_to_the_bit_from_a_checkpoint_behind_an_overflow(
    ranks: Any, tmp_path: Path, plan: str, overflow: int
) -> None:
    told, whole = ranks.run(2, unchecked, through_an_overflow, plan, overflow, str(tmp_path))[0]
    assert [skipped for skipped, _ in told] == [step == overflow for step in range(4)]
    assert told[2:] == [(False, 2.0**15)] * 2
    again, weights = ranks.run(2, unchecked, resumed_scaled, plan, str(next(tmp_path.glob("step-*"))))[0]
    assert again == told[2:] and whole.keys() == weights.keys()
    assert all(torch.equal(whole[key], weights[key]) for key in whole)


OTHERS = [
    (name, plan, LAYOUTS[(position + step + 2) % len(LAYOUTS)])
    for name, step in (("llama", 1), ("gpt2", 2), ("hf-gpt2", 1))
    for position, plan in list(enumerate(LAYOUTS))[::step]
]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "plan", "other"), OTHERS)
def test_any_layout_loads_into_any_layout(ranks: Any, tmp_path: Path, name: str, plan: str, other: str) -> None:
    whole, path = checkpoint_of(ranks, name, plan, "fp64", tmp_path)
    again = ranks.run(parse_plan(other).world, resumed, name, other, "fp64", 4, path)[0]
    for key in whole:
        assert difference(again[key], whole[key]) < 1e-9, f"{plan} -> {other}: {key}"


def copies_of(trainer: Trainer, folder: str) -> tuple[MemoryCheckpointer, list[str]]:
    """This rank's copies, and where those of all ranks are."""
    paths = [f"{folder}/{rank}" for rank in range(trainer.plan.world)]
    Path(paths[trainer.mesh.rank]).touch()
    return MemoryCheckpointer(paths[trainer.mesh.rank], trainer, Heartbeat(open_heartbeats("", 1), 0), {}), paths


def in_memory(trainer: Trainer, folder: str) -> MemoryCheckpoint:
    """The step that has just ended, as the next generation finds it."""
    copies, paths = copies_of(trainer, folder)
    copies.begin({})
    ranks = rank_exchange(trainer.mesh)
    ranks.all_gather("")
    kept = newest_memory_checkpoint(paths, ranks)
    assert kept is not None
    return kept


def checked(folder: str, plans: list[str]) -> list[tuple[bool, int]]:
    """What ranks need not check before their first step that go on under `plans` from copies of the first."""
    before = start("llama", plans[0], "fp32")
    before.step(make_batch("llama", 0))
    kept, found = in_memory(before, folder), []
    for plan in plans:
        after = start("llama", plan, "fp32")
        after.load(kept)
        found.append((after.engine.preflight.stages_run, after.engine.preflight.steps))
    return found


def test_ranks_that_resume_from_memory_do_not_check_the_same_plan_again(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, checked, str(tmp_path), ["pp2.mb2", "dp2.mb2"])[0] == [(True, 3), (False, 0)]


def recovery_of(
    trainer: Trainer, folder: str, sources: list[str], own: str = "", said: list[str] | None = None, **run: int
) -> Recovery:
    rank, world, words = trainer.mesh.rank, trainer.plan.world, [] if said is None else said
    channel = RankControl(
        rank, world, lambda message: words.append(message["kind"]), memory=SharedFiles(own=own, sources=tuple(sources))
    )
    launched = launch(Path("unread"), Path(folder), trainer.plan.name, **run)
    return Recovery(launched, channel, trainer, Heartbeat(open_heartbeats("", 1), 0), {"data": "same"})


def later_on_disk(folder: str, later: int) -> tuple[int, str]:
    """Where a run goes on, and from what: a copy of step 1 in memory, and where `later` says so a checkpoint of that
    step."""
    before = start("llama", "dp2", "fp32")
    before.step(make_batch("llama", 0))
    paths = [f"{folder}/{rank}" for rank in range(2)]
    Path(paths[before.mesh.rank]).touch()
    MemoryCheckpointer(paths[before.mesh.rank], before, Heartbeat(open_heartbeats("", 1), 0), {"data": "same"}).begin(
        {}
    )
    for step in range(1, later):
        before.step(make_batch("llama", step))
    if later:
        before.save(f"{folder}/checkpoints", {"data": "same"})
    rank_exchange(before.mesh).all_gather("")
    recovery = recovery_of(start("llama", "dp2", "fp32"), folder, paths)
    return recovery.resume(), recovery.source


@pytest.mark.parametrize(
    ("later", "expected"),
    [*(pytest.param(later, (1, "memory"), marks=pytest.mark.soak) for later in (0, 1)), (3, (3, "disk"))],
)
def test_a_run_goes_on_from_the_later_of_its_copies_in_memory_and_its_checkpoints(
    ranks: Any, tmp_path: Path, later: int, expected: tuple[int, str]
) -> None:
    """Copies of later steps may have found no room after a change of ranks."""
    assert ranks.run(2, unchecked, later_on_disk, str(tmp_path), later) == [expected] * 2


def room_on_one(folder: str) -> list[str]:
    """What each rank says of its copies, of which the last one's found no room: before and after the ranks agree, and
    in the next step."""
    trainer = start("llama", "dp2", "fp32")
    rank, said = trainer.mesh.rank, []
    (own := Path(folder, str(rank))).touch()
    recovery = recovery_of(trainer, folder, [], str(own))
    assert recovery.copies is not None
    if rank == 1:
        recovery.copies._refusal = lambda layout: "no room here"  # type: ignore[method-assign]
    for step in range(2):
        record = trainer.step(make_batch("llama", step))
        recovery.copy(record)
        said.append(recovery.copies.refused)
        _, flags, _, _ = agree_on_step(record.model_copy(update={"seconds": 1.0}), recovery.flags, trainer.mesh.world)
        recovery.agreed(record, flags)
    return [*said, recovery.copies.refused]


def test_where_one_rank_has_no_room_for_copies_none_keeps_any(ranks: Any, tmp_path: Path) -> None:
    """Else some would write a checkpoint beside training while others wait for all to write it together."""
    assert ranks.run(2, unchecked, room_on_one, str(tmp_path)) == [
        ["", PEER_OUT_OF_MEMORY_TEXT, PEER_OUT_OF_MEMORY_TEXT],
        ["no room here"] * 3,
    ]


def last_stage_trained(rule: str) -> Trainer:
    model, last = make_model("llama"), [f"{anatomy_of('llama').block(index)}." for index in (2, 3)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(name.startswith(block) for block in last))
    return parallelize(
        model, optimizer_factory(OptimizerConfig(name=rule)), "pp2.mb4", precision="fp32", anatomy=anatomy_of("llama")
    )  # type: ignore[arg-type]


def gone_on(rule: str, folder: str) -> list[dict[str, torch.Tensor] | None]:
    """Weights after three steps: in one go, from a checkpoint after two, and from the copies in memory."""
    trainer = last_stage_trained(rule)
    for step in range(2):
        trainer.step(make_batch("llama", step))
    sources = trainer.save(folder), in_memory(trainer, folder)
    trainer.step(make_batch("llama", 2))
    found = [trainer.full_state_dict()]
    for source in sources:
        again = last_stage_trained(rule)
        again.load(source)
        again.step(make_batch("llama", 2))
        found.append(again.full_state_dict())
    return found


@pytest.mark.parametrize("rule", ["adamw", pytest.param("muon", marks=pytest.mark.soak)])
def test_a_run_whose_first_rank_trains_nothing_goes_on_with_its_moments(ranks: Any, tmp_path: Path, rule: str) -> None:
    whole, *others = ranks.run(2, unchecked, gone_on, rule, str(tmp_path))[0]
    for again in others:
        assert all(torch.equal(whole[key], again[key]) for key in whole)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)))


def normed() -> Trainer:
    torch.manual_seed(0)
    return parallelize(
        Normed(), make_optimizer, "dp1.mb8", precision="fp32", loss=lambda output, batch: output.square().mean()
    )


def moved_on(folder: str) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """After each of two steps: the buffers, and those of the copy beside which a forward has moved them on."""
    trainer = normed()
    ranks, device = rank_exchange(trainer.mesh), trainer.mesh.device
    copies, paths = copies_of(trainer, folder)
    write, moved = copies.memory.write, threading.Event()
    copies.memory.write = lambda *given: (moved.wait(), write(*given))[1]  # type: ignore[method-assign, func-returns-value]
    found = []
    for step in range(2):
        trainer.step({"x": torch.randn(8, 4)})
        before = {name: buffer.clone() for name, buffer in trainer.engine.model.named_buffers()}
        trainer.mesh = replace(trainer.mesh, device=torch.device("meta"))  # no CPU: copied while the next step runs
        copies.begin({})
        trainer.mesh = replace(trainer.mesh, device=device)
        for buffer in trainer.engine.model.buffers():
            buffer.add_(1)
        moved.set()
        copies.finish()
        moved.clear()
        kept, again = newest_memory_checkpoint(paths, ranks), normed()
        assert kept is not None and kept.step == step + 1
        again.load(kept)
        found.append((before, {name: buffer.clone() for name, buffer in again.engine.model.named_buffers()}))
    return found


def test_a_copy_beside_the_next_step_has_the_running_means_of_its_own(ranks: Any, tmp_path: Path) -> None:
    for before, copied in ranks.run(1, moved_on, str(tmp_path))[0]:
        assert before and all(torch.equal(before[name], copied[name]) for name in before)


def caught_up(folder: str, plan: str, room: bool) -> tuple[list[str], bool]:
    """What this rank says where a save is due at the step that it goes on from under `plan`, and whether it has a good
    copy of that step; it goes on from copies of ranks of another plan. `room`: whether the last rank has room for
    copies."""
    said, rank = list[str](), dist.get_rank()
    own, before = ([f"{folder}/{which}-{at}" for at in range(dist.get_world_size())] for which in ("own", "before"))
    for paths in (own, before):
        Path(paths[rank]).touch()
    first = start("llama", "dp2.z1", "fp32")
    first.step(make_batch("llama", 0))
    MemoryCheckpointer(before[rank], first, Heartbeat(open_heartbeats("", 1), 0), {"data": "same"}).begin({"step": 1})
    rank_exchange(first.mesh).all_gather("")
    recovery = recovery_of(start("llama", plan, "fp32"), folder, before, own[rank], said, checkpoint_every=1)
    assert recovery.resume() == 1 and recovery.source == "memory" and recovery.copies is not None
    if rank == 1 and not room:
        recovery.copies._refusal = lambda layout: "no room here"  # type: ignore[method-assign]
    recovery.catch_up()
    memory = MemorySnapshot(own[rank])
    return said, 1 in memory.steps and memory.is_intact(1)


def test_a_due_save_uses_in_memory_checkpoints_or_is_made_by_all_ranks(ranks: Any, tmp_path: Path) -> None:
    for room, expected in ((True, [(["write"], True), ([], True)]), (False, [(["saved"], True), ([], False)])):
        (folder := tmp_path / str(room)).mkdir()
        assert ranks.run(2, unchecked, caught_up, str(folder), "tp2", room) == expected


def delayed(folder: str) -> dict[str, Any]:
    """What a rank does where saves are due while the one before is still written, and what it says of the seconds that
    it waited."""
    messages: list[dict[str, Any]] = []
    trainer = start("llama", "dp1", "fp32")
    Path(f"{folder}/own").touch()
    recovery = recovery_of(trainer, folder, [], f"{folder}/own", checkpoint_every=1)
    recovery.channel.hear = messages.append
    trainer.step(make_batch("llama", 0))
    assert recovery.copies is not None
    recovery.copies.begin({})
    recovery.save(must=False)  # asked for
    recovery_module.MAX_WRITER_WAIT_SECONDS = 0.05
    found = {"due": [], "asked": []}
    for step in (1, 2, 3):
        trainer.step(make_batch("llama", step))
        recovery.copies.begin({})
        if step == 3:  # the supervisor says that the one before has ended
            recovery.pulse.write(HeartbeatField.busy, 0)
            recovery._busy = False
        found["due"].append(recovery.due(trainer.steps))
        recovery.save(must=False)
        found["asked"].append([message["step"] for message in messages if message["kind"] == "write"])
    found["waited"] = [message["waited"] for message in messages if message["kind"] == "write"]
    return found


def test_training_continues_during_a_long_save_and_the_next_one_follows_it(ranks: Any, tmp_path: Path) -> None:
    """It waited without limit; what it did wait stands with the save that follows."""
    found = ranks.run(1, unchecked, delayed, str(tmp_path))[0]
    assert found["asked"] == [[1], [1], [1, 4]]
    first, second = found["waited"]
    assert first == 0.0 and 0.05 <= second < 60.0
