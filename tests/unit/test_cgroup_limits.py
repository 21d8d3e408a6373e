"""Limits of control groups, of both versions, as their files say them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.cgroup_limits import cgroup_memory_available, cgroup_memory_limit, oom_kill_count


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_of_a_group_and_those_above_counts(tmp_path: Path, version: int) -> None:
    base = tmp_path / "memory" if version == 1 else tmp_path
    inner = base / "outer" / "inner"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("5:cpu:/other\n4:memory:/outer/inner\n" if version == 1 else "0::/outer/inner\n")
    limit, events = ("memory.limit_in_bytes", "memory.oom_control") if version == 1 else ("memory.max", "memory.events")
    (inner / limit).write_text("9223372036854771712\n" if version == 1 else "max\n")
    assert cgroup_memory_limit(tmp_path, own) == float("inf")
    (inner.parent / limit).write_text("1000\n")
    (inner / events).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert cgroup_memory_limit(tmp_path, own) == 1000 and oom_kill_count(tmp_path, own) == 3


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_left_of_the_tightest_group_counts_without_what_files_have_cached(tmp_path: Path, version: int) -> None:
    base = tmp_path / "memory" if version == 1 else tmp_path
    inner = base / "outer" / "inner"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("4:memory:/outer/inner\n" if version == 1 else "0::/outer/inner\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    assert cgroup_memory_available(tmp_path, own) == float("inf")
    for folder, numbers in ((inner, (5000, 1000)), (inner.parent, (3000, 2500))):
        for name, number in zip(names, numbers, strict=True):
            (folder / name).write_text(f"{number}\n")
        (folder / "memory.stat").write_text(f"anon 7\n{'total_' if version == 1 else ''}inactive_file 300\n")
    assert cgroup_memory_available(tmp_path, own) == 800


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert (
        cgroup_memory_limit(tmp_path, tmp_path / "none") == float("inf")
        and oom_kill_count(tmp_path, tmp_path / "none") == 0
    )
