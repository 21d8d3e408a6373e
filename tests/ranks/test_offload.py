"""What waits on the host or in files is what would have stayed: losses and weights bit for bit, whatever the plan, and
after a resume."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import anatomy_of, make_batch, make_model, make_optimizer

from meshwright.core.errors import MeshwrightError
from meshwright.runtime.offload.swap_file import OffloadFailed
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.runtime.zero.param_group import make_optim_shard
from meshwright.spec.enums import Offload
from meshwright.spec.plan import parse_plan
from meshwright.spec.precision import recipe
from meshwright.train.trainer import Trainer, parallelize


def trained(
    name: str, plan: str, precision: str, folder: str, steps: int = 2
) -> tuple[list[float], dict[str, torch.Tensor] | None, dict[str, int]]:
    trainer = made(name, plan, precision, folder)
    losses = [trainer.step(make_batch(name, step)).loss for step in range(steps)]
    return losses, trainer.full_state_dict(), trainer.bytes()


def made(name: str, plan: str, precision: str, folder: str) -> Trainer:
    small = parse_plan(plan).but(bucket=40_000)
    return parallelize(
        make_model(name),
        make_optimizer,
        small,
        precision=precision,
        clip=1.0,
        anatomy=anatomy_of(name),
        offload_to=folder,
    )


def bit_for_bit(
    ranks: Any, folder: Any, name: str, plan: str, precision: str, way: str
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """What each rank holds without and with `way`, of runs that are the same to the bit and leave no files."""
    world = parse_plan(plan).world
    here = ranks.once(world, trained, name, plan, precision, "")
    away = ranks.run(world, trained, name, f"{plan}.off-{way}", precision, str(folder))
    for (losses, weights, _), (others, theirs, _) in zip(here, away, strict=True):
        assert losses == others
        assert weights is None or all(torch.equal(weights[key], theirs[key]) for key in weights)
    assert not list(folder.iterdir())
    return [(held, elsewhere) for (_, _, held), (_, _, elsewhere) in zip(here, away, strict=True)]


CASES = [
    ("llama", "dp1", "fp32", "optimizer-disk"), ("llama", "dp2", "fp64", "optimizer-disk"),
    ("llama", "dp2.z1", "bf16", "optimizer-disk"), ("llama", "dp2.z1", "fp32", "optimizer"),
    ("llama", "dp2.z2", "fp32", "optimizer-disk"), ("llama", "dp2.z3", "bf16", "optimizer"),
    ("llama", "tp2", "fp16", "optimizer-disk"), ("llama-tied", "pp2", "fp32", "optimizer-disk"),
    ("llama", "dp2.pp2.z3", "fp32", "optimizer-disk"), ("mixtral", "dp2.ep2.z1", "fp32", "optimizer-disk"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "precision", "way"), CASES)
@pytest.mark.covering(1)
def test_a_run_with_its_optimizer_away_is_bit_for_bit_the_run_without(
    ranks: Any, tmp_path: Any, name: str, plan: str, precision: str, way: str
) -> None:
    for held, elsewhere in bit_for_bit(ranks, tmp_path, name, plan, precision, way):
        assert elsewhere["offloaded"] == held["optimizer"] and elsewhere["optimizer"] == 0


SHARES = [
    ("llama", "dp2.z1", "bf16", "optimizer-disk50"), ("llama", "dp1", "fp32", "optimizer-disk20"),
    ("llama", "dp2.z3", "fp64", "optimizer-disk80"), ("mixtral", "dp2.ep2.z1", "bf16", "optimizer40"),
    ("llama-tied", "pp2", "fp32", "optimizer-disk50"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "precision", "way"), SHARES)
@pytest.mark.covering(1)
def test_a_run_with_a_share_of_its_optimizer_away_is_bit_for_bit_the_run_without(
    ranks: Any, tmp_path: Any, name: str, plan: str, precision: str, way: str
) -> None:
    for held, elsewhere in bit_for_bit(ranks, tmp_path, name, plan, precision, way):
        assert elsewhere["offloaded"] + elsewhere["optimizer"] == held["optimizer"]
        assert int(way[-2:]) / 100 * held["optimizer"] <= elsewhere["offloaded"] < held["optimizer"]


PARAMETERS = [
    ("llama", "dp2.z3", "fp64", "parameters-disk"), ("llama", "dp2.z3", "bf16", "parameters-disk"),
    ("llama", "dp1.z3", "fp32", "optimizer-disk.off-parameters-disk"),
    ("llama", "dp2.z3", "bf16", "optimizer-disk.off-parameters-disk"),
    ("llama", "tp2.z3.mb4", "fp32", "optimizer.off-parameters-disk"),
    ("llama-tied", "pp2.z3", "bf16", "parameters-disk"),
    ("llama", "dp2.z3", "fp32", "parameters"), ("mixtral", "dp2.ep2.z3", "fp32", "parameters-disk"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "precision", "way"), PARAMETERS)
@pytest.mark.covering(1)
def test_a_run_with_its_weights_away_is_bit_for_bit_the_run_without(
    ranks: Any, tmp_path: Any, name: str, plan: str, precision: str, way: str
) -> None:
    for held, elsewhere in bit_for_bit(ranks, tmp_path, name, plan, precision, way):
        gone = held["parameters"] * ("disk" in way.rpartition("parameters")[2]) + held["optimizer"] * (
            "optimizer" in way
        )
        assert elsewhere["offloaded"] == gone and sum(elsewhere.values()) == sum(held.values())


PARTS = [
    ("llama", "dp2.z3", "fp64", "parameters-disk50"), ("llama", "dp2.z3", "bf16", "parameters-disk50"),
    ("llama-tied", "pp2.z3", "fp32", "parameters-disk40"), ("llama", "dp2.z3", "fp32", "parameters50"),
    ("mixtral", "dp2.ep2.z3", "fp32", "parameters-disk60"),
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize(("name", "plan", "precision", "way"), PARTS)
def test_a_run_with_a_share_of_its_weights_away_is_bit_for_bit_the_run_without(
    ranks: Any, tmp_path: Any, name: str, plan: str, precision: str, way: str
) -> None:
    for held, elsewhere in bit_for_bit(ranks, tmp_path, name, plan, precision, way):
        in_files = "disk" in way
        assert int(way[-2:]) / 100 * held["parameters"] * in_files <= elsewhere["offloaded"] < held["parameters"]
        assert (
            elsewhere["offloaded"] + elsewhere["parameters"] == held["parameters"]
            and elsewhere["optimizer"] == held["optimizer"]
        )


BOTH = [
    ("llama", "dp1.z3", "fp32", "optimizer-disk60.off-parameters-disk50"),
    ("llama", "dp2.z3", "bf16", "optimizer-disk60.off-parameters-disk50"),
    ("llama", "dp2.z3", "fp64", "optimizer-disk30.off-parameters-disk70"),
    ("llama", "dp2.z3", "bf16", "optimizer-disk30.off-parameters-disk70"),
    ("llama", "dp2.z3", "fp32", "optimizer-disk.off-parameters-disk40"),
    ("llama", "dp2.z3", "bf16", "optimizer50.off-parameters-disk"),
    ("llama", "tp2.z3", "fp16", "optimizer-disk70.off-parameters50"),
    ("llama-tied", "pp2.z3", "fp32", "optimizer-disk20.off-parameters-disk40"),
    ("mixtral", "dp2.ep2.z3", "bf16", "optimizer-disk50.off-parameters-disk50"),
    ("llama", "dp3.z3", "bf16", "optimizer-disk60.off-parameters-disk40"),
    ("llama", "dp2.z3.zw3-1", "fp32", "optimizer-disk60.off-parameters-disk30"),
    ("llama", "dp2.z3.rc-full.mb2", "bf16", "optimizer-disk40.off-parameters-disk70.off-activations-disk"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "precision", "way"), BOTH)
@pytest.mark.covering(1)
def test_offload_fractions_of_states_and_weights_are_bit_identical(
    ranks: Any, tmp_path: Any, name: str, plan: str, precision: str, way: str
) -> None:
    states, weights = (int(part[-2:]) / 100 if part[-1].isdigit() else 1.0 for part in way.split(".")[:2])
    for held, elsewhere in bit_for_bit(ranks, tmp_path, name, plan, precision, way):
        for kind, share, stays in (("optimizer", states, False), ("parameters", weights, "parameters-disk" not in way)):
            gone = held[kind] - elsewhere[kind]
            assert (0 if stays else share) * held[kind] <= gone and (gone < held[kind] or share == 1.0)
        if "activations" not in way:
            assert sum(elsewhere.values()) == sum(held.values())


def resumed(plan: str, other: str, folder: str, checkpoints: str) -> tuple[list[float], list[float]]:
    """Returns the losses of four steps under `plan`, and those of the last two steps when `other` resumes from the
    checkpoint of step 2."""
    first = made("llama", f"{plan}.mb2", "bf16", folder)
    whole = [first.step(make_batch("llama", step)).loss for step in range(2)]
    path = first.save(checkpoints)
    whole += [first.step(make_batch("llama", step)).loss for step in range(2, 4)]
    second = made("llama", f"{other}.mb2", "bf16", folder)
    second.load(path)
    return whole, [second.step(make_batch("llama", step)).loss for step in range(2, 4)]


@pytest.mark.parametrize(
    ("plan", "other"),
    [
        ("dp2.z1.off-optimizer-disk", "dp2.z1.off-optimizer-disk"),
        ("dp2.z3.off-optimizer-disk", "dp2.z3"),
        ("dp2.z1", "dp2.z1.off-optimizer-disk"),
        ("dp2.z1.off-optimizer", "dp2.z1.off-optimizer"),
        ("dp2.z3.off-optimizer-disk.off-parameters-disk", "dp2.z3.off-parameters-disk"),
        ("dp2.z3.off-parameters-disk", "dp2.z3"),
        ("dp2.z1.off-optimizer-disk30", "dp2.z1.off-optimizer-disk70"),
        ("dp2.z3.off-optimizer-disk50", "dp2.z3"),
        ("dp2.z3.off-parameters-disk30", "dp2.z3.off-parameters-disk70"),
        ("dp2.z3.off-optimizer-disk60.off-parameters-disk50", "dp2.z3.off-optimizer-disk30.off-parameters-disk70"),
        ("dp2.z3.off-optimizer-disk30.off-parameters50", "dp2.z3"),
    ],
)
@pytest.mark.covering(1)
def test_a_checkpoint_holds_what_waits_in_files_and_goes_on_bit_for_bit(
    ranks: Any, tmp_path: Any, plan: str, other: str
) -> None:
    for whole, again in ranks.run(2, resumed, plan, other, str(tmp_path / "away"), str(tmp_path / "kept")):
        assert whole[2:] == again


class Odd(torch.nn.Module):
    """A unit of several windows, whose vectors begin at odd places."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(1501, 1009), torch.nn.LayerNorm(1009)
        self.first, self.last = torch.nn.Linear(1009, 7), torch.nn.Linear(7, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.norm(self.table(input_ids))).tanh())


