"""The training-time-test (TTT) step of EAGLE-3, computed only where it is needed.

At TTT step j the query of position i sees the keys of block 0 up to i (causal, within its document) and one key per
later step at its own position, k_1[i] .. k_j[i], under one softmax. The library builds a dense mask of S x (j+1)S for
that. Here block 0 is plain causal attention by a fused kernel that also returns its log-sum-exp, and the j extra scores
are merged in:

    lse = logaddexp(lse0, s_1 .. s_j)        out = e^(lse0 - lse) out0 + sum_m e^(s_m - lse) v_m[i]

The backward calls the same kernel's backward with the *merged* out and lse, which makes it exact: with
p_m = e^(s_m - lse) and ds_m = p_m (dO . (v_m - out)), dq += scale ds_m k_m, dk_m = scale ds_m q, dv_m = p_m dO.

Only *starts* need queries, MLP and logits: positions whose target at some step is supervised. Prompts give keys and
values of step 0 alone (`starts`; `pointwise`: what lies between the matrix products; `flash`: block 0's kernels). The verifier's target
distribution is computed once per position, and the loss block by block (`headloss`), so no [tokens, draft vocabulary] tensor exists.

Shapes: N packed tokens, M starts, H hidden, Q query heads, G key-value heads, D head dimension, V draft vocabulary.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import activations

from helpers import flash, headloss
from helpers.flash import Segment
from helpers.pointwise import gated_mlp, join, rms_norm, rotate, take
from helpers.starts import Plan, plan

# --- attention -----------------------------------------------------------------------------------------------------


class _Attend(torch.autograd.Function):
    """TTT attention of M queries: block 0 by segments, one diagonal per later step, merged by log-sum-exp."""

    @staticmethod
    def forward(ctx, q_MQD, k_NGD, v_NGD, segments, window, scale, *diagonals):
        out, lse, kept = flash.forward(q_MQD, k_NGD, v_NGD, segments, scale, window)
        groups = q_MQD.shape[1] // k_NGD.shape[1]
        if diagonals:
            q = q_MQD.float().unflatten(1, (-1, groups))  # [M, G, Q/G, D]
            scores = [(q * k.float()[:, :, None]).sum(-1).flatten(1) * scale for k in diagonals[::2]]
            total = torch.stack([lse, *scores]).logsumexp(0)
            out = out.float().mul_((lse - total).exp_()[..., None])
            for s, v in zip(scores, diagonals[1::2], strict=True):
                out.unflatten(1, (-1, groups)).addcmul_((s - total).exp().unflatten(1, (-1, groups))[..., None], v.float()[:, :, None])
            lse = total
        out = out.to(q_MQD.dtype)
        ctx.save_for_backward(q_MQD, k_NGD, v_NGD, out, lse, *diagonals)
        ctx.segments, ctx.window, ctx.scale, ctx.kept = segments, window, scale, kept
        return out

    @staticmethod
    def backward(ctx, d_MQD):
        q_MQD, k_NGD, v_NGD, out, lse, *diagonals = ctx.saved_tensors
        groups = q_MQD.shape[1] // k_NGD.shape[1]
        d_MQD = d_MQD.to(q_MQD.dtype).contiguous()
        dq, dk, dv = flash.backward(d_MQD, q_MQD, k_NGD, v_NGD, out, lse, ctx.segments, ctx.scale, ctx.window, ctx.kept)
        extra = []
        if diagonals:
            d, q = d_MQD.float().unflatten(1, (-1, groups)), q_MQD.float().unflatten(1, (-1, groups))
            inner = (d * out.float().unflatten(1, (-1, groups))).sum(-1)
            for k, v in zip(diagonals[::2], diagonals[1::2], strict=True):
                wide_k, wide_v = k.float()[:, :, None], v.float()[:, :, None]
                p = ((q * wide_k).sum(-1) * ctx.scale - lse.unflatten(1, (-1, groups))).exp()
                ds = p * ((d * wide_v).sum(-1) - inner) * ctx.scale
                dq.unflatten(1, (-1, groups)).addcmul_(ds[..., None], wide_k)
                extra += [(ds[..., None] * q).sum(2).to(k.dtype), (p[..., None] * d).sum(2).to(v.dtype)]
        return dq.to(q_MQD.dtype), dk.to(k_NGD.dtype), dv.to(v_NGD.dtype), None, None, None, *extra


def attend(q_MQD, k_NGD, v_NGD, segments: list[Segment], scale: float, window: int | None = None, diagonals=()) -> torch.Tensor:
    """TTT attention [M, Q, D] of the starts in `segments`; differentiable in all tensors.

    Args:
        q_MQD: queries of the starts; k_NGD, v_NGD: keys and values of step 0, every position.
        diagonals: (k_1, v_1, k_2, v_2, ..), each [M, G, D], of the later steps.
        window: a key further back than this many positions is not seen (block 0 alone, as in the library).
    """
    with torch.autocast(q_MQD.device.type, enabled=False):  # float32 inside stays float32, in the backward too
        return _Attend.apply(q_MQD, k_NGD, v_NGD, segments, window, scale, *diagonals)


# --- the step ----------------------------------------------------------------------------------------------------


def _stacked(linears: list[Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight, bias) of several linear layers as one, in the compute dtype: one product over one input."""
    weights, biases = [x.weight for x in linears], [x.bias for x in linears]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    bias = None if biases[0] is None else torch.cat(biases).to(dtype)
    return weight.to(dtype), bias


