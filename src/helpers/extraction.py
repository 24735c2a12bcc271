"""The verifier's own answers and its hidden states, resumable row by row.

Layout on disk is speculators' own: a `save_to_disk` dataset with `input_ids`, `loss_mask`, `seq_len`, and beside it
`hidden_states/hs_{i}.safetensors` with `hidden_states` [T, A + 1, H] (chosen layers rising, then the last layer before
the final norm) and `token_ids` [T]. So `speculators train` reads our folder, and we read one made by its tools.

Shapes: B rows, T tokens, A chosen layers, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from helpers import files
from helpers.conversations import Prompt, answer_text, from_turns, prompt_ids
from helpers.conversations import Tokenised as Row
from helpers.decoding import RowCache
from helpers.errors import DamagedInput, DataError
from helpers.verifier import Verifier

Report = Callable[[str], None]
SEGMENT = 32  # tokens generated between two looks for finished rows


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
        longest = max(lengths[i], 0) if not batch else longest
        batch.append(i)
    if batch:
        yield batch


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
    cache = RowCache(width + max_tokens)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    )
    torch.manual_seed(seed)
    produced = 0
    while alive and produced < max_tokens:
        step = min(SEGMENT, max_tokens - produced)
        ids = verifier.model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=step, pad_token_id=pad, eos_token_id=sorted(ends), **sampling
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
    """Answers already on disk by (prompt id, turn). A last line cut off by a kill is removed from the file."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    if not path.exists():
        return found
    good = 0
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                found[row["id"], row["turn"]] = row
            except (ValueError, KeyError):
                break
            if not line.endswith(b"\n"):
                break
            good += len(line)
    if good < path.stat().st_size:
        os.truncate(path, good)
        found = {k: v for k, v in found.items() if v is not None}
        return read_answers(path)
    return found


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


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
    report: Report = print,
) -> list[Answered]:
    """The verifier's answers to every turn of every prompt, appended to `path` batch by batch and resumed from it.

    Several user turns are answered in order, each after the verifier's own earlier answers. A later turn whose prompt
    would not fit any more ends its conversation there.

    Raises:
        DataError: first turns that leave no room for an answer, all of them named.
    """
    known = read_answers(path)
    done = {p.id: Answered(p) for p in prompts}
    if known:
        report(f"{len(known)} answers found in {files.shown(path)}; going on from there")
    turn, active = 0, list(prompts)
    began, tokens = time.perf_counter(), 0
    while active:
        asked: list[tuple[Prompt, list[int]]] = []
        for prompt in active:
            history = done[prompt.id].messages(verifier.tokenizer)
            ids = prompt_ids(verifier.tokenizer, [*history, *prompt.turns()[turn]], prompt.tools, row=prompt.id)
            if len(ids) + max_tokens <= max_sequence_tokens:
                asked.append((prompt, ids))
            elif turn == 0:
                asked.append((prompt, ids))
        long = [(p.id, len(ids)) for p, ids in asked if len(ids) + max_tokens > max_sequence_tokens]
        if long:
            listed = "\n".join(f"  - {name}: {n} tokens" for name, n in long[:10])
            raise DataError(
                f"{len(long)} prompt(s) leave no room for {max_tokens} answer tokens within {max_sequence_tokens}:\n{listed}",
                where="prompts_train",
                do="raise max_sequence_tokens, lower answer_max_tokens, or shorten these prompts",
            )
        open_ = [(p, ids) for p, ids in asked if (p.id, turn) not in known or known[p.id, turn]["prompt_ids"] != ids]
        plan = list(batches([len(ids) for _, ids in open_], rows=batch_rows))
        for number, batch in enumerate(plan, 1):
            rows = [open_[i] for i in batch]
            # the seed hangs on the rows, not on their place in the run, so a resumed run samples the same answers
            digest = hashlib.sha256(f"{seed} {turn} {[p.id for p, _ in rows]}".encode()).digest()
            made = generate(
                verifier, [ids for _, ids in rows], max_tokens=max_tokens, temperature=temperature, seed=int.from_bytes(digest[:4], "big")
            )
            lines = [{"id": p.id, "turn": turn, "prompt_ids": ids, "answer_ids": out} for (p, ids), out in zip(rows, made, strict=True)]
            _append(path, lines)
            known.update({(line["id"], turn): line for line in lines})
            tokens += sum(map(len, made))
            report(
                f"turn {turn + 1}, batch {number}/{len(plan)}: {tokens:,} answer tokens, {tokens / (time.perf_counter() - began):.0f} per second"
            )
        for prompt, ids in asked:
            out = known[prompt.id, turn]["answer_ids"]
            done[prompt.id].turns.append((ids, out))
            done[prompt.id].ended = out[-1] in verifier.end_ids
        # a conversation whose answer was cut off does not go on: the next question would answer half a sentence
        turn += 1
        active = [p for p, _ in asked if turn < len(p.turns()) and done[p.id].ended]
    return [done[p.id] for p in prompts]


