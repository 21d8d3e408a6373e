"""QLoRA on the text of a module of Python's standard library: the losses and the gradients of every plan are those of
one device with the same quantized base."""

from __future__ import annotations

import functools
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import adapted, check, make_optimizer, measured_on, read_once
from test_preferences import curve, ended
from test_train_run import kill_rank, let_go, start
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.nf4 import NF4_VALUES, quantize_base
from meshwright.checkpoint.huggingface import export_weights
from meshwright.core.errors import InputError
from meshwright.data.dataset import open_dataset
from meshwright.models.registry import build_reference_model
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.job import parse_lora, read_job, resolve_job
from meshwright.spec.job import Job, ModelSource
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import DataConfig, LoraConfig
from meshwright.train.model import build_model
from meshwright.train.trainer import Trainer, parallelize

SIZES = {"kind": "llama", "layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 258, "seq": 64}
LORA, SEQUENCE, ROWS, STEPS = LoraConfig(rank=4), 64, 8, 2
Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "shutil.txt"
    shutil.copy(Path(sysconfig.get_path("stdlib"), "shutil.py"), file)
    return file


def batches(file: str) -> list[Batch]:
    data = open_dataset(DataConfig(source=file, tokenizer="bytes", held_out=0), SEQUENCE, 258, "causal")
    rows = torch.arange(ROWS * STEPS).numpy()
    return [data.training(part, part, 1) for part in rows.reshape(STEPS, ROWS)]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return adapted(quantize_base(build_reference_model(SIZES)), LORA)


def nearest(weight: torch.Tensor) -> torch.Tensor:
    """The value of the published table that is nearest to each weight, in blocks of 64 of a row."""
    blocks = weight.view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True).bfloat16().to(weight)
    values = torch.tensor(NF4_VALUES).to(weight)
    return (values[(blocks[..., None] / scale[..., None] - values).abs().argmin(-1)] * scale).view_as(weight)


def plain_model(model: nn.Module) -> nn.Module:
    """Ordinary linear layers with the quantized values of `model`, in float64."""
    model = model.double()
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and ".layers." in path:
                module.weight.copy_(nearest(module.weight))
    return adapted(model, LORA)


def job(ranks: int = 1, sizes: dict[str, int] | None = None, **workload: Any) -> Job:
    known = {"head_dim": 32, **{key: value for key, value in SIZES.items() if key != "kind"}, **(sizes or {})}
    choice = {"model.name": "llama-tiny", "model.sizes": known, "cluster.name": f"local:{ranks}"}
    lora = {"rank": LORA.rank, "base": "nf4"}
    more = {f"workload.{key}": value for key, value in {"lora": lora, "sequence": SEQUENCE, **workload}.items()}
    return resolve_job(read_job(None, (), {**choice, "workload.batch": ROWS, **more}))


def trained(plan: str, file: str) -> dict[str, Any]:
    """On every rank: what `measured` returns."""
    anatomy = read_once("nf4", model_of)
    return measured(parallelize(model_of(), make_optimizer, plan, precision="fp64", clip=1.0, anatomy=anatomy), file)


