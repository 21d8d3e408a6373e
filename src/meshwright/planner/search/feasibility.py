"""Finds choices with which no plan is legal, before any cost is computed. The plan space (space.py) uses it.

`check_pins` rejects pins that are not fields of a plan, or that contradict each other. The other functions find
layouts, schedules and offload choices with which every plan breaks a rule of `spec.constraints`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from meshwright.core.codec import validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.planner.cost.plan_grid import ScheduleChoice, ZeroChoice, allows_offload
from meshwright.spec.constraints import (
    batch_split_violations,
    block_count_violations,
    expert_parallel_violations,
    offload_violations,
    sequence_violations,
    stage_violations,
    tensor_parallel_violations,
)
from meshwright.spec.enums import (
    ACTIVATION_OFFLOADS,
    Offload,
    Recompute,
    offloads_activations,
    offloads_states,
    offloads_weights,
    upgrade_offload_fields,
)
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.violation import Violation
from meshwright.spec.workload_constraints import (
    UpdateProperties,
    diloco_violations,
    preference_violations,
    update_violations,
)

MEMORY_POLICY_PINS = ("recompute", "recompute_layers", "recompute_rest", "offload", "offload_layers")
"""Pins of recompute and offload, which can contradict each other for every plan."""
OFFLOAD_FRACTION_PINS = {"offload_share": offloads_states, "weights_share": offloads_weights}
"""The pins of offload fractions, each with a function that returns whether an offload choice includes the data to which
the fraction applies."""


def check_pins(job: Job) -> None:
    """Raises InputError if a pin is not a field of a plan, or if pins contradict each other or the devices."""
    pins: dict[str, Any] = upgrade_offload_fields(job.pins)
    devices = job.cluster.devices
    known = ("dp", *(name for name in Plan.model_fields if name != "version"))
    for name in pins:
        if name not in known:
            raise InputError(
                Message(
                    "pin {name!r} is not a field of a plan{hint}; pins are {known}",
                    name=name,
                    hint=did_you_mean(name, known),
                    known=", ".join(known),
                )
            )
    shares = [name for name in OFFLOAD_FRACTION_PINS if pins.get(name, 100) < 100]
    if shares and not job.cluster.host_bandwidth and not job.cluster.storage_bandwidth:
        raise InputError(
            Message(
                "pin {shares}={pins}: nothing can be offloaded: the devices have no host link (CPU "
                "ranks, or no host_bandwidth), and no node has a disk (storage_bandwidth)",
                shares=shares[0],
                pins=pins[shares[0]],
            )
        )
    if "offload" in pins:
        _check_offload_fractions(pins, pins["offload"])
        # The validation of Plan rejects invalid lists, such as an offload that occurs twice, or gradients without
        # optimizer.
        validate_data(Plan, {"zero": 3, "dp_shard": 2, "offload": pins["offload"]}, "pin offload")
    _check_memory_policy_pins(pins)
    if {"dp_replicate", "dp_shard"} <= pins.keys():
        pins["dp"] = pins["dp_replicate"] * pins["dp_shard"]
    _check_device_pins(pins, devices)


def _check_memory_policy_pins(pins: Mapping[str, Any]) -> None:
    """Raises InputError if pins of recompute and offload contradict each other."""
    if pins.get("recompute_rest", "none") != "none" and not pins.get("recompute_layers"):
        raise InputError(
            Message(
                "pin recompute_rest={recompute_rest} applies to the blocks after the first recomputed"
                " blocks: pin recompute_layers too",
                recompute_rest=pins["recompute_rest"],
            )
        )
    if pins.get("offload_layers") and not offloads_activations(pins.get("offload", ())):
        raise InputError(
            Message(
                "pin offload_layers={offload_layers} needs offload of activations: pin off=[activations] too",
                offload_layers=pins["offload_layers"],
            )
        )
    policy = {name: pins[name] for name in MEMORY_POLICY_PINS if name in pins}
    if policy.get("recompute_layers"):
        policy.setdefault("recompute", Recompute.full)
    validate_data(Plan, {"zero": 3, "dp_shard": 2, **policy}, "pins")


def _check_device_pins(pins: Mapping[str, Any], devices: int) -> None:
    """Raises InputError if the product of the pinned degrees does not divide `devices`, or if all degrees are pinned
    and the product is not `devices`."""
    axes = ("dp", "tp", "pp", "cp") if "dp" in pins else ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    factors = [
        (name, degree) for name in axes if isinstance(degree := pins.get(name), int) and (degree > 1 or name != "cp")
    ]
    product = 1
    for _, degree in factors:
        product *= degree
    equation = " * ".join(f"{name}({degree})" for name, degree in factors)
    if all(name in pins for name in axes) and product != devices:  # no unpinned axis is left for the remaining devices
        raise InputError(
            Message(
                "{equation} = {product} but the cluster has {devices} devices: change the plan or the cluster",
                equation=equation,
                product=product,
                devices=devices,
            )
        )
    if factors and devices % product:
        raise InputError(
            Message(
                "pins {equation} = {product} but the cluster has {devices} devices, which {product} does not divide",
                equation=equation,
                product=product,
                devices=devices,
            )
        )


def _check_offload_fractions(pins: dict[str, Any], offload: Any) -> None:
    """Raises InputError if an offload fraction is pinned and the pinned `offload` does not include the data to which
    the fraction applies."""
    if pins.get("offload_share", 100) < 100 and not offloads_states(offload):
        raise InputError(
            Message(
                "pins offload_share={offload_share} and offload={offload}: offload_share needs "
                "offload of optimizer states: add optimizer or optimizer-disk to the pin offload",
                offload_share=pins["offload_share"],
                offload=[str(what) for what in offload],
            )
        )
    if pins.get("weights_share", 100) < 100 and not offloads_weights(offload):
        raise InputError(
            Message(
                "pins weights_share={weights_share} and offload={offload}: weights_share needs "
                "offload of weights: add parameters or parameters-disk to the pin offload",
                weights_share=pins["weights_share"],
                offload=[str(what) for what in offload],
            )
        )


class FeasibleSchedules(NamedTuple):
    """The schedules of one pipeline degree. `legal` are the schedules that the job allows, `illegal` the schedules that
    it does not allow. `parts` and `illegal_parts` are the total numbers of partial recompute choices of these
    schedules."""

    legal: list[ScheduleChoice]
    illegal: list[ScheduleChoice]
    parts: int
    illegal_parts: int


class UpdateFeasibility:
    """Checks choices by three kinds of rules: rules of the job's optimizer update, rules of its DiLoCo settings, and
    limits on pinned numbers of recomputed and offloaded blocks."""

    def __init__(self, job: Job, runnable: bool = False) -> None:
        pins: dict[str, Any] = dict(job.pins)
        self.counted, self.sent = pins.get("recompute_layers", 0), pins.get("offload_layers", 0)
        self.shares = {
            name: value
            for name, value in upgrade_offload_fields(job.pins).items()
            if name in ("offload_share", "weights_share")
        }
        self.way = tuple(what for what in ACTIVATION_OFFLOADS if self.sent and what in pins.get("offload", ()))
        self.blocks = job.model.blocks
        update = UpdateProperties.of(job.workload, job.cluster, job.model.layers)
        self.update, self.local = update._replace(trains=runnable), job.workload.local

    def violation(self, plan: Plan) -> Violation | None:
        """Returns the first rule of the optimizer update, of DiLoCo or of the numbers of blocks that `plan` breaks, or
        None."""
        return next(
            chain(
                update_violations(plan, self.update),
                diloco_violations(plan, self.local),
                block_count_violations(plan, self.blocks),
            ),
            None,
        )

    def offload_violation(self, way: tuple[Offload, ...]) -> Violation | None:
        """Returns the rule that every plan with the offload choice `way` breaks, or None if some plan may have this
        choice."""
        replicas = self.local.replicas if self.local is not None else 1
        return (
            self.violation(Plan(dp_replicate=replicas, dp_shard=2, zero=3, offload=way, **self.shares)) if way else None
        )

    def excludes_zero(self, shards: ZeroChoice, cp: int) -> bool:
        """Returns whether every plan with the ZeRO choice `shards` and context-parallel degree `cp` is illegal."""
        return self.local is not None and cp > 1 and not shards.zero

    def schedule_violation(self, pp: int, order: ScheduleChoice) -> Violation | None:
        """Returns the rule that every plan with the schedule `order` breaks, or None if some plan may have this
        schedule."""
        # Only the rules for 8-bit products and for pinned numbers of blocks depend on the schedule.
        if not self.update.recipe.products and max(self.counted, self.sent) <= max(order.stage_layers):
            return None
        plan = Plan(
            pp=pp,
            schedule=order.schedule,
            virtual_stages=order.virtual_stages,
            actions=order.actions,
            layers_per_stage=order.stage_layers if pp > 1 and all(order.stage_layers) else (),
            recompute=Recompute.full if self.counted else Recompute.none,
            recompute_layers=self.counted,
            offload=self.way,
            offload_layers=self.sent,
        )
        return next(chain(update_violations(plan, self.update), block_count_violations(plan, self.blocks)), None)


def count_plans(
    shards: Sequence[ZeroChoice],
    ways: Sequence[tuple[Offload, ...]],
    whole: int,
    parts: int,
    orders: int,
    axes: int = 1,
) -> int:
    """Returns the number of plans with the ZeRO choices `shards` and the offload choices `ways`, for one value of each
    of the remaining fields.

    Each of the `orders` schedules has `whole` uniform recompute choices. All schedules together have `parts` partial
    recompute choices. There are `axes` orders of axes. Orders other than the default are combined only with uniform
    recompute and the first offload choice.
    """
    kinds = Counter((shard.zero, shard.lone) for shard in shards)
    counts = [sum(count for kind, count in kinds.items() if allows_offload(*kind, way)) for way in ways]
    return (whole * orders + parts) * sum(counts) + whole * orders * (axes - 1) * sum(counts[:1])


def first_violation(job: Job, plan: Plan, updates: UpdateFeasibility) -> Violation | None:
    """Returns the first rule that all plans with the degrees and choices of `plan` break, or None."""
    model = job.model
    rules = (
        tensor_parallel_violations(plan, model.divisible, model.tensor_parallel, model.shared_vocabulary),
        expert_parallel_violations(plan, model.experts),
        offload_violations(plan, job.cluster),
        update_violations(plan, updates.update),
        stage_violations(plan, max(model.blocks, 1), model.against_stages),
        sequence_violations(plan, job.workload.sequence),
        batch_split_violations(plan, job.workload.batch, model),
        preference_violations(plan, job.workload.preference),
    )
    return next(chain.from_iterable(rules), None)


def sequence_cut_violation(job: Job, plan: Plan) -> Violation | None:
    """Returns the rule that forbids dividing the sequence as in `plan`, or None."""
    return next(sequence_violations(plan, job.workload.sequence, against=job.model.against_sequence), None)
