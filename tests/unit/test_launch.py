"""The files for launchers: valid by the published schemas, and saying what they have to."""

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import answering_once, cluster, small_job
from kubeflow_trainer_api import models

from meshwright.cli.launch import (
    KubernetesOptions,
    LengthOptions,
    NodeOptions,
    SlurmOptions,
    check_fewest_nodes,
    launch,
)
from meshwright.cli.options import JobOptions
from meshwright.core.errors import InputError, Interrupted
from meshwright.elastic.launch.submission import network_settings
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.search import ranking

BIG = JobOptions(model="llama-7b", cluster="4x8:h100")
SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "exclusive", "gpus-per-node", "partition", "time", "signal", "requeue",
    "no-kill", "open-mode", "output", "mem", "account", "qos",
}  # fmt: skip
"""Long options that the manual of sbatch lists."""


@pytest.fixture(scope="module", autouse=True)
def searched_once() -> Iterator[None]:
    """All of them ask for a plan of the same large job."""
    with answering_once(ranking, "search_plans"):
        yield


def written(folder: Path, on: Any, **more: Any) -> str:
    assert launch(shared=BIG, on=on, save=folder, **more) == 0
    (path,) = [path for path in folder.iterdir() if path.name != "job.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return path.read_text()


def cluster_objects(folder: Path) -> dict[str, dict[str, Any]]:
    text = written(
        folder, "kubernetes", nodes=NodeOptions(min_nodes=2), pods=KubernetesOptions(image="mesh:1", claim="shared")
    )
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def test_the_objects_are_what_their_schemas_say_and_nothing_else(tmp_path: Path) -> None:
    objects = cluster_objects(tmp_path)
    jobset = models.JobsetV1alpha2JobSet.from_dict(objects["JobSet"])
    assert (
        jobset is not None and jobset.to_dict() == objects["JobSet"]
    )  # a field that the schema does not know would be gone
    assert set(objects) == {"Secret", "ConfigMap", "JobSet"}


def test_a_pod_knows_its_number_the_first_one_and_the_token(tmp_path: Path) -> None:
    objects = cluster_objects(tmp_path)
    name, spec = objects["JobSet"]["metadata"]["name"], objects["JobSet"]["spec"]
    (nodes,) = spec["replicatedJobs"]
    job = nodes["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert (
        environment["MASTER_ADDR"]["value"] == f"{name}-{nodes['name']}-0-0.{name}"
        and spec["network"]["enableDNSHostnames"]
    )
    assert environment["WORLD_SIZE"]["value"] == "4" and job["parallelism"] == job["completions"] == 4
    assert environment["MESHWRIGHT_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == objects["Secret"]["metadata"]["name"]
    assert len(objects["Secret"]["stringData"]["token"]) == 64
    assert (
        container["resources"]["limits"] == container["resources"]["requests"]
        and container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    )
    assert container["command"][-1] == "run.min_ranks=16"
    assert environment["PYTORCH_ALLOC_CONF"]["value"] == "expandable_segments:True"
    ignored = [
        rule["onExitCodes"]["values"]
        for rule in job["podFailurePolicy"]["rules"]
        if rule["action"] == "Ignore" and "onExitCodes" in rule
    ]
    assert ignored == [[Interrupted.exit_code]]
    assert json.loads(objects["ConfigMap"]["data"]["job.json"])["model"] == {"name": "llama-7b"}


def test_a_batch_script_is_a_script_with_options_that_sbatch_has(tmp_path: Path) -> None:
    text = written(tmp_path, "slurm", nodes=NodeOptions(min_nodes=2), queue=SlurmOptions(partition="gpu", hours=1.5))
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    lines = text.splitlines()
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH --")
    )
    assert set(options) <= SBATCH
    assert (
        options["nodes"] == "2-4"
        and options["gpus-per-node"] == "8"
        and options["time"] == "1:30:00"
        and options["ntasks-per-node"] == "1"
    )
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])  # sbatch reads no further


@pytest.mark.parametrize("on", ["torchrun", "slurm", "kubernetes"])
def test_every_launcher_says_of_each_setting_why_it_is_set_or_who_chooses(on: str, tmp_path: Path) -> None:
    more = {"pods": KubernetesOptions(image="mesh:1", claim="shared")} if on == "kubernetes" else {}
    left, given = (written(tmp_path / name, on, nodes=NodeOptions(interface=name), **more) for name in ("", "eth1"))
    for name, value in (("GLOO_SOCKET_IFNAME", "eth1"), ("NCCL_SOCKET_IFNAME", "=eth1")):
        assert f"# {name}: unset: each node uses the interface of its route" in left and f"{name}=" not in left
        assert f"{name}={value}" in given and f"{name}: left" not in given
    assert "# NCCL_ALGO: left to NCCL, which chooses" in left and "# NCCL_IB_DISABLE: left to NCCL: where" in left


