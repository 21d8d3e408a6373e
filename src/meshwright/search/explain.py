"""Why this plan: what was chosen, where its time and memory go, what each other family of plans lost to. At most five lines."""

from __future__ import annotations

from meshwright.base.units import show_bytes, show_seconds
from meshwright.search.answer import Answer, Family
from meshwright.search.near import largest_kind
from meshwright.spec.estimate import Fits
from meshwright.spec.job import Job

SHOWN = 3
"""Families that a line names."""


def explain(job: Job, answer: Answer) -> list[str]:
    """Lines for a screen."""
    chosen = answer.chosen
    estimate = chosen.estimate
    refused = sum(rejection.count for rejection in answer.rejected)
    lines = [
        f"{chosen.name}: {show_seconds(estimate.time.step)} a step, {estimate.tokens_per_second:,.0f} tokens/s, "
        f"the fastest of {answer.considered - refused:,} plans that fit, of {answer.considered:,}",
        _where(answer),
    ]
    others = [family for family in answer.families if family.plan != chosen.plan]
    slower = [family for family in others if family.fits]
    unfit = [family for family in others if not family.fits]
    if slower:
        lines.append("slower: " + "; ".join(_slower(family, estimate.time.step) for family in slower[:SHOWN]) + _more(slower))
    if unfit:
        limit = min(group.device.memory for group in job.cluster.groups)
        lines.append(
            f"do not fit in {show_bytes(limit)}: "
            + "; ".join(f"{family.name} needs {show_bytes(family.reserved)}" for family in unfit[:SHOWN])
            + _more(unfit)
        )
    illegal = [rejection for rejection in answer.rejected if rejection.reason != "does not fit"]
    if illegal:
        lines.append("not possible: " + "; ".join(f"{it.reason} ({it.count:,})" for it in illegal[:SHOWN]) + _more(illegal))
    return lines


def _where(answer: Answer) -> str:
    """Shares of the step and of the fullest rank."""
    estimate = answer.chosen.estimate
    items = {name: seconds for name, seconds in estimate.time if name != "step" and seconds > 0.005 * estimate.time.step}
    shares = ", ".join(f"{name} {seconds / estimate.time.step:.0%}" for name, seconds in sorted(items.items(), key=lambda it: -it[1]))
    kind, size = largest_kind(estimate.memory)
    verdict = "fits with a margin" if estimate.verdict == Fits.fits else "tight"
    return f"time: {shares}; memory: {show_bytes(estimate.memory.reserved)}, {verdict}, most of it {kind} ({show_bytes(size)})"


def _slower(family: Family, best: float) -> str:
    return f"{family.name} by {max(0.0, family.seconds / best - 1.0):.0%} ({family.plan.name})"


def _more(found: list[Family] | list) -> str:
    return f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
