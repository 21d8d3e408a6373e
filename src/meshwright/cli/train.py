"""`meshwright train`: plan, launch and train; go on where a run stopped.

The command plans without torch, starts the ranks and shows their progress. If the run folder has a run, it resumes this
run.

Under torchrun, Slurm or Kubernetes this process is one node of several (node_role.py), or one rank. As a rank it forks
nothing: rank 0 plans and sends the plan to the others.
"""

from __future__ import annotations

import dataclasses
import functools
import json as plain
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from meshwright.cli.options import AsJson, JobOptions, JobPath, Language, count_option, print_json, search_progress
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, join_messages, translate

if TYPE_CHECKING:
    from meshwright.cli.launch_plan import PlanChoice
    from meshwright.cli.node_role import NodeRole
    from meshwright.core.ipc import IpcMessage
    from meshwright.spec.job import LaunchSpec
    from meshwright.train.console import RunConsole
    from meshwright.train.rank_main import ExternalLaunch, ProcessGroups

PROBE_TARGET = "meshwright.train.measured_runs:speed"

LEFTOVERS_SECONDS = 5.0
"""The command waits at most this long for the removal of a partial save before it ends."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of the training run, and the language of its output."""

    run: Annotated[
        str | None,
        Parameter(
            name=("--run", "--folder"),
            help=(
                "run folder, or its name under runs/; an existing run is resumed (under torchrun, "
                "which has its own --run: --folder)"
            ),
        ),
    ] = None
    steps: Annotated[
        int | None, count_option("total number of optimizer steps; a larger number extends an existing run")
    ] = None
    resume_from: Annotated[
        Path | None,
        Parameter(
            help=(
                "checkpoint with which a new run begins, also one of another system: torch DCP, "
                "DeepSpeed, Megatron, safetensors"
            )
        ),
    ] = None
    pin: Annotated[str | None, Parameter(help="plan fields to fix, such as tp=2,pp=2")] = None
    offload_to: Annotated[
        Path | None,
        Parameter(
            help=(
                "folder on a local disk for offloaded tensors (off-optimizer-disk, ...); default: a "
                "folder in the run folder"
            )
        ),
    ] = None
    prove: Annotated[
        bool | None,
        Parameter(
            help=(
                "compare loss and all gradients with one device, on the run's own ranks and weights; "
                "default: if it is cheap"
            )
        ),
    ] = None
    trials: Annotated[
        int,
        count_option(
            "before training, run up to this many of the best plans for a few steps each, and train with the fastest"
        ),
    ] = 0
    allow_cpu: Annotated[
        bool, Parameter(negative="", help="train on CPUs although the cluster has GPUs, which this machine lacks")
    ] = False
    lang: Language = None

    @property
    def language(self) -> str:
        """Returns the language of the output: --lang, otherwise the language of the locale."""

        return choose_language(self.lang, os.environ)


def train(
    job: JobPath = None,
    /,
    *,
    shared: JobOptions = JobOptions(),  # noqa: B008
    wanted: RunOptions = RunOptions(),
    json: AsJson = False,
) -> int:
    """Plan a job, start its ranks on this machine, train; leave records, checkpoints and a report in a run folder.

    The same command resumes a stopped run. Under torchrun, Slurm or Kubernetes each process is one node,
    or one rank.

    Try: meshwright train --model gpt2-tiny --steps 100 --cluster local:4 --pin tp=2
    """
    from meshwright.cli.launch_plan import read_job_file
    from meshwright.cli.node_role import read_node_role
    from meshwright.train.console import RunConsole
    from meshwright.train.rank_main import read_own_launch

    question = _job_arguments(job, shared)
    shared = _with_run_options(shared, wanted)
    me = read_own_launch()
    node = None if me is None else read_node_role(me, lambda: read_job_file(job, shared), os.environ)
    screen = RunConsole(words=functools.partial(translate, language=wanted.language))
    try:
        if node is not None:
            folder = _run_node(node, job, shared, wanted, screen)
        elif me is not None:
            folder = _run_external_rank(me, job, shared, wanted, screen)
        else:
            folder = _supervise(job, shared, wanted, screen, None)
    finally:
        screen.close()
    if me is None or node is not None or me.rank == 0:
        _print_conclusion(folder, question, screen, wanted, json)
    return 0


