"""The format of a recording: one safetensors file for each rank, with this header as JSON in its metadata.

The tensors of a file are `digests` (one row for each digest), `values` (single numbers, such as losses), the inputs,
labels and dropout masks of each micro-batch, and the weights of this rank at the start. No file contains code or
pickled objects.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open

from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

FORMAT_VERSION = 1
FILE_PATTERN = re.compile(r"rank-(\d{5})\.safetensors")
HEADER_KEY = "meshwright.recording"


class TensorRegion(StrictModel):
    """The part of a full tensor that a rank stores. `ranges` has, for each dimension, the ranges [start, end) of this
    part, which are concatenated. `flat` is a range of the flattened tensor instead. Neither means the full tensor."""

    shape: tuple[int, ...] = Field(description="shape of the full tensor")
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    flat: tuple[int, int] | None = None

    @property
    def whole(self) -> bool:
        """Returns whether the region is the full tensor."""
        return not self.ranges and self.flat is None


class RecordedOutput(StrictModel):
    """A call of a module: the rows of the digests of its output and of the gradient of this output (-1: none)."""

    path: str
    call: int
    shape: tuple[int, ...]
    dtype: str
    row: int
    gradient: int = -1
    region: TensorRegion | None = None
    partial: bool = False


class RecordedLoss(StrictModel):
    """A call of torch's cross entropy. `value` is an index of `values`, `target` the name of a tensor."""

    reduction: str
    labels: int = Field(description="index of `values`: the number of valid labels")
    value: int
    target: str
    smoothing: float = 0.0
    ignored: int = -100


class RecordedDropout(StrictModel):
    """A dropout with the name of its packed mask. `path`: the module whose forward ended next."""

    path: str
    rate: float
    shape: tuple[int, ...]
    mask: str


class RecordedMicroBatch(StrictModel):
    """A forward of the model. `inputs` is the tree of its arguments, `extra` that of the user's own entries."""

    inputs: Any
    extra: Any = None
    key: str = Field(description="hash of the inputs; equal on ranks with the same data")
    outputs: tuple[RecordedOutput, ...] = ()
    losses: tuple[RecordedLoss, ...] = ()
    dropouts: tuple[RecordedDropout, ...] = ()
    random: str = Field(default="", description="the tensor with the random state before this forward")
    autocast: str = ""
    backward: tuple[int, ...] = Field(default=(), description="indices of `values`: scalars that backward began from")


class RecordedOptimizer(StrictModel):
    """An optimizer: its class, and for each of its groups the options and the names of the parameters."""

    kind: str
    groups: tuple[dict[str, Any], ...]
    names: tuple[tuple[str, ...], ...]
    begun: bool = Field(description="whether it had states before the first recorded step")


class RecordedStep(StrictModel):
    """One optimizer step. The lists have an entry for each parameter piece: the row of a digest, or -1."""

    micro_batches: tuple[RecordedMicroBatch, ...]
    gradients: tuple[int, ...] = ()
    clipped: tuple[int, ...] = Field(default=(), description="rows of the gradients after clipping")
    partial: tuple[bool, ...] = Field(default=(), description="whether each gradient is a partial sum")
    regions: tuple[TensorRegion | None, ...] = Field(
        default=(), description="regions of gradients that are not those of the weights"
    )
    clip: float | None = None
    optimizers: tuple[RecordedOptimizer, ...] = ()
    after: tuple[int, ...] = Field(default=(), description="rows of the weights after the step")
    weights: tuple[str, ...] = Field(default=(), description="names of the tensors of the weights before the step")

    def region(self, at: int, piece: RecordedPiece) -> TensorRegion:
        """Returns the region of the gradient of piece `at`."""
        own = self.regions[at] if self.regions else None
        return piece.region if own is None else own


class RecordedPiece(StrictModel):
    """The part of a parameter that a rank stores. `before`: the row of the first weights. `constant`: whether they are
    constant along a dimension, so that different shards may be equal."""

    name: str
    region: TensorRegion
    dtype: str
    before: int
    constant: bool = False
    stored: str = Field(default="", description="name of the tensor of the first weights")
    trains: bool = True


class RecordedSequence(StrictModel):
    """The part of the sequence of a context-parallel rank. `positions`: its places in the full sequence, None for equal
    consecutive parts of the ranks `ranks`."""

    dim: int
    ranks: tuple[int, ...]
    positions: tuple[int, ...] | None = None


