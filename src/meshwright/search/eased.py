"""How little of the optimizer's states, and of the weights, must wait elsewhere: the search asks for all of them or none, and a plan that it found
keeps as many as fit.

Promise: an eased plan is as safe as the one that was found (fits with a margin where that one does) and takes no longer. All shares, in hundredths
that STEP divides, are priced at once, of states and weights every pair; of those as safe the quickest is taken, and of equally quick ones the one that
keeps most on the device. Weights that are updated where they wait have their states there too, so no more of them waits than of the states.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.box import Array, Box, lift
from meshwright.cost.memory import ample, reserved, usable
from meshwright.cost.price import Pricer
from meshwright.cost.step import estimate_of
from meshwright.search.pinned import WAITS
from meshwright.search.ranking import rounded
from meshwright.spec.estimate import Estimate, Fits
from meshwright.spec.keeps import with_shares
from meshwright.spec.plan import states_wait, weights_wait
from meshwright.spec.rules import Update

STEP = 5
"""Hundredths: a finer share would claim more than an estimate of memory knows."""

SHARES = np.arange(STEP, 101, STEP) / 100

SAFE = (Fits.no, Fits.tight, Fits.fits)


def eased(pricer: Pricer, box: Box) -> tuple[Box, Estimate]:
    """The only plan of `box` with the least shares that are as safe, and its price."""
    whole = estimate_of(pricer, box)
    less = _quickest(pricer, box, SAFE.index(whole.verdict)) if whole.fits else None
    if less is None:
        return box, whole
    price = estimate_of(pricer, less)
    return (less, price) if price.time.step <= whole.time.step else (box, whole)


def _quickest(pricer: Pricer, box: Box, safety: int) -> Box | None:
    """Of all shares that are as safe; None where there is no choice."""
    job, (offload,) = pricer.setting.job, box.offload
    pins, both = with_shares(job.pins), states_wait(offload) and weights_wait(offload)
    of_states, of_weights = (
        SHARES if waits(offload) and name not in pins else np.array([float(getattr(box, name))]) for name, waits in WAITS.items()
    )
    states, weights = (part.reshape(-1) for part in np.meshgrid(of_states, of_weights))
    if len(states) == 1:
        return None
    many = replace(box, offload_share=lift(states, "f"), weights_share=lift(weights, "f"))
    legal = states >= weights if both and Update.of(job.workload, job.cluster).there else np.array(True)
    step = np.broadcast_to(pricer.price(many).step.reshape(-1), states.shape)
    as_safe = np.flatnonzero((_safety(pricer, many) >= safety) & legal)
    found = min(((rounded(float(step[at])), float(states[at]), float(weights[at])) for at in as_safe), default=None)
    return None if found is None else replace(box, offload_share=found[1], weights_share=found[2])


def _safety(pricer: Pricer, box: Box) -> Array:
    """How safe each plan along f is, as `SAFE` counts."""
    setting, prices = pricer.setting, pricer.price(box)
    taken, safe = reserved(setting, prices.allocated)
    fits = (taken <= usable(setting)) & (prices.on_host <= setting.host_memory)
    return np.asarray(np.where(fits, np.where(safe <= ample(setting), 2, 1), 0).reshape(-1))
