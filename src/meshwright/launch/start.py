"""What is started, whatever starts it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.base.errors import InputError
from meshwright.launch.hardware import NodeSet
from meshwright.launch.quoting import comment, line, path_argument
from meshwright.launch.settings import Setting

JOB = "job.json"
PORT = 29400
NUMBERED = 'exec env "RANK=$(({first} + {number}))" "$@"'
"""What a shell of one node runs where the launcher counts the nodes of each set from 0: its arguments, with the node's number among all."""


@dataclass(frozen=True)
class Start:
    """The nodes of a run, set by set of equal ones. The run goes on with `least` nodes. `grace`: seconds between the request to stop and the end, for the last save.

    `folder`: of the run, the same on every node. `settings`: environment variables, each with its reason, also of those that are left alone. `about`: lines that say what this is.
    """

    name: str
    sets: tuple[NodeSet, ...]
    least: int
    folder: str
    grace: float
    settings: tuple[Setting, ...] = ()
    about: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        line("run.folder", self.folder)
        if not 1 <= self.least <= self.nodes:
            raise InputError(f"--least {self.least}: the job has {self.nodes} nodes; it may go on with 1 to {self.nodes}")
        if self.least < self.nodes and len(self.sets) > 1:
            kinds = ", ".join(each.words for each in self.sets)
            raise InputError(f"--least {self.least}: nodes of {kinds} are unlike; only equal ones can stand in for each other")

    @property
    def nodes(self) -> int:
        return sum(each.nodes for each in self.sets)

    @property
    def is_several(self) -> bool:
        """Whether nodes have to find each other. One node starts its ranks as `meshwright train` does anywhere."""
        return self.nodes > 1

    @property
    def label(self) -> str:
        """The name as host names and labels may be: at most 40 small letters, digits and dashes.

        >>> Start("Llama_7B v2", (NodeSet(0, 2, 8, "h100", "nvidia"),), 1, "runs/x", 30.0).label
        'llama-7b-v2'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-") or "run"

    def command(self, job: str) -> list[str]:
        """Returns the words of the command that each node runs. A folder without a slash would be taken for a name under runs/."""
        folder = self.folder if "/" in self.folder else f"./{self.folder}"
        return ["meshwright", "train", path_argument(job), "--folder", path_argument(folder), *self.ranks]

    @property
    def ranks(self) -> list[str]:
        """Fewer nodes are allowed: so many ranks at the least."""
        return ["--set", f"run.least={self.least * self.sets[0].devices}"] if self.least < self.nodes else []

    def comments(self) -> list[str]:
        return [comment(each) for each in self.about]

    def reasons(self) -> list[str]:
        """Of every setting, for what has no room for them beside it."""
        return [comment(f"{it.name}{it.value and '=' + it.value}: {it.reason}") for it in self.settings]

    def exports(self) -> list[str]:
        """Lines of a shell script."""
        return [setting.line for setting in self.settings]
