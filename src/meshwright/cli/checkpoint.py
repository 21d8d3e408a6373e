"""`meshwright checkpoint`: list, verify, export and import checkpoints.

PATH is a checkpoint, a folder of checkpoints, or a run folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from meshwright.cli.options import AsJson, Language, print_json, print_note, print_output
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, term, translate

if TYPE_CHECKING:
    from meshwright.checkpoint.huggingface import HfTemplate
    from meshwright.spec.job import LaunchSpec

checkpoint = App(
    name="checkpoint", help="List, verify, export and import checkpoints.", version_flags=[], help_format="plaintext"
)
TOKENIZER_FOLDER = "tokenizer"
"""The subfolder of a run folder with the tokenizer that was trained for the run."""
CheckpointPath = Annotated[Path, Parameter(name="PATH", help="a checkpoint, a folder of checkpoints, or a run folder")]


@checkpoint.command(name="list")
def list_(path: CheckpointPath, /, *, json: AsJson = False, lang: Language = None) -> int:
    """List checkpoints, newest first.

    Try: meshwright checkpoint list runs/mine
    """
    from meshwright.checkpoint.manifest import read_manifest
    from meshwright.core.units import show_bytes
    from meshwright.report.text import align_columns

    rows: list[dict[str, Any]] = []
    for one in checkpoints_at(path):
        try:
            found = read_manifest(one)
        except ValueError as error:
            rows.append({"path": str(one), "problem": str(error)})
            continue
        size = sum(file.bytes for file in found.files.values())
        rows.append(
            {
                "path": str(one),
                "step": found.step,
                "plan": found.plan,
                "ranks": found.world,
                "bytes": size,
                "save": found.serial,
            }
        )
    if json:
        print_json({"checkpoints": rows})
        return 0
    language = choose_language(lang, os.environ)
    columns = ("checkpoint", "step", "plan", "ranks", "size")
    table = [[translate(term("checkpoints", name), language) for name in columns]]
    table += [
        [row["path"], str(row["step"]), row["plan"], str(row["ranks"]), show_bytes(row["bytes"])]
        for row in rows
        if "step" in row
    ]
    print_output(align_columns(table))
    for row in rows:
        if "problem" in row:
            print_note(Message("damaged: {problem}", problem=row["problem"]), lang)
    return 0


@checkpoint.command
def verify(path: CheckpointPath, /, *, json: AsJson = False, lang: Language = None) -> int:
    """Read every byte and compare its digest. Exit code 2 when anything is damaged.

    Try: meshwright checkpoint verify runs/mine
    """
    from meshwright.checkpoint.verify import verify_checkpoint as problems_of

    language = choose_language(lang, os.environ)
    found = {str(one): problems_of(one) for one in checkpoints_at(path)}
    if json:
        print_json(
            {
                "checkpoints": [
                    {"path": one, "valid": not problems, "problems": problems} for one, problems in found.items()
                ]
            }
        )
    else:
        for one, problems in found.items():
            count = Message("{count:count problem}", count=len(problems)) if problems else Message("valid")
            print_output(translate(Message("{name}: {what}", name=one, what=count), language))
            for problem in problems:
                print_output(f"  {translate(problem, language)}")
    return 2 if any(found.values()) else 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """The options of the weights of an export."""

    config: Annotated[
        Path | None,
        Parameter(help="a config.json to store with the weights; default: the run's own if known"),
    ] = None
    dtype: Annotated[str | None, Parameter(help="round floating-point weights to float32, bfloat16 or float16")] = None
    adapter: Annotated[
        bool,
        Parameter(
            negative="",
            help="export only the LoRA adapters, in the format of peft; otherwise they are merged into the weights",
        ),
    ] = False


NO_WEIGHTS_OPTIONS = WeightsOptions()


@checkpoint.command
def export(
    path: CheckpointPath,
    /,
    to: Annotated[
        Path, Parameter(name="--to", help="output folder for model.safetensors, config.json and the tokenizer")
    ],
    *,
    weights: WeightsOptions = NO_WEIGHTS_OPTIONS,
    form: Annotated[
        Literal["huggingface", "dcp", "deepspeed", "megatron"],
        Parameter(
            help=(
                "huggingface: weights for transformers; with optimizer states: dcp (torch.distributed.checkpoint, for "
                "FSDP2), deepspeed (universal checkpoint), megatron (torch_dist, for Llama models)"
            )
        ),
    ] = "huggingface",
    weights_only: Annotated[
        bool, Parameter(negative="", help="leave out the optimizer states (Hugging Face folders have none)")
    ] = False,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Write the newest checkpoint for another system: a folder for transformers' from_pretrained, or with --form the
    checkpoint of another engine, with optimizer states.

    Try: meshwright checkpoint export runs/mine --to exported --dtype bfloat16
    """
    from meshwright.checkpoint.export_folder import HUGGINGFACE_FORM, check_export_folder
    from meshwright.core.errors import InputError

    check_export_folder(to, form, weights.adapter)
    if form != HUGGINGFACE_FORM:
        if (weights.config is not None and form != "megatron") or weights.dtype is not None or weights.adapter:
            raise InputError(
                Message("--config, --dtype and --adapter belong to --form huggingface, not to {form}", form=form)
            )
        return _export_form(newest_at(path), to, form, weights_only, weights.config, json, lang)
    one = newest_at(path)
    files = _export_huggingface(one, to, weights)
    if json:
        print_json({"checkpoint": str(one), "files": [str(file) for file in files]})
    else:
        head = translate(Message("{one} is exported to", one=one), choose_language(lang, os.environ))
        print_output("\n".join([head, *(f"  {file}" for file in files)]))
    return 0


