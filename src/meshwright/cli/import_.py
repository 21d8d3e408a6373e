"""`meshwright import`: read the configuration of another system as a job and a plan."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import join
from typing import Annotated

from cyclopts import Parameter

from meshwright.cli.options import AsJson, Language, count_option, print_json, print_note, print_output
from meshwright.core.files import check_output_folder, write_atomically
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate


def import_(
    *files: Annotated[Path, Parameter(help="the files of one configuration, such as ds_config.json and launch.sh")],
    source: Annotated[
        str | None, Parameter(name="--from", help="the system; default: recognized by the keys of the files")
    ] = None,
    devices: Annotated[int, count_option("number of devices; default: that of the launch command")] = 0,
    allow_unknown: Annotated[
        bool, Parameter(negative="", help="list keys that the system does not know, instead of refusing them")
    ] = False,
    out: Annotated[Path | None, Parameter(help="folder for job.yaml and model.yaml; default: print the job")] = None,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Read the configuration of another system as a job and a plan. Every key that has no equivalent is named.
    Supported are argument lists and launch scripts, ds_config.json, TOML and YAML files. Nothing is executed.

    Try: meshwright import ds_config.json launch.sh --out imported
    """
    check_output_folder(out)
    import yaml

    from meshwright.interop.importing import import_lines, import_plan
    from meshwright.spec.constraints import without_offload

    language = choose_language(lang, os.environ)
    found = import_plan(*files, system=source, devices=devices, allow_unknown=allow_unknown)
    job, texts = dict(found.job), {}
    if found.sizes:
        texts["model.yaml"] = yaml.safe_dump(found.sizes, sort_keys=False)
        job = {"model": {"path": "model.yaml"}, **job}
    texts["job.yaml"] = yaml.safe_dump(job, sort_keys=False)
    lines = [translate(line, language) for line in import_lines(found)]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(out / name, text)
    if json:
        print_json(
            {
                "system": found.system.name,
                "plan": found.plan.name,
                "job": job,
                "model": found.sizes or None,
                "carried": found.carried,
                "not_carried": [translate(line, language) for line in found.not_carried],
                "ignored": list(found.ignored),
            }
        )
        return 0
    print_output("\n".join(lines))
    if out is None:
        print_output("\n".join(f"==> {name} <==\n{text}" for name, text in texts.items()).rstrip())
    else:
        command = ["meshwright", "verify", str(out / "job.yaml"), "--cluster", f"local:{found.plan.world}"]
        command += ["--model", "MODEL"] if "model" not in job else []
        if found.plan.offload:  # CPU ranks have no device memory, so they offload nothing to the host
            command += ["--plan", without_offload(found.plan).name]
        paths = ", ".join(str(out / name) for name in texts)
        print_note(Message("written: {paths}; next: {command}", paths=paths, command=join(command)), language)
    return 0
