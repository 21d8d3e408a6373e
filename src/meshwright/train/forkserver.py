"""The fork server of ranks: it imports torch once and forks the ranks. So a rank starts in hundredths of a second and
shares the imported memory pages.

Guarantees: when the fork server forks, it has one thread and no process group. If the fork server dies, its ranks die
(PR_SET_PDEATHSIG, end of their pipe). If the supervisor dies, the fork server dies. The rendezvous store listens on
127.0.0.1 only; in a job of several machines it listens only on the address at which the others reach this machine. The
fork server binds the socket of the store before any fork. The store runs in a separate process, not in a rank. The
protocol is JSON lines: commands on standard input, events on the original standard output.

| command | event |
|---|---|
| start: rank, world, generation, target, payload, log | started: rank, generation, pid |
| tell: rank, message | said: rank, generation, message |
| signal: rank, signal | ended: rank, generation, status (negative: the signal) |
| clear: end every rank | clear: all ranks have ended |
| | refused: rank, generation, pid: a start while a process of that rank still runs |
| | refused: rank, generation, why: a start for which the system has no descriptor or process; ended follows |
| | ready: pid, port, secret: of the store |

Reason: a fork is 50 times as fast as a spawn. The first AdamW step in a process imports torch._dynamo, which takes
seconds. So the fork server imports it before it forks.

[Note: before the fork] A process that has started an accelerator cannot be forked: torch refuses CUDA in the child.
torch starts accelerators implicitly. The first backward, also of CPU tensors, counts the devices of every kind that
torch was built for and starts a thread for each device. The step of an optimizer queries the current stream. So the
fork server runs a first backward and a first step only with a CPU build of torch, which saves 11 ms in each rank. If
the driver has been started nevertheless, nothing is forked.

[Note: frozen] Python's garbage collector writes to every object that it visits. The first full collection in a rank
unshared between 60 and 70 MiB of imported pages, at an arbitrary time. Objects from before the fork are not garbage, so
they are frozen: every collection skips them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
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
from meshwright.train.rank_main import become_rank, die_with_parent, local_address, retain_heap

LISTEN_BACKLOG = 4096
"""The number of ranks that may connect at the same moment."""

CUDA_DEVICE_FILE = "/dev/nvidia-uvm"
"""The file that a process has open once it has started CUDA. A query of device names does not open it."""


def preload_modules(modules: list[str]) -> None:
    """Imports the modules that take every rank seconds to import. With a CPU build of torch it also runs a first
    backward and a first optimizer step ([Note: before the fork])."""
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
    """Returns the accelerators that this torch was built for. It does not search for devices, since a search may
    initialize them."""
    import torch

    built = {
        "cuda": torch.version.cuda, "hip": torch.version.hip, "xpu": getattr(torch.version, "xpu", None),
        "mps": torch.backends.mps.is_built(),
    }  # fmt: skip
    return [kind for kind, version in built.items() if version]


def fork_obstacle(opened: Iterable[str], initialized: bool) -> str:
    """Returns why a forked child could not use accelerators, or ''. `opened`: the paths of this process's open files.
    `initialized`: whether torch has initialized CUDA.

    >>> fork_obstacle(["/dev/null", "/dev/nvidiactl", "/dev/nvidia0"], False)
    ''
    >>> fork_obstacle(["/dev/null", "/dev/nvidia-uvm"], False)
    '/dev/nvidia-uvm is open'
    """
    if CUDA_DEVICE_FILE in opened:
        return Message("{cuda_device_file} is open", cuda_device_file=CUDA_DEVICE_FILE)
    return Message("torch has initialized CUDA") if initialized else ""


def open_file_paths() -> list[str]:
    """Returns the paths of this process's open files, where the system has /proc."""
    found = []
    for handle in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(handle))
    return found


@dataclass
class ForkedRank:
    """A forked rank, as the fork server tracks it."""

    rank: int
    generation: int
    pid: int
    inbox: MessageReader
    outbox: int


class ForkServer:
    """The main loop: runs commands, relays messages, reports ended ranks."""

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
        """Starts the store and handles commands until the supervisor's pipe ends."""
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
                with contextlib.suppress(BrokenPipeError):  # the rank has just ended, which is reported separately
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
        except OSError as error:  # no descriptor or process is left: only this start fails
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
        child = ForkedRank(message["rank"], message["generation"], pid, MessageReader(ours_in), ours_out)
        self.children[child.rank] = child
        self.waiting.register(ours_in, selectors.EVENT_READ, lambda: self._relay(child))
        write_message(self.events, {"event": "started", "rank": child.rank, "generation": child.generation, "pid": pid})

    def _refuse(self, message: IpcMessage, pipes: list[int], error: OSError) -> None:
        """Reports that the system could not start a process for this rank. The supervisor counts this as a failure of
        the rank and applies its restart policy."""
        for handle in pipes:
            os.close(handle)
        rank = {"rank": message["rank"], "generation": message["generation"]}
        why = f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'unknown')})"
        write_message(self.events, {"event": "refused", **rank, "why": why})
        write_message(self.events, {"event": "ended", **rank, "status": 1})

    def _forget(self) -> None:
        """Closes the inherited file handles of the fork server in a child, so that readers of its pipes see their
        end."""
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
            return  # this rank was reported as ended before its last messages were read
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
            # Without the store no rank can join, so the supervisor restarts all ranks.
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
            write_message(
                self.events, {"event": "ended", "rank": child.rank, "generation": child.generation, "status": status}
            )
        self._say_clear()

    def _serve_store(self, parent: int) -> NoReturn:
        """Serves the rendezvous store (core/rendezvous_store.py) on the socket that was bound before the fork, and on
        no other network interface."""
        die_with_parent(parent, "mesh-store")
        self._forget()
        ConnectionListener(self.listener, RendezvousStore(self.secret).client).run()
        os._exit(0)


def main() -> NoReturn:
    """Runs the fork server: the arguments are the supervisor's pid and the modules to import."""
    parent = int(sys.argv[1])
    die_with_parent(parent, "mesh-forkserver")
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the supervisor also receives this signal and decides what to do
    commands, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    retain_heap()
    for name, value in collective_environment(local_address()).items():
        os.environ.setdefault(name, value)  # does not overwrite what a person or a launcher has set
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
        "1"  # a query for CUDA devices must not start the driver before the fork
    )
    preload_modules(sys.argv[2:])
    from meshwright.runtime.backend import initialized_accelerators

    if why := fork_obstacle(open_file_paths(), bool(initialized_accelerators())):
        sys.exit(
            f"the process that ranks are forked from has started an accelerator ({why}), which none of them could "
            "use then"
        )
    ForkServer(commands, events).run()


if __name__ == "__main__":
    main()
