"""A run on several nodes, each a supervisor of its own: what happens on one of them, or to one of them, costs no step
that can be kept."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from fork_server import kill
from ports import reserved
from test_train_run import JOB, environment, furnished, held, let_go, weights

from meshwright.core.snapshots import HEADER_BYTES, SnapshotHeader

JOB = (
    JOB.replace("steps: 40, precision: fp32", "steps: 60, precision: fp64")
    .replace("warmup: 5", "warmup: 5, schedule: constant")
    .replace("dp2.z1", "dp4.z1")
    .replace("checkpoint_every: 4", "checkpoint_every: 20, rejoin_timeout: 1.0")
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return furnished(tmp_path_factory.mktemp("nodes"), text, JOB)


class Nodes:
    """Nodes of a job in `place`, on this machine's loopback. `endless`: they train until they are asked to stop;
    `steps`: in all, where the job says others."""

    program: tuple[str, ...] = (sys.executable, "-m", "meshwright.cli.main")

    def __init__(
        self,
        place: Path,
        run: str,
        port: int | None = None,
        count: int = 2,
        endless: bool = False,
        steps: int = 0,
        until: int = 0,
    ) -> None:
        """`until`: the step from which on they come slowly, until it is let go (paced_steps.py)."""
        self.place, self.run, self.count, self.held = place, run, count, ExitStack()
        self.paced = held(place, run, until) if until else {}
        self.program = (sys.executable, "-m", "paced_steps") if until else self.program
        self.told: list[dict] = []
        self.said = ""
        self.steps = ["--steps", str(10**6 if endless else steps)] if endless or steps else []
        self.port = self.held.enter_context(reserved()) if port is None else port
        self.processes = [self.start(number) for number in range(count)]

    def start(self, number: int, behind: Sequence[str] = (), **more: str) -> subprocess.Popen:
        there = {
            **environment(self.place),
            "MESHWRIGHT_NODE": "1", "RANK": str(number), "WORLD_SIZE": str(self.count), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port), **self.paced, **more,
        }  # fmt: skip
        command = [*behind, *self.program, "train", "job.yaml", "--folder", f"runs/{self.run}", *self.steps]
        with open(self.words(number), "a") as err:  # no pipe, which is full one day, and whose writer waits then
            return subprocess.Popen(command, cwd=self.place, env=there, stdout=subprocess.DEVNULL, stderr=err)

    def words(self, number: int) -> Path:
        """What a node says."""
        return self.place / f"{self.run}-{number}.err"

    @property
    def folder(self) -> Path:
        return self.place / "runs" / self.run

    def step(self) -> int:
        records = self.folder / "records.jsonl"
        lines = records.read_text().splitlines() if records.exists() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0

    def wait_for(self, step: int) -> None:
        while self.step() < step and self.processes[0].poll() is None:
            time.sleep(0.005)

    def wait_for_next(self, step: int, number: int) -> None:
        """Until node `number` has made more steps than `step`."""
        while self.step() <= step and self.processes[number].poll() is None:
            time.sleep(0.005)

    def wait_for_event(self, number: int, *words: str, times: int = 1) -> None:
        """Until it has happened so often that an event has all `words`, and node `number`, which leads, has made a step
        more."""
        happened = lambda: sum(all(word in str(event) for word in words) for event in self.events())
        while happened() < times and self.processes[number].poll() is None:
            time.sleep(0.02)
        self.wait_for_next(self.step() + 1, number)

    def mirrored(self, ranks: Sequence[int], number: int = 0) -> int:
        """A step of which node `number` certainly has whole copies of these ranks, which run elsewhere: of the two in
        a mirror the older one, as the newer one is ordered only then. 0: none yet."""
        return min((min(steps) if len(steps) == 2 else 0) for steps in self.mirrors(ranks, number).values())

    def mirrors(self, ranks: Sequence[int], number: int) -> dict[int, set[int]]:
        """The steps of which node `number` has whole copies of each of these ranks."""
        found: dict[int, set[int]] = {rank: set() for rank in ranks}
        for file in Path(f"/proc/{self.processes[number].pid}/fd").iterdir():
            with suppress(OSError):
                _, is_copy, name = os.readlink(file).partition(" ")[0].partition("/memfd:meshwright-copies-")
                rank = int(name.rpartition("-")[2]) if is_copy else -1
                if rank in found:
                    with file.open("rb") as copies:
                        found[rank] = SnapshotHeader(
                            memoryview(copies.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0")).cast("Q")
                        ).steps
        return found

    def ranks(self, number: int) -> list[psutil.Process]:
        return self.named(number, "mesh-rank")

    def named(self, number: int, name: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.processes[number].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found += [child] if child.name().startswith(name) else []
        return found

    def end(self) -> tuple[int, str, int]:
        """Exit code and words of the first node, exit code of the last one that was started."""
        codes = [process.wait(900) for process in self.processes]
        self.held.close()
        return codes[0], self.words(0).read_text(), codes[-1]

    def losses(self) -> dict[int, float]:
        return {
            record["step"]: record["loss"]
            for record in map(json.loads, (self.folder / "records.jsonl").read_text().splitlines())
        }

    def events(self) -> list[dict]:
        log = self.folder / "events.jsonl"
        return list(map(json.loads, log.read_text().splitlines())) if log.exists() else []

    def incidents(self) -> list[dict]:
        """The events that a run without a fault does not have."""
        return [event for event in self.events() if event["kind"] not in ("save", "ended")]


def knock(nodes: Nodes) -> list[dict]:
    """What somebody without the token is told, until the line is cut."""
    with socket.create_connection(("127.0.0.1", nodes.port)) as stranger:
        lines = stranger.makefile("rb")
        challenge = lines.readline()
        stranger.sendall(b'{"proof":"00","challenge":"11","name":"x","devices":8,"order":0}\n')
        return list(map(json.loads, (challenge, *lines)))


@pytest.fixture(scope="module")
def whole(place: Path) -> Nodes:
    """A run that nothing disturbed: somebody who has not the token knocks, and is sent away."""
    nodes = Nodes(place, "whole", until=10)
    nodes.wait_for(2)
    nodes.told = knock(nodes)
    let_go(place, "whole")
    code, nodes.said, other = nodes.end()
    assert (code, other) == (0, 0), nodes.said
    return nodes


def test_two_nodes_train_one_model_and_leave_no_secret(whole: Nodes) -> None:
    losses = whole.losses()
    assert sorted(losses) == list(range(61)) and losses[60] < 0.5 * losses[0]
    assert not (whole.folder / "token").exists()


def test_nobody_joins_without_the_token(whole: Nodes) -> None:
    """And nobody notices: runs at which nobody knocks end in the same bytes, below."""
    challenge, refusal = whole.told
    assert "challenge" in challenge and refusal == {"refused": "another token"}
    assert "x has joined" not in whole.said


@pytest.mark.soak
def test_a_rank_killed_on_either_node_costs_no_step(place: Path, whole: Nodes) -> None:
    nodes = Nodes(place, "ranks", until=50)
    for times, (step, node) in enumerate(((8, 1), (22, 0), (36, 1)), 1):
        nodes.wait_for(step)
        nodes.ranks(node)[-1].kill()
        nodes.wait_for_event(0, "'recovery'", times=times)
    let_go(place, "ranks")
    code, err, other = nodes.end()
    assert (code, other) == (0, 0), err
    recoveries = [event for event in nodes.events() if event["kind"] == "recovery"]
    assert len(recoveries) >= 3 and {(event.get("lost", 0), event["source"]) for event in recoveries} == {(0, "memory")}
    assert nodes.losses() == whole.losses()
    assert weights(place, "ranks", 60) == weights(place, "whole", 60) != {}


@pytest.mark.soak
def test_the_fork_server_of_a_node_killed_again_while_it_loads_costs_no_step(place: Path, whole: Nodes) -> None:
    nodes = Nodes(place, "fork", until=50)
    nodes.wait_for(20)
    assert len(kill(nodes.processes[1], 2)) == 2
    nodes.wait_for_event(0, "'recovery'")
    let_go(place, "fork")
    code, err, other = nodes.end()
    assert (code, other) == (0, 0), err
    assert {event.get("lost", 0) for event in nodes.events() if event["kind"] == "recovery"} == {0}
    assert nodes.losses() == whole.losses()


@pytest.mark.soak
def test_a_node_that_is_told_to_go_takes_no_step_with_it(place: Path, whole: Nodes) -> None:
    """The others read the copies of the one that leaves, under a plan for fewer ranks."""
    nodes = Nodes(place, "leaves", endless=True)
    nodes.wait_for(30)
    nodes.processes[1].send_signal(signal.SIGTERM)
    nodes.wait_for_event(0, "recovery")
    nodes.wait_for(60)
    nodes.processes[0].send_signal(signal.SIGTERM)
    code, err, other = nodes.end()
    assert (code, other) == (75, 75), err
    (resized,) = [event for event in nodes.events() if event["kind"] == "recovery"]
    assert resized.get("lost", 0) == 0 and resized["source"] == "memory"
    assert "goes on with 2 instead of 4 ranks" in err
    losses = nodes.losses()
    assert all(abs(losses[step] - loss) <= 1e-6 * loss for step, loss in whole.losses().items())


@pytest.mark.soak
def test_a_lost_node_costs_the_steps_since_a_checkpoint_and_its_ranks_return(place: Path, whole: Nodes) -> None:
    nodes = Nodes(place, "lost", endless=True)
    nodes.wait_for(30)
    nodes.processes[1].kill()
    nodes.wait_for_event(0, "resize", "4 to 2 ranks")
    nodes.processes.append(nodes.start(1))
    nodes.wait_for_event(0, "resize", "2 to 4 ranks")
    nodes.wait_for(60)
    nodes.processes[0].send_signal(signal.SIGTERM)
    code, err, other = nodes.end()
    assert (code, other) == (75, 75), err
    kinds = [event["kind"] for event in nodes.events()]
    assert "node_lost" in kinds and "node_joined" in kinds[kinds.index("node_lost") :]
    assert "goes on with 4 instead of 2 ranks" in err
    losses = nodes.losses()
    assert sorted(losses) == list(range(max(losses) + 1))
    assert all(abs(losses[step] - loss) <= 1e-6 * loss for step, loss in whole.losses().items())


@pytest.mark.soak
def test_a_killed_node_costs_the_steps_since_the_last_replication_round(place: Path) -> None:
    """Its copies went with it; the mirror that the other node kept of them is read instead."""
    calm = JOB.replace("batch: 8, steps: 60", "batch: 128, steps: 14")
    (place / "job.yaml").write_text(calm.replace("dp4.z1", "dp2.z1"))
    try:
        command = [sys.executable, "-m", "meshwright.cli.main", "train", "job.yaml", "--folder", "runs/calm"]
        subprocess.run(
            command,
            cwd=place,
            env={**os.environ, "MESHWRIGHT_CACHE": str(place / "cache")},
            check=True,
            capture_output=True,
        )
        (place / "job.yaml").write_text(calm)
        nodes = Nodes(place, "mirrored", until=9)
        nodes.wait_for(8)
        while not (mirrored := nodes.mirrored((2, 3))) and nodes.processes[0].poll() is None:
            time.sleep(0.02)
        ranks = nodes.ranks(1)
        for process in (*ranks, nodes.processes[1]):
            process.kill()
        let_go(place, "mirrored")
        code, err, _ = nodes.end()
    finally:
        (place / "job.yaml").write_text(JOB)
    assert code == 0, err
    (recovery,) = [event for event in nodes.events() if event["kind"] == "recovery"]
    assert (
        recovery["source"] == "memory"
        and recovery["step"] >= mirrored > 0
        and "goes on with 2 instead of 4 ranks" in err
    )
    losses = nodes.losses()
    nodes.run = "calm"
    expected = nodes.losses()
    assert sorted(losses) == sorted(expected) == list(range(15))
    assert all(abs(losses[step] - loss) <= 1e-6 * loss for step, loss in expected.items())


def test_when_the_first_node_is_gone_the_next_one_leads_and_at_most_one_step_is_lost(place: Path, whole: Nodes) -> None:
    """Row 26. From the copies of the node that leads then and its mirrors of the lost one, without a person; the lost
    node joins it when it comes back; no secret and no leader's address stay behind."""
    nodes = Nodes(place, "heir", endless=True, until=30)
    nodes.wait_for(29)
    while not all(29 in steps for steps in nodes.mirrors((0, 1), 1).values()) and nodes.processes[0].poll() is None:
        time.sleep(0.02)
    ranks, warm = nodes.ranks(1), nodes.named(1, "mesh-forkserver")
    for process in (*nodes.ranks(0), nodes.processes[0]):
        process.kill()
    nodes.processes[0].wait()
    let_go(place, "heir")
    _, alive = psutil.wait_procs(ranks, 300)
    assert ranks and not alive
    nodes.wait_for_next(nodes.step(), 1)
    assert nodes.named(1, "mesh-forkserver") == warm, "the process that forks ranks serves on"
    nodes.processes[0] = nodes.start(0)
    nodes.wait_for_event(1, "node_joined", "'0 (")
    nodes.wait_for(60)
    nodes.processes[1].send_signal(signal.SIGTERM)
    code, err, other = nodes.end()
    assert (code, other) == (75, 75), err
    assert "node 0 of 2 at 127.0.0.1, led by 127.0.0.1" in err
    recovery = next(event for event in nodes.events() if event["kind"] == "recovery")
    assert recovery["source"] == "memory" and recovery.get("lost", 0) <= 1 and recovery["step"] >= 28, recovery
    kinds = [(event["kind"], event.get("node", "")) for event in nodes.events()]
    assert ("node_lost", "0") in kinds and any(kind == "node_joined" and node.startswith("0 ") for kind, node in kinds)
    losses = nodes.losses()
    assert sorted(losses) == list(range(max(losses) + 1))
    assert all(abs(losses[step] - loss) <= 1e-6 * loss for step, loss in whole.losses().items())
    assert not {"token", "leader"} & set(os.listdir(nodes.folder))


