"""What a user reads when ranks would not get the devices of the job: one line with the remedy, before ranks start.
Machines are played by files as their drivers write them."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from jobs import small_job
from test_inputs import cards

from meshwright.cli import device_checks
from meshwright.cli.device_checks import TorchBuild, check_devices, count_amd_devices, driver_version, torch_build
from meshwright.core.errors import InputError
from meshwright.elastic.launch.submission import NodeRequest, node_sets
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.search.ranking import search_plans

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Feb  1 04:24:48 UTC 2024\nGCC version:  gcc 12.2\n"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@host)\n"
CUDA, CUDA_13, ROCM, NO_GPU = TorchBuild("12.8"), TorchBuild("13.0"), TorchBuild("", "6.4.2"), TorchBuild()


def machine(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: TorchBuild | None,
    driver: str = DRIVER.format("550.54.14"),
    nvidia: int = 0,
    amd: int = 0,
) -> None:
    """A machine with `nvidia` H200 and `amd` AMD devices, one CPU that its kernel lists like these, and a torch."""
    cards(folder, monkeypatch, *["NVIDIA H200"] * nvidia, files=nvidia)
    for node in range(amd + 1 if amd else 0):
        (folder / "kfd" / str(node)).mkdir(parents=True)
        (folder / "kfd" / str(node) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {304 * (node > 0)}\n")
    (folder / "version").write_text(driver)
    monkeypatch.setattr(device_checks, "DRIVER_VERSION_FILE", folder / "version")
    monkeypatch.setattr(device_checks, "AMD_TOPOLOGY_FOLDER", folder / "kfd")
    monkeypatch.setattr(device_checks, "torch_build", lambda: build)


def check(cluster: str, ranks: int = 0) -> None:
    check_devices(small_job().but(cluster=read_cluster(cluster)), ranks)


@pytest.mark.parametrize(
    ("cluster", "ranks", "build", "driver", "nvidia", "amd", "visible"),
    [
        ("1x8:h200", 8, CUDA, DRIVER.format("525.60.13"), 8, 0, None),
        ("2x8:h200", 0, CUDA, OPEN_DRIVER.format("580.65.06"), 1, 0, None),
        ("1x2:h200", 2, CUDA_13, OPEN_DRIVER.format("580.65.06"), 8, 0, "2,3"),
        ("1x8:h200", 8, CUDA, "", 8, 0, None),
        ("1x8:h200", 8, None, DRIVER.format("400.1"), 8, 0, None),
        ("1x8:mi300x", 8, ROCM, "", 0, 8, None),
        ("1x8:mi300x", 8, ROCM, "", 1, 8, None),
        ("local:4", 4, NO_GPU, "", 2, 0, ""),
    ],
)
def test_devices_that_torch_can_use_are_accepted(
    cluster: str,
    ranks: int,
    build: TorchBuild,
    driver: str,
    nvidia: int,
    amd: int,
    visible: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(tmp_path, monkeypatch, build, driver, nvidia, amd)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check(cluster, ranks)


@pytest.mark.parametrize(
    ("cluster", "ranks", "build", "driver", "nvidia", "amd", "visible", "words"),
    [
        ("1x8:h200", 8, NO_GPU, "", 8, 0, None, "installed torch is built without CUDA: install a torch built for"),
        ("1x8:h200", 8, ROCM, "", 8, 0, None, "the installed torch is built without CUDA"),
        ("1x8:mi300x", 8, CUDA, "", 0, 8, None, "8 GPUs (AMD), but the installed torch is built without ROCm: install"),
        ("1x8:mi300x", 8, CUDA, "", 0, 8, None, "with --cluster local:4 and HIP_VISIBLE_DEVICES= (empty)"),
        ("1x8:h200", 8, NO_GPU, "", 8, 0, None, "with --cluster local:4 and CUDA_VISIBLE_DEVICES= (empty)"),
        ("1x8:h200", 8, CUDA, DRIVER.format("470.82.01"), 8, 0, None, "driver 470.82.01 is older than 525.60.13, whi"),
        ("1x8:h200", 8, CUDA_13, OPEN_DRIVER.format("550.54.14"), 8, 0, None, "or install a torch for CUDA 12"),
        ("1x8:h200", 8, CUDA, "", 8, 0, "", "CUDA_VISIBLE_DEVICES= hides all 8 GPUs of this machine (NVIDIA H200)"),
        ("1x8:h200", 8, CUDA, "", 8, 0, "-1", "CUDA_VISIBLE_DEVICES=-1 hides all 8 GPUs"),
        ("1x8:h200", 8, CUDA, "", 8, 0, "0,1", "have 8 ranks on this machine, but CUDA shows 2 devices (NVIDIA H200)"),
        ("1x8:h200", 8, CUDA, "", 0, 0, None, "has h200, but this machine has no GPU"),
        ("1x8:mi300x", 8, CUDA, "", 8, 8, None, "its torch uses those of NVIDIA, but cluster '1x8:mi300x' has mi300x"),
        ("1x8:h200", 8, ROCM, "", 8, 8, None, "its torch uses those of AMD, but cluster '1x8:h200' has h200"),
        ("1x8:tpu-v5p", 8, NO_GPU, "", 0, 0, None, "tpu-v5p can be planned for but not trained on: "),
        ("1x8:mi300x", 8, ROCM, "", 0, 4, None, "but ROCm shows 4 devices (AMD): name a smaller cluster"),
    ],
)
def test_devices_that_torch_cannot_use_are_one_line_with_the_remedy(
    cluster: str,
    ranks: int,
    build: TorchBuild,
    driver: str,
    nvidia: int,
    amd: int,
    visible: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(tmp_path, monkeypatch, build, driver, nvidia, amd)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(InputError) as caught:
        check(cluster, ranks)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def install(folder: Path, package: str, version: str, requires: str = "") -> None:
    (folder / f"{package.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{requires}"
    (folder / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA").write_text(text)


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ("", "torch for CUDA 12.8 needs NCCL 2.27.5, but it is not installed: pip install nvidia-nccl-cu12==2.27.5"),
        ("2.9.6", "needs NCCL 2.27.5, but NCCL 2.9.6 is installed: pip install nvidia-nccl-cu12==2.27.5"),
        ("2.27.5", ""),
        ("2.30.1", ""),
    ],
)
def test_a_missing_or_old_nccl_is_one_line_before_ranks_start(
    installed: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, monkeypatch, CUDA, nvidia=2)
    required = 'Requires-Dist: nvidia-cudnn-cu12==9.10\nRequires-Dist: nvidia-nccl-cu12==2.27.5; system == "Linux"\n'
    install(tmp_path / "site", "torch", "2.13.0", required)
    if installed:
        install(tmp_path / "site", "nvidia-nccl-cu12", installed)
    monkeypatch.syspath_prepend(tmp_path / "site")
    if not words:
        check("1x2:h200", 2)
        return
    with pytest.raises(InputError) as caught:
        check("1x2:h200", 2)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_job_without_an_estimate_is_not_trained_on_cores_beside_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, monkeypatch, NO_GPU, nvidia=1)
    with pytest.raises(InputError, match=r"1 GPUs \(NVIDIA H200\), but the installed torch is built without"):
        check_devices(None, 1)


def test_the_build_of_torch_is_read_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "torch")]
    monkeypatch.setattr(device_checks, "find_spec", lambda name: spec)
    assert torch_build() == CUDA
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.2'\n")
    assert torch_build() == ROCM
    monkeypatch.setattr(device_checks, "find_spec", lambda name: None)
    assert torch_build() is None


def test_versions_and_devices_are_read_from_the_files_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, monkeypatch, CUDA, OPEN_DRIVER.format("580.65.06"), nvidia=1, amd=3)
    assert (driver_version(), count_amd_devices()) == ("580.65.06", 3)
    monkeypatch.setattr(device_checks, "DRIVER_VERSION_FILE", tmp_path / "absent")
    assert driver_version() == ""


@pytest.mark.parametrize("device", ["tpu-v5p", "gaudi3", "ascend-910b", "trainium2"])
def test_planner_launch_and_train_refuse_other_accelerators_with_one_line(device: str) -> None:
    job = small_job().but(cluster=read_cluster(f"1x8:{device}"))
    said = set()
    for ask in (
        lambda: search_plans(job, 1, runnable=True),
        lambda: node_sets(job.cluster, NodeRequest()),
        lambda: check_devices(job, 8),
    ):
        with pytest.raises(InputError) as caught:
            ask()
        said.add(str(caught.value))
    (line,) = said
    assert line.startswith(f"{device} can be planned for but not trained on: ") and "\n" not in line
