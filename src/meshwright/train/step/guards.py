"""Step guards. The results of preflight checks and proofs are valid only under the conditions of the checked step. The
guards record these conditions and compare them with those of each later step, before its update.

The guards record the following:
- The keys of the batch, and the type, dimensions and sizes of each value, except the number of rows.
- The values of zero-dimensional numbers, the mode of each module, and `requires_grad` of each parameter.
- The number of hooks on modules.
- Plain numbers, booleans and strings that the user's modules and the user's loss store, such as the weight of a loss
  term.
- The code path of forward, if the user's code branches on tensor values (runtime/preflight/code_paths.py).

| difference from the recorded conditions | what runs after the passes of this step and before its update |
|---|---|
| a key, dtype, number of dimensions, mode, hook, value, or code path | the checks of rows and writes, and a proof |
| a size outside of the range with which rows were checked | the checks of rows and writes |
| a size outside of the range that proofs have covered | a proof |
| a parameter that was frozen and is trained now | nothing; the step is refused, as the optimizer has no state for it |

Proofs run only if an earlier proof has passed. If a number changes repeatedly, two further values are checked; after
that, every value of this number counts as checked. (torch.compile makes such numbers dynamic in a similar way.) Sizes
count as known only between the smallest and the largest checked size. Parameters may be frozen later
(runtime/zero/reducer.py).

The guards also detect changes by the user's code around a step: another optimizer, other parameter groups, step hooks,
torch modes. The guarded optimizer was probed before sharding, and it updates this rank's shards. Another optimizer or
an added group was not probed, and it updates other tensors. If these are the model's parameters, they have no gradient
during the update. If they are new parameters, their gradient covers only this rank's rows. Learning rates, weight
decays and other group options may change at any time.

`SizeRanges` are the known sizes of batches: for each dimension, the range from the smallest to the largest size that a
check or a proof covered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.loss import Batch

if TYPE_CHECKING:
    from meshwright.runtime.engine import Engine
    from meshwright.runtime.optim.updater import Updater


Range = tuple[int, int]
Ranges = dict[str, tuple[Range, ...]]
"""The smallest and the largest size of each dimension except the rows, by a text with the keys of a batch and their
dimensions."""


class FirstOutside(NamedTuple):
    """The first micro-batch with unknown sizes: a description ('' if all sizes are known), and its index in the
    step."""

    said: str = ""
    at: int = -1


class SizeRanges:
    """Collects the sizes of batches and finds batches whose sizes are not known.

    >>> known = SizeRanges()
    >>> known.add([{"ids": torch.zeros(2, 8)}, {"ids": torch.zeros(2, 4)}])
    >>> (
    ...     known.first_outside([{"ids": torch.zeros(2, 5)}]),
    ...     known.first_outside([{"ids": torch.zeros(2, 5)}, {"ids": torch.zeros(2, 12)}]),
    ... )
    (FirstOutside(said='', at=-1), FirstOutside(said='the batch has other sizes: ids (12), known are 4 to 8', at=1))
    """

    def __init__(self, known: Mapping[str, Sequence[Sequence[int]]] | None = None) -> None:
        self.known: Ranges = {
            form: tuple((low, high) for low, high in ranges) for form, ranges in (known or {}).items()
        }

    def add(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Adds the sizes of `batches`."""
        for form, sizes in map(sizes_of, batches):
            before = self.known.get(form, tuple((size, size) for size in sizes))
            self.known[form] = tuple(
                (min(low, size), max(high, size)) for (low, high), size in zip(before, sizes, strict=True)
            )

    def first_outside(self, batches: Sequence[Batch]) -> FirstOutside:
        """Returns the largest of the micro-batches with unknown sizes. Before the first `add`, all sizes count as
        known."""
        outside = [at for at, batch in enumerate(batches) if self.known and not self._covers(batch)]
        if not outside:
            return FirstOutside()
        at = max(outside, key=lambda each: sizes_of(batches[each])[1])
        ranges = self.known.get(sizes_of(batches[at])[0])
        known = f", known are {', '.join(f'{low} to {high}' for low, high in dict.fromkeys(ranges))}" if ranges else ""
        return FirstOutside(f"the batch has other sizes: {', '.join(_shown(batches[at]))}{known}", at)

    def _covers(self, batch: Mapping[str, Any]) -> bool:
        form, sizes = sizes_of(batch)
        return form in self.known and all(
            low <= size <= high for size, (low, high) in zip(sizes, self.known[form], strict=True)
        )


