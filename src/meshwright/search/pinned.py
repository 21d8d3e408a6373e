"""Pins that are no fields of a plan, or that cannot all hold: refused before anything is searched."""

from __future__ import annotations

from typing import Any

from meshwright.base.codec import build
from meshwright.base.errors import InputError, did_you_mean
from meshwright.spec.job import Job
from meshwright.spec.keeps import with_shares
from meshwright.spec.plan import Plan, Recompute, sends, states_wait, weights_wait

KEPT = ("recompute", "recompute_layers", "recompute_rest", "offload", "offload_layers")
"""Pins that only some others go with, whatever the rest of a plan is."""
WAITS = {"offload_share": states_wait, "weights_share": weights_wait}
"""Shares, and whether what they are of waits in a choice of what does."""


def check_pins(job: Job) -> None:
    """InputError when a pin is no field of a plan, or pins contradict each other or the devices."""
    pins: dict[str, Any] = with_shares(job.pins)
    devices = job.cluster.devices
    known = ("dp", *(name for name in Plan.model_fields if name != "version"))
    for name in pins:
        if name not in known:
            raise InputError(f"pin {name!r} is no field of a plan{did_you_mean(name, known)}; pins are {', '.join(known)}")
    shares = [name for name in WAITS if pins.get(name, 100) < 100]
    if shares and not job.cluster.host_bandwidth and not job.cluster.storage_bandwidth:
        raise InputError(
            f"pin {shares[0]}={pins[shares[0]]}: there is nowhere to wait: these devices compute in their host's memory, or no way to it is known "
            "(host_bandwidth), and no node has a disk (storage_bandwidth)"
        )
    if "offload" in pins:
        _check_shares(pins, pins["offload"])
        # what no plan can say: twice the same, or gradients without the update
        build(Plan, {"zero": 3, "dp_shard": 2, "offload": pins["offload"]}, "pin offload")
    if pins.get("recompute_rest", "none") != "none" and not pins.get("recompute_layers"):
        raise InputError(
            f"pin recompute_rest={pins['recompute_rest']} is of the blocks behind the first ones that recompute: pin recompute_layers too"
        )
    if pins.get("offload_layers") and not sends(pins.get("offload", ())):
        raise InputError(f"pin offload_layers={pins['offload_layers']} counts blocks whose activations wait: pin off=[activations] too")
    kept = {name: pins[name] for name in KEPT if name in pins}
    if kept.get("recompute_layers"):
        kept.setdefault("recompute", Recompute.full)
    build(Plan, {"zero": 3, "dp_shard": 2, **kept}, "pins")
    if {"dp_replicate", "dp_shard"} <= pins.keys():
        pins["dp"] = pins["dp_replicate"] * pins["dp_shard"]
    axes = ("dp", "tp", "pp", "cp") if "dp" in pins else ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    factors = [(name, degree) for name in axes if isinstance(degree := pins.get(name), int) and (degree > 1 or name != "cp")]
    product = 1
    for _, degree in factors:
        product *= degree
    equation = " * ".join(f"{name}({degree})" for name, degree in factors)
    if all(name in pins for name in axes) and product != devices:  # no axis is left to take the rest of the devices
        raise InputError(f"{equation} = {product} but the cluster has {devices} devices")
    if factors and devices % product:
        raise InputError(f"pins {equation} = {product} but the cluster has {devices} devices, which {product} does not divide")


def _check_shares(pins: dict[str, Any], offload: Any) -> None:
    """A share is of what is pinned to wait."""
    if pins.get("offload_share", 100) < 100 and not states_wait(offload):
        raise InputError(
            f"pins offload_share={pins['offload_share']} and offload={[str(what) for what in offload]}: the share is of the optimizer's states: "
            "pin optimizer or optimizer-disk in off too"
        )
    if pins.get("weights_share", 100) < 100 and not weights_wait(offload):
        raise InputError(
            f"pins weights_share={pins['weights_share']} and offload={[str(what) for what in offload]}: the share is of the weights: "
            "pin parameters or parameters-disk in off too"
        )
