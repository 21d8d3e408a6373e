"""What an import takes over from a configuration without training options: the defaults of the other system, each with
its source, and a line for everything that the files do not state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from jobs import named_job

from meshwright.core.errors import InputError
from meshwright.interop.exporting import export_plan
from meshwright.interop.importing import ImportedPlan, import_plan
from meshwright.interop.registry import SYSTEMS
from meshwright.interop.settings import unstated_defaults
from meshwright.planner.inputs.model_parser import read_sizes
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import OptimizerConfig, Workload
from meshwright.train.optimizer import learning_rate

TORCH_ADAM = {"name": "adamw", "betas": [0.9, 0.999], "eps": 1e-8}
"""torch/optim/adamw.py:37 of pytorch/pytorch; FusedAdam of DeepSpeed and the Trainer have the same."""
TRAINER = {**TORCH_ADAM, "lr": 5e-5, "weight_decay": 0.0, "decay": "matrices", "clip": 1.0} | {
    "schedule": "linear",
    "warmup": 0,
    "final_lr": 0.0,
}
"""src/transformers/training_args.py:787 to 866, src/transformers/trainer.py:1408, version 5.24."""
UNSTATED_OPTIMIZER = tuple(
    f"optimizer.{key}" for key in ("betas", "eps", "weight_decay", "warmup", "final_lr", "schedule", "clip")
)
"""What no file states if it states only the learning rate."""
FSDP_YAML = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n"
NANOTRON = """
parallelism: {dp: 2, tp: 1, pp: 1}
tokens: {micro_batch_size: 1, sequence_length: 64, train_steps: 100}
optimizer:
  learning_rate_scheduler: {learning_rate: 1.0e-3}
  optimizer_factory: {adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-8}
  weight_decay: 0.01
