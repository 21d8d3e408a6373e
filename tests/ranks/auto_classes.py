"""Every class of transformers' Auto mappings, tiny, under plans, each against one device: what the sweeps of all
families run.

A family is 'kind:name' ('causal:llama'): a line of KINDS, and a key of that mapping. Its configuration is made small
(train/tiny_config.py, and here the sizes of families that the reduction does not know), its rates of dropout and of
masking 0, its model otherwise as it is. Causal and classifying models have labels, all others a loss of their own over
what they return first. `tried(family, plans)` runs all plans of a family in a process of its own, whose ranks have the
model and what was read of it: a pair costs a second or two.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from equality import check
from model_families import roughened
from pool import Pool, RankFailure, warm
from sweep import UNTRIED
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.example_inputs import ExampleInputs, make_example, name_positional_inputs
from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError, MeshwrightError
from meshwright.runtime.loss import Batch, LossHead, extract_logits
from meshwright.spec.plan import parse_plan
from meshwright.train.proof.reference_run import use_float64
from meshwright.train.tiny_config import shrink_config
from meshwright.train.trainer import parallelize

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM", "masked": "MODEL_FOR_MASKED_LM", "pairs": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ", "sequences": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION", "images": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "sounds": "MODEL_FOR_AUDIO_CLASSIFICATION", "ctc": "MODEL_FOR_CTC", "films": "MODEL_FOR_VIDEO_CLASSIFICATION",
    "seeing": "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "answers": "MODEL_FOR_QUESTION_ANSWERING",
    "patches": "MODEL_FOR_MASKED_IMAGE_MODELING", "areas": "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "things": "MODEL_FOR_OBJECT_DETECTION", "depths": "MODEL_FOR_DEPTH_ESTIMATION",
    "series": "MODEL_FOR_TIME_SERIES_PREDICTION", "plain": "MODEL",
}  # fmt: skip
OWN_LOSS = ("answers", "patches", "areas", "things", "depths", "series", "plain")
LENGTH, ROWS, STEPS, CLASSES, LARGEST = 16, 8, 3, 11, 4_000_000

SECONDS = 60.0
"""Of a family."""


@dataclass(frozen=True)
class Sizes:
    """`kv_heads` 0: as many heads to a key-value head as the family has."""

    heads: int = 8
    hidden: int = 64
    vocabulary: int = 99
    kv_heads: int = 0


USUAL, FEW_KEYS = Sizes(), Sizes(kv_heads=2)
THREE, FIVE, SIX = Sizes(3, 48, 509), Sizes(5, 40, 97), Sizes(6, 48, 509, 2)


# --- small configurations
# -----------------------------------------------------------------------------------------------------

FIXED = {
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "n_groups": 1, "mamba_expand": 2,
    "mamba_d_conv": 4, "conv_kernel": 4, "mamba_n_heads": 8, "mamba_num_heads": 8, "num_mamba_heads": 4,
    "n_mamba_heads": 4, "chunk_size": 8, "mamba_chunk_size": 8, "time_step_rank": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "index_n_heads": 4,
    "index_head_dim": 16, "index_topk": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "global_head_dim": 8, "num_global_key_value_heads": 2,
    "expert_ffn_hidden_size": 32, "moe_latent_size": 32, "expert_dim": 32, "moe_topk": 2, "top_k_experts": 2,
    "moe_num_shared_experts": 1, "intermediate_size_mlp": 96, "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48, "d_inner": 96, "decoder_intermediate_size": 96, "num_encoder_layers": 2,
    "decoder_num_hidden_layers": 2, "depth": 2, "hidden_size_per_layer_input": 8, "type_vocab_size": 2,
    "max_seq_length": 64, "feature_size": 8, "num_mel_bins": 8, "input_feat_per_channel": 8, "conv_channels": 32,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_frames": 4, "projection_dim": 32,
    "classifier_proj_size": 32, "fusion_hidden_size": 16, "query_dim": 64, "num_labels": CLASSES,
}  # fmt: skip
AS_HIDDEN = (
    "emb_dim", "d_embed", "embed_dim", "attention_hidden_size", "cross_attention_hidden_size", "decoder_hidden_size",
    "encoder_hidden_size", "out_hidden_size",
)  # fmt: skip
AS_HEADS = ("decoder_num_attention_heads",)
AS_VOCABULARY = ("n_words", "vocab_size_per_layer_input", "trigram_input_dim")
WIDTHS = ("hidden_sizes", "embed_dims", "channels", "dims", "widths", "embed_dim", "hidden_dim")
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def tiny(config: Any, sizes: Sizes, inside: int = 0) -> None:
    """`config` with small sizes, and those of its parts."""
    from transformers import PretrainedConfig

    layers = next((value for name in LAYERS if type(value := getattr(config, name, None)) is int), 0)
    by_layer = {
        name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == layers > 2
    }
    small: dict[str, Any] = {
        "hidden": sizes.hidden,
        "heads": sizes.heads,
        "ffn": 96,
        "vocabulary": sizes.vocabulary,
        "sequence": LENGTH,
    }
    _try(lambda: shrink_config(config, 2, 2, {**small, "side": 16, "ep": 2}))
    wanted: dict[str, Any] = dict(FIXED) | dict.fromkeys(AS_HIDDEN, sizes.hidden) | dict.fromkeys(AS_HEADS, sizes.heads)
    wanted |= dict.fromkeys(AS_VOCABULARY, sizes.vocabulary) | {
        "d_head": sizes.hidden // sizes.heads,
        "mamba_d_ssm": 2 * sizes.hidden,
    }
    wanted |= dict.fromkeys(("mamba_head_dim", "mamba_d_head", "mamba_headdim"), sizes.hidden // 4)
    wanted |= {"num_key_value_heads": sizes.kv_heads} if sizes.kv_heads else {}
    for name, value in wanted.items():
        if type(getattr(config, name, None)) is int:
            _try(setattr, config, name, value)
    for name, value in by_layer.items():  # a layer of each of two kinds
        _try(setattr, config, name, [value[0], next((other for other in value if other != value[0]), value[0])])
    for name, value in list(vars(config).items()):
        if (
            isinstance(value, list | tuple)
            and value
            and all(type(one) is int for one in value)
            and not name.startswith("_")
        ):
            _try(setattr, config, name, type(value)(_thinner(name, value)))
        if name in ("mask_time_prob", "mask_feature_prob", "layerdrop", "apply_spec_augment") or (
            "drop" in name and type(value) is float
        ):
            _try(setattr, config, name, False if value is True else 0.0)
        if isinstance(value, PretrainedConfig) and inside < 3:
            tiny(value, sizes, inside + 1)
    padding = getattr(config, "pad_token_id", None)
    if type(padding) is int and not 0 <= padding < sizes.vocabulary:
        config.pad_token_id = 0


def _thinner(name: str, value: Sequence[int]) -> list[int]:
    """Sizes that a configuration gives stage by stage."""
    if "conv_dim" in name:
        return [16] * len(value)
    if any(part in name for part in WIDTHS):
        return [16 * (min(at, 2) + 1) for at in range(len(value))]
    if any(part in name for part in ("depths", "num_blocks", "layer_repeats")):
        return [1] * len(value)
    return [2] * len(value) if "heads" in name else [16] * len(value) if name == "image_size" else list(value)


def _try(function: Any, *args: Any) -> None:
    """Some sizes follow from others and cannot be set."""
    try:
        function(*args)
    except Exception:
        return


def _own_sizes(kind: str, name: str, config: Any, sizes: Sizes) -> None:
    """Of families whose sizes hang together by a rule of their own."""
    if name == "funnel":
        own = {
            "block_sizes": [2, 2],
            "num_decoder_layers": 1,
            "d_model": sizes.hidden,
            "n_head": sizes.heads,
            "d_head": sizes.hidden // sizes.heads,
        }
    elif name == "reformer":
        own = {
            "attn_layers": ["local"] * 2,
            "axial_pos_shape": (4, 4),
            "axial_pos_embds_dim": (sizes.hidden // 2,) * 2,
            "is_decoder": kind == "causal",
        }
        own |= {"local_attn_chunk_length": 8, "feed_forward_size": 96, "attention_head_size": 8}
    elif name in ("longformer", "led"):
        own = {"attention_window": [8, 8]}
    else:
        own = {"is_decoder": True} if kind == "causal" and getattr(config, "is_decoder", None) is False else {}
    if kind == "sequences" and getattr(config, "pad_token_id", None) is None:
        own["pad_token_id"] = 1
    for key, value in own.items():
        setattr(config, key, value)


def build(kind: str, name: str, sizes: Sizes) -> nn.Module:
    """The model in float32, the same at every call."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, f"{KINDS[kind]}_MAPPING_NAMES")[name]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    config = model_class.config_class()
    tiny(config, sizes)
    _own_sizes(kind, name, config, sizes)
    config._experts_implementation = "eager"  # its grouped product knows no float64
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters at these sizes")
    torch.manual_seed(0)
    return roughened(model_class(config))


