"""The training-time-test (TTT) step of EAGLE-3, computed only where it is needed.

At TTT step j the query of position i sees the keys of block 0 up to i (causal, within its document) and one key per
later step at its own position, k_1[i] .. k_j[i], under one softmax. The library builds a dense mask of S x (j+1)S for
that. Here block 0 is plain causal attention by a fused kernel that also returns its log-sum-exp, and the j extra scores
are merged in:

    lse = logaddexp(lse0, s_1 .. s_j)        out = e^(lse0 - lse) out0 + sum_m e^(s_m - lse) v_m[i]

The backward calls the same kernel's backward with the *merged* out and lse, which makes it exact: with
p_m = e^(s_m - lse) and ds_m = p_m (dO . (v_m - out)), dq += scale ds_m k_m, dk_m = scale ds_m q, dv_m = p_m dO.

Only *starts* need queries, MLP and logits: positions whose target at some step is supervised. Prompts give keys and
values of step 0 alone. The verifier's target distribution is computed once per position, the loss row block by row
block, so no [tokens, draft vocabulary] tensor exists in float32.

Shapes: N packed tokens, M starts, H hidden, Q query heads, G key-value heads, D head dimension, V draft vocabulary.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from transformers.models.llama.modeling_llama import rotate_half

ROWS = 256  # rows of logits held in float32 at once


class Segment(NamedTuple):
    """A run of consecutive starts [start, stop) of the document that begins at `document`; its first row among starts."""

    document: int
    start: int
    stop: int
    row: int


class Plan(NamedTuple):
    """Which positions a batch needs, from its documents and mask."""

    starts: torch.Tensor  # [M] positions that need a query
    segments: list[Segment]
    targets: list[torch.Tensor]  # per step: rows (into starts) whose target is supervised and in the same document
    documents: list[Segment]  # every document whole, for layers below the last


def plan(document_ids_N: torch.Tensor, loss_mask_N: torch.Tensor, steps: int) -> Plan:
    """Positions needed at each of `steps` steps: start i has its step-k target at i + k, in the same document.

    Args:
        document_ids_N: document of each position, -1 for padding; loss_mask_N: 1 where the target is supervised.
    """
    documents, supervised = document_ids_N.cpu(), loss_mask_N.cpu().bool() & (document_ids_N.cpu() >= 0)
    total = documents.numel()
    reaches = []
    for k in range(steps):
        ok = torch.zeros(total, dtype=torch.bool)
        if k < total:
            ok[: total - k] = supervised[k:] & (documents[: total - k] == documents[k:])
        reaches.append(ok)
    needed = torch.stack(reaches).any(0)
    starts = needed.nonzero().squeeze(1)
    row_of = torch.full((total,), -1)
    row_of[starts] = torch.arange(starts.numel())
    begin: dict[int, int] = {}
    whole = []
    ids = documents.tolist()
    for i, d in enumerate(ids):
        if d >= 0 and d not in begin:
            begin[d] = i
        if d >= 0 and (i + 1 == total or ids[i + 1] != d):
            whole.append(Segment(begin[d], begin[d], i + 1, begin[d]))
    segments = []
    for row, i in enumerate(starts.tolist()):
        last = segments[-1] if segments else None
        if last and last.stop == i and ids[i] == ids[i - 1]:
            segments[-1] = last._replace(stop=i + 1)
        else:
            segments.append(Segment(begin[ids[i]], i, i + 1, row))
    targets = [row_of[ok.nonzero().squeeze(1)] for ok in reaches]
    device = document_ids_N.device
    return Plan(starts.to(device), segments, [t.to(device) for t in targets], whole)


# --- block 0 -----------------------------------------------------------------------------------------------------


def fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's fused CPU attention with log-sum-exp can serve block 0 here (private ops: looked for, not assumed)."""
    ops = torch.ops.aten
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16, torch.float64) and all(hasattr(ops, n) for n in names)


