"""`meshwright verify`: compare a plan with one device: loss, every gradient, counts.

The command runs a scaled-down version of the job's plan on real ranks of this machine, and compares the results with
those of one device. With `--recording`, it compares the recorded steps of any engine instead
(cli/recording_options.py). Exit code 4 means that the results differ.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from meshwright.cli.options import (
    AsJson,
    JobOptions,
    JobPath,
    Language,
    announce_micro_batch,
    print_json,
    print_note,
    print_output,
)
from meshwright.cli.recording_options import RecordingOptions
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate

if TYPE_CHECKING:
    from meshwright.cli.launch_plan import PlanChoice
    from meshwright.planner.inputs.job import JobFile
    from meshwright.spec.job import ModelSource
    from meshwright.spec.plan import Plan
    from meshwright.spec.workload import Workload

PRECISIONS_BY_DTYPE = {"float64": ("fp64",), "float32": ("fp32",), "both": ("fp64", "fp32")}
VERIFY_MODULE = "meshwright.train.verify"


def verify(
    job: JobPath = None,
    /,
    *,
    shared: JobOptions = JobOptions(),  # noqa: B008
    pin: Annotated[str | None, Parameter(help="plan fields to fix, such as tp=2,pp=2")] = None,
    dtype: Annotated[Literal["float64", "float32", "both"], Parameter(help="precision of the comparison")] = "both",
    recorded: RecordingOptions = RecordingOptions(),  # noqa: B008
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Run the job's plan with a small model on real ranks and compare it with one device.

    The comparison covers the loss of several steps, the gradients of the first step, the weights after the last step,
    and the numbers of parameters and labels.

    The model keeps its structure but gets small sizes; the plan keeps its kinds of parallelism on at most 8 ranks.

    With --recording, compare the recorded steps of any training loop (meshwright.recording) with one device instead.

    Try: meshwright verify --model llama-65b --cluster 8x8:a100-80gb --plan dp2x4.tp2.pp4.z3.rc-full
    """
    from meshwright.cli.launch_plan import read_job_file

    language = choose_language(lang, os.environ)
    if recorded.recording is not None:
        recorded.refuse_other_options(job, shared, pin)
        return recorded.compare(shared.model, json, language)
    recorded.refuse_without_recording()
    file = read_job_file(job, shared, pin)
    requested = prepare_verification(file, pin, dtype)
    small, source, choice = requested.small, requested.source, requested.choice
    if (given := file.given_plan()) is not None:
        announce_micro_batch(file.plan["name"], given, choice.plan, language)
    plan = Message("plan {plan}", plan=choice.plan.name)
    what = (
        plan if small.name == choice.plan.name else Message("{plan}, reduced to {small}", plan=plan, small=small.name)
    )
    print_note(
        translate(
            Message(
                "{model} with few and small layers, {what}, {ranks:count rank} of this machine; dropout 0",
                model=source.name,
                what=what,
                ranks=small.world,
            ),
            language,
        )
    )
    for line in requested.lossy:
        print_note(line, language)
    findings = run_verification(requested)
    if json:
        print_json(_findings_data(requested, findings))
    return _print_findings(findings, small, json, language)


class VerifyJob(NamedTuple):
    """The subject of a verification: the model, the plan of the job, the scaled-down plan, and `question`, the request
    that the ranks read."""

    source: ModelSource
    choice: PlanChoice
    small: Plan
    question: dict[str, Any]
    lossy: tuple[str, ...] = ()
    """A line for each workload option that is left out because it changes the result."""


COMPRESSION_ERROR_TEXTS = {
    "bf16": Message("each element of a host's sum by up to 2^-9 of its value"),
    "int8": Message("each element of a host's sum by up to 1/254 of the largest value in its block of 256"),
    "low-rank": Message("by the part outside the low-rank factors, without a bound for one step"),
}


def _lossy_notes(workload: Workload) -> tuple[str, ...]:
    """Returns a line for each workload option that makes the result differ from that of one device. The verification
    leaves such an option out."""
    found = []
    if workload.compression is not None:
        kind = workload.compression.kind
        found.append(
            Message(
                "workload.compression {kind} changes gradients between hosts, {compression_error_texts}, with error "
                "feedback: the plan is verified without it",
                kind=kind,
                compression_error_texts=COMPRESSION_ERROR_TEXTS[kind],
            )
        )
    if workload.local is not None:
        found.append(
            Message(
                "workload.local: replicas that synchronize every {steps} steps differ from one device: the plan is "
                "verified without it",
                steps=workload.local.steps,
            )
        )
    if workload.preference is not None:
        found.append(
            Message(
                "workload.preference: the plan is verified with the cross-entropy of text; `meshwright train --prove` "
                "compares {loss} on the pairs themselves",
                loss=workload.preference.loss,
            )
        )
    return tuple(found)


