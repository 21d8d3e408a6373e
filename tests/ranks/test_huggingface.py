"""Hugging Face in and out: a start from weights that no rank holds whole trains what one device trains, and what is
exported loads there."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import adapted, check, difference, make_batch, make_optimizer, measured, read_once
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

from meshwright.checkpoint.huggingface import export_adapter, export_weights, read_extra_files
from meshwright.checkpoint.load import iter_full_tensors
from meshwright.core.errors import InputError
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.spec.job import ModelSource
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import LoraConfig
from meshwright.train.model import attach_lora, build_model
from meshwright.train.proof.reference_run import use_float64
from meshwright.train.trainer import parallelize

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, eos_token_id=1)
    ),
}  # fmt: skip
STARTS = [
    ("llama", "dp2"), ("llama", "dp2.z3"), ("llama", "tp2"), ("llama", "pp2"), ("llama", "dp2.tp2.z1"),
    ("llama", "tp2.pp2.mb4"), ("gpt2", "dp2.z2"), ("gpt2", "tp2.pp2.mb4"), ("gpt2", "dp2.pp2.z3"),
    ("mixtral", "dp2.z3"), ("mixtral", "pp2"), ("mixtral", "dp2.ep2.z1.mb2"),
]  # fmt: skip


RARE = {
    ("llama", "dp2"),
    ("llama", "dp2.tp2.z1"),
    ("gpt2", "dp2.z2"),
    ("llama", "dp2.z3.rc-full"),
    ("llama", "tp2"),
    ("mixtral", "pp2"),
}
"""What the others cover too: only the soak runs it."""


def sample(pairs: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*pair, marks=pytest.mark.soak) if pair in RARE else pair for pair in pairs]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family as `save_pretrained` leaves it, in several files with an index."""
    found = {}
    for name, make in FAMILIES.items():
        torch.manual_seed(3)
        found[name] = tmp_path_factory.mktemp(name)
        make().save_pretrained(found[name], max_shard_size="20kB")
        assert len(list(found[name].glob("model-*.safetensors"))) > 1
    return found


def start(folder: str) -> nn.Module:
    return build_model(ModelSource(name="model", folder=folder), seed=1)


def train(folder: str, plan: str, precision: str, steps: int, save: str = "") -> dict[str, Any]:
    """On every rank, as equality.train does, from the weights of `folder`."""
    model = start(folder)
    assert all(tensor.is_meta for tensor in model.parameters()) and not any(
        tensor.is_meta for tensor in model.buffers()
    )
    trainer = parallelize(
        model, make_optimizer, plan, precision=precision, clip=1.0, anatomy=read_once(folder, lambda: start(folder))
    )
    trainer.load_weights(folder)
    return measured(trainer, "model", steps, save)


