"""Random job files, sane in part and wild in part: each ends in an answer or in one clear line, never in a traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import InputError, NothingFits
from meshwright.cli.main import run

WILD = [
    None,
    "",
    " ",
    -1,
    0,
    1,
    2,
    3,
    7,
    0.5,
    -0.0,
    1e308,
    1e-308,
    "nan",
    "inf",
    True,
    False,
    [],
    {},
    [1, 2],
    {"a": 1},
    "x",
    "🙂",
    10**30,
    "8 GiB",
]
WILD += [
    "80GiB",
    "-1 GB/s",
    "1e400 B",
    [[]],
    "tp=2",
    "dp8.tp2",
    "../..",
    "a:b",
    "1x0:h100",
    "auto",
    "local:0",
    "0x8:a100-80gb",
    2**31,
    "١٢",
]
NAMES: dict[str, list[Any]] = {
    "model": [
        "llama-tiny",
        "gpt2-tiny",
        "bert-tiny",
        "convnet-tiny",
        "llama2-7b",
        "mixtral-8x7b",
        "gpt2",
        "7b",
        "30m",
        "0b",
        "llama-65bb",
        "3t",
    ],
    "cluster": [
        "local",
        "local:3",
        "1x8:a100-80gb",
        "1x4:cpu",
        "2x3:v100",
        "2x2:h100+1x4:v100-32gb",
        "8x8:a100",
        "1x8:a100-80gb@400Gb",
        "dgx",
    ],
    "precision": ["bf16", "fp16", "fp32", "fp64", "bf17"],
    "optimizer": ["adamw", "sgd", "adam", "lion"],
}
GOOD: dict[str, dict[str, list[Any]]] = {
    "workload": {
        "sequence": [1, 16, 45, 128, 2048],
        "batch": [1, 2, 7, 12, 64, 97],
        "steps": [1, 10],
        "precision": NAMES["precision"],
        "seed": [0, 3],
        "optimizer": [{"name": name} for name in NAMES["optimizer"]],
    },
    "plan": {
        "tp": [1, 2, 3, 4, 8],
        "pp": [1, 2, 4],
        "dp": [1, 2, 8],
        "zero": [0, 1, 2, 3],
        "micro_batch": [1, 2, 5],
        "schedule": ["1f1b", "gpipe", "interleaved"],
        "virtual_stages": [1, 2],
        "recompute": ["none", "layer"],
        "sequence_parallel": [True, False],
        "layers_per_stage": [[1, 3], [2, 2], [4]],
        "dp_shard": [1, 2, 4],
        "dp_replicate": [1, 2],
        "bucket": [1, 10**6],
        "name": ["dp4", "tp2.pp2", "dp2.tp2.z1"],
    },
    "run": {"keep": [1, 3], "checkpoint_every": [0, 5]},
    "data": {"source": ["stdlib", "nowhere.txt"], "held_out": [0.0, 0.1]},
}
SIZES: dict[str, list[Any]] = {
    "layers": [1, 2, 5],
    "hidden": [32, 48, 96],
    "heads": [1, 3, 4],
    "kv_heads": [1, 2],
    "ffn": [7, 64],
    "vocab": [11, 300],
}
DEVICE: dict[str, list[Any]] = {
    "name": ["d"],
    "memory": ["1 MiB", "64 MiB", "4 GiB"],
    "bandwidth": ["100 GB/s", 1e9],
    "peak": [{"fp32": "1 TFLOP/s"}, {"bf16": 1e12, "fp32": 1e12}, {}],
    "efficiency": [0.5, 1.0],
}
LINK: dict[str, list[Any]] = {"name": ["l"], "bandwidth": ["10 GB/s"], "latency": ["3 us"], "span": [0, 2]}
WILDNESS = 0.03


def value(chance: random.Random, good: list[Any]) -> Any:
    return chance.choice(WILD) if chance.random() < WILDNESS else chance.choice(good)


def fields(chance: random.Random, table: dict[str, list[Any]], share: float) -> dict[str, Any]:
    found = {name: value(chance, good) for name, good in table.items() if chance.random() < share}
    if chance.random() < WILDNESS / 2:
        found[chance.choice(["tpp", "", "memroy", "x y"])] = chance.choice(WILD)
    return found


def cluster(chance: random.Random) -> Any:
    """A name, or the whole of it written out."""
    if chance.random() < 0.7:
        return value(chance, NAMES["cluster"])
    groups = [
        {
            "nodes": value(chance, [1, 2, 3]),
            "devices": value(chance, [1, 2, 4]),
            "device": value(chance, ["v100", fields(chance, DEVICE, 0.97)]),
            "link": value(chance, [fields(chance, LINK, 0.97)]),
        }
        for _ in range(chance.choice([1, 1, 2]))
    ]
    described = {"groups": value(chance, [groups]), "network": value(chance, [fields(chance, LINK, 0.97)])}
    if chance.random() < WILDNESS:
        del described[chance.choice(["groups", "network"])]
    return described


def job(seed: int) -> dict[str, Any]:
    """The job file of this number."""
    chance = random.Random(seed)
    data: dict[str, Any] = {"model": {"name": value(chance, NAMES["model"])}, "cluster": cluster(chance)}
    if chance.random() < 0.3:
        data["model"]["sizes"] = fields(chance, SIZES, 0.4)
    for section, table in GOOD.items():
        if chance.random() < 0.6:
            data[section] = value(chance, [fields(chance, table, 0.25 if section == "plan" else 0.5)])
    if chance.random() < WILDNESS:
        data[chance.choice(["models", "", "workload"])] = chance.choice(WILD)
    return data


def ends_well(seed: int, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """How `plan` ends with the job of this number: 'answer', or the exception that is one line."""
    path.write_text(json.dumps(job(seed)), encoding="utf-8")
    try:
        code = run(["plan", str(path), "--top", "1", "--runnable"])
    except (InputError, NothingFits) as error:
        assert str(error).strip() and "\n" not in str(error) and len(str(error)) < 1500, (seed, str(error))
        return type(error).__name__
    except BaseException as error:
        raise AssertionError(f"job {seed}: {json.dumps(job(seed))}") from error
    out = capsys.readouterr().out
    assert code == 0 and "nan" not in out and "inf" not in out.replace("info", ""), (seed, out)
    return "answer"


def test_random_jobs_end_in_an_answer_or_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [ends_well(seed, tmp_path / "job.json", capsys) for seed in range(100)]
    assert {"answer", "InputError", "NoPlanFits"} == set(ends)
    assert ends.count("answer") > 10


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_jobs_end_in_an_answer_or_in_one_line(part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [ends_well(seed, tmp_path / "job.json", capsys) for seed in range(part * 500, (part + 1) * 500)]
    assert ends.count("answer") > 50
