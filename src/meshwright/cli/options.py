"""Defines the options that all planning commands use, and turns them into a job file. All output goes through this
module, so that output with `--json` contains nothing but JSON."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from meshwright.core.background_thread import start_background_thread
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, join_messages, translate
from meshwright.core.printable_text import escape_terminal_controls

if TYPE_CHECKING:
    from cyclopts import Token

    from meshwright.planner.inputs.job import JobFile
    from meshwright.spec.job import Job
    from meshwright.spec.plan import Plan
    from meshwright.spec.workload import Workload


def join_negative_values(tokens: Sequence[str]) -> Iterator[str]:
    """Joins a negative number to the option before it, so that it is read as the value and not as an option.

    >>> [*join_negative_values(["plan", "--budget", "-1GiB", "--json", "--", "--budget", "-1"])]
    ['plan', '--budget=-1GiB', '--json', '--', '--budget', '-1']
    """
    ours, at = tokens.index("--") if "--" in tokens else len(tokens), 0
    while at < len(tokens):
        takes = (
            at + 1 < ours
            and tokens[at].startswith("--")
            and "=" not in tokens[at]
            and re.match(r"-[\d.]", tokens[at + 1])
        )
        yield f"{tokens[at]}={tokens[at + 1]}" if takes else tokens[at]
        at += 2 if takes else 1


JobPath = Annotated[
    Path | None,
    Parameter(name="JOB", help="job file (YAML or JSON); default: llama-tiny on this machine"),
]
Language = Annotated[
    str | None, Parameter(name="--lang", help="language of the output, en or zh; default: the language of the locale")
]
AsJson = Annotated[bool, Parameter(negative="", help="print one JSON object to standard output, and nothing else")]


DEFAULTS = ("--batch", "--seq")
"""Options whose default values the planning commands announce."""


def _option(text: str) -> Parameter:
    return Parameter(help=text)


def convert_count(type_: Any, tokens: Sequence[Token]) -> int:
    """Converts the value of an option to a whole number; 4k is 4,096.

    Raises: InputError if the value is not a whole number.
    """
    from meshwright.core.errors import InputError
    from meshwright.core.units import parse_count

    number = parse_count(tokens[0].value)
    if isinstance(number, str) and not re.fullmatch(r"[-+]?[0-9]+", number):
        raise InputError(Message("{text!r} is not a whole number, such as 32 or 4k", text=number))
    return int(number)


def count_option(text: str) -> Parameter:
    """Returns the declaration of an option whose value is a whole number. `text`: its help."""
    return Parameter(help=text, converter=convert_count)


@Parameter(name="*")
@dataclass(frozen=True)
class JobOptions:
    """The job to plan. An option overrides the same entry of the job file."""

    model: Annotated[
        str | None,
        _option("catalog name, size (200b), folder with config.json, architecture file, or package.module:function"),
    ] = None
    cluster: Annotated[
        str | None, _option("local, a file, or NODESxDEVICES:device[@LINK] joined by +, such as 8x8:a100-80gb")
    ] = None
    budget: Annotated[
        str | None, _option("bytes of device memory that a rank may use, such as 70GiB; default: nearly all")
    ] = None
    batch: Annotated[int | None, count_option("sequences per optimizer step, over all devices")] = None
    seq: Annotated[
        int | None,
        count_option("tokens per sequence, such as 4k; default: the context of the model, at most 4,096 (CPUs: 256)"),
    ] = None
    data: Annotated[
        str | None, _option("file, folder or pattern of the training data; default: the sources of Python's library")
    ] = None
    precision: Annotated[
        str | None,
        _option("fp64, fp32, tf32, bf16, bf16-pure, fp16 or fp8; default: the fastest precision of the devices"),
    ] = None
    optimizer: Annotated[
        str | None, _option("adamw, adam, sgd, sgd-momentum, muon, adafactor or package.module:function")
    ] = None
    lr: Annotated[float | None, _option("learning rate of the optimizer; default: 3e-4")] = None
    lora: Annotated[
        str | None,
        _option(
            "train LoRA adapters only: rank=8,alpha=16,target=q_proj+v_proj,base=nf4 (base in 4 bits); omitted "
            "settings have their defaults"
        ),
    ] = None
    preference: Annotated[
        str | None, _option("train on pairs of a chosen and a rejected answer: dpo or orpo, such as dpo,beta=0.1")
    ] = None
    plan: Annotated[str | None, _option("a plan by name (dp8.tp2.pp4.z1), a plan file, or auto")] = None
    set: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", show_default=False, help="override an entry of the job file: section.key=value, repeatable"
        ),
    ] = ()

    def overrides(self) -> dict[str, Any]:
        """Returns the options as entries of a job file."""
        from meshwright.planner.inputs.job import parse_lora, parse_preference
        from meshwright.planner.inputs.model_parser import is_user_code

        model = "model.module" if self.model and is_user_code(self.model) else "model.name"
        entries = {
            model: self.model,
            "cluster.name": self.cluster,
            "cluster.budget": self.budget,
            "workload.batch": self.batch,
            "workload.sequence": self.seq,
            "workload.precision": self.precision,
            "data.source": self.data,
            "workload.optimizer.name": self.optimizer,
            "workload.optimizer.lr": self.lr,
            "workload.lora": parse_lora(self.lora) if self.lora is not None else None,
            "workload.preference": parse_preference(self.preference) if self.preference is not None else None,
            "plan.name": self.plan,
        }
        return {name: value for name, value in entries.items() if value is not None}

    def job_file(self, path: Path | None) -> JobFile:
        """Returns the job file at `path`, with these options applied and with the traced description of the model if it
        needs one. If `path` is None, the defaults apply."""
        from meshwright.cli.trace_model import trace_job_model
        from meshwright.core.errors import InputError
        from meshwright.planner.inputs.job import read_job

        try:
            job = read_job(path, self.set, self.overrides())
        except InputError:
            _refuse_foreign_file(path)
            raise
        return trace_job_model(job)


def _refuse_foreign_file(path: Path | None) -> None:
    """Raises InputError if the job file `path` is the configuration of another system."""
    from meshwright.core.errors import InputError
    from meshwright.interop.importing import recognize_file

    system = recognize_file(path) if path is not None and path.is_file() else None
    if system is not None:
        raise InputError(
            Message(
                "{path} is a configuration of {system}: `meshwright import {path}` reads it", path=path, system=system
            )
        )


def announce_defaults(file: JobFile, workload: Workload, language: str, options: tuple[str, ...] = DEFAULTS) -> None:
    """Prints which of `options` (--batch, --seq) have default values: neither the user nor the job file sets them. The
    chosen number of ranks of `local` is one of them."""
    defaults = {
        "--batch": ("batch", Message("batch {value:,} ({option})", value=workload.batch, option="--batch")),
        "--seq": ("sequence", Message("sequence {value:,} ({option})", value=workload.sequence, option="--seq")),
    }
    said = [text for field, text in (defaults[name] for name in options) if field not in file.workload.model_fields_set]
    if file.cluster.local_ranks and "name" not in file.plan:
        said.append(Message("local:{value} ({option})", value=file.cluster.local_ranks, option="--cluster"))
    if said:
        print_note(Message("using defaults: {values}", values=join_messages(", ", said)), language)


def announce_micro_batch(written: str, plan: Plan, complete: Plan, language: str) -> None:
    """Prints the name of the `complete` plan if the name `written` of `plan` leaves the micro-batch open."""
    from meshwright.spec.plan_name import is_open

    if is_open(plan) and not is_open(complete):
        print_note(Message("plan {written} = {plan}", written=written, plan=complete.name), language)


def complete_given_plan(question: Job, plan: Plan, written: str, language: str) -> Plan:
    """Returns the complete plan with the name `written`. Prints its micro-batch if the name leaves it open."""
    from meshwright.planner.cost.named_plans import complete_plan

    complete = complete_plan(question, plan)
    announce_micro_batch(written, plan, complete, language)
    return complete


def given_or_best_plan(file: JobFile, question: Job, language: str) -> Plan:
    """Returns the plan of the job file or of --plan, otherwise the planner's first choice."""
    plan = file.given_plan()
    if plan is not None:
        return complete_given_plan(question, plan, file.plan["name"], language)
    from meshwright.planner.search.ranking import search_plans

    return search_plans(question, 1).chosen.plan


