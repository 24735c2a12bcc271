"""What a smaller draft vocabulary costs and saves: coverage of held-out answers, the ceiling on accept length, the head.

K is the number of drafted tokens per step. A draft cannot propose a token outside its vocabulary, so there its chain ends; the
verifier then emits that token itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from helpers.errors import DataError, ParameterError
from helpers.vocab import entry_order

ALL = "all"


def candidate_sizes(vocab_size: int, *, at_least: int = 1, more: Iterable[int] = ()) -> list[int]:
    """Sizes worth comparing: powers of two from about V/256 on, 32,000 for large vocabularies, those in `more`, and V itself."""
    powers = {1 << n for n in range(4, vocab_size.bit_length()) if (1 << n) >= vocab_size / 256}
    usual = {32_000} if vocab_size > 64_000 else set()
    return sorted(s for s in {*powers, *usual, *more, vocab_size} if max(1, at_least) <= s <= vocab_size)


def emitted(answers: Sequence[np.ndarray], inside: np.ndarray, k: int) -> list[np.ndarray]:
    """Tokens that a step starting at each position would emit, were the draft right wherever its vocabulary allows.

    Position p of an answer of N tokens: the run of tokens inside the vocabulary from p on, at most `k`, plus the verifier's own
    token, at most the N - p that are left. The first token comes from prefill and starts no step.

    Args:
        answers: token ids [N] each. inside: [V] bool.

    Returns:
        One array [N - 1] per answer.
    """
    out = []
    for answer in answers:
        wrong = np.flatnonzero(~inside[answer])
        positions = np.arange(1, len(answer))
        ends = np.append(wrong, len(answer))
        run = ends[np.searchsorted(wrong, positions)] - positions
        out.append(np.minimum(np.minimum(run, k) + 1, len(answer) - positions))
    return out


def chain_steps(emits: np.ndarray) -> int:
    """Steps that decoding an answer takes, each starting where the one before ended."""
    jumps, at, steps = emits.tolist(), 0, 0
    while at < len(jumps):
        at, steps = at + jumps[at], steps + 1
    return steps


def _summary(size: int, category: str, tokens: int, covered: int, emits: Sequence[np.ndarray], k: int) -> dict[str, object]:
    positions, steps = sum(map(len, emits)), sum(map(chain_steps, emits))
    share = covered / tokens
    return {
        "size": size,
        "category": category,
        "answers": len(emits),
        "tokens": tokens,
        "covered": share,
        "ceiling": positions / steps if steps else float("nan"),
        "ceiling_positions": sum(int(e.sum()) for e in emits) / positions if positions else float("nan"),
        "ceiling_independent": 1.0 + sum(share**n for n in range(1, k + 1)),
    }


def coverage(
    counts: np.ndarray,
    heldout: Mapping[str, Sequence[Sequence[int]]],
    sizes: Iterable[int],
    *,
    k: int,
    vocab_size: int,
    always_keep: Iterable[int] = (),
) -> pd.DataFrame:
    """Share of held-out tokens inside each draft vocabulary, and the accept length no draft with it can exceed.

    Three ceilings, all for a draft that is right wherever its vocabulary allows:
    `ceiling` decodes the held-out answers step by step (tokens emitted / steps, so it is accept length as the runs define it);
    `ceiling_positions` averages the steps that would start at every position, visited or not;
    `ceiling_independent` is 1 + c + … + c^K with c the coverage, which takes misses to be independent of each other.

    Args:
        counts: [V] from training rows. heldout: by category, the supervised token ids of each answer.
        sizes: draft vocabularies to compare; V is added.

    Returns:
        One row per size and category, and per size over all ("all"), with columns size, category, answers, tokens, covered
        and the three ceilings.

    Raises:
        DataError: no held-out token, or one outside the vocabulary. ParameterError: sizes below the kept tokens or above V.
    """
    keep = {int(i) for i in always_keep}
    wanted = sorted({*(int(s) for s in sizes), vocab_size})
    if wanted[0] < max(1, len(keep)) or wanted[-1] > vocab_size:
        what = f"draft vocabularies {wanted[0]:,} to {wanted[-1]:,}: each must lie in {max(1, len(keep)):,} to {vocab_size:,}"
        raise ParameterError(what, where="sizes", do="leave the others out")
    arrays = {name: [np.asarray(a, dtype=np.int64) for a in answers if len(a)] for name, answers in heldout.items()}
    arrays = {name: answers for name, answers in arrays.items() if answers}
    if not arrays:
        raise DataError("no held-out answer to measure coverage on", where="heldout", do="raise heldout_share or the number of prompts")
    joined = {name: np.concatenate(answers) for name, answers in arrays.items()}
    if any(ids.min() < 0 or ids.max() >= vocab_size for ids in joined.values()):
        raise DataError(f"held-out token ids outside the vocabulary of {vocab_size:,}", where="heldout", do="use the verifier's tokenizer")
    order, _ = entry_order(counts, vocab_size, keep)
    rows = []
    for size in wanted:
        inside = np.zeros(vocab_size, dtype=bool)
        inside[order[:size]] = True
        emits = {name: emitted(answers, inside, k) for name, answers in arrays.items()}
        inner = {name: int(inside[ids].sum()) for name, ids in joined.items()}
        rows += [_summary(size, name, len(joined[name]), inner[name], emits[name], k) for name in arrays]
        everything = [e for parts in emits.values() for e in parts]
        rows.append(_summary(size, ALL, sum(map(len, joined.values())), sum(inner.values()), everything, k))
    return pd.DataFrame(rows)


def head_cost(hidden_size: int, sizes: Iterable[int], dtype_bytes: int = 2) -> pd.DataFrame:
    """The draft's output head by vocabulary size: size, parameters (H · D), bytes, flops per drafted token (2 · H · D)."""
    return pd.DataFrame(
        [{"size": s, "parameters": hidden_size * s, "bytes": hidden_size * s * dtype_bytes, "flops": 2 * hidden_size * s} for s in sizes]
    )


