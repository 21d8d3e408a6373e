"""Runs one job on its ranks from start to end and recovers from faults. The commands `train`, `plan`, `probe` and
`verify` use it.

Guarantees:
- The run starts with exactly the requested number of ranks. This number changes only as in [Note: other numbers of
  ranks] and when slow devices are excluded or readmitted (devices.py).
- If `FaultPolicy` allows retries and a rank dies or hangs after training has begun, the run resumes without user
  action. It resumes from the in-memory snapshots of the last step, if there are any, and otherwise from the last
  checkpoint on disk.
- A fault without recovery ends with a diagnosis that names the rank that caused it.
- Ctrl-C and SIGTERM end the run at a step boundary with everything saved. If the ranks take longer than
  `grace_period` seconds, new ranks save the last in-memory snapshots. A second signal ends the run at once.
- No process is left behind.

[Note: generations] A generation is one start of all ranks. A fault ends all ranks of its generation. The next
generation has its own key prefix in the rendezvous store, so that no rank or message of the old generation can
interfere. Its ranks are forked from a preloaded process and read the memory that the supervisor keeps open
(shared_files.py). Alternatively, the surviving ranks could be reused. Measurements show that this is not faster, since
their collectives must first time out or be torn down. It would also need a second code path.

[Note: other numbers of ranks] A rank may be lost permanently, or the user may request another number of ranks. Then
`replan` returns the job for the new number. The next generation can read the last snapshots under any plan. The old
snapshots stay until all ranks have new snapshots, and on several machines until the new snapshots have replicas.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from meshwright.core.cgroup_limits import raise_open_file_limit
from meshwright.core.errors import Interrupted, MeshwrightError
from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message
from meshwright.core.node_wait import ended_without_save
from meshwright.core.retry import ResultT
from meshwright.core.signals import StopRequest, stop_signal_handler
from meshwright.core.storage import failures_as_one_line, make_folder, report_if_overdue
from meshwright.elastic.attempt import PROBE_RANK, Attempt, RankJob
from meshwright.elastic.devices import DeviceExclusion
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.failure import (
    RankExit,
    diagnose,
    failure_cause,
    find_culprit,
    fork_server_error,
    fork_server_exit,
    fork_server_hang,
)
from meshwright.elastic.hang_detector import FORK_SERVER_SECONDS, HangDetector, StepPace
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.missing_nodes import MissingNodes
from meshwright.elastic.replan import PendingChange, RankCountRequest
from meshwright.elastic.restart_policy import BAD_RANK_FAULTS, FaultPolicy, RestartPolicy, call_with_retries
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_adoption import SnapshotAdoption, SnapshotSets
from meshwright.elastic.writer_supervisor import WRITER_RANK, WriterSupervisor

__all__ = ["FaultPolicy", "RankJob", "Supervisor"]

TICK_SECONDS = 0.1  # the supervisor waits at most this long for events before it checks for hangs and requests
SETTLE_SECONDS = 1.0  # after a rank has failed, other ranks may report errors for this time


@dataclass
class Supervisor:
    """Runs `work` until every rank is done (`run`).

    `hear` receives the messages of ranks, and `note` receives lines for the user. `starting` is called several times a
    second until a rank begins to train; it gets the heartbeats. `generation`: the index of the current generation.
    """

    work: RankJob
    hear: Callable[[int, IpcMessage], None]
    note: Callable[[str], None] = lambda _: None
    grace_period: float = 30.0
    starting: Callable[[SharedFileStore], None] = lambda _: None
    generation: int = 0
    care: FaultPolicy = field(default_factory=FaultPolicy)
    agent: LocalAgent | None = None
    """An agent that is ready and outlives this run, as on several machines. None: the run creates its own agent."""
    early: str = Message("before the first step")
    """What the report of a stop request says if no rank had begun to train."""
    _stop: StopRequest = field(default_factory=StopRequest)
    _begun: bool = False

    def run(self) -> None:
        """Runs the job to its end. Raises InputError, RankFailed or another MeshwrightError after a failure, and
        Interrupted after a stop request."""
        raise_open_file_limit(
            max(self.work.world, self.care.full)
            if self.agent is None or self.agent.places is None
            else self.agent.devices
        )
        with failures_as_one_line(self.work.logs):
            self._retried(lambda: make_folder(self.work.logs))
        clock = self.agent.outside.clock if self.agent is not None else time.monotonic
        self._journal = EventLog(self.work.folder, self.note, clock)
        self._retries = RestartPolicy(self.care.retries)
        self._slots = DeviceExclusion(max(self.work.world, self.care.full), self._journal, self.care.leaving, clock)
        adoption = SnapshotAdoption(self.work.folder, self.care.hold if self.agent is None else None, self.note)
        log, pipe = self.work.logs / "fork-server.log", adoption.lifeline
        self._agent = self.agent or LocalAgent(log, self.work.warm, self.work.environment, lifeline=pipe)
        fresh = self._retried(lambda: self._agent.outside.holdings(self.work.world))
        self._pace, self._sets = StepPace(), SnapshotSets(fresh, adoption, self._agent.homes)
        request = RankCountRequest(self.work.folder, self.note, self._slots.full)
        self._change_to = PendingChange(request, self._agent.places)
        self._begun = self.care.follows
        limit = max(self.care.terms.otherwise, 10 * self.care.hang_timeout)
        self._writer = WriterSupervisor(self._journal, self.hear, self.note, self._agent.command, limit, clock)
        self._slots.name, self._slots.first = self._agent.name_of, self._agent.devices
        try:
            with stop_signal_handler(self._stop.on_signal):
                # The next generation reads the snapshots of a killed supervisor or leader, as after any fault.
                self._adopt()
                if self.agent is None and (first := self._await_ready()) is not None:
                    _revive(self, first)
                now = _run_attempts(self)
                with contextlib.suppress(OSError):
                    now.end(self._agent, self._heed_others, self.care.terms.kill)
        finally:
            if self._agent is not self.agent:
                self._agent.close()
            self._sets.close()
            self._journal.close()
        _finish(self, now)

    def _retried(self, do: Callable[[], ResultT]) -> ResultT:
        return call_with_retries(do, self.care.retries, self.note)

    def _adopt(self) -> None:
        """Adopts the snapshots of a killed supervisor or of a lost leader. If this fails, the run goes on from its
        checkpoint."""
        adopted = self._sets.adopt(self.work, self._journal)
        if adopted is None and (agent := self.agent) is not None:
            try:
                adopted = self._retried(lambda: self._sets.adopt_from_nodes(agent, self.care.hold, self._journal))
            except OSError as error:
                self.note(Message("the snapshots of a node that lost its leader {why}: not adopted", why=error))
        if adopted is not None:
            self.generation, self._begun = adopted + 1, True

    @property
    def _holdings(self) -> SharedFileStore:
        """Returns the snapshots that the current ranks write."""
        return self._sets.newest

    def _await_ready(self) -> RankExit | None:
        """Waits until the fork server is ready. Returns its failure if it has ended or is not ready within
        FORK_SERVER_SECONDS. Raises Interrupted after a stop request."""
        end = self._agent.outside.clock() + FORK_SERVER_SECONDS
        # Once training has begun, only a second stop request interrupts: after the first, the run still saves.
        while len(self._stop.signals) < 1 + self._begun:
            for event in (events := self._agent.events(TICK_SECONDS)):
                self._heed_others(event)
            if any(event["event"] == "ready" for event in events):
                return None
            if self._agent.ended:
                return fork_server_exit(self._agent.status(), self._agent.log)
            if (now := self._agent.outside.clock()) > end:
                return fork_server_hang(now, FORK_SERVER_SECONDS)
            self.starting(self._holdings)
        how = Message("while it recovered") if self._begun else self.early
        raise Interrupted(
            Message(
                "stopped by {reason} {early}; the same command starts again", reason=self._stop.signals[0], early=how
            )
        )

    # --- one generation

    def _generate(self) -> Attempt:
        """Runs one generation until all its ranks have ended, it has failed, or it must end because of a change."""
        if self._slots.free(self._agent.slots) is not None:  # nodes may have joined or left since the last assignment
            self.work = replace(self.work, slots=self._slots.seat(self.work.world))
        now = self._now = Attempt(self.work, self.generation, self._hear, clock=self._agent.outside.clock)
        self._sets.begin(self.generation, self.work)
        agent, patience = self._agent, self.care.hang_timeout * 2 ** max(0, self._retries.in_row - 1)
        clock, signs = agent.outside.clock, agent.signs
        watch = HangDetector(
            self._holdings, patience, clock, signs, self._pace, lambda: agent.is_blind, self.care.terms
        )
        now.start(self._agent, self._holdings, self._sets.source)
        self._slots.started(self.work.plan)
        if self._stop.restart():  # the last generation failed after a stop request
            now.tell(self._agent, {"stop": self._stop.signals[0]})
        while now.living and not self._stop.is_forced:
            # If this process was suspended for long, messages from before must be handled before a check for hangs.
            heard = clock()
            for event in self._agent.events(TICK_SECONDS):
                self._heed_others(event)
                now.heed(event)
            if self._agent.ended and now.living:
                break
            if self._stop.is_news():
                _request_stop(self, now)
            self._writer.look(self.generation, self._holdings)
            self._sets.adoption.look()
            self._journal.look()
            hung = watch.look(now.living)
            if hung is not None:
                now.silent, now.blames_server = hung.silent, hung.blames_server
                now.failures[hung.rank] = RankExit(
                    hung.rank, self._agent.outside.clock(), -signal.SIGKILL, words=hung.words
                )
            if hung is not None or self._is_failed(now, heard) or self._is_resized(now):
                break
            slot = self._slots.due()
            if slot is not None and self.care.leaving is not None:
                now.probe(self._agent, self.care.leaving.probe, slot)
            if not now.begun:
                self.starting(self._holdings)
        return now

    def _hear(self, rank: int, message: IpcMessage) -> None:
        if message["kind"] == "begin":
            self._begun = True
            self._stop.resume(self._agent.outside.clock() + self.grace_period)
        if message["kind"] == "write":
            self._journal.hear(message, self.generation)
            self._writer.begin(partial(self._now.write, self._agent, self._holdings), message)
            return
        if message["kind"] == "degraded":
            self._journal.degraded(message["line"], rank=rank, generation=self.generation)
            return
        if rank == 0 or message["kind"] == "bad_data":
            self._journal.hear(message, self.generation)
        if rank or not self._slots.hear(message, self._here(), self.generation):
            self.hear(rank, message)

    def _here(self) -> tuple[int, ...]:
        """Returns the device id of each current rank."""
        return self.work.slots or self._slots.of(self.work.world)

    def _heed_others(self, event: IpcMessage) -> None:
        """Handles events that do not come from ranks: those of nodes, of the device probe and of the checkpoint writer.
        The device probe and the checkpoint writer may outlive a generation."""
        if event["event"] == "pulse" and event["generation"] == self.generation:
            self._holdings.heard(event["rows"])
        elif self._journal.heed_node(event):
            self._slots.probed()
        elif event.get("rank") == PROBE_RANK:
            self._slots.heed(event)
        elif event.get("rank") == WRITER_RANK:
            self._writer.heed(event, self.generation, self._holdings)

    def _is_failed(self, now: Attempt, heard: float) -> bool:
        """Returns whether the generation has failed and need not continue. If ranks have only lost connections, or the
        run will not recover, they get SETTLE_SECONDS to report errors. `heard`: earlier messages have been handled."""
        recovers = now.guilty and self.care.retries > 0 and self._begun
        return _is_stop_overdue(self, now) or now.waited(heard) > SETTLE_SECONDS or recovers

    def _is_resized(self, now: Attempt) -> bool:
        """Returns whether the generation must end because the number of ranks or the devices change. It also closes the
        snapshots of earlier ranks when the new snapshots are complete."""
        change, places, clock = self._change_to, self._agent.places, self._agent.outside.clock
        if not self._writer.lives and self._sets.is_old_obsolete():
            self._sets.release_old(self.generation, self.work)
            self._agent.released()
        if not now.begun or self.care.replan is None or self._stop.deadline is not None or not change.is_due(clock()):
            return False
        wanted = change.request(places)
        if wanted is None and change.has_room_changed(places):
            wanted = self._slots.free(self._agent.slots)
        moves = self._slots.are_to_move(self.work.slots, self._agent.slots)
        change.world = (
            wanted if wanted not in (None, self.work.world) else self.work.world if moves else self._slots.take()
        )
        return change.world is not None

    # --- between generations

    def _heals(self, now: Attempt) -> bool:
        """Returns whether another generation starts ([Note: giving up] in restart_policy.py). It records the fault, if
        there was one. Raises RankFailed if the fork server has died and there is no recovery."""
        if self._agent.ended and now.living and not now.guilty:
            removed = self._agent.status()
            if self._stop.is_forced or not self._begun or not self.care.retries:
                raise fork_server_error(removed, self._agent.log)
            first = now.failures[-1] = fork_server_exit(removed, self._agent.log)
        elif self._change_to.world is not None and not now.failures and not self._stop.is_forced:
            return True
        elif not now.failures or self._stop.is_forced:
            return False
        else:
            first = find_culprit(list(now.failures.values()))
        hungry = self._retries.is_hungry(first)
        if (first.known and not hungry) or not (self._begun or first.rank < 0) or not self.care.retries:
            return False
        place = {
            **self._holdings.place(first.rank),
            "generation": self.generation,
            "cause": failure_cause(first),
            "detection": now.silent,
        }
        # The culprit's heartbeat may be ahead of the last step that rank 0 has reported.
        done = max(self._journal.last, place.get("step", 0) - 1)
        change, policy = self._change_to, self._retries
        policy.verdict = policy.count(first, done, hungry)
        if policy.verdict and hungry and (work := _lower_memory_job(self)) is not None:
            change.leaner, policy.verdict, policy.in_row = work, "", 0
        lemon = self._retries.lemon
        if (
            lemon is not None
            and self.care.replan is not None
            and self.care.min_ranks
            and self.work.world > self.care.min_ranks
        ):
            change.world, policy.verdict = self.work.world - 1, ""
            self._slots.leave_out([slot for rank, slot in enumerate(self._here()) if rank == lemon])
        now.silent = 0.0
        if policy.verdict:
            self._journal.write(kind="verdict", decision=policy.verdict, **place)
            return False
        decision = (
            Message("ranks start again")
            if change.world is None
            else Message(
                "this rank also failed the last {bad_rank_faults} times: goes on with {world} ranks",
                bad_rank_faults=BAD_RANK_FAULTS,
                world=change.world,
            )
        )
        if change.leaner is not None:
            decision = Message("out of memory in the same step again: goes on with a plan that takes less memory")
        self._journal.fault(decision=decision, **place)
        return True

    def _recover(self, now: Attempt) -> None:
        """Ends the ranks of the old generation and prepares the next one: fork server, pause, devices and plan."""
        began = self._agent.outside.clock()
        self._journal.decide()
        now.end(self._agent, self._heed_others, self.care.terms.kill)
        if self._agent.ended or now.living or now.blames_server:
            _revive(self)
        self._journal.part("end", self._agent.outside.clock() - began)
        self._retries.rest(self._journal.part)
        change = self._change_to
        if change.world is None:
            self._await_places()
        if change.world is not None:
            _resize(self, change.world)
        elif change.leaner is not None:
            self._change(change.leaner)
        change.leaner = None
        self.generation += 1

    def _await_places(self) -> None:
        """Waits for devices of lost nodes, if any are missing (missing_nodes.py)."""
        missing = MissingNodes(self._agent, self._slots, self._journal, self.care, self._stop, self._heed_others)
        places = missing.wait(self.work.world, self.generation, TICK_SECONDS)
        if places is not None:
            self._change_to.world, self._change_to.places = places, self._agent.places

    def _change(self, work: RankJob) -> None:
        """Replaces the job by `work` for the next generation. The current snapshots stay until those of `work` are
        complete."""
        fresh = self._agent.outside.holdings(work.world)
        self._journal.resize(self.work.world, work.world, work.plan, self.generation, work.plan == self.work.plan)
        self.work = replace(work, slots=self._slots.seat(work.world))
        self._retries.forget_culprits()
        self._pace = StepPace()
        self._sets.change(fresh)


def _resize(run: Supervisor, world: int) -> None:
    """Plans the job for `world` ranks and changes to it ([Note: other numbers of ranks]). If there is no plan, the run
    continues unchanged."""
    assert run.care.replan is not None
    began, run._change_to.world = run._agent.outside.clock(), None
    try:
        with report_if_overdue(lambda: run.note(Message("still planning for {world} ranks", world=world))):
            work = run.care.replan(world)
    except MeshwrightError as error:
        run._journal.unplanned(world, str(error), run.generation)
        if run._stop.is_own:
            raise ended_without_save(run._stop.signals[0]) from None
    else:
        run._change(work)
    run._journal.part("plan", run._agent.outside.clock() - began)


def _request_stop(run: Supervisor, now: Attempt) -> None:
    """Handles a stop request. After the first request, the ranks finish their step and save. A second request, or a
    request before any rank has begun to train, ends the run at once."""
    reason = run._stop.signals[0]
    if len(run._stop.signals) > 1 or not run._begun:
        run._stop.is_forced = True
        return
    run._stop.deadline = run._agent.outside.clock() + run.grace_period
    run.note(
        Message(
            "{reason}: the run ends after this step and saves everything, if that takes at most {seconds:.0f} s "
            "(run.grace_period); send the signal again to stop at once",
            reason=reason,
            seconds=run.grace_period,
        )
    )
    now.tell(run._agent, {"stop": reason})


def _is_stop_overdue(run: Supervisor, now: Attempt) -> bool:
    """Returns whether new ranks must save, because those of `now` did not before the deadline of a stop request."""
    is_overdue = run._stop.expire(now.clock(), run.care.retries > 0 and run._holdings.snapshot_step > 0)
    if is_overdue:
        now.fail_without_save(run.grace_period)
    return is_overdue


def _revive(run: Supervisor, first: RankExit | None = None) -> None:
    """Starts a new fork server and waits until it is ready. If it ends before, or hangs, this counts as a failure and
    is retried. `first`: how the first fork server of the run has failed. Raises RankFailed after the last retry, or if
    the first fork server has ended: it would end again."""
    if first is not None and run._agent.ended:
        raise fork_server_error(run._agent.status(), run._agent.log)
    if first is None:
        run._agent.again()
        run._slots.probed()
        first = run._await_ready()
    while first is not None:
        place = {"generation": run.generation, "cause": failure_cause(first)}
        if why := run._retries.count(first, run._journal.last):
            run._journal.write(kind="verdict", decision=why, **place)
            raise diagnose([first], run.work.world, run.work.log, why)
        run._journal.fault(decision=Message("it starts again"), **place)
        run._retries.rest(run._journal.part)
        run._agent.again()
        first = run._await_ready()
    run._writer.ended(run._holdings)


def _run_attempts(run: Supervisor) -> Attempt:
    """Runs generations one after the other until the run ends or cannot recover. Returns the last generation. An
    OSError in the supervisor itself counts like the failure of a rank."""
    recovers = False
    while True:
        try:
            if recovers:
                run._recover(run._now)
            run._generate()
        except OSError as error:
            run._now.failures[-1] = RankExit(
                -1, run._agent.outside.clock(), 1, words=Message("the supervisor failed: {error}", error=error)
            )
        if not run._heals(run._now):
            return run._now
        recovers = True


def _lower_memory_job(run: Supervisor) -> RankJob | None:
    """Returns the job under a plan that takes less memory, or None ([Note: lower memory] in restart_policy.py)."""
    if run.care.leaner is None:
        return None
    try:
        with report_if_overdue(lambda: run.note(Message("still searching for a plan that takes less memory"))):
            return run.care.leaner(run.work)
    except MeshwrightError as error:
        run.note(Message("cannot go on with less memory: {error}", error=error))
        return None


def _finish(run: Supervisor, now: Attempt) -> None:
    """Raises the error that failed or stopped the run: RankFailed, another MeshwrightError, or Interrupted. Returns
    after success. `now`: the last generation."""
    signals = run._stop.signals
    if now.failures and len(signals) < 2:
        instead = run.care.instead(run.work) if run._retries.hungry else ""
        raise diagnose(list(now.failures.values()), run.work.world, run.work.log, run._retries.verdict, instead)
    if signals and not run._begun:
        raise Interrupted(
            Message(
                "stopped by {reason} {early}; the same command starts again",
                reason=signals[0],
                early=run.early,
            )
        )
    # If no rank failed or stopped, the signal came too late: the run has completed its last step.
    if signals and (now.failures or now.stopped or run._stop.is_forced):
        if len(now.stopped) == run.work.world:
            text = Message(
                "stopped by {reason}: everything is saved; the same command goes on where this one stopped",
                reason=signals[0],
            )
        else:
            remedy = Message(
                " (the ranks did not save within {seconds:.0f} s: --set run.grace_period=N gives them N seconds)",
                seconds=run.grace_period,
            )
            text = Message(
                "stopped by {reason}: the step in progress was given up; the same command goes on from the last "
                "checkpoint, or from the start if there is none{remedy}",
                reason=signals[0],
                remedy="" if len(signals) > 1 else remedy,
            )
        raise Interrupted(text)
