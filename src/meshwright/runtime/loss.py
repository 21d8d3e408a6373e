"""Computes the loss of a training step, also over a vocabulary that is sharded over tensor ranks, and in chunks. The
engine calls `LossHead` for each micro-batch.

A step minimises the sum of the losses of all valid labels, divided by their number in the whole batch. If ranks have
unequal numbers of valid labels, the mean of the ranks' mean losses would be a different loss.

`sum_cross_entropy` computes the summed cross-entropy over valid labels. It saves only the softmax of the local logits,
which backward turns into the gradient in place. For each label:

    m   the largest local logit
    p   the probability of m in the local softmax, at least 1 / V for a vocabulary of V words, so log p is finite
    L   = m - log p, the log-sum-exp of the local logits
    G   the log-sum-exp of the logits of all ranks

The full softmax is the local softmax x exp(L - G). So for each label, one all-reduce takes the maximum of one number,
and one sums two numbers. Backward needs no communication. Source: Shoeybi et al., Megatron-LM (2019), section 3. The
form with L is this project's: it computes every exponential once, torch's cross_entropy twice.

The chunked loss computes the product with the vocabulary and its cross-entropy for one chunk of labels at a time. So
the logits of all labels never exist at the same time.

[Note: gradients at once] The loss is a scalar. So once the logits of a chunk are known, the gradients of the head's
input and weight are known too, except for one scalar factor. Forward computes and saves these gradients: H numbers per
label (H: hidden size), and one weight gradient for all chunks. Backward multiplies them by the factor. No product runs
twice. The softmax of all labels (tokens x vocabulary elements) is not saved. Logits and their gradient exist for one
chunk at a time. Chunks do not change the loss of any label, bit for bit, also over tensor ranks. They change only the
summation order of the weight gradient, which is summed over the chunks.

With chunks the head returns a meta tensor instead of logits. A model that computes on it (a cap, a scale) is refused.
Source of the idea: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (2024); Hsu et al.,
Liger Kernel (2024), section 3.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.analysis.example_inputs import bind_inputs, requires_input
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.layer_rules.rule import is_linear_like
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.loss_divisors import LossDivisors, find_divisors
from meshwright.runtime.shard.access_guard import ForwardAccessGuard
from meshwright.runtime.softmax import wide_softmax
from meshwright.spec.plan import Plan

IGNORE_INDEX = -100


def sum_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, shift: bool, group: CommGroup | None = None
) -> torch.Tensor:
    """Returns the sum of the losses over valid labels (not -100), a scalar in float32 or wider.

    `logits` (..., V), `labels` (...). With `group`, `logits` contains only this rank's ceil(V / ranks) columns of the
    vocabulary, fewer on the last ranks. `shift`: whether logits at a position predict the label of the next position.
    """
    wanted = (shift_labels(labels) if shift else labels).reshape(-1).to(logits.device)
    return _SumCrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), wanted, group)


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Returns at every position the label of the next position, and -100 at the last position."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def count_valid_labels(labels: torch.Tensor, shift: bool) -> torch.Tensor:
    """Returns the number of labels that `sum_cross_entropy` sums over, as a scalar on the device of the labels."""
    return (labels[..., 1:] if shift else labels).ne(IGNORE_INDEX).sum()


class _SumCrossEntropy(torch.autograd.Function):
    """Computes the sum of the losses for logits (N, local V) and labels (N). Saves for backward the results of
    `_cross_entropy_terms`."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: CommGroup | None) -> torch.Tensor:
        total, softmax, local, is_local, scale = _cross_entropy_terms(logits, labels, group)
        ctx.save_for_backward(softmax, local, is_local, scale)
        ctx.dtype = logits.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, local, is_local, scale = ctx.saved_tensors
        return _logits_grad(softmax, local, is_local, scale, gradient).to(ctx.dtype), None, None


