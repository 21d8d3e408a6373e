"""`meshwright verify`: the job's plan, reduced in size, on real ranks of this machine against one device; exit code 4 when not equal."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from meshwright.cli.options import AsJson, JobPath, Shared, note, say, say_json

if TYPE_CHECKING:
    from meshwright.cli.preparation import Choice
    from meshwright.spec.launch import ModelSource
    from meshwright.spec.plan import Plan
    from meshwright.spec.workload import Workload

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
) -> int:
    """Run the job's plan with a small model on real ranks and compare it with one device.

    Compared are the loss of several steps, every first gradient, the weights after them, the numbers of parameters and of labels.

    The model keeps its form and loses its size; the plan keeps its kinds of parallelism on at most 8 ranks.

    Try: meshwright verify --model llama-65b --cluster 8x8:a100-80gb --plan dp2x4.tp2.pp4.z3.rc-layer
    """
    asked = ask(job, shared, pin, dtype)
    small, source, choice = asked.small, asked.source, asked.choice
    what = f"plan {choice.plan.name}" + (f", reduced to {small.name}" if small.name != choice.plan.name else "")
    note(f"{source.name} with few and small layers, {what}, {small.world} rank{'s' if small.world > 1 else ''} of this machine; dropout 0")
    for line in asked.lossy:
        note(line)
    findings = run(asked)
    if json:
        equal = all(finding["equal"] for finding in findings)
        say_json(
            {"model": source.name, "plan": choice.plan.name, "ran": small.name, "ranks": small.world, "equal": equal, "found": findings}
        )
    return _judge(findings, small, json)


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
    from meshwright.elastic.supervisor import Supervisor, Work

    folder = Path(tempfile.mkdtemp(prefix="meshwright-verify-"))
    findings: list[dict[str, Any]] = []

    def hear(rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "found":
            findings.append({**message["finding"], "equal": message["equal"]})

    work = Work(f"{MODULE}:verify", asked.small.world, asked.question, folder, (MODULE,), {"CUDA_VISIBLE_DEVICES": ""})
    Supervisor(work, hear, note).run()
    shutil.rmtree(folder)
    return findings


def _judge(findings: list[dict[str, Any]], plan: Plan, quiet: bool) -> int:
    from meshwright.base.errors import VerificationFailed

    wrong = []
    for finding in findings:
        line = _line(finding, plan)
        if not finding["equal"]:
            wrong.append(line)
        elif not quiet:
            say(line)
    if wrong:
        raise VerificationFailed("\n".join(wrong))
    return 0


def _line(finding: dict[str, Any], plan: Plan) -> str:
    """One precision in one line."""
    one, many = finding["parameters"]
    labels, ours = finding["labels"]
    shares = finding["labels_by_replica"]
    spread = f", {min(shares)} to {max(shares)} a replica" if len(shares) > 1 else ""
    parts = [
        f"loss {finding['loss']:.1e}",
        f"gradients {finding['gradient']:.1e} at {finding['where']}",
        f"weights after {finding['steps']} steps {finding['weight']:.1e} at {finding['weight_where']}",
        f"{one:,} parameters" if one == many else f"{many:,} parameters instead of {one:,}",
        f"{labels:,} labels{spread}" if labels == ours else f"{ours:,} labels instead of {labels:,}",
    ]
    if finding["missing"]:
        parts.append(f"{len(finding['missing'])} gradients are missing or too many, the first {finding['missing'][0]}")
    if finding["rounding"]:
        parts.append(f"{finding['rounding']} gradients are rounding alone and left out")
    name = {"fp64": "float64", "fp32": "float32"}[finding["precision"]]
    parts += [finding["first"]] if finding["first"] else []
    return f"{name} {'equal to' if finding['equal'] else f'{plan.name} differs from'} one device: {', '.join(parts)}"
