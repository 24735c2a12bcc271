"""The verifier's own answers: batched through transformers' `generate`, several turns in order, resumable row by row.

Every answer is one line of `answers.jsonl` with the token ids the verifier was given and those it gave, so no template
has to be taken apart again. A batch is written at once and made again as a whole if a kill cut it off, so an
interrupted run ends with the same file as an undisturbed one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from helpers import files
from helpers.conversations import Prompt, answer_text, prompt_ids
from helpers.decoding import RowCache
from helpers.errors import DataError, DiskFull
from helpers.verifier import Verifier

Report = Callable[[str], None]
SEGMENT = 32  # tokens generated between two looks for finished rows
PREFILL_TOKENS = 4096  # prompt tokens in one forward pass: larger ones spend their time on fresh memory
LINES = 8  # of progress per turn or per extraction: a page is no log
# A checkpoint's generation_config may bend its distribution (Qwen's has a repetition penalty). The draft is trained to
# guess, and judged by, the distribution itself, so each of these is switched off.
PLAIN = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": None, "typical_p": None, "suppress_tokens": None}


@dataclass
class Answered:
    """A prompt with what the verifier was given and said, turn by turn."""

    prompt: Prompt
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)  # (prompt ids, answer ids with end of turn)
    ended: bool = True  # the last answer ended by itself, not at the token limit

    def messages(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The conversation with its answers, as OpenAI messages."""
        out: list[dict[str, Any]] = []
        for chunk, (_, answer) in zip(self.prompt.turns(), self.turns, strict=False):
            out += [*chunk, {"role": "assistant", "content": answer_text(tokenizer, answer)}]
        return out


def order(prompts: Sequence[Prompt], example_id: str, limit: int = 0) -> list[Prompt]:
    """The prompts to use, the followed example first (so any limit keeps it and it is trained on).

    Raises:
        DataError: no prompt has that id.
    """
    example = [p for p in prompts if p.id == example_id]
    if not example:
        near = ", ".join(p.id for p in prompts[:5])
        raise DataError(
            f"no prompt has the id {example_id!r}",
            where="parameter example_id",
            do=f"name one of the ids in prompts_train, for example {near}",
        )
    rest = [p for p in prompts if p.id != example_id]
    return (example + rest)[: limit or None]


