"""From what a person wrote to a launch: the question, its plan and price, how ranks build the model. Shared by the commands that run ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.base.errors import InputError
from meshwright.base.files import write_whole
from meshwright.cli.options import Shared

if TYPE_CHECKING:
    from meshwright.intake.job import JobFile
    from meshwright.spec.data import Data
    from meshwright.spec.estimate import Estimate
    from meshwright.spec.job import Job
    from meshwright.spec.launch import Launch, ModelSource
    from meshwright.spec.plan import Plan
    from meshwright.words.say import Sentence

EMBEDDED = Path(__file__).parents[1] / "catalog" / "default.yaml"
BYTE_VOCABULARY = 258
LANGUAGE = ("llama-tiny", "gpt2-tiny", "bert-tiny")


class Choice(NamedTuple):
    """A plan, its price, and why it. `question` and `estimate` are None for a model that cannot be run without memory."""

    question: Job | None
    plan: Plan
    estimate: Estimate | None
    why: list[Sentence]


def read_file(path: Path | None, shared: Shared) -> JobFile:
    """The job file with the options over it; without one the embedded job, which suits small models of language.

    Without the tokenizers library there are only bytes: then the embedded model's vocabulary is theirs.
    """
    embedded = path is None and (shared.model or "llama-tiny") in LANGUAGE
    try:
        file = shared.job_file(EMBEDDED if embedded else path)
    except InputError as error:  # the embedded job is right: what is wrong was said on the command line
        raise InputError(str(error).replace(f"{EMBEDDED}: ", "")) from None
    library = importlib.util.find_spec("tokenizers") is not None
    if embedded and not library:
        file = file.but(model={"sizes": {"vocab": BYTE_VOCABULARY}, **file.model.model_dump(exclude_defaults=True)})
    return file


def source_of(file: JobFile) -> ModelSource:
    """How the ranks build the model that the planner only counts."""
    from meshwright.intake.job import sizes_of
    from meshwright.intake.models import is_module
    from meshwright.spec.launch import ModelSource

    name = file.model.source
    path = Path(name).expanduser()
    if file.model.module or (is_module(name) and not path.exists()):
        return ModelSource(name=name, module=name, rules=file.model.rules)
    if path.is_dir():
        return ModelSource(name=path.resolve().name, folder=str(path.resolve()), rules=file.model.rules)
    sizes = {key: value for key, value in sizes_of(file.model).model_dump().items() if value is not None}
    return ModelSource(name=path.stem if path.is_file() else name, sizes=sizes)


def folder_of(file: JobFile, source: ModelSource) -> Path:
    """Where the run lies: as it says, or runs/ and the name of the model."""
    return Path(file.run.folder or "runs/" + (re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.") or "model")).expanduser()


def choose(file: JobFile, pin: str | None, folder: Path | None, environment: Mapping[str, str], world: int | None) -> Choice:
    """The plan that is given, that the run folder has been trained with, or that the search finds.

    `world` is the number of ranks that another launcher has started; None when they are ours to start.
    """
    from meshwright.cost.step import estimate as price
    from meshwright.intake.job import resolve
    from meshwright.intake.plans import parse_pins
    from meshwright.search.explain import explain
    from meshwright.search.rank import search
    from meshwright.words.say import tell

    if world is not None and file.cluster.name == "local" and not file.cluster.path and not file.cluster.groups:
        here = int(environment.get("LOCAL_WORLD_SIZE", environment.get("SLURM_NTASKS_PER_NODE", world)))
        file = file.but(cluster={"name": f"local:{here}"})
    if isinstance(file.described, str):
        return _unpriced(file, file.described, world)
    question = resolve(file)
    if world is not None:
        question = _over(question, world)
    if pin:
        question = question.but(pins={**question.pins, **parse_pins(pin)})
    given = _named(file, question, folder)
    plan = given or (_before(folder, question) if folder is not None and question.pins == question.workload.fixed else None)
    if plan is not None:
        estimate = price(question, plan)
        expected = {"seconds": estimate.time.step, "size": estimate.memory.total}
        why = [tell("choice.given" if given else "choice.before", plan=plan.name, **expected), *_unfit(estimate)]
    else:
        answer = search(question, 1, runnable=True)
        plan, estimate = answer.chosen.plan, answer.chosen.estimate
        first, *rest = explain(question, answer)
        why = [tell("choice.found", why=first), *(tell("choice.also", why=line) for line in rest)]
        why += _without_the_slow(question, estimate.time.step) if world is not None else []
    return Choice(question, plan, estimate, [_asked(question), *why, *_instead(folder, plan)])


def _named(file: JobFile, question: Job, folder: Path | None) -> Plan | None:
    """The plan that is given; one that says no bucket has that of the run, where it is the run's, or of the search."""
    from meshwright.cost.hiding import bucketed

    plan = file.given_plan()
    if plan is None or "bucket" in plan.model_fields_set:
        return plan
    before = _before(folder, question) if folder is not None else None
    return before if before is not None and before.name == plan.name else bucketed(question, plan)


