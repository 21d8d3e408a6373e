"""Faults for real: ranks of a training run are killed, frozen and broken where chance says; the end is that of the undisturbed run, to the bit."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors import safe_open

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.load import full, full_tensors
from meshwright.checkpoint.verify import Reader, verify
from meshwright.elastic.failure import RankFailed
from meshwright.elastic.nursery import Nursery
from meshwright.elastic.supervisor import Care, Supervisor, Work
from meshwright.spec.event import Event
from meshwright.spec.launch import Launch
from meshwright.spec.plan import parse_plan

HERE = Path(__file__).parent
STEPS = 16
SCRIBE = "doom:write"
FIRST = itertools.count(0, 1000)
"""Generations of one warm process must not meet at the addresses of earlier ones."""
ENVIRONMENT = {"PYTHONPATH": f"{HERE}:{HERE.parents[1] / 'src'}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64, "vocab": 258, "seq": 64, "kind": "llama"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n\n" for n in range(400)))
    return file


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """One warm process for all runs of this file."""
    with Nursery(tmp_path_factory.mktemp("nursery") / "log", ("doom",), ENVIRONMENT) as made:
        while not made.events(1.0):
            assert not made.ended
        yield made


def launch(text: Path, folder: Path, plan: str, steps: int = STEPS, **run: Any) -> Launch:
    return Launch(
        model={"name": "llama-tiny", "sizes": SIZES},
        workload={"sequence": 32, "batch": 8, "steps": steps, "precision": "fp32", "optimizer": {"lr": 1e-2, "warmup": 5}},
        data={"source": str(text), "tokenizer": "bytes", "held_out": 0.1},
        plan=parse_plan(plan),
        run={"folder": str(folder), "checkpoint_every": 0, "evaluate_every": 0, "tensorboard": False, **run},
    )


def work_of(work: Launch, faults: list[dict[str, Any]], pause: float = 0.0) -> Work:
    """`pause`: seconds by which each step is made longer."""
    payload = {"launch": work.model_dump(mode="json"), "faults": faults, "folder": work.run.folder, "pause": pause}
    return Work("doom:train", work.plan.world, payload, Path(work.run.folder), plan=work.plan.name, scribe=SCRIBE)


def train(
    nursery: Nursery,
    work: Launch,
    faults: list[dict[str, Any]],
    notes: list[str] | None = None,
    plans: dict[int, str] | None = None,
    hear: Callable[[int, dict[str, Any]], None] = lambda rank, message: None,
) -> None:
    """`plans`: what is chosen for another number of ranks."""
    Path(work.run.folder).mkdir(exist_ok=True)
    said = [] if notes is None else notes
    pause = 0.15 if plans else 0.0
    replan = lambda world: work_of(work.but(plan=parse_plan(plans[world])), faults, pause)
    care = Care(work.run.retries, work.run.patience, replan if plans else None, work.run.least)
    Supervisor(work_of(work, faults, pause), hear, said.append, generation=next(FIRST), care=care, lent=nursery).run()


def state(folder: Path, step: int = STEPS) -> dict[str, bytes]:
    """Every byte that the ranks saved at the end: weights, optimizer, random states."""
    saved: dict[str, bytes] = {}
    for file in sorted((folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            saved |= {f"{file.name}: {name}": tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118
    return saved


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in map(json.loads, (folder / "records.jsonl").read_text().splitlines())}


def events(folder: Path, saves: bool = False) -> list[Event]:
    found = [Event(**json.loads(line)) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if (event.kind == "save") == saves]


def random_faults(count: int, world: int, how: list[str], seed: int, last: int = STEPS) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(2, last), count))
    phases = ["data", "backward", "reduce", "agree", "update"]
    return [
        {"rank": chance.randrange(world), "step": step, "phase": chance.choice(phases), "how": chance.choice(how), "delay": delay}
        for step in steps
        for delay in (chance.choice([0.0, chance.uniform(0.0, 0.01)]),)
    ]


PLANS = ["dp2.tp2.z1", "dp2.pp2.z2.mb2", "dp4.mb2", "dp2x2.z2.mb2", "dp2.tp2.z3", "dp4.z3"]


@pytest.mark.parametrize("plan", [*PLANS[:2], *(pytest.param(plan, marks=pytest.mark.soak) for plan in PLANS[2:])])
def test_ranks_killed_anywhere_cost_no_step_and_no_bit(nursery: Nursery, tmp_path: Path, text: Path, plan: str) -> None:
    whole, broken = (launch(text, tmp_path / name, plan) for name in ("whole", "broken"))
    train(nursery, whole, [])
    faults = random_faults(3, 4, ["SIGKILL", "SIGSEGV", "exit"], seed=len(plan))
    train(nursery, broken, faults)
    found = events(tmp_path / "broken")
    assert [event.kind for event in found] == ["fault", "recovery"] * 3
    assert [event.rank for event in found if event.kind == "fault"] == [fault["rank"] for fault in faults]
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert state(tmp_path / "broken") == state(tmp_path / "whole") != {}


def test_all_ranks_killed_at_once_lose_nothing_either(nursery: Nursery, tmp_path: Path, text: Path) -> None:
    work = launch(text, tmp_path / "run", "dp4.z3")
    train(nursery, work, [{"rank": rank, "step": 6, "phase": "backward", "how": "SIGKILL"} for rank in range(4)])
    *_, recovery = events(tmp_path / "run")
    assert recovery.source == "memory" and recovery.lost == 0
    assert sorted(losses(tmp_path / "run")) == list(range(STEPS + 1))


def test_the_same_error_in_the_same_step_twice_ends_the_run_with_its_verdict(nursery: Nursery, tmp_path: Path, text: Path) -> None:
    work = launch(text, tmp_path / "run", "dp2.z1")
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .*ValueError: hidden 100 is not divisible") as caught:
        train(nursery, work, [{"rank": 1, "step": 5, "phase": "update", "how": "raise", "always": True}])
    assert "gave up after the same error in the same step again" in str(caught.value)
    assert [event.kind for event in events(tmp_path / "run")] == ["fault", "verdict"]


@pytest.mark.parametrize("how", ["SIGSTOP", "livelock", pytest.param("lock", marks=pytest.mark.soak)])
def test_who_hangs_is_named_not_who_waits_and_the_run_goes_on(nursery: Nursery, tmp_path: Path, text: Path, how: str) -> None:
    work = launch(text, tmp_path / "run", "dp2.tp2.z1")
    phase = {"SIGSTOP": "backward", "livelock": "data", "lock": "update"}[how]
    train(nursery, work, [{"rank": 2, "step": 8, "phase": phase, "how": how}])
    fault, recovery = events(tmp_path / "run")
    assert (fault.rank, fault.step, fault.phase) == (2, 8, phase)
    words = {"SIGSTOP": "stopped by a signal", "livelock": "reading its data", "lock": "no sign of life"}[how]
    assert fault.cause.startswith("hung: ") and words in fault.cause
    assert recovery.lost == 0 and sorted(losses(tmp_path / "run")) == list(range(STEPS + 1))


def test_ranks_that_are_lost_or_asked_for_change_the_plan_and_not_the_losses(nursery: Nursery, tmp_path: Path, text: Path) -> None:
    """4 ranks, 2 by request, 4 again by request, then 3 because one fails again and again."""
    whole = launch(text, tmp_path / "whole", "dp4.mb2")
    train(nursery, whole, [])
    broken = launch(text, tmp_path / "broken", "dp2x2.z2.mb2", least=2)
    faults = [{"rank": 3, "step": step, "phase": "backward", "how": "SIGKILL"} for step in (12, 13, 14)]

    def hear(rank: int, message: dict[str, Any]) -> None:
        asks = {2: 2, 6: 4}
        if rank == 0 and message["kind"] == "record" and message["record"]["step"] in asks:
            (tmp_path / "broken" / "ranks").write_text(f"{asks[message['record']['step']]}")

    plans = {2: "pp2.z1.mb2", 3: "dp1", 4: "tp2.dp2.z1"}
    train(nursery, broken, faults, plans=plans, hear=hear)
    found = events(tmp_path / "broken")
    assert [event.plan for event in found if event.kind == "resize"] == ["pp2.z1.mb2", "dp2.tp2.z1", "dp1"]
    expected = losses(tmp_path / "whole")
    assert all(abs(loss - expected[step]) < 1e-6 * abs(loss) for step, loss in losses(tmp_path / "broken").items())
    assert sorted(losses(tmp_path / "broken")) == list(range(STEPS + 1))
    assert all(event.lost == 0 for event in found)


def test_checkpoints_are_written_beside_training_and_are_those_of_the_ranks_themselves(
    nursery: Nursery, tmp_path: Path, text: Path
) -> None:
    """Every fourth step, with ranks killed meanwhile; the same steps written by the ranks, which have no copies in memory then."""
    plan = "dp2.tp2.z1"
    beside, alone = (
        launch(text, tmp_path / "beside", plan, checkpoint_every=4, keep=9),
        launch(text, tmp_path / "alone", plan, checkpoint_every=4, copies=False, keep=9),
    )
    train(nursery, alone, [])
    train(nursery, beside, [{"rank": 1, "step": 5, "phase": "backward", "how": "SIGKILL"}])
    for step in (4, 8, 12, 16):
        path = tmp_path / "beside" / "checkpoints" / f"step-{step:08d}"
        if path.exists() or step == STEPS:
            assert verify(path) == []
            assert dict(full_tensors(path, "")).keys() == dict(full_tensors(tmp_path / "alone" / "checkpoints" / path.name, "")).keys()
            for name, tensor in full_tensors(path, ""):
                assert torch.equal(tensor, full(Reader(tmp_path / "alone" / "checkpoints" / path.name), name)), f"{step} {name}"
    assert len(list((tmp_path / "beside" / "checkpoints").glob("step-*"))) >= 2
    assert [event.step for event in events(tmp_path / "beside", saves=True)] == [STEPS]
    assert not [name for name in os.listdir(tmp_path / "beside" / "checkpoints") if name.startswith(".")]


def test_a_bit_that_flips_in_one_of_several_copies_is_voted_out_and_mended(nursery: Nursery, tmp_path: Path, text: Path) -> None:
    """At the end of a step, before the copies are compared: nobody has computed with it yet, so nothing of it is left."""
    whole, broken = (launch(text, tmp_path / name, "dp4.mb2", compare_every=4) for name in ("whole", "broken"))
    train(nursery, whole, [])
    train(nursery, broken, [{"rank": 2, "step": 8, "phase": "compare", "how": "flip"}])
    [event] = events(tmp_path / "broken")
    assert (event.kind, event.rank, event.step) == ("divergence", 2, 8)
    assert state(tmp_path / "broken") == state(tmp_path / "whole") != {}


def test_two_copies_that_differ_end_the_run_because_nobody_can_say_which_is_right(nursery: Nursery, tmp_path: Path, text: Path) -> None:
    work = launch(text, tmp_path / "run", "dp2.mb4", compare_every=4)
    with pytest.raises(MeshwrightError, match="the states of ranks 0, 1 differ after step 8 and there is no majority"):
        train(nursery, work, [{"rank": 1, "step": 7, "phase": "backward", "how": "flip"}])


TABLE = Path(__file__).parents[2] / "bench" / "results" / "faults.md"
KINDS = {"killed": ["SIGKILL"], "crashed": ["SIGSEGV", "SIGABRT", "exit"], "frozen": ["SIGSTOP"], "hung": ["livelock", "lock"]}
FAULTS, LONG = 20, 80


@pytest.mark.soak
def test_twenty_faults_of_each_kind_under_every_kind_of_plan_lose_nothing(nursery: Nursery, tmp_path: Path, text: Path) -> None:
    rows = []
    for plan in PLANS:
        world = parse_plan(plan).world
        whole = launch(text, tmp_path / f"{plan}-whole", plan, LONG)
        train(nursery, whole, [])
        for kind, how in KINDS.items():
            folder = tmp_path / f"{plan}-{kind}"
            faults = random_faults(FAULTS, world, how, seed=len(rows), last=LONG)
            train(nursery, launch(text, folder, plan, LONG), faults)
            found = events(folder)
            broken = [event for event in found if event.kind == "fault"]
            healed = [event for event in found if event.kind == "recovery"]
            named = sum(
                any(event.step in (fault["step"], fault["step"] + 1) and event.rank == fault["rank"] for event in broken)
                for fault in faults
            )
            same = state(folder, LONG) == state(tmp_path / f"{plan}-whole", LONG) != {} and losses(folder) == losses(
                tmp_path / f"{plan}-whole"
            )
            silence, seconds = ([getattr(event, name) for event in held] for held, name in ((broken, "detection"), (healed, "seconds")))
            rows.append(
                f"| {plan} | {kind} | {len(faults)} | {named} | {sum(event.lost for event in healed)} | {'equal' if same else 'DIFFERENT'} "
                f"| {median(silence):.2f} | {median(seconds):.2f} | {max(seconds):.2f} |"
            )
            TABLE.write_text(
                "# Faults in real runs\n\nSeconds on the machine that ran this, whatever else ran on it: silence before a hang was noticed, and from the decision "
                "to the end of the next new step.\n\n| plan | fault | injected | culprit named | steps lost | final state | silence (median) | recovery "
                "(median) | (largest) |\n|---|---|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
            )
            assert same and healed and not any(event.lost for event in healed), rows[-1]
