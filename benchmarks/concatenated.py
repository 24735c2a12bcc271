"""The concatenating eager form of TTT that EAGLE and SpecForge train with, written from its description, as a yardstick.

Padded rows, not packed ones. Every position asks at every step. Scores against step 0's keys are a dense [T, T] matrix a head;
the scores of a position with its own later keys are concatenated to it as columns; one softmax in float32 goes over both.
Key and value heads are repeated for their query groups. Logits and targets are held whole in float32, and cross-entropy
to the verifier's distribution is averaged over supervised positions (its gradient is that of the KL divergence).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import rotate_half


def _heads(x_BTC: torch.Tensor, width: int) -> torch.Tensor:
    return x_BTC.unflatten(-1, (-1, width)).transpose(1, 2)


def _shifted(x_BT: torch.Tensor, by: int) -> torch.Tensor:
    """Each row moved left, zeros behind."""
    return torch.cat([x_BT[:, by:], torch.zeros_like(x_BT[:, :by])], 1)


def loss(model: Any, batch: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """Loss summed over TTT steps of a draft with one llama layer.

    Args:
        batch: `hidden_states` [B, T, A*H], `verifier_last_hidden_states` [B, T, H], `input_ids` and `loss_mask` [B, T], aligned
            as the library aligns them; each row is one document.
    """
    layer, mask = model.layers[0], batch["loss_mask"]
    attention = layer.self_attn
    width, groups = attention.head_dim, attention.num_key_value_groups
    with torch.no_grad():
        target = model.verifier_lm_head(model.verifier_norm(batch["verifier_last_hidden_states"])).float().softmax(-1)
    hidden = model.fc(batch["hidden_states"])
    rows, tokens = mask.shape
    positions = 1 + torch.arange(tokens, device=mask.device)[None]
    causal = torch.full((tokens, tokens), float("-inf"), device=mask.device).triu(1)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    total = torch.zeros((), device=mask.device)
    for j in range(steps):
        embeds = model.embed_tokens(_shifted(batch["input_ids"], j))
        normed = layer.hidden_norm(hidden)
        residual = normed if layer.norm_before_residual else hidden
        joined = torch.cat([layer.input_layernorm(embeds), normed], -1)
        cos, sin = (x[:, None] for x in model.rotary_emb(joined, positions + j))
        q, k = (_heads(x, width) for x in (attention.q_proj(joined), attention.k_proj(joined)))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        keys.append(k.repeat_interleave(groups, 1))
        values.append(_heads(attention.v_proj(joined), width).repeat_interleave(groups, 1))
        scores = q @ keys[0].mT * attention.scaling + causal
        for k in keys[1:]:
            scores = torch.cat([scores, ((q * k).sum(-1) * attention.scaling)[..., None]], -1)
        p = scores.softmax(-1, dtype=torch.float32).to(values[0].dtype)
        out = p[..., :tokens] @ values[0]
        for m, v in enumerate(values[1:]):
            out = out + p[..., tokens + m, None] * v
        hidden = residual + attention.o_proj(out.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed = model.norm(hidden)
        log_draft = model.lm_head(normed).float().log_softmax(-1)
        kept, wanted = _shifted(mask, j).float(), torch.cat([target[:, j:], target[:, :j]], 1)
        total = total - ((wanted * log_draft).sum(-1) * kept).sum() / kept.sum()
        hidden = normed if model.config.norm_output else hidden
    return total
