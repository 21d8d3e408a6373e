"""Ranks that fail as they are told to: `train` is the loop of `meshwright train`, with faults at given places. Each
happens once in a folder.

payload = {"launch": ..., "faults": [{"rank": 1, "step": 7, "phase": "backward", "how": "SIGKILL", "delay": 0.01}],
"folder": ...}

No test is a race between the run and whoever is to break it: a fault that comes late has come LATEST steps on, and
behind a step after which the run is
asked for something (`asks`) ranks wait until they are.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import resource
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from hanging_disk import HangingDisk

import meshwright.train.loop as loop
import meshwright.train.model as models
import meshwright.train.recovery as recovery
import meshwright.train.sample as sample
from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.graph import ModelGraph
from meshwright.checkpoint import save as saving
from meshwright.core import storage
from meshwright.core.ipc import Heartbeat, HeartbeatField, RankPhase
from meshwright.data.loader import BatchLoader, TensorBatch
from meshwright.data.sampler import batch_index
from meshwright.models.registry import build_reference_model
from meshwright.runtime.build.passes import analyze
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.train import memory_checkpointer
from meshwright.train.loss_spike import LossSpikeDetector
from meshwright.train.rank_main import RankControl
from meshwright.train.trainer import Trainer

SIZES = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 8,
    "ffn": 64,
    "vocab": 258,
    "seq": 64,
    "kind": "llama",
}
FAULTS: list[dict[str, Any]] = []
PAUSE: list[float] = []
PACE: list[Pace] = []
POISON: list[int] = []
LEFT_OUT: list[list[int]] = []
ASKS: list[tuple[int, int]] = []
"""Behind which steps ranks wait until there are so many of them; 0: until they are asked to stop."""
CHANNEL: list[RankControl] = []
LATE: list[tuple[int, threading.Timer]] = []
"""Faults that are to come, each with the step that it was to come in."""
LATEST, WAIT = 2, 300.0
"""Steps on that a fault comes at the latest; seconds after which nobody waits any more for what is asked."""
STEP = [0]
TAKE = FlatParamGroup.accumulate_grad


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def read_once(model: torch.nn.Module, **more: Any) -> ModelGraph:
    """What the warm process has read of the usual model, which each rank of each run would read anew."""
    return ANATOMY if shapes(model) == SHAPES else analyze_model(model, **more)


USUAL = build_reference_model(SIZES)
SHAPES, ANATOMY = shapes(USUAL), analyze_model(USUAL)


class Doomed(Heartbeat):
    """A row of signs of life whose rank fails when it comes to the place of a fault."""

    def at(self, phase: RankPhase, step: int | None = None) -> None:
        super().at(phase, step)
        STEP[0] = self.read(HeartbeatField.step)
        if phase in (RankPhase.data, RankPhase.sample):
            self.await_late(phase is RankPhase.sample)
        if phase is RankPhase.data and step is not None:
            self.await_asked(step)
        if phase is RankPhase.backward and PACE:
            PACE[0].sleep()
        if phase is RankPhase.data and PAUSE:
            time.sleep(PAUSE[0])
        for fault in FAULTS:
            place = (fault["rank"], fault["step"], fault["phase"])
            if place == (self.rank, self.read(HeartbeatField.step), phase.name) and is_now(fault):
                begin(fault, self.read(HeartbeatField.step))

    def await_late(self, is_last: bool) -> None:
        """Until faults have come that are as late as they may be; all of them where no steps follow."""
        for step, timer in LATE:
            if is_last or self.read(HeartbeatField.step) > step + LATEST:
                timer.join()

    def await_asked(self, step: int) -> None:
        """Before `step`, with signs of life."""
        end = time.monotonic() + WAIT
        for after, world in ASKS:
            while (
                step == after + 1
                and (world != CHANNEL[0].world if world else not CHANNEL[0].stop)
                and time.monotonic() < end
            ):
                super().at(RankPhase.data)
                time.sleep(0.01)


def is_now(fault: dict[str, Any]) -> bool:
    """Whether the rank came to the place for the time that the fault names, the first one if none."""
    if fault.get("always"):
        return True
    for time_ in range(1, fault.get("times", 1) + 1):
        try:
            os.close(os.open(f"{fault['mark']}.{time_}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return time_ == fault.get("times", 1)
    return False


def begin(fault: dict[str, Any], step: int) -> None:
    if fault.get("delay"):
        LATE.append((step, threading.Timer(fault["delay"], happen, (fault["how"],))))
        LATE[-1][1].start()
    else:
        happen(fault["how"])


def happen(how: str) -> None:
    if how == "raise":
        raise ValueError("hidden 100 is not divisible by 3 heads")
    if how == "exit":
        os._exit(1)
    if how == "memory":
        raise torch.OutOfMemoryError("tried to allocate 512.00 GiB")
    if how == "flip":
        flip()
        return
    if how == "mismatch":
        all_reduce(torch.ones(3), the_trainer().mesh.world).wait()
        return
    if how.startswith("disk hangs"):
        storage.os = disk = HangingDisk()  # type: ignore[assignment, attr-defined]
        disk.answers.clear()
        threading.Timer(float(how.split()[-1]), disk.answers.set).start()
        return
    if how.startswith("clock"):
        turn(int(how.removeprefix("clock")))
        return
    if how == "store":
        [store] = [child for child in psutil.Process(os.getppid()).children() if child.name() == "mesh-store"]
        store.kill()
        return
    if how == "livelock":
        while True:
            time.sleep(0.01)
    if how == "lock":
        ctypes.PyDLL(None).sleep(1000)  # the interpreter's lock is held all the while
    os.kill(os.getpid(), signal.Signals[how])


class Pace:
    """A rank that computes `seconds` longer than it would, and so many times as long in all as the file slow-RANK of
    the run's folder says while there is one."""

    def __init__(self, folder: Path, rank: int, seconds: float) -> None:
        self.file, self.seconds, self.woke = folder / f"slow-{rank}", seconds, 0.0
        self.others: list[float] = []
        """Seconds of steps but for those that it slept, while it was well."""

    def sleep(self) -> None:
        times = 1.0
        with suppress(FileNotFoundError):
            times = float(self.file.read_text() or 1.0)
        if times == 1.0 and self.woke:
            self.others.append(time.monotonic() - self.woke)
        time.sleep(times * self.seconds + (times - 1.0) * median(self.others[-8:] or [0.0]))
        self.woke = time.monotonic()


