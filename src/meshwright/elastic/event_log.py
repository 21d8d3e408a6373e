"""Writes the event log of a run, for the supervisor. The file events.jsonl in the run folder has one JSON line for each
event: faults, recoveries, saves, changes of the ranks. The callback `note` receives a readable line.

A disk that is full or does not answer does not stop the run: events are buffered in memory until the disk accepts them.
An event is reported to the user before it is written.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core import storage
from meshwright.core.append_file import AppendOnlyFile
from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message, join_messages, mark_msgid, term
from meshwright.core.units import show_seconds
from meshwright.spec.record import EVENTS_FILE_NAME, RunEvent

SAVE_KINDS = ("write", "saved", "unsaved")
"""Messages that say for how long a save has blocked training."""

NODE_EVENT_TEXTS = {
    "node_joined": mark_msgid("node {name} has joined, with room for {devices} ranks"),
    "node_lost": mark_msgid("node {name} {why}"),
    "node_leaving": mark_msgid("node {name} is asked to leave ({signal})"),
    "refusal": "{line}",
    "notice": "{line}",
}


def record_event(folder: Path, note: Callable[[str], None], **fields: Any) -> None:
    """Records one event in the run folder `folder`, in a process that has no event log open. `fields`: those of
    RunEvent. `note` receives a line if the event cannot be written."""
    with contextlib.closing(EventLog(folder, note)) as log:
        log.write(**fields)


@dataclass
class EventLog:
    """Writes events to the file in `folder` and passes readable lines to `note`. It also times recoveries: from the
    fault to the end of the first new step. `last` is the newest step that ranks have reported."""

    folder: Path
    note: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    last: int = 0
    _decided: float | None = None
    _heard: float | None = None
    """The end of the last period that goodput accounts for: the start of training, the end of the last reported step,
    or the end of a save after it."""
    _unfinished: float = 0.0
    """The seconds for which the interrupted step had run before the fault was detected."""
    _begun: float = 0.0
    _parts: dict[str, float] = field(default_factory=dict)
    _source: str = ""
    _from: int = 0
    _generation: int = 0
    _saved: int = 0
    """The step of the last checkpoint on disk."""
    _unsaved: int = 0
    """The number of saves that have failed since the last checkpoint on disk."""
    _is_behind: bool = False
    """Whether the user knows that events cannot be written."""

    def __post_init__(self) -> None:
        self._lines = AppendOnlyFile(self.folder / EVENTS_FILE_NAME)

    def write(self, **fields: Any) -> RunEvent:
        """Appends an event with the fields of RunEvent and the current time. Returns the event."""
        return self._write(RunEvent(at=time.time(), **fields))

    def _write(self, event: RunEvent) -> RunEvent:
        self._heed_disk(self._lines.append(event.to_line()))
        return event

    def look(self) -> None:
        """Writes buffered events, and reports if the disk accepts none. The supervisor calls it several times a
        second."""
        if self._lines.is_waiting:
            self._heed_disk(self._lines.flush())

    def _heed_disk(self, error: OSError | None) -> None:
        if (error is not None) == self._is_behind:
            return
        self._is_behind = error is not None
        if error is None:
            self.note(Message("the events are written"))
            return
        cause = Message("events cannot be written: {failure}", failure=storage.describe_failure(error))
        self.degraded(cause, Message("they are kept in memory, and the run goes on"))

    def close(self) -> None:
        """Closes the file and reports events that could not be written."""
        if (error := self._lines.close()) is not None:
            line = Message(
                "{lost} events are lost: {failure}", lost=self._lines.lost, failure=storage.describe_failure(error)
            )
            self.note(line)

    def fault(self, **fields: Any) -> None:
        """Records a fault and starts to time the recovery. If a recovery is in progress, the fault belongs to it.
        `fields`: those of RunEvent."""
        event = RunEvent(at=time.time(), kind="fault", **fields)
        cause = event.cause
        if event.rank is not None:
            cause = Message("rank {rank} {cause}", rank=event.rank, cause=cause)
        phase = term("phase", event.phase)
        if event.step:
            cause = Message("{cause} in step {step}, {phase}", cause=cause, step=event.step, phase=phase)
        elif phase:
            cause = Message("{cause} while it was in {phase}", cause=cause, phase=phase)
        self.note(Message("{cause}: {decision}", cause=cause, decision=event.decision))
        self._write(event)
        if self._decided is not None:  # the recovery in progress contains its detection
            self.part("detection", event.detection)
        self.decide(event.detection)

    def heed_node(self, event: IpcMessage) -> bool:
        """Records an event of a node: it has joined, is leaving or was lost, or a connection was refused. Returns
        whether the set of devices may have changed."""
        if event["event"] == "degraded":
            self.degraded(event["line"], event.get("decision", ""))
            return False
        msgid = NODE_EVENT_TEXTS.get(event["event"])
        if msgid is not None:
            self.note(Message(msgid, **event))
        if msgid is None or "name" not in event:
            return False
        self.write(kind=event["event"], node=event["name"])
        return True

    def degraded(self, cause: str, decision: str = "", rank: int | None = None, generation: int = 0) -> None:
        """Records the failure of something that training does not need, such as a background thread. The run continues
        with less protection or after a delay."""
        line = join_messages("; ", (cause, decision)) if decision else cause
        self.note(line if rank is None else Message("rank {rank}: {line}", rank=rank, line=line))
        self.write(kind="degraded", rank=rank, generation=generation, step=self.last, cause=cause, decision=decision)

    def decide(self, detection: float = 0.0) -> None:
        """Starts to time a recovery, unless one is in progress. No step runs from now until the recovery ends.
        `detection`: the seconds before now that count as the detection of the fault."""
        if self._decided is None:
            self._decided = self.clock()
            since = self._decided - self._heard if self._heard is not None else 0.0
            self._unfinished = max(0.0, since - detection)

    def resize(self, before: int, after: int, plan: str, generation: int, same: bool = False) -> None:
        """Records a change of ranks or plan: `after` instead of `before` ranks, a plan that takes less memory, or other
        devices. `same`: whether the plan is unchanged. `plan`: its name."""
        cause = (
            Message("{before} to {after} ranks", before=before, after=after)
            if before != after
            else Message("other devices")
            if same
            else Message("less memory")
        )
        less = Message("on the devices that are connected") if same else Message("under a plan that takes less memory")
        how = less if before == after else Message("with {after} instead of {before} ranks", after=after, before=before)
        how = Message("{how}, plan {plan}", how=how, plan=plan) if plan else how
        self.note(Message("goes on {how}", how=how))
        self.write(kind="resize", generation=generation, step=self.last, cause=cause, plan=plan)
        self.decide()

    def unplanned(self, world: int, why: str, generation: int) -> None:
        """Records that there is no plan for the requested number `world` of ranks, because of `why`. The run continues
        unchanged."""
        self.note(Message("cannot go on with {world} ranks: {why}", world=world, why=why))
        self.write(
            kind="verdict",
            generation=generation,
            step=self.last,
            cause=Message("{world} ranks: {why}", world=world, why=why),
            decision=Message("goes on as before"),
        )

    def part(self, name: str, seconds: float) -> None:
        """Adds `seconds` to the part `name` of the recovery in progress, such as `plan` or `pause`."""
        if self._decided is not None:
            self._parts[name] = self._parts.get(name, 0.0) + seconds

    def hear(self, message: IpcMessage, generation: int) -> None:
        """Records what a message from rank 0 says: the start or end of a recovery, a completed step, a save, a repaired
        replica, or a loss spike. A message about damaged data may come from any rank."""
        self._keep_time(message, generation)
        if message["kind"] == "saved":
            self._saved, self._unsaved = message["step"], 0
            self.write(kind="save", step=message["step"], seconds=message.get("waited", 0.0), generation=generation)
        if message["kind"] == "unsaved":
            self._not_saved(message, generation)
        if message["kind"] == "ended" and message["after"]:
            self.write(kind="ended", step=message["step"], seconds=message["after"], generation=generation)
        if message["kind"] == "divergence":
            self.write(
                kind="divergence",
                generation=generation,
                rank=message["rank"],
                step=message["step"],
                cause=message["line"],
            )
        if message["kind"] == "bad_data":
            self.write(
                kind="bad_data",
                generation=generation,
                step=self.last + 1,
                cause=message["line"],
                decision=Message("reads other samples instead"),
            )
        if message["kind"] == "spike":
            step, to = message["step"], message["to"]
            decision = Message("rolled back and skipped the batches")
            self.write(
                kind="spike",
                generation=generation,
                step=step,
                lost=step - to,
                cause=message["line"],
                decision=decision,
                batches=message["batches"],
            )
            self.last = min(self.last, to)

    def _keep_time(self, message: IpcMessage, generation: int) -> None:
        """Times the recovery in progress, and keeps the end of the last step and of its save."""
        now = self.clock()
        if message["kind"] == "begin" and self._decided is not None:
            for name, seconds in message.get("spent", {}).items():
                self.part(name, seconds)
            self._begun, self._source, self._from, self._generation = (
                now,
                message.get("source", ""),
                message["step"],
                generation,
            )
        if message["kind"] == "record":
            step, now = message["record"]["step"], now - message.get("late", 0.0)
            if self._decided is not None and step > self._from and step > self.last:
                self._recovered(now)
            elif self._decided is not None and step == self._from:
                # The last step had ended, but its record arrives only now. So its time was not lost.
                spent = message["record"]["seconds"] + message["record"].get("between_seconds", 0.0)
                self._unfinished = max(0.0, self._unfinished - spent)
            self.last = max(self.last, step)
        if message["kind"] in ("begin", "record"):
            self._heard = now
        if message["kind"] in SAVE_KINDS and self._heard is not None and not message.get("overlapped"):
            self._heard = min(now, self._heard + message.get("waited", 0.0))
        if message["kind"] == "ended" and self._decided is not None:
            self._recovered(now)  # the interrupted step was the last one

    def _not_saved(self, message: IpcMessage, generation: int) -> None:
        """Records a failed save. From the second failure in a row on, the note names the last checkpoint on disk."""
        self._unsaved += 1
        since = Message("step {saved}", saved=self._saved) if self._saved else Message("the start of this command")
        more = (
            Message(
                "; {unsaved} saves in a row have failed, and no checkpoint since {since} is on disk",
                unsaved=self._unsaved,
                since=since,
            )
            if self._unsaved > 1
            else ""
        )
        self.note(
            Message(
                "no checkpoint at step {step}: {why}; training goes on{more}",
                step=message["step"],
                why=message["why"],
                more=more,
            )
        )
        self.write(
            kind="unsaved",
            generation=generation,
            step=message["step"],
            cause=message["why"],
            seconds=message["waited"],
            decision=Message("training goes on"),
        )

    def _recovered(self, now: float) -> None:
        assert self._decided is not None
        seconds = now - self._decided
        parts = {**self._parts, "step": now - self._begun}
        parts["start"] = max(0.0, seconds - sum(parts.values()))
        if self._unfinished:
            parts["unfinished"] = self._unfinished
        lost = max(0, self.last - self._from)
        source = {
            "memory": Message("in-memory checkpoint"),
            "disk": Message("checkpoint on disk"),
            "": Message("step 0"),
        }[self._source]
        steps = Message("{lost} step lost" if lost == 1 else "{lost} steps lost", lost=lost)
        self.note(
            Message(
                "restored from {source} in {seconds}, {steps}",
                source=source,
                seconds=show_seconds(seconds),
                steps=steps,
            )
        )
        self.write(
            kind="recovery",
            generation=self._generation,
            step=self._from,
            source=self._source,
            lost=lost,
            seconds=seconds,
            parts={name: round(value, 6) for name, value in parts.items()},
        )
        self._decided, self._parts = None, {}
