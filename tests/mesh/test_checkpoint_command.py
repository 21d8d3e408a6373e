"""`meshwright checkpoint` on a run folder: list, verify, export, import; what is wrong is one line and its exit
code."""

from __future__ import annotations

import json
import random

import pytest
import torch
from checkpoint_worlds import layouts, save_world

from meshwright.cli.main import main
from meshwright.models.registry import build_reference_model
from meshwright.spec.job import LaunchSpec
from meshwright.spec.plan import Plan

SIZES = {"kind": "llama", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 32, "seq": 16}


def _run(folder, sizes=SIZES):
    """A run folder with two checkpoints of a reference model on three ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_reference_model(sizes)
    tensors = {f"model/{name}": tensor.detach() for name, tensor in model.named_parameters()}
    for step in (5, 10):
        save_world(
            folder / "checkpoints", step, tensors, layouts(tensors, 3, random.Random(step)), plan=Plan(dp_replicate=3)
        )
    launch = LaunchSpec(
        model={"name": "some", "sizes": sizes}, workload={}, data={}, plan=Plan(), run={"folder": str(folder)}
    )
    (folder / "launch.json").write_text(launch.to_json())
    return model


def test_list_names_step_plan_and_size_newest_first(tmp_path, capsys):
    _run(tmp_path)
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["plan"], row["ranks"]) for row in rows] == [(10, "dp3", 3), (5, "dp3", 3)]
    assert main(["checkpoint", "list", str(tmp_path / "checkpoints")]) == 0
    assert "step-00000010    10   dp3      3" in capsys.readouterr().out


def test_verify_says_valid_or_what_is_damaged_and_exits_with_2(tmp_path, capsys):
    _run(tmp_path)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": valid\n") == 2
    file = tmp_path / "checkpoints" / "step-00000010" / "rank-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 64
    file.write_bytes(data)
    assert main(["checkpoint", "verify", str(tmp_path), "--json"]) == 2
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["valid"] for row in rows] == [False, True] and "rank-00002.safetensors: model/" in rows[0]["problems"][
        0
    ]


@pytest.mark.parametrize(
    "sizes",
    [SIZES, {**SIZES, "qkv_bias": 1, "tied": 1, "rope_base": 5000.0},
        {"kind": "gpt2", "layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 32, "seq": 16}],
    ids=["llama", "qwen2", "gpt2"],
)  # fmt: skip
def test_an_exported_reference_model_computes_the_same_in_transformers(tmp_path, capsys, sizes):
    transformers = pytest.importorskip("transformers")
    model = _run(tmp_path / "run", sizes)
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "config.json" in capsys.readouterr().out
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-6)


def test_import_makes_a_checkpoint_of_step_0_that_exports_the_same(tmp_path, capsys):
    _run(tmp_path / "run")
    assert (
        main(["checkpoint", "export", str(tmp_path / "run" / "checkpoints" / "step-00000005"), str(tmp_path / "out")])
        == 0
    )
    capsys.readouterr()
    assert main(["checkpoint", "import", str(tmp_path / "out"), str(tmp_path / "imported"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"] == str(tmp_path / "imported" / "step-00000000")
    assert (found["form"], found["step"], found["optimizer"]) == ("safetensors", 0, [])
    assert main(["checkpoint", "verify", str(tmp_path / "imported")]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "imported"), str(tmp_path / "again")]) == 0
    assert "config.json is not written" in capsys.readouterr().err
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["list", "{0}/none"], "is not a folder"),
        (["verify", "{0}"], "holds no checkpoint"),
        (["import", "{0}/none", "{0}/x"], "do not exist"),
        (["lost", "{0}"], "Available commands: list, verify, export, import"),
        (["export", "{0}"], "--to is missing"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(tmp_path, capsys, words, sentence):
    assert main(["checkpoint", *(word.format(tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and sentence in err
