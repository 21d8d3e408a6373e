"""The table of waits in reliability.md, in both languages: each limit is the value of a constant in the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "meshwright"
FIRST_LINES = {"en": "| wait | limit |", "zh": "| 等待 | 时限 |"}
UNITS = {"en": ("s", "minutes", "MiB"), "zh": ("秒", "分钟", "MiB")}

CONSTANTS: dict[str, str] = {
    "a node for a leader": "core/node_wait.JOIN_SECONDS",
    "the leader for its nodes at a start": "core/node_wait.JOIN_SECONDS",
    "a node that lost its leader, for a new leader": "elastic/snapshot_inventory.RETAINED_SECONDS",
    "the leader for a node that was lost": "core/node_wait.JOIN_SECONDS",
    "finding the leader while the file system": "cli/leader_file.STORAGE_RETRY_SECONDS core/node_wait.JOIN_SECONDS",
    "a command for the lock of the run folder": "train/run_lock.LOCK_TIMEOUT_SECONDS",
    "a connection from its start to its admission": (
        "core/connection_listener.HANDSHAKE_SECONDS core/rendezvous_store.JOIN_TIMEOUT_SECONDS"
    ),
    "the leader for a message of a silent node": "elastic/node.NODE_TIMEOUT_SECONDS",
    "the supervisor for a rank that does not advance": "elastic/hang_detector.TIMEOUT_STEPS",
    "the supervisor for the end of killed ranks": (
        "elastic/hang_detector.KILL_SECONDS elastic/hang_detector.ACCELERATOR_KILL_SECONDS"
    ),
    "the supervisor for a fork server to become ready": "elastic/hang_detector.FORK_SERVER_SECONDS",
    "the supervisor for ranks that do not find each other": "",
    "the supervisor for a fork server that does not read commands": "elastic/local_agent.SEND_SECONDS",
    "a retry after a failure": "elastic/restart_policy.RETRY_PAUSE_SECONDS",
    "planning for another number of ranks": "elastic/replan.PLANNING_SECONDS",
    "planning for less memory": "elastic/replan.PLANNING_SECONDS",
    "training for a checkpoint that is due": "train/recovery.MAX_WRITER_WAIT_SECONDS",
    "a checkpoint writer without progress": "",
    "a checkpoint writer that removes old checkpoints": "",
    "rank 0 for the removal of old checkpoints": "train/checkpoint_pruner.MAX_REMOVAL_WAIT_SECONDS",
    "the end of a command for the removal of a partial checkpoint": "cli/train.LEFTOVERS_SECONDS",
    "a save by the ranks themselves": "elastic/hang_detector.DISK_TIMEOUT_SECONDS",
    "the saves after a save by the ranks that hung": (
        "train/storage_probe.PROBE_SECONDS train/storage_probe.LAST_SAVE_SECONDS"
    ),
    "a node for the snapshots of another node": "core/snapshots.SNAPSHOT_TIMEOUT_SECONDS",
    "a whole replication round": "elastic/snapshot_replication.ROUND_TIMEOUT_SECONDS",
    "a replicated step": "",
    "a message, for a node that does not read it": "core/secure_channel.SEND_TIMEOUT_SECONDS",
    "a node for the address of a name": "",
    "a new supervisor for the processes of the killed supervisor": "elastic/snapshot_adoption.TERMINATION_SECONDS",
    "a supervisor or a rank for a run folder": (
        "core/background_thread.PATIENCE_SECONDS core/append_file.CLOSE_SECONDS core/append_file.MAX_BACKLOG_BYTES"
    ),
    "the supervisor for a log in the run folder": "core/storage.OVERDUE_SECONDS",
    "a rank for its own log": "core/storage.OVERDUE_SECONDS core/background_thread.PATIENCE_SECONDS",
    "a report or a command for the disk": "",
}
"""For the start of each row's first cell: the constants whose values its limit states. Empty if the limit follows from
several values or has none."""


def rows(language: str) -> list[list[str]]:
    """Returns the cells of each row."""
    lines = (ROOT / "docs" / language / "reliability.md").read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith(FIRST_LINES[language])) + 2
    end = next(at for at in range(first, len(lines)) if not lines[at].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[first:end]]


def value_of(constant: str) -> float:
    """Returns the value that the source assigns to `constant` (`folder/file.NAME`)."""
    file, _, name = constant.rpartition(".")
    for node in ast.parse((SOURCES / f"{file}.py").read_text()).body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) else None
            for at, each in enumerate(names):
                if isinstance(each, ast.Name) and each.id == name:
                    one = values[at] if values is not None else node.value
                    return float(eval(compile(ast.Expression(one), file, "eval"), {"__builtins__": {}}))
    raise AssertionError(f"{constant} is not assigned")


def shown(constant: str, language: str) -> str:
    """Returns how a limit of the table states the value of `constant`."""
    value, (seconds, minutes, size) = value_of(constant), UNITS[language]
    if constant.endswith("_BYTES"):
        return f"{value / 2**20:g} {size}"
    if constant.endswith(("_STEPS", "PAUSE_SECONDS")):
        return f"{value:g}"
    return f"{value / 60:g} {minutes}" if value > 900 else f"{value:g} {seconds}"


def test_the_table_has_the_waits_that_this_test_knows_in_both_languages() -> None:
    found = [cells[0] for cells in rows("en")]
    assert len(found) == len(CONSTANTS) == len(rows("zh"))
    assert [wait for wait, begin in zip(found, CONSTANTS, strict=True) if not wait.startswith(begin)] == []
    assert {len(cells) for language in UNITS for cells in rows(language)} == {5}


@pytest.mark.parametrize("language", UNITS)
def test_each_limit_of_the_table_is_that_of_the_code(language: str) -> None:
    wrong = [
        (cells[0], constant, shown(constant, language))
        for cells, constants in zip(rows(language), CONSTANTS.values(), strict=True)
        for constant in constants.split()
        if shown(constant, language) not in cells[1]
    ]
    assert wrong == []
