"""Which positions of a packed row the TTT step has to compute: starts, their targets, and the runs they form in documents.

A start is a position whose target at some step is supervised and lies in the same document. All other positions (prompts, padding, a
document's end) need no query, no MLP and no logits. Shapes: N packed tokens, M starts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from helpers.flash import Segment


class Plan(NamedTuple):
    """Which positions a batch needs, from its documents and mask."""

    starts: torch.Tensor  # [M] positions that need a query
    segments: list[Segment]
    targets: list[torch.Tensor]  # per step: rows (into starts) whose target is supervised and in the same document
    documents: list[Segment]  # every document whole, for layers below the last


def plan(document_ids_N: torch.Tensor, loss_mask_N: torch.Tensor, steps: int) -> Plan:
    """Positions needed at each of `steps` steps: start i has its step-k target at i + k, in the same document.

    Args:
        document_ids_N: document of each position, -1 for padding; loss_mask_N: 1 where the target is supervised.
    """
    documents, supervised = document_ids_N.cpu(), loss_mask_N.cpu().bool() & (document_ids_N.cpu() >= 0)
    total = documents.numel()
    reaches = []
    for k in range(steps):
        ok = torch.zeros(total, dtype=torch.bool)
        if k < total:
            ok[: total - k] = supervised[k:] & (documents[: total - k] == documents[k:])
        reaches.append(ok)
    needed = torch.stack(reaches).any(0)
    starts = needed.nonzero().squeeze(1)
    row_of = torch.full((total,), -1)
    row_of[starts] = torch.arange(starts.numel())
    begin: dict[int, int] = {}
    whole = []
    ids = documents.tolist()
    for i, d in enumerate(ids):
        if d >= 0 and d not in begin:
            begin[d] = i
        if d >= 0 and (i + 1 == total or ids[i + 1] != d):
            whole.append(Segment(begin[d], begin[d], i + 1, begin[d]))
    segments = []
    for row, i in enumerate(starts.tolist()):
        last = segments[-1] if segments else None
        if last and last.stop == i and ids[i] == ids[i - 1]:
            segments[-1] = last._replace(stop=i + 1)
        else:
            segments.append(Segment(begin[ids[i]], i, i + 1, row))
    targets = [row_of[ok.nonzero().squeeze(1)] for ok in reaches]
    device = document_ids_N.device
    return Plan(starts.to(device), segments, [t.to(device) for t in targets], whole)
