"""Turns a user's input into a launch: the job, its plan and estimate, and how ranks build the model. All commands
that run ranks use it."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cli.options import JobOptions
from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.hub_cache import snapshot_name
from meshwright.core.messages import Message

if TYPE_CHECKING:
    from meshwright.planner.inputs.job import JobFile
    from meshwright.spec.estimate import Estimate
    from meshwright.spec.job import Job, LaunchSpec, ModelSource
    from meshwright.spec.plan import Plan
    from meshwright.spec.workload import DataConfig

DEFAULT_JOB_FILE = Path(__file__).parents[1] / "catalog" / "default.yaml"
BYTE_VOCABULARY = 258
TINY_LANGUAGE_MODELS = ("llama-tiny", "gpt2-tiny", "bert-tiny")


class PlanChoice(NamedTuple):
    """A chosen plan for the job `question`, with its estimate. `why` has the lines to print about the choice.
    `question` and `estimate` are None for a model that cannot be traced on the meta device."""

    question: Job | None
    plan: Plan
    estimate: Estimate | None
    why: list[Message]


def read_job_file(path: Path | None, shared: JobOptions, pin: str | None = None) -> JobFile:
    """Reads the job file, applies the options and chooses the ranks of `local` (planner/search/local_ranks.py). If
    there is no job file, catalog/default.yaml replaces it for the models TINY_LANGUAGE_MODELS (default: llama-tiny);
    other models get the default of each entry. `pin` has plan fields that the user fixes, such as tp=2.

    Without the tokenizers library only byte tokens exist. A model of catalog/default.yaml then has the byte vocabulary.

    Raises: InputError for an invalid job file or option.
    """
    embedded = path is None and (shared.model or "llama-tiny") in TINY_LANGUAGE_MODELS
    try:
        file = shared.job_file(DEFAULT_JOB_FILE if embedded else path)
    except InputError as error:  # default.yaml is valid, so the error comes from the command line.
        from meshwright.core.codec import without_file

        raise InputError(without_file(error, str(DEFAULT_JOB_FILE))) from None
    library = importlib.util.find_spec("tokenizers") is not None
    if embedded and not library:
        file = file.but(model={"sizes": {"vocab": BYTE_VOCABULARY}, **file.model.model_dump(exclude_defaults=True)})
    if not file.cluster.is_open_local:
        return file
    from meshwright.planner.inputs.plans import parse_pins
    from meshwright.planner.search.local_ranks import with_local_ranks

    return with_local_ranks(file, parse_pins(pin or ""))


def build_model_source(file: JobFile) -> ModelSource:
    """Returns the model source of a job: how ranks build the model."""
    from meshwright.planner.inputs.job import resolve_sizes
    from meshwright.planner.inputs.model_parser import is_model_folder, is_user_code
    from meshwright.spec.job import ModelSource

    name = file.model.source
    path = Path(name).expanduser()
    if file.model.module or (is_user_code(name) and not path.exists()):
        return ModelSource(name=name, module=name, rules=file.model.rules)
    if is_model_folder(name):
        title = snapshot_name(str(path.resolve())).rpartition("/")[2]
        return ModelSource(name=title, folder=str(path.resolve()), rules=file.model.rules)
    sizes = {key: value for key, value in resolve_sizes(file.model).model_dump().items() if value is not None}
    return ModelSource(name=path.stem if path.is_file() else name, sizes=sizes)


def run_folder_of(file: JobFile, source: ModelSource) -> Path:
    """Returns the run folder of the job. Its default is runs/ followed by the name of the model."""
    return Path(
        file.run.folder or "runs/" + (re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.") or "model")
    ).expanduser()


def choose_plan(
    file: JobFile, pin: str | None, folder: Path | None, environment: Mapping[str, str], world: int | None
) -> PlanChoice:
    """Chooses the plan: the user's plan, else the plan of the run folder, else the best plan of the search. `pin` has
    plan fields that the user fixes, such as tp=2. With fixed fields, the plan of the run folder is not used.

    `world` is the number of ranks that another launcher has started. It is None if this process starts the ranks.

    Raises: InputError if the job, the plan or `pin` is invalid; NothingFits if the search finds no plan.
    """
    from meshwright.planner.cost.step import estimate as price
    from meshwright.planner.inputs.job import resolve_job
    from meshwright.planner.inputs.plans import parse_pins
    from meshwright.planner.search.explain import explain
    from meshwright.planner.search.ranking import search_plans
    from meshwright.spec.constraints import check_supported

    if world is not None and file.cluster.is_open_local:
        here = int(environment.get("LOCAL_WORLD_SIZE", environment.get("SLURM_NTASKS_PER_NODE", world)))
        file = file.but(cluster={"name": f"local:{here}"})
    elif file.cluster.local_ranks and "name" not in file.plan and not pin and folder is not None:
        file = _with_ranks_of_run(file, folder)
    if isinstance(file.described, str):
        return _choose_without_estimate(file, file.described, world)
    question = resolve_job(file)
    if world is not None:
        question = _scale_to_world(question, world)
    if pin:
        question = question.but(pins={**question.pins, **parse_pins(pin)})
    given = _requested_plan(file, question, folder)
    plan = given or (
        _previous_plan(folder, question) if folder is not None and question.pins == question.workload.fixed else None
    )
    if plan is not None:
        check_supported(plan, question.workload.recipe)
        estimate = price(question, plan)
        expected = {"seconds": estimate.time.step, "size": estimate.memory.reserved}
        why = [
            Message(
                "plan {plan}, as requested: {seconds:step} a step and {size:bytes} on the peak rank expected"
                if given
                else "plan {plan}, as the run began: {seconds:step} a step and {size:bytes} on the peak rank expected",
                plan=_name_as_written(file, plan),
                **expected,
            ),
            *_memory_warnings(estimate),
        ]
    else:
        answer = search_plans(question, 1, runnable=True)
        plan, estimate = answer.chosen.plan, answer.chosen.estimate
        first, *rest = explain(question, answer)
        why = [Message("plan {why}", why=first), *(Message("  {why}", why=line) for line in rest)]
        why += _warn_slow_group(question, estimate.time.step) if world is not None else []
    return PlanChoice(question, plan, estimate, [_job_summary(question), *why, *_plan_change_note(folder, plan)])


def _with_ranks_of_run(file: JobFile, folder: Path) -> JobFile:
    """Returns the job with as many ranks of `local` as the run in `folder` has used so far, if it has begun."""
    from meshwright.core.codec import read_run_file
    from meshwright.planner.search.local_ranks import with_ranks
    from meshwright.spec.plan import Plan

    before = read_run_file(Plan, folder / "plan.json") if has_progress(folder) else None
    return file if before is None else with_ranks(file, before.world)


def _requested_plan(file: JobFile, question: Job, folder: Path | None) -> Plan | None:
    """Returns the user's plan, or None. Its name may leave the bucket size and the micro-batch open. A pin sets them,
    or the plan of the run folder if both plans are otherwise equal. Else the planner chooses them."""
    from meshwright.planner.cost.named_plans import complete_plan
    from meshwright.spec.plan_name import is_open

    plan = file.given_plan()
    if plan is None or "bucket" in plan.model_fields_set:
        return plan
    if is_open(plan) and "micro_batch" in question.pins:
        plan = plan.model_copy(update={"micro_batch": question.pins["micro_batch"]})
    before = _previous_plan(folder, question) if folder is not None else None
    if before is not None:
        named = plan.but(micro_batch=before.micro_batch) if is_open(plan) else plan
        if before.name == named.name:
            return before
    return complete_plan(question, plan)


def _name_as_written(file: JobFile, plan: Plan) -> str:
    """Returns the name of `plan`, such as `dp2 = dp2.mb4` if the user's name leaves the micro-batch open."""
    from meshwright.spec.plan_name import is_open

    given = file.given_plan()
    return plan.name if given is None or not is_open(given) else f"{file.plan['name']} = {plan.name}"


