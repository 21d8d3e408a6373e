"""DPO and ORPO on answers about functions of Python's standard library: the losses and the gradients of every plan are
those of one device, which reads the two answers of a pair in separate passes."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import signal
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import adapted, check, make_optimizer, read_once
from test_train_run import kill_rank, let_go, start
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.data.dataset import open_dataset
from meshwright.models.registry import build_reference_model
from meshwright.runtime.preference_loss import PreferenceLoss
from meshwright.spec.plan import parse_plan
from meshwright.spec.workload import DataConfig, LoraConfig
from meshwright.train.trainer import parallelize

SIZES = {"kind": "llama", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 258, "seq": 160}
LORA, SEQUENCE, ROWS, STEPS = LoraConfig(rank=4), 160, 8, 2
Batch = dict[str, torch.Tensor]


def pairs() -> list[dict[str, str]]:
    """What functions do, and what another function does."""
    tree = ast.parse(Path(sysconfig.get_path("stdlib"), "shutil.py").read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
    says = [(ast.get_docstring(node) or "").splitlines()[0] for node in functions]
    return [
        {"prompt": f"What does {node.name} do?\n", "chosen": one, "rejected": other}
        for node, one, other in zip(functions, says, says[5:] + says[:5], strict=True)
        if one != other
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in pairs()))
    return file


def batches(file: str) -> list[Batch]:
    data = open_dataset(
        DataConfig(source=file, tokenizer="bytes", held_out=0), SEQUENCE, 258, "preference", positions=True
    )
    rows = torch.arange(ROWS * STEPS).numpy()
    assert data.rows >= len(rows)
    return [data.training(part, part, 1) for part in rows.reshape(STEPS, ROWS)]


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_reference_model(SIZES)
    return adapted(model, LORA) if kind == "lora" else model


def trained(kind: str, loss: str, plan: str, file: str) -> dict[str, Any]:
    """On every rank: the log-probabilities of the reference, and what `equality.measured` returns."""
    trainer = parallelize(
        model_of(kind), make_optimizer, plan, precision="fp64", clip=1.0, loss=PreferenceLoss(loss, 0.5),
        anatomy=read_once(f"preferences of {kind}", lambda: model_of(kind)),
    )  # fmt: skip
    read = batches(file)
    if loss == "dpo":
        read = [batch | trainer.reference_log_probs(batch) for batch in read]
    first, rows, gradients = trainer.gradients(read[0])
    records = [trainer.step(batch) for batch in read]
    return {
        "reference": [batch["ref_chosen_logps"] for batch in read if loss == "dpo"],
        "first": first,
        "tokens": rows,
        "gradients": gradients,
        "losses": [record.loss for record in records],
        "norms": [record.gradient_norm for record in records],
        "weights": trainer.full_state_dict(),
        "evaluated": trainer.evaluate(read[0]),
    }


def separate(model: nn.Module, batch: Batch, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each answer and its number of tokens, each document in a pass of its own."""
    sums, counts = [], []
    for ids, places, labels in zip(batch["input_ids"], batch["position_ids"], batch[f"{name}_labels"], strict=True):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(ids)]
        [(first, last)] = [(a, b) for a, b in itertools.pairwise(starts) if bool((labels[a:b] != -100).any())]
        words = F.log_softmax(model(input_ids=ids[None, first:last]).logits[0, :-1], -1)
        answer = labels[first + 1 : last]
        chosen = words[answer != -100].gather(1, answer[answer != -100, None])
        sums.append(chosen.sum())
        counts.append(torch.tensor(float(len(chosen))))
    return torch.stack(sums), torch.stack(counts)


def loss_of(model: nn.Module, loss: str, batch: Batch) -> torch.Tensor:
    (chosen, of_chosen), (rejected, of_rejected) = (separate(model, batch, name) for name in ("chosen", "rejected"))
    if loss == "dpo":
        margin = (chosen - batch["ref_chosen_logps"]) - (rejected - batch["ref_rejected_logps"])
        return -F.logsigmoid(0.5 * margin).mean()
    chosen, rejected = chosen / of_chosen, rejected / of_rejected
    odds = [each - torch.log(1 - each.exp()) for each in (chosen, rejected)]
    return (-chosen - 0.5 * F.logsigmoid(odds[0] - odds[1])).mean()


