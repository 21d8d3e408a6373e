"""Random job files, sane in part and wild in part: each ends in an answer or in one clear line, never in a
traceback."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli.main import run_command
from meshwright.core.errors import InputError, NothingFits
from meshwright.planner.inputs.job import read_job, resolve_job

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
        "recompute": ["none", "full"],
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


SYNTAX = [
    "2001-99-99", "2001-01-01", "!!timestamp abc", "!!bool maybe", "!!int x", "!!float x", "!!null x", "!!binary x",
    "!!set {a}", "!!omap [a: 1]", "!!python/object/apply:os.system [a]", "!a b", "!<tag:x> b", "! x", "!!str 5",
    "&a [1]", "*a", "&a [*a]", "<<: {a: 1}", "? {a: 1} : 2", "? [a]\n: 1", "{? {a: 1} : 2}", "9" * 400, "9" * 5000,
    "-" + "9" * 5000, "1e400", "-1e400", "1e99999", "0x" + "f" * 500, "0x_", "0b_", "._", "1:30", "1_0", ".inf", ".nan",
    "-.inf", "NaN", "Infinity", "[" * 200, "{" * 200, "[" * 200 + "]" * 200, "'" , '"', '"\\ud800"', '"\\UFFFFFFFF"',
    '"\\x00"', "\x00", "\x07", "\x85", "\u2028", "\ufeff", "\t", "\ttext", "%YAML 9.9", "%TAG ! x", "---", "...",
    "--- a\n--- b", "|", ">9", "|\n a\n  b", "- a", ": a", "a:", "a: b: c", "#", "@a", "`a`", "{a: 1}", "[1, 2", "]",
    "}", ",", "yes", "~", "=", "null", "1x" + "9" * 5000 + ":h100", "9" * 5000 + "x8:h100", "local:" + "9" * 5000,
    "dp" + "9" * 5000, "2x8:h100@" + "9" * 5000, "2x8:h100@" + "9" * 5000 + "x100Gb", "9" * 5000 + "b", "1" + "0" * 400,
    "1" + "0" * 400 + " GiB", "٣" * 5000, "²", "½", "1²:h100", "a" * 5000, "dp2.tp²", "off-optimizer" + "9" * 5000,
    "sh1-" + "9" * 5000,
]  # fmt: skip
"""Pieces of YAML and JSON that a parser may stumble over, and numbers that are too long."""


def text(seed: int) -> str:
    """The same job as YAML or JSON, in which up to two values are another piece of syntax, or one is put between."""
    chance = random.Random(seed)
    written = (
        json.dumps(job(seed))
        if chance.random() < 0.3
        else yaml.safe_dump(job(seed), default_flow_style=chance.random() < 0.3)
    )
    for _ in range(chance.choice([0, 1, 1, 2])):
        piece = chance.choice(SYNTAX)
        values = list(re.finditer(r"(?<=: )[^\n{}\[\],]+", written))
        if values and chance.random() < 0.7:
            found = chance.choice(values)
            written = written[: found.start()] + piece + written[found.end() :]
        else:
            at = chance.randint(0, len(written))
            written = written[:at] + piece + written[at:]
    return written


def ends_well(seed: int, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """How `plan` ends with the job of this number, every other one as text: 'answer', or the class of the exception
    that is one line."""
    given = text(seed) if seed % 2 else json.dumps(job(seed))
    path.write_text(given, encoding="utf-8", errors="surrogatepass")
    try:
        code = run_command(["plan", str(path), "--top", "1", "--runnable"])
    except (InputError, NothingFits) as error:
        assert str(error).strip() and "\n" not in str(error) and len(str(error)) < 1500, (seed, str(error))
        return "NothingFits" if isinstance(error, NothingFits) else "InputError"
    except BaseException as error:
        raise AssertionError(f"job {seed}: {given}") from error
    out = capsys.readouterr().out
    assert code == 0 and not re.search(r"\b(nan|inf)\b", out), (seed, out)
    return "answer"


def reads_well(seed: int, path: Path) -> str:
    """How reading the job of this number as text ends, without a search."""
    path.write_text(text(seed), encoding="utf-8", errors="surrogatepass")
    try:
        resolve_job(read_job(path))
    except InputError as error:
        assert str(error).strip() and "\n" not in str(error) and len(str(error)) < 1500, (seed, str(error))
        return "InputError"
    except BaseException as error:
        raise AssertionError(f"job {seed}: {text(seed)}") from error
    return "answer"


def test_a_few_random_jobs_end_in_an_answer_or_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [ends_well(seed, tmp_path / "job.json", capsys) for seed in range(0, 36, 2)]
    assert {"answer", "InputError"} <= set(ends)


@pytest.mark.soak
def test_random_jobs_end_in_an_answer_or_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [ends_well(seed, tmp_path / "job.json", capsys) for seed in range(0, 200, 2)]
    assert {"answer", "InputError", "NothingFits"} == set(ends)
    assert ends.count("answer") > 10


def test_random_texts_end_in_a_job_or_in_one_line(tmp_path: Path) -> None:
    ends = [reads_well(seed, tmp_path / "job.yaml") for seed in range(400)]
    assert "answer" in ends and ends.count("InputError") > 200


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_jobs_end_in_an_answer_or_in_one_line(
    part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = [ends_well(seed, tmp_path / "job.json", capsys) for seed in range(part * 500, (part + 1) * 500)]
    assert ends.count("answer") > 20
