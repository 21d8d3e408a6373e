"""Links as ports: what a rank sends leaves by its own port and comes in by that of the receiver; what shares a port shares its bandwidth.

    rate of a transfer = the least over its ports of (share of the bandwidth that is left) / (transfers on the port)

A collective is on the ports of all its members, in and out, from its start to its end. Two tiers of ports for each rank: to the
devices of its own domain and to those outside, as in `cost.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from meshwright.simulate.events import Clock, Work


class Tier(StrEnum):
    """Which link."""

    near = "near"
    far = "far"


class Port:
    """One direction of one link of one rank."""

    __slots__ = ("share", "users")

    def __init__(self) -> None:
        self.share = 1.0
        self.users: list[Transfer] = []


class Transfer:
    """Bytes on their way, as the seconds that they take alone; `pace` slows it from outside, where it shares a device with compute."""

    __slots__ = ("clock", "pace", "ports", "work")

    def __init__(self, clock: Clock, ports: Sequence[Port], seconds: float, done: Callable[[], None], pace: float = 1.0) -> None:
        self.clock = clock
        self.ports = ports
        self.pace = pace
        self.work = Work(seconds, self._leave(done))
        for port in ports:
            port.users.append(self)
        retime(ports)

    def _leave(self, done: Callable[[], None]) -> Callable[[], None]:
        def leave() -> None:
            for port in self.ports:
                port.users.remove(self)
            retime(self.ports)
            done()

        return leave

    def retime(self) -> None:
        rate = min((port.share / len(port.users) for port in self.ports), default=1.0)
        self.clock.at(self.work, rate * self.pace)


def retime(ports: Iterable[Port]) -> None:
    """Everything on `ports` goes on at the rate that it gets now."""
    for transfer in dict.fromkeys(transfer for port in ports for transfer in port.users):
        transfer.retime()
