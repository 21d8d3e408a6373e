"""Recordings of other engines: correct runs equal one device, and planted faults are found with their module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from pool import Pool
from recorded_loops import (
    Setting,
    build,
    data_parallel,
    loss_of,
    pipeline,
    pipeline_by_hand,
    tensor_parallel,
    tensor_parallel_by_hand,
)

from meshwright.interop.recording.findings import RecordingReport
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
    return verify_recording(folder, lambda: build(case.setting._replace(seed=99)), loss)


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
    Case(tensor_parallel_by_hand, 2, Setting(seed=3, dropout=0.2, inner=0.2)),
    Case(tensor_parallel_by_hand, 2, Setting(kind="sequence", seed=4, dropout=0.2, inner=0.2)),
    *(
        Case(pipeline, 2, Setting(kind=kind, seed=seed, micro_batches=4))
        for kind in ("gpipe", "1f1b")
        for seed in (0, 1)
    ),
    Case(pipeline, 3, Setting(kind="1f1b", seed=2, micro_batches=4, layers=3)),
    Case(pipeline, 2, Setting(kind="1f1b", seed=3, micro_batches=4, dtype="float64")),
    Case(pipeline_by_hand, 2, Setting(seed=0)),
    Case(pipeline_by_hand, 2, Setting(seed=1, tied=True)),
    Case(pipeline_by_hand, 2, Setting(seed=2, dropout=0.1, micro_batches=3)),
]
"""Correct runs."""


@pytest.mark.covering(6)
@pytest.mark.parametrize("case", FAULTS, ids=[case.name for case in FAULTS])
def test_a_planted_fault_is_found_with_its_module(ranks: Pool, tmp_path: Path, case: Case) -> None:
    report = compare(ranks, case, tmp_path / "trace")
    found = report.findings[0] if report.findings else None
    assert found is not None, "\n".join(report.lines())
    assert found.module.startswith(case.module) and bool(found.module) >= bool(case.module), found.line()
    assert not case.cause or found.cause == case.cause, found.line()


@pytest.mark.covering(6)
@pytest.mark.parametrize("case", CORRECT, ids=[case.name for case in CORRECT])
def test_a_correct_run_equals_one_device(ranks: Pool, tmp_path: Path, case: Case) -> None:
    report = compare(ranks, case, tmp_path / "trace")
    assert report.equal, "\n".join([*report.lines(), *(found.line() for found in report.findings)])
    assert len(report.steps) == 2 and all(step.outputs and step.gradients and step.updates for step in report.steps)