def check_output_path(option: str, path: Path | None) -> None:
    """Raises InputError if no file can be written to `path`, which `option` names."""
    from meshwright.core.errors import InputError

    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise InputError(
            Message(
                "{option} {path}: {what}; name a file in an existing folder",
                option=option,
                path=path,
                what=Message("is a folder")
                if path.is_dir()
                else Message("folder {parent} does not exist", parent=path.parent),
            )
        )


def print_output(text: str) -> None:
    """Prints `text` on standard output."""
    sys.stdout.write(escape_terminal_controls(text) + "\n")


def print_note(text: str, language: str | None = None) -> None:
    """Prints progress and remarks on standard error, translated to `language` where possible. None means the
    language of the locale."""

    sys.stderr.write(escape_terminal_controls(translate(text, choose_language(language, os.environ))) + "\n")


@contextmanager
def search_progress(language: str | None = None, first: float = 5.0, every: float = 20.0) -> Iterator[None]:
    """Prints a line if the block, which searches for plans, takes longer than `first` seconds, and again every `every`
    seconds."""
    done, began = threading.Event(), time.monotonic()

    def report() -> None:
        wait = first
        while not done.wait(wait):
            seconds, wait = time.monotonic() - began, every
            print_note(Message("searching for the best plan: {seconds:seconds} so far", seconds=seconds), language)

    reporter = start_background_thread("search-progress", report, lambda line: None, restarts=False)
    try:
        yield
    finally:
        done.set()
        reporter.join()


def print_json(data: Any) -> None:
    """Prints one JSON object on standard output."""
    json.dump(data, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
