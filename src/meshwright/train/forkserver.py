"""The fork server imports torch once and forks the ranks of one machine. The supervisor starts it
(elastic/local_agent.py). A forked rank starts in hundredths of a second and shares the memory pages of the imports.

Guarantees:
- When the fork server forks, it has one thread and no process group.
- If the fork server dies, its ranks die: by PR_SET_PDEATHSIG, or when their pipe closes. If the supervisor dies, the
  fork server dies.
- The rendezvous store (core/rendezvous_store.py) listens only on 127.0.0.1. In a job of several machines, it listens
  only on this machine's address in the job. The fork server binds the socket before it forks. The store runs in a
  separate process, so it survives the death of a rank.

The protocol is JSON lines: commands arrive on standard input, events leave on the original standard output.

| command | event |
|---|---|
| start: rank, world, generation, target, payload, log | started: rank, generation, pid |
| tell: rank, message | said: rank, generation, message |
| signal: rank, signal | ended: rank, generation, status (negative: the signal) |
| clear: kill all ranks | clear: all ranks have ended |
| | refused: rank, generation, pid: not started, since process `pid` of this rank still runs |
| | refused: rank, generation, why: not started, since the system has no descriptor or process left; `ended` follows |
| | ready: pid of the fork server, port and secret of the store |

A fork is 50 times as fast as a new Python process. The first AdamW step in a process imports torch._dynamo, which takes
seconds, so the fork server imports this module before it forks.

[Note: before the fork] If a process has initialized an accelerator, its forked children cannot use one: torch raises an
error for CUDA. torch initializes accelerators implicitly. The first backward, even of CPU tensors, counts the devices
of every type that torch was built for, and starts a thread for each device. The step of an optimizer queries the
current stream. Therefore, the fork server runs a first backward and a first step only with a CPU build of torch. There
they save 11 ms in each rank. If the fork server has initialized an accelerator nevertheless, it exits with an error
before it forks.

[Note: frozen] Python's garbage collector writes to every object that it visits, which copies the shared page of the
object. Without the following measure, the first full collection in a rank copied between 60 and 70 MiB of pages of
imports. Before the fork, all existing objects are frozen (`gc.freeze`), so every collection skips them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import re
import secrets
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from meshwright.core.connection_listener import ConnectionListener
from meshwright.core.ipc import IpcMessage, MessageReader, write_message
from meshwright.core.messages import Message
from meshwright.core.rendezvous_store import RendezvousStore, store_key_prefix
from meshwright.core.secure_channel import collective_environment
from meshwright.core.signals import STOP_SIGNALS
from meshwright.core.storage_deadline import read_tail
from meshwright.train.rank_main import become_rank, die_with_parent, local_address, retain_heap

LISTEN_BACKLOG = 4096
"""The number of connections to the rendezvous store that may wait to be accepted. All ranks connect at once."""

CUDA_DEVICE_FILE = "/dev/nvidia-uvm"
"""A process that has initialized CUDA has this file open. A process that only queried device names does not."""

WATCHDOG_END = "watchdog thread terminated with exception:"
DEVICE_ERROR_PATTERN = re.compile(r"(CUDA|HIP) error")
PEER_LOST_PATTERN = re.compile(r"collective operation timeout|remote process exited|ncclRemoteError", re.IGNORECASE)
LOG_TAIL_BYTES = 1 << 18
"""The search for a message of NCCL's watchdog reads only this number of bytes at the end of a log."""


def preload_modules(modules: list[str]) -> None:
    """Imports torch and `modules` before the fork, since their import would take each rank seconds. With a CPU build of
    torch it also runs a first backward and a first optimizer step ([Note: before the fork])."""
    gc.disable()  # garbage collection took a sixth of the import time and found no garbage
    import torch
    import torch._dynamo
    import torch.distributed.device_mesh
    import torch.distributed.tensor

    torch.set_num_threads(1)
    if not supported_accelerators():
        weight = torch.nn.Parameter(torch.ones(2))
        weight.sum().backward()
        torch.optim.AdamW([weight]).step()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # [Note: frozen]
    gc.enable()


def supported_accelerators() -> list[str]:
    """Returns the accelerators that this torch was built for: "cuda", "hip", "xpu", "mps". It does not query devices,
    since a query may initialize them."""
    import torch

    built = {
        "cuda": torch.version.cuda, "hip": torch.version.hip, "xpu": getattr(torch.version, "xpu", None),
        "mps": torch.backends.mps.is_built(),
    }  # fmt: skip
    return [kind for kind, version in built.items() if version]


