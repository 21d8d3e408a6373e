"""Detects that a step differs from the conditions under which preflight checks and proofs have passed: their results
are valid only for such conditions. The step invariants (invariants.py) use these guards before each update.

The guards record these conditions of a checked step:
- The keys of the batch, and the type, dimensions and sizes of each value, except the number of rows.
- The values of zero-dimensional tensors and plain numbers in the batch, also inside dicts, lists and objects.
- The mode of each module, `requires_grad` of each parameter, and the number of hooks on modules.
- The values that the user's modules and the user's loss store, such as the weight of a loss term: numbers, strings,
  None, functions, small tensors, buffers, and what configuration objects, dicts and lists contain
  (analysis/guarded_values.py).
- The code path of forward, if the user's code branches on tensor values (runtime/preflight/code_paths.py).

| difference from the recorded conditions | what runs after the backward of this step and before its update |
|---|---|
| a key, dtype, number of dimensions, mode, hook, value, or code path | the preflight checks, and a proof |
| a size outside of the range for which the preflight checks have run | the preflight checks |
| a size outside of the range that proofs have covered | a proof |
| a parameter that was frozen and is trained now | nothing; the step is refused, as the optimizer has no state for it |

The preflight checks test whether the rows of a batch are independent, and what a forward and backward writes to
parameters and buffers (runtime/preflight/step_checks.py). A proof runs only if an earlier proof has passed. If a number
changes repeatedly, MAX_CHECKED_VALUES further values are checked. After that, every value of this number counts as
checked, just as torch.compile makes a changing number dynamic. Sizes count as known only between the smallest and the
largest checked size (`SizeRanges`). A parameter may be frozen at any time (runtime/zero/reducer.py).

The guards also refuse five changes by the user's code between steps: another optimizer, other parameter groups, new
step hooks of the optimizer, new post-accumulate-grad hooks of parameters, and some torch modes. `parallelize` has
probed the update rule of its optimizer, which updates the shards of this rank. Another optimizer or an added group was
not probed and updates other tensors. The model's parameters have no gradient during the update, and the gradient of a
new parameter covers only this rank's rows. Learning rates, weight decays and other options of a group may change at any
time.
"""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from meshwright.analysis.guarded_values import GuardedValue, guarded_values, is_same, plain_leaves
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.loss import Batch
from meshwright.runtime.loss_divisors import MicroBatchCounts

if TYPE_CHECKING:
    from meshwright.runtime.engine import Engine
    from meshwright.runtime.optim.updater import Updater


Range = tuple[int, int]
Ranges = dict[str, tuple[Range, ...]]
"""The smallest and the largest size of each dimension except the rows. The key is a text with the names in a batch and
their numbers of dimensions (`sizes_of`)."""


class FirstOutside(NamedTuple):
    """A micro-batch with unknown sizes. `said`: a description, or '' if all sizes are known. `at`: the index of the
    micro-batch in the step, or -1."""

    said: str = ""
    at: int = -1


