"""Instruction data: what is learned is what the assistant says, and a packed row has the loss of its conversations,
each by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.data.dataset import open_dataset
from meshwright.data.instructions import InstructionDataset, pack_conversations
from meshwright.data.sampler import sample_rows
from meshwright.data.tokens import train_bpe
from meshwright.spec.workload import DataConfig
from meshwright.train.model import accepts_packed_documents

transformers = pytest.importorskip("transformers")

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% "
    "generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}{% else %}{{ message['content'] "
    "}}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' and "
    "loop.last %}THINK {% endif %}{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def tokenizer_folder(place: Path, template: str = CHAT) -> str:
    place.mkdir(exist_ok=True)
    text = json.loads(train_bpe([Path(__file__).read_text()] * 2, 400))
    for number, word in enumerate(("<|im_start|>", "<|im_end|>")):
        flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        text["added_tokens"].append({"id": 400 + number, "content": word, **flags})
    (place / "tokenizer.json").write_text(json.dumps(text))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    (place / "chat_template.jinja").write_text(template)
    return str(place)


def conversation(number: int, turns: int = 1) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"What is {number} + {turn}?"},
            {"role": "assistant", "content": f"{number + turn}. Bye"},
        ]
    return {"messages": messages}


def written(place: Path, rows: list[dict[str, Any]]) -> DataConfig:
    (place / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source=str(place / "chat.jsonl"), tokenizer=tokenizer_folder(place / "tok"), held_out=0.1)


def opened(data: DataConfig, sequence: int = 96, positions: bool = True) -> InstructionDataset:
    found = open_dataset(data, sequence, 402, positions=positions)
    assert isinstance(found, InstructionDataset)
    return found


def learned_text(dataset: InstructionDataset, batch: dict[str, torch.Tensor]) -> list[str]:
    words = transformers.AutoTokenizer.from_pretrained(dataset.tokenizer.name)
    return [words.decode(row[row >= 0]) for row in batch["labels"]]


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_only_what_the_assistant_says_is_learned(tmp_path: Path, template: str) -> None:
    data = written(tmp_path, [conversation(number, turns=2) for number in range(12)])
    tokenizer_folder(tmp_path / "tok", template)
    dataset = opened(data, positions=False)
    texts = learned_text(dataset, dataset.training(np.arange(dataset.rows), np.arange(dataset.rows), 1))
    assert sorted(texts) and all(
        text.count("Bye<|im_end|>") == 2 and "What" not in text and "user" not in text for text in texts
    )
    assert dataset.rows + dataset.validation_rows == 12 and dataset.labels_per_row is None


def test_a_template_that_rewrites_earlier_turns_is_refused_not_guessed_at(tmp_path: Path) -> None:
    data = written(tmp_path, [conversation(number, turns=2) for number in range(12)])
    tokenizer_folder(tmp_path / "tok", REWRITING)
    with pytest.raises(InputError, match=r"chat.jsonl:1: the chat template rewrites earlier turns, so message 3"):
        opened(data)
    data = written(tmp_path, [conversation(number) for number in range(12)])
    tokenizer_folder(tmp_path / "tok", REWRITING)
    assert "THINK" in learned_text(found := opened(data), found.training(np.arange(1), np.arange(1), 1))[0]


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen2"])
def test_a_packed_row_has_the_loss_of_its_conversations_each_by_itself(tmp_path: Path, family: str) -> None:
    data = written(tmp_path, [conversation(number, turns=1 + number % 2) for number in range(16)])
    apart, packed = opened(data, 128, positions=False), opened(data, 128)
    assert packed.rows < apart.rows
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 402,
        "num_key_value_heads": 2,
    }
    small = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 402,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    config = getattr(transformers, f"{family}Config")(**(small if family == "GPT2" else sizes))
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).double()
    model.config.use_cache = False  # as the runtime sets it: with a cache there is no mask between conversations
    assert accepts_packed_documents(model)
    losses = []
    for dataset in (apart, packed):
        batch = dataset.training(np.arange(dataset.rows), np.arange(dataset.rows), 1)
        labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        with torch.no_grad():
            logits = model(**batch).logits
        losses.append(
            (float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")), int((labels >= 0).sum()))
        )
    assert losses[0][1] == losses[1][1] and losses[0][0] == pytest.approx(losses[1][0], rel=1e-12)


def test_prompt_and_completion_need_no_template_and_learn_the_end(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = open_dataset(DataConfig(source=str(tmp_path / "sums.jsonl"), tokenizer="bytes"), 16)
    assert isinstance(dataset, InstructionDataset)
    batch = dataset.training(np.arange(dataset.rows), np.arange(dataset.rows), 1)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        prompt = bytes(ids[: ids.index(ord("="))]).decode()
        answer = [label for label in labels if label >= 0]
        assert bytes(answer[:-1]).decode() == str(int(prompt[:-2]) + 1) and answer[-1] == 256
    assert dataset.digest == open_dataset(DataConfig(source=str(tmp_path / "sums.jsonl"), tokenizer="bytes"), 16).digest  # type: ignore[union-attr]


def test_records_of_sharegpt_and_alpaca_are_the_conversations_that_they_mean(tmp_path: Path) -> None:
    rows = [conversation(number) for number in range(12)]
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    other = [
        {"conversations": [{"from": speakers[each["role"]], "value": each["content"]} for each in row["messages"]]}
        for row in rows
    ]
    ours, theirs = (
        opened(data).training(np.arange(2), np.arange(2), 1)["input_ids"]
        for data in (written(tmp_path, rows), written(tmp_path, other))
    )
    assert ours.equal(theirs)
    with pytest.raises(InputError, match=r"chat\.jsonl:1: turn 1 needs 'from' and 'value'"):
        opened(written(tmp_path, [{"conversations": [{"from": "human"}]}]))
    alpaca = [{"instruction": f"Add 1 to {number}.", "input": "", "output": str(number + 1)} for number in range(20)]
    (tmp_path / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in alpaca))
    dataset = open_dataset(DataConfig(source=str(tmp_path / "alpaca.jsonl"), tokenizer="bytes"), 256)
    batch = dataset.training(np.arange(1), np.arange(1), 1)
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    answer = bytes(label for label in labels if 0 <= label < 256).decode()
    text = bytes(each for each in ids if each < 256).decode()
    assert (
        text.startswith("Below is an instruction") and f"Add 1 to {int(answer) - 1}.\n\n### Response:{answer}" in text
    )


def test_a_folder_that_datasets_saved_is_read_as_its_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist([conversation(number) for number in range(20)])
    with (
        pyarrow.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}, indent=2)
    )
    (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    lines = written(tmp_path, [conversation(number) for number in range(20)])
    table_rows = opened(lines.but(source=str(tmp_path / "saved")))
    assert table_rows.training(np.arange(2), np.arange(2), 1)["input_ids"].equal(
        opened(lines).training(np.arange(2), np.arange(2), 1)["input_ids"]
    )


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant message"),
        ({"messages": [{"role": "user"}]}, "message 1 needs a role and a content"),
        ({"prompt": "a", "completion": 3}, "field 'completion' is int, not text"),
    ],
)  # fmt: skip
def test_a_record_that_teaches_nothing_is_named_by_its_line(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"chat.jsonl:1: .*{sentence}"):
        opened(written(tmp_path, [row]))


def test_messages_without_a_chat_template_are_refused_with_the_way_out(tmp_path: Path) -> None:
    data = written(tmp_path, [conversation(1)])
    with pytest.raises(InputError, match=r"messages need a chat template: set data\.tokenizer"):
        open_dataset(data.but(tokenizer="bytes"), 32)
    (tmp_path / "tok" / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"has no chat template: put chat_template\.jinja beside it"):
        opened(data)


def test_packing_wastes_less_than_half_of_a_row_and_loses_nobody() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 500)
    rows = pack_conversations(np.arange(500), lengths, 100)
    assert sorted(one for row in rows for one in row) == list(range(500))
    assert all(lengths[row].sum() <= 100 for row in rows) and lengths.sum() / (100 * len(rows)) > 0.9


@pytest.mark.parametrize("times", [1, 8])
def test_of_one_conversation_nothing_is_held_out_however_often_it_stands_there(tmp_path: Path, times: int) -> None:
    (tmp_path / "one.jsonl").write_text((json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n") * times)
    dataset = open_dataset(DataConfig(source=str(tmp_path / "one.jsonl"), tokenizer="bytes"), 16)
    assert (dataset.rows, dataset.validation_rows) == (times, 0)
    assert (dataset.training(sample_rows(1, 0, 3, dataset.rows), np.arange(3), 1)["labels"] >= 0).any(dim=1).all()


def test_the_same_words_of_which_others_are_learned_are_other_data(tmp_path: Path) -> None:
    data = written(tmp_path, [conversation(number) for number in range(12)])
    fewer = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    rows, digests = [], []
    for template in (MARKED, fewer, MARKED):
        tokenizer_folder(tmp_path / "tok", template)
        dataset = opened(data, positions=False)
        rows.append(dataset.training(np.arange(dataset.rows), np.arange(dataset.rows), 1))
        digests.append(dataset.digest)
    assert torch.equal(rows[0]["input_ids"], rows[1]["input_ids"]) and not torch.equal(
        rows[0]["labels"], rows[1]["labels"]
    )
    assert digests[0] == digests[2] != digests[1]
