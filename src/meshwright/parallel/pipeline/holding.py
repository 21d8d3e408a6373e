"""Which stages hold which parameters: each holds those of its blocks, and of the others those that what it computes comes from (anatomy/flow.py).

A parameter that several stages come to, such as a table of words that is the head too, or the scales of all layers in one vector, is held by each
of them, and its gradients are summed over them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from itertools import pairwise

from meshwright.anatomy import Anatomy
from meshwright.anatomy.flow import Stage, flow_of
from meshwright.anatomy.keeper import AGAIN
from meshwright.anatomy.record import Record
from meshwright.base.errors import InputError
from meshwright.parallel.pipeline.carry import Wants
from meshwright.spec.plan import Plan

Holders = Mapping[str, tuple[int, ...]]
"""Of parameters outside of the blocks the stages that compute with them, in order."""

NOBODY: Holders = {}


def check_calls(record: Record, anatomy: Anatomy, plan: Plan) -> None:
    """Raises InputError where stages cannot be entered and left once in a pass, at the calls of their blocks, in their order."""
    paths, where = anatomy.cuts, f"plan {plan.name}:"
    if record.against is not None:
        what, block = record.against
        said = {
            "again": AGAIN.replace(": use pp1", ""),
            "apart": "runs where torch records no gradient, in a function with a backward of its own",
            "random": "runs in some passes and not in others (layers dropped at random?)",
        }
        raise InputError(f"{where} {paths[block]} {said[what]}, and stages are left and entered between blocks: use pp1")
    twice = next((block for block, times in Counter(record.calls).items() if times > 1), None)
    if twice is not None:
        raise InputError(f"{where} {paths[twice]} runs more than once in a pass, and stages are left and entered between blocks: use pp1")
    missing = next((path for block, path in enumerate(paths) if block not in record.calls), None)
    if missing is not None:
        raise InputError(f"{where} {missing} did not run with what the model seems to read: give an example of it, or use pp1")
    turn = next((paths[after] for before, after in pairwise(record.calls) if after < before), None)
    if turn is not None and len(anatomy.stacks) > 1:
        raise InputError(f"blocks of several lists run by turns ({turn} behind one of a later list): use pp1")
    if turn is not None:
        raise InputError(f"{where} {turn} runs behind a later block of its list, and stages run blocks in the order of the list: use pp1")


def holders_of(
    record: Record, anatomy: Anatomy, wants: Wants, bounds: Mapping[int, tuple[int, int]], plan: Plan, own_loss: bool
) -> Holders:
    """The stages that hold each parameter outside of the blocks. Raises InputError where a stage would need what only another one has."""
    if wants.unsent:
        raise InputError(
            f"{wants.unsent} is given a mask or numbers that are made of weights of another stage: use pp1, or give them as floats"
        )
    paths = anatomy.cuts
    stage_of = {
        name: stage
        for stage, (start, stop) in bounds.items()
        for path in paths[start:stop]
        for name in record.names
        if name.startswith(f"{path}.")
    }
    found: dict[str, list[int]] = defaultdict(list)
    for number, (start, stop) in bounds.items():
        receives = wants.message(start) if number else ()
        sends = wants.message(stop) if number + 1 < len(bounds) else ()
        stage = Stage(start, stop, receives, tuple(key for key in sends if key not in receives), wants.firsts)
        needed, lost = flow_of(record, stage, paths, own_loss)
        if lost:
            raise InputError(
                f"plan {plan.name}: stage {number} of this model reads what layers of an earlier stage make past the state that it is sent ({lost}): "
                "cut elsewhere with layers per stage, or use pp1"
            )
        for name in sorted(needed):
            if name in stage_of:
                raise InputError(
                    f"plan {plan.name}: {name} is read on stage {number} and lies in a block of stage {stage_of[name]}: use pp1, or let stages share it "
                    "outside of the blocks"
                )
            found[name].append(number)
    return {name: tuple(stages) for name, stages in found.items()}


def writers_of(
    record: Record, anatomy: Anatomy, bounds: Mapping[int, tuple[int, int]], saved: Collection[str], plan: Plan
) -> dict[str, int]:
    """The stage that writes to each of the buffers that the forward writes to. Raises InputError where this is not one stage of a `saved` buffer.

    Code before the first block also runs on later stages, and code between blocks on those behind: what they write is not the model's.
    """
    inside = tuple(f"{path}." for path in anatomy.cuts)
    replaced = min((name for name in record.replaced & set(saved) if not name.startswith(inside)), default=None)
    if replaced is not None:
        raise InputError(
            f"plan {plan.name}: the forward puts another tensor in the place of the buffer {replaced}, and stages hold one each: write to it in place "
            "(copy_), register it with persistent=False, or use pp1"
        )
    found = {}
    for name, blocks in record.updated.items():
        stages = sorted({next(stage for stage, (_, stop) in bounds.items() if block < stop) for block in blocks})
        if len(stages) > 1 and name in saved:
            raise InputError(f"plan {plan.name}: stages {stages[0]} and {stages[1]} both write to the buffer {name}: use pp1")
        found[name] = stages[0]
    return found