def cross_entropy_with_grad(
    logits: torch.Tensor, labels: torch.Tensor, group: CommGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the losses over valid labels, and its gradient with respect to `logits` (N, local V)."""
    total, softmax, local, is_local, scale = _cross_entropy_terms(logits, labels, group)
    return total, _logits_grad(softmax, local, is_local, scale, torch.ones_like(total)).to(logits.dtype)


def _cross_entropy_terms(logits: torch.Tensor, labels: torch.Tensor, group: CommGroup | None) -> tuple[Any, ...]:
    """Returns the sum of the losses, the local softmax (N, local V), and for each label (N): its index in this rank's
    part of the vocabulary, whether this part contains it, and exp(L - G) of the module docstring (None without a
    group)."""
    precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
    softmax = wide_softmax(logits, precise)
    peak = logits.amax(dim=-1).to(precise)
    above = -softmax.amax(dim=-1).log()  # log-sum-exp minus the largest logit
    valid = labels != IGNORE_INDEX
    if group is None:
        local = torch.where(valid, labels, 0)
        losses = above + (peak - _logits_at(logits, local, precise))
        scale, is_local = None, valid
    else:
        local, is_local, losses, scale = _reduce_over_ranks(logits, peak + above, labels, valid, group)
        scale = torch.where(valid, scale, 0)
    return torch.where(valid, losses, 0).sum(), softmax, local, is_local, scale


def _logits_grad(
    softmax: torch.Tensor, local: torch.Tensor, is_local: torch.Tensor, scale: torch.Tensor | None, grad: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the summed losses with respect to the logits. Overwrites `softmax` with it, so autograd
    raises an error if backward runs twice. The arguments before `grad` are results of `_cross_entropy_terms`.
    `grad`: the gradient of the summed losses."""
    weight = torch.where(is_local, grad, 0) if scale is None else scale * grad
    result = softmax.mul_(weight.unsqueeze(1))
    result.scatter_add_(1, local.unsqueeze(1), torch.where(is_local, -grad, 0).unsqueeze(1))
    return result


def _logits_at(logits: torch.Tensor, places: torch.Tensor, precise: torch.dtype) -> torch.Tensor:
    return logits.gather(1, places.unsqueeze(1)).squeeze(1).to(precise)


def _reduce_over_ranks(
    logits: torch.Tensor, local_lse: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, group: CommGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns for each label (N): its local index, whether it is on this rank, its loss, and exp(L - G), with
    L = `local_lse`."""
    count, width = logits.shape
    # The maximum over ranks of the last entry of `highest` is the local vocabulary size of rank 0. From this size each
    # rank computes where its part of the vocabulary begins.
    highest = F.pad(local_lse, (0, 1), value=width)
    async_collectives.all_reduce(highest, group, use_max=True).wait()
    local = labels - group.index * highest[count].to(labels.dtype)  # read on the device, without synchronisation
    is_local = valid & (local >= 0) & (local < width)
    local = torch.where(is_local, local, 0)
    top = highest[:count]
    own = (local_lse - top).exp()
    sums = torch.stack([own, torch.where(is_local, _logits_at(logits, local, local_lse.dtype) - top, 0)])
    async_collectives.all_reduce(sums, group).wait()
    return local, is_local, sums[0].log() - sums[1], own / sums[0]


class ChunkedHead:
    """Replaces the forward of a vocabulary head by a function that computes the loss in chunks, and returns a meta
    tensor instead of logits. The caller sets `labels`, already shifted, before each forward."""

    def __init__(self, module: nn.Module, chunks: int, group: CommGroup | None) -> None:
        self.module, self.chunks, self.group = module, chunks, group
        self.linear = isinstance(module, nn.Linear)
        self.labels: torch.Tensor | None = None
        self.made: tuple[torch.Tensor, torch.Tensor] | None = None
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.module._parameters["weight"], self.module._parameters.get("bias")
        assert self.labels is not None and weight is not None
        if self.labels.numel() != x.shape[:-1].numel():
            raise InputError(
                Message(
                    "lc{chunks}: the head gets {shape} positions, but there are {labels} labels: leave lc out",
                    chunks=self.chunks,
                    shape=x.shape[:-1].numel(),
                    labels=self.labels.numel(),
                )
            )
        rows = x.reshape(-1, x.shape[-1])
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(
            rows, weight, bias, self.labels.reshape(-1).to(x.device), self.chunks, self.linear, self.group
        )
        width = weight.shape[0] if self.linear else weight.shape[1]
        logits = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device="meta")
        self.made = (logits, loss)
        return logits

    def take(self, logits: torch.Tensor | None) -> torch.Tensor:
        """Returns the summed loss of the last forward. `logits`: the logits that the model returned.

        Raises:
            InputError: `logits` is not the tensor that the head returned, so the model has changed the logits.
        """
        made, self.made, self.labels = self.made, None, None
        if made is None or made[0] is not logits:
            raise InputError(
                Message(
                    "lc{chunks}: the model changes the logits after its head (a soft cap or a scale): leave lc out",
                    chunks=self.chunks,
                )
            )
        return made[1]


def check_chunked_head(anatomy: ModelGraph, plan: Plan, own_loss: bool) -> None:
    """Checks that the loss can be computed in chunks, if the plan requires chunks.

    Raises:
        InputError: The user passed a loss function, or the model has no vocabulary head.
    """
    if plan.loss_chunks > 1 and (own_loss or anatomy.head is None):
        why = "a user-defined loss needs the logits" if own_loss else "this model has no vocabulary head"
        raise InputError(
            Message(
                "plan {plan}: lc{loss_chunks}: {why}: leave lc out",
                plan=plan.name,
                loss_chunks=plan.loss_chunks,
                why=why,
            )
        )


def install_chunked_head(
    model: nn.Module, anatomy: ModelGraph, plan: Plan, group: CommGroup | None, own_loss: bool
) -> ChunkedHead | None:
    """Installs the chunked head and returns it. Returns None if the plan has no chunks, or if this rank does not run
    the head. `own_loss`: whether the user passed a loss function.

    Raises:
        InputError: as in `check_chunked_head`.
    """
    if plan.loss_chunks == 1:
        return None
    check_chunked_head(anatomy, plan, own_loss)
    assert anatomy.head is not None
    head = model.get_submodule(anatomy.head)
    if not is_linear_like(head) and "forward" not in vars(head):
        return None  # the head is on another stage
    entry = next((hook for hook in head._forward_pre_hooks.values() if hasattr(hook, "was_read")), None)
    if entry is not None:
        head.register_forward_hook(entry.was_read)
    return ChunkedHead(head, plan.loss_chunks, group)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the sum of the losses of valid labels for the head's input x (N, H) and labels (N). The head's weight is
    (V, H) if `linear`, otherwise (H, V)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        chunks: int,
        linear: bool,
        group: Any,
    ) -> torch.Tensor:
        wanted, precise = ctx.needs_input_grad, torch.promote_types(x.dtype, torch.float32)
        of_x = torch.empty_like(x) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=precise) if wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=precise) if wanted[2] and bias is not None else None
        total = torch.zeros((), dtype=precise, device=x.device)
        start = 0
        for part in x.chunk(chunks):
            own = slice(start, start + len(part))
            start += len(part)
            loss, gradient = cross_entropy_with_grad(
                F.linear(part, weight if linear else weight.t(), bias), labels[own], group
            )
            total += loss
            if of_x is not None:
                torch.mm(gradient, weight if linear else weight.t(), out=of_x[own])
            if of_weight is not None:
                of_weight += gradient.t() @ part if linear else part.t() @ gradient
            if of_bias is not None:
                of_bias += gradient.sum(0)
        ctx.save_for_backward(of_x, of_weight, of_bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[Any, ...]:
        of_x, of_weight, of_bias = (None if saved is None else saved.mul_(factor) for saved in ctx.saved_tensors)
        to = ctx.dtype
        return (
            of_x,
            None if of_weight is None else of_weight.to(to),
            None if of_bias is None else of_bias.to(to),
            None,
            None,
            None,
            None,
        )


Batch = dict[str, Any]
LossFunction = Callable[[Any, Batch], torch.Tensor]

DECODER_INPUTS = {"decoder_input_ids", "decoder_inputs_embeds"}
"""Names of the decoder's inputs in an encoder-decoder model."""


class ZeroWeightBatch(dict[str, Any]):
    """A micro-batch with weight 0 in the loss. A rank without data runs it, so that all ranks run the same
    collectives."""


class LossHead:
    """Computes the loss of a micro-batch and the number of its labels.

    A user-defined `loss(output, batch)` must return a mean over the rows (sequences) of the batch. Without such a
    function, the loss is the cross-entropy of logits and labels, and the model's own loss is not computed. Labels of
    -100 are not valid. For causal models the labels are shifted by one position.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        vocabulary_group: CommGroup | None,
        piece: Callable[[torch.Tensor], torch.Tensor] | None = None,
        chunked: ChunkedHead | None = None,
        unreadable: ForwardAccessGuard | None = None,
        gathered: LossFunction | None = None,
    ) -> None:
        """`loss`: the user's loss function, if any, which `gathered` calls with all rows of the batch (batch_loss.py).
        `vocabulary_group`: the tensor ranks that shard the logits, if any. `piece`: if context ranks divide the
        sequence, returns the labels at this rank's positions. `chunked`: the head that computes the loss in chunks.
        `unreadable`: the context in which `loss` runs, which may deny access to parameters.

        Raises:
            InputError: `loss` is combined with context parallelism. Or there is no `loss`, and the model's forward
                requires labels.
        """
        self.model, self.loss, self.piece, self.chunked = model, loss, piece, chunked
        self.applied_loss, self.divisors = gathered or loss, list[LossDivisors]()
        self.group, self.unreadable = vocabulary_group, unreadable or ForwardAccessGuard({}, None)
        if loss is not None and piece is not None:
            raise InputError(
                Message(
                    "cp: a user-defined loss would get a piece of the output and the whole batch: use cp1, or let "
                    "the model return logits"
                )
            )
        name = type(model).__name__
        if loss is None and requires_input(model, "labels"):
            raise InputError(
                Message(
                    "{name}.forward requires labels, but the trainer passes them only to the loss: give them a "
                    "default and return logits, or let the model compute its own loss with parallelize(..., "
                    "loss=lambda output, batch: output['loss'])",
                    name=name,
                )
            )
        self.shift = predicts_next_token(model)
        self.reads_shifted = is_encoder_decoder(model)

    def inputs(self, batch: Batch) -> Batch:
        """Returns the inputs of the model for `batch` (`bind_inputs`): without labels, so that it computes only logits;
        with a user-defined loss, all that forward takes. An encoder-decoder gets decoder inputs from the labels."""
        if self.loss is not None:
            return bind_inputs(self.model, batch, own_loss=True)
        if self.chunked is not None and "labels" in batch:
            self.chunked.labels = self._wanted(batch["labels"])
        found = {name: value for name, value in batch.items() if name != "labels"}
        if self.reads_shifted and not found.keys() & DECODER_INPUTS and getattr(batch.get("labels"), "ndim", 0) > 1:
            found["decoder_input_ids"] = decoder_inputs_from_labels(self.model, batch["labels"])
        return bind_inputs(self.model, found)

    def count(self, batch: Batch) -> int:
        """Returns `count_on_device` as a number. The host waits for the device of the labels."""
        return int(self.count_on_device(batch))

    def count_on_device(self, batch: Batch) -> torch.Tensor | int:
        """Returns the number of valid labels in `batch`. With a user-defined loss, or if `batch` has no labels, returns
        its number of rows (0 for a `ZeroWeightBatch`)."""
        if self.loss is None and "labels" in batch:
            return count_valid_labels(batch["labels"], self.shift)
        return loss_weight(batch)

    def sum(self, output: Any, batch: Batch) -> torch.Tensor:
        """Returns the sum of the losses over the valid labels of the micro-batch. With a user-defined loss, returns the
        sum over the rows.

        Raises:
            InputError: there is no user-defined loss, and `batch` has no labels or `output` has no logits. Or the
                model has changed the logits of a chunked head.
        """
        if self.applied_loss is not None:
            with self.unreadable:
                loss, rows = self.applied_loss(output, batch), loss_weight(batch)
            self.divisors += [find_divisors(loss, rows)] if getattr(loss, "requires_grad", False) else []
            return loss * rows
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

    The attribute `shift_labels` of the model decides. Without the attribute, the class name decides: `...ForCausalLM`,
    `...LMHeadModel`, and `...ForConditionalGeneration` without an encoder (LLaVA, Qwen3-VL) predict it. For a peft
    adapter, the class name of the wrapped model decides.
    """
    inner: Any = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # type: ignore[operator]
    name = type(inner).__name__
    single = not getattr(getattr(inner, "config", None), "is_encoder_decoder", True)
    named = name.endswith(("ForCausalLM", "LMHeadModel")) or (single and name.endswith("ForConditionalGeneration"))
    return bool(getattr(model, "shift_labels", named))


def is_encoder_decoder(model: nn.Module) -> bool:
    """Returns whether the model is an encoder-decoder model, such as T5, BART or Whisper."""
    asks = inspect.signature(model.forward).parameters
    return "decoder_input_ids" in asks and bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def decoder_inputs_from_labels(model: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """Returns the decoder inputs for `labels`: the labels, shifted by one position by the model's own function.

    Raises:
        InputError: the model has no such function, or the function fails.
    """
    config: Any = model.config
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    rule = own or getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    try:
        shifted_right: torch.Tensor = (
            rule(labels) if own else rule(labels, config.pad_token_id, config.decoder_start_token_id)  # type: ignore[misc]
        )
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        why = str(error).partition("\n")[0] if rule else "the model has no function that shifts labels"
        raise InputError(
            Message(
                "the batch has no 'decoder_input_ids' and {type} cannot compute them from 'labels' ({why}): add them "
                "to the batch, or set decoder_start_token_id and pad_token_id in its config",
                type=type(model).__name__,
                why=why,
            )
        ) from None
    return shifted_right


def num_rows(batch: Batch) -> int:
    """Returns the number of rows (sequences) in a batch: the size of the first dimension, which all its tensors share.

    Raises:
        InputError: the batch has no tensors, or tensors with different numbers of rows.
    """
    sizes = {name: value.shape[0] for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    if not sizes:
        raise InputError(Message("the batch holds no tensors"))
    if len(set(sizes.values())) > 1:
        raise InputError(Message("the tensors of the batch have different numbers of rows: {sizes}", sizes=sizes))
    return next(iter(sizes.values()))


def loss_weight(batch: Batch) -> int:
    """Returns the number of rows of `batch` that count in a mean over rows: 0 for a `ZeroWeightBatch`."""
    return 0 if isinstance(batch, ZeroWeightBatch) else num_rows(batch)


def extract_logits(output: Any) -> torch.Tensor | None:
    """Returns the logits in a model's output: the output itself, its entry or attribute `logits`, or the first element
    of a tuple. Returns None if the output has no logits."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return output.get("logits")
    if isinstance(output, tuple):
        return output[0]
    return getattr(output, "logits", None)
