"""Chooses other plans for a running job: for another number of ranks, or for less memory. `meshwright train` passes the
`Replanner` to its supervisor. The chosen plan is written to the run folder.

Guarantees: data, batch and model are those of the launch. If all ranks are available, the run uses its first plan,
unless a plan with less memory has replaced it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.messages import Message

if TYPE_CHECKING:
    from meshwright.cli.launch_plan import PlanChoice
    from meshwright.elastic.attempt import RankJob
    from meshwright.spec.job import Job, LaunchSpec
    from meshwright.spec.plan import Plan

TRAIN_MODULE, WRITER_MODULE = "meshwright.train.loop", "meshwright.train.memory_checkpointer"


def library_modules(launch: LaunchSpec) -> tuple[str, ...]:
    """Returns the modules of other libraries that every rank of `launch` imports. The fork server imports them once, so
    that neither a start nor a recovery waits for them."""
    reads_tokens = launch.data.tokenizer != "bytes" and importlib.util.find_spec("tokenizers") is not None
    hugging_face = ("transformers.modeling_utils",) if launch.model.folder else ()
    # bitsandbytes, which peft imports if it is installed, may initialize CUDA; a process with CUDA must not fork.
    adapts = launch.workload.lora is not None and importlib.util.find_spec("bitsandbytes") is None
    lora = ("peft",) if adapts and importlib.util.find_spec("peft") is not None else ()
    return (*hugging_face, *lora, *(("tokenizers",) if reads_tokens else ()))


@dataclass
class Replanner:
    """Replans `launch`, whose plan comes from `choice`."""

    launch: LaunchSpec
    choice: PlanChoice
    folder: Path
    _chosen: dict[int, tuple[Job | None, Plan]] = field(default_factory=dict)

    def work_of(self, launch: LaunchSpec) -> RankJob:
        """Returns the rank job for `launch`: the function that ranks call, its arguments, and the modules to import in
        advance."""
        from meshwright.elastic.attempt import RankJob

        warm = (TRAIN_MODULE, WRITER_MODULE, *library_modules(launch))
        payload, world, name = launch.model_dump(mode="json"), launch.plan.world, launch.plan.name
        return RankJob(
            f"{TRAIN_MODULE}:train", world, payload, self.folder, warm, plan=name, scribe=f"{WRITER_MODULE}:write"
        )

    def chosen(self, world: int) -> tuple[Job | None, Plan]:
        """Returns the job for at most `world` ranks, and its plan. The job is None for a model without an estimate.

        Raises: NothingFits if there is no plan.
        """
        from meshwright.elastic.replan import plan_for_devices

        self._chosen.setdefault(self.launch.plan.world, (self.choice.question, self.launch.plan))
        if world not in self._chosen:
            self._chosen[world] = plan_for_devices(self.choice.question, self.launch.workload, world)
        return self._chosen[world]

    def replan(self, world: int) -> RankJob:
        """Chooses the plan for at most `world` ranks, writes it to the run folder, and returns the rank job.

        Raises: NothingFits if there is no plan.
        """
        return self._take(*self.chosen(world))

    def leaner(self, work: RankJob) -> RankJob:
        """Replaces the plan of `work` by a plan that needs less memory, writes it to the run folder, and returns the
        rank job.

        Raises: NothingFits if there is no such plan.
        """
        from meshwright.elastic.replan import lower_memory_plan

        now = _plan_of_job(work)
        question = self.chosen(now.world)[0]
        self._chosen[now.world] = question, lower_memory_plan(question, now)
        return self._take(*self._chosen[now.world])

    def instead(self, work: RankJob) -> str:
        """Returns a hint at a plan that takes less memory than the plan of `work`, without choosing it."""
        now = _plan_of_job(work)
        return lower_memory_hint(self.chosen(now.world)[0], now)

    def predict(self, name: str, world: int) -> tuple[float, float]:
        """Returns the seconds of a step under the plan `name`, and under the plan that `chosen(world)` returns. Without
        an estimate, both values have an arbitrary unit, and the time is assumed to be inversely proportional to the
        number of ranks."""
        from meshwright.planner.cost.step import estimate
        from meshwright.spec.plan import parse_plan

        now = parse_plan(name)
        before, (question, plan) = self.chosen(now.world)[0], self.chosen(world)
        if before is None or question is None:
            return 1.0 / now.world, 1.0 / plan.world
        return estimate(before, now).time.step, estimate(question, plan).time.step

    def _take(self, question: Job | None, plan: Plan) -> RankJob:
        from meshwright.cli.launch_plan import PlanChoice, write_run_folder
        from meshwright.core.storage import StorageFailed
        from meshwright.planner.cost.step import estimate, ideal_seconds

        priced = None if question is None else estimate(question, plan)
        ideal = ideal_seconds(question, priced)
        other = self.launch.but(plan=plan, predicted=() if priced is None else priced.per_stage, ideal_seconds=ideal)
        # On a full disk the run continues; the files in the folder describe the previous plan.
        with contextlib.suppress(OSError, StorageFailed):
            write_run_folder(self.folder, other, PlanChoice(question, plan, priced, []))
        return self.work_of(other)


def _plan_of_job(work: RankJob) -> Plan:
    from meshwright.core.codec import validate_data
    from meshwright.spec.job import LaunchSpec

    return validate_data(LaunchSpec, work.payload).plan


def lower_memory_hint(question: Job | None, plan: Plan) -> str:
    """Returns the hint for an OOM under `plan`: a plan of the same job and ranks with less estimated memory. Without
    such a plan, the hint is to use more ranks or a smaller batch."""
    from meshwright.core.errors import MeshwrightError
    from meshwright.core.units import show_bytes
    from meshwright.elastic.replan import lower_memory_plan
    from meshwright.planner.cost.step import estimate

    try:
        other = lower_memory_plan(question, plan)
        assert question is not None, "a plan that takes less memory requires a job with an estimate"
        before, then = (show_bytes(estimate(question, each).memory.reserved) for each in (plan, other))
    except MeshwrightError as error:
        return Message("{error}: use more ranks, or a smaller batch", error=error)
    return Message(
        "plan {other} is estimated to take {then} on the peak rank, plan {plan} takes {before}: use --plan {other}",
        other=other.name,
        then=then,
        plan=plan.name,
        before=before,
    )
