"""Whether an attention implementation computes the right thing: nothing leaks, outputs and gradients are the reference's.

A loss curve shows neither fault: a draft that sees a later token learns nicely and fails at decoding, and one whose gradient
lacks a part learns, only worse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers import files, reference
from helpers.probe import Job, Probe, Save, in_words, packed, said

TOKENS = 256  # of the row that correctness is judged on: two documents and padding
MOVED = 1e-5  # largest movement, relative to the largest state, that still counts as none
TOLERANCE = 1e-4  # relative error in float32 against the float64 reference; three steps of one layer reach 1e-6


def _disturbed(row: dict[str, torch.Tensor], places: torch.Tensor, name: str = "hidden_states") -> dict[str, torch.Tensor]:
    changed = row[name].clone()
    if name == "input_ids":
        changed[0, places] = (changed[0, places] + 7) % (int(changed.max()) + 1)
    else:
        changed[0, places] += 3.0 * torch.randn(changed[0, places].shape, generator=torch.Generator().manual_seed(1)).to(changed)
    return row | {name: changed}


def movements(probe: Probe, row: dict[str, torch.Tensor], first: int) -> dict[str, float]:
    """How far states move that must not, by what was disturbed, relative to the largest state; and how far those that must.

    The first document has `first` tokens. Tokens are fed ahead of time in TTT: at step j position i may know token i + j, so a
    changed token must leave i < p - j alone, a changed state i < p at every step.
    """
    documents, places = row["document_ids"][0].cpu(), probe.places(row).cpu()
    p, at = first * 3 // 4, torch.arange(len(documents))
    probe.loss(row)
    before = probe.states()
    largest = max(x.abs().max().item() for x in before)

    def moved(changed: dict[str, torch.Tensor], still: Callable[[int], torch.Tensor]) -> float:
        probe.loss(changed)
        worst = 0.0
        for j, (a, b) in enumerate(zip(before, probe.states(), strict=True)):
            rows = still(j)[places].to(a.device)
            if rows.any():
                difference = (a[rows] - b[rows]).abs().max().item()
                worst = max(worst, difference if difference == difference else float("inf"))
        return worst / largest

    in_first, in_second, padding = documents == 0, documents == 1, documents == -1
    return {
        "a later state": moved(_disturbed(row, at[p : p + 1]), lambda j: (in_first & (at < p)) | in_second),
        "a later token": moved(_disturbed(row, at[p : p + 1], "input_ids"), lambda j: (in_first & (at < p - j)) | in_second),
        "the document before": moved(_disturbed(row, at[in_first]), lambda j: in_second),
        "the document after": moved(_disturbed(row, at[in_second]), lambda j: in_first),
        "padding": moved(_disturbed(row, at[padding]), lambda j: in_first | in_second),
        "what must move": moved(_disturbed(row, at[p : p + 1]), lambda j: in_first & (at >= p)),
    }


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖ over all values; infinite where either is not finite."""
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    return error.item() if torch.isfinite(error) else float("inf")


def _reference(probe: Probe, row: dict[str, torch.Tensor], job: Job) -> reference.Result:
    """The float64 result; kept in the job's folder, since all entries of a job have the same weights and row."""
    path = Path(job["folder"]) / "reference.pt" if job.get("folder") else None
    mark = torch.stack([p.detach().double().abs().sum() for p in probe.model.parameters() if p.requires_grad]).cpu()
    if path and path.is_file():
        kept = torch.load(path, weights_only=True, map_location=probe.device)
        if torch.equal(kept["mark"].cpu(), mark):
            return reference.Result(kept["hidden"], kept["losses"], kept["gradients"])
    found = reference.run(probe.model, row, job["steps"])
    if path and sum(g.numel() for g in found.gradients.values()) < 1e8:
        with files.atomic(path) as scratch:
            torch.save({"mark": mark, **found._asdict()}, scratch)
    return found


