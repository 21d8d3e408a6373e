"""Checkpoints in the layout of DeepSpeed and Megatron-LM: read to the bit, written, refused in one line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_worlds import same_bits
from engine_checkpoints import llama_weights, write_megatron, write_zero

from meshwright.checkpoint.formats.detect import import_checkpoint, open_checkpoint
from meshwright.checkpoint.formats.export import export_checkpoint
from meshwright.checkpoint.huggingface import hf_template
from meshwright.checkpoint.load import iter_full_tensors, read_full_tensor
from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.models.registry import build_reference_model
from meshwright.train.trainer import parallelize

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (2, 2, 3), "c": (1,)}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in WEIGHTS.items()}


BUFFERS = {"a.mean": torch.arange(4.0), "a.count": torch.tensor(7)}


def check_tensors(source: Any, expected: dict[str, torch.Tensor]) -> None:
    for name, one in expected.items():
        assert same_bits(read_full_tensor(source, f"model/{name}"), one), name
        assert same_bits(read_full_tensor(source, f"optimizer/exp_avg/{name}"), one + 1), name
        assert same_bits(read_full_tensor(source, f"optimizer/exp_avg_sq/{name}"), one.square()), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_a_zero_checkpoint_is_read_to_the_bit(tmp_path, stage, world):
    write_zero(tmp_path, stage, world, weights(), BUFFERS, 4)
    source = open_checkpoint(tmp_path)
    check_tensors(source, weights())
    for name, one in BUFFERS.items():
        assert same_bits(read_full_tensor(source, f"model/{name}"), one)
    assert source.form == "deepspeed" and source.manifest.step == 4 and source.left_out == ("lr_scheduler",)
    state = source.manifest.state["optimizer"]
    assert state["scalars"] == {"step": 4.0} and state["groups"][0]["weight_decay"] == 0.1


def test_an_export_for_deepspeed_is_a_universal_checkpoint_that_reads_back_the_same(tmp_path, capsys):
    write_zero(tmp_path / "zero", 2, 2, weights(), BUFFERS, 4)
    made, _ = import_checkpoint(tmp_path / "zero", tmp_path / "made")
    words = ["checkpoint", "export", str(made), "--to", str(tmp_path / "out"), "--form", "deepspeed"]
    assert main(words) == 0
    assert "(deepspeed): step 4, 6 weights, with the optimizer states exp_avg, exp_avg_sq" in capsys.readouterr().out
    tag = tmp_path / "out" / "global_step4_universal"
    assert (tmp_path / "out" / "latest_universal").read_text() == tag.name
    for name, one in weights().items():
        assert torch.equal(torch.load(tag / "zero" / name / "fp32.pt")["param"], one)
        assert torch.load(tag / "zero" / name / "step.pt") == 4
    source = open_checkpoint(tmp_path / "out")
    assert source.form == "deepspeed-universal"
    check_tensors(source, weights())
    assert source.manifest.state["optimizer"]["scalars"] == {"step": 4.0}


def test_flat_tensors_of_a_universal_checkpoint_get_their_shapes(tmp_path):
    """As ds_to_universal.py converts ZeRO 3: flat tensors, and the number of updates only in the common state."""
    write_zero(tmp_path / "zero", 3, 2, weights(), {}, 4)
    made, _ = import_checkpoint(tmp_path / "zero", tmp_path / "made")
    assert main(["checkpoint", "export", str(made), "--to", str(tmp_path / "out"), "--form", "deepspeed"]) == 0
    for file in (tmp_path / "out").glob("*/zero/*/*.pt"):
        content = torch.load(file)
        torch.save(content["param"].reshape(-1), file) if isinstance(content, dict) else file.unlink()
    source = open_checkpoint(tmp_path / "out")
    check_tensors(source, weights())
    assert source.manifest.state["optimizer"]["scalars"] == {"step": 4.0}


@pytest.mark.parametrize("distributed", [True, False])
def test_a_megatron_checkpoint_is_read_with_the_names_of_llama(tmp_path, distributed):
    expected = llama_weights()
    write_megatron(tmp_path, expected, heads=4, groups=2, step=6, padded=3, distributed=distributed)
    source = open_checkpoint(tmp_path)
    check_tensors(source, expected)
    assert source.form == "megatron" and source.manifest.step == 6 and source.weight_count == len(expected)
    assert source.manifest.state["optimizer"]["scalars"] == {"step": 6.0}
    assert source.left_out == ("opt_param_scheduler",)


def test_a_run_in_the_layout_of_megatron_goes_on_here_with_equal_losses(tmp_path):
    sizes = {"kind": "llama", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 32, "seq": 16}
    torch.manual_seed(0)
    model = build_reference_model(sizes)
    start = {name: one.detach().clone() for name, one in model.named_parameters()}
    batches = [{"input_ids": (ids := torch.randint(0, 32, (4, 16))), "labels": ids} for _ in range(5)]
    make = lambda given: torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1)
    optimizer, losses = make(model.parameters()), []
    for step, batch in enumerate(batches):
        if step == 3:
            names = {one: name for name, one in model.named_parameters()}
            moments: Any = {"exp_avg": {}, "exp_avg_sq": {}}
            for one, state in optimizer.state.items():
                for kind, found in moments.items():
                    found[names[one]] = state[kind].clone()
            weights = {name: one.detach().clone() for name, one in model.named_parameters()}
            write_megatron(tmp_path, weights, heads=4, groups=2, step=3, moments=moments)
        optimizer.zero_grad()
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(start[name])
    trainer = parallelize(model, make, "dp1", precision="fp32")
    assert trainer.load(tmp_path)["options"] == {}
    other = parallelize(
        build_reference_model(sizes), lambda given: torch.optim.AdamW(given, weight_decay=0.2), "dp1", precision="fp32"
    )
    assert other.load(tmp_path)["options"]["weight_decay"][:2] == ("0.1", "0.2")
    found = [trainer.step(batch).loss for batch in batches[trainer.steps :]]
    assert max(abs(a / b - 1) for a, b in zip(found, losses[3:], strict=True)) <= 1e-6


def test_a_run_begun_here_is_written_for_megatron_and_goes_on(tmp_path, capsys):
    sizes = {"kind": "llama", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 32, "seq": 16}
    batches = [{"input_ids": (ids := torch.randint(0, 32, (4, 16))), "labels": ids} for _ in range(5)]
    make = lambda given: torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1)
    trainer = parallelize(build_reference_model(sizes), make, "dp1", precision="fp32")
    for batch in batches[:3]:
        trainer.step(batch)
    trainer.save(tmp_path / "saved")
    (tmp_path / "config.json").write_text(json.dumps(hf_template(sizes).config))
    command = ["checkpoint", "export", str(tmp_path / "saved"), "--to", str(tmp_path / "out"), "--form", "megatron"]
    assert main(command) == 2
    assert "needs num_hidden_layers of the model: pass the config.json of a Llama" in capsys.readouterr().err
    assert main([*command, "--config", str(tmp_path / "config.json")]) == 0
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (
        json.loads((tmp_path / "out" / "iter_0000003" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    )
    source = open_checkpoint(tmp_path / "out")
    assert source.form == "megatron" and source.manifest.state["optimizer"]["scalars"] == {"step": 3.0}
    made = open_checkpoint(tmp_path / "saved")
    for name in source.manifest.tensors:
        assert same_bits(read_full_tensor(source, name), read_full_tensor(made, name)), name
    assert len(source.manifest.tensors) == 3 * len(trainer.full_state_dict())
    other = parallelize(build_reference_model(sizes), make, "dp1", precision="fp32")
    assert other.load(tmp_path / "out")["options"] == {}
    assert [other.step(batch).loss for batch in batches[3:]] == [trainer.step(batch).loss for batch in batches[3:]]


def test_a_model_that_is_not_a_llama_is_not_written_for_megatron(tmp_path):
    write_zero(tmp_path / "zero", 2, 2, weights(), {}, 4)
    made, _ = import_checkpoint(tmp_path / "zero", tmp_path / "made")
    sizes = dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size"), 4
    )
    with pytest.raises(InputError, match=r"a\.\w+ is not a weight of Megatron's Llama"):
        export_checkpoint(made, tmp_path / "out", "megatron", config=sizes)
    assert not (tmp_path / "out").exists()
    llama = {name: one for name, one in llama_weights().items() if "layers.0.mlp.up_proj" not in name}
    write_zero(tmp_path / "llama", 2, 2, llama, {}, 4)
    made, _ = import_checkpoint(tmp_path / "llama", tmp_path / "made-llama")
    sizes |= {"num_hidden_layers": 2, "hidden_size": 16, "num_key_value_heads": 2}
    with pytest.raises(InputError, match=r"fuses model.layers.0.mlp.gate_proj.weight with .*up_proj.weight, which"):
        export_checkpoint(made, tmp_path / "out", "megatron", config=sizes)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize(
    ("tp", "pp"), [(1, 1), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((2, 1), (1, 2), (2, 2)))]
)
def test_megatron_core_continues_a_run_begun_here_and_back(tmp_path, tp, pp):
    sizes = {"kind": "llama", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 32, "seq": 16}
    batches = [{"input_ids": (ids := torch.randint(0, 32, (4, 16))), "labels": ids} for _ in range(7)]

    def make(given: Any) -> torch.optim.Optimizer:
        own = list(given)
        groups = [[one for one in own if one.ndim > 1], [one for one in own if one.ndim < 2]]
        decays = zip(groups, (0.1, 0.0), strict=True)
        return torch.optim.AdamW([{"params": each, "weight_decay": decay} for each, decay in decays], lr=1e-2)

    trainer = parallelize(build_reference_model(sizes), make, "dp1", precision="fp32")
    for batch in batches[:3]:
        trainer.step(batch)
    trainer.save(tmp_path / "saved")
    export_checkpoint(
        tmp_path / "saved" / "step-00000003", tmp_path / "out", "megatron", config=hf_template(sizes).config
    )
    torch.save([batch["input_ids"] for batch in batches[3:5]], tmp_path / "batches.pt")
    script = [sys.executable, str(Path(__file__).with_name("megatron_core_run.py")), str(tmp_path), str(tp), str(pp)]
    run = subprocess.run(script, stderr=subprocess.PIPE, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert max(abs(a / trainer.step(b).loss - 1) for a, b in zip(losses, batches[3:5], strict=True)) <= 1e-6
    other = parallelize(build_reference_model(sizes), make, "dp1", precision="fp32")
    other.load(tmp_path / "back")
    assert other.steps == 5
    for batch in batches[5:]:
        assert abs(other.step(batch).loss / trainer.step(batch).loss - 1) <= 1e-6


def test_every_form_is_imported_by_the_command(tmp_path, capsys):
    write_zero(tmp_path / "zero", 3, 2, weights(), BUFFERS, 4)
    write_megatron(tmp_path / "megatron", llama_weights(), heads=4, groups=2, step=6)
    for name, count in (("zero", 6), ("megatron", len(llama_weights()))):
        assert main(["checkpoint", "import", str(tmp_path / name), str(tmp_path / f"{name}-made"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["optimizer"] == ["exp_avg", "exp_avg_sq"] and Path(found["checkpoint"]).is_dir()
        assert len(list(iter_full_tensors(found["checkpoint"], "model/"))) == count
        assert main(["checkpoint", "import", str(tmp_path / name), str(tmp_path / f"{name}-made"), "--json"]) == 2
        assert "already exists; name another folder" in capsys.readouterr().err


# --- bad input


def zero(folder: Path, stage: int = 2) -> Path:
    return write_zero(folder, stage, 2, weights(), BUFFERS, 4)


def change(file: Path, edit: Any) -> None:
    content = torch.load(file, weights_only=False)
    edit(content)
    torch.save(content, file)


def lose_rank(folder: Path) -> None:
    (zero(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def add_rank(folder: Path) -> None:
    tag = zero(folder)
    data = (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").read_bytes()
    (tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(data)


def truncate(folder: Path) -> None:
    file = zero(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-200])


def other_shape(folder: Path) -> None:
    change(zero(folder) / "mp_rank_00_model_states.pt", lambda m: m["param_shapes"][0].update(c=torch.Size((9,))))


def execute(folder: Path) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {folder}/mark",)

    change(zero(folder) / "mp_rank_00_model_states.pt", lambda m: m.update(client=Call()))


def tensor_parallel(folder: Path) -> None:
    tag = zero(folder)
    (tag / "mp_rank_01_model_states.pt").write_bytes((tag / "mp_rank_00_model_states.pt").read_bytes())


def no_zero(folder: Path) -> None:
    tag = zero(folder)
    for file in tag.glob("*_optim_states.pt"):
        file.unlink()
    change(tag / "mp_rank_00_model_states.pt", lambda m: m.update(optimizer={"state": {0: {}}}))


def lost_tag(folder: Path) -> None:
    zero(folder)
    (folder / "latest").write_text("global_step9")


def no_arguments(folder: Path) -> None:
    (write_megatron(folder, llama_weights(), 4, 2, 6) / "common.pt").unlink()


def not_llama(folder: Path) -> None:
    target = write_megatron(folder, llama_weights(), 4, 2, 6)
    data = (target / ".metadata").read_bytes()
    (target / ".metadata").write_bytes(
        data.replace(b"decoder.final_layernorm.weight", b"decoder.final_layernorm.bias01")
    )


@pytest.mark.parametrize("form", ["zero", "megatron"])
def test_random_bytes_raise_nothing_but_input_errors(tmp_path, form):
    import random

    if form == "zero":
        file = zero(tmp_path) / "mp_rank_00_model_states.pt"
    else:
        file = write_megatron(tmp_path, llama_weights(1), 4, 2, 6) / "common.pt"
    data, generator, refused = file.read_bytes(), random.Random(3), 0
    start = data.index(b"data.pkl")
    for _ in range(150):
        spoiled = bytearray(data)
        for _ in range(3):
            spoiled[generator.randrange(start, start + 1500)] = generator.randrange(256)
        file.write_bytes(spoiled)
        try:
            open_checkpoint(tmp_path)
        except InputError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lose_rank, "optimizer states of 1 ranks are there, but 2 ranks saved; rank 1 is missing: copy the files"),
        (add_rank, "optimizer states of 3 ranks are there, but 2 ranks saved; copy the files of one save"),
        (truncate, "zero_pp_rank_1_mp_rank_00_optim_states.pt cannot be read:"),
        (other_shape, "the parts of c have 1 elements, its shape [9] has 9: files of different checkpoints are mixed"),
        (execute, "system, which is not among the classes of such a checkpoint: the file is refused"),
        (tensor_parallel, "is a tensor-, pipeline- or expert-parallel checkpoint of DeepSpeed"),
        (no_zero, "was saved without ZeRO: its optimizer states are numbered, not named"),
        (lost_tag, "latest names the folder global_step9, which does not exist"),
        (no_arguments, "does not state the number of attention heads: copy its file common.pt too"),
        (not_llama, "is not a tensor of Megatron's Llama"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(tmp_path, capsys, spoil, sentence):
    spoil(tmp_path / "in")
    assert main(["checkpoint", "import", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and sentence in err, err
    assert not (tmp_path / "in" / "mark").exists() and not (tmp_path / "out").exists()
