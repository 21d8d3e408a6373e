"""Records training steps of any loop: `with meshwright.recording("trace/", model, steps=2):`.

The recorder adds hooks to the model and observes the functions of intercept.py. It computes a digest of every module
output and of its gradient, and of every gradient and weight. At the end it writes one file for each rank.

Guarantees: a recording changes no number of the training and adds no communication between ranks. After the last
requested step and outside of the context, no hook and no replaced function is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.core.errors import InputError
from meshwright.core.gloo_exit import wait_for_gloo_at_exit
from meshwright.core.messages import Message
from meshwright.core.version import __version__
from meshwright.interop.recording.engines import describe_engine
from meshwright.interop.recording.intercept import observe
from meshwright.interop.recording.layout import (
    LocalPart,
    dtensor_region,
    local_tensor,
    named_modules,
    sharded_by,
    unwrap,
    user_class,
)
from meshwright.interop.recording.sequence import SequenceShard, recorded_sequence, refuse_context_parallel
from meshwright.interop.recording.trace_format import FORMAT_VERSION, TraceHeader
from meshwright.interop.recording.trace_writer import TraceWriter
from meshwright.interop.recording.tree import encode_tree, first_tensor


@contextmanager
def recording(
    folder: str | Path,
    model: nn.Module | Sequence[nn.Module],
    steps: int = 2,
    *,
    tensors: bool = False,
    shards: Mapping[str, int] | None = None,
    group: Any = None,
    names: Callable[[str], str] | None = None,
    sequence: SequenceShard | None = None,
) -> Iterator[StepRecorder]:
    """Records the next `steps` optimizer steps of a training loop into `folder`, one file for each rank.

    `model` is the model that the loop calls, wrapped (DDP, FSDP, DeepSpeed) or not; several stages of one rank are
    given as a list. `tensors` also stores the weights before every step. `shards` maps patterns of parameter names to
    the dimension in which plain tensors are sharded over `group` (default: all ranks); DTensor, FSDP, DeepSpeed and
    Megatron-Core parameters describe themselves. `sequence` states which part of the sequence of each micro-batch this
    rank has under context parallelism. `names` maps the names of a pipeline stage to those of the full model.

    The context yields the recorder, whose `batch(**tensors)` adds entries that the model does not receive, such as
    labels.

    Raises: InputError if `folder` cannot be written or `shards` does not fit.
    """
    if steps < 1:
        raise InputError(Message("recording: steps is {steps}; record at least one step", steps=steps))
    modules = [model] if isinstance(model, nn.Module) else list(model)
    recorder = StepRecorder(Path(folder), modules, steps, tensors, names or (lambda name: name))
    recorder.begin(shards, group, sequence)
    if dist.is_initialized():
        wait_for_gloo_at_exit()
    try:
        yield recorder
    finally:
        recorder.close()


@dataclass
class OpenMicroBatch:
    """The micro-batch that is being recorded, as the entries of a RecordedMicroBatch."""

    entries: dict[str, Any]
    calls: dict[str, int] = field(default_factory=dict)


@dataclass
class OpenStep:
    """The step that is being recorded: its micro-batches, its entries, and the digests and numbers of the step."""

    micro_batches: list[OpenMicroBatch] = field(default_factory=list)
    entries: dict[str, Any] = field(default_factory=dict)
    forwards: list[int] = field(default_factory=list)
    stepped: bool = False
    clipped: bool = False


class StepRecorder:
    """The open recording of one rank. Use it through `recording`."""

    def __init__(
        self, folder: Path, models: list[nn.Module], wanted: int, tensors: bool, names: Callable[[str], str]
    ) -> None:
        self.folder, self.models, self.wanted, self.stores_weights, self.names = folder, models, wanted, tensors, names
        self.writer = TraceWriter()
        self.parts: list[LocalPart] = []
        self.header: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.now = OpenStep(forwards=[0] * len(models))
        self.extra: dict[str, Any] = {}
        self.inside: OpenMicroBatch | None = None
        self.pending: list[dict[str, Any]] = []
        self.paused = False
        self.stack = ExitStack()

    # --- begin and end ----------------------------------------------------------------------------

    def begin(self, shards: Mapping[str, int] | None, group: Any, sequence: SequenceShard | None) -> None:
        """Stores the weights, and installs hooks."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                Message("recording {folder}: {reason}; name another folder", folder=self.folder, reason=error.strerror)
            ) from None
        by = sharded_by(shards, group)
        engine = describe_engine(self.models, by)
        self.parts = [part._replace(name=self.names(part.name)) for part in engine.parts]
        self.optimizer_names = engine.optimizer_names
        first = unwrap(self.models[0])
        self.header = {
            "format": FORMAT_VERSION,
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "world": dist.get_world_size() if dist.is_initialized() else 1,
            "wanted": self.wanted,
            "model": f"{(kind := user_class(first)).__module__}.{kind.__qualname__}",
            "engine": engine.name,
            "replica": engine.replica,
            "peers": engine.peers,
            "sequence": recorded_sequence(sequence),
            "clip": engine.clip,
            "config": _config_of(first),
            "versions": {"meshwright": __version__, "torch": torch.__version__, **engine.versions},
            "tf32": torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest",
            "device": str(next((p.device.type for m in self.models for p in m.parameters()), "cpu")),
            "pieces": [self._piece(part, at) for at, part in enumerate(self.parts)],
            "aliases": tied_names(self.models, self.names),
            "buffers": {
                self.names(name): self.writer.store(f"buffers/{self.names(name)}", buffer)
                for each in self.models
                for name, buffer in unwrap(each).named_buffers()
            },
        }
        self.stack.enter_context(observe(self))
        for root, model in enumerate(self.models):
            self._hook_root(root, model)
            for path, module in named_modules(unwrap(model)):
                handle = module.register_forward_hook(self._output_hook(self.names(path)))
                self.stack.callback(handle.remove)

    def _hook_root(self, root: int, model: nn.Module) -> None:
        handles = (
            model.register_forward_pre_hook(
                lambda _, args, kwargs: self._forward_begins(root, args, kwargs), prepend=True, with_kwargs=True
            ),
            model.register_forward_hook(lambda _, args, output: self._forward_ends(output)),
        )
        for handle in handles:
            self.stack.callback(handle.remove)

    def close(self) -> None:
        """Removes all hooks and writes the file of this rank, once."""
        if not self.header:
            return
        if self.now.stepped and len(self.steps) < self.wanted:
            self._finish_step()
        self.stack.close()
        self.writer.write(self.folder, TraceHeader.model_validate({**self.header, "steps": self.steps}))
        self.header = {}

    def batch(self, **entries: Any) -> None:
        """Adds entries to the batch of the next forward of the model, such as `labels`. The loss function of the
        comparison receives them."""
        self.extra.update(entries)

    # --- weights ----------------------------------------------------------------------------------

    def _piece(self, part: LocalPart, at: int) -> dict[str, Any]:
        data = part.data()
        entry = {"name": part.name, "region": part.region.model_dump(), "before": -1, "trains": part.trains}
        if data is None:
            return {**entry, "dtype": ""}
        if part.stored:
            entry["stored"] = self.writer.store(f"weights/0/{at}", data)
        dims = [dim for dim, size in enumerate(data.shape) if size > 1]
        same = not dims or any(bool((data == data.narrow(dim, 0, 1)).all()) for dim in dims)
        return {
            **entry,
            "dtype": str(data.dtype).removeprefix("torch."),
            "before": self.writer.row(data),
            "constant": same,
        }

    # --- forward and backward ---------------------------------------------------------------------

    def _forward_begins(self, root: int, args: Any, kwargs: Any) -> None:
        if self.paused or not torch.is_grad_enabled():
            return
        refuse_context_parallel(self.header["sequence"] is not None)
        if self.now.stepped:
            self._finish_step()
            if len(self.steps) == self.wanted:
                self.close()
                return
        if not self.steps and not self.now.micro_batches:
            self.header["evaluated"] = [
                self.names(path)
                for each in self.models
                for path, module in named_modules(unwrap(each))
                if not module.training
            ]
        number = self.now.forwards[root]
        self.now.forwards[root] += 1
        if number == len(self.now.micro_batches):
            place = f"{len(self.steps)}/{number}"
            inputs, key = encode_tree(
                (args, kwargs), lambda name, tensor: self.writer.store(f"inputs/{place}/{name}", tensor)
            )
            extra, _ = encode_tree(self.extra, lambda name, tensor: self.writer.store(f"extra/{place}/{name}", tensor))
            self.extra = {}
            entries = {"inputs": inputs, "extra": extra, "key": key, "outputs": [], "losses": [], "dropouts": []}
            entries |= {"random": self.writer.store(f"random/{place}", torch.get_rng_state()), "backward": []}
            kind = self.header["device"]
            if torch.is_autocast_enabled(kind):
                entries["autocast"] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            self.now.micro_batches.append(OpenMicroBatch(entries))
        self.inside = self.now.micro_batches[number]

    def _forward_ends(self, output: Any) -> None:
        if self.inside is not None:
            self._record_output("", output)
        self.inside = None

    def _output_hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.inside is not None:
                self._record_output(path, output)

        return hook

    def _record_output(self, path: str, output: Any) -> None:
        assert self.inside is not None
        for mask in self.pending:
            mask["path"] = path
        self.pending = []
        tensor = first_tensor(output)
        if tensor is None:
            return
        call = self.inside.calls[path] = self.inside.calls.get(path, -1) + 1
        local = local_tensor(tensor)
        entry: dict[str, Any] = {
            "path": path,
            "call": call,
            "shape": list(local.shape),
            "dtype": str(local.dtype).removeprefix("torch."),
            "row": self.writer.row(local),
        }
        if isinstance(tensor, DTensor):
            entry["region"] = dtensor_region(tensor).model_dump()
            entry["partial"] = any(place.is_partial() for place in tensor.placements)
        self.inside.entries["outputs"].append(entry)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._output_gradient(entry, gradient))

    def _output_gradient(self, entry: dict[str, Any], gradient: torch.Tensor | None) -> None:
        if gradient is None:  # DDP passes none to an output that the loss does not use
            return
        places = gradient.placements if isinstance(gradient, DTensor) else ()
        local = local_tensor(gradient)
        if self.header and list(local.shape) == entry["shape"] and not any(place.is_partial() for place in places):
            entry["gradient"] = self.writer.row(local)

    # --- observed functions -----------------------------------------------------------------------

    def _last(self) -> dict[str, Any] | None:
        return self.now.micro_batches[-1].entries if self.now.micro_batches else None

    def backward(self, root: torch.Tensor) -> None:
        """Records the scalar from which a backward begins."""
        if (last := self._last()) is not None:
            last["backward"].append(self.writer.number(local_tensor(root)))

    def cross_entropy(self, loss: torch.Tensor, call: dict[str, Any]) -> None:
        """Records a call of cross entropy: its value, its target and the number of valid labels."""
        micro = self.inside.entries if self.inside is not None else self._last()
        if micro is None or not torch.is_grad_enabled():
            return
        target, ignored = local_tensor(call["target"]), call.get("ignore_index", -100)
        valid = target.new_tensor(len(target)) if target.is_floating_point() else (target != ignored).sum()
        place = f"targets/{len(self.steps)}/{len(self.now.micro_batches) - 1}/{len(micro['losses'])}"
        micro["losses"].append(
            {
                "reduction": call["reduction"],
                "labels": self.writer.number(valid),
                "value": self.writer.number(
                    local_tensor(loss).sum() if call["reduction"] == "none" else local_tensor(loss)
                ),
                "target": self.writer.store(place, target),
                "smoothing": float(call.get("label_smoothing", 0.0)),
                "ignored": int(ignored),
            }
        )

    def dropout(self, given: torch.Tensor, output: torch.Tensor, rate: float) -> torch.Tensor:
        """Records the mask of a dropout: one bit for each element."""
        if self.inside is None:
            return output
        local, micro = local_tensor(output), self.inside.entries
        place = f"masks/{len(self.steps)}/{self.now.micro_batches.index(self.inside)}/{len(micro['dropouts'])}"
        bits = np.packbits((local != 0).reshape(-1).cpu().numpy())
        entry = {
            "path": "",
            "rate": rate,
            "shape": list(local.shape),
            "mask": self.writer.store(place, torch.from_numpy(bits)),
        }
        micro["dropouts"].append(entry)
        self.pending.append(entry)
        return output

    def pause(self, paused: bool) -> None:
        """Stops or continues recording."""
        self.paused = paused

    def clip(self, max_norm: float, before: bool) -> None:
        """Records the gradients before they are clipped. Those after it are recorded before the update, because an
        engine may clip the parameters of each mesh by a call of its own."""
        if not self.now.micro_batches:
            return
        if before:
            self._record_gradients("gradients")
            self.now.entries.setdefault("clip", max_norm)
        self.now.clipped = True

    def optimizer_step(self, optimizer: torch.optim.Optimizer, before: bool) -> None:
        """Records the gradients and the options of an optimizer before its step."""
        names = self.optimizer_names(optimizer)
        if not self.now.micro_batches or names is None or not self.header:
            return
        if not before:
            self.now.stepped = True
            return
        self._record_gradients("gradients")
        if self.now.clipped:
            self._record_gradients("clipped")
        entry = {
            "kind": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "groups": [_options_of(group) for group in optimizer.param_groups],
            "names": [[self.names(name) for name in each] for each in names],
            "begun": bool(optimizer.state) and not self.steps,
        }
        self.now.entries.setdefault("optimizers", []).append(entry)

    def _record_gradients(self, key: str) -> None:
        if key in self.now.entries:
            return
        found = [part.gradient() for part in self.parts]
        self.now.entries[key] = [-1 if each is None else self.writer.row(local_tensor(each)) for each in found]
        self.now.entries["partial"] = [part.partial() for part in self.parts]
        regions = [part.gradient_region() for part in self.parts]
        self.now.entries["regions"] = [region.model_dump() if region is not None else None for region in regions]

    def _finish_step(self) -> None:
        entries = self.now.entries
        data = [part.data() for part in self.parts]
        entries["after"] = [-1 if each is None else self.writer.row(each) for each in data]
        entries["micro_batches"] = [each.entries for each in self.now.micro_batches]
        entries.setdefault("clip", self.header["clip"])
        number = len(self.steps) + 1
        self.steps.append(entries)
        if self.stores_weights and number < self.wanted:
            entries["weights"] = [
                self.writer.store(f"weights/{number}/{at}", each) if each is not None and self.parts[at].stored else ""
                for at, each in enumerate(data)
            ]
        self.now = OpenStep(forwards=[0] * len(self.models))


def tied_names(models: Sequence[nn.Module], names: Callable[[str], str]) -> dict[str, str]:
    """Returns, for each further name of a parameter of this rank, its first name."""
    found: dict[str, str] = {}
    for model in models:
        inner = unwrap(model)
        first = {id(parameter): name for name, parameter in inner.named_parameters()}
        for name, parameter in inner.named_parameters(remove_duplicate=False):
            if first[id(parameter)] != name:
                found[names(name)] = names(first[id(parameter)])
    return found


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a parameter group that are plain numbers, strings and tuples of them."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        plain = float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if name != "params" and isinstance(plain, bool | int | float | str | tuple | list | None):
            found[name] = list(plain) if isinstance(plain, tuple) else plain
    return found


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """Returns the configuration of a model of transformers as plain data, None for other models."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return None
    return json.loads(config.to_json_string(use_diff=False))