def _run_node(node: NodeRole, job: Path | None, shared: JobOptions, wanted: RunOptions, screen: RunConsole) -> Path:
    """Runs this node as leader or as follower (node_role.py). The first node leads unless another node already leads; a
    follower leads when its turn comes. Returns the run folder if this node led at the end.

    Raises: SystemExit with the exit code of the run if another node led.
    """
    from meshwright.cli.launch_plan import build_model_source, read_job_file, run_folder_of
    from meshwright.cli.leader_file import LeaderAddress, read_leader, retry_storage
    from meshwright.cli.node_role import has_lost_election, has_other_leader, serve_leader
    from meshwright.train.run_lock import RunLocked

    file = read_job_file(job, shared)
    folder = run_folder_of(file, build_model_source(file)).resolve()
    led = retry_storage(lambda: has_other_leader(node, folder), screen.note)
    found = serve_leader(node, file, screen.note) if node.number or led else node
    while not isinstance(found, int):
        try:
            return _supervise(
                job, shared, wanted if found.after is None else dataclasses.replace(wanted, trials=0), screen, found
            )
        except RunLocked:
            if found.after is None and not retry_storage(lambda: has_lost_election(node, folder), screen.note):
                raise
        lost = node.number if found.after is None else found.after
        known = retry_storage(lambda: read_leader(folder), screen.note) or LeaderAddress(lost, found.host, found.port)
        found = serve_leader(found, file, screen.note, known)  # another node took the lock first; this node joins it
    raise SystemExit(found)


def _with_run_options(shared: JobOptions, wanted: RunOptions) -> JobOptions:
    """Returns `shared` with the options of `wanted` that are also entries of the job file."""
    run = wanted.run
    named = None if run is None else run if "/" in run or run.startswith((".", "~")) else f"runs/{run}"
    where = None if wanted.offload_to is None else wanted.offload_to.expanduser().resolve()
    begin = None if wanted.resume_from is None else wanted.resume_from.expanduser().resolve()
    prove = None if wanted.prove is None else "start" if wanted.prove else "never"
    entries = (
        ("workload.steps", wanted.steps), ("run.folder", named), ("run.offload_to", where), ("run.prove", prove),
        ("run.resume_from", begin),
    )  # fmt: skip
    written = (
        f"{name}={plain.dumps(value if name == 'workload.steps' else str(value))}"
        for name, value in entries
        if value is not None
    )
    # Values are in quotes, because YAML would read '#' or ': ' in a path as a comment or a mapping.
    return dataclasses.replace(shared, set=(*shared.set, *written))


