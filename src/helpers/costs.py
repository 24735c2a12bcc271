"""Does speculation pay? Expected speedup from acceptance by position and the seconds of each part of a step.

One round of speculation drafts K tokens one after another, verifies K+1 positions in one pass and emits E[tokens](K):

    speedup(K) = E[tokens](K) · plain / (verify(K+1) + K · draft + overhead)
    E[tokens](K) = 1 + Σ_{k≤K} Π_{i≤k} a_i      (Leviathan et al. 2023, with acceptance by position instead of one rate)

Assumed: acceptance does not depend on the batch or on K; all rows of a batch go on to the end, so a batch pays by the row
as one does; cost does not grow with the text (measure at the length you serve). Beyond the last measured position its
conditional acceptance is repeated, and beyond the last measured pass the last slope goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.acceptance import predicted_accept_length
from helpers.errors import DataError


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of one round at one batch size (or any one unit: only ratios matter)."""

    plain: float  # one plain decoding step
    draft: float  # one drafted token
    verify: tuple[tuple[int, float], ...]  # (tokens per row in one pass, seconds), rising in tokens
    overhead: float = 0.0  # the rest of a round, whatever K

    def verify_seconds(self, tokens: int) -> float:
        """One verifier pass over `tokens` positions per row: straight lines between the measured points."""
        sizes, seconds = zip(*self.verify, strict=True)
        if tokens <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(tokens, sizes, seconds))
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        return seconds[-1] + slope * (tokens - sizes[-1])

    def round_seconds(self, k: int) -> float:
        """Seconds of one round that drafts k tokens."""
        return self.verify_seconds(k + 1) + k * self.draft + self.overhead


def fit_costs(
    plain: Sequence[float], draft: Mapping[int, Sequence[float]], verify: Mapping[int, Sequence[float]], overhead: Sequence[float] = (0.0,)
) -> Costs:
    """Costs from measured seconds; each list holds repeats, of which the median counts (one slow outlier then moves nothing).

    Args:
        plain: seconds of one plain decoding step.
        draft: K → seconds of drafting K tokens. With two or more K a line is fitted by least squares: its slope is the
            draft's cost per token, its intercept (never below 0) joins the overhead.
        verify: tokens per row → seconds of one verifier pass. One token, if not measured here, costs a plain step.
        overhead: seconds of a round that belong to neither.

    Raises:
        DataError: an empty list or a time that is not above zero (overhead may be zero).
    """
    times = {"plain": plain} | {f"draft {k}": v for k, v in draft.items()} | {f"verify {t}": v for t, v in verify.items()}
    bad = [name for name, values in times.items() if not len(values) or not np.all(np.asarray(values, float) > 0)]
    if bad or not draft or not verify or not len(overhead):
        raise DataError(f"no positive seconds for {', '.join(bad) or 'draft, verify or overhead'}", do="time these steps again")
    sizes, seconds = np.array(sorted(draft), float), np.array([np.median(draft[k]) for k in sorted(draft)])
    slope, intercept = float((sizes @ seconds) / (sizes @ sizes)), 0.0
    if len(sizes) > 1:
        line = np.polyfit(sizes, seconds, 1)
        if line[0] > 0 and line[1] > 0:
            slope, intercept = float(line[0]), float(line[1])
    step = float(np.median(plain))
    points = {1: step} | {int(t): float(np.median(v)) for t, v in verify.items()}
    return Costs(step, slope, tuple(sorted(points.items())), float(np.median(overhead)) + intercept)


def expected_tokens(conditional: Sequence[float], k: int) -> float:
    """Tokens a round of K = k emits on average; the last conditional acceptance is repeated for positions not measured."""
    if not len(conditional):
        raise DataError("no acceptance by position given", do="pass the `conditional` column of acceptance.by_position")
    rates = list(conditional)
    return predicted_accept_length(rates + [rates[-1]] * max(0, k - len(rates)), k)


def speedup_model(conditional: Sequence[float], costs: Costs, ks: Sequence[int] = range(1, 9)) -> list[dict[str, Any]]:
    """Rows {k, accept_length, seconds, speedup, break_even, draft_share, verify_share, overhead_share} for each K.

    `seconds` is one round's; `break_even` the accept length at which this K equals plain decoding.
    """
    rows = []
    for k in ks:
        tokens, seconds = expected_tokens(conditional, k), costs.round_seconds(k)
        shares = {"draft": k * costs.draft, "verify": costs.verify_seconds(k + 1), "overhead": costs.overhead}
        row = {"k": k, "accept_length": tokens, "seconds": seconds, "speedup": tokens * costs.plain / seconds}
        rows.append(row | {"break_even": seconds / costs.plain} | {f"{name}_share": v / seconds for name, v in shares.items()})
    return rows


