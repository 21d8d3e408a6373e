"""Whatever a name holds, files for launchers run nothing of it and add nothing: it stays one value."""

from __future__ import annotations

import random
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli.launch import KubernetesOptions, NodeOptions, SlurmOptions, launch
from meshwright.cli.options import JobOptions
from meshwright.core.errors import InputError
from meshwright.core.printable_text import FORBIDDEN_CATEGORIES, check_one_line, escape_unprintable
from meshwright.elastic.launch import kubernetes, slurm, torchrun
from meshwright.elastic.launch.quoting import comment_line, to_yaml
from meshwright.elastic.launch.submission import JobSubmission, NodeSet, network_settings
from meshwright.planner.inputs.cluster_parser import read_cluster

PIECES = [
    "\n", "\r", "\r\n", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\x00", "\x1b[2J", "\t", " ", "  #", "'", '"', "\\",
    "`", "$", "$(", ")", "${", "}", ";", "&&", "||", "|", "&", ">", "<", "(", "{", "[", "]", "*", "?", "~", "!", "%",
    "@", ":", ": ", "- ", "---", "---\n", "...\n", "\n---\n", "kind: Pod", "\nkind: Pod\n", "!!python/object:x ", "&a ",
    "*a", "<<: ", "#SBATCH --wrap=foreign", "\n#SBATCH --wrap=foreign\n", "\nforeign\n", "$(foreign)", "`foreign`",
    "; foreign #", "\nsrun foreign\n", "'$(foreign)'", "EOF\n", "yes", "null", "1e3", "0x10", "é", "集群", "🙂",
    "\u202e",
    "\ufeff", "\ud800", "a", "runs/x", "--", "-rf", "=", ",", "x", "GLOO", "^",
]  # fmt: skip


def names(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choice(PIECES) for _ in range(chance.randint(1, 6))) for _ in range(count)]


def is_refused(text: str) -> bool:
    try:
        check_one_line(text)
    except ValueError:
        return True
    return False


def start_with(name: str) -> JobSubmission:
    """A start in which `name` stands wherever text of a person can stand. What would be refused stands in comments
    alone."""
    cluster = read_cluster("2x8:h100@ethernet-100")
    cluster = cluster.model_copy(
        update={"name": name, "network": cluster.network.model_copy(update={"name": f"Ethernet {name}"})}
    )
    return JobSubmission(
        name=name,
        sets=(NodeSet(0, 2, 8, "h100", "nvidia"),),
        min_nodes=1,
        folder="runs/plain" if is_refused(name) else name,
        grace=30.0,
        settings=network_settings(cluster, "eth1"),
        about=("Written by `meshwright launch`.", name),
    )


NAMES = names(20, 2000)
FEW_OR_ALL = pytest.mark.parametrize(
    "given", [pytest.param(NAMES[:250], id="250"), pytest.param(NAMES, id="2000", marks=pytest.mark.soak)]
)
HARNESS = """
command_not_found_handle() { said FOREIGN "$@"; }
said() { printf '%s\\0' "$@" END >> "$LOG"; }
srun() { said "$@"; }
exec() { said "$@"; }
scontrol() { printf 'first\\nsecond\\n'; }
head() { while read -r row; do printf '%s\\n' "$row"; break; done; }
od() { :; }
tr() { printf secret; }
SLURM_JOB_ID=7 SLURM_JOB_NODELIST=first,second MESHWRIGHT_TOKEN=secret
for script in *.sh; do ( source "./$script" 0 first ); done
"""
"""Runs every script of a folder with the commands that they may run replaced; any other command is written down as
foreign."""


