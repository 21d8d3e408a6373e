"""Trials of `plan` and `train`: rank 0 searches, all ranks run what it chooses, for a few steps each; what was measured becomes the cluster."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.options import note
from meshwright.cli.others import stopped_together

if TYPE_CHECKING:
    from meshwright.base.lines import Message
    from meshwright.intake.job import JobFile
    from meshwright.search.answer import Answer
    from meshwright.search.trials import Trial
    from meshwright.spec.job import Job
    from meshwright.spec.launch import Launch
    from meshwright.train.rank import Channel, Connection

MODULE = "meshwright.cli.trials"
EARLY = "during trials, of which nothing is kept"


def hold_trials(
    question: Job, launch: Launch, most: int, note: Callable[[str], None], known: Connection | None = None
) -> list[Trial] | None:
    """Up to `most` plans, run here: on ranks that this process starts, or as one of those that a launcher started, by their connection if it is `known`. None on ranks other than 0."""
    from meshwright.base.errors import InputError
    from meshwright.train.rank import connect, launched

    if most < 1:
        raise InputError(f"--trials {most}: must be at least 1")
    me = launched(os.environ)
    if me is not None:
        with stopped_together(me.rank, EARLY):
            connection = known or connect(me.rank, me.world)
            found = conduct(question, launch, most, connection, lambda trial: note(line_of(trial)))
            if known is None:
                connection.close()
        return found if me.rank == 0 else None
    if sum(group.nodes for group in question.cluster.groups) > 1 or question.cluster.devices != launch.plan.world:
        raise InputError(
            f"--trials runs plans here, and cluster {question.cluster.name!r} has several nodes: start this command on each rank, with torchrun, "
            "Slurm or `meshwright emulate`"
        )
    return _supervised(question, launch, most, note)


def _supervised(question: Job, launch: Launch, most: int, note: Callable[[str], None]) -> list[Trial]:
    from meshwright.base.codec import build
    from meshwright.elastic.supervisor import Supervisor, Work
    from meshwright.search.trials import Trial

    found: list[Trial] = []

    def hear(rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "trial":
            found.append(build(Trial, message["trial"]))
            note(line_of(found[-1]))

    payload = {"job": question.model_dump(mode="json"), "launch": launch.model_dump(mode="json"), "most": most}
    with tempfile.TemporaryDirectory(prefix="meshwright-trials-") as folder:
        warm = ("meshwright.train.trials", MODULE, *(("transformers.modeling_utils",) if launch.model.folder else ()))
        Supervisor(Work(f"{MODULE}:rank", launch.plan.world, payload, Path(folder), warm), hear, note, early=EARLY).run()
    return found


def rank(channel: Channel, payload: Message) -> int:
    """What a supervised rank does."""
    from meshwright.base.codec import build
    from meshwright.spec.job import Job
    from meshwright.spec.launch import Launch
    from meshwright.train.rank import connect

    with connect(channel.rank, channel.world) as connection:
        hear = lambda trial: channel.say("trial", trial=trial.model_dump(mode="json"))
        conduct(build(Job, payload["job"]), build(Launch, payload["launch"]), payload["most"], connection, hear)
    return 0


def conduct(question: Job, launch: Launch, most: int, connection: Connection, hear: Callable[[Trial], None]) -> list[Trial]:
    """The trials, one after the other; every rank calls it. `hear` gets them on rank 0."""
    from meshwright.base.codec import build, parse
    from meshwright.search.trials import Trial, next_trial
    from meshwright.spec.plan import Plan
    from meshwright.train.trials import Ground

    ground, trials = Ground(launch), list[Trial]()
    while True:
        chosen = next_trial(question, trials, most) if connection.rank == 0 else None
        told = connection.tell(chosen[0].to_json(None) if chosen else "")
        if not told:
            return trials
        plan = build(Plan, parse(told, "rank 0"))
        timed = ground.try_plan(plan)
        trials.append(Trial(plan=plan, predicted=chosen[1] if chosen else 0.0, measured=timed.seconds, why=timed.why, busy=timed.busy))
        if connection.rank == 0:
            hear(trials[-1])


def line_of(trial: Trial) -> str:
    """One line of the screen."""
    from meshwright.base.units import show_seconds

    if trial.measured is None:
        return f"trial  {trial.plan.name}: not run: {trial.why}"
    off = trial.predicted / trial.measured - 1.0
    return (
        f"trial  {trial.plan.name}: {show_seconds(trial.measured)} a step, {show_seconds(trial.predicted)} predicted ({off:+.0%})".replace(
            "%", " %"
        )
    )


def tried(file: JobFile, question: Job, most: int, language: str, known: Connection | None = None) -> tuple[Job, Trial | None] | None:
    """`question` on the cluster that trials say it is, and the best of them. None on ranks other than 0. What `local` is, is kept."""
    from meshwright.cli.preparation import Choice, folder_of, launch_of, source_of
    from meshwright.intake.clusters import keep_local
    from meshwright.search.rank import search
    from meshwright.search.trials import best_of, refitted
    from meshwright.spec.measurement import QUIET

    gc.enable()
    source = source_of(file)
    any_plan = search(question, 1, runnable=True).chosen.plan
    launch = launch_of(file, source, folder_of(file, source), Choice(question, any_plan, None, []))
    remark = partial(note, language=language)
    trials = hold_trials(question, launch, most, remark, known)
    if trials is None:
        return None
    again = refitted(question, trials)
    if max((trial.busy for trial in trials), default=0.0) > QUIET:
        remark("other programs were busy meanwhile: what was measured is not kept")
    elif again.cluster.name.startswith("local") and best_of(trials) is not None:
        kept = keep_local(again.cluster)
        remark(f"the cluster that explains them is kept in {kept}: --cluster local is this from now on" if kept else "not kept: no cache")
    return again, best_of(trials)


def led_by(question: Job, answer: Answer, best: Trial) -> Answer:
    """`answer` with the plan that was measured to be the fastest in front."""
    from meshwright.cost.step import estimate
    from meshwright.search.answer import Entry

    others = [entry for entry in answer.plans if entry.plan != best.plan]
    first = Entry(plan=best.plan, estimate=estimate(question, best.plan))
    return answer.but(plans=(first, *others[: len(answer.plans) - 1]))
