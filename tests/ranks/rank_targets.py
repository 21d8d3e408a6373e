"""What ranks do in the tests of the supervisor: `module:function` targets, called in a forked rank."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.core.errors import InputError
from meshwright.train.rank_main import RankControl, join_process_groups


def say_sum(channel: RankControl, payload: dict) -> int:
    connection = join_process_groups(channel.rank, channel.world)
    total = torch.tensor([float(channel.rank + 1)])
    dist.all_reduce(total)
    channel.say("sum", value=total.item(), given=payload["given"], generation=os.environ["MESHWRIGHT_GENERATION"])
    connection.close()
    return 0


def fail(channel: RankControl, payload: dict) -> int:
    """All ranks reduce for ever; the victim fails on the way as `payload["how"]` says."""
    join_process_groups(channel.rank, channel.world)
    for step in range(10_000):
        if channel.rank == payload["victim"] and step == 3:
            if payload["how"] == "raise":
                raise ValueError("hidden 100 is not divisible by 3 heads")
            if payload["how"] == "input":
                raise InputError("data file 'x.txt' is empty")
            if payload["how"] == "exit":
                os._exit(9)
            if payload["how"] == "read":
                gone = torch.ones(64)
                gone.untyped_storage().resize_(0)
                gone.sum()
            os.kill(os.getpid(), signal.Signals[payload["how"]])
        dist.all_reduce(torch.ones(4))
        time.sleep(0.01)
    return 0


def until_stopped(channel: RankControl, payload: dict) -> int:
    """Says that it is there, then waits; `payload["deaf"]` ranks do not heed a request to stop."""
    join_process_groups(channel.rank, channel.world)
    channel.say("begin", pid=os.getpid())
    while not channel.stop or payload.get("deaf"):
        time.sleep(0.01)
    return 75


def lose_then_tell(channel: RankControl, payload: dict) -> int:
    """Rank 0 loses a connection, at once; rank 2 says so a moment later, and rank 1, whose fault it is, tells when the
    supervisor has heard of it."""
    heard = Path(payload["heard"])
    if channel.rank == 0:
        raise RuntimeError("Connection reset by peer")
    while channel.rank == 1 and not heard.exists():
        time.sleep(0.01)
    if channel.rank == 1:
        raise ValueError("hidden 100 is not divisible by 3 heads")
    time.sleep(0.3)
    channel.say("begin", pid=os.getpid())
    time.sleep(600)
    return 0


def speak_and_go(channel: RankControl, payload: dict) -> int:
    for number in range(payload["words"]):
        channel.say("word", number=number)
    return 0
