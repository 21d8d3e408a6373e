"""Activation recompute: runs the forward of a block so that autograd saves only the tensors that the plan allows. The
block wrappers (pipeline/block_wrapper.py) call it.

The plan gives each block one of these modes:

    none    the block saves every tensor that autograd needs for backward
    full    the block saves only its input
    attn    as `none`, except the tensors inside scaled_dot_product_attention
    sac     as `none`, except the results of cheap operations (analysis/recompute_tape.py)

With activation offload, the saved tensors are in host memory or on disk instead of on the device.

Guarantees: gradients with recompute are bitwise equal to gradients without recompute, because the same kernels run
again on the same values and the same random state. The random state includes the model's own generators
(analysis/own_generators.py).

Source of `attn`: Korthikanti et al., arXiv 2205.05198, section 5.

Some buffers, such as running means, change in the forward of a block. Recompute reads the values that these buffers had
in the original forward, and does not change the buffers. Nor does it change lists, dictionaries and sets of the block's
code and hooks, such as a list of activations.

[Note: buffer values of a pass] Between the forward and the backward of a block, other forwards of the block may change
its buffers (pipelines, a block that is called twice). So full recompute reads copies of the buffers from the start of
the original forward. Selective recompute reads copies of the values that the original forward read. The first forward
copies all buffers and determines which of them change. Later forwards copy and replace only these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from meshwright.analysis.code_state import CodeStateSnapshot, attribute_containers, state_places
from meshwright.analysis.own_generators import GeneratorStates
from meshwright.analysis.recompute_min_cut import RematPlanCache
from meshwright.analysis.recompute_tape import RematTape, active_saved_tensor_hooks
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.models.documents import document_attention
from meshwright.runtime.offload.activation_offload import (
    ActivationOffload,
    BlockActivations,
    storage_id,
    unpack_activation,
)
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.enums import Recompute, offloads_activations
from meshwright.spec.grid import offloads_block, recompute_at


class BufferSnapshot(NamedTuple):
    """A buffer before a forward of its block. `holder`: the `_buffers` dict that contains the buffer. `version`: the
    autograd version counter of the buffer. `value`: a copy of its values, or None if the first forward did not change
    it."""

    holder: dict[str, torch.Tensor | None]
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor | None

    @property
    def has_moved(self) -> bool:
        """Whether the buffer has changed since the snapshot. If the snapshot has a copy, the values are compared too,
        because batch norm updates running means without advancing the version counter."""
        written = self.holder.get(self.name) is not self.buffer or self.buffer._version != self.version
        return written or (self.value is not None and not torch.equal(self.buffer, self.value))


class MutatedBuffers:
    """Determines which buffers of one block change in its forward."""

    def __init__(self, module: nn.Module) -> None:
        self.block = module
        self._modules = [each for each in module.modules() if each._buffers]
        self._moved: set[tuple[int, str]] | None = None
        """The buffers that the first forward changed, as (id of the `_buffers` dict, name). None before the first
        forward."""

    def before(self) -> list[BufferSnapshot]:
        """Returns a snapshot of every buffer. The first call copies all values. Later calls copy only the values of the
        buffers that the first forward changed."""
        found = [
            (each._buffers, name, buffer)
            for each in self._modules
            for name, buffer in each._buffers.items()
            if buffer is not None
        ]
        return [
            BufferSnapshot(
                holder, name, buffer, buffer._version, buffer.detach().clone() if self._may_move(holder, name) else None
            )
            for holder, name, buffer in found
        ]

    def _may_move(self, holder: dict[str, torch.Tensor | None], name: str) -> bool:
        return self._moved is None or (id(holder), name) in self._moved

    def moved(self, before: list[BufferSnapshot]) -> list[BufferSnapshot]:
        """Returns those snapshots in `before` whose buffers the first forward changed. Must be called after each
        forward.

        Raises:
            InputError: this forward has changed a buffer that the first forward did not change.
        """
        if self._moved is None:
            self._moved = {(id(each.holder), each.name) for each in before if each.has_moved}
        delayed = next((each.name for each in before if each.value is None and each.has_moved), None)
        if delayed is not None:
            raise InputError(
                Message(
                    "the buffer {delayed} of a block changes in a later forward but did not change in the first "
                    "forward, so recompute would read a wrong value: leave recompute out",
                    delayed=delayed,
                )
            )
        return [each for each in before if self._may_move(each.holder, each.name)]


class RestoredBuffers:
    """Inside the context, replaces each buffer in `moved` by a copy of its snapshot. On exit, restores the replaced
    tensors."""

    def __init__(self, moved: list[BufferSnapshot]) -> None:
        self.moved = moved
        self._now: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._now = [each.holder.get(each.name) for each in self.moved]
        for each in self.moved:
            assert each.value is not None
            each.holder[each.name] = each.value.clone()

    def __exit__(self, *raised: Any) -> None:
        for each, now in zip(self.moved, self._now, strict=True):
            each.holder[each.name] = now


BlockForward = Callable[..., Any]

FUNCTORCH_HOOK_ERROR = "don't yet support saved tensor hooks"
"""Part of the message of the error that torch.func raises if saved-tensor hooks are active."""


def _no_recompute(place: int) -> Recompute:
    return Recompute.none


@dataclass(frozen=True)
class RecomputePolicy:
    """Applies recompute and offload to all blocks of a rank.

    `how` and `sends` take the index of a block in its stage. `how` returns the recompute mode of the block, and `sends`
    returns whether the block offloads its activations. `offload`: the activation offload, or None if no block offloads.
    `cuts`: a cache of which tensors `sac` saves, by the graph of a block. `weights`: the `storage_id` of each parameter
    group's weights. `generators`: the model's own random generators.
    """

    how: Callable[[int], Recompute] = _no_recompute
    offload: ActivationOffload | None = None
    sends: Callable[[int], bool] = bool
    cuts: RematPlanCache = field(default_factory=dict)
    weights: Collection[int] = ()
    generators: Collection[torch.Generator] = ()

    @classmethod
    def of(
        cls, mesh: ParallelContext, weights: Collection[int], generators: Collection[torch.Generator]
    ) -> RecomputePolicy:
        """Returns the policy of the plan of `mesh`. `weights`: the `storage_id` of each parameter group's weights,
        which are never offloaded as activations. `generators`: see the class.

        The policy excludes two cases that other modules handle: `attn` over context ranks
        (context_parallel/attention.py), and `sac` in compiled blocks (compile.py).
        """
        plan = mesh.plan
        excluded = {Recompute.attn} if plan.cp > 1 else set()
        excluded |= {Recompute.sac} if plan.compile else set()

        def mode_of_block(place: int) -> Recompute:
            return Recompute.none if (how := recompute_at(plan, place)) in excluded else how

        offloaded = (
            ActivationOffload(mesh.device, weights, mesh.activation_store)
            if offloads_activations(plan.offload)
            else None
        )
        return cls(mode_of_block, offloaded, partial(offloads_block, plan), weights=weights, generators=generators)

    def __call__(
        self, forward: BlockForward, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], moving: MutatedBuffers
    ) -> Any:
        """Runs the `forward` of the block with index `place` in its stage and returns its output. `moving` tracks the
        block's buffers.

        Raises:
            InputError: the block computes gradients with torch.func, and the plan recomputes or offloads it. Or the
                mode is `attn`, and the block does not call scaled_dot_product_attention. Or the mode is `full` or
                `sac`, and the block changes a buffer that its first forward did not change.
        """
        try:
            if self.offload is None or not self.sends(place):
                return self._run(forward, place, moving, None, args, kwargs)
            with self.offload.collect_block(place) as block:
                return self._run(forward, place, moving, block, args, kwargs)
        except RuntimeError as error:
            if FUNCTORCH_HOOK_ERROR not in str(error):
                raise
            raise InputError(
                Message(
                    "this block computes gradients with torch.func, which does not allow saved-tensor hooks: leave "
                    "recompute and off-activations out"
                )
            ) from None

    def _run(
        self,
        forward: BlockForward,
        place: int,
        moving: MutatedBuffers,
        block: BlockActivations | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        how = self.how(place)
        if how == Recompute.full:
            return _recompute_full(forward, moving, self.generators, args, kwargs)
        if how == Recompute.attn:
            return _recompute_attention(forward)(*args, **kwargs)
        return (
            self._by_operation(forward, moving, block, args, kwargs)
            if how == Recompute.sac
            else forward(*args, **kwargs)
        )

    def _by_operation(
        self,
        forward: BlockForward,
        moving: MutatedBuffers,
        block: BlockActivations | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        before = moving.before()
        tape = RematTape(
            tree_leaves((args, kwargs)),
            block.keep if block else None,
            unpack_activation if block else None,
            weights=self.weights,
        )
        with saved_tensors_hooks(tape.pack, tape.unpack), tape:
            output = forward(*args, **kwargs)
        tape.finish(self.cuts, {storage_id(each.buffer) for each in moving.moved(before)})
        return output


def _recompute_full(
    forward: BlockForward,
    moving: MutatedBuffers,
    generators: Collection[torch.Generator],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    before = moving.before()
    as_before, modes = RestoredBuffers(before), function_modes()
    restored: list[AbstractContextManager[Any]] = [as_before] if any(each.value is not None for each in before) else []
    restored += [GeneratorStates(generators)] if generators else []
    output = checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=lambda: (
            nullcontext(),
            RecomputeContext(
                lambda: with_function_modes(modes, early_stop_in_script(), preserve_state(moving.block), *restored)
            ),
        ),
        **kwargs,
    )
    as_before.moved = moving.moved(before)
    return output


class RecomputeContext:
    """Enters a new context of `make` for each recompute, because torch recomputes a block twice if a gradient is itself
    differentiated."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


