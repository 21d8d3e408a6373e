"""Checkpoints of other systems: nothing in them is executed, what is wrong is one line and exit code 2, and what is
exported reads back the same."""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_worlds import same_bits

from meshwright.checkpoint.formats.detect import import_checkpoint, open_checkpoint
from meshwright.checkpoint.formats.export import export_checkpoint
from meshwright.checkpoint.formats.inert_pickle import PickledRecord, load_tensors, read_inert_pickle
from meshwright.checkpoint.load import iter_full_tensors, read_full_tensor
from meshwright.checkpoint.save import save_checkpoint
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.cli.main import main
from meshwright.core.errors import InputError
from meshwright.runtime.host_process import malloc_trim
from meshwright.spec.layout import ShardMetadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPES = {"layers.0.weight": (6, 4), "layers.0.bias": (6,), "head.weight": (8, 6)}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def torch_state(step: int = 7) -> dict[str, Any]:
    """A state dict as torch.distributed.checkpoint.state_dict makes it."""
    state = {
        name: {"step": torch.tensor(float(step)), "exp_avg": one + 1, "exp_avg_sq": one.square()}
        for name, one in weights().items()
    }
    groups = [{"params": list(SHAPES), "lr": 1e-3, "betas": (0.9, 0.95)}]
    return {"model": weights(), "optimizer": {"state": state, "param_groups": groups}}


def saved(folder: Path, state: dict[str, Any] | None = None) -> Path:
    dcp.save(torch_state() if state is None else state, checkpoint_id=folder, no_dist=True)
    return folder


# --- pickles are data


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def marker(path: str) -> None:
    Path(path).touch()


def malicious(kind: str, mark: Path) -> bytes:
    """A pickle that would create the file `mark`."""
    if kind == "system":
        return pickle.dumps(Call(os.system, f"touch {mark}"))
    if kind == "eval":
        return pickle.dumps(Call(eval, f"open({str(mark)!r}, 'w')"))
    if kind == "exec in a list":
        return pickle.dumps({"a": [1, (Call(exec, f"open({str(mark)!r}, 'w')"),)]})
    if kind == "nested":
        return pickle.dumps(Call(getattr, Call(__import__, "os"), "system"))
    if kind == "getattr chain":  # getattr(getattr(os, "path"), "os").system, by dotted names of protocol 4
        return b"\x80\x04\x8c\x07os.path\x8c\x09os.system\x93\x8c\x05touch\x85R."
    if kind == "old protocol":
        return b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    if kind == "instance":
        return b"(S'touch " + str(mark).encode() + b"'\nios\nsystem\n."
    if kind == "copyreg":
        return b"ccopyreg\n_reconstructor\n(cos\nsystem\nc__builtin__\nobject\nNtR."
    raise AssertionError(kind)


MALICIOUS = (
    "system", "eval", "exec in a list", "nested", "getattr chain", "old protocol", "instance", "copyreg",
)  # fmt: skip


@pytest.mark.parametrize("kind", MALICIOUS)
@pytest.mark.parametrize("place", ["metadata", "value"])
def test_a_malicious_pickle_is_refused_with_its_name_and_nothing_runs(tmp_path, capsys, kind, place):
    folder, mark = saved(tmp_path / "dcp"), tmp_path / "mark"
    data = malicious(kind, mark)
    if place == "metadata":
        (folder / ".metadata").write_bytes(data)
    else:
        data = zip_pickle(data)
        file = folder / "__0_0.distcp"
        item = open_checkpoint(folder).tensors["model/head.weight"].ranges[0].read.args[1].item
        stored = bytearray(file.read_bytes())
        file.write_bytes(bytes(stored[: item.offset]) + data + bytes(stored[item.offset + item.length :]))
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.head.weight":
                info.length = len(data)
            elif info.offset > item.offset:
                info.offset += len(data) - item.length
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    names = ("os.system", "posix.system", "builtins.eval", "eval", "exec", "getattr", "os.path", "copyreg")
    assert any(name in err for name in names), err
    assert not mark.exists() and not list((tmp_path / "out").glob("step-*"))


