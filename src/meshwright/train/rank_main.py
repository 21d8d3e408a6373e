"""Sets up the process of one rank: log, environment, signals, messages to and from the supervisor, and process groups.
The fork server (forkserver.py) and the commands of `meshwright` use it.

Usually the fork server of a supervisor forks the ranks. Ranks that torchrun, Slurm or Kubernetes starts have no
supervisor and handle signals themselves. In both cases, the function that a rank runs gets a `RankControl`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import re
import selectors
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO, TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from meshwright.core import storage
from meshwright.core.background_thread import BackgroundCall, start_background_thread
from meshwright.core.errors import InputError, MeshwrightError, translate_system_error
from meshwright.core.ipc import IpcMessage, MessageReader, open_heartbeats, write_message
from meshwright.core.messages import Message
from meshwright.core.signals import install_stop_handler
from meshwright.core.snapshots import HISTORIES_PER_GENERATION, read_snapshot_locations
from meshwright.core.storage_deadline import answer_in_time

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
HEAP_THRESHOLD_BYTES = 2**30


def retain_heap() -> None:
    """Asks malloc to take large blocks from the heap and to keep freed memory up to 1 GiB, instead of returning it to
    the system. Accessing a new page for the first time takes ten times as long as reusing a page.

    It must run before torch allocates memory. It has no effect if the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, HEAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, HEAP_THRESHOLD_BYTES)


def die_with_parent(parent: int, name: str) -> None:
    """Makes the kernel kill this process when its parent dies (Linux only). Exits at once if the parent's pid is not
    `parent`, since the parent is then already dead. `name` becomes the name of this process."""
    if sys.platform.startswith("linux"):
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def local_address() -> str:
    """Returns the network address of this machine in the job: 127.0.0.1 if the job has only one machine."""
    return os.environ.get("MESHWRIGHT_ADDRESS", "127.0.0.1")


@dataclass(frozen=True)
class SharedFiles:
    """The paths of memory files that the supervisor keeps open. Without a supervisor the paths are empty. `pulse`: the
    file with the heartbeats of all ranks (core/ipc.py). `own`: the file for this rank's in-memory checkpoints.
    `sources`: the in-memory checkpoints of all ranks, from which the run resumes."""

    pulse: str = ""
    own: str = ""
    sources: tuple[str, ...] = ()
    single_node: bool = True
    """Whether all in-memory checkpoints are on this machine. Only then can one process write them to disk."""
    history: int = 0
    """The first history number of this generation's in-memory checkpoints ([Note: history] in core/snapshots.py)."""


@dataclass
class RankControl:
    """The connection between a rank and its supervisor. `hear` receives the messages that the rank sends. `stop` is the
    reason to stop after the current step (a signal name, or the supervisor's reason), or ''."""

    rank: int
    world: int
    hear: Callable[[IpcMessage], None]
    stop: str = ""
    memory: SharedFiles = SharedFiles()

    @property
    def row(self) -> tuple[memoryview, int]:
        """Returns the heartbeat buffer of all ranks, and the index of this rank's row in it (core/ipc.py)."""
        return open_heartbeats(self.memory.pulse, self.world), self.rank if self.memory.pulse else 0

    def say(self, kind: str, **message: Any) -> None:
        """Sends a message of `kind` with the fields `message`."""
        self.hear({"kind": kind, **message})

    def heed_signals(self, keyboard: bool = False) -> None:
        """Installs handlers: SIGTERM sets `stop`, so that the rank stops after the current step. A second SIGTERM ends
        the process at once. `keyboard`: whether SIGINT (Ctrl-C) and SIGHUP act like SIGTERM, for ranks without a
        supervisor; otherwise SIGINT is ignored."""
        if keyboard:
            install_stop_handler(self._at_keyboard)
            return
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _at_keyboard(self, number: int, frame: Any) -> None:
        if self.rank == 0 and not self.stop:
            self.say(
                "note",
                line=Message(
                    "{signals}: the run ends after this step and saves everything; send the signal again to stop at "
                    "once",
                    signals=signal.Signals(number).name,
                ),
            )
        self._on_signal(number, frame)

    def _on_signal(self, number: int, _: Any) -> None:
        self._ask(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)

    def _ask(self, reason: str) -> None:
        self.stop = self.stop or reason

    def heed(self, inbox: MessageReader) -> None:
        """Starts a background thread that receives the supervisor's messages. If the supervisor's pipe closes, the
        thread ends this process."""
        start_background_thread("inbox", lambda: self._listen(inbox), lambda line: self.say("degraded", line=line))

    def _listen(self, inbox: MessageReader) -> None:
        waiting = selectors.DefaultSelector()
        waiting.register(inbox.handle, selectors.EVENT_READ)
        while True:
            waiting.select()
            messages, ended = inbox.read()
            for message in messages:
                if "stop" in message:
                    self._ask(message["stop"])
            if ended:
                os._exit(1)


