"""What a person's own loop and own model may look like: open plan names, batches of a `DataLoader`, forwards with names
of their own; and what a run that learned nothing says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from test_coming_from import refresh, run_script
from test_train_run import environment
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.core.errors import InputError

ROWS, WIDTH, LENGTH, WORDS = 8, 16, 6, 40
Pair = namedtuple("Pair", ["ids", "labels"])
ROOT = Path(__file__).parents[2]
MODELS_PAGE = ROOT / "docs" / "en" / "models.md"


@dataclass
class Sample:
    ids: torch.Tensor
    labels: torch.Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.one(x))


class Net(nn.Module):
    """Its forward has one parameter, whose name no other model uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def data() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(WORDS, (ROWS, LENGTH), generator=random) for _ in range(2))
    return {"ids": ids, "labels": labels}


def alone(steps: int = 2) -> list[float]:
    """The losses of plain torch."""
    model, batch = made(), data()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        loss = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(plan: str) -> tuple[list[float], str]:
    trainer = mw.parallelize(made(), adamw, plan, example=data())
    return [trainer.step(data()).loss for _ in range(2)], trainer.plan.name


@pytest.mark.parametrize(
    ("plan", "world", "name"),
    [
        ("dp1", 1, "dp1.mb8"),
        ("ddp", 2, "dp2.mb4"),
        ("fsdp", 2, "dp2.z3.mb4"),
        ("pp2", 2, "pp2.mb1"),
        ("dp2.mb1", 2, "dp2.mb1"),
    ],
)
def test_a_name_without_mb_takes_the_rows_of_a_replica_at_once(ranks: Any, plan: str, world: int, name: str) -> None:
    for losses, chosen in ranks.run(world, trained, plan):
        assert chosen == name
        assert losses == pytest.approx(alone(), rel=1e-6)


def test_auto_prices_the_model_on_the_ranks_that_are_there(ranks: Any) -> None:
    (losses, name), (_, other) = ranks.run(2, trained, "auto")
    assert name == other and mw.parse_plan(name).world == 2
    assert losses == pytest.approx(alone(), rel=1e-6)


def test_a_batch_has_any_form_that_a_data_loader_yields() -> None:
    batch, (first, _) = data(), alone()
    ids, labels = batch["ids"], batch["labels"]
    forms = [(ids, labels), [ids, labels], Pair(ids, labels), Sample(ids, labels), {"input_ids": ids, "labels": labels}]
    assert [mw.parallelize(made(), adamw, "dp1").step(form).loss for form in forms] == pytest.approx([first] * 5)
    with pytest.raises(InputError, match=r"a batch of 3 values does not fit Net\.forward, which requires ids"):
        mw.parallelize(made(), adamw, "dp1").step([ids, ids, labels])


def test_a_loss_of_ones_own_reads_what_forward_does_not_take() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).relu())

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output, batch["labels"]) + batch["weight"].mean()

    random = torch.Generator().manual_seed(2)
    batch = {"x": torch.randn(8, WIDTH, generator=random), "labels": torch.arange(8) % 3, "weight": torch.ones(8)}
    torch.manual_seed(0)
    model = Classifier()
    expected = loss(model(batch["x"]), batch).item()
    assert mw.parallelize(model, adamw, "dp1", loss=loss).step(batch).loss == pytest.approx(expected)
    with pytest.raises(InputError, match=r"the batch has 'y', which Classifier\.forward does not take"):
        mw.parallelize(Classifier(), adamw, "dp1", loss=loss).step({"y": batch["x"]})


def test_an_optimizer_that_exists_already_and_auto_without_a_batch_get_the_fix_in_one_line() -> None:
    model = made()
    with pytest.raises(InputError, match=r"optimizer=lambda params: torch.optim.AdamW\(params, lr=0.01\)"):
        mw.parallelize(model, adamw(model.parameters()), "dp1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="plan 'auto' needs the size of a batch: give example=BATCH"):
        mw.parallelize(model, adamw)


# --- the command


def command(place: Path, *more: str) -> tuple[int, str]:
    tokens = [sys.executable, "-m", "meshwright.cli.main", "train", "--cluster", "local:1", "--batch", "4", *more]
    where = {**environment(place), "PYTHONPATH": f"{place}:{environment(place).get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [*tokens, "--seq", "16", "--data", "text.txt", "--set", "data.tokenizer=bytes", "--set", "run.prove=never"],
        cwd=place,
        env=where,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_model_of_the_models_page_trains_and_a_run_that_learned_nothing_fails(tmp_path: Path, text: Path) -> None:
    (tmp_path / "text.txt").write_bytes(text.read_bytes())
    page = re.search(r"cat > mine.py <<'END'\n(.*?)\nEND\n", MODELS_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert page is not None
    small = page[1].replace("50000", "258").replace("1024", "32").replace("4096", "64").replace("range(24)", "range(2)")
    (tmp_path / "mine.py").write_text(small)
    (tmp_path / "broken.py").write_text(
        "import torch\nimport mine\ndef net():\n    model = mine.Net()\n"
        "    with torch.no_grad():\n        model.head.weight.fill_(float('nan'))\n    return model\n"
    )
    code, out = command(tmp_path, "--model", "broken:net", "--steps", "2", "--run", "one")
    assert code == 1 and "no sample: weights are not finite" in out
    assert "2 of 2 steps changed no weight, because their gradient was not finite (step 1 was the first" in out
    code, out = command(tmp_path, "--model", "mine:Net", "--steps", "2", "--run", "two")
    assert code == 0 and "trained      2 of 2 steps" in out


def test_a_refusal_under_torchrun_is_one_line_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(InputError) as refused:
            mw.parallelize(made(), adamw, "dp2")
        with pytest.raises(SystemExit) as ended:
            sys.excepthook(InputError, refused.value, refused.tb)
        line = "meshwright: plan dp2: pp(1) * dp(2) * cp(1) * tp(1) = 2 ranks, but 1 were started: start 2, "
        line += "or name a plan of 1\n"
        assert (ended.value.code, capsys.readouterr().err) == (2, line if rank == "0" else "")


def test_the_loop_of_the_readme_trains_as_printed_on_its_ranks(ranks: Pool, tmp_path: Path) -> None:
    blocks = refresh["blocks"]((ROOT / "README.md").read_text(encoding="utf-8"))
    (script,) = [block.text for block in blocks if block.language == "python"]
    (world,) = [
        int(found[1]) for block in blocks if (found := re.search(r"torchrun --nproc-per-node (\d+)", block.text))
    ]
    assert script.index("init_process_group()") < script.index("parallelize(") < script.index("destroy_process_group()")
    loss = re.search(r"step 100: loss (\S+)\n", ranks.run(world, run_script, str(tmp_path), script)[0])
    assert loss is not None and float(loss[1]) < 0.5
