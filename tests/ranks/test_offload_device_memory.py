"""A device with memory of its own, played on the host: what the host updates comes down and goes up through the buffers
that are pinned beside an
accelerator, each copy between sides of one type, and the run is bit for bit the one that keeps everything where it
is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import anatomy_of, make_batch, make_model, make_optimizer

from meshwright.core.ipc import RankPhase
from meshwright.runtime.build import parallelize as building
from meshwright.runtime.offload.copy_streams import COPY_DONE, CopyEvent, CopyStreams
from meshwright.runtime.offload.param_swapper import CpuShard
from meshwright.runtime.offload.swapper import StateSwapper, make_state_swapper
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

STEPS = 2


class Counted(CopyStreams):
    """Remembers the elements and the type of each copy."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.copies: list[tuple[int, torch.dtype]] = []

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        self.copies.append((into.numel(), into.dtype))
        return super().copy(into, source)


def beyond(*given: Any) -> StateSwapper | None:
    away = make_state_swapper(*given)
    if away is not None:
        away.has_device_memory, away.copy_streams = True, Counted()
    return away


def trained(name: str, plan: str, precision: str, folder: str, apart: bool) -> tuple[list[float], Any, Any, int, bool]:
    """Losses, weights, copies by type in the last step, elements that this rank updates, whether shards wait in the
    host's memory."""
    building.make_state_swapper = beyond if apart else make_state_swapper  # type: ignore[attr-defined]
    try:
        made = parallelize(
            make_model(name), make_optimizer, parse_plan(plan).but(bucket=40_000), precision=precision, clip=1.0,
            anatomy=anatomy_of(name), offload_to=folder,
        )  # fmt: skip
    finally:
        building.make_state_swapper = make_state_swapper  # type: ignore[attr-defined]
    losses = []
    for step in range(STEPS):
        ferry = made.mesh.state_swapper.copy_streams if made.mesh.state_swapper is not None else None
        if isinstance(ferry, Counted):
            ferry.copies.clear()
        losses.append(made.step(make_batch(name, step)).loss)
    moved: dict[torch.dtype, int] = {}
    for numel, kind in ferry.copies if isinstance(ferry, Counted) else ():
        moved[kind] = moved.get(kind, 0) + numel
    units = made.engine.zero.trainable
    own = sum(unit.shard_range.stop - unit.shard_range.start for unit in units)
    return (
        losses,
        made.full_state_dict(),
        moved,
        own,
        any(
            isinstance(each, CpuShard)
            for unit in units
            if unit.weights.offloaded is not None
            for each in unit.weights.offloaded.shards
        ),
    )


CASES = [
    ("llama", "dp2.z1", "bf16", "optimizer"), ("llama", "dp2.z2", "fp32", "optimizer"),
    ("llama", "tp2", "fp16", "optimizer-disk"), ("llama", "dp2.z3", "bf16", "optimizer-disk"),
    ("llama", "dp2.z3", "bf16", "parameters"), ("llama", "dp2.z3", "bf16", "parameters-disk"),
    ("llama", "dp2.z3", "fp32", "optimizer.off-parameters"), ("llama", "dp2.z3", "bf16", "optimizer.off-parameters"),
    ("llama", "dp2.z3", "bf16", "optimizer-disk.off-parameters-disk"),
    ("llama-tied", "pp2", "fp32", "optimizer-disk50"), ("llama", "dp2.z1", "bf16", "optimizer40"),
    ("mixtral", "dp2.ep2.z1", "bf16", "optimizer"), ("llama", "dp2.z2", "bf16", "optimizer.off-gradients"),
    ("llama", "dp2.z3.mb2", "fp32", "optimizer.off-gradients"),
    ("llama", "dp1.z2.mb2", "bf16", "optimizer.off-gradients"),
    ("llama", "dp1.z3.mb4", "fp16", "optimizer-disk.off-gradients.off-parameters"),
    ("llama-tied", "pp2.z2.mb2", "fp32", "optimizer.off-gradients"),
    ("llama", "pp2.zbh1.z2.mb1", "bf16", "optimizer.off-gradients"),
    ("llama", "tp2.sp.z2.mb4", "bf16", "optimizer.off-gradients"),
    ("llama", "dp2x2.z3.mb1", "fp32", "optimizer.off-gradients.off-parameters"),
    ("mixtral", "dp2.ep2.z2.mb2", "bf16", "optimizer.off-gradients"),
    ("llama", "dp2.cp2.z3.mb2", "bf16", "optimizer.off-gradients"),
    ("llama", "dp2.z3", "bf16", "optimizer60.off-parameters50"),
    ("llama", "dp2.z3", "bf16", "optimizer30.off-parameters70"),
    ("llama", "dp2.z3", "fp32", "optimizer60.off-parameters40"),
    ("llama", "dp2.z3", "bf16", "optimizer-disk50.off-parameters50"),
    ("llama-tied", "pp2.z3.mb2", "bf16", "optimizer50.off-parameters-disk60"),
    ("mixtral", "dp2.ep2.z3", "bf16", "optimizer60.off-parameters40"),
    ("llama", "dp2.z2.mb2", "bf16", "optimizer40.off-gradients"),
    ("llama", "dp1.z3.mb2", "fp32", "optimizer60.off-gradients.off-parameters50"),
    ("llama", "tp2.z3.mb4", "bf16", "optimizer-disk30.off-gradients.off-parameters50"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "precision", "way"), CASES)
