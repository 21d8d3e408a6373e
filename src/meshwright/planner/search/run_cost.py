"""Answers what a whole training run costs under a plan: steps, days, device-hours, money, energy and CO2, and how well
the devices are used.

- Money: device-hours x price. The price is the user's (`--price`, or `price` of a device in a cluster file), else that
  of catalog/prices.json, with its date.
- Energy: device-hours x power of a device x PUE. CO2: energy x CARBON_KG_PER_KWH. Power is the power limit in the
  catalog. Hosts, network and cooling are in the PUE only. These are the formulas and constants of Touvron et al.,
  LLaMA, arXiv 2302.13971, section 6: 1,022,362 hours of A100-80GB (400 W) are 449 MWh and 173 t CO2.
- Speed-up: devices x efficiency. The efficiency is the compute time of a step on the slowest rank divided by the step
  time, so communication, bubbles, recompute and offload reduce it.
- Redundancy: the bytes of weights, gradients and optimizer states on all ranks, divided by the bytes of one copy.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence

from meshwright.catalog import read as catalog
from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.planner.search.best_plans import RankedPlan
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job

POWER_USAGE_EFFECTIVENESS = 1.1
"""Energy of the data centre divided by that of the devices (arXiv 2302.13971, section 6)."""

CARBON_KG_PER_KWH = 0.385
"""Kilograms of CO2 equivalent per kWh, the national average of the USA (arXiv 2302.13971, section 6)."""

HOUR, DAY = 3600.0, 86400.0
COUNT_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
MAX_TOKENS = 1e18


class RunCost(StrictModel):
    """The cost of a run. `money` is None without a price, `energy` (kWh) and `carbon` (kg) are None without the power
    of the devices. `copies` is the redundancy, `duplicates` the bytes beyond one copy."""

    tokens: float
    steps: int
    seconds: float
    device_hours: float
    money: float | None
    energy: float | None
    carbon: float | None
    speedup: float
    efficiency: float
    copies: float
    duplicates: float


def parse_token_count(text: str) -> float:
    """Returns a number of tokens such as 300B or 1T.

    Raises: InputError if the text is not a positive number with the suffix k, M, B or T.

    >>> parse_token_count("1.4T"), parse_token_count("300b")
    (1400000000000.0, 300000000000.0)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmbt]?)\s*", text.lower())
    tokens = float(found[1]) * COUNT_PREFIXES[found[2]] if found else 0.0
    if not 0 < tokens <= MAX_TOKENS:
        raise InputError(Message("--tokens {text!r} is not a number of tokens; write it like 300B or 1T", text=text))
    return tokens


def with_prices(cluster: Cluster, price: float | None) -> Cluster:
    """Returns the cluster with prices per device hour: `price` for all devices, else the prices of the cluster, else
    those of the catalog. Devices without any price have none.

    Raises: InputError if `price` is not a positive number.
    """
    if price is not None and not (price > 0 and math.isfinite(price)):
        raise InputError(Message("--price {price} must be above 0: money per device hour, such as 2.5", price=price))
    listed = {name: row["per_device_hour"] for name, row in catalog.prices().items()}
    groups = []
    for group in cluster.groups:
        own = price if price is not None else group.device.price
        groups.append(
            group.but(device=group.device.but(price=own if own is not None else listed.get(group.device.name)))
        )
    return cluster.but(groups=tuple(groups))


def with_power_as_price(cluster: Cluster) -> Cluster:
    """Returns the cluster in which the price of a device hour is its energy in kWh, so that the cheapest plan is the
    one with the least energy.

    Raises: InputError if the power of a device is not known.
    """
    for group in cluster.groups:
        if not group.device.power_watts:
            raise InputError(
                Message(
                    "the plan with the least energy needs the power of {device}: give it power_watts in the cluster "
                    "file",
                    device=group.device.name,
                )
            )
    groups = (group.but(device=group.device.but(price=group.device.power_watts / 1000.0)) for group in cluster.groups)
    return cluster.but(groups=tuple(groups))


