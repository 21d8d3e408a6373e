"""Exported files in the parsers of the systems themselves. A test is skipped if its system is not installed."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from interop_plans import random_plans

from meshwright.interop.registry import SYSTEMS
from meshwright.interop.settings import settings_of
from meshwright.interop.shell import read_command
from meshwright.interop.system import encode
from meshwright.planner.inputs.model_parser import read_sizes
from meshwright.spec.plan import Plan
from meshwright.spec.workload import Workload

PLANS = 60
MODELS = {"torchtitan": "llama3-8b"}


def exports(name: str, precision: str = "bf16") -> list[tuple[Plan, dict[str, Any], dict[str, str]]]:
    """Plans with their settings and exported files."""
    found = []
    for plan in islice(random_plans(SYSTEMS[name], seed=7), PLANS):
        workload = Workload(sequence=4096, batch=plan.dp * plan.micro_batch * 4, precision=precision, reduce="fp32")
        sizes = read_sizes(MODELS.get(name, "llama2-7b"))
        settings = settings_of(plan, workload, sizes, model=MODELS.get(name, "llama2-7b"))
        found.append((plan, settings, SYSTEMS[name].write(encode(SYSTEMS[name], settings), settings)))
    return found


def installed(name: str) -> ModuleType:
    if importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    return importlib.import_module(name)


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_reads_its_configurations(tmp_path: Path) -> None:
    config = installed("deepspeed.runtime.config")
    for plan, settings, files in exports("deepspeed"):
        data = json.loads(files["ds_config.json"])
        assert data.pop("train_batch_size") == settings["batch"] == plan.dp * plan.micro_batch * 4
        read = config.DeepSpeedConfig(data)  # without a process group, DeepSpeed multiplies by one rank
        assert read.gradient_accumulation_steps == 4
        assert read.train_micro_batch_size_per_gpu == plan.micro_batch
        assert read.zero_config.stage == plan.zero and read.bfloat16_config.enabled
        offload = read.zero_config.offload_optimizer
        assert (offload is not None) == any(str(what).startswith("optimizer") for what in plan.offload)
        assert read.tensor_parallel_config.autotp_size in (plan.tp, 0 if plan.tp == 1 else plan.tp)
        assert read.pipeline["stages"] in ("auto", plan.pp)


@pytest.mark.filterwarnings("ignore")
def test_torchtitan_reads_its_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = installed("torchtitan.config")
    if not hasattr(module, "JobConfig"):
        pytest.skip("this version of torchtitan has no TOML configuration")
    for plan, settings, files in exports("torchtitan"):
        path = tmp_path / "train.toml"
        path.write_text(files["train.toml"], encoding="utf-8")
        read = module.ConfigManager().parse_args(["--job.config_file", str(path)])
        degrees = read.parallelism
        assert (degrees.tensor_parallel_degree, degrees.pipeline_parallel_degree) == (plan.tp, plan.pp)
        assert (degrees.data_parallel_replicate_degree, degrees.data_parallel_shard_degree) == (
            plan.dp_replicate,
            plan.dp_shard,
        )
        assert degrees.context_parallel_degree == plan.cp and read.compile.enable == plan.compile
        assert read.training.global_batch_size == settings["batch"] and read.training.seq_len == 4096
        assert (read.model.name, read.model.flavor) == ("llama3", "8B")


@pytest.mark.filterwarnings("ignore")
def test_torchtitan_0_3_reads_its_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = installed("torchtitan.config")
    if hasattr(module, "JobConfig"):
        pytest.skip("this version of torchtitan has a TOML configuration")
    monkeypatch.syspath_prepend(str(tmp_path))
    for at, (plan, settings, files) in enumerate(exports("torchtitan")):
        (tmp_path / f"train_config_{at}.py").write_text(files["train_config.py"], encoding="utf-8")
        words = read_command(files["launch_0_3.sh"]).arguments
        assert words == ("--module", "train_config", "--config", "train")
        read = module.ConfigManager().parse_args(["--module", f"train_config_{at}", "--config", "train"])
        degrees = read.parallelism
        assert (degrees.tensor_parallel_degree, degrees.pipeline_parallel_degree) == (plan.tp, plan.pp)
        assert (degrees.data_parallel_replicate_degree, degrees.data_parallel_shard_degree) == (
            plan.dp_replicate,
            plan.dp_shard,
        )
        assert degrees.context_parallel_degree == plan.cp and read.compile.enable == plan.compile
        assert read.training.global_batch_size == settings["batch"] and read.training.seq_len == 4096
        assert read.lr_scheduler.warmup_steps == settings["warmup"]
        assert read.optimizer.param_groups[0].optimizer_kwargs["lr"] == settings["lr"]
        assert (read.model_spec.name, read.model_spec.flavor) == ("llama3", "8B")
        recompute = type(read.activation_checkpoint).__qualname__.partition(".")[0]
        assert recompute == {"none": "NoneType", "full": "FullAC", "sac": "SelectiveAC"}[settings["recompute"]]


def test_accelerate_reads_its_configurations(tmp_path: Path) -> None:
    module = installed("accelerate.commands.config.config_args")
    parallelism = importlib.import_module("accelerate.parallelism_config").ParallelismConfig
    launch = importlib.import_module("accelerate.commands.launch")
    for plan, _, files in exports("accelerate"):
        path = tmp_path / "accelerate.yaml"
        path.write_text(files["accelerate.yaml"], encoding="utf-8")
        read = module.load_config_from_file(str(path))
        assert read.num_processes == plan.world and read.mixed_precision == "bf16"
        assert str(read.distributed_type).rpartition(".")[2] == ("FSDP" if plan.zero else "MULTI_GPU")
        for name in (*read.fsdp_config, *getattr(read, "parallelism_config", {})):
            launch.launch_command_parser().parse_known_args([f"--{name}", "1", "x.py"])
        if plan.zero:
            sizes = {name.removeprefix("parallelism_config_"): size for name, size in read.parallelism_config.items()}
            assert parallelism(**sizes).total_size == plan.world


def test_transformers_reads_its_configurations(tmp_path: Path) -> None:
    transformers = installed("transformers")
    distributed = importlib.import_module("transformers.distributed").DistributedConfig
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    for plan, settings, files in exports("transformers", precision="fp32"):
        path = tmp_path / "training_args.json"
        data = {**json.loads(files["training_args.json"]), "output_dir": str(tmp_path / "out"), "use_cpu": True}
        data.pop("fsdp", None)  # building the FSDP plugin needs a process group
        path.write_text(json.dumps(data), encoding="utf-8")
        (read,) = parser.parse_json_file(str(path))
        assert read.per_device_train_batch_size == plan.micro_batch and read.gradient_accumulation_steps == 4
        assert read.max_steps == settings["steps"] and read.learning_rate == settings["lr"]
        if plan.tp > 1:
            native = distributed(**json.loads(files["distributed_config.json"]))
            assert (native.tp_size, native.dp_size) == (plan.tp, plan.dp)


@pytest.mark.filterwarnings("ignore")
def test_nanotron_reads_its_configurations(tmp_path: Path) -> None:
    try:
        config = installed("nanotron.config")
    except ImportError as error:  # version 0.4, the last on PyPI, has a circular import, and no `data_stages`
        pytest.skip(f"this version of nanotron cannot be imported: {error}")
    fields = config.ParallelismArgs.__dataclass_fields__
    newer = {"recompute_layer", "context_parallel_size"} - set(fields)  # version 0.5 does not have them
    for plan, settings, files in exports("nanotron"):
        if newer & yaml.safe_load(files["config.yaml"])["parallelism"].keys():
            continue
        path = tmp_path / "config.yaml"
        path.write_text(files["config.yaml"], encoding="utf-8")
        read = config.get_config_from_file(str(path))
        assert (read.parallelism.dp, read.parallelism.tp, read.parallelism.pp) == (plan.dp, plan.tp, plan.pp)
        assert read.optimizer.zero_stage == plan.zero and read.tokens.micro_batch_size == plan.micro_batch
        assert read.tokens.batch_accumulation_per_replica == 4
        assert read.model.model_config.num_hidden_layers == settings["model_layers"]


def test_automodel_reads_its_configurations() -> None:
    config = installed("nemo_automodel.components.distributed.config")
    for plan, _, files in exports("automodel"):
        read = yaml.safe_load(files["recipe.yaml"])["distributed"]
        sizes = ("dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size", "pipeline", "strategy")
        options = {name: value for name, value in read.items() if name not in sizes}
        kind = config.FSDP2Config if plan.zero else config.DDPConfig
        assert set(options) <= set(kind.__dataclass_fields__)
        assert plan.zero == 0 or kind(**options).sequence_parallel == plan.sequence_parallel


@pytest.mark.filterwarnings("ignore")
def test_megatron_reads_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        pytest.skip("megatron.training is not installed")
    arguments = importlib.import_module("megatron.training.arguments")
    has_fsdp = "use-megatron-fsdp" in inspect.getsource(arguments)  # older versions call it use-custom-fsdp
    for plan, settings, files in exports("megatron"):
        if plan.zero >= 2 and not has_fsdp:
            continue
        command = read_command(files["launch.sh"])
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *command.arguments])
        monkeypatch.setenv("WORLD_SIZE", str(plan.world))
        read = arguments.parse_args()
        assert read.tensor_model_parallel_size == plan.tp and read.pipeline_model_parallel_size == plan.pp
        assert read.context_parallel_size == plan.cp and read.expert_model_parallel_size == plan.ep
        assert read.micro_batch_size == plan.micro_batch and read.global_batch_size == settings["batch"]
        assert read.sequence_parallel == plan.sequence_parallel and read.bf16
