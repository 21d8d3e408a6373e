"""What a step's memory was, and what is said when there is none."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
from equality import anatomy_of, make_batch, make_model, make_optimizer

from meshwright.base.codec import read
from meshwright.report.memory import chart
from meshwright.spec.timeline import Timeline
from meshwright.train.memory import OutOfMemory, watching
from meshwright.train.trainer import parallelize

ROOM, ROWS = 48 << 20, 8192


def starved() -> str:
    """A step whose activations pass what this process may still map."""
    trainer = parallelize(make_model("llama"), make_optimizer, "dp1.mb8", anatomy=anatomy_of("llama"))
    trainer.step(make_batch("llama", 0))
    big = {name: value.repeat(ROWS // 8, 1) for name, value in make_batch("llama", 1).items()}
    trainer.plan = trainer.plan.but(micro_batch=ROWS)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, before[1]))
    try:
        trainer.step(big)
    except OutOfMemory as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return ""


def test_a_step_without_memory_ends_in_one_line_with_what_is_held_and_what_holds_less(ranks: Any) -> None:
    found = ranks.run(1, starved)[0]
    assert found.startswith("rank 0 is out of memory in step 2: ") and "\n" not in found
    assert "parameters" in found and "rc-layer" in found and "more were asked for" in found


def watched(folder: str, plan: str, before: int = 2) -> tuple[dict[str, float], float, int]:
    trainer = parallelize(make_model("llama"), make_optimizer, plan, anatomy=anatomy_of("llama"))
    for step in range(before):
        trainer.step(make_batch("llama", step))
    with watching(trainer.engine.model) as watch:
        trainer.step(make_batch("llama", before))
    kinds = watch.keep(trainer, Path(folder))
    return kinds, sum(trainer.bytes().values()) + trainer.passing + watch.peak - watch.kept, trainer.mesh.rank


def test_a_timeline_adds_up_to_the_peak_and_names_the_module_that_ran(ranks: Any, tmp_path: Any) -> None:
    for kinds, peak, rank in ranks.run(2, watched, str(tmp_path), "dp2.mb4"):
        found = read(Timeline, tmp_path / "memory" / f"rank-{rank}.json")
        assert found.total == kinds["total"] == pytest.approx(peak)
        assert found.place.startswith(("forward of model", "backward of model", "backward of lm_head", "forward of lm_head"))
        assert max(moment.activations + moment.buffers for moment in found.moments) == found.peak.activations + found.peak.buffers
        assert {"P", "G", "O", "a"} <= set("".join(chart(found)))


def test_a_timeline_of_the_first_step_begins_without_the_states_that_it_makes(ranks: Any, tmp_path: Any) -> None:
    for kinds, peak, rank in ranks.run(1, watched, str(tmp_path), "dp1.mb8", 0):
        found = read(Timeline, tmp_path / "memory" / f"rank-{rank}.json")
        assert found.held["optimizer"] == 0 and found.total == kinds["total"] == pytest.approx(
            peak, rel=1e-4
        )  # counters of steps are left too
