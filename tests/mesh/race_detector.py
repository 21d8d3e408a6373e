"""Finds accesses of streams and host threads to one memory that nothing orders (data races), on the device that
recording_backend.py plays. Each stream and each thread has a vector clock; launches, events, waits, and the starts and
results of threads order them. Memory that is freed must not be in use by another stream than the one that allocated it:
CUDA's allocator gives it to the next kernel of that stream. Freed pinned memory is safe: its allocator waits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from recording_backend import RecordedEvent, RecordedStream, RecordingBackend
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshwright.analysis import dry_run
from meshwright.runtime.backend import Backend, CpuBackend
from meshwright.runtime.offload.swap_file import SwapFile
from meshwright.train.device_copies import D2HStaging

Clock = dict["Actor", int]


def join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        clock[actor] = max(time, clock.get(actor, 0))


class Actor:
    """A stream or a host thread. `clock`: the last operation of each actor that precedes its next one."""

    def __init__(self, name: str, is_host: bool = False) -> None:
        self.name, self.is_host, self.clock = name, is_host, Clock({self: 0})
        self.clock[self] = 0


class Memory:
    """One storage, with the accesses since its last write and that write, as (actor, time, operation)."""

    def __init__(self, storage: torch.UntypedStorage, owner: Actor) -> None:
        self.reference, self.owner, self.is_host = StorageWeakRef(storage), owner, False
        self.write: tuple[Actor, int, str] | None = None
        self.reads: list[tuple[Actor, int, str]] = []


class RaceDetector(RecordingBackend):
    """The backend. `dropped`: a wait that is left out (`site`). `pins`: whether the system pins memory that a process
    has mapped. `waits`: the waits that ran. `races`: what it found."""

    def __init__(self, dropped: str = "", pins: bool = True) -> None:
        super().__init__()
        self.pins = pins
        self.dropped, self.waits, self.races = dropped, set[str](), set[str]()
        self.lock = threading.RLock()
        self.compute = Actor("compute")
        self.streams, self.hosts = [self.compute], list[Actor]()
        self.memories: dict[int, Memory] = {}

    # --- who runs

    @property
    def host(self) -> Actor:
        if not hasattr(self.local, "host"):
            self.local.host = Actor(threading.current_thread().name, is_host=True)
            self.hosts.append(self.local.host)
        return self.local.host  # type: ignore[no-any-return]

    @property
    def current(self) -> Actor:
        return getattr(self.local, "stream", self.compute)

    def stream(self, device: torch.device) -> Any:
        self.touch("stream")
        self.streams.append(Actor(f"stream {len(self.streams)}"))
        return TimedStream(self, self.streams[-1])

    def current_stream(self, device: torch.device | None = None) -> Any:
        return TimedStream(self, self.current)

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        self.touch("use_stream")
        before, self.local.stream = self.current, stream.actor
        try:
            with Accesses(self):
                yield
        finally:
            self.local.stream = before

    # --- waits

    def runs(self, wait: str) -> bool:
        """Notes a wait, and returns whether it runs."""
        place = f"{wait} of {site()}"
        self.waits.add(place)
        return place != self.dropped

    def order(self, wait: str, later: Actor, earlier: Clock) -> None:
        with self.lock:
            self.look_for_freed()
            if self.runs(wait):
                join(later.clock, earlier)

    def synchronize(self, device: torch.device) -> None:
        self.touch("synchronize")
        for stream in self.streams:
            self.order("synchronize", self.host, stream.clock)

    def event(self, timing: bool = False, blocking: bool = False) -> Any:
        return TimedEvent(self)

    def host_buffer(self, shape: int | Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        buffer = super().host_buffer(shape, dtype)
        with self.lock:
            memory = self.memory(buffer)
            memory.is_host, memory.write = True, None
        return buffer

    def pin(self, memory: torch.Tensor, device: torch.device) -> bool:
        self.touch("pin")
        if self.pins:
            with self.lock:
                self.memory(memory).is_host = True
        return self.pins

    # --- accesses

    def memory(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        return self.memories.setdefault(storage._cdata, Memory(storage, self.current))

    def allocated(self, result: Any) -> None:
        """Notes new memory. Kernels of its stream that are already launched may use its last contents."""
        with self.lock:
            self.look_for_freed()
            for each in result if isinstance(result, list | tuple) else [result]:
                if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in self.memories:
                    memory, actor = self.memory(each), self.current
                    memory.write = (actor, actor.clock[actor], "allocation")

    def run(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], blocks: bool) -> None:
        """Notes an operation. Operations on host memory alone run in the host thread, others in the current stream.
        `blocks`: whether the host waits for the operation."""
        with self.lock:
            self.look_for_freed()
            read, written = ([self.memory(each) for each in tensors if each.numel()] for tensors in (reads, writes))
            on_host = bool(read or written) and all(each.is_host for each in (*read, *written))
            actor = self.host if on_host else self.current
            join(actor.clock, self.host.clock)
            actor.clock[actor] += 1
            access = (actor, actor.clock[actor], name)
            for each in read:
                self.check(actor.clock, [each.write], access)
                each.reads.append(access)
            for each in written:
                self.check(actor.clock, [each.write, *each.reads], access)
                each.write, each.reads = access, []
            if blocks:
                join(self.host.clock, actor.clock)

    def check(self, clock: Clock, before: Sequence[tuple[Actor, int, str] | None], access: tuple[Any, ...]) -> None:
        for each in before:
            if each is not None and clock.get(each[0], 0) < each[1] and not (each[0].is_host and access[0].is_host):
                self.races.add(f"{access[2]} in {access[0].name} after {each[2]} in {each[0].name}")

    def look_for_freed(self) -> None:
        for key, memory in list(self.memories.items()):
            if memory.reference.expired():
                del self.memories[key]
                next_kernel = dict(memory.owner.clock)
                for each in list(self.hosts):  # whichever thread freed it has waited before
                    join(next_kernel, dict(each.clock))
                if not memory.is_host:
                    self.check(next_kernel, [memory.write, *memory.reads], (memory.owner, 0, "the next owner"))


Backend.by_type["cpu"] = CpuBackend()  # defining a subclass registers it


PASS_ON = ("async_collectives.py", "copy_streams.py", "timers.py")


def site() -> str:
    """The function that asks for a wait, outside of the modules that pass it on."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        passes_on = (
            path.endswith(("async_collectives.py", "copy_streams.py", "timers.py"))
            or frame.f_code.co_name == "timed_wait"
        )
        if "/meshwright/" in path and not passes_on:
            return f"{path.rpartition('/')[2]}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "the test"


