"""Defines the options of `meshwright plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from meshwright.cli.options import Language, count_option


@Parameter(name="*")
@dataclass(frozen=True)
class RankingOptions:
    """The options that select the plans of the search."""

    pin: Annotated[str | None, Parameter(help="plan fields to fix, such as tp=2,pp=4")] = None
    objective: Annotated[
        Literal["fastest", "fewest", "cheapest", "energy", "headroom"],
        Parameter(help="minimize step time, number of devices, price, energy of the devices, or device memory"),
    ] = "fastest"
    runnable: Annotated[
        bool, Parameter(negative="", help="rank only plans that this version can run; some plans are plan-only")
    ] = False
    trust: Annotated[
        Literal["all", "measured"],
        Parameter(help="rank all plans, or only plans whose features all occur in published runs with a measured time"),
    ] = "all"
    trials: Annotated[
        int,
        count_option("run up to this many of the best plans for a few steps each, refit the estimate and rank again"),
    ] = 0


@Parameter(name="*")
@dataclass(frozen=True)
class RunLengthOptions:
    """The length of the run, its price and its end."""

    tokens: Annotated[
        str | None, Parameter(help="tokens of the whole run, such as 1T: prints days, device-hours, money and energy")
    ] = None
    price: Annotated[
        float | None, Parameter(help="money per device hour; default: of the cluster file, else of the catalog")
    ] = None
    by: Annotated[
        str | None,
        Parameter(help="with --tokens: the day by which the run must end, such as 2027-03-01, on the fewest devices"),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class OutputOptions:
    """The further output of the command, and the files to write."""

    top: Annotated[int, count_option("number of plans to show")] = 10
    why: Annotated[
        bool, Parameter(negative="", help="show the best plan of each rejected plan family, and why it lost")
    ] = False
    why_not: Annotated[
        str | None,
        Parameter(
            help=(
                "explain why a plan, or pins such as tp=8,pp=8, was not chosen: the violated limit or "
                "the additional time"
            )
        ),
    ] = None
    compare: Annotated[
        tuple[str, str] | None,
        Parameter(negative="", help="two plans, such as dp8.z1 tp2.dp4: compare their times and memory"),
    ] = None
    advice: Annotated[
        bool,
        Parameter(
            negative="",
            help=(
                "answer six questions about the job, and predict the effect of improvements of the cluster or workload"
            ),
        ),
    ] = False
    save: Annotated[Path | None, Parameter(help="write the best plan to this file, for --plan")] = None
    fresh: Annotated[
        bool, Parameter(negative="", help="search again, even if the answer to this question is in the cache")
    ] = False
    page: Annotated[
        Path | None,
        Parameter(
            help=(
                "write an HTML page to this file: plans for this job and for other numbers of "
                "devices, batch, sequence, memory"
            )
        ),
    ] = None
    lang: Language = None


@Parameter(name="*")
@dataclass(frozen=True)
class SystemOptions:
    """The options that plan for another system."""

    system: Annotated[
        str | None,
        Parameter(
            name="--for",
            help="plan for another system: only plans that it can run, as a diff of its own keys; such as megatron",
        ),
    ] = None
    config: Annotated[
        tuple[Path, ...],
        Parameter(negative="", show_default=False, help="with --for: a file of your configuration, repeatable"),
    ] = ()
