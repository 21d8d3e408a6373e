"""Supervises the checkpoint writer, a process that writes in-memory snapshots to disk while training continues. The
supervisor (supervisor.py) owns it.

There is at most one writer at a time. If a save is requested during another save, it begins when that save has ended.
Only when the last requested save has ended are ranks informed that no save is in progress. The writer may outlive the
ranks that requested the save, and their plan: the snapshots stay in memory until the writer has read them. If the fork
server ends, the writer ends.

Guarantees: training continues whatever happens to the writer. If the writer raises an exception, is killed or waits for
a disk that does not respond, only its checkpoint is lost. The loss is reported, logged and counted. If this happens
while the writer removes older checkpoints, its own checkpoint is saved, and the event is `degraded`. A writer without
progress for `limit` seconds is killed. If it cannot end because its disk call is not interruptible, it is abandoned. An
abandoned writer reads no more snapshots.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.core.ipc import HeartbeatField, IpcMessage, RankPhase
from meshwright.core.messages import Message, mark_msgid
from meshwright.core.units import show_seconds
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.proc_stats import ProcStats, read_proc_stats
from meshwright.elastic.shared_files import SharedFileStore

WRITER_RANK = -1
"""The rank number of the writer in messages."""

NO_PROGRESS_SECONDS = 10.0
"""A writer that has made no progress for this time is reported to the user."""

BLOCKED_SECONDS = 5.0
"""A checkpoint that has blocked training for this time is reported to the user."""

KILL_SECONDS = 5.0
"""A killed writer that has not ended after this time is abandoned."""

STALL_TEXTS = {
    "writes": mark_msgid(
        "the checkpoint of step {step} has made no progress for {silent}{state}; given up after {limit:.0f} s"
    ),
    "failed": mark_msgid(
        "the checkpoint of step {step} is not saved; removing what it left has made no progress for {silent}{state}; "
        "given up after {limit:.0f} s"
    ),
    "saved": mark_msgid(
        "the checkpoint of step {step} is saved; removing older checkpoints has made no progress for {silent}{state}; "
        "given up after {limit:.0f} s"
    ),
}
"""The message about a writer without progress, by what it has done so far."""

SAVED_THEN_STALLED = mark_msgid(
    "the checkpoint of step {step} is saved; removing older checkpoints made no progress for {silent}"
)


@dataclass
class BlockedTraining:
    """Reports that a checkpoint blocks training: first after BLOCKED_SECONDS, then each time the blocked time has
    doubled."""

    since: float | None = None
    limit: float = BLOCKED_SECONDS

    def look(self, holdings: SharedFileStore, now: float, note: Callable[[str], None]) -> None:
        """Checks at the time `now` whether rank 0 is in the phase `save`. It is called several times a second."""
        pulse = holdings.pulse(0)
        if pulse.read(HeartbeatField.phase) != RankPhase.save:
            self.since = None
        elif self.since is None:
            self.since, self.limit = now, BLOCKED_SECONDS
        elif now - self.since > self.limit:
            self.limit *= 2
            step, waited = pulse.read(HeartbeatField.step), show_seconds(now - self.since)
            note(
                Message(
                    "step {step}: training has waited {waited} so far for a checkpoint to be written",
                    step=step,
                    waited=waited,
                )
            )


@dataclass
class WriterSupervisor:
    """Starts and watches the writer. `hear` receives its messages, `note` receives lines for the user. `command` sends
    a command to the fork server. `journal`: the event log."""

    journal: EventLog
    hear: Callable[[int, IpcMessage], None]
    note: Callable[[str], None]
    command: Callable[..., None] = lambda *_, **__: None
    limit: float = 60.0
    """The writer is killed after this number of seconds without progress."""
    clock: Callable[[], float] = time.monotonic
    signs: Callable[[int], ProcStats] = read_proc_stats
    lives: bool = False
    """Whether a save is in progress, so that its snapshots must stay in memory."""
    _next: IpcMessage | None = None
    _start: Callable[[IpcMessage], None] = lambda _: None
    _request: IpcMessage = field(default_factory=dict)
    """The message with which rank 0 requested the current save. It has the step, and the seconds for which the save has
    blocked training so far."""
    _saved: bool = False
    _why: str = ""
    _seconds: float = 0.0
    _process: int = 0
    _before: ProcStats = field(default_factory=ProcStats)
    _moved: float = 0.0
    _said: bool = False
    _killed: float | None = None
    _standing: BlockedTraining = field(default_factory=BlockedTraining)

    def begin(self, start: Callable[[IpcMessage], None], request: IpcMessage) -> None:
        """Starts the writer for `request`, by `start(request)`. If a save is in progress, this happens after its
        end."""
        self._start = start
        if self.lives:
            self._next = request
            return
        self.lives, self._request, self._saved, self._why, self._process = True, request, False, "", 0
        self._moved, self._said, self._killed = self.clock(), False, None
        start(request)

    def heed(self, event: IpcMessage, generation: int, holdings: SharedFileStore) -> None:
        """Handles an event of the fork server about the writer. `generation`: the current one, for the event log.
        `holdings`: the store whose ranks learn about the end of the save."""
        kind = event["event"]
        if not self.lives:
            return  # the event is the exit of an abandoned writer
        if kind == "started":
            self._process, self._moved = event["pid"], self.clock()
        elif kind == "refused":
            lives = Message(
                "process {pid}, which wrote an earlier checkpoint, still waits for its disk and cannot be killed",
                pid=event.get("pid"),
            )
            why = event.get("why")
            self._why = Message("its process was not started: {why}", why=why) if why else lives
            self._end(generation, holdings)
        elif kind == "said" and self._process:
            self._heed_words(event["message"], generation)
        elif kind == "ended" and self._process:
            if not self._saved:
                words = mark_msgid("the process that writes it ended with status {status}")
                self._why = self._why or Message(words, status=event["status"])
            self._end(generation, holdings)

    def _heed_words(self, message: IpcMessage, generation: int) -> None:
        if message["kind"] == "saved":
            self._saved, self._seconds = True, float(message.get("seconds", 0.0))
            self.journal.hear({**message, "waited": self._request.get("waited", 0.0), "overlapped": True}, generation)
        if message["kind"] == "unsaved":
            self._why = message["why"]
        elif message["kind"] == "failed":
            self._why = message["message"] if message["known"] else f"{message['error']}: {message['message']}"
            if self._saved:
                words = mark_msgid("the checkpoint of step {step} is saved; removing older checkpoints failed: {why}")
                self._why = Message(words, step=self._request.get("step", 0), why=self._why)
        else:
            self.hear(0, message)

    def look(self, generation: int, holdings: SharedFileStore) -> None:
        """Reports and kills a writer without progress, and reports blocked training. The supervisor calls it several
        times a second. Arguments as for `heed`."""
        self._standing.look(holdings, self.clock(), self.note)
        if not self.lives or not self._process:
            return
        now, signs = self.clock(), self.signs(self._process)
        if (signs.moved, signs.computed) != (self._before.moved, self._before.computed):
            self._before, self._moved, self._said = signs, now, False
            return
        # On an overloaded machine, time in the run queue is no lack of progress.
        silent = now - self._moved - (signs.in_line - self._before.in_line)
        if silent > NO_PROGRESS_SECONDS and not self._said:
            self._said = True
            state = {
                "T": Message(": a signal has stopped its process"),
                "D": Message(": its disk does not answer"),
            }.get(signs.state, "")
            self.note(
                Message(
                    STALL_TEXTS["saved" if self._saved else "failed" if self._why else "writes"],
                    step=self._request.get("step", 0),
                    silent=show_seconds(silent),
                    state=state,
                    limit=self.limit,
                )
            )
        if silent > self.limit and self._killed is None:
            self._killed = now
            words = (
                SAVED_THEN_STALLED
                if self._saved
                else mark_msgid("the process that writes it made no progress for {silent}")
            )
            why = Message(words, step=self._request.get("step", 0), silent=show_seconds(silent))
            self._why = self._why or why
            self.command("signal", WRITER_RANK, signal=int(signal.SIGKILL))
        elif self._killed is not None and now > self._killed + KILL_SECONDS:
            self._end(generation, holdings)

    def _end(self, generation: int, holdings: SharedFileStore) -> None:
        if not self._saved:
            waited = self._request.get("waited", 0.0)
            self.journal.hear(
                {
                    "kind": "unsaved",
                    "step": self._request.get("step", 0),
                    "why": self._why,
                    "waited": waited,
                    "overlapped": True,
                },
                generation,
            )
        elif self._why:
            self.journal.degraded(self._why, Message("tried again after the next checkpoint"), generation=generation)
        self.ended(holdings)

    def ended(self, holdings: SharedFileStore) -> None:
        """Records that the writer has ended, alone or with the fork server. Starts the next save if one was
        requested."""
        self.lives, seconds, self._seconds = False, self._seconds, 0.0
        if self._next is not None:
            requested, self._next = self._next, None
            self.begin(self._start, requested)
        else:
            holdings.written(seconds)
