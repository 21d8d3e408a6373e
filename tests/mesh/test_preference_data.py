"""Preference data: the three forms of records become equal rows, and bad records and jobs are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_instructions import tokenizer_folder

from meshwright.core.errors import InputError
from meshwright.data.dataset import open_dataset
from meshwright.data.preferences import PreferenceDataset
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.search.ranking import search_plans
from meshwright.spec.workload import DataConfig

TEXT = {"prompt": "What is 1 + 2?\n", "chosen": "3", "rejected": "It is twelve, 12."}
QUESTION = {"role": "user", "content": "What is 1 + 2?"}
ANSWERS = {
    name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "3"), ("rejected", "It is 12."))
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


def opened(place: Path, records: list[dict[str, Any]], sequence: int = 64, tokenizer: str = "bytes") -> Any:
    file = place / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(source=str(file), tokenizer=tokenizer, held_out=0)
    return open_dataset(data, sequence, 0, "preference", positions=True)


def answers(data: PreferenceDataset, row: int = 0) -> tuple[str, str]:
    batch = data.training(np.array([row]), np.array([row]), 1)
    found = [batch[name][batch[name] != -100].numpy() for name in ("chosen_labels", "rejected_labels")]
    return data.tokenizer.decode(found[0].tolist()), data.tokenizer.decode(found[1].tolist())


def test_a_row_has_both_answers_as_documents_with_positions_of_their_own(tmp_path: Path) -> None:
    data = opened(tmp_path, [TEXT])
    assert answers(data)[0].startswith("3") and answers(data)[1].startswith("It is twelve, 12.")
    batch = data.training(np.array([0]), np.array([0]), 1)
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    first = len(TEXT["prompt"]) + len(TEXT["chosen"]) + 1
    assert starts == [0, first, first + len(TEXT["prompt"]) + len(TEXT["rejected"]) + 1]
    assert not bool(((batch["chosen_labels"] != -100) & (batch["rejected_labels"] != -100)).any())


def test_messages_with_and_without_a_prompt_are_the_same_rows(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    implicit = {name: [QUESTION, *answer] for name, answer in ANSWERS.items()}
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    one = opened(tmp_path / "a", [{"prompt": [QUESTION], **ANSWERS}], 128, folder)
    other = opened(tmp_path / "b", [implicit], 128, folder)
    assert answers(one) == answers(other) and "3" in answers(one)[0] and "It is 12." in answers(one)[1]
    assert one.digest == other.digest


def test_long_pairs_are_truncated_and_pairs_without_room_left_out(tmp_path: Path) -> None:
    long = {**TEXT, "rejected": "no " * 40}
    data = opened(tmp_path, [TEXT, long, {**TEXT, "prompt": "x" * 50}], 64)
    assert (data.rows, data.cut) == (2, 2)
    assert len(answers(data, 1)[1]) >= 64 - 2 * len(TEXT["prompt"]) - 2
    with pytest.raises(InputError, match="no pair has a token of each answer within its first 16 tokens: increase"):
        opened(tmp_path, [TEXT], 16)


REFUSED = [
    ({"prompt": "a", "chosen": "b"}, r"pairs.jsonl:2: a preference pair has no 'rejected': give each record"),
    ({**TEXT, "chosen": " \n"}, r"pairs.jsonl:2: the chosen answer is empty: leave the record out"),
    ({**TEXT, "rejected": TEXT["chosen"]}, r"pairs.jsonl:2: chosen and rejected are equal: leave the record out"),
    ({**TEXT, "rejected": [QUESTION]}, r"pairs.jsonl:2: rejected is list, but that of the first record is str"),
    ({"chosen": "a", "rejected": "b"}, r"pairs.jsonl:2: a preference pair of text needs its 'prompt' as text"),
]


@pytest.mark.parametrize(("record", "words"), REFUSED)
def test_a_bad_record_is_refused_with_its_line(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        opened(tmp_path, [TEXT, record])
    assert "\n" not in str(error.value)


def test_an_answer_without_an_assistant_message_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    with pytest.raises(InputError, match=r"pairs.jsonl:1: rejected has no assistant message after the prompt: leave"):
        opened(tmp_path, [{"prompt": [QUESTION], **ANSWERS, "rejected": [QUESTION]}], 128, folder)


def test_pairs_without_the_objective_and_the_objective_without_pairs_are_refused(tmp_path: Path) -> None:
    opened(tmp_path, [TEXT])
    data = DataConfig(source=str(tmp_path / "pairs.jsonl"), tokenizer="bytes")
    with pytest.raises(InputError, match="its records are preference pairs: add --preference dpo or --preference orpo"):
        open_dataset(data, 64, 0, "causal", positions=True)
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(InputError, match="preference training needs records with 'prompt', 'chosen' and 'rejected'"):
        open_dataset(data.but(source=str(tmp_path / "text.jsonl")), 64, 0, "preference", positions=True)


def test_no_plan_of_the_planner_divides_a_pair() -> None:
    job = resolve_job(
        read_job(
            None, (), {"model.name": "llama-7b", "cluster.name": "1x8:h100", "workload.preference": {"loss": "orpo"}}
        )
    )
    assert all(each.plan.cp == each.plan.loss_chunks == 1 for each in search_plans(job).plans)
    divided = job.but(pins={**job.pins, "cp": 2})
    with pytest.raises(InputError, match="orpo compares the two answers of a row, which cp2 divides"):
        search_plans(divided)