def _memory_warnings(estimate: Estimate) -> list[Message]:
    """Returns warnings for a requested plan that does not fit: the missing memory, and a note if host memory is
    missing. Returns no warning for a plan that fits."""
    from meshwright.spec.estimate import fit_message

    if estimate.fits:
        return []
    notes = [Message("  {note}", note=estimate.notes[-1])] if estimate.crowded else []
    return [Message("  it {verdict}", verdict=fit_message(estimate)), *notes]


def _warn_slow_group(question: Job, step: float) -> list[Message]:
    """Returns a warning if a plan on fewer node groups would be faster than `step` seconds. Another launcher has
    started the ranks. A plan must use all of them, so the search could not leave out a slow group."""
    from meshwright.planner.search.heterogeneous import heterogeneous_plans

    score, plan = next(iter(heterogeneous_plans(question, 1, ceiling=step)), (step, None))
    if plan is None or score >= step or len(set(plan.placement)) in (0, len(question.cluster.groups)):
        return []
    groups = ", ".join(str(at) for at in range(len(question.cluster.groups)) if at not in plan.placement)
    return [
        Message(
            "  without group {groups} of the cluster {plan} would take {seconds:step} a step: start ranks only on "
            "the other nodes",
            groups=groups,
            plan=plan.name,
            seconds=score,
        )
    ]


