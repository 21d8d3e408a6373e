"""Combines the metrics of all ranks into one record per training step and writes the records. The training loop
(loop.py) calls it after each step.

Each time and each size in a record is the maximum over all ranks. One small all-reduce per step exchanges all values,
including the request to stop, so all ranks stop after the same step.

Sample accounting: a record has a digest of the samples that all ranks together have read (spec/record.py). Its field
`content` is the sum of the hashes of all rows, modulo 2^64. The hash of a row is xxh3 of its bytes, with the sample
index as seed. Guarantees:
- `content` does not depend on the plan. It is equal in all runs that read the same data.
- If the ranks of one replica have read different bytes, the run ends with an error that names a rank that differs. This
  detects damaged files and damaged memory.

The module also writes the results of proof runs (proof/) to RUN/proofs.jsonl. RUN is the run folder. A proof run
compares the loss and the gradients of a small batch under the plan with those of one device.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from meshwright.core.append_file import AppendOnlyFile
from meshwright.core.errors import MeshwrightError
from meshwright.core.messages import Message
from meshwright.core.storage import StorageFailed, describe_failure, read_file, read_text
from meshwright.data.loader import SampleRange, TensorBatch
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.preference_loss import REFERENCE_ENTRIES
from meshwright.spec.grid import RankGrid
from meshwright.spec.job import LaunchSpec
from meshwright.spec.record import (
    DIGEST_MODULUS,
    RECORD_TAIL_BYTES,
    RECORDS_FILE_NAME,
    RecordedProof,
    SampleDigest,
    StepRecord,
    digest_samples,
    last_recorded_step,
)
from meshwright.train.model import preference_loss
from meshwright.train.silent_corruption import recompute_obstacle
from meshwright.train.straggler import PhaseSeconds
from meshwright.train.trackers import TrackerProcess
from meshwright.train.trainer import ParallelizeOptions, Trainer

HALF_WORD = 2**32


class SampleAccount(NamedTuple):
    """The number of samples and the content digest of one step, for one rank or for all ranks."""

    samples: SampleDigest
    content: int

    @property
    def numbers(self) -> list[float]:
        """Returns the account as five floats for an all-reduce. 64-bit values are divided into halves of 32 bits, which
        a float64 represents exactly."""
        return [
            float(self.samples.number),
            *(float(half) for word in (self.samples.squares, self.content) for half in divmod(word, HALF_WORD)),
        ]

    @property
    def fields(self) -> dict[str, Any]:
        """Returns the account as the fields `samples` and `content` of a step record."""
        return {"samples": self.samples.text, "content": f"{self.content:016x}"}


def account_batches(batches: Sequence[TensorBatch], ranges: Sequence[SampleRange], start: int) -> SampleAccount:
    """Returns the account of this rank's micro-batches. `ranges`: for each micro-batch, the index of its first row in
    the global batch and its number of rows. `start`: the sample index of the first row of the global batch."""
    content = 0
    for batch, (first, count) in zip(batches, ranges, strict=True):
        # The log-probabilities of a reference are results of the plan, equal only up to rounding.
        names = sorted(batch.keys() - set(REFERENCE_ENTRIES))
        arrays = [np.ascontiguousarray(batch[name].numpy()) for name in names]
        for row in range(count):
            digest = xxhash.xxh3_64(seed=(start + first + row) % DIGEST_MODULUS)
            for array in arrays:
                digest.update(array[row].data)
            content += digest.intdigest()
    return SampleAccount(digest_samples((start + first, count) for first, count in ranges), content % DIGEST_MODULUS)


def decode_account(numbers: Sequence[float]) -> SampleAccount:
    """Returns the account that the property `SampleAccount.numbers` has encoded as `numbers`."""
    count, *halves = map(int, numbers)
    squares, content = (high * HALF_WORD + low for high, low in (halves[:2], halves[2:]))
    return SampleAccount(SampleDigest(count, squares), content)


def combine_accounts(by_rank: Sequence[Sequence[float]], grid: RankGrid, step: int) -> SampleAccount:
    """Returns the sum of the accounts of all replicas after step `step`. `by_rank`: the encoded account of each rank.
    Raises MeshwrightError on all ranks if two ranks of one replica have read different bytes."""
    lines = [decode_account(numbers) for numbers in by_rank]
    replicas: dict[int, list[int]] = {}
    for rank in range(len(lines)):
        replicas.setdefault(grid.replica(rank), []).append(rank)
    for ranks in replicas.values():
        votes = Counter(lines[rank] for rank in ranks)
        usual = votes.most_common(1)[0][0]
        for rank in ranks:
            if lines[rank] != usual:
                other = next(other for other in ranks if lines[other] == usual)
                raise MeshwrightError(
                    Message(
                        "step {step}: rank {rank} and rank {other} must read identical rows, but read different bytes: "
                        "a data file, its cache or the memory of one of them is damaged",
                        step=step,
                        rank=rank,
                        other=other,
                    )
                )
    firsts = [lines[ranks[0]] for ranks in replicas.values()]
    counts, squares = (
        sum(line.samples.number for line in firsts),
        sum(line.samples.squares for line in firsts) % DIGEST_MODULUS,
    )
    return SampleAccount(SampleDigest(counts, squares), sum(line.content for line in firsts) % DIGEST_MODULUS)


PROOFS_FILE = "proofs.jsonl"


def launch_options(launch: LaunchSpec, folder: Path) -> ParallelizeOptions:
    """Returns the options of `parallelize` for a job that runs in `folder`. If `run.prove` is "auto", the environment
    variable MESHWRIGHT_PROVE sets the mode, and without this variable it is "auto"."""
    return ParallelizeOptions(
        offload_to=launch.run.offload_to or folder,
        predicted=launch.predicted,
        prove=None if launch.run.prove == "auto" else launch.run.prove,
        deterministic=launch.run.deterministic,
        loss=preference_loss(launch.workload),
    )


def record_proofs(trainer: Trainer, launch: LaunchSpec, folder: Path, say: Callable[[str], None]) -> None:
    """Makes `trainer` write the results of its proof runs to `folder` and print them. All ranks call it after a
    checkpoint was loaded. Only rank 0 reads and writes.

    A resumed run does not repeat the proof before its first update if this plan has already passed. This shortens
    recovery.
    """
    prover, path, first = trainer.prover, folder / PROOFS_FILE, trainer.mesh.rank == 0
    earlier = gather_objects(_last_equal(path, trainer.plan.name) if first and trainer.steps else None)[0]
    prover.predicted, prover.say = launch.proof, say
    if earlier is not None:
        prover.resume(earlier, trainer.steps)
    if first:
        prover.record = lambda proof: _append_proof(path, RecordedProof(proof, prover.sizes.known), say)


def _append_proof(path: Path, proof: RecordedProof, say: Callable[[str], None]) -> None:
    lines = AppendOnlyFile(path)
    error = lines.append(proof.to_json()) or lines.close(0.0)
    if error is not None:
        say(
            Message(
                "a proof could not be written to {proofs_file}: {failure}; training goes on",
                proofs_file=PROOFS_FILE,
                failure=describe_failure(error),
            )
        )


def _last_equal(path: Path, plan: str) -> RecordedProof | None:
    """Returns the last recorded proof of `plan` if it passed, else None."""
    for line in reversed((read_text(path) or "").splitlines()):
        try:
            proof = RecordedProof.from_json(line)
        except ValueError:
            continue  # a killed process may have left an incomplete line
        if proof.result.plan == plan:
            return proof if proof.result.equal else None
    return None


def launch_notes(launch: LaunchSpec, trainer: Trainer, parameters: int) -> Iterator[str]:
    """Yields warnings for the user: a wrong parameter count in the plan, and options that have no effect under the
    plan. `parameters`: the number of parameters of the model."""
    if (expected := launch.parameters) and expected != parameters:
        yield Message(
            "the model has {parameters:,} parameters, but the planner counted {expected:,}: its estimates are wrong",
            parameters=parameters,
            expected=expected,
        )
    if launch.run.sdc_check_every and (why := recompute_obstacle(trainer)):
        yield Message("run.sdc_check_every: gradients are not checked by a second computation: {why}", why=why)
    requested, units = launch.workload.compression, trainer.engine.zero.trainable
    if requested is not None and not any(way is not None for unit in units for way in unit.compressors):
        yield Message(
            "compression {kind}: no gradients leave this machine, so that nothing is compressed", kind=requested.kind
        )


LogFunction = Callable[[str], None]


class StepAgreement(NamedTuple):
    """The values of a step after the exchange between all ranks. Each time and size in `record` and each value in
    `flags` is the maximum over all ranks. `phases`: the seconds of every rank by phase, or None without a process
    group. `by_rank[r]`: the numbers that rank r passed as `own`."""

    record: StepRecord
    flags: Sequence[float]
    phases: PhaseSeconds | None
    by_rank: Sequence[Sequence[float]]


def agree_on_step(
    record: StepRecord, flags: Sequence[float], group: CommGroup | None, own: Sequence[float] = ()
) -> StepAgreement:
    """Exchanges the values of one step between all ranks, with one all-reduce. All ranks call it.

    The result has the maximum of each time and each size in `record`, and of each of `flags` (such as the request to
    stop). It also has every rank's phase durations and `own` numbers, which must not be negative. `group`: None for one
    rank.
    """
    phases: PhaseSeconds | None = None
    by_rank: Sequence[Sequence[float]] = [list(own)]
    if group is not None:
        kinds = [(name, kind) for name in ("memory", "exposed", "sent") for kind in sorted(getattr(record, name))]
        mine = [record.seconds, record.data_seconds, *flags, *(getattr(record, name)[kind] for name, kind in kinds)]
        each = 3 + len(own)
        largest = torch.zeros(len(mine) + each * group.size, dtype=torch.float64)
        waiting = sum(record.exposed.values())
        brought = [max(record.seconds - record.data_seconds - waiting, 0.0), record.data_seconds, waiting, *own]
        largest[: len(mine)] = torch.tensor(mine, dtype=torch.float64)
        place = len(mine) + each * group.index
        # The entries of a rank are 0 on all other ranks, so the maximum is the rank's own value.
        largest[place : place + each] = torch.tensor(brought, dtype=torch.float64)
        all_reduce(largest, group, use_max=True).wait()
        rows = largest[len(mine) :].view(-1, each).tolist()
        phases, by_rank = PhaseSeconds(*zip(*(row[:3] for row in rows), strict=True)), [row[3:] for row in rows]
        seconds, data_seconds, *rest = largest[: len(mine)].tolist()
        flags, rest = rest[: len(flags)], rest[len(flags) :]
        most: dict[str, dict[str, float]] = {"memory": {}, "exposed": {}, "sent": {}}
        for (name, kind), value in zip(kinds, rest, strict=True):
            most[name][kind] = value
        record = record.model_copy(update={"seconds": seconds, "data_seconds": data_seconds, **most})
    return StepAgreement(
        record.model_copy(update={"tokens_per_second": record.tokens / record.seconds}), flags, phases, by_rank
    )


class StepGap:
    """Measures the time between steps since the ranks started. `blocked`: the total seconds for which saves have
    blocked training; this time is subtracted."""

    def __init__(self) -> None:
        self.blocked = 0.0
        self._ended: tuple[float, float] | None = None
        """The end of the previous step on the slowest rank, and the value of `blocked` then."""

    def before(self, start: float) -> float:
        """Returns the seconds from the end of the previous step to `start`. Returns 0 for the first step."""
        if self._ended is None:
            return 0.0
        ended, blocked = self._ended
        return max(0.0, start - ended - (self.blocked - blocked))

    def after(self) -> float:
        """Returns the seconds from the end of the previous step to now."""
        return self.before(time.perf_counter())

    def end(self, ended: float) -> None:
        """Records the end of a step."""
        self._ended = ended, self.blocked


class RecordWriter:
    """Writes records.jsonl in the run folder, and starts the trackers that read it. Rank 0 uses it.

    A disk that is full or does not answer does not stop the run. The user gets a note, and records are buffered in
    memory until the disk accepts them.
    """

    def __init__(self, folder: Path, track: Sequence[str], say: LogFunction) -> None:
        self.say = say
        self._waits_since = 0
        """The first step whose record is still buffered in memory, or 0."""
        self._is_behind = False
        """Whether the user knows that records cannot be written."""
        self.last = last_reported_step(folder)
        self._lines = AppendOnlyFile(folder / RECORDS_FILE_NAME)
        self._trackers = [TrackerProcess(name, folder, say) for name in track]

    def write(self, record: StepRecord) -> None:
        """Appends a record, or buffers it if the disk is full or does not answer."""
        error = self._lines.append(json.dumps(record.model_dump(exclude_none=True), separators=(",", ":")))
        self._waits_since = self._waits_since or record.step
        if error is not None and not self._is_behind:
            self.say(
                Message(
                    "the records from step {step} on cannot be written and are kept in memory: {failure}; training "
                    "goes on",
                    step=self._waits_since,
                    failure=describe_failure(error),
                )
            )
        elif error is None and self._is_behind:
            self.say(Message("the records from step {waits_since} on are written", waits_since=self._waits_since))
        self._is_behind = error is not None
        if not self._lines.is_waiting:
            self._waits_since = 0
        for tracker in self._trackers:
            tracker.check()

    def close(self) -> None:
        """Closes the files and reports records that could not be written."""
        error = self._lines.close()
        if error is not None:
            self.say(
                Message(
                    "{lost} records from step {waits_since} on are lost: {failure}",
                    lost=self._lines.lost,
                    waits_since=self._waits_since,
                    failure=describe_failure(error),
                )
            )
        for tracker in self._trackers:
            tracker.close()


def last_reported_step(folder: Path) -> int:
    """Returns the last step in the records of a run folder, or -1 if there are no records. Raises StorageFailed if the
    file cannot be read."""
    try:
        return last_recorded_step(read_file(folder / RECORDS_FILE_NAME, -RECORD_TAIL_BYTES, links=True))
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise StorageFailed(describe_failure(error)) from None
