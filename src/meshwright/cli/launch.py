"""`meshwright launch`: files for torchrun, Slurm or Kubernetes: one process on each node."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from meshwright.cli.options import (
    JobOptions,
    JobPath,
    Language,
    count_option,
    print_note,
    print_output,
    search_progress,
)
from meshwright.core.files import write_atomically
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate

if TYPE_CHECKING:
    from meshwright.elastic.launch.submission import JobSubmission
    from meshwright.planner.inputs.job import JobFile
    from meshwright.spec.job import Job, LaunchSpec, ModelSource

LAUNCH_FILES = {"torchrun": "torchrun.sh", "slurm": "slurm.sbatch", "kubernetes": "kubernetes.yaml"}


@Parameter(name="*")
@dataclass(frozen=True)
class NodeOptions:
    """The nodes of a job, their devices and their network."""

    min_nodes: Annotated[
        int | None,
        count_option("minimum number of nodes to run with if others are lost or not yet available; default: all"),
    ] = None
    interface: Annotated[
        str,
        Parameter(
            help=(
                "network interface between the nodes, such as eth0; empty: the interface of each "
                "node's route to the leader node"
            )
        ),
    ] = ""
    memory: Annotated[
        str,
        Parameter(
            help=(
                "host memory per node, such as 512GiB; empty: all of it (slurm), 80 % of the cluster "
                "description (kubernetes)"
            )
        ),
    ] = ""
    select: Annotated[
        str,
        Parameter(
            help=(
                "GPU type (slurm: h100) or node label (kubernetes: KEY=VALUE); for heterogeneous "
                "nodes one per type, joined by +"
            )
        ),
    ] = ""


@Parameter(name="*")
@dataclass(frozen=True)
class KubernetesOptions:
    """The settings for Kubernetes. `image` also applies to Slurm."""

    image: Annotated[
        str,
        Parameter(help="container image with meshwright; kubernetes: required; slurm: needs pyxis"),
    ] = ""
    claim: Annotated[str, Parameter(help="kubernetes: the persistent volume claim that all nodes share")] = ""
    mount: Annotated[
        str, Parameter(help="kubernetes: mount path of the shared volume; relative paths of the job start there")
    ] = "/data"
    resource: Annotated[
        str, Parameter(help="kubernetes: resource name of the devices; empty: the name that their vendor uses")
    ] = ""
    rdma: Annotated[
        str,
        Parameter(help="kubernetes: resource and number of RDMA devices per pod, such as rdma/hca=1; empty: TCP only"),
    ] = ""
    tolerate: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help=(
                "kubernetes: a tolerated taint, KEY[=VALUE][:EFFECT], repeatable; the taint of the "
                "devices is always tolerated"
            ),
        ),
    ] = ()


@Parameter(name="*")
@dataclass(frozen=True)
class SlurmOptions:
    """The settings for Slurm."""

    partition: Annotated[str, Parameter(help="slurm: the partition")] = ""
    hours: Annotated[float, Parameter(help="slurm: time limit in hours; 0: the limit of the partition")] = 0.0
    account: Annotated[str, Parameter(help="slurm: the account to charge")] = ""
    qos: Annotated[str, Parameter(help="slurm: the quality of service")] = ""
    mounts: Annotated[
        str,
        Parameter(
            help="slurm: additional container mounts, FROM:TO joined by commas; the job's folder is always mounted"
        ),
    ] = ""


@Parameter(name="*")
@dataclass(frozen=True)
class LengthOptions:
    """The length of the run, in steps or in tokens, and the language of the output."""

    steps: Annotated[int | None, count_option("total number of optimizer steps")] = None
    tokens: Annotated[str | None, Parameter(help="tokens of the whole run instead of --steps, such as 300B")] = None
    lang: Language = None


def launch(
    job: JobPath = None,
    /,
    *,
    shared: JobOptions = JobOptions(),  # noqa: B008
    on: Annotated[
        Literal["torchrun", "slurm", "kubernetes"], Parameter(help="launcher that starts the processes")
    ] = "torchrun",
    length: LengthOptions = LengthOptions(),
    nodes: NodeOptions = NodeOptions(),
    save: Annotated[Path | None, Parameter(help="output folder of the files; default: print the script")] = None,
    pods: KubernetesOptions = KubernetesOptions(),
    queue: SlurmOptions = SlurmOptions(),
) -> int:
    """Write the files that start a job: one process on each node, which starts, restarts and rejoins its ranks.

    Try: meshwright launch --model llama-7b --cluster 4x8:h100 --data tokens.npy --tokens 100B --on slurm --save launch/
    """
    from meshwright.elastic.launch.quoting import check_single_line, shell_word
    from meshwright.elastic.launch.submission import JOB_FILE

    remark = partial(print_note, language=(language := choose_language(length.lang, os.environ)))
    write = _file_writer(on, pods, queue)
    file = with_length(shared.job_file(job), length)
    start = build_submission(file, nodes, language, remark)
    said = json.dumps(file.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"
    where = check_single_line("--save", f"{save}/{JOB_FILE}" if save else JOB_FILE)
    text = write(start, where, said)
    if save is None:
        print_output(text.rstrip("\n"))
        remark(
            Message(
                "the script is not saved: --save FOLDER writes it to the folder, with the job file {job_file}",
                job_file=JOB_FILE,
            )
        )
        return 0
    for why in start.about[1:]:
        remark(why)
    save.mkdir(parents=True, exist_ok=True)
    for name, content in (*(((JOB_FILE, said),) if on != "kubernetes" else ()), (LAUNCH_FILES[on], text)):
        write_atomically(save / name, content, private=True)  # the file may contain the token
        remark(Message("wrote {path}", path=save / name))
    secret = "MESHWRIGHT_TOKEN=SECRET " if start.is_several else ""
    first = {"slurm": "sbatch", "kubernetes": "kubectl apply -f", "torchrun": f"{secret}bash"}[on]
    words = f"{first} {shell_word(str(save / LAUNCH_FILES[on]))}"
    remark(
        Message(
            "next, on each machine: {words} NUMBER FIRST (NUMBER: its index from 0, FIRST: host name of machine 0)",
            words=words,
        )
        if on == "torchrun" and start.is_several
        else Message("next: {words}", words=words)
    )
    return 0


def _file_writer(on: str, pods: KubernetesOptions, queue: SlurmOptions) -> Callable[[JobSubmission, str, str], str]:
    """Returns the function that generates the launch file for the launcher `on`. Its arguments are a submission, the
    path of the job file, and the text of the job file. The options are checked at once, before the plan search.

    Raises: InputError if an option of Kubernetes is missing or an option is invalid.
    """
    from meshwright.core.errors import InputError
    from meshwright.elastic.launch import kubernetes, slurm, torchrun
    from meshwright.elastic.launch.quoting import to_yaml

    if on == "torchrun":
        return lambda start, where, said: torchrun.node_script(start, where)
    if on == "slurm":
        requested = slurm.SlurmRequest(queue.partition, queue.hours, queue.account, queue.qos, pods.image, queue.mounts)
        return lambda start, where, said: slurm.batch_script(start, where, requested)
    if not (pods.image and pods.claim):
        raise InputError(
            Message(
                "launch --on kubernetes needs --image (a container image with meshwright) and --claim (a volume that "
                "all nodes share)"
            )
        )
    made = kubernetes.PodTemplate(pods.image, pods.claim, pods.mount, pods.resource, pods.rdma, pods.tolerate)

    def text(start: JobSubmission, where: str, said: str) -> str:
        comments = "\n".join((*start.comments(), *start.reasons()))
        return f"{comments}\n" + "---\n".join(map(to_yaml, kubernetes.build_objects(start, said, made)))

    return text


def build_submission(
    file: JobFile, options: NodeOptions, language: str = "en", remark: Callable[[str], None] = lambda line: None
) -> JobSubmission:
    """Builds the submission of a job. Also searches the plan and builds the model on the meta device: a job that cannot
    run fails here, and not in the queue. `remark` receives notes for the user."""
    from meshwright.cli.launch_plan import build_launch, build_model_source, choose_plan, run_folder_of
    from meshwright.elastic.launch.submission import JobSubmission, NodeRequest, network_settings, node_sets
    from meshwright.planner.inputs.job import resolve_cluster

    cluster = resolve_cluster(file.cluster)
    source = build_model_source(file)
    folder, sets = run_folder_of(file, source), node_sets(cluster, NodeRequest(options.memory, options.select))
    start = JobSubmission(
        name=folder.name,
        sets=sets,
        min_nodes=sum(each.nodes for each in sets) if options.min_nodes is None else options.min_nodes,
        folder=str(folder),
        grace=file.run.grace_period,
        settings=network_settings(cluster, options.interface),
    )
    check_model_builds(file, source, remark)
    with search_progress(language):
        choice = choose_plan(file, None, None, os.environ, None)
    if choice.question is not None and start.min_nodes < start.nodes:
        check_fewest_nodes(choice.question, start.min_nodes)
    ready = build_launch(file, source, folder, choice)
    lines = (*choice.why, work_summary(file, ready))
    return replace(
        start, about=("Written by `meshwright launch`.", *(translate(line, language).strip() for line in lines))
    )


def check_fewest_nodes(job: Job, min_nodes: int) -> None:
    """Checks that a plan fits on `min_nodes` nodes, because a run that loses nodes would otherwise end.

    Raises: InputError if no plan fits on them.
    """
    from meshwright.core.errors import InputError
    from meshwright.planner.search.infeasible import fits

    groups = (job.cluster.groups[0].but(nodes=min_nodes),)
    fewer = job.but(cluster=job.cluster.but(groups=groups), pins=job.workload.fixed)
    if not fits(fewer, runnable=True):
        raise InputError(
            Message(
                "--min-nodes {min_nodes}: no plan fits on {min_nodes:count node}, so a run that loses the others would "
                "end; a larger number is needed (meshwright fit states the smallest cluster)",
                min_nodes=min_nodes,
            )
        )


def with_length(file: JobFile, length: LengthOptions) -> JobFile:
    """Returns the job with the number of steps of `length`, or unchanged without options.

    Raises: InputError if both options are set, or if `tokens` is not a number of tokens.
    """
    from meshwright.core.errors import InputError
    from meshwright.planner.inputs.job import resolve_job
    from meshwright.planner.search.run_cost import parse_token_count

    steps = length.steps
    if length.tokens is not None:
        if steps is not None:
            raise InputError(Message("--steps and --tokens both set the length of the run: leave one out"))
        total = parse_token_count(length.tokens)
        work = file.workload if isinstance(file.described, str) else resolve_job(file).workload
        steps = math.ceil(total / work.tokens)
    if steps is None:
        return file
    checked = file.workload.but(steps=steps)  # `model_copy` does not validate, but remembers which fields are defaults
    fields = {"steps": checked.steps}
    return file.model_copy(update={"workload": file.workload.model_copy(update=fields)})


def work_summary(file: JobFile, ready: LaunchSpec) -> Message:
    """Returns the line with the steps and the data of the job, and which of them are defaults. It is a warning if a
    model that is not tiny would train on the built-in data."""
    from meshwright.cli.launch_plan import TINY_LANGUAGE_MODELS

    work, source = ready.workload, file.data.source
    steps: Message | str = Message("{steps:count step}", steps=work.steps)
    if "steps" not in file.workload.model_fields_set:
        steps = Message("{steps} (default; --steps or --tokens sets them)", steps=steps)
    total = work.steps * work.tokens
    if source != "stdlib":
        return Message(
            "trains {steps}, {tokens:parameters} tokens, on {data}",
            steps=steps,
            tokens=total,
            data=source if isinstance(source, str) else ", ".join(source),
        )
    if "source" in file.data.model_fields_set or ready.model.name in TINY_LANGUAGE_MODELS:
        return Message(
            "trains {steps}, {tokens:parameters} tokens, on stdlib, the sources of Python's standard library",
            steps=steps,
            tokens=total,
        )
    return Message(
        "warning: no data is named: trains {steps}, {tokens:parameters} tokens, on the sources of Python's standard "
        "library, which only tests the cluster; --data sets your own",
        steps=steps,
        tokens=total,
    )


def check_model_builds(file: JobFile, source: ModelSource, remark: Callable[[str], None]) -> None:
    """Checks that ranks can build the model, by building it on the meta device. A reference model gets only one block.
    Without torch on this machine, nothing is checked and `remark` receives a note.

    Raises: InputError if the model cannot be built.
    """
    if find_spec("torch") is None:
        remark(Message("torch is not installed here: whether the ranks can build the model was not checked"))
        return
    if file.described is not None and not isinstance(file.described, str):
        return  # the planner has already built and traced the model on the meta device
    import torch

    from meshwright.models.registry import build_reference_model
    from meshwright.train.meta_init import init_on_meta
    from meshwright.train.model import build_model

    if source.sizes:
        with torch.device("meta"):
            build_reference_model({**source.sizes, **({"layers": 1} if source.sizes.get("layers") else {})})
    else:
        with init_on_meta():
            build_model(source, 0, weights=False)
