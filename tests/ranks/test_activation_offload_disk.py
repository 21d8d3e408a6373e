"""What blocks keep between forward and backward waits in a file: the same numbers to the bit, in less memory, in a file
no larger than what waits."""

from __future__ import annotations

import functools
import gc
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import anatomy_of, make_batch, make_model, read_once
from test_peak_memory import BATCH, MODELS, SMALL, expected, most

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.models.registry import build_reference_model
from meshwright.runtime.offload.activation_offload import ActivationOffload
from meshwright.runtime.offload.swap_file import PAGE_BYTES, ActivationStore, ExtentAllocator, OffloadFailed
from meshwright.spec.plan import parse_plan
from meshwright.train.memory import trace_memory
from meshwright.train.trainer import Trainer, parallelize

PROMISED = "dp1.mb16"


def watched(plan: str, folder: str) -> tuple[list[float], int, list[int]]:
    """Of four steps the losses, the most that the last allocated, and the bytes of the file after each."""
    torch.manual_seed(0)
    anatomy = read_once("peak of llama", functools.partial(build_reference_model, MODELS["llama"]))
    trainer = parallelize(
        build_reference_model(MODELS["llama"]), torch.optim.AdamW, plan, anatomy=anatomy, offload_to=folder
    )
    ids = torch.randint(SMALL["vocab"], (BATCH, SMALL["seq"]), generator=torch.Generator().manual_seed(1))
    losses, sizes = [], []
    for _ in range(4):
        with trace_memory() as watch:
            losses.append(trainer.step({"input_ids": ids, "labels": ids}).loss)
        sizes.append(trainer.mesh.activation_store.peak_bytes if trainer.mesh.activation_store else 0)
    held = sum(size for kind, size in trainer.bytes().items() if kind != "offloaded")
    return losses, held + trainer.passing + watch.peak - watch.remaining, sizes


def test_what_blocks_keep_waits_in_a_file_and_two_blocks_of_it_in_memory(ranks: Any, tmp_path: Any) -> None:
    """The promise: of four blocks two stay, losses are the same to the bit, the file grows in the first step alone and
    leaves nothing behind."""
    losses, whole, _ = ranks.run(1, watched, PROMISED, str(tmp_path))[0]
    others, less, sizes = ranks.run(1, watched, f"{PROMISED}.off-activations-disk", str(tmp_path))[0]
    block = (expected("llama", f"{PROMISED}.rc-full1", "fp32") - expected("llama", f"{PROMISED}.rc-full2", "fp32")) / 2
    assert losses == others and not list(tmp_path.iterdir())
    assert less < whole - 2 * block and sizes[0] == sizes[-1] > 2 * block


def trained(name: str, plan: str, precision: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor] | None]:
    trainer = parallelize(
        make_model(name),
        torch.optim.AdamW,
        plan,
        anatomy=anatomy_of(name),
        precision=precision,
        clip=1.0,
        offload_to=folder,
    )
    losses = [trainer.step(make_batch(name, step)).loss for step in range(2)]
    return losses, trainer.full_state_dict()


PAIRS = [
    ("llama", "dp1.mb4", "bf16", ""), ("llama", "dp2.z3.mb4", "fp64", ".off-optimizer-disk"),
    ("llama", "dp1.z3.mb8", "fp32", ".off-parameters-disk"), ("llama", "pp2.mb2", "fp64", ""),
    ("llama", "pp2.zbh1.mb2", "fp32", ""), ("llama", "pp2.zbv.mb2", "fp32", ""),
    ("llama", "pp2.interleaved2.mb2", "fp64", ""), ("llama-tied", "pp2.gpipe.mb2", "fp64", ""),
    ("llama", "tp2.sp.mb4", "fp32", ""), ("llama", "cp2.mb4", "fp64", ""), ("mixtral", "dp2.ep2.z1.mb4", "fp32", ""),
    ("llama", "pp2.mb4.rc-full1", "fp32", ""), ("hf-llama", "dp1.mb8", "bf16", ""),
    ("hf-gpt2", "dp1.mb8.rc-attn", "fp32", ""), ("bert", "dp1.mb8", "fp32", ""),
    ("llama", "dp2.z2.mb2", "bf16", ".off-optimizer.off-gradients"), ("convnet", "dp1.mb8", "fp32", ""),
    ("mixture", "dp1.mb4.rc-sac", "fp32", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "precision", "beside"), PAIRS)
