"""Compiles blocks with torch.compile. The build pass `wrap_blocks` uses it. All code outside of blocks stays eager.

Only the forward inside a block wrapper is compiled. The wrapper's other work stays eager: all-gather of weights,
recompute, sequence cuts and stage boundaries. A block of tensor and context parallelism is one graph: its collectives
and ring attention are operators of the graph (comm/graph_collectives.py). The compiler skips other replaced layers of
the project: those with deferred weight gradients, and experts. In a block with such layers, only the code
between them is compiled. All identical blocks use the code that was compiled for the first of them.

[Note: what the compiler keeps] In a compiled block the compiler decides which tensors forward saves for backward. It
saves the operands of matrix products, and recomputes the results of norms and activations. With selective recompute the
compiler saves fewer tensors: it must save the results of operations that analysis/recompute_tape.py does not consider
cheap, and may recompute all others, including operands of matrix products. (torch's own rule considers attention on a
CPU cheap.)

Results equal those of eager mode within the rounding of fused operations. If the machine has no compiler, a plan with
`compile` is refused with a one-line error.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.analysis.recompute_tape import RECOMPUTABLE_OPS
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.spec.plan import Plan

COMPILER_ENV = "MESHWRIGHT_COMPILER"
"""Environment variable: the backend of torch.compile, by default inductor."""


def check_compiler(plan: Plan, device: torch.device) -> None:
    """Checks that blocks of `plan` can be compiled on `device`.

    Raises:
        InputError: the machine lacks a program that Inductor needs.
    """
    if not plan.compile:
        return
    if compiler_backend() != "inductor":
        return
    if obstacle := backend_of(device).compile_obstacle():
        raise InputError(Message("plan {plan}: compile needs {obstacle}", plan=plan.name, obstacle=obstacle))


def compiler_backend() -> str:
    """Returns the backend of torch.compile: the value of the environment variable, or inductor."""
    return os.environ.get(COMPILER_ENV) or "inductor"


def compile_block(
    forward: Callable[..., Any], block: nn.Module, uses_sac: bool, defers_wgrad: bool
) -> Callable[..., Any]:
    """Returns a compiled version of `forward`, the forward of `block`. The first call compiles. Layers and hooks inside
    of `block` that this project has replaced or added stay eager.

    `uses_sac`: whether the block uses selective recompute. `defers_wgrad`: whether its weight gradients are deferred.
    """
    for module in block.modules():
        _disable_compiler(module, block, defers_wgrad)
    chosen = _backend_for_sac if uses_sac else _backend_for_deferred_wgrad if defers_wgrad else _backend
    compiled: Callable[..., Any] = torch.compile(forward, backend=chosen, dynamic=False)
    return compiled


def _backend(graph: Any, given: Any, **options: Any) -> Any:
    """Compiles the graph of a block. Backward repeats the all-gathers of the forward, whose inputs are smaller than
    their results ([Note: region input] in tensor_parallel/column.py)."""
    from torch._dynamo import lookup_backend

    for node in graph.graph.nodes:
        if node.target is torch.ops.meshwright.collective.default and "all_gather" in node.args:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return lookup_backend(compiler_backend())(graph, given, **options)


def _backend_for_deferred_wgrad(graph: Any, given: Any, **options: Any) -> Any:
    """Compiles the graph of a block with deferred weight gradients. With a separate compiler backend, torch compiles
    separate code for these blocks. Otherwise torch could run this code when it recomputes other blocks."""
    from torch._dynamo import lookup_backend

    return lookup_backend(compiler_backend())(graph, given, **options)


def _backend_for_sac(graph: Any, given: Any, **options: Any) -> Any:
    """Compiles the graph of a block with selective recompute ([Note: what the compiler keeps]). This compiler backend
    uses private names of torch. tests/ranks/test_compile.py fails if torch renames them."""
    from torch._functorch import config

    nodes = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    for node in nodes:
        if not {_target_name(node), f"__{_target_name(node)}__"} & RECOMPUTABLE_OPS:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if _target_name(node) in ("chunk", "split"):
            _replace_split_with_slices(graph.graph, node)
    graph.recompile()
    with config.patch(aggressive_recomputation=True, recompute_views=True):
        return _backend(graph, given, **options)


def _target_name(node: Any) -> str:
    """Returns the name of the function or method that a graph node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _replace_split_with_slices(graph: Any, node: Any) -> None:
    """Replaces a `split` or `chunk` node by slices, which the compiler treats as views. Otherwise the compiler would
    save the parts of the tensor, and results computed from them, in addition to the full tensor."""
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


def _disable_compiler(module: nn.Module, block: nn.Module, defers_wgrad: bool) -> None:
    """Excludes the hooks of `module` from compilation, and its `forward` if it was replaced and `module` is not `block`
    itself. Hooks and forwards with a true `is_traceable` are compiled, unless the block defers weight gradients."""
    stored: Any = vars(module)
    if module is not block and "forward" in stored:
        module.forward = _traced_or_disabled(stored["forward"], defers_wgrad)  # type: ignore[method-assign]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in hooks.items():
            hooks[number] = _traced_or_disabled(hook, defers_wgrad)


def _traced_or_disabled(function: Any, defers_wgrad: bool) -> Any:
    owner = getattr(function, "__self__", function)  # the object of a bound method
    is_traced = not defers_wgrad and getattr(owner, "is_traceable", False)
    return function if is_traced else torch.compiler.disable(function)


def compile_seconds() -> float:
    """Returns the seconds that this process has spent in compilation. The counter is private to torch.
    tests/ranks/test_compile.py fails if torch renames it."""
    from torch._dynamo.utils import calculate_time_spent

    spent = calculate_time_spent()
    return float(spent.get("total_wall_time", 0.0))


def first_step_message(took: float) -> str:
    """Returns the message after a run's first step, which took `took` seconds."""
    return Message(
        "compiled blocks: the compiler took {compiler:.1f} s until the end of the first step, which took {step:.1f} s",
        compiler=compile_seconds(),
        step=took,
    )
