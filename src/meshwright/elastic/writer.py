"""The process that writes a checkpoint beside training, as the supervisor sees it: one at a time, and none is left out.

Rule: a save that is asked for while another one is written begins when that one has ended; only then do ranks hear that nothing is written any
more. It may outlive the ranks that asked for it, and their plan: their copies stay in memory until it has read them. It ends with the zygote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.base.lines import Message
from meshwright.elastic.holdings import Holdings
from meshwright.elastic.journal import Journal


@dataclass
class Writer:
    """`hear` gets what the process says, `note` what a person is to be told."""

    journal: Journal
    hear: Callable[[int, Message], None]
    note: Callable[[str], None]
    lives: bool = False
    """Whether it may still have to read copies."""
    _next: Callable[[], None] | None = None
    _seconds: float = 0.0

    def begin(self, start: Callable[[], None]) -> None:
        """`start` starts the process, now or once the one before has ended."""
        if self.lives:
            self._next = start
            return
        self.lives = True
        start()

    def heed(self, event: Message, generation: int, holdings: Holdings) -> None:
        """What it says, and its end."""
        if event["event"] == "said":
            self._seconds = float(event["message"].get("seconds", 0.0))
            self.journal.hear(event["message"], generation)
            self.hear(0, event["message"])
        if event["event"] == "ended":
            if event["status"]:
                self.note(f"no checkpoint: the process that writes it ended with status {event['status']}; training goes on")
            self.ended(holdings)

    def ended(self, holdings: Holdings) -> None:
        """It has ended, or whoever forked it has."""
        self.lives, seconds, self._seconds = False, self._seconds, 0.0
        if self._next is not None:
            start, self._next = self._next, None
            self.begin(start)
        else:
            holdings.written(seconds)