def zip_pickle(data: bytes) -> bytes:
    """A file of torch.save with `data` as its pickle."""
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def test_allowed_names_become_records_that_cannot_be_called_or_changed(tmp_path):
    file = tmp_path / "a.pkl"
    size = torch.Size((2, 3))
    file.write_bytes(pickle.dumps({"size": size, "dtype": torch.float32}))
    found = read_inert_pickle(file, {"torch.Size", "torch.float32"})
    assert isinstance(found["size"], PickledRecord) and found["size"].values == ((2, 3),)
    assert found["dtype"].kind == "torch.float32" and not hasattr(torch.float32, "kind")
    # An allowed class whose state the pickle sets: the class of torch stays as it is.
    file.write_bytes(b"\x80\x02ctorch\nSize\nq\x00}q\x01X\x05\x00\x00\x00countq\x02K\x01sb.")
    with pytest.raises(InputError, match="cannot be read"):
        read_inert_pickle(file, {"torch.Size"})
    assert torch.Size((1, 1)).count(1) == 2


@pytest.mark.parametrize("cut", [0, 1, 7, 100, 0.5, 0.99])
def test_a_pickle_that_ends_early_is_one_line(tmp_path, cut):
    file = saved(tmp_path / "dcp") / ".metadata"
    data = file.read_bytes()
    file.write_bytes(data[: int(cut * len(data)) if isinstance(cut, float) else cut])
    with pytest.raises(InputError, match=r"\.metadata cannot be read: .*damaged or incomplete") as caught:
        open_checkpoint(file.parent)
    assert "\n" not in str(caught.value)


def test_random_bytes_in_the_metadata_raise_nothing_but_input_errors(tmp_path):
    import random

    folder = saved(tmp_path / "dcp")
    data, generator = (folder / ".metadata").read_bytes(), random.Random(5)
    refused = 0
    for _ in range(400):
        spoiled = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            spoiled[generator.randrange(len(spoiled))] = generator.randrange(256)
        (folder / ".metadata").write_bytes(spoiled)
        try:
            source = open_checkpoint(folder)
            for name in source.manifest.tensors:
                read_full_tensor(source, name)
        except InputError:
            refused += 1
    assert refused > 200


def test_a_file_of_torch_save_is_read_with_records_for_allowed_classes_only(tmp_path):
    torch.save({"step": 3, "shape": Path("x")}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"a\.pt names pathlib\..*refused and nothing of it was executed"):
        load_tensors(tmp_path / "a.pt", tmp_path / "a.pt")
    names = re.compile(r"pathlib\.\S*PosixPath")
    assert load_tensors(tmp_path / "a.pt", tmp_path / "a.pt", names)["shape"].values == ("x",)


# --- reading and writing


