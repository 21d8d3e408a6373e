"""An isolated pass under the plan: afterwards the engine, its model and the random states are unchanged.

During the pass, dropout multiplies by a constant factor instead of a random mask, under the plan and on one device. So
a proof detects a dropout that is missing under the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.analysis.dry_run import dry_run
from meshwright.analysis.run_conditions import set_seed
from meshwright.runtime.backend import backend_of
from meshwright.runtime.engine import Engine
from meshwright.runtime.preflight.step_checks import Preflight
from meshwright.runtime.tensor_parallel.random import has_dropout

UNCHECKED_STEP = 4
"""A step count for which `CHECKED_STEPS` requires no check: after 4 completed steps, step 5 is next, and it is not in
`CHECKED_STEPS`."""
MIN_DROPOUT_FACTOR = 0.75
"""The factor that replaces dropout at rate 0. The factor grows with the rate, so a proof detects a wrong rate."""


class ConstantDropout(TorchFunctionMode):
    """Replaces active dropout of rate p by the factor MIN_DROPOUT_FACTOR + p / 8. Instead of attention weights, it
    scales the output of the attention."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "scaled_dot_product_attention":
            rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            if rate > 0.0:
                args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
                kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
                return function(*args, **kwargs) * dropout_factor(rate)
        elif name.strip("_").endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            rate = given.get("p", 0.0 if name.startswith("_") else 0.5)
            draws = given.get("training", given.get("train", True))
            return given["input"] * dropout_factor(rate) if draws and rate > 0.0 else given["input"]
        return function(*args, **kwargs)


def dropout_factor(rate: float) -> float:
    """Returns the factor for a dropout rate."""
    return MIN_DROPOUT_FACTOR + rate / 8


@contextmanager
def preserve_engine(engine: Engine) -> Iterator[None]:
    """Restores the engine's state that a backward pass changes, except gradients: the set of reached parameters,
    records, and the error feedback of compression."""
    preflight = engine.preflight
    unchecked = Preflight(preflight.stages_run, UNCHECKED_STEP, paths=preflight.paths)
    learns = nullcontext() if engine.mesh.plan.compile else preflight.paths.learning()
    with engine.executor.checked_by(unchecked), engine.zero.isolate_pass(), learns:
        yield


@contextmanager
def isolate_pass(engine: Engine, trains: bool, seed: int) -> Iterator[None]:
    """Restores random states and the model when the context ends. Inside the context, dropout is a constant factor.
    With `trains`, modules keep their training modes; otherwise they are in eval mode."""
    engine.mesh.error_propagator.report_alive()
    model, compiles = engine.model, engine.mesh.plan.compile
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(backend_of(engine.mesh.device).fork_rng(engine.mesh.device))
        set_seed(seed)
        stack.enter_context(dry_run(model, loss=engine.objective.loss))
        for module, mode in modes if trains else ():
            module.training = mode
        if compiles and has_dropout(model):  # a compiled block would recompile for the mode that replaces dropout
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if not compiles or has_dropout(model):
            stack.enter_context(ConstantDropout())
        yield
