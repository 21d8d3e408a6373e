"""What a supervised rank of `meshwright probe` runs: it joins the others, all measure, and rank 0 says the `Measurement`.

And what measures one device beside a run that has left it out: a moment of products of matrices.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from meshwright.base.lines import Message
from meshwright.parallel.device import own_device
from meshwright.probe.device import numbers
from meshwright.probe.machine import measure
from meshwright.train.rank import Channel, connect

SIZES = {"cpu": 512, "cuda": 4096}
"""Of a matrix."""

TIMES = 15


def probe(channel: Channel, payload: Message) -> int:
    """Returns its exit status."""
    with connect(channel.rank, channel.world, timeout=120.0):
        found = measure()
        if channel.rank == 0:
            channel.say("measured", measurement=found.model_dump(mode="json"))
    return 0


def speed(channel: Channel, payload: Message) -> int:
    """Says the seconds of a product on the device of `slot`, by the clock on the wall; returns its exit status. It joins nobody."""
    torch.set_num_threads(1)
    device = own_device()
    left = numbers(device.type)(SIZES[device.type], SIZES[device.type], device=device)
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        float(torch.mm(left, left)[0, 0])  # asked for, so that it is done
        seconds.append(time.perf_counter() - began)
    channel.say("speed", slot=payload["slot"], seconds=median(seconds))
    return 0