def seconds_until(date: str, now: datetime.datetime) -> float:
    """Returns the seconds from `now` until the end of the day `date` in UTC.

    Raises: InputError if `date` is not a date such as 2027-03-01, or is in the past.

    >>> seconds_until("2027-03-01", datetime.datetime(2027, 3, 1, 12, tzinfo=datetime.UTC))
    43200.0
    """
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError:
        raise InputError(Message("--by {date!r} is not a date; write it like 2027-03-01", date=date)) from None
    end = datetime.datetime(day.year, day.month, day.day, tzinfo=datetime.UTC) + datetime.timedelta(days=1)
    if end <= now:
        raise InputError(Message("--by {date} is in the past: name a day from {today} on", date=date, today=now.date()))
    return (end - now).total_seconds()


def run_cost(job: Job, ranked: RankedPlan, tokens: float) -> RunCost:
    """Returns the cost of training on `tokens` tokens under the plan `ranked`. `job` has the devices that the plan
    uses."""
    plan, priced, cluster = ranked.plan, ranked.estimate, job.cluster
    steps = math.ceil(tokens / job.workload.tokens)
    seconds = steps * priced.time.step + priced.first
    hours = cluster.devices * seconds / HOUR
    watts = [group.nodes * group.devices * group.device.power_watts for group in cluster.groups]
    energy = sum(watts) / 1000.0 * seconds / HOUR * POWER_USAGE_EFFECTIVENESS if all(watts) else None
    stored = sum(stage.parameters + stage.gradients + stage.optimizer for stage in priced.per_stage)
    stored *= plan.world / plan.pp
    once = job.workload.bytes_per_parameter * job.model.parameters
    efficiency = priced.time.compute / priced.time.step
    return RunCost(
        tokens=tokens,
        steps=steps,
        seconds=seconds,
        device_hours=hours,
        money=cluster.price * seconds / HOUR if cluster.price is not None else None,
        energy=energy,
        carbon=energy * CARBON_KG_PER_KWH if energy is not None else None,
        speedup=cluster.devices * efficiency,
        efficiency=efficiency,
        copies=stored / once,
        duplicates=max(stored - once, 0.0),
    )


def run_cost_messages(job: Job, cost: RunCost, given: bool) -> Sequence[Message]:
    """Returns sentences about the cost of a run. `given`: whether the user stated the price."""
    found = [
        Message(
            "{tokens:parameters} tokens: {steps:count step}, {days} days, {hours:count device-hour}",
            tokens=cost.tokens,
            steps=cost.steps,
            days=f"{cost.seconds / DAY:,.1f}",
            hours=round(cost.device_hours),
        )
    ]
    prices = catalog.prices()
    rows = [prices[name] for group in job.cluster.groups if (name := group.device.name) in prices]
    if cost.money is not None:
        rate = cost.money / cost.device_hours
        listed = not given and rows and abs(rate - rows[0]["per_device_hour"]) < 1e-9
        values = {"money": f"{cost.money:,.0f}", "rate": f"{rate:.3f}"}
        found.append(
            Message(
                "money: {money} {currency} at {rate} {currency} per {device}-hour: a price of {date} ({source}); "
                "--price sets yours",
                **values,
                **{name: rows[0][name] for name in ("currency", "date", "source")},
                device=rows[0]["name"],
            )
            if listed
            else Message("money: {money} at {rate} per device-hour (your price)", **values)
        )
    if cost.energy is not None and cost.carbon is not None:
        found.append(
            Message(
                "energy: {energy} MWh at PUE {pue}, {carbon} t CO2 at {factor} kg per kWh (formulas and factors of "
                "arXiv 2302.13971, section 6)",
                energy=f"{cost.energy / 1e3:,.1f}",
                pue=POWER_USAGE_EFFECTIVENESS,
                carbon=f"{cost.carbon / 1e3:,.1f}",
                factor=CARBON_KG_PER_KWH,
            )
        )
    return [*found, usage_message(job, cost)]


def usage_message(job: Job, cost: RunCost) -> Message:
    """Returns a sentence about the speed-up and the redundancy."""
    return Message(
        "speed-up {speedup} on {devices:count device} (efficiency {efficiency:percent}); weights, gradients and states "
        "are stored {copies} times, {duplicates:bytes} of them are duplicates",
        speedup=f"{cost.speedup:,.1f}",
        devices=job.cluster.devices,
        efficiency=cost.efficiency,
        copies=f"{cost.copies:.2f}",
        duplicates=cost.duplicates,
    )
