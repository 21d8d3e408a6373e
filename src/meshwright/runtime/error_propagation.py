"""Propagates the exception of one rank to the ranks that wait for it. `parallelize` and the trainer use it.

A collective call is a function that every rank calls (`parallelize`, `Trainer.step`, ...). If one rank raises inside
the call, the other ranks would wait for this rank forever. So the raising rank writes one line into the store of the
default process group. A rank that waits longer than STORE_POLL_SECONDS reads the store at this interval and raises the
error that it finds. During shorter waits the store is not read.

Only waits of the host are interrupted. A thread reads the store, because a read blocks for seconds if the link to the
store fails, and a rank that waits must still report that it waits (elastic/hang_detector.py). The code that waits for
shared memory polls what the thread has read (shm/memory.py). A wait for NCCL never blocks the host, so no code reads
the store during it.

[Note: waits inside gloo] A wait for gloo blocks inside the library. To interrupt the wait, the thread starts a receive
that times out immediately. gloo then closes all connections of this rank in the process group. The group cannot be used
afterwards. Source: gloo/transport/tcp/unbound_buffer.cc, `waitRecv`.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from meshwright.core.errors import (
    InputError,
    Interrupted,
    MeshwrightError,
    NothingFits,
    PlanRefused,
    VerificationFailed,
)

T = TypeVar("T")

OOM_ERRORS = ("can't allocate memory", "out of memory")
"""Substrings of OOM errors without a separate exception class: torch's on a CPU, the driver's for pinned memory."""

STORE_POLL_SECONDS = 0.2
"""Seconds from the beginning of a wait to the first read of the store, and from one read to the next."""

BARRIER_POLL_SECONDS = 0.01
"""Seconds between two reads of the store while a rank waits, after an exception, for the other ranks to raise too."""

BARRIER_TIMEOUT_SECONDS = 1800.0
"""Maximum seconds for which a rank waits, after an exception, for the other ranks to raise too."""

MAX_IDLE_POLLS = 25
"""The thread that reads the store ends after this number of consecutive intervals without a wait."""

MAX_MESSAGE_CHARACTERS = 200
"""Maximum number of characters of the propagated message of an exception outside of PROPAGATED_ERROR_CLASSES."""

PROPAGATED_ERROR_CLASSES = {
    kind.__name__: kind
    for kind in (MeshwrightError, InputError, PlanRefused, NothingFits, VerificationFailed, Interrupted)
}
"""Exceptions of these classes are raised with their own class on other ranks. All others become MeshwrightError."""

ERROR_KEY, CALL_COUNT_KEY, BROKEN_GROUP_KEY = "error", "meshwright/parallelize", "meshwright/broken"
"""Keys of the store.

