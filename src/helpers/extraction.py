"""The verifier's own answers and its hidden states, resumable row by row.

Layout on disk is speculators' own: a `save_to_disk` dataset with `input_ids`, `loss_mask`, `seq_len`, and beside it
`hidden_states/hs_{i}.safetensors` with `hidden_states` [T, A + 1, H] (chosen layers rising, then the last layer before
the final norm) and `token_ids` [T]. So `speculators train` reads our folder, and we read one made by its tools.

Answers are made in `answers`, whose names can be taken from here.

Shapes: B rows, T tokens, A chosen layers, H hidden size.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from helpers import files
from helpers.answers import Answered, Report, answer, batches, due, generate, order, read_answers
from helpers.conversations import Tokenised as Row
from helpers.conversations import from_turns
from helpers.errors import DamagedInput, DataError
from helpers.verifier import Verifier

__all__ = [
    "Answered", "Report", "Row", "answer", "batches", "conversations", "extract", "generate", "load_conversations", "load_rows",
    "load_states", "order", "read_answers", "rows", "save_dataset", "shard", "shard_fault", "split", "spoken",
]  # fmt: skip

MEND = "run notebook 01 again (`workbook run PARAMS --only 01`): what is whole is kept, the rest made again"
LISTED = 5  # damaged shards named one by one
WAITING = 2  # batches computed and not yet on the disk


def rows(verifier: Verifier, answered: Sequence[Answered], *, max_tokens: int) -> list[Row]:
    """Token ids and loss mask of each answered conversation, the verifier's own tokens as it produced them."""
    return [from_turns(verifier.tokenizer, a.turns, max_tokens=max_tokens, row=a.prompt.id) for a in answered]


def conversations(tokenizer: Any, answered: Sequence[Answered], found: Sequence[Row]) -> list[dict[str, Any]]:
    """What `conversations.jsonl` holds, one dict per row of the dataset and in its order: the text, and what it became."""
    return [
        {
            "id": a.prompt.id,
            "category": a.prompt.category,
            "messages": a.messages(tokenizer),
            "ended": a.ended,
            "tokens": len(row.input_ids),
            "supervised": row.supervised,
        }
        for a, row in zip(answered, found, strict=True)
    ]


