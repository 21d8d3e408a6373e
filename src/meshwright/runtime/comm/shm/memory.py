"""Memory shared by the ranks of one host, and fields on which these ranks wait. Collectives (collectives.py) and
messages between pipeline stages (pipeline/p2p.py) use both.

A segment is anonymous memory of one process (memfd). The other processes open it through /proc. After a crash there is
nothing to clean up. The total size is limited only by the memory of the host.

Each rank has one segment of 64-bit fields. Only this rank writes to the fields, and the other ranks read them. A
waiting rank sleeps on a field (futex) until the field reaches a value. The values of fields only grow. A field is
written after the data that it announces. x86 preserves the order of these writes. Machines with other processors do not
use shared memory.

Ranks in different network namespaces count as ranks of different hosts, so that they communicate over the links between
the namespaces.

Time of an all-reduce of 256 bytes on 2 cores (bench/exchange.py):

               shared memory   gloo
    2 ranks            20 us     240 us
    4 ranks           175 us   6,700 us
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.core.cgroup_limits import MAX_OPEN_FILES, raise_soft_file_limit
from meshwright.core.ipc import WAIT_INCREMENT
from meshwright.core.messages import Message
from meshwright.runtime.error_propagation import CURRENT_PROPAGATOR, gather_objects

SHARED_MEMORY_ENV = "MESHWRIGHT_SHARED"
"""Environment variable. The value 0 disables shared memory."""

HOST_ENV = "MESHWRIGHT_HOST"
"""Environment variable that simulates several hosts on one machine: ranks with different values count as ranks of
different hosts."""

FIELDS_PER_RANK = 1 << 14
"""Number of 64-bit fields of each rank. A 64-bit counter does not overflow in any run."""

PAGE_BYTES = 1 << 12
"""Page size of the operating system."""

YIELDS_BEFORE_SLEEP = 20
"""Number of times that a waiting rank yields its core before it sleeps."""

FUTEX_SLEEP_SECONDS = 0.1
"""Seconds after which a sleeping rank wakes and checks whether the awaited rank is alive."""

SHUTDOWN_TIMEOUT_SECONDS = 30.0
"""Maximum seconds that a rank waits at its end until the other ranks have read its memory."""

_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _WAKE_ALL = 202, 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("whole", ctypes.c_long), ("nano", ctypes.c_long))


class ShmSegment:
    """Anonymous memory of this process, `size` bytes. `number` identifies the segment in the process."""

    def __init__(self, size: int, number: int) -> None:
        self.number, self.size = number, size
        self.fd = os.memfd_create(f"meshwright-{number}")
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class SharedMemory:
    """The shared memory of this rank's host: the fields of all its ranks, and tensors that all its ranks can read.

    `rank`: the global rank of this process. `staging_bytes`: the total bytes of this rank's staging buffers. Tensors
    made by `zeros` do not count.
    """

    def __init__(self, rank: int, fields: ShmSegment, peers: dict[int, tuple[int, int]], timeout: float) -> None:
        """`peers` maps each rank of the host, including this rank, to the process id and the file descriptor of its
        fields.

        Raises:
            OSError: a file cannot be opened.
        """
        self.rank, self.timeout = rank, timeout
        self._propagator = CURRENT_PROPAGATOR.get()
        self._num_segments = fields.number
        self._own_fields, self._processes = fields, {other: process for other, (process, _) in peers.items()}
        self._start_times = {other: _process_state(process)[1] for other, process in self._processes.items()}
        self._maps = {
            other: fields.map if other == rank else _map_process_file(*location) for other, location in peers.items()
        }
        self.fields = {other: memoryview(mapped).cast("Q") for other, mapped in self._maps.items()}
        self._addresses = {
            other: ctypes.addressof(ctypes.c_char.from_buffer(mapped)) for other, mapped in self._maps.items()
        }
        self._system = ctypes.CDLL(None, use_errno=True).syscall
        self._sleep = ctypes.byref(_Timespec(0, int(FUTEX_SLEEP_SECONDS * 1e9)))
        self.waiting_field = memoryview(bytearray(8)).cast("Q")
        """One field, 0 if this rank does not wait. Otherwise 1 + the rank for which this rank waits, plus
        `WAIT_INCREMENT` for each unsuccessful check. Under a supervisor, the field is in the heartbeat memory that the
        supervisor reads."""
        self.staging_bytes = 0
        self._own: dict[int, ShmSegment] = {}
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}

    # --- segments

    def segment(self, size: int) -> ShmSegment:
        """Returns a new segment of `size` bytes."""
        self._num_segments += 1
        segment = ShmSegment(max(size, 1), self._num_segments)
        self._own[segment.bytes.data_ptr()] = segment
        self.staging_bytes += segment.size
        return segment

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a flat tensor of `numel` zeros that the other ranks can read. Its memory is freed with this
        object."""
        segment = self.segment(numel * dtype.itemsize)
        self.staging_bytes -= segment.size
        return segment.bytes[: numel * dtype.itemsize].view(dtype)

    def drop(self, segment: ShmSegment) -> None:
        """Frees a segment that no rank reads any more."""
        del self._own[segment.bytes.data_ptr()]
        self.staging_bytes -= segment.size

    def locate(self, tensor: torch.Tensor) -> tuple[ShmSegment, int] | None:
        """Returns the segment that contains `tensor`, and its offset in bytes. Returns None if the tensor is not in
        this rank's shared memory."""
        base = tensor.untyped_storage().data_ptr()
        mapped = self._own.get(base)
        # Segments are identified by their storage, because an empty tensor has no address.
        return None if mapped is None else (mapped, int(tensor.storage_offset()) * tensor.element_size())

    def map_segment(self, rank: int, number: int, file: int) -> torch.Tensor:
        """Returns the bytes of segment `number` of `rank`. The first call maps the segment, through the file descriptor
        `file` of that rank's process. Later calls return the same mapping."""
        key = (rank, number)
        if key not in self._mapped:
            self._mapped[key] = torch.frombuffer(_map_process_file(self._processes[rank], file), dtype=torch.uint8)
        return self._mapped[key]

    def map_file(self, rank: int, file: int) -> torch.Tensor:
        """Returns the bytes of the open file descriptor `file` of the process of `rank`, in a new mapping. `rank` may
        also be this rank."""
        return torch.frombuffer(_map_process_file(self._processes[rank], file), dtype=torch.uint8)

    def unmap(self, rank: int, number: int | None) -> None:
        """Unmaps segment `number` of `rank`, after `rank` has stopped using the segment."""
        self._mapped.pop((rank, number), None)  # type: ignore[arg-type]

    # --- fields of ranks

    def set_field(self, index: int, value: int) -> None:
        """Writes this rank's field `index` and wakes the ranks that sleep on it."""
        self.fields[self.rank][index] = value
        self._system(
            _SYS_FUTEX, ctypes.c_void_p(self._addresses[self.rank] + 8 * index), _FUTEX_WAKE, _WAKE_ALL, None, None, 0
        )

    def wait_for_field(self, rank: int, index: int, value: int) -> None:
        """Waits until field `index` of `rank` has reached `value`.

        Raises:
            ConnectionError: the process of `rank` ended first, the wait took longer than `timeout` seconds, or another
                rank has raised an error (`RemoteRankError`).
        """
        fields = self.fields[rank]
        if fields[index] >= value:
            return
        for _ in range(YIELDS_BEFORE_SLEEP):
            os.sched_yield()
            if fields[index] >= value:
                return
        address, began = ctypes.c_void_p(self._addresses[rank] + 8 * index), time.monotonic()
        self.waiting_field[0] = rank + 1
        while (now := fields[index]) < value:
            self._system(_SYS_FUTEX, address, _FUTEX_WAIT, ctypes.c_uint32(now & 0xFFFFFFFF), self._sleep, None, 0)
            if fields[index] < value:
                self.waiting_field[0] += WAIT_INCREMENT
                self._check(rank, time.monotonic() - began)
        self.waiting_field[0] = 0

    def drain(self, awaited: Iterable[tuple[int, int, int]]) -> None:
        """Waits for each (rank, field, value) until the field of that rank has reached the value. Stops waiting for a
        rank whose process has ended. Stops waiting for all ranks after SHUTDOWN_TIMEOUT_SECONDS, or if a rank has left
        a collective because of another rank's exception."""
        end = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        for rank, index, value in awaited:
            while (
                self.fields[rank][index] < value
                and self._is_alive(rank)
                and time.monotonic() < end
                and not self._ranks_diverged()
            ):
                time.sleep(0.001)

    def _check(self, rank: int, waited: float) -> None:
        if self._propagator is not None:
            self._propagator.poll(waited)
        if not self._is_alive(rank):
            raise self._lost(Message("connection closed by rank {rank}: its process ended", rank=rank))
        if waited > self.timeout:
            raise self._lost(
                Message(
                    "rank {rank} did not answer within {timeout:.0f} s: socket timeout", rank=rank, timeout=self.timeout
                )
            )

    def _lost(self, line: str) -> ConnectionError:
        error = ConnectionError(line)
        return error if self._propagator is None else self._propagator.connection_lost(error)

    def _ranks_diverged(self) -> bool:
        return self._propagator is not None and self._propagator.ranks_diverged()

    def _is_alive(self, rank: int) -> bool:
        state, born = _process_state(self._processes[rank])
        return state not in "ZX" and born == self._start_times[rank]