class SizeRanges:
    """Collects the sizes of batches and finds batches with unknown sizes. For each dimension, the sizes from the
    smallest to the largest collected size are known.

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
        """Extends the known ranges by the sizes of `batches`."""
        for form, sizes in map(sizes_of, batches):
            before = self.known.get(form, tuple((size, size) for size in sizes))
            self.known[form] = tuple(
                (min(low, size), max(high, size)) for (low, high), size in zip(before, sizes, strict=True)
            )

    def first_outside(self, batches: Sequence[Batch]) -> FirstOutside:
        """Returns the micro-batch with unknown sizes; if there are several, the one with the largest sizes. Before the
        first `add`, all sizes count as known."""
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
    """Returns a text with the name and the number of dimensions of each tensor in `batch`, and all sizes except the
    numbers of rows."""
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
    """Detects that the optimizer is not the one that `parallelize` has made, or was changed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._hooks = optimizer, _count_step_hooks(optimizer)

    def check(self, optimizer: torch.optim.Optimizer, updater: Updater) -> None:
        """Raises InputError if `optimizer` is not the optimizer that `parallelize` has made, if the number of
        parameters in its groups has changed, or if step hooks were added after `parallelize`."""
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
    """Raises InputError under inference_mode and no_grad, where a step would train nothing, and under autocast, where a
    step would not compute in the dtypes of its precision."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        raise InputError(
            Message("the step is inside {mode}, where no parameter gets a gradient: call it outside", mode=mode)
        )
    if torch.is_autocast_enabled(device.type):
        raise InputError(
            Message(
                "the step is inside torch.autocast, so it would not compute in the dtypes of the precision given to "
                "parallelize: call it outside, and give parallelize a precision, 'bf16' or 'fp16'"
            )
        )


def _count_step_hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


MAX_CHECKED_VALUES = 2
"""If a number changes, this number of further values is checked; after that, all its values count as known."""


class Outside(NamedTuple):
    """How a step of one rank differs from the checked conditions. A text field is '' if nothing differs. `changed`: a
    changed key, type, mode, hook or value. `code`: a new code path. `at`: the index of a micro-batch that differs, or
    -1 if the difference is not in one micro-batch."""

    trained: str = ""
    """The name of a parameter that was frozen and is trained now."""
    changed: str = ""
    code: str = ""
    sizes: str = ""
    """Sizes for which the preflight checks have not run."""
    unproven: str = ""
    """Sizes that no proof covers."""
    at: int = -1
    counts: tuple[MicroBatchCounts, ...] = ()
    """The divisors of the user's loss in the micro-batches of this rank (runtime/loss_divisors.py)."""
    has_other_counts: bool = False
    """Whether `counts` differ from the last ones that were compared between the ranks."""

    @property
    def is_any(self) -> bool:
        """Returns whether the step needs a check, a proof, or a comparison of the divisors of the loss."""
        return bool(self.unchecked or self.unproven or self.has_other_counts)

    @property
    def unchecked(self) -> str:
        """Returns why the preflight checks must run again, or ''."""
        return self.changed or self.code or self.sizes

    def asks_for_proof(self, is_fresh: bool) -> str:
        """Returns why a proof must run, or ''. `is_fresh`: whether a proof ran directly before this step, since such a
        proof has covered the changed values."""
        return self.code or self.unproven or ("" if is_fresh else self.changed)


