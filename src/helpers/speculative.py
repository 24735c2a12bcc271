"""Chain speculation: the draft proposes K tokens, the verifier checks them in one pass, and the output stays the verifier's.

After a verification the draft's entries of the accepted tokens are written again from the verifier's own states; those
made while drafting are forgotten. Both caches are rolled back by setting row lengths.

The same loop with K = 0 is plain decoding, so a comparison of speeds compares nothing but the drafting. Greedy at
temperature 0, above it sampled by exact rejection (see `rejection`), which leaves the verifier's distribution as it is.

Shapes: B rows, T new tokens, P longest prompt, H hidden, K drafted tokens, A captured layers, D draft vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from helpers import rejection
from helpers.chains import ChainRecord, flatten
from helpers.decoding import RowCache
from helpers.drafting import Drafter, Rule, propose
from helpers.errors import DataError
from helpers.extraction import batches
from helpers.replaying import replay
from helpers.verifier import Verifier

__all__ = ["Decoded", "Drafter", "decode", "decode_both", "draws", "replay"]


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


@dataclass
class _Batch:
    """Rows between two rounds: both caches, the length each keeps, its newest token, and the draft's state there."""

    cache: RowCache
    draft_cache: RowCache
    lengths: torch.Tensor
    current: torch.Tensor
    hidden: torch.Tensor | None = None

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        self.cache.batch_select_indices(rows)
        self.draft_cache.batch_select_indices(rows)
        self.lengths, self.current = self.lengths[rows], self.current[rows]
        self.hidden = self.hidden[rows] if self.hidden is not None else None
        self.set_lengths()

    def set_lengths(self) -> None:
        """Roll both caches back to the lengths kept."""
        self.cache.set_lengths(self.lengths)
        self.draft_cache.set_lengths(self.lengths)


@torch.inference_mode()
def decode(
    verifier: Verifier,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int,
    drafter: Drafter | None = None,
    k: int = 0,
    batch_rows: int = 32,
    confidence: float = 0.0,
    temperature: float = 0.0,
    seed: int = 0,
) -> Decoded:
    """Decoding of prompts, with chain speculation where a draft and K > 0 are given.

    Args:
        prompts: token ids with the generation prompt.
        max_tokens: longest answer; a step that would pass it is cut there.
        confidence: stop drafting before the slot at which the draft's certainty, the product of its largest
            probabilities along the chain, falls below this; 0 always drafts K.
        temperature: 0 is greedy; above it tokens are sampled, from the whole distribution, with `seed`.
    """
    speculate = drafter is not None and k > 0
    rule = Rule.seeded(verifier.device, k, confidence, temperature, seed)
    clock, made = _Clock(verifier.device), []
    for batch in batches([len(p) for p in prompts], rows=batch_rows):
        rows = [_Row(i, len(prompts[i])) for i in batch]
        started = _prefill(verifier, [prompts[i] for i in batch], max_tokens, drafter if speculate else None, rule, clock)
        _go_on(verifier, started, rows, max_tokens, drafter if speculate else None, rule, clock)
        made += rows
    return _decoded(made, clock)


@torch.inference_mode()
def decode_both(
    verifier: Verifier, prompts: Sequence[list[int]], *, max_tokens: int, drafter: Drafter, k: int, batch_rows: int = 32
) -> tuple[Decoded, Decoded]:
    """Plain and speculative greedy decoding of the same prompts from one prefill: (plain, speculative), as `decode` gives them."""
    rule, made = Rule(k), ([], [])
    clocks = _Clock(verifier.device), _Clock(verifier.device)
    for batch in batches([len(p) for p in prompts], rows=batch_rows):
        started = _prefill(verifier, [prompts[i] for i in batch], max_tokens, drafter, rule, clocks[1])
        again = copy.deepcopy(started)
        for side, start, draft in ((0, again, None), (1, started, drafter)):
            rows = [_Row(i, len(prompts[i])) for i in batch]
            clocks[side].last = time.perf_counter()
            _go_on(verifier, start, rows, max_tokens, draft, rule, clocks[side])
            made[side].extend(rows)
    return _decoded(made[0], clocks[0]), _decoded(made[1], clocks[1])


@torch.inference_mode()
def draws(
    verifier: Verifier,
    prompt: list[int],
    count: int,
    *,
    max_tokens: int,
    drafter: Drafter,
    k: int,
    temperature: float,
    confidence: float = 0.0,
    seed: int = 0,
    batch_rows: int = 64,
) -> Decoded:
    """`count` sampled continuations of one prompt, every token of them through draft and verification.

    Prefill stops before the prompt's last token, which then stands where prefill's token does (`tokens` of each draw
    begins with it); so even the first token of the answer is a proposal judged, or its replacement.

    Raises:
        DataError: the prompt has fewer than two tokens.
    """
    if len(prompt) < 2:
        raise DataError(f"a prompt of {len(prompt)} token(s)", do="draw from prompts of at least two tokens")
    rule, clock, made = Rule.seeded(verifier.device, k, confidence, temperature, seed), _Clock(verifier.device), []
    last = torch.tensor(prompt[-1:], device=verifier.device)
    started = _prefill(verifier, [prompt[:-1]], max_tokens + 1, drafter, rule, clock, given=last)
    for start in range(0, count, batch_rows):
        some = copy.deepcopy(started)
        rows = [_Row(i, len(prompt) - 1) for i in range(start, min(count, start + batch_rows))]
        some.select(torch.zeros(len(rows), dtype=torch.long, device=verifier.device))
        _go_on(verifier, some, rows, max_tokens + 1, drafter, rule, clock, given=True)
        made += rows
    return _decoded(made, clock)


