"""Sweeps: many pairs of a model and a plan, each against one device, and the table of what was found. What `make soak`
is made of.

`covering(candidates, strength)` chooses: of everything that is legal, pairs in which every `strength` choices that can
stand together do.
`run(name, title, pairs, judge)` runs them and writes bench/results/NAME.md, a table of strategies and models, from
NAME.json, which it keeps pair by
pair. MESHWRIGHT_SOAK=2/8 runs the second of eight parts and adds to what the others left there; without it a table
begins anew.
MESHWRIGHT_SOAK='whole 2/80' takes its part of everything that is legal instead.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pool import RankFailure

from meshwright.spec.plan import parse_plan

RESULTS = Path(__file__).parents[2] / "bench" / "results"
Pair = tuple[str, str]
Found = tuple[float, float] | str
"""Largest relative difference of a loss and of a first gradient; or the line by which a plan was refused, or that says
why it was not tried."""
DIFFERS, UNTRIED = "differs: ", "not tried: "


def asked() -> tuple[bool, int, int]:
    """(everything that is legal, part, parts) of what MESHWRIGHT_SOAK says."""
    words = os.environ.get("MESHWRIGHT_SOAK", "").split()
    part, _, parts = (words[-1] if words and "/" in words[-1] else "1/1").partition("/")
    return "whole" in words, int(part), int(parts)


def covering(candidates: Iterable[tuple[tuple[str, ...], Pair]], strength: int) -> list[Pair]:
    """Pairs of `candidates` ((choices, pair), as many choices each) that hold every `strength` choices that any
    candidate holds; greedily few.

    >>> square = [((row, column, "x"), (row, column)) for row in "abc" for column in "abc"]
    >>> len(covering(square, 1)), len(covering(square, 2))
    (3, 9)
    """
    listed = sorted(candidates)
    random.Random(0).shuffle(listed)
    if asked()[0]:
        return [pair for _, pair in listed]
    columns = [
        np.unique([choices[axis] for choices, _ in listed], return_inverse=True)[1] for axis in range(len(listed[0][0]))
    ]
    numbers, first = [], 0
    for axes in itertools.combinations(columns, strength):
        key = np.ravel_multi_index(axes, [int(axis.max()) + 1 for axis in axes])
        numbers.append(np.unique(key, return_inverse=True)[1] + first)
        first = int(numbers[-1].max()) + 1
    held = np.stack(numbers, axis=1)  # [candidate, axes]: which combination of choices
    left = np.ones(first, dtype=bool)
    taken = []
    for least in reversed([*range(1, 10), *range(10, held.shape[1] + 1, 5)]):
        for at in np.flatnonzero(left[held].sum(axis=1) >= least):
            if left[held[at]].sum() >= least:
                left[held[at]] = False
                taken.append(listed[at][1])
    return taken


def strategy(plan: str) -> str:
    """What the plan is made of.

    >>> strategy("dp2.tp2.z3.mb2"), strategy("dp1")
    ('tp x ZeRO-3', 'one device')
    """
    said = parse_plan(plan)
    parts = [
        name for name, degree in (("tp", said.tp), ("pp", said.pp), ("cp", said.cp), ("ep", said.ep)) if degree > 1
    ]
    parts += [f"ZeRO-{said.zero}"] if said.zero else ["dp"] if said.dp > 1 else []
    return " x ".join(parts) or "one device"


def run(
    name: str, title: str, pairs: Sequence[Pair], judge: Callable[[str, str], Found], by_plan: bool = False
) -> None:
    """AssertionError with every pair of this part that differs. `by_plan`: a line a model and a column a plan
    instead."""
    _, part, parts = asked()
    file, found, wrong = RESULTS / f"{name}.json", dict[Pair, Found](), []
    for pair in pairs[part - 1 :: parts]:
        try:
            found[pair] = judge(*pair)
        except AssertionError as error:
            said = str(error).strip().splitlines() or ["without a word"]
            found[pair] = (
                DIFFERS + said[-1 if isinstance(error, RankFailure) else 0]
            )  # a traceback ends in what it is about
            wrong.append(f"{' '.join(pair)}: {found[pair]}")
        with open(__file__) as turn:  # parts may run at the same time
            fcntl.flock(turn, fcntl.LOCK_EX)
            kept: dict[str, Any] = json.loads(file.read_text()) if parts > 1 and file.exists() else {}
            known = {**{each: kept[" ".join(each)] for each in pairs if " ".join(each) in kept}, **found}
            ran = {each: known[each] for each in pairs if each in known}
            lines = [f"{json.dumps(' '.join(each))}: {json.dumps(what)}" for each, what in ran.items()]
            file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            (RESULTS / f"{name}.md").write_text(table(title, ran, len(pairs), by_plan))
    assert not wrong, "\n".join(wrong)


def table(title: str, found: dict[Pair, Found], pairs: int, by_plan: bool) -> str:
    """Markdown. A cell is the largest difference of a first gradient and, of several pairs, their number."""
    numbers = [what for what in found.values() if not isinstance(what, str)]
    found = {pair: re.sub(r"^plan \S+: ", "", what) if isinstance(what, str) else what for pair, what in found.items()}
    notes = list(dict.fromkeys(what for what in found.values() if isinstance(what, str)))
    places = {pair: (pair[0], pair[1]) if by_plan else (strategy(pair[1]), pair[0]) for pair in found}
    rows = list(dict.fromkeys(row for row, _ in places.values()))
    columns = list(dict.fromkeys(column for _, column in places.values()))

    def cell(row: str, column: str) -> str:
        here = [found[pair] for pair, place in places.items() if place == (row, column)]
        differences = [what[1] for what in here if not isinstance(what, str)]
        said = [f"{max(differences):.0e}" + f" ({len(differences)})" * (not by_plan)] if differences else []
        return ", ".join(
            [*said, *dict.fromkeys(f"[{notes.index(what) + 1}]" for what in here if isinstance(what, str))]
        )

    worst = [max((one[at] for one in numbers), default=0.0) for at in (0, 1)]
    differ, untried = (
        sum(note.startswith(kind) for note in found.values() if isinstance(note, str)) for kind in (DIFFERS, UNTRIED)
    )
    lines = [
        f"# {title}",
        "",
        f"Written by `make soak`. {len(found)} of {pairs} pairs of model and plan ran: {len(numbers)} equal to one "
        f"device, {len(found) - len(numbers) - differ - untried} refused in one line, {differ} differ"
        + f", {untried} not tried" * bool(untried)
        + ".",
        f"The largest relative difference of a loss is {worst[0]:.1e}, of a first gradient {worst[1]:.1e}. A cell is "
        "the largest of a first gradient" + ("." if by_plan else ", and of how many pairs."),
        "",
        "| | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
        *(
            f"| {row} | " + " | ".join(cell(row, column) for column in columns) + " |"
            for row in (rows if by_plan else sorted(rows))
        ),
        "",
        *(f"{number}. {note}" for number, note in enumerate(notes, 1)),
    ]
    return "\n".join(lines).rstrip() + "\n"
