"""Recordings of accelerate, transformers, DeepSpeed and Megatron-Core. An engine that is not installed is skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from model_families import build_family
from pool import Pool
from recorded_engines import (
    EngineSetting,
    accelerate_loop,
    deepspeed_loop,
    megatron_loop,
    megatron_pipeline,
    transformers_trainer,
    verify_megatron,
)
from recorded_loops import Setting, build, loss_of
from transformers_modes import differences, train_on_one_device, train_under

from meshwright.interop.recording.verify_recording import verify_recording

LOOPS: dict[str, Callable[[str, EngineSetting], None]] = {
    "accelerate": accelerate_loop,
    "transformers": transformers_trainer,
    "deepspeed": deepspeed_loop,
}
CASES = [
    (EngineSetting("accelerate"), ""),
    (EngineSetting("accelerate", clip=0.3, seed=1), ""),
    (EngineSetting("accelerate", low="bf16", seed=2), ""),
    (EngineSetting("accelerate", fault="scaled twice"), "scaled gradient"),
    (EngineSetting("transformers"), ""),
    (EngineSetting("transformers", clip=0.5, seed=1), ""),
    (EngineSetting("transformers", fault="mean of means"), "mean of means"),
    *((EngineSetting("deepspeed", stage=stage, seed=stage), "") for stage in range(4)),
    (EngineSetting("deepspeed", stage=2, clip=0.2), ""),
    (EngineSetting("deepspeed", stage=3, clip=0.2), ""),
    (EngineSetting("deepspeed", stage=1, low="bf16"), ""),
    (EngineSetting("deepspeed", stage=3, fault="skipped micro-batch"), "skipped micro-batch"),
]
"""A setting, and the cause that must be found ('' for a correct run)."""


@pytest.mark.soak
@pytest.mark.parametrize(("setting", "cause"), CASES, ids=["-".join(map(str, case[0])) for case in CASES])
def test_an_engine_equals_one_device_unless_a_fault_is_planted(
    tmp_path: Path, setting: EngineSetting, cause: str
) -> None:
    pytest.importorskip(setting.engine)
    pool = Pool()  # the engines remember the process group of the call before
    try:
        pool.run(2, LOOPS[setting.engine], str(tmp_path / "trace"), setting)
    finally:
        pool.close()
    own = setting.engine == "transformers"  # its model is built from the recorded configuration, and returns a loss
    report = verify_recording(
        tmp_path / "trace", None if own else lambda: build(Setting(seed=9)), None if own else loss_of
    )
    shown = "\n".join([*report.lines(), *(found.line() for found in report.findings)])
    assert [found.cause for found in report.findings] == ([cause] if cause else []), shown
    if not cause:
        assert len(report.steps) == 2 and all(step.outputs and step.gradients and step.updates for step in report.steps)


MEGATRON = [
    (1, EngineSetting("megatron"), "", ""),
    (2, EngineSetting("megatron", seed=1), "", ""),
    (2, EngineSetting("megatron", fault="no reduction of outputs"), "layers.1.mlp", "missing all-reduce"),
    (2, EngineSetting("megatron", fault="wrong shard"), "layers.1.mlp.linear_fc1", "wrong shard"),
    (2, EngineSetting("megatron", pipeline=True, seed=2), "", ""),
    (4, EngineSetting("megatron", pipeline=True, seed=3), "", ""),
    (2, EngineSetting("megatron", pipeline=True, fault="skipped micro-batch"), "", "skipped micro-batch"),
]
"""The number of tensor-parallel or pipeline ranks, a setting, and the module and the cause that must be found."""


@pytest.mark.soak
@pytest.mark.parametrize(("world", "setting", "module", "cause"), MEGATRON)
def test_a_gpt_of_megatron_core_equals_one_device_unless_a_fault_is_planted(
    tmp_path: Path, world: int, setting: EngineSetting, module: str, cause: str
) -> None:
    """The feed-forward is gated: each rank has rows of the gate and of the up projection in one weight."""
    pytest.importorskip("megatron.core")
    report = None
    loop = megatron_pipeline if setting.pipeline else megatron_loop
    for ranks, work, given in ((world, loop, setting), (1, verify_megatron, 9)):
        pool = Pool()  # Megatron-Core retains its groups
        try:
            report = pool.run(ranks, work, str(tmp_path / "trace"), given)[0]
        finally:
            pool.close()
    shown = "\n".join([*report.lines(), *(found.line() for found in report.findings)])
    assert report.stages == (world if setting.pipeline else 1)
    assert [found.cause for found in report.findings][:1] == ([cause] if cause else []), shown
    if cause:
        assert module in report.findings[0].module, shown
    else:
        assert len(report.steps) == 2 and all(step.outputs and step.gradients and step.updates for step in report.steps)


@pytest.mark.parametrize(
    ("family", "mode", "cause"),
    [
        ("phi3", "TP", ""),
        ("mixtral", "TP+EP", ""),
        ("gemma3", "DDP", ""),
        ("distilbert", "DDP", "mean of means"),
    ],
)
def test_a_recording_of_a_mode_of_transformers_agrees_with_plain_autograd(
    tmp_path: Path, family: str, mode: str, cause: str
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    build_family(family).save_pretrained(tmp_path / "saved")
    pool = Pool()
    try:
        results = pool.run(2, train_under, str(tmp_path / "trace"), str(tmp_path / "saved"), family, mode)
    finally:
        pool.close()
    off = differences(results[0], train_on_one_device(family))
    assert (off[0] > 1e-4) == bool(cause), off
    report = verify_recording(tmp_path / "trace")
    shown = "\n".join([*report.lines(), *(found.line() for found in report.findings)])
    assert [found.cause for found in report.findings] == ([cause] if cause else []), shown