# --- what a family is given
# ---------------------------------------------------------------------------------------------------


@dataclass
class Family:
    """A model with what it reads. `labels`: of a row, and the number of classes; None with a loss of its own."""

    kind: str
    model: nn.Module
    example: ExampleInputs
    vocabulary: int
    labels: tuple[tuple[int, ...], int] | None = None
    anatomy: ModelGraph = field(default_factory=ModelGraph)

    @property
    def loss(self) -> Any:
        return own_loss if self.labels is None else None

    def inputs(self, random: torch.Generator) -> Batch:
        def drawn(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.ndim:
                return value
            shape = (ROWS, *value.shape[1:])
            return (
                torch.randn(shape, generator=random)
                if value.is_floating_point()
                else torch.randint(3, self.vocabulary, shape, generator=random)
            )

        return {name: drawn(value) for name, value in self.example.items()}

    def batch(self, step: int) -> Batch:
        """Rows hold unequal numbers of valid labels."""
        random = torch.Generator().manual_seed(1000 + step)
        batch = self.inputs(random)
        if self.labels is not None:
            shape, classes = self.labels
            is_text = self.kind in ("causal", "seeing") and "input_ids" in batch
            labels = (
                batch["input_ids"].clone() if is_text else torch.randint(0, classes, (ROWS, *shape), generator=random)
            )
            for row in range(ROWS if labels.ndim > 1 else 0):
                labels[row, : (row * 5 + step) % max(labels[row].numel() - 2, 1)] = -100
            batch["labels"] = labels
        return batch

    def loss_of(self, model: nn.Module, step: int, objective: LossHead) -> tuple[torch.Tensor, int]:
        """With torch's own loss; and what counts."""
        batch = {
            name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in self.batch(step).items()
        }
        if self.labels is None:
            return own_loss(model(**batch), batch), ROWS
        labels, logits = batch["labels"], extract_logits(model(**objective.inputs(batch)))
        assert logits is not None
        labels = F.pad(labels[:, 1:], (0, 1), value=-100) if objective.shift else labels
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100), int((labels != -100).sum())


