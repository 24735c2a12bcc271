"""Proof that a stored shard is what it claims to be: held against a fresh forward pass of the verifier, row by row.

Low acceptance is most often born here, and nothing later shows it: a draft trains happily on the wrong layer, on states
after the final norm, or on another row's. So a sample of rows is passed through the verifier again, one at a time. Every
stored slice has to be nearest, of all the verifier's states, to the layer whose id it carries, and final norm and head
have to make the verifier's own logits of the stored last state. A fault is named by the known cause that fits it.

Shapes: T tokens, L = A + 1 stored slices, n decoder layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from helpers import files
from helpers.errors import DataError
from helpers.extraction import Row, shard
from helpers.verifier import Verifier

NEAR = 0.05  # mean relative distance up to which a slice is a layer; measured 0.003 for its own, 0.25 for the next one (bf16)
LEAST_COSINE, LEAST_TOP1, SCALE = 0.995, 0.98, 0.02  # of rebuilt logits: lowest cosine and top-1 share, largest error in length
DIFFERENCE = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-3}  # largest relative, any token; measured 0.03 in bf16
PADDING = 8

# Known causes, each with what mends it.
UNREADABLE = "the file cannot be read"
NOT_FINITE = "it holds NaN or infinity"
ANOTHER_ROW = "it is the shard of another row"
SHIFTED_IDS = "its token ids are shifted by one"
OTHER_IDS = "its token ids are of another tokenizer or chat template"
LENGTH = "it has states for another number of tokens than it has token ids"
WIDTH = "its width is another verifier's"
COUNT = "it has another number of layers"
OFF_BY_ONE = "its layer ids are off by one"
AFTER_NORM = "its last slice was taken after the final norm"
ORDER = "its layers are in another order"
LAYERS = "it holds other layers than it claims"
SHIFTED_STATES = "its states are shifted by one token"
FOREIGN = "its states are of no layer here: of other tokens, another verifier or other weights"
HEAD = "final norm and head do not make the verifier's logits of its last state"
LEAK = "in a batch a row has other states than alone"
REDO = "delete the shard and run notebook 01 again: it is made anew"
CAUSES = {
    UNREADABLE: REDO,
    NOT_FINITE: REDO,
    ANOTHER_ROW: "were rows reordered after extraction? " + REDO,
    SHIFTED_IDS: "store the ids that went into the forward pass, not the targets",
    OTHER_IDS: "extract with the tokenizer and template that made the dataset",
    LENGTH: "chunked prefill or prefix caching may have shortened the row: switch them off and extract again",
    WIDTH: "check the parameter verifier; states of another model cannot be used",
    COUNT: "three layers and the last one are expected; check aux_layer_ids",
    OFF_BY_ONE: "id k is the state after k decoder layers, 0 the embeddings; some tools count from the first layer's output",
    AFTER_NORM: "transformers' last hidden_states entry is behind the final norm: take what goes into the norm",
    ORDER: "layers are stored in rising order, the last layer last",
    LAYERS: "check aux_layer_ids, and that the folder was made for them",
    SHIFTED_STATES: "state t belongs to token t; the shift to the next token is made in training",
    FOREIGN: "check that dataset, shards and verifier belong together, and its dtype and quantisation",
    HEAD: "does the architecture scale or cap its logits? The draft applies norm and head alone",
    LEAK: "padding reaches into rows: is attention causal, with padding on the right? Try extraction_batch_tokens 16",
}


@dataclass
class _Fresh:
    """One row through the verifier again: states of layers 0..n [n + 1, T, H], logits [T, V]."""

    states: torch.Tensor
    normed: torch.Tensor
    logits: torch.Tensor


@torch.inference_mode()
def _fresh(verifier: Verifier, ids: Sequence[int]) -> _Fresh:
    layers = list(range(verifier.depth + 1))
    with verifier.capture(layers) as found:
        logits = verifier.model(input_ids=torch.tensor([list(ids)], device=verifier.device), use_cache=False).logits[0]
    return _Fresh(torch.stack([found[k][0] for k in layers]), verifier.decoder.norm(found[verifier.depth])[0], logits.float())


def relative(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Distance by token, ‖states − reference‖ / ‖reference‖: [.., T, H] to [.., T].

    By token, since the first one's state is so large in many models that a norm over all would hear nothing else.
    """
    states, reference = states.float(), reference.float()
    return (states - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-12)


def _ids_fault(stored: Sequence[int], rows: Sequence[Row], i: int) -> str | None:
    own = list(rows[i].input_ids)
    stored = list(stored)
    if stored == own:
        return None
    if any(stored == list(row.input_ids) for row in rows):
        return ANOTHER_ROW
    shifted = len(own) > 1 and (stored[: len(own) - 1] == own[1:] or stored[1 : len(own)] == own[:-1])
    return SHIFTED_IDS if shifted else OTHER_IDS


