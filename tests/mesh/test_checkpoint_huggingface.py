"""Hugging Face's form in and out: same bits, same model, only what is needed read, pickle never."""

from __future__ import annotations

import ast
import errno
import json
import os
import random
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import empty, layouts, random_tensor, same_bits, save_world
from safetensors.torch import load_file, save_file

import meshwright.checkpoint
from meshwright.checkpoint.formats.detect import import_checkpoint
from meshwright.checkpoint.hf_weights import load_weights
from meshwright.checkpoint.huggingface import export_weights
from meshwright.checkpoint.load import iter_full_tensors, load_checkpoint
from meshwright.checkpoint.reshard import slice_shard
from meshwright.checkpoint.save import save_checkpoint
from meshwright.core import storage
from meshwright.core.errors import InputError, MeshwrightError
from meshwright.spec.layout import ShardMetadata

CONFIG = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def _tensors():
    shapes = {"h.0.weight": (12, 8), "h.0.bias": (8,), "wte.weight": (20, 8), "h.1.weight": (4, 6, 4), "scale": ()}
    return {
        name: random_tensor(shape, "float32", index).nan_to_num(1.0, 2.0, 3.0)
        for index, (name, shape) in enumerate(shapes.items())
    }


def test_an_exported_model_is_read_by_transformers_and_computes_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    tensors = {f"model/{name}": tensor.detach() for name, tensor in model.named_parameters()}
    path = save_world(tmp_path / "run", 3, tensors, layouts(tensors, 4, random.Random(2)))
    export_weights(
        path, tmp_path / "out", model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, largest=20_000
    )
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)
    pieces = [piece for rank in layouts(tensors, 3, random.Random(3)) for piece in rank]
    wanted = empty(pieces)
    load_weights(tmp_path / "out", wanted)
    assert all(same_bits(tensor, slice_shard(tensors[piece.name], piece)) for piece, tensor in wanted)


def test_weights_fill_any_layout_from_a_file_a_folder_and_a_checkpoint(tmp_path):
    tensors = _tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    named = {f"model/{name}": tensor for name, tensor in tensors.items()}
    checkpoint, _ = import_checkpoint(tmp_path, tmp_path / "checkpoints")
    assert checkpoint.name == "step-00000000"
    assert all(same_bits(full, tensors[name]) for name, full in iter_full_tensors(checkpoint))
    for seed, source in enumerate((tmp_path / "model.safetensors", tmp_path, checkpoint)):
        for pieces in layouts(named, 4, random.Random(seed)):
            wanted = empty(pieces)
            load_weights(source, wanted)
            assert all(same_bits(tensor, slice_shard(named[piece.name], piece)) for piece, tensor in wanted)


def test_weights_are_converted_to_the_type_of_the_wanted_tensor(tmp_path):
    weight = torch.randn(6, 4).to(torch.bfloat16)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    target = torch.zeros(12)
    load_weights(tmp_path, [(ShardMetadata("model/w", (6, 4), "float32", 1, ((2, 4),), 0, 12), target)])
    assert torch.equal(target.view(6, 2), weight[:, 2:].float())


def test_a_leading_part_of_a_name_more_or_less_is_the_same_tensor(tmp_path):
    save_file({"h.0.weight": torch.ones(2), "model.norm": torch.zeros(2)}, tmp_path / "model.safetensors")
    for name in ("transformer.h.0.weight", "h.0.weight"):
        target = torch.zeros(2)
        load_weights(tmp_path, [(ShardMetadata(f"model/{name}", (2,), "float32", None, (), 0, 2), target)])
        assert target.tolist() == [1, 1]
    target = torch.ones(2)
    load_weights(tmp_path, [(ShardMetadata("model/norm", (2,), "float32", None, (), 0, 2), target)])
    assert target.tolist() == [0, 0]


