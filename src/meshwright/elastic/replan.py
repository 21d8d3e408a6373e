"""Plans a run for another number of ranks or for less memory, and reads the number of ranks that the user requests. The
supervisor uses it while training is paused, so planning has a time limit.

The search that chose the first plan is repeated for the job on the available devices. It considers only plans that the
runtime can run. It ignores pins (plan fields that the user has fixed), since these were chosen for another number of
ranks. If no plan fits in memory or divides the batch, the next smaller number of ranks is tried. After an OOM, the
search chooses the fastest plan whose estimated memory is at most MAX_MEMORY_FRACTION of the current plan's. Batch size,
sample order and learning rate belong to the workload and do not change.

The user requests a number of ranks by writing it to the file `ranks` in the run folder, such as `echo 3 > RUN/ranks`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from meshwright.core import storage
from meshwright.core.background_thread import BackgroundCall, CallPending
from meshwright.core.errors import InputError, NothingFits
from meshwright.core.messages import Message, mark_msgid
from meshwright.core.storage_deadline import unanswered
from meshwright.elastic.attempt import RankJob
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.ranking import search_plans
from meshwright.spec.cluster import NodeGroup
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.workload import Workload
from meshwright.spec.workload_constraints import diloco_violations

RANKS_FILE = "ranks"
MAX_MEMORY_FRACTION = 0.8
"""After an OOM, the estimated memory of the new plan is at most this fraction of the old plan's estimate."""

MAX_RANKS_FILE_BYTES = 12
"""At most this number of bytes is read from the file `ranks`."""

PLANNING_SECONDS = 60.0
"""Planning is aborted after this time, even during a search. Then the run continues as before."""

POSTPONE_SECONDS = 0.01
"""If the time limit expires during an import or in a destructor, the search is interrupted this time later."""

MAX_CANDIDATE_PLANS = 1000
"""A lower-memory plan is searched among this many of the fastest plans."""


def plan_for_devices(
    job: Job | None, workload: Workload, devices: int, clock: Callable[[], float] = time.monotonic
) -> tuple[Job | None, Plan]:
    """Returns `job` on at most `devices` devices of its first node group, and the best plan for it.

    `job` is None for a model without a cost estimate. The plan is then data parallelism for `workload`. Raises
    NothingFits if there is no plan, or if none was found in PLANNING_SECONDS.
    """
    end = clock() + PLANNING_SECONDS
    for count in range(devices, 0, -1):
        if (left := end - clock()) <= 0:
            raise _planning_expired(count + 1, devices)
        if job is None:
            plan = Plan(dp_replicate=count, micro_batch=max(workload.exact, 1))
            if workload.batch % (count * plan.micro_batch) == 0 and not any(diloco_violations(plan, workload.local)):
                return None, plan
            continue
        fewer = job.cluster.but(
            name=f"{job.cluster.name.partition(':')[0]}:{count}", groups=(resize_group(job.cluster.groups[0], count),)
        )
        question = job.but(cluster=fewer, pins=job.workload.fixed)
        try:
            with limit_planning_time(left):
                return question, search_plans(question, 1, runnable=True).chosen.plan
        except PlanningTimeout:
            raise _planning_expired(count, devices) from None
        except (NothingFits, InputError):
            continue
    raise NothingFits(
        Message("no plan runs on {devices} or fewer ranks: the run cannot go on with them", devices=devices)
    )


def _planning_expired(fewest: int, most: int) -> NothingFits:
    if fewest == most:
        template = mark_msgid("no plan for {most} ranks was found in {seconds:.0f} s: request fewer ranks")
    else:
        template = mark_msgid("no plan for {fewest} to {most} ranks was found in {seconds:.0f} s: request fewer ranks")
    return NothingFits(Message(template, fewest=fewest, most=most, seconds=PLANNING_SECONDS))


class PlanningTimeout(BaseException):
    """Raised if the search has exceeded its time limit. It does not derive from Exception, so that no handler inside
    the search catches it."""