def test_a_dcp_checkpoint_is_imported_with_weights_states_and_step(tmp_path, capsys):
    state = {**torch_state(), "lr_scheduler": {"last_epoch": 7}}
    assert main(["checkpoint", "import", str(saved(tmp_path / "dcp", state)), str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert "is imported as" in out and "step 7, 3 weights, with the optimizer states exp_avg, exp_avg_sq" in out
    assert err == "not carried over: lr_scheduler.last_epoch\n"
    made = tmp_path / "out" / "step-00000007"
    assert verify_checkpoint(made) == []
    found = dict(iter_full_tensors(made, ""))
    for name, one in weights().items():
        assert same_bits(found[f"model/{name}"], one)
        assert same_bits(found[f"optimizer/exp_avg/{name}"], one + 1)
        assert same_bits(found[f"optimizer/exp_avg_sq/{name}"], one.square())


def test_an_export_reads_back_the_same_and_torch_loads_it(tmp_path, capsys):
    made, _ = import_checkpoint(saved(tmp_path / "dcp"), tmp_path / "out")
    assert main(["checkpoint", "export", str(made), "--to", str(tmp_path / "again"), "--form", "dcp"]) == 0
    assert "(dcp): step 7, 3 weights, with the optimizer states exp_avg, exp_avg_sq" in capsys.readouterr().out
    target = torch_state(0)
    for part in (target["model"], *target["optimizer"]["state"].values()):
        for tensor in part.values():
            tensor.fill_(-1)
    dcp.load(target, checkpoint_id=tmp_path / "again", no_dist=True)
    for name, one in weights().items():
        assert torch.equal(target["model"][name], one)
        assert torch.equal(target["optimizer"]["state"][name]["exp_avg"], one + 1)
        assert target["optimizer"]["state"][name]["step"] == 7
    back, _ = import_checkpoint(tmp_path / "again", tmp_path / "back")
    one, other = (json.loads((path / "manifest.json").read_text())["state"] for path in (made, back))
    assert one["optimizer"] == other["optimizer"] and one["run"] == other["run"]


def test_the_two_folders_of_accelerate_are_one_checkpoint(tmp_path):
    state = torch_state()
    saved(tmp_path / "in" / "pytorch_model_fsdp_0", {"model": state["model"]})
    saved(tmp_path / "in" / "optimizer_0", {"optimizer": state["optimizer"]})
    source = open_checkpoint(tmp_path / "in")
    assert source.manifest.step == 7 and source.weight_count == 3
    for name, one in weights().items():
        assert same_bits(read_full_tensor(source, f"model/{name}"), one)
        assert same_bits(read_full_tensor(source, f"optimizer/exp_avg/{name}"), one + 1)


def test_weights_alone_are_step_0_without_states(tmp_path, capsys):
    words = ["checkpoint", "import", str(saved(tmp_path / "dcp")), str(tmp_path / "out"), "--weights-only", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["optimizer"], found["form"]) == (0, [], "dcp")
    assert {name for name, _ in iter_full_tensors(found["checkpoint"], "")} == {f"model/{name}" for name in SHAPES}


def test_parameters_with_other_numbers_of_updates_retain_them(tmp_path):
    state = torch_state()
    state["optimizer"]["state"]["head.weight"]["step"] = torch.tensor(2.0)
    state["optimizer"]["state"]["layers.0.bias"]["step"] = 5
    saved_state = open_checkpoint(saved(tmp_path / "dcp", state)).manifest.state["optimizer"]
    assert saved_state["scalars"]["step"] in (7.0, 2.0, 5.0)
    assert len(saved_state["skipped"]) == 2


TENSORS, TENSOR_BYTES = 12, 8 * 2**20


def growth(work: Callable[[], Any]) -> int:
    """The bytes by which `work` raises the peak of this process's resident memory."""

    def resident(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))

    gc.collect()
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: freed tensors are unmapped at once
    malloc_trim()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def test_import_and_export_read_one_tensor_at_a_time(tmp_path):
    """In a fresh process the peak is 3 tensors for the import and 1 for the export, of the 12 of the checkpoint."""
    rows = TENSOR_BYTES // 4 // 64
    state = {"model": {f"w{at}": torch.full((rows, 64), float(at)) for at in range(TENSORS)}}
    folder = saved(tmp_path / "dcp", state)
    del state
    import_checkpoint(saved(tmp_path / "small"), tmp_path / "first")  # loads what the first use loads
    paths: list[Path] = []
    assert growth(lambda: paths.append(import_checkpoint(folder, tmp_path / "out")[0])) < 7 * TENSOR_BYTES
    assert growth(lambda: export_checkpoint(paths[0], tmp_path / "again", "dcp")) < 7 * TENSOR_BYTES


# --- bad input


def spoil_missing(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def spoil_truncated(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def spoil_swapped(folder: Path) -> None:
    other = saved(
        folder.with_name("other"), {**torch_state(), "model": {k: v.view(torch.int32) for k, v in weights().items()}}
    )
    data = (other / "__0_0.distcp").read_bytes()
    size = (folder / "__0_0.distcp").stat().st_size
    (folder / "__0_0.distcp").write_bytes(data.ljust(size, b"\0"))


def change(folder: Path, edit: Any) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def spoil_path(folder: Path) -> None:
    (folder.parent / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    change(folder, lambda m: [setattr(one, "relative_path", "../secret") for one in m.storage_data.values()])


def spoil_chunk(folder: Path) -> None:
    change(folder, lambda m: m.state_dict_metadata["model.head.weight"].chunks.clear())


def spoil_dtype(folder: Path) -> None:
    change(folder, lambda m: setattr(m.state_dict_metadata["model.head.weight"].properties, "dtype", torch.complex64))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_missing, "1 of 1 files are missing, the first is __0_0.distcp: copy the files of all ranks"),
        (spoil_truncated, "__0_0.distcp is truncated: it has"),
        (spoil_swapped, "of different checkpoints are mixed"),
        (spoil_path, "names the file '../secret', which is not a file of this folder"),
        (spoil_chunk, "head.weight: "),
        (spoil_dtype, "has dtype 'complex64'; supported are"),
    ],
)
def test_what_is_wrong_with_a_dcp_folder_is_one_line_and_nothing_is_written(tmp_path, capsys, spoil, sentence):
    folder = saved(tmp_path / "dcp")
    spoil(folder)
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and sentence in err
    assert not list((tmp_path / "out").glob("**/*.safetensors"))


def test_unclear_or_unnamed_contents_are_one_line(tmp_path, capsys):
    def line(state: dict[str, Any]) -> str:
        folder = saved(tmp_path / "dcp", state)
        assert main(["checkpoint", "import", str(folder), str(tmp_path / "out")]) == 2
        shutil.rmtree(folder)
        return capsys.readouterr().err

    assert "holds tensors below ema, net: which are the weights is unclear" in line(
        {"net": weights(), "ema": weights()}
    )
    numbered = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": []}
    assert "belongs to no weight" in line({"model": weights(), "optimizer": numbered})
    factored = {"state": {"head.weight": {"row_var": torch.zeros(8, 1)}}}
    assert "only elementwise states are read" in line({"model": weights(), "optimizer": factored})


def test_an_export_never_changes_a_folder_and_leaves_nothing_when_it_fails(tmp_path, capsys):
    made, _ = import_checkpoint(saved(tmp_path / "dcp"), tmp_path / "out")
    words = ["checkpoint", "export", str(made), "--form", "dcp", "--to"]
    before = (tmp_path / "dcp" / ".metadata").read_bytes()
    assert main([*words, str(tmp_path / "dcp")]) == 2
    assert "already exists; name a new one" in capsys.readouterr().err
    assert (tmp_path / "dcp" / ".metadata").read_bytes() == before
    file = made / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main([*words, str(tmp_path / "new")]) == 2
    assert "damaged" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "out"]
    assert main([*words, str(tmp_path / "new"), "--dtype", "bfloat16"]) == 2
    assert "belong to --form huggingface" in capsys.readouterr().err


