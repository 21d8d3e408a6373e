"""Defines the options of `meshwright verify --recording`, and prints the comparison of a recording with one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from meshwright.cli.options import JobOptions, check_output_path, print_json, print_note, print_output
from meshwright.core.errors import InputError, VerificationFailed
from meshwright.core.files import write_atomically
from meshwright.core.messages import Message, translate


@Parameter(name="*")
@dataclass(frozen=True)
class RecordingOptions:
    """A recording to compare with one device."""

    recording: Annotated[
        Path | None,
        Parameter(
            help="folder of meshwright.recording; --model names the function that builds the model: FILE.py:function"
        ),
    ] = None
    loss: Annotated[
        str | None, Parameter(help="with --recording: the loss of (output, batch), as FILE.py:function")
    ] = None
    page: Annotated[Path | None, Parameter(help="with --recording: also write the comparison as an HTML page")] = None

    def refuse_other_options(self, job: Path | None, shared: JobOptions, pin: str | None) -> None:
        """Raises InputError if there are options that a recording does not use."""
        others = [f"--{name}" for name, value in vars(shared).items() if value and name != "model"]
        others += ["--pin"] if pin else []
        if job is not None or others:
            raise InputError(
                Message(
                    "--recording takes no {what}: use it with --model, --loss, --page and --json",
                    what=others[0] if others else "job file",
                )
            )

    def refuse_without_recording(self) -> None:
        """Raises InputError if there are options that only a recording uses."""
        if self.loss is not None or self.page is not None:
            option = "--loss" if self.loss is not None else "--page"
            raise InputError(Message("{option} needs --recording, the folder of a recording", option=option))

    def compare(self, model: str | None, json: bool, language: str) -> int:
        """Compares the recording and prints the result. Raises VerificationFailed if it differs from one device."""
        from meshwright.interop.recording.verify_recording import verify_recording
        from meshwright.report.page.recording_page import recording_page_text

        assert self.recording is not None
        check_output_path("--page", self.page)
        report = verify_recording(self.recording, model, self.loss)
        if self.page is not None:
            lines = (*(finding.why for finding in report.findings), *report.notes)
            text = recording_page_text(report.data(), lines, str(self.recording), language)
            write_atomically(self.page, text)
            print_note(Message("wrote {path}", path=self.page), language)
        if json:
            print_json(report.data())
        else:
            for line in report.lines():
                print_output(translate(line, language))
        if report.findings:
            raise VerificationFailed("\n".join(translate(finding.line(), language) for finding in report.findings))
        if not json:
            print_output(translate(Message("equal to one device"), language))
        return 0
