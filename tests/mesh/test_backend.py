"""Device types: one class for each, and nothing else in `runtime/` and `train/` compares them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import anatomy_of, make_model, make_optimizer
from recording_backend import recording_device

import meshwright.runtime.backend as backends
from meshwright.core.errors import InputError
from meshwright.runtime.backend import (
    Backend,
    CpuBackend,
    CudaBackend,
    DeviceProperties,
    ProfilingSizes,
    backend_of,
    local_device,
    platform_names,
)
from meshwright.runtime.float8 import check_precision_support
from meshwright.runtime.profiler.device import tensor_factory
from meshwright.spec.precision import recipe
from meshwright.train.silent_corruption import SdcRecompute
from meshwright.train.trainer import parallelize

SOURCE = Path(backends.__file__).parents[1]
DEVICE_TYPES = {"mps", "xpu", "nccl", *Backend.by_type}
EXCEPTIONS = {
    "runtime/profiler/device.py: 'cpu' in kinds.split(',')": "the name of a cgroup controller",
    "runtime/comm/group.py: backend_of(device).collective_library == 'nccl'": "a limit of NCCL on any device",
}


def device_dependences(tree: ast.AST) -> Iterator[str]:
    """Comparisons with the name of a device type, `is_cuda` and `is_cpu`, and everything in `torch.cuda`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = [item for side in sides for item in ast.walk(side) if isinstance(item, ast.Constant)]
            if any(item.value in DEVICE_TYPES for item in names):
                yield ast.unparse(node)
        elif isinstance(node, ast.Attribute) and (
            node.attr in ("is_cuda", "is_cpu") or ast.unparse(node) in ("torch.cuda", "torch.backends.cuda")
        ):
            yield ast.unparse(node)


def test_only_the_backends_compare_device_types() -> None:
    found = {
        f"{path.relative_to(SOURCE).as_posix()}: {text}"
        for package in ("runtime", "train")
        for path in sorted((SOURCE / package).rglob("*.py"))
        for text in device_dependences(ast.parse(path.read_text(encoding="utf-8")))
        if path != Path(backends.__file__)
    }
    assert found == EXCEPTIONS.keys()


def pinning(tree: ast.AST) -> Iterator[str]:
    """Pinned memory, and random states of which only those of the host are restored."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func).endswith(("pin_memory", "fork_rng")) and "backend" not in ast.unparse(node.func):
                yield ast.unparse(node.func)
            yield from (word.arg for word in node.keywords if word.arg == "pin_memory")


def test_only_the_backends_pin_memory_and_restore_random_states() -> None:
    found = {
        f"{path.relative_to(SOURCE).as_posix()}: {text}"
        for package in ("runtime", "train", "data", "checkpoint")
        for path in sorted((SOURCE / package).rglob("*.py"))
        for text in pinning(ast.parse(path.read_text(encoding="utf-8")))
        if path != Path(backends.__file__)
    }
    assert found == set()


@pytest.mark.parametrize(
    "text", ["device.type == 'cuda'", "'cpu' != kind", "x.is_cuda", "torch.cuda.synchronize()", "set(k) <= {'cpu'}"]
)
def test_the_check_sees_every_form_of_comparison(text: str) -> None:
    assert list(device_dependences(ast.parse(text)))


def test_cpu_cuda_and_meta_differ_as_the_runtime_relies_on() -> None:
    cpu, cuda, meta = (backend_of(kind) for kind in ("cpu", "cuda", "meta"))
    assert (type(cpu), type(cuda), type(meta)) == (CpuBackend, CudaBackend, Backend)
    assert [each.memory_is_host for each in (cpu, cuda, meta)] == [True, False, False]
    assert [each.has_streams for each in (cpu, cuda, meta)] == [False, True, False]
    assert [each.process_group_backend for each in (cpu, cuda, meta)] == ["gloo", "cpu:gloo,cuda:nccl", "gloo"]


@pytest.fixture
def new_backend() -> Iterator[type[Backend]]:
    class XpuBackend(Backend):
        device_type = "xpu"
        has_streams = True
        collective_library = "xccl"
        profiling = ProfilingSizes(health_matmul=2048)

        def local_device(self, index: int | None) -> torch.device | None:
            return torch.device("xpu", index or 0)

    yield XpuBackend
    del Backend.by_type["xpu"]


def test_a_new_backend_needs_one_class(new_backend: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    if not torch.cuda.is_available():
        assert local_device() == torch.device("xpu", 3)
    device = torch.device("xpu", 3)
    assert isinstance(backend_of(device), new_backend)
    assert backend_of(device).process_group_backend == "cpu:gloo,xpu:xccl"
    assert backend_of(device).profiling.health_matmul == 2048
    assert tensor_factory(device.type) is torch.randn


def test_no_backend_of_this_machine_has_started_a_driver_by_import() -> None:
    assert torch.cuda.is_available() or backends.initialized_accelerators() == []


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_of_an_accelerator_are_deterministic_if_the_job_says_so(deterministic: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        with recording_device():
            parallelize(
                make_model("llama"), make_optimizer, "dp1", anatomy=anatomy_of("llama"), deterministic=deterministic
            ).close()
        assert torch.are_deterministic_algorithms_enabled() == deterministic
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("accelerator", "errors", "said"),
    [
        (True, (0.0, 1e-4), 0),  # another order of additions
        (True, (0.0, 8.0, 0.0), 1),  # a flipped bit
        (True, (float("nan"), float("nan")), 0),
        (False, (0.0, 1e-4, 0.0), 1),
        (False, (0.0, 1e-4, 2e-4), 1),
    ],
)
def test_recomputed_gradients_have_a_tolerance_where_kernels_are_not_deterministic(
    accelerator: bool, errors: tuple[float, ...], said: int
) -> None:
    with recording_device() if accelerator else nullcontext():
        made = parallelize(make_model("llama"), make_optimizer, "dp1", anatomy=anatomy_of("llama"))
        shards = [unit.gradients.shard for unit in made.engine.zero.trainable]
        lines, left = list[str](), [*errors]

        def compute() -> Any:
            for shard in shards:
                shard.copy_(torch.linspace(-1, 1, len(shard)))
            shards[0][7] += left.pop(0) * len(shards[0])
            return 0.0, 0.0, [1.0]

        SdcRecompute(1, lambda step, line: lines.append(line)).settled(made, compute)
        made.close()
    assert (len(lines), left) == (said, [])


def test_rocm_is_the_cuda_backend_with_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks say on a machine of 2 AMD devices, gfx942, with a torch that is built for ROCm."""
    backend = backend_of("cuda")
    assert isinstance(backend, CudaBackend) and platform_names(backend)[:2] == ("CUDA", "NCCL")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(CudaBackend, "properties", lambda *_: DeviceProperties("gfx942", 0.0, (9, 4)))
    assert platform_names(backend)[:2] == ("ROCm", "RCCL")
    assert backend.local_device(1) == torch.device("cuda", 1)
    with pytest.raises(InputError, match=r"torch sees 2 devices; .* \(HIP_VISIBLE_DEVICES\)"):
        backend.local_device(2)
    with pytest.raises(InputError, match=r"a ROCm device of capability 9\.5 or newer; this ROCm device has .* 9\.4"):
        check_precision_support(recipe("fp8"), torch.device("cuda"))
    with pytest.raises(InputError, match=r"a CUDA device of capability 8\.0 or newer; this ROCm device"):
        check_precision_support(recipe("tf32"), torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torch for ROCm" in backend.compile_obstacle()