class TimedStream(RecordedStream):
    def __init__(self, backend: RaceDetector, actor: Actor) -> None:
        super().__init__(backend)
        self.detector, self.actor = backend, actor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimedStream) and other.actor is self.actor

    def __hash__(self) -> int:
        return hash(self.actor)

    def wait_stream(self, stream: Any) -> None:
        self.detector.order("wait_stream", self.actor, stream.actor.clock)

    def record_event(self) -> TimedEvent:
        event = TimedEvent(self.detector)
        event.record(self)
        return event


class TimedEvent(RecordedEvent):
    def __init__(self, backend: RaceDetector) -> None:
        super().__init__(backend)
        self.detector, self.clock = backend, Clock()

    def record(self, stream: Any = None) -> None:
        with self.detector.lock:
            self.clock = dict((self.detector.current if stream is None else stream.actor).clock)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.detector.touch("synchronize")
        self.detector.order("synchronize", self.detector.host, self.clock)

    def wait(self, stream: Any = None) -> None:
        self.detector.order("wait_event", self.detector.current if stream is None else stream.actor, self.clock)


ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
KEEPS = {"set_", "resize_", "detach"}
READS_VALUE = {"_local_scalar_dense", "equal", "is_nonzero"}


class Accesses(TorchDispatchMode):
    """Tells the detector what each operation of this thread reads and writes."""

    def __init__(self, detector: RaceDetector) -> None:
        super().__init__()
        self.detector = detector

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, name = function._schema, function.overloadpacket.__name__
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(each, (kwargs or {}).get(each.name)) for each in schema.arguments[len(args) :]]
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, torch.Tensor):
                    (writes if written else reads).append(each)
        is_view = not writes and any(each.alias_info is not None for each in schema.returns)
        result = function(*args, **(kwargs or {}))
        if name in ALLOCATES:
            self.detector.allocated(result)
        if is_view or name in ALLOCATES or name in KEEPS:
            return result
        known = {each.untyped_storage()._cdata for each in (*reads, *writes)}
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in known:
                writes.append(each)
        asynchronous = name == "copy_" and ((len(args) > 2 and args[2]) or (kwargs or {}).get("non_blocking"))
        hosts = {self.detector.memory(each).is_host for each in (*reads, *writes)}
        self.detector.run(name, reads, writes, name in READS_VALUE or (len(hosts) == 2 and not asynchronous))
        return result