class RankLog(FileIO):
    """The output of a rank to the open log file `handle`. A full disk, and a disk that does not answer, lose lines but
    raise no error and stop no rank: a background thread writes, for which a caller waits PATIENCE_SECONDS at most."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle, "wb", closefd=False)
        self._process = os.getpid()
        self._disk: BackgroundCall[None] = BackgroundCall("rank log")
        self._lock = threading.RLock()
        """Several threads of a rank may print."""

    def write(self, data: Any) -> int:
        """Writes `data` and ignores errors of the disk. A forked process of the user's code has no background thread
        and writes by itself."""
        content = bytes(data)
        if os.getpid() != self._process:
            with contextlib.suppress(OSError):
                storage.write_bytes(self.fileno(), content)
            return len(content)
        with self._lock:
            self._disk.attempt(lambda: storage.write_bytes(self.fileno(), content))
        return len(content)


def open_rank_log(path: Path, say: Callable[..., None]) -> int:
    """Opens the log of a rank and returns the descriptor. If the disk does not answer in time, the output of the rank
    is lost, and a message `degraded` says so. After any other error the output goes to the log of the parent process.
    """
    try:
        return answer_in_time(path, lambda: storage.open_for_append(path))
    except TimeoutError as error:
        failure = storage.describe_failure(error, path)
        say("degraded", line=Message("the output of this rank is lost: {failure}", failure=failure))
        return os.open(os.devnull, os.O_WRONLY)
    except OSError as error:
        print(storage.describe_failure(error, path), file=sys.stderr, flush=True)
        return 2


def become_rank(message: IpcMessage, parent: int, store: tuple[str, int, str], inbox: int, outbox: int) -> NoReturn:
    """Turns a forked child into a rank: sets up log and environment, runs the target function, and exits with its
    status.

    `message` is the command `start` of the fork server. `parent`: the pid of the fork server. `store`: the address,
    port and key prefix of the rendezvous store, unless `message` names another store. `inbox` and `outbox`: descriptors
    of the pipes from and to the supervisor.
    """
    code = 1
    try:
        memory = message.get("memory") or {}
        places = SharedFiles(
            memory.get("pulse", ""),
            memory.get("own", ""),
            read_snapshot_locations(memory.get("sources", "")),
            memory.get("single_node", True),
            int(message["generation"]) * HISTORIES_PER_GENERATION,
        )
        channel = RankControl(
            message["rank"], message["world"], lambda said: write_message(outbox, said), memory=places
        )
        die_with_parent(parent, f"mesh-rank-{channel.rank}")
        log = open_rank_log(Path(message["log"]), channel.say)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        sys.stdout, sys.stderr = (TextIOWrapper(RankLog(handle), write_through=True) for handle in (1, 2))
        faulthandler.enable(file=2)  # after a crash in native code, elastic/failure.py finds the stack in the log
        rank, world = str(channel.rank), str(channel.world)
        local, here = message.get("local", (rank, world))
        host, port, prefix = message.get("store", store)
        os.environ |= {"RANK": rank, "LOCAL_RANK": str(local), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": str(here)}
        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            ATTEMPT_VARIABLE: str(message["generation"]),
            STORE_PREFIX_VARIABLE: prefix,
        }
        channel.heed_signals()
        channel.heed(MessageReader(inbox))
        code = run_target(message["target"], channel, message["payload"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_target(target: str, channel: RankControl, payload: IpcMessage) -> int:
    """Runs the function `target` (`module:function`) and returns its exit code. If the function raises, the supervisor
    gets a message `failed` with the error, the source location and the exit code of the error's class."""
    module, _, name = target.partition(":")
    try:
        return int(getattr(importlib.import_module(module), name)(channel, payload) or 0)
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        found = translate_system_error(error, ()) if isinstance(error, Exception) else error
        known = isinstance(found, MeshwrightError)
        code = found.exit_code if isinstance(found, MeshwrightError) else 1
        words = str(found) or type(found).__name__
        said = {"error": type(found).__name__, "message": words, "place": place, "code": code, "known": known}
        channel.say("failed", **said, raised_by=getattr(found, "raised_by", None))
        traceback.print_exc()
        return code


ATTEMPT_VARIABLE, STORE_PREFIX_VARIABLE = "MESHWRIGHT_GENERATION", "MESHWRIGHT_STORE"
"""Environment variables of a rank: its generation (the index of the current start of all ranks), and the prefix of this
generation's keys in the rendezvous store (core/rendezvous_store.py)."""


class ExternalLaunch(NamedTuple):
    """The rank and the world size that a launcher such as torchrun assigned to this process. `by`: the names of the
    environment variables."""

    rank: int
    world: int
    by: str