def test_a_folder_without_a_known_form_is_one_line_and_a_run_folder_is_its_newest_checkpoint(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    assert main(["checkpoint", "import", str(tmp_path / "other"), str(tmp_path / "out")]) == 2
    assert "other' holds no checkpoint: manifest.json (Meshwright), .metadata (torch DCP" in capsys.readouterr().err
    with pytest.raises(InputError, match="holds no checkpoint: manifest"):
        open_checkpoint(tmp_path / "other")
    made, _ = import_checkpoint(saved(tmp_path / "dcp"), tmp_path / "run" / "checkpoints")
    assert main(["checkpoint", "import", str(made), str(tmp_path / "out")]) == 2
    assert "is a checkpoint of Meshwright already" in capsys.readouterr().err
    for path in (made, made.parent, tmp_path / "run"):
        assert open_checkpoint(path).path == made
    (made / "manifest.json").unlink()
    with pytest.raises(InputError, match="the checkpoint is incomplete"):
        open_checkpoint(made)


def test_states_that_are_not_elementwise_are_not_exported(tmp_path):
    pieces = [
        (ShardMetadata("model/w", (4, 4), "float32", None, (), 0, 16), torch.zeros(16)),
        (ShardMetadata("optimizer/row_var/w", (4, 1), "float32", None, (), 0, 4), torch.zeros(4)),
    ]
    path = save_checkpoint(tmp_path / "c", 1, pieces, {"optimizer": {"groups": [{}]}})
    with pytest.raises(InputError, match="row_var of w is not elementwise"):
        export_checkpoint(path, tmp_path / "new", "dcp")
    export_checkpoint(path, tmp_path / "new", "dcp", weights_only=True)
