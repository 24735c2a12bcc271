"""Exact greedy chain acceptance without a verifier: its own text and its stored states are all a chain depends on.

After each verification the draft's entries are written again from the verifier's states, so what it proposes at a place
depends on the text before it and on nothing else: not on K, nor on where earlier chains began. `foresee` therefore drafts
one chain from every place of an answer at once, and `walk` reads off what a live decoder would have done at any K and any
confidence. `replay` does the same for one K token by token, as a live decoder runs.

Shapes: T tokens of a row, S places a chain can start at, H hidden, K drafted tokens, A captured layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from helpers import rejection
from helpers.decoding import RowCache
from helpers.drafting import Drafter, greedy

SLOTS = 32_768  # cache slots copied at once: places of a long text are taken in parts


@torch.inference_mode()
def replay(drafter: Drafter, ids: Sequence[int], states_TC: torch.Tensor, first: int, k: int) -> list[dict[str, Any]]:
    """The chain a live greedy decoder would run over the verifier's own text, from stored states, without a verifier.

    Args:
        ids: a row's token ids [T]; states_TC: its joined aux states [T, A*H], as stored.
        first: index of the answer's first token, which prefill gives.

    Returns:
        steps as `decode` records them. Slots past the end of the text cannot be judged and are not drafted.
    """
    device = drafter.model.fc.weight.device
    text = torch.tensor(list(ids), device=device)[None]
    features = drafter.features(states_TC.to(device)[None])
    cache, steps, at = RowCache(len(ids) + k + 1), [], first
    hidden = drafter.advance(cache, text[:, 1 : at + 1], features[:, :at])[:, -1]
    while at + 1 < len(ids):
        room = min(k, len(ids) - 1 - at)
        guesses = greedy(drafter, cache, hidden, room)[0].tolist()
        m = next((i for i, guess in enumerate(guesses) if guess != ids[at + 1 + i]), room)
        emitted = list(ids[at + 1 : at + m + 2])
        steps.append({"drafted": guesses, "accepted": m, "emitted": emitted})
        cache.set_lengths(torch.tensor([at], device=device))
        grown = at + len(emitted)
        hidden = drafter.advance(cache, text[:, at + 1 : grown + 1], features[:, at:grown])[:, -1]
        at = grown
    return steps


@dataclass
class Foreseen:
    """One chain from every place of an answer: place s begins after token `first + s`."""

    ids: list[int]
    first: int
    guesses: np.ndarray  # [S, K] verifier ids
    certainty: np.ndarray  # [S, K] product of the draft's largest probabilities up to the slot

    @cached_property
    def right(self) -> np.ndarray:
        """How many guesses from the first agree with the text, by place [S]."""
        places, k = self.guesses.shape
        # no token is -1: past the end of the text nothing agrees
        text = np.concatenate([np.asarray(self.ids), np.full(k, -1)])
        truth_SK = text[self.first + 1 + np.arange(places)[:, None] + np.arange(k)]
        return (truth_SK == self.guesses).cumprod(1).sum(1)

    def row(self) -> dict[str, Any]:
        """Plain values for JSON; `Foreseen.of` reads them."""
        return asdict(self) | {"k": self.guesses.shape[1]}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Foreseen:
        """From what `row` gave."""
        shape = (-1, row["k"])
        guesses, certainty = np.asarray(row["guesses"], int).reshape(shape), np.asarray(row["certainty"], float).reshape(shape)
        return cls(list(row["ids"]), row["first"], guesses, certainty)


@torch.inference_mode()
def foresee(drafter: Drafter, ids: Sequence[int], states_TC: torch.Tensor, first: int, k: int) -> Foreseen:
    """Draft K tokens from every place of an answer, places side by side as rows of a batch.

    Args:
        ids: a row's token ids [T]; states_TC: its joined aux states [T, A*H] (the last token's is not used).
        first: index of the answer's first token, which prefill gives.
    """
    device = drafter.model.fc.weight.device
    text = torch.tensor(list(ids), device=device)[None]
    cache = RowCache(len(ids) + k + 1)
    states_TH = drafter.advance(cache, text[:, 1:], drafter.features(states_TC[: len(ids) - 1].to(device)[None]))[0]
    starts_S, found, sure = torch.arange(first, len(ids) - 1, device=device), [], []
    for starts in starts_S.split(max(1, SLOTS // (len(ids) + k + 1))):
        rows = copy.deepcopy(cache)
        rows.batch_select_indices(torch.zeros_like(starts))
        rows.set_lengths(starts)
        # the entry that proposes what follows token `start` joins it with the states before it
        hidden, certainty, guesses, certainties = states_TH[starts - 1], torch.ones(len(starts), device=device), [], []
        for step in range(k):
            q = rejection.probabilities(drafter.propose(hidden), 1.0)
            top, own = q.max(-1)
            guesses.append(drafter.to_verifier[own])
            certainties.append(certainty := certainty * top)
            if step + 1 < k:
                hidden = drafter.advance(rows, guesses[-1][:, None], hidden[:, None])[:, 0]
                rows.step(1)
        found.append(torch.stack(guesses, dim=1))
        sure.append(torch.stack(certainties, dim=1))
    empty = torch.zeros(0, k, device=device)
    guesses_SK, certainty_SK = torch.cat(found) if found else empty.long(), torch.cat(sure) if sure else empty
    return Foreseen(list(ids), first, guesses_SK.cpu().numpy(), certainty_SK.float().cpu().numpy())


def walk(foreseen: Foreseen, k: int, confidence: float = 0.0) -> list[dict[str, Any]]:
    """Steps of the live decoder at this K and confidence over the text, as `speculative.decode` records them.

    Slots past the end of the text cannot be judged and are left out, as in `replay`.
    """
    ids, first, right_S, steps, at = foreseen.ids, foreseen.first, foreseen.right, [], foreseen.first
    sure_S = (foreseen.certainty[:, :k] >= confidence).cumprod(1).sum(1)
    while at + 1 < len(ids):
        drafted = min(k, int(sure_S[at - first]), len(ids) - 1 - at)
        accepted = min(drafted, int(right_S[at - first]))
        emitted = list(ids[at + 1 : at + accepted + 2])
        steps.append({"drafted": foreseen.guesses[at - first, :drafted].tolist(), "accepted": accepted, "emitted": emitted})
        at += len(emitted)
    return steps
