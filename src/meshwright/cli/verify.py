"""`meshwright verify`: the job's plan, reduced in size, on real ranks of this machine against one device; exit code 4 when not equal."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from meshwright.cli.options import AsJson, JobPath, Language, Shared, note, say, say_json

if TYPE_CHECKING:
    from meshwright.cli.preparation import Choice
    from meshwright.spec.launch import ModelSource
    from meshwright.spec.plan import Plan
    from meshwright.spec.workload import Workload
    from meshwright.words.say import Sentence

DTYPES = {"float64": ("fp64",), "float32": ("fp32",), "both": ("fp64", "fp32")}
MODULE = "meshwright.train.verify"


def verify(
    job: JobPath = None,
    /,
    *,
    shared: Shared = Shared(),  # noqa: B008
    pin: Annotated[str | None, Parameter(help="parts of the plan to fix, such as tp=2,pp=2")] = None,
    dtype: Annotated[Literal["float64", "float32", "both"], Parameter(help="in which precision to compare")] = "both",
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Run the job's plan with a small model on real ranks and compare it with one device.

    Compared are the loss of several steps, every first gradient, the weights after them, the numbers of parameters and of labels.

    The model keeps its form and loses its size; the plan keeps its kinds of parallelism on at most 8 ranks.

    Try: meshwright verify --model llama-65b --cluster 8x8:a100-80gb --plan dp2x4.tp2.pp4.z3.rc-full
    """
    from meshwright.words.say import language_of, tell
    from meshwright.words.say import say as said

    language = language_of(lang, os.environ)
    asked = ask(job, shared, pin, dtype)
    small, source, choice = asked.small, asked.source, asked.choice
    plan = tell("verify.plan", plan=choice.plan.name)
    what = plan if small.name == choice.plan.name else tell("verify.reduced", plan=plan, small=small.name)
    note(said(tell("verify.small", model=source.name, what=what, ranks=small.world), language))
    for line in asked.lossy:
        note(line, language)
    findings = run(asked)
    if json:
        equal = all(finding["equal"] for finding in findings)
        say_json(
            {"model": source.name, "plan": choice.plan.name, "ran": small.name, "ranks": small.world, "equal": equal, "found": findings}
        )
    return _judge(findings, small, json, language)


class Asked(NamedTuple):
    """What is verified: the model, the plan of the job and the one that it is reduced to, and what the ranks are told."""

    source: ModelSource
    choice: Choice
    small: Plan
    question: dict[str, Any]
    lossy: tuple[str, ...] = ()
    """What the workload asks for that changes the result, and by how much."""


LOSSES = {
    "bf16": "each element of a host's sum by 2^-9 of itself",
    "int8": "each element of a host's sum by 1/254 of the largest of its block of 256",
    "low-rank": "what the factors do not span, without a bound for one step",
}


def _lossy(workload: Workload) -> tuple[str, ...]:
    """A line for each thing that one device would have to do too."""
    found = []
    if workload.compression is not None:
        kind = workload.compression.kind
        found.append(
            f"workload.compression {kind} changes gradients between hosts, {LOSSES[kind]}, sent later: verified is the plan without it"
        )
    if workload.local is not None:
        found.append(
            f"workload.local: replicas that meet every {workload.local.steps} steps are no one device: verified is the plan without it"
        )
    return tuple(found)


def ask(job: Path | None, shared: Shared, pin: str | None, dtype: str) -> Asked:
    """From the options of the command, or of `meshwright.verify`."""
    from meshwright.cli.preparation import choose, read_file, source_of
    from meshwright.spec.reduced import reduced

    file = read_file(job, shared)
    source = source_of(file)
    choice = choose(file, pin, None, {}, None)
    small = reduced(choice.plan)
    rule = file.workload.optimizer.model_dump(mode="json")
    question: dict[str, Any] = {
        "model": source.model_dump(),
        "plan": small.model_dump(mode="json"),
        "optimizer": rule,
        "precisions": DTYPES[dtype],
    }
    question["lora"] = file.workload.lora.model_dump() if file.workload.lora is not None else None
    question["capacity"] = file.workload.expert_capacity
    return Asked(source, choice, small, question, _lossy(file.workload))


def run(asked: Asked) -> list[dict[str, Any]]:
    """The findings of the ranks. Their logs stay when something went wrong."""
    from meshwright.elastic.failure import RankFailed
    from meshwright.elastic.supervisor import Supervisor, Work

    folder = Path(tempfile.mkdtemp(prefix="meshwright-verify-"))
    findings: list[dict[str, Any]] = []

    def hear(rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "found":
            findings.append({**message["finding"], "equal": message["equal"]})

    work = Work(f"{MODULE}:verify", asked.small.world, asked.question, folder, (MODULE,), {"CUDA_VISIBLE_DEVICES": ""})
    try:
        Supervisor(work, hear, note, early="before all was compared").run()
    except RankFailed:
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    return findings


def _judge(findings: list[dict[str, Any]], plan: Plan, quiet: bool, language: str) -> int:
    from meshwright.base.errors import VerificationFailed
    from meshwright.words.say import say as said

    wrong = []
    for finding in findings:
        line = "".join(said(part, language) for part in _line(finding, plan))
        if not finding["equal"]:
            wrong.append(line)
        elif not quiet:
            say(line)
    if wrong:
        raise VerificationFailed("\n".join(wrong))
    return 0


def _line(finding: dict[str, Any], plan: Plan) -> Iterator[Sentence]:
    """One precision in one line."""
    from meshwright.words.say import tell

    one, many = finding["parameters"]
    labels, ours = finding["labels"]
    shares = finding["labels_by_replica"]
    name = {"fp64": "float64", "fp32": "float32"}[finding["precision"]]
    yield tell("verify.equal", precision=name) if finding["equal"] else tell("verify.differs", precision=name, plan=plan.name)
    yield tell("verify.loss", loss=f"{finding['loss']:.1e}")
    yield tell("verify.gradients", gradient=f"{finding['gradient']:.1e}", where=finding["where"])
    yield tell("verify.weights", steps=finding["steps"], weight=f"{finding['weight']:.1e}", where=finding["weight_where"])
    yield tell("verify.parameters", many=many) if one == many else tell("verify.parameters.other", many=many, one=one)
    yield tell("verify.labels", labels=labels) if labels == ours else tell("verify.labels.other", ours=ours, labels=labels)
    if len(shares) > 1 and labels == ours:
        yield tell("verify.spread", least=min(shares), most=max(shares))
    if finding["missing"]:
        yield tell("verify.missing", count=len(finding["missing"]), first=finding["missing"][0])
    if finding["rounding"]:
        yield tell("verify.rounding", count=finding["rounding"])
    if finding["first"]:
        yield tell("verify.first", first=finding["first"])