def own_loss(output: Any, batch: Batch) -> torch.Tensor:
    """A number for each row of the first two tensors that a model returns, uneven over their places; the mean over
    rows."""
    rows = next(len(value) for value in batch.values() if isinstance(value, torch.Tensor))
    leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    found = [
        leaf.double()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim and len(leaf) == rows
    ]
    value = found[0] + (found[1] if len(found) > 1 and found[1].shape == found[0].shape else 0.0)
    weight = torch.cos(torch.arange(value[0].numel(), dtype=value.dtype)).view(value[0].shape)
    return ((value * weight) ** 2 / weight.numel() + value * weight).flatten(1).sum(1).mean()


def family_of(said: str, sizes: Sizes) -> Family:
    kind, _, name = said.partition(":")
    model = build(kind, name, sizes)
    tables = [
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings > 20
    ]
    family = Family(
        kind,
        model,
        name_positional_inputs(model, make_example(model, length=LENGTH, side=32)),
        min([sizes.vocabulary, *tables]) - 2,
    )
    if kind not in OWN_LOSS:
        with torch.no_grad():
            logits = extract_logits(copy.deepcopy(model).eval()(**family.inputs(torch.Generator().manual_seed(0))))
        if logits is None:
            raise ValueError("it returns no logits")
        family.labels = tuple(logits.shape[1:-1]), min(logits.shape[-1], sizes.vocabulary)
    return family


