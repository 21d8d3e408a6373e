"""Whether a batch may be divided: rows that see each other make the loss depend on how they are shared out.

Rule: the loss of rows that pass together must be the sum of the losses of these rows in two parts. It is asked once, before the first step, with
numbers: forward alone, of the first rows of every rank, once together and once apart. A mean over the batch, a contrast of its rows (CLIP), a
loss that is a mean over the labels instead of the rows, statistics over the batch under another name: all of them show. A model that was seen to give
tokens a place among those of other rows (an expert's capacity) is asked with as many rows as the whole batch has, and with ones that are all of one
token, which go the same way: what does not bite then never does.

What one forward keeps for the next (a count of calls, running means that are read, spectral norm) moves once a micro-batch and twice where a layer is
computed again: the same rows passed twice in a row must give the same loss, or such plans are refused too.

It runs as it trains, but for dropout, which is left out; a model that draws otherwise is asked in eval mode, and one that draws there too
cannot be asked. Plans that pass the batch as one piece need not ask. Costs a few forward passes of one micro-batch, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.anatomy.observed import observed
from meshwright.base.errors import PlanRefused
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.objective import Batch, rows_of
from meshwright.spec.plan import Recompute

if TYPE_CHECKING:
    from meshwright.parallel.engine import Parallel

IGNORED = -100


class Undropped(TorchFunctionMode):
    """Dropout gives what it is given."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "scaled_dot_product_attention":
            args, kwargs = (
                (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args,
                {**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})},
            )
        elif name.endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            return args[0] if args else kwargs["input"]
        return function(*args, **kwargs)


def check_divided(engine: Parallel, batches: Sequence[Batch]) -> None:
    """Raises PlanRefused on every rank where rows of a batch see each other and the plan takes them apart. Every rank calls it."""
    plan = engine.mesh.plan
    pieces = sum(plan.shares) or plan.dp * len(batches)
    if pieces > 1 or plan.recompute == Recompute.layer:
        _check_kept(engine, batches)
    if pieces == 1:
        return
    counts = engine.anatomy.against.get("rows", "")
    wholes = [together(batches) if engine.objective.loss is None else unequal(together(batches))]
    if counts:
        rows = max(sum(map(rows_of, batches)) * plan.dp, 2)
        wholes += [repeated(batches[0], rows, token) for token in (None, 0, 1)]
    for whole in wholes:
        found = _asked(engine, whole)
        if found is not None:
            why = (
                f"{counts} gives tokens a place among those of other rows"
                if counts
                else "a mean or a contrast over the batch, or a mean over labels"
            )
            raise PlanRefused(
                f"plan {plan.name}: rows of a batch see each other in this model or its loss ({why}): together their loss is {found[0]:.6g}, apart "
                f"{found[1]:.6g} (they differ by {difference(*found):.1e} of it), and this plan divides the batch into {pieces} parts: use dp1 with the batch as one micro-batch"
            )


def difference(one: float, other: float) -> float:
    """Relative to the larger of both, for messages: the digits of two losses may look the same where they are not.

    >>> f"{difference(0.693147, 0.693148):.1e}"
    '1.4e-06'
    """
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def together(batches: Sequence[Batch]) -> Batch:
    """Rows that one device passes at once: those of the first micro-batch, or of the first two where each has one row."""
    first = batches[0]
    second = next((each for each in batches[1:2] if rows_of(first) == 1 and _form(each) == _form(first)), None)
    if second is None:
        return first
    return {
        name: torch.cat([value, second[name]]) if isinstance(value, torch.Tensor) and value.ndim else value for name, value in first.items()
    }


