"""Causal attention over step 0's keys with its log-sum-exp: PyTorch's own fused kernels, reached in this one place.

The public attention gives no log-sum-exp, so aten's private operators are called: `_scaled_dot_product_flash_attention_for_cpu` on a CPU,
`_flash_attention_forward` with cumulative lengths (all segments in one call) on CUDA, and their backwards. Private operators
change: each is used only while its schema begins with the arguments known here. Otherwise, and for dtypes and widths a kernel does not
take, plain scores stand in, which compute the same and hold [queries, keys] in float32; `missing` says so in words.

The CUDA path was written against the schemas of torch 2.14 and its arguments are tested on meta tensors; it has not run on a GPU.

Shapes: N positions, M queries, Q query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from helpers.errors import AttentionError


class Segment(NamedTuple):
    """A run of consecutive queries [start, stop) of the document that begins at `document`; its first row among the queries."""

    document: int
    start: int
    stop: int
    row: int


# The arguments that are passed by position here, by the operator's name. A keyword that went missing raises on its own.
KNOWN = {
    "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal attn_mask scale",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"
    ),
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale window_size_left window_size_right"
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused scale "
        "window_size_left window_size_right"
    ),
}  # fmt: skip
PAIRS = {
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    "cuda": ("_flash_attention_forward", "_flash_attention_backward"),
}
SHORT = 512  # keys: up to here a CPU computes bfloat16 in float32
DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float64), "cuda": (torch.float16, torch.bfloat16)}


@cache
def _changed(name: str) -> str:
    """What is wrong with a private operator here, in words; empty if it is as it is known."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return f"torch {torch.__version__} has no aten::{name}"
    found = [argument.name for argument in packet.default._schema.arguments]
    known = KNOWN[name].split()
    return "" if found[: len(known)] == known else f"torch {torch.__version__} changed aten::{name}"


def missing(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why the fused kernel cannot serve here, in words; empty if it can."""
    if device.type not in PAIRS:
        return f"PyTorch has no fused kernel for {device.type}"
    if changed := [words for name in PAIRS[device.type] if (words := _changed(name))]:
        return changed[0]
    if dtype not in DTYPES[device.type]:
        return f"the {device.type} kernel does not take {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda":
        if head_dim % 8 or head_dim > 256:
            return f"the CUDA kernel takes head dimensions that are multiples of 8 up to 256, not {head_dim}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "the CUDA kernel needs compute capability 8.0"
    return ""


def fused(device: torch.device, dtype: torch.dtype, head_dim: int = 64) -> bool:
    """Whether PyTorch's fused attention with log-sum-exp serves here."""
    return not missing(device, dtype, head_dim)


def forward(q_MQD, k_NGD, v_NGD, segments: Sequence[Segment], scale: float, window: int | None) -> tuple[Any, Any, Any]:
    """(out [M, Q, D], lse [M, Q] float32, what the backward needs back) of queries over their documents' keys up to themselves.

    Args:
        window: a key further back than this many positions is not seen.
    """
    if q_MQD.device.type == "cuda" and fused(q_MQD.device, q_MQD.dtype, q_MQD.shape[-1]):
        return _forward_cuda(q_MQD, k_NGD, v_NGD, segments, scale, window)
    out, lse = (torch.zeros(shape, dtype=torch.float32, device=q_MQD.device) for shape in (q_MQD.shape, q_MQD.shape[:2]))
    for segment in segments:
        rows = slice(segment.row, segment.row + segment.stop - segment.start)
        q, merged = _heads_first(q_MQD[rows]), None
        for first, last, ahead, causal, mask in _parts(segment, window, k_NGD):
            k, v = _heads_first(k_NGD[first:last]), _heads_first(v_NGD[first:last])
            o, part = _forward0(_behind(ahead, q), k, v, causal, mask, scale)
            o, part = o[0, :, ahead:].transpose(0, 1), part[0, :, ahead:].transpose(0, 1).float()
            if merged is None:
                merged = o, part
            else:
                both = torch.logaddexp(merged[1], part)
                kept, new = ((x - both).exp()[..., None] for x in (merged[1], part))
                merged = merged[0].float() * kept + o.float() * new, both
        out[rows], lse[rows] = merged
    return out, lse, None


def backward(d_MQD, q_MQD, k_NGD, v_NGD, out, lse, segments, scale: float, window: int | None, kept: Any) -> tuple[Any, Any, Any]:
    """Gradients (q, k, v) in float32, given the out [M, Q, D] and lse [M, Q] of *all* that the softmax went over.

    Args:
        kept: what `forward` gave for it.
    """
    if q_MQD.device.type == "cuda" and fused(q_MQD.device, q_MQD.dtype, q_MQD.shape[-1]):
        return _backward_cuda(d_MQD, q_MQD, k_NGD, v_NGD, out, lse, segments, scale, window, kept)
    # a key's gradient is the sum over all segments that read it, so it is summed in float32
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q_MQD, k_NGD, v_NGD))
    for segment in segments:
        rows = slice(segment.row, segment.row + segment.stop - segment.start)
        q, d, o = (_heads_first(x[rows]) for x in (q_MQD, d_MQD, out))
        own_lse, total = lse[rows].transpose(0, 1)[None], None
        for first, last, ahead, causal, mask in _parts(segment, window, k_NGD):
            k, v = _heads_first(k_NGD[first:last]), _heads_first(v_NGD[first:last])
            # with a large log-sum-exp the rows put ahead have no probability, and so no gradient
            padded = torch.nn.functional.pad(own_lse, (ahead, 0), value=1e4).contiguous()
            gq, gk, gv = _backward0(_behind(ahead, d), _behind(ahead, q), k, v, _behind(ahead, o), padded, causal, mask, scale)
            gq = gq[0, :, ahead:].transpose(0, 1)
            total = gq if total is None else total.float() + gq
            dk[first:last] += gk[0].transpose(0, 1)
            dv[first:last] += gv[0].transpose(0, 1)
        dq[rows] = total
    return dq, dk, dv


