"""The parts around the step: agreement of ranks, measured memory, the sample, the screen, the lease, models from
folders and modules."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from world_group import world_comm_group

from meshwright.core.errors import InputError
from meshwright.data.dataset import open_dataset
from meshwright.models.model_io import ModelOutput
from meshwright.report.run import read_records
from meshwright.runtime.deferred_init import deferred_init_of
from meshwright.spec.job import LaunchSpec, ModelSource
from meshwright.spec.record import StepRecord
from meshwright.spec.workload import DataConfig, OptimizerConfig, Workload
from meshwright.train.console import RunConsole
from meshwright.train.memory import trace_memory
from meshwright.train.metrics import RecordWriter, agree_on_step
from meshwright.train.model import build_model, model_objective, vocabulary_size
from meshwright.train.optimizer import learning_rate, optimizer_factory
from meshwright.train.rank_main import ProcessGroups, read_external_launch, read_own_launch, slurm_master
from meshwright.train.run_lock import RunLock
from meshwright.train.sample import generate_tokens, sample_of_run, sample_prompt, sample_text
from meshwright.train.straggler import PhaseSeconds


def record(step: int = 1, **more: object) -> StepRecord:
    return StepRecord(
        step=step, **{"loss": 2.0, "tokens": 100, "gradient_norm": 1.0, "lr": 0.1, "seconds": 0.5, **more}
    )


# --- agreement
# ------------------------------------------------------------------------------------------------------------------


def agree_on_ranks() -> tuple[StepRecord, Sequence[float], PhaseSeconds | None]:
    rank = dist.get_rank()
    mine = record(
        seconds=1.0 + rank,
        data_seconds=3.0 - rank,
        memory={"parameters": 10.0 * (rank == 0), "resident": float(rank)},
        exposed={"data": 0.5, "pipeline": rank / 4},
    )
    return agree_on_step(mine, (float(rank == 1),), world_comm_group(), (float(rank), 2.0**53 - 1))


def test_a_record_has_the_slowest_and_the_peak_rank_and_one_stop_stops_all(ranks: Pool) -> None:
    for agreed, (stop,), phases, by_rank in ranks.run(3, agree_on_ranks):
        assert stop and by_rank == [[rank, 2.0**53 - 1] for rank in range(3)]
        assert phases == PhaseSeconds((0.0, 0.0, 1.0), (3.0, 2.0, 1.0), (0.5, 0.75, 1.0))
        assert (agreed.seconds, agreed.data_seconds) == (3.0, 3.0)
        assert agreed.memory == {"parameters": 10.0, "resident": 2.0}
        assert agreed.exposed == {"data": 0.5, "pipeline": 0.5}
        assert agreed.tokens_per_second == pytest.approx(100 / 3)


def tell() -> list[str]:
    connection = ProcessGroups(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    return [connection.tell(text if connection.rank == 0 else "") for text in ("", "größer", "x" * 10_000)]


def test_every_rank_hears_the_text_of_rank_0(ranks: Pool) -> None:
    assert ranks.run(2, tell) == [["", "größer", "x" * 10_000]] * 2


def test_a_slurm_job_of_several_tasks_without_an_address_is_refused_not_run_alone() -> None:
    with pytest.raises(InputError, match="SLURM_NTASKS is 4 but MASTER_ADDR is not set"):
        read_external_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    with pytest.raises(InputError, match="WORLD_SIZE is 2 but RANK is not set"):
        read_external_launch({"WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    with pytest.raises(InputError, match=r"RANK \(4\) is not a rank of a world of 4"):
        read_external_launch({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "a"})


SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "41007", "SLURM_STEP_ID": "2"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"), ("gpu7,gpu9", "gpu7"), ("gpu[02-04,7],cpu1", "gpu02"), ("r[1-2]n[03,5]-ib", "r1n03-ib"),
        ("a-b-c[9]", "a-b-c9"), ("10.0.0.[5-6]", "10.0.0.5"),
    ],
)  # fmt: skip
def test_a_task_of_srun_finds_the_first_host_and_a_port_of_its_step(
    nodes: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = SRUN | {"SLURM_JOB_NODELIST": "other[1-9]", "SLURM_STEP_NODELIST": nodes}
    assert slurm_master(given) == {"MASTER_ADDR": first, "MASTER_PORT": "21009"}
    assert slurm_master(given | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}) == {}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert read_own_launch() == (3, 16, "SLURM_PROCID and SLURM_NTASKS") and os.environ["MASTER_ADDR"] == first


def test_a_batch_script_and_other_launchers_get_no_address_from_slurm() -> None:
    """A batch script has SLURM_PROCID=0 too; with an address it would wait for tasks that nobody starts."""
    given = SRUN | {"SLURM_JOB_NODELIST": "n[1-2]"}
    assert slurm_master(given)["MASTER_ADDR"] == "n1"
    assert slurm_master({name: value for name, value in given.items() if name != "SLURM_STEP_ID"}) == {}
    assert slurm_master(given | {"RANK": "0"}) == slurm_master(given | {"SLURM_HET_SIZE": "2"}) == {}
    assert slurm_master(given | {"SLURM_NTASKS": "1"}) == {}


# --- measures
# -------------------------------------------------------------------------------------------------------------------


def test_a_watched_block_knows_its_highest_moment_and_what_it_left() -> None:
    kilo = 1024
    gc.collect()  # nothing that tests before this one left is to go meanwhile
    with trace_memory() as watch:
        kept = torch.empty(100 * kilo, dtype=torch.uint8)
        first = torch.empty(300 * kilo, dtype=torch.uint8)
        del first
        second = torch.empty(200 * kilo, dtype=torch.uint8)
        del second
    assert watch.peak == 400 * kilo
    assert watch.remaining == kept.numel()


def test_records_are_a_line_a_step_and_a_lost_disk_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    records = RecordWriter(tmp_path, (), said.append)
    records.write(record(1))
    records.write(record(2, held_out_loss=3.0))
    lines = [
        StepRecord.model_validate(json.loads(line)) for line in (tmp_path / "records.jsonl").read_text().splitlines()
    ]
    assert lines == [record(1), record(2, held_out_loss=3.0)]
    records.close()
    (tmp_path / "full").mkdir()
    full = RecordWriter(tmp_path / "full", (), said.append)
    (tmp_path / "full" / "records.jsonl").symlink_to("/dev/full")
    full.write(record(3))
    full.write(record(4))
    full.close()
    waiting, lost = said
    assert waiting.startswith(
        "the records from step 3 on cannot be written and are kept in memory: "
    ) and lost.startswith("2 records from step 3 on are lost: ")


def test_records_go_on_behind_a_line_that_a_kill_cut(tmp_path: Path) -> None:
    lines = tmp_path / "records.jsonl"
    lines.write_text('{"step": 1, "lo')
    records = RecordWriter(tmp_path, (), print)
    records.write(record(2))
    records.close()
    assert read_records(lines) == ([record(2)], 1)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "sgd-momentum"])
def test_an_optimizer_holds_the_states_that_the_planner_counts(name: str) -> None:
    rule = OptimizerConfig(name=name)
    weight = nn.Parameter(torch.ones(5))
    optimizer = optimizer_factory(rule)([weight])
    weight.sum().backward()
    optimizer.step()
    held = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor) and value.ndim]
    assert len(held) == rule.states


def test_the_learning_rate_rises_to_its_top_and_ends_where_it_should() -> None:
    rule = OptimizerConfig(lr=0.5, warmup=10, final_lr=0.2)
    rates = [learning_rate(rule, step, 100) for step in range(100)]
    assert rates[9] == rates[10] == max(rates) == 0.5
    assert rates[99] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert learning_rate(OptimizerConfig(lr=0.5, schedule="constant"), 77, 100) == 0.5
    for schedule, full in (("linear", 11), ("warmup-stable-decay", 80)):
        rates = [learning_rate(rule.but(schedule=schedule), step, 100) for step in range(100)]
        assert [step for step, rate in enumerate(rates) if rate == 0.5] == [*range(9, full)]
        assert rates[99] == pytest.approx(0.1) and all(a >= b for a, b in pairwise(rates[10:]))


def test_an_optimizer_that_is_a_persons_own_code_is_named_as_a_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rules.py").write_text(
        "import torch\n\ndef make(params):\n    return torch.optim.NAdam(params, lr=1e-2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made = optimizer_factory(OptimizerConfig(name="own_rules:make"))([nn.Parameter(torch.ones(3))])
    assert isinstance(made, torch.optim.NAdam)
    for name, line in (
        ("own_rules:mak", "optimizer 'own_rules:mak': module 'own_rules' has no 'mak'; did you mean 'make'"),
        (
            "no_rules:make",
            "optimizer 'no_rules:make': module 'no_rules' is neither in the current folder nor installed",
        ),
    ):
        with pytest.raises(InputError, match=line):
            optimizer_factory(OptimizerConfig(name=name))


# --- sample
# ---------------------------------------------------------------------------------------------------------------------


class Successor(nn.Module):
    """After token t it says t + 1; its weight is how surely."""

    def __init__(self) -> None:
        super().__init__()
        self.sure = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor) -> ModelOutput:
        return ModelOutput(nn.functional.one_hot((input_ids + 1) % 256, 258) * self.sure)


class Bytes:
    name, vocabulary, end_of_text, mask, digest = "bytes", 258, 256, None, ""

    def encode(self, texts: list[str]) -> list[bytes]:
        return [text.encode() for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def test_a_sample_is_what_the_trained_weights_say() -> None:
    text = sample_text(Successor(), {"sure": torch.full((1,), 50.0)}, Bytes(), [97, 98, 99], 5, 4, seed=1)  # type: ignore[arg-type]
    assert text == "abcdefgh"


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"prompt": "What is 2 + 3?", "completion": "It is 5."}, "What is 2 + 3?"),
        ({"prompt": "1 + 2?", "chosen": "3", "rejected": "12"}, "1 + 2?"),
        ({"text": "z" * 100}, "z" * 8),
    ],
    ids=["conversation", "preference", "text"],
)
@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_a_sample_begins_with_a_prompt_of_the_data(
    line: dict[str, str], prompt: str, held_out: float, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(line)] * 8))
    data = DataConfig(source=str(tmp_path / "a.jsonl"), tokenizer="bytes", held_out=held_out)
    found = open_dataset(data, 32, 258, "preference" if "chosen" in line else "causal", positions=True)
    assert found.tokenizer is not None
    assert found.tokenizer.decode(sample_prompt(found, found.tokenizer, False)).strip() == prompt
    assert found.tokenizer.decode(sample_prompt(found, found.tokenizer, True)) == "\n\ndef"


def test_the_same_seed_draws_the_same_sample_and_temperature_0_draws_nothing() -> None:
    model = Successor()
    nn.init.constant_(model.sure, 1.0)
    drawn = [generate_tokens(model, [1], 20, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert generate_tokens(model, [1], 3, temperature=0) == [1, 2, 3, 4]


class RowsThatAreGone:
    """A data set whose files were deleted while the run trained."""

    tokenizer, validation_rows = Bytes(), 1

    def validation(self, rows: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "data/a.jsonl")


class TrainedWeights:
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return {"sure": torch.full((1,), 50.0)}


def test_a_run_whose_sample_fails_says_why_and_ends_as_usual() -> None:
    launch = LaunchSpec.model_construct(
        workload=Workload(batch=1), data=DataConfig(source="data/a.jsonl"), model=ModelSource.model_construct()
    )
    found = sample_of_run(TrainedWeights(), launch, "causal", RowsThatAreGone(), 1)  # type: ignore[arg-type]
    assert found is not None and "text" not in found and "\n" not in found["why"]
    assert "data/a.jsonl" in found["why"] and "meshwright checkpoint export" in found["why"]


def test_weights_that_do_not_fill_the_model_are_never_sampled_from() -> None:
    with pytest.raises(AssertionError, match="weights do not fit"):
        sample_text(Successor(), {}, Bytes(), [97], 1, 4, seed=1)  # type: ignore[arg-type]


# --- screen
# ---------------------------------------------------------------------------------------------------------------------


def test_away_from_a_terminal_the_screen_prints_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    screen = RunConsole()
    screen.hear({"kind": "note", "line": "[bold]not markup[/bold]"})
    screen.hear({"kind": "begin", "step": 0, "steps": 2, "data": "some text", "parameters": 5})
    screen.hear(
        {
            "kind": "record",
            "record": record(1, tokens_per_second=1234.0, memory={"resident": 2.0**20, "total": 5.0}).model_dump(),
        }
    )
    screen.hear({"kind": "record", "record": record(2, held_out_loss=1.5).model_dump()})
    screen.hear({"kind": "saved", "step": 2, "path": "runs/a/step-2"})
    screen.hear({"kind": "sample", "text": "def f():\n    return [red]"})
    screen.hear({"kind": "done", "step": 2})
    screen.close()
    out, err = capsys.readouterr()
    assert out == "" and "\r" not in err and "\x1b" not in err
    assert "[bold]not markup[/bold]\n" in err
    assert "step 1/2  loss 2.0000  1.23 k tokens/s  1.00 MiB on the peak rank" in err
    assert "step 2/2  loss 2.0000  val loss 1.5000" in err
    assert "  |     return [red]\n" in err


@pytest.mark.parametrize(("waited", "said"), [(0.9, True), (0.1, False)])
def test_a_run_that_mostly_waits_for_its_disk_says_so_once(
    capsys: pytest.CaptureFixture[str], waited: float, said: bool
) -> None:
    screen = RunConsole()
    screen.hear({"kind": "begin", "step": 4, "steps": 90, "data": "some text", "parameters": 5})
    for step in range(5, 12):
        screen.hear({"kind": "record", "record": record(step, seconds=1.0, exposed={"offload": waited}).model_dump()})
    lines = [line for line in capsys.readouterr().err.splitlines() if "--offload-to" in line]
    assert len(lines) == said and all("step 7 waited 900.0 ms of 1.00 s for offloaded" in line for line in lines)


def test_a_slow_first_step_does_not_count_for_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("meshwright.train.console.time.monotonic", lambda: now[0])
    screen = RunConsole()
    screen.hear({"kind": "begin", "step": 0, "steps": 100, "data": "some text", "parameters": 5})
    for step in range(1, 51):
        now[0] += 600.0 if step == 1 else 2.0
        screen.hear({"kind": "record", "record": record(step, held_out_loss=2.0).model_dump()})
    assert capsys.readouterr().err.splitlines()[-1].endswith("1 min 40 s left")


def test_a_run_folder_has_one_tenant_at_a_time_even_between_processes(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom meshwright.train.run_lock import RunLock\nwith "
        f"RunLock(Path({str(tmp_path)!r})): pass"
    )
    with RunLock(tmp_path):
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "is being trained by process" in second.stderr.splitlines()[-1]
        with pytest.raises(InputError, match="wait for it, or choose another --run"), RunLock(tmp_path):
            pass
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- models
# ---------------------------------------------------------------------------------------------------------------------


def test_a_hugging_face_folder_is_built_with_its_weights_if_it_has_any(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    torch.manual_seed(3)
    made = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=16)
    )
    made.config.save_pretrained(tmp_path)
    source = ModelSource(name="m", folder=str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    fresh = build_model(source, seed=1)
    assert type(fresh).__name__ == "LlamaForCausalLM"
    assert fresh.lm_head.weight.is_meta, "what a rank holds of it is made when it is cut"
    again = build_model(source, seed=1, weights=False).lm_head.weight
    assert torch.equal(deferred_init_of(fresh).seen(fresh.lm_head.weight).value(), again) and not torch.equal(
        again, made.lm_head.weight
    )
    assert (model_objective(source, fresh), vocabulary_size(source, fresh)) == ("causal", 50)
    made.save_pretrained(tmp_path)
    assert build_model(source, seed=1).lm_head.weight.is_meta, "weights of a folder are read when the model is cut"


def test_live_code_is_called_and_what_is_wrong_with_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\nnet = lambda: nn.Linear(2, 3)\nwrong = lambda: 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert isinstance(build_model(ModelSource(name="a", module="mine:net"), 1), nn.Linear)
    for module, words in (
        ("mine:nte", "module 'mine' has no 'nte'; did you mean 'net'?"),
        ("mine:wrong", "returned a int, not a torch.nn.Module"),
        ("nobody.here:net", "module 'nobody' is neither in the current folder nor installed"),
    ):
        with pytest.raises(InputError) as caught:
            build_model(ModelSource(name="a", module=module), 1)
        assert words in str(caught.value)
