"""What is checked before a pass counts, and when.

Once, before the first pass of a pipeline: whether every stage runs by itself (rehearsal.py). Before the training steps `CHECKED` of every run, counted since
the process began: what a pass writes to parameters and buffers (writes.py), and whether rows of the batch may pass apart (divided.py). What is zero, or off, in the first steps often is not in later ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.parallel.analysis import Analysed
from meshwright.parallel.divided import check_divided
from meshwright.parallel.objective import Batch
from meshwright.parallel.pipeline.rehearsal import rehearse
from meshwright.parallel.writes import Once, check_replaced, check_writes, is_one_device

if TYPE_CHECKING:
    from meshwright.parallel.engine import Parallel

CHECKED = frozenset({1, 2, 3, 10, 100, 1000})
"""Training steps, counted from 1."""
LAST_FIRST = 3
SETTING = "MESHWRIGHT_CHECKS"
"""`never` in the environment leaves out the checks of rows and writes, where something else compares the run with one device."""


@dataclass
class Preflight:
    """`stages_run`: every stage has been seen to. `steps`: training steps that have begun. `checked`: the last step before which rows were.
    `once`: buffers that move once a step. `began`: passes of stages that were made before this step's."""

    stages_run: bool = False
    steps: int = field(default_factory=lambda: LAST_FIRST if os.environ.get(SETTING) == "never" else 0)
    checked: int = 0
    began: int = 0
    once: Once = field(default_factory=Once)
    written: set[str] = field(default_factory=set)
    """Parameters that a pass of the model writes to."""
    analysed: Analysed | None = None
    """What the plan took from the analysis run, and the forms of batches that it holds for; None where the plan needs no such run."""

    def skip(self, stages: bool = True) -> None:
        """What the first steps are checked for is known of them: others have been, or nothing but their own passes may run. `stages`: of these too."""
        self.stages_run |= stages
        self.steps = max(self.steps, LAST_FIRST)

    def before(self, engine: Parallel, batches: Sequence[Batch], trains: bool) -> None:
        """Before all micro-batches of a step pass, or of an evaluation. Raises PlanRefused on every rank. Every rank calls it."""
        self.check(engine, batches, trains)
        self.steps += trains
        self.began = engine.run.passes

    def check(self, engine: Parallel, batches: Sequence[Batch], trains: bool) -> None:
        """What is due before the next step, which has not begun."""
        if trains and self.analysed is not None:
            inputs = engine.objective.inputs(batches[0])
            self.analysed.check(inputs, engine.model.training, together=not self.steps)
        stages = engine.mesh.plan.stages > 1 and not self.stages_run
        rows = trains and self.steps + 1 in CHECKED and self.steps + 1 != self.checked
        if stages or rows:
            engine.open_ungated()
            if stages:
                rehearse(engine.model, engine.mesh, engine.run, engine.stage_forward, batches[0], engine.objective.loss)
            if rows:
                self.once.names = check_writes(engine, batches)
                check_divided(engine, batches)
                self.checked = self.steps + 1
            engine.zero.close_all()
            self.stages_run = True
            engine.forget()
        self.once.made = {}

    def again(self, engine: Parallel, batches: Sequence[Batch]) -> None:
        """Behind the passes of a step that is outside of what was checked, before its update; gradients stay where they are."""
        self.steps, self.checked, steps = 0, -1, self.steps
        try:
            self.check(engine, batches, True)
        finally:
            self.steps = self.checked = steps

    def after(self, engine: Parallel, batches: Sequence[Batch], trains: bool) -> None:
        """After all micro-batches have passed."""
        self.once.put_back(engine, len(batches))
        if trains and self.steps in CHECKED and is_one_device(engine, len(batches)):
            check_replaced(engine)