"""
AUTOMODEL = """
step_scheduler: {global_batch_size: 8, local_batch_size: 1, max_steps: 100}
distributed: {tp_size: 1, dp_size: 2}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5}
"""


def deepspeed(scheduler: dict[str, Any], kind: str = "AdamW", **params: Any) -> str:
    return json.dumps(
        {"train_batch_size": 8, "optimizer": {"type": kind, "params": params}, "scheduler": scheduler, "bf16": {}}
    )


def warmup_decay(**params: Any) -> dict[str, Any]:
    return {"type": "WarmupDecayLR", "params": {"total_num_steps": 4000, **params}}


DEFAULTS: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    # deepspeed/ops/adam/fused_adam.py:76, deepspeed/runtime/lr_schedules.py:814 (decay to 0, 1000 steps of warmup),
    # deepspeed/runtime/constants.py:203 (clipping at 1), deepspeed/runtime/engine.py:659 (every parameter decays)
    "deepspeed": (
        {"ds.json": deepspeed(warmup_decay())},
        {**TORCH_ADAM, "lr": 1e-3, "weight_decay": 0.0, "decay": "all", "clip": 1.0}
        | {"schedule": "linear", "warmup": 1000, "final_lr": 0.0},
        ("seed",),
    ),
    # deepspeed/runtime/engine.py:2490: Adam is AdamW unless adam_w_mode is false
    "deepspeed adam": (
        {"ds.json": deepspeed({"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, kind="Adam", lr=2e-3)},
        {**TORCH_ADAM, "lr": 2e-3, "weight_decay": 0.0, "decay": "all", "clip": 1.0}
        | {"schedule": "constant", "warmup": 5},
        ("steps", "seed"),
    ),
    # the Trainer makes its own optimizer (src/transformers/integrations/deepspeed.py:587)
    "deepspeed with the Trainer": (
        {
            "ds.json": json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": 2}}),
            "l.sh": "deepspeed --num_gpus 2 t.py --deepspeed ds.json --per_device_train_batch_size 2 --max_steps 100",
        },
        TRAINER,
        (),
    ),
    "deepspeed with a script": (
        {"ds.json": json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}})},
        {"schedule": "constant", "warmup": 0, "clip": 1.0},
        (
            "optimizer.name",
            "optimizer.lr",
            "optimizer.betas",
            "optimizer.eps",
            "optimizer.weight_decay",
            "optimizer.decay",
            "steps",
            "seed",
        ),
    ),
    "transformers": (
        {"a.json": json.dumps({"per_device_train_batch_size": 2, "max_steps": 100, "fsdp": "full_shard"})},
        TRAINER,
        (),
    ),
    "accelerate with the Trainer": (
        {"a.yaml": FSDP_YAML, "l.sh": "accelerate launch --config_file a.yaml run_clm.py --max_steps 100"},
        TRAINER,
        (),
    ),
    # examples/pytorch/language-modeling/run_clm_no_trainer.py of huggingface/transformers: no clipping, and the names
    # of the parameters decide which decay
    "accelerate without the Trainer": (
        {"a.yaml": FSDP_YAML, "l.sh": "accelerate launch --config_file a.yaml train.py --max_train_steps 100"},
        {name: value for name, value in TRAINER.items() if name != "decay"} | {"clip": None},
        ("optimizer.decay",),
    ),
    "accelerate without a script": (
        {"a.yaml": FSDP_YAML},
        {},
        tuple(unstated_defaults({"precision": "fp32", "sequence": 1})),
    ),
    # megatron/training/arguments.py (defaults), megatron/core/optimizer/__init__.py:111 (no decay of biases and norms)
    "megatron": (
        {"a.sh": "torchrun --nproc-per-node 2 pretrain_gpt.py --micro-batch-size 1 --train-iters 100 --lr 1e-4"},
        {**TORCH_ADAM, "lr": 1e-4, "weight_decay": 0.01, "decay": "matrices", "clip": 1.0}
        | {"schedule": "linear", "warmup": 0, "final_lr": 0.0},
        (),
    ),
    # the recipe states the other settings
    "megatron_bridge": (
        {"a.yaml": "train: {micro_batch_size: 1, train_iters: 100}\noptimizer: {lr: 1.0e-4}\n"},
        {"name": "adamw", "lr": 1e-4, "decay": "matrices"},
        (
            *UNSTATED_OPTIMIZER,
            "seed",
            "precision",
        ),
    ),
    # torchtitan/components/optimizer/optimizer.py:385, lr_scheduler.py:52 to 82, torchtitan/config/configs.py:55
    "torchtitan": (
        {"a.toml": "[parallelism]\ndata_parallel_shard_degree = 4\ntensor_parallel_degree = 1\n"},
        {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "lr": 8e-4, "weight_decay": 0.1, "decay": "all"}
        | {"clip": 1.0, "schedule": "linear", "warmup": 200, "final_lr": 0.0},
        ("seed",),
    ),
    # torch/optim/adamw.py:37 of pytorch/pytorch: AdamW decays all parameters; torch schedules and clips nothing
    "fsdp2": (
        {"a.py": "MODEL = 'llama-tiny'\nDP_SHARD = 2\nMICRO_BATCH = 4\nRESHARD_AFTER_FORWARD = True\nLR = 1e-3\n"},
        {**TORCH_ADAM, "lr": 1e-3, "weight_decay": 0.01, "decay": "all", "clip": None}
        | {"schedule": "constant", "warmup": 0},
        ("steps", "seed", "precision"),
    ),
    # src/nanotron/config/config.py, LRSchedulerArgs (min_decay_lr is the learning rate) and OptimizerArgs
    "nanotron": (
        {"a.yaml": NANOTRON},
        {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "lr": 1e-3, "weight_decay": 0.01, "decay": "all"}
        | {"clip": None, "schedule": "linear", "warmup": 0, "final_lr": 1.0},
        (),
    ),
    # nemo_automodel/components/optim/config.py, nemo_automodel/recipes/llm/train_ft.py (clipping at 1)
    "automodel": (
        {"a.yaml": AUTOMODEL},
        {**TORCH_ADAM, "lr": 1e-5, "weight_decay": 0.01, "decay": "all", "clip": 1.0}
        | {"schedule": "constant", "warmup": 0},
        ("seed", "precision"),
    ),
    "automodel with a scheduler": (
        {"a.yaml": AUTOMODEL + "lr_scheduler: {lr_decay_style: cosine}\n"},
        {**TORCH_ADAM, "lr": 1e-5, "weight_decay": 0.01, "decay": "all", "clip": 1.0}
        | {"schedule": "cosine", "warmup": 10, "final_lr": 0.01},
        ("seed", "precision"),
    ),
}
"""Minimal configurations, with the optimizer that the system has with them and the keys that they do not state."""


def imported(folder: Path, files: dict[str, str]) -> ImportedPlan:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return import_plan(*(folder / name for name in files))


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_import_has_every_training_default_of_the_other_system(name: str, tmp_path: Path) -> None:
    files, optimizer, unstated = DEFAULTS[name]
    found = imported(tmp_path, files)
    assert found.system.name == name.split()[0]
    workload = found.job["workload"]
    assert workload.get("optimizer", {}) == optimizer
    unstated += () if name in ("torchtitan", "nanotron") else ("sequence",)
    assert tuple(unstated_defaults(workload)) == unstated
    lines = [line for line in found.not_carried if line.startswith("no file states these keys")]
    assert len(lines) == bool(unstated) and all(f" {each} " in line for each in unstated for line in lines)
    Workload(**workload)


def test_every_system_has_a_row_of_defaults() -> None:
    assert {name.split()[0] for name in DEFAULTS} == SYSTEMS.keys()


LOST = [
    ({"d.json": deepspeed(warmup_decay())}, "scheduler.params.warmup_type=log: the warmup here is linear"),
    ({"d.json": deepspeed({"type": "OneCycle", "params": {}})}, "scheduler.type=OneCycle: no equivalent of this value"),
    ({"d.json": deepspeed(warmup_decay(warmup_min_lr=1e-4))}, "scheduler.params.warmup_min_lr=0.0001: no equivalent"),
    ({"a.sh": "x.py --micro-batch-size 1 --train-iters 100 --lr 1 --lr-decay-iters 50"}, "--lr-decay-iters=50: no"),
    (
        {"a.sh": "x.py --micro-batch-size 1 --global-batch-size 8 --train-samples 800 --lr 1 --lr-decay-samples 400"},
        "--lr-decay-samples=400: no equivalent of this value; the learning rate falls until the last step here: set "
        "workload.steps 50",
    ),
    (
        {"a.sh": "x.py --micro-batch-size 1 --train-iters 100 --lr 1 --lr-decay-style WSD --lr-wsd-decay-iters 9"},
        "--lr-wsd-decay-style=exponential: no equivalent",
    ),
    (
        {"a.json": json.dumps({"per_device_train_batch_size": 1, "bf16": True, "lr_scheduler_type": "polynomial"})},
        "lr_scheduler_type=polynomial: no equivalent",
    ),
    ({"a.yaml": NANOTRON.replace("1.0e-3}", "1.0e-3, lr_warmup_style: constant}")}, "lr_warmup_style=constant: no"),
    ({"a.yaml": AUTOMODEL + "lr_scheduler: {min_lr: 0.0}\n"}, "lr_scheduler.init_lr=1e-06: the warmup here starts at"),
    ({"a.sh": "x.py --micro-batch-size 1 --train-iters 100 --lr 1 --lr-warmup-iters 60"}, "warmup 60 of 100 steps"),
]
"""Configurations whose training the job cannot have, and the line that says so."""


@pytest.mark.parametrize(("files", "line"), LOST, ids=lambda given: given if isinstance(given, str) else "")
def test_a_schedule_that_is_not_carried_over_is_named(files: dict[str, str], line: str, tmp_path: Path) -> None:
    assert [each for each in imported(tmp_path, files).not_carried if line in each]


def test_a_linear_warmup_of_deepspeed_is_carried_over_without_a_line(tmp_path: Path) -> None:
    """Its rate of step n is that of step n - 1 here, up to the last step of the warmup and of the decay."""
    text = deepspeed(warmup_decay(warmup_num_steps=50, warmup_type="linear"), lr=1e-3)
    found = imported(tmp_path, {"ds.json": text})
    assert "warmup" not in "\n".join(found.not_carried)
    rule = OptimizerConfig(**found.job["workload"]["optimizer"])
    for step in range(1, 4000):
        theirs = 1e-3 * (step / 50 if step < 50 else (4000 - step) / 3950)  # lr_schedules.py:831
        assert math.isclose(learning_rate(rule, step - 1, 4000), theirs, abs_tol=1e-6)


def test_options_of_the_trainer_s_schedules_are_carried_over(tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": 1, "max_steps": 100, "learning_rate": 1e-3, "bf16": True}
    decay = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 30}}
    found = imported(tmp_path, {"a.json": json.dumps(given | decay)})
    optimizer = found.job["workload"]["optimizer"]
    assert (optimizer["schedule"], optimizer["cooldown"], optimizer["final_lr"]) == ("warmup-stable-decay", 0.3, 0.0)
    assert "lr_scheduler_kwargs.decay_type=cosine: no equivalent of this value" in found.not_carried
    cosine = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}
    assert imported(tmp_path, {"a.json": json.dumps(given | cosine)}).job["workload"]["optimizer"]["final_lr"] == 0.1
    fixed = {"lr_scheduler_type": "constant", "warmup_steps": 10}
    assert imported(tmp_path, {"a.json": json.dumps(given | fixed)}).job["workload"]["optimizer"]["warmup"] == 0


def test_momentum_of_sgd_is_carried_over(tmp_path: Path) -> None:
    text = deepspeed({"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, kind="SGD", lr=0.1, momentum=0.8)
    optimizer = imported(tmp_path, {"d.json": text}).job["workload"]["optimizer"]
    assert (optimizer["name"], optimizer["momentum"]) == ("sgd-momentum", 0.8)
    options = "x.py --micro-batch-size 1 --lr 0.1 --optimizer sgd --sgd-momentum 0.8"
    optimizer = imported(tmp_path, {"a.sh": options}).job["workload"]["optimizer"]
    assert (optimizer["name"], optimizer["momentum"]) == ("sgd-momentum", 0.8)


@pytest.mark.parametrize("decay", ["matrices", "all"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_an_export_says_when_other_parameters_decay(name: str, decay: str) -> None:
    job = named_job("llama2-7b", "2x8:a100-80gb", 64, 4096)
    job = job.but(workload=job.workload.but(optimizer=job.workload.optimizer.but(decay=decay)))
    allowed = SYSTEMS[name].workload.get("decayed", ("matrices", "all"))
    plan = parse_plan("dp16.z3" if name not in ("megatron", "megatron_bridge", "nanotron") else "dp16.z1")
    found = export_plan(job, plan, name, read_sizes("llama2-7b"))
    lines = [line for line in found.changes if "optimizer.decay=" in line]
    assert len(lines) == (decay not in allowed)


def test_a_mistyped_constant_of_a_script_is_refused(tmp_path: Path) -> None:
    text = "MODEL = 'llama-tiny'\nDP_SHRAD = 2\nDP_REPLICATE = 2\nBATCHES = 3\nRESHARD_AFTER_FORWARD = False\n"
    with pytest.raises(InputError, match="has no DP_SHRAD; did you mean 'DP_SHARD'"):
        imported(tmp_path, {"a.py": text})
    assert imported(tmp_path, {"a.py": text.replace("SHRAD", "SHARD")}).plan.world == 4


def test_a_script_without_constants_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("BATCH_SIZE = 4\n", encoding="utf-8")
    with pytest.raises(InputError, match="no constant of FSDP2 found: write MODEL, DP_SHARD"):
        import_plan(tmp_path / "a.py", system="fsdp2")


def test_auto_values_of_deepspeed_are_those_of_the_trainer(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
    files = {"ds.json": deepspeed(scheduler, lr="auto"), "l.sh": "deepspeed --num_gpus 2 t.py --max_steps 10"}
    optimizer = imported(tmp_path, files).job["workload"]["optimizer"]
    assert (optimizer["lr"], optimizer["warmup"]) == (5e-5, 0)


def test_full_sharding_is_the_default_of_a_script_with_fully_shard(tmp_path: Path) -> None:
    assert imported(tmp_path, {"a.py": "MODEL = 'llama-tiny'\nDP_SHARD = 2\n"}).plan.name == "dp2.z3.mb1"
    (tmp_path / "b.py").write_text("BATCH_SIZE = 4\n", encoding="utf-8")
    with pytest.raises(InputError, match="no constant of FSDP2 found: write MODEL, DP_SHARD"):
        import_plan(tmp_path / "b.py")
