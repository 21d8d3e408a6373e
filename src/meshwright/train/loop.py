"""The loop around `trainer.step`: data, learning rate, records, held-out loss, checkpoints, and an end that loses nothing.

Promise: step k reads the same batch and the same learning rate whenever it is run, so a run that was killed and started again ends in the
same weights, bit for bit, under the same plan. A request to stop is heeded after a step, by all ranks after the same one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from meshwright.base.codec import build
from meshwright.base.errors import InputError, Interrupted
from meshwright.base.lines import Message
from meshwright.base.pulse import Phase, Pulse, Word
from meshwright.base.units import show_count
from meshwright.data.dataset import open_dataset
from meshwright.data.loader import Batch
from meshwright.data.sampler import batch_of
from meshwright.parallel.compiled import first_step
from meshwright.parallel.exchange.group import of_process
from meshwright.probe.links import slow_links
from meshwright.spec.launch import Launch
from meshwright.spec.record import StepRecord
from meshwright.train.ledger import joined, line_of
from meshwright.train.memory import Memories, watching
from meshwright.train.metrics import Records, agree
from meshwright.train.model import build_model, loader_of, objective_of, takes_positions, vocabulary_of
from meshwright.train.optimizer import learning_rate, optimizer_of, recipe_of
from meshwright.train.proof_records import follow_proofs, mode_of
from meshwright.train.rank import Channel, Connection, connect
from meshwright.train.recount import Recount, why_not
from meshwright.train.recovery import Recovery
from meshwright.train.replicas import mend
from meshwright.train.sample import why_no_sample, write_text
from meshwright.train.straggler import Phases, Watch
from meshwright.train.trainer import Beside, Share, parallelize

HELD_OUT_ROWS = 64
WATCHED = 2  # which step of a launch the profiler watches for memory: the first two warm up
PROMPT, SAMPLE_TOKENS = "\n\ndef", 160


def train(channel: Channel, payload: Message) -> int:
    """What every rank of `meshwright train` runs: `payload` is the `Launch`. Returns its exit status."""
    began = time.perf_counter()
    Pulse(*channel.row).at(Phase.join)
    with connect(channel.rank, channel.world) as connection:
        loop = Loop(build(Launch, payload), channel, connection, began)
        try:
            return loop.run()
        finally:
            loop.trainer.close()


class Loop:
    """One rank's part of one launch."""

    def __init__(self, launch: Launch, channel: Channel, connection: Connection, began: float | None = None) -> None:
        """`began`: when this rank did, by time.perf_counter()."""
        self.launch, self.channel, self.connection = launch, channel, connection
        joined = time.perf_counter()
        self.spent = {"join": joined - (joined if began is None else began)}
        self.pulse = Pulse(*channel.row)
        self.pulse.at(Phase.build)
        self.folder = Path(launch.run.folder)
        self.steps = launch.workload.steps
        work = launch.workload
        model = build_model(launch.model, work.seed, lora=work.lora, capacity=work.expert_capacity, bias_rate=work.expert_bias_rate)
        self.objective = objective_of(launch.model, model)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        vocabulary, positions = vocabulary_of(launch.model, model), takes_positions(model)
        if launch.data.documents == "apart" and not positions:
            raise InputError(
                f"data.documents=apart: {type(model).__name__} has no position_ids that keep its attention inside of a document"
            )
        dataset = open_dataset(launch.data, launch.workload.sequence, vocabulary, self.objective, self._note, positions)
        for part in getattr(dataset, "parts", ()):
            part.quarantine = lambda line: self.channel.say("quarantine", line=line)
        self.dataset, self.loader = dataset, loader_of(dataset, self.objective, model, work)
        rule, kind = launch.workload.optimizer, recipe_of(launch.workload, launch.plan)
        beside = Beside(offload_to=launch.run.offload_to or self.folder, predicted=launch.predicted, prove=mode_of(launch))
        self.trainer = parallelize(model, optimizer_of(rule), launch.plan, precision=kind, clip=rule.clip, seed=work.seed, **beside)
        self.device, self.memories = self.trainer.mesh.device, Memories(self.trainer, self.folder)
        self.control = self.trainer.mesh.world if self.device.type == "cpu" else of_process(self.connection.control)
        self.stopping = False
        identity = {"data": dataset.digest, "parameters": self.parameters}
        said = lambda line, step, rank=None: self._say("divergence", line=line, rank=rank, step=step)
        self.trainer.recount = Recount(launch.run.recount_every, lambda step, line: said(line, step))
        self.trainer.mend = partial(mend, self.trainer, said)
        self.recovery = Recovery(launch, channel, self.trainer, self.pulse, identity)
        self.trainer.on_phase, self.trainer.mesh.calls.alive = self._phase, self.pulse.beat
        if self.trainer.mesh.host is not None:
            self.trainer.mesh.host.waiting = self.pulse.row[Word.waits : Word.waits + 1]
        self.spent["build"] = time.perf_counter() - joined

    def _note(self, line: str) -> None:
        self.channel.say("note", line=line)

    def _say(self, kind: str, **message: Any) -> None:
        if self.channel.rank == 0:
            self.channel.say(kind, **message)

    def _phase(self, phase: Phase) -> None:
        self.pulse.at(phase)
        if phase is Phase.agree:
            self.recovery.finish()

    def run(self) -> int:
        self.pulse.at(Phase.restore)
        start = time.perf_counter()
        began = self.recovery.resume()
        self.spent["restore"] = time.perf_counter() - start
        follow_proofs(self.trainer, self.launch, self.folder, lambda line: self._say("note", line=line))
        self._check()
        self._say(
            "begin", step=began, steps=self.steps, data=self.dataset.describe(), parameters=self.parameters,
            source=self.recovery.source, spent=self.spent,
        )  # fmt: skip
        records = Records(self.folder, self.launch.run.tensorboard, self._note) if self.channel.rank == 0 else None
        if self.channel.rank == 0 and self.dataset.tokenizer is not None:
            (self.folder / "tokenizer").mkdir(exist_ok=True)
            self.dataset.tokenizer.save(self.folder / "tokenizer")
        held_out = list(self.loader.held_out_batches(HELD_OUT_ROWS))
        if began == 0 and held_out:
            loss = self._evaluate(held_out)
            self._report(records, StepRecord(step=0, loss=loss, tokens=0, gradient_norm=0, lr=0, seconds=0, held_out_loss=loss))
        self.recovery.catch_up()
        late = self.recovery.unreported(records.last if records is not None else 0)
        for record in chain([late] if late is not None else [], self._steps(began)):
            if held_out and self._due(record.step, self.launch.run.evaluate_every):
                record = record.model_copy(update={"held_out_loss": self._evaluate(held_out)})
            self._report(records, record)
            if self.stopping or self.recovery.due(record.step):
                self.recovery.save(must=self.stopping or record.step == self.steps)
            if self.stopping and record.step < self.steps:
                self._say("stopped", step=record.step)
                return Interrupted.exit_code
        self.recovery.finish()
        if records is not None:
            records.close()
        self.pulse.at(Phase.sample)
        self._sample()
        self.pulse.at(Phase.end)
        self._say("done", step=self.steps)
        return 0

    def _due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    # --- steps ----------------------------------------------------------------------------------------------------------------

    def _steps(self, began: int) -> Iterator[StepRecord]:
        """The records of steps began + 1 to the last, each as the whole world saw it."""
        tell = lambda kind, **entries: self._say(kind, last=self.steps, **entries)
        engine, work, note = self.trainer.engine, self.launch.workload, lambda line: self._say("note", line=line)
        halves = not (work.exact or work.local or engine.balance or engine.statistics)
        asked = lambda: slow_links(self.trainer.mesh, lambda: self.pulse.at(Phase.evaluate))
        done, watch = began, Watch(self.launch.plan, work.batch, note, tell, halves, asked)
        guard = self.recovery.guard
        while done < self.steps or guard.is_spike:
            done = self.recovery.go_back() if guard.is_spike else done
            self.loader.left_out = guard.left_out
            for record, phases in self._stretch(done, began):
                done = record.step
                if self.launch.plan.compile and done == began + 1:
                    self._say("note", line=first_step(record.seconds))
                yield record
                if guard.is_spike:
                    break
                if phases is not None and (plan := watch.heed(phases, done, self.launch.run.balance)) is not None:
                    self.trainer.plan = plan  # other rows are to be read from here on
                    break

    def _stretch(self, began: int, launched: int) -> Iterator[tuple[StepRecord, Phases | None]]:
        """Steps from `began` on under one plan."""
        plan, rule = self.trainer.plan, self.launch.workload.optimizer
        rows, every = self.launch.workload.batch, 0 if self.trainer.engine.outer is not None else self.launch.run.compare_every
        ranges = plan.ranges(rows, self.trainer.mesh.replica)
        with self.loader.prefetch(ranges, began, self.steps, device=self.device.type) as batches:
            for step, batch in enumerate(self._awaited(batches, began), began):
                start = time.perf_counter() - batches.waited
                self.trainer.learning_rate(learning_rate(rule, step, self.steps))
                watched = step - launched == min(WATCHED, self.steps - launched - 1)
                watched = watched and self.recovery.source != "memory"  # once a run: it takes time
                with watching(self.trainer.engine.model, self.device.type) if watched else nullcontext() as watch:
                    record = self.trainer.step(Share(batch, self.loader.labels_per_step))
                memory, number = self.memories.of(record, watch), batch_of(step, self.loader.left_out)
                took = {"data_seconds": batches.waited, "seconds": time.perf_counter() - start}
                record = record.model_copy(update={"memory": memory, "batch": number, **took})
                if self.trainer.mesh.world is not None and every and self._due(step + 1, every):
                    self.pulse.at(Phase.compare)
                    self.trainer.mend()
                self.recovery.copy(record)
                asked = (float(bool(self.channel.stop)), *self.recovery.flags)
                read = line_of(batch, ranges, number * rows)
                record, (stop, *flags), phases, by_rank = agree(record, asked, self.control, read.numbers)
                record = record.model_copy(update=joined(by_rank, self.trainer.mesh.grid, step + 1).fields)
                self.stopping = stop > 0
                self.recovery.agreed(record, flags)
                yield record, phases

    def _awaited(self, batches: Iterator[list[Batch]], began: int) -> Iterator[list[Batch]]:
        """The batches, with a sign of life before each wait."""
        for step in range(began, self.steps):
            self.pulse.at(Phase.data, step + 1)
            yield next(batches)

    def _report(self, records: Records | None, record: StepRecord) -> None:
        if records is not None:
            records.write(record)
        self._say("record", record=record.model_dump(exclude_none=True))

    def _evaluate(self, batches: list[Batch]) -> float:
        total = tokens = 0.0
        for batch in batches:
            self.pulse.at(Phase.evaluate)
            count = self.trainer.engine.objective.count(batch)
            total, tokens = total + self.trainer.evaluate(batch) * count, tokens + count
        return total / tokens

    def _check(self) -> None:
        if (expected := self.launch.parameters) and expected != self.parameters:
            self._say("note", line=f"the model has {self.parameters:,} parameters, the planner counted {expected:,}: its estimates are off")
        if self.launch.run.recount_every and (why := why_not(self.trainer)):
            self._say("note", line=f"run.recount_every: gradients are not computed twice: {why}")
        asked, units = self.launch.workload.compression, self.trainer.engine.zero.trained
        if asked is not None and not any(way is not None for unit in units for way in unit.across):
            self._say("note", line=f"compression {asked.kind}: no gradients leave this machine, so that nothing is compressed")

    def _sample(self) -> None:
        """Text written by the trained model, where it can write any."""
        why = why_no_sample(self.objective, self.dataset.tokenizer, 4.0 * self.parameters)
        if why:
            self._say("sample", why=why)
            return
        weights = self.trainer.full_state_dict()
        if weights is None:
            return
        launch, tokenizer = self.launch, self.dataset.tokenizer
        assert tokenizer is not None
        model = build_model(launch.model, launch.workload.seed, weights=False, lora=launch.workload.lora)
        text = write_text(model, weights, tokenizer, PROMPT, SAMPLE_TOKENS, launch.workload.sequence, launch.workload.seed)
        self._say("sample", text=text.strip("\n"), parameters=show_count(self.parameters))
