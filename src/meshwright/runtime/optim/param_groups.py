"""Builds the optimizer of sharded parameters with the script's groups, and runs optimizer steps over a few parameters
at a time. The build and the trainer use `ParamGroups`. updater.py and rule_probe.py use `SubsetStep`.

A script assigns full tensors to groups: by name, by number of dimensions, or from the model's own parameters. But the
optimizer updates flat segments of the shards, or full tensors that this rank owns. So the factory (the script's
function that creates the optimizer) is called twice. Before sharding, the factory gets meta tensors with the names and
shapes of the trained parameters, and may also use the model's own parameters. The group of each name is recorded, and
the parameters are removed from the resulting optimizer. After sharding, the factory gets the flat segments, which end
where the group changes. If this second call fails or assigns segments to groups other than the recorded ones, the
optimizer of the first call gets the segments as parameters. An optimizer may get new parameters before its first step,
because until then torch's optimizers depend only on their groups.

`SubsetStep` runs an optimizer over a few parameters at a time, as if each partial step were the only step of the
update. Partial steps are used for groups that are temporarily upcast, for new states, and for offloaded states. So the
update needs extra memory for only one chunk of a shard. Scalars of a group or of the optimizer, such as a step count,
have their values from before the update in every partial step. After the update they have the values from the group's
last partial step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.shard.optimizer_shard import ShardParam, nested_optimizers

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class FullParam(nn.Parameter):
    """A full tensor that is passed to an optimizer. `path`: its name in the model. `is_matrix`: whether it has two or
    more dimensions. `in_block`: whether it belongs to a repeated block. Matrices outside of blocks are embeddings and
    heads."""

    path: str
    is_matrix: bool
    in_block: bool

    def __new__(cls, data: torch.Tensor, name: str, in_block: bool) -> FullParam:
        made = super().__new__(cls, data)
        made.path, made.in_block, made.is_matrix = name, in_block, data.ndim > 1
        return made


class ParamGroups:
    """Records the optimizer's groups and builds optimizers with these groups. `group_of` maps the name of each trained
    parameter to the index of its group."""

    def __init__(
        self,
        make: OptimizerFactory,
        shapes: Mapping[str, Sequence[int]],
        in_block: Mapping[str, bool],
        model_names: Mapping[int, str] | None = None,
    ) -> None:
        """`make` is the script's factory. `shapes` and `in_block` have an entry for each trained parameter by name.
        `model_names` maps the `id` of every parameter of the model to its name.

        Raises:
            InputError: no parameter is trained; the factory fails; the optimizer has a tensor that is not a parameter
                of the model; or the optimizer lacks a trained parameter. (It may have frozen parameters.)
        """
        self._make = make
        self.shapes, self.in_block = dict(shapes), dict(in_block)
        self._names = dict(model_names or {})
        self.group_of: dict[str, int] = {}
        if not shapes:
            raise InputError(Message("no parameter of the model is trained: all have requires_grad False"))
        optimizer, params = self._make_on_meta()
        names = {**self._names, **{id(each): each.path for each in params}}
        self._uses_model_params = False
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise InputError(
                        Message(
                            "the optimizer has a tensor of shape {shape} that is not a parameter of the model: build "
                            "its groups from the parameters that your optimizer function receives, or from those of "
                            "the model that you pass to parallelize",
                            shape=tuple(parameter.shape),
                        )
                    )
                if name in self.shapes:
                    self.group_of[name] = number
                self._uses_model_params |= id(parameter) in self._names
        missing = [name for name in self.shapes if name not in self.group_of]
        if missing:
            raise InputError(
                Message(
                    "the optimizer was not given {count} of the {total} trainable parameters ({missing} is one): "
                    "give it all of them, or freeze these (requires_grad_(False))",
                    count=len(missing),
                    total=len(self.shapes),
                    missing=missing[0],
                )
            )
        self._count = len(optimizer.param_groups)
        self._template: torch.optim.Optimizer | None = _without_params(optimizer)

    @property
    def is_custom(self) -> bool:
        """Whether the update rule may differ from torch's. It may if the class of the optimizer or of a nested
        optimizer is neither torch's nor Meshwright's, if hooks run around its step, or if its step is replaced."""
        made = self._template
        assert made is not None, "`is_custom` must be read before `build_optimizer`"
        hooked = any(
            each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks or "step" in vars(each)
            for each in nested_optimizers(made)
        )
        return hooked or any(
            type(each).__module__.split(".")[0] not in ("torch", "meshwright") for each in nested_optimizers(made)
        )

    def build_optimizer(
        self, parts: Sequence[ShardParam | FullParam], for_probe: bool = False
    ) -> torch.optim.Optimizer:
        """Returns an optimizer with the parameters `parts`, each in the group of the tensor named by its `path`.
        `for_probe`: whether the optimizer is temporary. With False, call this method only once."""
        direct: torch.optim.Optimizer | None = None
        if not self._uses_model_params:
            try:
                direct = self._make(list(parts))
            except Exception:  # some optimizers refuse flat parameters, or only matrices, or only vectors
                direct = None
            if direct is not None and self._matches(direct, parts):
                return direct
        made = self._make_new() if for_probe else self._template
        assert made is not None, "`build_optimizer` was called twice for training"
        if not for_probe:
            self._template = None
        for number, group in enumerate(made.param_groups):
            group["params"] = [each for each in parts if self.group_of.get(each.path, 0) == number]
        return made

    def _make_on_meta(self) -> tuple[torch.optim.Optimizer, list[FullParam]]:
        given = [
            FullParam(torch.empty(tuple(shape), device="meta"), name, self.in_block[name])
            for name, shape in self.shapes.items()
        ]
        try:
            made = self._make(list(given))
            _ = made.param_groups, made.state
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(
                Message(
                    "the optimizer cannot be used: {type}: {first_line}",
                    type=type(error).__name__,
                    first_line=first_line(error),
                )
            ) from error
        return made, given

    def _make_new(self) -> torch.optim.Optimizer:
        """Calls the factory with meta tensors, and returns the new optimizer without parameters in its groups."""
        made, _ = self._make_on_meta()
        if made is self._template:
            raise InputError(
                Message(
                    "the optimizer function returns the same optimizer each time: return a new one, `lambda params: "
                    "AdamW(...)`"
                )
            )
        if made.state:
            raise InputError(
                Message(
                    "{type} creates its states in its constructor, from full tensors: build its groups from "
                    "`params`, by their `path` and `is_matrix`",
                    type=type(made).__name__,
                )
            )
        return _without_params(made)

    def _matches(self, optimizer: torch.optim.Optimizer, parts: Sequence[ShardParam | FullParam]) -> bool:
        found = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        numbers = [(found.pop(id(each), None), each.path) for each in parts]
        same_groups = all(number is not None and number == self.group_of.get(path, number) for number, path in numbers)
        return same_groups and not found and len(optimizer.param_groups) == self._count


def _without_params(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Removes the parameters from the optimizer `made` and returns it. References to the parameters would keep the
    unsharded model in memory."""
    for group in made.param_groups:
        group["params"] = []
        group.pop("param_names", None)
    made.state.clear()
    return made


