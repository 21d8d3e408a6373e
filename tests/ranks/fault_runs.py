"""Runs that fail as they are told to (fault_injection.py), on real ranks of one warm process: what all tests of faults
start, and what they look at."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fault_injection import SIZES
from safetensors import safe_open

from meshwright.checkpoint.load import iter_full_tensors
from meshwright.core.codec import validate_data
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.hang_detector import CPU_LIMITS, HangLimits
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.replan import lower_memory_plan as replanned
from meshwright.elastic.restart_policy import FaultPolicy
from meshwright.elastic.supervisor import Supervisor
from meshwright.spec.job import Job, LaunchSpec
from meshwright.spec.plan import parse_plan
from meshwright.spec.record import RunEvent, parse_events

HERE = Path(__file__).parent
STEPS = 16
SCRIBE = "fault_injection:write"
FIRST = itertools.count(0, 1000)
"""Generations of one warm process must not meet at the addresses of earlier ones."""
PATIENT, USUAL = 60.0, 1.8
"""Seconds of silence after which a rank counts as hung: where none is to hang, so that a machine that stands still for
a while blames nobody; and where a run has them by itself."""
LIMITS = replace(CPU_LIMITS, kill=60.0)
"""A killed rank takes seconds to end on a busy machine, and the next run would find it alive."""
ENVIRONMENT = {"PYTHONPATH": f"{HERE}:{HERE.parents[1] / 'src'}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def warm_process(folder: Path, **more: str) -> Iterator[LocalAgent]:
    """One for all runs of a session. `more`: of its environment."""
    with LocalAgent(folder / "log", ("fault_injection",), {**ENVIRONMENT, **more}) as made:
        while not made.events(1.0):
            assert not made.ended
        yield made


def launch(
    text: Path, folder: Path, plan: str, steps: int = STEPS, workload: dict[str, Any] | None = None, **run: Any
) -> LaunchSpec:
    """`workload`: what differs from the usual one."""
    return LaunchSpec(
        model={"name": "llama-tiny", "sizes": SIZES},
        workload={
            "sequence": 32,
            "batch": 8,
            "steps": steps,
            "precision": "fp32",
            "optimizer": {"lr": 1e-2, "warmup": 5},
            **(workload or {}),
        },
        data={"source": str(text), "tokenizer": "bytes", "held_out": 0.1},
        plan=parse_plan(plan),
        run={
            "folder": str(folder),
            "checkpoint_every": 0,
            "evaluate_every": 0,
            "hang_timeout": PATIENT,
            **run,
        },
    )


def work_of(work: LaunchSpec, faults: list[dict[str, Any]], pause: float = 0.0, **more: Any) -> RankJob:
    """`pause`: seconds by which each step is made longer. `more`: what else the ranks are told (fault_injection.py)."""
    payload = {
        "launch": work.model_dump(mode="json"),
        "faults": faults,
        "folder": work.run.folder,
        "pause": pause,
        **more,
    }
    return RankJob(
        "fault_injection:train", work.plan.world, payload, Path(work.run.folder), plan=work.plan.name, scribe=SCRIBE
    )


def train(
    agent: LocalAgent,
    work: LaunchSpec,
    faults: list[dict[str, Any]],
    notes: list[str] | None = None,
    plans: dict[int, str] | None = None,
    leaner: Job | None = None,
    hear: Callable[[int, dict[str, Any]], None] = lambda rank, message: None,
    asks: dict[int, int] | None = None,
    terms: HangLimits = LIMITS,
    **more: Any,
) -> None:
    """`plans`: what is chosen for another number of ranks. `leaner`: the question that a plan for less memory answers.
    `asks`: behind which steps how many ranks are asked for, 0 for a request to stop; the ranks wait there until they
    have heard of it."""
    folder, asks = Path(work.run.folder), asks or {}
    folder.mkdir(exist_ok=True)
    (folder / "launch.json").write_text(work.to_json())
    said = [] if notes is None else notes
    pause, more = 0.15 if plans and not asks else 0.0, {**more, "asks": list(asks.items())}

    def ask(rank: int, message: dict[str, Any]) -> None:
        hear(rank, message)
        world = asks.get(message["record"]["step"]) if rank == 0 and message["kind"] == "record" else None
        if world:
            (folder / "ranks").write_text(str(world))
        elif world == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    replan_leaner = lambda now: work_of(
        work.but(plan=replanned(leaner, validate_data(LaunchSpec, now.payload["launch"]).plan)), faults, pause, **more
    )
    replan = lambda world: work_of(work.but(plan=parse_plan(plans[world])), faults, pause, **more)
    instead = lambda now: f"something else than {now.plan}"
    care = FaultPolicy(
        work.run.retries, work.run.hang_timeout, replan if plans else None, work.run.min_ranks,
        replan_leaner if leaner else None, instead, terms=terms
    )  # fmt: skip
    Supervisor(
        work_of(work, faults, pause, **more), ask, said.append, generation=next(FIRST), care=care, agent=agent
    ).run()


def state(folder: Path, step: int = STEPS) -> dict[str, bytes]:
    """Every byte that the ranks saved at the end: weights, optimizer, random states."""
    saved: dict[str, bytes] = {}
    for file in sorted((folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            saved |= {f"{file.name}: {name}": tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118
    return saved


def tensors(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Every whole tensor of the checkpoint at the end, whatever plan wrote it."""
    return dict(iter_full_tensors(folder / "checkpoints" / f"step-{step:08d}", ""))


def losses(folder: Path) -> dict[int, float]:
    return {
        record["step"]: record["loss"]
        for record in map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    }


def events(folder: Path, saves: bool = False) -> list[RunEvent]:
    text = (folder / "events.jsonl").read_text()
    found = list(parse_events(text))
    assert len(found) == len(text.splitlines())
    return [event for event in found if event.kind != "ended" and (event.kind == "save") == saves]


def random_faults(
    count: int, world: int, how: list[str], seed: int, last: int = STEPS, apart: int = 1
) -> list[dict[str, Any]]:
    """One in each of `count` steps, any two of which are `apart` at least; half of them come up to 10 ms after the
    place, but for exceptions and endless loops, which only the place itself can be in."""
    chance = random.Random(seed)
    free = sorted(chance.sample(range(2, last - (count - 1) * (apart - 1)), count))
    steps = [step + number * (apart - 1) for number, step in enumerate(free)]
    phases = ["data", "backward", "reduce", "agree", "update"]
    found = []
    for step in steps:
        delay = chance.choice([0.0, chance.uniform(0.0, 0.01)])
        fault = {
            "rank": chance.randrange(world),
            "step": step,
            "phase": chance.choice(phases),
            "how": chance.choice(how),
        }
        found.append({**fault, "delay": 0.0 if fault["how"] in ("raise", "livelock", "memory") else delay})
    return found
