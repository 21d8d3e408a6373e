"""Checks that a batch may be divided into micro-batches. If one row (sample) affects the result of another row, the
loss depends on the division. step_checks.py schedules the check.

Rule: one pass of some rows must have the same summed loss and the same parameter gradients as two passes of half the
rows each. The check runs before the training step. A few rows of every rank run forward and backward in training mode,
once together and once in two halves.

The check detects a mean over the batch, a contrastive loss between its rows (CLIP), and a mean over labels instead of
rows. It also detects batch statistics in layers other than batch norm, a backward that divides by the norm over all
rows, and `scale_grad_by_freq`. A constant weight (a zero-initialised head, a gate of 0) can hide that rows affect each
other, so such weights contain noise during the check. Some effects appear only if several rows contain equal tokens, so
two copies of one row are also checked. Gradients are compared by fingerprints (numeric_probes.py).

In some models the position of a token among the tokens of all rows matters, because an expert drops tokens above its
capacity. The check runs such a model with the rows of the whole batch. It runs the model again with as many rows in
which all tokens are equal and therefore go to one expert. If this expert drops none of them, no expert drops tokens of
a batch of this size.

A forward may change state that the next forward reads (a count of calls, running means, spectral norm, the state of a
`torch.Generator`). The state changes once per micro-batch, and twice if a layer is recomputed. So the check runs two
consecutive passes of the same rows. If their losses differ, plans that run several forwards per step are refused. Data
parallelism is then also refused if the state depends on the rows.

The check runs in training mode without dropout. If Python code of the model reads values (`if x.mean() > 0`), one
forward of several micro-batches is also compared with separate forwards, because the halves of one micro-batch may take
the same branch. A model that draws other random numbers is compared in evaluation mode, and in training mode by
random_mixing.py. If it also draws random numbers in evaluation mode, the first comparison is skipped. In two cases only
losses are compared: with a balance loss of experts, which is defined for each micro-batch; and with experts in 16 bits,
where rounding decides which expert a token goes to. If the plan runs the whole batch in one pass, rows are not
compared. If such a plan also does not use recompute `full`, only the repetition of a forward is checked. If the check
finds no difference, it costs six to ten forwards and two forward-backward passes of one micro-batch, and two
forward-backward passes of two rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from meshwright.analysis.dry_run import ParamWriteRecorder, StorageSpan, dry_run
from meshwright.analysis.own_generators import GeneratorRecorder
from meshwright.analysis.run_conditions import without_inner_dropout
from meshwright.core.errors import PlanRefused
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects, interruptible_wait
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.preflight.numeric_probes import (
    GradientDifference,
    GradientFingerprint,
    perturb_constants,
    record_fingerprint,
)
from meshwright.runtime.preflight.row_batches import (
    equal_tokens,
    join_and_split,
    joint_rows,
    mask_first_row_labels,
    repeat_first_row,
    repeat_rows,
    split_in_half,
)
from meshwright.runtime.tensor_parallel.random import preserve_python_rng, seed_all_generators
from meshwright.spec.enums import Recompute
from meshwright.spec.plan import Plan

REPEAT_TOLERANCE, REPEAT_TOLERANCE_64 = 0.1, 1e-3
"""Tolerances of the loss of a repeated forward, as multiples of the tolerance of losses. The second is for float64."""
MAX_COMPARED_MICRO_BATCHES = 8
"""A forward of at most as many rows as this number of micro-batches have is compared. It stores no activations."""
ROW_SAMPLES = 3
"""The number of micro-batches whose rows are compared by their loss."""
MAX_JOINED_ELEMENTS = 1 << 14
"""If the model reads values, micro-batches with this number of elements (tokens) in all are compared in one forward, at
least two of them."""
GRADIENT_TOLERANCE_FACTOR = 10.0
"""Tolerance of gradients as a multiple of the tolerance of losses."""


class NoDropout(TorchFunctionMode):
    """Disables dropout: the dropout functions return their input, and attention and recurrent layers run without
    dropout. Dropout with a rate of 1 uses no random numbers, so it is not disabled."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name.endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return function(*args, **kwargs) if rate == 1 else args[0] if args else kwargs["input"]
        args, kwargs, _ = without_inner_dropout(name, args, kwargs)
        return function(*args, **kwargs)


