"""Keys that an import does not carry over: one line for each that can change the result, one line for all others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from test_interop_defaults import imported

from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.interop.importing import import_lines, import_plan
from meshwright.planner.inputs.job import read_job

GPT = (
    "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size "
    "512 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 100 "
    "--lr 1e-4 --tensor-model-parallel-size 2 "
)
TRAINER = {"per_device_train_batch_size": 2, "max_steps": 100, "fsdp": "full_shard", "bf16": True}


def test_keys_without_effect_on_the_result_are_one_line_and_others_have_a_remedy(tmp_path: Path) -> None:
    options = "--rampup-batch-size 2 2 9 --apply-layernorm-1p --calculate-per-token-loss --log-interval 5 --save x"
    found = imported(tmp_path, {"a.sh": GPT + options})
    assert found.ignored == ("--log-interval", "--save")
    lines = [str(line) for line in import_lines(found)]
    assert lines[-1] == "not carried over, without effect on the result: --log-interval, --save"
    assert "  --rampup-batch-size: no equivalent; the batch is constant here: set workload.batch" in lines
    assert "  --apply-layernorm-1p: no equivalent" in lines and "  dropout 0.1 is not applied here" in lines
    assert not [line for line in lines if "per-token" in line]
    found = imported(tmp_path, {"a.json": json.dumps({**TRAINER, "num_train_epochs": 3, "logging_steps": 1})})
    assert found.not_carried[0] == "num_train_epochs: no equivalent; set the number of steps with --steps"
    assert found.ignored == ("logging_steps",)


def test_recompute_of_fsdp_config_and_bf16_of_the_command_line_are_carried_over(tmp_path: Path) -> None:
    recompute = {"fsdp_config": {"activation_checkpointing": True}}
    assert imported(tmp_path, {"a.json": json.dumps({**TRAINER, **recompute})}).plan.name.endswith(".rc-full")
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n"
    found = imported(tmp_path, {"a.yaml": text, "l.sh": "accelerate launch --config_file a.yaml t.py --bf16"})
    assert found.job["workload"]["precision"] == "bf16" and not [each for each in found.not_carried if "bf16" in each]


def test_a_zero_stage_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 4, "overlap_comm": True}})
    with pytest.raises(InputError, match=r"^zero_optimization.stage is 0 to 3, not 4$"):
        imported(tmp_path, {"ds.json": text})


def test_a_model_that_cannot_be_built_is_named_at_import(tmp_path: Path) -> None:
    found = imported(tmp_path, {"a.sh": GPT + "--swiglu --normalization LayerNorm"})
    start = "the job can be planned, not trained: LayerNorm with SwiGLU cannot be built"
    assert [line for line in found.not_carried if line.startswith(start)]
    found = imported(tmp_path, {"a.sh": GPT})
    assert found.sizes["kind"] == "gpt2" and not [line for line in found.not_carried if "cannot be built" in line]


def test_the_job_of_an_import_finds_its_model_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.sh").write_text(GPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["import", "a.sh", "--out", "imported"]) == 0
    assert yaml.safe_load(Path("imported/job.yaml").read_text(encoding="utf-8"))["model"] == {"path": "model.yaml"}
    monkeypatch.chdir("/")
    assert main(["estimate", str(tmp_path / "imported" / "job.yaml"), "--cluster", "1x4:h100"]) == 0
    assert read_job(tmp_path / "imported" / "job.yaml").model.path == str(tmp_path / "imported" / "model.yaml")
    capsys.readouterr()
    assert main(["estimate", "--model", "imported/other.yaml", "--cluster", "1x4:h100"]) == 2
    assert "model file 'imported/other.yaml' does not exist" in capsys.readouterr().err


def test_the_printed_command_for_cpu_ranks_offloads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": offload, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    out = tmp_path / "imported"
    assert main(["import", str(tmp_path / "ds.json"), "--devices", "2", "--out", str(out)]) == 0
    assert "--cluster local:2 --model MODEL --plan dp2.z3.mb2" in capsys.readouterr().err
    assert main(["verify", str(out / "job.yaml"), "--cluster", "local:2", "--model", "llama-tiny"]) == 2
    assert "write the plan without offload, dp2.z3.mb2" in capsys.readouterr().err


def test_a_gain_within_the_error_of_the_estimates_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--model", "llama2-7b", "--cluster", "1x8:a100-80gb", "--batch", "64", "--seq", "4096"]
    said = "no change: your configuration is within the error of the estimates (5%) of the best that FSDP2 can run"
    for plan, changes in (("dp8.z3.mb1", False), ("dp8.z3.mb1.rc-full", True)):
        assert main(["export", *job, "--plan", plan, "--to", "fsdp2", "--out", str(tmp_path / plan)]) == 0
        capsys.readouterr()
        assert main(["plan", "--for", "fsdp2", "--config", str(tmp_path / plan / "train.py"), *job]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (said in lines, "  + MICRO_BATCH = 2" in lines) == (not changes, changes)


def test_an_export_and_the_advice_for_a_system_have_the_same_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--model", "llama2-7b", "--cluster", "1x8:a100-80gb", "--batch", "64", "--seq", "4096"]
    assert main(["plan", "--for", "fsdp2", *job]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    plan, seconds = line.split(": ")[1].split(", ")[:2]
    assert main(["export", *job, "--plan", plan, "--to", "fsdp2", "--out", str(tmp_path / "a")]) == 0
    assert f", plan {plan} of llama2-7b: {seconds.removesuffix(' a step')} a step" in capsys.readouterr().out


def test_a_configuration_without_a_known_model_says_which_model_it_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**TRAINER, "model_name_or_path": "my/own"}), encoding="utf-8")
    assert main(["plan", "--for", "transformers", "--config", str(tmp_path / "a.json"), "--cluster", "1x8:h100"]) == 2
    said = "model my/own: not in the catalog; --model: a catalog name, a folder or module:function"
    assert said in capsys.readouterr().err
    assert said in import_plan(tmp_path / "a.json", devices=2).not_carried
