"""Runs the trials of `plan` and `train`: rank 0 searches, and all ranks run each chosen plan for a few steps. The
measurements calibrate the cluster."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.joint_stop import stop_together
from meshwright.cli.options import print_note
from meshwright.cli.replanning import library_modules
from meshwright.core.messages import Message

if TYPE_CHECKING:
    from meshwright.core.ipc import IpcMessage
    from meshwright.planner.inputs.job import JobFile
    from meshwright.planner.search.best_plans import SearchResult
    from meshwright.planner.search.trials import Trial
    from meshwright.spec.job import Job, LaunchSpec
    from meshwright.train.rank_main import ProcessGroups, RankControl

TRIALS_MODULE = "meshwright.cli.trials"
INTERRUPTED_TEXT = Message("during trials, whose results are not saved")


def run_trials(
    question: Job, launch: LaunchSpec, most: int, note: Callable[[str], None], known: ProcessGroups | None = None
) -> list[Trial] | None:
    """Runs up to `most` plans on this cluster, and passes a line about each plan to `note`. This process starts the
    ranks, or it is one of the ranks that another launcher has started. In the second case `known` is the connection of
    the ranks if they are already connected. Returns None on ranks other than 0.

    Raises: InputError if `most` is less than 1. A process that starts the ranks also raises it if the cluster has
    several nodes, or if the plan of `launch` does not use all devices of the cluster.
    """
    from meshwright.core.errors import InputError
    from meshwright.train.rank_main import join_process_groups, read_own_launch

    if most < 1:
        raise InputError(Message("--trials {most} must be at least 1", most=most))
    me = read_own_launch()
    if me is not None:
        with stop_together(me.rank, INTERRUPTED_TEXT):
            connection = known or join_process_groups(me.rank, me.world)
            found = conduct_trials(question, launch, most, connection, lambda trial: note(trial_line(trial)))
            if known is None:
                connection.close()
        return found if me.rank == 0 else None
    if sum(group.nodes for group in question.cluster.groups) > 1 or question.cluster.devices != launch.plan.world:
        raise InputError(
            Message(
                "--trials runs plans here, and cluster {cluster!r} has several nodes: start this command on each "
                "rank, with torchrun, Slurm or `python -m bench.emulation`",
                cluster=question.cluster.name,
            )
        )
    return _run_supervised_trials(question, launch, most, note)


def _run_supervised_trials(question: Job, launch: LaunchSpec, most: int, note: Callable[[str], None]) -> list[Trial]:
    from meshwright.core.codec import validate_data
    from meshwright.elastic.attempt import RankJob
    from meshwright.elastic.supervisor import Supervisor
    from meshwright.planner.search.trials import Trial

    found: list[Trial] = []

    def hear(rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "trial":
            found.append(validate_data(Trial, message["trial"]))
            note(trial_line(found[-1]))

    payload = {"job": question.model_dump(mode="json"), "launch": launch.model_dump(mode="json"), "most": most}
    with tempfile.TemporaryDirectory(prefix="meshwright-trials-") as folder:
        warm = ("meshwright.train.measured_runs", TRIALS_MODULE, *library_modules(launch))
        Supervisor(
            RankJob(f"{TRIALS_MODULE}:rank", launch.plan.world, payload, Path(folder), warm),
            hear,
            note,
            early=INTERRUPTED_TEXT,
        ).run()
    return found


def rank(channel: RankControl, payload: IpcMessage) -> int:
    """Runs the trials on one supervised rank and returns its exit code. `payload` has the job, the launch file and the
    maximum number of trials."""
    from meshwright.core.codec import validate_data
    from meshwright.spec.job import Job, LaunchSpec
    from meshwright.train.rank_main import join_process_groups

    with join_process_groups(channel.rank, channel.world) as connection:
        hear = lambda trial: channel.say("trial", trial=trial.model_dump(mode="json"))
        conduct_trials(
            validate_data(Job, payload["job"]),
            validate_data(LaunchSpec, payload["launch"]),
            payload["most"],
            connection,
            hear,
        )
    return 0


def conduct_trials(
    question: Job, launch: LaunchSpec, most: int, connection: ProcessGroups, hear: Callable[[Trial], None]
) -> list[Trial]:
    """Runs the trials one after another. Every rank must call the function. `hear` receives each trial on rank 0
    only."""
    from meshwright.core.codec import parse_text, validate_data
    from meshwright.planner.search.trials import Trial, next_trial
    from meshwright.spec.plan import Plan
    from meshwright.train.measured_runs import TrialRunner

    ground, trials = TrialRunner(launch), list[Trial]()
    while True:
        chosen = next_trial(question, trials, most) if connection.rank == 0 else None
        sent = connection.tell(chosen[0].to_json(None) if chosen else "")
        if not sent:
            return trials
        plan = validate_data(Plan, parse_text(sent, "rank 0"))
        timed = ground.try_plan(plan)
        trials.append(
            Trial(
                plan=plan,
                predicted=chosen[1] if chosen else 0.0,
                measured=timed.seconds,
                why=timed.why,
                busy=timed.busy,
            )
        )
        if connection.rank == 0:
            hear(trials[-1])


def trial_line(trial: Trial) -> str:
    """Returns one line of output for a trial."""
    from meshwright.core.units import show_seconds

    if trial.measured is None:
        return Message("trial  {plan}: not run: {why}", plan=trial.plan.name, why=trial.why)
    off = trial.predicted / trial.measured - 1.0
    return Message(
        "trial  {plan}: {measured} a step, {predicted} predicted ({off:+.0f} %)",
        plan=trial.plan.name,
        measured=show_seconds(trial.measured),
        predicted=show_seconds(trial.predicted),
        off=100 * off,
    )


def job_from_trials(
    file: JobFile, question: Job, most: int, language: str, known: ProcessGroups | None = None
) -> tuple[Job, Trial | None] | None:
    """Returns `question` on the cluster that the trials calibrated, and the best trial, or None if no trial ran. On
    ranks other than 0 the whole result is None.

    Also saves the calibrated cluster if it is `local`, a trial ran, and other programs used at most
    MAX_BUSY_PROCESSORS processors during each trial.
    """
    from meshwright.cli.launch_plan import PlanChoice, build_launch, build_model_source, run_folder_of
    from meshwright.planner.inputs.cluster_parser import save_local_cluster
    from meshwright.planner.search.ranking import search_plans
    from meshwright.planner.search.trials import best_trial, refit_job
    from meshwright.spec.cluster import MAX_BUSY_PROCESSORS

    gc.enable()
    source = build_model_source(file)
    any_plan = search_plans(question, 1, runnable=True).chosen.plan
    launch = build_launch(file, source, run_folder_of(file, source), PlanChoice(question, any_plan, None, []))
    remark = partial(print_note, language=language)
    trials = run_trials(question, launch, most, remark, known)
    if trials is None:
        return None
    again = refit_job(question, trials)
    if max((trial.busy for trial in trials), default=0.0) > MAX_BUSY_PROCESSORS:
        remark(Message("other programs used the processors during the trials: the measurements are not saved"))
    elif again.cluster.name.startswith("local") and best_trial(trials) is not None:
        saved = save_local_cluster(again.cluster)
        remark(
            Message(
                "the cluster fitted to the trials is saved in {path}: --cluster local uses it from now on", path=saved
            )
            if saved
            else Message("not saved: there is no cache")
        )
    return again, best_trial(trials)


def with_fastest_first(question: Job, answer: SearchResult, best: Trial) -> SearchResult:
    """Returns `answer` with the plan of `best`, the fastest trial, in first place."""
    from meshwright.planner.cost.step import estimate
    from meshwright.planner.search.best_plans import RankedPlan

    others = [entry for entry in answer.plans if entry.plan != best.plan]
    first = RankedPlan(plan=best.plan, estimate=estimate(question, best.plan))
    return answer.but(plans=(first, *others[: len(answer.plans) - 1]))
