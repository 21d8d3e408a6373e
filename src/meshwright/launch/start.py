"""What is started, whatever starts it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.base.errors import InputError
from meshwright.launch.quoting import comment, line, path_argument
from meshwright.launch.settings import Setting

JOB = "job.json"
PORT = 29400


@dataclass(frozen=True)
class Start:
    """`nodes` of `devices` each; the run goes on with `least` of them. `grace`: seconds between the request to stop and the end, for the last save.

    `folder`: of the run, the same on every node. `settings`: environment variables, each with its reason, also of those that are left alone. `about`: lines that say what this is.
    """

    name: str
    nodes: int
    least: int
    devices: int
    accelerator: bool
    folder: str
    grace: float
    settings: tuple[Setting, ...] = ()
    about: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        line("run.folder", self.folder)
        if not 1 <= self.least <= self.nodes:
            raise InputError(f"--least {self.least}: the job has {self.nodes} nodes; it may go on with 1 to {self.nodes}")

    @property
    def label(self) -> str:
        """The name as host names and labels may be: at most 40 small letters, digits and dashes.

        >>> Start("Llama_7B v2", 2, 1, 8, True, "runs/x", 30.0).label
        'llama-7b-v2'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-") or "run"

    def command(self, job: str) -> list[str]:
        return ["meshwright", "train", path_argument(job), "--folder", path_argument(self.folder), *self.ranks]

    @property
    def ranks(self) -> list[str]:
        """Fewer nodes are allowed: so many ranks at the least."""
        return ["--set", f"run.least={self.least * self.devices}"] if self.least < self.nodes else []

    def comments(self) -> list[str]:
        return [comment(each) for each in self.about]

    def reasons(self) -> list[str]:
        """Of every setting, for what has no room for them beside it."""
        return [comment(f"{it.name}{it.value and '=' + it.value}: {it.reason}") for it in self.settings]

    def exports(self) -> list[str]:
        """Lines of a shell script."""
        return [setting.line for setting in self.settings]
