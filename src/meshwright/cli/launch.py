"""`meshwright launch`: what torchrun, Slurm or Kubernetes needs to start a job on several nodes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from meshwright.base.files import write_whole
from meshwright.cli.options import JobPath, Language, Shared, note, say

if TYPE_CHECKING:
    from meshwright.intake.job import JobFile
    from meshwright.launch.start import Start

NAMES = {"torchrun": "torchrun.sh", "slurm": "slurm.sbatch", "kubernetes": "kubernetes.yaml"}


@Parameter(name="*")
@dataclass(frozen=True)
class Nodes:
    """Which of them, and over which network."""

    least: Annotated[int | None, Parameter(help="nodes to go on with, at the least, when others are lost or not there yet; else all")] = (
        None
    )
    interface: Annotated[
        str, Parameter(help="network device between the nodes, such as eth0; else each takes that of its route to the one that leads")
    ] = ""


@Parameter(name="*")
@dataclass(frozen=True)
class Pods:
    """What Kubernetes has to be told."""

    image: Annotated[str, Parameter(help="kubernetes: the container image, with meshwright in it")] = ""
    claim: Annotated[str, Parameter(help="kubernetes: the volume claim that all nodes share")] = ""
    mount: Annotated[str, Parameter(help="kubernetes: where that volume lies; relative paths of the job start there")] = "/data"


@Parameter(name="*")
@dataclass(frozen=True)
class Queue:
    """What Slurm has to be told."""

    partition: Annotated[str, Parameter(help="slurm: the partition")] = ""
    hours: Annotated[float, Parameter(help="slurm: the longest time; 0: what the partition allows")] = 0.0


def launch(
    job: JobPath = None,
    /,
    *,
    shared: Shared = Shared(),  # noqa: B008
    on: Annotated[Literal["torchrun", "slurm", "kubernetes"], Parameter(help="what starts the processes")] = "torchrun",
    nodes: Nodes = Nodes(),
    save: Annotated[Path | None, Parameter(help="folder for the files; without one the script is printed")] = None,
    pods: Pods = Pods(),
    queue: Queue = Queue(),
    lang: Language = None,
) -> int:
    """Write what starts a job on several nodes: one process on each, which starts its ranks itself, heals them, and joins again.

    Try: meshwright launch --model llama-7b --cluster 4x8:h100 --on slurm --least 2 --save launch/
    """
    from meshwright.base.errors import InputError
    from meshwright.launch import kubernetes, slurm, torchrun
    from meshwright.launch.quoting import line, shell_word, yaml_of
    from meshwright.launch.start import JOB
    from meshwright.words.say import language_of

    remark = partial(note, language=(language := language_of(lang, os.environ)))
    if on == "kubernetes" and not (pods.image and pods.claim):
        raise InputError(
            "launch --on kubernetes needs --image (a container image with meshwright) and --claim (a volume that all nodes share)"
        )
    file = shared.job_file(job)
    start = start_of(file, nodes, language)
    said = json.dumps(file.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"
    where = f"{save}/{JOB}" if save else JOB
    line("--save", where)
    if on == "slurm":
        text = slurm.script(start, where, queue.partition, queue.hours)
    elif on == "torchrun":
        text = torchrun.script(start, where)
    else:
        text = (
            "\n".join((*start.comments(), *start.reasons()))
            + "\n"
            + "---\n".join(map(yaml_of, kubernetes.objects(start, said, pods.image, pods.claim, pods.mount)))
        )
    if save is None:
        say(text.rstrip("\n"))
        remark(f"not saved: with --save FOLDER it is written there, and the job file beside it as {JOB}")
        return 0
    for why in start.about[1:]:
        remark(why)
    save.mkdir(parents=True, exist_ok=True)
    for name, content in (*(((JOB, said),) if on != "kubernetes" else ()), (NAMES[on], text)):
        write_whole(save / name, content, private=True)  # it may hold the token
        remark(f"wrote {save / name}")
    first = {"slurm": "sbatch", "kubernetes": "kubectl apply -f", "torchrun": "MESHWRIGHT_TOKEN=SECRET bash"}[on]
    words = f"{first} {shell_word(str(save / NAMES[on]))}"
    remark(f"next: {words} NUMBER FIRST" if on == "torchrun" else f"next: {words}")
    return 0


def start_of(file: JobFile, asked: Nodes, language: str = "en") -> Start:
    """What is started for a job: the plan is searched here too, so that nothing is queued that does not fit."""
    from meshwright.base.errors import InputError
    from meshwright.cli.preparation import choose, folder_of, source_of
    from meshwright.intake.job import cluster_from
    from meshwright.launch.settings import settings_of
    from meshwright.launch.start import Start
    from meshwright.words.say import say as said

    cluster, least = cluster_from(file.cluster), asked.least
    kinds = {group.devices for group in cluster.groups}
    nodes = sum(group.nodes for group in cluster.groups)
    if nodes < 2:
        raise InputError(
            f"cluster {cluster.name!r} is one node: `meshwright train` starts its ranks itself; launch is for several, such as 4x8:h100"
        )
    if least is not None and least < nodes and len(kinds) > 1:
        raise InputError(
            f"--least {least}: nodes of {', '.join(map(str, sorted(kinds)))} devices are unlike; only equal ones can stand in for each other"
        )
    source = source_of(file)
    folder = folder_of(file, source)
    choice = choose(file, None, None, os.environ, None)
    accelerator = not cluster.groups[0].device.name.lower().startswith("cpu")
    return Start(
        name=folder.name,
        nodes=nodes,
        least=nodes if least is None else least,
        devices=max(kinds),
        accelerator=accelerator,
        folder=str(folder),
        grace=file.run.grace,
        settings=settings_of(cluster, asked.interface),
        about=("Written by `meshwright launch`.", *(said(line, language).strip() for line in choice.why)),
    )