- ERROR_KEY: the error in the collective calls of one `parallelize` and its trainer.
- CALL_COUNT_KEY: the number of `parallelize` calls of each rank.
- BROKEN_GROUP_KEY: the error after which ranks have closed gloo connections.
"""


class ErrorRecord(NamedTuple):
    """The exception that `rank` raised in its collective call number `call`. `kind` is the name of its class if
    PROPAGATED_ERROR_CLASSES contains the class, '' otherwise."""

    call: int
    rank: int
    kind: str
    message: str
    exit_code: int = 1
    is_final: bool = False
    """Whether a rank has left a collective because of this error. If so, no later call can succeed."""

    def to_exception(self, is_earlier: bool) -> MeshwrightError:
        """Returns the exception that other ranks raise. `is_earlier`: whether `rank` raised in an earlier collective
        call than the present one.

        >>> ErrorRecord(3, 1, "PlanRefused", "plan pp2: no").to_exception(False)
        PlanRefused('rank 1: plan pp2: no')
        >>> ErrorRecord(3, 1, "", "ValueError: no").to_exception(False)
        MeshwrightError('rank 1 raised ValueError: no')
        """
        line = f"rank {self.rank}: {self.message}" if self.kind else f"rank {self.rank} raised {self.message}"
        if is_earlier:
            line = (
                "an error in an earlier call left the ranks in different collectives, so they cannot continue "
                f"({line}): restart all ranks"
            )
        made = (MeshwrightError if is_earlier else PROPAGATED_ERROR_CLASSES.get(self.kind, MeshwrightError))(line)
        made.exit_code, made.raised_by = self.exit_code, self.rank
        return made


class RemoteRankError(ConnectionError):
    """Interrupts a wait that would never end, because another rank has raised. `ErrorPropagator.call` converts this
    exception to the error that users get."""

    def __init__(self, record: ErrorRecord, is_earlier: bool) -> None:
        self.record, self.is_earlier = record, is_earlier
        super().__init__(str(record.to_exception(is_earlier)))


class _GlooWait(NamedTuple):
    process: dist.ProcessGroup | None
    began: float


class ErrorPropagator:
    """Propagates exceptions in the collective calls of one `parallelize` and its trainer.

    Numbers the calls, so that a call has the same number on all ranks. Without a store there is only one rank, and this
    object does nothing.
    """

    def __init__(self, store: dist.Store | None = None, prefix: str = "", rank: int = 0) -> None:
        self._store, self._key, self._rank = store, f"{prefix}/{ERROR_KEY}", rank
        self.report_alive: Callable[[], None] = lambda: None
        """Reports to a supervisor that this rank is alive. Work of several minutes before a step must call it
        repeatedly, because the supervisor would otherwise consider this rank hung."""
        self._call_number = self._raised_in = 0
        self._is_inside = False
        self._polled = float("-inf")
        self._seen: ErrorRecord | None = None
        """The record that the thread has read last."""
        self._final_record: ErrorRecord | None = None
        self._lost: BaseException | None = None
        self._interrupt_cause: RemoteRankError | None = None
        self._wait: _GlooWait | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def of_default_group(cls) -> ErrorPropagator:
        """Returns the propagator of the next `parallelize`. Every rank calls it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        store, rank = _get_default_store(), dist.get_rank()
        try:
            return cls(store, f"{CALL_COUNT_KEY}/{store.add(f'{CALL_COUNT_KEY}/{rank}', 1)}", rank)
        except RuntimeError:  # the store of torch's fake backend stores nothing
            return cls()

    @contextmanager
    def call(self, inner: AbstractContextManager[T]) -> Iterator[T]:
        """Makes the code inside the context one collective call, and enters `inner`. Sends an exception of this rank to
        the other ranks. A nested call is part of the outer call.

        Raises:
            MeshwrightError: another rank raised. The message is one line. The class is that of the other rank's
                exception if it is in PROPAGATED_ERROR_CLASSES.
        """
        if self._store is None or self._is_inside:
            with inner as value:
                yield value
            return
        if self._call_number and self._raised_in == self._call_number:
            self._check_all_raised()
        self._is_inside, self._call_number = True, self._call_number + 1
        before = CURRENT_PROPAGATOR.set(self)
        try:
            with inner as value:
                yield value
        except Exception as error:
            raised = next((each for each in _exception_chain(error) if isinstance(each, RemoteRankError)), None)
            if raised is not None:
                self._publish_final(raised)
                raise raised.record.to_exception(raised.is_earlier) from None
            if not any(each is self._lost for each in _exception_chain(error)):
                self._publish(error)
            self._raised_in = self._call_number
            self._store.add(f"{self._key}/{self._call_number}", 1)
            raise
        finally:
            CURRENT_PROPAGATOR.reset(before)
            self._is_inside = False

    def _check_all_raised(self) -> None:
        """Waits until every rank has raised its own exception in the last call, as all ranks do when they refuse the
        same input.

        Raises:
            MeshwrightError: a rank was interrupted by another rank's exception instead of raising its own, or has not
                raised within BARRIER_TIMEOUT_SECONDS.
        """
        assert self._store is not None
        end = time.monotonic() + BARRIER_TIMEOUT_SECONDS
        while (
            self._final_record is None
            and self._store.add(f"{self._key}/{self._call_number}", 0) < dist.get_world_size()
        ):
            record = self._read(self._key)
            self._final_record = record if record is not None and (record.is_final or time.monotonic() > end) else None
            time.sleep(BARRIER_POLL_SECONDS)
        if self._final_record is not None:
            raise self._final_record.to_exception(is_earlier=True)

    # --- waiting

    def poll(self, waited: float) -> None:
        """Checks whether another rank has raised. Does nothing if `waited`, the seconds for which this rank has waited
        so far, is below STORE_POLL_SECONDS. Never blocks.

        Raises:
            RemoteRankError: another rank has raised.
        """
        if waited < STORE_POLL_SECONDS or self._store is None:
            return
        self._polled = time.monotonic()
        if self._thread is None:
            self._start()
        if (raised := self._error_of(self._seen)) is not None:
            raise raised

    def connection_lost(self, error: ConnectionError) -> ConnectionError:
        """Returns `error`, which reports a lost connection. `call` will not propagate `error`, because its cause is the
        rank at the other end.

        Raises:
            RemoteRankError: another rank has raised.
        """
        if (raised := self._raised()) is not None:
            raise raised
        self._lost = error
        return error

    def ranks_diverged(self) -> bool:
        """Returns whether a rank has left a collective because of another rank's exception. If so, no rank completes
        the collectives in flight."""
        record = self._read(self._key)
        return self._final_record is not None or (record is not None and record.is_final)

    @contextmanager
    def interruptible_wait(self, process: dist.ProcessGroup | None) -> Iterator[None]:
        """Allows this rank to block in gloo inside the context ([Note: waits inside gloo]). `process`: the process
        group of the wait, None for the default group.

        Raises:
            RemoteRankError: another rank has raised.
        """
        self._wait = _GlooWait(process, time.monotonic())
        if self._thread is None:
            self._start()
        try:
            yield
        except RuntimeError as error:
            raised = self._interrupt_cause or self._raised()
            if raised is None and (broken := self._read(BROKEN_GROUP_KEY)) is not None:
                raised = RemoteRankError(broken, is_earlier=True)
            if raised is None:
                self._lost = error
                raise
            raise raised from None
        finally:
            self._wait = None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="meshwright-errors", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        idle = 0
        while idle < MAX_IDLE_POLLS:
            time.sleep(STORE_POLL_SECONDS)
            wait, now = self._wait, time.monotonic()
            is_polled = now - self._polled < 2 * STORE_POLL_SECONDS
            idle = 0 if wait is not None or is_polled else idle + 1
            if not is_polled and (wait is None or now - wait.began < STORE_POLL_SECONDS):
                continue
            self._seen = self._read(self._key)
            raised = None if wait is None else self._error_of(self._seen)
            if raised is not None and wait is not None and self._wait is wait:
                self._interrupt_cause = raised
                self._set(BROKEN_GROUP_KEY, raised.record)
                interrupt_gloo(wait.process)
        self._thread = None
        if self._wait is not None:  # a wait began while this thread ended
            self._start()

    # --- the store
    # --------------------------------------------------------------------------------------------------------------

    def _raised(self) -> RemoteRankError | None:
        """Reads the store. Returns the error of another rank, None if no other rank has raised."""
        return self._error_of(self._read(self._key))

    def _error_of(self, record: ErrorRecord | None) -> RemoteRankError | None:
        """Returns the error of another rank in `record`, None if there is none. The other rank may have raised in this
        call, in the previous or in the next one, because ranks differ by at most one call. Excludes errors that all
        ranks raised."""
        if record is None:
            return None
        if record.call >= self._call_number - 1 and record.call > self._raised_in:
            return RemoteRankError(record, is_earlier=False)
        return RemoteRankError(record, is_earlier=True) if record.is_final else None

    def _publish(self, error: Exception) -> None:
        """Writes `error` to the store, unless another rank has already raised in this call. So all ranks that did not
        raise report the first error."""
        known = self._read(self._key)
        if known is not None and (known.is_final or known.call > max(self._raised_in, self._call_number - 2)):
            return
        code = error.exit_code if isinstance(error, MeshwrightError) else 1
        mine = ErrorRecord(self._call_number, self._rank, *describe_error(error), code)
        self._set(self._key, mine, "" if known is None else _record_to_json(known))

    def _publish_final(self, raised: RemoteRankError) -> None:
        self._final_record, self._raised_in = raised.record, self._call_number
        if not raised.is_earlier:
            self._set(self._key, raised.record._replace(is_final=True))

    def _read(self, key: str) -> ErrorRecord | None:
        assert self._store is not None
        try:
            return ErrorRecord(*json.loads(self._store.get(key))) if self._store.check([key]) else None
        except RuntimeError:  # the process that serves the store has ended
            return None

    def _set(self, key: str, record: ErrorRecord, expected: str | None = None) -> None:
        """Writes `record` to `key`. If `expected` is not None, writes only if the present value is `expected` ('' means
        that the key has no value)."""
        assert self._store is not None
        try:
            if expected is None:
                self._store.set(key, _record_to_json(record))
            else:
                self._store.compare_set(key, expected, _record_to_json(record))
        except RuntimeError:
            return


