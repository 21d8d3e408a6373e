"""The list of wrong results, crashes and needless refusals that a hunt once found: each is equal to one device, or
refused in one line.

`make soak` writes the outcomes as a table to bench/results/soundness.md.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from odd_jobs import EQUAL, REFUSED, run
from odd_models import Job

RESULTS = Path(__file__).parents[2] / "bench" / "results"


class Case(NamedTuple):
    part: str
    what: str
    features: str
    plans: str
    must_run: bool = False


SILENT = (
    Case("1 sequence", "x + x.mean(1) between blocks", "between:mean", "tp2.sp.mb8 tp2.pp2.sp.mb2.zbv"),
    Case("1 sequence", "x + x.mean(1) inside blocks", "block:mean", "tp2.sp.mb8"),
    Case("1 sequence", "x + x.mean(1) before and after blocks", "front:mean back:mean", "tp2.sp.mb8"),
    Case("1 sequence", "x.cumsum(1)", "between:cumsum", "tp2.sp.mb8"),
    Case("1 sequence", "x[:, :1]", "between:first", "tp2.sp.mb8 tp4.sp.mb8"),
    Case("1 sequence", "a norm over the sequence", "between:sequence-norm", "tp2.sp.mb8"),
    Case("1 sequence", "1 / x.shape[1]", "between:length", "tp2.sp.mb8 dp2.tp2.sp.z1.mb4"),
    Case("1 sequence", "token shift", "between:shift", "tp2.sp.mb8"),
    Case("1 sequence", "the mean, in training only", "block:train-mean", "tp2.sp.mb8"),
    Case("1 sequence", "first token under cp", "between:first body:attention", "cp2.mb8"),
    Case("1 sequence", "length under cp", "between:length body:attention", "cp2.mb8 cp2.mb8.ulysses"),
    Case("1 sequence", "last token under cp", "back:last body:attention", "cp2.mb8"),
    Case("1 sequence", "the last token as pooling under cp", "head:last body:attention", "cp2.mb8"),
    Case("2 pipelines", "nn.Dropout between blocks", "between:dropout-all", "pp2.mb2 pp2.mb4.zbh1"),
    Case("2 pipelines", "F.dropout between blocks", "between:dropout-call", "pp2.mb2 pp2.mb2.z3"),
    Case("2 pipelines", "nn.Dropout behind one block", "once:dropout-all", "pp2.mb2 pp2.mb2.interleaved2"),
    Case("2 pipelines", "code under if self.training", "between:train-scale", "pp2.mb2 pp2.mb4.zbv"),
    Case("2 pipelines", "an addition under if self.training", "once:train-add", "pp2.mb2 pp4.mb2"),
    Case("2 pipelines", "gradient reversal", "between:reversal", "pp2.mb2 pp2.mb2.dualpipev"),
    Case("2 pipelines", "gradient reversal behind one block", "once:reversal", "pp2.mb2"),
    Case("2 pipelines", ".detach()", "once:detach", "pp2.mb2 pp2.mb2.gpipe"),
    Case("2 pipelines", "a half of .detach()", "between:half-detach", "pp2.mb2"),
    Case("2 pipelines", "x.register_hook", "between:hook", "pp2.mb2 pp2.mb2.rc-full"),
    Case("2 pipelines", "x.register_hook behind one block", "once:hook", "pp2.mb2"),
    Case("2 pipelines", ".tolist() hides a dropout", "back:tolist between:dropout-call", "pp2.mb2"),
    Case("2 pipelines", ".unique() hides a dropout", "back:unique between:dropout-call", "pp2.mb2"),
    Case("2 pipelines", "nonzero hides a dropout", "back:nonzero between:dropout-call", "pp2.mb2"),
    Case("2 pipelines", "numpy hides a dropout", "back:numpy between:dropout-call", "pp2.mb2"),
    Case("2 pipelines", ".tolist() hides reused blocks", "back:tolist stack:reused", "pp2.mb2"),
    Case("2 pipelines", ".unique() hides another order of blocks", "back:unique stack:reversed", "pp2.mb2"),
    Case("2 pipelines", "numpy hides blocks that run twice", "front:numpy stack:twice", "pp2.mb2"),
    Case("2 pipelines", "an optional key that the example has not", "batch:mask-later", "pp2.mb2"),
    Case("2 pipelines", "a branch on values", "between:branch", "pp2.mb2 pp2.mb8"),
    Case("2 pipelines", "weights that no loss reaches", "back:unused", "pp2.mb2 dp2.z3"),
    Case("2 pipelines", "weights that no loss reaches any more", "back:detach", "pp2.mb2.dualpipev pp2.mb2"),
    Case("3 proofs", "features mixed in training only", "inner:train-mean", "tp2.mb8 dp2.tp2.mb4"),
    Case("3 proofs", "features mixed from a length on", "batch:longer inner:long-mean", "tp2.mb8"),
    Case("3 proofs", "features mixed for some values", "inner:value-mean", "tp2.mb8"),
    Case("3 proofs", "a scale in training only", "inner:train-scale", "tp2.mb8"),
    Case("3 proofs", "the sequence mixed in training only", "between:train-mean body:attention", "cp2.mb8"),
    Case("3 proofs", "a branch on length", "between:length-branch body:attention", "cp2.mb8"),
    Case("3 proofs", "an optional key that the example has not", "batch:mask-later body:attention", "tp2.mb8 cp2.mb8"),
    Case("4 rows", "the mean of rows behind a zero gate", "between:rows-gate", "dp2 dp1.mb2 pp2.mb2"),
    Case("4 rows", "the mean of rows behind a zero gate in blocks", "block:rows-gate", "dp2.z3.mb4 pp2.mb2.dualpipev"),
    Case("4 rows", "a zero-initialised layer of the mean of rows", "once:rows-zero", "dp2.mb4"),
    Case("4 rows", "rows meet before a zero-initialised head", "between:rows head:zero", "dp2.mb4 dp1.mb2"),
    Case("4 rows", "a contrast behind a zero-initialised head", "head:zero loss:contrast", "dp2.mb4"),
    Case("4 rows", "ReZero", "block:rezero", "dp2.mb4 tp2.mb8 pp2.mb2"),
    Case("4 rows", "a term whose weight grows from 0", "loss:grows", "dp2 dp1.mb2 dp2.mb4"),
    Case("4 rows", "rows meet in training only", "between:rows-train", "dp2.mb4 pp2"),
    Case("5 writes", "an EMA teacher", "between:moving-teacher", "dp1 dp2.mb4 dp4.z3.mb2 tp2.mb8 dp1.mb8"),
    Case("5 writes", "an EMA teacher in blocks", "block:moving-teacher", "dp2.z1.mb4 pp2.mb8"),
    Case("5 writes", "nn.Embedding(max_norm=)", "input:max-norm", "dp2.mb4 dp2.z3.mb4 tp2.mb8 pp2.mb8"),
    Case("5 writes", "a layer that normalises its columns", "block:unit-columns", "tp2.mb8 dp2.z3.mb4 dp2.mb4"),
    Case("5 writes", "weights shrunk through .data", "block:shrunk-data", "tp2.mb8 dp2.z3.mb4 dp1.mb2 pp2.mb2"),
    Case("6 losses", "L2 of all parameters in the loss", "loss:l2", "tp2.mb8 pp2.mb2 dp2.mb4 dp2.tp2.mb4"),
    Case("7 requires_grad_", "frozen behind parallelize", "train:freeze", "dp2.mb4 dp2.z3.mb4 tp2.mb8 pp2.mb2"),
    Case("7 requires_grad_", "trained again behind parallelize", "train:thaw", "dp1.mb8 dp2.z3 pp2.mb4.zbv tp2.mb8"),
    Case("8 backward", "scale_grad_by_freq", "input:frequency", "dp2.mb4 dp1.mb2 pp2.mb4.zbv"),
    Case("8 backward", "a backward divided by its norm", "between:unit-gradient", "dp2.mb4 dp1.mb2 pp2.mb2"),
    Case("8 backward", "a hook that divides by the norm", "between:hook-norm", "dp2.mb4 dp1.mb2"),
    Case("8 backward", "a hook that bends the gradient", "block:hook-bent", "dp2.mb4 tp2.mb8"),
    Case("8 backward", "a backward divided by its norm in a region", "inner:unit-gradient", "tp2.mb8"),
    Case("8 backward", "a hook that divides by the norm in a region", "inner:hook-norm", "tp2.mb8"),
    Case("8 backward", "a hook that bends the gradient in a region", "inner:hook-bent", "tp2.mb8"),
    Case("9 states", "an empty parameter in full_state_dict", "back:empty", "dp1 dp2 tp2.mb8 dp2x2.z2.mb1"),
    Case("9 states", "an empty parameter of each block", "block:empty", "dp4 dp2.z3 pp2.mb2"),
    Case("9 states", "a buffer that counts steps", "block:counter", "dp1.mb2 dp2.mb2 dp1.mb8.rc-full pp2.mb2"),
    Case("9 states", "a Python number that counts steps", "block:python-counter", "dp1.mb2 dp1.mb8.rc-full pp2.mb2"),
)
CRASHES = (
    Case("crashes", "an own loss that reads weights under z3", "loss:l2", "dp2.z3 dp2.z3.mb4"),
    Case("crashes", "weights clamped between steps", "train:clamp", "dp2.z3 pp2.mb2.z3 tp2.mb8 pp2.mb2"),
    Case("crashes", "load_state_dict between steps", "train:put-back", "dp2.z3.mb4 tp2.mb8 pp2 dp2.mb4"),
    Case("crashes", "named_parameters() read between steps", "train:read", "dp2.z3.mb4 pp2.mb2.z3 tp2.mb8"),
    Case(
        "crashes", "a module shared by several blocks", "stack:shared-module", "dp1 dp2.mb4 dp2.z3.mb4 pp2.mb2 tp2.mb8"
    ),
    Case("crashes", "complex parameters", "back:complex", "dp1 dp2.mb4 dp2.z3 cp2.pp2.mb4 tp2.mb8"),
    Case("crashes", "parametrizations.orthogonal", "back:orthogonal", "dp1 dp2.z3 dp2.tp2.mb4 dp1.mb8.rc-full"),
    Case("crashes", "a 0-dim tensor in the batch", "batch:scalar", "dp1.mb2 dp2.mb4 tp2.mb8.sp pp2.mb2"),
    Case("crashes", "shapes under sp", "body:parallel", "tp2.sp.mb8"),
    Case("crashes", "shapes under sp with places", "between:places", "tp2.sp.mb8"),
    Case("crashes", "shapes under cp with places", "between:places body:attention", "cp2.mb8"),
    Case("crashes", "shapes under cp of another length", "batch:lengths body:attention", "cp2.mb8"),
    Case("crashes", "shapes under sp of another length", "batch:lengths", "tp2.sp.mb8 tp4.sp.mb8"),
    Case("crashes", "a mask under sp and cp", "batch:mask body:attention", "tp2.sp.mb8 cp2.mb8"),
    Case(
        "crashes",
        "weights written where autograd needs them",
        "between:unit-columns",
        "dp2.mb4 dp1.mb8.rc-full pp2.mb2 tp2.mb8",
    ),
    Case(
        "found by the hunt",
        "blocks that run in another order than they are listed",
        "stack:skip",
        "tp2.sp tp2.sp.mb4 pp2.mb2 dp2.z3",
    ),
    Case("found by the hunt", "blocks that run backwards", "stack:reversed", "tp2.sp pp2.mb2"),
    Case("found by the hunt", "weights shrunk through .data behind one block", "once:shrunk-data", "pp2.mb2 tp2.mb8"),
)
NEEDLESS = (
    Case(
        "needless refusals",
        "F.linear(x, table.weight) as head",
        "head:functional",
        "pp2.mb2 pp2.mb4.zbh1 pp4.mb2",
        True,
    ),
    Case(
        "needless refusals",
        "scales of each layer between blocks",
        "between:scales",
        "pp2.mb2 pp2.mb4.zbv pp4.mb2",
        True,
    ),
    Case(
        "needless refusals",
        "embeddings of each layer between blocks",
        "between:layer-embedding",
        "pp2.mb2 pp2.mb2.z3",
        True,
    ),
    Case("needless refusals", "BatchNorm in eval mode", "back:batch-norm-eval", "dp2.mb4 dp2.z3", True),
    Case("needless refusals", "BatchNorm in eval mode in blocks", "block:batch-norm-eval", "dp2.mb4 dp4.z3.mb2", True),
    Case(
        "needless refusals",
        "an own loss with an odd last batch",
        "batch:odd-last loss:rows",
        "dp2.mb4 dp2.mb2 dp4.z3.mb2",
        True,
    ),
    Case("needless refusals", "weights shared by two blocks", "stack:shared-weight", "dp2.z3 dp2.z3.mb4", True),
)
CASES = [(case, plan) for case in (*SILENT, *CRASHES, *NEEDLESS) for plan in case.plans.split()]


def outcome_of(ranks: Any, case: Case, plan: str) -> tuple[str, str]:
    """(outcome, line), with the proof as users have it. A job of an odd number compares the first gradients, an even
    one begins with a step: half of the cases each."""
    seed = 3 + zlib.crc32(f"{case.what} {plan}".encode()) % 2
    return run(ranks, Job(seed, tuple(sorted(case.features.split()))), plan, seconds=120.0, prove="auto")


def passes(case: Case, outcome: str) -> bool:
    return outcome == EQUAL or (outcome == REFUSED and not case.must_run)


FIRST = [(case, case.plans.split()[0]) for case in (*SILENT, *CRASHES, *NEEDLESS)]


@pytest.mark.parametrize(("case", "plan"), FIRST, ids=[f"{case.what}, {plan}" for case, plan in FIRST])
@pytest.mark.covering(5)
def test_each_model_of_the_list_is_equal_to_one_device_or_refused(ranks: Any, case: Case, plan: str) -> None:
    outcome, line = outcome_of(ranks, case, plan)
    assert passes(case, outcome), f"{outcome}: {line}"


@pytest.mark.soak
def test_the_list_under_all_its_plans_is_written_as_a_table(ranks: Any) -> None:
    lines = [
        "# Soundness: the list, line by line",
        "",
        "Written by `make soak`: each model under each plan in float64 against one device.",
    ]
    lines += ["", "| part | model | plan | outcome |", "|---|---|---|---|"]
    wrong = []
    for case, plan in CASES:
        outcome, line = outcome_of(ranks, case, plan)
        wrong += [] if passes(case, outcome) else [f"{case.what}, {plan}: {outcome} {line}"]
        said = f"{outcome}: {line}" if line else outcome
        lines.append(f"| {case.part} | {case.what} | `{plan}` | {said.replace('|', '/')} |")
    (RESULTS / "soundness.md").write_text("\n".join(lines) + "\n")
    assert not wrong, "\n".join(wrong)