def best_k(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row with the highest `speedup`; {"k": 0, "speedup": 1.0, "accept_length": 1.0} when plain decoding is fastest."""
    best = max(rows, key=lambda row: row["speedup"])
    return dict(best) if best["speedup"] > 1 else {"k": 0, "speedup": 1.0, "accept_length": 1.0}


def does_it_pay(rows: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for the reader, from rows of `speedup_model`."""
    best = best_k(rows)
    if best["k"] == 0:
        near = max(rows, key=lambda row: row["speedup"])
        return (
            f"It does not pay: the best K, {near['k']}, gives {near['speedup']:.2f} times plain decoding; "
            f"it would need an accept length above {near['break_even']:.2f} and has {near['accept_length']:.2f}."
        )
    return (
        f"It pays: K = {best['k']} gives {best['speedup']:.2f} times plain decoding, with an accept length of "
        f"{best['accept_length']:.2f} where {best['break_even']:.2f} breaks even."
    )


def model_error(rows: Sequence[Mapping[str, Any]], measured: Mapping[int, float]) -> list[dict[str, Any]]:
    """Modelled beside measured speedup: rows {k, modelled, measured, error}, error = modelled / measured - 1."""
    modelled = {row["k"]: row["speedup"] for row in rows}
    return [{"k": k, "modelled": modelled[k], "measured": v, "error": modelled[k] / v - 1} for k, v in measured.items() if k in modelled]


def expert_reads(tokens: float, experts: int, per_token: int) -> float:
    """Experts a layer of a mixture reads for `tokens` tokens, if routing spreads evenly: E · (1 - (1 - k/E)^tokens)."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


def node_case(
    decode_ms: float,
    allreduce_share: float,
    *,
    batch: int = 1,
    layers: int = 61,
    draft_ms: float | None = None,
    overhead_ms: float = 0.0,
    allreduce_growth: float = 0.01,
    compute_growth: float = 0.01,
    expert_share: float = 0.0,
    experts: int = 384,
    experts_per_token: int = 8,
    longest: int = 9,
) -> Costs:
    """Costs (milliseconds) of a node from its own decode times, for `speedup_model`.

    A plain step of `decode_ms` at `batch` rows is split into three parts that grow differently with the tokens verified:

    - all-reduce, `allreduce_share`: messages of one or a few tokens are small, so latency counts and stays; each further
      token adds `allreduce_growth` of it (raise it for large batches, where bandwidth counts).
    - routed experts, `expert_share`: read from memory; further tokens read further experts until all are read
      (`expert_reads`). This is what makes verification dear for a mixture of experts at batch 1. 0 for a dense model.
    - the rest: weights read once whatever the tokens, and arithmetic; each further token adds `compute_growth` of it.

    With half of a step in all-reduce, half of verification costs next to nothing more per token: that half is paid once
    for K+1 tokens. The draft, one layer with two all-reduces and a head, is taken as two of the verifier's layers
    (`2 · decode_ms / layers`) unless `draft_ms` is given. These are assumptions: time a pass of K+1 tokens where you can
    and use `fit_costs`.

    Raises:
        DataError: shares that are not shares, or times not above zero.
    """
    rest = 1 - allreduce_share - expert_share
    if min(allreduce_share, expert_share) < 0 or rest < -1e-9:
        raise DataError(f"shares of all-reduce {allreduce_share} and experts {expert_share} must lie in 0 to 1 and add to at most 1")
    if decode_ms <= 0 or batch < 1 or layers < 1 or (draft_ms is not None and draft_ms <= 0) or not 0 < experts_per_token <= experts:
        raise DataError(
            f"decode_ms {decode_ms}, batch {batch}, layers {layers}, draft_ms {draft_ms}, {experts_per_token} of {experts} experts: "
            "all must be above zero, and no more experts per token than there are"
        )

    def verify(tokens: int) -> float:
        more = tokens - 1
        reads = expert_reads(tokens * batch, experts, experts_per_token) / expert_reads(batch, experts, experts_per_token)
        return decode_ms * (
            allreduce_share * (1 + allreduce_growth * more) + expert_share * reads + max(0.0, rest) * (1 + compute_growth * more)
        )

    points = tuple((t, verify(t)) for t in range(1, longest + 1))
    return Costs(decode_ms, 2 * decode_ms / layers if draft_ms is None else draft_ms, points, overhead_ms)