@functools.cache
def alone(kind: str, loss: str, file: str) -> dict[str, Any]:
    """On one device, with nothing of ours but the model and the rows."""
    model, read = model_of(kind).double(), batches(file)
    with torch.no_grad():
        for batch in read if loss == "dpo" else []:
            for name in ("chosen", "rejected"):
                batch[f"ref_{name}_logps"] = separate(model, batch, name)[0]
    optimizer = make_optimizer([each for each in model.parameters() if each.requires_grad])
    result: dict[str, Any] = {"reference": [batch.get("ref_chosen_logps") for batch in read], "losses": [], "norms": []}
    for number, batch in enumerate(read):
        optimizer.zero_grad()
        value = loss_of(model, loss, batch)
        value.backward()
        if not number:
            found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
            result |= {"first": value.item(), "tokens": ROWS, "gradients": found}
        result["losses"].append(value.item())
        result["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    with torch.no_grad():
        result["evaluated"] = loss_of(model, loss, read[0]).item()
    result["weights"] = {name: value.detach() for name, value in model.named_parameters()}
    return result


PLANS = [
    ("full", "dpo", "dp2.mb2"), ("full", "dpo", "dp2.z3.mb1"), ("full", "dpo", "tp2.mb4"), ("full", "dpo", "pp2.mb2"),
    ("lora", "dpo", "dp2.z3.mb2"), ("lora", "dpo", "tp2.pp2.mb2"), ("full", "orpo", "dp2.pp2.z3.mb1"),
    ("full", "orpo", "tp2.mb4"), ("lora", "orpo", "pp2.mb2"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "loss", "plan"), PLANS)
@pytest.mark.covering(2)
def test_preference_losses_and_gradients_are_those_of_one_device(
    ranks: Any, source: Path, kind: str, loss: str, plan: str
) -> None:
    expected = alone(kind, loss, str(source))
    results = ranks.run(parse_plan(plan).world, trained, kind, loss, plan, str(source))
    check(expected, results, "fp64")
    assert abs(expected["losses"][1] - expected["losses"][0]) > 1e-3
    for result in results if loss == "dpo" else []:
        for found, wanted in zip(result["reference"], expected["reference"], strict=True):
            assert (found - wanted).abs().max() < 1e-10 * wanted.abs().max()


JOB = """
model: {name: llama-tiny, sizes: {layers: 2, hidden: 32, heads: 4, kv_heads: 2, head_dim: 8, ffn: 64, vocab: 258, seq: \
160}}
workload: {sequence: 160, batch: 4, steps: 16, precision: fp64, optimizer: {lr: 1.0e-2, warmup: 2}, preference: \
{loss: dpo, beta: 0.5}}
data: {source: pairs.jsonl, tokenizer: bytes, held_out: 0.1}
cluster: {name: "local:2"}
plan: {name: dp2.z3.mb1}
run: {checkpoint_every: 4, evaluate_every: 8, prove: start}
"""


@pytest.fixture(scope="module")
def place(source: Path) -> Path:
    (source.parent / "job.yaml").write_text(JOB)
    return source.parent


def curve(place: Path, run: str) -> list[tuple[float, float | None]]:
    lines = (place / "runs" / run / "records.jsonl").read_text().splitlines()
    last = {record["step"]: record for record in map(json.loads, lines)}
    return [(record["loss"], record.get("held_out_loss")) for _, record in sorted(last.items())]


def ended(process: subprocess.Popen) -> str:
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return str(err)


def test_a_dpo_run_goes_on_after_kill_9_and_has_the_losses_of_another_plan(place: Path) -> None:
    process = start(place, "killed", until=10)
    kill_rank(place, "killed", process)
    let_go(place, "killed")
    said = ended(process)
    assert f"killed by SIG{signal.SIGKILL.name[3:]}" in said and "0 steps lost" in said
    ended(start(place, "other", "--plan", "pp2.mb2"))
    one, other = curve(place, "killed"), curve(place, "other")
    assert one[0][1] == pytest.approx(0.6931471805599453, rel=1e-12)  # every margin is 0 before the first update
    assert min(loss for loss, _ in one[-4:]) < 0.6
    for values in (0, 1):
        found, wanted = ([record[values] for record in run if record[values] is not None] for run in (one, other))
        assert len(wanted) == (17, 3)[values] and found == pytest.approx(wanted, rel=1e-9)


def test_orpo_from_the_command_line_has_the_losses_of_another_plan(place: Path) -> None:
    more = ("--preference", "orpo,beta=0.25", "--steps", "6")
    for run, plan in (("orpo", "dp2.z3.mb1"), ("orpo-tp", "tp2.mb2")):
        ended(start(place, run, *more, "--plan", plan))
        assert json.loads((place / "runs" / run / "job.json").read_text())["workload"]["preference"]["loss"] == "orpo"
    one, other = curve(place, "orpo"), curve(place, "orpo-tp")
    assert len(one) == 7 and one[-1][0] < one[1][0]
    for values in (0, 1):
        found, wanted = ([record[values] for record in run if record[values] is not None] for run in (one, other))
        assert found == pytest.approx(wanted, rel=1e-9)
    assert not (place / "runs" / "orpo" / "reference_log_probs.json").exists()


def test_plans_that_divide_the_answers_and_unknown_references_are_refused(
    ranks: Any, place: Path, source: Path
) -> None:
    process = start(place, "cut", "--plan", "cp2.mb1")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 2
    assert "dpo compares the two answers of a row, which cp2 divides: use cp1 without lc" in err
    assert len(err.strip().splitlines()) == 1
    with pytest.raises(InputError, match=r"dpo needs ref_chosen_logps and ref_rejected_logps in the batch: add"):
        PreferenceLoss("dpo")(model_of("full")(input_ids=batches(str(source))[0]["input_ids"]), batches(str(source))[0])
    with pytest.raises(InputError, match=r"a preference loss is dpo or orpo with beta > 0, not kto with beta 0.1"):
        PreferenceLoss("kto")  # type: ignore[arg-type]