def many_windows(folder: str, way: str, precision: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    batch = {"input_ids": torch.arange(64).view(4, 16), "labels": torch.zeros(4, 16, dtype=torch.int64)}
    loss = lambda output, batch: output.square().mean()
    trainer = parallelize(Odd(), make_optimizer, f"dp1{way}", loss=loss, precision=precision, offload_to=folder)
    for _ in range(3):
        trainer.step(batch)
    found = trainer.full_state_dict()
    assert found is not None and len(trainer.engine.updater.optimizer_params()) > 12
    return list(found.values())


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.soak)])
def test_a_unit_of_many_windows_is_updated_as_one_in_memory(ranks: Any, tmp_path: Any, precision: str) -> None:
    """Also where the states of only some of them wait in the file, and the weights of all, or where only the weights
    do."""
    here = ranks.run(1, many_windows, str(tmp_path), "", precision)[0]
    together = (
        ".z3.off-optimizer-disk45.off-parameters-disk",
        ".z3.off-optimizer45.off-parameters-disk",
        ".z3.off-parameters-disk",
    )
    for way in (".off-optimizer", ".off-optimizer-disk", ".off-optimizer-disk45", *together):
        assert all(map(torch.equal, here, ranks.run(1, many_windows, str(tmp_path), way, precision)[0]))