class StepGuards:
    """The guards of one rank. `outside` compares a step with the checked conditions. `accept` records the conditions of
    a checked step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = OptimizerGuard(optimizer)
        self._forms: dict[Hashable, set[Hashable]] = {}
        """The checked values of the plain numbers in a batch, by its keys, types and dimensions."""
        self._sizes = SizeRanges()
        self._places: list[GuardedValue] = []
        self._values: list[Any] = []
        self._times: dict[str, int] = {}
        self._trained: list[bool] = []
        self._hooks: list[int] = []
        self._counts: MicroBatchCounts | None = None

    def untrained(self, engine: Engine) -> str:
        """Returns the name of a parameter that was frozen at the last call and is trained now, or ''."""
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
        """Raises InputError if the user's code has replaced the optimizer, added hooks or entered a torch mode that a
        step does not allow. It is called before each step and before each backward."""
        check_torch_modes(engine.mesh.device)
        self._optimizer.check(optimizer, engine.updater)
        self.check_hooks(engine)

    def check_hooks(self, engine: Engine) -> None:
        """Raises InputError if a parameter got a post-accumulate-grad hook since the last call. When such a hook runs,
        the gradient is no longer in `.grad`."""
        now = [len(parameter._post_accumulate_grad_hooks or ()) for _, parameter in _group_parameters(engine)]
        before, self._hooks = self._hooks or now, now
        name = next(
            (name for (name, _), had, has in zip(_group_parameters(engine), before, now, strict=True) if has > had),
            None,
        )
        if name is not None:
            raise InputError(
                Message(
                    "{name} got a post-accumulate-grad hook after parallelize, but when the hook runs, the gradient is "
                    "no longer in .grad: register the hook before parallelize, or use register_hook",
                    name=name,
                )
            )

    def outside(self, engine: Engine, batches: Sequence[Batch], proven: SizeRanges) -> Outside:
        """Returns how the current step differs from the checked conditions. `batches`: the micro-batches of this rank.
        `proven`: the batch sizes that proofs cover."""
        code, at = engine.preflight.paths.unknown(batches)
        checked, unproven = self._sizes.first_outside(batches), proven.first_outside(batches)
        at = at if at >= 0 else unproven.at if unproven.said else checked.at
        divisors = engine.objective.divisors if engine.outer is None else []
        counts = tuple((each.rows, each.counts()) for each in divisors if each.divisors)
        return Outside(
            self.untrained(engine),
            self._changed(batches),
            f"tensor values select a code path that was not checked: {code}" if code else "",
            checked.said,
            unproven.said,
            at,
            counts,
            any(each != self._counts for each in counts),
        )

    def _changed(self, batches: Sequence[Batch]) -> str:
        """Returns a description of a changed key, type, mode, hook or value; '' if nothing has changed since the last
        check, or no check has run."""
        for form, numbers in map(_batch_signature, batches) if self._forms else ():
            if form not in self._forms:
                return f"the batch has other keys, types or dimensions: {', '.join(str(each[0]) for each in form)}"
            if numbers not in self._forms[form] and len(self._forms[form]) <= MAX_CHECKED_VALUES:
                return f"the batch has other numbers: {', '.join(map(str, numbers))}"
        for (name, stored, key), before in zip(self._places, self._values, strict=True):
            now = stored.get(key)
            if now is not before and not is_same(now, before):
                return f"{name} is {_repr(now)} and was {_repr(before)}"
        return ""

    def accept_counts(self, counts: Sequence[MicroBatchCounts]) -> None:
        """Records the divisors of the loss of all ranks, which were found to be even."""
        self._counts = next(iter(counts), None)

    def accept(self, engine: Engine, batches: Sequence[Batch]) -> None:
        """Records the conditions of the current step as checked."""
        for form, numbers in map(_batch_signature, batches):
            self._forms.setdefault(form, set()).add(numbers)
        self._sizes.add(batches)
        engine.preflight.paths.accept()
        before = {name: value for (name, _, _), value in zip(self._places, self._values, strict=True)}
        places = [
            each
            for each in guarded_values(engine.model, engine.objective.loss)
            if self._times.get(each.name, 0) <= MAX_CHECKED_VALUES
        ]
        for name, stored, key in places:
            if name in before and not is_same(before[name], stored.get(key)):
                self._times[name] = self._times.get(name, 0) + 1
        self._places = [each for each in places if self._times.get(each.name, 0) <= MAX_CHECKED_VALUES]
        self._values = [each.stored.get(each.key) for each in self._places]


def _repr(value: Any) -> str:
    """Returns a short description of a value that has changed, on one line."""
    return " ".join(reprlib.repr(value).split())


def _group_parameters(engine: Engine) -> list[tuple[str, nn.Parameter]]:
    return [each for unit in engine.zero.units for each in unit.parameters.items()]


def _batch_signature(batch: Batch) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns two tuples: the names, types and numbers of dimensions of a batch, and the values of its plain numbers
    and zero-dimensional tensors."""
    forms: list[Any] = []
    numbers: list[Any] = []
    for name, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            forms.append((name, str(value.dtype), value.ndim))
            numbers += [] if value.ndim else [value.item()]
        else:
            forms.append((name, type(value).__name__))
            numbers += plain_leaves(value)
    return tuple(forms), tuple(numbers)