def turn(seconds: int) -> None:
    """The clock of this process, as everything in it sees it (test_faults_soak_silent.py): the time of day only."""
    before = time.time(), time.monotonic()
    ctypes.c_long.in_dll(ctypes.CDLL(None), "clock_skew").value += seconds
    assert abs(time.time() - before[0] - seconds) < 600.0 and time.monotonic() < before[1] + 600.0


class Stale:
    """In place of `saving.Item`: at some steps what one tensor of this rank was at the save before, as a cache with an
    error in it would give."""

    def __init__(self, rank: int, steps: dict[str, int]) -> None:
        """`steps`: the rank that does so in each of them."""
        self.steps, self.item, self.before = (
            [int(step) for step, hit in steps.items() if hit == rank],
            saving.PendingTensor,
            dict[str, torch.Tensor](),
        )
        self.chance = random.Random(rank)
        self.chosen: tuple[int, str] = (0, "")

    def __call__(self, key: str, dtype: str, shape: tuple[int, ...], size: int, tensor: Any) -> Any:
        if STEP[0] in self.steps and self.chosen[0] != STEP[0]:
            self.chosen = (
                STEP[0],
                self.chance.choice([key for key in self.before if key.startswith(("model/", "optimizer/"))]),
            )
        old = self.before.get(key)
        self.before[key] = tensor().clone()
        return self.item(key, dtype, shape, size, (lambda: old) if (STEP[0], key) == self.chosen else tensor)  # type: ignore[arg-type, return-value]


def the_trainer() -> Trainer:
    [trainer] = [each for each in gc.get_objects() if type(each) is Trainer]
    return trainer