def prepare_verification(file: JobFile, pin: str | None, dtype: str) -> VerifyJob:
    """Chooses the plan of a job file and scales it down to the ranks of this machine. `pin` has plan fields to fix,
    such as tp=2. `dtype` is float64, float32 or both."""
    from meshwright.cli.launch_plan import build_model_source, choose_plan
    from meshwright.spec.scaled_down import scale_down_plan

    source = build_model_source(file)
    choice = choose_plan(file, pin, None, {}, None)
    small = scale_down_plan(choice.plan)
    rule = file.workload.optimizer.model_dump(mode="json")
    question: dict[str, Any] = {
        "model": source.model_dump(),
        "plan": small.model_dump(mode="json"),
        "optimizer": rule,
        "precisions": PRECISIONS_BY_DTYPE[dtype],
    }
    question["lora"] = file.workload.lora.model_dump() if file.workload.lora is not None else None
    question["capacity"] = file.workload.expert_capacity
    return VerifyJob(source, choice, small, question, _lossy_notes(file.workload))


def run_verification(job: VerifyJob) -> list[dict[str, Any]]:
    """Runs the verification on ranks of this machine, and returns one finding for each precision.

    Raises: RankFailed if a rank fails. The folder with the logs is then not removed.
    """
    from meshwright.elastic.attempt import RankJob
    from meshwright.elastic.failure import RankFailed
    from meshwright.elastic.supervisor import Supervisor

    folder = Path(tempfile.mkdtemp(prefix="meshwright-verify-"))
    findings: list[dict[str, Any]] = []

    def hear(rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "found":
            findings.append({**message["finding"], "equal": message["equal"]})

    work = RankJob(
        f"{VERIFY_MODULE}:verify",
        job.small.world,
        job.question,
        folder,
        (VERIFY_MODULE,),
        {"CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        Supervisor(work, hear, print_note, early=Message("before all was compared")).run()
    except RankFailed:
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    return findings


def _findings_data(job: VerifyJob, findings: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": job.source.name,
        "plan": job.choice.plan.name,
        "ran": job.small.name,
        "ranks": job.small.world,
        "equal": all(finding["equal"] for finding in findings),
        "found": findings,
    }


def _print_findings(findings: list[dict[str, Any]], plan: Plan, quiet: bool, language: str) -> int:
    from meshwright.core.errors import VerificationFailed

    wrong = []
    for finding in findings:
        line = "".join(translate(part, language) for part in _finding_text(finding, plan))
        if not finding["equal"]:
            wrong.append(line)
        elif not quiet:
            print_output(line)
    if wrong:
        raise VerificationFailed("\n".join(wrong))
    return 0


def _finding_text(finding: dict[str, Any], plan: Plan) -> Iterator[Message]:
    """Yields the parts of the line about one finding, which is about one precision."""

    one, many = finding["parameters"]
    labels, ours = finding["labels"]
    shares = finding["labels_by_replica"]
    name = {"fp64": "float64", "fp32": "float32"}[finding["precision"]]
    yield (
        Message("{precision} equal to one device: ", precision=name)
        if finding["equal"]
        else Message("{precision} {plan} differs from one device: ", precision=name, plan=plan.name)
    )
    yield Message("largest relative differences: loss {loss}", loss=f"{finding['loss']:.1e}")
    yield Message(", gradients {gradient} at {where}", gradient=f"{finding['gradient']:.1e}", where=finding["where"])
    yield Message(
        ", weights after {steps} steps {weight} at {where}",
        steps=finding["steps"],
        weight=f"{finding['weight']:.1e}",
        where=finding["weight_where"],
    )
    yield (
        Message(", {many:count} parameters", many=many)
        if one == many
        else Message(", {many:count} parameters instead of {one:count}", many=many, one=one)
    )
    yield (
        Message(", {labels:count} labels", labels=labels)
        if labels == ours
        else Message(", {ours:count} labels instead of {labels:count}", ours=ours, labels=labels)
    )
    if len(shares) > 1 and labels == ours:
        yield Message(", {least} to {most} a replica", least=min(shares), most=max(shares))
    if finding["missing"]:
        yield Message(
            ", {count} gradients are missing or extra, the first {first}",
            count=len(finding["missing"]),
            first=finding["missing"][0],
        )
    if finding["rounding"]:
        yield Message(
            ", {count} gradients are 0 on one device, up to rounding, and are not compared", count=finding["rounding"]
        )
    if finding["first"]:
        yield Message(", {first}", first=finding["first"])
