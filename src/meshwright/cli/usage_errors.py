"""Turns the errors of the option parser into one line in the language of the user, with the option to write instead.

An unknown option is looked up by its meaning first: the names that other trainers use are in OPTIONS_BY_NAME. Only then
the spelling counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args, get_origin

from cyclopts import CycloptsError
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message

_OPTION_NAMES = {
    "--model NAME": "model-name model-name-or-path model-id base-model checkpoint-model arch architecture",
    "--data PATH": "dataset dataset-name dataset-path data-path data-dir train-file train-data corpus train-files",
    "--lr 3e-4": "learning-rate max-lr base-lr lr-rate",
    "--batch N": "batch-size bs global-batch-size train-batch-size gbs global-batch",
    "--pin mb=N": "micro-batch micro-batch-size mbs per-device-batch-size per-device-train-batch-size",
    "--seq N": "seq-len seq-length sequence sequence-length sequence-len max-length max-seq-length max-seq-len "
    "context-length context block-size",
    "--steps N": "max-steps train-iters iterations iters num-steps train-steps max-iters total-steps",
    "--run NAME": "output-dir output out save-dir save log-dir logdir name run-name experiment exp-name project",
    "--cluster local:N": "devices gpus gpu num-gpus n-gpus ngpus num-devices nproc nproc-per-node num-processes "
    "world-size ranks procs device cuda",
    "--cluster NODESxDEVICES:DEVICE": "nodes nnodes num-nodes",
    "--precision bf16": "bf16 dtype mixed-precision amp torch-dtype half",
    "--precision fp16": "fp16",
    "--precision fp8": "fp8",
    "--pin tp=N": "tp tensor-parallel tensor-parallel-size tensor-model-parallel-size tp-size tensor-parallel-degree",
    "--pin pp=N": "pp pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size pp-size stages",
    "--pin dp=N": "dp data-parallel data-parallel-size dp-size",
    "--pin cp=N": "cp context-parallel context-parallel-size ring-attention",
    "--pin ep=N": "ep expert-parallel expert-parallel-size expert-model-parallel-size",
    "--pin zero=N": "zero zero-stage z stage",
    "--pin sequence_parallel=true": "sequence-parallel",
    "--pin compile=true": "compile torch-compile",
    "--pin recompute=full": "gradient-checkpointing activation-checkpointing recompute checkpoint-activations "
    "recompute-activations",
    "--pin offload=optimizer": "offload cpu-offload offload-optimizer offload-optimizer-device",
    "--plan fsdp": "fsdp",
    "--plan ddp": "ddp",
    "--set workload.seed=1": "seed random-seed",
    "--set workload.optimizer.weight_decay=0.1": "weight-decay wd",
    "--set workload.optimizer.warmup=100": "warmup warmup-steps num-warmup-steps lr-warmup-iters",
    "--set workload.optimizer.schedule=cosine": "scheduler lr-scheduler lr-scheduler-type lr-decay-style lr-schedule",
    "--set workload.optimizer.clip=1.0": "clip grad-clip clip-grad max-grad-norm gradient-clipping gradient-clip-val",
    "--set data.tokenizer=FOLDER": "tokenizer tokenizer-name tokenizer-path tokenizer-model",
    "--set data.field=NAME": "text-column text-field dataset-text-field text-key",
    "--set run.checkpoint_every=100": "checkpoint-every save-every save-steps save-interval checkpoint-interval "
    "save-freq",
    "--set run.evaluate_every=50": "eval-every eval-steps eval-interval evaluate-every",
    "--set run.keep=3": "save-total-limit keep",
    "--set run.track=tensorboard": "tensorboard tb",
    "--set run.track=wandb": "wandb use-wandb wandb-project wandb-name wandb-entity report-to logger tracker trackers "
    "track",
    "--set run.track=mlflow": "mlflow",
    "--set run.track=swanlab": "swanlab trackio",
    "--set run.track=prometheus": "prometheus",
    "--resume-from CHECKPOINT": "checkpoint load load-checkpoint ckpt ckpt-path checkpoint-path from-checkpoint",
    "--preference dpo": "dpo rl rlhf loss-type ref-model",
    "--preference dpo,beta=0.1": "beta rl-beta dpo-beta",
    "--preference orpo": "orpo orpo-alpha",
    "--lora rank=8": "lora-r lora-rank use-peft peft",
    "--lang zh": "language locale",
    "--page FILE.html": "html",
}
OPTIONS_BY_NAME = {name: instead for instead, names in _OPTION_NAMES.items() for name in names.split()}
"""Names of options of other trainers, without the dashes before them, and what to write instead."""

REMARKS_BY_NAME = {
    **dict.fromkeys(
        ("epochs", "num-epochs", "num-train-epochs", "max-epochs", "epoch"),
        Message("a run has a number of steps: one epoch has rows / batch of them, so write --steps N"),
    ),
    **dict.fromkeys(
        ("resume", "resume-from-checkpoint", "continue", "restart"),
        Message("the same command resumes the run in its folder; --resume-from CHECKPOINT begins a new run"),
    ),
    **dict.fromkeys(
        (
            "gradient-accumulation-steps",
            "grad-accum",
            "accumulate",
            "accumulation-steps",
            "grad-accumulation",
            "accumulate-grad-batches",
        ),
        Message("--batch N is the batch of one update; the plan divides it into micro-batches, which --pin mb=N sets"),
    ),
    **dict.fromkeys(
        ("config", "config-file", "job", "yaml"),
        Message("a job file is the first argument: meshwright COMMAND job.yaml"),
    ),
    **dict.fromkeys(
        ("deepspeed", "deepspeed-config", "ds-config", "fsdp-config", "accelerate"),
        Message("`meshwright import FILE` reads the configuration of another system"),
    ),
    **dict.fromkeys(
        ("num-workers", "workers", "dataloader-num-workers"),
        Message("no option is needed: batches are read in the background"),
    ),
    **dict.fromkeys(
        ("load-in-4bit", "load-in-8bit", "qlora", "quantize", "quantization", "bits", "bnb-4bit-quant-type"),
        Message("--lora rank=8,base=nf4 trains adapters of a base in 4 bits"),
    ),
    **dict.fromkeys(
        ("kto", "grpo", "ppo", "ipo", "simpo", "reward-model"),
        Message("preference training is dpo or orpo: write --preference dpo"),
    ),
    **dict.fromkeys(
        ("strategy", "accelerator", "trainer"),
        Message("--plan NAME sets the strategy and --cluster the devices; without them the planner chooses"),
    ),
    **dict.fromkeys(
        ("push-to-hub", "hub-model-id"),
        Message("`meshwright checkpoint export` writes a Hugging Face folder, which their own tool uploads"),
    ),
}
"""Names of options that have no equivalent, with a remark that says what to do."""


def usage_error(command: str, error: CycloptsError) -> InputError:
    """Returns the error of the option parser as one line that begins with the name of the command."""
    if isinstance(error.__cause__, InputError) and isinstance(error, CoercionError):
        name = error.token.keyword if error.token is not None and error.token.keyword else _argument_name(error)
        return InputError(Message("{command}: {name} {cause}", command=command, name=name, cause=error.__cause__))
    return InputError(Message("{command}: {what}", command=command, what=_describe(command, error)))


def _describe(command: str, error: CycloptsError) -> str:
    if isinstance(error, UnknownOptionError):
        known = [name for argument in error.argument_collection if argument.parse for name in argument.names]
        return _describe_unknown(command, error.token.keyword or error.token.value, known)
    if isinstance(error, MissingArgumentError):
        if error.keyword:
            count = error.argument.token_count()[0] if error.argument is not None else 1
            if count > 1:
                return Message("{name} needs {count} values", name=error.keyword, count=count)
            return Message("{name} needs a value", name=error.keyword)
        argument = error.argument
        is_option = argument is not None and argument.index != 0
        return Message("{name} is missing", name=argument.name if argument and is_option else _argument_name(error))
    if isinstance(error, RepeatArgumentError):
        return Message("{name} is given twice", name=error.token.keyword or _argument_name(error))
    if isinstance(error, UnusedCliTokensError):
        return Message("{words!r} is one argument too many", words=" ".join(error.unused_tokens or ()))
    if isinstance(error, CoercionError) and error.token is not None:
        name, value = error.token.keyword or _argument_name(error), error.token.value
        choices = get_args(error.target_type) if get_origin(error.target_type) is Literal else ()
        if choices:
            return Message(
                "{name} {value!r} is not one of {choices}{hint}",
                name=name,
                value=value,
                choices=", ".join(map(str, choices)),
                hint=did_you_mean(value, map(str, choices)),
            )
        kind = Message("a number") if error.target_type is float else Message("a valid value")
        return Message("{name} {value!r} is not {kind}", name=name, value=value, kind=kind)
    return str(error)


def _argument_name(error: CycloptsError) -> str:
    return error.argument.name.lstrip("-").upper() if error.argument is not None else ""


def _describe_unknown(command: str, option: str, known: Iterable[str]) -> str:
    """Describes an unknown `option`, which may end with '=value'. `known`: the options of the command.

    >>> _describe_unknown("train", "--learning_rate=1e-3", ["--lr"])
    'unknown option --learning_rate; write --lr 3e-4'
    >>> _describe_unknown("train", "--modle", ["--model"])
    "unknown option --modle; did you mean '--model'?"
    """
    option, options = option.partition("=")[0], set(known)
    name = option.lstrip("-").replace("_", "-").lower()
    instead, remark = OPTIONS_BY_NAME.get(name), REMARKS_BY_NAME.get(name)
    if instead is not None and instead.split()[0] in options:
        return Message("unknown option {option}; write {instead}", option=option, instead=instead)
    if remark is not None:
        return Message("unknown option {option}; {remark}", option=option, remark=remark)
    if hint := did_you_mean(option, options):
        return Message("unknown option {option}{hint}", option=option, hint=hint)
    return Message(
        "unknown option {option}; `meshwright {command} --help` lists the options", option=option, command=command
    )