def test_export_rounds_floating_point_weights_alone_and_leaves_the_optimizer_out(tmp_path):
    held = {"model/w": torch.randn(4, 4), "model/steps": torch.tensor([3]), "optimizer/exp_avg/w": torch.randn(4, 4)}
    path = save_world(
        tmp_path / "run", 1, held, layouts(held, 2, random.Random(1)), local={"random": torch.get_rng_state()}
    )
    files = export_weights(path, tmp_path / "out", {"model_type": "llama"}, dtype="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert same_bits(found["w"], held["model/w"].to(torch.bfloat16)) and same_bits(found["steps"], held["model/steps"])
    assert set(found) == {"w", "steps"} and [file.name for file in files] == ["model.safetensors", "config.json"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_a_damaged_checkpoint_exports_nothing(tmp_path):
    held = {"model/w": torch.randn(400)}
    path = save_world(tmp_path / "run", 1, held, layouts(held, 1, random.Random(1)))
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="model/w"):
        export_weights(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_finds_no_room_leaves_what_was_there(tmp_path, monkeypatch):
    held = {"model/w": torch.randn(400)}
    path = save_world(tmp_path / "run", 1, held, layouts(held, 1, random.Random(1)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("before")
    for free in (100, 10**9):  # said before, and by the disk itself
        monkeypatch.setattr(storage, "free_bytes", lambda _, free=free: free)
        monkeypatch.setattr(storage, "write_file", refused)
        with pytest.raises(MeshwrightError, match="; nothing is exported") as caught:
            export_weights(path, tmp_path / "out", {})
        assert caught.value.exit_code == 1
        assert [(file.name, file.read_text()) for file in (tmp_path / "out").iterdir()] == [("config.json", "before")]


def refused(path, blocks, durable=True):
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: None, "holds no safetensors file$"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"),
            "pytorch_model.bin is pickle and is not read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 20), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot be read"),
        (lambda folder: save_file({"v": torch.ones(4)}, folder / "model.safetensors"), "has no tensor 'w'"),
        (lambda folder: save_file({"w": torch.ones(5)}, folder / "model.safetensors"),
            r"shape \[5\], this model's w is \[4\]"),
        (lambda folder: _index(folder, {"w": "../secret.safetensors"}), "must name safetensors files beside it"),
        (lambda folder: _index(folder, {"w": "gone.safetensors"}), "gone.safetensors cannot be read"),
        (lambda folder: _index(folder, [1]), "must name safetensors files beside it"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_read_are_one_sentence(tmp_path, make, sentence):
    make(tmp_path)
    with pytest.raises(InputError, match=sentence) as caught:
        load_weights(tmp_path, [(ShardMetadata("model/w", (4,), "float32", None, (), 0, 4), torch.zeros(4))])
    assert "\n" not in str(caught.value)


def _index(folder, weights):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def test_export_does_not_write_over_weights_nor_without_any(tmp_path):
    path = save_checkpoint(
        tmp_path, 1, [(ShardMetadata("model/w", (4,), "float32", None, (), 0, 4), torch.ones(4))], {}
    )
    export_weights(path, tmp_path / "out")
    with pytest.raises(InputError, match="already holds weights"):
        export_weights(path, tmp_path / "out")
    with pytest.raises(InputError, match="has no model weights"):
        export_weights(save_checkpoint(tmp_path, 2, [], {}), tmp_path / "other")
    with pytest.raises(InputError, match="not a floating-point type"):
        export_weights(path, tmp_path / "other", dtype="int8")


def test_nothing_in_the_room_unpickles():
    """Neither by name nor by torch.load, whose `weights_only` was passed twice (CVE-2025-32434, CVE-2026-24747)."""
    for file in Path(meshwright.checkpoint.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {
                    name.partition(".")[0] for name in names
                }, file
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in ("load", "save"), file


def test_a_planted_pickle_in_a_checkpoint_does_not_run(tmp_path):
    path = save_checkpoint(
        tmp_path / "run", 1, [(ShardMetadata("model/w", (4,), "float32", None, (), 0, 4), torch.ones(4))], {}
    )
    planted = f"cposix\nsystem\n(S'touch {tmp_path / 'ran'}'\ntR.".encode()
    for name in (".metadata", "rank-00000.safetensors", "manifest.json", "model.pt"):
        (path / name).write_bytes(planted)
    with pytest.raises(InputError):
        load_checkpoint(path, [])
    with pytest.raises(InputError):
        load_weights(path, [])
    assert not (tmp_path / "ran").exists()
