"""Other numbers of ranks while a run goes on: by request, and because one fails again and again; plans of other kinds;
exact runs to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fault_runs import STEPS, events, launch, losses, tensors, train

from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.elastic.local_agent import LocalAgent
from meshwright.report.run import read_run, summarize_run


def contents(folder: Path) -> dict[int, str]:
    """The digest of what was read, of the steps whose ranks lived to say it."""
    return {record.batch: record.content for record in read_run(folder).steps if record.batch is not None}


@pytest.mark.parametrize(
    ("even", "first", "world", "plans", "resized"),
    [
        pytest.param("dp2.mb2", "dp2.z2.mb2", 2, {1: "dp1", 2: "pp2.z1.mb2"}, ["dp1", "pp2.z1.mb2", "dp1"], id="two"),
        pytest.param(
            "dp4.mb2",
            "dp2x2.z2.mb2",
            4,
            {2: "pp2.z1.mb2", 3: "dp1", 4: "tp2.dp2.z1"},
            ["pp2.z1.mb2", "dp2.tp2.z1", "dp1"],
            id="four",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_ranks_that_are_lost_or_asked_for_change_the_plan_and_not_the_losses(
    agent: LocalAgent,
    tmp_path: Path,
    text: Path,
    even: str,
    first: str,
    world: int,
    plans: dict[int, str],
    resized: list[str],
) -> None:
    """`world` ranks, half of them by request, all again by request, then fewer because one fails again and again."""
    whole = launch(text, tmp_path / "whole", even)
    train(agent, whole, [])
    broken = launch(text, tmp_path / "broken", first, min_ranks=world // 2)
    faults = [{"rank": world - 1, "step": step, "phase": "backward", "how": "SIGKILL"} for step in (12, 13, 14)]
    train(agent, broken, faults, plans=plans, asks={2: world // 2, 6: world})
    found = events(tmp_path / "broken")
    assert [event.plan for event in found if event.kind == "resize"] == resized
    expected = losses(tmp_path / "whole")
    assert all(abs(loss - expected[step]) < 1e-6 * abs(loss) for step, loss in losses(tmp_path / "broken").items())
    assert sorted(losses(tmp_path / "broken")) == list(range(STEPS + 1))
    assert all(event.lost == 0 for event in found)


WAYS = {
    "data-parallel": ({3: "dp3", 2: "dp2", 4: "dp4"}, "dp4"),
    "sharded": ({3: "dp3.z3", 2: "dp2.z2", 4: "dp4.z1"}, "dp4.z3"),
    "of another kind": ({3: "dp3.z1", 2: "tp2.mb3", 4: "dp2.pp2.z1.mb3"}, "tp4.mb3"),
}


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_four_ranks_become_three_and_two_and_four_again_without_a_step_lost(
    agent: LocalAgent, tmp_path: Path, text: Path, way: str
) -> None:
    plans, first = WAYS[way]
    whole, moved = (launch(text, tmp_path / name, first, workload={"batch": 12}) for name in ("whole", "moved"))
    train(agent, whole, [])
    train(agent, moved, [], plans=plans, asks={3: 3, 7: 2, 11: 4})
    found = events(tmp_path / "moved")
    assert [event.plan for event in found if event.kind == "resize"] == [plans[3], plans[2], plans[4]]
    assert not any(event.lost for event in found)
    expected = losses(tmp_path / "whole")
    assert sorted(losses(tmp_path / "moved")) == list(range(STEPS + 1))
    assert all(abs(loss - expected[step]) < 1e-6 * abs(loss) for step, loss in losses(tmp_path / "moved").items())


@pytest.mark.soak
def test_an_exact_run_that_shrinks_and_grows_ends_in_the_same_bits(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Losses and weights; under the other plan files are cut otherwise, so whole tensors are compared."""
    exact = {"batch": 12, "exact": 1}
    whole, moved = (
        launch(text, tmp_path / name, plan, workload=exact)
        for name, plan in (("whole", "dp4.z1"), ("moved", "dp2x2.z3"))
    )
    train(agent, whole, [])
    faults = [{"rank": 1, "step": 5, "phase": "backward", "how": "SIGKILL"}]
    plans = {3: "dp3.z2", 2: "dp2", 4: "dp4.z3"}
    train(agent, moved, faults, plans=plans, asks={3: 3, 7: 2, 11: 4})
    assert [event.kind for event in events(tmp_path / "moved")].count("resize") == 3
    assert losses(tmp_path / "moved") == losses(tmp_path / "whole")
    whole_contents = contents(tmp_path / "whole")
    assert all(content in ("", whole_contents[batch]) for batch, content in contents(tmp_path / "moved").items())
    for name in ("moved", "whole"):
        ledger = summarize_run(read_run(tmp_path / name)).ledger
        assert ledger is not None and ledger.problems == () and ledger.proven >= STEPS - 4
    one, other = tensors(tmp_path / "whole"), tensors(tmp_path / "moved")
    names = [name for name in one if not name.startswith("rank/")]
    assert len(names) > 30 and all(torch.equal(one[name], other[name]) for name in names)


def test_a_checkpoint_is_written_once_while_the_number_of_ranks_changes(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """The one of step 4 takes as long as the change; the ranks of the next plan ask for it again, and wait for their
    turn."""
    work = launch(text, tmp_path / "run", "dp2.z1", steps=8, checkpoint_every=4, keep=9)
    notes: list[str] = []
    train(agent, work, [], notes, plans={1: "dp1"}, asks={4: 1}, disk={"4": "slow"})
    found = events(tmp_path / "run")
    assert [event.kind for event in found] == ["resize", "recovery"]
    assert [note for note in notes if "no checkpoint" in note] == []
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000004", "step-00000008"]
    assert all(verify_checkpoint(folder / name) == [] for name in ("step-00000004", "step-00000008"))