@FEW_OR_ALL
@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_a_script_runs_its_one_command_whatever_names_hold(target: str, given: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    expected = []
    for number, name in enumerate(given):
        start, job = start_with(name), "job.json" if is_refused(name) else f"{name}/job.json"
        text = torchrun.node_script(start, job) if target == "torchrun" else slurm.batch_script(start, job)
        (folder / f"{number:04}.sh").write_text(text.replace("/dev/urandom", "/dev/null"), encoding="utf-8")
        expected.append(start.command(job))
        assert not any(row.startswith("#SBATCH --wrap") for row in text.splitlines())
    environment = {"PATH": "/nonexistent", "LOG": str(tmp_path / "log")}
    done = subprocess.run(
        ["/bin/bash", "-c", HARNESS], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    calls = [call.split("\0")[:-1] for call in (tmp_path / "log").read_text(encoding="utf-8").split("END\0")[:-1]]
    assert [call[-len(words) :] for call, words in zip(calls, expected, strict=True)] == expected
    assert (
        len(list(folder.iterdir())) == len(given) and len(list(tmp_path.iterdir())) == 2
    )  # nothing was written but the log
    for number in range(0, len(given), 100):
        assert subprocess.run(["bash", "-n", folder / f"{number:04}.sh"], check=False).returncode == 0


def expanded(text: str) -> str:
    """What Kubernetes makes of a word of a command: two dollar signs are one, a name in $(...) is a variable."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda found: "$" if found[0] == "$$" else "EXPANDED", text)


@FEW_OR_ALL
def test_kubernetes_objects_hold_names_as_plain_data(given: list[str]) -> None:
    for name in given[::10]:
        start = start_with(name)
        mount = "/data" if is_refused(name) or ":" in name else f"/{name}"
        objects = kubernetes.build_objects(start, '{"a": 1}\n', kubernetes.PodTemplate("mesh:1", "1e3", mount))
        head = "\n".join((*start.comments(), *start.reasons()))
        found = list(yaml.safe_load_all(head + "\n" + "---\n".join(map(to_yaml, objects))))
        (jobset,) = [each for each in found if each["kind"] == "JobSet"]
        (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
        assert [expanded(word) for word in container["command"]] == start.command("/etc/meshwright/job.json")
        assert found == objects and [each["kind"] for each in found] == ["Secret", "ConfigMap", "JobSet"]


@FEW_OR_ALL
def test_yaml_reads_back_as_the_same_data(given: list[str]) -> None:
    for name in given:
        text = name.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        data = {"kind": text, text: [text, {"name": text}, [text, []], 1, True, {}], "data": {"text": f"{text}\n"}}
        assert yaml.safe_load(to_yaml(data)) == data
        assert list(yaml.safe_load_all(f"{comment_line(text)}\nkind: x\n")) == [{"kind": "x"}]


def test_every_control_character_is_refused_in_a_name_and_shown_in_a_comment() -> None:
    for number in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E, 0xD800):
        with pytest.raises(ValueError, match=f"U\\+{number:04X}"):
            check_one_line(f"a{chr(number)}b")
        assert escape_unprintable(f"a{chr(number)}b").isprintable()
    assert "Cf" not in FORBIDDEN_CATEGORIES and check_one_line("\u0646\u200c\u0627")  # a joiner of Persian words


BIG = JobOptions(model="llama-7b", cluster="4x8:h100")
CLUSTER = """groups: [{nodes: 2, devices: 8, device: h100}]
network: {name: %s, bandwidth: 25 GB/s}
name: %s
"""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"on": "slurm", "queue": SlurmOptions(partition="gpu\nforeign")}, "--partition"),
        ({"on": "slurm", "queue": SlurmOptions(partition="gpu --wrap=foreign")}, "--partition"),
        ({"on": "kubernetes", "pods": KubernetesOptions(image="a\n---\nkind: Pod", claim="c")}, "--image"),
        ({"on": "kubernetes", "pods": KubernetesOptions(image="a", claim="c\n---")}, "--claim"),
        ({"on": "kubernetes", "pods": KubernetesOptions(image="a", claim="c", mount="/x\ny")}, "--mount"),
        ({"on": "kubernetes", "pods": KubernetesOptions(image="a", claim="c", mount="data")}, "--mount"),
        ({"nodes": NodeOptions(interface="$(foreign)")}, "--interface"),
        (
            {"shared": JobOptions(model="llama-7b", cluster="4x8:h100", set=('run.folder="a\\nb"',))},
            r"\$.run.folder: holds the character U\+000A",
        ),
        ({"shared": JobOptions(model="llama-7b", cluster="4x8:h100\n")}, "holds the character"),
    ],
)
def test_names_that_are_not_one_plain_line_are_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as error:
        launch(**{"shared": BIG, "save": tmp_path / "out", **more})
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", [0, 1])
def test_a_cluster_file_with_a_line_break_in_a_name_is_refused(place: int, tmp_path: Path) -> None:
    given = ["plain", "plain"]
    given[place] = '"a\\nforeign"'
    (tmp_path / "cluster.yaml").write_text(CLUSTER % tuple(given))
    with pytest.raises(InputError, match=r"name: holds the character U\+000A"):
        launch(shared=JobOptions(model="llama-7b", cluster=str(tmp_path / "cluster.yaml")), save=tmp_path / "out")


def test_a_folder_with_every_sign_of_the_shell_is_one_argument(tmp_path: Path) -> None:
    save = tmp_path / 'it\'s $(foreign) `foreign` \\ & ; "x"'
    assert launch(shared=BIG, on="slurm", save=save) == 0
    text = (save / "slurm.sbatch").read_text()
    assert f"train {shlex.quote(str(save / 'job.json'))} --folder" in text
