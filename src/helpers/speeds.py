"""Wall-clock speed, one prompt at a time: what a round costs, which setting the costs favour, and every method measured.

The costs come from runs of their own, so that the cost model predicts the measured speeds rather than repeats them. In the
measurement every method answers a prompt before the next prompt begins: a slow moment of the machine hits all of them.
Prefill is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from helpers import costs, replaying, speculative
from helpers.answers import PLAIN
from helpers.drafting import Drafter
from helpers.replaying import Foreseen
from helpers.verifier import Verifier

PROBED = (1, 4, 8)  # K at which rounds are timed: verifications of 2, 5 and 9 tokens
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
GENERATE, LOOKUP = "transformers generate", "transformers prompt lookup"
PARTS = ("draft", "verify", "overhead")


@dataclass(frozen=True)
class Method:
    """A way to decode in our loop; without a draft it is plain decoding."""

    name: str
    drafter: Drafter | None = None
    k: int = 0
    confidence: float = 0.0


def probe(verifier: Verifier, drafter: Drafter, ids: Sequence[list[int]], *, max_tokens: int) -> dict[str, Any]:
    """Seconds of a plain step, and of the parts of a round at each K of `PROBED`: one value per prompt.

    Returns:
        {"plain_step": [seconds], "rounds": [{k, draft, verify, overhead}]}, for `fitted`.
    """
    steps, rounds = [], []
    speculative.decode(verifier, ids[:1], max_tokens=8, drafter=drafter, k=PROBED[-1])  # first use allocates and picks kernels
    for start in ids:
        for k in (0, *PROBED):
            made = speculative.decode(verifier, [start], max_tokens=max_tokens, drafter=drafter, k=k)
            split = {part: made.seconds[part] / max(1, len(made.steps[0])) for part in PARTS}
            if k:
                rounds.append({"k": k} | split)
            elif made.steps[0]:
                steps.append(sum(split.values()))
    return {"plain_step": steps, "rounds": [r for r in rounds if r["verify"] > 0]}


def fitted(probed: dict[str, Any]) -> costs.Costs:
    """Costs from `probe`. Raises DataError where no round could be timed (every answer ended with prefill's token)."""
    rows = probed["rounds"]
    ks = sorted({r["k"] for r in rows})
    times = {part: {k: [r[part] for r in rows if r["k"] == k] for k in ks} for part in ("draft", "verify")}
    verify = {k + 1: seconds for k, seconds in times["verify"].items()}
    return costs.fit_costs(probed["plain_step"], times["draft"], verify, [r["overhead"] for r in rows] or [0.0])


def settings(found: Sequence[Mapping[str, Any]], here: costs.Costs, ks: Sequence[int]) -> list[dict[str, Any]]:
    """Speedup expected of each K, and of stopping when unsure, by replay of the chains and the costs of their rounds.

    Args:
        found: rows of `Foreseen.row`, with chains of at least the largest of `ks`.

    Returns:
        Rows {k, confidence (0: always K), accept_length, drafted (per round), speedup}.
    """
    rows, chains = [], [Foreseen.of(row) for row in found]
    for k, confidence in [(k, 0.0) for k in ks] + [(max(ks), c) for c in CONFIDENCES]:
        steps = [step for f in chains for step in replaying.walk(f, k, confidence)]
        # a fixed K drafts past the end of the text too; one that stops has drafted the token it was unsure of
        drafted = [len(s["drafted"]) if confidence else k for s in steps]
        spent = sum(here.verify_seconds(d + 1) + min(k, d + (confidence > 0)) * here.draft + here.overhead for d in drafted)
        tokens = sum(len(s["emitted"]) for s in steps)
        row = {"k": k, "confidence": confidence, "accept_length": tokens / len(steps), "drafted": float(np.mean(drafted))}
        rows.append(row | {"speedup": tokens * here.plain / spent})
    return rows


def best(rows: Sequence[dict[str, Any]], *, stopping: bool) -> dict[str, Any]:
    """The fastest row of `settings` among those that stop when unsure, or among those that do not."""
    return max((r for r in rows if bool(r["confidence"]) == stopping), key=lambda r: r["speedup"])


def methods(trained: Drafter, untrained: Drafter, rows: Sequence[dict[str, Any]], k: int) -> list[Method]:
    """What is measured: plain, K = 1, the run's K, the K and the stopping the costs favour, and an untrained draft."""
    fixed, stops = best(rows, stopping=False)["k"], best(rows, stopping=True)
    found = [Method("plain")] + [Method(f"speculative, K = {n}", trained, n) for n in sorted({1, k, fixed})]
    found.append(Method(f"speculative, stops below {stops['confidence']:g}", trained, stops["k"], stops["confidence"]))
    return [*found, Method(f"untrained draft, K = {fixed}", untrained, fixed)]


@torch.inference_mode()
def _generate(verifier: Verifier, ids: list[int], max_tokens: int, **options: Any) -> tuple[float, int]:
    began = time.perf_counter()
    given = torch.tensor([ids], device=verifier.device)
    out = verifier.model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=max_tokens, do_sample=False, **PLAIN, **options
    )
    return time.perf_counter() - began, out.shape[1] - len(ids)


