"""The loss over the draft vocabulary, all TTT steps at once, so that no [tokens, vocabulary] tensor outlives a block of rows.

A target position serves a start of every step. So blocks of target positions are the outer loop: the verifier's distribution of a
block is computed once, then each step's logits against it, their loss and their gradient, which goes into the hidden states at once.
Only a block's logits exist at a time, and in float32 only the distribution and a slice of rows that stays in the cache.

Shapes: R target positions, H hidden, V draft vocabulary, J steps; step j has as many rows as starts with a target.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

ROWS = 512  # target positions of a block: enough for a matrix product to run at its rate
SLICE = 128  # rows of it in float32 at once on a CPU: four megabytes at V = 8,192


class Verdicts(NamedTuple):
    """What the head said."""

    sums: torch.Tensor  # [J] loss summed over the rows of each step
    best: torch.Tensor  # [R] the verifier's own best id within the draft vocabulary
    guesses: list[torch.Tensor]  # per step: the draft's best id


def top(x_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest value [R], its first index [R]). In two stages: on a CPU a maximum alone is ten times as fast as one with its index."""
    if x_RV.shape[-1] % 64 or x_RV.device.type != "cpu":
        found = x_RV.max(-1)
        return found.values, found.indices
    parts = x_RV.unflatten(-1, (-1, 64))
    value, part = parts.amax(-1).max(-1)
    within = parts[torch.arange(len(part), device=part.device), part].max(-1).indices
    return value, part * 64 + within