def rows(verifier: Verifier, answered: Sequence[Answered], *, max_tokens: int) -> list[Row]:
    """Token ids and loss mask of each answered conversation, the verifier's own tokens as it produced them."""
    return [from_turns(verifier.tokenizer, a.turns, max_tokens=max_tokens, row=a.prompt.id) for a in answered]


def save_dataset(found: Sequence[Row], folder: Path) -> None:
    """Write rows as the dataset speculators reads; hidden states already beside it stay."""
    from datasets import Dataset

    scratch = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    columns = {
        "input_ids": [list(r.input_ids) for r in found],
        "loss_mask": [list(r.loss_mask) for r in found],
        "seq_len": [len(r.input_ids) for r in found],
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(str(scratch))
    folder.mkdir(parents=True, exist_ok=True)
    for file in scratch.iterdir():
        os.replace(file, folder / file.name)
    scratch.rmdir()


def shard(folder: Path, i: int) -> Path:
    """Path of row i's hidden states."""
    return folder / "hidden_states" / f"hs_{i}.safetensors"


def shard_fault(path: Path, token_ids: Sequence[int], layers: int, hidden: int, *, values: bool = False) -> str | None:
    """What is wrong with a stored row, or None. With `values` the numbers are read too, not the header alone."""
    if not path.exists():
        return "missing"
    try:
        with safe_open(path, framework="pt") as file:
            shape = list(file.get_slice("hidden_states").get_shape())
            ids = file.get_tensor("token_ids").tolist()
            states = file.get_tensor("hidden_states") if values else None
    except (SafetensorError, OSError, KeyError) as error:
        return f"unreadable ({str(error).splitlines()[0]})"
    if ids != list(token_ids):
        return f"token ids differ from the dataset's ({len(ids)} stored, {len(token_ids)} expected)"
    if shape != [len(token_ids), layers, hidden]:
        return f"shape {shape}, expected {[len(token_ids), layers, hidden]} (tokens, layers, hidden size)"
    if states is not None and not torch.isfinite(states.float()).all():
        return "holds NaN or infinity"
    return None


def _write(path: Path, states: torch.Tensor, ids: Sequence[int]) -> None:
    with files.atomic(path) as scratch:
        save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, scratch)
    path.chmod(0o644)


def extract(verifier: Verifier, found: Sequence[Row], folder: Path, ids: list[int], *, batch_tokens: int, report: Report = print) -> int:
    """Store hidden states of layers `ids` and of the last layer for every row that has none yet; returns rows computed.

    Rows are written by a second thread while the next batch is computed; at most two batches wait, so memory does not
    grow with the number of rows.
    """
    (folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    width = verifier.config.hidden_size
    todo = [i for i, r in enumerate(found) if shard_fault(shard(folder, i), r.input_ids, len(ids) + 1, width)]
    if len(todo) < len(found):
        report(f"{len(found) - len(todo)} of {len(found)} rows are stored already")
    began, tokens, pending = time.perf_counter(), 0, []
    plan = list(batches([len(found[i].input_ids) for i in todo], budget=batch_tokens))
    with ThreadPoolExecutor(1) as writer:
        for number, batch in enumerate(plan, 1):
            picked = [found[todo[j]].input_ids for j in batch]
            padded = torch.zeros(len(picked), max(map(len, picked)), dtype=torch.long)
            for b, row in enumerate(picked):
                padded[b, : len(row)] = torch.tensor(row)
            states = verifier.states(padded, ids).cpu()
            while len(pending) >= 2:
                pending.pop(0).result()
            pending.append(writer.submit(_write_batch, folder, [todo[j] for j in batch], picked, states))
            tokens += sum(map(len, picked))
            if number % max(1, len(plan) // 8) == 0 or number == len(plan):
                report(f"batch {number}/{len(plan)}: {tokens:,} tokens, {tokens / (time.perf_counter() - began):.0f} per second")
        _drain(pending)
    return len(todo)


def _write_batch(folder: Path, indices: list[int], picked: list[list[int]], states: torch.Tensor) -> None:
    for b, (i, row) in enumerate(zip(indices, picked, strict=True)):
        _write(shard(folder, i), states[b, : len(row)].contiguous(), row)


def _drain(pending: list[Future]) -> None:
    for future in pending:
        future.result()


def load_rows(folder: Path) -> list[tuple[list[int], list[int]]]:
    """(input ids, loss mask) of every row of a stored dataset.

    Raises:
        DamagedInput: the folder is no readable dataset.
    """
    from datasets import load_from_disk

    try:
        data = load_from_disk(str(folder)).with_format(None)
        return [(list(r["input_ids"]), [int(m) for m in r["loss_mask"]]) for r in data]
    except Exception as error:  # datasets raises many kinds
        raise DamagedInput(f"no readable dataset: {error}", where=files.shown(folder), do="run notebook 01 again") from error


def load_states(folder: Path, i: int) -> torch.Tensor:
    """Stored states of row i, [T, A + 1, H]."""
    with safe_open(shard(folder, i), framework="pt") as file:
        return file.get_tensor("hidden_states")
