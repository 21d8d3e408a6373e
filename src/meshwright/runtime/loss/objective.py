"""Defines what a step minimises: the sum of the losses of all valid labels, divided by their number in the whole batch.

A common error is to take a mean on each rank and then the mean of these means. If ranks have unequal numbers of valid
labels, this is a different loss.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.analysis.example_inputs import requires_input
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.loss.cross_entropy import ChunkedHead, count_valid_labels, shift_labels, sum_cross_entropy
from meshwright.runtime.shard.access_guard import ForwardAccessGuard

Batch = dict[str, Any]
LossFunction = Callable[[Any, Batch], torch.Tensor]

DECODER_INPUTS = {"decoder_input_ids", "decoder_inputs_embeds"}
"""Names of the decoder's inputs in an encoder-decoder model."""


class ZeroWeightBatch(dict[str, Any]):
    """A micro-batch with weight 0 in the loss. A rank runs it so that all ranks run the same collectives."""


class LossHead:
    """Computes the loss of a micro-batch and the number of its labels.

    The user's `loss(output, batch)` is a mean over the rows of the batch. Without it, the loss is the cross-entropy of
    logits and labels. The model's own loss is not computed. Labels of -100 are not valid, and causal models shift the
    labels by one position.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        vocabulary_group: CommGroup | None,
        piece: Callable[[torch.Tensor], torch.Tensor] | None = None,
        chunked: ChunkedHead | None = None,
        unreadable: ForwardAccessGuard | None = None,
    ) -> None:
        """Prepares the loss. `piece` returns this rank's positions of labels, if context ranks divide the sequence.
        `chunked` computes the loss instead of logits. `unreadable` makes parameters inaccessible while a loss of the
        user runs."""
        self.model, self.loss, self.piece, self.chunked = model, loss, piece, chunked
        self.group = vocabulary_group
        self.unreadable = unreadable or ForwardAccessGuard({}, None)
        if loss is not None and piece is not None:
            raise InputError(
                Message(
                    "cp: a loss of one's own sees a piece of the output beside the whole batch: use cp1, or let the "
                    "model return logits"
                )
            )
        name = type(model).__name__
        if loss is None and requires_input(model, "labels"):
            raise InputError(
                Message(
                    "{name}.forward demands labels, which are kept for the loss: give them a default and return "
                    "logits, or let the model make its own loss with parallelize(..., loss=lambda output, batch: "
                    "output['loss'])",
                    name=name,
                )
            )
        self.shift = predicts_next_token(model)
        self.reads_shifted = is_encoder_decoder(model)

    def inputs(self, batch: Batch) -> Batch:
        """Returns the inputs of the model without labels, so that the model computes only logits."""
        if self.loss is not None:
            return batch
        if self.chunked is not None and "labels" in batch:
            self.chunked.labels = self._wanted(batch["labels"])
        found = {name: value for name, value in batch.items() if name != "labels"}
        if self.reads_shifted and not found.keys() & DECODER_INPUTS and getattr(batch.get("labels"), "ndim", 0) > 1:
            found["decoder_input_ids"] = decoder_inputs_from_labels(self.model, batch["labels"])
        return found

    def count(self, batch: Batch) -> int:
        """Returns the number of valid labels in `batch`. With a loss of the user, returns the number of rows."""
        if self.loss is None and "labels" in batch:
            return count_valid_labels(batch["labels"], self.shift)
        return loss_weight(batch)

    def sum(self, output: Any, batch: Batch) -> torch.Tensor:
        """Returns the sum of the losses over the valid labels (or rows) of the micro-batch."""
        if self.loss is not None:
            with self.unreadable:
                loss = self.loss(output, batch)
            return loss * loss_weight(batch)
        logits = extract_logits(output)
        if logits is None or "labels" not in batch:
            raise InputError(
                Message(
                    "the loss is not known: the batch has {batch} and the model returns {type}; give 'labels' and a "
                    "model that returns logits, or pass loss=function(output, batch)",
                    batch=sorted(batch),
                    type=type(output).__name__,
                )
            )
        if self.chunked is not None:
            return self.chunked.take(logits)
        return sum_cross_entropy(logits, self._wanted(batch["labels"]), False, self.group)

    def _wanted(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the label for the logits at each position. Labels are shifted before the sequence is cut, because the
        label of the last position of a piece may be in another piece."""
        labels = shift_labels(labels) if self.shift else labels
        return labels if self.piece is None else self.piece(labels)


def predicts_next_token(model: nn.Module) -> bool:
    """Returns whether the logits at a position predict the next token.

    This is so if the model declares it (`shift_labels`), if its name implies it, or if it generates without an encoder
    (LLaVA, Qwen3-VL). Adapters of peft around a model do not matter.
    """
    inner: Any = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # type: ignore[operator]
    name = type(inner).__name__
    single = not getattr(getattr(inner, "config", None), "is_encoder_decoder", True)
    named = name.endswith(("ForCausalLM", "LMHeadModel")) or (single and name.endswith("ForConditionalGeneration"))
    return bool(getattr(model, "shift_labels", named))


def is_encoder_decoder(model: nn.Module) -> bool:
    """Returns whether a decoder generates from the output of an encoder (T5, BART, Whisper)."""
    asks = inspect.signature(model.forward).parameters
    return "decoder_input_ids" in asks and bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def decoder_inputs_from_labels(model: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """Returns the decoder inputs for `labels`: the labels shifted by one position by the model's own rule."""
    config: Any = model.config
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    rule = own or getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    try:
        shifted_right: torch.Tensor = (
            rule(labels) if own else rule(labels, config.pad_token_id, config.decoder_start_token_id)  # type: ignore[misc]
        )
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        why = str(error).partition("\n")[0] if rule else "it says no rule"
        raise InputError(
            Message(
                "the batch has no 'decoder_input_ids' and {type} cannot make them of 'labels' ({why}): put them in "
                "the batch, or set decoder_start_token_id and pad_token_id in its config",
                type=type(model).__name__,
                why=why,
            )
        ) from None
    return shifted_right


def num_rows(batch: Batch) -> int:
    """Returns the number of rows (sequences) in a batch. It is the common first dimension of all its tensors."""
    sizes = {name: value.shape[0] for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    if not sizes:
        raise InputError(Message("the batch holds no tensors"))
    if len(set(sizes.values())) > 1:
        raise InputError(Message("the tensors of the batch differ in rows: {sizes}", sizes=sizes))
    return next(iter(sizes.values()))


def loss_weight(batch: Batch) -> int:
    """Returns the number of rows of `batch` that count in a mean over rows."""
    return 0 if isinstance(batch, ZeroWeightBatch) else num_rows(batch)


def extract_logits(output: Any) -> torch.Tensor | None:
    """Returns the logits in a model's output, None if there are none."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return output.get("logits")
    if isinstance(output, tuple):
        return output[0]
    return getattr(output, "logits", None)
