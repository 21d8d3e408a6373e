"""Verification finds equal what is equal, and finds what is not: each kind of fault is named with its place."""

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from pool import Pool
from torch import nn

import meshwright as mw
from meshwright.core.errors import InputError
from meshwright.spec.job import ModelSource
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import OptimizerConfig
from meshwright.train.model import model_objective
from meshwright.train.verify import VerifyRequest, VerifyResult, _run_under_plan, compare_results, locate_difference

SIZES = {
    "kind": "llama",
    "layers": 80,
    "hidden": 8192,
    "heads": 64,
    "kv_heads": 8,
    "ffn": 28672,
    "vocab": 32000,
    "seq": 4096,
}


def question(plan: str) -> VerifyRequest:
    source = ModelSource(name="m", sizes=SIZES)
    return VerifyRequest(
        model=source, plan=parse_plan(plan), optimizer=OptimizerConfig(lr=1e-3), precisions=("fp64", "fp32")
    )


def under_plan(given: VerifyRequest, precision: str) -> dict[str, Any]:
    return _run_under_plan(given, precision)


@pytest.fixture(scope="module")
def asked() -> VerifyRequest:
    return question("dp2.z1")


@pytest.fixture(scope="module")
def ours(ranks: Pool, asked: VerifyRequest) -> dict[str, Any]:
    return ranks.run(2, under_plan, asked, "fp64")[0]


def test_a_right_plan_equals_one_device_with_unequal_labels_on_each_replica(
    asked: VerifyRequest, ours: dict[str, Any]
) -> None:
    found = compare_results(asked, "fp64", ours)
    assert found.equal and found.gradient < 1e-13 and found.loss < 1e-13
    assert found.parameters[0] == found.parameters[1] > 100_000
    assert len(set(found.labels_by_replica)) == 2 and sum(found.labels_by_replica) == found.labels[0] == found.labels[1]


def spoil(ours: dict[str, Any], how: str) -> dict[str, Any]:
    bad = copy.deepcopy(ours)
    name = "model.layers.1.mlp.down_proj.weight"
    if how == "one gradient":
        bad["gradients"][name][3, 3] *= 1 + 1e-6
    elif how == "loss":
        bad["losses"][2] *= 1 + 1e-9
    elif how == "weight":
        bad["weights"][name] += 1e-6
    elif how == "gradient lost":
        del bad["gradients"][name]
    elif how == "weight lost":
        del bad["weights"][name]
    elif how == "labels":
        bad["labels"] += 1
    elif how == "not finite":
        bad["gradients"][name][0, 0] = float("nan")
    return bad


@pytest.mark.parametrize(
    "how", ["one gradient", "loss", "weight", "gradient lost", "weight lost", "labels", "not finite"]
)
def test_each_kind_of_fault_is_found(asked: VerifyRequest, ours: dict[str, Any], how: str) -> None:
    found = compare_results(asked, "fp64", spoil(ours, how))
    assert not found.equal
    if how in ("one gradient", "not finite"):
        assert found.where == "model.layers.1.mlp.down_proj.weight"


def spoil_one(model: nn.Module, how: str) -> None:
    """A fault in one module on the last rank."""
    path, _, kind = how.partition(" ")
    module = dict(model.named_modules()).get(path)
    if dist.get_rank() == dist.get_world_size() - 1 and isinstance(module, nn.Module) and kind:
        if kind == "forward":
            module.register_forward_hook(lambda module, args, output: output * (1 + 1e-6))
        if kind == "backward":
            module.register_forward_hook(
                lambda module, args, output: output.register_hook(lambda gradient: gradient * (1 + 1e-6)) and None
            )
        if kind == "weight":
            module._parameters["weight"].register_hook(lambda gradient: gradient * (1 + 1e-6))  # type: ignore[union-attr]


def locate_spoiled(given: VerifyRequest, how: str) -> str:
    return locate_difference(given, "fp64", partial(spoil_one, how=how))


LAYER = "model.layers.1"
FAULTS = [
    ("dp2.z1", f"{LAYER}.mlp.up_proj forward", f"output of {LAYER}.mlp.up_proj"),
    ("dp2.z1", f"{LAYER}.mlp.up_proj backward", f"gradient of the output of {LAYER}.mlp.up_proj"),
    ("tp2.rc-full", f"{LAYER}.self_attn.q_proj forward", f"output of {LAYER}.self_attn.q_proj"),
    ("tp2.sp", f"{LAYER}.mlp.down_proj forward", f"output of {LAYER}.mlp.down_proj"),
    (
        "tp2",
        f"{LAYER}.post_attention_layernorm backward",
        f"gradient of the output of {LAYER}.post_attention_layernorm",
    ),
    ("pp2", "model.norm forward", "output of model.norm"),
    ("dp2.z3", f"{LAYER}.mlp.up_proj weight", f"gradient of {LAYER}.mlp.up_proj.weight"),
]