def _export_huggingface(one: Path, to: Path, weights: WeightsOptions) -> list[Path]:
    from meshwright.checkpoint import huggingface
    from meshwright.core.errors import InputError

    launch = launch_of_checkpoint(one)
    lora = launch.workload.lora if launch is not None else None
    if weights.adapter and lora is None:
        raise InputError(Message("{one}: the run does not train LoRA adapters; leave --adapter out", one=one))
    if weights.adapter and lora is not None and launch is not None:
        return huggingface.export_adapter(one, to, lora, launch.model.folder, extra_files=run_extra_files(one))
    template = run_template(one)
    text = _model_config(one, weights.config)
    files = huggingface.export_weights(
        one,
        to,
        text,
        dtype=weights.dtype,
        transposed=template.transposed if template else (),
        extra_files=run_extra_files(one),
        lora=lora,
    )
    if text is None:
        print_note(
            Message(
                "config.json is not written: transformers has no class for this run's model; pass one with --config"
            )
        )
    return files


def _model_config(one: Path, config: Path | None) -> dict[str, Any] | None:
    """Returns the content of the file `config`, otherwise the config.json of the run's model, None if it is unknown."""
    from meshwright.core.codec import parse_text, read_text_file

    template = run_template(one)
    found = parse_text(read_text_file(config, "config"), str(config)) if config else template and template.config
    return found or None


def _export_form(
    one: Path, to: Path, form: str, weights_only: bool, config: Path | None, json: bool, lang: str | None
) -> int:
    from meshwright.checkpoint.formats.export import export_checkpoint

    content = export_checkpoint(one, to, form, weights_only, _model_config(one, config))
    if json:
        print_json({"checkpoint": str(one), "folder": str(to), "form": form, "step": content.step})
        return 0
    kinds = sorted({kind for states in content.states.values() for kind in states})
    line = Message(
        "{one} is exported to {to} ({form}): step {step}, {count} weights, {states}",
        one=one,
        to=to,
        form=form,
        step=content.step,
        count=len(content.weights),
        states=_states_text(kinds),
    )
    print_output(translate(line, choose_language(lang, os.environ)))
    return 0


def _states_text(kinds: Sequence[str]) -> Message:
    """Returns the phrase for the kinds of optimizer states of a checkpoint."""
    if not kinds:
        return Message("without optimizer states")
    return Message("with the optimizer states {kinds}", kinds=", ".join(kinds))