def _supervise(
    job: Path | None, shared: JobOptions, wanted: RunOptions, screen: RunConsole, node: NodeRole | None
) -> Path:
    """Supervises the ranks of this machine, which are children of this process. If this node leads, also supervises the
    ranks of the other nodes. Returns the run folder."""
    from meshwright.cli.launch_plan import read_job_file
    from meshwright.cli.leader_role import continues_run, lead_nodes
    from meshwright.cli.node_role import announce_leader, local_cluster_name
    from meshwright.cli.replanning import Replanner
    from meshwright.elastic.devices import ExclusionPolicy
    from meshwright.elastic.hang_detector import ACCELERATOR_LIMITS, CPU_LIMITS, StartupProgress
    from meshwright.elastic.restart_policy import FaultPolicy
    from meshwright.elastic.snapshot_adoption import SNAPSHOT_LIFETIME_SECONDS, json_digest
    from meshwright.elastic.snapshot_inventory import AdoptionPolicy
    from meshwright.elastic.supervisor import Supervisor
    from meshwright.planner.inputs.cluster_parser import cuda_device_names

    shared = _options_after_trials(job, shared, wanted) if wanted.trials else shared
    if node is not None:
        shared = dataclasses.replace(
            shared, cluster=local_cluster_name(read_job_file(job, shared), node) or shared.cluster
        )
    world, number = (node.world, node.number) if node else (None, None)
    with _prepared_run(job, shared, wanted, screen, world, number) as (launch, folder, choice), ExitStack() as stack:
        run, plans = launch.run, Replanner(launch, choice, folder)
        leaving = ExclusionPolicy(plans.predict, PROBE_TARGET) if run.balance else None
        work = plans.work_of(launch)
        terms = ACCELERATOR_LIMITS if cuda_device_names() else CPU_LIMITS
        hold = (
            AdoptionPolicy(SNAPSHOT_LIFETIME_SECONDS, json_digest(launch.result()), not run.restart)
            if run.memory_checkpoints
            else None
        )
        care = FaultPolicy(
            run.retries,
            run.hang_timeout,
            plans.replan,
            run.min_ranks,
            plans.leaner,
            plans.instead,
            run.rejoin_timeout,
            leaving,
            work.world,
            terms,
            hold,
        )
        stack.callback(_remove_partial_saves, folder / "checkpoints")
        run_id = stack.enter_context(announce_leader(folder, node, screen.note))
        fleet = stack.enter_context(lead_nodes(node, work, screen.note, run)) if node else None
        work = plans.replan(len(fleet.slots)) if fleet is not None and len(fleet.slots) < work.world else work
        many = Message("starting {world} ranks", world=work.world)
        screen.note(many if work.world > 1 else Message("starting 1 rank"))
        hear = lambda rank, message: screen.hear(message)
        if fleet is not None and node is not None:
            hold = hold and hold._replace(job=json_digest(hold.job, run_id), retained=node.retained)
            care = dataclasses.replace(care, follows=continues_run(fleet, node), hold=hold)
        Supervisor(
            work, hear, screen.note, run.grace_period, StartupProgress(screen.note), care=care, agent=fleet
        ).run()
    return folder


def _remove_partial_saves(folder: Path) -> None:
    """Removes the partial save that a second stop request left. Files that cannot be removed within
    LEFTOVERS_SECONDS are removed after a later save."""
    from meshwright.core.background_thread import start_background_thread
    from meshwright.core.storage import remove_leftovers

    with suppress(OSError):
        work = lambda: remove_leftovers(folder)
        start_background_thread("leftovers", work, lambda line: None, restarts=False).join(LEFTOVERS_SECONDS)


def _options_after_trials(
    job: Path | None, shared: JobOptions, wanted: RunOptions, connection: ProcessGroups | None = None
) -> JobOptions:
    """Returns the options with the plan that trials chose. They are unchanged if the user gave a plan, if the run
    folder already has one, or if no trial ran. On ranks other than 0 they are always unchanged.

    `connection` connects ranks that another launcher has started. All of them call the function and follow rank 0.
    """
    from meshwright.cli.launch_plan import build_model_source, read_job_file, run_folder_of
    from meshwright.cli.options import print_note
    from meshwright.cli.trials import job_from_trials
    from meshwright.core.storage import is_present
    from meshwright.planner.inputs.job import resolve_job
    from meshwright.planner.inputs.plans import parse_pins

    file = read_job_file(job, shared, wanted.pin)
    before = run_folder_of(file, build_model_source(file)) / "plan.json"
    known = file.given_plan() is not None or is_present(before)
    if connection.tell("known" if known else "") if connection is not None else known:
        if connection is None or connection.rank == 0:
            print_note(Message("trials are skipped: the plan is given, or the run already has one"), wanted.language)
        return shared
    question = resolve_job(file)
    pins = {**question.pins, **parse_pins(wanted.pin)} if wanted.pin else question.pins
    found = job_from_trials(file, question.but(pins=pins), wanted.trials, wanted.language, connection)
    best = found[1] if found else None
    return dataclasses.replace(shared, plan=best.plan.name) if best else shared


