"""The ledger of samples: a step that read a sample twice, missed one or read another batch is named; a ledger that
balances says so."""

from __future__ import annotations

from meshwright.report.run import check_sample_balance, sample_balance_text
from meshwright.spec.record import RunEvent, StepRecord, digest_batch, digest_samples

ROWS = 8


def record(step: int, batch: int, samples: str | None = None) -> StepRecord:
    text = digest_batch(batch, ROWS).text if samples is None else samples
    return StepRecord(step=step, loss=1.0, tokens=8, gradient_norm=1.0, lr=1.0, seconds=1.0, batch=batch, samples=text)


def test_every_batch_once_in_order_balances_also_where_a_record_says_its_batch_alone() -> None:
    found = check_sample_balance([record(step, step - 1, "" if step == 3 else None) for step in range(1, 6)], ROWS, [])
    assert found is not None and (found.steps, found.proven, found.samples, found.problems) == (5, 4, 40, ())


def test_a_batch_read_twice_or_missed_is_named_and_one_left_out_in_writing_is_not() -> None:
    batches = [0, 1, 1, 2, 5, 6]
    found = check_sample_balance([record(step, batch) for step, batch in enumerate(batches, 1)], ROWS, [])
    assert found is not None
    assert found.problems == ("step 3 read batch 1 again, not batch 2", "step 5 read batch 5 and missed 2, not batch 3")
    spike = RunEvent(kind="spike", at=0.0, batches=(3, 5))
    kept = check_sample_balance([record(step, batch) for step, batch in enumerate([0, 1, 2, 5, 6], 1)], ROWS, [spike])
    assert kept is not None and kept.problems == () and kept.left_out == 2
    trained = check_sample_balance([record(step, batch) for step, batch in enumerate([0, 1, 2, 3], 1)], ROWS, [spike])
    assert trained is not None and trained.problems == ("step 4 read batch 3 again, not batch 5",)


def test_a_lost_record_beside_batches_that_were_left_out_balances() -> None:
    """Steps 1 to 5 read batches 0, 1, 2, 5, 6, of which the record of step 4 is lost."""
    spike = RunEvent(kind="spike", at=0.0, batches=(3, 5))
    found = check_sample_balance(
        [record(step, batch) for step, batch in [(1, 0), (2, 1), (3, 2), (5, 6)]], ROWS, [spike]
    )
    assert found is not None and found.problems == ()
    wrong = check_sample_balance(
        [record(step, batch) for step, batch in [(1, 0), (2, 1), (3, 2), (5, 5)]], ROWS, [spike]
    )
    assert wrong is not None and wrong.problems == ("step 5 read batch 5 again, not batch 6",)


def test_one_sample_in_place_of_another_does_not_balance() -> None:
    wrong = digest_samples([(0, 3), (2, 1), (4, 4)])
    found = check_sample_balance([record(1, 0, wrong.text)], ROWS, [])
    assert (
        found is not None
        and sample_balance_text(found)
        == "steps read the wrong samples: step 1 read 8 samples that are not the 8 of batch 0"
    )


def test_records_without_a_ledger_say_nothing() -> None:
    assert (
        check_sample_balance([StepRecord(step=1, loss=1.0, tokens=8, gradient_norm=1.0, lr=1.0, seconds=1.0)], ROWS, [])
        is None
    )
