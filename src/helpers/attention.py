"""Which attention can train this draft here: every implementation tried, and the choice made from what was seen."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from helpers import decoding, files, flash
from helpers.attention_checks import MOVED, TOLERANCE
from helpers.errors import AttentionError
from helpers.probe import said
from helpers.registry import registry

FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface", "flash_attention_4": "flash_attn"}
SECONDS = 60.0  # for each of an entry's two parts


# --- verdicts ----------------------------------------------------------------------------------------------------


def at_first_sight(entry: dict[str, Any]) -> dict[str, Any] | None:
    """`reason` (and what transformers `said`) if an entry needs no trial, for what it lacks or is made for; None: try it."""
    name = entry["implementation"]
    if name == decoding.GROUPED:
        return {"reason": "for decoding only: it folds query groups, and a training mask would be copied once for each"}
    if entry["module"] == "__main__" or "<locals>" in entry["function"]:
        return {"reason": "registered in this process alone: another cannot import it; move it into a module"}
    if not name.startswith("flash_attention"):
        return None
    lacks = [] if torch.cuda.is_available() else ["needs CUDA"]
    package = FLASH_PACKAGES.get(name, "flash_attn")
    if importlib.util.find_spec(package) is None:
        lacks.append(f"package missing: {package}")
    return {"reason": "; ".join(lacks), "said": _said_at_building(name)} if lacks else None


def _said_at_building(name: str) -> str:
    """What transformers says itself when a model is built with an implementation; empty if it builds."""
    from transformers import AutoModel, LlamaConfig

    small = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    try:
        with torch.device("meta"):
            AutoModel.from_config(small, attn_implementation=name)
    except Exception as error:  # ImportError or ValueError, by version
        return said(error)
    return ""


def trial(
    proposal: dict[str, Any],
    verifier_folder: Path | str,
    *,
    steps: int,
    lengths: Sequence[int],
    dtype: str,
    device: torch.device,
    seed: int = 0,
    entries: Sequence[dict[str, Any]] | None = None,
    seconds: float = SECONDS,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Try every entry on this draft's shapes, one at a time, each in a process of its own.

    Args:
        proposal: from `draft.propose`. steps: TTT steps. lengths: tokens of the rows that are timed.
        dtype: the verifier's; anything but float32 is timed under bfloat16 autocast.
        entries: rows of `registry()`; None takes all.
        seconds: limit for checking an entry, and again for timing it.

    Returns:
        One verdict per entry: its registry row with `usable`, `reason`, and what `attention_checks.check` and
        `attention_costs.cost` found.

    Raises:
        AttentionError: the process of the trial itself cannot run.
    """
    entries = registry() if entries is None else list(entries)
    verdicts = {e["implementation"]: e | {"usable": False} | why for e in entries if (why := at_first_sight(e))}
    # ours first: its checks leave the reference for the others
    todo = sorted((e for e in entries if e["implementation"] not in verdicts), key=lambda e: e["implementation"] != "ttt")
    job = {
        "proposal": proposal, "verifier": str(verifier_folder), "steps": steps, "lengths": list(lengths), "dtype": dtype,
        "device": str(device), "seed": seed, "seconds": seconds, "fork": device.type == "cpu",
    }  # fmt: skip
    for batch in [todo] if job["fork"] else [[e] for e in todo]:
        for entry, found in zip(batch, _run(job | {"entries": batch}, report), strict=True):
            verdicts[entry["implementation"]] = entry | judge(found) | found
    if "ttt" in verdicts:
        verdicts["ttt"]["reason"] += without_kernel(device, dtype, proposal["transformer_layer_config"]["head_dim"])
    return [verdicts[e["implementation"]] for e in entries]


def without_kernel(device: torch.device, dtype: str, head_dim: int) -> str:
    """What to add to the verdict on `ttt` where PyTorch's fused kernel cannot serve its block 0; empty where it can."""
    lacks = flash.missing(device, getattr(torch, dtype), head_dim)
    return f"; with plain scores, whose memory grows with the square of the row: {lacks}" if lacks else ""


