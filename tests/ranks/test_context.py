"""A sequence held in pieces gives the loss and the gradients of one device: by a ring, by exchanged heads, with masks, beside every other axis."""

from __future__ import annotations

import functools
import os
from typing import Any

import equality
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.base.errors import InputError
from meshwright.parallel.shared import SWITCH
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

SAMPLE = [
    ("llama", "cp2"), ("llama", "cp4"), ("llama", "cp2.ulysses"), ("llama", "cp4.ulysses"), ("llama", "dp2.cp2"), ("llama", "dp2.cp2.z1"),
    ("llama", "dp2.cp2.z2.mb2"), ("llama", "dp2.cp2.z3"), ("llama", "dp2x1.cp2.z3.rc-layer"), ("llama", "cp2.rc-layer"), ("llama", "tp2.cp2.mb2"),
    ("llama", "tp2.sp.cp2.ulysses.mb2"), ("llama", "pp2.cp2"), ("llama-tied", "pp2.cp2.z3"), ("gpt2", "cp2"), ("gpt2", "tp2.sp.pp2.cp2.mb2"), ("gpt2", "cp4.z1.ulysses"),
    ("bert", "cp2"), ("bert", "dp2.cp2.z2.ulysses"), ("hf-llama", "cp2.z3.rc-layer"), ("hf-llama", "pp2.cp2.interleaved2"), ("hf-gpt2", "cp2"), ("hf-gpt2", "tp2.cp2.ulysses.mb4"),
]  # fmt: skip


@functools.cache
def alone(model: str, precision: str) -> dict[str, Any]:
    return equality.alone(model, precision, steps=2)


@pytest.mark.parametrize(("model", "plan"), SAMPLE)
def test_pieces_of_a_sequence_compute_what_one_device_computes_in_float64(ranks: Any, model: str, plan: str) -> None:
    equality.check(alone(model, "fp64"), ranks.run(parse_plan(plan).world, equality.train, model, plan, "fp64", 2), "fp64")


@pytest.mark.parametrize(("model", "plan"), SAMPLE[2::5])
def test_pieces_of_a_sequence_compute_what_one_device_computes_in_float32(ranks: Any, model: str, plan: str) -> None:
    equality.check(alone(model, "fp32"), ranks.run(parse_plan(plan).world, equality.train, model, plan, "fp32", 2), "fp32")