@pytest.mark.parametrize(
    ("data", "length", "steps", "words"),
    [
        (None, LengthOptions(), None, ("warning: no data is named: trains 200 steps (default;", "13.1 M tokens")),
        ("stdlib", LengthOptions(steps=300), 300, ("trains 300 steps, 19.7 M tokens, on stdlib, the sources of",)),
        ("a.npy", LengthOptions(tokens="1T"), 15258790, ("trains 15,258,790 steps, 1.00 T tokens, on a.npy",)),
    ],
)
def test_the_written_job_has_the_requested_length_and_says_what_it_trains(
    data: str | None,
    length: LengthOptions,
    steps: int | None,
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1 T tokens in steps of 32 x 2,048: 15,258,789.06, so 15,258,790 steps."""
    job = replace(BIG, data=data, batch=32, seq=2048)
    assert launch(shared=job, on="slurm", save=tmp_path, length=length) == 0
    said = json.loads((tmp_path / "job.json").read_text())
    assert said["workload"].get("steps") == steps and said.get("data", {}).get("source") in (None, data)
    shown, script = capsys.readouterr().err, (tmp_path / "slurm.sbatch").read_text()
    assert all(each in shown and each in script for each in words)
    assert shown.count("warning") == (data is None)


def test_a_tiny_model_trains_on_the_builtin_data_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(shared=JobOptions(model="llama-tiny", cluster="1x2:cpu"), save=tmp_path) == 0
    shown = capsys.readouterr().err
    assert "trains 200 steps (default; --steps or --tokens sets them)" in shown and "warning" not in shown


def test_a_pod_is_given_settings_that_have_a_value_and_no_others(tmp_path: Path) -> None:
    written(
        tmp_path,
        "kubernetes",
        nodes=NodeOptions(interface="eth1"),
        pods=KubernetesOptions(image="mesh:1", claim="shared"),
    )
    (jobset,) = [
        each for each in yaml.safe_load_all((tmp_path / "kubernetes.yaml").read_text()) if each["kind"] == "JobSet"
    ]
    (nodes,) = jobset["spec"]["replicatedJobs"]
    environment = {
        it["name"]: it.get("value") for it in nodes["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth1" and not {"NCCL_ALGO", "NCCL_IB_DISABLE"} & environment.keys()


def test_a_script_for_torchrun_says_what_is_missing(tmp_path: Path) -> None:
    text = written(tmp_path, "torchrun")
    without = subprocess.run(
        ["bash", "-c", text, "x", "0", "host"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert without.returncode and "the same secret on all machines" in without.stderr
    assert "run.min_ranks" not in text


@pytest.mark.parametrize(
    ("shared", "more", "words"),
    [
        (BIG, {"nodes": NodeOptions(min_nodes=5)}, "it may go on with 1 to 4"),
        (
            JobOptions(cluster="2x8:h100+2x4:a100-80gb", model="llama-7b"),
            {"nodes": NodeOptions(min_nodes=2)},
            "only equal nodes can replace",
        ),
        (
            BIG,
            {"nodes": NodeOptions(interface="eth0 ens5")},
            "--interface 'eth0 ens5' is not the name of one network interface",
        ),
        (BIG, {"on": "kubernetes"}, "--image"),
        (BIG, {"length": LengthOptions(steps=3, tokens="1B")}, "--steps and --tokens both"),
        (BIG, {"on": "slurm", "queue": SlurmOptions(hours=float("nan"))}, "--hours nan must be at least 0"),
        (BIG, {"on": "slurm", "queue": SlurmOptions(hours=-3.0)}, "--hours -3 must be at least 0"),
    ],
)
def test_what_cannot_be_launched_is_one_line(
    shared: JobOptions, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words) as error:
        launch(shared=shared, save=tmp_path, **more)
    assert "\n" not in str(error.value)


def test_a_job_may_continue_on_fewer_nodes_only_if_a_plan_fits_on_them() -> None:
    job = small_job(on=cluster(8, 1, memory=2e6))
    check_fewest_nodes(job, 4)
    with pytest.raises(InputError, match=r"--min-nodes 2: no plan fits on 2 nodes, so a run that loses the others"):
        check_fewest_nodes(job, 2)


@pytest.mark.parametrize(("on", "library"), [("2x8:h100", "NCCL"), ("2x8:mi300x", "RCCL")])
def test_launch_files_name_the_library_of_collectives_of_the_devices(on: str, library: str) -> None:
    """RCCL reads the variables of NCCL."""
    reasons = {each.name: each.reason for each in network_settings(read_cluster(on), "eth1")}
    assert reasons["NCCL_SOCKET_IFNAME"].startswith(f"{library} uses exactly this interface")
    assert reasons["NCCL_ALGO"].startswith(f"left to {library}, which chooses")
