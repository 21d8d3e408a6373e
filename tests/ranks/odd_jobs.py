"""Odd models under sampled plans, each against one device in float64: equal, or refused in one line by all ranks.

    python tests/ranks/odd_jobs.py --seeds 0:2000 --out table.jsonl [--prove never]    appends one line per job; resumes
    python tests/ranks/odd_jobs.py --count table.jsonl                                 shares of outcomes
    python tests/ranks/odd_jobs.py --count table.jsonl --write                         and bench/results/odd.md
    python tests/ranks/odd_jobs.py --features between:cumsum,head:tied --plan pp2,tp2  one job, by its features

A job that fails is printed with the smallest set of features that still fails in the same way.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from odd_data import batches, before_steps, between_steps, loss_of, optimizer_of, plain_loss
from odd_models import Job, Odd, sample
from pool import Pool, RankFailure

from meshwright.analysis.dry_run import in_eval_mode
from meshwright.core.errors import InputError
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

LONGEST_LINE = 400
RESULTS = Path(__file__).parents[2] / "bench" / "results"
LIMITS = {"loss": (1e-10, 1e-12), "gradient": (1e-10, 1e-13), "weight": (1e-8, 1e-11)}
"""Relative to what one device computes, and absolute where that is nearly zero."""
EQUAL, REFUSED, VOID = "equal", "refused", "void"
DIFFERS, CRASH, HANG, APART = "DIFFERS", "CRASH", "HANG", "RANKS DISAGREE"
PLANS = {
    1: ("dp1", "dp1.mb2", "dp1.mb8", "dp1.mb8.rc-full", "dp1.mb4.rc-sac"),
    2: (
        "dp2", "dp2.mb2", "dp2.mb4", "dp2.z1.mb4", "dp2.z2.mb2", "dp2.z3", "dp2.z3.mb4", "dp2.z3.mb4.rc-full",
        "dp2.mb4.rc-attn", "dp2.mb4.off-optimizer", "dp2.z3.mb4.off-parameters", "tp2", "tp2.mb8", "tp2.mb8.sp",
        "tp2.sp", "tp2.mb4.rc-full", "tp2.z3.mb8", "pp2", "pp2.mb2", "pp2.mb4.zbh1", "pp2.mb4.zbv", "pp2.mb8",
        "pp2.mb2.interleaved2", "pp2.mb2.gpipe", "pp2.mb2.z3", "pp2.mb2.rc-full", "pp2.mb2.dualpipev", "pp2.mb2.ls1-3",
        "cp2.mb8", "cp2.mb2.z3", "cp2.mb8.ulysses",
    ),
    4: (
        "dp4", "dp4.z3.mb2", "dp2x2.z3.mb2", "dp2x2.z2.mb1", "dp2.tp2.mb4", "dp2.tp2.z3.mb4", "dp2.tp2.sp.z1.mb4",
        "dp2.pp2.mb2", "dp2.pp2.z3.mb2.rc-full", "dp2.pp2.z1.zbh1", "tp2.pp2.mb4", "tp2.pp2.sp.mb2.zbv", "tp4.mb8",
        "tp4.sp.mb8", "pp4.mb2", "pp4.mb1.zbh1", "dp2.cp2.mb4", "cp2.tp2.mb8", "cp2.pp2.mb4", "cp4.mb8",
        "dp2.tp2.mb4.off-optimizer.rc-full",
    ),
}  # fmt: skip


def drawn(seed: int) -> tuple[Job, str]:
    """The job and the plan of a number. Half of the jobs keep only the features that are legal under the plan."""
    dice, job = random.Random(f"plan {seed}"), sample(seed)
    plan = dice.choice(PLANS[dice.choice((1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 4))])
    if dice.random() < 0.5:
        job = Job(
            seed, tuple(each for each in job.features if is_legal(Job(seed, (each,)), plan) or each.startswith("body:"))
        )
    return job, plan


def is_legal(job: Job, name: str) -> bool:
    """Whether the documentation promises that the job runs under the plan."""
    plan, against = parse_plan(name), job.against
    forwards_of_a_step = 8 // plan.rows_per_round * plan.dp
    sequence_is_cut = plan.cp > 1 or plan.sequence_parallel
    return not (
        "any" in against
        or ("rows" in against and forwards_of_a_step > 1)
        or ("state" in against and (forwards_of_a_step > plan.dp or plan.recompute != "none" or plan.pp > 1))
        or ("sequence" in against and sequence_is_cut)
        or ("values" in against and (plan.tp > 1 or plan.stages > 1 or plan.cp > 1))
        or ("tensor" in against and plan.tp > 1)
        or ("stages" in against and plan.stages > 1)
        or ("writes" in against and (plan.zero == 3 or plan.world > 1 or plan.recompute != "none"))
        or (plan.recompute == "attn" and job.one("body") not in ("attention", "parallel"))
        or (plan.cp > 1 and job.one("body") not in ("attention", "parallel"))
        or (plan.cp > 1 and (job.own_loss or job.one("batch") in ("odd-last", "lengths", "longer", "longer-late")))
        or (job.one("batch") == "odd-last" and job.own_loss)
        or (job.has("train:no-example") and job.one("input") in ("floats", "image"))
        or (job.one("input") == "image" and sequence_is_cut)
    )


# --- on a rank ------------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What a run gives: losses of its steps, gradients of the first batch, the last state dict."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def exact(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as float64 computes on it."""
    return {
        name: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in batch.items()
    }


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def alone(job: Job) -> Trained:
    """The job on one device, with nothing but torch."""
    model = Odd(job).double()
    start = copied(model.state_dict())
    loss_function, optimizer, losses = loss_of(job, model), optimizer_of(job)(model.parameters()), []
    before_steps(job, model)

    def loss_on(batch: dict[str, Any]) -> torch.Tensor:
        if loss_function is None:
            inputs = {name: each for name, each in batch.items() if name != "labels"}
            return plain_loss(job, model(**inputs), batch["labels"])
        return loss_function(model(**batch), batch)

    def backward(batch: dict[str, Any]) -> float:
        optimizer.zero_grad()
        loss = loss_on(batch)
        loss.backward()
        return loss.item()

    given, gradients = [exact(batch) for batch in batches(job)], {}
    if job.seed % 2:
        losses.append(backward(given[0]))
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    for step, batch in enumerate(given):
        losses.append(backward(batch))
        if job.has("train:clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if job.has("train:evaluate"):
            with in_eval_mode(model), torch.no_grad():
                losses.append(loss_on(batch).item())
        between_steps(job, model, step, start)
    return Trained(losses, gradients, copied(model.state_dict()))


def on_rank(job: Job, plan: str, options: dict[str, Any]) -> tuple[str, str]:
    """(outcome, line) of this rank. What is no error of a user's is raised."""
    warnings.simplefilter("ignore")
    try:
        expected = alone(job)
    except (RuntimeError, TypeError) as error:  # such as a weight that the forward writes to, or a hook without a value
        return VOID, f"one device: {error}"
    if not all(torch.tensor(expected.losses).isfinite()):
        return VOID, "one device computes no finite loss"
    try:
        model = Odd(job).double()
        start = copied(model.state_dict())
        dist.barrier()
        loss = loss_of(job, model)
        given = {} if loss is None else {"loss": loss}
        if not job.has("train:no-example"):
            given["example"] = batches(job)[0]
    except Exception as error:
        raise AssertionError(f"the generator is wrong: {error!r}") from error
    found = Trained([], {}, {})
    try:
        clip = 0.1 if job.has("train:clip") else None
        trainer = parallelize(model, optimizer_of(job), plan, precision="fp64", clip=clip, **given, **options)
        before_steps(job, model)
        if job.seed % 2:
            value, _, gradients = trainer.gradients(batches(job)[0])
            found.losses.append(value)
            found.gradients = copied(gradients or {})
        for step, batch in enumerate(batches(job)):
            found.losses.append(trainer.step(batch).loss)
            if job.has("train:evaluate"):
                found.losses.append(trainer.evaluate(batch))
            between_steps(job, model, step, start)
        found.weights = copied(trainer.full_state_dict() or {})
    except InputError as error:
        line = str(error)
        beside = job.seed % 2  # gradients asked for outside of a step, which nothing is updated with
        wrong = losses_differ(Trained(expected.losses[beside:], {}, {}), Trained(found.losses[beside:], {}, {}))
        if wrong:
            return DIFFERS, f"{wrong}, before it was refused: {line}"
        if "\n" in line or len(line) > LONGEST_LINE or "Traceback" in line:
            return CRASH, f"a refusal of {len(line)} characters in {len(line.splitlines())} lines: {line[:600]}"
        return REFUSED, line
    wrong = (differ(expected, found) if dist.get_rank() == 0 else "") or losses_differ(expected, found)
    return (DIFFERS, wrong) if wrong else (EQUAL, "")


def near(found: float, expected: float, kind: str) -> bool:
    relative, absolute = LIMITS[kind]
    return found <= relative * expected + absolute


def losses_differ(expected: Trained, found: Trained) -> str:
    for step, (ours, theirs) in enumerate(zip(found.losses, expected.losses, strict=False)):
        if not near(abs(ours - theirs), abs(theirs), "loss"):
            return f"loss {step} is {ours!r} instead of {theirs!r}, by {abs(ours / theirs - 1):.1e}"
    return ""


def differ(expected: Trained, found: Trained) -> str:
    """The first difference among the first loss, the first gradients, the other losses and the last weights."""
    if wrong := losses_differ(Trained(expected.losses[:1], {}, {}), found):
        return wrong
    for name in expected.gradients.keys() | found.gradients.keys() if expected.gradients else ():
        ours, theirs = found.gradients.get(name), expected.gradients.get(name)
        size = 0.0 if theirs is None else float(theirs.norm())
        off = size if ours is None else float(ours.norm() if theirs is None else (ours - theirs).norm())
        if not near(off, size, "gradient"):
            return f"gradient of {name} differs by {off:.1e} of {size:.1e}"
    if wrong := losses_differ(expected, found):
        return wrong
    if found.weights.keys() != expected.weights.keys():
        return f"the state dict differs in {sorted(found.weights.keys() ^ expected.weights.keys())[:3]}"
    for name, theirs in expected.weights.items():
        ours = found.weights[name]
        if ours.shape != theirs.shape:
            return f"weight {name} has shape {list(ours.shape)} instead of {list(theirs.shape)}"
        if theirs.numel() and not near(
            float((ours.to(theirs) - theirs).abs().max()), float(theirs.abs().max()), "weight"
        ):
            return (
                f"weight {name} differs by {float((ours.to(theirs) - theirs).abs().max()):.1e} of "
                f"{float(theirs.abs().max()):.1e}"
            )
    return ""


def noted(folder: str, job: Job, plan: str, options: dict[str, Any]) -> tuple[str, str]:
    """As `on_rank`; what a rank found stands in a file too, since the others may not answer."""
    found = on_rank(job, plan, options)
    Path(folder, f"rank-{dist.get_rank()}").write_text(json.dumps(found))
    return found


# --- over the ranks -------------------------------------------------------------------------------------------------


def run(pool: Pool, job: Job, plan: str, seconds: float = 60.0, **options: Any) -> tuple[str, str]:
    """(outcome, line) of a job on the ranks of its plan."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = pool.run(parse_plan(plan).world, noted, folder, job, plan, options, timeout=seconds)
        except RankFailure as error:
            said = {file.name: json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())}
            text = str(error)
            if "did not answer within" in text:
                return HANG, f"{text.splitlines()[0]}; the others: {said or 'silent'}"
            last = [line for line in text.strip().splitlines() if line and not line.startswith(" ")][-1]
            where = [line.strip() for line in text.splitlines() if "/meshwright/" in line][-1:]
            return CRASH, f"{last[:300]} {' '.join(where)[-160:]}" + (f"; the others: {said}" if said else "")
    kinds = {outcome for outcome, _ in found}
    for bad in (CRASH, DIFFERS):
        if bad in kinds:
            return next(each for each in found if each[0] == bad)
    if len(kinds) > 1:
        return APART, str(found)[:600]
    return found[0]


FAILURES = (DIFFERS, CRASH, HANG, APART)


def smallest(pool: Pool, job: Job, plan: str, **options: Any) -> Job:
    """The job with as few features as still fail in the same way."""
    outcome = run(pool, job, plan, **options)[0]
    left = list(job.features)
    for feature in job.features:
        fewer = Job(job.seed, tuple(each for each in left if each != feature))
        if run(pool, fewer, plan, **options)[0] == outcome:
            left.remove(feature)
    return Job(job.seed, tuple(left))


def hunt(seeds: Sequence[int], file: Path, minimise: bool = True, **options: Any) -> None:
    """Runs every seed that `file` does not hold and appends what was found."""
    known = {json.loads(line)["seed"] for line in file.open()} if file.exists() else set()
    pool = Pool()
    for number, seed in enumerate(each for each in seeds if each not in known):
        if number % 50 == 49:  # ranks that start anew hold nothing of what ran before
            pool.close()
        job, plan = drawn(seed)
        began = time.monotonic()
        outcome, line = run(pool, job, plan, **options)
        entry = {
            "seed": seed,
            "plan": plan,
            "features": job.features,
            "legal": is_legal(job, plan),
            "outcome": outcome,
            "line": line,
        }
        entry["seconds"] = round(time.monotonic() - began, 2)
        if outcome in FAILURES and outcome != HANG and minimise:
            entry["smallest"] = smallest(pool, job, plan, **options).features
        with file.open("a") as table:
            table.write(json.dumps(entry) + "\n")
        if outcome in FAILURES:
            print(f"{seed} {plan} {','.join(entry.get('smallest', job.features))}: {outcome} {line[:300]}", flush=True)
    pool.close()


def entries_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a table, with what is legal now."""
    found = [json.loads(line) for line in file.open()]
    for entry in found:
        entry["legal"] = is_legal(Job(entry["seed"], tuple(entry["features"])), entry["plan"])
    return found


def count(file: Path) -> str:
    """Shares of outcomes in a table, and the lines by which legal jobs were refused."""
    entries = entries_of(file)
    outcomes = Counter(entry["outcome"] for entry in entries)
    legal = [entry for entry in entries if entry["legal"] and entry["outcome"] != VOID]
    refused = [entry for entry in legal if entry["outcome"] == REFUSED]
    lines = [f"{len(entries)} jobs: " + ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())]
    lines.append(
        f"{len(legal)} legal jobs, {len(refused)} of them refused ({100 * len(refused) / max(len(legal), 1):.1f} %)"
    )
    reasons = Counter(
        " ".join(word for word in entry["line"].split(": ", 1)[-1].split() if not any(c.isdigit() for c in word))[:110]
        for entry in refused
    )
    lines += [f"    {number:4d}  {reason}" for reason, number in reasons.most_common(40)]
    return "\n".join(lines)


