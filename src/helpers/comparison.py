"""Two decodings of the same prompts: is one draft better than another, and is speculative output the plain output?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from helpers.acceptance import LEVEL, RESAMPLES, accept_length
from helpers.errors import DataError

FEWEST_PAIRS = 6  # of five pairs, all agree in sign by chance once in sixteen times (2 / 2^5)
TIE_GAP = 0.25  # bfloat16 has 8 significant bits: logits from 16 to 32 lie 0.125 apart; two such spacings


def compare(
    new: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]], *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> dict[str, Any]:
    """Accept length of `new` less that of `old` on the same prompts, with a paired bootstrap interval.

    Both are taken from the same resampled prompts, so what makes a prompt easy for both cancels. The verdict on `new` is
    "better" or "worse" when the interval leaves out zero and there are at least six pairs, else "cannot tell at this n".

    Returns:
        difference, low, high, n, new, old (accept lengths over the pairs), left_out (prompts only one side has, or
        without a step), prompts_needed (pairs at which an interval around this difference would leave out zero; None
        unless it cannot tell and there is a difference), verdict, sentence.

    Raises:
        DataError: no prompt in common, or a prompt tokenised differently on the two sides.
    """
    accept_length(new, resamples=1), accept_length(old, resamples=1)  # refuses records that cannot be, and empty ones
    sides = [{r["id"]: r for r in side} for side in (new, old)]
    shared = [i for i in sides[0] if i in sides[1] and sides[0][i]["emitted"] and sides[1][i]["emitted"]]
    left_out = len(set(sides[0]) | set(sides[1])) - len(shared)
    if not shared:
        raise DataError("the two results share no prompt", do="evaluate both drafts on the same prompts")
    unlike = [i for i in shared if sides[0][i]["prompt_tokens"] != sides[1][i]["prompt_tokens"]]
    if unlike:
        raise DataError(
            f"{len(unlike)} prompts have other lengths on the two sides, first {unlike[0]}",
            do="compare drafts of one verifier, with one chat template",
        )
    n = len(shared)
    num = np.array([[sum(side[i]["emitted"]) for side in sides] for i in shared], float)
    den = np.array([[len(side[i]["emitted"]) for side in sides] for i in shared], float)
    lengths = num.sum(0) / den.sum(0)
    difference = float(lengths[0] - lengths[1])
    low = high = math.nan
    if n >= 2:
        weights_RN = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
        ratios_R2 = (weights_RN @ num) / (weights_RN @ den)
        low, high = (float(v) for v in np.percentile(ratios_R2[:, 0] - ratios_R2[:, 1], [50 * (1 - level), 50 * (1 + level)]))
    verdict, needed = "cannot tell at this n", None
    if n >= FEWEST_PAIRS and (low > 0 or high < 0):
        verdict = "better" if difference > 0 else "worse"
    elif n >= FEWEST_PAIRS and difference:
        needed = math.ceil(n * ((high - low) / 2 / difference) ** 2)  # the interval narrows with the root of n
    interval = "no interval" if math.isnan(low) else f"{low:+.2f} to {high:+.2f}"
    return {
        "difference": difference,
        "low": low if n >= 2 else None,
        "high": high if n >= 2 else None,
        "n": n,
        "new": float(lengths[0]),
        "old": float(lengths[1]),
        "left_out": left_out,
        "prompts_needed": needed,
        "verdict": verdict,
        "sentence": f"{lengths[0]:.2f} against {lengths[1]:.2f}: {difference:+.2f} ({interval}, n = {n}): {verdict}.",
    }


def losslessness(pairs: Sequence[Mapping[str, Any]], *, tie_gap: float = TIE_GAP) -> dict[str, Any]:
    """Whether speculative greedy decoding gave what plain greedy decoding gives.

    Rounding may turn a tie: computing several tokens at once sums in another order. So a difference is excused when the
    verifier's two best logits at its place lie no further apart than `tie_gap`. Everything after the first difference is
    another text and is not compared.

    Args:
        pairs: {"id", "plain": ids, "speculative": ids}; "gap", optional, is the difference between the logits of plain's
            and speculative's token at the first difference, "allowed" the widest gap that is a tie there (else `tie_gap`). In
            float32 no gap is needed: expected is equality.

    Returns:
        prompts, identical, ties, different (neither), passed, verdict (a sentence), rows: one for each pair that differs,
        {id, position (in the answer, from 0), plain, speculative (token ids, None past an end), gap, allowed, tie}.
    """
    if not pairs:
        raise DataError("no pair of answers to compare", do="decode at least one prompt both ways")
    rows = []
    for pair in pairs:
        plain, speculative = list(pair["plain"]), list(pair["speculative"])
        shorter = min(len(plain), len(speculative))
        position = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
        if position == len(plain) == len(speculative):
            continue
        found = [int(side[position]) if position < len(side) else None for side in (plain, speculative)]
        gap = pair.get("gap")
        allowed = pair.get("allowed", tie_gap)
        tie = gap is not None and bool(abs(gap) <= allowed)
        rows.append(
            {"id": pair["id"], "position": position, "plain": found[0], "speculative": found[1], "gap": gap, "allowed": allowed, "tie": tie}
        )
    ties = sum(row["tie"] for row in rows)
    different, total = len(rows) - ties, len(pairs)
    if different:
        verdict = f"{different} of {total} answers differ where the verifier was not undecided: speculation changes the output."
    elif ties:
        widest, reach = (max(abs(row[key]) for row in rows) for key in ("gap", "allowed"))
        tie = f"largest gap {widest:.3f}, at most {reach:.3f} is one"
        verdict = f"{total - ties} of {total} answers are identical; {ties} differ at a tie ({tie})."
    else:
        verdict = f"All {total} answers are identical, token for token."
    return {
        "prompts": total,
        "identical": total - len(rows),
        "ties": ties,
        "different": different,
        "passed": different == 0,
        "verdict": verdict,
        "rows": rows,
    }