def _job_summary(question: Job) -> Message:

    model, cluster, work = question.model, question.cluster, question.workload
    values = {"model": model.name, "parameters": model.parameters, "ranks": cluster.devices, "cluster": cluster.name}
    return Message(
        "{model}, {parameters:parameters} parameters, on {ranks:count rank} of {cluster}; {batch} x {sequence} tokens "
        "a step",
        **values,
        batch=work.batch,
        sequence=work.sequence,
    )


def _previous_plan(folder: Path, question: Job) -> Plan | None:
    """Returns the plan of the run folder, under which a resumed run is bit-identical. Returns None if there is no plan
    or no step yet, or if the plan cannot run on these devices."""
    from meshwright.core.codec import read_run_file
    from meshwright.core.errors import InputError
    from meshwright.spec.constraints import validate_plan
    from meshwright.spec.plan import Plan

    plan = read_run_file(Plan, folder / "plan.json")
    if plan is None or not has_progress(folder):
        return None
    try:
        validate_plan(question, plan)
    except InputError:
        return None
    return plan


def _plan_change_note(folder: Path | None, plan: Plan) -> list[Message]:
    """Returns a note if the plan of the run folder differs from `plan`; otherwise no note."""
    from meshwright.core.codec import read_run_file
    from meshwright.core.errors import InputError
    from meshwright.spec.plan import Plan

    with contextlib.suppress(InputError, storage.StorageFailed):
        is_begun = folder is not None and has_progress(folder)
        before = (read_run_file(Plan, folder / "plan.json") if folder is not None and is_begun else None) or plan
        return (
            [Message("  instead of plan {plan}, which the run used so far", plan=before.name)] if before != plan else []
        )
    return []


def _scale_to_world(question: Job, world: int) -> Job:
    """Returns the job unchanged if its cluster has `world` devices. A cluster `local` whose number of devices divides
    `world` is extended to as many nodes like this machine as `world` ranks need.

    Raises: InputError for any other cluster.
    """
    from meshwright.core.errors import InputError

    cluster = question.cluster
    if cluster.devices == world:
        return question
    nodes, rest = divmod(world, cluster.devices)
    if cluster.name.startswith("local") and not rest:
        group = cluster.groups[0]
        return question.but(cluster=cluster.but(groups=(group.but(nodes=nodes),)))
    raise InputError(
        Message(
            "{world} ranks were started, but cluster {cluster!r} has {devices} devices: start one rank per device",
            world=world,
            devices=cluster.devices,
            cluster=cluster.name,
        )
    )