def by_itself(model: nn.Module, steps: int) -> dict[str, Any]:
    """What transformers' model computes on one device, with torch's own loss. Only what takes gradients is trained."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = make_optimizer(trained.values())

    def loss_of(step: int) -> tuple[torch.Tensor, int]:
        batch = make_batch("model", step)
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        logits = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100), int((labels != -100).sum())

    loss, tokens = loss_of(0)
    loss.backward()
    result: dict[str, Any] = {"first": loss.item(), "tokens": tokens, "losses": [], "norms": []}
    result["gradients"] = {name: parameter.grad.clone() for name, parameter in trained.items()}
    for step in range(steps):
        optimizer.zero_grad()
        loss, _ = loss_of(step)
        loss.backward()
        result["losses"].append(loss.item())
        result["norms"].append(float(nn.utils.clip_grad_norm_(list(trained.values()), 1.0)))
        optimizer.step()
    result["weights"] = {name: parameter.detach() for name, parameter in trained.items()}
    with torch.no_grad():
        result["evaluated"] = loss_of(99)[0].item()
    return result


@functools.cache
def expected(name: str, folder: str) -> dict[str, Any]:
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision_of(name)]
    return by_itself(type(FAMILIES[name]()).from_pretrained(folder, dtype=dtype).train(), 2)


def precision_of(name: str) -> str:
    """torch groups the products of experts in float32 at most."""
    return "fp32" if name == "mixtral" else "fp64"


@pytest.mark.parametrize(("name", "plan"), sample(STARTS))
@pytest.mark.covering(1)
def test_a_start_from_weights_that_no_rank_holds_whole_trains_what_one_device_trains(
    ranks: Any, folders: dict[str, Path], name: str, plan: str
) -> None:
    folder, precision = str(folders[name]), precision_of(name)
    check(expected(name, folder), ranks.run(parse_plan(plan).world, train, folder, plan, precision, 2), precision)


def test_a_step_before_the_weights_are_read_is_refused(folders: dict[str, Path]) -> None:
    trainer = parallelize(start(str(folders["llama"])), make_optimizer, "dp1", precision="fp32")
    with pytest.raises(InputError, match="has no values: call trainer"):
        trainer.step(make_batch("model", 0))


def renamed(folder: Path, change: Any) -> None:
    """The one file of `folder` with its tensors changed."""
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: renamed(folder, lambda held: {k: v for k, v in held.items() if "o_proj" not in k}),
            r"has no tensor '.*o_proj.weight' and 1 more"),
        (lambda folder: renamed(folder, lambda held: {**held, "model.layers.2.mlp.up_proj.weight": torch.ones(4)}),
            "has a tensor that this model does not have"),
        (lambda folder: renamed(folder, lambda held: {**held, "model.norm.weight": torch.ones(5)}), r"has shape \[5\]"),
        (lambda folder: renamed(folder, lambda held: {**held, "model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            "has dtype I8, but only floating-point"),
        (lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
            "truncated"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "pickle and is not read: convert it once"),
        (lambda folder: quantized(folder), "quantized and cannot be trained"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_one_line_before_any_is_read(tmp_path: Path, spoil: Any, sentence: str) -> None:
    torch.manual_seed(0)
    FAMILIES["llama"]().save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(InputError, match=sentence) as caught:
        model, anatomy = start(str(tmp_path)), read_once("llama of transformers", FAMILIES["llama"])
        parallelize(model, make_optimizer, "dp1", anatomy=anatomy).load_weights(tmp_path)
    assert "\n" not in str(caught.value)


def quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))


def test_rotary_frequencies_and_tensors_of_earlier_versions_do_not_hinder_a_start(tmp_path: Path) -> None:
    torch.manual_seed(0)
    FAMILIES["llama"]().save_pretrained(tmp_path)
    renamed(tmp_path, lambda held: {**held, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    model = start(str(tmp_path))
    parallelize(model, make_optimizer, "dp1").load_weights(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.get_buffer("model.rotary_emb.inv_freq"), again.get_buffer("model.rotary_emb.inv_freq"))
    ids = torch.arange(32).view(2, 16)
    assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize(
    ("name", "plan"),
    [pytest.param("llama", "tp2.pp2.mb4", marks=pytest.mark.soak), ("gpt2", "dp2.z3.mb2"), ("mixtral", "dp2.z1.mb2")],
)
def test_a_run_under_any_plan_is_exported_as_a_folder_that_transformers_loads(
    ranks: Any, folders: dict[str, Path], tmp_path: Path, name: str, plan: str
) -> None:
    folder = str(folders[name])
    ours = ranks.run(parse_plan(plan).world, train, folder, plan, "fp32", 2, str(tmp_path / "run"))[0]["weights"]
    config = json.loads((folders[name] / "config.json").read_text())
    export_weights(tmp_path / "run" / "step-00000002", tmp_path / "out", config, largest=20_000)
    again = type(FAMILIES[name]()).from_pretrained(tmp_path / "out")
    one = type(again).from_pretrained(folder)
    one.load_state_dict(ours, strict=False)
    one.tie_weights()
    ids = torch.arange(40).view(2, 20)
    assert torch.equal(again(ids).logits, one(ids).logits)


def command(place: Path, *words: str) -> str:
    """A command as a person runs it; its standard output."""
    environment = {
        **os.environ,
        "MESHWRIGHT_CACHE": str(place / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", *words],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bare configuration, trained on real text under tp2.pp2, exported; then trained further from those
    weights."""
    place = tmp_path_factory.mktemp("command")
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 512}, num_key_value_heads=2, max_position_embeddings=64)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(place / "model")
    work = (
        "--cluster",
        "local:4",
        "--seq",
        "32",
        "--batch",
        "8",
        "--steps",
        "12",
        "--set",
        f"data.source={argparse.__file__}",
    )
    work += ("--precision", "fp32", "--set", "workload.optimizer.lr=0.003")
    command(place, "train", "--model", "model", "--pin", "pp=2,tp=2", *work, "--folder", "first")
    command(place, "checkpoint", "export", "runs/first", "--to", "out")
    command(place, "train", "--model", "out", "--plan", "dp2.tp2.z3", *work, "--folder", "second")
    command(place, "checkpoint", "export", "runs/second", "--to", "further", "--dtype", "bfloat16")
    return place