def _shape_fault(shape: Sequence[int], tokens: int, layers: int, hidden: int) -> str | None:
    if len(shape) != 3:
        return COUNT
    expected = {LENGTH: (shape[0], tokens), COUNT: (shape[1], layers), WIDTH: (shape[2], hidden)}
    return next((cause for cause, (size, wanted) in expected.items() if size != wanted), None)


def _layer_fault(stored_LTH: torch.Tensor, found: Sequence[Any], claimed: Sequence[int], fresh: _Fresh) -> str | None:
    """Which cause explains the layers found (ids, None for none, text for behind the norm)."""
    depth = claimed[-1]
    after_norm = isinstance(found[-1], str)
    layers = [depth if isinstance(k, str) else k for k in found]
    if layers == list(claimed):
        return AFTER_NORM if after_norm else None
    if all(k is None for k in found):
        own = fresh.states[list(claimed)]
        ahead, behind = relative(stored_LTH[:, :-1], own[:, 1:]).mean(), relative(stored_LTH[:, 1:], own[:, :-1]).mean()
        return SHIFTED_STATES if min(ahead, behind) < NEAR else FOREIGN
    if None in found:
        return FOREIGN
    # the last slice cannot be off by +1 but by being taken after the norm
    steps = {k - c for k, c in zip(layers[:-1], claimed[:-1], strict=True)}
    if steps in ({1}, {-1}) and layers[-1] - depth in (0, *steps):
        return f"{OFF_BY_ONE}; {AFTER_NORM}" if after_norm else OFF_BY_ONE
    return ORDER if sorted(layers) == sorted(claimed) else LAYERS


def _nearest(slice_TH: torch.Tensor, fresh: _Fresh) -> tuple[Any, float, float]:
    """Layer a slice is nearest to (None when none is near), its distance, and that of the next one."""
    distances = {k: relative(slice_TH, state).mean().item() for k, state in enumerate(fresh.states)}
    distances[f"{len(fresh.states) - 1} after norm"] = relative(slice_TH, fresh.normed).mean().item()
    first, second = sorted(distances, key=lambda k: distances[k])[:2]
    return first if distances[first] <= NEAR else None, distances[first], distances[second]


@torch.inference_mode()
def _logits(verifier: Verifier, last_TH: torch.Tensor, real_TV: torch.Tensor) -> dict[str, float]:
    """Logits rebuilt from the stored last state against the verifier's own: top-1 agreement, mean cosine, ratio of lengths.

    Choices whose real logits differ by less than two steps of the dtype count as agreeing: they are ties.
    """
    rebuilt = verifier.logits(last_TH[None])[0].float()
    top, at = real_TV.max(dim=-1).values, real_TV.gather(-1, rebuilt.argmax(-1, keepdim=True))[:, 0]
    agree = at >= top - 2 * torch.finfo(verifier.dtype).eps * top.abs()
    cosine = torch.cosine_similarity(rebuilt, real_TV, dim=-1).mean().item()
    return {"top1": agree.float().mean().item(), "cosine": cosine, "scale": (rebuilt.norm() / real_TV.norm()).item()}


def _one(verifier: Verifier, rows: Sequence[Row], folder: Path, claimed: Sequence[int], i: int, fresh: _Fresh) -> dict[str, Any]:
    tokens = len(rows[i].input_ids)
    out: dict[str, Any] = {"row": i, "id": rows[i].id, "tokens": tokens, "cause": None, "claimed": list(claimed), "found": None}
    out |= {"distance": None, "next_layer": None, "top1": None, "cosine": None, "scale": None, "finite": None}
    try:
        made = load_file(shard(folder, i))
        ids, stored = made["token_ids"].tolist(), made["hidden_states"].to(verifier.device)
    except (SafetensorError, OSError, KeyError, ValueError):
        return out | {"cause": UNREADABLE}
    fault = _ids_fault(ids, rows, i) or _shape_fault(stored.shape, tokens, len(claimed), fresh.states.shape[-1])
    if fault:
        return out | {"cause": fault}
    out["finite"] = bool(torch.isfinite(stored.float()).all())
    if not out["finite"]:
        return out | {"cause": NOT_FINITE}
    stored_LTH = stored.transpose(0, 1)
    near = [_nearest(slice_TH, fresh) for slice_TH in stored_LTH]
    out |= {"found": [n[0] for n in near], "distance": max(n[1] for n in near), "next_layer": min(n[2] for n in near)}
    out |= _logits(verifier, stored_LTH[-1], fresh.logits)
    fault = _layer_fault(stored_LTH, out["found"], claimed, fresh)
    return out | {"cause": fault or (None if _logits_agree(out) else HEAD)}


