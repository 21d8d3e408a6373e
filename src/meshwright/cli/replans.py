"""Other plans for a run that trains: for another number of ranks, or for less memory. What is chosen is written into the run's folder.

Promise: data, batch and model stay those of the launch; the plan of all ranks is the one that the run began with.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.cli.preparation import Choice
    from meshwright.elastic.generation import Work
    from meshwright.spec.job import Job
    from meshwright.spec.launch import Launch
    from meshwright.spec.plan import Plan

LOOP, SCRIBE = "meshwright.train.loop", "meshwright.train.scribe"


@dataclass
class Replans:
    """Of `launch`, whose plan is the answer of `choice`."""

    launch: Launch
    choice: Choice
    folder: Path
    _chosen: dict[int, tuple[Job | None, Plan]] = field(default_factory=dict)

    def work_of(self, launch: Launch) -> Work:
        from meshwright.elastic.generation import Work

        warm = (LOOP, SCRIBE, *(("transformers.modeling_utils",) if launch.model.folder else ()))
        payload, world, name = launch.model_dump(mode="json"), launch.plan.world, launch.plan.name
        return Work(f"{LOOP}:train", world, payload, self.folder, warm, plan=name, scribe=f"{SCRIBE}:write")

    def chosen(self, world: int) -> tuple[Job | None, Plan]:
        """The question of so many ranks, and its plan."""
        from meshwright.elastic.replan import plan_for

        self._chosen.setdefault(self.launch.plan.world, (self.choice.question, self.launch.plan))
        if world not in self._chosen:
            self._chosen[world] = plan_for(self.choice.question, self.launch.workload, world)
        return self._chosen[world]

    def replan(self, world: int) -> Work:
        return self._take(*self.chosen(world))

    def leaner(self, work: Work) -> Work:
        """Raises NothingFits when no plan takes less."""
        from meshwright.elastic.replan import leaner

        now = _plan_of(work)
        question = self.chosen(now.world)[0]
        self._chosen[now.world] = question, leaner(question, now)
        return self._take(*self._chosen[now.world])

    def instead(self, work: Work) -> str:
        """Which plan takes less, in words; it is not taken."""
        now = _plan_of(work)
        return instead(self.chosen(now.world)[0], now)

    def predict(self, name: str, world: int) -> tuple[float, float]:
        """Seconds of a step under the plan of this name, and with so many ranks; what cannot be priced is divided among its ranks."""
        from meshwright.cost.step import estimate
        from meshwright.spec.plan import parse_plan

        now = parse_plan(name)
        before, (question, plan) = self.chosen(now.world)[0], self.chosen(world)
        if before is None or question is None:
            return 1.0 / now.world, 1.0 / plan.world
        return estimate(before, now).time.step, estimate(question, plan).time.step

    def _take(self, question: Job | None, plan: Plan) -> Work:
        from meshwright.cli.preparation import Choice, write_run
        from meshwright.cost.step import estimate

        priced = None if question is None else estimate(question, plan)
        other = self.launch.but(plan=plan, predicted=() if priced is None else priced.per_stage)
        with contextlib.suppress(OSError):  # a full disk costs what the folder says of the plan, not the run
            write_run(self.folder, other, Choice(question, plan, priced, []))
        return self.work_of(other)


def _plan_of(work: Work) -> Plan:
    from meshwright.base.codec import build
    from meshwright.spec.launch import Launch

    return build(Launch, work.payload).plan


def instead(question: Job | None, plan: Plan) -> str:
    """What is said behind a want of memory under `plan`: a plan of the same job and ranks that is priced, fits and takes less."""
    from meshwright.base.errors import MeshwrightError
    from meshwright.base.units import show_bytes
    from meshwright.cost.step import estimate
    from meshwright.elastic.replan import leaner

    try:
        other = leaner(question, plan)
        assert question is not None, "what is not priced has no leaner plan"
        before, then = (show_bytes(estimate(question, each).memory.reserved) for each in (plan, other))
    except MeshwrightError as error:
        return f"{error}: use more ranks, or a smaller batch"
    return f"plan {other.name} is to take {then} on a rank where {plan.name} was to take {before}: --plan {other.name}"
