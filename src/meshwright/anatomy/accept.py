"""Accepts the splits that the proof shows to be equal: of regions over tensor ranks, of the hidden state along the sequence.

Rule: of a small model every block is proven, of another the first of each kind; a region whose shares do not compute and train the whole stays
whole, and where the sequence cannot be cut `Reading.along` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from meshwright.anatomy.conditions import CHEAP, kinds_of_blocks
from meshwright.anatomy.expert_modules import has_experts
from meshwright.anatomy.prove import Proof, passing, proven, proving
from meshwright.anatomy.reading import Outline, Reading
from meshwright.anatomy.regions import Found, guesses
from meshwright.anatomy.sequence_proof import objection_between

Answers = list[tuple[Found, str | None]]
"""Of each region of a block: with the counts that it was proven with, or why it stays whole."""


def accept(reading: Reading, outline: Outline, lend: bool) -> None:
    """Keeps the regions whose shares were seen to compute and to train the whole: of each kind of block the first is tried."""
    model, blocks = reading.model, list(reading.found)
    if not any(reading.found.values()) and not has_experts(model):
        return
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    numbers = kinds_of_blocks([model.get_submodule(block) for block in blocks])
    kinds: list[Any] = list(blocks) if sum(parameters.values()) <= CHEAP else list(numbers)
    keys = {block: (kind, tuple(_signature(block, one) for one in reading.found[block])) for block, kind in zip(blocks, kinds, strict=True)}
    first: dict[Any, str] = {}
    for block, key in keys.items():
        first.setdefault(key, block)
    patterns = list(first.values())
    needed = _runs_before(reading, patterns)
    vocabulary = model.get_parameter(f"{outline.embedding}.weight").shape[0] if outline.embedding else 0
    answers: dict[str, Answers] = {}
    with ExitStack() as stack:
        stack.enter_context(passing(model, reading.lists, patterns) if len(patterns) < len(blocks) else ExitStack())
        try:
            proof = stack.enter_context(proving(reading, patterns, needed, lend, vocabulary, outline.head))
        except Exception as error:
            why = f"the model does not run with numbers ({(str(error).splitlines() or [''])[0][:100]}), so that nothing is proven"
            if reading.seen is None:  # the plan that the model carries may be priced, not run
                reading.unproven = f"the plan that the model carries is not proven: {why}"
            objection = why if reading.seen is not None else None
            answers = {block: [(one, objection) for one in reading.found[block]] for block in patterns}
            reading.along = why
        else:
            if proof.is_meta:
                reading.unproven = "regions are tried by their shapes alone: the model has no numbers here, a run proves them with numbers"
                reading.said.append(reading.unproven)
            answers = _proven(reading, proof, patterns, outline)
    for block in blocks:
        pattern = first[keys[block]]
        pairs = zip(reading.found[block], answers[pattern], strict=True)
        reading.found[block] = [found for one, answer in pairs if (found := _like(reading, block, one, pattern, *answer)) is not None]
    _agree(reading)


def _proven(reading: Reading, proof: Proof, patterns: list[str], outline: Outline) -> dict[str, Answers]:
    """The answers for each of `patterns`; `reading.along` where the sequence cannot be cut."""
    known: dict[str, tuple[str, Found, str | None]] = {}
    answers: dict[str, Answers] = {}
    sequence = len(reading.lists) == 1 and not (reading.seen and reading.seen.repeated) and not proof.is_meta
    for block in patterns:
        answers[block] = []
        for one in reading.found[block]:
            kind = _signature(block, one)
            if kind not in known:
                known[kind] = block, *proven(proof, block, one, guesses(reading.model, block, one))
            there, found, why = known[kind]
            answers[block].append((one if why is not None else _moved(block, one, there, found), why))
        why_along = _trained(proof, block, answers[block], sequence and not reading.along)
        if why_along is not None:
            reading.along = f"{block}: {why_along}"
    if sequence and not reading.along:
        reading.along = _out_of_order(reading)
    if sequence and not reading.along:
        why, reading.sliced = objection_between(proof, list(reading.found), outline.head)
        reading.along = why or ""
    return answers


def _out_of_order(reading: Reading) -> str:
    """Returns why sequence parallelism is wrong for this order of blocks, or "" where they run in the order of their list.

    The hidden state is scattered before the first block of the list and gathered after the last one.
    """
    ran = list(reading.found)
    listed = [
        path for name in reading.model.get_submodule(reading.lists[0])._modules if (path := f"{reading.lists[0]}.{name}") in reading.found
    ]
    shown = ", ".join([*ran[:4], *(["..."] if len(ran) > 4 else [])])
    return "" if ran == listed else f"its blocks run in another order than they are listed ({shown})"


def _trained(proof: Proof, block: str, answers: Answers, sequence: bool) -> str | None:
    """Refuses in `answers` what does not train alike; says why the hidden state cannot be cut."""
    good = [number for number, (_, why) in enumerate(answers) if why is None]
    why, along = proof.trained(block, [answers[number][0] for number in good], sequence)
    if why is None:
        return along
    alone = {number: proof.trained(block, [answers[number][0]], False)[0] for number in good} if len(good) > 1 else {good[0]: why}
    if all(one is None for one in alone.values()):
        alone = dict.fromkeys(good, why)
    for number, one in alone.items():
        answers[number] = (answers[number][0], one)
    left = [number for number, one in alone.items() if one is None]
    again, along = proof.trained(block, [answers[number][0] for number in left], sequence)
    for number in left if again is not None else ():
        answers[number] = (answers[number][0], again)
    return along if again is None else proof.trained(block, [], sequence)[1]


def _signature(block: str, one: Found) -> str:
    """What the regions of like blocks have in common."""
    text = repr((one.region, sorted(one.splits.items()), one.sizes)).replace(f"'{block}.", "'").replace(f"'{block}'", "''")
    return text


def _runs_before(reading: Reading, patterns: list[str]) -> Callable[[str], bool]:
    """Whether what lies at a path is outside of all blocks, or in one of those that run."""
    run = tuple(f"{block}." for block in patterns)
    inside = tuple(f"{blocks}." for blocks in reading.lists)
    return lambda path: not path.startswith(inside) or path.startswith(run)


def _like(reading: Reading, block: str, one: Found, pattern: str, answer: Found, objection: str | None) -> Found | None:
    """`one` with the counts and sizes that its kind was proven with."""
    if objection is not None:
        reading.whole |= dict.fromkeys((f"{path}.weight" for path in one.region.columns), objection)
        return None
    return _moved(block, one, pattern, answer)


def _moved(block: str, one: Found, pattern: str, answer: Found) -> Found:
    """`answer`, of the block at `pattern`, as it is for `one` of the block at `block`."""

    def here(path: str) -> str:
        return block + path.removeprefix(pattern) if path.startswith(pattern) else path

    moved = tuple(type(count)(here(count.path), count.name, count.kind) for count in answer.region.counts)
    kept = {here(name): split for name, split in answer.splits.items()}
    splits = {name: kept.get(name, split) for name, split in one.splits.items()}
    region = type(one.region)(**{**vars(one.region), "counts": moved})
    return one._replace(region=region, splits=splits, sizes=answer.sizes)


def _agree(reading: Reading) -> None:
    """A region that reads shares of another block, such as a bias by position, stands and falls with it."""
    changed = True
    while changed:
        good = {name for regions in reading.found.values() for one in regions for name in one.splits}
        changed = False
        for block, regions in reading.found.items():
            kept = [one for one in regions if one.weights <= good]
            changed |= len(kept) < len(regions)
            reading.found[block] = kept
