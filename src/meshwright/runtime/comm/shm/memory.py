"""Memory that the ranks of one host share, and the words that they wait on. What stands on it: lanes.py (collectives),
wire.py (messages).

A `Segment` is anonymous memory of one process (memfd) that the others open through /proc: nothing to clean up, whatever
dies, and no
limit but the host's memory. Each rank has one segment of words that only it writes; the others read it and sleep on a
word until it has
come to the value that they wait for (futex; words only grow). A value is written after the data that it announces; x86
keeps that order, so other machines do
without. Ranks in other network namespaces count as other hosts: the links between them are to be used, not passed by.

With 2 ranks on 2 cores a sum of 256 bytes took 20 us where gloo took 240; with 4 ranks 175 us where gloo took 6,700
(bench/exchange.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.core.heartbeat import WAIT_INCREMENT
from meshwright.runtime.comm.error_propagation import CURRENT_PROPAGATOR, gather_objects

SHARED_MEMORY_ENV = "MESHWRIGHT_SHARED"
"""Environment variable: 0 leaves shared memory unused."""

HOST_ENV = "MESHWRIGHT_HOST"
"""Environment variable: ranks with unlike values count as ranks of unlike hosts, to try on one machine what happens
between several."""

FIELDS_PER_RANK = 1 << 14
"""Words of 8 bytes in the segment that a rank speaks through: they count for longer than any run."""

PAGE_BYTES = 1 << 12
"""Bytes that the system gives out at once."""

YIELDS_BEFORE_SLEEP = 20
"""Times that a waiting rank gives its core away before it sleeps."""

FUTEX_SLEEP_SECONDS = 0.1
"""Seconds of sleep after which it looks whether the other rank still lives."""

SHUTDOWN_TIMEOUT_SECONDS = 30.0
"""Seconds that a rank which is through waits for others to read the last of its memory."""

MAX_OPEN_FILES = 1 << 16
"""Descriptors that a rank asks for: every mapping keeps one, a unit has several, and 1,024 is the usual limit."""

_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _WAKE_ALL = 202, 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("whole", ctypes.c_long), ("nano", ctypes.c_long))


class ShmSegment:
    """Anonymous memory of this process; `number` is its own among all that this process ever makes."""

    def __init__(self, size: int, number: int) -> None:
        self.number, self.size = number, size
        self.fd = os.memfd_create(f"meshwright-{number}")
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.fd)


class SharedMemory:
    """The ranks of this host: their words, and tensors in memory that they can read. `rank` is this one's global
    number.

    `passing`: bytes that this rank holds for what is on its way to others, beyond the tensors made by `zeros`.
    """

    def __init__(self, rank: int, words: ShmSegment, others: dict[int, tuple[int, int]], timeout: float) -> None:
        """`others`: process and file of the words of each rank, this one included. Raises OSError where one may not be
        opened."""
        self.rank, self.timeout = rank, timeout
        self._propagator = CURRENT_PROPAGATOR.get()
        self._num_segments = words.number
        self._own_fields, self._processes = words, {other: process for other, (process, _) in others.items()}
        self._start_times = {other: _process_state(process)[1] for other, process in self._processes.items()}
        self._maps = {
            other: words.map if other == rank else _map_process_file(*place) for other, place in others.items()
        }
        self.fields = {other: memoryview(found).cast("Q") for other, found in self._maps.items()}
        self._addresses = {
            other: ctypes.addressof(ctypes.c_char.from_buffer(found)) for other, found in self._maps.items()
        }
        self._system = ctypes.CDLL(None, use_errno=True).syscall
        self._sleep = ctypes.byref(_Timespec(0, int(FUTEX_SLEEP_SECONDS * 1e9)))
        self.waiting_field = memoryview(bytearray(8)).cast("Q")
        """One word: 1 + the rank that this one waits for, 0 while it waits for none. Who watches this rank gives it a
        word that he sees."""
        self.staging_bytes = 0
        self._own: dict[int, ShmSegment] = {}
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}

    # --- memory
    # ---------------------------------------------------------------------------------------------------------------

    def segment(self, size: int) -> ShmSegment:
        """New memory of `size` bytes."""
        self._num_segments += 1
        made = ShmSegment(max(size, 1), self._num_segments)
        self._own[made.bytes.data_ptr()] = made
        self.staging_bytes += made.size
        return made

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros that the other ranks can read where it lies. It lives as long as this object."""
        made = self.segment(numel * dtype.itemsize)
        self.staging_bytes -= made.size
        return made.bytes[: numel * dtype.itemsize].view(dtype)

    def drop(self, segment: ShmSegment) -> None:
        """Forget memory that nobody reads any more."""
        del self._own[segment.bytes.data_ptr()]
        self.staging_bytes -= segment.size

    def locate(self, tensor: torch.Tensor) -> tuple[ShmSegment, int] | None:
        """Where `tensor` lies, if in this rank's shared memory: segment and offset in bytes."""
        base = tensor.untyped_storage().data_ptr()
        found = self._own.get(base)
        return (
            None if found is None else (found, int(tensor.storage_offset()) * tensor.element_size())
        )  # an empty tensor has no address

    def map_segment(self, rank: int, number: int, file: int) -> torch.Tensor:
        """Bytes of segment `number` of `rank`."""
        key = (rank, number)
        if key not in self._mapped:
            self._mapped[key] = torch.frombuffer(_map_process_file(self._processes[rank], file), dtype=torch.uint8)
        return self._mapped[key]

    def map_file(self, rank: int, file: int) -> torch.Tensor:
        """Bytes of a file of memory that `rank` has open, mapped anew; it may be this rank's own."""
        return torch.frombuffer(_map_process_file(self._processes[rank], file), dtype=torch.uint8)

    def unmap(self, rank: int, number: int | None) -> None:
        """Unmap a segment that its owner no longer uses."""
        self._mapped.pop((rank, number), None)  # type: ignore[arg-type]

    # --- words ----------------------------------------------------------------------------------------------------------------

    def set_field(self, at: int, value: int) -> None:
        """Write this rank's word `at` and wake who sleeps on it."""
        self.fields[self.rank][at] = value
        self._system(
            _SYS_FUTEX, ctypes.c_void_p(self._addresses[self.rank] + 8 * at), _FUTEX_WAKE, _WAKE_ALL, None, None, 0
        )

    def wait_for_field(self, rank: int, at: int, value: int) -> None:
        """Wait until word `at` of `rank` has come to `value`. ConnectionError when that process ends first, or takes
        longer than the timeout."""
        words = self.fields[rank]
        if words[at] >= value:
            return
        for _ in range(YIELDS_BEFORE_SLEEP):
            os.sched_yield()
            if words[at] >= value:
                return
        address, began = ctypes.c_void_p(self._addresses[rank] + 8 * at), time.monotonic()
        self.waiting_field[0] = rank + 1
        while (now := words[at]) < value:
            self._system(_SYS_FUTEX, address, _FUTEX_WAIT, ctypes.c_uint32(now & 0xFFFFFFFF), self._sleep, None, 0)
            if words[at] < value:
                self.waiting_field[0] += WAIT_INCREMENT
                self._check(rank, time.monotonic() - began)
        self.waiting_field[0] = 0

    def drain(self, awaited: Iterable[tuple[int, int, int]]) -> None:
        """Wait until each (rank, word, value) has come, or that rank's process ended, or PATIENCE is over."""
        end = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        for rank, at, value in awaited:
            while (
                self.fields[rank][at] < value
                and self._is_alive(rank)
                and time.monotonic() < end
                and not self._ranks_diverged()
            ):
                time.sleep(0.001)

    def _check(self, rank: int, waited: float) -> None:
        if self._propagator is not None:
            self._propagator.poll(waited)
        if not self._is_alive(rank):
            raise self._lost(f"connection closed by rank {rank}: its process ended")
        if waited > self.timeout:
            raise self._lost(f"rank {rank} did not answer within {self.timeout:.0f} s: socket timeout")

    def _lost(self, line: str) -> ConnectionError:
        error = ConnectionError(line)
        return error if self._propagator is None else self._propagator.connection_lost(error)

    def _ranks_diverged(self) -> bool:
        return self._propagator is not None and self._propagator.ranks_diverged()

    def _is_alive(self, rank: int) -> bool:
        state, born = _process_state(self._processes[rank])
        return state not in "ZX" and born == self._start_times[rank]