@pytest.mark.covering(1)
def test_a_run_with_activations_in_files_is_bit_for_bit_the_run_without(
    ranks: Any, tmp_path: Any, name: str, plan: str, precision: str, beside: str
) -> None:
    world = parse_plan(plan).world
    here = ranks.run(world, trained, name, plan, precision, str(tmp_path))
    away = ranks.run(world, trained, name, f"{plan}{beside}.off-activations-disk", precision, str(tmp_path))
    for (losses, weights), (others, theirs) in zip(here, away, strict=True):
        assert losses == others
        assert weights is None or all(torch.equal(weights[key], theirs[key]) for key in weights)
    assert not list(tmp_path.iterdir())


ESTIMATED = (
    *(
        "dp1.mb4",
        "dp1.mb16",
        "pp2.mb4",
        "dp2.mb4.z3",
        "tp2.sp.mb8",
        "pp2.mb4.gpipe",
        "pp2.mb2.interleaved2",
        "dp2.z1.mb8.off-optimizer-disk",
    ),
    *("dp1.mb8.rc-full2", "dp1.mb16.rc-sac", "cp2.mb8", "pp2.mb2.zbh1", "pp2.mb2.zbv"),
)


@pytest.mark.soak
@pytest.mark.parametrize("plan", ESTIMATED)
def test_a_rank_allocates_what_the_estimate_says(ranks: Any, plan: str) -> None:
    name = f"{plan}.off-activations-disk"
    assert expected("llama", name, "fp32") == pytest.approx(
        max(ranks.run(parse_plan(name).world, most, "llama", name, "fp32")), rel=0.05
    )


def test_of_the_first_blocks_alone_activations_wait_as_estimated(ranks: Any) -> None:
    name = f"{PROMISED}.off-activations-disk2"
    assert expected("llama", name, "fp32") == pytest.approx(ranks.run(1, most, "llama", name, "fp32")[0], rel=0.05)


# --- passes that are dropped, and what goes wrong
# ------------------------------------------------------------------------------


def passes(rank: ActivationOffload, count: int, size: int) -> torch.Tensor:
    hidden = torch.ones(size, requires_grad=True)
    for place in range(count):
        with rank.collect_block(place):
            hidden = hidden.exp()
    return hidden.sum()


def test_room_comes_back_with_a_pass_that_is_dropped_or_broken(tmp_path: Path) -> None:
    rank = ActivationOffload(torch.device("cpu"), (), ActivationStore(tmp_path, torch.device("cpu")))
    for _ in range(3):
        loss = passes(rank, 4, 4 * PAGE_BYTES)
        del loss
        with pytest.raises(ZeroDivisionError), rank.collect_block(0):
            torch.ones(4 * PAGE_BYTES, requires_grad=True).exp()
            raise ZeroDivisionError
        gc.collect()
        size = rank.depot.peak_bytes
        passes(rank, 4, 4 * PAGE_BYTES).backward()
        assert rank.depot.peak_bytes == size and rank.depot.allocator.free == [(0, size)]


def test_several_passes_in_flight_share_the_file_and_each_gets_its_own_back(tmp_path: Path) -> None:
    rank = ActivationOffload(torch.device("cpu"), (), ActivationStore(tmp_path, torch.device("cpu")))
    given = [torch.full((2 * PAGE_BYTES + at,), at / 8, requires_grad=True) for at in range(4)]
    ends = []
    for each in given:
        hidden = each
        for place in range(3):
            with rank.collect_block(place):
                hidden = hidden.exp()
        ends.append(hidden.sum())
    for end in (*ends[::2], *ends[1::2]):
        end.backward(retain_graph=end is ends[1])
    ends[1].backward()  # a graph that is kept is walked again
    for times, each in zip((1, 2, 1, 1), given, strict=True):
        whole = each.detach().clone().requires_grad_()
        (whole.exp().exp().exp().sum() * times).backward()
        assert torch.equal(each.grad, whole.grad)


def test_rooms_of_other_sizes_are_found_in_what_came_back() -> None:
    rooms = ExtentAllocator()
    for start in (0, 8, 16):
        rooms.release(start, 8)
    assert rooms.allocate(4) == 0 and rooms.allocate(12) == 4 and rooms.allocate(12) is None
    rooms.release(0, 4)
    assert rooms.free == [(0, 4), (16, 8)] and rooms.allocate(3) == 0


def test_rooms_that_come_back_in_another_thread_are_given_to_one_alone(tmp_path: Path) -> None:
    """The collector ends what had them wherever it runs: in the middle of taking one, or in a thread that writes."""
    depot, held, lost = ActivationStore(tmp_path, torch.device("cpu")), {}, queue.SimpleQueue[list[tuple[int, int]]]()

    def give() -> None:
        while rooms := lost.get():
            for start, size in rooms:
                del held[start]
                depot.free(start, size)

    interval, thread = sys.getswitchinterval(), threading.Thread(target=give)
    thread.start()
    try:
        sys.setswitchinterval(1e-6)
        for turn in range(500):
            rooms = []
            for size in (PAGE_BYTES * (1 + (turn * 7 + at) % 5) for at in range(6)):
                start = depot.allocate(size)
                assert all(start >= first + length or first >= start + size for first, length in held.copy().items())
                held[start] = size
                rooms.append((start, size))
            lost.put(rooms)
    finally:
        lost.put([])
        thread.join()
        sys.setswitchinterval(interval)


