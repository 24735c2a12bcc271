"""Statistics of chain speculation: accept length with its interval, by position, category and context; misses; repetition.

All functions take chain records (see `chains`) and give plain rows for tables, figures and JSON.

Shapes: N prompts, S verification steps of one prompt, R resamples, M ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from helpers.chains import check
from helpers.errors import DataError

RESAMPLES = 2000
LEVEL = 0.95
CONTEXT_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; low and high are NaN where one prompt gives no interval."""

    value: float
    low: float
    high: float
    n: int  # prompts
    steps: int  # verification steps, or pairs of prompts' steps in a comparison

    def __str__(self) -> str:
        interval = "no interval" if np.isnan(self.low) else f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.value:.2f} ({interval}, n = {self.n})"

    def row(self) -> dict[str, Any]:
        """Plain values for a table or JSON, None for NaN."""
        return {name: None if isinstance(v, float) and np.isnan(v) else v for name, v in asdict(self).items()}


def ratio_interval(num_NM, den_NM, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL):
    """Ratios of sums over prompts with percentile bootstrap intervals; prompts are resampled, their steps stay together.

    Steps of one answer resemble each other, so resampling steps would give intervals that are too narrow. The percentile
    interval is itself a little narrow below about 20 prompts.

    Args:
        num_NM, den_NM: what each prompt adds to numerator and denominator of each ratio.

    Returns:
        value, low, high, each [M]; low and high are NaN where fewer than two prompts have a denominator.
    """
    num, den = np.asarray(num_NM, float), np.asarray(den_NM, float)
    n = len(num)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = num.sum(0) / den.sum(0)
        rng, draws = np.random.default_rng(seed), []
        for start in range(0, resamples, chunk := max(1, 4_000_000 // n)):
            weights_RN = rng.multinomial(n, np.full(n, 1 / n), size=min(chunk, resamples - start)).astype(float)
            draws.append((weights_RN @ num) / (weights_RN @ den))
    draws_RM = np.concatenate(draws)
    low, high = np.full(len(value), np.nan), np.full(len(value), np.nan)
    known = (den > 0).sum(0) >= 2
    if known.any():
        low[known], high[known] = np.nanpercentile(draws_RM[:, known], [50 * (1 - level), 50 * (1 + level)], axis=0)
    return value, low, high


def _with_steps(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    check(records)
    kept = [r for r in records if len(r["emitted"])]
    if not kept:
        raise DataError(
            f"no verification step in {len(records)} chain records", do="evaluate prompts whose answers have at least two tokens"
        )
    return kept


def accept_length(records: Sequence[Mapping[str, Any]], *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Accept length: tokens emitted by verification steps / verification steps, the bonus token included.

    The token that prefill gives is not counted; a step cut by end-of-turn or the length limit counts what it emitted.
    Prompts answered by prefill's token alone have no step and add nothing (n leaves them out).
    """
    kept = _with_steps(records)
    num, den = np.array([sum(r["emitted"]) for r in kept]), np.array([len(r["emitted"]) for r in kept])
    value, low, high = ratio_interval(num[:, None], den[:, None], seed=seed, resamples=resamples)
    return Estimate(float(value[0]), float(low[0]), float(high[0]), len(kept), int(den.sum()))


def by_category(records: Sequence[Mapping[str, Any]], *, seed: int = 0, resamples: int = RESAMPLES) -> list[dict[str, Any]]:
    """Accept length of each category: rows {category, value, low, high, n, steps}, longest first."""
    groups: dict[str, list] = {}
    for record in _with_steps(records):
        groups.setdefault(record["category"], []).append(record)
    rows = [{"category": name} | accept_length(group, seed=seed, resamples=resamples).row() for name, group in groups.items()]
    return sorted(rows, key=lambda row: -row["value"])


def by_context(records: Sequence[Mapping[str, Any]], edges: Sequence[int] = CONTEXT_EDGES, *, seed: int = 0) -> list[dict[str, Any]]:
    """Accept length by tokens before the step (prompt and answer so far): rows {context, value, low, high, n, steps}.

    `edges` are the lower ends of the buckets; the last has no upper end. Buckets without a step are left out.
    """
    kept = _with_steps(records)
    num, den = np.zeros((len(kept), len(edges))), np.zeros((len(kept), len(edges)))
    for i, record in enumerate(kept):
        emitted = np.asarray(record["emitted"])
        before = record["prompt_tokens"] + 1 + np.cumsum(emitted) - emitted
        bucket = np.clip(np.searchsorted(edges, before, side="right") - 1, 0, None)
        np.add.at(num[i], bucket, emitted)
        np.add.at(den[i], bucket, 1)
    value, low, high = ratio_interval(num, den, seed=seed)
    names = [f"{a} to {b - 1}" for a, b in zip(edges[:-1], edges[1:], strict=True)] + [f"{edges[-1]} and more"]
    return [
        {"context": names[m]}
        | Estimate(float(value[m]), float(low[m]), float(high[m]), int((den[:, m] > 0).sum()), int(den[:, m].sum())).row()
        for m in range(len(edges))
        if den[:, m].any()
    ]


def by_position(records: Sequence[Mapping[str, Any]], *, past_end: bool = True, seed: int = 0) -> list[dict[str, Any]]:
    """Acceptance at position i, accepted at i / steps that drafted i, and given that all earlier ones were accepted.

    Args:
        past_end: count slots past the end of the answer as the record has them (the definition, and vLLM's counters for
            live records). False leaves them out of both counts; live decoding and replay then agree exactly.

    Returns:
        Rows {position, drafted, accepted, rate, low, high, conditional, conditional_low, conditional_high}; None where
        nothing was drafted there or one prompt gives no interval.
    """
    kept = _with_steps(records)
    slots = max(max(r["drafted"]) for r in kept)
    hits, drafts, reached = (np.zeros((len(kept), slots)) for _ in range(3))
    for i, record in enumerate(kept):
        drafted, accepted, emitted = (np.asarray(record[k]) for k in ("drafted", "accepted", "emitted"))
        if not past_end:
            cut = emitted <= accepted
            drafted, accepted = np.where(cut, emitted, drafted), np.where(cut, emitted, accepted)
        for slot in range(slots):
            hits[i, slot] = (accepted > slot).sum()
            drafts[i, slot] = (drafted > slot).sum()
            reached[i, slot] = ((drafted > slot) & (accepted >= slot)).sum()
    rate, conditional = ratio_interval(hits, drafts, seed=seed), ratio_interval(hits, reached, seed=seed)
    names = ("rate", "low", "high", "conditional", "conditional_low", "conditional_high")
    rows = []
    for slot in range(slots):
        figures = {name: float(v[slot]) for name, v in zip(names, (*rate, *conditional), strict=True)}
        row = {"position": slot + 1, "drafted": int(drafts[:, slot].sum()), "accepted": int(hits[:, slot].sum())}
        rows.append(row | {k: None if np.isnan(v) else v for k, v in figures.items()})
    return rows


def misses(records: Sequence[Mapping[str, Any]], by: str = "position") -> list[dict[str, Any]]:
    """Why chains end: rows {position or category, steps, accepted, outside, wrong}, counts that add up to `steps`.

    By position, `steps` are those whose earlier slots were all accepted and whose slot was judged inside the answer or
    accepted. By category they are all steps, and `accepted` those in which nothing was refused.
    """
    if by not in ("position", "category"):
        raise DataError(f"misses by {by!r}", do="ask by 'position' or by 'category'")
    counts: dict[Any, dict[str, int]] = {}
    for record in _with_steps(records):
        for accepted, miss in zip(record["accepted"], record["miss"], strict=True):
            keys = [(record["category"], miss or "accepted")]
            if by == "position":
                keys = [(i + 1, "accepted") for i in range(accepted)] + ([(accepted + 1, miss)] if miss else [])
            for key, kind in keys:
                counts.setdefault(key, {"accepted": 0, "outside": 0, "wrong": 0})[kind] += 1
    return [{by: key, "steps": sum(kinds.values())} | kinds for key, kinds in sorted(counts.items())]


def predicted_accept_length(conditional: Sequence[float], k: int | None = None) -> float:
    """1 + Σ_k Π_{i≤k} a_i, from conditional accuracies a_1, a_2, … (against the verifier's full vocabulary)."""
    rates = np.asarray(conditional[:k], float)
    if len(rates) < (k or 0) or not np.all((rates >= 0) & (rates <= 1)):
        raise DataError(f"conditional accuracies {list(conditional)}: {k or 'some'} values from 0 to 1 expected")
    return float(1 + np.cumprod(rates).sum())


def repeats(tokens: Sequence[int], *, window: int = 64, shortest: int = 4, longest: int = 32) -> bool:
    """Whether an answer has fallen into repetition.

    Looked at are the last `window` tokens (all of a shorter answer). A stretch repeats with period p when its p tokens
    come again at once at least once in full; the answer repeats when, for one p from `shortest` to `longest`, such
    stretches cover more than half of the tokens looked at. Periods 1 to 3 show as multiples of themselves.
    """
    tail = np.asarray(tokens)[-window:]
    for period in range(shortest, min(longest, len(tail) // 2) + 1):
        covered, run = np.zeros(len(tail), bool), 0
        for i in range(period, len(tail)):
            run = run + 1 if tail[i] == tail[i - period] else 0
            if run >= period:
                covered[i - run - period + 1 : i + 1] = True
        if covered.mean() > 0.5:
            return True
    return False


def with_and_without_repeats(records: Sequence[Mapping[str, Any]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Accept length of all rows, of those that do not fall into repetition, and of those that do: rows {rows, value, …}."""
    looping = [r for r in records if repeats(r["tokens"])]
    steady = [r for r in records if not repeats(r["tokens"])]
    groups = {"all": records, "without repetition": steady, "repetition": looping}
    return [{"rows": name} | accept_length(g, seed=seed).row() for name, g in groups.items() if any(len(r["emitted"]) for r in g)]


def summary(records: Sequence[Mapping[str, Any]], *, seed: int = 0) -> dict[str, Any]:
    """The figures a run is known by, flat and plain, for a manifest or a table of runs."""
    overall = accept_length(records, seed=seed).row()
    steady = [r for r in with_and_without_repeats(records, seed=seed) if r["rows"] == "without repetition"]
    kinds = [m for r in records for m in r["miss"]]
    return {
        "accept_length": overall["value"],
        "accept_length_low": overall["low"],
        "accept_length_high": overall["high"],
        "prompts": overall["n"],
        "steps": overall["steps"],
        "accept_length_without_repetition": steady[0]["value"] if steady else None,
        "repeating_rows": sum(repeats(r["tokens"]) for r in records),
        "acceptance_by_position": [row["rate"] for row in by_position(records, seed=seed)],
        "misses_outside": kinds.count("outside"),
        "misses_wrong": kinds.count("wrong"),
    }