@contextlib.contextmanager
def limit_planning_time(seconds: float) -> Iterator[None]:
    """A context that raises PlanningTimeout in its block after `seconds` seconds, by the signal SIGALRM.

    The limit does not apply in three cases: outside of the main thread (in which a supervisor plans), if the process
    already uses the timer, or if a C library handles SIGALRM. The previous signal handler is restored at the end.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or any(signal.getitimer(signal.ITIMER_REAL))
        or signal.getsignal(signal.SIGALRM) is None  # a C library has set the handler, which Python cannot restore
    ):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        # An exception during an import would leave a half-imported module. Python ignores an exception in a destructor.
        while frame is not None:
            if frame.f_code.co_name == "__del__" or frame.f_code.co_filename.startswith("<frozen importlib"):
                signal.setitimer(signal.ITIMER_REAL, POSTPONE_SECONDS)
                return
            frame = frame.f_back
        raise PlanningTimeout

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # a separate block, since the signal may arrive while the timer is being switched off
        signal.signal(signal.SIGALRM, before)


def resize_group(group: NodeGroup, count: int) -> NodeGroup:
    """Returns a group of `count` devices like those of `group`. If `count` devices fit in one node or exactly fill
    several nodes, the result has these nodes. Otherwise each device gets its own node, with one device's fraction of
    the resources of a node. So no link is assumed to be faster than it is.

    >>> from meshwright.planner.inputs.cluster_syntax import parse_cluster
    >>> pair = parse_cluster("2x2:cpu").groups[0]
    >>> [(found.nodes, found.devices) for found in (resize_group(pair, count) for count in (2, 4, 3))]
    [(1, 2), (2, 2), (3, 1)]
    """
    if count <= group.devices:
        return group.but(nodes=1, devices=count)
    if count % group.devices == 0:
        return group.but(nodes=count // group.devices)
    share = 1.0 / group.devices
    parts = {name: getattr(group, name) * share for name in ("host_memory", "storage_bandwidth", "host_update")}
    return group.but(nodes=count, devices=1, **parts)


def lower_memory_plan(job: Job | None, plan: Plan) -> Plan:
    """Returns the fastest plan that takes at most MAX_MEMORY_FRACTION of the memory of `plan` on an equal number of
    ranks. Raises NothingFits if there is no such plan, if none was found in time, or if `job` is None: without a job
    there is no cost estimate."""
    if job is not None:
        most = MAX_MEMORY_FRACTION * estimate(job, plan).memory.total
        question = job.but(pins=job.workload.fixed)
        try:
            with limit_planning_time(PLANNING_SECONDS):
                found = search_plans(question, MAX_CANDIDATE_PLANS, runnable=True).plans
        except PlanningTimeout:
            raise NothingFits(
                Message(
                    "no plan that takes less memory than {plan} was found in {seconds:.0f} s",
                    plan=plan.name,
                    seconds=PLANNING_SECONDS,
                )
            ) from None
        for entry in found:
            if entry.plan.world == plan.world and entry.estimate.memory.total <= most:
                return entry.plan
    raise NothingFits(
        Message("no plan for {world} ranks takes less memory than {plan}", world=plan.world, plan=plan.name)
    )


@dataclass
class RankCountRequest:
    """Reads the number of ranks that the user requests in the file `ranks` of the run folder. Invalid content is
    reported to `note` in one line and ignored. A disk that does not answer delays the request only, and is reported
    after storage.OVERDUE_SECONDS."""

    folder: Path
    note: Callable[[str], None]
    full: int
    """The number of ranks for which the run was planned."""
    _said: str = ""
    _disk: BackgroundCall[bytes] = field(default_factory=lambda: BackgroundCall("read ranks"))

    def __call__(self, places: int | None) -> int | None:
        """Returns the requested number of ranks and removes the file. Returns None if there is no valid request.

        `places`: the number of ranks for which the machines have devices, or None on one machine. A request may be at
        most this number (on one machine, the CPU count), or the planned number if that is larger.
        """
        most = max(self.full, len(os.sched_getaffinity(0)) if places is None else places)
        path = self.folder / RANKS_FILE
        try:
            content = self._disk.call(lambda: _take_content(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say_unreadable(error)
            return None
        except CallPending as pending:
            if pending.seconds >= storage.OVERDUE_SECONDS:
                self._say_unreadable(unanswered(path))
            return None
        if not content:
            return None  # an empty file is still being written
        text = content.decode("ascii", errors="backslashreplace")
        wanted = int(text) if text.isdigit() and len(text) < MAX_RANKS_FILE_BYTES else 0
        if not 1 <= wanted <= most:
            self._say(
                Message(
                    "{path} requests {text!r} ranks, but the number must be from 1 to {most}; the run goes on as "
                    "before",
                    path=path,
                    text=text,
                    most=most,
                )
            )
            return None
        self._said = ""
        return wanted

    def _say_unreadable(self, error: OSError) -> None:
        failure = storage.describe_failure(error)
        self._say(Message("the requested number of ranks cannot be read: {failure}", failure=failure))

    def _say(self, line: str) -> None:
        """Reports `line` unless it was the last line reported, since the file is read repeatedly."""
        if line != self._said:
            self.note(line)
        self._said = line


def _take_content(path: Path) -> bytes:
    """Returns the content of the file `path` and removes the file, unless it is empty."""
    content = storage.read_file(path, most=MAX_RANKS_FILE_BYTES).strip()
    if content:
        storage.remove(path)
    return content


RANKS_FILE_SECONDS = 0.2
"""The file `ranks` is read at most once in this time."""


@dataclass
class PendingChange:
    """The change that the next generation makes. `world`: the new number of ranks, or None. `leaner`: the job under a
    plan that takes less memory, or None.

    `request` reads the user's request. `places`: the number of ranks for which there were devices at the last check, or
    None on one machine.
    """

    request: RankCountRequest
    places: int | None
    world: int | None = None
    leaner: RankJob | None = None
    _looked: float = 0.0

    def is_due(self, now: float) -> bool:
        """Returns whether the user's request and the nodes must be checked at the time `now`."""
        if now < self._looked + RANKS_FILE_SECONDS:
            return False
        self._looked = now
        return True

    def has_room_changed(self, places: int | None) -> bool:
        """Returns whether `places`, the number of ranks for which there are devices, has changed since the last
        check."""
        before, self.places = self.places, places
        return places not in (None, before)