def _window_mask(queries: int, keys: int, first: int, window: int | None, causal: bool, like: torch.Tensor) -> torch.Tensor | None:
    """Additive mask [1, 1, queries, keys]; query r sits at key index `first + r`. None where nothing is hidden."""
    if window is None or first + queries <= window:
        return None
    at = torch.arange(queries, device=like.device)[:, None] + first
    key = torch.arange(keys, device=like.device)[None]
    hidden = key <= at - window
    if causal:
        hidden = hidden | (key > at)
    return torch.zeros(queries, keys, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))[None, None]


def _parts(segment: Segment, window: int | None, k: torch.Tensor):
    """Block 0 of a segment as kernel calls: (first key, last key, causal, mask)."""
    length, prefix = segment.stop - segment.start, segment.start - segment.document
    if window is not None and prefix + length > window:
        # one call with an explicit mask: a row could otherwise see no key of a part, whose log-sum-exp is then undefined
        mask = _window_mask(length, prefix + length, prefix, window, True, k)
        return [(segment.document, segment.stop, False, mask)]
    own = [(segment.start, segment.stop, True, None)]
    return [(segment.document, segment.start, False, None), *own] if prefix else own


def _heads_first(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD.transpose(0, 1)[None]


def _dense_scores(q, k, causal, mask, scale):
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(groups, 1)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores if mask is None else scores + mask


def _forward0(q, k, v, causal, mask, scale):
    """(out [1, Q, n, D], lse [1, Q, n] float32) of one kernel call over heads-first tensors."""
    if fused(q.device, q.dtype):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    scores = _dense_scores(q.float(), k.float(), causal, mask, scale)
    lse = scores.logsumexp(-1)
    groups = q.shape[1] // k.shape[1]
    return ((scores - lse[..., None]).exp() @ v.float().repeat_interleave(groups, 1)).to(q.dtype), lse


def _backward0(d_out, q, k, v, out, lse, causal, mask, scale):
    """Gradients of q, k, v through one part of block 0, given the merged out and lse."""
    if fused(q.device, q.dtype):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v, d_out = k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1), d_out.float()
    p = (_dense_scores(q.float(), k.float(), causal, mask, scale) - lse[..., None]).exp()
    ds = p * (d_out @ wide_v.mT - (d_out * out.float()).sum(-1, keepdim=True)) * scale

    def fold(x):
        return x.unflatten(1, (-1, groups)).sum(2)

    return (ds @ wide_k).to(q.dtype), fold(ds.mT @ q.float()).to(k.dtype), fold(p.mT @ d_out).to(v.dtype)


