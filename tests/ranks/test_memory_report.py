"""What a step's memory was, and what is said when there is none."""

from __future__ import annotations

import json
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from equality import anatomy_of, make_batch, make_model, make_optimizer
from torch import nn

from meshwright.core.background_thread import BackgroundCall
from meshwright.core.codec import read_as
from meshwright.core.quantities import parse_quantity
from meshwright.report.memory import memory_chart, read_rank_peaks
from meshwright.spec.estimate import MemoryBreakdown
from meshwright.spec.plan import parse_plan
from meshwright.spec.record import MemoryTimeline
from meshwright.train.memory import MemoryRecorder, peak_resident_bytes, trace_memory
from meshwright.train.oom import MemoryReport, OutOfMemory, explain_oom, oom_message
from meshwright.train.trainer import parallelize

ROOM, ROWS = 48 << 20, 8192


PREDICTED = MemoryBreakdown(
    parameters=1e6, gradients=1e6, optimizer=2e6, activations=3e6, buffers=1e6, total=8e6, reserved=9e6
)
"""Of a rank that was to take next to nothing."""


@contextmanager
def little_room(room: int = ROOM) -> Iterator[None]:
    """What this process may still map; what its heap keeps free, of tests before this one, is taken first."""
    before, mapped, taken = resource.getrlimit(resource.RLIMIT_AS), psutil.Process().memory_info().vms, []
    resource.setrlimit(resource.RLIMIT_AS, (mapped, before[1]))
    try:
        with suppress(RuntimeError, MemoryError):
            while True:
                taken.append(torch.empty(ROOM // 3, dtype=torch.uint8))  # never written, so no memory of the machine's
        resource.setrlimit(resource.RLIMIT_AS, (mapped + room, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def starved(where: str, predicted: tuple[MemoryBreakdown, ...]) -> str:
    """A step, or an evaluation, whose activations pass what this process may still map; a model of which no second copy
    has room."""
    if where == "states":
        model = nn.Linear(1 << 13, 1 << 13)  # 256 MiB, more than a heap that is given back could free
        with little_room(), pytest.raises(OutOfMemory) as found:
            parallelize(model, make_optimizer, "dp1", loss=lambda output, batch: output.mean(), predicted=predicted)
        return str(found.value)
    trainer = parallelize(
        make_model("llama"), make_optimizer, "dp1.mb8", anatomy=anatomy_of("llama"), predicted=predicted
    )
    trainer.step(make_batch("llama", 0))
    big = {name: value.repeat(ROWS // 8, 1) for name, value in make_batch("llama", 1).items()}
    trainer.plan = trainer.plan.but(micro_batch=ROWS)
    with little_room(), pytest.raises(OutOfMemory) as found:
        trainer.step(big) if where == "step" else trainer.evaluate(big)
    return str(found.value)


@pytest.mark.parametrize(
    ("where", "doing"),
    [("step", "in step 2"), ("evaluation", "in an evaluation after step 1"), ("states", "before the first step")],
)
def test_an_oom_is_one_line_with_memory_by_kind_and_the_excess_over_the_prediction(
    ranks: Any, where: str, doing: str
) -> None:
    found = ranks.run(1, starved, where, (PREDICTED,))[0]
    assert found.startswith(f"rank 0 is out of memory {doing}: ") and "\n" not in found
    rest = "allocated memory" if where == "states" else "activations and all else"
    size = "([0-9.]+ [KMG]iB)"  # a rank that served other tests before may hold more than 1 GiB
    sizes = re.search(f"that is {size} for {rest}, {size} more than the predicted {size}", found)
    taken, more, said = (parse_quantity(shown, "B") for shown in sizes.groups())
    assert taken - more == pytest.approx(
        said, abs=0.15 * (1 << 20) if taken < 1 << 30 else 0.015 * (1 << 30)
    )  # tenths of MiB, hundredths of GiB
    assert said == pytest.approx(9e6 if where == "states" else 5e6, abs=0.01 * (1 << 20))
    assert "in addition to" in found and ("parameters" in found) == (where != "states")


def test_a_want_of_memory_without_a_prediction_says_what_holds_less(ranks: Any) -> None:
    found = ranks.run(1, starved, "step", ())[0]
    assert "in addition to parameters" in found and "rc-full" in found


def holder(held: Callable[[], dict[str, float]], predicted: MemoryBreakdown | None = PREDICTED) -> MemoryReport:
    return MemoryReport(3, parse_plan("dp4"), torch.device("cpu"), held, predicted)


def test_the_line_names_the_kind_that_is_the_most_beyond_its_part() -> None:
    said = oom_message(
        holder(lambda: {"parameters": 1e6, "gradients": 1e6, "optimizer": 2e13}),
        "in step 2",
        "you tried to allocate 64 bytes",
    )
    assert (
        "it requested 64 B" in said
        and "that is 18.2 TiB for optimizer, 18.2 TiB more than the predicted 1.91 MiB" in said
    )


def test_a_kind_within_what_was_predicted_is_not_said_to_take_more() -> None:
    ample = PREDICTED.but(total=1e15, reserved=1e15)
    said = oom_message(
        holder(lambda: {"parameters": 1e6}, ample), "in step 2", "CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert said.startswith("rank 3 is out of memory in step 2: it requested 2.00 GiB")
    assert "no kind takes more memory than predicted" in said


def test_what_fails_while_the_line_is_made_does_not_take_its_place() -> None:
    def fails() -> dict[str, float]:
        raise MemoryError

    assert (
        oom_message(holder(fails), "in step 2", "")
        == "rank 3 is out of memory in step 2, and too little is left to report what uses it"
    )


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("CUDA error: out of memory"), torch.OutOfMemoryError("CUDA out of memory. Tried")],
)
def test_every_way_in_which_memory_is_said_to_be_wanting_is_one(error: Exception) -> None:
    with pytest.raises(OutOfMemory), explain_oom(holder(dict), "in step 2"):
        raise error
    with pytest.raises(RuntimeError, match="other"), explain_oom(holder(dict), "in step 2"):
        raise RuntimeError("something other")


def watched(folder: str, plan: str, before: int = 2) -> tuple[dict[str, float], float, int]:
    trainer = parallelize(make_model("llama"), make_optimizer, plan, anatomy=anatomy_of("llama"))
    for step in range(before):
        trainer.step(make_batch("llama", step))
    with trace_memory(trainer.engine.model) as watch:
        trainer.step(make_batch("llama", before))
    disk: BackgroundCall[None] = BackgroundCall("write memory")
    kinds = watch.keep(trainer, Path(folder), disk)
    if disk.is_pending:  # a busy machine: the step does not wait for the disk, the test does
        disk.call(lambda: None, time.monotonic() + 60.0)
    return kinds, sum(trainer.bytes().values()) + trainer.passing + watch.peak - watch.remaining, trainer.mesh.rank


def test_a_timeline_adds_up_to_the_peak_and_names_the_module_that_ran(ranks: Any, tmp_path: Any) -> None:
    for kinds, peak, rank in ranks.run(2, watched, str(tmp_path), "dp2.mb4"):
        found = read_as(MemoryTimeline, tmp_path / "memory" / f"rank-{rank}.json")
        assert found.total == kinds["total"] == pytest.approx(peak)
        assert found.place.startswith(
            ("forward of model", "backward of model", "backward of lm_head", "forward of lm_head")
        )
        assert (
            max(moment.activations + moment.buffers for moment in found.moments)
            == found.peak.activations + found.peak.buffers
        )
        assert {"P", "G", "O", "a"} <= set("".join(memory_chart(found)))


def test_a_timeline_of_the_first_step_begins_without_the_states_that_it_makes(ranks: Any, tmp_path: Any) -> None:
    for kinds, peak, rank in ranks.run(1, watched, str(tmp_path), "dp1.mb8", 0):
        found = read_as(MemoryTimeline, tmp_path / "memory" / f"rank-{rank}.json")
        assert found.resident["optimizer"] == 0 and found.total == kinds["total"] == pytest.approx(
            peak, rel=1e-4
        )  # counters of steps are left too


def written(folder: str, plan: str) -> list[dict[str, float]]:
    """What three steps held, the last of which holds more."""
    trainer = parallelize(make_model("llama"), make_optimizer, plan, anatomy=anatomy_of("llama"))
    memories = MemoryRecorder(trainer, Path(folder))
    found = []
    for step in range(3):
        record = trainer.step(make_batch("llama", step))
        held = memories.of(
            record.model_copy(update={"memory": {**record.memory, "gradients": 1e9 if step == 2 else 1e6}}), None
        )
        found.append(held)
    trainer.close()
    return found


def test_every_rank_writes_what_it_holds_whenever_that_changes(ranks: Any, tmp_path: Any) -> None:
    found = ranks.run(2, written, str(tmp_path), "dp2.z1")
    for rank, held in enumerate(found):
        rows = [json.loads(line) for line in (tmp_path / "memory" / f"rank-{rank}.jsonl").read_text().splitlines()]
        steps = [row.pop("step") for row in rows]
        assert steps[0] == 1 and steps[-1] == 3 and rows[0] == held[0] and rows[-1] == held[2]
        near = [row for step, row in zip(steps, rows, strict=True) if step <= 2][-1]
        assert all(abs(near[kind] - size) <= 0.01 * size for kind, size in held[1].items())
        assert "reserved" not in rows[0], "each reads memory of the other, which the system counts for both"
    most = [
        {kind: max(held[kind] for held in each) for kind in ("parameters", "gradients", "optimizer")} for each in found
    ]
    read_back = read_rank_peaks(tmp_path)
    assert [each["rank"] for each in read_back] == [0, 1]
    assert [{kind: each[kind] for kind in most[0]} for each in read_back] == most


def test_a_rank_alone_has_reserved_the_most_that_its_process_took_during_a_step(ranks: Any, tmp_path: Any) -> None:
    (held,) = ranks.run(1, written, str(tmp_path), "dp1")
    assert all(each["reserved"] >= 0.99 * each["resident"] > 1e7 for each in held)
    peak_resident_bytes()
    with mmap(
        -1, size := 128 << 20, MAP_PRIVATE | MAP_ANONYMOUS
    ) as taken:  # of the system: what the heap has left over from tests before is no part of it
        for page in range(0, size, PAGESIZE):
            taken[page] = 1
    most, later = peak_resident_bytes(), peak_resident_bytes()
    assert most - later > 0.9 * size
