"""The TTT forward of an EAGLE-3 draft, written plainly in float64: what every attention implementation is held against.

One dense softmax per layer and step over explicitly masked scores. It takes the draft's weights by name and nothing else of
the library's: no layer, no mask, no cache, no loss of it runs here, so a fault it may share with them cannot hide.

At step j the query of position i (rotated by i + j) sees step 0's keys up to i in its own document and its own keys of steps
1..j. Shapes: N packed positions, H hidden, Q query heads, G key-value heads, D head dimension, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Result(NamedTuple):
    """What a plain forward gives."""

    hidden: list[torch.Tensor]  # per step [N, H]: output of the last layer, before the final norm
    losses: list[torch.Tensor]  # per step: KL to the verifier's distribution, mean over supervised targets
    gradients: dict[str, torch.Tensor]  # of the sum of the losses, by parameter name


class _Weights:
    """The draft's parameters in float64, by name; frozen ones are converted where they are read."""

    def __init__(self, model: Any):
        self.frozen = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
        self.trained = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}

    def __contains__(self, name: str) -> bool:
        return name in self.trained or name in self.frozen

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.trained[name] if name in self.trained else self.frozen[name].double()

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` of a matrix, without converting all of it."""
        return (self.trained if name in self.trained else self.frozen)[name][ids].double()


class _Draft:
    def __init__(self, model: Any):
        self.w, self.config = _Weights(model), model.config.transformer_layer_config
        self.flags = model.config
        self.window = {i: model.sliding_window for i in model.sliding_window_indices}
        self.inverse_frequency = model.rotary_emb.inv_freq.double()
        self.rope_scale = model.rotary_emb.attention_scaling
        self.keys: list[list[torch.Tensor]] = [[] for _ in model.layers]
        self.values: list[list[torch.Tensor]] = [[] for _ in model.layers]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.w[name]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A projection as [N, heads, D], with the norm of its heads where there is one (qwen3)."""
        out = self.linear(x, f"{name}_proj").unflatten(-1, (-1, self.config.head_dim))
        return self.norm(out, f"{name}_norm.weight") if f"{name}_norm.weight" in self.w else out

    def rotate(self, x_NhD: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
        angle = (position_N.double()[:, None] * self.inverse_frequency).repeat(1, 2)[:, None]
        a, b = x_NhD.chunk(2, -1)
        return (x_NhD * angle.cos() + torch.cat([-b, a], -1) * angle.sin()) * self.rope_scale

    def attend(self, x: torch.Tensor, layer: int, documents: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}.self_attn."
        q = self.rotate(self.heads(x, f"{name}q"), position)
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        self.keys[layer].append(self.rotate(self.heads(x, f"{name}k"), position).repeat_interleave(groups, 1))
        self.values[layer].append(self.heads(x, f"{name}v").repeat_interleave(groups, 1))
        scale = self.config.head_dim**-0.5
        at = torch.arange(len(x), device=x.device)
        seen = (documents[:, None] == documents) & (at[:, None] >= at) & (documents != -1)
        if layer in self.window:
            seen = seen & (at > at[:, None] - self.window[layer])
        seen = seen | (at[:, None] == at)
        block0 = torch.einsum("nqd,mqd->qnm", q, self.keys[layer][0]).masked_fill(~seen, float("-inf"))
        own = [(q * k).sum(-1).T[..., None] for k in self.keys[layer][1:]]
        p = (torch.cat([block0, *own], -1) * scale).softmax(-1)
        out = torch.einsum("qnm,mqd->nqd", p[..., : len(x)], self.values[layer][0])
        for m, v in enumerate(self.values[layer][1:]):
            out = out + p[..., len(x) + m].T[..., None] * v
        return self.linear(out.flatten(1), f"{name}o_proj")

    def layer(self, index: int, embeds: torch.Tensor, hidden: torch.Tensor, documents, position) -> torch.Tensor:
        from transformers.activations import ACT2FN

        name = f"layers.{index}."
        if index:
            x, residual = self.norm(hidden, f"{name}input_layernorm.weight"), hidden
        else:
            normed = self.norm(hidden, f"{name}hidden_norm.weight")
            x = torch.cat([self.norm(embeds, f"{name}input_layernorm.weight"), normed], -1)
            residual = normed if self.flags.norm_before_residual else hidden
        hidden = residual + self.attend(x, index, documents, position)
        x = self.norm(hidden, f"{name}post_attention_layernorm.weight")
        gate = ACT2FN[self.config.hidden_act](self.linear(x, f"{name}mlp.gate_proj"))
        return hidden + self.linear(gate * self.linear(x, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")


def run(model: Any, batch: dict[str, torch.Tensor], steps: int) -> Result:
    """Hidden states, losses and gradients of `steps` TTT steps in float64.

    Args:
        model: a draft as `draft.build` makes it; it is only read.
        batch: a packed row as the library's collate function makes it; a supervised target counts for a start only when both
            lie in one document.
    """
    draft = _Draft(model)
    documents, mask, ids = batch["document_ids"][0], batch["loss_mask"][0].bool(), batch["input_ids"][0]
    total, position = len(ids), batch["position_ids"][0]
    x = batch["hidden_states"][0].double()
    if "input_norm.weight" in draft.w:
        x = draft.norm(x, "input_norm.weight")
    if "fc_norm.0.weight" in draft.w:
        parts = x.split(draft.config.hidden_size, -1)
        x = torch.cat([draft.norm(part, f"fc_norm.{n}.weight") for n, part in enumerate(parts)], -1)
    hidden = draft.linear(x, "fc")
    last = batch["verifier_last_hidden_states"][0].double()
    log_target = draft.linear(draft.norm(last, "verifier_norm.weight"), "verifier_lm_head").log_softmax(-1)
    states, losses = [], []
    for j in range(steps):
        token = torch.cat([ids[j:], ids.new_zeros(min(j, total))])
        embeds = draft.w.rows("embed_tokens.weight", token)
        for index in range(len(draft.keys)):
            hidden = draft.layer(index, embeds, hidden, documents, position + j)
        states.append(hidden)
        normed = draft.norm(hidden, "norm.weight")
        hidden = normed if draft.flags.norm_output else hidden
        start = torch.arange(max(0, total - j), device=ids.device)
        start = start[mask[j:] & (documents[start] == documents[j:]) & (documents[j:] != -1)]
        log_draft, target = draft.linear(normed[start], "lm_head").log_softmax(-1), log_target[start + j]
        losses.append((target.exp() * (target - log_draft)).sum() / max(1, len(start)))
    names = list(draft.w.trained)
    found = torch.autograd.grad(sum(losses), list(draft.w.trained.values()), allow_unused=True)
    gradients = {n: torch.zeros_like(draft.w.trained[n]) if g is None else g for n, g in zip(names, found, strict=True)}
    return Result([h.detach() for h in states], [x.detach() for x in losses], gradients)
