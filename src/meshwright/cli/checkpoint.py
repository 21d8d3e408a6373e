"""`meshwright checkpoint`: list, verify, export and import. PATH is a checkpoint, a folder of them, or a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from meshwright.cli.options import AsJson, note, say, say_json

if TYPE_CHECKING:
    from meshwright.checkpoint.reference import Form
    from meshwright.spec.launch import Launch

checkpoint = App(name="checkpoint", help="List, verify, export and import checkpoints.", version_flags=[], help_format="markdown")
TOKENIZER = "tokenizer"
"""Of a run folder: where the tokenizer that was trained for it is kept."""
At = Annotated[Path, Parameter(name="PATH", help="a checkpoint, a folder of checkpoints, or a run folder")]


@checkpoint.command(name="list")
def list_(path: At, /, *, json: AsJson = False) -> int:
    """List checkpoints, newest first.

    Try: meshwright checkpoint list runs/mine
    """
    from meshwright.base.units import show_bytes
    from meshwright.checkpoint.manifest import read_manifest
    from meshwright.report.text import columns

    rows: list[dict[str, Any]] = []
    for one in checkpoints_at(path):
        try:
            found = read_manifest(one)
        except ValueError as error:
            rows.append({"path": str(one), "problem": str(error)})
            continue
        size = sum(file.bytes for file in found.files.values())
        rows.append({"path": str(one), "step": found.step, "plan": found.plan, "ranks": found.world, "bytes": size, "save": found.serial})
    if json:
        say_json({"checkpoints": rows})
        return 0
    table = [["checkpoint", "step", "plan", "ranks", "size"]]
    table += [[row["path"], str(row["step"]), row["plan"], str(row["ranks"]), show_bytes(row["bytes"])] for row in rows if "step" in row]
    say(columns(table))
    for row in rows:
        if "problem" in row:
            note(f"damaged: {row['problem']}")
    return 0


@checkpoint.command
def verify(path: At, /, *, json: AsJson = False) -> int:
    """Read every byte and compare its digest. Exit code 2 when anything is damaged.

    Try: meshwright checkpoint verify runs/mine
    """
    from meshwright.checkpoint.verify import verify as problems_of

    found = {str(one): problems_of(one) for one in checkpoints_at(path)}
    if json:
        say_json({"checkpoints": [{"path": one, "valid": not problems, "problems": problems} for one, problems in found.items()]})
    else:
        for one, problems in found.items():
            say(f"{one}: {'valid' if not problems else f'{len(problems)} problems' if len(problems) > 1 else '1 problem'}")
            for problem in problems:
                say(f"  {problem}")
    return 2 if any(found.values()) else 0


@checkpoint.command
def export(
    path: At,
    /,
    to: Annotated[Path, Parameter(name="--to", help="where model.safetensors, config.json and the tokenizer go")],
    *,
    config: Annotated[Path | None, Parameter(help="a config.json to put beside the weights; else the run's own, where it is known")] = None,
    dtype: Annotated[str | None, Parameter(help="round floating-point weights to float32, bfloat16 or float16")] = None,
    adapter: Annotated[
        bool, Parameter(negative="", help="of a run with LoRA: the adapters alone, as peft reads them; else they are added to the weights")
    ] = False,
    json: AsJson = False,
) -> int:
    """Write the newest weights as a folder that transformers' from_pretrained loads: safetensors, config, tokenizer.

    Try: meshwright checkpoint export runs/mine --to exported --dtype bfloat16
    """
    from meshwright.base.codec import parse, read_text
    from meshwright.base.errors import InputError
    from meshwright.checkpoint import huggingface
    from meshwright.checkpoint.adapters import export_adapter

    one = newest_at(path)
    form = known_form(one)
    text = parse(read_text(config, "config"), str(config)) if config else form.config if form else None
    launch = launch_around(one)
    lora = launch.workload.lora if launch is not None else None
    if adapter and lora is None:
        raise InputError(f"{one}: no run with LoRA: it has no adapters; leave --adapter out")
    if adapter and lora is not None and launch is not None:
        files = export_adapter(one, to, lora, launch.model.folder, beside=beside(one))
    else:
        files = huggingface.export(one, to, text, dtype=dtype, turned=form.turned if form else (), beside=beside(one), lora=lora)
    if text is None and not adapter:
        note("no config.json is written: this run's model has no form that transformers knows; give one by --config")
    if json:
        say_json({"checkpoint": str(one), "files": [str(file) for file in files]})
    else:
        say("\n".join([f"{one} is exported to", *(f"  {file}" for file in files)]))
    return 0


@checkpoint.command(name="import")
def import_(
    weights: Annotated[Path, Parameter(name="WEIGHTS", help="a safetensors file, or a Hugging Face folder of them")],
    folder: Annotated[Path, Parameter(name="FOLDER", help="the folder of checkpoints that gets step 0")],
    /,
    *,
    json: AsJson = False,
) -> int:
    """Make Hugging Face weights a checkpoint of step 0: weights alone, without optimizer states.

    Try: meshwright checkpoint import Llama-3.2-1B imported
    """
    from meshwright.checkpoint.huggingface import import_weights

    made = import_weights(weights, folder)
    if json:
        say_json({"checkpoint": str(made)})
    else:
        say(f"{weights} is imported as {made}")
    return 0


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or those that it holds, newest first."""
    from meshwright.base.errors import InputError
    from meshwright.checkpoint.folder import checkpoints
    from meshwright.checkpoint.manifest import MANIFEST, step_of

    if path.is_dir() and (step_of(path) is not None or (path / MANIFEST).exists()):
        return [path]
    found = checkpoints(path / "checkpoints") or checkpoints(path)
    if not found:
        raise InputError(
            f"{str(path)!r} {'holds no checkpoint' if path.is_dir() else 'is no folder'}; name a run folder, such as runs/NAME, or a checkpoint"
        )
    return found


def newest_at(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest valid one that it holds."""
    from meshwright.checkpoint.folder import newest

    found = checkpoints_at(path)
    return path if found == [path] else newest(found[0].parent, say=note) or found[0]


def launch_around(one: Path) -> Launch | None:
    """What the run folder around a checkpoint was told; None where it is no run's."""
    from meshwright.base.codec import read
    from meshwright.spec.launch import Launch

    file = one.resolve().parent.parent / "launch.json"
    return read(Launch, file) if file.exists() else None


def beside(one: Path) -> dict[str, bytes]:
    """The files that stand beside the weights of a run's checkpoint: those of its tokenizer, and how to generate."""
    from meshwright.checkpoint.companions import companions
    from meshwright.data.tokens import END_OF_TEXT, MASK

    run, launch = one.resolve().parent.parent, launch_around(one)
    if launch is None:
        return {}
    named = Path(launch.data.tokenizer).expanduser()
    tokenizer = named if named.is_dir() else run / TOKENIZER
    model = Path(launch.model.folder) if launch.model.folder else None
    return companions(tokenizer if tokenizer.is_dir() else None, model, END_OF_TEXT, MASK)


def known_form(one: Path) -> Form | None:
    """What the run folder around a checkpoint says of its model: a reference model's sizes, or the folder it came from."""
    from meshwright.base.codec import parse, read_text
    from meshwright.checkpoint.reference import Form, form_of

    launch = launch_around(one)
    if launch is None:
        return None
    model = launch.model
    if model.sizes:
        return form_of(model.sizes)
    config = Path(model.folder, "config.json")
    return Form(parse(read_text(config), str(config))) if model.folder and config.exists() else None