@pytest.mark.parametrize(("plan", "fault", "said"), FAULTS)
@pytest.mark.covering(3)
def test_the_module_with_the_fault_is_named(ranks: Pool, plan: str, fault: str, said: str) -> None:
    first, last = ranks.run(2, locate_spoiled, question(plan), fault)
    assert first == last
    assert first.startswith(f"first to differ: {said}, by ")


@pytest.mark.parametrize("plan", ["dp2.z3", "tp2.sp", "pp2"])
@pytest.mark.covering(1)
def test_of_a_right_plan_no_module_differs(ranks: Pool, plan: str) -> None:
    assert ranks.run(2, locate_spoiled, question(plan), "")[0].startswith("no module differs")


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.covering(1)
def test_rules_that_need_whole_tensors_are_compared_with_torchs_own(ranks: Pool, name: str) -> None:
    given = question("tp2").but(optimizer=OptimizerConfig(name=name, lr=1e-3))
    found = compare_results(given, "fp64", ranks.run(2, under_plan, given, "fp64")[0])
    assert found.equal and found.weight < 1e-10


def test_an_optimizer_of_a_persons_own_is_compared_with_itself_on_one_device(ranks: Pool) -> None:
    given = question("dp2.z1").but(optimizer=OptimizerConfig(name="optimizer_reference:by_path"))
    found = compare_results(given, "fp64", ranks.run(2, under_plan, given, "fp64")[0])
    assert found.equal and found.weight < 1e-10


def test_a_finding_survives_json(asked: VerifyRequest, ours: dict[str, Any]) -> None:
    found = compare_results(asked, "fp64", ours)
    assert VerifyResult.model_validate_json(found.model_dump_json()) == found


@pytest.mark.soak
def test_the_command_reduces_a_plan_of_many_devices_and_prints_one_object(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "meshwright.cli.main",
        "verify",
        "--json",
        "--dtype",
        "float64",
        "--model",
        "llama2-7b",
    ]
    command += [
        "--cluster",
        "2x8:a100-80gb",
        "--batch",
        "64",
        "--seq",
        "2048",
        "--plan",
        "dp4.tp2.sp.pp2.z3.mb1.rc-full",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["plan"], answer["ran"], answer["ranks"]) == (
        "dp4.tp2.sp.pp2.z3.mb1.rc-full",
        "dp2.tp2.sp.pp2.z3.mb1.rc-full",
        8,
    )
    assert answer["equal"] and answer["found"][0]["gradient"] < 1e-12


def test_the_same_from_python(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "model: {name: llama2-7b}\ncluster: {name: 1x2:a100-80gb}\nworkload: {batch: 8, sequence: 2048}\n"
    )
    (found,) = mw.verify(tmp_path / "job.yaml", plan="dp2", dtype="float64")
    assert found["equal"] and not found["first"] and found["gradient"] < 1e-12


class Sensors(nn.Module):
    """Reads two tensors of its own; an example says so. `spare` takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head, self.spare = (
            nn.Linear(6, 16),
            nn.Embedding(5, 16),
            nn.Linear(16, 9),
            nn.Linear(3, 3),
        )
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.dummy_inputs = {"places": torch.zeros(3, 11, 6), "kinds": torch.tensor([1, 2, 4])}

    def forward(self, places: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        x = self.first(places) + self.second(kinds)[:, None]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def speech(folder: Path) -> ModelSource:
    small = {
        "d_model": 32,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    transformers.WhisperConfig(
        **small, encoder_layers=2, decoder_layers=2, architectures=["WhisperForConditionalGeneration"]
    ).save_pretrained(folder)  # fmt: skip
    return ModelSource(name="whisper", folder=str(folder))


@pytest.mark.parametrize(
    ("what", "plan"),
    [
        *(pytest.param("speech", plan, marks=pytest.mark.soak) for plan in ("tp2", "pp2.mb2")),
        pytest.param("sensors", "tp2", marks=pytest.mark.soak),
        ("sensors", "dp2.z3"),
    ],
)
def test_a_model_with_other_inputs_is_compared_in_the_form_of_its_example(
    ranks: Pool, tmp_path: Path, what: str, plan: str
) -> None:
    source = speech(tmp_path) if what == "speech" else ModelSource(name="sensors", module=f"{__name__}:Sensors")
    given = VerifyRequest(model=source, plan=parse_plan(plan), optimizer=OptimizerConfig(lr=1e-3), precisions=("fp64",))
    found = compare_results(given, "fp64", ranks.run(2, under_plan, given, "fp64")[0])
    assert found.equal and found.labels[0] > 8, found


def test_training_with_the_data_of_a_job_is_refused_in_one_line_for_such_a_model() -> None:
    with pytest.raises(
        InputError,
        match=r"'sensors' reads places, kinds, but the data of a job are token ids or images: train it in your own",
    ):
        model_objective(ModelSource(name="sensors", module="here:Sensors"), Sensors())
