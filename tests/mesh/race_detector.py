"""Finds accesses of streams and host threads to one memory that nothing orders (data races), on the device that
recording_backend.py plays. Each stream and each thread has a vector clock; launches, events, waits, and the starts and
results of threads order them. Memory that is freed must not be in use by another stream than the one that allocated it:
CUDA's allocator gives it to the next kernel of that stream. Freed pinned memory is safe: its allocator waits."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from recording_backend import RecordedEvent, RecordedStream, RecordingBackend
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


Access = tuple[Actor, int, str]
"""The actor of an access, its time and the operation."""
Span = tuple[int, int]
"""The first byte of a storage that a tensor uses, and the byte after the last."""


def span(tensor: torch.Tensor) -> Span:
    first = tensor.storage_offset() * tensor.itemsize
    steps = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (steps + 1) * tensor.itemsize


class Memory:
    """One storage, with the last writes of its bytes, and the reads since then."""

    def __init__(self, owner: Actor) -> None:
        self.owner, self.is_host = owner, False
        self.reference: weakref.ref[torch.UntypedStorage] | None = None
        self.writes: dict[tuple[Actor, Span], Access] = {}
        self.reads: dict[tuple[Actor, Span], Access] = {}

    def allocate(self, owner: Actor) -> None:
        """Notes that kernels of `owner` which are already launched may use the last contents of the memory."""
        self.owner = owner
        self.writes, self.reads = {(owner, ALL_BYTES): (owner, owner.clock[owner], "allocation")}, {}

    def conflicts(self, bytes_: Span, writes: bool) -> list[Access]:
        """Returns the accesses that must precede a read or write of these bytes."""
        tables = (self.writes, self.reads) if writes else (self.writes,)
        return [
            access
            for table in tables
            for (_, (first, end)), access in table.items()
            if first < bytes_[1] and bytes_[0] < end
        ]

    def add(self, bytes_: Span, writes: bool, access: Access) -> None:
        if writes:
            for table in (self.writes, self.reads):
                for key in [key for key in table if bytes_[0] <= key[1][0] and key[1][1] <= bytes_[1]]:
                    del table[key]
        (self.writes if writes else self.reads)[access[0], bytes_] = access


ALL_BYTES = (0, sys.maxsize)


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
        self.resize = torch.UntypedStorage.resize_

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

    def order(self, wait: str, later: Actor, earlier: Clock) -> bool:
        with self.lock:
            runs = self.runs(wait)
            if runs:
                join(later.clock, earlier)
        return runs

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
            memory.is_host, memory.writes = True, {}
        return buffer

    def pin(self, memory: torch.Tensor, device: torch.device) -> bool:
        self.touch("pin")
        if self.pins:
            with self.lock:
                self.memory(memory).is_host = True
        return self.pins

    # --- accesses

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside the context, operations of this thread are not noted."""
        self.local.is_silent = True
        try:
            yield
        finally:
            self.local.is_silent = False

    def memory(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.memories:
            self.memories[key] = memory = Memory(self.current)
            memory.reference = weakref.ref(storage, lambda _: self.freed(key))
        return self.memories[key]

    def allocated(self, result: Any) -> None:
        """Notes new memory."""
        with self.lock:
            for each in result if isinstance(result, list | tuple) else [result]:
                if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in self.memories:
                    self.memory(each).allocate(self.current)

    def resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        """Frees the memory of a storage, and allocates other memory for it."""
        with self.lock:
            memory = self.memories.get(storage._cdata)
            if memory is not None:
                self.check_freed(memory)
                memory.allocate(self.current)
        return self.resize(storage, size)

    def run(
        self,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        blocks: bool,
        stream: Actor | None = None,
    ) -> None:
        """Notes an operation. Operations on host memory alone run in the host thread, others in `stream`, by default
        the current one. `blocks`: whether the host waits for the operation."""
        with self.lock:
            used = [
                (self.memory(each), span(each), writes_)
                for tensors, writes_ in ((reads, False), (writes, True))
                for each in tensors
                if each.numel()
            ]
            on_host = bool(used) and all(memory.is_host for memory, _, _ in used)
            actor = stream or (self.host if on_host else self.current)
            join(actor.clock, self.host.clock)
            actor.clock[actor] += 1
            access = (actor, actor.clock[actor], name)
            for memory, bytes_, writes_ in used:
                self.check(actor.clock, memory.conflicts(bytes_, writes_), access)
            for memory, bytes_, writes_ in used:
                memory.add(bytes_, writes_, access)
            if blocks:
                join(self.host.clock, actor.clock)

    def check(self, clock: Clock, before: Sequence[Access], access: Access) -> None:
        for each in before:
            if clock.get(each[0], 0) < each[1] and not (each[0].is_host and access[0].is_host):
                self.races.add(f"{access[2]} in {access[0].name} after {each[2]} in {each[0].name}")

    def freed(self, key: int) -> None:
        with self.lock:
            memory = self.memories.pop(key, None)
            if memory is not None:
                self.check_freed(memory)

    def check_freed(self, memory: Memory) -> None:
        next_kernel = dict(memory.owner.clock)
        for each in list(self.hosts):  # whichever thread freed it has waited before
            join(next_kernel, dict(each.clock))
        if not memory.is_host:
            self.check(next_kernel, memory.conflicts(ALL_BYTES, True), (memory.owner, 0, "the next owner"))


Backend.by_type["cpu"] = CpuBackend()  # defining a subclass registers it


PASS_ON = ("async_collectives.py", "copy_streams.py", "timers.py")


def site() -> str:
    """The function that asks for a wait, outside of the modules that pass it on."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        passes_on = path.endswith(PASS_ON) or frame.f_code.co_name == "timed_wait"
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


@functools.cache
def signature(function: Any) -> tuple[dict[str, bool], bool]:
    """Returns whether an operation writes each of its arguments, and whether it returns a part of one."""
    schema = function._schema
    written = {each.name: each.alias_info is not None and each.alias_info.is_write for each in schema.arguments}
    return written, any(each.alias_info is not None for each in schema.returns)


class Accesses(TorchDispatchMode):
    """Tells the detector what each operation of this thread reads and writes."""

    def __init__(self, detector: RaceDetector) -> None:
        super().__init__()
        self.detector = detector

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(self.detector.local, "is_silent", False):
            return function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        arguments, returns_alias = signature(function)
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        given = [*zip(arguments.values(), args, strict=False)]
        given += [(arguments[key], value) for key, value in (kwargs or {}).items()]
        for is_written, value in given:
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, torch.Tensor):
                    (writes if is_written else reads).append(each)
        is_view = not writes and returns_alias
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

    def listed(tensor: torch.Tensor) -> Any:
        detector.run("tolist", [tensor], [], False)  # no other order may rely on this wait of the host
        return as_list(tensor)

    arrived, as_list = D2HStaging.parts, torch.Tensor.tolist
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
            mock.patch.object(torch.Tensor, "tolist", listed),
            mock.patch.object(torch.UntypedStorage, "resize_", lambda storage, size: detector.resized(storage, size)),
            mock.patch.object(dry_run, "_disable_current_modes", hidden_from_others),
            Accesses(detector),
        ):
            yield detector
    finally:
        Backend.by_type["cpu"] = before
        detector.memories.clear()
