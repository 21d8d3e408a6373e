"""Slow links between two emulated nodes of two ranks: sums in tiers beside flat ones, compressed gradients, and how
much of it backward hides.

sudo python -m bench links [--rate 12.5e6] [--rounds 5]: bytes/s of a node's wire each way. Linux and root only. Wires
are real (shaped pairs of
virtual devices), ranks are processes on the cores that this machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.emulation.emulated_cluster import EmulatedCluster, ScaledCluster, emulate_cluster
from bench.ranks import warm
from meshwright.models.llama import Llama, LlamaConfig
from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.compression import FlatSlice, make_compressed_reducer
from meshwright.runtime.comm.shm.memory import SHARED_MEMORY_ENV
from meshwright.runtime.tensor_parallel import chunks
from meshwright.runtime.tensor_parallel.column import RegionEntryHook
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.runtime.zero.reducer import GradReducer
from meshwright.spec.layout import MAX_TENSOR_CHUNKS
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.precision import GradientCompression, recipe
from meshwright.train.trainer import Trainer, parallelize

RESULTS = Path(__file__).parent / "results"
BUFFER = 2**21
"""Elements of a collective: 8 MiB."""

SIZES = {"layers": 6, "hidden": 192, "ffn": 512, "vocab": 512, "sequence": 64, "batch": 32}
BUCKET = 2**20
PAIRS = 4
"""Pairs of steps for each round of the others: differences scatter more than times."""


@contextmanager
def shared(on: bool) -> Any:
    os.environ[SHARED_MEMORY_ENV] = str(int(on))
    try:
        yield
    finally:
        del os.environ[SHARED_MEMORY_ENV]


def timed(call: Callable[[], Any], rounds: int) -> float:
    """The median over rounds of the slowest rank's seconds."""
    found = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        call()
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(float(seconds))
    return statistics.median(found)


def collectives(rounds: int) -> dict[str, dict[str, float]]:
    world = dist.get_world_size()
    full = torch.ones(BUFFER)
    own = torch.ones(BUFFER // world)
    found: dict[str, dict[str, float]] = {}
    for name, on in (("flat", False), ("tiers", True)):
        with shared(on):
            group = make_parallel_context(Plan(tp=world)).world
        for kind, call in _calls(full, own, group).items():
            call()
            found.setdefault(kind, {})[name] = timed(call, rounds)
    whole = FlatSlice(0, BUFFER, full, [])
    for code in ("bf16", "int8"):
        summed, cut = (
            make_compressed_reducer(GradientCompression(kind=code), group, whole, scattered)
            for scattered in (False, True)
        )  # type: ignore[arg-type]
        found["all-reduce"][code] = timed(
            lambda way=summed: async_collectives.all_reduce(full, group, inter_host=way).wait(), rounds
        )
        found["reduce-scatter"][code] = timed(
            lambda way=cut: async_collectives.reduce_scatter(full, own, group, way).wait(), rounds
        )
    return found


def _calls(full: torch.Tensor, own: torch.Tensor, group: Any) -> dict[str, Callable[[], Any]]:
    return {
        "all-reduce": lambda: async_collectives.all_reduce(full, group).wait(),
        "reduce-scatter": lambda: async_collectives.reduce_scatter(full, own, group).wait(),
        "all-gather": lambda: async_collectives.all_gather(full, own, group).wait(),
    }


def model() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(SIZES["layers"], SIZES["hidden"], 4, 4, SIZES["ffn"], SIZES["vocab"], SIZES["sequence"]))


def trainer_of(plan: str, kind: str, on: bool, bucket: int = BUCKET) -> Trainer:
    asked = recipe("fp32").but(compression=GradientCompression(kind=kind) if kind else None)  # type: ignore[arg-type]
    with shared(on):
        return parallelize(
            model(),
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            parse_plan(plan).but(bucket=bucket),
            precision=asked,
        )


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(
        0, SIZES["vocab"], (SIZES["batch"], SIZES["sequence"]), generator=torch.Generator().manual_seed(1)
    )
    return {"input_ids": ids, "labels": ids}


