"""The supervisor with real processes: ranks that fail are named, ranks that should stop do, and nothing is ever left
behind."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.core.errors import InputError, Interrupted
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.failure import MAX_REPORT_LINES, RankFailed
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.supervisor import Supervisor

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAgent]:
    """The process that forks the ranks of several tests. Its log is in no folder of a test."""
    folder, path = tmp_path_factory.mktemp("warm"), f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with LocalAgent(folder / "log", ("rank_targets",), {"PYTHONPATH": path}) as agent:
        while not agent.events(1.0):
            assert not agent.ended
        yield agent


GENERATIONS = itertools.count(1, 10)


def supervise(folder: Path, function: str, world: int, payload: dict, **more) -> list[tuple[int, dict]]:
    more.setdefault("generation", next(GENERATIONS))
    heard: list[tuple[int, dict]] = []
    hear = more.pop("hear", lambda rank, message: heard.append((rank, message)))
    Supervisor(RankJob(f"rank_targets:{function}", world, payload, folder, ("rank_targets",)), hear, **more).run()
    return heard


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every live process that writes into `folder`: the logs of ranks and fork server are open as long as they live."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(
                Path(f"/proc/{process.pid}/fd/{fd}").resolve().is_relative_to(folder)
                for fd in os.listdir(f"/proc/{process.pid}/fd")
            ):
                found.append(process)
        except OSError:
            continue
    return found


def gone(folder: Path, seconds: float = 300.0) -> bool:
    end = time.monotonic() + seconds
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.02)
    return not processes_of(folder)


@pytest.mark.soak
def test_the_world_that_was_asked_for_is_the_world_that_runs(tmp_path: Path) -> None:
    heard = supervise(tmp_path, "say_sum", 3, {"given": "x"}, generation=2)
    assert sorted(rank for rank, _ in heard) == [0, 1, 2]
    assert all(message == {"kind": "sum", "value": 6.0, "given": "x", "generation": "2"} for _, message in heard)
    assert gone(tmp_path)


def test_no_last_word_is_lost_when_many_ranks_end_in_the_same_moment(tmp_path: Path, warm: LocalAgent) -> None:
    heard = supervise(tmp_path, "speak_and_go", 16, {"words": 50}, agent=warm)
    for rank in range(16):
        assert [message["number"] for of, message in heard if of == rank] == list(range(50))


@pytest.mark.soak
def test_the_rank_that_raised_is_reported_first_and_other_ranks_are_counted(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankFailed) as caught:
        supervise(tmp_path, "fail", 4, {"victim": 2, "how": "raise"})
    lines = str(caught.value).splitlines()
    assert len(lines) <= MAX_REPORT_LINES
    assert lines[0].startswith("rank 2 of 4 on ")
    assert lines[0].endswith("ValueError: hidden 100 is not divisible by 3 heads")
    assert "rank_targets.py" in lines[1]
    assert "onnection" not in lines[0] + lines[1]
    log = Path(lines[-1].partition("log: ")[2])
    assert "Traceback" in log.read_text() and log == tmp_path / "logs" / "rank-2.log"
    assert gone(tmp_path)


@pytest.mark.parametrize(
    ("how", "words"), [("SIGKILL", "killed by SIGKILL"), ("SIGSEGV", "killed by SIGSEGV"), ("exit", "exit status 9")]
)
@pytest.mark.soak
def test_a_rank_that_dies_without_a_word_is_named_with_its_signal_or_status(
    tmp_path: Path, how: str, words: str
) -> None:
    with pytest.raises(RankFailed, match=rf"rank 1 of 3 on .*{words}") as caught:
        supervise(tmp_path, "fail", 3, {"victim": 1, "how": how})
    assert len(str(caught.value).splitlines()) <= MAX_REPORT_LINES
    assert gone(tmp_path)


def test_a_delayed_supervisor_reads_all_messages_before_it_names_a_rank(tmp_path: Path, warm: LocalAgent) -> None:
    """It named who had lost a connection, and not whose fault that was."""

    def stand_still(rank: int, message: dict) -> None:
        (tmp_path / "heard").touch()
        while len(processes_of(tmp_path / "logs" / "rank-1.log")) > 0:
            time.sleep(0.02)
        time.sleep(2.0)

    with pytest.raises(RankFailed, match=r"rank 1 of 3 on .*ValueError: hidden"):
        supervise(tmp_path, "lose_then_tell", 3, {"heard": str(tmp_path / "heard")}, hear=stand_still, agent=warm)
    assert gone(tmp_path)


def test_a_crash_in_native_code_is_told_with_the_line_of_the_model_that_it_came_from(
    tmp_path: Path, warm: LocalAgent
) -> None:
    with pytest.raises(
        RankFailed, match=r"rank 1 of 3 on .*killed by SIGSEGV: .*under z3, weights that are read outside"
    ) as caught:
        supervise(tmp_path, "fail", 3, {"victim": 1, "how": "read"}, agent=warm)
    lines = str(caught.value).splitlines()
    assert re.fullmatch(r"  at .*targets\.py:\d+ in fail", lines[1]) and len(lines) <= MAX_REPORT_LINES
    assert gone(tmp_path)


@pytest.mark.soak
def test_what_a_person_wrote_wrong_is_one_line_with_its_own_exit_code(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        supervise(tmp_path, "fail", 2, {"victim": 0, "how": "input"})
    assert str(caught.value) == "data file 'x.txt' is empty"


@pytest.mark.soak
def test_a_request_to_stop_lets_every_rank_end_by_itself(tmp_path: Path) -> None:
    there: set[int] = set()

    def hear(rank: int, message: dict) -> None:
        there.add(rank)
        if len(there) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    notes: list[str] = []
    with pytest.raises(Interrupted, match=r"stopped by SIGTERM: everything is saved"):
        supervise(tmp_path, "until_stopped", 2, {}, hear=hear, note=notes.append, grace_period=600.0)
    assert len(notes) == 1
    assert gone(tmp_path)


def test_ranks_that_do_not_stop_within_the_grace_or_at_a_second_request_are_ended(
    tmp_path: Path, warm: LocalAgent
) -> None:
    def stop_once(rank: int, message: dict) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def stop_twice(rank: int, message: dict) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    for hear, grace in ((stop_once, 0.3), (stop_twice, 600.0)):
        began = time.monotonic()
        with pytest.raises(Interrupted, match="stopped by SIGINT: the step in progress was given up") as stopped:
            supervise(tmp_path, "until_stopped", 2, {"deaf": True}, hear=hear, grace_period=grace, agent=warm)
        assert "from the last checkpoint, or from the start" in str(stopped.value)
        assert ("run.grace_period=N" in str(stopped.value)) == (grace < 1), "a second signal needs no longer grace"
        assert time.monotonic() - began < 300
        assert gone(tmp_path)


PARENT = """
import sys
from pathlib import Path
from meshwright.elastic.supervisor import Supervisor; from meshwright.elastic.attempt import RankJob
Supervisor(RankJob("rank_targets:until_stopped", 3, {}, Path(sys.argv[1]), ("rank_targets",)), lambda rank, said: \
print(said["pid"], flush=True)).run()
"""


def start_parent(folder: Path) -> tuple[subprocess.Popen, list[int]]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    return parent, [int(parent.stdout.readline()) for _ in range(3)]


def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    parent, ranks = start_parent(tmp_path)
    assert all(psutil.pid_exists(pid) for pid in ranks)
    parent.kill()
    parent.communicate()
    assert gone(tmp_path)


@pytest.mark.soak
def test_no_rank_outlives_a_killed_fork_server_and_the_parent_says_so(tmp_path: Path) -> None:
    parent, ranks = start_parent(tmp_path)
    fork_server = psutil.Process(ranks[0]).ppid()
    assert len(os.listdir(f"/proc/{fork_server}/task")) == 1  # forking a process with threads is not safe
    os.kill(fork_server, signal.SIGKILL)
    _, said = parent.communicate(timeout=900)
    assert "the process that starts ranks died (signal 9)" in said
    assert gone(tmp_path)


def test_nothing_listens_beyond_this_machine(tmp_path: Path) -> None:
    parent, _ = start_parent(tmp_path)
    try:
        family = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
        listening = {
            c.laddr.ip for process in family for c in process.net_connections() if c.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
    finally:
        parent.kill()
        parent.communicate()
    assert gone(tmp_path)


def test_a_rank_whose_process_still_lives_is_not_started_a_second_time(tmp_path: Path) -> None:
    with LocalAgent(tmp_path / "fork-server.log", ("rank_targets",)) as agent:
        heard: list[dict] = []

        def until(kind: str) -> dict:
            while not any(event["event"] == kind for event in heard):
                assert not agent.ended
                heard.extend(agent.events(0.1))
            return next(event for event in heard if event["event"] == kind)

        def start(generation: int) -> None:
            more = {
                "world": 1,
                "target": "rank_targets:until_stopped",
                "payload": {},
                "log": str(tmp_path / "log"),
                "memory": {},
            }
            agent.command("start", 0, generation=generation, **more)

        until("ready")
        start(1)
        first = until("started")["pid"]
        start(2)
        assert until("refused") == {"event": "refused", "rank": 0, "generation": 2, "pid": first}
        agent.command("signal", 0, signal=int(signal.SIGKILL))
        assert until("ended") == {"event": "ended", "rank": 0, "generation": 1, "status": -9}
        heard.clear()
        start(3)
        assert until("started")["generation"] == 3
    assert gone(tmp_path)


WARMS = """
import sys
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from meshwright.train import forkserver

