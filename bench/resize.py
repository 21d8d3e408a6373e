"""How long a run pauses when its number of ranks changes: 4 to 3 to 2 to 4, data-parallel, sharded, and to plans of
other kinds.

`meshwright train`'s own supervisor, ranks and loop; the file RUN/ranks asks for the change while it trains. The clock
runs from the decision at a step boundary to
the end of the next new step; its parts are said by the run: the old ranks end, new ones are forked, join, build the
model, and read the copies of the old ones (the
transfer). `in steps` is the pause without the transfer, in steps of the plan before. Lost: steps that were run again.
The losses are compared with those of a run of
the first plan that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers import machine, write
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.restart_policy import FaultPolicy
from meshwright.elastic.supervisor import Supervisor
from meshwright.report.run import read_run
from meshwright.spec.job import LaunchSpec
from meshwright.spec.plan import parse_plan

WAYS = {
    "data-parallel": ("dp4", {3: "dp3", 2: "dp2", 4: "dp4"}),
    "sharded": ("dp4.z3", {3: "dp3.z3", 2: "dp2.z2", 4: "dp4.z1"}),
    "of another kind": ("tp4.mb3", {3: "dp3.z1", 2: "tp2.mb3", 4: "dp2.pp2.z1.mb3"}),
}
LOOP, SCRIBE = "meshwright.train.loop", "meshwright.train.memory_checkpointer"


def launch(folder: Path, name: str, plan: str, hidden: int, steps: int) -> LaunchSpec:
    text = folder / "text.txt"
    text.write_text("".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n\n" for n in range(400)))
    sizes = {
        "layers": 4,
        "hidden": hidden,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": hidden // 4,
        "ffn": 2 * hidden,
        "vocab": 258,
        "seq": 128,
        "kind": "llama",
    }
    return LaunchSpec(
        model={"name": "llama-tiny", "sizes": sizes},
        workload={"sequence": 128, "batch": 24, "steps": steps, "precision": "fp32", "optimizer": {"lr": 1e-3}},
        data={"source": str(text), "tokenizer": "bytes", "held_out": 0.1},
        plan=parse_plan(plan),
        run={"folder": str(folder / name), "checkpoint_every": 0, "evaluate_every": 0},
    )


def train(agent: LocalAgent, work: LaunchSpec, plans: dict[int, str], asks: dict[int, int], first: int) -> None:
    folder = Path(work.run.folder)
    folder.mkdir()

    def of(plan: str) -> RankJob:
        payload = work.but(plan=parse_plan(plan)).model_dump(mode="json")
        return RankJob(f"{LOOP}:train", parse_plan(plan).world, payload, folder, plan=plan, scribe=f"{SCRIBE}:write")

    def hear(rank: int, message: dict[str, Any]) -> None:
        if rank == 0 and message["kind"] == "record" and message["record"]["step"] in asks:
            (folder / "ranks").write_text(str(asks[message["record"]["step"]]))

    (folder / "launch.json").write_text(work.to_json())
    Supervisor(
        of(work.plan.name),
        hear,
        generation=first,
        care=FaultPolicy(5, 10.0, lambda world: of(plans[world])),
        agent=agent,
    ).run()


def once(agent: LocalAgent, way: str, hidden: int, every: int, first: int) -> list[dict[str, Any]]:
    plan, plans = WAYS[way]
    asks = {every: 3, 2 * every: 2, 3 * every: 4}
    with tempfile.TemporaryDirectory() as place:
        whole, moved = (launch(Path(place), name, plan, hidden, 4 * every) for name in ("whole", "moved"))
        train(agent, whole, {}, {}, first)
        train(agent, moved, plans, asks, first + 100)
        runs = [read_run(Path(run.run.folder)) for run in (whole, moved)]
    steps = {record.step: record for record in runs[1].steps}
    off = max(abs(steps[record.step].loss / record.loss - 1) for record in runs[0].steps)
    found, changed = [], [event for event in runs[1].events if event.kind in ("resize", "recovery")]
    for resize, recovery in zip(changed[::2], changed[1::2], strict=True):
        before = median(steps[step].seconds for step in range(max(1, resize.step - every // 2), resize.step + 1))
        pause, parts = recovery.seconds, recovery.parts
        found.append(
            {
                "way": way,
                "change": resize.cause,
                "plan": resize.plan,
                "pause": pause,
                "parts": parts,
                "step": before,
                "lost": recovery.lost,
                "off": off,
            }
        )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench resize", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--every", type=int, default=12, help="steps under each plan")
    parser.add_argument("--out", default="resize", help="file in bench/results; -: none")
    given = parser.parse_args(arguments)
    report: dict[str, Any] = {"machine": machine(), "workload": {"hidden": given.hidden}, "changes": []}
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as place, LocalAgent(Path(place) / "log", (LOOP, SCRIBE)) as agent:
        while not agent.events(1.0):
            assert not agent.ended
        for number in range(given.rounds):
            for at, way in enumerate(WAYS):
                report["changes"] += once(agent, way, given.hidden, given.every, 1000 * (1 + 3 * number + at))
    lines = [
        "| way | change | to plan | pause s | of it transfer | build | step s | in steps | lost | losses off by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((each["way"], each["change"], each["plan"]) for each in report["changes"]):
        all_ = [each for each in report["changes"] if (each["way"], each["change"], each["plan"]) == key]
        middle = lambda value, all_=all_: median(map(value, all_))
        pause, moved, built = (
            middle(f)
            for f in (
                lambda e: e["pause"],
                lambda e: e["parts"].get("restore", 0.0),
                lambda e: e["parts"].get("build", 0.0),
            )
        )
        step, off = middle(lambda e: e["step"]), max(each["off"] for each in all_)
        lines.append(
            f"| {' | '.join(key)} | {pause:.2f} | {moved:.2f} | {built:.2f} | {step:.3f} | "
            f"{(pause - moved) / step:.1f} | {sum(e['lost'] for e in all_)} | {off:.1e} |"
        )
    report["machine"]["load_average_after"] = round(os.getloadavg()[0], 2)
    print("\n".join(lines) + "\n" + json.dumps(report["machine"]), flush=True)
    if given.out != "-":
        write(
            given.out,
            "Pauses of other numbers of ranks",
            report,
            ["\n".join(lines)],
            f"Medians of {given.rounds} rounds.",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