def test_a_storage_saved_in_several_views_is_offloaded_once(tmp_path: Path) -> None:
    rank = ActivationOffload(torch.device("cpu"), (), ActivationStore(tmp_path, torch.device("cpu")))
    given, weight = torch.arange(4.0 * PAGE_BYTES), torch.ones(4 * PAGE_BYTES, requires_grad=True)
    with rank.collect_block(0) as block:
        whole, turned, part = (
            weight * given,
            weight.view(4, -1) * given.view(4, -1),
            weight[:PAGE_BYTES] * given[:PAGE_BYTES],
        )
    assert sorted(parcel.size for parcel in block.parcels) == [4 * PAGE_BYTES, 16 * PAGE_BYTES]
    (whole.sum() + turned.sum() + part.sum()).backward()
    assert torch.equal(weight.grad, 2 * given + torch.cat([given[:PAGE_BYTES], torch.zeros(3 * PAGE_BYTES)]))


def test_parts_of_storages_that_are_gone_are_told_apart(tmp_path: Path) -> None:
    """A storage that is freed while its block runs leaves its number to the next one."""
    rank = ActivationOffload(torch.device("cpu"), (), ActivationStore(tmp_path, torch.device("cpu")))
    weight, found = torch.ones(2 * PAGE_BYTES, requires_grad=True), []
    with rank.collect_block(0):
        for value in range(8):
            found.append((weight * torch.full((8 * PAGE_BYTES,), float(value))[: 2 * PAGE_BYTES]).sum())
    sum(found).backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 28.0))


def test_what_was_written_after_it_was_kept_is_refused_as_autograd_does(tmp_path: Path) -> None:
    rank = ActivationOffload(torch.device("cpu"), (), ActivationStore(tmp_path, torch.device("cpu")))
    weight, given = torch.ones(PAGE_BYTES, requires_grad=True), torch.ones(PAGE_BYTES)
    with rank.collect_block(0):
        output = weight * given
    given += 1
    with pytest.raises(RuntimeError, match="modified in place after it was saved"):
        output.sum().backward()


@pytest.fixture
def narrow(tmp_path: Any) -> Iterator[Path]:
    """A disk of 64 KiB."""
    folder = tmp_path / "narrow"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"this machine does not let us mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def made(folder: str) -> Trainer:
    return parallelize(
        make_model("llama"),
        torch.optim.AdamW,
        "dp1.mb8.off-activations-disk",
        anatomy=anatomy_of("llama"),
        offload_to=folder,
    )


def refused(folder: str) -> str:
    try:
        made(folder).step(make_batch("llama", 0))
    except MeshwrightError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_a_folder_that_is_full_or_cannot_be_written_is_one_line(ranks: Any, narrow: Path, tmp_path: Path) -> None:
    found = ranks.run(1, refused, str(narrow))[0]
    assert found.startswith(InputError.__name__) and "is full" in found and "64.0 KiB" in found and "\n" not in found
    (tmp_path / "file").write_text("")
    found = ranks.run(1, refused, str(tmp_path / "file" / "inside"))[0]
    assert found.startswith(InputError.__name__) and "--offload-to" in found and "\n" not in found


def lost(folder: str, checkpoints: str) -> tuple[str, float, float]:
    """A file that is gone while a step reads it: the words, and the loss of the step after the checkpoint, in this run
    and in the next."""
    trainer = made(folder)
    trainer.step(make_batch("llama", 0))
    path = trainer.save(checkpoints)
    loss, words = trainer.step(make_batch("llama", 1)).loss, ""
    depot = trainer.mesh.activation_store
    assert depot is not None
    read = depot.read
    depot.read = lambda *given: (os.ftruncate(depot.swap_file.handle, 0), read(*given))[1]  # type: ignore[method-assign]
    try:
        trainer.step(make_batch("llama", 2))
    except OffloadFailed as error:
        words = f"{error.exit_code} {error}"
    again = made(folder)
    again.load(path)
    return words, loss, again.step(make_batch("llama", 1)).loss


def test_a_file_that_is_lost_ends_the_run_in_one_line_and_its_checkpoint_is_good(ranks: Any, tmp_path: Any) -> None:
    words, loss, again = ranks.run(1, lost, str(tmp_path / "away"), str(tmp_path / "kept"))[0]
    assert words.startswith("1 offload folder") and "continues from its last checkpoint" in words and "\n" not in words
    assert loss == again
