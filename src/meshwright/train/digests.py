"""Which module differs first, when nothing is stored: sums over the outputs of each module, added up over all ranks.

A module's output is divided among ranks by rows, places or features, or stored alike by several. Its number of elements over all ranks says how
often each is counted, so that sums of outputs and of their squares can be compared with one device's whatever the division. Outputs that are partial
or divided otherwise give no whole number and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.parallel.engine import Parallel
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.pipeline.absent import Absent


class Digests:
    """`sums` by module, in the order in which modules first end: elements, their sum, the sum of their squares."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float, float]] = {}
        self.records = True

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Outputs of all modules of `model` inside are added while `records`."""
        handles = [module.register_forward_hook(self._hook(path)) for path, module in model.named_modules() if path]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def of_plan(self, engine: Parallel) -> Iterator[None]:
        """Outputs of this rank's forward passes inside; what backward recomputes is not added."""
        inner, pipeline = engine.pipeline.forward, engine.pipeline
        self.records = False

        def forward(*given: Any) -> Any:
            self.records = True
            try:
                return inner(*given)
            finally:
                self.records = False

        pipeline.forward = forward
        try:
            with self.of(engine.model):
                yield
        finally:
            pipeline.forward = inner

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            leaves = output if isinstance(output, tuple | list) else (output,)
            tensor = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
            if not self.records or isinstance(module, Absent) or tensor is None or not tensor.is_floating_point():
                return
            values = tensor.detach().double()
            elements, total, squares = self.sums.get(path, (0.0, 0.0, 0.0))
            self.sums[path] = (elements + values.numel(), total + float(values.sum()), squares + float(values.square().sum()))

        return hook


def first_differing(engine: Parallel, one: Mapping[str, tuple[float, float, float]], ours: Digests, limit: float) -> str:
    """The first module whose output differs by more than `limit`, in words; nothing where none does. `one`: sums of one device, on every rank."""
    rows = [ours.sums.get(path, (0.0, 0.0, 0.0)) for path in one]
    table = torch.tensor(rows, dtype=torch.float64, device=engine.mesh.device).view(-1)
    if table.numel():
        all_reduce(table, engine.mesh.world).wait()
    for (path, (elements, total, squares)), (count, ours_total, ours_squares) in zip(one.items(), table.view(-1, 3).tolist(), strict=True):
        alike = count / elements if elements else 0.0
        if alike < 1 or alike != int(alike):
            continue
        size = math.sqrt(max(squares, 1e-300))
        off = max(
            abs(ours_squares / alike - squares) / max(squares, 1e-300) / 2, abs(ours_total / alike - total) / (size * math.sqrt(elements))
        )
        if not off <= limit:
            return f"first at {path}: its output by {off:.2g}"
    return ""
