"""Budgets of a training step on a device with streams: how often the host waits for a value of the device, how many
kernels a block launches, and that a compiled block is one graph. The device is played on the CPU
(recording_backend.py)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import make_batch, make_optimizer
from recording_backend import recording_device
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from traced_mesh import SEQUENCE, constant_model, graph_of, still, trace, traced_rank

from meshwright.core.ipc import Heartbeat, RankPhase, open_heartbeats
from meshwright.models.registry import build_reference_model
from meshwright.runtime import compile
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import wrap_process_group
from meshwright.runtime.optim import updater
from meshwright.runtime.optim.updater import Updater
from meshwright.runtime.tensor_parallel import chunks
from meshwright.runtime.tensor_parallel.joint_columns import column_gradients
from meshwright.spec.plan import Plan, parse_plan
from meshwright.train.memory_checkpointer import MemoryCheckpointer
from meshwright.train.trainer import Trainer, parallelize

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "expand", "slice", "split", "detach", "alias", "as_strided", "unsqueeze",
    "squeeze", "select", "permute", "unbind", "_reshape_alias", "empty", "empty_like", "empty_strided", "new_empty",
    "lift_fresh", "narrow", "chunk", "split_with_sizes", "is_same_size", "set_", "resize_", "new_empty_strided",
}  # fmt: skip


class HostTensors(TorchDispatchMode):
    """Tracks which tensors are in host memory: results of `cpu`, and what is computed from them alone. Counts in
    `found` operations whose result has a size that only the device knows."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found, self.host = found, dict[int, torch.UntypedStorage]()

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self.host[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.host

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = function.overloadpacket.__name__, [each for each in args if isinstance(each, torch.Tensor)]
        on_host = bool(given) and all(map(self.has, given))
        result = function(*args, **(kwargs or {}))
        if on_host and isinstance(result, torch.Tensor):
            self.add(result)
        if not on_host and (name in ("nonzero", "masked_select") or name == "repeat_interleave"):
            self.found[f"size of {name}"] += (kwargs or {}).get("output_size") is None
        return result


@contextmanager
def host_reads(found: Counter[str]) -> Iterator[None]:
    """Counts by place where Python code reads values of tensors: on a device, each read waits for it."""
    before = {name: getattr(torch.Tensor, name) for name in READS}
    depth, tracked = [0], HostTensors(found)

    def counted(name: str) -> Any:
        def read(tensor: torch.Tensor, *arguments: Any, **more: Any) -> Any:
            if not depth[0] and not tracked.has(tensor):
                frame = sys._getframe(1)
                found[f"{frame.f_code.co_filename.rpartition('/meshwright/')[2]}:{frame.f_code.co_name}"] += 1
            depth[0] += 1
            try:
                result = before[name](tensor, *arguments, **more)
                return tracked.add(result.clone()) if name == "cpu" else result
            finally:
                depth[0] -= 1

        return read

    try:
        for name in READS:
            setattr(torch.Tensor, name, counted(name))
        with tracked:
            yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


class Kernels(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.count[name] += 1
        return function(*args, **(kwargs or {}))


def trainer(plan: str | Plan, layers: int = 2, precision: str = "bf16", clip: float = 1.0) -> Trainer:
    torch.manual_seed(0)
    sizes = {"layers": layers, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 96, "seq": 32}
    return parallelize(
        build_reference_model({**sizes, "kind": "llama"}),
        make_optimizer,
        plan,
        precision=precision,
        clip=clip,
    )


def reads_of_a_step(plan: str) -> Counter[str]:
    """Reads in the fourth step, the first one before which no preflight check runs."""
    with recording_device():
        made = trainer(plan)
        for step in range(3):
            made.step(make_batch("llama", step))
        found: Counter[str] = Counter()
        with host_reads(found):
            made.step(make_batch("llama", 3))
        made.close()
    return found


DISPATCHER = "runtime/expert_parallel/token_dispatcher.py"
WAITS_OF_A_LAYER = {f"{DISPATCHER}:_gather_counts": 1}
"""Waits of the host in one forward of a layer with experts, under expert parallelism."""
OF_HOST_MEMORY = (
    "runtime/loss.py:count", "train/step/inputs.py:_position_checksum", "train/step/inputs.py:check_batch_across_ranks",
    f"{DISPATCHER}:expert_loads", f"{DISPATCHER}:<listcomp>",
)  # fmt: skip
"""Reads of the batch and of the sums of a step, which are in host memory, in each step."""


@pytest.mark.parametrize(("plan", "waits"), [("dp1.mb1", {}), ("dp2.ep2.z1.mb1", WAITS_OF_A_LAYER)])
def test_the_host_waits_at_most_once_in_a_layer_with_experts(plan: str, waits: dict[str, int]) -> None:
    """Beside the waits of a dense step. On one rank, grouped products need no counts on the host."""
    layers, micro_batches, found = 2, 2, Counter[str]()
    with traced_rank(0, parse_plan(plan).world) as rank:
        made = parallelize(
            constant_model("mixture", layers), still, plan, precision="bf16", anatomy=graph_of("mixture", layers),
            prove="never",
        )  # fmt: skip
        rank.trains = True
        made.engine.preflight.skip()
        made.engine.preflight.analysed = None
        rows = micro_batches * parse_plan(plan).dp
        batch = {name: torch.arange(SEQUENCE).repeat(rows, 1) for name in ("input_ids", "labels")}
        for _ in range(2):
            made.step(batch)
        with host_reads(found):
            made.step(batch)
        made.close()
    assert found.pop("train/step/passes.py:backward") == 1
    for place in OF_HOST_MEMORY:
        found.pop(place, None)
    assert found == {place: count * layers * micro_batches for place, count in waits.items()}


@pytest.mark.parametrize("plan", ["dp1.mb8", "dp1.mb2", "dp1.z3.rc-full.mb4"])
def test_the_host_waits_for_the_device_once_in_a_step_and_never_in_a_micro_batch(plan: str) -> None:
    """The batch of the test is in host memory, where its labels are counted once without a wait."""
    found = reads_of_a_step(plan)
    assert found.pop("runtime/loss.py:count") == 1
    assert found == {"train/step/passes.py:backward": 1}


def test_an_in_memory_checkpoint_makes_the_host_of_a_training_step_wait_no_more_often(tmp_path: Path) -> None:
    """Only the thread that copies waits: for the count of optimizer steps, the slot and its digest."""
    (tmp_path / "copies").touch()
    with recording_device() as backend:
        made = trainer("dp1.mb4")
        copies = MemoryCheckpointer(str(tmp_path / "copies"), made, Heartbeat(open_heartbeats("", 1), 0), {})
        made.on_phase = lambda phase: copies.finish() if phase == RankPhase.update else None
        found: Counter[str] = Counter()
        for step in range(6):
            if step == 4:
                backend.threads.clear()
                with host_reads(found):
                    made.step(make_batch("llama", step))
                    copies.begin({"step": step})
                    copies.finish()
            else:
                made.step(make_batch("llama", step))
                copies.begin({"step": step})
        copies.finish()
        assert copies.memory.is_intact(made.steps)
        made.close()
    of_copy = ("checkpoint/memory_checkpoint.py:digest", "train/device_copies.py:encode")
    assert all(found.pop(place) for place in of_copy)  # in the thread that copies
    assert found.pop("runtime/loss.py:count") == 1
    assert found == {"train/step/passes.py:backward": 1}
    assert "synchronize" in backend.threads["copy"]
    assert "synchronize" not in backend.threads["MainThread"]


KERNELS_OF_A_BLOCK = 112
"""Operations of one block of a Llama in bf16 for one micro-batch: forward, backward, and its part of the update."""


def test_a_block_launches_no_more_kernels_than_its_budget() -> None:
    counts = []
    for layers in (2, 3):
        with recording_device():
            made = trainer("dp1.mb4", layers)
            for step in range(3):
                made.step(make_batch("llama", step))
            with Kernels() as kernels:
                made.step(make_batch("llama", 3))
            made.close()
        counts.append(kernels.count)
    of_a_block = counts[1] - counts[0]
    assert of_a_block["mm"] > 0 and sum(of_a_block.values()) / 2 <= KERNELS_OF_A_BLOCK, of_a_block


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_call_of_the_optimizer_scales_all_gradients_and_updates_all_weights(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of a scale that is applied before: to clip, gradients are multiplied by a factor below 1."""
    weights, kernels, update = [], Kernels(), Updater.step

    def counted(*arguments: Any) -> None:
        with kernels:
            update(*arguments)

    for folds in (True, False):
        if not folds:
            monkeypatch.setattr(updater, "folds_scale", lambda optimizer: False)
        made = trainer(parse_plan("dp1.mb4").but(bucket=1), precision=precision, clip=0.01)
        made.engine.preflight.skip()
        for step in range(4):
            kernels.count.clear()
            with monkeypatch.context() as patched:
                patched.setattr(Updater, "step", counted)
                assert made.step(make_batch("llama", step)).gradient_norm > 0.01
        groups = sum(bool(group["params"]) for group in made.optimizer.param_groups)
        units = len(made.engine.zero.trainable)
        assert kernels.count["_fused_adamw_"] == groups and units > groups
        assert kernels.count["div_"] == (0 if folds else units) and "grad_scale" not in vars(made.optimizer)
        weights.append(made.full_state_dict())
        made.close()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


COMPILED = ("dp2", "dp2.z3", "tp2", "tp2.sp", "cp2", "cp2.ulysses", "tp2.cp2.sp", "cp4.ulysses2", "tp2.sp.rc-sac")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's own
@pytest.mark.parametrize(
    ("plan", "in_chunks"), [*((plan, False) for plan in COMPILED), ("tp2", True), ("tp2.sp", True)]
)
@pytest.mark.covering(5)
def test_a_compiled_block_is_one_graph_without_breaks(
    plan: str, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts in one step of two micro-batches of two blocks. Each call of a graph is overhead of the host, and the
    compiler fuses nothing across a break. Equal blocks share what is compiled for the first one."""
    if in_chunks:
        monkeypatch.setattr(chunks, "MIN_TENSOR_CHUNK_BYTES", {"gloo": 1, "nccl": 1})
    calls: list[int] = []
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return lambda *given: (calls.append(1), graph.forward(*given))[1]

    monkeypatch.setattr(compile, "compiler_backend", lambda: counting)
    torch._dynamo.reset()
    counters.clear()
    try:
        trace(parse_plan(f"{plan}.compile"), "llama", [0], steps=1)
        assert not counters["graph_break"]
        assert (len(graphs), len(calls)) == (1, 4)
        assert ("row_layer" in str(graphs[0].graph)) == in_chunks
    finally:
        torch._dynamo.reset()
        counters.clear()


class Order(TorchDispatchMode):
    """Notes products in `found`, among what others note there."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in function.overloadpacket.__name__:
            self.found.append("product")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_a_compiled_region_sums_over_ranks_while_it_computes_weight_gradients(
    sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As eager code does: backward starts the sum after the products for the input, and waits after all others."""
    found: list[str] = []

    def noted(start: Any) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            found.append(start.__name__)
            work = start(*given, **options)
            return async_collectives.CollectiveWork(None, lambda: (work.wait(), found.append("wait"))[0])

        return run

    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        monkeypatch.setattr(async_collectives, name, noted(getattr(async_collectives, name)))
    with traced_rank(0, 2):
        group = wrap_process_group(dist.group.WORLD)
        assert group is not None
        hidden, weights = torch.ones(1, 4, 3), [torch.ones(5, 3), torch.ones(6, 3)]
        gradients = [torch.ones(1, 8 if sequence_parallel else 4, len(weight)) for weight in weights]
        with Order(found):
            results = column_gradients(gradients, hidden, weights, group.key, sequence_parallel, [True, False])
    assert [tuple(each.shape) for each in results] == [(1, 4, 3), (5, 3)]
    products = ["product", "product"]
    assert found == (
        ["all_gather", *products, "reduce_scatter", "wait", "product", "wait"]
        if sequence_parallel
        else [*products, "all_reduce", "product", "wait"]
    )