class _Attend(torch.autograd.Function):
    """TTT attention of M queries: block 0 by segments, one diagonal per later step, merged by log-sum-exp."""

    @staticmethod
    def forward(ctx, q_MQD, k_NGD, v_NGD, segments, window, scale, *diagonals):
        m, heads, width = q_MQD.shape
        groups = heads // k_NGD.shape[1]
        out = torch.zeros(m, heads, width, dtype=torch.float32, device=q_MQD.device)  # rows outside all segments are padding
        lse = torch.zeros(m, heads, dtype=torch.float32, device=q_MQD.device)
        for segment in segments:
            rows = slice(segment.row, segment.row + segment.stop - segment.start)
            q = _heads_first(q_MQD[rows])
            merged = None
            for first, last, causal, mask in _parts(segment, window, k_NGD):
                o, part = _forward0(q, _heads_first(k_NGD[first:last]), _heads_first(v_NGD[first:last]), causal, mask, scale)
                o, part = o[0].transpose(0, 1).float(), part[0].transpose(0, 1).float()
                if merged is None:
                    merged = o, part
                else:
                    both = torch.logaddexp(merged[1], part)
                    merged = merged[0] * (merged[1] - both).exp()[..., None] + o * (part - both).exp()[..., None], both
            out[rows], lse[rows] = merged
        if diagonals:
            q = q_MQD.float().unflatten(1, (-1, groups))  # [M, G, Q/G, D]
            scores = [(q * k.float()[:, :, None]).sum(-1).flatten(1) * scale for k in diagonals[::2]]
            total = torch.stack([lse, *scores]).logsumexp(0)
            out *= (lse - total).exp()[..., None]
            for s, v in zip(scores, diagonals[1::2], strict=True):
                out.unflatten(1, (-1, groups)).addcmul_((s - total).exp().unflatten(1, (-1, groups))[..., None], v.float()[:, :, None])
            lse = total
        out = out.to(q_MQD.dtype)
        ctx.save_for_backward(q_MQD, k_NGD, v_NGD, out, lse, *diagonals)
        ctx.segments, ctx.window, ctx.scale = segments, window, scale
        return out

    @staticmethod
    def backward(ctx, d_MQD):
        q_MQD, k_NGD, v_NGD, out, lse, *diagonals = ctx.saved_tensors
        groups = q_MQD.shape[1] // k_NGD.shape[1]
        d_MQD = d_MQD.to(q_MQD.dtype).contiguous()
        dq = torch.zeros(q_MQD.shape, dtype=torch.float32, device=q_MQD.device)
        # a key's gradient is the sum over all segments that read it, so it is summed in float32
        dk = torch.zeros(k_NGD.shape, dtype=torch.float32, device=k_NGD.device)
        dv = torch.zeros(v_NGD.shape, dtype=torch.float32, device=v_NGD.device)
        for segment in ctx.segments:
            rows = slice(segment.row, segment.row + segment.stop - segment.start)
            q, d, o = (_heads_first(x[rows]) for x in (q_MQD, d_MQD, out))
            own_lse = lse[rows].transpose(0, 1)[None].contiguous()
            first_part = True
            for first, last, causal, mask in _parts(segment, ctx.window, k_NGD):
                k, v = _heads_first(k_NGD[first:last]), _heads_first(v_NGD[first:last])
                gq, gk, gv = _backward0(d, q, k, v, o, own_lse, causal, mask, ctx.scale)
                if first_part:
                    dq[rows] = gq[0].transpose(0, 1)
                else:
                    dq[rows] += gq[0].transpose(0, 1)
                dk[first:last] += gk[0].transpose(0, 1)
                dv[first:last] += gv[0].transpose(0, 1)
                first_part = False
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


# --- loss --------------------------------------------------------------------------------------------------------


class _HeadLoss(torch.autograd.Function):
    """Sum of a per-position loss over rows, and its gradient, without keeping the logits.

    The gradient is computed together with the loss, block by block; the backward only scales it.
    """

    @staticmethod
    def forward(ctx, hidden_RH, head_VH, target_RV, entropy_R, loss_config):
        d_hidden = torch.empty_like(hidden_RH)
        train_head = ctx.needs_input_grad[1]
        d_head = torch.zeros(head_VH.shape, dtype=torch.float32, device=head_VH.device) if train_head else None
        best = torch.empty(hidden_RH.shape[0], dtype=torch.long, device=hidden_RH.device)
        total = torch.zeros((), dtype=torch.float32, device=hidden_RH.device)
        weight = head_VH.to(hidden_RH.dtype)
        for a in range(0, hidden_RH.shape[0], ROWS):
            rows = slice(a, a + ROWS)
            raw = linear(hidden_RH[rows], weight)
            if loss_config is None:
                d_logits, loss, best[rows] = _kl(raw, target_RV[rows], entropy_R[rows])
            else:
                best[rows] = raw.argmax(-1)
                d_logits, loss = _library_loss(raw, target_RV[rows], loss_config)
            total += loss
            d_logits = d_logits.to(hidden_RH.dtype)
            d_hidden[rows] = d_logits @ weight
            if train_head:
                d_head += d_logits.T @ hidden_RH[rows]
        ctx.save_for_backward(d_hidden, *([d_head] if train_head else []))
        ctx.head_dtype = head_VH.dtype
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx, d_total, _):
        d_hidden, *d_head = ctx.saved_tensors
        d_head = (d_head[0] * d_total).to(ctx.head_dtype) if d_head else None
        return d_hidden * d_total.to(d_hidden.dtype), d_head, None, None, None


