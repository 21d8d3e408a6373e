"""Prints the progress of `meshwright train` on standard error. On a terminal it shows a progress line. Otherwise it
prints plain lines without carriage returns or escape sequences.

The console prints what rank 0 reports in messages such as `begin`, `record` and `saved`. It runs in the supervisor's
process, or in rank 0 if there is no supervisor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message
from meshwright.core.printable_text import escape_terminal_controls
from meshwright.core.units import show_bytes, show_count, show_seconds
from meshwright.spec.record import StepRecord

LINE_INTERVAL_SECONDS = 10.0  # the minimum time between plain lines about ordinary steps
SILENT_KINDS = ("slow", "verdict", "rebalanced", "rebalance_result", "unsaved", "write", "failed", "ended")
"""The console ignores messages of these kinds, which only the supervisor handles. If the user must know about such a
message, rank 0 also sends a `note`, or the supervisor prints a line."""
WARMUP_STEPS = 3
"""The number of steps after a start whose times are not yet stable."""


class RunConsole:
    """Prints the progress of one run. `quiet`: whether to print nothing. `words` translates a line into the user's
    language."""

    def __init__(self, quiet: bool = False, words: Callable[[str], str] = str) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.quiet, self.words = quiet, words
        self.steps = self.first = 0
        self.last: StepRecord | None = None
        self.held_out: list[tuple[int, float]] = []
        self.sample = ""
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._shown = 0.0
        self._began, self._warm = time.monotonic(), 0.0
        self._heeded = {
            "begin": self._begin, "record": self._record, "saved": self._saved, "sample": self._sample,
            "stopped": self._stopped, "done": self._done,
            **dict.fromkeys(("note", "divergence", "spike", "bad_data", "degraded"), self._note),
        }  # fmt: skip

    def hear(self, message: IpcMessage) -> None:
        """Prints a message of rank 0. It ignores messages for the supervisor and reports unknown kinds of messages."""
        kind = message["kind"]
        if kind in self._heeded:
            self._heeded[kind](message)
        elif kind not in SILENT_KINDS:
            self.note(Message("a rank sent a message of the unknown kind {kind!r}, which is ignored", kind=kind))

    def note(self, line: str) -> None:
        """Prints a line in the user's language."""
        self.show(self.words(line))

    def show(self, text: str) -> None:
        """Prints text without translation. Markup of the `rich` library in the text is not interpreted."""
        if self.quiet:
            return
        try:
            self.console.print(escape_terminal_controls(text), markup=False)
        except OSError:  # the reader of standard error has closed it, which must not end the run
            self.quiet = True

    def close(self) -> None:
        """Removes the progress line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    # --- messages ---------------------------------------------------------------------------------

    def _note(self, message: IpcMessage) -> None:
        self.note(message["line"])

    def _begin(self, message: IpcMessage) -> None:
        again = self.steps > 0
        self.steps, self.first, self._began = message["steps"], message["step"], time.monotonic()
        self._warm = 0.0
        if again:
            return  # the ranks have restarted, which the supervisor has already reported
        self.note(message["data"])
        if self.first >= self.steps:
            self.note(Message("all {steps} steps are done", steps=self.steps))
        elif self.first and message.get("source") == "memory":
            self.note(Message("goes on from the snapshots of step {first}", first=self.first))
        elif self.first:
            self.note(Message("goes on from the checkpoint of step {first}", first=self.first))
        if self.console.is_terminal and not self.quiet and self.first < self.steps:
            # On a narrow terminal, the description must be cut off and not the step.
            whole = Column(no_wrap=True, min_width=len(f"step {self.steps}/{self.steps}"))
            step = TextColumn(
                self.words(Message("step {step}/{steps}", step="{task.completed}", steps="{task.total}")),
                table_column=whole,
            )
            columns = (step, BarColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task("", total=self.steps, completed=self.first)
            self._progress.start()

    def _record(self, message: IpcMessage) -> None:
        record = StepRecord.model_validate(message["record"])
        self.last = record
        if record.held_out_loss is not None:
            self.held_out.append((record.step, record.held_out_loss))
        now = time.monotonic()
        if record.step == self.first + WARMUP_STEPS:
            self._warm = now
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=record.step, description=self._words(record))
        notable = record.held_out_loss is not None or record.skipped or record.step == self.steps
        if notable or (self._progress is None and now - self._shown > LINE_INTERVAL_SECONDS):
            self._shown = now
            step = self.words(Message("step {step}/{steps}", step=record.step, steps=self.steps))
            self.show(f"{step}  {self._words(record)}")
        waited = record.exposed.get("offload", 0.0)
        if record.step == self.first + WARMUP_STEPS and waited > record.seconds / 2:
            self.note(
                Message(
                    "step {step} waited {waited} of {seconds} for offloaded data: use a folder on a faster disk "
                    "(--offload-to), or a smaller offload fraction (off-optimizer-disk50, off-activations-disk8)",
                    step=record.step,
                    waited=show_seconds(waited),
                    seconds=show_seconds(record.seconds),
                )
            )

    def _words(self, record: StepRecord) -> str:
        words = [Message("loss {loss:.4f}", loss=record.loss)] if record.tokens else []
        if record.held_out_loss is not None:
            words.append(Message("val loss {held_out_loss:.4f}", held_out_loss=record.held_out_loss))
        if record.skipped:
            words.append(Message("skipped: the gradient was not finite"))
        if record.tokens:
            words.append(
                Message("{tokens_per_second} tokens/s", tokens_per_second=show_count(record.tokens_per_second))
            )
            if (mfu := record.rates.get("mfu")) is not None:
                words.append(Message("MFU {mfu}", mfu=f"{mfu:.1%}"))
            # With several CPU ranks per host, a record has no `reserved`, since the RSS of each rank includes the
            # memory that these ranks share.
            kind = "reserved" if "reserved" in record.memory else "resident"
            words.append(Message("{memory} on the peak rank", memory=show_bytes(record.memory.get(kind, 0.0))))
        # The first steps take several times as long as the others (checks, a proof, compilation).
        if self.first + WARMUP_STEPS < record.step < self.steps:
            words.append(Message("{time} left", time=show_seconds(self._seconds_left(record.step))))
        return "  ".join(map(self.words, words))

    def _seconds_left(self, step: int) -> float:
        """Returns the expected seconds of the steps after `step`. The first steps do not count if others were timed."""
        warm = self.first + WARMUP_STEPS
        begin, first = (self._warm, warm) if step > warm and self._warm else (self._began, self.first)
        return (time.monotonic() - begin) / (step - first) * (self.steps - step)

    def _saved(self, message: IpcMessage) -> None:
        if message["step"] == self.steps or self._progress is None:
            path = Path(message["path"])
            here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            self.note(Message("checkpoint {path}", path=str(here)))

    def _stopped(self, message: IpcMessage) -> None:
        self.close()

    def _sample(self, message: IpcMessage) -> None:
        self.close()
        if "why" in message:
            self.note(Message("no sample: {why}", why=message["why"]))
            return
        self.sample = message["text"]
        self.note(Message("a sample of generated text:"))
        for line in self.sample.splitlines():
            self.show(f"  | {line}")

    def _done(self, message: IpcMessage) -> None:
        self.close()

    def summary(self) -> dict[str, Any]:
        """Returns the summary of the run that `--json` prints: the last step, its loss (None if no step has run), and
        the validation losses by step (`held_out`)."""
        losses = [{"step": step, "loss": loss} for step, loss in self.held_out]
        return {
            "steps": self.last.step if self.last else self.first,
            "loss": self.last.loss if self.last else None,
            "held_out": losses,
        }
