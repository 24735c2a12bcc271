"""Chain speculation: the draft proposes K tokens, the verifier checks them in one pass, and the output stays the verifier's.

Indices, as in training: entry i of the draft joins token x[i+1] with the verifier's states at i, stands at RoPE position
i+1 and proposes x[i+2]. After a verification the entries of the accepted tokens are written again from the verifier's own
states; the entries made while drafting are forgotten. Both caches are rolled back by setting row lengths.

The same loop with K = 0 is plain decoding, so a comparison of speeds compares nothing but the drafting.

Shapes: B rows, T new tokens, P longest prompt, H hidden, K drafted tokens, A captured layers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import linear

from helpers.chains import ChainRecord, flatten
from helpers.decoding import GROUPED, RowCache
from helpers.extraction import batches
from helpers.verifier import Verifier


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
        size = model.draft_vocab_size
        offsets = model.d2t if model.d2t is not None else torch.zeros(size, dtype=torch.long)
        self.to_verifier = torch.arange(size) + offsets.cpu()
        self.to_verifier = self.to_verifier.to(model.fc.weight.device)

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


@dataclass
class _Row:
    """What one prompt has produced so far."""

    place: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Decoded:
    """Result of decoding a set of prompts.

    `tokens` per prompt (prefill's token first, end-of-turn token included), `steps` per prompt as `chains.flatten` reads
    them, `seconds` by part (prefill, draft, verify, overhead) and `emitted`, tokens after prefill's.
    """

    tokens: list[list[int]]
    steps: list[list[dict[str, Any]]]
    prompt_tokens: list[int]
    seconds: dict[str, float]
    emitted: int

    def records(self, ids: Sequence[str], categories: Sequence[str], inside: Sequence[bool] | None) -> list[ChainRecord]:
        """Chain records, the form `acceptance` reads."""
        rows = zip(ids, categories, self.prompt_tokens, self.tokens, self.steps, strict=True)
        names = ("id", "category", "prompt_tokens", "tokens", "steps")
        return [flatten(dict(zip(names, row, strict=True)), inside) for row in rows]


class _Clock:
    def __init__(self, device: torch.device):
        self.device, self.parts = device, {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "overhead": 0.0}
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.parts[part] += now - self.last
        self.last = now


@torch.inference_mode()
def decode(
    verifier: Verifier, prompts: Sequence[list[int]], *, max_tokens: int, drafter: Drafter | None = None, k: int = 0, batch_rows: int = 32
) -> Decoded:
    """Greedy decoding of prompts, with chain speculation where a draft and K > 0 are given.

    Args:
        prompts: token ids with the generation prompt.
        max_tokens: longest answer; a step that would pass it is cut there.
    """
    speculate = drafter is not None and k > 0
    tokens: list[list[int]] = [[] for _ in prompts]
    steps: list[list[dict[str, Any]]] = [[] for _ in prompts]
    clock = _Clock(verifier.device)
    for batch in batches([len(p) for p in prompts], rows=batch_rows):
        rows = [_Row(i, len(prompts[i])) for i in batch]
        _decode_batch(verifier, [prompts[i] for i in batch], rows, max_tokens, drafter if speculate else None, k, clock)
        for row in rows:
            tokens[row.place], steps[row.place] = row.tokens, row.steps
    return Decoded(tokens, steps, [len(p) for p in prompts], clock.parts, sum(len(t) - 1 for t in tokens))


def _join(states: dict[int, torch.Tensor], ids: Sequence[int]) -> torch.Tensor:
    return torch.cat([states[i] for i in ids], dim=-1)


def _decode_batch(verifier, prompts, rows, max_tokens, drafter, k, clock) -> None:
    device, ends = verifier.device, verifier.end_ids
    layer_ids = list(drafter.config.eagle_aux_hidden_state_layer_ids) if drafter else []
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    for b, prompt in enumerate(prompts):
        ids[b, : len(prompt)] = torch.tensor(prompt, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    everyone = torch.arange(len(prompts), device=device)
    cache, draft_cache = RowCache(width + max_tokens + k + 2), RowCache(width + max_tokens + k + 2)
    clock.lap("overhead")
    with verifier.capture(layer_ids) as states:
        # rows are padded on the right: causal attention keeps the padding out of every real position
        last_BH = verifier.decoder(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[everyone, lengths - 1]
        current = verifier.head(last_BH).argmax(-1)
        cache.set_lengths(lengths)
        clock.lap("prefill")
        hidden = None
        if drafter:
            joined = _join(states, layer_ids)
            shifted = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
            shifted[everyone, lengths - 1] = current
            hidden = drafter.advance(draft_cache, shifted, drafter.features(joined))[everyone, lengths - 1]
            draft_cache.set_lengths(lengths)
            clock.lap("prefill")
        for row, token in zip(rows, current.tolist(), strict=True):
            row.tokens.append(token)
        alive = list(rows)
        done = torch.tensor([row.tokens[0] in ends or max_tokens == 1 for row in alive], device=device)
        while not bool(done.all()):
            if int(done.sum()) * 4 >= len(alive):
                keep = (~done).nonzero().squeeze(1)
                alive = [alive[b] for b in keep.tolist()]
                cache.batch_select_indices(keep)
                draft_cache.batch_select_indices(keep)
                lengths, current, done = lengths[keep], current[keep], done[keep]
                hidden = hidden[keep] if hidden is not None else None
                cache.set_lengths(lengths)
                draft_cache.set_lengths(lengths)
                everyone = torch.arange(len(alive), device=device)
            clock.lap("overhead")
            guesses = _draft(drafter, draft_cache, hidden, k) if drafter else current[:, None][:, :0]
            clock.lap("draft")
            asked = torch.cat([current[:, None], guesses], dim=1)
            positions = cache.positions(len(alive), asked.shape[1], device)
            mask = cache.mask(len(alive), asked.shape[1], device)
            out = verifier.decoder(input_ids=asked, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
            answers = verifier.head(out.last_hidden_state).argmax(-1)  # [B, K + 1]
            agreed = (answers[:, :-1] == guesses).long().cumprod(1).sum(1)
            clock.lap("verify")
            finished = _record(alive, done.tolist(), guesses.tolist(), answers.tolist(), agreed.tolist(), ends, max_tokens)
            # a finished row stands still until it leaves the batch
            grown = torch.where(done, 0, agreed + 1)
            if drafter:
                draft_cache.set_lengths(lengths)
                reach = int(agreed.max()) + 1
                entries = drafter.advance(draft_cache, answers[:, :reach], drafter.features(_join(states, layer_ids)[:, :reach]))
                hidden = entries[everyone, agreed]
            current = answers[everyone, agreed]
            lengths = lengths + grown
            cache.set_lengths(lengths)
            if drafter:
                draft_cache.set_lengths(lengths)
                clock.lap("draft")
            done = done | torch.tensor(finished, device=device)
            clock.lap("overhead")


def _draft(drafter: Drafter, cache: RowCache, hidden_BH: torch.Tensor, k: int) -> torch.Tensor:
    """K proposals per row [B, K] in verifier ids; `hidden_BH` is the state of each row's last entry."""
    found = []
    for step in range(k):
        token = drafter.to_verifier[drafter.propose(hidden_BH).argmax(-1)]
        found.append(token)
        if step + 1 < k:
            hidden_BH = drafter.advance(cache, token[:, None], hidden_BH[:, None])[:, 0]
            cache.step(1)
    return torch.stack(found, dim=1)


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
        guesses = _draft(drafter, cache, hidden, room)[0].tolist()
        m = next((i for i, guess in enumerate(guesses) if guess != ids[at + 1 + i]), room)
        emitted = list(ids[at + 1 : at + m + 2])
        steps.append({"drafted": guesses, "accepted": m, "emitted": emitted})
        cache.set_lengths(torch.tensor([at], device=device))
        grown = at + len(emitted)
        hidden = drafter.advance(cache, text[:, at + 1 : grown + 1], features[:, at:grown])[:, -1]
        at = grown
    return steps


def _record(alive, done, guesses, answers, agreed, ends, max_tokens) -> list[bool]:
    """Append what this step emitted to every live row; returns which rows are finished."""
    finished = []
    for row, over, drafted, said, m in zip(alive, done, guesses, answers, agreed, strict=True):
        if over:
            finished.append(True)
            continue
        emitted = said[: m + 1]
        stop = next((i + 1 for i, token in enumerate(emitted) if token in ends), None)
        emitted = emitted[: min(stop or len(emitted), max_tokens - len(row.tokens))]
        row.tokens += emitted
        row.steps.append({"drafted": drafted, "accepted": m, "emitted": emitted})
        finished.append(stop is not None and emitted[-1] in ends or len(row.tokens) >= max_tokens)
    return finished