def measured(trainer: Trainer, file: str, save: str = "") -> dict[str, Any]:
    """What `equality.measured_on` returns, on the text of `file`."""
    read = batches(file)
    return measured_on(trainer, read, read[0], save)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def alone(model: nn.Module, file: str) -> dict[str, Any]:
    """On one device, with nothing of ours but the model and the rows."""
    read = batches(file)
    optimizer = make_optimizer([each for each in model.parameters() if each.requires_grad])
    result: dict[str, Any] = {"losses": [], "norms": []}
    for number, batch in enumerate(read):
        optimizer.zero_grad()
        value = loss_of(model, batch)
        value.backward()
        if not number:
            found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
            tokens = int((batch["labels"][:, 1:] != -100).sum())
            result |= {"first": value.item(), "tokens": tokens, "gradients": found}
        result["losses"].append(value.item())
        result["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    with torch.no_grad():
        result["evaluated"] = loss_of(model, read[0]).item()
    result["weights"] = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    return result


@functools.cache
def expected_of_reference_model(file: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return alone(plain_model(build_reference_model(SIZES)), file)


PLANS = [
    "dp1", "dp2.mb2", "dp2.z3.mb2", "pp2.mb2", "tp2.mb4", "dp2.z1.mb4", "dp2.z2.mb1.rc-full", "dp2.z3.mb1.rc-sac",
    "dp2.pp2.z3.mb2", "tp2.sp.mb4", "dp2.tp2.z3.mb4",
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.covering(3)
def test_losses_and_gradients_are_those_of_one_device_with_the_same_base(ranks: Any, source: Path, plan: str) -> None:
    expected = expected_of_reference_model(str(source))
    results = ranks.run(parse_plan(plan).world, trained, plan, str(source))
    check(expected, results, "fp64")
    counted = estimate(job(len(results), precision="fp64"), parse_plan(plan)).memory.parameters
    assert max(result["bytes"]["parameters"] for result in results) == pytest.approx(counted, rel=0.01)
    assert all(".lora_" in name for name in results[0]["gradients"])
    assert abs(expected["losses"][1] - expected["losses"][0]) > 1e-3


JOB = """
model: {name: llama-tiny, sizes: {layers: 4, hidden: 128, heads: 4, kv_heads: 2, head_dim: 32, ffn: 256, vocab: 258, \
seq: 64}}
workload: {sequence: 64, batch: 8, steps: 16, precision: fp64, optimizer: {lr: 1.0e-2, warmup: 2}, lora: {rank: 4, \
base: nf4}}
data: {source: shutil.txt, tokenizer: bytes, held_out: 0.1}
cluster: {name: "local:2"}
plan: {name: dp2.z3.mb2}
run: {checkpoint_every: 4, evaluate_every: 8, prove: start}
"""


@pytest.fixture(scope="module")
def place(source: Path) -> Path:
    (source.parent / "job.yaml").write_text(JOB)
    return source.parent


@pytest.mark.soak
def test_a_qlora_run_goes_on_after_kill_9_and_has_the_losses_of_another_plan(place: Path) -> None:
    process = start(place, "killed", until=10)
    kill_rank(place, "killed", process)
    let_go(place, "killed")
    said = ended(process)
    assert f"killed by SIG{signal.SIGKILL.name[3:]}" in said and "0 steps lost" in said
    assert "proven equal to one device" in said and "the planner counted" not in said
    ended(start(place, "other", "--plan", "pp2.mb2"))
    one, other = curve(place, "killed"), curve(place, "other")
    assert one[-1][0] < 0.9 * one[0][0]
    for values in (0, 1):
        found, wanted = ([record[values] for record in run if record[values] is not None] for run in (one, other))
        assert len(wanted) == (17, 3)[values] and found == pytest.approx(wanted, rel=1e-9)


def of_folder(folder: str) -> nn.Module:
    return adapted(quantize_base(build_model(ModelSource(name="model", folder=folder), seed=1)), LORA)


def trained_from_folder(folder: str, plan: str, file: str, save: str) -> dict[str, Any]:
    """On every rank: each reads and converts only what it stores."""
    model = of_folder(folder)
    assert all(each.is_meta for name, each in model.named_parameters() if ".lora_" not in name)
    anatomy = read_once(folder, lambda: of_folder(folder))
    trainer = parallelize(model, make_optimizer, plan, precision="fp64", clip=1.0, anatomy=anatomy)
    trainer.load_weights(folder)
    return measured(trainer, file, save)


@pytest.mark.parametrize("plan", ["tp2.mb4", pytest.param("dp2.z3.mb2", marks=pytest.mark.soak)])
def test_weights_of_a_folder_are_converted_and_merged_when_they_are_exported(
    ranks: Any, source: Path, tmp_path: Path, plan: str
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=258, use_cache=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base", max_shard_size="200kB")
    plain = plain_model(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    expected = alone(plain, str(source))
    results = ranks.run(2, trained_from_folder, str(tmp_path / "base"), plan, str(source), str(tmp_path / "run"))
    check(expected, results, "fp64")
    export_weights(tmp_path / "run" / f"step-{STEPS:08d}", tmp_path / "merged", config.to_dict(), lora=LORA)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float64
    with torch.no_grad():
        assert loss_of(merged, batches(str(source))[0]).item() == pytest.approx(expected["evaluated"], rel=1e-10)


class Odd(nn.Module):
    """Blocks with one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(layer), nn.Sequential(layer)])


@pytest.mark.soak
def test_verify_reduces_a_model_to_blocks_that_tensor_ranks_can_divide(tmp_path: Path) -> None:
    options = ["--lora", "rank=4,base=nf4", "--cluster", "local:2", "--plan", "tp2", "--dtype", "float64"]
    command = [sys.executable, "-m", "meshwright.cli.main", "verify", "--model", "llama2-7b", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "float64 equal to one device" in done.stdout


def test_what_cannot_be_quantized_is_one_line() -> None:
    for model, why in (
        (nn.Linear(64, 64), "this model has no repeated blocks with an nn.Linear: leave base out"),
        (adapted(build_reference_model(SIZES), LORA), "q_proj has an adapter already: quantize the base before LoRA"),
        (build_reference_model({**SIZES, "ffn": 96}), r"mlp.down_proj.weight \[128, 96\] of a Linear cannot be stored"),
    ):
        with pytest.raises(InputError, match=why) as error:
            quantize_base(model)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"down_proj.weight \[128, 96\] of llama-tiny cannot be stored in 4 bits"):
        job(sizes={"ffn": 96})
    with pytest.raises(InputError, match=r"--lora base='int4' is not nf4: leave base out, or write base=nf4"):
        parse_lora("base=int4")


def test_the_planner_counts_the_bytes_of_the_engine() -> None:
    for precision in ("fp32", "bf16"):
        trainer = parallelize(model_of(), make_optimizer, "dp1.mb8", precision=precision)
        counted = estimate(job(precision=precision), parse_plan("dp1.mb8")).memory
        assert trainer.bytes()["parameters"] == counted.parameters
        assert trainer.bytes()["gradients"] == pytest.approx(counted.gradients)
        plain = estimate(job(precision=precision, lora={"rank": LORA.rank}), parse_plan("dp1.mb8"))
        assert counted.parameters < 0.4 * plain.memory.parameters and counted.gradients == plain.memory.gradients
