"""Warm ranks: processes forked once from the test process, which has torch imported, and used by every test.

Interface, as the session fixture `ranks` (conftest.py):

    def work(scale):                      # at module level of the test file; runs on every rank
        tensor = torch.ones(2) * dist.get_rank() * scale
        dist.all_reduce(tensor)           # the default group is there: gloo over loopback, `world` ranks
        return tensor                     # anything that pickles; tensors come back as CPU tensors

    def test_sums(ranks):
        results = ranks.run(2, work, 3.0)       # one result per rank, in order of rank
        assert results[0].tolist() == [3.0, 3.0]

`ranks.once` runs equal calls once: what several tests compare with.

Guarantee: each call has a fresh default process group, torch seeded with 0, one thread a rank, default dtype float32.
If a rank raises, dies or does not answer within `timeout` seconds, `run` raises `RankFailure` with the rank and its
traceback, ends every rank, and the next call starts new ones. To expect an exception on a rank, catch it inside the
function and return what it says. Ranks end with the test process.
A cold start costs about 0.1 s a rank, a call some hundredths of a second.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from meshwright.runtime.backend import backend_of, init_local_device

# seconds that the other ranks get to answer after one has failed: they may be waiting for it inside a collective
GRACE = 3.0
# seconds by which a collective gives up after the test process has: a rank that hangs does not answer, it does not fail
LATER = 60.0


CHECKED = [
    "batch_loss", "between_blocks", "buffers", "code_paths", "consistency", "crash_list", "data_dependent_models",
    "input_kinds", "late_changes", "loss_reads_parameters", "no_needless_refusals", "odd_cases", "odd_experts",
    "odd_jobs", "parameter_access", "pass_writes", "plain_modules", "plan_trials", "precision_recipes", "proof",
    "proof_faults", "proof_limit", "proof_models", "proof_repeated", "proof_rows", "replica_check",
    "row_coupling", "sequence_mixing", "shared_weights", "soundness_list", "split_proofs", "stage_check",
    "step_guards", "step_invariants", "trainer", "trainer_state", "unused_weights", "unusual_models",
    "writes_between_steps",
]  # fmt: skip
CHECKED_FILES = frozenset(Path(__file__).with_name(f"test_{name}.py") for name in CHECKED)
"""Files whose tests need the checks of rows and writes; the others compare with one device themselves, where the checks
would cost more than the steps."""
assert all(file.is_file() for file in CHECKED_FILES), "a file of CHECKED_FILES has another name now"


DEVICE_VARIABLE = "MESHWRIGHT_TEST_DEVICE"
"""With the value `cuda`, ranks compute on CUDA devices and communicate through NCCL (`make gpu-check`). If the machine
has one device, all ranks share it, which NCCL 2.30 and later support. With any other value, ranks use the CPU."""


def join(rank: int, world: int, store: dist.Store, limit: timedelta) -> None:
    """Joins the default process group of a call. The first call of a rank selects its device."""
    backend = "gloo"
    if os.environ.get(DEVICE_VARIABLE) == "cuda":
        os.environ["LOCAL_RANK"] = str(rank)
        backend = backend_of(init_local_device()).process_group_backend
        assert backend != "gloo", f"{DEVICE_VARIABLE}=cuda, but torch sees no CUDA device"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def checks() -> str:
    """What the environment of the ranks says of them for the test that runs. Outside of a test they are on."""
    current = os.environ.get("PYTEST_CURRENT_TEST")
    file = Path(current.partition("::")[0]).name if current else ""
    return "first" if not current or Path(__file__).with_name(file) in CHECKED_FILES else "never"


def unchecked(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(*args)` on a rank without the preflight checks of rows and writes. In CHECKED_FILES it is used for
    runs that serve as the reference of another run, or that are compared with one device."""
    os.environ["MESHWRIGHT_CHECKS"] = "never"  # each call sets it anew
    return function(*args)


