"""Twenty slow links and twenty slow ranks, each in one run: each is told of within twenty steps, and so is its
recovery; nothing is said in between, and no bit differs. What is measured stands in bench/results/faults.md."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
from fault_runs import events, launch, train
from network_namespace import ip
from test_faults_soak import FAULTS
from test_faults_soak_links import stopped
from test_faults_soak_rows import COPIES, same, settle
from test_nodes import JOB
from test_nodes_links import Apart
from test_train_run import furnished, weights

from meshwright.core.errors import Interrupted
from meshwright.elastic.local_agent import LocalAgent
from meshwright.spec.record import RunEvent
from meshwright.train.straggler import ALL_HEALTHY_TEXT

pytestmark = pytest.mark.soak

WITHIN = 20
LATEST = 40
"""Steps after which nobody waits for a verdict any more."""


class Spell(NamedTuple):
    """It began after `step`: `rank` was so many `times` as slow, or the link so many (rank -1)."""

    step: int
    rank: int
    times: float


def verdicts(folder: Path) -> list[RunEvent]:
    return [event for event in events(folder) if event.kind == "slow"] if (folder / "events.jsonl").exists() else []


def found(spells: Sequence[Spell], said: Sequence[RunEvent]) -> list[int]:
    """Steps until the right verdict fell, of the spells between which and the next one that was said, that all was well
    again, and nothing else."""
    steps = list[int]()
    assert not spells or not any(event.step <= spells[0].step for event in said), "slow before anything was"
    for spell, following in zip(spells, [*(each.step for each in spells[1:]), 10**9], strict=True):
        heard = [event for event in said if spell.step < event.step <= following]
        ranks, *expected = (
            (0, 2),
            "every rank waits",
            "the link between the hosts of ranks 0 and 2 carries ",
            ALL_HEALTHY_TEXT,
        )
        if spell.rank >= 0:
            ranks, *expected = (spell.rank,), f"rank {spell.rank} computes ", ALL_HEALTHY_TEXT
        right = len(heard) == len(expected) and all(
            event.cause.startswith(words) for event, words in zip(heard, expected, strict=True)
        )
        if right and heard[-2].ranks == ranks and heard[0].step <= spell.step + WITHIN:
            steps.append(heard[0].step - spell.step)
    return steps


def print_spells(spells: Sequence[Spell], said: Sequence[RunEvent]) -> None:
    print(
        [(step, rank, round(times, 1)) for step, rank, times in spells],
        [(event.step, event.ranks, event.cause) for event in said],
        sep="\n",
    )


FAST = 100
"""Mbit/s of the link while it is well."""


class Shaped(Apart):
    """Behind a link that carries so many Mbit/s, either way."""

    def shape(self, rate: float) -> None:
        for where, end in (((), "a"), (("-n", self.space), "b")):
            bucket = ("tbf", "rate", f"{rate:.2f}mbit", "burst", "32kb", "latency", "500ms")
            assert ip(*where, "qdisc", "replace", "dev", f"{self.space}{end}", "root", *bucket, command="tc")

    def hears(self, words: str, count: int, latest: int) -> None:
        """Waits until a verdict behind the first `count` has `words`, at the latest for step `latest`."""
        step = self.step()
        while (
            not any(words in event.cause for event in verdicts(self.folder)[count:])
            and step < latest
            and self.processes[0].poll() is None
        ):
            self.wait_for_next(step, 0)
            step = self.step()


def test_twenty_times_a_link_becomes_slow_and_is_well_again(tmp_path: Path, text: Path, space: str) -> None:
    """Row 11: to a fifth and less of what it carried."""
    place, chance, spells = (
        furnished(tmp_path, text, JOB.replace("checkpoint_every: 20", "checkpoint_every: 200")),
        random.Random(11),
        list[Spell](),
    )
    nodes = Shaped(place, "shaped", space, endless=True)
    nodes.shape(FAST)
    nodes.wait_for(40)
    for _ in range(FAULTS):
        times, count = chance.uniform(5.0, 20.0), len(verdicts(nodes.folder))
        spells.append(Spell(nodes.step(), -1, times))
        nodes.shape(FAST / times)
        nodes.hears("the link between", count, spells[-1].step + LATEST)
        nodes.shape(FAST)
        nodes.hears(ALL_HEALTHY_TEXT, count, nodes.step() + LATEST)
        nodes.wait_for(nodes.step() + chance.randrange(10, 25))
    last = stopped(nodes)
    whole = Apart(place, "plain", space, steps=last)
    code, err, other = whole.end()
    assert (code, other) == (0, 0), err
    equal = nodes.losses() == whole.losses() and weights(place, "shaped", last) == weights(place, "plain", last) != {}
    said = verdicts(nodes.folder)
    print_spells(spells, said)
    steps = found(spells, said)
    settle("11 a slow link", "dp4.z1", len(steps), nodes.folder, equal, in_time=f"{len(steps)} of {FAULTS}")
    assert median(steps) <= WITHIN


PACE = 0.15
"""Seconds that each rank computes longer than it would: beside them other programs of this machine count little."""


class Illness:
    """Hears a run, and makes one rank of it after another slow, each until it is told of."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance, self.spells = folder, chance, list[Spell]()
        self.heard, self.since, self.until = 0, 0, 30
        self.sick: Path | None = None

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        if rank or message["kind"] != "record":
            return
        step, said = message["record"]["step"], len(verdicts(self.folder))
        is_over = said > self.heard or step > self.since + LATEST
        if self.sick is not None and is_over:
            self.sick.unlink()
            self.sick, self.heard, self.since, self.until = None, max(said, self.heard + 1), step, 0
        elif self.sick is None and not self.until and is_over:  # well again
            self.until = step + self.chance.randrange(12, 25)
        elif self.sick is None and self.until and step >= self.until and len(self.spells) < FAULTS:
            self.spells.append(Spell(step, self.chance.randrange(4), self.chance.uniform(1.5, 4.0)))
            self.sick, self.heard, self.since = self.folder / f"slow-{self.spells[-1].rank}", said, step
            self.sick.write_text(f"{self.spells[-1].times:.2f}")
        elif self.until and step == self.until:
            os.kill(os.getpid(), signal.SIGTERM)


def test_twenty_ranks_become_slow_one_after_another_and_are_well_again(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Row 12: 1.5 to 4 times as slow."""
    folder, constant = tmp_path / "hurt", {"optimizer": {"lr": 1e-2, "warmup": 5, "schedule": "constant"}}
    illness = Illness(folder, random.Random(12))
    with pytest.raises(Interrupted, match="everything is saved"):
        train(agent, launch(text, folder, COPIES, 10**6, constant), [], hear=illness.hear, pace=PACE)
    said = verdicts(folder)
    print_spells(illness.spells, said)
    last = max(event.step for event in events(folder, saves=True))
    train(agent, launch(text, tmp_path / "whole", COPIES, last, constant), [])
    steps = found(illness.spells, said)
    settle(
        "12 a slow rank",
        COPIES,
        len(steps),
        folder,
        same(folder, tmp_path / "whole", last),
        in_time=f"{len(steps)} of {FAULTS}",
    )