def _unfit(estimate: Estimate) -> list[Sentence]:
    """Of a plan that is run as asked and has no room: how much is missing, and where."""
    from meshwright.words.say import tell
    from meshwright.words.verdict import verdict

    if estimate.fits:
        return []
    notes = [tell("choice.note", note=estimate.notes[-1])] if estimate.crowded else []
    return [tell("choice.unfit", verdict=verdict(estimate)), *notes]


def _without_the_slow(question: Job, step: float) -> list[Sentence]:
    """Ranks that were started all take part. Where a plan without a group of them is faster, a line says so."""
    from meshwright.search.unlike import plans
    from meshwright.words.say import tell

    score, plan = next(iter(plans(question, 1)), (step, None))
    if plan is None or score >= step or len(set(plan.placement)) in (0, len(question.cluster.groups)):
        return []
    groups = ", ".join(str(at) for at in range(len(question.cluster.groups)) if at not in plan.placement)
    return [tell("choice.without", groups=groups, plan=plan.name, seconds=score)]


def _asked(question: Job) -> Sentence:
    from meshwright.words.say import tell

    model, cluster, work = question.model, question.cluster, question.workload
    values = {"model": model.name, "parameters": model.parameters, "ranks": cluster.devices, "cluster": cluster.name}
    return tell("choice.asked", **values, batch=work.batch, sequence=work.sequence)


def _before(folder: Path, question: Job) -> Plan | None:
    """The plan that the run folder has, so that going on is bit-identical; None where it cannot run on these devices."""
    from meshwright.base.codec import read
    from meshwright.base.errors import InputError
    from meshwright.spec.plan import Plan
    from meshwright.spec.rules import check_plan

    path = folder / "plan.json"
    if not path.is_file():
        return None
    plan = read(Plan, path)
    try:
        check_plan(question, plan)
    except InputError:
        return None
    return plan


def _instead(folder: Path | None, plan: Plan) -> list[Sentence]:
    """That the run folder was trained under another plan."""
    from meshwright.base.codec import read
    from meshwright.base.errors import InputError
    from meshwright.spec.plan import Plan
    from meshwright.words.say import tell

    with contextlib.suppress(InputError, OSError):
        before = read(Plan, folder / "plan.json") if folder is not None and (folder / "plan.json").is_file() else plan
        return [tell("choice.instead", plan=before.name)] if before != plan else []
    return []


def _over(question: Job, world: int) -> Job:
    """The cluster of one machine as many times as it takes for `world` ranks."""
    from meshwright.base.errors import InputError

    cluster = question.cluster
    if cluster.devices == world:
        return question
    nodes, rest = divmod(world, cluster.devices)
    if cluster.name.startswith("local") and not rest:
        group = cluster.groups[0]
        return question.but(cluster=cluster.but(groups=(group.but(nodes=nodes),)))
    raise InputError(f"{world} of the {cluster.devices} ranks of cluster {cluster.name!r} were started; start as many as it has devices")


def _unpriced(file: JobFile, reason: str, world: int | None) -> Choice:
    """A model that only a real run can size: the plan must be given, or it is data parallel."""
    from meshwright.base.errors import InputError
    from meshwright.intake.job import cluster_from
    from meshwright.spec.plan import Plan
    from meshwright.spec.rules import workload_faults
    from meshwright.words.say import tell

    cluster = cluster_from(file.cluster)
    devices = world or cluster.devices
    plan = file.given_plan() or Plan(dp_replicate=devices, micro_batch=max(file.workload.exact, 1))
    if plan.world != devices:
        raise InputError(f"plan {plan.name} is for {plan.world} ranks but there are {devices} devices")
    for fault in workload_faults(plan, file.workload, cluster):
        raise InputError(f"plan {plan.name}: {fault.message}")
    return Choice(None, plan, None, [tell("choice.unpriced", plan=plan.name, reason=reason)])


def launch_of(file: JobFile, source: ModelSource, folder: Path, choice: Choice) -> Launch:
    """What the ranks are told. Raises InputError when the batch does not divide."""
    from meshwright.cost.proof import proof_price
    from meshwright.spec.launch import Launch
    from meshwright.spec.proof import ProofPrice

    question, step = choice.question, choice.estimate.time.step if choice.estimate is not None else 0.0
    workload = question.workload if question is not None else file.workload
    choice.plan.micro_batches(workload.batch)
    return Launch(
        model=source,
        workload=workload,
        data=data_of(file.data, source),
        plan=choice.plan,
        run=file.run.but(folder=str(folder.resolve())),
        parameters=question.model.parameters if question is not None else 0,
        predicted=choice.estimate.per_stage if choice.estimate is not None else (),
        proof=proof_price(question, choice.plan, step) if question is not None and step else ProofPrice(),
    )


