"""Recordings of other engines: correct runs equal one device, and planted faults are found with their module."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from pool import Pool
from recorded_loops import (
    Setting,
    batch_of,
    build,
    build_mixture,
    context_parallel,
    data_parallel,
    expert_parallel,
    loss_of,
    loss_of_shifted,
    pipeline,
    pipeline_by_hand,
    tensor_parallel,
    tensor_parallel_by_hand,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as context_parallel_of_torch
from torch.nn import functional as F

import meshwright
from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.interop.recording.findings import RecordingReport
from meshwright.interop.recording.layout import ShardedBy, parts_of
from meshwright.interop.recording.trace_format import HEADER_KEY, trace_name
from meshwright.interop.recording.verify_recording import verify_recording

Loop = Callable[[str, Setting], None]


class Case(NamedTuple):
    """A loop on `world` ranks. A fault must be found with a module that begins with `module` and the cause `cause`."""

    loop: Loop
    world: int
    setting: Setting
    module: str = ""
    cause: str = ""

    @property
    def name(self) -> str:
        """The name of the test."""
        changed = {key: value for key, value in self.setting._asdict().items() if value != Setting._field_defaults[key]}
        return f"{self.loop.__name__}-{self.world}-" + "-".join(f"{key}={value}" for key, value in changed.items())


def compare(ranks: Pool, case: Case, folder: Path) -> RecordingReport:
    """Records the loop and compares it with one device."""
    ranks.run(case.world, case.loop, str(folder), case.setting)
    loss = None if case.loop in (pipeline, pipeline_by_hand) else loss_of
    loss = loss_of_shifted if case.loop is context_parallel else loss
    own = build_mixture if case.loop is expert_parallel else build
    return verify_recording(folder, lambda: own(case.setting._replace(seed=99)), loss)


DDP, FSDP1, ORIG, FSDP2 = (Setting(kind=kind) for kind in ("DDP", "FSDP1", "FSDP1 orig", "FSDP2"))
PLAIN, SEQUENCE = Setting(), Setting(kind="sequence")

FAULTS = [
    Case(data_parallel, 2, DDP._replace(fault="mean of means"), "", "mean of means"),
    Case(data_parallel, 2, DDP._replace(fault="no reduction"), "", "missing gradient all-reduce"),
    Case(data_parallel, 2, DDP._replace(fault="skipped micro-batch"), "", "skipped micro-batch"),
    Case(data_parallel, 2, DDP._replace(fault="not zeroed"), "", "not zeroed"),
    Case(data_parallel, 2, FSDP2._replace(fault="scaled twice"), "", "scaled gradient"),
    Case(data_parallel, 2, DDP._replace(fault="learning rate"), "", "unequal options"),
    Case(data_parallel, 2, FSDP2._replace(fault="label shift"), "", "label shift"),
    Case(data_parallel, 2, FSDP1._replace(fault="padding counted"), "", "label count"),
    Case(data_parallel, 2, FSDP2._replace(fault="clip norm", clip=0.1), "", "wrong clip norm"),
    Case(data_parallel, 2, FSDP2._replace(fault="divided twice"), "layers.1", "scaled gradient"),
    Case(data_parallel, 2, FSDP2._replace(fault="stale weight"), "embedding", "stale weight"),
    Case(data_parallel, 2, PLAIN._replace(fault="not broadcast"), "", "unequal replicas"),
    Case(data_parallel, 2, DDP._replace(fault="excluded parameter"), "layers.1.up", "missing gradient all-reduce"),
    Case(
        tensor_parallel_by_hand,
        2,
        PLAIN._replace(fault="no reduction of outputs"),
        "layers.1.down",
        "missing all-reduce",
    ),
    Case(tensor_parallel_by_hand, 2, PLAIN._replace(fault="doubled bias"), "layers.0.attention.out", "doubled bias"),
    Case(
        tensor_parallel_by_hand,
        2,
        PLAIN._replace(fault="no reduction of input gradients"),
        "layers.1.up",
        "missing input-gradient all-reduce",
    ),
    Case(
        tensor_parallel_by_hand,
        2,
        SEQUENCE._replace(fault="norm not reduced"),
        "layers.1.norm2",
        "missing gradient all-reduce",
    ),
    Case(
        tensor_parallel_by_hand,
        2,
        SEQUENCE._replace(fault="reduced after every micro-batch"),
        "layers.1.norm2",
        "repeated all-reduce",
    ),
    Case(tensor_parallel_by_hand, 2, PLAIN._replace(fault="wrong shard"), "layers.0.up", "wrong shard"),
    Case(
        tensor_parallel_by_hand,
        2,
        PLAIN._replace(fault="unequal masks", dropout=0.2),
        "layers.0.dropout",
        "unequal dropout masks",
    ),
    Case(
        tensor_parallel_by_hand,
        2,
        PLAIN._replace(fault="equal masks", inner=0.2),
        "layers.0.inner",
        "equal dropout masks",
    ),
    Case(tensor_parallel_by_hand, 2, PLAIN._replace(fault="not causal"), "layers.1.attention.out", ""),
    Case(pipeline_by_hand, 2, Setting(fault="stale tied weight", tied=True), "head", "stale tied weight"),
    Case(pipeline_by_hand, 2, Setting(fault="tied gradients not reduced", tied=True), "embedding", "tied weight"),
    Case(pipeline_by_hand, 2, Setting(fault="skipped micro-batch"), "", "skipped micro-batch"),
    Case(pipeline, 2, Setting(fault="scaled twice", kind="gpipe"), "", "scaled gradient"),
    Case(context_parallel, 2, Setting(fault="positions"), "positions", "wrong shard"),
    Case(context_parallel, 2, Setting(fault="no reduction", kind="zigzag"), "", "missing gradient all-reduce"),
    Case(expert_parallel, 2, Setting(fault="divided twice"), "experts", "scaled gradient"),
    Case(context_parallel, 2, Setting(fault="equal masks", dropout=0.2), "layers.0.dropout", "equal dropout masks"),
]
"""Planted faults."""

CORRECT = [
    *(Case(data_parallel, 2, each) for each in (PLAIN, DDP, FSDP1, ORIG, FSDP2)),
    *(Case(data_parallel, 2, each._replace(seed=1, tied=True, clip=0.3)) for each in (DDP, FSDP1, ORIG, FSDP2)),
    *(Case(data_parallel, 2, each._replace(seed=2, dropout=0.2, inner=0.1)) for each in (DDP, FSDP1, FSDP2)),
    *(Case(data_parallel, 2, each._replace(seed=3, dtype="float64")) for each in (PLAIN, DDP, FSDP1, FSDP2)),
    *(Case(data_parallel, 2, each._replace(seed=4, low="bfloat16")) for each in (DDP, FSDP2)),
    *(Case(data_parallel, 2, each._replace(seed=5, dtype="bfloat16")) for each in (DDP, FSDP2)),
    *(Case(data_parallel, 3, each._replace(seed=6, micro_batches=3, optimizer="SGD")) for each in (DDP, FSDP1, FSDP2)),
    *(
        Case(data_parallel, 4, each._replace(seed=7, micro_batches=1, optimizer="Adam", layers=3))
        for each in (DDP, FSDP2)
    ),
    *(Case(data_parallel, 2, each._replace(seed=8, tensors=True)) for each in (DDP, FSDP2)),
    *(Case(tensor_parallel, 2, Setting(kind=kind, seed=seed)) for kind in ("", "sequence") for seed in (0, 1)),
    Case(tensor_parallel, 4, Setting(seed=2, dtype="float64")),
    Case(tensor_parallel, 4, Setting(kind="2d", seed=3)),
    Case(tensor_parallel, 4, Setting(kind="2d sequence", seed=4)),
    Case(tensor_parallel, 4, Setting(kind="2d", seed=5, optimizer="SGD")),
    *(Case(tensor_parallel_by_hand, 2, Setting(kind=kind, seed=seed)) for kind in ("", "sequence") for seed in (0, 1)),
    Case(tensor_parallel_by_hand, 4, Setting(seed=2, dtype="float64")),
    Case(tensor_parallel_by_hand, 2, Setting(kind="attributes", seed=5)),
    Case(tensor_parallel_by_hand, 2, Setting(seed=3, dropout=0.2, inner=0.2)),
    Case(tensor_parallel_by_hand, 2, Setting(kind="sequence", seed=4, dropout=0.2, inner=0.2)),
    *(
        Case(pipeline, 2, Setting(kind=kind, seed=seed, micro_batches=4))
        for kind in ("gpipe", "1f1b")
        for seed in (0, 1)
    ),
    Case(pipeline, 3, Setting(kind="1f1b", seed=2, micro_batches=4, layers=3)),
    Case(pipeline, 2, Setting(kind="1f1b", seed=3, micro_batches=4, dtype="float64")),
    Case(expert_parallel, 2, Setting()),
    Case(expert_parallel, 4, Setting(seed=1, dtype="float64")),
    *(Case(context_parallel, 2, Setting(kind=kind, dropout=0.2)) for kind in ("", "zigzag")),
    Case(context_parallel, 3, Setting(kind="zigzag", seed=1, dtype="float64")),
    Case(pipeline_by_hand, 2, Setting(seed=0)),
    Case(pipeline_by_hand, 2, Setting(seed=1, tied=True)),
    Case(pipeline_by_hand, 2, Setting(seed=2, dropout=0.1, micro_batches=3)),
]
"""Correct runs."""


@pytest.mark.covering(5)
@pytest.mark.parametrize("case", FAULTS, ids=[case.name for case in FAULTS])
def test_a_planted_fault_is_found_with_its_module(ranks: Pool, tmp_path: Path, case: Case) -> None:
    report = compare(ranks, case, tmp_path / "trace")
    found = report.findings[0] if report.findings else None
    assert found is not None, "\n".join(report.lines())
    assert found.module.startswith(case.module) and bool(found.module) >= bool(case.module), found.line()
    assert not case.cause or found.cause == case.cause, found.line()


@pytest.mark.covering(5)
@pytest.mark.parametrize("case", CORRECT, ids=[case.name for case in CORRECT])
def test_a_correct_run_equals_one_device(ranks: Pool, tmp_path: Path, case: Case) -> None:
    report = compare(ranks, case, tmp_path / "trace")
    assert report.equal, "\n".join([*report.lines(), *(found.line() for found in report.findings)])
    assert len(report.steps) == 2 and all(step.outputs and step.gradients and step.updates for step in report.steps)


def inside_context_parallel(folder: str) -> str:
    """Runs a recorded forward inside of torch's context_parallel. Returns the error."""
    model, ids = build(Setting()), batch_of(Setting(), 0, 0)[0]
    mesh = init_device_mesh("cpu", (2,))
    try:
        with (
            meshwright.recording(folder, model),
            context_parallel_of_torch(mesh, buffers=[ids], buffer_seq_dims=[1]),
        ):
            model(ids)
    except InputError as error:
        return str(error)
    return ""


