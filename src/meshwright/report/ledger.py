"""Whether a run read every sample once: its records against what the order of the data asks for, whatever faults, other numbers of ranks and ways back lay between.

Rule: the batches of steps 1, 2, ... are 0, 1, ..., without those that a spike left out (events.jsonl); and what the ranks of a step read together is that
batch, whole. A step whose record was written by ranks that came after it says its batch and not what was read.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from meshwright.base.codec import Noun
from meshwright.base.units import show_count
from meshwright.spec.event import Event
from meshwright.spec.ledger import batch_read
from meshwright.spec.record import StepRecord


class Balance(Noun):
    """`problems`: a sentence for each step that read something else."""

    steps: int
    proven: int
    samples: int
    left_out: int = 0
    missing: int = Field(default=0, description="steps that ended and of which no record says what they read")
    problems: tuple[str, ...] = ()


def balance(records: Sequence[StepRecord], rows: int, events: Sequence[Event], last: int = 0) -> Balance | None:
    """`records`: each step once, as it was run last; `rows`: the batch of the job; `last`: the last step that is known to have ended. None where
    records hold no ledger."""
    steps = [record for record in records if record.batch is not None]
    if not steps:
        return None
    left_out = {batch for event in events if event.kind == "spike" and event.batches for batch in range(*event.batches)}
    problems: list[str] = []
    expected, before = 0, 0
    for record in steps:
        for step in range(before, record.step):
            expected += step > before  # the batch of a step whose record is lost
            while expected in left_out:
                expected += 1
        if record.batch != expected:
            what = "again" if record.batch < expected else f"and missed {record.batch - expected}"  # type: ignore[operator]
            problems.append(f"step {record.step} read batch {record.batch} {what}, not batch {expected}")
        expected, before = (record.batch or 0) + 1, record.step
        whole = batch_read(record.batch or 0, rows)
        if record.samples and record.samples != whole.text:
            problems.append(
                f"step {record.step} read {record.samples.partition(':')[0]} samples that are not the {rows} of batch {record.batch}"
            )
    proven = [record for record in steps if record.samples]
    return Balance(
        steps=len(steps), proven=len(proven), samples=rows * len(steps), left_out=len(left_out), problems=tuple(problems),
        missing=max(last, steps[-1].step) - len(steps),
    )  # fmt: skip


def balance_text(found: Balance) -> str:
    """
    >>> balance_text(Balance(steps=10, proven=9, samples=80, left_out=4))
    '80 samples in 10 steps, each once; proven for 9 of them; 4 batches left out'
    >>> balance_text(Balance(steps=10, proven=10, samples=80, problems=("step 4 read batch 2 again, not batch 3",)))
    'DOES NOT BALANCE: step 4 read batch 2 again, not batch 3'
    >>> balance_text(Balance(steps=25, proven=25, samples=200, missing=35))
    '200 samples in 25 steps, each once; 35 steps more have no record of what they read'
    """
    if found.problems:
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        return f"DOES NOT BALANCE: {found.problems[0]}{more}"
    words = f"{show_count(found.samples)} samples in {found.steps} steps, each once"
    words += f"; proven for {found.proven} of them" if found.proven < found.steps else ""
    if found.missing:
        words += f"; {found.missing} step{'s' if found.missing > 1 else ''} more {'have' if found.missing > 1 else 'has'} no record of what they read"
    return words + (f"; {found.left_out} batches left out" if found.left_out else "")
