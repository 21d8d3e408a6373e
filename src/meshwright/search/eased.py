"""How little of the optimizer's states, or of the weights, must wait elsewhere: the search asks for all of them or none, and a plan that it found
keeps as many as fit.

Promise: an eased plan is as safe as the one that was found (fits with a margin where that one does) and takes no longer. Memory falls and the
update grows with the share that waits, so the least share is found by halving, in hundredths that STEP divides.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost.box import Box
from meshwright.cost.price import Pricer
from meshwright.cost.step import estimate_of
from meshwright.spec.estimate import Estimate, Fits
from meshwright.spec.plan import goes_in_part

STEP = 5
"""Hundredths: a finer share would claim more than an estimate of memory knows."""

SAFE = (Fits.no, Fits.tight, Fits.fits)


def eased(pricer: Pricer, box: Box) -> tuple[Box, Estimate]:
    """The only plan of `box` with the least share that is as safe, and its price."""
    whole = estimate_of(pricer, box)
    (offload,) = box.offload
    if not goes_in_part(offload) or "offload_share" in pricer.setting.job.pins:
        return box, whole
    best, few, enough = (box, whole), 0, 100 // STEP
    while enough - few > 1:
        part = (few + enough) // 2
        less = replace(box, offload_share=part * STEP / 100)
        price = estimate_of(pricer, less)
        if SAFE.index(price.verdict) >= SAFE.index(whole.verdict) and price.time.step <= best[1].time.step:
            best, enough = (less, price), part
        else:
            few = part
    return best