def interleaved(
    verifier: Verifier,
    ids: Sequence[list[int]],
    chosen: Sequence[Method],
    *,
    max_tokens: int,
    lookup: int,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Tokens per second of each method and of transformers' `generate`, alone and with its prompt lookup.

    Args:
        chosen: the first is the base of all speedups. lookup: tokens prompt lookup proposes at most.

    Returns:
        `methods`: rows {method, k, confidence, tokens_per_second, speedup, low, high (of the speedup, over prompts),
        over_generate}; `rounds`: {k, draft, verify, overhead} in seconds for fixed K of the trained draft.
    """
    names = [m.name for m in chosen] + [GENERATE, LOOKUP]
    spent: dict[str, list[float]] = {name: [] for name in names}
    emitted: dict[str, list[int]] = {name: [] for name in names}
    parts = {m.name: dict.fromkeys((*PARTS, "rounds"), 0.0) for m in chosen}
    generators: dict[str, dict[str, Any]] = {GENERATE: {}, LOOKUP: {"prompt_lookup_num_tokens": lookup}}
    for options in generators.values():
        _generate(verifier, ids[0], 4, **options)  # first use allocates
    for start in ids:
        prefill = 0.0
        for method in chosen:
            made = speculative.decode(
                verifier, [start], max_tokens=max_tokens, drafter=method.drafter, k=method.k, confidence=method.confidence
            )
            split = {part: made.seconds[part] for part in PARTS}
            spent[method.name].append(sum(split.values()))
            emitted[method.name].append(made.emitted)
            prefill = prefill or made.seconds["prefill"]
            for part, value in {**split, "rounds": len(made.steps[0])}.items():
                parts[method.name][part] += value
        for name, options in generators.items():
            # generate offers no time without prefill, so the base's prefill of the same prompt is taken off
            whole, tokens = _generate(verifier, start, max_tokens, **options)
            spent[name].append(max(whole - prefill, 1e-9))
            emitted[name].append(tokens - 1)
    base, rows, known = names[0], [], {m.name: m for m in chosen}
    rates = {name: sum(emitted[name]) / max(sum(spent[name]), 1e-9) for name in names}
    least = max(rates[base], 1e-9)  # a base whose every answer ended with prefill's token made none
    for name in names:
        low, high = _interval(emitted[name], spent[name], emitted[base], spent[base], seed)
        method = known.get(name, Method(name))
        row = {"method": name, "k": method.k or None, "confidence": method.confidence or None, "tokens_per_second": rates[name]}
        row |= {"speedup": rates[name] / least, "low": low, "high": high}
        rows.append(row | {"over_generate": rates[name] / max(rates[GENERATE], 1e-9)})
    fixed = [m for m in chosen if m.k and not m.confidence and m.drafter is chosen[1].drafter]
    rounds = [{"k": m.k} | {part: parts[m.name][part] / max(1.0, parts[m.name]["rounds"]) for part in PARTS} for m in fixed]
    report(f"{len(ids)} prompts, one at a time, {len(names)} methods each: plain {rates[base]:.1f} tokens per second")
    return {"methods": rows, "rounds": rounds}


def _interval(tokens, spent, base_tokens, base_spent, seed: int) -> tuple[float | None, float | None]:
    """95 % interval of a ratio of two rates, each a ratio of sums, resampled over prompts."""
    if len(tokens) < 2:
        return None, None
    pick = np.random.default_rng(seed).integers(0, len(tokens), (2000, len(tokens)))
    a, b, c, d = (np.asarray(x, float)[pick].sum(1) for x in (tokens, spent, base_tokens, base_spent))
    low, high = np.percentile((a / b) / (c / d), [2.5, 97.5])
    return float(low), float(high)