seen = []
register_optimizer_step_pre_hook(lambda *_: seen.append("step"))
torch.version.cuda = sys.argv[1] or None
forkserver.preload_modules([])
print(forkserver.supported_accelerators(), seen)
"""


@pytest.mark.soak
def test_nothing_that_could_start_an_accelerator_runs_before_the_fork() -> None:
    def warmed(cuda: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", WARMS, cuda], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert warmed("13.0") == "['cuda'] []"
    assert warmed("") == "[] ['step']"


COLLECTS = """
import gc
import os
from pathlib import Path
from meshwright.train import forkserver

def own() -> int:
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Private_"))

forkserver.preload_modules([])
if os.fork() == 0:
    before = own()
    gc.collect()
    print((own() - before) // 1024, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_full_collection_in_a_rank_leaves_what_it_shares_with_the_others() -> None:
    """In MiB: 70 of what torch brings were its own after it."""
    grown = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 8


def test_a_process_that_has_started_an_accelerator_forks_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "starts.py").write_text("import torch\ntorch.cuda.is_initialized = lambda: True\n")
    with pytest.raises(RankFailed, match=r"has initialized an accelerator \(torch has initialized a GPU\)"):
        Supervisor(RankJob("rank_targets:say_sum", 1, {"given": ""}, tmp_path, ("starts",)), lambda *_: None).run()
    assert gone(tmp_path)