@contextmanager
def _prepared_run(
    job: Path | None,
    shared: JobOptions,
    wanted: RunOptions,
    screen: RunConsole,
    world: int | None,
    number: int | None = None,
) -> Iterator[tuple[LaunchSpec, Path, PlanChoice]]:
    """Plans the run and locks its folder for this process while the block runs. Yields the launch file, the folder and
    the chosen plan. `world` is the number of ranks that the plan must use; None leaves it to the job. `number` is the
    index of this node if there are several."""
    from shutil import disk_usage

    from meshwright.cli.launch_plan import (
        build_launch,
        build_model_source,
        choose_plan,
        disk_space_warnings,
        read_job_file,
        run_folder_of,
        write_run_folder,
    )
    from meshwright.cli.start_checks import check_before_ranks, cluster_mismatches
    from meshwright.core.errors import InputError
    from meshwright.core.storage import make_folder
    from meshwright.train.run_lock import RunLock

    file = read_job_file(job, shared, wanted.pin)
    source = build_model_source(file)
    folder = run_folder_of(file, source)
    with search_progress(wanted.language):
        choice: PlanChoice = choose_plan(file, wanted.pin, folder, os.environ, world)
    launch = build_launch(file, source, folder, choice)
    check_before_ranks(launch, choice.question, wanted.allow_cpu, launch.plan.world if world is None else 0)
    try:
        make_folder(folder)
    except OSError as error:
        raise InputError(
            Message("run folder {folder!r} cannot be made: {strerror}", folder=str(folder), strerror=error.strerror)
        ) from None
    with RunLock(folder, number):
        longer = write_run_folder(folder, launch, choice)
        offloaded = Path(launch.run.offload_to or folder)
        blocks = choice.question.model.blocks if choice.question is not None else 0
        room = (
            disk_space_warnings(choice.plan, choice.estimate, offloaded, disk_usage(offloaded).free, blocks)
            if choice.estimate and offloaded.is_dir()
            else ""
        )
        other = cluster_mismatches(choice.question) if choice.question is not None and world is None else []
        for line in filter(None, [*(translate(line, wanted.language) for line in choice.why), *other, longer, room]):
            screen.note(line)
        yield launch, folder, choice


def _run_external_rank(
    me: ExternalLaunch, job: Path | None, shared: JobOptions, wanted: RunOptions, screen: RunConsole
) -> Path:
    """Runs one of the ranks that another launcher has started. Rank 0 plans. If planning fails, all ranks end, and only
    rank 0 prints the error. Returns the run folder."""
    from meshwright.core.codec import parse_text, validate_data
    from meshwright.core.errors import Interrupted, MeshwrightError
    from meshwright.elastic.failure import local_failure
    from meshwright.spec.job import LaunchSpec
    from meshwright.train.rank_main import RankControl, join_process_groups, retain_heap

    retain_heap()
    note = lambda message: screen.note(message["line"]) if message["kind"] == "note" else None
    channel = RankControl(me.rank, me.world, note)
    channel.heed_signals(keyboard=True)
    if me.rank == 0:
        screen.note(Message("rank 0 of {world}: it joins the others, then it plans", world=me.world))
    connection = join_process_groups(me.rank, me.world)
    with ExitStack() as stack:
        stack.enter_context(connection)
        shared = _options_after_trials(job, shared, wanted, connection) if wanted.trials else shared
        if me.rank == 0:
            try:
                launch, folder, _ = stack.enter_context(_prepared_run(job, shared, wanted, screen, me.world))
            except MeshwrightError as error:
                connection.tell(f'{{"wrong": {error.exit_code}}}')
                raise
            connection.tell(launch.to_json())
            channel.hear = _event_listener(folder, me.world, screen)
        else:
            sent = parse_text(connection.tell(""), "rank 0")
            if "wrong" in sent:
                raise SystemExit(sent["wrong"])
            launch = validate_data(LaunchSpec, sent)
            folder = Path(launch.run.folder)
        from meshwright.train.loop import TrainLoop
        from meshwright.train.oom import OutOfMemory

        try:
            code = TrainLoop(launch, channel, connection).run()
        except OutOfMemory as error:
            raise OutOfMemory(_with_memory_hint(str(error), folder, launch)) from None
        except Exception as error:
            raise local_failure(error, me.rank, me.world) from error
    if code == Interrupted.exit_code:
        if me.rank:
            raise SystemExit(code)
        raise Interrupted(
            Message(
                "stopped by {reason}: everything is saved; the same command goes on where this one stopped",
                reason=channel.stop or Message("another rank"),
            )
        )
    return folder