def _compare(probe: Probe, row: dict[str, torch.Tensor], wanted: reference.Result, dtype: str) -> dict[str, Any]:
    states, loss, gradients = probe.step(row, dtype)
    places = probe.places(row)
    kept = (row["document_ids"][0] != -1)[places]
    errors = {name: relative_error(g, wanted.gradients[name]) for name, g in gradients.items()}
    worst = max(errors, key=errors.__getitem__)
    output = max(relative_error(a[kept], b[places][kept]) for a, b in zip(states, wanted.hidden, strict=True))
    total = sum(wanted.losses).item()
    return {"output": output, "loss": abs(loss - total) / abs(total), "gradient": errors[worst], "worst": worst, "parameters": len(errors)}


def check(entry: dict[str, Any], job: Job, save: Save = lambda _: None) -> dict[str, Any]:
    """Whether an implementation trains this draft and computes the right thing.

    Args:
        save: called with what is known so far, `stage` naming what comes next (read when the process dies there).

    Returns:
        `faults` (words, empty when it may be used), `said` (its first exception), `trains`, `movements`, `float32` and
        `bfloat16` (errors against the float64 reference: output, loss, gradient, worst parameter), `any_length`.
    """
    found: dict[str, Any] = {"faults": [], "said": None, "trains": False, "movements": None}
    found |= {"float32": None, "bfloat16": None, "any_length": None}
    faults = found["faults"]

    def attempt(stage: str, compute: Callable[[], Any]) -> Any:
        save(found | {"stage": stage})
        try:
            return compute()
        except Exception as error:  # whatever an implementation raises is its verdict
            found["said"] = found["said"] or said(error)
            if in_words(error) not in faults:
                faults.append(in_words(error))
            return None

    probe = attempt("building the draft", lambda: Probe(entry, job))
    if probe is None:
        return found
    first = TOKENS * 5 // 8
    row = packed([first, TOKENS * 5 // 16], TOKENS - first - TOKENS * 5 // 16, job["proposal"], probe.device, job["seed"])
    found["trains"] = attempt("a training step", lambda: probe.step(row)) is not None
    # what cannot train is still looked at; uncompiled, since a compiler may crash on what no one will use
    plainly = contextlib.nullcontext() if found["trains"] else torch.compiler.set_stance("force_eager")
    with torch.no_grad(), plainly:
        found["movements"] = attempt("disturbing one position", lambda: movements(probe, row, first))
        if found["movements"] is None:
            return found
        short = packed([TOKENS - 56], 0, job["proposal"], probe.device, job["seed"])
        found["any_length"] = _at_other_lengths(probe, short)
    leaks = [name for name, x in found["movements"].items() if x > MOVED and name != "what must move"]
    if leaks:
        worst = max(found["movements"][name] for name in leaks)
        faults.append(f"cannot take this mask: {', '.join(leaks)} moved what they must not, by up to {worst:.1e}")
    if not found["movements"]["what must move"] > MOVED:
        faults.append("wrong: a changed state moves nothing at all")
    if found["trains"]:
        wanted = attempt("the float64 reference", lambda: _reference(probe, row, job))
        if wanted is None:
            return found
        found["float32"] = attempt("a training step to compare", lambda: _compare(probe, row, wanted, "float32"))
        if found["float32"] and not found["float32"]["output"] <= TOLERANCE:
            faults.append(f"wrong outputs: {found['float32']['output']:.1e} from the float64 reference")
        elif found["float32"] and not found["float32"]["gradient"] <= TOLERANCE:
            faults.append(f"wrong gradients: {found['float32']['gradient']:.1e} from the float64 reference in {found['float32']['worst']}")
        if job["dtype"] != "float32":
            found["bfloat16"] = attempt("a training step in bfloat16", lambda: _compare(probe, row, wanted, job["dtype"]))
    return found


def _at_other_lengths(probe: Probe, row: dict[str, torch.Tensor]) -> bool:
    """Whether a row of 200 tokens, no multiple of 128, goes through."""
    try:
        return bool(torch.isfinite(probe.loss(row)))
    except Exception:  # as above: it is the finding
        return False
