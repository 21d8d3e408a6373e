"""Builds the recorded model on one device and fills it with the recorded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.interop.recording.layout import fill_region, local_shape, slice_region
from meshwright.interop.recording.trace_format import RankTrace, RecordedPiece

BuildModel = Callable[[], nn.Module]
CASTS = {
    torch.float64: nn.Module.double,
    torch.float32: nn.Module.float,
    torch.bfloat16: nn.Module.bfloat16,
    torch.float16: nn.Module.half,
}
"""`Module.to(dtype)` would discard the imaginary part of complex buffers; these leave them as they are."""


class LoadedModel:
    """Builds the model of a recording with `build`. `what` names its source in messages.

    Raises: InputError if the parameters of the model are not those of the recording.
    """

    def __init__(self, traces: list[RankTrace], build: BuildModel, what: str) -> None:
        self.traces, self.factory, self.what = traces, build, what
        model = build()
        if not isinstance(model, nn.Module):
            raise InputError(
                Message("{what}: returns {kind}, not a torch module", what=what, kind=type(model).__name__)
            )
        self.paths = [path for path, _ in model.named_modules()]
        self.canonical = canonical_names(model)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._check()
        self.trains = {self.canonical[piece.name]: piece.trains for trace in traces for piece in trace.header.pieces}

    def _check(self) -> None:
        recorded: dict[str, tuple[int, ...]] = {}
        for trace in self.traces:
            for piece in trace.header.pieces:
                if piece.name not in self.canonical:
                    raise InputError(
                        Message(
                            "{what}: has no parameter {name}, which rank {rank} recorded{hint}; give the function "
                            "that builds the "
                            "recorded model, or names= for the names of a pipeline stage",
                            what=self.what,
                            name=piece.name,
                            rank=trace.header.rank,
                            hint=did_you_mean(piece.name, self.canonical),
                        )
                    )
                name = self.canonical[piece.name]
                recorded[name] = piece.region.shape
                if piece.region.shape != self.shapes[name]:
                    raise InputError(
                        Message(
                            "{what}: {name} has shape {here}, but the recording has {there}; give the function that "
                            "builds the "
                            "recorded model, or shards= for a tensor that is sharded",
                            what=self.what,
                            name=piece.name,
                            here=str(self.shapes[name]),
                            there=str(piece.region.shape),
                        )
                    )
        missing = [name for name in self.shapes if name not in recorded]
        if missing:
            raise InputError(
                Message(
                    "{what}: {count:count parameter} are not in the recording, the first is {name}; give the function "
                    "that builds the recorded model",
                    what=self.what,
                    count=len(missing),
                    name=missing[0],
                )
            )

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Returns a new model with the recorded first weights and buffers, in `dtype`."""
        model = CASTS[dtype](self.factory())
        model.train()
        for path in {path for trace in self.traces for path in trace.header.evaluated}:
            if path in self.paths:
                model.get_submodule(path).training = False
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trains[name])
        buffers = dict(model.named_buffers())
        with torch.no_grad():
            for trace in reversed(self.traces):
                for name, key in trace.header.buffers.items():
                    if name in buffers and buffers[name].shape == (stored := trace.tensor(key)).shape:
                        buffers[name].copy_(stored)
        return model

    def names(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters by name, each once."""
        return dict(model.named_parameters())

    @torch.no_grad()
    def load(self, model: nn.Module, step: int, dtype: torch.dtype) -> bool:
        """Fills the parameters with the weights before step `step`, if they are recorded. Returns whether they are."""
        if step and not any(trace.header.steps[step - 1].weights for trace in self.traces):
            return False
        parameters = dict(model.named_parameters())
        filled = {name: torch.zeros(parameter.shape, dtype=torch.bool) for name, parameter in parameters.items()}
        for trace in self.traces:
            for at, piece in enumerate(trace.header.pieces):
                key = stored_weight(trace, step, at)
                if key and not _is_filled(filled[self.canonical[piece.name]], piece):
                    name = self.canonical[piece.name]
                    fill_region(parameters[name], piece.region, trace.tensor(key).to(dtype))
                    fill_region(
                        filled[name], piece.region, torch.ones((), dtype=torch.bool).expand(local_shape(piece.region))
                    )
        for name, mask in filled.items():
            if not bool(mask.all()):
                raise InputError(
                    Message(
                        "recording: {have:,} of {all:,} elements of {name} are recorded; record the ranks that store "
                        "the "
                        "others",
                        have=int(mask.sum()),
                        all=mask.numel(),
                        name=name,
                    )
                )
        return True


def stored_weight(trace: RankTrace, step: int, at: int) -> str:
    """Returns the name of the stored weights of piece `at` before step `step`, '' if this rank does not store them."""
    if step:
        weights = trace.header.steps[step - 1].weights
        return weights[at] if weights else ""
    return trace.header.pieces[at].stored


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Returns the name under which torch lists each parameter, for all names of the parameter."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _is_filled(mask: torch.Tensor, piece: RecordedPiece) -> bool:
    return bool(slice_region(mask, piece.region).all())


def build_from_class(header: Any) -> BuildModel | None:
    """Returns a function that builds a recorded model of transformers from its recorded configuration, None for another
    model. No code of a model folder is run."""
    if header.config is None:
        return None
    try:
        import transformers
    except ImportError:
        return None
    kind = getattr(transformers, header.model.rpartition(".")[2], None)
    config_kind = getattr(kind, "config_class", None)
    if kind is None or config_kind is None:
        return None

    def build() -> nn.Module:
        config = config_kind.from_dict(dict(header.config))
        config._experts_implementation = "eager"  # grouped matrix products do not exist in float64
        return kind(config)

    return build