def _choose_without_estimate(file: JobFile, reason: str, world: int | None) -> PlanChoice:
    """Returns the plan for a model that cannot be estimated: the user's plan, or else data parallelism over all ranks.
    `reason` says why there is no estimate.

    Raises: InputError if the plan is for another number of ranks, or if the workload excludes it.
    """
    from meshwright.core.errors import InputError
    from meshwright.planner.inputs.job import resolve_cluster
    from meshwright.spec.plan import Plan, default_micro_batches
    from meshwright.spec.plan_name import is_open
    from meshwright.spec.workload_constraints import workload_violations

    cluster = resolve_cluster(file.cluster)
    devices = world or cluster.devices
    plan = file.given_plan() or Plan(dp_replicate=devices)
    if plan.world != devices:
        raise InputError(
            Message(
                "plan {plan} is for {world} ranks but there are {devices} devices",
                plan=plan.name,
                world=plan.world,
                devices=devices,
            )
        )
    if is_open(plan):
        plan = plan.but(micro_batch=file.workload.exact or default_micro_batches(plan, file.workload.batch)[0])
    named = _name_as_written(file, plan)
    for fault in workload_violations(plan, file.workload, cluster):
        raise InputError(Message("plan {plan}: {message}", plan=named, message=fault.message))
    return PlanChoice(
        None,
        plan,
        None,
        [Message("plan {plan} has no estimate, choose another with --plan: {reason}", plan=named, reason=reason)],
    )


def build_launch(file: JobFile, source: ModelSource, folder: Path, choice: PlanChoice) -> LaunchSpec:
    """Returns the launch file of the ranks.

    Raises: InputError if the plan cannot divide the batch, or if the model's embedding is too small for bytes.
    """
    from meshwright.planner.cost.step import ideal_seconds, proof_price
    from meshwright.spec.job import LaunchSpec
    from meshwright.spec.record import ProofCost

    question, step = choice.question, choice.estimate.time.step if choice.estimate is not None else 0.0
    workload = question.workload if question is not None else file.workload
    choice.plan.micro_batches(workload.batch)
    data, vocabulary = resolve_data(file.data, source), question.model.vocabulary if question is not None else 0
    _check_default_tokenizer(data, vocabulary)
    return LaunchSpec(
        model=source,
        workload=workload,
        data=data,
        plan=choice.plan,
        run=file.run.but(folder=str(folder.resolve())),
        parameters=question.model.parameters if question is not None else 0,
        vocabulary=vocabulary,
        predicted=choice.estimate.per_stage if choice.estimate is not None else (),
        ideal_seconds=ideal_seconds(question, choice.estimate),
        proof=proof_price(question, choice.plan, step) if question is not None and step else ProofCost(),
    )


def _check_default_tokenizer(data: DataConfig, vocabulary: int) -> None:
    """Raises InputError if the default data set needs more token ids than the model's embedding has. `vocabulary`: this
    number, 0 if it is unknown or if the model reads no token ids."""
    from meshwright.core.errors import InputError

    text = data.sources == ("stdlib",) and data.tokenizer in ("auto", "bytes", "bpe")
    if text and 0 < vocabulary < BYTE_VOCABULARY:
        raise InputError(
            Message(
                "the model's embedding has {vocabulary} token ids, but text needs at least {needed} (the bytes and two "
                "special tokens): enlarge the embedding, set data.tokenizer to a smaller tokenizer, or set data.source "
                "to arrays of token ids",
                vocabulary=vocabulary,
                needed=BYTE_VOCABULARY,
            )
        )


def resolve_data(data: DataConfig, source: ModelSource) -> DataConfig:
    """Returns the data section of a job. If the model has a folder with a tokenizer, and the user names no tokenizer
    (`auto`), the section gets the tokenizer of this folder."""
    from meshwright.data.tokens import tokenizer_file

    own = bool(source.folder) and tokenizer_file(Path(source.folder)) is not None
    return data.but(tokenizer=source.folder) if own and data.tokenizer == "auto" else data


def disk_space_warnings(plan: Plan, estimate: Estimate, folder: Path, free: float, blocks: int = 0) -> str:
    """Returns a warning if the offloaded tensors of all ranks may not fit in the `free` bytes of `folder`; otherwise an
    empty string.

    The warning names offload fractions that would fit. For activations, it names a number of blocks per stage; `blocks`
    is the number of blocks of the model (0: unknown). The plan is not rejected: some ranks need less space, and the
    first step reports a full disk.
    """
    from meshwright.core.units import show_bytes
    from meshwright.spec.enums import ACTIVATION_OFFLOADS, DISK_OFFLOADS
    from meshwright.spec.grid import offload_percent

    kinds, need = [what for what in plan.offload if what in DISK_OFFLOADS], estimate.in_files * plan.world
    if not kinds or need <= free:
        return ""
    whole = {what: offload_percent(plan, what) for what in kinds}
    if kinds[-1] in ACTIVATION_OFFLOADS:
        layers = plan.offload_layers or max(plan.stage_layers(blocks), default=0) if blocks else 0
        whole = {kinds[-1]: layers if len(kinds) == 1 else 0}
    less = {what: int(share * free / need) for what, share in whole.items()}
    fits = ".".join(f"off-{what}{share}" for what, share in less.items()) + " would fit, " if all(less.values()) else ""
    return (
        f"offload folder {str(folder)!r} has {show_bytes(free)}, {plan.name} needs up to {show_bytes(need)} in it: "
        f"{fits}"
        f"or make room, or give another folder (--offload-to)"
    )