def load_conversations(path: Path) -> list[dict[str, Any]]:
    """Read `conversations.jsonl` back. Raises DamagedInput."""
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:  # never splitlines(): an answer may hold U+2028
            return [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise DamagedInput(f"conversations cannot be read: {error}", where=files.shown(path), do=MEND) from error


def split(count: int, heldout_share: float) -> int:
    """How many of `count` rows are trained on: the first ones. The others, at the end, are held out.

    The expression is speculators' own (`train_ratio` is 1 - heldout_share), so that both cut at the same row.

    Raises:
        DataError: one of the two would be empty.
    """
    training = int(count * (1.0 - heldout_share))
    if not 0 < training < count:
        raise DataError(
            f"{count} rows with heldout_share {heldout_share:g} leave {training} to train on and {count - training} held out",
            where="parameters prompts_limit, heldout_share",
            do="take more prompts or another share",
        )
    return training


def spoken(input_ids: Sequence[int], loss_mask: Sequence[int]) -> list[list[int]]:
    """The verifier's answers in a row: its runs of supervised tokens, one list each."""
    runs = itertools.groupby(zip(input_ids, loss_mask, strict=True), key=lambda pair: bool(pair[1]))
    return [[token for token, _ in run] for own, run in runs if own]


def save_dataset(found: Sequence[Row], folder: Path) -> None:
    """Write rows as the dataset speculators reads; hidden states already beside it stay.

    Raises:
        DiskFull: what was there before is unchanged.
    """
    from datasets import Dataset

    columns = {
        "input_ids": [list(r.input_ids) for r in found],
        "loss_mask": [list(r.loss_mask) for r in found],
        "seq_len": [len(r.input_ids) for r in found],
    }
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.new")
    for leftover in folder.parent.glob(f".*{scratch.name}"):  # of a process that was killed
        shutil.rmtree(leftover)
    with files.atomic(scratch) as temporary:
        Dataset.from_dict(columns).with_format("torch").save_to_disk(str(temporary))
    for old in folder.glob("data-*.arrow"):  # another number of files would leave some behind
        old.unlink()
    for file in list(scratch.iterdir()):
        os.replace(file, folder / file.name)
    shutil.rmtree(scratch)


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
        raise DamagedInput(f"no readable dataset: {error}", where=files.shown(folder), do=MEND) from error


def shard(folder: Path, i: int) -> Path:
    """Path of row i's hidden states."""
    return folder / "hidden_states" / f"hs_{i}.safetensors"


def shard_fault(path: Path, token_ids: Sequence[int], layers: int, hidden: int, *, values: bool = False) -> str | None:
    """What is wrong with a stored row, or None. With `values` the numbers are read too, not the header alone.

    Numbers that changed and are still finite show only against the SHA-256 in the stage's manifest.
    """
    if not path.exists():
        return "missing"
    try:
        with safe_open(path, framework="pt") as file:
            shape = list(file.get_slice("hidden_states").get_shape())
            ids = file.get_tensor("token_ids").tolist()
            states = file.get_tensor("hidden_states") if values else None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        return f"unreadable ({str(error).splitlines()[0]})"
    if ids != list(token_ids):
        return f"token ids differ from the dataset's ({len(ids)} stored, {len(token_ids)} expected)"
    if shape != [len(token_ids), layers, hidden]:
        return f"shape {shape}, expected {[len(token_ids), layers, hidden]} (tokens, layers, hidden size)"
    if states is not None and not torch.isfinite(states.float()).all():
        return "holds NaN or infinity"
    return None


def load_states(folder: Path, i: int) -> torch.Tensor:
    """Stored states of row i, [T, A + 1, H]. Raises DamagedInput."""
    try:
        with safe_open(shard(folder, i), framework="pt") as file:
            return file.get_tensor("hidden_states")
    except (SafetensorError, OSError, ValueError) as error:
        what = f"hidden states cannot be read: {str(error).splitlines()[0]}"
        raise DamagedInput(what, where=files.shown(shard(folder, i)), do=MEND) from error


def _to_do(found: Sequence[Row], folder: Path, layers: int, width: int, verify: bool, report: Report) -> list[int]:
    """Rows without a good shard; says how many are stored and what is wrong with damaged ones."""
    faults = {i: shard_fault(shard(folder, i), r.input_ids, layers, width, values=verify) for i, r in enumerate(found)}
    damaged = [f"{shard(folder, i).name} {fault}" for i, fault in faults.items() if fault not in (None, "missing")]
    for line in damaged[:LISTED]:
        report(f"to be made again: {line}")
    if len(damaged) > LISTED:
        report(f"to be made again: {len(damaged) - LISTED} more")
    todo = [i for i, fault in faults.items() if fault]
    if len(todo) < len(found):
        report(f"{len(found) - len(todo)} of {len(found)} rows are stored already")
    return todo


def extract(
    verifier: Verifier,
    found: Sequence[Row],
    folder: Path,
    ids: list[int],
    *,
    batch_tokens: int,
    verify: bool = False,
    again: bool = False,
    report: Report = print,
) -> int:
    """Store hidden states of layers `ids` and of the last layer for every row that has no good shard; returns rows written.

    Rows are written by a second thread while the next batch is computed; at most two batches wait, so memory does not
    grow with the number of rows. Batches are planned over all rows, stored or not: a row made again meets the same
    neighbours and the same rounding, so its shard is the same to the bit and later stages stay fresh.

    Args:
        verify: read the numbers of the shards that are there too, not their headers alone.
        again: make every shard anew, whatever is there.

    Raises:
        DiskFull: every shard that is there is whole; the same call goes on from it.
    """
    (folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    for leftover in (folder / "hidden_states").glob(".*"):  # half-written by a process that was killed
        leftover.unlink()
    width = verifier.config.hidden_size
    todo = set(range(len(found)) if again else _to_do(found, folder, len(ids) + 1, width, verify, report))
    began, tokens, pending = time.perf_counter(), 0, []
    plan = [b for b in batches([len(r.input_ids) for r in found], budget=batch_tokens) if todo.intersection(b)]
    with ThreadPoolExecutor(1) as writer:
        for number, batch in enumerate(plan, 1):
            picked = [found[i].input_ids for i in batch]
            states = verifier.states(verifier.padded(picked), ids).cpu()
            while len(pending) >= WAITING:
                pending.pop(0).result()
            pending.append(writer.submit(_write, folder, {i: b for b, i in enumerate(batch) if i in todo}, picked, states))
            tokens += sum(map(len, picked))
            if due(number, len(plan)):
                report(f"batch {number}/{len(plan)}: {tokens:,} tokens, {tokens / (time.perf_counter() - began):.0f} per second")
        for written in pending:
            written.result()
    return len(todo)


def _write(folder: Path, places: dict[int, int], picked: Sequence[list[int]], states_BTLH: torch.Tensor) -> None:
    """Write shards from a batch; `places` maps rows of the dataset to rows of the batch."""
    for i, b in places.items():
        row = picked[b]
        with files.atomic(shard(folder, i)) as temporary:
            save_file({"hidden_states": states_BTLH[b, : len(row)].contiguous(), "token_ids": torch.tensor(row)}, temporary)
