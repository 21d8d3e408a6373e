"""`meshwright train`: plans without torch, starts the ranks, shows the run; picks up where a run folder stopped.

Started by torchrun, Slurm or Kubernetes this process is one node of several (nodes.py), or itself one rank: then rank 0 plans and tells the
others, and nothing is forked.
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

from meshwright.cli.options import AsJson, JobPath, Language, Shared, say_json

if TYPE_CHECKING:
    from meshwright.base.lines import Message
    from meshwright.cli.nodes import Place
    from meshwright.cli.preparation import Choice
    from meshwright.spec.launch import Launch
    from meshwright.train.rank import Connection, Launched
    from meshwright.train.screen import Screen

PROBE = "meshwright.train.probing:speed"


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Wanted:
    """How the job is run, and in which language it speaks."""

    run: Annotated[
        str | None,
        Parameter(
            name=("--run", "--folder"),
            help="run folder, or its name under runs/; the same folder goes on where it stopped (torchrun takes --run for its own: use --folder)",
        ),
    ] = None
    steps: Annotated[int | None, Parameter(help="optimizer steps in all; more than a run was begun with train it on")] = None
    pin: Annotated[str | None, Parameter(help="parts of the plan to fix, such as tp=2,pp=2")] = None
    offload_to: Annotated[
        Path | None,
        Parameter(
            help="folder on a local disk for what the plan keeps in files (off-optimizer-disk, off-activations-disk); else the run's own"
        ),
    ] = None
    prove: Annotated[
        bool | None,
        Parameter(
            help="prove the plan on the run's own ranks and weights: loss and every gradient are compared with one device; without either flag, where that is cheap"
        ),
    ] = None
    trials: Annotated[
        int, Parameter(help="before: run up to so many of the best plans for a few steps each, and train with the fastest")
    ] = 0
    lang: Language = None

    @property
    def language(self) -> str:
        from meshwright.words.say import language_of

        return language_of(self.lang, os.environ)


def train(
    job: JobPath = None,
    /,
    *,
    shared: Shared = Shared(),  # noqa: B008
    wanted: Wanted = Wanted(),
    json: AsJson = False,
) -> int:
    """Plan a job, start its ranks on this machine, train; leave records, checkpoints and a report in a run folder.

    The same command again goes on where the run stopped. Under torchrun, Slurm or Kubernetes each process is one node, or one rank.

    Try: meshwright train --model gpt2-tiny --steps 100 --cluster local:4 --pin tp=2
    """
    from meshwright.cli.nodes import place_of
    from meshwright.cli.preparation import read_file
    from meshwright.train.rank import launched
    from meshwright.train.screen import Screen
    from meshwright.words.lines import translated

    question = _question(job, shared)
    shared = _with(shared, wanted)
    me = launched(os.environ)
    node = None if me is None else place_of(me, lambda: read_file(job, shared), os.environ)
    screen = Screen(words=functools.partial(translated, language=wanted.language))
    try:
        if node is not None:
            folder = _be_a_node(node, job, shared, wanted, screen)
        elif me is not None:
            folder = _be_a_rank(me, job, shared, wanted, screen)
        else:
            folder = _supervise(job, shared, wanted, screen, None)
    finally:
        screen.close()
    if me is None or node is not None or me.rank == 0:
        _conclude(folder, question, screen, wanted, json)
    return 0


def _be_a_node(node: Place, job: Path | None, shared: Shared, wanted: Wanted, screen: Screen) -> Path:
    """The first node leads, unless another one does; who follows leads when it is its turn (succession.py). Ends the process of one that has not led."""
    from meshwright.cli.nodes import serve
    from meshwright.cli.preparation import folder_of, read_file, source_of
    from meshwright.cli.succession import Leader, is_led_by_another, is_overtaken, leader_of
    from meshwright.train.lease import Held

    file = read_file(job, shared)
    folder = folder_of(file, source_of(file)).resolve()
    found = serve(node, file, screen.note) if node.number or is_led_by_another(node, folder) else node
    while not isinstance(found, int):
        try:
            return _supervise(job, shared, wanted if found.after is None else dataclasses.replace(wanted, trials=0), screen, found)
        except Held:
            if found.after is None and not is_overtaken(node, folder):
                raise
        lost = node.number if found.after is None else found.after
        known = leader_of(folder) or Leader(lost, found.host, found.port)
        found = serve(found, file, screen.note, known)  # another one was faster: it is joined
    raise SystemExit(found)


def _with(shared: Shared, wanted: Wanted) -> Shared:
    """The options that are entries of the job file too."""
    run = wanted.run
    named = None if run is None else run if "/" in run or run.startswith((".", "~")) else f"runs/{run}"
    where = None if wanted.offload_to is None else wanted.offload_to.expanduser().resolve()
    prove = None if wanted.prove is None else "start" if wanted.prove else "never"
    entries = (("workload.steps", wanted.steps), ("run.folder", named), ("run.offload_to", where), ("run.prove", prove))
    written = (f"{name}={plain.dumps(value if name == 'workload.steps' else str(value))}" for name, value in entries if value is not None)
    return dataclasses.replace(shared, set=(*shared.set, *written))  # quoted: a path may hold what YAML reads as a comment or a mapping


def _supervise(job: Path | None, shared: Shared, wanted: Wanted, screen: Screen, node: Place | None) -> Path:
    """Ranks of this machine, each a child of this process; and of the other nodes, when this is the one of several that leads."""
    from meshwright.cli.nodes import goes_on, leading, told
    from meshwright.cli.preparation import read_file
    from meshwright.cli.replans import Replans
    from meshwright.cli.succession import announced
    from meshwright.elastic.adoption import HELD, Hold, digest_of
    from meshwright.elastic.slots import Leaving
    from meshwright.elastic.starting import Starting
    from meshwright.elastic.supervisor import Care, Supervisor
    from meshwright.elastic.watch import ACCELERATORS, CORES
    from meshwright.intake.local import cuda_cards

    shared = _after_trials(job, shared, wanted) if wanted.trials else shared
    if node is not None:
        shared = dataclasses.replace(shared, cluster=told(read_file(job, shared), node) or shared.cluster)
    world, number = (node.world, node.number) if node else (None, None)
    with _prepared(job, shared, wanted, screen, world, number) as (launch, folder, choice), ExitStack() as stack:
        run, plans = launch.run, Replans(launch, choice, folder)
        leaving = Leaving(plans.predict, PROBE) if run.balance else None
        work = plans.work_of(launch)
        terms = ACCELERATORS if cuda_cards() else CORES
        hold = Hold(HELD, digest_of(launch.result()), not run.anew) if run.copies else None
        care = Care(
            run.retries, run.patience, plans.replan, run.least, plans.leaner, plans.instead, run.rejoin, leaving, work.world, terms, hold
        )
        stack.callback(_sweep, folder / "checkpoints")
        stack.enter_context(announced(folder, node, screen.note))
        fleet = stack.enter_context(leading(node, work, screen.note, run)) if node else None
        work = plans.replan(len(fleet.slots)) if fleet is not None and len(fleet.slots) < work.world else work
        screen.note(f"starting {work.world} ranks" if work.world > 1 else "starting 1 rank")
        hear = lambda rank, message: screen.hear(message)
        if fleet is not None and node is not None:
            care = dataclasses.replace(care, follows=goes_on(fleet, node))
        Supervisor(work, hear, screen.note, run.grace, Starting(screen.note), care=care, lent=fleet).run()
    return folder


def _sweep(folder: Path) -> None:
    """What a second request to stop cut short goes; whatever cannot be removed, the next save removes."""
    from meshwright.base.storage import sweep

    with suppress(OSError):
        sweep(folder)


def _after_trials(job: Path | None, shared: Shared, wanted: Wanted, connection: Connection | None = None) -> Shared:
    """The options with the plan that trials found; as they are where the plan is given, or the run has begun with one. `connection`: of ranks that
    another launcher has started, of which rank 0 knows."""
    from meshwright.cli.options import note
    from meshwright.cli.preparation import folder_of, read_file, source_of
    from meshwright.cli.trials import tried
    from meshwright.intake.job import resolve
    from meshwright.intake.plans import parse_pins

    file = read_file(job, shared)
    known = file.given_plan() is not None or (folder_of(file, source_of(file)) / "plan.json").is_file()
    if connection.tell("known" if known else "") if connection is not None else known:
        if connection is None or connection.rank == 0:
            note("no trials: the plan is given, or the run has begun with one", wanted.language)
        return shared
    question = resolve(file)
    pins = {**question.pins, **parse_pins(wanted.pin)} if wanted.pin else question.pins
    found = tried(file, question.but(pins=pins), wanted.trials, wanted.language, connection)
    best = found[1] if found else None
    return dataclasses.replace(shared, plan=best.plan.name) if best else shared


@contextmanager
def _prepared(
    job: Path | None, shared: Shared, wanted: Wanted, screen: Screen, world: int | None, number: int | None = None
) -> Iterator[tuple[Launch, Path, Choice]]:
    """A planned run whose folder is ours for as long as the block lasts. `number`: of this node, where there are several."""
    from shutil import disk_usage

    from meshwright.base.errors import InputError
    from meshwright.cli.preparation import apart, choose, folder_of, launch_of, read_file, short_of_room, source_of, write_run
    from meshwright.train.lease import Lease
    from meshwright.words.say import say

    file = read_file(job, shared)
    source = source_of(file)
    folder = folder_of(file, source)
    choice: Choice = choose(file, wanted.pin, folder, os.environ, world)
    launch = launch_of(file, source, folder, choice)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"run folder {str(folder)!r} cannot be made: {error.strerror}") from None
    with Lease(folder, number):
        longer = write_run(folder, launch, choice)
        away = Path(launch.run.offload_to or folder)
        blocks = choice.question.model.blocks if choice.question is not None else 0
        room = short_of_room(choice.plan, choice.estimate, away, disk_usage(away).free, blocks) if choice.estimate and away.is_dir() else ""
        other = apart(choice.question) if choice.question is not None and world is None else []
        for line in filter(None, [*(say(line, wanted.language) for line in choice.why), *other, longer, room]):
            screen.note(line)
        yield launch, folder, choice


def _be_a_rank(me: Launched, job: Path | None, shared: Shared, wanted: Wanted, screen: Screen) -> Path:
    """One rank among those that another launcher has started. Rank 0 plans; what it finds wrong ends them all with one line."""
    from meshwright.base.codec import build, parse, read
    from meshwright.base.errors import Interrupted, MeshwrightError
    from meshwright.elastic.failure import failed_here
    from meshwright.spec.job import Job
    from meshwright.spec.launch import Launch
    from meshwright.train.rank import Channel, connect, keep_heap

    keep_heap()
    channel = Channel(me.rank, me.world, lambda message: screen.note(message["line"]) if message["kind"] == "note" else None)
    channel.heed_signals(keyboard=True)
    if me.rank == 0:
        screen.note(f"rank 0 of {me.world}: it joins the others, then it plans")
    connection = connect(me.rank, me.world)
    with ExitStack() as stack:
        stack.enter_context(connection)
        shared = _after_trials(job, shared, wanted, connection) if wanted.trials else shared
        if me.rank == 0:
            try:
                launch, folder, _ = stack.enter_context(_prepared(job, shared, wanted, screen, me.world))
            except MeshwrightError as error:
                connection.tell(f'{{"wrong": {error.exit_code}}}')
                raise
            connection.tell(launch.to_json())
            channel.hear = _journalled(folder, me.world, screen)
        else:
            told = parse(connection.tell(""), "rank 0")
            if "wrong" in told:
                raise SystemExit(told["wrong"])
            launch = build(Launch, told)
            folder = Path(launch.run.folder)
        from meshwright.cli.replans import instead
        from meshwright.train.loop import Loop
        from meshwright.train.want import OutOfMemory

        try:
            code = Loop(launch, channel, connection).run()
        except OutOfMemory as error:
            with suppress(MeshwrightError, MemoryError):  # the job lies where rank 0 wrote it, which not every rank may see
                error = OutOfMemory(f"{error}; {instead(read(Job, folder / 'job.json'), launch.plan)}")
            raise error from None
        except Exception as error:
            raise failed_here(error, me.rank, me.world) from error
    if code == Interrupted.exit_code:
        if me.rank:
            raise SystemExit(code)
        raise Interrupted(
            f"stopped by {channel.stop or 'another rank'}: everything is saved; the same command goes on where this one stopped"
        )
    return folder


def _journalled(folder: Path, world: int, screen: Screen) -> Callable[[Message], None]:
    """What hears rank 0 where no supervisor does: what breaks and what is decided goes into the journal all the same."""
    from meshwright.elastic.journal import Journal
    from meshwright.elastic.slots import Slots

    journal = Journal(folder, screen.note)
    slots = Slots(world, journal)

    def hear(message: Message) -> None:
        journal.hear(message, 0)
        if not slots.hear(message, (), 0):
            screen.hear(message)

    return hear


def _question(job: Path | None, shared: Shared) -> list[str]:
    """The words of this command that say what is trained, for the commands that are proposed after it.

    >>> _question(None, Shared(model="gpt2-tiny", plan="tp2", set=("workload.seed=3", "run.keep=9")))
    ['--model', 'gpt2-tiny', '--set', 'workload.seed=3']
    """
    single = {name: value for name, value in dataclasses.asdict(shared).items() if name not in ("plan", "set") and value is not None}
    words = [word for name, value in single.items() for word in (f"--{name}", str(value))]
    words += [word for entry in shared.set if not entry.startswith(("run.", "plan")) for word in ("--set", entry)]
    return [*([str(job)] if job else []), *words]


def _conclude(folder: Path, question: list[str], screen: Screen, wanted: Wanted, json: bool) -> None:
    """Predicted beside measured, and what to type next."""
    from shlex import join

    from meshwright.report.run import read_run, summarise
    from meshwright.report.run_text import run_text
    from meshwright.report.text import plain

    finished = read_run(folder)
    screen.show(f"\n{run_text(finished, wanted.language)}\n")
    proof = join(["meshwright", "verify", *question, "--plan", finished.plan.name if finished.plan else "auto"])
    screen.note(f"next: {join(['meshwright', 'report', str(folder)])}    or prove the plan: {proof}")
    if json:
        say_json(plain(summarise(finished)))