@contextlib.contextmanager
def as_torchrun_starts() -> Iterator[None]:
    """The environment of torchrun on a rank of the pool, for libraries that read it."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29500}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="none")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def block_of_page(page: str, words: str) -> str:
    """The code block of a page of docs/en that has `words`."""
    text = (Path(__file__).parents[2] / "docs" / "en" / page).read_text(encoding="utf-8")
    (found,) = [block for block in re.findall(r"^```python[^\n]*\n(.*?)^```$", text, re.M | re.S) if words in block]
    return str(found)


class RankFailure(AssertionError):
    """A rank raised, died or hung."""


def warm() -> None:
    """Imports and first calls that would cost every rank seconds: an optimizer step pulls in torch._dynamo."""
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()


class Pool:
    """Ranks that outlive a test. Not for two callers at once."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.mkdtemp(prefix="meshwright-ranks-")
        self._calls = 0
        self._known: dict[tuple[Any, ...], list[Any]] = {}

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 1200.0) -> list[Any]:
        """`function(*args)` on `world` ranks: their results in order of rank."""
        self._grow(world)
        os.makedirs(self._folder, exist_ok=True)
        self._calls += 1
        store = os.path.join(self._folder, f"store-{self._calls}")
        message = pickle.dumps((world, store, timeout, checks(), function, args))
        for _, pipe in self._workers[:world]:
            pipe.send_bytes(message)
        answers = self._collect(world, timeout)
        failed = {rank: text for rank, (good, text) in answers.items() if not good}
        if failed or len(answers) < world:
            silent = [
                f"rank {rank} did not answer within {timeout:g} s" for rank in range(world) if rank not in answers
            ]
            self.close()
            raise RankFailure(
                "\n".join([*(f"rank {rank}: {text}" for rank, text in failed.items()), *(silent if not failed else [])])
            )
        return [answers[rank][1] for rank in range(world)]

    def once(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run`, of equal arguments once; nobody changes what it returns."""
        key = (world, function, *args)
        if key not in self._known:
            self._known[key] = self.run(world, function, *args)
        return self._known[key]

    def _collect(self, world: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {self._workers[rank][1]: rank for rank in range(world)}
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self._workers[rank][0].join(60)
                    answers[rank] = (False, f"died (exit code {self._workers[rank][0].exitcode})")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def _grow(self, world: int) -> None:
        forked = (
            os.environ.get(DEVICE_VARIABLE) != "cuda"
        )  # backward in the parent process starts the driver and threads, which a fork cannot use
        if forked and len(self._workers) < world:
            assert not dist.is_initialized(), "ranks would inherit the process group that a test left in this process"
            warm()
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        while len(self._workers) < world:
            rank = len(self._workers)
            ours, theirs = context.Pipe()
            inherited = [*(pipe for _, pipe in self._workers), ours] if forked else []
            process = context.Process(target=_serve, args=(rank, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        """Ends every rank and its files; the next `run` starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(rank: int, pipe: Connection, inherited: list[Connection]) -> None:
    """A rank's life: until the test process closes the pipe."""
    for other in inherited:  # else a rank would keep its sisters' pipes open and none would see the end
        other.close()
    torch.set_num_threads(1)
    gc.freeze()  # what was there at the fork stays: a collection after every test looks only at what the test made
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            _call(rank, message, pipe.send_bytes)
        except ConnectionError:
            os._exit(0)


def _call(rank: int, message: bytes, answer: Callable[[bytes], None]) -> None:
    """What fails is said before the group goes: the others lose the connection then, and would be heard first."""
    found = b""
    try:
        world, path, timeout, os.environ["MESHWRIGHT_CHECKS"], function, args = pickle.loads(message)
        store, limit = dist.FileStore(path, world), timedelta(seconds=timeout + LATER)
        join(rank, world, store, limit)
        dist.barrier()  # nobody leaves while another still connects
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        found = pickle.dumps((True, function(*args)))
    except BaseException:
        answer(pickle.dumps((False, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # a group lives, with threads that wake 100 times a second, as long as anything of the test holds it
        gc.collect()
    if found:
        answer(found)