def sizes_of(batch: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Returns the keys and numbers of dimensions of a batch's tensors as text, and all sizes except the rows."""
    tensors = [(name, value) for name, value in sorted(batch.items()) if isinstance(value, torch.Tensor)]
    return ", ".join(f"{name} {value.ndim}" for name, value in tensors), tuple(
        size for _, value in tensors for size in value.shape[1:]
    )


def _shown(batch: Mapping[str, Any]) -> list[str]:
    tensors = [
        (name, value) for name, value in sorted(batch.items()) if isinstance(value, torch.Tensor) and value.ndim > 1
    ]
    return [f"{name} ({', '.join(map(str, value.shape[1:]))})" for name, value in tensors]


class OptimizerGuard:
    """Guards the optimizer that `parallelize` has made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._hooks = optimizer, _count_step_hooks(optimizer)

    def check(self, optimizer: torch.optim.Optimizer, updater: Updater) -> None:
        """Raises InputError if `optimizer` is not the one that `parallelize` made, if its groups do not have as many
        parameters as `parallelize` gave it, or if step hooks were registered after `parallelize`."""
        if optimizer is not self._optimizer:
            raise InputError(
                Message(
                    "trainer.optimizer is not the {type} that parallelize created, and would not update the shards "
                    "of this rank: give parallelize a function that creates it, `lambda params: ...`",
                    type=type(optimizer).__name__,
                )
            )
        stored, given = (
            sum(len(group["params"]) for group in optimizer.param_groups),
            max(sum(len(updater.params_of(unit)) for unit in updater.reducer.trainable), 1),
        )
        if stored != given:
            raise InputError(
                Message(
                    "the optimizer's groups have {stored} parameters, but parallelize gave it {given}: groups cannot "
                    "change after sharding; freeze with requires_grad_(False), and make parameters that are trained "
                    "later part of the model from the start",
                    stored=stored,
                    given=given,
                )
            )
        if _count_step_hooks(optimizer) > self._hooks:
            raise InputError(
                Message(
                    "the optimizer got a step hook after parallelize, which would see shards instead of full "
                    "tensors: register it in the function that creates the optimizer"
                )
            )


def check_torch_modes(device: torch.device) -> None:
    """Raises InputError if a torch mode is active in which a step would train nothing, or would not compute in the
    dtypes of its precision."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        raise InputError(
            Message("the step is inside {mode}, where no parameter gets a gradient: call it outside", mode=mode)
        )
    if torch.is_autocast_enabled(device.type):
        raise InputError(
            Message(
                "the step is inside torch.autocast, which keeps copies of weights and computes in other dtypes than "
                "the proof: leave it out and give parallelize a precision, 'bf16' or 'fp16'"
            )
        )


def _count_step_hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


GUARDED_TYPES = (bool, int, float, str)
MAX_CHECKED_VALUES = 2
"""The number of further values of a changing number that are checked before all its values count as known."""
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Outside(NamedTuple):
    """How a step of one rank differs from what was checked. A text field is '' if nothing differs. `at`: the index of a
    micro-batch that differs, or -1 if all or none differ."""

    trained: str = ""
    """The name of a parameter that was frozen and is trained now."""
    changed: str = ""
    code: str = ""
    sizes: str = ""
    """Sizes with which the check of rows has not run."""
    unproven: str = ""
    """Sizes that no proof covers."""
    at: int = -1

    @property
    def is_any(self) -> bool:
        """Returns whether the step needs a check or a proof."""
        return bool(self.unchecked or self.unproven)

    @property
    def unchecked(self) -> str:
        """Returns why the checks of rows and writes must run again, or ''."""
        return self.changed or self.code or self.sizes

    def asks_for_proof(self, is_fresh: bool) -> str:
        """Returns why a proof must run, or ''. `is_fresh`: whether a proof with the plain values of this step has just
        run."""
        return self.code or self.unproven or ("" if is_fresh else self.changed)