def _map_process_file(process: int, file: int) -> mmap.mmap:
    """Maps the file descriptor `file` of the process with id `process` into this process."""
    mine = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(mine, os.fstat(mine).st_size)
    finally:
        os.close(mine)


def _process_state(process: int) -> tuple[str, str]:
    """Returns the state letter and the start time of a process, or ("X", "") if the process does not exist."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


def shm_host_id() -> str:
    """Returns an id of the host. Processes with the same id can share memory. Returns '' if this process cannot share
    memory."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or os.environ.get(SHARED_MEMORY_ENV) == "0":
        return ""
    try:
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "user")]
        return " ".join(
            [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *names, os.environ.get(HOST_ENV, "")]
        ).strip()
    except OSError:
        return ""


def connect_shared_memory(timeout: float) -> tuple[SharedMemory | None, Sequence[str]]:
    """Returns the shared memory of this rank's host, and the host id of every rank. All ranks of the default process
    group call it. A rank that cannot share memory gets None and the host id ''. If one rank of a host cannot map the
    fields of the other ranks, no rank of this host can share memory."""
    rank, own = dist.get_rank(), shm_host_id()
    raise_soft_file_limit(MAX_OPEN_FILES)
    fields = ShmSegment(8 * FIELDS_PER_RANK, 0) if own else None
    cards = gather_objects((own, os.getpid(), fields.fd if fields else 0))
    host = None
    if fields is not None:
        try:
            host = SharedMemory(
                rank, fields, {other: card[1:] for other, card in enumerate(cards) if card[0] == own}, timeout
            )
        except OSError:
            own = ""
    identities = gather_objects(own)  # when this returns, every rank has opened the fields of all others
    refused = {card[0] for card, name in zip(cards, identities, strict=True) if not name}
    identities = ["" if card[0] in refused else card[0] for card in cards]
    return host if identities[rank] else None, identities