@pytest.mark.covering(1)
def test_beside_a_device_with_memory_of_its_own_a_run_is_bit_for_bit_the_run_without(
    ranks: Any, tmp_path: Any, name: str, plan: str, precision: str, way: str
) -> None:
    world = parse_plan(plan).world
    here = ranks.once(world, trained, name, plan, precision, "", False)
    away = ranks.run(world, trained, name, f"{plan}.off-{way}", precision, str(tmp_path), True)
    for (losses, weights, _, _, _), (others, theirs, moved, _, on_host) in zip(here, away, strict=True):
        assert losses == others
        assert weights is None or all(torch.equal(weights[key], theirs[key]) for key in weights)
        assert moved and on_host == (way.rpartition("parameters")[2].strip("0123456789") == "" and "parameters" in way)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["optimizer", pytest.param("optimizer-disk", marks=pytest.mark.soak)])
def test_gradients_and_weights_cross_the_host_link_once_a_step(ranks: Any, tmp_path: Any, way: str) -> None:
    for _, _, moved, own, _ in ranks.run(2, trained, "llama", f"dp2.z1.off-{way}", "bf16", str(tmp_path), True):
        assert moved == {torch.float32: own, torch.bfloat16: own}


def test_offloaded_gradient_sums_use_no_device_memory(ranks: Any, tmp_path: Any) -> None:
    plan = "dp2.z2.mb2.off-optimizer.off-gradients"
    for _, _, moved, own, _ in ranks.run(2, trained, "llama", plan, "bf16", str(tmp_path), True):
        assert moved == {torch.float32: 2 * own, torch.bfloat16: own}
    for here, there, own in ranks.run(2, held, plan, str(tmp_path)):
        assert (here, there) == (0, (4 + 2 * 4 + 4) * own)


def held(plan: str, folder: str) -> tuple[int, int, int]:
    """Bytes of gradients on the device, and of what waits elsewhere behind one step; elements that this rank
    updates."""
    building.make_state_swapper = beyond  # type: ignore[attr-defined]
    try:
        made = parallelize(
            make_model("llama"), make_optimizer, plan, precision="bf16", anatomy=anatomy_of("llama"), offload_to=folder
        )
    finally:
        building.make_state_swapper = make_state_swapper  # type: ignore[attr-defined]
    made.step(make_batch("llama", 0))
    return (
        made.bytes()["gradients"],
        made.bytes()["offloaded"],
        sum(unit.shard_range.stop - unit.shard_range.start for unit in made.engine.zero.trainable),
    )


def test_a_copy_that_would_be_cast_is_refused_and_another_one_completes() -> None:
    ferry, host = CopyStreams(torch.device("cpu")), torch.arange(4.0)
    assert ferry.copy(into := torch.empty(4), host) is COPY_DONE and torch.equal(into, host)
    with pytest.raises(AssertionError, match=r"cast torch.float32 to torch.bfloat16"):
        ferry.copy(torch.empty(4, dtype=torch.bfloat16), host)


def came(plan: str, folder: str, apart: bool) -> list[int]:
    """Windows out of files that are in memory, or on their way there, when backward is through, step by step."""
    building.make_state_swapper = beyond if apart else make_state_swapper  # type: ignore[attr-defined]
    try:
        small = parse_plan(plan).but(bucket=40_000)
        made = parallelize(
            make_model("llama"), make_optimizer, small, precision="bf16", anatomy=anatomy_of("llama"), offload_to=folder
        )
    finally:
        building.make_state_swapper = make_state_swapper  # type: ignore[attr-defined]
    found, away = [], made.mesh.state_swapper
    assert away is not None
    made.on_phase = lambda phase: found.append(len(away._fetching)) if phase is RankPhase.reduce else None
    for step in range(STEPS):
        made.step(make_batch("llama", step))
    return found


BACKWARD = [(f"{plan}.off-optimizer-disk", apart) for plan in ("dp1", "pp2", "dp2.z3") for apart in (False, True)]
FEW = {("dp1.off-optimizer-disk", False), ("pp2.off-optimizer-disk", True)}


@pytest.mark.parametrize(
    ("plan", "apart"), [case if case in FEW else pytest.param(*case, marks=pytest.mark.soak) for case in BACKWARD]
)
def test_the_first_states_are_read_while_backward_runs(ranks: Any, tmp_path: Any, plan: str, apart: bool) -> None:
    for found in ranks.run(parse_plan(plan).world, came, plan, str(tmp_path), apart):
        assert len(found) == STEPS and min(found) > 1
