"""Imports of configurations whose scripts take the arguments of Hugging Face: DeepSpeed, accelerate, transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.errors import InputError
from meshwright.interop.importing import ImportedPlan, import_plan

DDP_YAML = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n"


def imported(folder: Path, files: dict[str, Any], devices: int = 0) -> ImportedPlan:
    """Imports the files; a mapping is written as JSON."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return import_plan(*(folder / name for name in files), devices=devices)


def trainer(system: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the files of a configuration of `system` with options of the Trainer."""
    if system == "transformers":
        return {"args.json": {"per_device_train_batch_size": 2, **options}}
    words = " ".join(f"--{name} {value}" for name, value in {"per_device_train_batch_size": 2, **options}.items())
    if system == "accelerate":
        return {"a.yaml": DDP_YAML, "l.sh": f"accelerate launch --config_file a.yaml run_clm.py {words}"}
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    return {"ds.json": config, "l.sh": f"deepspeed --num_gpus 2 t.py --deepspeed ds.json {words}"}


@pytest.mark.parametrize("system", ["accelerate", "transformers", "deepspeed"])
def test_a_warmup_in_parts_of_the_steps_is_stored_or_named(system: str, tmp_path: Path) -> None:
    """The Trainer rounds up (src/transformers/training_args.py:2154)."""
    for options, warmup in (
        ({"warmup_ratio": 0.03, "num_train_epochs": 3}, None),
        ({"warmup_ratio": 0.03, "max_steps": 400}, 12),
        ({"warmup_ratio": 0.03, "max_steps": 410}, 13),
        ({"warmup_steps": 0, "warmup_ratio": 0.03, "max_steps": 400}, 12),
        ({"warmup_steps": 7, "warmup_ratio": 0.03}, 7),
        ({"warmup_steps": 0.1, "max_steps": 400}, 40),
    ):
        found = imported(tmp_path, trainer(system, options))
        assert found.system.name == system
        assert found.job["workload"]["optimizer"]["warmup"] == (warmup or 0)
        lines = [line for line in found.not_carried if line.startswith("warmup_ratio=0.03 needs the number of steps")]
        assert len(lines) == (warmup is None)


@pytest.mark.parametrize("system", ["accelerate", "transformers"])
def test_ddp_under_autocast_reduces_float32(system: str, tmp_path: Path) -> None:
    files = trainer(system, {"max_steps": 4, "bf16": True} if system == "transformers" else {"max_steps": 4})
    if system == "accelerate":
        files["a.yaml"] += "mixed_precision: bf16\n"
    workload = imported(tmp_path, files).job["workload"]
    assert workload["precision"] == "bf16" and "reduce" not in workload  # the default of bf16 here is float32


def test_arguments_of_the_trainer_with_deepspeed_ask_for_its_file(tmp_path: Path) -> None:
    """They were imported as data parallelism without ZeRO."""
    arguments = {"per_device_train_batch_size": 2, "max_steps": 4, "deepspeed": "ds.json"}
    with pytest.raises(InputError, match=r"name ds\.json together with the arguments"):
        imported(tmp_path, {"args.json": arguments})
    found = imported(tmp_path, trainer("deepspeed", {"max_steps": 4}))
    assert (found.plan.zero, found.plan.dp, found.plan.micro_batch) == (2, 2, 2)


def test_arguments_of_the_trainer_fill_the_auto_values_of_deepspeed(tmp_path: Path) -> None:
    """Both files have `gradient_accumulation_steps`, so the import said that they contradict each other."""
    sharded = {
        "zero_optimization": {"stage": 3},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 2e-5, "max_steps": 9}
    files = {"ds.json": sharded, "args.json": {**given, "deepspeed": "ds.json"}}
    found = imported(tmp_path, files, devices=4)
    work = found.job["workload"]
    assert (found.plan.zero, found.plan.dp, found.plan.micro_batch) == (3, 4, 2)
    assert (work["batch"], work["steps"], work["optimizer"]["lr"]) == (32, 9, 2e-5)


def test_accelerate_takes_the_arguments_of_the_trainer_as_a_file_or_as_options(tmp_path: Path) -> None:
    """The file was refused: "give the files of one system"."""
    options = {"max_steps": 9, "learning_rate": 2e-5, "gradient_accumulation_steps": 4, "weight_decay": 0.1}
    as_options = imported(tmp_path, trainer("accelerate", options), devices=2)
    arguments = {"per_device_train_batch_size": 2, **options}
    for files in ({"a.yaml": DDP_YAML, "args.json": arguments}, {"args.json": arguments, "a.yaml": DDP_YAML}):
        found = imported(tmp_path, files, devices=2)
        assert found.system.name == "accelerate" and (found.plan, found.job) == (as_options.plan, as_options.job)
    assert found.job["workload"]["batch"] == 16 and found.job["workload"]["optimizer"]["lr"] == 2e-5


@pytest.mark.parametrize("system", ["accelerate", "transformers", "deepspeed"])
@pytest.mark.parametrize(
    ("optim", "remedy"),
    [
        ("adafactor", "workload.optimizer.name adafactor"),
        ("sgd", "workload.optimizer.name sgd"),
        ("paged_adamw_8bit", "workload.optimizer.state 8bit"),
        ("lomo", "package.module:function"),
        ("adamw_torch", None),
    ],
)
def test_an_optimizer_of_the_trainer_that_the_job_does_not_have_gets_a_remedy(
    system: str, optim: str, remedy: str | None, tmp_path: Path
) -> None:
    lines = [line for line in imported(tmp_path, trainer(system, {"optim": optim})).not_carried if "optim=" in line]
    assert len(lines) == (remedy is not None) and all(str(remedy) in line for line in lines)


def test_options_of_a_script_beside_a_file_of_the_trainer_are_those_of_the_trainer(tmp_path: Path) -> None:
    """The script was refused, because `--max_seq_length` was said to belong to DeepSpeed."""
    launch = "torchrun --nproc_per_node 8 t.py args.json --model_name_or_path gpt2 --max_seq_length 1024 --dataset x"
    arguments = {"per_device_train_batch_size": 4, "max_steps": 100, "bf16": True}
    found = imported(tmp_path, {"args.json": arguments, "launch.sh": launch})
    assert found.system.name == "transformers" and found.job["workload"]["sequence"] == 1024
    assert (found.plan.dp, found.plan.micro_batch, found.job["workload"]["batch"]) == (8, 4, 32)
    assert "reduce" not in found.job["workload"]


@pytest.mark.parametrize("enabled", [True, "auto"])
def test_keys_of_the_loss_scale_matter_only_with_fp16(enabled: bool | str, tmp_path: Path) -> None:
    files = trainer("deepspeed", {"bf16": True} if enabled == "auto" else {"fp16": True})
    files["ds.json"] |= {"fp16": {"enabled": enabled, "initial_scale_power": 16, "hysteresis": 2}}
    lines = [line for line in imported(tmp_path, files).not_carried if line.startswith("fp16.")]
    assert len(lines) == 2 * (enabled is True) and all("the loss scale adapts" in line for line in lines)


def test_sizes_without_a_vocabulary_are_left_out_with_one_line(tmp_path: Path) -> None:
    words = "x.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --vocab-file a.json"
    lines = [line for line in imported(tmp_path, {"a.sh": words}).not_carried if "sizes" in line]
    assert len(lines) == 1 and "add --vocab-size N (50257 for GPT-2)" in lines[0]


def test_a_deepspeed_section_of_accelerate_names_the_file_to_give(tmp_path: Path) -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\n"
    with pytest.raises(InputError, match="give the JSON file of DeepSpeed"):
        imported(tmp_path, {"a.yaml": text + "deepspeed_config:\n  zero_stage: 3\n"})
