"""Compiled blocks: each block's own computation goes through torch.compile, everything around it stays as it is.

What is compiled is the forward inside a gate: gathering of weights, recompute, cuts of the sequence and stages lie
outside. Collectives and
layers with a forward of ours (tensor parallelism, weight gradients that are put off, experts) wait for other ranks: the
compiler is kept out of
them, as out of attention over context ranks, so that a block of theirs is compiled in the pieces between. Blocks are
alike, so the first one's code
serves all.

[Note: what the compiler keeps] Of a compiled block the compiler cuts forward from backward: it keeps what products
read, and makes again on the way what
norms and activations give besides. Where a block recomputes by operation, it keeps least instead, by the rule of
analysis/remat/tape.py: whatever is not cheap
there (attention on a processor is, to torch) must be saved, and all else may be made again, for what products read too.

Results are those of eager mode within the rounding of fused operations. Where a compiler is missing the plan is refused
in one line.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.analysis.remat.tape import RECOMPUTABLE_OPS
from meshwright.core.errors import InputError
from meshwright.runtime.backend import backend_of
from meshwright.runtime.pipeline.block_wrapper import BlockWrapper
from meshwright.spec.plan import Plan

COMPILER_ENV = "MESHWRIGHT_COMPILER"
"""Environment variable: another backend of torch.compile than inductor."""


def check_compiler(plan: Plan, device: torch.device) -> None:
    """InputError where blocks of `plan` cannot be compiled on `device`."""
    if not plan.compile:
        return
    if compiler_backend() != "inductor":
        return
    if obstacle := backend_of(device).compile_obstacle():
        raise InputError(f"plan {plan.name}: compile needs {obstacle}")


def compiler_backend() -> str:
    return os.environ.get(COMPILER_ENV) or "inductor"


def compile_blocks(
    gates: Sequence[BlockWrapper], blocks: Sequence[nn.Module], lean: Collection[int], put_off: Collection[int]
) -> None:
    """The computation inside of the gates of `blocks` is compiled when it first runs. `lean`: those that recompute by
    operation; `defer_wgrad`: those whose
    weights wait for W, in pieces."""
    for gate in gates:
        if gate.index is not None:
            block = blocks[gate.index]
            for module in block.modules():
                _disable_compiler(module, block)
            chosen = (
                _backend_for_sac
                if gate.index in lean
                else _backend_for_deferred_wgrad
                if gate.index in put_off
                else compiler_backend()
            )
            gate.inner = torch.compile(gate.inner, backend=chosen, dynamic=False)


def _backend_for_deferred_wgrad(graph: Any, given: Any, **options: Any) -> Any:
    """A backend of its own, and so code of its own: else a block that recomputes could be made again by the pieces of
    one whose weights are put off."""
    from torch._dynamo import lookup_backend

    return lookup_backend(compiler_backend())(graph, given, **options)


def _backend_for_sac(graph: Any, given: Any, **options: Any) -> Any:
    """A backend of torch.compile: [Note: what the compiler keeps]. Names of torch that are not public:
    tests/mesh/test_compiled.py fails when they move."""
    from torch._dynamo import lookup_backend
    from torch._functorch import config

    nodes = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    for node in nodes:
        if not {_target_name(node), f"__{_target_name(node)}__"} & RECOMPUTABLE_OPS:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if _target_name(node) in ("chunk", "split"):
            _replace_split_with_slices(graph.graph, node)
    graph.recompile()
    with config.patch(aggressive_recomputation=True, recompute_views=True):
        return lookup_backend(compiler_backend())(graph, given, **options)


def _target_name(node: Any) -> str:
    """Of the function or the method that a node of a graph calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _replace_split_with_slices(graph: Any, node: Any) -> None:
    """Parts of a tensor as slices of it, which the compiler knows as such: it would keep a part and what is made of
    another beside the whole."""
    parts = node.meta["example_value"]
    if (
        len(parts) < 2
        or not node.args
        or any(user.target is not operator.getitem or not isinstance(user.args[1], int) for user in node.users)
    ):
        return
    shape = node.args[0].meta["example_value"].shape
    dim = next(dim for dim, size in enumerate(shape) if size != parts[0].shape[dim])
    starts = [0, *accumulate(part.shape[dim] for part in parts)]
    for user in [*node.users]:
        place = user.args[1] % len(parts)
        with graph.inserting_before(user):
            part = graph.call_function(torch.narrow, (node.args[0], dim, starts[place], parts[place].shape[dim]))
        part.meta = user.meta
        user.replace_all_uses_with(part)
        graph.erase_node(user)
    graph.erase_node(node)


def _disable_compiler(module: nn.Module, block: nn.Module) -> None:
    """The compiler does not look into forwards and hooks of ours."""
    held: Any = vars(module)
    if module is not block and "forward" in held:
        module.forward = torch.compiler.disable(held["forward"])  # type: ignore[method-assign]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in hooks.items():
            hooks[number] = torch.compiler.disable(hook)


def compile_seconds() -> float:
    """That this process has spent compiling. The counter is private to torch: tests/ranks/test_compile.py fails when it
    moves."""
    from torch._dynamo.utils import calculate_time_spent

    spent = calculate_time_spent()
    return float(spent.get("total_wall_time", 0.0))


def first_step_message(took: float) -> str:
    """What a run says after its first step, which took so many seconds."""
    return f"compiled blocks: {compile_seconds():.1f} s for the compiler up to the end of the first step, which took {took:.1f} s"