class Slow:
    """A window whose states stay, and whose weights are written when nobody waits for them any more."""

    def __init__(self, away: StateSwapper) -> None:
        self.resident, self.written = True, False
        self.index, self.buffer = away.next_buffer(self.resident)

    def fetch(self) -> None:
        """Nothing of it waits."""

    def store(self) -> None:
        time.sleep(0.2)
        self.written = True


def test_an_update_waits_for_the_weights_beside_states_that_stay() -> None:
    away = StateSwapper(None, torch.device("cpu"), Offload.optimizer, 50)
    window = Slow(away)
    away.run_pipelined([window], lambda window: None)
    away.quiesce()
    assert window.written


def refused(folder: str, plan: str) -> str:
    try:
        trainer = made("llama", plan, "fp32", folder)
        trainer.step(make_batch("llama", 0))
    except MeshwrightError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_a_folder_that_cannot_be_written_is_one_line(ranks: Any, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    found = ranks.run(1, refused, str(tmp_path / "file" / "inside"), "dp1.off-optimizer-disk")[0]
    assert found.startswith("InputError offload folder") and "--offload-to" in found and "\n" not in found


@pytest.fixture
def narrow(tmp_path: Any) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "narrow"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"this machine does not let us mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_folder_that_is_full_is_one_line_at_the_first_step(ranks: Any, narrow: Path) -> None:
    found = ranks.run(1, refused, str(narrow), "dp1.off-optimizer-disk")[0]
    assert "is full" in found and "1 MiB" in found and "\n" not in found


def lost(folder: str, checkpoints: str) -> tuple[str, float, float]:
    """A file that is gone in the middle of a run: the words, and the loss of the step after the checkpoint, in this run
    and in the next."""
    trainer = made("llama", "dp1.off-optimizer-disk", "fp32", folder)
    trainer.step(make_batch("llama", 0))
    path = trainer.save(checkpoints)
    loss = trainer.step(make_batch("llama", 1)).loss
    away = trainer.mesh.state_swapper
    assert away is not None and away.swap_file is not None
    away.quiesce()
    os.ftruncate(away.swap_file.handle, 0)
    words = ""
    try:
        trainer.step(make_batch("llama", 2))
    except OffloadFailed as error:
        words = str(error)
    again = made("llama", "dp1.off-optimizer-disk", "fp32", folder)
    again.load(path)
    return words, loss, again.step(make_batch("llama", 1)).loss


def test_a_file_that_is_lost_ends_the_run_in_one_line_and_its_checkpoint_is_good(ranks: Any, tmp_path: Any) -> None:
    words, loss, again = ranks.run(1, lost, str(tmp_path / "away"), str(tmp_path / "kept"))[0]
    assert "continues from its last checkpoint" in words and "\n" not in words
    assert loss == again


def masters(folder: str) -> set[str]:
    """Devices of the float32 weights whose 16-bit copy waits in a file, of ranks that compute on another device than
    the host."""
    units, found = made("llama", "dp1.z3.off-parameters-disk", "bf16", folder).engine.zero.units, set[str]()
    for unit in units:
        context = replace(unit.layout.context, device=torch.device("meta"))
        shard = make_optim_shard(replace(unit.layout, context=context), unit.weights, recipe("bf16"), {})
        found.add(shard.flat.device.type)
    return found


def test_float32_weights_stay_on_device_where_16_bit_weights_are_offloaded(ranks: Any, tmp_path: Any) -> None:
    assert ranks.run(1, masters, str(tmp_path)) == [{"meta"}]