def _decoded(rows: Sequence[_Row], clock: _Clock) -> Decoded:
    rows = sorted(rows, key=lambda row: row.place)
    emitted = sum(len(row.tokens) - 1 for row in rows)
    return Decoded([row.tokens for row in rows], [row.steps for row in rows], [row.prompt_tokens for row in rows], clock.parts, emitted)


def _join(states: dict[int, torch.Tensor], ids: Sequence[int]) -> torch.Tensor:
    return torch.cat([states[i] for i in ids], dim=-1)


def _layer_ids(drafter: Drafter | None) -> list[int]:
    return list(drafter.config.eagle_aux_hidden_state_layer_ids) if drafter else []


def _prefill(verifier, prompts, max_tokens, drafter, rule, clock, given=None) -> _Batch:
    """Both caches filled with the prompts, and the token after each: the verifier's own, or the one given."""
    device, layer_ids = verifier.device, _layer_ids(drafter)
    ids = verifier.padded(prompts)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    everyone = torch.arange(len(prompts), device=device)
    cache, draft_cache = (RowCache(ids.shape[1] + max_tokens + rule.k + 2) for _ in range(2))
    clock.lap("overhead")
    with verifier.capture(layer_ids) as states:
        # rows are padded on the right: causal attention keeps the padding out of every real position
        last_BH = verifier.decoder(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[everyone, lengths - 1]
        current = rule.choose(verifier.head(last_BH)) if given is None else given
        batch = _Batch(cache, draft_cache, lengths, current)
        cache.set_lengths(lengths)
        clock.lap("prefill")
        if drafter:
            joined = _join(states, layer_ids)
            shifted = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
            shifted[everyone, lengths - 1] = current
            batch.hidden = drafter.advance(draft_cache, shifted, drafter.features(joined))[everyone, lengths - 1]
            draft_cache.set_lengths(lengths)
            clock.lap("prefill")
    return batch


def _go_on(verifier, batch, rows, max_tokens, drafter, rule, clock, given=False) -> None:
    """Rounds until every row has ended; a token that was given ends nothing."""
    device, ends, layer_ids = verifier.device, verifier.end_ids, _layer_ids(drafter)
    everyone = torch.arange(len(rows), device=device)
    for row, token in zip(rows, batch.current.tolist(), strict=True):
        row.tokens.append(token)
    alive = list(rows)
    done = torch.tensor([(row.tokens[0] in ends and not given) or max_tokens == 1 for row in alive], device=device)
    with verifier.capture(layer_ids) as states:
        while not bool(done.all()):
            if int(done.sum()) * 4 >= len(alive):
                keep = (~done).nonzero().squeeze(1)
                alive, done = [alive[b] for b in keep.tolist()], done[keep]
                batch.select(keep)
                everyone = torch.arange(len(alive), device=device)
            cache, draft_cache, current = batch.cache, batch.draft_cache, batch.current
            clock.lap("overhead")
            proposed = propose(drafter, batch.draft_cache, current, batch.hidden, rule, ~done)
            clock.lap("draft")
            asked = torch.cat([current[:, None], proposed.guesses], dim=1)
            positions = cache.positions(len(alive), asked.shape[1], device)
            mask = cache.mask(len(alive), asked.shape[1], device)
            out = verifier.decoder(input_ids=asked, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
            agreed, answers = _judge(verifier.head(out.last_hidden_state), proposed, drafter, rule)
            clock.lap("verify")
            finished = _record(alive, done.tolist(), proposed.lists(), answers.tolist(), agreed.tolist(), ends, max_tokens)
            # a finished row stands still until it leaves the batch
            grown = torch.where(done, 0, agreed + 1)
            if drafter:
                draft_cache.set_lengths(batch.lengths)
                reach = int(agreed.max()) + 1
                entries = drafter.advance(draft_cache, answers[:, :reach], drafter.features(_join(states, layer_ids)[:, :reach]))
                batch.hidden = entries[everyone, agreed]
            batch.current, batch.lengths = answers[everyone, agreed], batch.lengths + grown
            cache.set_lengths(batch.lengths)
            if drafter:
                draft_cache.set_lengths(batch.lengths)
                clock.lap("draft")
            done = done | torch.tensor(finished, device=device)
            clock.lap("overhead")


def _judge(logits_BKV, proposed, drafter, rule) -> tuple[torch.Tensor, torch.Tensor]:
    """How many guesses of each row hold [B], and the tokens to emit up to the one after them [B, K + 1]."""
    if rule.temperature:
        p_BKV = rejection.probabilities(logits_BKV, rule.temperature)
        return rejection.verify(p_BKV, proposed.q, proposed.own, proposed.drafted, drafter and drafter.to_verifier, rule.generator)
    answers = logits_BKV.argmax(-1)
    right = answers[:, :-1] == proposed.guesses
    if proposed.drafted is not None:
        right &= torch.arange(right.shape[1], device=right.device) < proposed.drafted[:, None]
    return right.long().cumprod(1).sum(1), answers


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