def training(rounds: int) -> list[dict[str, Any]]:
    """Seconds of a step, waited and sent, of every system; what a step without data ranks takes."""
    rows, found = batch(), []
    systems = [
        ("flat", "", False),
        ("tiers", "", True),
        *((f"tiers, {kind}", kind, True) for kind in ("bf16", "int8", "low-rank")),
    ]
    for plan in ("dp4", "dp4.z1"):
        for name, kind, on in systems:
            trainer = trainer_of(plan, kind, on)
            records = []
            trainer.step(rows)
            seconds = timed(lambda trainer=trainer, records=records: records.append(trainer.step(rows)), rounds)
            exposed = statistics.median(record.exposed["data"] for record in records)
            found.append(
                {
                    "plan": plan,
                    "system": name,
                    "step": seconds,
                    "exposed": exposed,
                    "sent": records[-1].sent.get("data", 0.0),
                }
            )
            end(trainer)
    return found


TENSOR_SIZES = {"layers": 2, "hidden": 768, "ffn": 2048, "vocab": 256, "sequence": 128, "batch": 4}
TENSOR_PLANS, TENSOR_SHARE, TENSOR_PAIRS, TENSOR_RATE = ("tp2", "tp2.sp"), 1.0, 3, 15e6
"""Of a core, what each of two tensor ranks takes, so that the wire and other programs leave it this; the pairs of steps
for each round of the others; bytes/s of the wire."""


@contextmanager
def timed_waits() -> Iterator[list[float]]:
    """The seconds of each wait for a collective. The ranks have equally many."""
    found: list[float] = []
    wait = async_collectives.CollectiveWork.wait

    def timed_wait(work: async_collectives.CollectiveWork) -> None:
        began = time.perf_counter()
        wait(work)
        found.append(time.perf_counter() - began)

    async_collectives.CollectiveWork.wait = timed_wait  # type: ignore[method-assign]
    try:
        yield found
    finally:
        async_collectives.CollectiveWork.wait = wait  # type: ignore[method-assign]


@contextmanager
def tensor_overlap(on: bool) -> Iterator[None]:
    """Whether tensor ranks exchange hidden states in chunks and compute the column layers of a region together. Without
    it, only the sum of a region's input gradients overlaps, with one weight gradient."""
    before = RegionEntryHook._is_joint
    if not on:
        chunks.MAX_TENSOR_CHUNKS = 1  # type: ignore[attr-defined]
        RegionEntryHook._is_joint = lambda hook, hidden: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        chunks.MAX_TENSOR_CHUNKS = MAX_TENSOR_CHUNKS  # type: ignore[attr-defined]
        RegionEntryHook._is_joint = before  # type: ignore[method-assign]


def row_layers(rounds: int) -> dict[str, dict[str, Any]]:
    """Two nodes of one rank: seconds of a tensor-parallel step, and of those exposed by collectives, in one chunk and
    in several, in turn. Of each wait, the rank that comes last counts: the other also waits for it."""
    torch.manual_seed(0)
    sizes = TENSOR_SIZES
    config = LlamaConfig(
        layers=sizes["layers"], hidden=sizes["hidden"], heads=12, kv_heads=12, ffn=sizes["ffn"],
        vocab=sizes["vocab"], seq=sizes["sequence"],
    )  # fmt: skip
    ids = torch.randint(sizes["vocab"], (sizes["batch"], sizes["sequence"]))
    rows = {"input_ids": ids, "labels": ids}
    found = {}
    for plan in TENSOR_PLANS:
        trainer = parallelize(Llama(config), lambda params: torch.optim.SGD(params, lr=1e-3), f"{plan}.mb4")
        seconds: dict[str, list[tuple[float, float]]] = {"one chunk": [], "chunks": []}
        for at in range(TENSOR_PAIRS * rounds + 1):
            for name in seconds:
                dist.barrier()
                began = time.perf_counter()
                with tensor_overlap(name == "chunks"), timed_waits() as waits:
                    trainer.step(rows)
                took, waited = torch.tensor(time.perf_counter() - began), torch.tensor(waits)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                dist.all_reduce(waited, dist.ReduceOp.MIN)
                if at:  # the first step allocates
                    seconds[name].append((float(took), float(waited.sum())))
        end(trainer)
        pairs = list(zip(seconds["chunks"], seconds["one chunk"], strict=True))
        found[plan] = {
            "pairs": len(pairs),
            **{name: [statistics.median(each) for each in zip(*part, strict=True)] for name, part in seconds.items()},
            "step": statistics.quantiles([one[0] / other[0] for one, other in pairs], n=4),
            "exposed": statistics.quantiles([one[1] / other[1] for one, other in pairs], n=4),
        }
    return found


