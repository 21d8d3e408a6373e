"""The records of a run on a disk that is full for a while."""

from __future__ import annotations

import resource
from pathlib import Path

from meshwright.report.run import read_records
from meshwright.spec.record import StepRecord
from meshwright.train.metrics import RECORDS, Records


def test_a_record_that_found_no_room_is_said_once_and_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    """No file of this process may grow beyond the limit: the one of the records is longer than all others."""
    begins, said = 2**24, list[str]()
    with (tmp_path / RECORDS).open("wb") as file:
        file.truncate(begins - 1)
        file.seek(begins - 1)
        file.write(b"\n")
    records = Records(tmp_path, False, said.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, room in ((1, hard), (2, 200), (3, 0), (4, hard)):
        end = (tmp_path / RECORDS).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if room == hard else end + room // 4, hard))
        try:
            records.write(StepRecord(step=step, loss=2.0, tokens=64, gradient_norm=1.0, lr=0.1, seconds=0.5))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    records.close()
    (line,) = said
    assert line.startswith("records are lost from step 2 on: ") and line.endswith("; training goes on")
    (tmp_path / RECORDS).write_bytes((tmp_path / RECORDS).read_bytes()[begins:])
    found, cut = read_records(tmp_path / RECORDS)
    assert [record.step for record in found] == [1, 4] and cut == 1