@checkpoint.command(name="import")
def import_(
    source: Annotated[
        Path,
        Parameter(
            name="SOURCE",
            help="a checkpoint of torch DCP, DeepSpeed or Megatron-LM, or safetensors (Hugging Face: weights only)",
        ),
    ],
    folder: Annotated[Path, Parameter(name="FOLDER", help="folder of checkpoints in which the step is written")],
    /,
    *,
    weights_only: Annotated[
        bool, Parameter(negative="", help="leave out the optimizer states; the checkpoint is of step 0")
    ] = False,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Convert a checkpoint of another system to one of Meshwright, with its optimizer states. Nothing in the source is
    executed.

    Try: meshwright checkpoint import Llama-3.2-1B imported
    """
    from meshwright.checkpoint.formats.detect import import_checkpoint

    made, imported = import_checkpoint(source, folder, weights_only)
    state = imported.manifest.state["optimizer"]["kinds"]
    if json:
        print_json(
            {
                "checkpoint": str(made),
                "form": imported.form,
                "step": imported.manifest.step,
                "optimizer": sorted(state),
                "left_out": list(imported.left_out),
            }
        )
        return 0
    line = Message(
        "{source} ({form}) is imported as {made}: step {step}, {count} weights, {states}",
        source=source,
        form=imported.form,
        made=made,
        step=imported.manifest.step,
        count=imported.weight_count,
        states=_states_text(sorted(state)),
    )
    print_output(translate(line, choose_language(lang, os.environ)))
    if imported.left_out:
        print_note(Message("not carried over: {names}{more}", names=", ".join(imported.left_out), more=""), lang)
    return 0


def checkpoints_at(path: Path) -> list[Path]:
    """Returns the checkpoint at `path`, or the checkpoints in the folder `path`, newest first. The folder may be a run
    folder.

    Raises: InputError if there is no checkpoint.
    """
    from meshwright.checkpoint.manifest import MANIFEST_FILE, parse_step
    from meshwright.checkpoint.retention import list_checkpoints
    from meshwright.core import storage
    from meshwright.core.errors import InputError

    is_folder = storage.is_present(path) and storage.is_folder(path)
    if is_folder and (parse_step(path) is not None or storage.is_present(path / MANIFEST_FILE)):
        return [path]
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise InputError(
            Message(
                "{path!r} {what}; name a run folder, such as runs/NAME, or a checkpoint",
                path=str(path),
                what=Message("holds no checkpoint") if is_folder else Message("is not a folder"),
            )
        )
    return found


def newest_at(path: Path) -> Path:
    """Returns the checkpoint at `path`, or the newest valid checkpoint in the folder `path`.

    Raises: InputError if there is no checkpoint; CorruptCheckpoint if none in the folder is valid.
    """
    from meshwright.checkpoint.retention import newest_checkpoint

    found = checkpoints_at(path)
    return path if found == [path] else newest_checkpoint(found[0].parent, say=print_note) or found[0]


def launch_of_checkpoint(one: Path) -> LaunchSpec | None:
    """Returns the launch file (RUN/launch.json) of the run folder that contains the checkpoint `one`, or None outside a
    run folder."""
    from meshwright.core.codec import read_run_file
    from meshwright.spec.job import LaunchSpec

    return read_run_file(LaunchSpec, one.resolve().parent.parent / "launch.json")


def run_extra_files(one: Path) -> dict[str, bytes]:
    """Returns the extra files to export with a run's weights, by name: the tokenizer's files and the generation config.
    Returns no files outside a run folder."""
    from meshwright.checkpoint.huggingface import read_extra_files
    from meshwright.data.tokens import END_OF_TEXT_TOKEN, MASK_TOKEN

    run, launch = one.resolve().parent.parent, launch_of_checkpoint(one)
    if launch is None:
        return {}
    named = Path(launch.data.tokenizer).expanduser()
    tokenizer = named if named.is_dir() else run / TOKENIZER_FOLDER
    model = Path(launch.model.folder) if launch.model.folder else None
    return read_extra_files(tokenizer if tokenizer.is_dir() else None, model, END_OF_TEXT_TOKEN, MASK_TOKEN)


def run_template(one: Path) -> HfTemplate | None:
    """Returns the config.json for the exported model of the checkpoint `one`. It comes from the sizes of the run's
    reference model, or from the Hugging Face folder of the run's model. Returns None if the run records neither, or if
    transformers has no class for the reference model."""
    from meshwright.checkpoint.huggingface import HfTemplate, hf_template
    from meshwright.core.codec import parse_text, read_text_file

    launch = launch_of_checkpoint(one)
    if launch is None:
        return None
    model = launch.model
    if model.sizes:
        return hf_template(model.sizes)
    config = Path(model.folder, "config.json")
    return HfTemplate(parse_text(read_text_file(config), str(config))) if model.folder and config.exists() else None