def end(trainer: Trainer) -> None:
    """Its process groups go: their threads would disturb whoever comes next."""
    trainer.close()
    groups = [
        one for group in trainer.mesh.groups.values() for one in group.process_groups if one is not dist.group.WORLD
    ]
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


class Later:
    """Reductions of `zero` begin when backward is over, where `on` is not set; what they and backward took then."""

    def __init__(self, zero: GradReducer) -> None:
        self.on = True
        self.reducing = self.beside = 0.0
        """Seconds of the reductions alone; of backward from the first of them that could have begun to its end."""
        self._start, self._finish, self._waiting, self._first = (
            zero._start,
            zero.finish_gradients,
            list[FlatParamGroup](),
            0.0,
        )
        zero.finish_gradients = self.finish  # type: ignore[method-assign]
        for stage in zero.stages.values():
            stage.start = self.start

    def start(self, unit: FlatParamGroup) -> None:
        if self.on:
            self._start(unit)
            return
        self._first = self._first if self._waiting else time.perf_counter()
        self._waiting.append(unit)

    def finish(self) -> None:
        began = time.perf_counter()
        self.beside = began - self._first
        waiting, self._waiting = self._waiting, []
        for unit in waiting:
            self._start(unit)
        self._finish()
        self.reducing = time.perf_counter() - began


def hidden(rounds: int) -> dict[str, Any]:
    """Of dp4 with one micro-batch, steps with reductions beside backward and steps with reductions behind it in turn:
    by how much the former are
    shorter, of what can be hidden, which is the lesser of the reductions and of the backward that comes after the first
    of them."""
    rows = batch()
    trainer = trainer_of(f"dp4.mb{SIZES['batch'] // dist.get_world_size()}", "", True)
    later, pairs = Later(trainer.engine.zero), []
    trainer.step(rows)
    for number in range(PAIRS * rounds):
        step = {}
        for on in (True, False) if number % 2 else (False, True):
            later.on = on
            step[on] = timed(lambda: trainer.step(rows), 1)
            if not on:
                alone = torch.tensor([later.reducing, later.beside])
                dist.all_reduce(alone, dist.ReduceOp.MAX)
        pairs.append(
            {"beside": step[True], "behind": step[False], "reducing": float(alone[0]), "backward": float(alone[1])}
        )
    end(trainer)
    shares = [(it["behind"] - it["beside"]) / min(it["reducing"], it["backward"]) for it in pairs]
    low, middle, high = statistics.quantiles(shares, n=4)
    medians = {name: statistics.median(it[name] for it in pairs) for name in pairs[0]}
    return {**medians, "hidden": middle, "quartiles": [low, high], "pairs": len(pairs)}


