"""Which rank failed first and what is said of it; which launches are one job; which reduced plans stand for a plan. No
process is started."""

import math
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cli.launch_plan import PlanChoice, choose_plan, write_run_folder
from meshwright.cli.options import JobOptions
from meshwright.core.errors import InputError, MeshwrightError, NothingFits
from meshwright.core.ipc import WAIT_INCREMENT, Heartbeat, HeartbeatField, RankPhase
from meshwright.core.messages import translate
from meshwright.elastic.attempt import Attempt, RankJob
from meshwright.elastic.cluster_agent import LEADER_PLANNING_SECONDS, _send_keepalives
from meshwright.elastic.failure import (
    MAX_REPORT_LINES,
    RankExit,
    RankFailed,
    crash_location,
    diagnose,
    failure_cause,
    find_culprit,
    is_oom,
    local_failure,
)
from meshwright.elastic.hang_detector import (
    ACCELERATOR_LIMITS,
    CPU_LIMITS,
    FORK_SERVER_SECONDS,
    WARMUP_STEPS,
    HangDetector,
    HangLimits,
    StepPace,
)
from meshwright.elastic.local_agent import SystemInterface
from meshwright.elastic.proc_stats import ProcStats
from meshwright.elastic.replan import plan_for_devices
from meshwright.elastic.restart_policy import RestartPolicy
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.report.faults import faults_text, read_events
from meshwright.spec.constraints import world_size_violations
from meshwright.spec.job import LaunchSpec, describe_extension, job_difference
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.record import EVENTS_FILE_NAME
from meshwright.spec.scaled_down import MAX_SCALED_DOWN_RANKS, scale_down_plan
from meshwright.spec.workload import Workload
from meshwright.train.forkserver import aborted_by_watchdog

LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:36501"
NCCL = "NCCL error: remote process exited or there was a network error, NCCL version 2.27\nncclRemoteError: ..."


def logs(rank: int) -> Path:
    return Path("run/logs") / f"rank-{rank}.log"


WATCHDOG = (
    "[rank2]:[E810 ProcessGroupNCCL.cpp:758] [Rank 2] To avoid data inconsistency, we are taking the entire process "
    "down.\n[PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception: {}\n"
)


@pytest.mark.parametrize(
    ("said", "aborted"),
    [
        (WATCHDOG.format("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, ...)"), True),
        (WATCHDOG.format("NCCL error: remote process exited or there was a network error, NCCL version 2.27.5"), True),
        (WATCHDOG.format("CUDA error: an illegal memory access was encountered"), False),
        (WATCHDOG.format("HIP error: invalid device function, collective operation timeout"), False),
        ("terminate called after throwing an instance of 'gloo::EnforceNotMet'\n", False),
    ],
)
def test_a_rank_that_the_watchdog_of_nccl_aborts_is_not_the_culprit(said: str, aborted: bool, tmp_path: Path) -> None:
    """The watchdog aborts ranks that wait for a hung or dead rank. Without this, the first of them was to blame."""
    (tmp_path / "rank-2.log").write_text("step 7\n" + said)
    assert aborted_by_watchdog(tmp_path / "rank-2.log") == aborted
    attempt = Attempt(RankJob("", 3, {}, tmp_path), 1, lambda *_: None, dict.fromkeys(range(3), 1))
    for rank, status in ((2, -6), (1, -9)):
        event = {"event": "ended", "rank": rank, "generation": 1, "status": status}
        attempt.heed(event | ({"watchdog": True} if aborted and rank == 2 else {}))
    assert find_culprit([*attempt.failures.values()]).rank == (1 if aborted else 2)
    if aborted:
        assert "NCCL's watchdog aborted the process" in failure_cause(attempt.failures[2])


@pytest.mark.parametrize("words", [LOST, NCCL, "Connection reset by peer", "[Errno 32] Broken pipe"])
def test_a_lost_connection_is_innocent_however_early_it_is_told(words: str) -> None:
    failures = [
        RankExit(0, 1.0, 1, "RuntimeError", words),
        RankExit(1, 1.5, 1, "ValueError", "no good"),
        RankExit(2, 2.0, -9),
    ]
    assert find_culprit(failures).rank == 1