def _log_sum(largest: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exponentials [r], from the largest logit and the probability it got, which is at least 1 / V."""
    return largest - p.amax(-1).log()


def _distribution(logits_RV: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum p log p [R], best id [R]) of the verifier's logits, whose probabilities are written to `p` [R, V] float32."""
    largest, best = top(logits_RV)
    entropy, largest = p.new_empty(len(p)), largest.float()
    for a in range(0, len(p), _slice(p.device)):
        at = slice(a, a + _slice(p.device))
        wide = logits_RV[at].to(torch.float32, copy=True)
        torch.softmax(wide, -1, out=p[at])
        # log p = logit - lse: p = 0 then gives 0, not 0 * -inf
        entropy[at] = wide.mul_(p[at]).sum(-1) - _log_sum(largest[at], p[at])
    return entropy, best


def _slice(device: torch.device) -> int:
    return SLICE if device.type == "cpu" else ROWS


def _rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x[at] for ascending, different `at`: a view where they are a run, as nearly always."""
    first, last = int(at[0]), int(at[-1])
    return x[first : last + 1] if last - first + 1 == at.numel() else x[at]


def _kl(raw: torch.Tensor, largest: torch.Tensor, p: torch.Tensor, entropy: torch.Tensor, gradient: bool) -> torch.Tensor:
    """KL(p || draft) [r] of a slice of logits, which becomes the gradient: softmax(raw) - p."""
    wide = raw.to(torch.float32, copy=True)
    q = torch.softmax(wide, -1)
    loss = entropy - wide.mul_(p).sum(-1) + _log_sum(largest, q)
    if gradient:
        raw.copy_(q.sub_(p))
    return loss


def _library_loss(raw: torch.Tensor, target: torch.Tensor, loss_config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss [r], gradient) of the library's own losses on a block; `target` holds the verifier's logits."""
    with torch.enable_grad():
        logits = raw.float().detach().requires_grad_()
        loss = sum(weight * fn(logits[None], target[None].float())[0] for fn, weight in loss_config.values())
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return loss.detach(), gradient.to(raw.dtype)


class _HeadLoss(torch.autograd.Function):
    """Gradients are computed together with the losses, block by block; the backward only scales them."""

    @staticmethod
    def forward(ctx, head_VH, verifier_head_VH, verifier_RH, slots, scales, loss_config, gradient, *hidden):
        device, total = verifier_RH.device, verifier_RH.shape[0]
        train_head = gradient and ctx.needs_input_grad[0]
        d_head = torch.zeros(head_VH.shape, dtype=torch.float32, device=device) if train_head else None
        d_hidden = [torch.empty_like(x) for x in hidden] if gradient else []
        weight, verifier = head_VH.to(verifier_RH.dtype), verifier_head_VH.to(verifier_RH.dtype)
        rows = [torch.zeros(x.shape[0], dtype=torch.float32, device=device) for x in hidden]
        guesses = [torch.empty(x.shape[0], dtype=torch.long, device=device) for x in hidden]
        best = torch.empty(total, dtype=torch.long, device=device)
        begins = torch.arange(0, total + ROWS, ROWS)
        bounds = [torch.searchsorted(s.cpu(), begins).tolist() for s in slots]  # slots ascend, so a block's rows are a range
        # blocks share their buffers: fresh ones would be fetched from the system, page by page, every time
        logits_RV, raw_RV = (verifier_RH.new_empty(min(ROWS, total), weight.shape[0]) for _ in range(2))
        p_RV = torch.empty_like(logits_RV, dtype=torch.float32) if loss_config is None else None
        for number, a in enumerate(range(0, total, ROWS)):
            block = verifier_RH[a : a + ROWS]
            logits = torch.mm(block, verifier.T, out=logits_RV[: len(block)])
            if loss_config is None:
                p = p_RV[: len(block)]
                entropy, best[a : a + ROWS] = _distribution(logits, p)
            else:
                best[a : a + ROWS] = top(logits)[1]
            for j, x in enumerate(hidden):
                here = slice(*bounds[j][number : number + 2])
                if here.start == here.stop:
                    continue
                raw, local = torch.mm(x[here], weight.T, out=raw_RV[: here.stop - here.start]), slots[j][here] - a
                largest, guesses[j][here] = top(raw)
                if loss_config is None:
                    largest = largest.float()
                    for b in range(0, raw.shape[0], _slice(device)):
                        part = slice(b, b + _slice(device))
                        at = slice(here.start + b, min(here.start + b + _slice(device), here.stop))
                        rows[j][at] = _kl(raw[part], largest[part], _rows(p, local[part]), _rows(entropy, local[part]), gradient)
                else:
                    rows[j][here], raw = _library_loss(raw, logits[local], loss_config)
                if gradient:
                    torch.mm(raw, weight, out=d_hidden[j][here])
                if train_head:
                    d_head.add_(raw.T @ x[here], alpha=scales[j])
        ctx.save_for_backward(*d_hidden, *([d_head] if train_head else []))
        ctx.scales, ctx.head_dtype = scales, head_VH.dtype
        sums = torch.stack([x.sum() for x in rows])
        ctx.mark_non_differentiable(sums, best, *guesses)
        return sum(s * scale for s, scale in zip(sums, scales, strict=True)), sums, best, *guesses

    @staticmethod
    def backward(ctx, d_total, *_):
        d_hidden, d_head = ctx.saved_tensors[: len(ctx.scales)], ctx.saved_tensors[len(ctx.scales) :]
        d_head = (d_head[0] * d_total).to(ctx.head_dtype) if d_head else None
        return d_head, *[None] * 6, *[d * (d_total * s).to(d.dtype) for d, s in zip(d_hidden, ctx.scales, strict=True)]


def losses(
    hidden_RH: list[torch.Tensor],
    slots_R: list[torch.Tensor],
    head_VH: torch.Tensor,
    verifier_head_VH: torch.Tensor,
    verifier_RH: torch.Tensor,
    scales: list[float],
    loss_config: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, Verdicts]:
    """Sum over steps of `scales` times the step's summed loss, differentiable in hidden states and head; and what was seen.

    Args:
        hidden_RH: per step, normed states of the starts that have a target, in the compute dtype.
        slots_R: per step, the target position (a row of `verifier_RH`) of each of them, ascending.
        verifier_RH: the verifier's normed last states at the target positions, in the compute dtype.
        loss_config: the library's losses; None is KL(verifier || draft), computed in slices.
    """
    gradient = torch.is_grad_enabled()
    found = _HeadLoss.apply(head_VH, verifier_head_VH, verifier_RH, slots_R, scales, loss_config, gradient, *hidden_RH)
    return found[0], Verdicts(found[1], found[2], list(found[3:]))