@contextmanager
def with_function_modes(modes: Sequence[TorchFunctionMode], *restored: AbstractContextManager[Any]) -> Iterator[None]:
    """Activates `modes`, the function modes of the original forward (one may disable dropout, for example), and enters
    the contexts `restored`. Recompute needs this context, because torch deactivates function modes during backward."""
    with ExitStack() as stack:
        for context in restored:
            stack.enter_context(context)
        for mode in modes:
            if mode not in function_modes():
                stack.enter_context(mode)
        yield


@contextmanager
def preserve_state(block: nn.Module) -> Iterator[None]:
    """Restores on exit the state that the code of `block` and the user's hooks in it change, such as a list of
    activations, because recompute runs this code again."""
    before = CodeStateSnapshot(chain(state_places(block), attribute_containers(block.modules())))
    try:
        yield
    finally:
        before.restore()


@contextmanager
def early_stop_in_script() -> Iterator[None]:
    """Lets torch stop a recompute inside a TorchScript function.

    Torch stops a recompute with an exception once all saved tensors exist. TorchScript turns an exception that passes
    through it into a RuntimeError. This context raises torch's exception again. If another failure caused the
    RuntimeError, torch reports that recomputed tensors are missing.
    """
    try:
        yield
    except RuntimeError as error:
        if "TorchScript interpreter" not in str(error):
            raise
        raise _StopRecomputationError from None