@pytest.mark.soak
def test_a_model_folder_is_trained_exported_and_writes_text_in_transformers(trained: Path) -> None:
    files = {path.name for path in (trained / "out").iterdir()}
    assert files == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "out")
    saved = dict(iter_full_tensors(trained / "runs" / "first" / "checkpoints" / "step-00000012"))
    own = dict(model.named_parameters())
    assert saved.keys() == own.keys() and all(torch.equal(saved[name], own[name]) for name in own)
    prompt = tokenizer("def main():", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert written.shape[1] > prompt["input_ids"].shape[1] and tokenizer.decode(written[0]).startswith("def main():")
    whole = transformers.LlamaForCausalLM(model.config)
    whole.load_state_dict(saved)
    assert torch.equal(whole(**prompt).logits, model(**prompt).logits)


SHOWN: dict[str, tuple[Any, str, str]] = {
    "gpt2": (lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=512, n_positions=64),
        "pp=2,tp=2", "local:4"),
    "mixtral": (
        lambda: transformers.MixtralConfig(**{**SIZES, "vocab_size": 512}, num_key_value_heads=2, num_local_experts=4),
        "dp=2,ep=2,zero=1",
        "local:2",
    ),
    "t5": (
        lambda: transformers.T5Config(
            d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=512, decoder_start_token_id=0
        ),
        "pp=2,tp=2",
        "local:4",
    ),
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("name", SHOWN)
def test_a_bare_configuration_trains_exports_and_generates_the_same_logits(tmp_path: Path, name: str) -> None:
    make, pins, cluster = SHOWN[name]
    make().save_pretrained(tmp_path / "model")
    work = (
        "--seq",
        "32",
        "--batch",
        "8",
        "--steps",
        "12",
        "--set",
        f"data.source={argparse.__file__}",
        "--precision",
        "fp32",
    )
    command(tmp_path, "train", "--model", "model", "--cluster", cluster, "--pin", pins, *work, "--folder", "run")
    command(tmp_path, "checkpoint", "export", "runs/run", "--to", "out")
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    model, loading = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    own = kind.from_config(make()).eval()
    own.load_state_dict(
        dict(iter_full_tensors(tmp_path / "runs" / "run" / "checkpoints" / "step-00000012")), strict=False
    )
    own.tie_weights()
    prompt = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("def main():", return_tensors="pt")
    beside = {"decoder_input_ids": torch.tensor([[0, 3, 4]])} if name == "t5" else {}
    torch.testing.assert_close(model(**prompt, **beside).logits, own(**prompt, **beside).logits, rtol=1e-5, atol=1e-6)
    assert model.generate(**prompt, max_new_tokens=8, do_sample=False).shape[1] > 1


def test_the_generation_config_states_the_start_token_of_a_decoder(tmp_path: Path) -> None:
    SHOWN["t5"][0]().save_pretrained(tmp_path)
    assert json.loads(read_extra_files(None, tmp_path, "end", "mask")["generation_config.json"]) == {
        "decoder_start_token_id": 0
    }


@pytest.mark.soak
def test_a_run_from_weights_begins_where_they_left_off_with_their_tokenizer(trained: Path) -> None:
    records = {
        name: [json.loads(line) for line in (trained / "runs" / name / "records.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    }
    first, second = (found[0]["loss"] for found in records.values())
    assert second == pytest.approx(records["first"][-1]["held_out_loss"], rel=1e-5) and second < first - 0.2
    assert json.loads((trained / "runs" / "second" / "launch.json").read_text())["data"]["tokenizer"] == str(
        trained / "out"
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(trained / "further")
    assert again.dtype == torch.bfloat16
    assert (trained / "further" / "tokenizer.json").read_bytes() == (trained / "out" / "tokenizer.json").read_bytes()


# --- adapters
# -------------------------------------------------------------------------------------------------------------------

ADAPTED = [
    ("llama", "dp2"), ("llama", "dp2.z3.rc-full"), ("llama", "tp2"), ("llama", "tp2.sp.mb4"), ("llama", "dp2.tp2.z1"),
    ("llama", "tp2.pp2.mb4"), ("llama", "dp2.pp2.z3.mb2"), ("llama", "tp4"), ("gpt2", "tp2.pp2.mb4"),
    ("gpt2", "dp2.z2"),
]  # fmt: skip
LORA = LoraConfig(rank=4, alpha=8.0)


def with_adapters(folder: str) -> nn.Module:
    model = adapted(start(folder), LORA)
    model.config._experts_implementation = "eager"  # type: ignore[union-attr]
    return model


def train_adapters(folder: str, plan: str, steps: int, save: str = "") -> dict[str, Any]:
    model = exactly(with_adapters(folder))
    trainer = parallelize(
        model,
        make_optimizer,
        plan,
        precision="fp64",
        clip=1.0,
        anatomy=read_once(f"adapters of {folder}", lambda: with_adapters(folder)),
    )
    trainer.load_weights(folder)
    result = measured(trainer, "model", steps, save)
    return {**result, "bytes": trainer.bytes()}


def exactly(model: Any) -> Any:
    """Experts in their plain loop and routers without their rounding to float32, so that float64 is float64
    throughout."""
    if not hasattr(model.config, "num_local_experts"):
        return model
    model.config._experts_implementation = "eager"
    return use_float64(model)


@functools.cache
def expected_adapters(name: str, folder: str) -> dict[str, Any]:
    return by_itself(exactly(adapted(whole(name, folder), LORA)).train(), 2)


def whole(name: str, folder: str) -> Any:
    return type(FAMILIES[name]()).from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize(("name", "plan"), sample(ADAPTED))
@pytest.mark.covering(2)
def test_adapters_train_as_on_one_device_and_nothing_else_does(
    ranks: Any, folders: dict[str, Path], name: str, plan: str
) -> None:
    folder = str(folders[name])
    expected = expected_adapters(name, folder)
    assert expected["gradients"] and all(".lora_" in key for key in expected["gradients"])
    results = ranks.run(parse_plan(plan).world, train_adapters, folder, plan, 2)
    check(expected, results, "fp64")
    for held in (result["bytes"] for result in results):
        assert held["gradients"] < held["parameters"] / 2 and held["optimizer"] <= 2 * held["gradients"]


def test_the_planner_counts_adapters_as_peft_makes_them_and_states_for_them_alone(folders: dict[str, Path]) -> None:
    config = {
        "workload.lora": {"rank": 4, "target": ["q_proj", "down_proj"]},
        "cluster.name": "1x2:a100-80gb",
        "workload.sequence": 16,
    }
    job = resolve_job(read_job(None, (), {**config, "model.name": str(folders["llama"])}))
    model = start(str(folders["llama"]))
    attach_lora(model, LoraConfig(rank=4, target=("q_proj", "down_proj")), seed=1)
    assert job.model.parameters == sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert job.model.trained() == pytest.approx(trained / job.model.parameters)
    plain = resolve_job(read_job(None, (), {**config, "workload.lora": None, "model.name": str(folders["llama"])}))
    few, all_ = (estimate(each, parse_plan("dp2")).memory for each in (job, plain))
    large = {"model.name": "llama2-7b", "cluster.name": "1x8:h100"}
    both = [resolve_job(read_job(None, (), {**large, "workload.lora": lora})) for lora in ({"rank": 8}, None)]
    less, more = (estimate(each, parse_plan("dp8.z3")).time.compute for each in both)
    assert 0.6 * more < less < more, "two products a weight instead of three, and what the adapters move"
    assert (
        few.gradients < 0.2 * all_.gradients
        and few.optimizer < 0.2 * all_.optimizer
        and few.parameters >= all_.parameters
    )


def test_a_target_that_is_not_there_and_an_adapter_on_the_vocabulary_are_one_line(folders: dict[str, Path]) -> None:
    model = start(str(folders["llama"]))
    with pytest.raises(
        InputError, match=r"lora.target 'q_porj' is not a linear layer of this model; did you mean 'q_proj'"
    ):
        attach_lora(model, LoraConfig(target=("q_porj",)), seed=1)
    attach_lora(model, LoraConfig(target=("q_proj", "lm_head")), seed=1)
    with pytest.raises(InputError, match=r"adapters on the vocabulary \(lm_head\) are not supported"):
        parallelize(model, make_optimizer, "dp1")


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.soak)])
def test_adapters_are_exported_for_peft_and_added_to_the_weights(
    ranks: Any, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    import peft

    folder = str(folders[name])
    ranks.run(2, train_adapters, folder, "dp2.z3.mb2", 1, str(tmp_path / "run"))
    path = tmp_path / "run" / "step-00000001"
    export_adapter(path, tmp_path / "adapter", LORA, folder, {})
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as handle:
        keys = list(handle.keys())
    assert all(key.startswith("base_model.model.") and ".lora_" in key and "optimizer" not in key for key in keys)
    config = json.loads((folders[name] / "config.json").read_text())
    export_weights(path, tmp_path / "merged", config, lora=LORA)
    ids = torch.arange(40).view(2, 20)
    kind = type(FAMILIES[name]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apart = peft.PeftModel.from_pretrained(whole(name, folder), tmp_path / "adapter")
    merged = kind.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float64
    plain = whole(name, folder)
    assert (apart(ids).logits - merged(ids).logits).abs().max() < 1e-12
    assert (plain(ids).logits - merged(ids).logits).abs().max() > 1e-3


RELOADED = [
    ("llama", "tp2.pp2.mb4"), ("llama", "tp2.sp.mb4"), ("llama", "tp4"), ("llama", "cp2"), ("llama", "pp2"),
    ("llama", "dp2.pp2.z3"), ("llama", "dp2.tp2.z1"), ("gpt2", "tp2"), ("gpt2", "tp2.pp2.mb4"), ("gpt2", "dp2.z2"),
    ("mixtral", "dp2.ep2.z1.mb2"), ("mixtral", "tp2.mb4"), ("mixtral", "dp2.pp2.z3"),
]  # fmt: skip
FEW = {("mixtral", "dp2.ep2.z1.mb2")}


@pytest.mark.parametrize(
    ("name", "plan"), [pair if pair in FEW else pytest.param(*pair, marks=pytest.mark.soak) for pair in RELOADED]
)
def test_adapters_that_peft_reloads_compute_what_one_device_has_trained(
    ranks: Any, folders: dict[str, Path], tmp_path: Path, name: str, plan: str
) -> None:
    import peft

    folder = str(folders[name])
    ranks.run(parse_plan(plan).world, train_adapters, folder, plan, 2, str(tmp_path / "run"))
    export_adapter(tmp_path / "run" / "step-00000002", tmp_path / "adapter", LORA, folder, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reloaded = exactly(peft.PeftModel.from_pretrained(whole(name, folder), tmp_path / "adapter"))
    one = exactly(adapted(whole(name, folder), LORA))
    before = logits(one)
    assert not one.load_state_dict(expected_adapters(name, folder)["weights"], strict=False).unexpected_keys
    assert difference(logits(reloaded), logits(one)) < 1e-10 < 1e-4 < difference(before, logits(one))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(40).view(2, 20)).logits
    return found


def resumed(folder: str, plan: str, path: str) -> float:
    anatomy = read_once(f"adapters of {folder}", lambda: with_adapters(folder))
    trainer = parallelize(
        adapted(start(folder), LORA), make_optimizer, plan, precision="fp64", clip=1.0, anatomy=anatomy
    )
    trainer.load(path)
    return trainer.step(make_batch("model", 1)).loss


def test_a_run_with_adapters_goes_on_under_another_plan(ranks: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = str(folders["llama"])
    ranks.run(2, train_adapters, folder, "dp2.z3.mb2", 1, str(tmp_path / "run"))
    after = ranks.run(2, resumed, folder, "tp2.mb4", str(tmp_path / "run" / "step-00000001"))
    assert after[0] == after[1] == pytest.approx(expected_adapters("llama", folder)["losses"][1], rel=1e-10)