def test_an_oom_kill_is_distinguished_from_a_manual_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the control group counted before the generation began says nothing of it."""
    counted = [3]
    monkeypatch.setattr("meshwright.elastic.attempt.oom_kill_count", lambda: counted[0])

    def died(before: int, after: int, status: int = -9, **more: Any) -> RankExit:
        now = Attempt(RankJob("", 2, {}, Path("run")), 0, lambda rank, message: None, living={1: 7}, kills=before)
        counted[0] = after
        now.heed({"event": "ended", "generation": 0, "rank": 1, "status": status, **more})
        return now.failures[1]

    assert (
        is_oom(died(3, 4))
        and "which was out of memory" in failure_cause(died(3, 4))
        and "(1 killed" in failure_cause(died(3, 4))
    )
    plain = died(3, 3)
    assert (
        not is_oom(plain)
        and failure_cause(plain)
        == "killed by SIGKILL (by someone's kill -9, or by the system, which was out of memory)"
    )
    assert not is_oom(died(3, 4, -11)) and "out of memory" not in failure_cause(died(3, 4, -11))
    assert not is_oom(died(3, 4, kills=0))  # on another node, which has counted for itself
    assert is_oom(RankExit(1, 0.0, -9, words=failure_cause(died(3, 4)), oom=True)) and not is_oom(
        RankExit(1, 0.0, -9, words="hung: no sign of life", kills=2)
    )


def test_a_second_oom_in_a_step_is_hopeless_under_the_same_plan() -> None:
    retries = RestartPolicy(5)
    assert not retries.count(RankExit(0, 0.0, 75, "OutOfMemory", "48 MiB more", known=True), 7, starved=True)
    assert "again" in retries.count(RankExit(2, 0.0, -9), 7, starved=True)
    assert not retries.count(RankExit(2, 0.0, -9), 8, starved=True)


def test_two_ranks_that_vanish_in_the_same_step_are_no_repeated_error() -> None:
    retries = RestartPolicy(5)
    assert not retries.count(RankExit(3, 0.0, 1), 51) and not retries.count(RankExit(1, 0.0, 1), 51)
    assert "the same error" in retries.count(RankExit(1, 0.0, 1), 51)
    assert not retries.count(RankExit(3, 0.0, 1, "ValueError", "hidden"), 60) and "same" in retries.count(
        RankExit(1, 0.0, 1, "ValueError", "hidden"), 60
    )


def test_when_all_lost_their_connections_the_first_is_named() -> None:
    assert (
        find_culprit([RankExit(3, 2.0, 1, "RuntimeError", LOST), RankExit(1, 1.0, 1, "RuntimeError", LOST)]).rank == 1
    )


def test_a_report_names_rank_and_cause_first_and_counts_the_innocent(tmp_path: Path) -> None:
    log = tmp_path / "rank-5.log"
    log.write_text("\n".join(f"line {number} " + "x" * 500 for number in range(100)))
    failures = [RankExit(5, 1.0, -11), *(RankExit(rank, 2.0, 1, "RuntimeError", LOST) for rank in range(5))]
    lines = str(diagnose(failures, 8, lambda rank: tmp_path / f"rank-{rank}.log")).splitlines()
    assert "rank 5 of 8 on " in lines[0] and "killed by SIGSEGV" in lines[0]
    assert len(lines) <= MAX_REPORT_LINES and max(map(len, lines)) < 260
    assert "  5 other ranks lost the connection because of it" in lines
    assert lines[-1] == f"  log: {log}"


def test_a_crash_names_the_innermost_line_outside_of_torch(tmp_path: Path) -> None:
    stack = (
        'Fatal Python error: {}\n\nCurrent thread 0x01 (most recent call first):\n  File "/x/torch/_ops.py", line 1 '
        'in call\n{}\nThread 0x02 (most recent call first):\n  File "b.py", line 9 in wait\n'
    )
    log = tmp_path / "rank-0.log"
    log.write_text(
        "step 1\n"
        + stack.format("Aborted", '  File "old.py", line 5 in old\n')
        + stack.format("Bus error", '  File "a b.py", line 7 in <lambda>\n')
    )
    assert crash_location(log) == "a b.py:7 in <lambda>"
    assert "  at a b.py:7 in <lambda>" in str(diagnose([RankExit(0, 1.0, -7)], 1, lambda rank: log)).splitlines()
    assert "  at" not in str(diagnose([RankExit(0, 1.0, -9)], 1, lambda rank: log))  # nobody was asked
    log.write_text(stack.format("Aborted", ""))
    assert crash_location(log) == "" == crash_location(tmp_path / "none.log")


def test_a_message_of_many_lines_takes_one() -> None:
    failure = RankExit(0, 1.0, 1, "RuntimeError", "first\n" + "more\n" * 50, "a.py:1 in f")
    assert len(str(diagnose([failure], 1, logs)).splitlines()) == 3


def test_what_a_person_wrote_wrong_keeps_its_line_and_its_exit_code() -> None:
    lost = RankExit(0, 0.5, 1, "RuntimeError", LOST)
    error = diagnose([RankExit(1, 1.0, 2, "InputError", "batch 7 is odd", known=True), lost], 2, logs)
    assert isinstance(error, InputError) and str(error) == "batch 7 is odd"
    error = diagnose([RankExit(1, 1.0, 1, "SaveFailed", "no space left", known=True), lost], 2, logs)
    assert (type(error), error.exit_code, str(error)) == (MeshwrightError, 1, "no space left")


def test_a_plan_with_less_memory_is_suggested_after_an_oom_or_an_oom_kill() -> None:
    wanting = RankExit(1, 1.0, 1, "OutOfMemory", "rank 1 is out of memory in step 2", known=True)
    assert (
        str(diagnose([wanting], 2, logs, "", "plan dp2.z3 takes less"))
        == "rank 1 is out of memory in step 2; plan dp2.z3 takes less"
    )
    assert (
        "  plan dp2.z3 takes less"
        in str(diagnose([RankExit(1, 1.0, -9)], 2, logs, "", "plan dp2.z3 takes less")).splitlines()
    )


def test_the_rank_that_raised_is_the_culprit_also_when_those_that_waited_tell_first(tmp_path: Path) -> None:
    first = RankExit(0, 1.0, 2, "PlanRefused", "rank 1: plan pp2: no", known=True, raised_by=1)
    origin = RankExit(1, 1.1, 2, "PlanRefused", "plan pp2: no", known=True)
    assert find_culprit([first, origin]) is origin
    assert str(diagnose([first, origin], 2, lambda rank: tmp_path / "log")) == "plan pp2: no"
    unknown = RankExit(1, 1.1, 1, "ValueError", "a bad value", "model.py:3 in forward")
    waited = RankExit(0, 1.0, 1, "MeshwrightError", "rank 1 raised ValueError: a bad value", known=True, raised_by=1)
    lines = str(diagnose([waited, unknown], 2, lambda rank: tmp_path / "log")).splitlines()
    assert lines[0].startswith("rank 1 of 2") and lines[0].endswith("ValueError: a bad value")
    assert "  1 other rank lost the connection because of it" in lines


def test_ranks_that_fail_of_their_own_are_not_called_innocent() -> None:
    failures = [RankExit(rank, 1.0 + rank, 1, "ValueError", "no good") for rank in range(3)] + [
        RankExit(3, 4.0, 1, "RuntimeError", LOST)
    ]
    lines = str(diagnose(failures, 4, logs)).splitlines()
    assert lines[0].startswith("rank 0 of 4") and "  2 other ranks failed too" in lines
    assert "  1 other rank lost the connection because of it" in lines


def test_a_rank_without_a_supervisor_says_whether_it_was_the_cause() -> None:
    own = local_failure(ValueError("no good"), 1, 4)
    assert (
        isinstance(own, RankFailed)
        and str(own).startswith("rank 1 of 4 on ")
        and str(own).endswith(": ValueError: no good")
    )
    assert "because of another rank" in str(local_failure(RuntimeError(LOST), 0, 4))
    known = MeshwrightError("full disk")
    assert local_failure(known, 0, 4) is known


def launch(plan: str = "dp2", **workload: object) -> LaunchSpec:
    return LaunchSpec(
        model={"name": "m", "sizes": {"layers": 2}},
        workload=workload,
        data={},
        plan=parse_plan(plan),
        run={"folder": "runs/m"},
    )


def test_the_plan_and_the_folder_do_not_make_another_job() -> None:
    assert (
        job_difference(launch("dp2"), launch("dp4.tp2.z3").but(run={"folder": "elsewhere", "keep": 1}, parameters=9))
        == ""
    )


def test_what_decides_the_result_makes_another_job_and_is_named() -> None:
    assert job_difference(launch(seed=2), launch()) == "workload.seed is 1 there and 2 here"
    assert (
        job_difference(launch(optimizer={"lr": 0.1}), launch()) == "workload.optimizer.lr is 0.0003 there and 0.1 here"
    )
    other = launch().but(model={"name": "m", "sizes": {"layers": 3}})
    assert job_difference(other, launch()) == "model.sizes.layers is 2 there and 3 here"
    assert (
        job_difference(launch().but(data={"source": "a.txt"}), launch())
        == "data.source is 'stdlib' there and 'a.txt' here"
    )


def test_more_steps_are_another_curve_but_under_a_constant_learning_rate() -> None:
    assert job_difference(launch(steps=9), launch(steps=5)) == "workload.steps is 5 there and 9 here"
    constant = {"schedule": "constant"}
    assert job_difference(launch(steps=9, optimizer=constant), launch(steps=5, optimizer=constant)) == ""
    assert (
        describe_extension(launch(steps=9, optimizer=constant), launch(steps=5, optimizer=constant))
        == "goes on to step 9 instead of 5"
    )


def test_a_run_is_extended_with_a_note_and_an_event_but_not_shortened(tmp_path: Path) -> None:
    begin = lambda more: write_run_folder(tmp_path, launch(**more), PlanChoice(None, parse_plan("dp2"), None, []))
    assert (
        begin({"seed": 3}) == begin({"steps": 5}) == begin({"steps": 5}) == ""
    )  # a folder without a step is used again
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert begin({"steps": 9}).startswith(
        "goes on to step 9 instead of 5: from here on the learning rate follows the cosine over 9 steps"
    )
    assert begin({"steps": 9}) == ""
    for more in ({"steps": 8}, {"steps": 10, "seed": 2}):
        with pytest.raises(InputError, match="belongs to another job"):
            begin(more)
    assert [event.kind for event in read_events(tmp_path / EVENTS_FILE_NAME)] == ["run_extended"]
    assert "goes on to step 9 instead of 5" in faults_text(read_events(tmp_path / EVENTS_FILE_NAME))


def test_another_plan_than_the_run_was_trained_under_is_said(tmp_path: Path) -> None:
    job = JobOptions(model="llama-tiny", cluster="1x2:cpu", plan="dp2.z1").job_file(None)
    said = lambda: [translate(line) for line in choose_plan(job, None, tmp_path, {}, None).why]
    (tmp_path / "plan.json").write_text(parse_plan("tp2").to_json())
    assert not any("instead of" in line for line in said())  # no step was made
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "plan.json").write_text(parse_plan("dp2.z1").to_json())
    assert not any("instead of" in line for line in said())
    (tmp_path / "plan.json").write_text(parse_plan("tp2").to_json())
    assert said()[-1] == "  instead of plan tp2.mb1, which the run used so far"


degrees = st.integers(1, 64)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    zero, tp, pp = draw(st.integers(0, 3)), draw(degrees), draw(degrees)
    virtual = draw(st.integers(2, 10)) if pp > 1 and draw(st.booleans()) else 1
    schedule = "interleaved" if virtual > 1 else draw(st.sampled_from(["gpipe", "1f1b"]))
    return Plan(
        dp_replicate=draw(degrees),
        dp_shard=draw(degrees) if zero else 1,
        zero=zero,
        tp=tp,
        pp=pp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        schedule=schedule,
        virtual_stages=virtual,
        micro_batch=draw(st.integers(1, 16)),
        recompute=draw(st.sampled_from(["none", "full"])),
    )


@settings(deadline=None)
@given(plans())
def test_a_reduced_plan_is_legal_small_and_keeps_what_it_can(plan: Plan) -> None:
    small = scale_down_plan(plan)
    assert small.world <= MAX_SCALED_DOWN_RANKS and not list(world_size_violations(small, small.world))
    assert (small.zero, small.recompute) == (plan.zero, plan.recompute)
    for axis in ("tp", "pp"):
        assert getattr(small, axis) <= getattr(plan, axis)
        assert (getattr(small, axis) > 1) == (getattr(plan, axis) > 1)  # there is always room for both
    assert (plan.world > MAX_SCALED_DOWN_RANKS) or small.world == plan.world


def test_a_hang_after_a_restart_is_judged_by_the_steps_before_the_restart() -> None:
    """Of the very first steps nobody knows how long they take: they get a minute."""
    holdings, pace, clock = SharedFileStore(2), StepPace(), [0.0]

    def generation(steps: int, seconds: float, limit: float) -> float:
        """Rank 1 hangs after so many steps; how long it took to be seen."""
        watch = HangDetector(holdings, 2.0, clock=lambda: clock[0], signs=lambda process: ProcStats("S"), pace=pace)
        holdings.begin()
        watch.look({0: 10, 1: 11})
        pulses = [Heartbeat(holdings.memory, rank, lambda: clock[0]) for rank in (0, 1)]
        for step in range(1, steps + 2):
            for pulse in pulses:
                pulse.at(RankPhase.data, step)
                watch.look({0: 10, 1: 11})
            clock[0] += seconds
        holdings.pulse(0).at(RankPhase.reduce)
        holdings.pulse(0).write(HeartbeatField.waits, 2)
        began = clock[0] - seconds
        while (hung := watch.look({0: 10, 1: 11})) is None and clock[0] < began + limit:
            clock[0] += 0.1
        assert hung is not None and hung.rank == 1
        holdings.pulse(0).write(HeartbeatField.waits, 0)
        return clock[0] - began

    assert 60.0 < generation(2, 1.0, 70.0) < 61.0
    assert 60.0 < generation(0, 1.0, 70.0) < 61.0
    assert 5.0 < generation(1, 1.0, 70.0) < 5.5 and not pace.steps, (
        "three steps have been seen, whatever generations they were of"
    )
    assert 5.0 < generation(8, 1.0, 20.0) < 5.5
    assert 5.0 < generation(0, 1.0, 70.0) < 5.5
    pace.first = 0.1
    assert 5.0 < generation(0, 0.1, 70.0) < 5.5
    holdings.close()


def test_ranks_that_start_are_not_silent_while_one_of_them_computes() -> None:
    """One encodes a corpus for ten minutes, the other waits for its lock; neither says a word meanwhile."""
    holdings, clock, computed = SharedFileStore(2), [0.0], {10: 0.0, 11: 0.0}
    watch = HangDetector(
        holdings, 2.0, clock=lambda: clock[0], signs=lambda process: ProcStats("S", 0.0, computed[process])
    )
    holdings.begin()

    def seconds(most: float, share: float) -> float:
        """How long nobody is called hung while rank 1 computes for that share of its time."""
        began = clock[0]
        while watch.look({0: 10, 1: 11}) is None and clock[0] < began + most:
            clock[0] += 0.2
            computed[11] += 0.2 * share
        return clock[0] - began

    watch.look({0: 10, 1: 11})
    for rank in (0, 1):
        holdings.pulse(rank).at(RankPhase.build)
    assert seconds(600.0, 0.8) >= 600.0
    assert seconds(600.0, 0.002) < 70.0, "looking about is no work"
    for rank in (0, 1):
        holdings.pulse(rank).at(RankPhase.data, 1)
    assert seconds(600.0, 1.0) < 70.0, "who trains and computes for ever hangs"
    holdings.close()


def test_of_two_ranks_that_wait_for_each_other_the_one_that_stopped_is_named() -> None:
    holdings, clock = SharedFileStore(2), [0.0]

    def hang(looking: tuple[int, ...]) -> str:
        pace = StepPace(first=0.1, early=3)
        watch = HangDetector(holdings, 2.0, clock=lambda: clock[0], signs=lambda process: ProcStats("S"), pace=pace)
        holdings.begin()
        for step in (1, 2):
            for rank in (0, 1):
                holdings.pulse(rank).at(RankPhase.reduce, step)
            watch.look({0: 10, 1: 11})
        for rank in (0, 1):
            holdings.pulse(rank).write(HeartbeatField.waits, 2 - rank)
        while (hung := watch.look({0: 10, 1: 11})) is None and clock[0] < 1e3:
            clock[0] += 0.1
            for rank in looking:
                holdings.pulse(rank).write(
                    HeartbeatField.waits, holdings.pulse(rank).read(HeartbeatField.waits) + WAIT_INCREMENT
                )
        return "" if hung is None else f"{hung.rank}: {hung.words}"

    assert hang((0,)).startswith("1: hung: no sign of life") and hang((1,)).startswith("0: hung: no sign of life")
    assert hang((0, 1)) == "0: hung: rank 0 waits for rank 1 waits for rank 0: they are not in the same collective"
    holdings.close()


def test_steps_are_as_long_as_ranks_say_however_seldom_they_are_looked_at() -> None:
    holdings, pace, clock = SharedFileStore(1), StepPace(), [0.0]
    watch = HangDetector(holdings, 2.0, clock=lambda: clock[0], signs=lambda process: ProcStats("S"), pace=pace)
    holdings.begin()
    pulse = Heartbeat(holdings.memory, 0, lambda: clock[0])
    for step in range(1, 9):
        pulse.at(RankPhase.data, step)
        if step in (2, 7):
            watch.look({0: 10})
        clock[0] += 0.1
    assert [pace.first, *pace.steps] == pytest.approx([0.1, 0.1], abs=2e-6)
    assert pulse.read(HeartbeatField.took) == pytest.approx(100_000, abs=2)
    pulse.at(RankPhase.data, 8)
    assert pulse.read(HeartbeatField.took) == 0, "a step that begins again has ended none"
    holdings.close()


def seconds_until_named(
    phases: tuple[RankPhase, RankPhase], most: float = 600.0, state: str = "S", **rates: float
) -> tuple[float, str]:
    """How long nobody is called hung while two ranks stand in `phases`, and what is said then. `rates`: what rank 1
    does each second."""
    holdings, clock = SharedFileStore(2), [0.0]
    doing = lambda process: (
        ProcStats(state, **{name: rate * clock[0] for name, rate in rates.items()}) if process == 11 else ProcStats("S")
    )
    watch = HangDetector(holdings, 2.0, clock=lambda: clock[0], signs=doing)
    holdings.begin()
    for rank, phase in enumerate(phases):
        holdings.pulse(rank).at(phase)
    while (hung := watch.look({0: 10, 1: 11})) is None and clock[0] < most:
        clock[0] += 0.2
    holdings.close()
    return clock[0], "" if hung is None else f"{hung.rank}: {hung.words}"


@pytest.mark.parametrize("phase", [RankPhase.build, RankPhase.restore, RankPhase.save])
def test_ranks_that_read_or_write_for_long_are_not_silent_where_they_do_not_train(phase: RankPhase) -> None:
    """Ten minutes, 100 kB a second; or one call that has not come back from its disk; the other rank waits."""
    assert seconds_until_named((phase, phase), moved=1e5)[0] >= 600.0
    assert seconds_until_named((phase, phase), state="D")[0] >= 600.0
    assert 60.0 < seconds_until_named((phase, phase), moved=1e3)[0] < 70.0, "looking about is no work"
    found, words = seconds_until_named((phase, phase), most=3000.0, state="D")
    assert 1250.0 < found < 1280.0, "a disk that never answers holds no run for ever"
    assert words == "0: hung: no sign of life for 21 min 0 s", "not only for the minute after the disk's time was over"
    assert 60.0 < seconds_until_named((RankPhase.data, RankPhase.data), state="D", moved=1e9)[0] < 70.0


def test_a_library_that_looks_for_the_others_for_ever_hangs_however_much_it_computes() -> None:
    found, words = seconds_until_named((RankPhase.join, RankPhase.join), computed=1.0)
    assert 60.0 < found < 70.0 and words == "0: hung: joining the others, no sign of life for 1 min 0 s"
    assert 60.0 < seconds_until_named((RankPhase.restore, RankPhase.restore), computed=1.0)[0] < 70.0
    assert seconds_until_named((RankPhase.join, RankPhase.build), computed=1.0)[0] >= 600.0


def test_a_silent_rank_is_named_once_the_others_wait_for_it() -> None:
    holdings, clock = SharedFileStore(2), [0.0]
    holdings.begin()
    watch = HangDetector(holdings, 2.0, clock=lambda: clock[0], signs=lambda process: ProcStats("S"))

    def named(living: dict[int, int]) -> str:
        """Within ten minutes."""
        end = clock[0] + 600.0
        while (hung := watch.look(living)) is None and clock[0] < end:
            clock[0] += 0.2
        return "" if hung is None else f"{hung.rank}: {hung.words}"

    assert named({0: 10, 1: 11}) == "", "work that never says a word is not judged"
    holdings.pulse(0).at(RankPhase.join)
    for _ in range(int(4 * FORK_SERVER_SECONDS)):
        assert watch.look({0: 10, 1: 0}) is None, "it is yet to be forked"
        clock[0] += 0.2
    assert named({0: 10, 1: 11}).startswith("1: hung: no sign of life")
    holdings.close()


def test_a_fork_server_that_starts_no_rank_is_blamed_after_five_minutes() -> None:
    holdings, clock = SharedFileStore(2), [0.0]
    holdings.begin()
    for patience in (0.0, 2.0):  # also without the detection of hung ranks
        watch = HangDetector(holdings, patience, clock=lambda: clock[0], blind=lambda: True)
        began = clock[0]
        while (hung := watch.look({0: 10, 1: 0})) is None:
            clock[0] += 0.2
        assert FORK_SERVER_SECONDS < clock[0] - began < FORK_SERVER_SECONDS + 0.5
        assert hung.rank == -1 and hung.blames_server and hung.silent > FORK_SERVER_SECONDS
        assert hung.words == "hung: the process that starts ranks has not started rank 1 for 5 min 0 s"
    holdings.close()


@pytest.mark.parametrize("outage", [0.0, 3.0, 6.0])
def test_silence_counts_again_as_long_after_an_outage_as_it_lasted(outage: float) -> None:
    """TCP doubles the time between two attempts to send. A heartbeat from before the outage may arrive behind it."""
    holdings, clock, blind, patience = SharedFileStore(2), [0.0], [False], 2.0
    pace, signs = StepPace(deque([0.1]), 0.1, WARMUP_STEPS), lambda process: ProcStats("S")
    watch = HangDetector(holdings, patience, lambda: clock[0], signs, pace, lambda: blind[0])
    holdings.begin()

    def named_at(end: float) -> float:
        while (hung := watch.look({0: 10, 1: 11})) is None and clock[0] < end:
            clock[0] += 0.1
        return clock[0] if hung is not None else math.inf

    for rank in range(2):
        assert named_at(1.0) == math.inf
        holdings.pulse(rank).at(RankPhase.reduce, 1)
    blind[0] = True
    assert named_at(1.0 + outage) == math.inf
    blind[0], over = False, clock[0]
    assert named_at(over + 0.1) == math.inf
    holdings.pulse(0).at(RankPhase.agree)
    assert named_at(over + 60.0) == pytest.approx(over + outage + patience, abs=0.4)
    holdings.close()


def test_ranks_that_all_join_without_an_end_blame_the_fork_server_and_its_store() -> None:
    clock = [0.0]
    for phases, blames in ((["join"] * 3, True), (["join", "build", "join"], False)):
        holdings, clock[0] = SharedFileStore(3), 0.0
        watch = HangDetector(holdings, 2.0, clock=lambda: clock[0], signs=lambda process: ProcStats("S"))
        holdings.begin()
        for rank, phase in enumerate(phases):
            holdings.pulse(rank).at(RankPhase[phase])
        while (hung := watch.look({0: 10, 1: 11, 2: 12})) is None and clock[0] < 600.0:
            clock[0] += 0.2
        assert hung is not None and hung.blames_server == blames and 60.0 < clock[0] < 61.0
        holdings.close()


def test_no_training_rank_is_blamed_while_another_rank_evaluates() -> None:
    holdings, clock = SharedFileStore(2), [0.0]
    watch = HangDetector(
        holdings, 2.0, clock=lambda: clock[0], signs=lambda process: ProcStats("S"), pace=StepPace(first=0.1, early=3)
    )
    holdings.begin()
    for rank, phase, step in ((0, RankPhase.evaluate, 50), (1, RankPhase.data, 51)):
        holdings.pulse(rank).at(phase, step)
    while (hung := watch.look({0: 10, 1: 11})) is None and clock[0] < 600.0:
        clock[0] += 0.2
    assert hung is not None and hung.rank == 0 and 60.0 < clock[0] < 61.0
    holdings.pulse(0).at(RankPhase.data, 51)
    watch.look({0: 10, 1: 11})
    holdings.pulse(0).at(RankPhase.reduce)
    hung = watch.look({0: 10, 1: 11})
    assert hung is not None and hung.rank == 1
    holdings.close()


def test_nodes_hear_that_their_leader_lives_while_it_plans_but_not_for_ever() -> None:
    told: list[tuple[str, bytes]] = []
    node = SimpleNamespace(link=SimpleNamespace(write=lambda line: told.append(("b", line))))
    fleet = SimpleNamespace(nodes=[node], outside=SystemInterface(clock=lambda: 1000.0))
    for looked in (1000.0, 1000.0 - 2 * LEADER_PLANNING_SECONDS):
        fleet._looked = looked
        _send_keepalives(fleet)  # type: ignore[arg-type]
        assert told == [("b", b'{"do":"alive"}\n')]
    SystemInterface().repeat(lambda: told.append(("c", b"")) or over.set(), 0.0, over := threading.Event())  # type: ignore[func-returns-value]
    assert over.wait(60.0) and told[-1] == ("c", b"")


def test_a_model_without_a_price_goes_on_with_fewer_ranks_as_its_workload_asks() -> None:
    """Sums that are exact are of its micro-batches; replicas that meet rarely are as many as they were."""
    plans = lambda work, *counts: [plan_for_devices(None, Workload(**work), count)[1].name for count in counts]
    assert plans({"batch": 24}, 6, 5, 3) == ["dp6.mb1", "dp4.mb1", "dp3.mb1"]
    assert plans({"batch": 24, "exact": 4}, 6, 5, 1) == ["dp6.mb4", "dp3.mb4", "dp1.mb4"]
    assert plans({"batch": 24, "local": {"replicas": 2}}, 4, 3, 2) == ["dp2.mb1", "dp2.mb1", "dp2.mb1"]
    with pytest.raises(NothingFits):
        plans({"batch": 24, "local": {"replicas": 2}}, 1)


def named_on(
    terms: HangLimits, places: list[tuple[RankPhase, int]], known: bool = True, most: float = 1000.0, beats: int = -1
) -> tuple[float, str]:
    """How long nobody is called hung while silent ranks stand at `places`, and what is said then; rank `beats` goes
    on."""
    holdings, clock = SharedFileStore(len(places)), [0.0]
    pace = StepPace(first=0.4, early=3) if known else StepPace()
    watch = HangDetector(
        holdings, 1.8, clock=lambda: clock[0], signs=lambda process: ProcStats("S"), pace=pace, terms=terms
    )
    holdings.begin()
    living = {rank: 10 + rank for rank in range(len(places))}
    watch.look(living)
    for rank, (phase, step) in enumerate(places):
        holdings.pulse(rank).at(phase, step)
    while (hung := watch.look(living)) is None and clock[0] < most:
        clock[0] += 0.2
        if beats >= 0:
            holdings.pulse(beats).at(*places[beats])
    holdings.close()
    return clock[0], "" if hung is None else f"{hung.rank}: {hung.words}"


def test_ranks_on_accelerators_compare_for_minutes_where_those_on_cores_hang() -> None:
    """16 GB of states are brought to the host, and digested there."""
    same = [(RankPhase.compare, 50)] * 4
    assert named_on(CPU_LIMITS, same)[0] < 3.0
    assert named_on(ACCELERATOR_LIMITS, same, most=290.0)[1] == ""


def test_a_first_step_on_an_accelerator_has_minutes_and_a_later_one_half_a_minute() -> None:
    behind = [(RankPhase.agree, 1), (RankPhase.backward, 1)]
    assert 60.0 < named_on(CPU_LIMITS, behind, known=False)[0] < 61.0
    assert 300.0 < named_on(ACCELERATOR_LIMITS, behind, known=False)[0] < 301.0
    assert 30.0 < named_on(ACCELERATOR_LIMITS, behind)[0] < 31.0


def test_of_silent_ranks_on_accelerators_one_is_named_only_if_it_alone_is_behind() -> None:
    assert named_on(ACCELERATOR_LIMITS, [(RankPhase.agree, 7), (RankPhase.data, 7), (RankPhase.agree, 7)])[
        1
    ].startswith("1: hung: reading its data, no sign of life")
    assert named_on(ACCELERATOR_LIMITS, [(RankPhase.agree, 7)] * 3)[1].startswith("-1: hung: no sign of life for 30.")
    assert named_on(ACCELERATOR_LIMITS, [(RankPhase.agree, 7), (RankPhase.backward, 7), (RankPhase.backward, 7)])[
        1
    ].endswith(", and no rank is behind the others")
    assert named_on(ACCELERATOR_LIMITS, [(RankPhase.agree, 7), (RankPhase.backward, 7)], beats=1)[1] == "", (
        "rank 0 waits for rank 1, which goes on"
    )


def test_a_hang_that_is_nobodys_is_told_of_all_ranks() -> None:
    lines = str(
        diagnose(
            [RankExit(-1, 0.0, -9, words="hung: no sign of life for 31 s, and no rank is behind the others")],
            8,
            lambda rank: Path(f"rank-{rank}.log"),
        )
    )
    assert lines.startswith("all 8 ranks on ") and "rank-0.log" in lines and "rank -1" not in lines
