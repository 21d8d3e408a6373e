"""Ranks whose device is slow while a file of the run's folder says so: slow-2 makes the device of slot 2 compute longer, whichever rank has it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import meshwright.train.loop as loop
from meshwright.base.pulse import Phase, Pulse
from meshwright.train import probing
from meshwright.train.rank import Channel

NAP = 0.2
FOLDER: list[Path] = []


def nap() -> None:
    if (FOLDER[0] / f"slow-{os.environ['LOCAL_RANK']}").exists():
        time.sleep(NAP)


class Slowed(Pulse):
    """Sleeps where backward begins, which counts as computing: a little in any case, so that a device can be measured meanwhile."""

    def at(self, phase: Phase, step: int | None = None) -> None:
        super().at(phase, step)
        if phase is Phase.backward:
            time.sleep(0.03)
            nap()


def train(channel: Channel, payload: dict[str, Any]) -> int:
    FOLDER[:] = [Path(payload["run"]["folder"])]
    loop.Pulse = Slowed  # type: ignore[misc]
    return loop.train(channel, payload)


def speed(channel: Channel, payload: dict[str, Any]) -> int:
    """As slow as the device: each product sleeps too."""
    FOLDER[:] = [Path(payload["launch"]["run"]["folder"])]
    probing.TIMES, multiply = 3, probing.torch.mm
    probing.torch.mm = lambda *args: (nap(), multiply(*args))[1]  # type: ignore[assignment]
    status = probing.speed(channel, payload)
    (FOLDER[0] / "measured").touch()
    return status
