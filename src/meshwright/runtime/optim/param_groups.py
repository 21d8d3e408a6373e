"""Groups of an optimizer: which of a model's tensors each of them has, whatever the optimizer is made of.

Scripts make groups of whole tensors: by names, by dimensions, of the model's own parameters. What an optimizer updates
are runs of flat buffers
or whole tensors that this rank owns. So its maker is asked once before anything is shared: it is given stand-ins for
the tensors that are
trained, with their names and shapes and without memory, and it may take the model's own parameters instead. Which name
is in which group
is all that is kept. Runs are cut where the group changes; then the maker is given them. Where it puts them into other
groups, or into none, the
optimizer that was made of whole tensors gets them in the places of these: torch's optimizers look at nothing else until
their first step.

A few runs through an optimizer at a time, as if each such step were the only one of its update.

Units whose gradients or weights are in the type of the update for a moment only, and states that are made in a first
update or wait elsewhere,
pass by so: what an update needs besides is then a window's, however large a unit is. Numbers of a group or of the
optimizer itself, such as a count of
steps that it does not keep for each of its parameters, are for every step of an update what they were before it, and
afterwards what the last step
with parameters of the group has made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.runtime.shard.optimizer_shard import ShardParam, nested_optimizers

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class FullParam(nn.Parameter):
    """A whole tensor that an optimizer is given. `in_block`: of a repeated block; matrices elsewhere are embeddings and
    heads."""

    path: str
    is_matrix: bool
    in_block: bool

    def __new__(cls, data: torch.Tensor, name: str, in_block: bool) -> FullParam:
        made = super().__new__(cls, data)
        made.path, made.in_block, made.is_matrix = name, in_block, data.ndim > 1
        return made


class ParamGroups:
    """`of`: the number of the group of each tensor."""

    def __init__(
        self,
        make: OptimizerFactory,
        shapes: Mapping[str, Sequence[int]],
        in_block: Mapping[str, bool],
        own: Mapping[int, str] | None = None,
    ) -> None:
        """`shapes`: of the tensors that are trained, by name; `own`: names of all parameters of the model by their
        identity.
        Raises InputError where the optimizer has others, or not all."""
        self._make = make
        self.shapes, self.in_block = dict(shapes), dict(in_block)
        self._names = dict(own or {})
        self.group_of: dict[str, int] = {}
        if not shapes:
            raise InputError("no parameter of the model is trained: all have requires_grad False")
        made, given = self._make_on_meta()
        names = {**self._names, **{id(each): each.path for each in given}}
        self._uses_model_params = False
        for number, group in enumerate(made.param_groups):
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise InputError(
                        f"the optimizer was made of a tensor of shape {tuple(parameter.shape)} that is no parameter of the model: make its groups "
                        "of `params`, each of which says its `path`, or of the parameters of the model that parallelize is given"
                    )
                if name in self.shapes:
                    self.group_of[name] = number
                self._uses_model_params |= id(parameter) in self._names
        left = [name for name in self.shapes if name not in self.group_of]
        if left:
            raise InputError(
                f"the optimizer was not given {len(left)} of the {len(self.shapes)} parameters that are trained ({left[0]} is one): give it all, "
                "or freeze these (requires_grad_(False))"
            )
        self._count = len(made.param_groups)
        self._template: torch.optim.Optimizer | None = _without_params(made)

    @property
    def is_custom(self) -> bool:
        """Whether the rule is not one of torch's alone: of another class, or with hooks around its step."""
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
        """Made of `parts`, each in the group of the tensor that its path names. `anew`: one to try, not the last
        one."""
        direct: torch.optim.Optimizer | None = None
        if not self._uses_model_params:
            try:
                direct = self._make(list(parts))
            except (
                Exception
            ):  # a rule of whole tensors may say no to runs, one of two kinds to a rank that has none of one
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
            raise InputError(f"the optimizer cannot be used: {type(error).__name__}: {first_line(error)}") from error
        return made, given

    def _make_new(self) -> torch.optim.Optimizer:
        """A new one of whole tensors, with groups of none."""
        made, _ = self._make_on_meta()
        if made is self._template:
            raise InputError(
                "the optimizer that is made is the same one each time: make a new one, `lambda params: AdamW(...)`"
            )
        if made.state:
            raise InputError(
                f"{type(made).__name__} makes its states when it is made, of whole tensors: make its groups of `params`, by their `path` and `is_matrix`"
            )
        return _without_params(made)

    def _matches(self, made: torch.optim.Optimizer, parts: Sequence[ShardParam | FullParam]) -> bool:
        found = {id(each): number for number, group in enumerate(made.param_groups) for each in group["params"]}
        numbers = [(found.pop(id(each), None), each.path) for each in parts]
        alike = all(number is not None and number == self.group_of.get(path, number) for number, path in numbers)
        return alike and not found and len(made.param_groups) == self._count


def _without_params(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without parameters: it would keep the model's own in memory while they are shared out."""
    for group in made.param_groups:
        group["params"] = []
        group.pop("param_names", None)
    made.state.clear()
    return made


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class SubsetStep:
    """Leaves in the groups of an optimizer some parameters alone: else each of its steps would look at all runs of the
    model."""

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
        self.record()
        chosen: list[list[torch.nn.Parameter]] = [[] for _ in self.groups]
        for run in runs:
            chosen[self._group_of[id(run)]].append(run)
        for group, some in zip(self.groups, chosen, strict=True):
            group["params"] = some
        self._set_scalars(self._before)

    def record(self) -> None:
        """Remember the numbers that the last step left: those of groups that it had parameters of, or that have none on
        this rank."""
        for at, holder in enumerate(self._holders):
            if at >= len(self.groups) or holder["params"] or not self.all_params[at]:
                self._after[at] = scalar_fields(holder)

    def end(self) -> None:
        """Give the groups all of their parameters, and the numbers of after the update."""
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
        """Update `runs`, those that were skipped until now by themselves: fused kernels of torch want states of all
        that they are given, or of none."""
        fresh, others = (
            [run for run in runs if run.needs_new_state],
            [run for run in runs if not (run.needs_new_state or run.skipped)],
        )
        gradients = [run.grad for run in others]
        if fresh:
            for run in others:  # an optimizer may hold parameters outside of its groups too
                run.grad = None
            self(fresh)
            self.optimizer.step()
            for run in fresh:
                run.grad = None
        if others:
            for run, gradient in zip(others, gradients, strict=True):
                run.grad = gradient
            self(others)
            self.optimizer.step()


@contextmanager
def step_subsets(optimizer: torch.optim.Optimizer) -> Iterator[SubsetStep]:
    """Until the first call the optimizer has all of its parameters, and so it has when this ends."""
    few = SubsetStep(optimizer)
    try:
        yield few
    finally:
        few.end()


def scalar_fields(held: Mapping[str, Any]) -> dict[str, float]:
    """The plain numbers of a group, or of an optimizer's own attributes.

    >>> scalar_fields({"params": [], "lr": 0.1, "k": 3, "betas": (0.9, 0.99)})
    {'lr': 0.1, 'k': 3}
    """
    return {name: value for name, value in held.items() if isinstance(value, int | float)}
