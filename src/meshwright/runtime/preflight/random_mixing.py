"""Checks that random numbers do not mix the rows of a batch, as mixup does (`x + x[torch.randperm(len(x))]`).

One pass of all rows draws other numbers than passes of fewer rows, so batch_separability.py cannot compare their losses
in training mode. All passes of this check have the same number of rows and the same seed, so they draw the same
numbers. A and B are the two halves of some rows. If the loss is a sum over rows,

    loss(A, B) + loss(B, A) = loss(A, A) + loss(B, B).

With one seed, a random permutation of two rows is the identity in half of the cases, so several seeds are compared. If
passes with the same seed draw different amounts of numbers, they are not compared. Only models that draw random numbers
other than for dropout are checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.core.errors import PlanRefused
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch, num_rows
from meshwright.runtime.preflight.batch_separability import isolated_pass, loss_tolerance, relative_difference
from meshwright.runtime.preflight.numeric_probes import perturb_constants
from meshwright.runtime.preflight.row_batches import join_rows, joint_rows, split_in_half
from meshwright.runtime.tensor_parallel.random import seed_all_generators

SEEDS = 4


def check_random_mixing(engine: Engine, batches: Sequence[Batch], pieces: int) -> None:
    """Checks the rows of `batches`, micro-batches of this rank's replica. `pieces` is the number of micro-batches of a
    step on all ranks. Every rank calls this function.

    Raises:
        PlanRefused: random numbers mix the rows. Every rank raises it.
    """
    if engine.anatomy.unsupported.get("rows"):  # the loss of a pass is not a sum over rows, and is compared otherwise
        return
    with perturb_constants(engine):
        _compare_exchanged(engine, joint_rows(batches), pieces)


def _compare_exchanged(engine: Engine, rows: Batch, pieces: int) -> None:
    first, second = split_in_half({name: _even(value, num_rows(rows)) for name, value in rows.items()})
    mixed = [join_rows(first, second), join_rows(second, first)]
    repeated = [join_rows(first, first), join_rows(second, second)]
    if not any(gather_objects(_draws(engine, mixed[0]))):
        return
    for seed in range(SEEDS):
        losses, ends = zip(*(_pass(engine, batch, seed) for batch in (*mixed, *repeated)), strict=True)
        equal = all(torch.equal(end, ends[0]) for end in ends)
        if not all(gather_objects(equal)):
            continue
        total = torch.stack(losses) / engine.mesh.plan.tp
        all_reduce(total, engine.mesh.world).wait()
        together, separate = float(total[:2].sum()), float(total[2:].sum())
        if relative_difference(together, separate) > loss_tolerance(engine):
            raise PlanRefused(
                Message(
                    "plan {plan}: the model mixes the rows of a batch in training, by random numbers (as mixup does): "
                    "exchanging two rows changes the loss from {separate:.6g} to {together:.6g} (relative difference "
                    "{difference:.1e}), and this plan divides the batch into {pieces} parts: use dp1 with the batch as "
                    "one micro-batch, or mix the rows before the step",
                    plan=engine.mesh.plan.name,
                    separate=separate,
                    together=together,
                    difference=relative_difference(together, separate),
                    pieces=pieces,
                )
            )


def _even(value: object, rows: int) -> object:
    return value[: rows // 2 * 2] if isinstance(value, torch.Tensor) and value.ndim else value


def _draws(engine: Engine, batch: Batch) -> bool:
    """Returns whether a forward in training mode without dropout draws random numbers."""
    with isolated_pass(engine, True):
        seed_all_generators(0)
        before = _random_state(engine.mesh.device)
        engine.pipeline.run([batch], None)
        return not torch.equal(before, _random_state(engine.mesh.device))


def _pass(engine: Engine, batch: Batch, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of one forward on this rank, and the random state after it."""
    with isolated_pass(engine, True):
        seed_all_generators(seed)
        return engine.pipeline.run([batch], None), _random_state(engine.mesh.device)


def _random_state(device: torch.device) -> torch.Tensor:
    state = backend_of(device).rng_state(device)
    host = torch.get_rng_state()
    return host if state is None else torch.cat([host, state])