def has_progress(folder: Path) -> bool:
    """Returns whether the run folder has a step or a checkpoint. A folder without them is used for another job."""
    from meshwright.report.run import read_records

    with storage.failures_as_one_line(folder):
        checkpoints = storage.list_names(folder / "checkpoints") if storage.is_folder(folder / "checkpoints") else []
    return bool(checkpoints) or any(record.step for record in read_records(folder / "records.jsonl")[0])


def _discard_unstarted(folder: Path) -> str:
    """Removes the records of a job that made no step from the run folder. Returns '': the run is not extended."""
    from meshwright.spec.record import EVENTS_FILE_NAME

    for name in ("records.jsonl", EVENTS_FILE_NAME):
        storage.remove_if_possible(folder / name)
    return ""


def _compare_with_begun(folder: Path, launch: LaunchSpec) -> str:
    """Compares `launch` with the job of the run folder. Returns a note if it extends the run, otherwise ''.

    Raises: InputError if the folder belongs to another job that has made a step, or to another version.
    """
    from meshwright.core.codec import read_run_file
    from meshwright.spec.job import LaunchSpec, describe_extension, job_difference

    path = folder / "launch.json"
    try:
        before = read_run_file(LaunchSpec, path)
        assert before is not None, "launch.json was removed while it was read"
        longer = describe_extension(launch, before)
        other = job_difference(
            launch.but(workload=launch.workload.but(steps=before.workload.steps)) if longer else launch, before
        )
    except InputError as error:
        why = str(error).removeprefix(f"{path}: ")
        raise InputError(
            Message(
                "run {folder!r} was begun by another version, or its launch.json is damaged ({why}): go on with "
                "that version, or choose another --run",
                folder=str(folder),
                why=why,
            )
        ) from None
    if other and not has_progress(folder):
        longer = _discard_unstarted(folder)
    elif other:
        raise InputError(
            Message(
                "run {folder!r} belongs to another job: {other}; choose another --run, or repeat its options",
                folder=str(folder),
                other=other,
            )
        )
    return longer


def write_run_folder(folder: Path, launch: LaunchSpec, choice: PlanChoice) -> str:
    """Writes job.json, plan.json, estimate.json and launch.json to the run folder, each atomically. Returns a note to
    print if the launch extends the run by more steps; otherwise an empty string. The event log records the extension.

    A model without an estimate has no job.json and no estimate.json.

    Raises: InputError if the folder belongs to another job that has made a step, or has data but no readable
        launch.json.
    """
    from meshwright.core.errors import InputError
    from meshwright.elastic.event_log import record_event
    from meshwright.report.run import read_records

    longer = ""
    if storage.is_present(folder / "launch.json"):
        longer = _compare_with_begun(folder, launch)
    elif has_progress(folder):
        raise InputError(
            Message(
                "run {folder!r} has records or checkpoints but no launch.json: not a run of `meshwright train`; "
                "choose another --run",
                folder=str(folder),
            )
        )
    written = {"job": choice.question, "plan": choice.plan, "estimate": choice.estimate, "launch": launch}
    for name, content in written.items():
        if content is not None:
            with storage.failures_as_one_line(folder / f"{name}.json"):
                storage.replace_file(folder / f"{name}.json", content.to_json() + "\n")
    if longer:
        done = read_records(folder / "records.jsonl")[0]
        step = max((record.step for record in done), default=0)
        record_event(folder, lambda _: None, kind="run_extended", step=step, cause=longer)
    return longer
