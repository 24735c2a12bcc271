"""What notebook 02 shows of a draft vocabulary: counts and ranks as text, cost by size, the map walked through, its checks.

V is the verifier's vocabulary, D the draft's, K the drafted tokens per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from helpers import vocab
from helpers.coverage import ALL, Recommendation, coverage
from helpers.extraction import spoken
from helpers.rendering import decode

Rows = Sequence[tuple[list[int], list[int]]]
SHARES = {"covered": ".2%", "ceiling": ".3f", "lost": ".2%"}
COUNTED = 20_000_000  # tokens drawn for the synthetic case
HELD_OUT = (100, 500)  # answers and tokens each, to judge it by


def _text(tokenizer: Any, token: int) -> str:
    return repr(decode(tokenizer, [int(token)]))


def by_category(rows: Rows, talks: Sequence[Mapping[str, Any]]) -> dict[str, list[list[int]]]:
    """The verifier's answers as token ids by the category of their conversation; rows and `conversations.jsonl` in step."""
    found: dict[str, list[list[int]]] = {}
    for row, talk in zip(rows, talks, strict=True):
        found.setdefault(talk["category"], []).extend(spoken(*row))
    return found


def split_rows(rows: Rows, training: int) -> list[dict[str, Any]]:
    """Sizes of the training rows (the first ones) and of the held-out rows."""
    parts = {"training: counted": rows[:training], "held out: judged by": rows[training:]}
    return [
        {"rows": name, "conversations": len(part), "tokens": sum(len(i) for i, _ in part), "supervised": sum(sum(m) for _, m in part)}
        for name, part in parts.items()
    ]


def _ranks(counts: np.ndarray) -> np.ndarray:
    """Rank of each token by count, the most frequent 1, ties to the lower id: [V]."""
    ranks = np.empty(len(counts), dtype=np.int64)
    ranks[np.lexsort((np.arange(len(counts)), -counts))] = np.arange(1, len(counts) + 1)
    return ranks


def frequent(counts: np.ndarray, tokenizer: Any, top: int) -> list[dict[str, Any]]:
    """The `top` most frequent tokens with the share of all tokens that they and those above them make."""
    order = np.argsort(_ranks(counts))[:top]
    together = np.cumsum(counts[order]) / counts.sum()
    return [
        {"rank": n, "token": _text(tokenizer, i), "id": int(i), "count": int(counts[i]), "together": f"{share:.1%}"}
        for n, (i, share) in enumerate(zip(order, together, strict=True), 1)
    ]


def ranked(tokens: Sequence[int], counts: np.ndarray, kept: Sequence[int], tokenizer: Any, size: int) -> list[dict[str, Any]]:
    """Tokens of a text with count and rank by count, and whether a draft vocabulary of `size` has them."""
    ranks, (order, _) = _ranks(counts), vocab.entry_order(counts, len(counts), kept)
    inside = set(order[:size].tolist())
    return [
        {"token": _text(tokenizer, t), "id": t, "count": int(counts[t]), "rank": int(ranks[t]), "in the draft vocabulary": t in inside}
        for t in tokens
    ]


def kept_rows(kept: Sequence[int], end_ids: Sequence[int], counts: np.ndarray, tokenizer: Any) -> list[dict[str, Any]]:
    """The tokens kept whatever their count, and why; those that end a turn first."""
    ends = set(end_ids)
    return [
        {"token": _text(tokenizer, t), "id": t, "count": int(counts[t]), "why": "ends a turn" if t in ends else "special token"}
        for t in sorted(kept, key=lambda t: (t not in ends, t))
    ]


def by_size(table: pd.DataFrame, size: int) -> list[dict[str, Any]]:
    """Each category at one draft vocabulary, of `coverage`'s table: covered, ceiling, and what the whole vocabulary would allow."""
    here = table[table["size"] == size].set_index("category")
    full = table[table["size"] == table["size"].max()].set_index("category")["ceiling"]
    names = sorted(here.index, key=lambda name: (name == ALL, -here.loc[name, "covered"]))
    return [
        {
            "category": name,
            "answers": int(here.loc[name, "answers"]),
            "tokens": int(here.loc[name, "tokens"]),
            "covered": float(here.loc[name, "covered"]),
            "ceiling": float(here.loc[name, "ceiling"]),
            "ceiling_of_all": float(full[name]),
            "lost": max(0.0, 1 - float(here.loc[name, "ceiling"]) / float(full[name])),
        }
        for name in names
    ]


def costs(total: pd.DataFrame, head: pd.DataFrame, choice: Mapping[str, int]) -> list[dict[str, Any]]:
    """What each size covers and saves, side by side.

    Args:
        total: rows of `coverage`'s table over all categories, by size. head: of `head_cost`. choice: sizes to mark, by name.
    """
    full = float(total["ceiling"].iloc[-1])
    rows = []
    for size, parameters, read in zip(head["size"].tolist(), head["parameters"].tolist(), head["bytes"].tolist(), strict=True):
        covered, ceiling = (float(total.loc[size, column]) for column in ("covered", "ceiling"))
        row = {"size": size, "covered": covered, "ceiling": ceiling, "lost": max(0.0, 1 - ceiling / full)}
        row |= {"head_parameters": f"{parameters / 1e6:,.2f} million", "read_per_drafted_token": f"{read / 1e6:,.1f} MB"}
        rows.append(row | {"chosen": ", ".join(name for name, chosen in choice.items() if chosen == size)})
    return rows


