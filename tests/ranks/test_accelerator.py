"""What only ranks on accelerators need, decided where there are none: which kernels, where numbers lie, what is said
first."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import stuck_shutdown
import torch
import torch.distributed as dist
from pool import Pool

from meshwright.checkpoint.safetensors_writer import tensor_digest
from meshwright.checkpoint.save import _copy_to_host
from meshwright.core.errors import MeshwrightError
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.supervisor import Supervisor
from meshwright.runtime.backend import ALLOCATOR_VARIABLES, init_local_device
from meshwright.runtime.build.passes.prepare_model import move_buffers
from meshwright.runtime.comm import compression
from meshwright.runtime.comm.compression import FlatSlice, make_compressed_reducer
from meshwright.runtime.comm.group import uses_nccl, wrap_process_group
from meshwright.runtime.comm.topology import GroupFactory, Topology
from meshwright.runtime.context_parallel import kernels
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.profiler.links import CollectiveProfiler
from meshwright.runtime.shard.optimizer_shard import OptimizerShard, ParamRun
from meshwright.runtime.stage_placeholder import StagePlaceholder
from meshwright.spec.grid import RankGrid
from meshwright.spec.plan import Plan
from meshwright.spec.precision import GradientCompression, recipe
from meshwright.train import silent_corruption
from meshwright.train.measured_runs import measure_seconds

HERE = Path(__file__).parent


@pytest.mark.parametrize(("options", "place"), [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({}, "cpu")])
def test_the_count_of_steps_goes_on_where_the_update_reads_it(options: dict[str, Any], place: str) -> None:
    master = OptimizerShard(
        torch.zeros(512, device="meta"), [ParamRun(0, 64, False, "bias"), ParamRun(64, 512, True, "weight")]
    )
    optimizer = torch.optim.AdamW(master.params, fused=None)
    optimizer.param_groups[0].update(options)
    master.init_states(optimizer, {"exp_avg": "float32"}, {"step": 3.0})
    assert {optimizer.state[run]["step"].device.type for run in master.params} == {place}


def backends() -> tuple[str, bool]:
    group = wrap_process_group(dist.group.WORLD)
    assert group is not None
    return group.backends, group.is_native(torch.zeros(1))


def test_whether_nccl_carries_a_tensor_is_read_from_what_torch_says_of_each_device(ranks: Pool) -> None:
    said, native = ranks.run(2, backends)[0]
    assert "cpu:gloo" in said.split(",") and not native
    assert uses_nccl(said.replace("cuda:gloo", "cuda:nccl"), "cuda"), (
        "the same words, of a group whose tensors on CUDA devices NCCL carries"
    )


def test_products_that_repeat_themselves_are_asked_for_before_cublas_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    init_local_device()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    init_local_device()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "somebody chose"


@pytest.mark.parametrize("chosen", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", ""])
def test_device_memory_grows_in_segments_unless_somebody_chose(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(chosen or "PYTORCH_ALLOC_CONF", "backend:native")
    if not chosen:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    init_local_device()
    found = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}
    assert found == ({chosen: "backend:native"} if chosen else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize(
    ("target", "words"),
    [
        pytest.param("meshwright.train.loop:train", "model", marks=pytest.mark.soak),
        ("meshwright.cli.trials:rank", "job"),
    ],
)
def test_a_rank_says_what_failed_before_groups_end(
    target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setenv(stuck_shutdown.STUCK, "1")
    began = time.monotonic()
    with pytest.raises(MeshwrightError, match=words):
        Supervisor(RankJob(target, 2, {}, tmp_path, ("stuck_shutdown",)), lambda *_: None).run()
    assert time.monotonic() - began < stuck_shutdown.FOR_EVER


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_a_device_checksum_detects_a_flipped_bit_and_two_swapped_elements(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_corruption, "CHUNK_ELEMENTS", 300)
    tensor = torch.randint(0, 200, (1001,), generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = silent_corruption.bit_sums(tensor)
    assert whole.tolist() == silent_corruption.bit_sums(tensor.clone().view(7, 143)).tolist()
    for place in (0, 299, 300, 1000):
        other = tensor.clone()
        other.view(torch.uint8)[place * tensor.element_size()] ^= 1
        assert silent_corruption.bit_sums(other)[0] != whole[0]
    first, second = tensor.tolist()[0], next(value for value in tensor.tolist() if value != tensor.tolist()[0])
    swapped = tensor.clone()
    swapped[0], swapped[tensor.tolist().index(second)] = second, first
    assert silent_corruption.bit_sums(swapped)[0] == whole[0] and silent_corruption.bit_sums(swapped)[1] != whole[1]


def test_messages_between_hosts_and_cards_are_sent_from_where_training_sends_them() -> None:
    mesh = ParallelContext(Plan(), Topology(RankGrid(Plan()), 0), torch.device("meta"))
    out, sent = CollectiveProfiler(mesh, ((0,),)).messages(1024)
    assert (out.device.type, sent.device.type, sent.numel()) == ("meta", "meta", 512)


def test_a_step_is_timed_until_its_device_is_through() -> None:
    order: list[str] = []
    assert measure_seconds(lambda: order.append("step"), lambda: (order.append("through"), time.sleep(0.05))[0]) >= 0.05
    assert order == ["step", "through"]


def test_a_model_is_cut_where_it_was_built_and_only_buffers_go_to_the_device_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    move_buffers(model, torch.device("meta"), recipe("fp32"))
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert {each.device.type for each in model.buffers()} == {"meta"}
    absent = StagePlaceholder(model[0], (torch.device("meta"), torch.bfloat16))
    assert (absent.weight.device.type, absent.weight.dtype) == ("meta", torch.bfloat16)


def compressed(hosts: tuple[str, ...]) -> bool:
    """Whether a sum over all ranks of these hosts, none of which shares memory, is compressed."""
    plan, rank = Plan(dp_replicate=2), dist.get_rank()
    topology = Topology(RankGrid(plan), rank, host_ids=hosts)
    group = GroupFactory(topology, torch.device("cpu")).by_parts("copies", [(0, 1)])
    assert group is not None and group.process_group is not None
    dist.barrier()  # nobody leaves while the other still connects
    vector = FlatSlice(0, 512, torch.zeros(512), [(0, (512,))])
    return make_compressed_reducer(GradientCompression(kind="int8"), group, vector, scattered=False) is not None


def test_accelerator_sums_are_compressed_only_between_hosts(ranks: Pool) -> None:
    assert ranks.run(2, compressed, ("a", "a")) == [False, False]
    assert ranks.run(2, compressed, ("a", "b")) == [True, True]


def test_device_bytes_are_copied_once_and_digested_as_they_are_written() -> None:
    tensor, live = torch.arange(5.0), {"here": "as it was"}
    assert _copy_to_host(tensor, "here", live) is not None and live == {"here": "as it was"}
    assert torch.equal(_copy_to_host(tensor, "there", live), tensor) and live["there"] == tensor_digest(tensor)


@pytest.mark.parametrize("tile", [compression.CPU_TILE_ELEMENTS, compression.ACCELERATOR_TILE_ELEMENTS])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_sums_are_coded_alike_in_tiles_of_any_length(kind: str, tile: int) -> None:
    values = torch.randn(3 * compression.CPU_TILE_ELEMENTS + 100, generator=torch.Generator().manual_seed(0))
    way = compression.CompressedReducer(compression.CODECS[kind](), torch.zeros_like(values))
    assert (way.tile, compression.tile_elements(torch.device("meta"))) == (
        compression.CPU_TILE_ELEMENTS,
        compression.ACCELERATOR_TILE_ELEMENTS,
    )
    way.tile = tile
    way._encode(values.view(1, -1))
    plain = compression.CompressedReducer(compression.CODECS[kind](), torch.zeros_like(values))
    plain._encode(values.view(1, -1))
    assert torch.equal(way.residual, plain.residual)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_of_a_part_is_called_as_torch_wants_it(causal: bool) -> None:
    """Its forms alone are computed here: names and arguments that move are found."""
    query = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16, device="meta")
    key, value = torch.empty(2, 4, 48, 128, dtype=torch.bfloat16, device="meta").split(64, -1)
    part = kernels.PartialAttention(query[..., 8:, :], key, value, 0.125, causal)
    assert kernels.supports_flash(part) and not part.flash, "it is of CUDA devices"
    output, total = kernels.flash_forward(part)
    assert (output.shape, output.dtype, total.shape, total.dtype) == (
        (2, 8, 8, 64),
        torch.bfloat16,
        (2, 8, 8),
        torch.float32,
    )
    of_query, of_key, of_value = kernels.flash_backward(part, output, output, total)
    assert (of_query.shape, of_key.shape, of_value.shape) == (part.query.shape, key.shape, value.shape)


def test_a_kernel_gives_gradients_of_a_part_from_the_output_and_sum_of_all_parts() -> None:
    """What FlashAttention is relied on for, shown by its like on the CPU: the merged numbers in the place of a part's
    own."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (torch.randn(1, 2, 12, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    torch.nn.functional.scaled_dot_product_attention(*leaves, scale=0.3).backward(gradient)
    merged = kernels.LseMerge(query, 8)
    parts = [
        kernels.PartialAttention(query, key[:, :, rows], value[:, :, rows], 0.3) for rows in (slice(0, 4), slice(4, 12))
    ]
    for part in parts:
        merged.add(slice(None), *kernels.attention_forward(part))
    shares = [kernels.attention_backward(part, gradient, *merged.result()) for part in parts]
    torch.testing.assert_close(shares[0][0] + shares[1][0], leaves[0].grad)
    for place in (1, 2):
        torch.testing.assert_close(torch.cat([share[place] for share in shares], 2), leaves[place].grad)