def _logits_agree(row: Mapping[str, Any]) -> bool:
    return row["top1"] is not None and row["top1"] >= LEAST_TOP1 and row["cosine"] >= LEAST_COSINE and abs(row["scale"] - 1) <= SCALE


def sampled(count: int, sample: int, seed: int) -> list[int]:
    """Rows to look at, rising: row 0 (the example) and others drawn by `seed`, `sample` in all or as many as there are."""
    return [0, *sorted(random.Random(seed).sample(range(1, count), min(sample, count) - 1))]


def audit(
    verifier: Verifier, rows: Sequence[Row], folder: Path, layer_ids: Sequence[int], *, sample: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Hold stored rows against a fresh single-row forward pass.

    Args:
        rows: all rows of the dataset, in its order. folder: the dataset, shards in it.
        layer_ids: ids the shards claim, rising, the last layer not among them.
        sample: rows to look at; row 0 is always one.

    Returns:
        One dict per row looked at: row, id, tokens; claimed and found layer ids (None: no layer is near); distance (largest
        mean relative one to the layer found) and next_layer (smallest one to any other); top1, cosine and scale of the
        rebuilt logits; finite; difference (largest relative one between a batched and a single pass) and what is allowed; cause
        (None when nothing is wrong, else what fits). Figures that could not be taken are None.
    """
    chosen = sampled(len(rows), sample, seed)
    claimed = [*layer_ids, verifier.depth]
    batched = verifier.states(verifier.padded([rows[i].input_ids for i in chosen], extra=PADDING), list(layer_ids))
    found = []
    for b, i in enumerate(chosen):
        fresh = _fresh(verifier, rows[i].input_ids)
        row = _one(verifier, rows, folder, claimed, i, fresh)
        together = batched[b, : row["tokens"]].transpose(0, 1)
        row |= {"difference": relative(together, fresh.states[claimed]).max().item(), "allowed": DIFFERENCE[verifier.dtype]}
        if row["cause"] is None and not row["difference"] <= row["allowed"]:
            row["cause"] = LEAK
        found.append(row)
    return found


def _remedy(cause: str) -> str:
    return "; ".join(CAUSES[part] for part in cause.split("; "))


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool, str, str]]:
    """The audit as gates for `pages.checks`: name, passed, figure, what to do."""

    def gate(name: str, good: Sequence[bool], figure: str) -> tuple[str, bool, str, str]:
        causes = {r["cause"] for r, ok in zip(rows, good, strict=True) if not ok and r["cause"]}
        return name, all(good), figure, "; ".join(f"{cause}: {_remedy(cause)}" for cause in sorted(causes))

    def count(good: Sequence[bool]) -> str:
        return f"{sum(good)} of {len(rows)} rows"

    def least(key: str) -> float:
        return min((r[key] for r in rows if r[key] is not None), default=float("nan"))

    read = [r["finite"] is not None for r in rows]
    finite = [r["finite"] is True for r in rows]
    layers = [r["found"] is not None and r["found"] == r["claimed"] for r in rows]
    logits = [_logits_agree(r) for r in rows]
    alone = [r["difference"] <= r["allowed"] for r in rows]
    rebuilt = f"top-1 {least('top1'):.1%}, cosine {least('cosine'):.5f} in the worst row"
    return [
        gate("stored token ids and shapes are the dataset's", read, count(read)),
        gate("stored values are finite", finite, count(finite)),
        gate("each slice is the layer it claims", layers, count(layers)),
        gate("logits rebuilt from the stored last state are the verifier's", logits, rebuilt),
        gate(
            "a row in a batch has the states it has alone",
            alone,
            f"{max(r['difference'] for r in rows):.1e}, {rows[0]['allowed']:g} allowed",
        ),
    ]


def require(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The rows of an audit, if nothing is wrong with any.

    Raises:
        DataError: names each bad shard with the cause that fits, the layers claimed and found, and what mends it.
    """
    bad = [r for r in rows if r["cause"]]
    if not bad:
        return rows
    lines = []
    for r in bad:
        seen = f" (claimed {r['claimed']}, found {r['found']})" if r["found"] is not None and r["found"] != r["claimed"] else ""
        lines.append(f"  - {shard(folder, r['row']).name}: {r['cause']}{seen}")
    raise DataError(
        f"{len(bad)} of {len(rows)} audited rows are not what they claim:\n" + "\n".join(lines),
        where=files.shown(folder / "hidden_states"),
        do="; ".join(dict.fromkeys(_remedy(r["cause"]) for r in bad)),
    )
