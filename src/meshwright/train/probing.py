"""What a supervised rank of `meshwright probe` runs: it joins the others, all measure, and rank 0 says the `Measurement`."""

from __future__ import annotations

from meshwright.base.lines import Message
from meshwright.probe.machine import measure
from meshwright.train.rank import Channel, connect


def probe(channel: Channel, payload: Message) -> int:
    """Returns its exit status."""
    connection = connect(channel.rank, channel.world, timeout=120.0)
    try:
        found = measure()
        if channel.rank == 0:
            channel.say("measured", measurement=found.model_dump(mode="json"))
    finally:
        connection.close()
    return 0