def data_of(data: Data, source: ModelSource) -> Data:
    """A model folder with a tokenizer of its own is trained with that one, unless another is named."""
    own = bool(source.folder) and Path(source.folder, "tokenizer.json").is_file()
    return data.but(tokenizer=source.folder) if own and data.tokenizer == "auto" else data


def short_of_room(plan: Plan, estimate: Estimate, folder: Path, free: float, blocks: int = 0) -> str:
    """What is to be told where the files of the plan's ranks may not fit into `free` bytes of `folder`: the shares of them that would, or of activations how
    many of the model's `blocks` of each stage; else nothing. No refusal: ranks that hold less than the fullest take less, and the first step says what is missing."""
    from meshwright.base.units import show_bytes
    from meshwright.spec.choices import ACTIVATIONS, FILES

    kinds, need = [what for what in plan.offload if what in FILES], estimate.in_files * plan.world
    if not kinds or need <= free:
        return ""
    whole = {what: plan.share_of(what) for what in kinds}
    if kinds[-1] in ACTIVATIONS:
        layers = plan.offload_layers or max(plan.stage_layers(blocks), default=0) if blocks else 0
        whole = {kinds[-1]: layers if len(kinds) == 1 else 0}
    less = {what: int(share * free / need) for what, share in whole.items()}
    fits = ".".join(f"off-{what}{share}" for what, share in less.items()) + " would fit, " if all(less.values()) else ""
    return (
        f"offload folder {str(folder)!r} has {show_bytes(free)}, {plan.name} needs up to {show_bytes(need)} in it: {fits}"
        f"or make room, or give another folder (--offload-to)"
    )


def apart(question: Job) -> list[str]:
    """What the cluster of a job says and this machine, which is to start all of its ranks, does not; told before they start."""
    from meshwright.intake.local import cuda_cards

    cluster, found = question.cluster, []
    nodes, devices = sum(group.nodes for group in cluster.groups), dict.fromkeys(group.device.name for group in cluster.groups)
    if nodes > 1:
        found.append(
            f"cluster {cluster.name!r} has {nodes} nodes, and all of its ranks start on this one: `meshwright launch` writes what starts them on each"
        )
    if all(name.lower().startswith("cpu") for name in devices) == bool(cuda_cards()):
        here = "CUDA devices" if cuda_cards() else "cores"
        found.append(
            f"cluster {cluster.name!r} has {' and '.join(devices)}, this machine has {here}: what is predicted is not what its ranks will take"
        )
    return found


def write_run(folder: Path, launch: Launch, choice: Choice) -> str:
    """The nouns of a run into its folder, each whole or not at all; what a person is to be told of it. Raises InputError when the folder is another job's.
    More steps than it was begun with are the same job: what they change is told, and written down."""
    from meshwright.base.codec import read
    from meshwright.base.errors import InputError
    from meshwright.elastic.journal import Journal
    from meshwright.report.run import read_records
    from meshwright.spec.launch import Launch, difference, lengthened

    path, longer = folder / "launch.json", ""
    if path.is_file():
        try:
            before = read(Launch, path)
            longer = lengthened(launch, before)
            other = difference(launch.but(workload=launch.workload.but(steps=before.workload.steps)) if longer else launch, before)
        except InputError as error:
            why = str(error).removeprefix(f"{path}: ")
            raise InputError(
                f"run {str(folder)!r} was begun by another version, or its launch.json is damaged ({why}): go on with that version, or choose another --run"
            ) from None
        if other:
            raise InputError(f"run {str(folder)!r} holds another job: {other}; choose another --run, or give the same job")
    elif (folder / "checkpoints").is_dir() or (folder / "records.jsonl").is_file():
        raise InputError(
            f"run {str(folder)!r} has records or checkpoints but no launch.json: not a run of `meshwright train`; choose another --run"
        )
    nouns = {"job": choice.question, "plan": choice.plan, "estimate": choice.estimate, "launch": launch}
    for name, noun in nouns.items():
        if noun is not None:
            write_whole(folder / f"{name}.json", noun.to_json() + "\n")
    if longer:
        done = read_records(folder / "records.jsonl")[0] if (folder / "records.jsonl").is_file() else []
        Journal(folder, lambda _: None).write(kind="longer", step=max((record.step for record in done), default=0), cause=longer)
    return longer