def count_pieces(plan: Plan, batches: Sequence[Batch]) -> int:
    """Returns the number of micro-batches of all replicas into which the plan divides a batch."""
    return sum(plan.shares) or plan.dp * len(batches)


def check_batch_separable(engine: Engine, batches: Sequence[Batch]) -> None:
    """Checks that the rows of a batch do not affect each other, if the plan divides the batch. If the plan divides the
    batch or uses recompute `full`, also checks that a forward does not affect the next forward. Under every plan,
    checks that a forward can be repeated. Every rank calls this function.

    Raises:
        PlanRefused: rows or forwards affect each other, or a forward cannot be repeated. Every rank raises it.
    """
    plan = engine.mesh.plan
    pieces = count_pieces(plan, batches)
    if pieces == 1 and plan.recompute != Recompute.full:
        _repeated_loss(engine, batches[0])
        return
    counts = engine.anatomy.unsupported.get("rows", "")
    whole = joint_rows(batches) if engine.objective.loss is None else mask_first_row_labels(joint_rows(batches))
    with perturb_constants(engine):
        _check_forward_stateless(engine, batches)
        if pieces > 1:
            _check_rows_independent(engine, (whole, repeat_first_row(batches[0])), pieces, counts)
    if pieces == 1:
        return
    rows = max(sum(map(num_rows, batches)) * plan.dp, 2)
    if any(gather_objects(engine.preflight.paths.asks)):
        check_joined_separable(engine, batches, rows, pieces)
    contents = _whole_batches(batches, rows) if counts else _row_samples(engine, batches)
    _check_rows_independent(engine, contents, pieces, counts, backward=False)