def slurm_master(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns MASTER_ADDR and MASTER_PORT for a task that `srun` started, as far as they are not set: the first host of
    the step, and a port that every task derives from the ids of the job and the step.

    Returns nothing for a process of another launcher, for a batch script (it has SLURM_PROCID too, but no step, and is
    one process), and for a heterogeneous job, whose components have node lists of their own.
    """
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    several = "RANK" not in environment and int(environment.get("SLURM_NTASKS", 1)) > 1
    if not (several and nodes and job.isdecimal() and step.isdecimal()) or "SLURM_HET_SIZE" in environment:
        return {}
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes)
    host = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0] if first else nodes)  # n[02-04,7] is n02, n03, n04 and n7
    found = {"MASTER_ADDR": host, "MASTER_PORT": str(20000 + (int(job) + int(step)) % 20000)}
    return {name: value for name, value in found.items() if name not in environment}


def read_own_launch() -> ExternalLaunch | None:
    """Returns `read_external_launch` of this process. Under `srun` it also sets MASTER_ADDR and MASTER_PORT."""
    os.environ.update(slurm_master(os.environ))
    return read_external_launch(os.environ)


def read_external_launch(environment: Mapping[str, str]) -> ExternalLaunch | None:
    """Returns the rank that torchrun, Kubernetes or Slurm assigned to this process, or None if `environment` has none.

    Raises InputError if the rank is invalid, or if RANK or MASTER_ADDR is missing in a world of several ranks. (Without
    this error, each task of a Slurm job would silently train alone.)

    >>> read_external_launch({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    ExternalLaunch(rank=1, world=4, by='RANK and WORLD_SIZE')
    >>> read_external_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    True
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE")
    elif int(environment.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS")
    elif environment.get("WORLD_SIZE", "1") != "1":
        raise InputError(
            Message(
                "WORLD_SIZE is {world} but RANK is not set: set RANK to the number of this process, from 0, or start "
                "it with torchrun; without WORLD_SIZE this machine trains alone",
                world=environment["WORLD_SIZE"],
            )
        )
    else:
        return None
    rank, world = int(environment[names[0]]), int(environment[names[1]])
    if world > 1 and "MASTER_ADDR" not in environment:
        raise InputError(
            Message(
                "{names} is {world} but MASTER_ADDR is not set: set it to the host of rank 0, and MASTER_PORT to a "
                "free port there",
                names=names[1],
                world=world,
            )
        )
    if not 0 <= rank < world:
        raise InputError(
            Message(
                "{rank_variable} ({rank}) is not a rank of a world of {world} ({world_variable})",
                rank_variable=names[0],
                rank=rank,
                world=world,
                world_variable=names[1],
            )
        )
    return ExternalLaunch(rank, world, " and ".join(names))


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of a rank. `control` is a gloo group that exchanges small host tensors, such as stop requests
    and measured times. It is None for one rank.

    The context manager destroys the groups only after success. After an exception they stay open, and the process ends.
    Destroying an NCCL group would wait for the other ranks, while they wait for the failed rank: a deadlock, and the
    failure would never be reported.
    """

    rank: int
    world: int
    control: Any = None

    def tell(self, text: str) -> str:
        """Broadcasts the text of rank 0 and returns it on every rank. All ranks call it."""
        if self.control is None:
            return text
        import torch
        import torch.distributed as dist

        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = torch.tensor(data.numel())
        dist.broadcast(length, 0, self.control)
        data = data if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, self.control)
        return bytes(data.tolist()).decode()

    def __enter__(self) -> ProcessGroups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def close(self) -> None:
        """Destroys the process groups."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def join_process_groups(rank: int, world: int, timeout: float = 1800.0) -> ProcessGroups:
    """Joins the default process group (NCCL for CUDA devices, gloo for CPU ranks) and returns it with a gloo group for
    host tensors. If `world` is 1, no groups are made. `timeout`: the timeout of collectives in seconds.

    Raises: InputError if MASTER_PORT is in use, or if torch lacks the library for collectives of the devices.

    Unless OMP_NUM_THREADS is set, it also sets torch's number of threads to the number of this machine's cores divided
    by the number of its ranks.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from meshwright.runtime.backend import backend_of, init_local_device, platform_names

    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", world)))
    os.environ.setdefault("LOCAL_RANK", os.environ.get("SLURM_LOCALID", str(rank)))
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_world))
    device = backend_of(init_local_device(by_command=True))
    backend = device.process_group_backend
    if world == 1:
        return ProcessGroups(rank, world)
    if not dist.is_backend_available(device.collective_library):
        raise InputError(
            Message(
                "torch sees {type} devices but has no {library}: install a torch built with {library}",
                type=platform_names(device)[0],
                library=platform_names(device)[1],
            )
        )
    limit = timedelta(seconds=timeout)
    if STORE_PREFIX_VARIABLE in os.environ:
        raw = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
        store = PrefixStore(os.environ[STORE_PREFIX_VARIABLE], raw)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    else:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ.setdefault("MASTER_PORT", "29500")
        if os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        try:
            dist.init_process_group(backend, timeout=limit)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            place = f"port {os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']}"
            raise InputError(
                Message("{place} is in use: set MASTER_PORT to a free one (torchrun: --master-port)", place=place)
            ) from None
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
    return ProcessGroups(rank, world, control)
