"""The draft at work: one entry after another with a key-value cache, and chains proposed by a rule.

Indices, as in training: entry i of the draft joins token x[i+1] with the verifier's states at i, stands at RoPE position
i+1 and proposes x[i+2].

Shapes: B rows, T new tokens, H hidden, K drafted tokens, A captured layers, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from helpers import rejection
from helpers.decoding import GROUPED, RowCache
from helpers.draft import verifier_ids
from helpers.errors import DataError


class Drafter:
    """A library draft model run token by token with a key-value cache.

    Args:
        model: from `draft.load`, in the dtype to decode in.
    """

    def __init__(self, model: Any):
        self.model = model
        self.config = model.config
        model.config.transformer_layer_config._attn_implementation = GROUPED  # decoding has its own; training's stays in draft.json
        self.dtype = model.fc.weight.dtype
        self.to_verifier = verifier_ids(model)

    @property
    def inside(self) -> list[bool] | None:
        """Which verifier tokens the draft can propose; None when all."""
        return None if self.model.t2d is None else self.model.t2d.tolist()

    def features(self, states_BTC: torch.Tensor) -> torch.Tensor:
        """The verifier's joined states [B, T, A*H] as the draft's input [B, T, H]."""
        x = states_BTC.to(self.dtype)
        if self.model.input_norm is not None:
            x = self.model.input_norm(x)
        if self.model.fc_norm is not None:
            parts = x.chunk(len(self.model.fc_norm), dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(self.model.fc_norm, parts, strict=True)], dim=-1)
        return self.model.fc(x)

    def advance(self, cache: RowCache, tokens_BT: torch.Tensor, features_BTH: torch.Tensor) -> torch.Tensor:
        """Run entries through the layers and write their keys; returns the states the next step reads, [B, T, H]."""
        rows, tokens = tokens_BT.shape
        slots = cache.positions(rows, tokens, tokens_BT.device)
        length = cache.get_seq_length()
        mask = cache.mask(rows, tokens, tokens_BT.device) if length else None
        near = self._window(mask, slots, (cache.longest if cache.starts is not None else length) + tokens)
        embeds = self.model.embed_tokens(tokens_BT).to(self.dtype)
        hidden = torch.cat([embeds, features_BTH], dim=-1)
        rotary = self.model.rotary_emb(hidden, slots + 1)
        for i, layer in enumerate(self.model.layers):
            seen = near if i in self.model.sliding_window_indices else mask
            hidden = layer(hidden, attention_mask=seen, position_ids=slots + 1, past_key_values=cache, position_embeddings=rotary)
        return self.model.norm(hidden) if self.config.norm_output else hidden

    def _window(self, mask: torch.Tensor | None, slots_BT: torch.Tensor, length: int) -> torch.Tensor | None:
        """The mask [B, 1, T, length] of a layer with a sliding window; the plain one while the window holds everything."""
        window = self.model.sliding_window
        if not self.model.sliding_window_indices or length <= window:
            return mask
        key = torch.arange(length, device=slots_BT.device)
        at = slots_BT[:, :, None]
        return ((key <= at) & (key > at - window))[:, None]

    def propose(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary [B, V_d]."""
        normed = hidden_BH if self.config.norm_output else self.model.norm(hidden_BH)
        return linear(normed, self.model.lm_head.weight)


@dataclass(frozen=True)
class Rule:
    """How tokens are proposed and chosen; greedy with a fixed K unless told otherwise."""

    k: int = 0
    confidence: float = 0.0
    temperature: float = 0.0
    generator: torch.Generator | None = None

    @classmethod
    def seeded(cls, device: torch.device, k: int, confidence: float, temperature: float, seed: int) -> Rule:
        """A rule with a generator of its own where it samples.

        Raises:
            DataError: a temperature below 0 or a confidence outside 0 to 1.
        """
        if temperature < 0 or not 0 <= confidence <= 1:
            raise DataError(f"temperature {temperature}, confidence {confidence}: the first is 0 or more, the second lies in 0 to 1")
        return cls(k, confidence, temperature, torch.Generator(device).manual_seed(seed) if temperature else None)

    def choose(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """The verifier's token of each row [B]."""
        if not self.temperature:
            return logits_BV.argmax(-1)
        return rejection.draw(rejection.probabilities(logits_BV, self.temperature), self.generator)


@dataclass
class Proposal:
    """What the draft proposed: verifier ids [B, K]; where rows differ in number, how many count [B]; when sampled, draft ids and q."""

    guesses: torch.Tensor
    drafted: torch.Tensor | None = None
    own: torch.Tensor | None = None
    q: torch.Tensor | None = None

    def lists(self) -> list[list[int]]:
        """The drafted ids of each row."""
        found = self.guesses.tolist()
        return found if self.drafted is None else [g[:n] for g, n in zip(found, self.drafted.tolist(), strict=True)]


def greedy(drafter: Drafter, cache: RowCache, hidden_BH: torch.Tensor, k: int) -> torch.Tensor:
    """K proposals per row [B, K] in verifier ids; `hidden_BH` is the state of each row's last entry."""
    found = []
    for step in range(k):
        token = drafter.to_verifier[drafter.propose(hidden_BH).argmax(-1)]
        found.append(token)
        if step + 1 < k:
            hidden_BH = drafter.advance(cache, token[:, None], hidden_BH[:, None])[:, 0]
            cache.step(1)
    return torch.stack(found, dim=1)


def propose(
    drafter: Drafter | None, cache: RowCache, current_B: torch.Tensor, hidden_BH: torch.Tensor | None, rule: Rule, live_B: torch.Tensor
) -> Proposal:
    """A chain for each row by the rule; without a draft, chains of no token.

    Args:
        cache: the draft's; the entries written here are to be forgotten by the caller.
        current_B: newest token of each row; hidden_BH: the draft's state at its last entry.
        live_B: rows that count; the others do not keep the batch drafting.
    """
    nothing = current_B[:, None][:, :0]
    if drafter is None:
        return Proposal(nothing, torch.zeros_like(current_B), nothing)
    if not rule.confidence and not rule.temperature:
        return Proposal(greedy(drafter, cache, hidden_BH, rule.k))
    own, q, drafted = [], [], torch.zeros_like(current_B)
    certainty = torch.ones(len(drafted), device=drafted.device)
    for step in range(rule.k):
        q_BD = rejection.probabilities(drafter.propose(hidden_BH), rule.temperature or 1.0)
        certainty = certainty * q_BD.amax(-1)
        live_B = live_B & (certainty >= rule.confidence)
        if not bool(live_B.any()):
            break
        token = rejection.draw(q_BD, rule.generator) if rule.temperature else q_BD.argmax(-1)
        own.append(token)
        q.append(q_BD)
        drafted = drafted + live_B
        if step + 1 < rule.k:
            hidden_BH = drafter.advance(cache, drafter.to_verifier[token][:, None], hidden_BH[:, None])[:, 0]
            cache.step(1)
    if not own:
        return Proposal(nothing, drafted, nothing)
    own_BK = torch.stack(own, dim=1)
    return Proposal(drafter.to_verifier[own_BK], drafted, own_BK, torch.stack(q, dim=1) if rule.temperature else None)