def _row_samples(engine: Engine, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Yields the rows of up to ROW_SAMPLES micro-batches, because a loss that divides by a count over all rows does not
    differ if the compared rows happen to have equal counts. All ranks yield the same number of batches."""
    for index in range(0, min(max(gather_objects(len(batches))), 2 * ROW_SAMPLES), 2):
        rows = joint_rows(batches[index % len(batches) :])
        yield rows if engine.objective.loss is None else mask_first_row_labels(rows)


def _whole_batches(batches: Sequence[Batch], rows: int) -> Iterator[Batch]:
    """Yields batches of `rows` rows, one at a time in memory: the rows of `batches`, those of the first micro-batch
    repeated, and these with equal tokens."""
    yield join_and_split(batches, rows)[0]
    first = repeat_rows(batches[0], rows)
    yield first
    for index in range(2):
        yield equal_tokens(first, index)


def check_joined_separable(engine: Engine, batches: Sequence[Batch], rows: int, pieces: int) -> None:
    """Checks that a forward of several micro-batches has the loss of separate forwards. `batches` are micro-batches,
    of which `rows` rows are compared at most; they are repeated if they have fewer. The losses are compared with
    the model's weights, whose values decide which branches the code takes, and again with noise in constant weights,
    which may hide a difference. `pieces` is the number of
    micro-batches of a step on all ranks. Every rank calls this function.

    Raises:
        PlanRefused: rows affect each other. Every rank raises it.
    """
    counts = engine.anatomy.unsupported.get("rows", "")
    if counts:
        return
    sizes = [value.numel() for value in batches[0].values() if isinstance(value, torch.Tensor)]
    most = min(max(MAX_JOINED_ELEMENTS // max(sizes, default=1), 2), MAX_COMPARED_MICRO_BATCHES)
    joined, *parts = join_and_split(batches, min(rows, num_rows(batches[0]) * most))
    for weights in (nullcontext(), perturb_constants(engine)):
        with weights:
            _check_rows_independent(engine, [joined], pieces, counts, backward=False, parts=parts)


def check_evaluation_separable(engine: Engine, batches: Sequence[Batch]) -> bool:
    """Checks before an evaluation that the rows of a batch do not affect each other in evaluation mode. Returns whether
    the plan divides this batch. If not, nothing is checked. Every rank calls this function.

    Raises:
        PlanRefused: rows affect each other. Every rank raises it.
    """
    plan = engine.mesh.plan
    pieces = count_pieces(plan, batches)
    if pieces == 1:
        return False
    whole = joint_rows(batches) if engine.objective.loss is None else mask_first_row_labels(joint_rows(batches))
    counts = engine.anatomy.unsupported.get("rows", "")
    with torch.no_grad(), perturb_constants(engine):
        _check_rows_independent(engine, [whole], pieces, counts, backward=False, modes=(False,))
    return True


def _check_rows_independent(
    engine: Engine,
    contents: Iterable[Batch],
    pieces: int,
    counts: str,
    backward: bool = True,
    modes: Sequence[bool] = (True, False),
    parts: Sequence[Batch] = (),
) -> None:
    name = engine.mesh.plan.name
    for whole in contents:
        found = _find_difference(engine, whole, backward, modes, parts)
        if found is None:
            continue
        together, separate, gradient = found
        why = (
            Message("Python code reads a value of all rows, such as `if x.mean() > 0`")
            if parts
            else Message("{counts} orders tokens across all rows of the batch", counts=counts)
            if counts
            else Message("a mean or a contrastive term over the batch, or a mean over labels")
        )
        if engine.preflight.generators.alive() and not counts and not parts:
            why = Message("such as random numbers of a torch.Generator, drawn for all rows together")
        shown = Message(
            "their loss is {together:.6g} in one pass but {separate:.6g} in separate passes (relative difference "
            "{difference:.1e})",
            together=together,
            separate=separate,
            difference=relative_difference(together, separate),
        )
        if gradient.name:
            why = Message("a backward that is not linear, scale_grad_by_freq, or a contrastive term behind a gate of 0")
            shown = Message(
                "the gradient of {name} in one pass differs from that in separate passes by {size:.3g} of its norm",
                name=gradient.name,
                size=gradient.size,
            )
        raise PlanRefused(
            Message(
                "plan {name}: rows of a batch depend on each other in this model or its loss ({why}): {shown}, and "
                "this plan divides the batch into {pieces} parts: use dp1 with the batch as one micro-batch{gather}",
                name=name,
                why=why,
                shown=shown,
                pieces=pieces,
                gather=Message(", or gather='batch' for a contrastive loss")
                if engine.objective.loss is not None and engine.batch_loss is None and not gradient.name
                else "",
            )
        )


def relative_difference(one: float, other: float) -> float:
    """Returns the difference of two losses relative to the larger magnitude. Messages show this number, because two
    losses may differ only in digits that are not printed.

    >>> f"{relative_difference(0.693147, 0.693148):.1e}"
    '1.4e-06'
    """
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def _repeated_loss(engine: Engine, batch: Batch) -> tuple[float, float]:
    """Runs two forwards of `batch` with equal seeds, and restores the state of the model between them. Returns the
    first loss and the absolute difference, which is that of the last bits of a kernel. If the difference is larger, the
    forwards of the analysis and of the checks have changed a state that they cannot restore.

    Raises:
        PlanRefused: the losses differ.
    """
    first, second = (_total_loss(engine, [batch], True, every=True) for _ in range(2))
    multiple = REPEAT_TOLERANCE_64 if engine.recipe.compute == "float64" else REPEAT_TOLERANCE
    if abs(second - first) > multiple * loss_tolerance(engine) * abs(first):
        raise PlanRefused(
            Message(
                "plan {plan}: two forwards of the same rows have the losses {first:.6g} and {second:.6g} (relative "
                "difference {difference:.1e}). The model or its loss has a state that cannot be restored (an iterator, "
                "a variable of a closure, a file, a clock, random numbers that no seed determines): keep it in an "
                "attribute of a module, or give it in the batch",
                plan=engine.mesh.plan.name,
                first=first,
                second=second,
                difference=relative_difference(first, second),
            )
        )
    return first, abs(second - first)


def _check_forward_stateless(engine: Engine, batches: Sequence[Batch]) -> None:
    """Checks that a forward leaves no state that changes the result of the next forward. Examples are a count of calls,
    running means, and the vectors of spectral norm. Such state matters if a rank runs more forwards per step than one
    device would, or runs them on other rows.

    Raises:
        PlanRefused: the state changes the loss, or a forward cannot be repeated.
    """
    plan, whole = engine.mesh.plan, joint_rows(batches)
    first, noise = _repeated_loss(engine, whole)
    after = _total_loss(engine, [whole], True, preceding=whole)
    # The same kernel may return a different last bit in a second run, so losses are compared with the tolerance `near`.
    near = max(abs(first) * 1e-2 * loss_tolerance(engine), 10 * noise)
    if not abs(after - first) > near:
        return
    by_rows = plan.dp > 1 and abs(_total_loss(engine, [whole], True, preceding=split_in_half(whole)[0]) - after) > near
    if len(batches) > 1 or plan.recompute == Recompute.full or by_rows:
        raise PlanRefused(
            Message(
                "plan {plan}: each forward of this model changes a state that the next one reads (count, "
                "mean, generator, spectral norm): the loss of the same rows is {first:.6g} and then "
                "{after:.6g} (relative difference {relative_difference:.1e}), and this plan would change that state "
                "differently than one device: use one micro-batch without recompute, and dp1 if the state depends on "
                "the rows",
                plan=plan.name,
                first=first,
                after=after,
                relative_difference=relative_difference(first, after),
            )
        )


def loss_tolerance(engine: Engine) -> float:
    """Returns the relative tolerance of the loss. It is larger in 16 bits, because rounding depends on the number of
    rows in a pass."""
    return {"float64": 1e-10, "float32": 1e-4}.get(engine.recipe.compute, 2e-2)


class PassResult(NamedTuple):
    """The result of some passes: the loss summed over all ranks, and a fingerprint of this rank's gradients."""

    loss: float
    gradients: GradientFingerprint


def find_row_count_difference(engine: Engine, batches: Sequence[Batch], rows: int) -> tuple[float, float] | None:
    """Compares one forward of `rows` rows with forwards of as many rows as the first micro-batch has. The rows are
    those of `batches`, repeated. Returns the two losses if they differ, otherwise None. Constant weights, such as
    those of a zero-initialised head, may hide a difference, so they contain noise. All ranks call it."""
    whole, *parts = join_and_split(batches, rows)
    with perturb_constants(engine):
        found = _find_difference(engine, whole, False, (True, False), parts)
    return None if found is None else found[:2]


def _find_difference(
    engine: Engine, whole: Batch, backward: bool, modes: Sequence[bool], parts: Sequence[Batch] = ()
) -> tuple[float, float, GradientDifference] | None:
    """Compares one pass of `whole` with passes of its `parts`, by default of its two halves, in each of `modes`: in
    training mode (True), then in evaluation mode (False).

    Returns None if the results of one pass and of two passes are equal within tolerance on all ranks. Also returns None
    if in all modes the random numbers of the model explain the difference. Otherwise returns the loss of one pass, the
    loss of two passes, and the largest difference of a gradient. Its `name` is '' if the losses differ.
    """
    parts, backward = parts or split_in_half(whole), backward and _compares_gradients(engine)
    gathered = engine.batch_loss
    with nullcontext() if gathered is None else gathered.compare_rows():
        return _compare_passes(engine, whole, parts, backward, modes)


def _compare_passes(
    engine: Engine, whole: Batch, parts: Sequence[Batch], backward: bool, modes: Sequence[bool]
) -> tuple[float, float, GradientDifference] | None:
    """Returns the difference of `_find_difference`, under the present loss."""
    for train in modes:
        once, separate = _run_batches(engine, [whole], train, backward), _run_batches(engine, parts, train, backward)
        loss = abs(once.loss - separate.loss) / max(abs(once.loss), abs(separate.loss), 1e-300)
        gradient = _largest_difference(engine, once.gradients.difference(separate.gradients))
        by_loss = not loss <= loss_tolerance(engine) and math.isfinite(loss)
        if not by_loss and gradient.size <= loss_tolerance(engine) * GRADIENT_TOLERANCE_FACTOR:
            return None
        again = _run_batches(engine, [whole], train, backward, seed=1)
        drawn = abs(once.loss - again.loss) > 1e-3 * abs(once.loss - separate.loss) if by_loss else False
        drawn |= (
            not by_loss
            and _largest_difference(engine, once.gradients.difference(again.gradients)).size > 1e-3 * gradient.size
        )
        if not drawn:  # random draws of the model do not explain the difference
            return once.loss, separate.loss, GradientDifference(0.0, "") if by_loss else gradient
    return None


def _compares_gradients(engine: Engine) -> bool:
    few_bits = engine.recipe.compute not in ("float64", "float32")
    return engine.balance is None and not (few_bits and engine.mixtures)


def _largest_difference(engine: Engine, own: GradientDifference) -> GradientDifference:
    """Gathers the differences `own` of all ranks and returns the largest. If it exceeds the tolerance, all ranks return
    the same parameter name."""
    sizes = torch.zeros(
        dist.get_world_size() if dist.is_initialized() else 1, dtype=torch.float64, device=engine.mesh.device
    )
    sizes[engine.mesh.rank] = own.size
    all_reduce(sizes, engine.mesh.world).wait()
    at = int(sizes.argmax())
    names = [own.name]
    if float(sizes[at]) > loss_tolerance(engine) * GRADIENT_TOLERANCE_FACTOR and dist.is_initialized():
        names = [own.name] if at == engine.mesh.rank else [""]
        with interruptible_wait():
            dist.broadcast_object_list(names, src=at)
    return GradientDifference(float(sizes[at]), names[0])


def _run_batches(engine: Engine, batches: Sequence[Batch], train: bool, backward: bool, seed: int = 0) -> PassResult:
    """Runs each of `batches` in a separate pass and sums the results. If `batches` repeats one batch, the sum is
    divided by the number of repetitions."""
    if not backward:
        return PassResult(_total_loss(engine, batches, train, seed), GradientFingerprint())
    similarity = sum(batch is batches[0] for batch in batches)
    total = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
    with record_fingerprint(engine) as gradients:
        for batch in batches:
            with isolated_pass(engine, train):
                seed_all_generators(seed)
                total += engine.pipeline.run([batch], 1.0) / (similarity * engine.mesh.plan.tp)
    all_reduce(total, engine.mesh.world).wait()
    return PassResult(float(total), gradients.over(similarity))


def _total_loss(
    engine: Engine,
    batches: Sequence[Batch],
    train: bool,
    seed: int = 0,
    preceding: Batch | None = None,
    every: bool = False,
) -> float:
    """Returns the loss summed over `batches` and all ranks. Each batch runs in a separate pass. If `batches` repeats
    one batch, the sum is divided by the number of repetitions. If `preceding` is not None, a pass of `preceding` runs
    before each of these passes, and its loss is not added. `every`: as in `isolated_pass`."""
    found = []
    for batch in batches:
        with isolated_pass(engine, train, every=every):
            for each in (batch,) if preceding is None else (preceding, batch):
                seed_all_generators(seed)
                last = engine.pipeline.run([each], None)
        found.append(last)
    similarity = sum(batch is batches[0] for batch in batches)
    total = torch.stack(found).sum() / (similarity * engine.mesh.plan.tp)
    all_reduce(total, engine.mesh.world).wait()
    return float(total)


@contextmanager
def isolated_pass(
    engine: Engine, train: bool, dropout: bool = False, every: bool = False
) -> Iterator[ParamWriteRecorder]:
    """Prepares the model for passes of a check. Restores the model and the random states on exit.

    `train`: whether all modules stay in their present modes, with dropout disabled unless `dropout` is set. Otherwise
    the model is in evaluation mode. Compiled blocks run without compilation.

    Yields a recorder of writes to parameters. `every`: whether it records all parameters, or only those to which
    user_writes.py has found writes.
    """
    model, device = engine.model, engine.mesh.device
    engine.mesh.error_propagator.report_alive()
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(backend_of(device).fork_rng(device))
        stack.enter_context(preserve_python_rng())
        stack.enter_context(GeneratorRecorder(engine.preflight.generators))
        if engine.mesh.plan.compile:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        lying = {
            name: StorageSpan(
                unit.weights.full, unit.layout.offsets[name], unit.layout.offsets[name] + parameter.numel()
            )
            for unit in engine.zero.units
            for name, parameter in unit.parameters.items()
            if every or name in engine.preflight.written
        }
        writes = stack.enter_context(dry_run(model, lying, loss=engine.objective.loss))
        if train:
            for module, mode in modes:
                module.training = mode
            if not dropout:
                stack.enter_context(NoDropout())
        yield writes