class _Weights:
    """A layer's matrices in the compute dtype, cast once for all steps: their gradients gather here before they are cast back."""

    def __init__(self, layer: Any, dtype: torch.dtype):
        attention, mlp = layer.self_attn, layer.mlp
        self.q = _stacked([attention.q_proj], dtype)
        self.kv = _stacked([attention.k_proj, attention.v_proj], dtype)
        self.o = _stacked([attention.o_proj], dtype)
        plain = getattr(mlp.gate_proj, "bias", None) is None and getattr(mlp.down_proj, "bias", None) is None
        self.gated = None
        if plain and isinstance(mlp.act_fn, torch.nn.SiLU | activations.SiLUActivation):
            self.gated = _stacked([mlp.gate_proj, mlp.up_proj], dtype)[0], _stacked([mlp.down_proj], dtype)[0]


class _Layers:
    """Runs the draft's decoder layers over a plan, keeping block-0 keys and the diagonals of earlier steps."""

    def __init__(self, model: Any, found: Plan, dtype: torch.dtype):
        self.model, self.plan, self.dtype = model, found, dtype
        self.weights = [_Weights(layer, dtype) for layer in model.layers]
        self.block0: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.diagonals: list[list[torch.Tensor]] = [[] for _ in model.layers]

    def _heads(self, attention: Any, name: str, x_TC: torch.Tensor) -> torch.Tensor:
        """A projection as [T, heads, D], with the per-head norm where the layer has one (qwen3)."""
        out = x_TC.unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, f"{name}_norm", None)
        return out if norm is None else rms_norm(norm, out, self.dtype)

    def _enter(self, layer: Any, index: int, token: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor | None):
        """(input of the projections, residual at `rows`) of a layer; the first one joins embeddings and hidden state."""
        if index:
            joined, normed = rms_norm(layer.input_layernorm, hidden, self.dtype), None
        else:
            joined, normed = join(layer, token, self.model.embed_tokens.weight, hidden, self.dtype, rows)
        if normed is not None and layer.norm_before_residual:
            return joined, normed
        return joined, hidden if rows is None else take(hidden, rows)

    def step(self, j: int, token: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Output of the last layer at the starts [M, H], float32.

        Args:
            token, hidden, positions: of every position at step 0, of the starts afterwards.
        """
        # float32 angles, as the library has them: its input there holds float32 embeddings
        cos, sin = (x[0] for x in self.model.rotary_emb(hidden.new_empty(1, dtype=torch.float32), positions[None]))
        for index, layer in enumerate(self.model.layers):
            attention, weights, segments = layer.self_attn, self.weights[index], self.plan.segments
            window = self.model.sliding_window if index in self.model.sliding_window_indices else None
            rows = None
            if j == 0 and index + 1 == len(self.model.layers):
                rows = self.plan.starts if self.plan.starts.numel() < len(token) else None
            elif j == 0:
                segments = self.plan.documents  # the layers above need its output everywhere
            joined, residual = self._enter(layer, index, token, hidden, rows)
            k, v = linear(joined, *weights.kv).chunk(2, -1)
            k, v = rotate(self._heads(attention, "k", k), cos, sin), v.unflatten(-1, (-1, attention.head_dim))
            if j:
                self.diagonals[index] += [k, v]
            else:
                self.block0.append((k, v))
            if rows is not None:
                joined, cos, sin = take(joined, rows), cos[rows], sin[rows]
            q = rotate(self._heads(attention, "q", linear(joined, *weights.q)), cos, sin)
            # a layer below the last still needs its diagonals only at the starts, which is where steps 1.. query
            out = attend(q, *self.block0[index], segments, attention.scaling, window, self.diagonals[index])
            hidden = residual + linear(out.flatten(1), *weights.o)
            x = rms_norm(layer.post_attention_layernorm, hidden, self.dtype)
            hidden = hidden + (layer.mlp(x) if weights.gated is None else gated_mlp(x, *weights.gated))
        return hidden


def _over_the_full_vocabulary(model: Any, normed_RH: torch.Tensor, full_head: torch.Tensor) -> torch.Tensor:
    """Draft id [R] of the verifier's own best token over its whole vocabulary; -1 where the draft cannot propose it."""
    found = torch.cat([headloss.top(linear(block.to(full_head.dtype), full_head))[1] for block in normed_RH.split(headloss.ROWS)])
    if model.t2d is None:
        return found
    return torch.where(model.t2d[found], (model.t2d.cumsum(0) - 1)[found], -1)


def forward(
    self: Any,
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor,
    document_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    verifier_last_hidden_states: torch.Tensor | None = None,
    ttt_steps: int = 3,
    ttt_step_loss_decay: float = 1.0,
    loss_config: dict | None = None,
    **_kwargs: Any,
):
    """Drop-in for `Eagle3DraftModel.forward` in training and validation: same arguments, losses, metrics and gradients.

    It differs on purpose where a packed row holds several documents: a start and its target must lie in one document,
    while the library also trains a document's last starts on the next document's first tokens. In evaluation mode
    accuracies are against the verifier's full vocabulary where its head is bound.

    Args:
        hidden_states: [1, N, A*H]; input_ids, document_ids, loss_mask, position_ids: [1, N], as the library packs them.
        verifier_last_hidden_states: [1, N, H].

    Returns:
        (predicted draft ids per step [1, N], -1 where nothing was predicted; loss; metrics as sums and totals).
    """
    device = hidden_states.device
    found = plan(document_ids[0], loss_mask[0], ttt_steps)
    total = document_ids.shape[1]
    positions = position_ids[0] if position_ids is not None else 1 + torch.arange(total, device=device)
    metrics: dict[str, torch.Tensor] = {}
    if not found.starts.numel():
        # nothing supervised: a zero with a graph, counted as zero rows, so that it can neither win nor stop a run
        zero = sum((p.sum() * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros((), device=device))
        empty = [torch.full((1, total), -1, device=device) for _ in range(ttt_steps)]
        return empty, zero, {"loss_sum": zero.detach(), "loss_total": torch.zeros((), device=device)}
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else self.fc.weight.dtype
    x = hidden_states[0]
    if self.input_norm is not None:
        x = rms_norm(self.input_norm, x, dtype)
    if self.fc_norm is not None:
        parts = x.chunk(len(self.fc_norm), dim=-1)
        x = torch.cat([rms_norm(norm, part, dtype) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
    hidden = linear(x.to(dtype), *_stacked([self.fc], dtype))
    layers = _Layers(self, found, dtype)
    normed = []
    for j in range(ttt_steps):
        index = found.starts + j
        if j == 0:
            token, at = input_ids[0], positions
        else:
            token = torch.where(index < total, input_ids[0, index.clamp_max(total - 1)], 0)
            at = positions[found.starts] + j
        hidden = layers.step(j, token, hidden, at)
        out = rms_norm(self.norm, hidden, hidden.dtype if self.config.norm_output else dtype)
        hidden = out if self.config.norm_output else hidden
        normed.append(take(out.to(dtype), found.targets[j]))
    # targets of all steps lie at supervised positions, whose distribution is computed once
    wanted = (loss_mask[0].bool() & (document_ids[0] >= 0)).nonzero().squeeze(1)
    place = torch.full((total,), -1, device=device)
    place[wanted] = torch.arange(wanted.numel(), device=device)
    slots = [place[found.starts[rows] + j] for j, rows in enumerate(found.targets)]
    scales = [ttt_step_loss_decay**j / (rows.numel() + 1e-5) for j, rows in enumerate(found.targets)]
    simple_kl = loss_config is None or list(loss_config) == ["kl_div"] and loss_config["kl_div"][1] == 1.0
    with torch.no_grad():
        verifier = rms_norm(self.verifier_norm, verifier_last_hidden_states[0, wanted], dtype)
    with torch.autocast(device.type, enabled=False):
        loss, said = headloss.losses(
            normed, slots, self.lm_head.weight, self.verifier_lm_head.weight, verifier, scales, None if simple_kl else loss_config
        )
    full_head = None if self.training else getattr(self, "full_head", None)
    best = said.best if full_head is None else _over_the_full_vocabulary(self, verifier, full_head)
    correct = loss_mask[0, found.starts].bool()  # of a start: every step so far right
    drafted = []
    for j, (rows, guess) in enumerate(zip(found.targets, said.guesses, strict=True)):
        asked = correct[rows].sum().float()  # starts without a target at this step are not asked
        right = torch.zeros_like(correct)
        right[rows] = guess == best[slots[j]]
        correct = correct & right
        hits = correct[rows].sum().float()
        for name, top, bottom in (
            (f"loss_{j}", said.sums[j] * scales[j], torch.ones((), device=device)),
            (f"full_acc_{j}", hits, torch.tensor(float(rows.numel()), device=device)),
            (f"cond_acc_{j}", hits.clone(), asked),
        ):
            metrics[f"{name}_sum"], metrics[f"{name}_total"] = top, bottom
        shown = torch.full((1, total), -1, device=device)
        shown[0, found.starts[rows]] = guess
        drafted.append(shown)
    metrics["loss_sum"], metrics["loss_total"] = loss.detach().clone(), torch.ones((), device=device)
    return drafted, loss, metrics


def bind(model: Any, full_head: torch.Tensor | None = None) -> Any:
    """Give a library draft model this step as its `forward`; weights, config and checkpoints stay the library's.

    Args:
        full_head: the verifier's output matrix [vocabulary, H], for accuracies over its whole vocabulary in evaluation.
    """
    model.full_head = full_head
    model.forward = types.MethodType(forward, model)
    return model