def fork_obstacle(opened: Iterable[str], initialized: bool) -> str:
    """Returns why children that this process forks could not use accelerators, or ''. `opened`: the paths of this
    process's open files. `initialized`: whether torch has initialized an accelerator.

    >>> fork_obstacle(["/dev/null", "/dev/nvidiactl", "/dev/nvidia0"], False)
    ''
    >>> fork_obstacle(["/dev/null", "/dev/nvidia-uvm"], False)
    '/dev/nvidia-uvm is open'
    """
    if CUDA_DEVICE_FILE in opened:
        return Message("{cuda_device_file} is open", cuda_device_file=CUDA_DEVICE_FILE)
    return Message("torch has initialized a GPU") if initialized else ""


def open_file_paths() -> list[str]:
    """Returns the paths of this process's open files, or an empty list on a system without /proc."""
    found = []
    for handle in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(handle))
    return found


def aborted_by_watchdog(log: Path) -> bool:
    """Returns whether NCCL's watchdog has aborted the rank that wrote `log` because of other ranks: a collective timed
    out, or another rank was gone. The watchdog also aborts a rank whose own device has failed; then the result is
    False."""
    try:
        said = read_tail(log, LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return False
    reason = said.rpartition(WATCHDOG_END)[2] if WATCHDOG_END in said else ""
    return not DEVICE_ERROR_PATTERN.search(reason) and bool(PEER_LOST_PATTERN.search(reason))


@dataclass
class ForkedRank:
    """A running rank. `inbox` reads its messages to the supervisor. `outbox`: the file descriptor for messages to the
    rank. `log`: its log file."""

    rank: int
    generation: int
    pid: int
    inbox: MessageReader
    outbox: int
    log: Path


class ForkServer:
    """The main loop of the fork server. `commands` and `events` are the descriptors of the supervisor's pipes."""

    def __init__(self, commands: int, events: int) -> None:
        self.commands = MessageReader(commands)
        self.events = events
        self.children: dict[int, ForkedRank] = {}
        self.listener = socket.create_server((local_address(), 0), backlog=LISTEN_BACKLOG)
        self.port: int = self.listener.getsockname()[1]
        self.secret = secrets.token_hex(16)
        self.woken, self.waker = socket.socketpair()
        for end in (self.woken, self.waker):
            end.setblocking(False)
        self.waiting = selectors.DefaultSelector()
        self.store = 0
        self.clears = False

    def run(self) -> NoReturn:
        """Starts the store, then handles commands until the supervisor closes its pipe."""
        parent = os.getpid()
        self.store = os.fork()
        if self.store == 0:
            self._serve_store(parent)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.waiting.register(self.commands.handle, selectors.EVENT_READ, self._obey)
        self.waiting.register(self.woken, selectors.EVENT_READ, self._reap)
        write_message(self.events, {"event": "ready", "pid": os.getpid(), "port": self.port, "secret": self.secret})
        try:
            while True:
                for key, _ in self.waiting.select():
                    key.data()
        except BaseException:
            traceback.print_exc()
            self._end(1)

    def _end(self, code: int = 0) -> NoReturn:
        for pid in [*(child.pid for child in self.children.values()), *([self.store] if self.store else [])]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        sys.stderr.flush()
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)

    def _obey(self) -> None:
        messages, ended = self.commands.read()
        for message in messages:
            child = self.children.get(message["rank"])
            if message["do"] == "start":
                self._start(message)
            elif message["do"] == "clear":
                self._clear()
            elif child is not None and message["do"] == "signal":
                os.kill(child.pid, message["signal"])
            elif child is not None and message["do"] == "tell":
                with contextlib.suppress(BrokenPipeError):  # raised if the rank has just ended, which `_reap` reports
                    write_message(child.outbox, message["message"])
        if ended:
            self._end()

    def _clear(self) -> None:
        self.clears = True
        for child in self.children.values():
            os.kill(child.pid, signal.SIGKILL)
        self._say_clear()

    def _say_clear(self) -> None:
        if self.clears and not self.children:
            self.clears = False
            write_message(self.events, {"event": "clear"})

    def _start(self, message: IpcMessage) -> None:
        lives = self.children.get(message["rank"])
        if lives is not None:  # two processes with one rank would overwrite each other's checkpoints
            write_message(
                self.events,
                {"event": "refused", "rank": lives.rank, "generation": message["generation"], "pid": lives.pid},
            )
            return
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            parent, pid = os.getpid(), os.fork()
        except OSError as error:  # without a free descriptor or process, only this start must fail
            self._refuse(message, pipes, error)
            return
        theirs_in, ours_out, ours_in, theirs_out = pipes
        if pid == 0:
            for handle in (ours_out, ours_in):
                os.close(handle)
            self._forget()
            self.listener.close()
            store = local_address(), self.port, store_key_prefix(self.secret, message["generation"])
            become_rank(message, parent, store, theirs_in, theirs_out)
        for handle in (theirs_in, theirs_out):
            os.close(handle)
        child = ForkedRank(
            message["rank"], message["generation"], pid, MessageReader(ours_in), ours_out, Path(message["log"])
        )
        self.children[child.rank] = child
        self.waiting.register(ours_in, selectors.EVENT_READ, lambda: self._relay(child))
        write_message(self.events, {"event": "started", "rank": child.rank, "generation": child.generation, "pid": pid})

    def _refuse(self, message: IpcMessage, pipes: list[int], error: OSError) -> None:
        """Reports that the system could not start a process for the rank of `message`, and closes `pipes`. The
        supervisor treats this as a failure of the rank."""
        for handle in pipes:
            os.close(handle)
        rank = {"rank": message["rank"], "generation": message["generation"]}
        why = f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'unknown')})"
        write_message(self.events, {"event": "refused", **rank, "why": why})
        write_message(self.events, {"event": "ended", **rank, "status": 1})

    def _forget(self) -> None:
        """Closes the fork server's descriptors in a forked child. If the child left them open, a pipe would stay open
        after the fork server has closed it or died."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.waiting.close()
        for end in (self.woken, self.waker):
            end.close()
        for handle in [
            self.commands.handle,
            self.events,
            *(h for c in self.children.values() for h in (c.inbox.handle, c.outbox)),
        ]:
            os.close(handle)

    def _relay(self, child: ForkedRank) -> None:
        if self.children.get(child.rank) is not child:
            return  # `_reap` has already forwarded the last messages of this rank and closed its pipes
        messages, ended = child.inbox.read()
        for message in messages:
            write_message(
                self.events, {"event": "said", "rank": child.rank, "generation": child.generation, "message": message}
            )
        if ended:
            self.waiting.unregister(child.inbox.handle)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)
        removed, status = os.waitpid(self.store, os.WNOHANG)
        if removed:
            self.store = 0
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            # Without the store no rank can join the process groups. The supervisor then restarts all ranks.
            self._end(-signal.SIGKILL if killed else 1)
        for child in list(self.children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if not pid:
                continue
            if child.inbox.handle in self.waiting.get_map():
                self._relay(child)
            if child.inbox.handle in self.waiting.get_map():
                self.waiting.unregister(child.inbox.handle)
            os.close(child.inbox.handle)
            os.close(child.outbox)
            del self.children[child.rank]
            status = os.waitstatus_to_exitcode(status)
            event = {"event": "ended", "rank": child.rank, "generation": child.generation, "status": status}
            if status == -signal.SIGABRT and aborted_by_watchdog(child.log):
                event["watchdog"] = True
            write_message(self.events, event)
        self._say_clear()

    def _serve_store(self, parent: int) -> NoReturn:
        """Runs the rendezvous store in this forked child, on the socket that the fork server has bound. `parent`: the
        pid of the fork server."""
        die_with_parent(parent, "mesh-store")
        self._forget()
        ConnectionListener(self.listener, RendezvousStore(self.secret).client).run()
        os._exit(0)


def main() -> NoReturn:
    """Runs the fork server. Its command-line arguments are the supervisor's pid and the names of the modules to
    import."""
    parent = int(sys.argv[1])
    die_with_parent(parent, "mesh-forkserver")
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the supervisor, which receives the signal too, must react to it
    commands, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    retain_heap()
    for name, value in collective_environment(local_address()).items():
        os.environ.setdefault(name, value)  # the user's or a launcher's setting takes precedence
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
        "1"  # a query for CUDA devices must not start the driver before the fork
    )
    preload_modules(sys.argv[2:])
    from meshwright.runtime.backend import initialized_accelerators

    if why := fork_obstacle(open_file_paths(), bool(initialized_accelerators())):
        sys.exit(
            f"the fork server has initialized an accelerator ({why}), so the ranks that it forks could not use one"
        )
    ForkServer(commands, events).run()


if __name__ == "__main__":
    main()