@dataclass(frozen=True)
class Recommendation:
    """A draft vocabulary size and why, in words."""

    size: int
    ceiling: float
    full: float
    reason: str


def recommend(table: pd.DataFrame, *, k: int, hidden_size: int = 0, tolerance: float = 0.01) -> Recommendation:
    """The smallest size in `coverage`'s table that, like every larger one, keeps the ceiling within `tolerance` of the full vocabulary's.

    Raises:
        DataError: the table has no ceiling (held-out answers of one token).
    """
    total = table[table["category"] == ALL].sort_values("size")
    sizes, ceilings = total["size"].tolist(), total["ceiling"].tolist()
    full = ceilings[-1]
    if not full > 0:
        raise DataError("no ceiling to choose by: every held-out answer has one token", where="heldout", do="allow longer answers")
    lost = [1 - c / full for c in ceilings]
    # The chain may start its steps luckily at one size, so a size counts only when all above it pass as well.
    at = next(i for i in range(len(sizes)) if max(lost[i:]) <= tolerance)
    size, tokens = sizes[at], int(total["tokens"].iloc[0])
    words = [
        f"{size:,} tokens: a draft that is right wherever this vocabulary allows emits {ceilings[at]:.2f} tokens per step on "
        f"{tokens:,} held-out tokens (K = {k}), {max(lost[at], 0.0):.1%} below the {full:.2f} of all {sizes[-1]:,}"
    ]
    if at:
        words.append(f"{sizes[at - 1]:,} would lose {lost[at - 1]:.1%}, more than the {tolerance:.0%} allowed")
    else:
        words.append("no smaller size was compared")
    parts = table[table["category"] != ALL].pivot(index="category", columns="size", values="ceiling").dropna()
    if len(parts) > 1 and size != sizes[-1]:
        by_part = 1 - parts[size] / parts[sizes[-1]]
        words.append(f"the category that loses most is {by_part.idxmax()} ({max(by_part.max(), 0.0):.1%})")
    if hidden_size and size != sizes[-1]:
        words.append(f"its head has {hidden_size * size / 1e6:.1f} million parameters instead of {hidden_size * sizes[-1] / 1e6:.1f}")
    return Recommendation(size, ceilings[at], full, "; ".join(words) + ".")