class StepGuards:
    """The guards of one rank. `outside` compares a step with what was checked, and `accept` records a checked step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = OptimizerGuard(optimizer)
        self._forms: dict[Hashable, set[Hashable]] = {}
        """Values of the checked plain numbers, by keys, types and dimensions of the batch."""
        self._sizes = SizeRanges()
        self._places: list[tuple[str, Mapping[str, Any], str]] = []
        self._values: list[Any] = []
        self._times: dict[str, int] = {}
        self._trained: list[bool] = []
        self._hooks: list[int] = []

    def untrained(self, engine: Engine) -> str:
        """Returns the name of a parameter that was frozen and is trained now, or ''."""
        now = [parameter.requires_grad for _, parameter in _group_parameters(engine)]
        before, self._trained = self._trained or now, now
        return next(
            (
                name
                for (name, _), was, is_ in zip(_group_parameters(engine), before, now, strict=True)
                if is_ and not was
            ),
            "",
        )

    def check_around(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        """Raises InputError if the user's code has changed the optimizer, its hooks or torch modes around the step."""
        check_torch_modes(engine.mesh.device)
        self._optimizer.check(optimizer, engine.updater)
        self.check_hooks(engine)

    def check_hooks(self, engine: Engine) -> None:
        """Raises InputError if a parameter got a post-accumulate-grad hook. The hook would run when the gradient is no
        longer in `.grad`."""
        now = [len(parameter._post_accumulate_grad_hooks or ()) for _, parameter in _group_parameters(engine)]
        before, self._hooks = self._hooks or now, now
        name = next(
            (name for (name, _), had, has in zip(_group_parameters(engine), before, now, strict=True) if has > had),
            None,
        )
        if name is not None:
            raise InputError(
                Message(
                    "{name} got a post-accumulate-grad hook after parallelize, but its gradient is no longer in "
                    ".grad then: register it before parallelize, or use register_hook",
                    name=name,
                )
            )

    def outside(self, engine: Engine, batches: Sequence[Batch], proven: SizeRanges) -> Outside:
        """Returns how the step differs from the checked conditions. `proven`: the batch sizes that proofs cover."""
        code, at = engine.preflight.paths.unknown(batches)
        checked, unproven = self._sizes.first_outside(batches), proven.first_outside(batches)
        at = at if at >= 0 else unproven.at if unproven.said else checked.at
        return Outside(
            self.untrained(engine),
            self._changed(batches),
            f"values lead through other code: {code}" if code else "",
            checked.said,
            unproven.said,
            at,
        )

    def _changed(self, batches: Sequence[Batch]) -> str:
        """Returns what has changed since the check; '' if nothing has changed or no check has run."""
        for form, numbers in map(_batch_signature, batches) if self._forms else ():
            if form not in self._forms:
                return f"the batch has other keys, types or dimensions: {', '.join(str(each[0]) for each in form)}"
            if numbers not in self._forms[form] and len(self._forms[form]) <= MAX_CHECKED_VALUES:
                return f"the batch has other numbers: {', '.join(map(str, numbers))}"
        now = [stored.get(key) for _, stored, key in self._places]
        if now == self._values:
            return ""
        at = next(at for at, (one, other) in enumerate(zip(now, self._values, strict=True)) if one != other)
        return f"{self._places[at][0]} is {now[at]!r} and was {self._values[at]!r}"

    def accept(self, engine: Engine, batches: Sequence[Batch]) -> None:
        """Records the conditions of this step as checked."""
        for form, numbers in map(_batch_signature, batches):
            self._forms.setdefault(form, set()).add(numbers)
        self._sizes.add(batches)
        engine.preflight.paths.accept()
        before = {name: value for (name, _, _), value in zip(self._places, self._values, strict=True)}
        places = [each for each in _guarded_values(engine) if self._times.get(each[0], 0) <= MAX_CHECKED_VALUES]
        for name, stored, key in places:
            if name in before and before[name] != stored.get(key):
                self._times[name] = self._times.get(name, 0) + 1
        self._places = [each for each in places if self._times.get(each[0], 0) <= MAX_CHECKED_VALUES]
        self._values = [stored.get(key) for _, stored, key in self._places]


def _group_parameters(engine: Engine) -> list[tuple[str, nn.Parameter]]:
    return [each for unit in engine.zero.units for each in unit.parameters.items()]


def _batch_signature(batch: Batch) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns two keys of a batch: its names, types and dimensions, and the values of its plain numbers."""
    forms: list[Any] = []
    numbers: list[Any] = []
    for name, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            forms.append((name, str(value.dtype), value.ndim))
            numbers += [] if value.ndim else [value.item()]
        else:
            forms.append((name, type(value).__name__))
            numbers += [value] if isinstance(value, GUARDED_TYPES) else []
    return tuple(forms), tuple(numbers)


def _guarded_values(engine: Engine) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yields the plain values that the user's code may read, as (description, mapping that contains the value, key in
    the mapping)."""
    for path, module in engine.model.named_modules():
        own = vars(module)
        name = path or "the model"
        yield f"{name}.training", own, "training"
        for hooks in HOOK_ATTRIBUTES:
            yield f"the number of hooks of {name} ({hooks})", _HookCount(own.get(hooks, {})), "length"
        if not type(module).__module__.startswith(("torch.", "meshwright.")):
            yield from (
                (f"{name}.{key}", own, key)
                for key, value in own.items()
                if isinstance(value, GUARDED_TYPES) and key != "training"
            )
    loss: Any = engine.objective.loss
    for holder in (loss, getattr(loss, "__self__", None)):
        stored = getattr(holder, "__dict__", {})
        yield from (
            (f"{key} of the loss", stored, key) for key, value in stored.items() if isinstance(value, GUARDED_TYPES)
        )
    code = getattr(loss, "__code__", None)
    if code is not None:
        cells = zip(code.co_freevars, loss.__closure__ or (), strict=True)
        yield from (
            (f"{name} of the loss", _ClosureValue(cell), "value")
            for name, cell in cells
            if isinstance(_ClosureValue(cell).get("value"), GUARDED_TYPES)
        )
        around = loss.__globals__
        yield from (
            (f"{name} of the loss", around, name)
            for name in code.co_names
            if isinstance(around.get(name), GUARDED_TYPES)
        )


class _HookCount(dict[str, Any]):
    """Counts the current hooks, except hooks of this package, since the memory trace adds and removes its hooks."""

    def __init__(self, of: Mapping[int, Any]) -> None:
        super().__init__()
        self.of = of

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the current number of hooks."""
        return sum(not str(getattr(hook, "__module__", "")).startswith("meshwright.") for hook in self.of.values())


class _ClosureValue(dict[str, Any]):
    """Reads the current value of a closure cell."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value, or `default` for an empty cell."""
        try:
            return self.cell.cell_contents
        except ValueError:  # the cell is still empty
            return default
