"""Launch files for one node, unlike nodes, other vendors, networks, accounts and containers: golden files, each valid
for its target."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import answering_once
from kubeflow_trainer_api import models

from meshwright.cli.launch import KubernetesOptions, NodeOptions, SlurmOptions, build_submission, launch
from meshwright.cli.options import JobOptions
from meshwright.core.errors import InputError
from meshwright.elastic.launch import kubernetes, slurm, torchrun
from meshwright.elastic.launch.quoting import to_yaml
from meshwright.elastic.launch.submission import JOB_FILE, JobSubmission, NodeRequest, network_settings, node_sets
from meshwright.planner.inputs.job import resolve_cluster
from meshwright.planner.search import ranking

GOLDEN = Path(__file__).parent / "golden" / "launch"
PODS = kubernetes.PodTemplate(
    "registry.example/mesh:1", "shared", rdma="rdma/hca=8", tolerate=("dedicated=training:NoSchedule", "spot")
)
QUEUE = slurm.SlurmRequest("gpu", 1.5, "physics", "long", "nvcr.io#nvidia/pytorch:25.10-py3", "/data:/data")
CASES: dict[str, tuple[str, NodeOptions]] = {
    "four": ("4x8:h100@ib-ndr", NodeOptions(min_nodes=2, interface="eth1", memory="512GiB")),
    "one": ("1x8:h100", NodeOptions()),
    "unlike": ("2x8:h100+2x4:h100", NodeOptions()),
    "kinds": ("1x8:h100+2x8:a100-80gb", NodeOptions()),
    "amd": ("2x8:mi300x", NodeOptions()),
    "cores": ("2x4:cpu@ethernet-100", NodeOptions()),
}
SELECT = {"slurm": "h100+a100", "kubernetes": "nvidia.com/gpu.product=H100+nvidia.com/gpu.product=A100"}


@pytest.fixture(scope="module", autouse=True)
def searched_once() -> Iterator[None]:
    """Many of them ask for a plan of the same large job."""
    with answering_once(ranking, "search_plans"):
        yield


def start_for(case: str, target: str) -> JobSubmission:
    """As the command makes it, without the words of the plan, which another plan would change."""
    text, asked = CASES[case]
    cluster = resolve_cluster(JobOptions(model="llama-tiny", cluster=text).job_file(None).cluster)
    sets = node_sets(cluster, NodeRequest(asked.memory, SELECT.get(target, "") if case == "kinds" else ""))
    min_nodes = sum(each.nodes for each in sets) if asked.min_nodes is None else asked.min_nodes
    about = ("Written by `meshwright launch`.",)
    return JobSubmission(
        "llama_tiny", sets, min_nodes, "runs/llama-tiny", 25.0, network_settings(cluster, asked.interface), about
    )


def text_for(case: str, target: str) -> str:
    start = start_for(case, target)
    if target == "torchrun":
        return torchrun.node_script(start, JOB_FILE)
    if target == "slurm":
        return slurm.batch_script(start, JOB_FILE, QUEUE if case == "four" else slurm.SlurmRequest())
    pods = PODS if case == "four" else kubernetes.PodTemplate("mesh:1", "shared")
    text = "---\n".join(map(to_yaml, kubernetes.build_objects(start, '{\n "model": {"name": "llama-tiny"}\n}\n', pods)))
    return re.sub(r'token: "[0-9a-f]{64}"', 'token: "TOKEN"', text)


@pytest.mark.parametrize("target", ["torchrun", "slurm", "kubernetes"])
@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_the_golden_folder(case: str, target: str) -> None:
    """MESHWRIGHT_FREEZE=1 writes them anew."""
    path, text = GOLDEN / f"{case}.{target}", text_for(case, target)
    if os.environ.get("MESHWRIGHT_FREEZE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.*")), ids=lambda path: path.name)
def test_golden_files_are_valid_for_their_target(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".kubernetes":
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
        return
    *_, jobset = yaml.safe_load_all(text)
    read = models.JobsetV1alpha2JobSet.from_dict(jobset)
    assert read is not None and read.to_dict() == jobset  # a field that the schema does not know would be gone


def numbers_of(case: str) -> dict[int, tuple[str, ...]]:
    """What the pods of each set run, by the number of the first of them."""
    *_, jobset = yaml.safe_load_all(text_for(case, "kubernetes"))
    sets = [each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]]
    containers = [each["template"]["spec"]["containers"][0] for each in sets]
    firsts = [sum(each["completions"] for each in sets[:at]) for at in range(len(sets))]
    return {
        first: tuple(word.replace("$$", "$") for word in container["command"])
        for first, container in zip(firsts, containers, strict=True)
    }


def test_every_pod_of_unlike_nodes_knows_its_number_among_all() -> None:
    commands = numbers_of("unlike")
    assert list(commands) == [0, 2] and commands[0][0] == "meshwright"
    shell = ["/bin/sh", "-c", *commands[2][2:3], "node", "sh", "-c", 'printf %s "$RANK"']
    assert commands[2][:2] == ("/bin/sh", "-c") and commands[2][3] == "node"
    for index in range(2):
        done = subprocess.run(
            shell, env={"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": str(index)}, capture_output=True, check=True
        )
        assert done.stdout.decode() == str(2 + index)


STUBS = """
scontrol() { if [ "$1" = show ]; then printf '%s\\n' "first of $3"; else echo "requeue $2"; fi; }
srun() {
  while [ "$1" != meshwright ] && [ "$1" != bash ]; do case "$1" in --het-group=*) group=${1#*=};; esac; shift; done
  for ((task = 0; task < 2; task++)); do
    ( export SLURM_PROCID=$task SLURM_NTASKS=2; "$@" ) | sed "s/^/${group:-all} $task: /"
  done
  return $((group == 0 ? 75 : 1))
}
meshwright() { env | grep -E '^(RANK|WORLD_SIZE|MASTER_ADDR|MESHWRIGHT_NODE)=' | sort | tr '\\n' ' '; echo; }
export -f meshwright
SLURM_JOB_ID=7 SLURM_JOB_NODELIST=all SLURM_JOB_NODELIST_HET_GROUP_0=zero SLURM_SUBMIT_DIR=/x
"""


def test_a_heterogeneous_slurm_job_numbers_all_nodes_and_ends_with_the_first_set() -> None:
    text = text_for("unlike", "slurm")
    parts = text.split("#SBATCH hetjob\n")
    assert ["--gpus-per-node=8" in part for part in parts] == [True, False] and "--gpus-per-node=4" in parts[1]
    assert all("#SBATCH --nodes=2\n" in part for part in parts)
    # env replaces the process, so that what it starts has to be a program and not a function
    stubs = (
        STUBS + 'env() { if [ $# -eq 0 ]; then command env; else ( export "$1"; shift; "$@" ); fi; }; export -f env\n'
    )
    script = (stubs + text).replace("exec env ", "env ")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    said = sorted(done.stdout.splitlines())
    shared = "MASTER_ADDR=first of zero MESHWRIGHT_NODE=1"
    expected = [f"{rank // 2} {rank % 2}: {shared} RANK={rank} WORLD_SIZE=4 " for rank in range(4)]
    assert (said, done.returncode) == ([*expected, "requeue 7"], 75), done.stderr


def test_one_node_starts_its_ranks_without_a_token_or_an_address() -> None:
    for target in ("torchrun", "slurm", "kubernetes"):
        text = text_for("one", target)
        assert not re.search("TOKEN|MASTER_ADDR|RANK|MESHWRIGHT_NODE", text), target
    assert "exec meshwright train" in text_for("one", "torchrun")


@pytest.mark.parametrize("target", ["torchrun", "slurm", "kubernetes"])
def test_a_job_of_one_node_is_written(target: Any, tmp_path: Path) -> None:
    assert (
        launch(
            shared=JobOptions(model="llama-7b", cluster="1x8:h100"),
            on=target,
            save=tmp_path,
            pods=KubernetesOptions(image="mesh:1", claim="c"),
        )
        == 0
    )
    assert len(list(tmp_path.iterdir())) == (1 if target == "kubernetes" else 2)


def test_resources_are_those_of_the_vendor_with_memory_and_rdma() -> None:
    def container(case: str) -> dict[str, Any]:
        *_, jobset = yaml.safe_load_all(text_for(case, "kubernetes"))
        pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        return {**pod["containers"][0], "tolerations": pod.get("tolerations")}

    four = container("four")
    assert four["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/hca": "8", "memory": f"{512 * 1024}Mi"}
    assert four["resources"]["requests"] == four["resources"]["limits"] and four["securityContext"] == {
        "capabilities": {"add": ["IPC_LOCK"]}
    }
    assert [each["key"] for each in four["tolerations"]] == ["nvidia.com/gpu", "dedicated", "spot"]
    amd, cores = container("amd"), container("cores")
    assert amd["resources"]["limits"]["amd.com/gpu"] == "8" and amd["tolerations"][0]["key"] == "amd.com/gpu"
    assert cores["resources"]["limits"]["cpu"] == "4" and cores["tolerations"] is None


DESCRIBED = """
name: mine
network: {name: ib, bandwidth: 25 GB/s}
groups: [{nodes: 2, devices: 8, device: {name: my-gpu, memory: 80 GiB, bandwidth: 2 TB/s, peak: {bf16: 900 TFLOP/s, \
fp32: 60 TFLOP/s}}, link: {name: nv, bandwidth: 450 GB/s}}]
"""


@pytest.mark.parametrize(
    ("cluster", "more", "words"),
    [
        ("2x8:gaudi3", {}, "gaudi3 can be planned for but not trained on"),
        *(
            pytest.param(f"2x8:{name}", {}, "can be planned for but not trained on: training", marks=pytest.mark.soak)
            for name in ("tpu-v5p", "ascend-910b", "trainium2")
        ),
        ("1x8:h100+1x8:mi300x", {}, "devices of several vendors"),
        ("1x8:h100+1x8:a100-80gb", {"on": "slurm"}, r"--select h100\+a100"),
        ("1x8:h100+1x8:a100-80gb", {"on": "slurm", "nodes": NodeOptions(select="h100")}, "2 sets of equal nodes"),
        ("2x8:h100", {"on": "slurm", "nodes": NodeOptions(select="a=b")}, "Slurm selects nodes by the name"),
        ("2x8:h100", {"on": "kubernetes", "nodes": NodeOptions(select="h100")}, "labels of the form KEY=VALUE"),
        ("2x8:h100", {"nodes": NodeOptions(select="$(x)")}, "neither a name nor a label"),
        ("2x8:h100", {"nodes": NodeOptions(memory="much")}, "--memory: expected a quantity"),
        ("2x8:h100", {"nodes": NodeOptions(memory="-1GiB")}, "at least 1 MiB"),
        ("mine", {"on": "kubernetes"}, "--resource nvidia.com/gpu"),
        (
            "2x8:h100",
            {"on": "kubernetes", "pods": {"rdma": "rdma/hca"}},
            "--rdma 'rdma/hca' is not of the form NAME=COUNT",
        ),
        ("2x8:h100", {"on": "kubernetes", "pods": {"tolerate": ("a b",)}}, "--tolerate 'a b'"),
        ("2x8:h100", {"on": "slurm", "queue": SlurmOptions(account="a b")}, "--account 'a b'"),
        ("2x8:h100", {"on": "slurm", "queue": SlurmOptions(qos="a;b")}, "--qos 'a;b'"),
        (
            "2x8:h100",
            {"on": "slurm", "pods": {"image": ""}, "queue": SlurmOptions(mounts="/a:/b")},
            "needs a container",
        ),
    ],
)
def test_what_a_scheduler_could_not_start_is_one_line(
    cluster: str, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(DESCRIBED)
    cluster = str(tmp_path / "mine.yaml") if cluster == "mine" else cluster
    more = {**more, "pods": KubernetesOptions(**{"image": "mesh:1", "claim": "c", **more.get("pods", {})})}
    with pytest.raises(InputError, match=words) as error:
        launch(shared=JobOptions(model="llama-7b", cluster=cluster), save=tmp_path / "out", **more)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt3-1.3b", r"hidden \(2048\) must be heads \(24\) times head_dim"),
        ("nowhere:make", "nowhere"),
    ],
)
def test_no_job_is_written_for_a_model_that_cannot_be_built(model: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as error:
        launch(shared=JobOptions(model=model, cluster="16x8:h200"), on="slurm", save=tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_a_run_folder_with_signs_of_yaml_is_the_folder_that_ranks_use(tmp_path: Path) -> None:
    from meshwright.cli.train import RunOptions, _with_run_options

    for name in ("runs/a #b", "runs/a: b", "runs/[a]", "runs/'a'", "runs/é"):
        shared = _with_run_options(JobOptions(model="llama-tiny", cluster="2x8:h100"), RunOptions(run=name))
        file = shared.job_file(None)
        assert file.run.folder == name
        assert replace(build_submission(file, NodeOptions()), about=()).command(JOB_FILE)[4] == name
