"""Export to other systems, import from them, and the round trip."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from interop_plans import BLOCKS, random_plans
from jobs import named_job

import meshwright
from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.interop.comparison import compare_for
from meshwright.interop.exporting import describe_violation, export_lines, export_plan
from meshwright.interop.for_system import best_plan_for, system_pricer
from meshwright.interop.formats import argument_words, flatten, nest
from meshwright.interop.importing import import_plan
from meshwright.interop.registry import SYSTEMS, find_system
from meshwright.interop.settings import settings_of
from meshwright.interop.shell import read_command
from meshwright.interop.system import encode
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.step import estimate_grid
from meshwright.planner.inputs.job import known_sizes, read_job, resolve_job
from meshwright.planner.inputs.model_parser import read_sizes
from meshwright.planner.search.best_plans import RISK_MARGIN
from meshwright.spec.constraints import validate_plan
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, parse_plan
from meshwright.spec.workload import Workload

ROUND_TRIPS = [pytest.param(40, id="40"), pytest.param(1000, id="1000", marks=pytest.mark.soak)]


def llama_job(batch: int = 64, on: str = "2x8:a100-80gb") -> Job:
    return named_job("llama2-7b", on, batch, 4096)


def write_files(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def imported(folder: Path, name: str, text: str, **options: object) -> str:
    return import_plan(*write_files(folder, {name: text}), **options).plan.name  # type: ignore[arg-type]


@pytest.mark.parametrize("count", ROUND_TRIPS)
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_plan_returns_unchanged_from_every_system(name: str, count: int, tmp_path: Path) -> None:
    system, sizes = SYSTEMS[name], read_sizes("llama2-7b")
    assert sizes.layers == BLOCKS
    for at, plan in enumerate(islice(random_plans(system, seed=count), count)):
        batch = plan.dp * plan.micro_batch * (1, 4, 8)[at % 3]
        workload = Workload(sequence=4096, batch=batch, precision="bf16", reduce="fp32", steps=100 + at)
        settings = settings_of(plan, workload, sizes, nodes=2 if plan.world % 2 == 0 else 1, model="llama2-7b")
        paths = write_files(tmp_path, system.write(encode(system, settings), settings))
        found = import_plan(*paths)
        assert (found.system.name, found.plan.but(bucket=plan.bucket)) == (name, plan), plan.name
        assert found.job["workload"]["batch"] == batch, plan.name
        assert found.settings["sequence"] == 4096 and found.settings["steps"] == workload.steps


@pytest.mark.parametrize("count", ROUND_TRIPS)
def test_a_plan_returns_unchanged_from_the_python_form_of_torchtitan(count: int, tmp_path: Path) -> None:
    system, sizes = SYSTEMS["torchtitan"], read_sizes("llama3-8b")
    for plan in islice(random_plans(system, seed=count + 1), count):
        workload = Workload(sequence=4096, batch=plan.dp * plan.micro_batch * 2, precision="bf16", reduce="fp32")
        settings = settings_of(plan, workload, sizes, model="llama3-8b")
        files = system.write(encode(system, settings), settings)
        found = import_plan(
            *write_files(tmp_path, {name: files[name] for name in ("train_config.py", "launch_0_3.sh")})
        )
        assert found.plan.but(bucket=plan.bucket) == plan and not found.not_carried, plan.name
        assert found.job["model"] == {"name": "llama3-8b"} and found.job["workload"]["batch"] == workload.batch


@pytest.mark.parametrize(
    ("name", "text", "reduce"),
    [
        ("ds.json", '{"train_batch_size": 8, "bf16": {"enabled": true}}', "bf16"),
        ("ds.json", '{"train_batch_size": 8, "fp16": {"enabled": true}}', "fp16"),
        ("ds.json", '{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}', None),
        ("run.sh", "torchrun pretrain_gpt.py --micro-batch-size 1 --bf16", None),
        ("run.sh", "torchrun pretrain_gpt.py --micro-batch-size 1 --bf16 --grad-reduce-in-bf16", "bf16"),
        ("run.sh", "torchrun pretrain_gpt.py --micro-batch-size 1 --fp16", "fp16"),
    ],
)
def test_gradients_keep_the_dtype_that_they_have_in_the_other_system(
    name: str, text: str, reduce: str | None, tmp_path: Path
) -> None:
    """Whatever Meshwright's own default is, which is float32."""
    found = import_plan(*write_files(tmp_path, {name: text}))
    assert found.job["workload"].get("reduce") == reduce
    Workload(**{"batch": 8, **found.job["workload"]})