class TraceHeader(StrictModel):
    """All of a rank's recording except its tensors."""

    format: int
    rank: int
    world: int
    wanted: int = Field(description="number of steps that should be recorded")
    model: str
    engine: str
    replica: str = ""
    peers: tuple[int, ...] = Field(default=(), description="ranks of the tensor-parallel group, if it is known")
    sequence: RecordedSequence | None = None
    clip: float | None = Field(default=None, description="largest gradient norm, if the engine itself clips")
    config: dict[str, Any] | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    device: str = "cpu"
    tf32: bool = Field(default=False, description="whether float32 matrix products may use TF32")
    pieces: tuple[RecordedPiece, ...] = ()
    buffers: dict[str, str] = Field(default_factory=dict)
    evaluated: tuple[str, ...] = Field(default=(), description="modules in eval mode")
    aliases: dict[str, str] = Field(default_factory=dict)
    steps: tuple[RecordedStep, ...] = ()
    notes: tuple[str, ...] = ()


class RankTrace(NamedTuple):
    """The recording of one rank."""

    header: TraceHeader
    digests: torch.Tensor
    values: list[float]
    path: Path

    def tensor(self, name: str) -> torch.Tensor:
        """Reads the tensor `name`."""
        with safe_open(str(self.path), "pt") as file:
            return file.get_tensor(name)


def trace_name(rank: int) -> str:
    """Returns the name of the file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def read_traces(folder: Path) -> list[RankTrace]:
    """Returns the recordings of all ranks, in order. Raises InputError if the folder is not one complete recording."""
    if not folder.is_dir():
        raise InputError(
            Message("recording {folder}: no such folder; name the folder of meshwright.recording", folder=folder)
        )
    files = sorted(path for path in folder.iterdir() if FILE_PATTERN.fullmatch(path.name))
    if not files:
        raise InputError(
            Message(
                "recording {folder}: has no file rank-NNNNN.safetensors; record a run with meshwright.recording",
                folder=folder,
            )
        )
    traces = [_read_trace(path) for path in files]
    worlds = {trace.header.world: trace for trace in traces}
    if len(worlds) > 1:
        (one, first), (two, second) = list(worlds.items())[:2]
        raise InputError(
            Message(
                "recording {folder}: {first} is of {one} ranks and {second} of {two}; record one run into an empty "
                "folder",
                folder=folder,
                first=first.path.name,
                one=one,
                second=second.path.name,
                two=two,
            )
        )
    missing = sorted(set(range(traces[0].header.world)) - {trace.header.rank for trace in traces})
    if missing:
        raise InputError(
            Message(
                "recording {folder}: the files of {count:count rank} are missing, the first is {name}; copy the "
                "files of all "
                "{world} ranks into the folder",
                folder=folder,
                count=len(missing),
                name=trace_name(missing[0]),
                world=traces[0].header.world,
            )
        )
    _check_equal_steps(folder, traces)
    return traces


def _check_equal_steps(folder: Path, traces: list[RankTrace]) -> None:
    for trace in traces[1:]:
        if (one := len(traces[0].header.steps)) != (two := len(trace.header.steps)):
            raise InputError(
                Message(
                    "recording {folder}: rank 0 has {one:count step} and rank {rank} has {two}; record the same "
                    "steps on "
                    "every rank",
                    folder=folder,
                    one=one,
                    rank=trace.header.rank,
                    two=two,
                )
            )
    if not traces[0].header.steps:
        raise InputError(
            Message(
                "recording {folder}: has no complete step; the recorded model must run forward and its optimizer "
                "must step",
                folder=folder,
            )
        )


def _read_trace(path: Path) -> RankTrace:
    try:
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get(HEADER_KEY, "")
            digests, values = file.get_tensor("digests"), file.get_tensor("values")
    except (SafetensorError, OSError) as error:
        raise InputError(
            Message(
                "{path}: is truncated or not a recording ({error}); copy or record it again",
                path=path,
                error=str(error).partition("\n")[0],
            )
        ) from None
    try:
        data = json.loads(text)
        version = data.get("format")
        if version != FORMAT_VERSION:
            raise InputError(
                Message(
                    "{path}: format {version} of a recording; this version reads format {known}, record again",
                    path=path,
                    version=version,
                    known=FORMAT_VERSION,
                )
            )
        header = TraceHeader.model_validate(data)
    except (json.JSONDecodeError, AttributeError, ValidationError) as error:
        raise InputError(
            Message("{path}: is damaged ({error}); copy or record it again", path=path, error=type(error).__name__)
        ) from None
    if trace_name(header.rank) != path.name:
        raise InputError(
            Message(
                "{path}: is the file of rank {rank}; do not rename files of a recording", path=path, rank=header.rank
            )
        )
    return RankTrace(header, digests, values.tolist(), path)
