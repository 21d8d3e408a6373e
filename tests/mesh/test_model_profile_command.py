"""The command line with models that only a run shows: live code, Hugging Face folders of other families."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import meshwright
from meshwright.cli.launch_plan import build_launch, build_model_source, choose_plan
from meshwright.cli.main import main
from meshwright.cli.options import JobOptions
from meshwright.core.messages import translate
from meshwright.train.model import build_model, open_training_data

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LIVE = """
from torch import nn
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(96, 64), nn.Linear(64, 96)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 160, batch_first=True) for _ in range(3))
    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
class Asking(Encoder):
    def forward(self, ids):
        return super().forward(ids) if ids.sum().item() else None
class Small(Encoder):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(300, 64), nn.Linear(64, 300)
class Simple(Encoder):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 64)) for _ in range(3))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests of this file, so that they trace the model of the folder only once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with live code and a model folder."""
    (tmp_path / "a_live_model.py").write_text(LIVE)
    transformers.AutoConfig.for_model("phi", **SMALL).save_pretrained(tmp_path / "phi")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(cache))
    return tmp_path


def test_live_code_is_planned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--model", "a_live_model:Encoder", "--cluster", "1x4:a100-80gb", "--pin", "tp=2,pp=2", "--json"])
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["chosen"]["plan"]["tp"] == 2
    assert answer["job"]["model"]["divisible"] == {"ffn": 160}


def test_the_default_tokenizer_fits_the_embedding_of_live_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.txt").write_text("one text of some words\n" * 200)
    file = JobOptions(model="a_live_model:Small").job_file(None)
    source = build_model_source(file)
    choice = choose_plan(file, None, None, {}, 1)
    launch = build_launch(file, source, here / "run", choice)
    data = launch.data.but(source=str(here / "mine.txt"))
    dataset = open_training_data(launch.but(data=data), build_model(source, 1), "causal", print, print)
    assert dataset.tokenizer is not None and dataset.tokenizer.vocabulary <= launch.vocabulary == 300
    assert main(["train", "--model", "a_live_model:Encoder", "--steps", "1"]) == 2
    assert "the model's embedding has 96 token ids, but text needs at least 258" in capsys.readouterr().err


@pytest.mark.soak
def test_what_stays_whole_is_not_cut_along_the_sequence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "--model", "a_live_model:Encoder", "--cluster", "1x4:a100-80gb"]
    assert main([*command, "--plan", "dp2.tp2"]) == 0
    assert main([*command, "--plan", "dp2.tp2.sp"]) == 2
    assert (
        "sp: layers.0.self_attn.in_proj_weight is not sharded; leave sequence parallelism out"
        in capsys.readouterr().err
    )


def test_a_folder_of_another_family_is_planned_without_torch_once_it_is_known(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--model", "phi", "--cluster", "1x4:a100-80gb", "--seq", "128", "--pin", "pp=1", "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    script = (
        f"import sys; sys.modules['torch'] = None\nfrom meshwright.cli.main import main\nsys.exit(main({command!r}))"
    )
    again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["plans"] == first["plans"]


def test_layers_say_what_was_found_and_what_stays_whole(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--layers", "--model", "phi", "--cluster", "1x4:a100-80gb", "--seq", "128"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert re.search(r"^block +3 ", out, re.MULTILINE) and "3 blocks in model.layers" in out
    assert "block, not sharded: self_attn.dense.bias, mlp.fc2.bias, input_layernorm.weight" in out
    assert main(["estimate", "--layers", "--model", "llama2-7b", "--cluster", "1x4:a100-80gb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][1]["repeat"] == 32


def test_an_untraceable_model_is_one_line_in_plan_and_data_parallel_in_train(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "a_live_model:Asking", "--cluster", "1x4:a100-80gb"]) == 2
    error = capsys.readouterr().err
    assert "its forward asks for the values of a tensor" in error and error.count("\n") == 1
    file = JobOptions(model="a_live_model:Asking", cluster="1x4:a100-80gb").job_file(None)
    choice = choose_plan(file, None, None, {}, None)
    assert (choice.plan.name, choice.estimate) == ("dp4.mb8", None)
    assert "has no estimate" in translate(choice.why[0])


def test_a_folder_that_nobody_knows_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "odd").mkdir()
    (here / "odd" / "config.json").write_text('{"model_type": "nobodys", "hidden_size": 4}')
    assert main(["plan", "--model", "odd", "--cluster", "1x4:a100-80gb"]) == 2
    error = capsys.readouterr().err
    assert "config.json: transformers" in error and "`nobodys`" in error and error.count("\n") == 1


def test_live_code_in_a_job_file_needs_no_section(here: Path) -> None:
    (here / "short.yaml").write_text("model: a_live_model:Simple\ncluster: {name: 1x4:a100-80gb}\n")
    file = JobOptions().job_file(here / "short.yaml")
    assert build_model_source(file).module == "a_live_model:Simple"


def test_sizes_of_what_has_none_cannot_be_changed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "phi", "--set", "model.sizes.layers=4", "--cluster", "1x4:a100-80gb"]) == 2
    assert "'layers' cannot be set for 'phi'" in capsys.readouterr().err


def test_a_job_that_names_live_code_loads(here: Path) -> None:
    (here / "job.yaml").write_text("model: {module: a_live_model:Simple}\ncluster: {name: 1x4:a100-80gb}\n")
    job = meshwright.load("job.yaml")
    assert (job.model.name, job.model.blocks) == ("a_live_model:Simple", 3)