CURRENT_PROPAGATOR: ContextVar[ErrorPropagator | None] = ContextVar("CURRENT", default=None)
"""The propagator of the collective call in progress, None outside of collective calls."""


def interruptible_wait(process: dist.ProcessGroup | None = None) -> AbstractContextManager[None]:
    """Allows this rank to block in gloo inside the context (`ErrorPropagator.interruptible_wait`). Does nothing outside
    of collective calls."""
    calls = CURRENT_PROPAGATOR.get()
    return nullcontext() if calls is None else calls.interruptible_wait(process)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` says that an allocation has failed."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in OOM_ERRORS)


def gather_objects(mine: T) -> list[T]:
    """Returns the objects `mine` of all ranks, in order of rank. Every rank calls it."""
    if not dist.is_initialized():
        return [mine]
    found = [mine] * dist.get_world_size()
    with interruptible_wait():
        dist.all_gather_object(found, mine)
    return found


def interrupt_gloo(process: dist.ProcessGroup | None) -> None:
    """Makes all waits of this rank in the gloo group `process` raise ([Note: waits inside gloo])."""
    other = next(rank for rank in dist.get_process_group_ranks(process) if rank != dist.get_rank())
    try:
        work = dist.irecv(torch.empty(1), other, group=process, tag=2**30)
        assert work is not None
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


def describe_error(error: Exception) -> tuple[str, str]:
    """Returns the class name and message of `error`, if PROPAGATED_ERROR_CLASSES contains its class or a base class.

    Otherwise returns '' and one line with the class, the first line of the message, and the code location.

    >>> describe_error(InputError("no labels")), describe_error(ValueError("no"))
    (('InputError', 'no labels'), ('', 'ValueError: no'))
    """
    kind = next(
        (each.__name__ for each in type(error).__mro__ if PROPAGATED_ERROR_CLASSES.get(each.__name__) is each), ""
    )
    if kind:
        return kind, str(error)
    first = (str(error).strip().splitlines() or [""])[0][:MAX_MESSAGE_CHARACTERS]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return "", f"{type(error).__name__}{': ' * bool(first)}{first}{place}"


def _record_to_json(record: ErrorRecord) -> str:
    return json.dumps(record)


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yields `error`, then the exception that caused it (or was active when it was raised), and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__
