"""Do sampled answers have the verifier's distribution? Pearson's chi-square of drawn tokens against exact probabilities.

Σ (observed - expected)² / expected over cells, with one degree of freedom less than cells; cells that expect fewer than
five draws are put together, as the approximation asks. Under the right distribution the p-value is uniform; a small one
means that the draws come from another.

Shapes: M cells, V verifier vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from helpers import rejection, speculative
from helpers.drafting import Drafter
from helpers.errors import DataError
from helpers.verifier import Verifier

FEWEST = 5.0  # expected draws in a cell
SIGNIFICANT = 1e-3  # one right run in a thousand fails: seeds are fixed, so a run that passed passes again


def tail(statistic: float, degrees: int) -> float:
    """Probability of a chi-square value at least so large: the regularised upper incomplete gamma function."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)))


def chi_square(observed_M: Sequence[int], probability_M: Sequence[float], *, fewest: float = FEWEST) -> dict[str, Any]:
    """Counts held against probabilities: {draws, cells, statistic, degrees, p_value}.

    An outcome drawn although its probability is zero cannot be: statistic infinite, p-value 0. With one cell left
    nothing can be told: degrees 0, p-value None.

    Raises:
        DataError: counts and probabilities of unlike length, no draw, or probabilities that do not add to one.
    """
    observed, probability = np.asarray(observed_M, float), np.asarray(probability_M, float)
    draws = observed.sum()
    if observed.shape != probability.shape or draws == 0 or abs(probability.sum() - 1) > 1e-3:
        raise DataError(
            f"{len(observed)} counts of {draws:.0f} draws against {len(probability)} probabilities that add to {probability.sum():.4f}",
            do="pass one count per outcome, at least one draw, and probabilities of all outcomes",
        )
    expected = draws * probability / probability.sum()
    if observed[expected == 0].any():
        return {"draws": int(draws), "cells": len(observed), "statistic": float("inf"), "degrees": len(observed) - 1, "p_value": 0.0}
    order = np.argsort(-expected)
    observed, expected = observed[order], expected[order]
    kept = int((expected >= fewest).sum())
    rest = expected[kept:].sum()
    if kept and 0 < rest < fewest:
        kept -= 1  # the rest alone is too small a cell: it takes the smallest full one in
    cells = [np.append(side[:kept], side[kept:].sum()) for side in (observed, expected)] if rest else [observed[:kept], expected[:kept]]
    found = {"draws": int(draws), "cells": len(cells[0])}
    statistic, degrees = float(((cells[0] - cells[1]) ** 2 / cells[1]).sum()), len(cells[0]) - 1
    return found | {"statistic": statistic, "degrees": degrees, "p_value": tail(statistic, degrees) if degrees else None}


def next_token(verifier: Verifier, context: Sequence[int], temperature: float) -> np.ndarray:
    """The verifier's probabilities of the token after a context [V], from one plain forward pass."""
    return rejection.probabilities(verifier.next_logits(context), temperature).double().cpu().numpy()


def first_tokens(
    verifier: Verifier,
    drafter: Drafter,
    ids: Sequence[list[int]],
    *,
    k: int,
    draws: int,
    temperature: float,
    seed: int = 0,
    batch_rows: int = 64,
) -> list[dict[str, Any]]:
    """First answer tokens drawn by speculation, held against the verifier's exact probabilities, prompt by prompt.

    As a control that the test can fail, the draft's own proposals of the same slot are held against them too: an engine
    that accepted every proposal would emit these.

    Returns:
        Rows {prompt, draws, cells, statistic, degrees, p_value, accepted (share of proposals), proposals_statistic,
        proposals_p_value}, and a last row "all" with statistics and degrees summed.
    """
    rows = []
    options: dict[str, Any] = {"max_tokens": 1, "drafter": drafter, "k": k, "temperature": temperature, "batch_rows": batch_rows}
    for place, prompt in enumerate(ids):
        exact_V = next_token(verifier, prompt, temperature)
        made = speculative.draws(verifier, prompt, draws, seed=seed + place, **options)
        emitted, proposed = ([s[0][name][0] for s in made.steps] for name in ("emitted", "drafted"))
        ours, theirs = (chi_square(np.bincount(side, minlength=len(exact_V)), exact_V) for side in (emitted, proposed))
        accepted = sum(s[0]["accepted"] > 0 for s in made.steps) / draws
        proposals = {f"proposals_{name}": theirs[name] for name in ("statistic", "p_value")}
        rows.append({"prompt": place} | ours | {"accepted": accepted} | proposals)
    statistic, degrees = sum(r["statistic"] for r in rows), sum(r["degrees"] for r in rows)
    apart = sum(r["proposals_statistic"] for r in rows)
    whole = {"prompt": "all", "draws": draws * len(rows), "cells": sum(r["cells"] for r in rows), "statistic": statistic}
    whole |= {"degrees": degrees, "p_value": tail(statistic, degrees) if degrees else None}
    whole |= {"accepted": sum(r["accepted"] for r in rows) / len(rows), "proposals_statistic": apart}
    return [*rows, whole | {"proposals_p_value": tail(apart, degrees) if degrees else None}]