# --- CPU, and plain scores ---------------------------------------------------------------------------------------


def _heads_first(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD.transpose(0, 1)[None]


def _window_mask(queries: int, keys: int, first: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Additive causal mask [1, 1, queries, keys]; query r sits at key index `first + r`."""
    at = torch.arange(queries, device=like.device)[:, None] + first
    key = torch.arange(keys, device=like.device)[None]
    hidden = (key <= at - window) | (key > at)
    return torch.zeros(queries, keys, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))[None, None]


def _behind(ahead: int, x_1QnD: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x_1QnD, (0, 0, ahead, 0)) if ahead else x_1QnD


def _parts(segment: Segment, window: int | None, k: torch.Tensor):
    """A segment as calls of a kernel whose causal mask begins at the first key: (first key, last key, rows ahead, causal, mask).

    Behind a short prompt the queries are moved to where the mask has them, by rows of zeros for the prompt: one call, whose extra pairs are
    at most an eighth. Behind a long one the prompt's keys are a call of their own, all of them seen.
    """
    length, prefix = segment.stop - segment.start, segment.start - segment.document
    if window is not None and prefix + length > window:
        # one call with an explicit mask: a row could otherwise see no key of a part, whose log-sum-exp is then undefined
        first = max(0, prefix + 1 - window)  # before it no query of the segment sees anything
        mask = _window_mask(length, prefix + length - first, prefix - first, window, k)
        return [(segment.document + first, segment.stop, 0, False, mask)]
    if 2 * prefix <= length:
        return [(segment.document, segment.stop, prefix, True, None)]
    return [(segment.document, segment.start, 0, False, None), (segment.start, segment.stop, 0, True, None)]


def _dense_scores(q, k, causal, mask, scale):
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(groups, 1)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores if mask is None else scores + mask


def _width(k: torch.Tensor) -> torch.dtype:
    # the kernel's backward takes 1.5 to 3 times as long in bfloat16 over few keys
    return torch.float32 if k.dtype == torch.bfloat16 and k.shape[2] <= SHORT else k.dtype


def _widened(q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(_width(k)) for x in (q, k, *others)]


def _forward0(q, k, v, causal, mask, scale):
    """(out [1, Q, n, D], lse [1, Q, n] float32) of one kernel call over heads-first tensors."""
    if fused(q.device, q.dtype, q.shape[-1]):
        mask, (q, k, v) = None if mask is None else mask.to(_width(k)), _widened(q, k, v)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    scores = _dense_scores(q.float(), k.float(), causal, mask, scale)
    lse = scores.logsumexp(-1)
    groups = q.shape[1] // k.shape[1]
    return ((scores - lse[..., None]).exp() @ v.float().repeat_interleave(groups, 1)).to(q.dtype), lse


def _backward0(d_out, q, k, v, out, lse, causal, mask, scale):
    """Gradients of q, k, v through one part, given the merged out and lse."""
    if fused(q.device, q.dtype, q.shape[-1]):
        mask, (q, k, v, d_out, out) = None if mask is None else mask.to(_width(k)), _widened(q, k, v, d_out, out)
        wide = q.shape[1] // k.shape[1] if k.shape[1] % torch.get_num_threads() else 1
        # the kernel's threads share out key-value heads: where they do not come out even, query heads come out better
        k, v = (x.repeat_interleave(wide, 1) if wide > 1 else x for x in (k, v))
        gq, *rest = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return gq, *(x.unflatten(1, (-1, wide)).sum(2, dtype=torch.float32) if wide > 1 else x for x in rest)
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v, d_out = k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1), d_out.float()
    p = (_dense_scores(q.float(), k.float(), causal, mask, scale) - lse[..., None]).exp()
    ds = p * (d_out @ wide_v.mT - (d_out * out.float()).sum(-1, keepdim=True)) * scale

    def fold(x):
        return x.unflatten(1, (-1, groups)).sum(2)

    return (ds @ wide_k).to(q.dtype), fold(ds.mT @ q.float()).to(k.dtype), fold(p.mT @ d_out).to(v.dtype)


# --- CUDA --------------------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """Segments as the kernel's variable-length call takes them: sequence i has queries and keys between two cumulative lengths."""

    queries: torch.Tensor  # [segments + 1] int32
    keys: torch.Tensor  # [segments + 1] int32
    most_queries: int
    most_keys: int
    rows: int  # of all segments together
    index: torch.Tensor | None  # [keys] position of each key, None where the positions are 0, 1, 2 …


def lengths(segments: Sequence[Segment], positions: int, device: torch.device) -> Lengths:
    """Cumulative lengths of segments: each has its queries, and its document's keys up to its last query.

    The kernel aligns its causal mask to the last key, so a query sees all keys of its document up to itself, prompt included.
    Two segments of one document (a conversation with two answers) each have their own copy of the keys they share.
    """
    queries, keys, index, most = [0], [0], [], [0, 0]
    for s in segments:
        if s.row != queries[-1]:
            raise ValueError(f"segment {s} does not follow the {queries[-1]} rows before it")
        queries.append(queries[-1] + s.stop - s.start)
        keys.append(keys[-1] + s.stop - s.document)
        most = [max(most[0], s.stop - s.start), max(most[1], s.stop - s.document)]
        index.append(torch.arange(s.document, s.stop))
    found = torch.cat(index)
    whole = found.numel() == positions and bool((found == torch.arange(positions)).all())

    def cumulative(x: list[int]) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    return Lengths(cumulative(queries), cumulative(keys), *most, queries[-1], None if whole else found.to(device))


def _window(window: int | None) -> dict[str, int]:
    # the query's own position is one of the window's; nothing to its right is seen
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _forward_cuda(q_MQD, k_NGD, v_NGD, segments, scale, window):
    n = lengths(segments, k_NGD.shape[0], q_MQD.device)
    rows = n.rows
    k, v = (x if n.index is None else x.index_select(0, n.index) for x in (k_NGD.contiguous(), v_NGD.contiguous()))
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        q_MQD[:rows].contiguous(), k, v, n.queries, n.keys, n.most_queries, n.most_keys, 0.0, True, False, scale=scale, **_window(window)
    )
    if lse.shape != (q_MQD.shape[1], rows):
        raise AttentionError(
            f"aten::_flash_attention_forward gave a log-sum-exp of shape {tuple(lse.shape)}, not [heads, queries] {(q_MQD.shape[1], rows)}",
            where=f"torch {torch.__version__}",
            do="install the pinned torch, or choose another attention",
        )
    if rows < q_MQD.shape[0]:  # rows after all segments are padding
        out = torch.cat([out, out.new_zeros(q_MQD.shape[0] - rows, *out.shape[1:])])
        lse = torch.cat([lse, lse.new_zeros(lse.shape[0], q_MQD.shape[0] - rows)], 1)
    return out, lse.T.contiguous(), (n, rng, unused)


def _backward_cuda(d_MQD, q_MQD, k_NGD, v_NGD, out, lse, segments, scale, window, kept):
    (n, rng, unused), rows = kept, kept[0].rows
    k, v = (x if n.index is None else x.index_select(0, n.index) for x in (k_NGD.contiguous(), v_NGD.contiguous()))
    d, q, o = (x[:rows].contiguous() for x in (d_MQD, q_MQD, out))
    gq, gk, gv = torch.ops.aten._flash_attention_backward(
        d, q, k, v, o, lse[:rows].T.contiguous(), n.queries, n.keys, n.most_queries, n.most_keys, 0.0, True, rng, unused,
        scale=scale, **_window(window),
    )  # fmt: skip
    dq = torch.zeros(q_MQD.shape, dtype=torch.float32, device=q_MQD.device)
    dq[:rows] = gq
    if n.index is None:
        return dq, gk.float(), gv.float()
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k_NGD, v_NGD))
    return dq, dk.index_add_(0, n.index, gk.float()), dv.index_add_(0, n.index, gv.float())