def _with_memory_hint(line: str, folder: Path, launch: LaunchSpec) -> str:
    """Returns the OOM message `line` with a hint at a plan that needs less memory. Returns `line` alone if this rank
    cannot read RUN/job.json, which rank 0 wrote."""
    from meshwright.cli.replanning import lower_memory_hint
    from meshwright.core.codec import read_run_file
    from meshwright.core.errors import MeshwrightError
    from meshwright.spec.job import Job

    with suppress(MeshwrightError, MemoryError):
        if (question := read_run_file(Job, folder / "job.json")) is not None:
            return join_messages("; ", (line, lower_memory_hint(question, launch.plan)))
    return line


def _event_listener(folder: Path, world: int, screen: RunConsole) -> Callable[[IpcMessage], None]:
    """Returns the function that receives messages of rank 0 in a run without a supervisor. It records faults and
    decisions in the event log, as a supervisor would."""
    from meshwright.elastic.devices import DeviceExclusion
    from meshwright.elastic.event_log import EventLog

    journal = EventLog(folder, screen.note)
    slots = DeviceExclusion(world, journal)

    def hear(message: IpcMessage) -> None:
        journal.hear(message, 0)
        journal.look()
        if not slots.hear(message, (), 0):
            screen.hear(message)

    return hear


def _job_arguments(job: Path | None, shared: JobOptions) -> list[str]:
    """Returns the arguments of this command that define the training job, for the commands that are suggested
    afterwards.

    >>> _job_arguments(None, JobOptions(model="gpt2-tiny", plan="tp2", set=("workload.seed=3", "run.keep=9")))
    ['--model', 'gpt2-tiny', '--set', 'workload.seed=3']
    """
    single = {
        name: value
        for name, value in dataclasses.asdict(shared).items()
        if name not in ("plan", "set") and value is not None
    }
    words = [word for name, value in single.items() for word in (f"--{name}", str(value))]
    words += [word for entry in shared.set if not entry.startswith(("run.", "plan")) for word in ("--set", entry)]
    return [*([str(job)] if job else []), *words]


def _print_conclusion(folder: Path, question: list[str], screen: RunConsole, wanted: RunOptions, json: bool) -> None:
    """Prints predicted and measured values side by side, and the next commands."""
    from shlex import join

    from meshwright.planner.inputs.cluster_parser import available_cpus
    from meshwright.report.faults import check_skipped
    from meshwright.report.run import read_run, summarize_run
    from meshwright.report.run_text import run_text, speed_hint
    from meshwright.report.text import strict_json_data

    finished = read_run(folder)
    screen.show(f"\n{run_text(finished, wanted.language)}\n")
    ratio, ranks = summarize_run(finished).pair("time", "step").ratio, finished.plan.world if finished.plan else 0
    steps = len(finished.steps_of_plan)
    if (hint := speed_hint(ratio, steps, os.getloadavg()[0], ranks, available_cpus())) is not None:
        screen.note(hint)
    proof = join(["meshwright", "verify", *question, "--plan", finished.plan.name if finished.plan else "auto"])
    screen.note(
        Message(
            "next: {join}    or compare the plan with one device: {proof}",
            join=join(["meshwright", "report", str(folder)]),
            proof=proof,
        )
    )
    if json:
        print_json(strict_json_data(summarize_run(finished)))
    check_skipped(finished.steps)
