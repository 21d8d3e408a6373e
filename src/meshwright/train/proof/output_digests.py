"""Digests of module outputs. They locate the first module whose output under the plan differs from that on one device.

No output is stored. A digest consists of sums over the elements of a module's outputs, added up over all ranks. A
module's output is sharded by rows, positions or features, or replicated on several ranks. The number of elements over
all ranks divided by the number on one device is how often each element is counted. The sums divided by this ratio are
comparable with those of one device under any sharding. Outputs whose ratio is not an integer, such as partial sums, are
skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.engine import Engine
from meshwright.runtime.layout.placeholder import StagePlaceholder


class OutputDigests:
    """The digests of module outputs. For each module, `sums` has the number of elements, their sum, and the sum of
    their squares. Modules are in the order in which their first call ends."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float, float]] = {}
        self.records = True

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Collects the outputs of all modules of `model` inside the context, while `records` is set."""
        handles = [module.register_forward_hook(self._hook(path)) for path, module in model.named_modules() if path]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def of_plan(self, engine: Engine) -> Iterator[None]:
        """Collects the outputs of this rank's forward passes inside the context, except those of recomputes."""
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
            values = tensor.detach().double()
            elements, total, squares = self.sums.get(path, (0.0, 0.0, 0.0))
            self.sums[path] = (
                elements + values.numel(),
                total + float(values.sum()),
                squares + float(values.square().sum()),
            )

        return hook


def first_differing_module(
    engine: Engine, one: Mapping[str, tuple[float, float, float]], ours: OutputDigests, limit: float
) -> str:
    """Returns a description of the first module whose digest differs by more than `limit` (relative), or ''. `one`: the
    sums of one device by module, on every rank."""
    rows = [ours.sums.get(path, (0.0, 0.0, 0.0)) for path in one]
    table = torch.tensor(rows, dtype=torch.float64, device=engine.mesh.device).view(-1)
    if table.numel():
        all_reduce(table, engine.mesh.world).wait()
    for (path, (elements, total, squares)), (count, ours_total, ours_squares) in zip(
        one.items(), table.view(-1, 3).tolist(), strict=True
    ):
        similarity = count / elements if elements else 0.0
        if similarity < 1 or similarity != int(similarity):
            continue
        size = math.sqrt(max(squares, 1e-300))
        off = max(
            abs(ours_squares / similarity - squares) / max(squares, 1e-300) / 2,
            abs(ours_total / similarity - total) / (size * math.sqrt(elements)),
        )
        if not off <= limit:
            return f"first at {path}: its output by {off:.2g}"
    return ""