def test_a_function_of_torchtitan_s_registry_and_its_options_are_imported(tmp_path: Path) -> None:
    """The form of torchtitan/models/llama3/config_registry.py."""
    function = """
def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
        compile=CompileConfig(),
    )
"""
    launch = "torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b"
    files = write_files(tmp_path, {"config.py": function, "launch.sh": launch})
    found = import_plan(*files)
    assert found.plan.name == "dp4.tp2.sp.z3.mb1.rc-full" and found.job["model"] == {"name": "llama3-8b"}
    assert found.job["workload"]["sequence"] == 8192 and found.job["workload"]["optimizer"]["lr"] == 3e-4
    options = f"{launch} --training.local-batch-size 2 --parallelism.pipeline_parallel_degree=2 --compile.enable"
    found = import_plan(*write_files(tmp_path, {"options.sh": options}))
    assert found.plan.name == "dp4.pp2.z2.mb1.compile" and found.settings["accumulation"] == 2
    assert found.not_carried[0] == (
        "--config llama3_8b: the settings of this function are not read; give its file, or write them as options"
    )
    two = write_files(tmp_path, {"two.py": function + function.replace("llama3_8b", "llama3_70b")})
    with pytest.raises(InputError, match=r"two\.py has 2 functions: keep the one that returns your configuration"):
        import_plan(*two)


def test_megatron_gets_the_options_that_its_users_expect() -> None:
    found = export_plan(llama_job(), parse_plan("dp2.tp4.pp2.z1.mb2"), "megatron", read_sizes("llama2-7b"))
    command = read_command(found.files["launch.sh"])
    assert command.launcher == ("--nnodes", "2", "--nproc-per-node", "8")
    words = " ".join(command.arguments)
    for option in (
        "--num-layers 32",
        "--hidden-size 4096",
        "--ffn-hidden-size 11008",
        "--num-attention-heads 32",
        "--swiglu",
        "--normalization RMSNorm",
        "--position-embedding-type rope",
        "--untie-embeddings-and-output-weights",
        "--disable-bias-linear",
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 2",
        "--use-distributed-optimizer",
        "--micro-batch-size 2",
        "--global-batch-size 64",
        "--seq-length 4096",
        "--bf16",
        "--attention-dropout 0",
        "--hidden-dropout 0",
    ):
        assert f" {option} " in f" {words} ", option
    assert found.plan.name == "dp2.tp4.pp2.z1.mb2" and not found.changes and len(found.numerics) >= 2


NOT_EXPRESSIBLE = {
    "megatron": ("dp8.pp2.z1.zbv", "no schedule=zbv"),
    "megatron_bridge": ("dp8.pp2.z1.zbv", "no schedule=zbv"),
    "torchtitan": ("dp16.z1", "no zero=1"),
    "deepspeed": ("dp16.z1.rc-attn", "no recompute=attn"),
    "fsdp2": ("dp16.z1", "no zero=1"),
    "accelerate": ("dp16.z1", "no zero=1"),
    "transformers": ("dp16.z1", "no zero=1"),
    "nanotron": ("dp4.tp2.pp2.z2", "no zero=2"),
    "automodel": ("dp4.tp2.pp2.z1", "no zero=1"),
}
"""For each system a plan that it cannot express, and what its export says."""


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_files_of_an_export_say_what_is_not_expressible_its_cost_and_the_numerics(name: str) -> None:
    job, plan, (_, said) = llama_job(), parse_plan(NOT_EXPRESSIBLE[name][0]), NOT_EXPRESSIBLE[name]
    found = export_plan(job, plan, name, read_sizes("llama2-7b"))
    assert found.plan != plan
    (text,) = (text for text in found.files.values() if "# not expressible:" in text)
    changes, numerics = text.partition("# not expressible:\n")[2].split("# numerics:\n")
    assert f"{SYSTEMS[name].title} has {said}; it has " in changes
    size = r"[\d.]+ [KMG]iB"
    cost = rf"#   cost: {found.plan.name} instead of {plan.name}: [\d.]+ m?s a step instead of [\d.]+ m?s "
    assert re.search(rf"{cost}\([+-][\d.]+%\), {size} on the peak rank instead of {size}", changes), changes
    notes = [line for line in numerics.splitlines() if line.startswith("#   ")]
    assert all(re.search(r"\([\w-]+/[\w-]+, [\w/.]+:\d+\)$", note) for note in notes), notes
    assert any(re.search("loss .*(mean|sum|divide)", note) for note in notes), notes
    assert any(re.search("gradients .*(float32|dtype|DTYPE)", note) for note in notes), notes