def _kl(raw, target, entropy):
    """(gradient, sum, best ids) of KL(target || draft): target holds probabilities, entropy their sum p log p per row."""
    logits = raw.float()
    top = logits.max(-1, keepdim=True)  # one pass for the largest logit and where it is
    logits -= top.values
    cross = (logits * target).sum(-1)
    logits.exp_()
    z = logits.sum(-1, keepdim=True)
    loss = (entropy - cross + z.squeeze(-1).log()).sum()
    logits /= z
    logits -= target
    return logits, loss, top.indices.squeeze(-1)


def _library_loss(raw, target, loss_config):
    """(gradient, sum) of the library's own losses on one block; target holds the verifier's logits."""
    with torch.enable_grad():
        logits = raw.float().detach().requires_grad_()
        loss = sum(weight * fn(logits[None], target[None].float()).sum() for fn, weight in loss_config.values())
        (grad,) = torch.autograd.grad(loss, logits)
    return grad, loss.detach()


# --- the step ----------------------------------------------------------------------------------------------------


def _rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated = x_THD * cos[:, None] + rotate_half(x_THD) * sin[:, None]
    return rotated.to(x_THD.dtype)  # under autocast the angles are float32 from step 1 on, the keys of step 0 bfloat16


def _project(attention: Any, name: str, x_TC: torch.Tensor) -> torch.Tensor:
    """One of q, k, v as [T, heads, D], with the per-head norm where the layer has one (qwen3)."""
    out = getattr(attention, f"{name}_proj")(x_TC).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return norm(out) if norm is not None else out


