"""Documents in one row, each by itself: what the data say, and what models make of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.core.errors import InputError
from meshwright.data.dataset import TextDataset, open_dataset
from meshwright.models.registry import build_reference_model
from meshwright.spec.workload import DataConfig
from meshwright.train.model import accepts_packed_documents

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 64, "seq": 32}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_document_in_a_row_of_several_is_read_as_if_it_were_alone(kind: str) -> None:
    torch.manual_seed(0)
    model = build_reference_model({**SIZES, "kind": kind}).double()
    ids = torch.randint(64, (2, 12))
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]]).expand(2, -1)
    together = model(ids, position_ids=places).logits
    for start, stop in ((0, 5), (5, 7), (7, 12)):
        torch.testing.assert_close(together[:, start:stop], model(ids[:, start:stop]).logits, rtol=1e-10, atol=1e-12)


def test_models_that_keep_documents_apart_are_told_from_those_that_do_not() -> None:
    torch.manual_seed(0)
    assert [
        accepts_packed_documents(build_reference_model({**SIZES, "kind": kind})) for kind in ("llama", "gpt2", "bert")
    ] == [
        True,
        True,
        False,
    ]


def test_rows_of_documents_apart_have_places_and_no_label_for_the_first_token_of_one(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("word " * (3 + number % 5) + str(number))
    data = DataConfig(source=str(tmp_path / "*.txt"), tokenizer="bytes")
    joined, apart = (open_dataset(data.but(documents=how), 32) for how in ("joined", "apart"))
    assert isinstance(joined, TextDataset)
    assert isinstance(apart, TextDataset)
    assert apart.digest != joined.digest
    rows = np.arange(4)
    one, other = (each.training(rows, rows, 1) for each in (joined, apart))
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert apart.tokenizer is not None
    begins = torch.zeros_like(one["input_ids"], dtype=torch.bool)
    begins[:, 1:] = one["input_ids"][:, :-1] == apart.tokenizer.end_of_text
    assert begins.any()
    assert torch.equal(other["labels"] == -100, begins)
    assert torch.equal(other["position_ids"] == 0, begins | (torch.arange(32) == 0))
    assert (other["position_ids"].diff() == 1)[~begins[:, 1:]].all()


def test_documents_apart_need_a_causal_model_and_a_token_that_ends_them(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(2000, dtype=np.uint16) % 50)
    with pytest.raises(InputError, match=r"documents=apart: token arrays have no tokenizer.*set data\.tokenizer"):
        open_dataset(DataConfig(source=str(tmp_path / "tokens.npy"), documents="apart"), 32)
    (tmp_path / "a.txt").write_text("some text " * 200)
    with pytest.raises(InputError, match="objective is masked; leave documents joined"):
        open_dataset(
            DataConfig(source=str(tmp_path / "a.txt"), tokenizer="bytes", documents="apart"), 32, objective="masked"
        )
