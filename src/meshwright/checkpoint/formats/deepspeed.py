"""Reads and writes DeepSpeed checkpoints: the ZeRO form of stages 1 to 3, and the universal form.

A checkpoint folder has a file `latest` (or `latest_universal`) with the name of the newest subfolder.

The ZeRO form has one file `[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt` for each data-parallel rank R, and files
`..._model_states.pt`. At stages 1 and 2, `param_slice_mappings` states for each rank which elements of its flat
partition belong to which parameter; the parts of a parameter on consecutive ranks are consecutive. At stage 3 a
parameter is padded to a multiple of the number of ranks and divided equally; rank R has the R-th part of each
parameter, in the order of `param_shapes`. Files are mapped into memory, so only elements that are used are read.

The universal form has a folder `zero/PARAMETER` for each parameter, with the full tensors `fp32.pt`, `exp_avg.pt`, ...
and the number of updates, `step.pt`. DeepSpeed loads this form for any number of ranks and any ZeRO stage, so exports
use it.

Sources: deepspeedai/DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`), runtime/engine.py
(`_common_checkpoint_state`), utils/zero_to_fp32.py, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.formats.inert_pickle import PickledRecord, load_tensors
from meshwright.checkpoint.formats.source import (
    STEP_KEY,
    ForeignState,
    ForeignTensor,
    StoredRange,
    check_dtype,
    full_range,
)
from meshwright.checkpoint.formats.torch_state import TorchState, save_durably
from meshwright.checkpoint.safetensors_writer import dtype_name
from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

LATEST_FILES = ("latest", "latest_universal")
CLASSES = re.compile(r"deepspeed\.[\w.]+|megatron\.[\w.]+|argparse\.Namespace")
"""The classes, other than those of tensors, that files of DeepSpeed contain. All become inert records."""
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_TAG = re.compile(r"[A-Za-z0-9_.-]+")
FP32_KIND = "fp32"
VERSION = "0.19.8"
"""The version of DeepSpeed whose form an export has."""


class _FlatPart(NamedTuple):
    """Elements [start, start + numel) of a flat tensor: a part of a parameter."""

    flat: torch.Tensor
    start: int
    numel: int

    def read(self) -> torch.Tensor:
        """Returns the elements."""
        return self.flat.narrow(0, self.start, self.numel)


def deepspeed_folder(path: Path) -> Path | None:
    """Returns the folder of the DeepSpeed checkpoint at `path`: `path` itself, or the subfolder that its file `latest`
    names. Returns None if `path` has no DeepSpeed checkpoint.

    Raises:
        InputError: the file `latest` names a folder that does not exist.
    """
    if any(_MODEL_FILE.fullmatch(file.name) for file in path.glob("*_model_states.pt")):
        return path
    for name in LATEST_FILES:
        if (path / name).is_file():
            tag = (path / name).read_text(errors="replace").strip()
            if _TAG.fullmatch(tag) and any((path / tag).glob("*_model_states.pt")):
                return path / tag
            if _TAG.fullmatch(tag) and not (path / tag).is_dir() and any(path.glob("*/*_model_states.pt")):
                raise InputError(
                    Message("{path} names the folder {tag}, which does not exist; name one of the checkpoints",
                        path=path / name, tag=tag)
                )  # fmt: skip
    return None


def read_deepspeed(path: Path, weights_only: bool = False) -> ForeignState:
    """Returns the content of the DeepSpeed checkpoint in the folder `path`, of the ZeRO or the universal form. With
    `weights_only`, optimizer states may be left out.

    Raises:
        InputError: a file is missing, damaged or unsafe, or the checkpoint is tensor- or pipeline-parallel.
    """
    files = [(file, match) for file in sorted(path.iterdir()) if (match := _MODEL_FILE.fullmatch(file.name))]
    others = [file.name for file in path.iterdir() if re.match(r"layer_|expp_rank_", file.name)]
    if others or {match[2] for _, match in files} != {"00"}:
        raise InputError(
            Message(
                "{path} is a tensor-, pipeline- or expert-parallel checkpoint of DeepSpeed ({file}): convert it with "
                "deepspeed/checkpoint/ds_to_universal.py first, then import the result",
                path=path, file=next(iter(others), files[-1][0].name),
            )
        )  # fmt: skip
    model = [_load(file) for file, _ in sorted(files, key=lambda found: int(found[1][1] or 0))]
    return _read_universal(path, model) if (path / "zero").is_dir() else _read_zero(path, model, weights_only)


def _load(file: Path) -> Any:
    return load_tensors(file, file, CLASSES, mmap=zipfile.is_zipfile(file))


def _read_zero(path: Path, model: Sequence[Any], weights_only: bool) -> ForeignState:
    found = {int(match[1]): file for file in path.iterdir() if (match := _OPTIMIZER_FILE.fullmatch(file.name))}
    world = int(model[0]["dp_world_size"])
    if not found:
        return _without_states(path, model[0], weights_only)
    missing = sorted(set(range(world)) - found.keys())
    if missing or len(found) > world:
        raise InputError(
            Message(
                "{path}: optimizer states of {count} ranks are there, but {world} ranks saved; {missing}copy the files "
                "of one save of all ranks",
                path=path, count=len(found), world=world,
                missing=Message("rank {rank} is missing: ", rank=missing[0]) if missing else "",
            )
        )  # fmt: skip
    states = [_load(found[rank])["optimizer_state_dict"] for rank in range(world)]
    stage = states[0].get("zero_stage", 1)
    stage = int(stage.values[0]) if isinstance(stage, PickledRecord) else int(stage)
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model[0]["param_shapes"]]
    parts = _stage3_parts(states, shapes) if stage == 3 else _partition_parts(path, states)
    base = [state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] for state in states]
    if not isinstance(base[0], dict):
        raise InputError(
            Message("{path} was saved with elastic_checkpoint: convert it with ds_to_universal.py first", path=path)
        )
    weights: dict[str, ForeignTensor] = {}
    optimizer: dict[str, dict[str, ForeignTensor]] = {}
    for name, kinds in parts.items():
        shape = next(group[name] for group in shapes if name in group)
        for kind, each in kinds.items():
            target = weights if kind == FP32_KIND else optimizer.setdefault(kind, {})
            target[name] = _joined(path, name, shape, each)
    groups = [{**base[0]["param_groups"][0], "params": list(parts)}] if len(base[0]["param_groups"]) == 1 else []
    if len(groups) != 1 and stage != 3:
        groups = [{**one, "params": list(shapes[at])} for at, one in enumerate(base[0]["param_groups"])]
    updates = _updates(base[0])
    steps = dict.fromkeys(parts, updates) if optimizer else {}
    weights |= _module_tensors(path, model, weights, stage)
    return ForeignState("deepspeed", weights, optimizer, steps, int(model[0]["global_steps"]), groups, _left_out(model))


def _updates(base: Mapping[str, Any]) -> float:
    """Returns the number of updates that the optimizer state `base` records."""
    places = [*base["state"].values(), *base["param_groups"]]
    return float(next((one[STEP_KEY] for one in places if STEP_KEY in one), 0))


def _partition_parts(path: Path, states: Sequence[Any]) -> dict[str, dict[str, list[_FlatPart]]]:
    """Returns the parts of each parameter at ZeRO 1 and 2, in order, by parameter and kind of state."""
    parts: dict[str, dict[str, list[_FlatPart]]] = {}
    if any("param_slice_mappings" not in state for state in states):
        raise InputError(
            Message(
                "{path} was saved by a version of DeepSpeed before 0.7, which does not state where a parameter is: "
                "save it again with a newer version", path=path)
        )  # fmt: skip
    for state in states:
        for at, mapping in enumerate(state["param_slice_mappings"]):
            flats = {FP32_KIND: state["single_partition_of_fp32_groups"][at]} | _flat_states(
                state["base_optimizer_state"], at
            )
            for name, address in mapping.items():
                start, numel = address.fields["start"], address.fields["numel"]
                for kind, flat in flats.items():
                    parts.setdefault(name, {}).setdefault(kind, []).append(_FlatPart(flat, start, numel))
    return parts


def _stage3_parts(
    states: Sequence[Any], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> dict[str, dict[str, list[_FlatPart]]]:
    """Returns the parts of each parameter at ZeRO 3, in order, by parameter and kind of state."""
    parts: dict[str, dict[str, list[_FlatPart]]] = {}
    for rank, state in enumerate(states):
        for at, group in enumerate(shapes):
            flats = {FP32_KIND: state["fp32_flat_groups"][at]} | _flat_states(state["optimizer_state_dict"], at)
            offset = 0
            for name, shape in group.items():
                numel = math.prod(shape)
                share = -(-numel // len(states))
                mine = max(0, min(share, numel - rank * share))
                for kind, flat in flats.items():
                    parts.setdefault(name, {}).setdefault(kind, []).append(_FlatPart(flat, offset, mine))
                offset += share
    return parts


def _flat_states(base: Any, at: int) -> dict[str, torch.Tensor]:
    """Returns the elementwise states of the flat parameter `at` of the optimizer state `base`, by kind."""
    state = base["state"].get(at, {}) if isinstance(base, dict) else {}
    return {
        kind: one for kind, one in state.items() if isinstance(one, torch.Tensor) and one.dim() and kind != STEP_KEY
    }


def _joined(path: Path, name: str, shape: tuple[int, ...], parts: Sequence[_FlatPart]) -> ForeignTensor:
    """Returns the tensor whose flattened elements are those of `parts`, one after another."""
    ranges = []
    at = 0
    for part in parts:
        if part.start + part.numel > part.flat.numel():
            raise InputError(
                Message(
                    "{path}: elements {start} to {stop} of a partition belong to {name}, but it has {count}: files of "
                    "different checkpoints are mixed",
                    path=path, start=part.start, stop=part.start + part.numel, name=name, count=part.flat.numel(),
                )
            )  # fmt: skip
        if part.numel:
            ranges.append(StoredRange(at, at + part.numel, part.read))
        at += part.numel
    if at != math.prod(shape):
        raise InputError(
            Message("{path}: the parts of {name} have {count} elements, its shape {shape} has {numel}: files of "
                "different checkpoints are mixed",
                path=path, name=name, count=at, shape=list(shape), numel=math.prod(shape))
        )  # fmt: skip
    return ForeignTensor(shape, check_dtype(path, name, dtype_name(parts[0].flat.dtype)), tuple(ranges))


def _module_tensors(
    path: Path, model: Sequence[Any], weights: Mapping[str, Any], stage: int
) -> dict[str, ForeignTensor]:
    """Returns the buffers and the frozen parameters, which have no optimizer states."""
    first = model[0]
    module = first["module"] or {}
    found = {name: _whole(path, name, module[name]) for name in first["buffer_names"] if name in module}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [one["frozen_param_fragments"][name].reshape(-1) for one in (model if stage == 3 else model[:1])]
        numel, share = math.prod(shape), parts[0].numel()
        cut = [_FlatPart(one, 0, max(0, min(share, numel - at * share))) for at, one in enumerate(parts)]
        found[name] = _joined(path, name, tuple(shape), cut)
    return {name: one for name, one in found.items() if name not in weights}


def _whole(path: Path, name: str, tensor: torch.Tensor) -> ForeignTensor:
    shape = tuple(tensor.shape)
    return ForeignTensor(
        shape, check_dtype(path, name, dtype_name(tensor.dtype)), full_range(shape, lambda: tensor.detach())
    )


def _without_states(path: Path, model: Any, weights_only: bool) -> ForeignState:
    """Returns the weights of a checkpoint without ZeRO."""
    if model.get("optimizer") and not weights_only:
        raise InputError(
            Message(
                "{path} was saved without ZeRO: its optimizer states are numbered, not named; save it with ZeRO stage "
                "1, or import its weights alone with --weights-only",
                path=path,
            )
        )
    weights = {name: _whole(path, name, tensor) for name, tensor in model["module"].items()}
    return ForeignState("deepspeed", weights, {}, {}, int(model["global_steps"]), (), _left_out([model]))


def _left_out(model: Sequence[Any]) -> list[str]:
    """Returns the names of states of the training loop that are not carried over."""
    return [name for name in ("lr_scheduler", "data_sampler", "random_ltd") if model[0].get(name) is not None]


def _read_universal(path: Path, model: Sequence[Any]) -> ForeignState:
    weights: dict[str, ForeignTensor] = {}
    optimizer: dict[str, dict[str, ForeignTensor]] = {}
    steps: dict[str, float] = {}
    buffers = _module_tensors(path, model, {}, 1)
    shapes = {name: tuple(shape) for group in model[0].get("param_shapes") or () for name, shape in group.items()}
    for folder in sorted(one for one in (path / "zero").iterdir() if one.is_dir() and one.name not in buffers):
        for file in sorted(folder.glob("*.pt")):
            content = _load(file)
            if file.stem == STEP_KEY:
                steps[folder.name] = float(content)
                continue
            tensor = content["param"] if isinstance(content, dict) else content
            target = weights if file.stem == FP32_KIND else optimizer.setdefault(file.stem, {})
            shape = shapes.get(folder.name, ())  # a tensor that was converted from ZeRO 3 is flat
            shape = shape if math.prod(shape) == tensor.numel() else tuple(tensor.shape)
            dtype = check_dtype(path, folder.name, dtype_name(tensor.dtype))
            read = partial(_read_universal_tensor, file)
            target[folder.name] = ForeignTensor(shape, dtype, full_range(shape, read))
        if folder.name not in weights:
            raise InputError(Message("{path} has no file fp32.pt: copy the folder again", path=folder))
    states = {name for kind in optimizer.values() for name in kind}
    common = path / "zero" / "optimizer_state.pt"
    base = _load(common) if common.is_file() else {}
    groups = base.get("param_groups", [])
    updates = _updates({"state": {}, "param_groups": groups, **base.get("optimizer_state_dict", {})})
    named = [{**groups[0], "params": list(weights)}] if len(groups) == 1 else []
    step = int(model[0]["global_steps"])
    steps = {name: steps.get(name, updates or float(step)) for name in states}
    return ForeignState("deepspeed-universal", weights | buffers, optimizer, steps, step, named, _left_out(model))


def _read_universal_tensor(file: Path) -> torch.Tensor:
    content = _load(file)
    tensor: torch.Tensor = content["param"] if isinstance(content, dict) else content
    return tensor


def write_deepspeed(content: TorchState, folder: Path) -> None:
    """Writes `content` as a universal checkpoint into the new folder `folder`. DeepSpeed loads it at ZeRO 1 to 3 if its
    configuration has `"checkpoint": {"load_universal": true}`.

    Raises:
        InputError: the parameters have had different numbers of updates, which DeepSpeed cannot express.
    """
    steps = {scalars[STEP_KEY] for scalars in content.scalars.values() if STEP_KEY in scalars}
    if len(steps) > 1:
        raise InputError(
            Message(
                "the parameters have had from {least:.0f} to {most:.0f} updates, but DeepSpeed has one number for all; "
                "export the weights alone with --weights-only",
                least=min(steps),
                most=max(steps),
            )
        )
    step = int(next(iter(steps), content.step))
    target = folder / f"global_step{content.step}_universal"
    for name, tensor in content.weights.items():
        if name not in content.buffers:
            save_durably(target / "zero" / name / "fp32.pt", {"param": tensor.read().float()})
    for name, kinds in content.states.items():
        for kind, tensor in kinds.items():
            save_durably(target / "zero" / name / f"{kind}.pt", {"param": tensor.read()})
        save_durably(target / "zero" / name / f"{STEP_KEY}.pt", torch.tensor(float(step)))  # as torch.optim stores it
    groups = [{**group, "params": [at], STEP_KEY: step} for at, group in enumerate(content.groups)]
    updates = {at: {STEP_KEY: torch.tensor(float(step))} for at in range(max(1, len(groups)))}
    base = {"state": updates, "param_groups": groups}
    common = {"param_groups": groups, "optimizer_state_dict": base, "ds_version": VERSION}
    save_durably(target / "zero" / "optimizer_state.pt", common)
    model = {
        "module": {name: content.weights[name].read() for name in sorted(content.buffers)},
        "buffer_names": sorted(content.buffers),
        "optimizer": None,
        "param_shapes": [{name: torch.Size(content.weights[name].shape) for name in content.states}],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": content.step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        save_durably(target / name, model)
    storage.write_file(folder / "latest_universal", [target.name.encode()])