def _run(job: dict[str, Any], report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Results of a job's entries from its process, reported as they come."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files.write_json(folder / "job.json", job | {"folder": scratch})
        log = folder / "log.txt"
        command = [sys.executable, "-m", "helpers.attention_trial", str(folder / "job.json")]
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
        deadline = time.monotonic() + 120 + 4 * job["seconds"] * len(job["entries"])
        found: list[dict[str, Any]] = []
        try:
            while len(found) < len(job["entries"]):
                ended = process.poll() is not None or time.monotonic() > deadline
                path = folder / f"{len(found)}.json"
                if path.is_file():
                    found.append(json.loads(path.read_text(encoding="utf-8")))
                    report(f"{found[-1]['implementation']}: {judge(found[-1])['reason']}")
                elif ended:
                    break
                else:
                    time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if len(found) == len(job["entries"]):
            return found
        partial = folder / "check-0.json"
        if not job["fork"] and partial.is_file():  # one entry, whose process died with it
            part = json.loads(partial.read_text(encoding="utf-8"))
            ended = f"crashed in {part.pop('stage', 'the timing')}"
            return [part | {"implementation": job["entries"][0]["implementation"], "ended": ended}]
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise AttentionError(f"the trial's process ended early: {last}", where="helpers.attention_trial", do="see `workbook doctor`")


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """`usable` and the `reason` in words, from what a trial found."""
    faults, timings = list(found.get("faults") or []), found.get("timings") or []
    ended, notes = found.get("ended"), []
    ran = [t for t in timings if t["seconds"] is not None]
    if ended and ("crashed" in ended or not ran):
        faults.append(ended)
    elif ended:
        notes.append(ended)
    failed = [t for t in timings if t["seconds"] is None]
    lines = [f"{t['tokens']:,} tokens: {t['note']}" for t in failed]
    out = [line for line, t in zip(lines, failed, strict=True) if "not enough memory" in t["note"] or not ran]
    faults += out
    notes += [line for line in lines if line not in out]
    if not faults and not ran:
        faults.append("was not timed")
    if found.get("any_length") is False and found.get("trains"):
        notes.append("rows must be a multiple of 128 tokens")
    return {"usable": not faults, "reason": "; ".join(faults or ["right, and trains here", *notes])}


def choose(verdicts: Sequence[dict[str, Any]], wanted: str) -> dict[str, Any]:
    """The implementation to train with, and why.

    Args:
        wanted: a name, or `auto` for the fastest usable one at the longest length any of them was timed at.

    Returns:
        `attention`, `reason`, `tokens` and `seconds` of its longest timing, `bytes` there.

    Raises:
        AttentionError: the named one is unknown or failed, or none is usable; the message holds the table.
    """
    by_name = {v["implementation"]: v for v in verdicts}
    usable = {n: _longest(v) for n, v in by_name.items() if v["usable"]}
    do = f"set attention to auto or to one of: {', '.join(usable)}" if usable else "see the reasons"
    if wanted != "auto" and wanted not in by_name:
        near = difflib.get_close_matches(wanted, by_name, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise AttentionError(f"unknown attention {wanted!r}{hint}\n{as_text(verdicts)}", where="parameter attention", do=do)
    if wanted != "auto" and wanted not in usable:
        what = f"attention {wanted!r} cannot train this draft here: {by_name[wanted]['reason']}\n{as_text(verdicts)}"
        raise AttentionError(what, where="parameter attention", do=do)
    if not usable:
        raise AttentionError(f"no attention can train this draft here\n{as_text(verdicts)}", where="attention trial", do=do)
    if wanted != "auto":
        return {"attention": wanted, "reason": "asked for, and it passed every check", **usable[wanted]}
    ranked = sorted(usable, key=lambda n: (-usable[n]["tokens"], usable[n]["seconds"]))
    first, mine = ranked[0], usable[ranked[0]]
    reason = f"the fastest that passed every check: {mine['seconds']:.3g} s a step of {mine['tokens']:,} tokens"
    same = [n for n in ranked[1:] if usable[n]["tokens"] == mine["tokens"]]
    if same:
        reason += f", {usable[same[0]]['seconds'] / mine['seconds']:.1f} times as fast as {same[0]}, the next"
    return {"attention": first, "reason": reason, **mine}


def _longest(verdict: dict[str, Any]) -> dict[str, Any]:
    ran = [t for t in verdict.get("timings") or [] if t["seconds"] is not None]
    best = max(ran, key=lambda t: t["tokens"], default={"tokens": 0, "seconds": float("inf"), "bytes": None})
    return {key: best[key] for key in ("tokens", "seconds", "bytes")}


# --- tables ------------------------------------------------------------------------------------------------------


def as_text(verdicts: Sequence[dict[str, Any]]) -> str:
    """The verdicts as lines of text, for messages."""
    width = max((len(v["implementation"]) for v in verdicts), default=0)
    return "\n".join(f"  {v['implementation']:{width}}  {'usable' if v['usable'] else 'no':6}  {v['reason']}" for v in verdicts)


def verdict_rows(verdicts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per entry for a table: whose it is, usable, why, and what it said where it failed."""
    return [{key: v.get(key) for key in ("implementation", "from", "usable", "reason", "said")} for v in verdicts]


def check_rows(verdicts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per entry that was tried: largest forbidden movement by cause, errors against the float64 reference."""
    rows = []
    for v in verdicts:
        if not (v.get("movements") or v.get("float32")):
            continue
        moved = {f"moved by {name}": x for name, x in (v.get("movements") or {}).items() if name != "what must move"}
        errors = {}
        for dtype in ("float32", "bfloat16"):
            found = v.get(dtype) or {}
            errors |= {f"{dtype} output": found.get("output"), f"{dtype} gradient": found.get("gradient")}
        rows.append({"implementation": v["implementation"]} | moved | errors | {"worst gradient": (v.get("float32") or {}).get("worst")})
    return rows


def cost_rows(verdicts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per entry and length: seconds, peak bytes above the built draft, runs, note."""
    return [{"implementation": v["implementation"], **t} for v in verdicts for t in v.get("timings") or []]


def forms(rows: Sequence[dict[str, Any]]) -> dict[str, Callable[[float], str]]:
    """How a table writes the columns of `check_rows`: 0 where there is nothing at all, else the power of ten."""
    return dict.fromkeys([name for name in (rows[0] if rows else {}) if name not in ("implementation", "worst gradient")], _power)


def _power(x: float) -> str:
    return "0" if x == 0 else f"{x:.0e}"


def gates(verdicts: Sequence[dict[str, Any]], choice: dict[str, Any]) -> list[tuple[str, bool, str, str]]:
    """The checks of the implementation chosen, for `pages.checks`."""
    chosen = next(v for v in verdicts if v["implementation"] == choice["attention"])
    moved = max(x for name, x in chosen["movements"].items() if name != "what must move")
    errors, do = chosen["float32"], "set another attention; section 5 shows what it does"
    return [
        (f"{choice['attention']}: nothing moves that must not", moved <= MOVED, _power(moved), do),
        ("its outputs are the float64 reference's", errors["output"] <= TOLERANCE, _power(errors["output"]), do),
        (f"its gradients too, of {errors['parameters']} parameters", errors["gradient"] <= TOLERANCE, _power(errors["gradient"]), do),
    ]