SOAK = (
    "Written by `make soak`: generated models under drawn plans, each in float64 against one device; "
    "a third of them with the proof."
)
BY_HAND = (
    "Generated models under drawn plans, each in float64 against one device, with the proof as users have it. By "
    "`python tests/ranks/odd_jobs.py --seeds FIRST:LAST --out jobs.jsonl`, and `--count jobs.jsonl --write`."
)


def write_table(entries: Sequence[dict[str, Any]], keep: bool, folder: Path = RESULTS, how: str = SOAK) -> None:
    """Writes odd.md, the counts of `entries` by outcome, and every failure, from odd.jsonl, which has one line a job.
    `keep`: what other parts have found. `how` the jobs ran, in words."""
    file = folder / "odd.jsonl"
    with open(__file__) as turn:  # parts may run at the same time
        fcntl.flock(turn, fcntl.LOCK_EX)
        known = (
            {each["seed"]: each for each in map(json.loads, file.read_text().splitlines())}
            if keep and file.exists()
            else {}
        )
        known |= {entry["seed"]: entry for entry in entries}
        file.write_text("".join(json.dumps(known[seed]) + "\n" for seed in sorted(known)))
        outcomes = Counter(entry["outcome"] for entry in known.values())
        legal = [entry["outcome"] for entry in known.values() if entry["legal"] and entry["outcome"] != VOID]
        wrong = [known[seed] for seed in sorted(known) if known[seed]["outcome"] in FAILURES]
        share = f"{legal.count(REFUSED)} ({100 * legal.count(REFUSED) / max(len(legal), 1):.1f} %)"
        lines = [
            "# Odd models", "",
            how, "",
            "| seeds | jobs | equal | refused | legal jobs | of these refused | one device does not train | failures |",
            "|---|---|---|---|---|---|---|---|",
            f"| {min(known)} to {max(known)} | {len(known)} | {outcomes[EQUAL]} | {outcomes[REFUSED]} | "
            f"{len(legal)} | {share} | {outcomes[VOID]} | {len(wrong)} |",
        ]  # fmt: skip
        lines += ["", "| seed | plan | features | failure |", "|---|---|---|---|"] if wrong else []
        lines += [
            f"| {each['seed']} | `{each['plan']}` | {' '.join(each['features'])} | {each['outcome']}: "
            f"{each['line'][:300].replace('|', '/')} |"
            for each in wrong
        ]
        (folder / "odd.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:60")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=Path)
    parser.add_argument("--write", action="store_true", help="bench/results/odd.md too")
    parser.add_argument("--features")
    parser.add_argument("--plan")
    parser.add_argument("--prove")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a rank that does not answer hangs")
    parser.add_argument("--whole", action="store_true", help="do not look for the smallest job that fails")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    options: dict[str, Any] = {"prove": given.prove} if given.prove else {}
    options["seconds"] = given.seconds
    os.environ.setdefault("MESHWRIGHT_MEASURED", "0")
    if given.count:
        print(count(given.count))
        if given.write:
            write_table(entries_of(given.count), keep=False, how=BY_HAND)
    elif given.features is not None:
        pool, job = Pool(), Job(given.seed, tuple(sorted(filter(None, given.features.split(",")))))
        for plan in given.plan.split(","):
            outcome, line = run(pool, job, plan, **options)
            print(f"{plan}: {outcome} {line}", "(legal)" if is_legal(job, plan) else "", flush=True)
        pool.close()
    else:
        first, _, last = given.seeds.partition(":")
        hunt(range(int(first), int(last)), given.out, not given.whole, **options)


if __name__ == "__main__":
    main()
