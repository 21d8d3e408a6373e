"""What a run writes of itself on a disk that is full for a while."""

from __future__ import annotations

import resource
from pathlib import Path

from meshwright.data.tokens import LibraryTokenizer, train_bpe
from meshwright.report.run import read_records
from meshwright.spec.record import RECORDS_FILE_NAME, StepRecord
from meshwright.train.metrics import RecordWriter


def test_a_record_that_found_no_room_is_said_once_and_written_when_there_is_some(tmp_path: Path) -> None:
    """No file of this process may grow beyond the limit: the one of the records is longer than all others."""
    begins, said = 2**24, list[str]()
    with (tmp_path / RECORDS_FILE_NAME).open("wb") as file:
        file.truncate(begins - 1)
        file.seek(begins - 1)
        file.write(b"\n")
    records = RecordWriter(tmp_path, (), said.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, room in ((1, hard), (2, 200), (3, 0), (4, hard)):
        end = (tmp_path / RECORDS_FILE_NAME).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if room == hard else end + room // 4, hard))
        try:
            records.write(StepRecord(step=step, loss=2.0, tokens=64, gradient_norm=1.0, lr=0.1, seconds=0.5))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    records.close()
    waiting, written = said
    assert waiting.startswith(
        "the records from step 2 on cannot be written and are kept in memory: "
    ) and waiting.endswith("; training goes on")
    assert written == "the records from step 2 on are written"
    (tmp_path / RECORDS_FILE_NAME).write_bytes((tmp_path / RECORDS_FILE_NAME).read_bytes()[begins:])
    found, cut = read_records(tmp_path / RECORDS_FILE_NAME)
    assert [record.step for record in found] == [1, 2, 3, 4] and cut == 0


def test_a_run_resumes_where_a_full_disk_cannot_complete_a_cut_line(tmp_path: Path) -> None:
    lines, said = tmp_path / RECORDS_FILE_NAME, list[str]()
    lines.write_text('{"step": 1, "lo')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (lines.stat().st_size, hard))
    try:
        records = RecordWriter(tmp_path, (), said.append)
        records.write(StepRecord(step=2, loss=2.0, tokens=64, gradient_norm=1.0, lr=0.1, seconds=0.5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    records.write(StepRecord(step=3, loss=2.0, tokens=64, gradient_norm=1.0, lr=0.1, seconds=0.5))
    records.close()
    found, cut = read_records(lines)
    assert [record.step for record in found] == [2, 3] and cut == 1
    assert said[0].startswith("the records from step 2 on cannot be written and are kept in memory: ")


def test_the_tokenizer_that_a_run_has_needs_no_room_when_it_goes_on(tmp_path: Path) -> None:
    tokenizer = LibraryTokenizer(train_bpe(["some text " * 50] * 3, 280), "bpe")
    tokenizer.save(tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        tokenizer.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    (tmp_path / "tokenizer.json").write_bytes(before[:100])
    tokenizer.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before