def first_line(error: BaseException) -> str:
    """Returns the first line of the message of `error`."""
    return str(error).strip().partition("\n")[0]


class SubsetStep:
    """Restricts an optimizer to some parameters, so that a partial step does not iterate over all parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups
        self.all_params = [group["params"] for group in self.groups]
        self._holders: list[dict[str, Any]] = [*self.groups, *map(vars, nested_optimizers(optimizer))]
        self._before = list(map(scalar_fields, self._holders))
        self._after = list(self._before)

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {id(run): at for at, runs in enumerate(self.all_params) for run in runs}

    def __call__(self, runs: Sequence[torch.nn.Parameter]) -> None:
        """Selects the parameters `runs` for the next step."""
        self.record()
        chosen: list[list[torch.nn.Parameter]] = [[] for _ in self.groups]
        for run in runs:
            chosen[self._group_of[id(run)]].append(run)
        for group, some in zip(self.groups, chosen, strict=True):
            group["params"] = some
        self._set_scalars(self._before)

    def record(self) -> None:
        """Records the scalars after a partial step: the scalars of the optimizer, of groups with selected parameters,
        and of groups without any parameters on this rank."""
        for at, holder in enumerate(self._holders):
            if at >= len(self.groups) or holder["params"] or not self.all_params[at]:
                self._after[at] = scalar_fields(holder)

    def end(self) -> None:
        """Restores all parameters, and sets the scalars to their values after the update."""
        self.record()
        self._set_scalars(self._after)
        for group, runs in zip(self.groups, self.all_params, strict=True):
            group["params"] = runs

    def _set_scalars(self, numbers: Sequence[Mapping[str, float]]) -> None:
        for holder, values in zip(self._holders, numbers, strict=True):
            for name in scalar_fields(holder).keys() - values.keys():
                del holder[name]
            holder.update(values)

    def step(self, runs: Sequence[ShardParam]) -> None:
        """Updates those of `runs` that are not skipped. Parameters that all earlier updates have skipped have no states
        yet. They get a separate partial step, because in one step fused kernels need states of all parameters or of
        none."""
        new, others = (
            [run for run in runs if run.needs_new_state],
            [run for run in runs if not (run.needs_new_state or run.skipped)],
        )
        gradients = [run.grad for run in others]
        if new:
            for run in others:  # a nested optimizer may update parameters that are not in `groups`
                run.grad = None
            self(new)
            self.optimizer.step()
            for run in new:
                run.grad = None
        if others:
            for run, gradient in zip(others, gradients, strict=True):
                run.grad = gradient
            self(others)
            self.optimizer.step()


@contextmanager
def step_subsets(optimizer: torch.optim.Optimizer) -> Iterator[SubsetStep]:
    """Yields a `SubsetStep` of `optimizer`. The optimizer has all of its parameters until the `SubsetStep` is first
    called, and has them again on exit."""
    few = SubsetStep(optimizer)
    try:
        yield few
    finally:
        few.end()


def scalar_fields(fields: Mapping[str, Any]) -> dict[str, float]:
    """Returns the entries of a group, or of an optimizer's attributes, that are plain numbers.

    >>> scalar_fields({"params": [], "lr": 0.1, "k": 3, "betas": (0.9, 0.99)})
    {'lr': 0.1, 'k': 3}
    """
    return {name: value for name, value in fields.items() if isinstance(value, int | float)}
