"""Waits for lost nodes between two generations of a run on several machines. The supervisor uses it.

The wait has three stages. For `rejoin_timeout` seconds it waits for all devices. Then the run goes on with the devices
that are there, if these are at least `min_ranks`. Otherwise the wait goes on until there are `min_ranks` devices, for
at most JOIN_SECONDS from its beginning. Then the run ends as after a stop request: it starts once more under a plan for
the devices that are there, saves everything after one step, and ends with the exit code of Interrupted. If there is no
such plan, it ends at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message
from meshwright.core.node_wait import JOIN_SECONDS, WAIT_NOTE_SECONDS, ended_without_save, too_few_nodes, waiting_line
from meshwright.core.signals import StopRequest
from meshwright.elastic.devices import DeviceExclusion
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.restart_policy import FaultPolicy


@dataclass
class MissingNodes:
    """Waits for devices. The fields are parts of the supervisor; `heed` handles the events that arrive meanwhile."""

    agent: LocalAgent
    slots: DeviceExclusion
    journal: EventLog
    care: FaultPolicy
    stop: StopRequest
    heed: Callable[[IpcMessage], None]

    def wait(self, world: int, generation: int, tick: float) -> int | None:
        """Waits until there are devices for `world` ranks, as the module docstring describes. Returns None if the run
        goes on unchanged, otherwise the number of ranks with which it goes on. `generation`: the one that failed.
        `tick`: the longest wait for events in seconds. Raises Interrupted if the run ends at once."""
        clock, care = self.agent.outside.clock, self.care
        began = said = clock()
        places = self.slots.free(self.agent.slots)
        if places is None or places >= world:
            return None
        self.journal.note(
            Message(
                "the nodes have room for {places} of {world} ranks: waiting {seconds:.0f} s for another node",
                places=places,
                world=world,
                seconds=care.rejoin_timeout,
            )
        )
        limit = max(care.rejoin_timeout, JOIN_SECONDS)
        while (places := self.slots.free(self.agent.slots) or 0) < world and not self.stop.signals:
            now = clock()
            if now > began + (care.rejoin_timeout if places >= care.min_ranks else limit):
                break
            if now >= said + WAIT_NOTE_SECONDS:
                said = now
                self.journal.note(waiting_line(places, world, care.min_ranks, now - began, limit))
            for event in self.agent.events(tick):
                self.heed(event)
        self.journal.part("wait", clock() - began)
        if places >= world or self.stop.signals:
            return None
        if places < care.min_ranks:
            self._end_with(places, generation)
        return places

    def _end_with(self, places: int, generation: int) -> None:
        """Requests the end of a run that has room for only `places` ranks, fewer than `min_ranks`."""
        reason = too_few_nodes(places, self.care.min_ranks)
        decision = Message("the run saves everything and ends")
        self.journal.write(
            kind="verdict", generation=generation, step=self.journal.last, cause=reason, decision=decision
        )
        if self.care.replan is None:
            raise ended_without_save(reason)
        self.journal.note(Message("{reason}: the run saves everything and ends", reason=reason))
        self.stop.request(reason, self.agent.outside.clock() + JOIN_SECONDS)
