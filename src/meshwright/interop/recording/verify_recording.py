"""Compares a recording with one device: `meshwright verify --recording` and `meshwright.verify_recording`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.recording.findings import RecordingReport
from meshwright.interop.recording.judge import UPDATES_NOTE, StepJudge
from meshwright.interop.recording.loaded import LoadedModel, build_from_class
from meshwright.interop.recording.reference import LossFunction, OneDevice, Precision
from meshwright.interop.recording.tolerance import FLOORS
from meshwright.interop.recording.topology import RecordedTopology
from meshwright.interop.recording.trace_format import RankTrace, read_traces
from meshwright.train.model import load_user_function

LOW_DTYPES = ("bfloat16", "float16")


def verify_recording(
    folder: str | Path,
    model: Callable[[], nn.Module] | str | None = None,
    loss: LossFunction | str | None = None,
) -> RecordingReport:
    """Repeats the steps of a recording on one device in float64 and in the precision of the recording, and compares
    losses, label counts, module outputs, gradients and updates.

    `model` builds the unsharded model, or names such a function (`FILE.py:function` or `package.module:function`); its
    weights are replaced by the recorded ones. Models of transformers need none. `loss(output, batch)` returns the mean
    loss over the valid labels, or the pair (sum of losses, number of labels); `batch` has the arguments of the model
    and the entries of `recorder.batch`. By default it is the loss that the model returns, else torch's cross entropy
    with the recorded labels.

    Raises: InputError if the recording is incomplete or damaged, or if the model is not the recorded one.
    """
    traces = read_traces(Path(folder))
    build, what = _resolve_model(traces, model)
    loss = load_user_function(loss, "loss") if isinstance(loss, str) else loss
    loaded = LoadedModel(traces, build, what)
    topology = RecordedTopology(traces, loaded.paths, loaded.canonical)
    precision = recorded_precision(traces)
    header = traces[0].header
    report = RecordingReport(
        header.engine,
        header.model.rpartition(".")[2],
        header.world,
        len(topology.replicas),
        len(topology.stages),
        precision,
        dict(header.versions),
    )
    report.notes += [note for trace in traces[:1] for note in trace.header.notes]
    with torch.random.fork_rng(devices=[]):
        truth = OneDevice(topology, loaded, loss, Precision(torch.float64))
        other = OneDevice(topology, loaded, loss, _rounding_precision(traces, precision))
        for step in range(len(header.steps)):
            one, two = truth.run(step), other.run(step)
            judge = StepJudge(truth, step, one, two, FLOORS[precision])
            report.findings += judge.run()
            report.steps.append(judge.compared)
            if report.findings:
                break
            if one.after is None:
                report.notes += [UPDATES_NOTE] if UPDATES_NOTE not in report.notes else []
                if step + 1 < len(header.steps) and not any(trace.header.steps[step].weights for trace in traces):
                    break
    return report


def recorded_precision(traces: list[RankTrace]) -> str:
    """Returns the dtype in which most recorded modules compute, such as 'float32'. A 16-bit dtype counts if at least a
    tenth of the outputs have it."""
    counts = Counter(
        each.dtype for trace in traces for micro in trace.header.steps[0].micro_batches for each in micro.outputs
    )
    low = [name for name in LOW_DTYPES if counts[name] * 10 >= sum(counts.values()) and counts[name]]
    stored = {piece.dtype for trace in traces for piece in trace.header.pieces}
    low += [name for name in LOW_DTYPES if name in stored]
    if low:
        return low[0]
    if any(trace.header.tf32 for trace in traces):
        return "tf32"
    return "float64" if counts["float64"] and not counts["float32"] else "float32"


def _rounding_precision(traces: list[RankTrace], precision: str) -> Precision:
    if precision == "float64":
        return Precision(torch.float64, perturbed=True)
    autocast = traces[0].header.steps[0].micro_batches[0].autocast
    if autocast:
        return Precision(torch.float32, autocast)
    return Precision(getattr(torch, "float32" if precision == "tf32" else precision))


def _resolve_model(
    traces: list[RankTrace], model: Callable[[], nn.Module] | str | None
) -> tuple[Callable[[], nn.Module], str]:
    if isinstance(model, str):
        return load_user_function(model, "model"), Message("model {name}", name=model)
    if model is not None:
        return model, Message("model {name}", name=getattr(model, "__name__", type(model).__name__))
    header = traces[0].header
    build = build_from_class(header)
    if build is None:
        raise InputError(
            Message(
                "the recorded model is {kind}: name a function that builds it on one device, as --model "
                "FILE.py:function or "
                "model=",
                kind=header.model,
            )
        )
    return build, Message("the recorded configuration of {name}", name=header.model.rpartition(".")[2])