def test_an_export_names_what_the_system_cannot_express_and_the_cost() -> None:
    job, plan = llama_job(), parse_plan("dp8.pp2.z2")
    found = export_plan(job, plan, "deepspeed", read_sizes("llama2-7b"))
    lines = "\n".join(export_lines(found, job, plan))
    assert found.plan == parse_plan("dp8.pp2.z1")
    assert "DeepSpeed has zero=2 only with ZeRO 2 or Ulysses with ZeRO; the pipeline has zero=1 or zero=0" in lines
    assert "cost: dp8.pp2.z1.mb1 instead of dp8.pp2.z2: " in lines and "on the peak rank instead of" in lines
    assert "deepspeedai/DeepSpeed, deepspeed/runtime/engine.py" in lines


def test_degrees_that_a_system_lacks_are_replaced_by_its_best_plan() -> None:
    found = export_plan(llama_job(), parse_plan("dp2.tp4.pp2.z1"), "deepspeed", read_sizes("llama2-7b"))
    assert found.plan.world == 16 and not SYSTEMS["deepspeed"].limit_of(found.plan).violations(found.plan)
    assert found.cost is not None and any("the best plan that DeepSpeed can run" in line for line in found.changes)


def test_a_plan_without_an_equivalent_feature_is_exported_without_it() -> None:
    plan = parse_plan("dp8.tp2.z1.lc4")
    found = export_plan(llama_job(), plan, "megatron", read_sizes("llama2-7b"))
    assert found.plan == parse_plan("dp8.tp2.z1")
    assert "Megatron-LM has no loss_chunks=4; it has loss_chunks=1; exported as 1" in found.changes


def test_a_shell_script_with_arrays_defaults_and_arithmetic_is_read() -> None:
    text = """
    #!/bin/bash
    GPUS=8   # devices
    NODES=${SLURM_NNODES:-2}
    WORLD=$((GPUS * NODES))
    TP=${TP:-4}
    DTYPE=${DTYPE:-fp8}
    MODEL_ARGS=(
        --num-layers 32  # layers
        --hidden-size $((128 * 32))
    )
    if [[ "$DTYPE" == fp8 ]]; then
        MODEL_ARGS+=("--fp8-format hybrid")
    else
        MODEL_ARGS+=(--fp32)
    fi
    OPTIONS=" --tensor-model-parallel-size ${TP} \\
        --lr 1e-4"
    torchrun --nproc_per_node $GPUS --nnodes=$NODES pretrain_gpt.py \\
        ${MODEL_ARGS[@]} $OPTIONS --save $1 --world $WORLD
    """
    command = read_command(text)
    assert command.launcher == ("--nproc_per_node", "8", "--nnodes=2")
    assert " ".join(command.arguments) == (
        "--num-layers 32 --hidden-size 4096 --fp8-format hybrid --tensor-model-parallel-size 4 --lr 1e-4 --save $1 "
        "--world 16"
    )