def on_ranks(cluster: EmulatedCluster, function: Callable[[], Any]) -> Any:
    """Rank 0's `function()`, which every rank calls."""

    def here(rank: int) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=cluster.world, timeout=timedelta(seconds=600))
        found = function()
        dist.barrier()
        return found if rank == 0 else None

    return cluster.fork(here)[0]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench links")
    parser.add_argument("--rate", type=float, default=12.5e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="collectives,training,hidden,rows")
    parser.add_argument("--rows-rate", type=float, default=TENSOR_RATE, help="bytes/s of the wire for the part rows")
    given = parser.parse_args(arguments)
    warm()
    parts = {"collectives": collectives, "training": training, "hidden": hidden, "rows": row_layers}
    several = ScaledCluster(shares=(1.0,) * 4, nodes=(0, 0, 1, 1), wires=(given.rate,) * 2, motion=1.0)
    pair = ScaledCluster(shares=(TENSOR_SHARE,) * 2, nodes=(0, 1), wires=(given.rows_rate,) * 2, motion=1.0)
    found: dict[str, Any] = {"rate": given.rate, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    for name in given.only.split(","):
        with emulate_cluster(pair if name == "rows" else several) as cluster:
            found[name] = on_ranks(cluster, lambda name=name: parts[name](given.rounds))
        if name == "rows":
            found |= {"rows rate": given.rows_rate, "rows load": os.getloadavg()[0]}
        print(json.dumps(found[name], indent=1), flush=True)
    RESULTS.mkdir(exist_ok=True)
    before = json.loads((RESULTS / "links.json").read_text()) if (RESULTS / "links.json").exists() else {}
    (RESULTS / "links.json").write_text(json.dumps({**before, **found}, indent=1) + "\n")
    (RESULTS / "links.md").write_text(page({**before, **found}))


def page(found: dict[str, Any]) -> str:
    """What was measured, as tables."""
    lines = [f"# Two nodes of two ranks, {found['rate'] * 8 / 1e6:.0f} Mbit/s between them", ""]
    if found.get("load", 0.0) > 2 * found.get("cores", 1):
        lines += [
            f"Other programs kept the {found['cores']} cores busy (load {found['load']:.0f}): steps say little, "
            "waits and bytes more.",
            "",
        ]
    if "collectives" in found:
        lines += ["8 MiB of float32, milliseconds; times: flat over tiers, and tiers over tiers in int8.", ""]
        lines += ["| collective | flat | tiers | times | bf16 | int8 | times |", "|---|---|---|---|---|---|---|"]
        for kind, it in found["collectives"].items():
            cells = [f"{it[code] * 1e3:.0f}" if code in it else "" for code in ("bf16", "int8")]
            cells.append(f"{it['tiers'] / it['int8']:.2f}" if "int8" in it else "")
            lines.append(
                f"| {kind} | {it['flat'] * 1e3:.0f} | {it['tiers'] * 1e3:.0f} | {it['flat'] / it['tiers']:.2f} | "
                f"{' | '.join(cells)} |"
            )
    if "training" in found:
        lines += ["", "A step of a small Llama; times: of the flat step of the same plan.", ""]
        lines += ["| plan | system | ms a step | waited, ms | MB sent by a rank | times |", "|---|---|---|---|---|---|"]
        flat = {it["plan"]: it["step"] for it in found["training"] if it["system"] == "flat"}
        lines += [
            f"| {it['plan']} | {it['system']} | {it['step'] * 1e3:.0f} | {it['exposed'] * 1e3:.0f} | "
            f"{it['sent'] / 1e6:.2f} | {flat[it['plan']] / it['step']:.2f} |"
            for it in found["training"]
        ]
    if "rows" in found:
        lines += [
            "",
            f"Two nodes of one tensor rank, {found['rows rate'] * 8 / 1e6:.0f} Mbit/s between them, a Llama of "
            f"{TENSOR_SIZES['layers']} blocks of width {TENSOR_SIZES['hidden']}, steps in turn (load "
            f"{found['rows load']:.0f}). Exposed: of each wait, the rank that comes last.",
            "",
            "| plan | exchange | ms a step | exposed, ms | exposed / one chunk [quartiles] | pairs |",
            "|---|---|---|---|---|---|",
        ]
        for plan, it in found["rows"].items():
            low, middle, high = it["exposed"]
            ratios = {"one chunk": "1.00", "chunks": f"{middle:.2f} [{low:.2f}, {high:.2f}]"}
            lines += [
                f"| {plan} | {name} | {it[name][0] * 1e3:.0f} | {it[name][1] * 1e3:.0f} | {ratio} | {it['pairs']} |"
                for name, ratio in ratios.items()
            ]
    if "quartiles" in found.get("hidden", ()):
        it = found["hidden"]
        low, high = it["quartiles"]
        lines += [
            "",
            f"A step with reductions beside backward {it['beside'] * 1e3:.0f} ms, behind it {it['behind'] * 1e3:.0f} "
            f"ms, in turn, {it['pairs']} of each;",
        ]
        lines += [
            f"reductions alone {it['reducing'] * 1e3:.0f} ms, backward after the first of them "
            f"{it['backward'] * 1e3:.0f} ms: {it['hidden']:.0%} of what can be hidden is"
        ]
        lines[-1] += f" (quartiles {low:.0%} and {high:.0%})."
    return "\n".join(lines) + "\n"