SRUN = """#!/bin/bash
for task in 0 1; do SLURM_PROCID=$task SLURM_NTASKS=2 "${@:3}" & done
wait -n; first=$?; wait -n; second=$?; exit $((first > second ? first : second))
"""


@pytest.mark.soak
def test_the_script_for_slurm_trains_on_two_nodes(place: Path, whole: Nodes) -> None:
    """In the place of Slurm: its commands, for two nodes that are this machine."""
    bin_ = place / "bin"
    bin_.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n")):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o700)
    path = f"{bin_}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    there = {**environment(place), "PATH": path}
    command = [
        sys.executable,
        "-m",
        "meshwright.cli.main",
        "launch",
        "job.yaml",
        "--cluster",
        "2x2:cpu",
        "--on",
        "slurm",
        "--save",
        "slurm",
    ]
    command += ["--set", "run.folder=runs/slurm"]
    assert subprocess.run(command, cwd=place, env=there, check=False, capture_output=True).returncode == 0
    with reserved(range(20001, 30000)) as port:  # which the script makes of the number of the job
        there = {**there, "SLURM_JOB_ID": str(port - 20000), "SLURM_JOB_NODELIST": "here[0-1]"}
        done = subprocess.run(
            ["bash", "slurm/slurm.sbatch"],
            cwd=place,
            env=there,
            check=False,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr
    assert "node 1 of 2 at 127.0.0.1" in done.stderr
    assert weights(place, "slurm", 60) == weights(place, "whole", 60) != {}