def test_deepspeed_reads_auto_values_from_the_arguments(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    }
    launch = "deepspeed --num_gpus 8 train.py --deepspeed ds_config.json --per_device_train_batch_size 4 "
    launch += "--gradient_accumulation_steps 2 --gradient_checkpointing true --learning_rate 2e-5 --dataset_name x"
    paths = write_files(tmp_path, {"ds_config.json": json.dumps(config), "launch.sh": launch})
    found = import_plan(*paths)
    assert found.plan.name == "dp8.z3.mb4.rc-full.off-optimizer.off-gradients.off-parameters"
    assert found.job["workload"]["batch"] == 64 and found.job["workload"]["precision"] == "bf16"
    assert found.not_carried == (
        "--dataset_name: not a key of DeepSpeed, left to your script",
        "no file states these keys; the job has the defaults of Meshwright: steps 200, sequence of the model, at most "
        "4096",
        "no file states the sizes of the model; --model: a catalog name, a folder or module:function",
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "torchrun --nproc-per-node 8 x.py --tensor-model-paralel-size 2 --micro-batch-size 1 --lr 1e-4",
         "Megatron-LM core 0.19 has no --tensor-model-paralel-size; did you mean '--tensor-model-parallel-size'?; "
         "--allow-unknown reads the other keys"),
        ("a.sh", "torchrun --nproc-per-node 6 x.py --tensor-model-parallel-size 4 --micro-batch-size 1",
         "6 devices are not a multiple of tp(4) * pp(1) * cp(1) = 4; --devices gives another number"),
        ("a.sh", "x.py --model-parallel-size 8 --batch-size 4 --num-layers 24",
         "--model-parallel-size belongs to a version of Megatron-LM before core 0.19: write "
         "--tensor-model-parallel-size"),
        ("a.sh", "torchrun --nproc-per-node 8 x.py --bf16 --fp16 --micro-batch-size 1 --tensor-model-parallel-size 2",
         "--bf16 and --fp16 contradict each other in Megatron-LM: no precision has both values"),
        ("a.sh", "torchrun --nproc-per-node 8 x.py --micro-batch-size 3 --global-batch-size 64 --num-layers 4 --lr 1",
         "batch 64 is not a multiple of micro_batch(3) * dp(8) = 24"),
        ("ds.json", '{"train_batch_size": 64, "zero_optimization": {"stage": 2}, "tensor_model_parallel_size": 2}',
         "DeepSpeed 0.19 has no tensor_model_parallel_size; --allow-unknown reads the other keys"),
        ("ds.json", '{"train_batch_size": 64, "zero_optimization": {"stage": 3}, "pipeline": {"stages": 2}}',
         "the configuration contradicts itself, plan pp2.z3.mb1: DeepSpeed has pp=2 only with the pipeline; ZeRO 3 has "
         "pp=1"),
        ("ds.json", '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, '
         '"parallelism": {"tensor_parallel_degree": 2}}',
         "parallelism.tensor_parallel_degree belongs to torchtitan, the other keys to DeepSpeed: give the files"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 2\n[training]\nbatch_size = 8\n",
         "training.batch_size belongs to a version of torchtitan before 0.2: write training.local_batch_size"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 2\n[zero_optimization]\nstage = 3\n[training]\nsteps=3\n",
         "zero_optimization.stage belongs to DeepSpeed, the other keys to torchtitan: give the files of one system"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 2\n[training]\nsteps=3\n",
         "data_parallel_shard_degree is -1 and the number of devices is in no file: --devices sets it"),
        ("a.toml", "[parallelism\n", "Expected ']' at the end of a table declaration"),
        ("a.sh", "echo hello", "a.sh: not a configuration of"),
        ("a.json", "[1, 2]", "a.json: expected keys and values of a configuration"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        imported(tmp_path, name, text)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_an_unknown_system_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no system 'megatorn'; did you mean 'megatron'\\? systems are megatron,"):
        find_system("megatorn")
    assert find_system("Megatron-LM") is SYSTEMS["megatron"]


def test_unknown_keys_can_be_listed_instead_of_refused(tmp_path: Path) -> None:
    (path,) = write_files(tmp_path, {"a.sh": "x.py --micro-batch-size 2 --num-layers 4 --my-option 3 --lr 1e-3"})
    found = import_plan(path, allow_unknown=True, devices=4)
    assert found.plan == parse_plan("dp4.mb2") and found.plan.world == 4
    assert "--my-option: not a key of Megatron-LM, left to your script" in found.not_carried


def test_the_commands_write_and_read_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    job = ["--model", "llama2-7b", "--cluster", "2x8:a100-80gb", "--batch", "64", "--seq", "4096"]
    assert main(["export", *job, "--plan", "dp2.tp4.pp2.z1.mb2", "--to", "megatron", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("Megatron-LM core 0.19, plan dp2.tp4.pp2.z1.mb2 of llama2-7b: ")
    assert main(["import", str(out / "launch.sh"), "--out", str(back)]) == 0
    assert "Megatron-LM: plan dp2.tp4.pp2.z1.mb2 on 16 devices, " in capsys.readouterr().out
    assert main(["estimate", str(back / "job.yaml"), "--cluster", "2x8:a100-80gb", "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert Plan.model_validate(estimated["plan"]).name == "dp2.tp4.pp2.z1.mb2"


MEGATRON_ARGUMENTS = """
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008
 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --swiglu
 --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
 --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 3e-4 --bf16 --tensor-model-parallel-size 8
 --pipeline-model-parallel-size 2 --sequence-parallel --attention-dropout 0 --hidden-dropout 0
""".replace("\n ", " ")


def test_advice_for_a_system_is_a_diff_of_its_own_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = write_files(tmp_path, {"train.sh": MEGATRON_ARGUMENTS})
    wanted = ["plan", "--for", "megatron", "--config", str(path), "--cluster", "2x8:a100-80gb"]
    assert main([*wanted, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    yours, best = (Plan.model_validate(found[name]["plan"]) for name in ("yours", "best"))
    assert yours == parse_plan("tp8.sp.pp2") and not SYSTEMS["megatron"].limit_of(best).violations(best)
    seconds = {name: found[name]["estimate"]["time"]["step"] for name in ("yours", "best")}
    assert seconds["best"] < seconds["yours"]
    assert found["removed"]["--tensor-model-parallel-size"] == 8
    assert found["added"]["--tensor-model-parallel-size"] == best.tp
    unchanged = {"--num-layers", "--lr", "--bf16", "--global-batch-size", "--optimizer"}
    assert not unchanged & {*found["added"], *found["removed"]}
    assert main(wanted) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["yours", "best in Megatron-LM", "best here"]
    assert "  - --tensor-model-parallel-size 8" in lines and "reasons:" in lines
    changed = [line.split()[1:] for line in lines if line.startswith(("  - ", "  + "))]
    assert {words[0] for words in changed} == {*found["removed"], *found["added"]}


def test_a_diff_has_only_keys_of_the_configuration_that_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file states the number of devices: it is that of the cluster. A key that is "auto" stays."""
    keys = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": "auto",
        "bf16.enabled": True,
        "zero_optimization.stage": 2,
    }
    (path,) = write_files(tmp_path, {"ds.json": json.dumps(nest(keys))})
    wanted = ["plan", "--for", "deepspeed", "--config", str(path), "--model", "llama2-7b", "--cluster"]
    assert main([*wanted, "1x8:a100-80gb", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert Plan.model_validate(found["yours"]["plan"]).name == "dp8.z2.mb1"
    assert {*found["removed"]} <= {"train_micro_batch_size_per_gpu", "zero_optimization.stage"}
    unlike = {"gradient_accumulation_steps", "--gradient_accumulation_steps", "--per_device_train_batch_size"}
    assert found["removed"] and not unlike & {*found["removed"], *found["added"]}


def test_all_devices_of_a_launch_line_are_shards_of_torchtitan(tmp_path: Path) -> None:
    files = {
        "train.toml": "[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n",
        "launch.sh": "torchrun --nnodes 2 --nproc-per-node 4 -m torchtitan.train --job.config_file train.toml\n",
    }
    assert import_plan(*write_files(tmp_path, files)).plan.but(micro_batch=1) == parse_plan("dp4.tp2.sp.z3")


def test_a_field_that_no_mode_has_is_named_with_the_values_of_all_modes() -> None:
    line = describe_violation(parse_plan("dp4.z3.off-optimizer"), "offload", SYSTEMS["torchtitan"])
    assert line.endswith("it has offload=none or offload=optimizer+gradients+parameters")


def test_the_changed_options_give_the_best_plan_when_they_are_read_back(tmp_path: Path) -> None:
    (path,) = write_files(tmp_path, {"train.sh": MEGATRON_ARGUMENTS})
    first = import_plan(path)
    file = read_job(None, (), {**first.job_options(), "cluster.name": "2x8:a100-80gb"})
    found = compare_for(resolve_job(file), SYSTEMS["megatron"], known_sizes(file), yours=first.plan, given=first.keys)
    keys = {name: value for name, value in first.keys.items() if name not in found.removed} | found.added
    text = "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py " + " ".join(argument_words(keys))
    assert import_plan(*write_files(tmp_path, {"new.sh": text})).plan.but(bucket=1) == found.best.plan.but(bucket=1)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_best_plan_for_a_system_is_one_that_it_can_run(name: str) -> None:
    system, job = SYSTEMS[name], llama_job()
    best = best_plan_for(job, system, read_sizes("llama2-7b"))
    limit = system.limit_of(best.plan)
    assert not limit.violations(best.plan) and not limit.rule(best.plan) and best.estimate.fits
    assert best.plan.world == job.cluster.devices


def test_the_search_for_a_system_finds_the_best_of_all_its_plans() -> None:
    job = llama_job(batch=16, on="1x4:a100-80gb")
    system, pricer = SYSTEMS["deepspeed"], system_pricer(job, SYSTEMS["deepspeed"], None)
    best, compared = best_plan_for(job, system, None).estimate.time.step, 0
    for plan in islice(random_plans(system, seed=3), 400):
        if plan.world == 4 and 16 % (plan.dp * plan.micro_batch) == 0 and not plan_violations_of(job, plan):
            priced = estimate_grid(pricer, grid_of_plan(plan, 16, job.model.blocks))
            assert priced.verdict != "fits" or priced.time.step >= best * (1 - RISK_MARGIN), plan.name
            compared += priced.verdict == "fits"
    assert compared >= 5


def plan_violations_of(job: Job, plan: Plan) -> bool:
    try:
        validate_plan(job, plan)
    except InputError:
        return True
    return False


def test_a_configuration_for_another_number_of_devices_is_refused(tmp_path: Path) -> None:
    (path,) = write_files(tmp_path, {"train.sh": MEGATRON_ARGUMENTS})
    wanted = ["plan", "--for", "megatron", "--config", str(path), "--cluster", "1x8:a100-80gb"]
    assert main(wanted) == 2
    assert main(["plan", "--config", str(path), "--model", "llama2-7b"]) == 2
    (path,) = write_files(tmp_path, {"ds.json": json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}})})
    assert (
        "no file states the sizes of the model; --model: a catalog name, a folder or module:function"
        in import_plan(path, devices=8).not_carried
    )
    assert main(["plan", "--for", "deepspeed", "--config", str(path), "--cluster", "1x8:a100-80gb"]) == 2


def test_the_python_functions_do_what_the_commands_do(tmp_path: Path) -> None:
    (job,) = write_files(
        tmp_path,
        {"job.yaml": "model: llama2-7b\ncluster: 2x8:a100-80gb\nworkload: {batch: 64, sequence: 4096}\n"},
    )
    files = meshwright.export_plan(job, "dp2.tp4.pp2.z1.mb2", "torchtitan")
    assert {"train.toml", "launch.sh"} < files.keys() and files["train.toml"].startswith("# torchtitan 0.2")
    assert meshwright.import_plan(*write_files(tmp_path, files)).plan.name == "dp2.tp4.sp.pp2.z2.mb2"
    ranked = meshwright.plan(meshwright.load(job), top=2, system="deepspeed")
    assert len(ranked) == 2 and not SYSTEMS["deepspeed"].limit_of(ranked[0].plan).violations(ranked[0].plan)


PUBLIC_CONFIGS = json.loads((Path(__file__).parent / "golden" / "interop_configs.json").read_text(encoding="utf-8"))
SAME_FIELDS = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--micro-batch-size": "micro_batch",
    "zero_optimization.stage": "zero",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.expert_parallel_degree": "ep",
    "parallelism.dp": "dp",
    "parallelism.tp": "tp",
    "parallelism.pp": "pp",
    "tokens.micro_batch_size": "micro_batch",
    "parallelism_config.parallelism_config_cp_size": "cp",
    "model.tensor_model_parallel_size": "tp",
    "train.micro_batch_size": "micro_batch",
    "distributed.tp_size": "tp",
    "distributed.pp_size": "pp",
    "distributed.cp_size": "cp",
    "distributed.ep_size": "ep",
}
"""Keys whose value is that of a field of the plan."""


@pytest.mark.parametrize("config", PUBLIC_CONFIGS, ids=lambda config: config["source"].split(" ")[1][-60:])
def test_a_public_configuration_is_imported_and_every_other_key_is_named(
    config: dict[str, Any], tmp_path: Path
) -> None:
    keys = flatten(config["keys"])
    if any(name.startswith("--") for name in keys):
        words = [word.replace("'", "") for word in argument_words(keys)]
        files = {"launch.sh": "python train.py " + " ".join(words)}
    else:
        files = {"config.json": json.dumps(keys)}
    found = import_plan(*write_files(tmp_path, files), devices=config["devices"])
    assert (found.system.name, found.plan.name) == (config["system"], config["plan"])
    named = "\n".join((*found.not_carried, *(f"{name}: " for name in found.ignored)))
    for name, value in keys.items():
        assert name in found.system.own_keys or f"{name}: " in named or f"{name}=" in named, name
        if isinstance(value, int) and name in SAME_FIELDS:
            assert getattr(found.plan, SAME_FIELDS[name]) == value, name


def test_at_least_40_public_configurations_of_seven_systems_are_imported() -> None:
    assert len({config["source"] for config in PUBLIC_CONFIGS}) >= 40
    assert len({config["system"] for config in PUBLIC_CONFIGS}) >= 7


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_key_of_a_system_is_on_its_page(name: str, language: str) -> None:
    folder = Path(__file__).parents[2] / "docs" / language / "coming-from"
    page = (folder / f"{name.replace('_', '-')}.md").read_text(encoding="utf-8")
    words = {re.split(r"[ :=]", code, maxsplit=1)[0] for code in re.findall(r"`([^`\n]+)`", page)}
    meaningless = {name for key in SYSTEMS[name].keys if key.setting == "engine" for name in (key.name, *key.also)}
    missing = SYSTEMS[name].own_keys - words - meaningless
    assert not {each for each in missing if each.removeprefix("--") not in words}


def test_assumptions_of_an_import_are_named(tmp_path: Path) -> None:
    text = json.dumps({"zero_optimization": {"stage": "three"}, "train_batch_size": 8})
    lines = import_plan(*write_files(tmp_path, {"ds.json": text})).not_carried
    assert lines[0] == "zero_optimization.stage=three: no equivalent of this value"
    assert "the number of devices is in no file: the smallest number is assumed; --devices sets it" in lines
    toml = "[parallelism]\ndata_parallel_shard_degree = 4\n[activation_checkpoint]\nmode = 'selective'\n"
    found = import_plan(*write_files(tmp_path, {"a.toml": toml}))
    assert "activation_checkpoint.selective_ac_option=2: no equivalent of this value" in found.not_carried


def test_an_import_has_the_defaults_of_the_other_system(tmp_path: Path) -> None:
    toml = "[parallelism]\ndata_parallel_shard_degree = 4\n"
    found = import_plan(*write_files(tmp_path, {"a.toml": toml}), system="torchtitan")
    optimizer = found.job["workload"]["optimizer"]
    assert (optimizer["schedule"], optimizer["final_lr"]) == ("linear", 0.0)
    root = "[lr_scheduler]\ndecay_type = 'sqrt'\n" + toml
    assert (
        "lr_scheduler.decay_type=sqrt: no equivalent of this value"
        in import_plan(*write_files(tmp_path, {"a.toml": root}), system="torchtitan").not_carried
    )
    arguments = json.dumps({"per_device_train_batch_size": 2, "max_steps": 9, "fsdp": "full_shard", "bf16": True})
    found = import_plan(*write_files(tmp_path, {"args.json": arguments}), system="transformers", devices=2)
    optimizer = found.job["workload"]["optimizer"]
    assert (optimizer["schedule"], optimizer["final_lr"], optimizer["lr"]) == ("linear", 0.0, 5e-5)
