"""The training loop that every rank of `meshwright train` runs. It calls `trainer.step` and handles data, learning
rate, records, validation loss and checkpoints.

Guarantees: the batch and the learning rate of a step depend only on the step's index, not on restarts. So if a run is
killed and restarted under an unchanged plan, its final weights are bit-identical to those of an uninterrupted run. On
accelerators this needs `run.deterministic`.
After a request to stop, all ranks end the current step, save a checkpoint and stop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from meshwright.analysis.nf4 import parameter_count
from meshwright.core.codec import validate_data
from meshwright.core.errors import Interrupted
from meshwright.core.ipc import Heartbeat, HeartbeatField, IpcMessage, RankPhase
from meshwright.data.loader import TensorBatch
from meshwright.data.sampler import batch_index
from meshwright.runtime.backend import backend_of, pin_function
from meshwright.runtime.comm.group import wrap_process_group
from meshwright.runtime.compile import first_step_message
from meshwright.runtime.profiler.links import find_slow_links
from meshwright.spec.grid import micro_batch_rows
from meshwright.spec.job import LaunchSpec
from meshwright.spec.record import StepRecord
from meshwright.train.memory import MemoryRecorder, resident_bytes, trace_memory
from meshwright.train.metrics import (
    RecordWriter,
    account_batches,
    agree_on_step,
    combine_accounts,
    launch_notes,
    launch_options,
    record_proofs,
)
from meshwright.train.model import build_loader, build_model, model_objective, open_training_data
from meshwright.train.optimizer import learning_rate, optimizer_factory, precision_recipe
from meshwright.train.rank_main import ProcessGroups, RankControl, join_process_groups
from meshwright.train.recovery import Recovery
from meshwright.train.reference_log_probs import VALIDATION_BATCH_ROWS, add_reference
from meshwright.train.sample import sample_of_run
from meshwright.train.silent_corruption import SdcRecompute, repair_replicas
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.straggler import PhaseSeconds, StragglerMonitor
from meshwright.train.trainer import parallelize

MEMORY_TRACE_STEP = 3  # steps before the traced one (checks run extra passes in them); if fewer are left: the last one
RECOVERY_STEPS = 8  # more steps before the traced one after a recovery from in-memory checkpoints


def train(channel: RankControl, payload: IpcMessage) -> int:
    """Runs one rank of `meshwright train`. `payload` is the `LaunchSpec`. Returns the exit status."""
    began = time.perf_counter()
    Heartbeat(*channel.row).at(RankPhase.join)
    with join_process_groups(channel.rank, channel.world) as connection:
        loop = TrainLoop(validate_data(LaunchSpec, payload), channel, connection, began)
        try:
            return loop.run()
        finally:
            loop.trainer.close()


class TrainLoop:
    """The training loop of one rank in one launch."""

    def __init__(
        self, launch: LaunchSpec, channel: RankControl, connection: ProcessGroups, began: float | None = None
    ) -> None:
        """`began`: when this rank started, by time.perf_counter()."""
        self.launch, self.channel, self.connection = launch, channel, connection
        joined, process = time.perf_counter(), resident_bytes()
        self.spent = {"join": joined - (joined if began is None else began)}
        self.pulse = Heartbeat(*channel.row)
        self.pulse.at(RankPhase.build)
        work, self.folder, self.steps = launch.workload, Path(launch.run.folder), launch.workload.steps
        model = build_model(
            launch.model, work.seed, lora=work.lora, capacity=work.expert_capacity, bias_rate=work.expert_bias_rate
        )
        self.objective, self.parameters = model_objective(launch.model, model), parameter_count(model)
        report = lambda line: channel.say("bad_data", line=line)
        self.dataset = open_training_data(launch, model, self.objective, self._note, report)
        self.loader = build_loader(self.dataset, self.objective, model, work)
        rule, kind = work.optimizer, precision_recipe(launch.workload, launch.plan)
        extra = launch_options(launch, self.folder)
        self.trainer = parallelize(
            model, optimizer_factory(rule), launch.plan, precision=kind, clip=rule.clip, seed=work.seed, **extra
        )
        self.device, self.memories = self.trainer.mesh.device, MemoryRecorder(self.trainer, self.folder, process)
        on_host = backend_of(self.device).memory_is_host
        self.control = self.trainer.mesh.world if on_host else wrap_process_group(self.connection.control)
        self.stopping, identity = False, {"data": self.dataset.digest, "parameters": self.parameters}
        said = lambda line, step, rank=None: self._say("divergence", line=line, rank=rank, step=step)
        self.trainer.recount = SdcRecompute(launch.run.sdc_check_every, lambda step, line: said(line, step))
        self.trainer.mend = partial(repair_replicas, self.trainer, said)
        self.recovery = Recovery(launch, channel, self.trainer, self.pulse, identity)
        self.trainer.on_phase, self.trainer.mesh.error_propagator.report_alive = self._phase, self.pulse.beat
        if (shared := self.trainer.mesh.shared_memory) is not None:
            shared.waiting_field = self.pulse.row[HeartbeatField.waits : HeartbeatField.waits + 1]
        self.spent["build"] = time.perf_counter() - joined

    def _note(self, line: str) -> None:
        self.channel.say("note", line=line)

    def _say(self, kind: str, **message: Any) -> None:
        if self.channel.rank == 0:
            self.channel.say(kind, **message)

    def _phase(self, phase: RankPhase) -> None:
        self.pulse.at(phase)
        if phase is RankPhase.agree:
            self.recovery.finish()

    def run(self) -> int:
        """Runs the loop to the last step or a request to stop. Returns the exit status."""
        self.pulse.at(RankPhase.restore)
        start = time.perf_counter()
        began = self.recovery.resume()
        begins = self.recovery.source != "memory" and self.recovery.saved < 0
        add_reference(self.trainer, self.loader, self.launch, begins, self.pulse)
        self.spent["restore"] = time.perf_counter() - start
        record_proofs(self.trainer, self.launch, self.folder, lambda line: self._say("note", line=line))
        for line in launch_notes(self.launch, self.trainer, self.parameters):
            self._say("note", line=line)
        self._say(
            "begin", step=began, steps=self.steps, data=self.dataset.describe(), parameters=self.parameters,
            source=self.recovery.source, spent=self.spent,
        )  # fmt: skip
        records = RecordWriter(self.folder, self.launch.run.track, self._note) if self.channel.rank == 0 else None
        if self.channel.rank == 0 and self.dataset.tokenizer is not None:
            self.dataset.tokenizer.save(self.folder / "tokenizer")
        validation_batches = list(self.loader.validation_batches(VALIDATION_BATCH_ROWS))
        if began == 0 and validation_batches:
            loss = self._evaluate(validation_batches)
            first = StepRecord(step=0, loss=loss, tokens=0, gradient_norm=0, lr=0, seconds=0, held_out_loss=loss)
            self._report(records, first)
        self.stopping = self.recovery.catch_up()
        delayed = self.recovery.unreported(records.last if records is not None else 0)
        for record in chain([delayed] if delayed is not None else [], [] if self.stopping else self._steps(began)):
            if validation_batches and self._due(record.step, self.launch.run.evaluate_every):
                record = record.model_copy(update={"held_out_loss": self._evaluate(validation_batches)})
            self._report(records, record)
            if self.stopping:
                break
            if self.recovery.due(record.step):
                self.recovery.save(must=record.step == self.steps)
        if self.stopping:
            self.recovery.save(must=True)
        self.recovery.finish()
        self._end(records, self.trainer.steps)
        if self.trainer.steps < self.steps:
            self._say("stopped", step=self.trainer.steps)
            return Interrupted.exit_code
        found = sample_of_run(self.trainer, self.launch, self.objective, self.dataset, self.parameters)
        if found is not None:
            self._say("sample", **found)
        self.pulse.at(RankPhase.end)
        self._say("done", step=self.steps)
        return 0

    def _end(self, records: RecordWriter | None, step: int) -> None:
        self._say("ended", step=step, after=self.recovery.gap.after())
        self.pulse.at(RankPhase.sample)  # the disk may take longer than a rank that trains may be silent
        if records is not None:
            records.close()

    def _due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    # --- steps ------------------------------------------------------------------------------------

    def _steps(self, began: int) -> Iterator[StepRecord]:
        """Yields the record of each remaining step, combined over all ranks. It rolls back after a loss spike and
        changes the plan if a straggler makes it necessary."""
        tell = lambda kind, **entries: self._say(kind, last=self.steps, **entries)
        engine, work, note = self.trainer.engine, self.launch.workload, lambda line: self._say("note", line=line)
        halves = not (work.exact or work.local or engine.balance or engine.statistics)
        requested = lambda: find_slow_links(self.trainer.mesh, lambda: self.pulse.at(RankPhase.evaluate))
        done, watch = began, StragglerMonitor(self.launch.plan, work.batch, note, tell, halves, requested)
        guard = self.recovery.guard
        while done < self.steps or guard.is_spike:
            done = self.recovery.go_back() if guard.is_spike else done
            self.loader.skipped_batches = guard.left_out
            for record, phases in self._stretch(done, began):
                done = record.step
                if self.launch.plan.compile and done == began + 1:
                    self._say("note", line=first_step_message(record.seconds))
                yield record
                if guard.is_spike:
                    break
                if phases is not None and (plan := watch.heed(phases, done, self.launch.run.balance)) is not None:
                    self.trainer.plan = plan  # `_stretch` must run again: this rank now reads other rows of the batches
                    break

    def _stretch(self, began: int, launched: int) -> Iterator[tuple[StepRecord, PhaseSeconds | None]]:
        """Runs steps from index `began` on. Yields the record and the phase durations of each step. The caller ends
        the iteration after a loss spike, or to change the plan. `launched`: the first step since the ranks started."""
        plan, rule, rows = self.trainer.plan, self.launch.workload.optimizer, self.launch.workload.batch
        every = 0 if self.trainer.engine.outer is not None else self.launch.run.replica_check_every
        ranges = micro_batch_rows(plan, rows, self.trainer.mesh.replica)
        with self.loader.prefetch(ranges, began, self.steps, pin=pin_function(self.device)) as batches:
            for step, batch in enumerate(self._awaited(batches, began), began):
                start = time.perf_counter() - batches.wait_seconds
                self.trainer.learning_rate(learning_rate(rule, step, self.steps))
                later = RECOVERY_STEPS if self.recovery.source == "memory" else 0  # else tracing delays the recovery
                watched = step - launched == min(MEMORY_TRACE_STEP + later, self.steps - launched - 1)
                with trace_memory(self.trainer.engine.model, self.device.type) if watched else nullcontext() as watch:
                    record = self.trainer.step(LocalBatch(batch, self.loader.labels_per_step), wait=False)
                number = batch_index(step, self.loader.skipped_batches)
                took = {"memory": self.memories.of(record, watch, self.recovery.copies), "batch": number}
                took |= {"data_seconds": batches.wait_seconds, "seconds": time.perf_counter() - start}
                record = record.model_copy(update={**took, "between_seconds": self.recovery.gap.before(start)})
                if self.trainer.mesh.world is not None and every and self._due(step + 1, every):
                    self.pulse.at(RankPhase.compare)
                    self.trainer.mend()
                self.recovery.copy(record)
                requested = (float(bool(self.channel.stop)), *self.recovery.flags)
                read = account_batches(batch, ranges, number * rows)
                record, (stop, *flags), phases, by_rank = agree_on_step(record, requested, self.control, read.numbers)
                record = record.model_copy(update=combine_accounts(by_rank, self.trainer.mesh.grid, step + 1).fields)
                self.stopping = stop > 0
                self.recovery.gap.end(start + record.seconds)
                self.recovery.agreed(record, flags)
                yield record, phases

    def _awaited(self, batches: Iterator[list[TensorBatch]], began: int) -> Iterator[list[TensorBatch]]:
        """Yields the batches of the remaining steps. It sends a heartbeat before it waits for a batch."""
        for step in range(began, self.steps):
            self.pulse.at(RankPhase.data, step + 1)
            yield next(batches)

    def _report(self, records: RecordWriter | None, record: StepRecord) -> None:
        record = record.with_rates(self.launch.plan.world, self.launch.ideal_seconds)
        if records is not None:
            records.write(record)
        self._say("record", record=record.model_dump(exclude_none=True), late=self.recovery.gap.after())

    def _evaluate(self, batches: list[TensorBatch]) -> float:
        total = tokens = 0.0
        for batch in batches:
            self.pulse.at(RankPhase.evaluate)
            count = self.trainer.engine.objective.count(batch)
            total, tokens = total + self.trainer.evaluate(batch) * count, tokens + count
        return total / tokens