def batches(lengths: Sequence[int], *, budget: int = 0, rows: int = 0) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first, so that memory peaks at the start and padding stays small.

    Args:
        budget: most tokens in a batch, padding included (0: no limit); rows: most rows in one (0: no limit).
    """
    batch: list[int] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and ((budget and longest * (len(batch) + 1) > budget) or (rows and len(batch) >= rows)):
            yield batch
            batch = []
        longest = lengths[i] if not batch else longest
        batch.append(i)
    if batch:
        yield batch


def due(number: int, total: int, lines: int = LINES) -> bool:
    """Whether batch `number` of `total` is one to report, so that a page gets at most `lines` lines."""
    return number == total or number % -(-total // max(1, lines - 1)) == 0


def _prefill(verifier: Verifier, prompts: Sequence[list[int]], width: int, capacity: int) -> RowCache:
    """A cache that holds all but the last token of every prompt, as a batch padded on the left to `width` would leave it.

    `generate` goes on from there. Done here because it would pass the whole batch at once, where most time goes to fresh
    memory, and compute the padding too. Rows are padded on the right and in small groups instead (causal attention then
    needs no mask), and their keys moved to where `generate` looks for them.
    """
    parts = []
    for group in batches([len(p) for p in prompts], budget=PREFILL_TOKENS):
        rows = [prompts[i][:-1] for i in group]
        ids = verifier.padded(rows)
        cache = RowCache(ids.shape[1])
        verifier.decoder(input_ids=ids, past_key_values=cache, use_cache=True)
        parts.append((group, [len(row) for row in rows], cache))
    return RowCache.padded_left(parts, width - 1, capacity)


@torch.inference_mode()
def generate(
    verifier: Verifier, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """Answer prompts together through transformers' `generate`; each answer keeps its end-of-turn token.

    Between segments finished rows leave the batch. Greedy at temperature 0, else plain sampling from the whole
    distribution, seeded, so that a batch repeated gives the same answers.

    Args:
        prompts: token ids with the generation prompt; padded on the left here.
    """
    ends, pad = verifier.end_ids, verifier.tokenizer.pad_token_id or 0
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, device=verifier.device)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(prompts):
        ids[b, width - len(row) :] = torch.tensor(row, device=verifier.device)
        mask[b, width - len(row) :] = 1
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    cache = _prefill(verifier, prompts, width, width + max_tokens)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    )
    torch.manual_seed(seed)
    produced = 0
    while alive and produced < max_tokens:
        step = min(SEGMENT, max_tokens - produced)
        ids = verifier.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=step,
            pad_token_id=pad,
            eos_token_id=sorted(ends),
            **PLAIN,
            **sampling,
        )
        made = ids.shape[1] - width - produced
        keep = []
        for b, (row, new) in enumerate(zip(alive, ids[:, -made:].tolist(), strict=True)):
            stop = next((i + 1 for i, token in enumerate(new) if token in ends), None)
            answers[row] += new[:stop]
            if stop is None:
                keep.append(b)
        produced += made
        kept = torch.tensor(keep, device=ids.device, dtype=torch.long)
        if len(keep) < len(alive):
            cache.batch_select_indices(kept)
        alive = [alive[b] for b in keep]
        ids = ids[kept]
        mask = torch.cat([mask[kept], mask.new_ones(len(keep), made)], dim=1)
    return answers


def read_answers(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Answers already on disk by (prompt id, turn). Lines cut off by a kill, or damaged, are taken out of the file."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    if not path.exists():
        return found
    lines = path.read_bytes().splitlines(keepends=True)
    good = []
    for line in lines:
        try:
            row = json.loads(line)
            if line.endswith(b"\n") and row["answer_ids"] and row["prompt_ids"]:
                found[row["id"], row["turn"]] = row
                good.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    if len(good) < len(lines):
        files.write_bytes(path, b"".join(good))
    return found


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add lines to `path` and have them on the disk; a disk that is full takes none of them."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if not files.disk_full(error):
            raise
        os.truncate(path, before)
        raise DiskFull(
            f"no space left while writing {path.name}",
            where=files.shown(path),
            do="free some space, then run the same command again: the answers before these are kept",
        ) from error


def _questions(tokenizer: Any, active: Sequence[Answered], turn: int, max_tokens: int, limit: int) -> list[tuple[Answered, list[int]]]:
    """What the verifier is given at `turn`, by conversation. A later turn that leaves no room for an answer ends its conversation.

    Raises:
        DataError: first turns that leave no room, all of them named.
    """
    asked, long = [], []
    for row in active:
        ids = prompt_ids(tokenizer, [*row.messages(tokenizer), *row.prompt.turns()[turn]], row.prompt.tools, row=row.prompt.id)
        if len(ids) + max_tokens <= limit:
            asked.append((row, ids))
        else:
            long.append(f"  - {row.prompt.id}: {len(ids)} tokens")
    if long and turn == 0:
        more = [f"  - and {len(long) - 10} more"] if len(long) > 10 else []
        raise DataError(
            f"{len(long)} prompt(s) leave no room for {max_tokens} answer tokens within {limit}:\n" + "\n".join(long[:10] + more),
            where="prompts_train",
            do="raise max_sequence_tokens, lower answer_max_tokens, or shorten these prompts",
        )
    return asked


def answer(
    verifier: Verifier,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    max_tokens: int,
    max_sequence_tokens: int,
    temperature: float = 0.0,
    batch_rows: int = 64,
    seed: int = 0,
    again: bool = False,
    report: Report = print,
) -> list[Answered]:
    """The verifier's answers to every turn of every prompt, appended to `path` batch by batch and resumed from it.

    Several user turns are answered in order, each after the verifier's own earlier answers. A conversation ends early
    where an answer was cut off (the next question would follow half a sentence) or where the next prompt does not fit.

    Args:
        again: let the verifier answer anew, whatever is in `path`.

    Raises:
        DataError: first turns that leave no room for an answer, all of them named.
        DiskFull: what was written before stays.
    """
    if again:
        path.unlink(missing_ok=True)
    known = read_answers(path)
    if known:
        report(f"{len(known)} answers found in {files.shown(path)}")
    done = [Answered(p) for p in prompts]
    active, turn, began, tokens = done, 0, time.perf_counter(), 0
    while active:
        asked = _questions(verifier.tokenizer, active, turn, max_tokens, max_sequence_tokens)

        open_ = {i for i, (row, ids) in enumerate(asked) if known.get((row.prompt.id, turn), {}).get("prompt_ids") != ids}
        # batches are planned over all rows, known or not: a row then meets the same neighbours, rounding and random
        # draws in a resumed run as in an undisturbed one
        plan = [b for b in batches([len(ids) for _, ids in asked], rows=batch_rows) if open_.intersection(b)]
        for number, batch in enumerate(plan, 1):
            drawn = hashlib.sha256(f"{seed} {turn} {[asked[i][0].prompt.id for i in batch]}".encode()).digest()
            made = generate(
                verifier,
                [asked[i][1] for i in batch],
                max_tokens=max_tokens,
                temperature=temperature,
                seed=int.from_bytes(drawn[:4], "big"),
            )
            lines = [
                {"id": asked[i][0].prompt.id, "turn": turn, "prompt_ids": asked[i][1], "answer_ids": out}
                for i, out in zip(batch, made, strict=True)
                if i in open_
            ]
            _append(path, lines)
            known.update({(line["id"], turn): line for line in lines})
            tokens += sum(map(len, made))
            if due(number, len(plan), LINES if turn == 0 else 3):
                speed = tokens / (time.perf_counter() - began)
                report(f"turn {turn + 1}, batch {number}/{len(plan)}: {tokens:,} answer tokens, {speed:.0f} per second")
        for row, ids in asked:
            row.turns.append((ids, known[row.prompt.id, turn]["answer_ids"]))
            row.ended = row.turns[-1][1][-1] in verifier.end_ids
        turn += 1
        active = [row for row, _ in asked if row.ended and turn < len(row.prompt.turns())]
    return done
