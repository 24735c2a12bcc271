"""Chains over stored rows without decoding: what a live greedy decoder would have accepted, read off one teacher-forced pass.

At TTT step j a start goes on from its own state and the true token, which is what a drafter does after j accepted guesses. So
one pass tells for *every* start how many guesses in a row would have been accepted, and a walk through a row, each step
starting where the one before ended, gives the chain that `speculative.replay` decodes token by token, as chain records: the
same measure as the evaluation's, for hundreds of rows in seconds.

Shapes: N packed positions, A chosen layers, H hidden size, K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers import draft, replaying, ttt
from helpers.chains import ChainRecord, flatten
from helpers.errors import DamagedInput
from helpers.extraction import load_states, shard
from helpers.files import shown
from helpers.replaying import Foreseen

PACK = 2048  # positions of one pass

Row = tuple[Sequence[int], Sequence[int]]  # input ids, loss mask


def answer_span(mask: Sequence[int]) -> tuple[int, int] | None:
    """Where the last supervised run of a row begins and ends [start, stop); None where nothing is supervised."""
    stop = max((i + 1 for i, m in enumerate(mask) if m), default=0)
    start = stop
    while start and mask[start - 1]:
        start -= 1
    return (start, stop) if stop else None


def _batch(rows: Sequence[Row], places: Sequence[int], folder: Path, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows packed and shifted as the trainer shifts them (entry i: token i + 1, states at i), one document each."""
    parts: dict[str, list[torch.Tensor]] = {}
    for document, i in enumerate(places):
        ids, mask = (torch.tensor(list(x)) for x in rows[i])
        states = load_states(folder, i)
        if states.dim() != 3 or len(states) != len(ids):
            what = f"states of shape {list(states.shape)} for {len(ids)} tokens"
            raise DamagedInput(what, where=shown(shard(folder, i)), do="delete the shard and run notebook 01 again")
        states = states.to(like.dtype)
        added = {
            "input_ids": ids[1:],
            "loss_mask": mask[1:],
            "position_ids": torch.arange(1, len(ids)),
            "document_ids": torch.full((len(ids) - 1,), document),
            "hidden_states": states[:-1, :-1].flatten(1),
            "verifier_last_hidden_states": states[1:, -1],
        }
        for name, value in added.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values)[None].to(like.device) for name, values in parts.items()}


def _packs(rows: Sequence[Row], places: Sequence[int]) -> Iterator[list[int]]:
    pack: list[int] = []
    for i in places:
        if pack and sum(len(rows[j][0]) for j in pack) + len(rows[i][0]) > PACK:
            yield pack
            pack = []
        pack.append(i)
    if pack:
        yield pack


@torch.no_grad()
def chains(
    model: Any, rows: Sequence[Row], places: Sequence[int], folder: Path, k: int, *, names: Sequence[tuple[str, str]] | None = None
) -> list[ChainRecord]:
    """Chain records of the last answers of stored rows; rows without a supervised token behind their first one are left out.

    Drafted tokens after the first miss of a step are those that follow the true text, not the draft's own; nothing counts them.

    Args:
        model: a draft from `draft.load`, in the dtype to decode in; it is only read.
        rows: all rows of the dataset. places: rows to look at. folder: the dataset, shards in it.
        names: (id, category) of every row.

    Raises:
        DamagedInput: a shard cannot be read or has states for another number of tokens.
    """
    to_verifier = draft.verifier_ids(model)
    inside = None if model.t2d is None else model.t2d.tolist()
    spans = {i: answer_span(rows[i][1]) for i in places}
    usable = [i for i in places if spans[i] and spans[i][0] and spans[i][1] - spans[i][0] > 1]
    records, was_training = [], model.training
    model.eval()
    try:
        for pack in _packs(rows, usable):
            batch = _batch(rows, pack, folder, model.fc.weight)
            drafted, _, _ = ttt.forward(model, **batch, ttt_steps=k)
            guesses_NK = torch.stack([torch.where(d[0] >= 0, to_verifier[d[0].clamp_min(0)], -1) for d in drafted], 1).cpu().numpy()
            offset = 0
            for i in pack:
                text, (start, stop) = list(rows[i][0]), spans[i]
                # the entry that joins token t with the states before it stands at t - 1; what follows the last token is not judged
                there_SK = guesses_NK[offset + start - 1 : offset + stop - 2]
                steps = replaying.walk(Foreseen(text[:stop], start, there_SK, np.ones(there_SK.shape)), k)
                name, category = names[i] if names else (f"row-{i}", "")
                made = {"id": name, "category": category, "prompt_tokens": start, "tokens": text[start:stop]}
                records.append(flatten(made | {"steps": steps}, inside))
                offset += len(text) - 1
    finally:
        model.train(was_training)
    return records