def synthetic(vocab_size: int, size: int, *, hidden_size: int, k: int, seed: int = 0) -> dict[str, Any]:
    """A full-size case on synthetic counts: tokens drawn independently from a Zipf–Mandelbrot law, (rank + 2.7) ** -1.2."""
    draw = np.random.default_rng(seed)
    law = (np.arange(1, vocab_size + 1) + 2.7) ** -1.2
    law = draw.permutation(law / law.sum())  # ranks fall on ids at random, as they nearly do in a trained tokenizer
    counts = draw.multinomial(COUNTED, law)
    answers = draw.choice(vocab_size, size=HELD_OUT, p=law)
    table = coverage(counts, {"synthetic": list(answers)}, [size], k=k, vocab_size=vocab_size).set_index(["category", "size"])
    return {
        "vocabulary": vocab_size,
        "draft vocabulary": size,
        "counted": COUNTED,
        "covered": float(table.loc[(ALL, size), "covered"]),
        "ceiling": float(table.loc[(ALL, size), "ceiling"]),
        "lost": 1 - float(table.loc[(ALL, size), "ceiling"]) / float(table.loc[(ALL, vocab_size), "ceiling"]),
        "head": f"{hidden_size * size / 1e6:,.0f} of {hidden_size * vocab_size / 1e6:,.0f} million parameters",
    }


def through_the_map(tokens: Sequence[int], mapping: vocab.VocabMap, tokenizer: Any) -> list[dict[str, Any]]:
    """Tokens of a text to draft ids and back by the offset, as an engine does it."""
    rows = []
    for t in tokens:
        place = int(np.searchsorted(mapping.ids, t)) if mapping.t2d[t] else None
        offset = int(mapping.d2t[place]) if place is not None else None
        back = "outside: never guessed" if place is None else _text(tokenizer, place + offset)
        rows.append({"token": _text(tokenizer, t), "verifier id": t, "draft id": place, "offset": offset, "back": back})
    return rows


def by_the_library(path: Path, mapping: vocab.VocabMap) -> dict[str, Any]:
    """The map speculators itself builds from the counts in `path`, beside ours."""
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counts = vocab.load_counts(path, mapping.vocab_size)
    seen = {int(i): int(counts[i]) for i in np.flatnonzero(counts)}
    d2t, _ = build_vocab_mappings_from_distribution(seen, mapping.size, mapping.vocab_size)
    theirs, ours = set((d2t.numpy() + np.arange(mapping.size)).tolist()), set(mapping.ids.tolist())
    return {
        "tokens in both": len(ours & theirs),
        "ours alone": len(ours - theirs),
        "ours alone and not among those always kept": len(ours - theirs - set(mapping.kept)),
        "theirs alone": len(theirs - ours),
    }


def results(table: pd.DataFrame, mapping: vocab.VocabMap, advice: Recommendation, counts: np.ndarray, *, k: int) -> dict[str, Any]:
    """What notebook 02 hands on."""
    total = table[table["category"] == ALL].set_index("size")
    return {
        "draft_vocab_size": mapping.size,
        "vocab_size": mapping.vocab_size,
        "coverage": float(total.loc[mapping.size, "covered"]),
        "ceiling": float(total.loc[mapping.size, "ceiling"]),
        "ceiling_full": float(total["ceiling"].iloc[-1]),
        "k": k,
        "recommended_size": advice.size,
        "kept_tokens": len(mapping.kept),
        "never_seen_tokens": mapping.filled,
        "distinct_tokens": int(np.count_nonzero(counts)),
        "counted_tokens": int(counts.sum()),
        "heldout_tokens": int(total["tokens"].iloc[0]),
    }


def gates(
    mapping: vocab.VocabMap, read: vocab.VocabMap, end_ids: Sequence[int], training: Rows, counts: np.ndarray, twice: Mapping[str, Any]
) -> list[tuple[str, bool, str, str]]:
    """Checks of notebook 02 for `pages.checks`.

    Args:
        mapping: as built. read: as read back from its files. twice: of `by_the_library`.
    """
    supervised = sum(sum(mask) for _, mask in training)
    ends = sum(bool(mapping.t2d[i]) for i in end_ids)
    ids = mapping.d2t + np.arange(mapping.size)
    sound = len(set(ids.tolist())) == mapping.size == int(mapping.t2d.sum()) and bool(mapping.t2d[ids].all())
    same = bool((read.d2t == mapping.d2t).all() and (read.t2d == mapping.t2d).all())
    strangers = twice["ours alone and not among those always kept"]
    return [
        (
            "every supervised training token is counted",
            int(counts.sum()) == supervised,
            f"{int(counts.sum()):,} of {supervised:,}",
            vocab.MEND,
        ),
        ("d2t and t2d name the same tokens, each once", sound, f"{mapping.size:,} of {mapping.vocab_size:,}", vocab.MEND),
        ("the map read back is the one built", same, f"{read.size:,} tokens", vocab.MEND),
        (
            "every end-of-turn token is in it",
            ends == len(end_ids),
            f"{ends} of {len(end_ids)}",
            "the draft would miss every end: " + vocab.MEND,
        ),
        ("it is speculators' own map but for the tokens always kept", strangers == 0, f"{strangers} others", vocab.MEND),
    ]