def test_a_part_of_a_sequence_must_be_described(ranks: Pool, tmp_path: Path) -> None:
    for said in ranks.run(2, inside_context_parallel, str(tmp_path)):
        assert "give sequence=SequenceShard(dim, group, positions)" in said


def test_a_gated_weight_of_megatron_core_has_a_part_of_the_gate_and_of_the_up_projection() -> None:
    model = nn.Module()
    model.linear_fc1, model.linear_fc2 = nn.Linear(3, 8), nn.Linear(4, 3)
    for parameter in model.parameters():
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    for gated, rows in ((True, ((4, 8), (12, 16))), (False, ((8, 16),))):
        model.config = SimpleNamespace(gated_linear_unit=gated)
        found = {part.name: part.region.ranges for part in parts_of(model, ShardedBy({}, 1, 2, (0, 1)), True)}
        assert found["linear_fc1.weight"] == (rows, ((0, 3),)) and found["linear_fc1.bias"] == (rows,)
        assert found["linear_fc2.bias"] == (((3, 6),),)


MODEL = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def other():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))
"""


def small_recording(folder: Path, steps: int = 2, faulty: bool = False) -> None:
    """Records a plain loop of one process that runs one step more than is recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with meshwright.recording(folder, model, steps=steps):
        for _ in range(steps + 1):
            F.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 4, (6,))).backward()
            optimizer.step()
            if not faulty:
                optimizer.zero_grad()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def user_files(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(MODEL, encoding="utf-8")
    small_recording(tmp_path / "trace")
    return tmp_path


def test_the_command_compares_a_recording_and_writes_a_page(
    user_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", f"{user_files / 'own.py'}:build", "--page", str(user_files / "page.html")]
    assert main(["verify", "--recording", str(user_files / "trace"), *options, "--lang", "en"]) == 0
    said = capsys.readouterr().out
    assert "step 2: micro-batches 1, loss " in said and said.endswith("equal to one device\n")
    small_recording(user_files / "faulty", faulty=True)
    assert main(["verify", "--recording", str(user_files / "faulty"), *options, "--json", "--lang", "en"]) == 4
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert not found["equal"] and found["findings"][0]["cause"] == "not zeroed" and found["findings"][0]["step"] == 2
    assert "step 2: gradient of the whole model on rank 0 differs by" in said.err
    assert '"cause":"not zeroed"' in (user_files / "page.html").read_text(encoding="utf-8")


def test_bad_input_is_one_line_that_says_what_to_do(user_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, model = user_files / "trace", f"{user_files / 'own.py'}:build"

    def said(folder: Path, *options: str) -> str:
        assert main(["verify", "--recording", str(folder), *(options or ("--model", model)), "--lang", "en"]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1, line
        return line

    def copied(name: str, changes: dict[str, Any], rank: int = 0, cut: int = 0) -> Path:
        """A copy of the recording as the file of `rank`, with changed entries, without its last `cut` bytes."""
        folder = user_files / name
        folder.mkdir(exist_ok=True)
        with safe_open(str(trace / trace_name(0)), "pt") as file:
            header = json.loads(file.metadata()[HEADER_KEY]) | changes
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        path = folder / trace_name(rank)
        save_file(tensors, str(path), {HEADER_KEY: json.dumps(header)})
        path.write_bytes(path.read_bytes()[: -cut or None])
        return folder

    with safe_open(str(trace / trace_name(0)), "pt") as file:
        steps = json.loads(file.metadata()[HEADER_KEY])["steps"]
    assert "no such folder" in said(user_files / "none")
    assert "has no file rank-NNNNN.safetensors" in said(user_files)
    assert "is truncated or not a recording" in said(copied("cut", {}, cut=100))
    assert "format 9 of a recording" in said(copied("format", {"format": 9}))
    assert "is damaged" in said(copied("damaged", {"steps": 3}))
    assert "is the file of rank 0" in said(copied("renamed", {}, rank=1))
    assert "the files of 2 ranks are missing, the first is rank-00001" in said(copied("missing", {"world": 3}))
    copied("worlds", {"world": 2})
    assert "is of 2 ranks and rank-00001.safetensors of 4" in said(copied("worlds", {"world": 4, "rank": 1}, rank=1))
    copied("steps", {"world": 2})
    shorter = {"world": 2, "rank": 1, "steps": steps[:1]}
    assert "rank 0 has 2 steps and rank 1 has 1" in said(copied("steps", shorter, rank=1))
    assert "has no complete step" in said(copied("empty", {"steps": []}))
    assert "2.weight has shape (5, 16), but the recording has (4, 16)" in said(trace, "--model", model[:-5] + "other")
    assert "name a function that builds it" in said(trace, "--json")
    assert "--recording takes no --cluster" in said(trace, "--cluster", "1x2:cpu")
    assert main(["verify", "--page", str(user_files / "page.html")]) == 2
    assert "--page needs --recording" in capsys.readouterr().err


def test_a_recording_changes_no_number_of_the_training(tmp_path: Path) -> None:
    weights = []
    for recorded in (False, True):
        model = build(Setting(dropout=0.1))
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        with meshwright.recording(tmp_path / "trace", model) if recorded else nullcontext():
            for step in range(3):
                ids, labels = batch_of(Setting(), step, 0)
                loss_of(model(ids), {"labels": labels})[0].backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


class RotaryModel(nn.Module):
    """Rotates hidden states in the complex plane, as the rotary embedding of torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 5)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(self.up(given).unflatten(-1, (3, 2))) * self.turns
        return self.down(torch.view_as_real(turned).flatten(-2))


def test_a_complex_buffer_keeps_its_imaginary_part(tmp_path: Path) -> None:
    model = RotaryModel()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with meshwright.recording(tmp_path, model):
        for _ in range(2):
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(5, (8,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = verify_recording(tmp_path, RotaryModel)
    assert not report.findings and all(step.outputs == 3 for step in report.steps), report.lines()
