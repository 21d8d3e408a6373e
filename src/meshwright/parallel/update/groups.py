"""Groups of an optimizer: which of a model's tensors each of them has, whatever the optimizer is made of.

Scripts make groups of whole tensors: by names, by dimensions, of the model's own parameters. What an optimizer updates are runs of flat buffers
or whole tensors that this rank owns. So its maker is asked once before anything is shared: it is given stand-ins for the tensors that are
trained, with their names and shapes and without memory, and it may take the model's own parameters instead. Which name is in which group
is all that is kept. Runs are cut where the group changes; then the maker is given them. Where it puts them into other groups, or into none, the
optimizer that was made of whole tensors gets them in the places of these: torch's optimizers look at nothing else until their first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from meshwright.base.errors import InputError
from meshwright.parallel.zero.master import Run, nested

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Whole(nn.Parameter):
    """A whole tensor that an optimizer is given. `in_block`: of a repeated block; matrices elsewhere are embeddings and heads."""

    path: str
    is_matrix: bool
    in_block: bool

    def __new__(cls, data: torch.Tensor, name: str, in_block: bool) -> Whole:
        made = super().__new__(cls, data)
        made.path, made.in_block, made.is_matrix = name, in_block, data.ndim > 1
        return made


class Groups:
    """`of`: the number of the group of each tensor."""

    def __init__(
        self, make: MakeOptimizer, shapes: Mapping[str, Sequence[int]], in_block: Mapping[str, bool], own: Mapping[int, str] | None = None
    ) -> None:
        """`shapes`: of the tensors that are trained, by name; `own`: names of all parameters of the model by their identity.
        Raises InputError where the optimizer has others, or not all."""
        self._make = make
        self.shapes, self.in_block = dict(shapes), dict(in_block)
        self._names = dict(own or {})
        self.of: dict[str, int] = {}
        if not shapes:
            raise InputError("no parameter of the model is trained: all have requires_grad False")
        made, given = self._of_whole()
        names = {**self._names, **{id(each): each.path for each in given}}
        self._takes_own = False
        for number, group in enumerate(made.param_groups):
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise InputError(
                        f"the optimizer was made of a tensor of shape {tuple(parameter.shape)} that is no parameter of the model: make its groups "
                        "of `params`, each of which says its `path`, or of the parameters of the model that parallelize is given"
                    )
                if name in self.shapes:
                    self.of[name] = number
                self._takes_own |= id(parameter) in self._names
        left = [name for name in self.shapes if name not in self.of]
        if left:
            raise InputError(
                f"the optimizer was not given {len(left)} of the {len(self.shapes)} parameters that are trained ({left[0]} is one): give it all, "
                "or freeze these (requires_grad_(False))"
            )
        self._count = len(made.param_groups)
        self._kept: torch.optim.Optimizer | None = _emptied(made)

    @property
    def is_foreign(self) -> bool:
        """Whether the rule is not one of torch's alone: of another class, or with hooks around its step."""
        made = self._kept
        assert made is not None, "asked before the optimizer is made of parts"
        hooked = any(each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks or "step" in vars(each) for each in nested(made))
        return hooked or any(type(each).__module__.split(".")[0] not in ("torch", "meshwright") for each in nested(made))

    def optimizer(self, parts: Sequence[Run | Whole], anew: bool = False) -> torch.optim.Optimizer:
        """Made of `parts`, each in the group of the tensor that its path names. `anew`: one to try, not the last one."""
        direct: torch.optim.Optimizer | None = None
        if not self._takes_own:
            try:
                direct = self._make(list(parts))
            except Exception:  # a rule of whole tensors may say no to runs, one of two kinds to a rank that has none of one
                direct = None
            if direct is not None and self._agrees(direct, parts):
                return direct
        made = self._another() if anew else self._kept
        assert made is not None, "an optimizer is trained with once"
        if not anew:
            self._kept = None
        for number, group in enumerate(made.param_groups):
            group["params"] = [each for each in parts if self.of.get(each.path, 0) == number]
        return made

    def _of_whole(self) -> tuple[torch.optim.Optimizer, list[Whole]]:
        given = [Whole(torch.empty(tuple(shape), device="meta"), name, self.in_block[name]) for name, shape in self.shapes.items()]
        try:
            made = self._make(list(given))
            _ = made.param_groups, made.state
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(f"the optimizer cannot be used: {type(error).__name__}: {first_line(error)}") from error
        return made, given

    def _another(self) -> torch.optim.Optimizer:
        """A new one of whole tensors, with groups of none."""
        made, _ = self._of_whole()
        if made is self._kept:
            raise InputError("the optimizer that is made is the same one each time: make a new one, `lambda params: AdamW(...)`")
        if made.state:
            raise InputError(
                f"{type(made).__name__} makes its states when it is made, of whole tensors: make its groups of `params`, by their `path` and `is_matrix`"
            )
        return _emptied(made)

    def _agrees(self, made: torch.optim.Optimizer, parts: Sequence[Run | Whole]) -> bool:
        found = {id(each): number for number, group in enumerate(made.param_groups) for each in group["params"]}
        numbers = [(found.pop(id(each), None), each.path) for each in parts]
        alike = all(number is not None and number == self.of.get(path, number) for number, path in numbers)
        return alike and not found and len(made.param_groups) == self._count


def _emptied(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without parameters: it would keep the model's own in memory while they are shared out."""
    for group in made.param_groups:
        group["params"] = []
        group.pop("param_names", None)
    made.state.clear()
    return made


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