# --- one device, and ranks
# ----------------------------------------------------------------------------------------------------


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def alone(family: Family) -> dict[str, Any]:
    """What one device computes, with nothing of ours but the form of the loss."""
    model = use_float64(copy.deepcopy(family.model).double()).train()
    objective, optimizer = LossHead(model, family.loss, None), optimizer_of(model.parameters())
    loss, tokens = family.loss_of(model, 0, objective)
    loss.backward()
    found: dict[str, Any] = {"first": loss.item(), "tokens": tokens, "losses": [], "norms": []}
    found["gradients"] = {
        name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
    }
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = family.loss_of(model, step, objective)
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    found["weights"] = {name: value.detach() for name, value in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        found["evaluated"] = family.loss_of(model, 9, objective)[0].item()
    return found


HELD: list[Family] = []
"""The family of this process, and of the ranks that it forks."""


def under(plan: str) -> dict[str, Any] | str:
    """On every rank: the same under a plan, or why it is refused."""
    family = HELD[0]
    model = use_float64(copy.deepcopy(family.model).double()).train()
    try:
        trainer = parallelize(
            model, optimizer_of, plan, precision="fp64", clip=1.0, anatomy=family.anatomy, loss=family.loss
        )
        loss, tokens, gradients = trainer.gradients(family.batch(0))
    except MeshwrightError as error:
        return str(error)
    records = [trainer.step(family.batch(step)) for step in range(STEPS)]
    found = {"first": loss, "tokens": tokens, "gradients": gradients, "losses": [record.loss for record in records]}
    found |= {
        "norms": [record.gradient_norm for record in records],
        "weights": trainer.full_state_dict(),
        "evaluated": trainer.evaluate(family.batch(9)),
    }
    trainer.close()
    return found


def judged(expected: dict[str, Any], pool: Pool, plan: str, seconds: float) -> tuple[float, float] | str:
    """The largest differences, or the line of a refusal. AssertionError where the plan differs or ends in an error."""
    results = pool.run(parse_plan(plan).world, under, plan, timeout=seconds)
    if not isinstance(results[0], str):
        return check(expected, results, "fp64")
    assert len(set(results)) == 1 and "\n" not in results[0], f"ranks refuse in several lines: {results}"
    return results[0]


def _each(said: str, plans: Sequence[str], sizes: Sizes, seconds: float) -> Iterator[tuple[str, Any]]:
    """(plan, what was found); ('', why) of a family that is not tried."""
    try:
        family = family_of(said, sizes)
        expected, again = alone(family), alone(family)
    except Exception as error:
        yield (
            "",
            f"{UNTRIED}alone it does not run ({type(error).__name__}: "
            f"{(str(error).strip().splitlines() or [''])[0][:120]})",
        )
        return
    if expected["losses"] != again["losses"]:
        yield "", f"{UNTRIED}it draws numbers, so that two runs are never equal"
        return
    try:
        family.anatomy = analyze_model(family.model)
    except InputError as error:
        yield from ((plan, str(error)) for plan in plans)
        return
    if os.environ.get("MESHWRIGHT_SAY"):
        print(said, family.anatomy.stacks, *family.anatomy.findings, sep="\n   ", flush=True)
    HELD[:] = [family]
    pool = Pool()
    for plan in plans:
        begun = time.monotonic()
        try:
            found: Any = judged(expected, pool, plan, seconds)
        except AssertionError as error:
            lines = str(error).strip().splitlines() or ["without a word"]
            found = {"differs": lines[-1 if isinstance(error, RankFailure) else 0], "all": str(error)[-3000:]}
        if os.environ.get("MESHWRIGHT_SAY"):
            print(
                said,
                plan,
                found if not isinstance(found, dict) else found["all"],
                f"{time.monotonic() - begun:.1f} s",
                flush=True,
            )
        yield plan, found
    pool.close()


@functools.cache
def _warmed() -> None:
    """What every family would import again after the fork."""
    warm()
    family = family_of("causal:llama", USUAL)
    family.anatomy = analyze_model(family.model)
    alone(family)


def tried(said: str, plans: Sequence[str], sizes: Sizes = USUAL, seconds: float = SECONDS) -> dict[str, Any]:
    """By plan: (loss, gradient) differences, the line of a refusal, or {'differs': line}; under '' why none was tried.
    In a process of its own, which has `seconds`."""
    _warmed()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found"
        child = os.fork()
        if not child:
            try:
                os.setsid()
                with file.open("w") as written:
                    for plan, found in _each(said, plans, sizes, seconds / 2):
                        written.write(json.dumps([plan, found]) + "\n")
                        written.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        end = time.monotonic() + seconds
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.05)
        return dict(json.loads(line) for line in file.read_text().splitlines()) if file.exists() else {}


def everyone_of(kind: str) -> list[str]:
    """All families of a kind."""
    from transformers.models.auto import modeling_auto

    return [f"{kind}:{name}" for name in getattr(modeling_auto, f"{KINDS[kind]}_MAPPING_NAMES")]


def main() -> None:
    """FILE SIZES BUDGET kind[:name]... -- plan...: appends a JSON line a family to FILE; what stands there already is
    left out."""
    file, sizes, budget, rest = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]
    begun, at = time.monotonic(), rest.index("--")
    plans = rest[at + 1 :]
    known = (
        {(one["family"], one["sizes"], plan) for one in map(json.loads, file.open()) for plan in one["plans"]}
        if file.exists()
        else set()
    )

    for said in (one for each in rest[:at] for one in ([each] if ":" in each else everyone_of(each))):
        left = [plan for plan in plans if (said, sizes, plan) not in known]
        if left and time.monotonic() - begun < budget:
            start = time.monotonic()
            found = tried(said, left, globals()[sizes])
            with file.open("a") as kept:
                kept.write(json.dumps({"family": said, "sizes": sizes, "plans": left, "found": found}) + "\n")
            print(f"{said} {sizes} {time.monotonic() - start:.0f}s", flush=True)
            for plan, what in found.items():
                line = (
                    "DIFFERS " + what["differs"]
                    if isinstance(what, dict)
                    else what
                    if isinstance(what, str)
                    else f"{what[1]:.0e}"
                )
                print(f"    {plan}: {line[:260]}", flush=True)
            print(
                *(f"    {plan}: TOO SLOW\n" for plan in left if plan not in found and "" not in found),
                sep="",
                end="",
                flush=True,
            )


if __name__ == "__main__":
    main()