def unequal(batch: Batch) -> Batch:
    """Where some labels do not count: of the first row none but the last does, so that a mean over labels is none over rows."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or not bool((labels == IGNORED).any()):
        return batch
    labels = labels.clone()
    labels[0, (labels[0] != IGNORED).nonzero().flatten()[:-1]] = IGNORED
    return {**batch, "labels": labels}


def repeated(batch: Batch, rows: int, token: int | None) -> Batch:
    """The rows of `batch` again and again, `rows` in all; with `token` in all places of inputs that are whole numbers of (rows, places)."""

    def more(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        many = value.repeat(-(-rows // len(value)), *[1] * (value.ndim - 1))[:rows]
        inputs = token is not None and value.ndim == 2 and value.dtype == torch.int64 and name.endswith("input_ids")
        return torch.full_like(many, int(value.flatten()[min(token or 0, value.numel() - 1)])) if inputs else many

    return {name: more(name, value) for name, value in batch.items()}


def _form(batch: Batch) -> list[Any]:
    return [(name, value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)]


def _check_kept(engine: Parallel, batches: Sequence[Batch]) -> None:
    """Raises PlanRefused where what one forward keeps (a number of calls, running means, the vectors of spectral norm) changes the next, and the plan runs
    the forward oftener, or on other rows, than one device."""
    plan, whole = engine.mesh.plan, together(batches)
    first = _loss(engine, [whole], True)
    after = _loss(engine, [whole], True, behind=whole)
    near = abs(first) * 1e-2 * _tolerance(engine)  # what the equality of one device promises; kernels may differ in the last bit
    if abs(after - first) > near:
        near = max(near, 10 * abs(_loss(engine, [whole], True) - first))
    if not abs(after - first) > near:
        return
    by_rows = plan.dp > 1 and abs(_loss(engine, [whole], True, behind=_halves(whole)[0]) - after) > near
    if len(batches) > 1 or plan.recompute == Recompute.layer or by_rows:
        raise PlanRefused(
            f"plan {plan.name}: this model keeps something of each forward that changes the next (a count, a running mean, spectral norm): "
            f"the same rows give {first:.6g} and then {after:.6g} (they differ by {difference(first, after):.1e} of it), and micro-batches, recompute or data ranks would move it otherwise than one device "
            "does: use one micro-batch without recompute, on dp1 where it keeps something of the rows"
        )


def _halves(whole: Batch) -> list[Batch]:
    """A single row is its own half, twice: ranks with more rows pass as often."""
    half = rows_of(whole) // 2
    if not half:
        return [whole, whole]
    return [
        {name: value[rows] if isinstance(value, torch.Tensor) and value.ndim else value for name, value in whole.items()}
        for rows in (slice(half), slice(half, None))
    ]


def _tolerance(engine: Parallel) -> float:
    """Relative, of the loss; 16-bit products differ more with the rows that they are taken of."""
    return {"float64": 1e-8, "float32": 1e-4}.get(engine.recipe.compute, 2e-2)


def _asked(engine: Parallel, whole: Batch) -> tuple[float, float] | None:
    """The loss of `whole` together and apart, summed over all ranks, where they differ."""
    parts = _halves(whole)
    for train in (True, False):
        once, apart = _loss(engine, [whole], train), _loss(engine, parts, train)
        off = abs(once - apart)
        if not off > _tolerance(engine) * max(abs(once), abs(apart)):
            return None
        if abs(once - _loss(engine, [whole], train, seed=1)) <= 1e-3 * off:  # else it draws, and drew otherwise
            return once, apart
    return None


def _loss(engine: Parallel, batches: Sequence[Batch], train: bool, seed: int = 0, behind: Batch | None = None) -> float:
    """The sum over `batches`, each passed by itself and counted once, and over all ranks; `behind` passes before each."""
    found = []
    for batch in batches:
        with _quiet(engine, train):
            for each in (batch,) if behind is None else (behind, batch):
                torch.manual_seed(seed)
                last = engine.pipeline.run([each], None)
        found.append(last)
    alike = sum(batch is batches[0] for batch in batches)
    total = torch.stack(found).sum() / (alike * engine.mesh.plan.tp)
    all_reduce(total, engine.mesh.world).wait()
    return float(total)


@contextmanager
def _quiet(engine: Parallel, train: bool) -> Iterator[None]:
    """The model as it trains, or in eval mode; afterwards it and the random state are those of before."""
    model, device = engine.model, engine.mesh.device
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        if engine.mesh.plan.compile:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observed(model))
        if train:
            for module, mode in modes:
                module.training = mode
            stack.enter_context(Undropped())
        yield