def flip() -> None:
    """One bit of one weight of this rank's states, in the middle of a number."""
    data = max((unit.optim_shard.flat for unit in the_trainer().engine.zero.units), key=torch.numel).view(torch.int32)
    data[data.numel() // 3] ^= 1 << 20


def take(unit: FlatParamGroup, name: str, gradient: torch.Tensor) -> None:
    """One bit of one number of one gradient of this rank, or the number, before it is added to those of others."""
    for fault in FAULTS:
        place = (fault["rank"], fault["step"], fault["phase"])
        if gradient.ndim == 2 and place == (unit.layout.context.rank, STEP[0], "gradient") and is_now(fault):
            gradient = gradient.clone()
            if fault["how"] == "nan":
                gradient.view(-1)[gradient.numel() // 3] = torch.nan
            else:
                gradient.view(-1).view(torch.int32)[gradient.numel() // 3] ^= (1 << fault["bit"]) - (
                    1 << 32 if fault["bit"] == 31 else 0
                )
    TAKE(unit, name, gradient)


class Poisoned(BatchLoader):
    """Batches of the data's order whose labels are noise, and batches that are left out from the beginning."""

    def rows(self, step: int, first: int = 0, count: int | None = None) -> TensorBatch:
        found = super().rows(step, first, count)
        if batch_index(step, self.skipped_batches) in POISON:
            noise = torch.Generator().manual_seed(step * self.batch + first)
            found["labels"] = torch.randint(0, 256, found["labels"].shape, generator=noise)
        return found


class Preset(LossSpikeDetector):
    """Knows from the beginning what is to be left out."""

    def read(self, saved: dict[str, Any]) -> None:
        super().read({"left_out": LEFT_OUT, **saved})


def train(channel: RankControl, payload: dict[str, Any]) -> int:
    hit = payload.get("poisoned", channel.rank) == channel.rank
    POISON[:], LEFT_OUT[:] = payload.get("poison", []) if hit else [], payload.get("left_out", [])
    recovery.LossSpikeDetector = Preset  # type: ignore[misc]
    models.BatchLoader = Poisoned  # type: ignore[misc]
    analyze.analyze_model = read_once
    FAULTS[:] = [
        {**fault, "mark": f"{payload['folder']}/fault-{number}"}
        for number, fault in enumerate(payload["faults"])
        if payload["launch"]["plan"]["recompute"] != fault.get("spares")
    ]
    PAUSE[:] = [payload["pause"]] if payload["pause"] else []
    ASKS[:], CHANNEL[:] = payload.get("asks", []), [channel]
    PACE[:] = [Pace(Path(payload["folder"]), channel.rank, payload["pace"])] if "pace" in payload else []
    if "stale" in payload:
        saving.PendingTensor = Stale(channel.rank, payload["stale"])  # type: ignore[misc, assignment]
    if "crowded" in payload:
        recovery.SAVE_RETRY_SECONDS = 0.01
        storage.free_bytes = Crowded(Path(payload["folder"]) / "checkpoints", payload["crowded"])  # type: ignore[assignment]
    sample.SAMPLE_TOKENS = 2
    if os.environ.get("MESHWRIGHT_CHECKS") == "never":
        loop.MEMORY_TRACE_STEP, loop.RECOVERY_STEPS = -1, 0  # tracing a step takes as long as all others
    loop.Heartbeat = Doomed  # type: ignore[misc]
    FlatParamGroup.accumulate_grad = take if any(fault["phase"] == "gradient" for fault in FAULTS) else TAKE  # type: ignore[method-assign]
    return loop.train(channel, payload["launch"])


class Crowded:
    """In place of `storage.free_bytes`: a disk with no room beside more than `most` checkpoints."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most

    def __call__(self, path: Path) -> int:
        return 0 if len(list(self.folder.glob("step-*"))) > self.most else 2**40


def refuse(path: Path) -> OSError:
    """In place of `storage.remove_if_possible`."""
    return OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))


def fail(*_: Any, **__: Any) -> None:
    raise ValueError("nobody expected this")


class Disk:
    """In place of `storage.write_file`: a file that cannot be written, or the end of the process after the first one
    that can."""

    def __init__(self, how: str) -> None:
        self.how, self.write_file, self.count = how, storage.write_file, 0

    def __call__(self, path: Path, blocks: Any, durable: bool = True) -> int:
        self.count += 1
        if self.how == "broken" and self.count > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if self.how == "killed" and self.count > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.write_file(path, blocks, durable)


def write(channel: RankControl, payload: dict[str, Any]) -> int:
    how = payload["launch"].get("disk", {}).get(str(payload["step"]), "")
    if how == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    elif how == "slow":
        time.sleep(0.5)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        memory_checkpointer.save_checkpoint = fail  # type: ignore[assignment]
    elif how == "not empty":
        storage.remove_if_possible = refuse  # type: ignore[assignment]
    elif how == "strange":
        channel.say("gossip", words="nobody knows this kind")
    elif how:
        storage.write_file = Disk(how)  # type: ignore[assignment]
    return memory_checkpointer.write(channel, {**payload, "launch": payload["launch"]["launch"]})