@contextmanager
def preserve_buffers(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restores the values of `buffers` on exit, without advancing their version counters. If a counter advanced and
    autograd has saved the buffer, backward would raise an error, even if it does not read the values of the buffer."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)


def _recompute_attention(forward: BlockForward) -> BlockForward:
    def run(*args: Any, **kwargs: Any) -> Any:
        with RecomputeAttention() as core:
            output = forward(*args, **kwargs)
        if not core.met:
            raise InputError(
                Message(
                    "rc-attn: this block does not call scaled_dot_product_attention, so its attention "
                    'cannot be recomputed; build the model with attn_implementation="sdpa", or use rc-full'
                )
            )
        return output

    return run


class RecomputeAttention(TorchFunctionMode):
    """Makes scaled_dot_product_attention, or attention over packed documents, save only its inputs. Has no effect
    inside an activation checkpoint of the model's own code, which already recomputes attention. torch.compile traces
    this mode, so compiled blocks recompute attention too."""

    def __init__(self) -> None:
        super().__init__()
        self.met, self.keeper = False, active_saved_tensor_hooks()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_core = function in (F.scaled_dot_product_attention, document_attention)
        self.met |= is_core
        if not is_core or (not torch.compiler.is_compiling() and active_saved_tensor_hooks() != self.keeper):
            return function(*args, **(kwargs or {}))
        return checkpoint(function, *args, use_reentrant=False, **(kwargs or {}))
