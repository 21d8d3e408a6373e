"""In-memory checkpoints of accelerators become rarer if training would wait for them, on the device that
recording_backend.py plays. The steps are real; the times are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from equality import anatomy_of, make_batch, make_model, make_optimizer
from recording_backend import recording_device

from meshwright.core.ipc import Heartbeat, open_heartbeats
from meshwright.core.messages import translate
from meshwright.spec.record import StepRecord
from meshwright.train import memory_checkpointer, recovery
from meshwright.train.memory_checkpointer import MAX_WAIT_FRACTION, NO_WAIT
from meshwright.train.trainer import Trainer, parallelize

STEP = 1.0


class Run:
    """A run of one rank, whose steps take STEP seconds and `wait` seconds more if they wait for a copy."""

    def __init__(self, made: Trainer, folder: Path) -> None:
        self.trainer, self.said = made, list[dict[str, Any]]()
        (folder / "copies").touch()
        say = lambda kind, **fields: self.said.append({"kind": kind, **fields})
        memory = SimpleNamespace(own=str(folder / "copies"), single_node=True, history=0)
        channel: Any = SimpleNamespace(rank=0, say=say, memory=memory)
        run = SimpleNamespace(folder=str(folder), memory_checkpoints=True, keep=2, retries=2, checkpoint_every=1)
        launch: Any = SimpleNamespace(run=run, workload=SimpleNamespace(skips_spikes=False, steps=100))
        self.recovery = recovery.Recovery(launch, channel, made, Heartbeat(open_heartbeats("", 1), 0), {})
        assert self.recovery.copies is not None
        self.copies = self.recovery.copies

    def step(self, wait: float) -> float:
        """Runs a step. Returns the seconds for which it has waited for the copy of an earlier one."""
        self.trainer.step(make_batch("llama", 0))
        self.recovery.finish()  # before the last reduction
        waited = 0.0
        if self.copies.waited != NO_WAIT:
            self.copies.waited = waited = wait
        record = StepRecord(
            step=self.trainer.steps, loss=1.0, tokens=1, gradient_norm=1.0, lr=0.1, seconds=STEP + waited
        )
        self.recovery.copy(record)
        self.recovery.agreed(record, self.recovery.flags)
        return waited


@contextmanager
def a_run(folder: Path, device: Any) -> Iterator[Run]:
    with device:
        made = parallelize(make_model("llama"), make_optimizer, "dp1", anatomy=anatomy_of("llama"), prove="never")
        made.engine.preflight.skip()
        run = Run(made, folder)
        yield run
        run.recovery.finish()
        made.close()


def test_training_waits_at_most_2_percent_of_its_time_for_copies(tmp_path: Path) -> None:
    """A copy makes the next step wait for a tenth of a step. The interval doubles until the waits are rare enough."""
    with a_run(tmp_path, recording_device()) as run:
        waits = [run.step(0.1 * STEP) for _ in range(40)]
        assert run.copies.interval == memory_checkpointer.copy_interval(0.1, STEP) == 5
        assert [step for step, wait in enumerate(waits, 1) if wait] == [2, 3, 7, *range(12, 41, 5)]
        late = waits[11:36]
        assert sum(late) / (sum(late) + STEP * len(late)) <= MAX_WAIT_FRACTION
        assert [each["line"] for each in run.said] == [
            "training waits 100.0 ms for an in-memory checkpoint and 1.00 s for a step: every 5th step has one from "
            "now on, so a failed rank repeats up to that many steps; --set run.memory_checkpoints=false trains "
            "without them"
        ]
        assert translate(run.said[0]["line"], "zh").startswith("训练为一个内存检查点等待 100.0 ms，一步需要 1.00 s")


def test_copies_return_to_every_step_when_they_are_fast(tmp_path: Path) -> None:
    with a_run(tmp_path, recording_device()) as run:
        for _ in range(10):
            run.step(0.5 * STEP)
        assert run.copies.interval > 2
        for _ in range(20):
            run.step(0.0)
        assert run.copies.interval == 1
        run.recovery.finish()
        assert run.trainer.steps in run.copies.memory.steps


def test_a_step_that_is_saved_is_copied_between_two_others(tmp_path: Path) -> None:
    with a_run(tmp_path, recording_device()) as run:
        while run.copies.interval < 8:
            run.step(STEP)
        run.step(STEP)
        run.recovery.finish()
        assert run.trainer.steps not in run.copies.memory.steps
        run.recovery.save(must=False)
        assert run.trainer.steps in run.copies.memory.steps and run.copies.memory.is_intact(run.trainer.steps)
        assert run.said[-1]["kind"] == "write" and run.said[-1]["step"] == run.trainer.steps


def test_every_step_is_copied_again_after_a_rollback(tmp_path: Path) -> None:
    with a_run(tmp_path, recording_device()) as run:
        while run.copies.interval < 8:
            run.step(STEP)
        run.copies.go_back()
        run.step(STEP)
        run.recovery.finish()
        assert run.copies.memory.steps == {run.trainer.steps}
