"""Runs forward and backward of a proof without side effects, and records digests of the module outputs. Proof runs
(proof_run.py) use it under the plan and on one device.

`isolate_pass` and `preserve_engine` restore the model, the random states and the engine. In between, dropout multiplies
by a constant factor instead of a random mask. This lets a proof detect dropout that is missing under the plan.

`OutputDigests` locates the first module whose output under the plan differs from that on one device. It stores no
output. A digest has the number of elements of a module's outputs, their sum, the sum of their squares, and the sum of
the squares of what bfloat16 would round off. The last number shows a module that computes in a lower precision: its
rounding errors cancel in the other sums. Under the plan, digests are added up over all ranks. An output may be sharded
by rows, positions or features, or replicated. The number of elements over all ranks, divided by the number on one
device, says how often each element is counted. Divided by this ratio, the sums under the plan are comparable with the
sums on one device, however the output is sharded. Modules whose ratio is not an integer are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.analysis.dry_run import dry_run
from meshwright.analysis.run_conditions import scale_first, set_seed, without_inner_dropout
from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.engine import Engine
from meshwright.runtime.preflight.step_checks import Preflight
from meshwright.runtime.stage_placeholder import StagePlaceholder
from meshwright.runtime.tensor_parallel.random import has_dropout

UNCHECKED_STEP = 4
"""After this number of completed steps, the engine does not check the next step: step 5 is not in `CHECKED_STEPS`."""
MIN_DROPOUT_FACTOR = 0.75
"""The factor that replaces dropout as the rate approaches 0. The factor grows with the rate, so that a proof detects a
wrong rate."""


class ConstantDropout(TorchFunctionMode):
    """While this mode is active, dropout of rate p > 0 in training mode multiplies by MIN_DROPOUT_FACTOR + p / 8.
    Dropout inside attention and recurrent layers is replaced by this factor on their output."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        args, kwargs, inner = without_inner_dropout(name, args, kwargs)
        if inner > 0.0:
            return scale_first(function(*args, **kwargs), dropout_factor(inner))
        if name.strip("_").endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            rate = given.get("p", 0.0 if name.startswith("_") else 0.5)
            draws = given.get("training", given.get("train", True))
            return given["input"] * dropout_factor(rate) if draws and rate > 0.0 else given["input"]
        return function(*args, **kwargs)


def dropout_factor(rate: float) -> float:
    """Returns the constant factor that replaces dropout of this rate."""
    return MIN_DROPOUT_FACTOR + rate / 8


@contextmanager
def preserve_engine(engine: Engine) -> Iterator[None]:
    """A context that restores what a backward changes in the engine, except gradients: the records of which parameters
    get a gradient, and the residuals of gradient compression. Step checks are off inside it."""
    preflight = engine.preflight
    unchecked = Preflight(preflight.stages_run, UNCHECKED_STEP, divided=True, paths=preflight.paths)
    learns = nullcontext() if engine.mesh.plan.compile else preflight.paths.learning()
    with engine.executor.checked_by(unchecked), engine.zero.isolate_pass(), learns:
        yield


@contextmanager
def isolate_pass(engine: Engine, trains: bool, seed: int) -> Iterator[None]:
    """A context that restores random states and the model at its end. Inside it, the random seed is `seed` and dropout
    is a constant factor. `trains`: whether modules keep their training modes; otherwise they are in eval mode."""
    engine.mesh.error_propagator.report_alive()
    model, compiles = engine.model, engine.mesh.plan.compile
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(backend_of(engine.mesh.device).fork_rng(engine.mesh.device))
        set_seed(seed)
        stack.enter_context(dry_run(model, loss=engine.objective.loss))
        for module, mode in modes if trains else ():
            module.training = mode
        if compiles and has_dropout(model):  # eager: ConstantDropout would trigger recompilation of every block
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if not compiles or has_dropout(model):
            stack.enter_context(ConstantDropout())
        yield


LOST_DIGITS = 1e-7
"""A smaller change of `OutputDigest.rounded`, relative to `squares`, is noise. Rounding to bfloat16 changes it by about
2^-18 / 3 = 1.3e-6."""


class OutputDigest(NamedTuple):
    """The digest of a module's outputs: the number of elements, their sum, the sum of their squares, and the sum of the
    squares of what bfloat16 would round off."""

    elements: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    rounded: float = 0.0

    def plus(self, values: torch.Tensor) -> OutputDigest:
        """Returns the digest with one more output `values`, of any shape, in float64."""
        rest = values - values.bfloat16()
        return OutputDigest(
            self.elements + values.numel(),
            self.total + float(values.sum()),
            self.squares + float(values.square().sum()),
            self.rounded + float(rest.square().sum()),
        )

    def difference(self, plan: OutputDigest, copies: float) -> float:
        """Returns the relative difference of the digest under the plan, which counts each element `copies` times."""
        squares = max(self.squares, 1e-300)
        lost = abs(plan.rounded / copies - self.rounded) / squares
        return max(
            abs(plan.squares / copies - self.squares) / squares / 2,
            abs(plan.total / copies - self.total) / math.sqrt(squares * self.elements),
            math.sqrt(lost) if not lost <= LOST_DIGITS else 0.0,
        )


class OutputDigests:
    """Collects the digests of module outputs on one rank, by module path. Modules are in the order in which their first
    calls end."""

    def __init__(self) -> None:
        self.sums: dict[str, OutputDigest] = {}
        self.records = True

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """A context that collects the outputs of all submodules of `model` while `records` is true."""
        handles = [module.register_forward_hook(self._hook(path)) for path, module in model.named_modules() if path]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def of_plan(self, engine: Engine) -> Iterator[None]:
        """A context that collects the outputs of this rank's forward under the plan. Recomputes in backward are not
        collected."""
        inner, pipeline = engine.pipeline.forward, engine.pipeline
        self.records = False

        def forward(*given: Any) -> Any:
            self.records = True
            try:
                return inner(*given)
            finally:
                self.records = False

        with pipeline.replace_forward(forward), self.of(engine.model):
            yield

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            leaves = output if isinstance(output, tuple | list) else (output,)
            tensor = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
            if (
                not self.records
                or isinstance(module, StagePlaceholder)
                or tensor is None
                or not tensor.is_floating_point()
            ):
                return
            self.sums[path] = self.sums.get(path, OutputDigest()).plus(tensor.detach().double())

        return hook


def first_differing_module(engine: Engine, one: Mapping[str, OutputDigest], ours: OutputDigests, limit: float) -> str:
    """Returns a description of the first module whose digest differs by more than the fraction `limit`, or ''. All
    ranks call it. `one`: the digests of one device, on every rank. `ours`: the digests of this rank under the plan."""
    rows = [ours.sums.get(path, OutputDigest()) for path in one]
    table = torch.tensor(rows, dtype=torch.float64, device=engine.mesh.device).view(-1)
    if table.numel():
        all_reduce(table, engine.mesh.world).wait()
    for (path, digest), row in zip(one.items(), table.view(-1, len(OutputDigest._fields)).tolist(), strict=True):
        plan = OutputDigest(*row)
        copies = plan.elements / digest.elements if digest.elements else 0.0
        if copies < 1 or copies != int(copies):
            continue
        off = digest.difference(plan, copies)
        if not off <= limit:
            return f"first at {path}: its output by {off:.2g}"
    return ""