class _Layers:
    """Runs the draft's decoder layers over a plan, keeping block-0 keys and the diagonals of earlier steps."""

    def __init__(self, model: Any, found: Plan):
        self.model, self.plan = model, found
        self.block0: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.diagonals: list[list[torch.Tensor]] = [[] for _ in model.layers]

    def _mix(self, layer: Any, index: int, embeds: torch.Tensor | None, hidden: torch.Tensor):
        """(input of the projections, residual) of a layer; the first one joins embeddings and hidden state."""
        if index:
            return layer.input_layernorm(hidden), hidden
        normed = layer.hidden_norm(hidden)
        joined = torch.cat([layer.input_layernorm(embeds), normed], dim=-1)
        return joined, normed if layer.norm_before_residual else hidden

    def step(self, j: int, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Output of the last layer at the starts [M, H].

        Args:
            embeds, hidden, positions: of every position at step 0, of the starts afterwards.
        """
        cos, sin = (x[0] for x in self.model.rotary_emb(hidden, positions[None]))
        for index, layer in enumerate(self.model.layers):
            last = index + 1 == len(self.model.layers)
            attention = layer.self_attn
            window = self.model.sliding_window if index in self.model.sliding_window_indices else None
            joined, residual = self._mix(layer, index, embeds, hidden)
            k, v = _rotate(_project(attention, "k", joined), cos, sin), _project(attention, "v", joined)
            q_cos, q_sin, segments = cos, sin, self.plan.segments
            if j == 0:
                self.block0.append((k, v))
                if last:
                    joined, residual = joined[self.plan.starts], residual[self.plan.starts]
                    q_cos, q_sin = cos[self.plan.starts], sin[self.plan.starts]
                else:
                    segments = self.plan.documents
            else:
                self.diagonals[index] += [k, v]
            q = _rotate(_project(attention, "q", joined), q_cos, q_sin)
            # a layer below the last still needs its diagonals only at the starts, which is where steps 1.. query
            out = attend(q, *self.block0[index], segments, attention.scaling, window, self.diagonals[index])
            hidden = residual + attention.o_proj(out.flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden


def _targets(model: Any, last_RH: torch.Tensor, probabilities: bool, full_head: torch.Tensor | None):
    """The verifier's view of each target position, once: (probabilities or logits [R, V], entropy [R], best id [R]).

    With the full head the best id is the verifier's own, over its whole vocabulary (-1 where the draft cannot propose
    it); without it, the best within the draft vocabulary, which overstates acceptance.
    """
    with torch.no_grad():
        normed = model.verifier_norm(last_RH)
        kept, entropies, best = [], [], []
        for block in normed.split(ROWS):
            logits = model.verifier_lm_head(block)
            if full_head is None:
                best.append(logits.max(-1).indices)
            else:
                top = linear(block.to(full_head.dtype), full_head).max(-1).indices
                if model.t2d is not None:
                    inside = model.t2d[top]
                    top = torch.where(inside, (model.t2d.cumsum(0) - 1)[top], -1)
                best.append(top)
            if probabilities:
                logp = logits.float().log_softmax(-1)
                p = logp.exp()
                entropies.append((p * logp.clamp_min(-1e30)).sum(-1))
                kept.append(p.to(logits.dtype))
            else:
                kept.append(logits)
        return torch.cat(kept), torch.cat(entropies) if entropies else None, torch.cat(best)


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
    x = hidden_states[0]
    if self.input_norm is not None:
        x = self.input_norm(x)
    if self.fc_norm is not None:
        x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, x.chunk(len(self.fc_norm), dim=-1), strict=True)], dim=-1)
    hidden = self.fc(x)
    simple_kl = loss_config is None or list(loss_config) == ["kl_div"] and loss_config["kl_div"][1] == 1.0
    # targets of all steps lie at supervised positions, which are computed once
    wanted = (loss_mask[0].bool() & (document_ids[0] >= 0)).nonzero().squeeze(1)
    place = torch.full((total,), -1, device=device)
    place[wanted] = torch.arange(wanted.numel(), device=device)
    full_head = None if self.training else getattr(self, "full_head", None)
    target, entropy, best = _targets(self, verifier_last_hidden_states[0, wanted], simple_kl, full_head)
    layers = _Layers(self, found)
    correct = loss_mask[0, found.starts].bool()  # of a start: every step so far right
    loss = torch.zeros((), device=device)
    drafted = []
    for j in range(ttt_steps):
        index = found.starts + j
        if j == 0:
            token, at = input_ids[0], positions
        else:
            inside = index < total
            token = torch.where(inside, input_ids[0, index.clamp_max(total - 1)], 0)
            at = positions[found.starts] + j
        with torch.no_grad():
            embeds = self.embed_tokens(token).to(hidden.dtype)
        hidden = layers.step(j, embeds, hidden, at)
        normed = self.norm(hidden)
        if self.config.norm_output:
            hidden = normed
        rows = found.targets[j]
        slots = place[found.starts[rows] + j]
        compute = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else normed.dtype
        with torch.autocast(device.type, enabled=False):
            summed, guess = _HeadLoss.apply(
                normed[rows].to(compute),
                self.lm_head.weight,
                target[slots],
                None if entropy is None else entropy[slots],
                None if simple_kl else loss_config,
            )
        step_loss = ttt_step_loss_decay**j * summed / (rows.numel() + 1e-5)
        loss = loss + step_loss
        asked = correct[rows].sum().float()  # starts without a target at this step are not asked
        right = torch.zeros_like(correct)
        right[rows] = guess == best[slots]
        correct = correct & right
        hits = correct[rows].sum().float()
        one = torch.ones((), device=device)
        for name, top, bottom in (
            (f"loss_{j}", step_loss.detach(), one),
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
