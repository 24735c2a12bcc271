"""The draft layer's pieces between its matrix products, each with a backward that keeps little.

Autograd would keep every float32 intermediate of a norm and every product of a gated MLP, and autocast would cast one input three
times for q, k and v. Here a norm keeps its input and one number a row, the MLP its gate and up projections, a rotation
nothing but its angles. Sums run in float32; what enters a matrix product is in the compute dtype.

Shapes: T rows, H hidden, D head dimension, F MLP width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, silu


def _rstd(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _norm_backward(d: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and weight of y = w x r, r = 1/rms(x), all float32; `d` is overwritten.

    dw = sum d x r;  with g = d w and n = x r:  dx = r (g - n mean(g n)).
    """
    normed = x * rstd
    d_weight = (d * normed).flatten(0, -2).sum(0)
    d *= weight
    d.addcmul_(normed, (d * normed).mean(-1, keepdim=True), value=-1)
    d *= rstd
    return d, d_weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        wide = x.float()
        rstd = _rstd(wide, eps)
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight.float()).to(dtype)

    @staticmethod
    def backward(ctx, d):
        x, weight, rstd = ctx.saved_tensors
        # a gradient may be shared with another consumer: it must not be written to
        wide = d.float() if d.dtype != torch.float32 else d.clone()
        dx, dw = _norm_backward(wide, x.float(), rstd, weight.float())
        return dx.to(x.dtype), dw.to(weight.dtype), None, None


def rms_norm(module: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """RMS norm over the last dimension as `module` has it (weight, variance_epsilon), its output in `dtype`.

    A module that someone hooked is called itself, so that hooks see what they expect.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return module(x).to(dtype)
    return _Norm.apply(x, module.weight, module.variance_epsilon, dtype)


class _Join(torch.autograd.Function):
    """[norm(embedding) | norm(hidden)] in `dtype`, and norm(hidden) in float32 at `rows`."""

    @staticmethod
    def forward(ctx, token, table, hidden, w_embed, w_hidden, eps, dtype, rows):
        width = hidden.shape[-1]
        joined = torch.empty(*hidden.shape[:-1], 2 * width, dtype=dtype, device=hidden.device)
        embeds = table[token].float()
        rstd_embed = _rstd(embeds, eps)
        joined[:, :width] = embeds.mul_(rstd_embed).mul_(w_embed.float())
        wide = hidden.float()
        rstd = _rstd(wide, eps)
        normed = (wide * rstd).mul_(w_hidden.float())
        joined[:, width:] = normed
        ctx.save_for_backward(token, table, hidden, w_embed, w_hidden, rstd_embed, rstd, rows)
        return joined, normed if rows is None else normed.index_select(0, rows)

    @staticmethod
    def backward(ctx, d_joined, d_normed):
        token, table, hidden, w_embed, w_hidden, rstd_embed, rstd, rows = ctx.saved_tensors
        width = hidden.shape[-1]
        # embeddings are frozen: gathered again rather than kept
        d_embed = table[token].float().mul_(rstd_embed).mul_(d_joined[:, :width]).sum(0)
        d = d_joined[:, width:].to(torch.float32, copy=True)
        if rows is None:
            d += d_normed
        else:
            d.index_add_(0, rows, d_normed)
        d, d_weight = _norm_backward(d, hidden.float(), rstd, w_hidden.float())
        return None, None, d.to(hidden.dtype), d_embed.to(w_embed.dtype), d_weight.to(w_hidden.dtype), None, None, None


def join(layer: Any, token_T: torch.Tensor, table: torch.Tensor, hidden_TH: torch.Tensor, dtype: torch.dtype, rows: torch.Tensor | None):
    """Input of an EAGLE-3 first layer's projections [T, 2H] in `dtype`, and its normed hidden states at `rows` (None: all) in float32.

    Args:
        table: the frozen embedding matrix, read at `token_T` in the forward and again in the backward.
    """
    norms = layer.input_layernorm, layer.hidden_norm
    weights = [norm.weight for norm in norms]
    return _Join.apply(token_T, table, hidden_TH, *weights, norms[0].variance_epsilon, dtype, rows)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.total = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, d):
        (rows,) = ctx.saved_tensors
        return d.new_zeros(ctx.total, *d.shape[1:]).index_copy_(0, rows, d), None


def take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] for ascending rows that are all different, whose backward then copies instead of adding."""
    return x if rows.numel() == x.shape[0] else _Take.apply(x, rows)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x cos + (-x2, x1) sin over halves (x1, x2) of the last dimension, computed in float32."""
    half = x.shape[-1] // 2
    x = x.float()
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin).to(x.dtype)

    @staticmethod
    def backward(ctx, d):
        cos, sin = ctx.saved_tensors
        # the transpose: each half's sine meets the other half's gradient
        return _turn(d, cos, -sin.roll(sin.shape[-1] // 2, -1)).to(d.dtype), None, None


def rotate(x_ThD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of heads [T, h, D] by float32 angles; computed in float32, given back in the dtype of x."""
    return _Rotate.apply(x_ThD, cos_TD[:, None], sin_TD[:, None])


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up, down):
        both = linear(x, gate_up)
        gate, up = both.chunk(2, -1)
        ctx.save_for_backward(x, gate_up, down, both)
        return linear(silu(gate).mul_(up), down)

    @staticmethod
    def backward(ctx, d):
        x, gate_up, down, both = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        active = silu(gate)
        d_down = d.mT @ (active * up)
        d_active = d @ down
        d_both = torch.empty_like(both)
        width = gate.shape[-1]
        torch.mul(d_active, active, out=d_both[:, width:])
        d_both[:, :width] = torch.ops.aten.silu_backward(d_active.mul_(up), gate)
        return d_both @ gate_up, d_both.mT @ x, d_down


def gated_mlp(x_TH: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) up(x)) [T, H]; gate and up are one matrix [2F, H]. The active product is computed again in the backward."""
    return _GatedMLP.apply(x_TH, gate_up, down)
