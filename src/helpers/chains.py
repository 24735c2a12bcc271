"""Chain records: what one prompt's speculative decoding left behind, the form every statistic reads.

A chain record is a plain dict (it goes to `prompts.jsonl` as it is):

    id, category        of the prompt
    prompt_tokens       tokens of the rendered prompt
    tokens              every emitted id, the one that prefill gives first
    drafted [S]         per verification step: tokens the draft proposed
    accepted [S]        how many of them, from the first, the verifier agreed with
    emitted [S]         tokens the step added to the answer: accepted + 1 (the bonus or corrected token), fewer if it was cut
    miss [S]            why the first refused slot was refused: "outside" (the verifier's token is not in the draft
                        vocabulary), "wrong" (another token of it), "" (nothing was refused, or the step was cut before it)
    guesses [S][K]      optional: the drafted ids, for the token view

A step is *cut* when end-of-turn or the length limit falls among its accepted tokens: it counts for the tokens it emitted.
Slots past the cut may be judged (live decoding and vLLM do) or left out of `drafted` and `accepted` (replay has no text there).

Shapes: S verification steps of one prompt, K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from helpers.errors import DataError


class ChainRecord(TypedDict, total=False):
    """The keys above; all but `guesses` are needed."""

    id: str
    category: str
    prompt_tokens: int
    tokens: list[int]
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    miss: list[str]
    guesses: list[list[int]]


def flatten(record: Mapping[str, Any], in_draft_vocabulary: Sequence[bool] | None = None) -> ChainRecord:
    """A chain record from one that lists its steps as `{"drafted": ids, "accepted": m, "emitted": ids}`.

    Args:
        record: id, category, prompt_tokens, tokens and `steps`.
        in_draft_vocabulary: t2d, one bool per verifier token; None when the draft can propose all of them.
    """
    flat = ChainRecord({k: record[k] for k in ("id", "category", "prompt_tokens")}, tokens=[int(t) for t in record["tokens"]])
    flat.update(drafted=[], accepted=[], emitted=[], miss=[], guesses=[])
    for step in record["steps"]:
        drafted, accepted, emitted = [int(t) for t in step["drafted"]], int(step["accepted"]), [int(t) for t in step["emitted"]]
        miss = ""
        if accepted < len(drafted) and len(emitted) > accepted:
            known = in_draft_vocabulary is None or bool(in_draft_vocabulary[emitted[accepted]])
            miss = "wrong" if known else "outside"
        values = {"drafted": len(drafted), "accepted": accepted, "emitted": len(emitted), "miss": miss, "guesses": drafted}
        for name, value in values.items():
            flat[name].append(value)
    check([flat])
    return flat


def check(records: Sequence[Mapping[str, Any]]) -> None:
    """Refuse records that contradict themselves.

    Raises:
        DataError: names the first record and step whose counts cannot be.
    """
    seen = set()
    for record in records:
        missing = [k for k in ("id", "category", "prompt_tokens", "tokens", "drafted", "accepted", "emitted", "miss") if k not in record]
        if missing:
            raise DataError(f"chain record without {', '.join(missing)}", where=str(record.get("id", "")), do="make it with chains.flatten")
        where = f"record {record['id']}"
        if record["id"] in seen:
            raise DataError(f"two chain records with id {record['id']}", where=where, do="give every prompt its own id")
        seen.add(record["id"])
        lengths = {k: len(record[k]) for k in ("drafted", "accepted", "emitted", "miss")}
        if len(set(lengths.values())) > 1:
            raise DataError(f"one entry per verification step expected, found {lengths}", where=where, do="decode this prompt again")
        for i, (d, a, e, miss) in enumerate(zip(*(record[k] for k in lengths), strict=True)):
            reached = a < d and e == a + 1  # the first refused slot lies inside the answer, so its reason is known
            if not (0 <= a <= d and 1 <= e <= a + 1 and miss in ("", "outside", "wrong") and (miss != "") == reached):
                raise DataError(
                    f"drafted {d}, accepted {a}, emitted {e}, miss {miss!r} cannot be",
                    where=f"{where}, step {i}",
                    do="decode this prompt again",
                )
        if len(record["tokens"]) != 1 + sum(record["emitted"]):
            raise DataError(
                f"{len(record['tokens'])} tokens, expected prefill's and the {sum(record['emitted'])} the steps emitted",
                where=where,
                do="decode this prompt again",
            )
