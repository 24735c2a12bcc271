"""Pre-flight: what the rows are, what they will cost and what is wrong with them, before anything heavy runs."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from helpers.conversations import Tokenised
from helpers.errors import DataError
from helpers.masks import INSERTED, SCAFFOLD
from helpers.messages import Message, Prompt
from helpers.rendering import prompt_ids

SHINGLE = 8  # words; shorter texts are one shingle
NEAR = 0.5  # share of an evaluation prompt's shingles seen in training that counts as near
# Words, with Chinese and Japanese characters one by one: those scripts set no spaces.
WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
STAND_IN = "Yes."
MAY_BE_CUT = "answers may be cut where the row reaches its limit"


@dataclass
class Preflight:
    """The report: `table` for the page, `rows` for a closer look, `figures` as plain numbers, `problems` in words."""

    table: pd.DataFrame
    rows: pd.DataFrame
    figures: dict[str, Any]
    problems: list[str] = field(default_factory=list)


def plan(
    tokenizer: Any, prompt: Prompt, *, answer_max_tokens: int, max_tokens: int, arguments: Mapping[str, Any] | None = None
) -> Tokenised:
    """What a prompt's row will be once the verifier has answered it, at most; nothing is generated.

    The template is tried on stand-in answers, so one that refuses the conversation shows before any work. A prompt that is
    answered in its file has its turns answered anew all the same: give `tokenise` its messages to use them as they are.

    Returns:
        The ids of the last prompt, an empty mask, and `planned_tokens`: the most that answers can add within `max_tokens`.

    Raises:
        DataError: naming the row: refused by the template, or a prompt of `max_tokens` or more. VerifierError: no template.
    """
    messages: list[Message] = []
    for n, chunk in enumerate(turns := prompt.turns()):
        messages += [{"role": "assistant", "content": STAND_IN}] * (n > 0) + chunk
    ids = prompt_ids(tokenizer, messages, prompt.tools, arguments=arguments, row=prompt.id)
    if len(ids) >= max_tokens:
        raise DataError(
            f"the prompt has {len(ids)} tokens, {max_tokens} are allowed for prompt and answer together",
            where=prompt.id,
            do="shorten the prompt, leave it out or raise max_sequence_tokens",
        )
    planned, room = len(turns) * answer_max_tokens, max_tokens - len(ids)
    notes = [MAY_BE_CUT] * (planned > room)
    counts = {"answers": len(turns), "supervised_answers": len(turns), "full_tokens": len(ids), "planned_tokens": min(planned, room)}
    return Tokenised(ids, [0] * len(ids), "generated", id=prompt.id, **counts, notes=notes)


def rate(work: Callable[[list[list[int]]], Any], rows: Sequence[Tokenised], *, budget: int = 2048) -> float:
    """Tokens per second of `work`, from a short probe: one call to warm up, one timed, on rows of middling length.

    Args:
        work: takes a list of token id lists, such as one forward pass of the extraction.
        budget: tokens in the timed call, about.
    """
    ordered = sorted(rows, key=lambda r: len(r.input_ids))
    middle = ordered[len(ordered) // 2 :] + ordered[: len(ordered) // 2][::-1]
    batch: list[list[int]] = []
    for row in middle:
        if batch and sum(map(len, batch)) + len(row.input_ids) > budget:
            break
        batch.append(row.input_ids)
    work(batch[:1])
    start = time.perf_counter()
    work(batch)
    return sum(map(len, batch)) / max(time.perf_counter() - start, 1e-9)


def _shingles(prompt: Prompt) -> set[tuple[str, ...]]:
    """Runs of eight words over what the user says; the system prompt is left out, since many rows share one."""
    words = WORDS.findall(" ".join(m["content"] for m in prompt.messages if m["role"] == "user").lower())
    return {tuple(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))}


def _asked(prompt: Prompt) -> str:
    return " ".join(w for m in prompt.messages if m["role"] != "assistant" for w in m["content"].lower().split())


def overlap(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> pd.DataFrame:
    """How far each evaluation prompt was seen in training.

    Returns:
        One row per evaluation prompt: id, exact (a training prompt asks the same, letter case and spaces aside), share (of its
        8-word shingles that occur anywhere in training), most_like (the training id that has most of them).
    """
    owners: dict[tuple[str, ...], list[str]] = {}
    for prompt in train:
        for shingle in _shingles(prompt):
            owners.setdefault(shingle, []).append(prompt.id)
    texts = {_asked(p): p.id for p in reversed(train)}
    out = []
    for prompt in evaluation:
        shingles = _shingles(prompt)
        votes = Counter(owner for s in shingles for owner in owners.get(s, ()))
        most = texts.get(_asked(prompt)) or (votes.most_common(1)[0][0] if votes else "")
        share = sum(s in owners for s in shingles) / len(shingles)
        out.append({"id": prompt.id, "exact": _asked(prompt) in texts, "share": share, "most_like": most})
    return pd.DataFrame(out, columns=["id", "exact", "share", "most_like"])


def _some(names: Sequence[str], n: int = 5) -> str:
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


def _refuse(rows: Sequence[Tokenised], bad: Callable[[Tokenised], bool], what: str, do: str) -> None:
    names = [r.id or f"row {n}" for n, r in enumerate(rows) if bad(r)]
    if names:
        raise DataError(f"{len(names)} of {len(rows)} rows {what}", where=_some(names), do=do)


def _figures(rows: Sequence[Tokenised], table: pd.DataFrame, findings: Mapping[str, list[str]], per_token: int) -> dict[str, Any]:
    tokens, supervised = int(table["tokens"].sum()), int(table["supervised"].sum())
    return {
        "rows": len(rows),
        "answers": int(table["answers"].sum()),
        "unsupervised_answers": sum(r.answers - r.supervised_answers for r in rows),
        "tokens": tokens,
        "planned_tokens": sum(r.planned_tokens for r in rows),
        "longest": int(table["tokens"].max()),
        "supervised": supervised,
        "supervised_share": supervised / tokens,
        "first_position_supervised": sum(not {INSERTED, SCAFFOLD} & set(r.notes) for r in rows),
        "unclosed": len(findings["open"]) + len(findings["cut"]),
        "duplicates": len(findings["twice"]),
        "truncated": len(findings["cut"]),
        "overlap_exact": len(findings["exact"]),
        "overlap_near": len(findings["near"]),
        "bytes_per_token": per_token,
        "disk_bytes": tokens * per_token,
        "mask_sources": dict(Counter(r.source for r in rows)),
        "notes": dict(Counter(note for r in rows for note in r.notes).most_common()),
    }


def _lines(figures: Mapping[str, Any], table: pd.DataFrame, max_tokens: int, formula: str) -> list[tuple[str, str, str]]:
    rows, planned = figures["rows"], figures["planned_tokens"]
    still = f"; {planned:,} are answers still to come, at most" if planned else ""
    by_row = f"{table['supervised_share'].min():.1%} to {table['supervised_share'].max():.1%} by row"
    of = f"of {figures['evaluation_rows']}; near: {NEAR:.0%} of the {SHINGLE}-word shingles"
    return [
        ("rows", f"{rows:,}", f"{figures['rejected']} left out"),
        ("answers", f"{figures['answers']:,}", f"{figures['unsupervised_answers']} of them unsupervised"),
        ("tokens", f"{figures['tokens']:,}", f"longest row {figures['longest']:,} of {max_tokens:,}{still}"),
        ("supervised share", f"{figures['supervised_share']:.1%}", by_row),
        ("mask", ", ".join(f"{n} {source}" for source, n in figures["mask_sources"].items()), "how the tokens of the answers were told"),
        ("first draftable position", f"{figures['first_position_supervised']} of {rows}", "rows that supervise the first token behind it"),
        ("end of turn", f"{rows - figures['unclosed']} of {rows}", "rows whose last answer ends with its token"),
        ("duplicate rows", f"{figures['duplicates']}", "same token ids"),
        ("cut rows", f"{figures['truncated']}", f"longer than {max_tokens:,} tokens"),
        ("evaluation overlap", f"{figures['overlap_exact']} exact, {figures['overlap_near']} near", of),
        ("disk", f"{figures['disk_bytes'] / 1e9:.2f} GB", formula),
    ]


def preflight(
    rows: Sequence[Tokenised],
    *,
    vocab_size: int,
    hidden_size: int,
    max_tokens: int,
    aux_layers: int = 3,
    state_bytes: int = 2,
    prompts: Sequence[Prompt] = (),
    evaluation: Sequence[Prompt] = (),
    rejected: Sequence[tuple[Any, str]] = (),
    rates: Mapping[str, float] | None = None,
) -> Preflight:
    """Check rows, tokenised or planned, before answers or hidden states are made.

    Disk is (aux_layers + 1) · hidden_size · state_bytes per token: the auxiliary layers and the last one.

    Args:
        vocab_size: of the verifier's embedding, padding included.
        prompts, evaluation: training and evaluation prompts, for the overlap between them.
        rejected: rows left out before, as (line or id, reason), for the counts.
        rates: measured tokens per second by name of the step; `answering` counts planned tokens, others all tokens.

    Raises:
        DataError: no row; rows without a supervised or planned token, or with nothing else; token ids outside the vocabulary.
    """
    if not rows:
        raise DataError("no row to check", where="pre-flight", do="give prompts that can be used; the rejected ones have their reasons")
    learnt = {id(r): r.supervised + r.planned_tokens for r in rows}
    _refuse(rows, lambda r: learnt[id(r)] == 0, "have no supervised token (0 %)", "the mask found no answer: check roles and template")
    everything = "are supervised from the first token (100 %): the prompt would be trained on"
    _refuse(rows, lambda r: learnt[id(r)] >= len(r.input_ids) + r.planned_tokens, everything, "check the mask: prompts must not be in it")
    outside = f"have token ids outside the vocabulary of {vocab_size:,}"
    _refuse(
        rows, lambda r: min(r.input_ids) < 0 or max(r.input_ids) >= vocab_size, outside, "use the tokenizer that belongs to the verifier"
    )

    names = [r.id or f"row {n}" for n, r in enumerate(rows)]
    table = pd.DataFrame(
        {
            "id": names,
            "answers": [r.answers for r in rows],
            "tokens": [len(r.input_ids) + r.planned_tokens for r in rows],
            "supervised": [learnt[id(r)] for r in rows],
            "cut_tokens": [r.truncated for r in rows],
            "notes": ["; ".join(r.notes) for r in rows],
        }
    )
    table.insert(4, "supervised_share", table["supervised"] / table["tokens"])
    seen: dict[tuple[int, ...], int] = {}
    first = [seen.setdefault(tuple(r.input_ids), n) for n, r in enumerate(rows)]
    findings = {
        "twice": [f"{names[n]} = {names[f]}" for n, f in enumerate(first) if f != n],
        "cut": table.loc[table["cut_tokens"] > 0, "id"].tolist(),
        "open": [name for name, r in zip(names, rows, strict=True) if not r.closed and not r.truncated],
    }
    shared = overlap(prompts, evaluation)
    for name, chosen in (("exact", shared["exact"]), ("near", ~shared["exact"].astype(bool) & (shared["share"] >= NEAR))):
        findings[name] = [f"{r.id} ~ {r.most_like}" for r in shared[chosen.astype(bool)].itertuples()]
    figures = _figures(rows, table, findings, (aux_layers + 1) * hidden_size * state_bytes)
    figures |= {"rejected": len(rejected), "evaluation_rows": len(shared)}
    speeds = {name: speed for name, speed in (rates or {}).items() if speed > 0}
    figures["minutes"] = {
        name: figures["planned_tokens" if name == "answering" else "tokens"] / speed / 60 for name, speed in speeds.items()
    }

    problems = [f"{len(rejected)} rows were left out, first: {rejected[0][0]}: {rejected[0][1]}"] if rejected else []
    worded = {
        "twice": "duplicate rows",
        "cut": f"rows are longer than {max_tokens:,} tokens and were cut",
        "open": "rows end without an end-of-turn token: the answer was cut",
        "exact": f"of {len(shared)} evaluation prompts are also asked in training",
        "near": f"of {len(shared)} evaluation prompts are nearly asked in training",
    }
    problems += [f"{len(findings[key])} {words}: {_some(findings[key])}" for key, words in worded.items() if findings[key]]
    problems += [f"{count} rows: {note}" for note, count in figures["notes"].items()]
    formula = f"({aux_layers} + 1) layers · {hidden_size} · {state_bytes} bytes = {figures['bytes_per_token']:,} bytes per token"
    lines = _lines(figures, table, max_tokens, formula)
    lines.append(("token ids", "all inside", f"vocabulary of {vocab_size:,}"))
    for name, minutes in figures["minutes"].items():
        lines.append((f"minutes, {name}", f"{minutes:.1f}", f"at {speeds[name]:,.0f} tokens/s, from a short probe"))
    return Preflight(pd.DataFrame(lines, columns=["check", "value", "detail"]), table, figures, problems)
