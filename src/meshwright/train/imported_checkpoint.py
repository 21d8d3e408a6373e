"""Matches a checkpoint of another system with the model and the optimizer of a trainer. `load_trainer` uses it.

A checkpoint of Meshwright belongs to a run, and its tensors have the names of the run's model. A foreign checkpoint may
belong to another model or optimizer, and may use another name of a shared parameter. `ImportedNames` refuses what does
not match before a tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.manifest import CheckpointManifest
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.runtime.engine import Engine
from meshwright.runtime.state_dict import BUFFER_PREFIX, LocalPiece
from meshwright.spec.workload import Workload
from meshwright.train.rank_main import RankControl
from meshwright.train.step.state import TrainState

WEIGHT_PREFIX, OPTIMIZER_PREFIX = "model/", "optimizer/"


class ImportedNames:
    """The names of a foreign checkpoint for the model of `engine`. `path` is the checkpoint for messages.

    Raises:
        InputError: the checkpoint has a tensor that the model does not have, or states of another optimizer.
    """

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, path: Path, manifest: CheckpointManifest
    ) -> None:
        self.tensors, self.kinds = manifest.tensors, tuple(manifest.state["optimizer"]["kinds"])
        self.aliases: dict[str, list[str]] = {}
        for name, first in engine.extra_state.shared_names.items():
            self.aliases.setdefault(first, []).append(name)
        known = {*engine.shapes, *engine.extra_state.shared_names, *engine.shards.buffers}
        unknown = [
            name
            for full in manifest.tensors
            if full.startswith(WEIGHT_PREFIX) and (name := full.removeprefix(WEIGHT_PREFIX)) not in known
        ]
        if unknown:
            raise InputError(
                Message(
                    "{path} has {count} tensors that this model does not have, the first is {name}{hint}: a checkpoint "
                    "of another model?",
                    path=path,
                    count=len(unknown),
                    name=unknown[0],
                    hint=did_you_mean(unknown[0], known),
                )
            )
        expected = state_kinds(optimizer)
        if self.kinds and expected is not None and set(self.kinds) != set(expected):
            raise InputError(
                Message(
                    "{path} has the optimizer states {found}, but {optimizer} of this job has {expected}: use the "
                    "optimizer of the checkpoint, or import its weights alone",
                    path=path,
                    found=", ".join(self.kinds),
                    optimizer=type(optimizer).__name__,
                    expected=", ".join(expected) or Message("none"),
                )
            )

    def find(self, prefix: str, name: str) -> str:
        """Returns the full name of the tensor of parameter or buffer `name` in the checkpoint, or `prefix` + `name` if
        the checkpoint does not have the tensor."""
        for one in (name, *self.aliases.get(name, ())):
            if prefix + one in self.tensors:
                return prefix + one
        return prefix + name

    def stateless(self, names: Sequence[str]) -> frozenset[str]:
        """Returns those of the parameters `names` for which the checkpoint has no optimizer states."""
        return frozenset(
            name
            for name in names
            if not any(self.find(f"{OPTIMIZER_PREFIX}{kind}/", name) in self.tensors for kind in self.kinds)
        )

    def rename(self, local: LocalPiece) -> LocalPiece:
        """Returns `local` with the name of its tensor in the checkpoint. Other systems store buffers with the
        weights."""
        full = local.piece.name
        if full.startswith(BUFFER_PREFIX):
            found = self.find(WEIGHT_PREFIX, full.removeprefix(BUFFER_PREFIX))
        else:
            words = full.split("/", 2 if full.startswith(OPTIMIZER_PREFIX) else 1)
            found = self.find("".join(f"{word}/" for word in words[:-1]), words[-1])
        return local._replace(piece=local.piece._replace(name=found))

    def facts(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns facts for the user: the `kinds` of optimizer states, and the `options` of the optimizer that differ:
        for each its value in the checkpoint and in this job, and the first parameter to which it applies. `saved` is
        the state of the checkpoint."""
        groups, members = saved["optimizer"]["groups"], saved["optimizer"].get("members", {})
        options: dict[str, tuple[str, str, str]] = {}
        for group in optimizer.param_groups:
            for name in sorted({run.path for run in group["params"] if hasattr(run, "path")}):
                alias = next((one for one in (name, *self.aliases.get(name, ())) if one in members), None)
                before = groups[members[alias]] if alias is not None else {}
                for key in before.keys() & group.keys() - SCHEDULED_OPTIONS:
                    if repr(_plain(before[key])) != repr(_plain(group[key])):
                        options.setdefault(key, (str(_plain(before[key])), str(_plain(group[key])), name))
        return {"kinds": self.kinds, "options": options}


SCHEDULED_OPTIONS = frozenset(("lr", "initial_lr", "fused", "foreach", "capturable", "differentiable", "maximize"))
"""Options of an optimizer that a job sets in every step, or that select kernels."""


def _plain(value: Any) -> Any:
    """Returns an option without the types that other systems store differently."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def state_kinds(optimizer: torch.optim.Optimizer) -> list[str] | None:
    """Returns the kinds of elementwise state of an optimizer of torch.optim, found by one step on a copy of it with one
    parameter. Returns None for other optimizers."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    options = {
        key: optimizer.defaults[key] for key in signature(type(optimizer)).parameters if key in optimizer.defaults
    }
    probe: Any = type(optimizer)(
        [parameter], **options | {key: False for key in ("fused", "capturable") if key in options}
    )
    probe.step()
    return [kind for kind, value in probe.state[parameter].items() if getattr(value, "shape", None) == parameter.shape]


def accept_imported(state: TrainState, work: Workload, extra: dict[str, Any], channel: RankControl) -> None:
    """Accounts for the steps of a foreign checkpoint at the start of a run. Rank 0 prints lines about it. `extra` is
    what `load_trainer` returned.

    Raises:
        InputError: the checkpoint has as many steps as the run, or more.
    """
    step = state.steps
    if step >= work.steps:
        raise InputError(
            Message(
                "{path} is of step {step}, but the run has {steps} steps: set --steps to a larger number",
                path=extra["imported"]["path"],
                step=step,
                steps=work.steps,
            )
        )
    state.samples = step * work.batch
    for line in _imported_notes(extra, step) if channel.rank == 0 else ():
        channel.say("note", line=line)


def _imported_notes(extra: dict[str, Any], step: int) -> Iterator[Message]:
    """Yields lines for the user about a run that begins after `step` steps of a foreign checkpoint. `extra` is what
    `load_trainer` returned."""
    imported, kinds = extra["imported"], extra["kinds"]
    yield Message(
        "the run goes on after step {step} of {path} ({form}), {states}",
        step=step,
        path=imported["path"],
        form=imported["form"],
        states=Message("with the optimizer states {kinds}", kinds=", ".join(kinds))
        if kinds
        else Message("without optimizer states"),
    )
    if imported["left_out"]:
        more = imported["left_out_count"] - len(imported["left_out"])
        yield Message(
            "not carried over: {names}{more}",
            names=", ".join(imported["left_out"]),
            more=Message(" and {count} more", count=more) if more else "",
        )
    for key, (before, now, name) in sorted(extra["options"].items()):
        yield Message(
            "the optimizer option {key} of {name} was {before} and is now {now}: set it in workload.optimizer if this "
            "is not intended",
            key=key,
            name=name,
            before=before,
            now=now,
        )