@contextmanager
def detected_races(dropped: str = "", pins: bool = True) -> Iterator[RaceDetector]:
    """Inside the context, CPU tensors are on a device whose races are found."""
    before, detector = Backend.by_type["cpu"], RaceDetector(dropped, pins)
    submit, result, start, wait = (
        ThreadPoolExecutor.submit,
        Future.result,
        threading.Thread.start,
        threading.Thread.join,
    )

    def ordered(function: Callable[..., Any], ends: Clock) -> Callable[..., Any]:
        begins = dict(detector.host.clock)

        def run(*arguments: Any, **more: Any) -> Any:
            join(detector.host.clock, begins)
            try:
                with Accesses(detector):
                    return function(*arguments, **more)
            finally:
                join(ends, detector.host.clock)

        return run

    def submitted(pool: Any, function: Any, *arguments: Any, **more: Any) -> Any:
        ends = Clock()
        future: Any = submit(pool, ordered(function, ends), *arguments, **more)
        future.ends = ends
        return future

    def resulting(future: Any, timeout: Any = None) -> Any:
        value = result(future, timeout)
        join(detector.host.clock, getattr(future, "ends", {}))
        return value

    def started(thread: Any) -> None:
        thread.ends = Clock()
        thread.run = ordered(thread.run, thread.ends)
        start(thread)

    def joined(thread: Any, timeout: Any = None) -> None:
        wait(thread, timeout)
        join(detector.host.clock, getattr(thread, "ends", {}))

    def moved(kind: str) -> Callable[..., Any]:
        move = getattr(SwapFile, kind)

        def call(file: Any, at: int, data: torch.Tensor) -> None:
            move(file, at, data)
            detector.run(f"file {kind}", [data] * (kind == "write"), [data] * (kind == "read"), True)

        return call

    def parts(staging: D2HStaging, source: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        for at, part in arrived(staging, source):
            detector.run("memmove", [part], [], False)
            yield at, part

    @contextmanager
    def hidden_from_others() -> Iterator[None]:
        with _disable_current_modes(), Accesses(detector):
            yield

    arrived = D2HStaging.parts
    Backend.by_type["cpu"] = detector
    try:
        with (
            mock.patch.object(ThreadPoolExecutor, "submit", submitted),
            mock.patch.object(Future, "result", resulting),
            mock.patch.object(threading.Thread, "start", started),
            mock.patch.object(threading.Thread, "join", joined),
            mock.patch.object(D2HStaging, "parts", parts),
            mock.patch.object(SwapFile, "read", moved("read")),
            mock.patch.object(SwapFile, "write", moved("write")),
            mock.patch.object(dry_run, "_disable_current_modes", hidden_from_others),
            Accesses(detector),
        ):
            yield detector
    finally:
        Backend.by_type["cpu"] = before
