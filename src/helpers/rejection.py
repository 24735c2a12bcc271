"""Exact rejection sampling: tokens proposed by the draft, kept or replaced so that the output has the verifier's distribution.

A token x drawn from the draft's q is accepted with probability min(1, p(x) / q(x)); the first refused one is replaced by a
draw from (p - q)+, normalised; after K accepted ones a bonus token comes from p (Leviathan et al. 2023; Chen et al. 2023).
Whatever q is, each emitted token is distributed as p. q lives on the draft's vocabulary and is 0 elsewhere.

Whether a slot is drafted may depend on the tokens before it and on q there, never on the token drawn: refusing draws that
look unlikely would take their probability away from the output. `certainty` is therefore the largest probability of q.

Shapes: B rows, K drafted slots, V verifier vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import torch


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Softmax of logits over the last dimension at a temperature above 0, in float32."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def draw(weights_BV: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One index per row [B], drawn in proportion to the weights [B, V] (they need not add to one)."""
    return torch.multinomial(weights_BV, 1, generator=generator).squeeze(1)


def residual(p_BV: torch.Tensor, q_BD: torch.Tensor, to_verifier_D: torch.Tensor) -> torch.Tensor:
    """(p - q)+ [B, V], not normalised, with q mapped into the verifier's vocabulary.

    Where p and q agree to the last digit nothing is left, and nothing is refused but by rounding: p itself then.
    """
    left = p_BV.clone()
    left[:, to_verifier_D] -= q_BD
    left.clamp_(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p_BV)


def verify(
    p_BKV: torch.Tensor,
    q_BKD: torch.Tensor | None,
    drawn_BK: torch.Tensor,
    drafted_B: torch.Tensor,
    to_verifier_D: torch.Tensor | None,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Judge drawn tokens and draw the one that follows the accepted ones.

    Args:
        p_BKV: the verifier's probabilities, [B, K + 1, V]: at each drafted slot and after the last.
        q_BKD, to_verifier_D: the draft's, [B, K, D], and its map into the verifier's vocabulary; None where nothing was
            drafted (K = 0).
        drawn_BK: tokens in draft ids; drafted_B: how many of each row's slots count.

    Returns:
        (accepted [B], tokens [B, K + 1] in verifier ids): a row's accepted tokens, then the one drawn from p or the
        residual; what stands after that has no meaning.
    """
    rows, k = drawn_BK.shape
    everyone, slots = torch.arange(rows, device=p_BKV.device), torch.arange(k, device=p_BKV.device)
    tokens = torch.zeros(rows, k + 1, dtype=torch.long, device=p_BKV.device)
    if q_BKD is None or not k:
        tokens[:, 0] = draw(p_BKV[:, 0], generator)
        return torch.zeros_like(everyone), tokens
    guesses = to_verifier_D[drawn_BK]
    p_guess = p_BKV[:, :k].gather(2, guesses[..., None])[..., 0]
    q_guess = q_BKD.gather(2, drawn_BK[..., None])[..., 0]
    chance = torch.rand(rows, k, generator=generator, device=p_BKV.device)
    kept = (chance * q_guess < p_guess) & (slots < drafted_B[:, None])
    accepted = kept.long().cumprod(1).sum(1)
    refused = accepted < drafted_B
    # a row that accepted all it drafted has no q to take off there
    q_there = q_BKD[everyone, accepted.clamp(max=k - 1)] * refused[:, None]
    tokens[:, :k] = guesses
    tokens[everyone, accepted] = draw(residual(p_BKV[everyone, accepted], q_there, to_verifier_D), generator)
    return accepted, tokens
