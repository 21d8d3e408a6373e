"""Optimizer groups of sharded parameters, and optimizer steps over a subset of the parameters.

Scripts assign full tensors to groups: by name, by number of dimensions, or from the model's own parameters. But the
optimizer updates flat segments, or full tensors that this rank owns. So the script's factory is called once before
sharding, with meta tensors that have the names and shapes of the trained parameters. It may also use the model's own
parameters. Only the group of each name is recorded. Flat segments are cut where the group changes, and the factory is
called again with the segments. If it fails or assigns them to other groups, the optimizer of the meta tensors gets the
segments as its parameters. This works because torch's optimizers read only their groups before the first step.

`SubsetStep` runs an optimizer over a few parameters at a time, as if each such partial step were the only one of the
update. It serves groups that are temporarily upcast, new states, and offloaded states. So the update needs extra memory
for only one chunk. Scalars of a group or of the optimizer, such as a step count, have their old values in every partial
step. After the update they have the values from the group's last partial step.
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
    """A full tensor that is passed to an optimizer. `in_block`: it belongs to a repeated block. Matrices outside of
    blocks are embeddings and heads."""

    path: str
    is_matrix: bool
    in_block: bool

    def __new__(cls, data: torch.Tensor, name: str, in_block: bool) -> FullParam:
        made = super().__new__(cls, data)
        made.path, made.in_block, made.is_matrix = name, in_block, data.ndim > 1
        return made


class ParamGroups:
    """The optimizer's groups. `group_of` has the index of the group of each tensor."""

    def __init__(
        self,
        make: OptimizerFactory,
        shapes: Mapping[str, Sequence[int]],
        in_block: Mapping[str, bool],
        model_names: Mapping[int, str] | None = None,
    ) -> None:
        """`shapes` are the shapes of the trained tensors by name. `model_names` has the names of all parameters of the
        model by id.

        Raises:
            InputError: the optimizer does not have exactly the trained parameters.
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
        """Whether the update rule may differ from torch's: the optimizer's class is not torch's, or hooks run around
        its step."""
        made = self._template
        assert made is not None, "asked before the optimizer is made of parts"
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
        """Returns an optimizer of `parts`. Each part is in the group of the tensor at its `path`. `for_probe`: the
        optimizer is temporary."""
        direct: torch.optim.Optimizer | None = None
        if not self._uses_model_params:
            try:
                direct = self._make(list(parts))
            except Exception:  # the optimizer may refuse flat parameters, or a rank with only matrices or only vectors
                direct = None
            if direct is not None and self._matches(direct, parts):
                return direct
        made = self._make_new() if for_probe else self._template
        assert made is not None, "an optimizer is trained with once"
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
        """Returns a new optimizer that was made with meta tensors, with its parameters removed from the groups."""
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
    """Removes the parameters from the optimizer `made`, because they would keep the unsharded model in memory."""
    for group in made.param_groups:
        group["params"] = []
        group.pop("param_names", None)
    made.state.clear()
    return made


def first_line(error: BaseException) -> str:
    """Returns the first line of the message of `error`."""
    return str(error).strip().partition("\n")[0]


class SubsetStep:
    """Restricts an optimizer to some of its parameters. Otherwise each partial step would iterate over all of them."""

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
        """Records the scalars after a partial step, for groups with selected parameters and for groups without any
        parameters on this rank."""
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
        """Updates `runs`. Parameters that all earlier updates have skipped are updated separately, because fused
        kernels need states of all parameters or of none."""
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
    """Yields a `SubsetStep`. Before its first call and on exit, the optimizer has all of its parameters."""
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