def _map_process_file(process: int, file: int) -> mmap.mmap:
    """Another process's anonymous memory."""
    mine = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(mine, os.fstat(mine).st_size)
    finally:
        os.close(mine)


def _process_state(process: int) -> tuple[str, str]:
    """State letter and start time of a process; ("X", "") when there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


def shm_host_id() -> str:
    """The same text for processes that can share memory; empty where none can."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or os.environ.get(SHARED_MEMORY_ENV) == "0":
        return ""
    try:
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "user")]
        return " ".join(
            [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *names, os.environ.get(HOST_ENV, "")]
        ).strip()
    except OSError:
        return ""


def _raise_open_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (most := min(hard, MAX_OPEN_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connect_shared_memory(timeout: float) -> tuple[SharedMemory | None, Sequence[str]]:
    """This rank's host, if it has one, and the identity of every rank's, "" for none. All ranks of the default process
    group call it."""
    rank, own = dist.get_rank(), shm_host_id()
    _raise_open_file_limit()
    words = ShmSegment(8 * FIELDS_PER_RANK, 0) if own else None
    cards = gather_objects((own, os.getpid(), words.fd if words else 0))
    host = None
    if words is not None:
        try:
            host = SharedMemory(
                rank, words, {other: card[1:] for other, card in enumerate(cards) if card[0] == own}, timeout
            )
        except OSError:
            own = ""
    identities = gather_objects(own)  # after it every rank has opened what it needs
    refused = {card[0] for card, name in zip(cards, identities, strict=True) if not name}
    identities = ["" if card[0] in refused else card[0] for card in cards]
    return host if identities[rank] else None, identities
