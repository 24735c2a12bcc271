"""Why acceptance is what it is: the known causes in order, each ruled out, found or not judged, with its figure.

The order is that of the pipeline, so the first cause that fails is the likely root. A fault makes later lines fail too, and
which ones is declared beside each cause: what fails beyond that is a fault of its own.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helpers import acceptance, causes, rehearsal, reloaded
from helpers.chains import ChainRecord
from helpers.comparison import FEWEST_PAIRS
from helpers.errors import MissingInput, WorkbookError
from helpers.evidence import Evidence, Finding
from helpers.params import Parameters
from helpers.verifier import Verifier

LEAST_LEARNT = 0.1  # accept length above 1 on training rows; below, nothing was learnt that could carry over
LEAST_KEPT = 0.5  # share of the training rows' gain (accept length above 1) that held-out rows must keep
LEAST_REACHED = 2 / 3  # share of the held-out rows' gain that the evaluation must reach
TURNED = 0.9  # a last held-out accept length below this share of the best is a curve that turned (as in notebook 04)
LEAST_TOKENS = 40_000  # supervised; 49,000 gave a predicted accept length of 1.49 when this project began
PUBLISHED = (
    "published, with larger verifiers: 2,000 conversations 1.95 to 2.61 (SpecForge PR 870), 5,000 samples 1.45 to 1.89 "
    "(speculators' examples, PR 1132), 508,000 samples 2.82 to 3.02 (speculators issue 610)"
)


def overfit_gate(e: Evidence) -> Finding:
    """A row learnt by heart was accepted before training began, as notebook 04 recorded it."""
    found = e.read(4, "results", "gate.json")["value"]
    try:
        gates = rehearsal.gate_checks(found)
    except KeyError as error:
        return Finding(None, f"the gate's record lacks {error}", "run notebook 04 again")
    figure = "; ".join(f"{name}: {shown}" for name, _, shown, _ in gates)
    return Finding(all(passed is not False for _, passed, *_ in gates), figure, f"look for the fault {rehearsal.SUSPECTS}")


def _curve(e: Evidence) -> list[float]:
    """Held-out accept lengths of the run, by validation. Raises MissingInput."""
    with e.file(4, "curves.csv").open(newline="", encoding="utf-8") as file:
        values = [row.get("heldout_accept_length") for row in csv.DictReader(file)]
    return [float(v) for v in values if v]


def train_against_heldout(e: Evidence) -> Finding:
    """What was learnt carries over from the rows trained on to the rows held out, and did so until the end."""
    seen, unseen = (acceptance.accept_length(e.chains(which), seed=e.parameters.seed) for which in ("training", "heldout"))
    figure = f"training rows {seen}, held-out rows {unseen}"
    try:
        curve = _curve(e)
    except MissingInput:
        curve = []
    if curve:
        figure += f"; predicted on held-out rows in training: best {max(curve):.2f}, last {curve[-1]:.2f}"
    if seen.value - 1 < LEAST_LEARNT:
        do = "mend what failed above; if nothing did, train longer or at a higher rate: even its training rows are not learnt"
        return Finding(False, figure, do)
    apart = np.isnan(unseen.high) or np.isnan(seen.low) or unseen.high < seen.low
    if apart and unseen.value - 1 < LEAST_KEPT * (seen.value - 1):
        return Finding(False, figure, "the draft has memorised: more conversations, fewer epochs, noise_std or weight decay")
    turned = bool(curve) and curve[-1] < TURNED * max(curve)
    return Finding(not turned, figure, "the held-out curve turned down: fewer epochs, or more data (the best epoch was kept)")


def data_against_evaluation(e: Evidence) -> Finding:
    """The evaluation's kinds of prompts are among those trained on, and are accepted about as held-out rows are."""
    seed = e.parameters.seed
    heldout, measured = (acceptance.accept_length(records, seed=seed) for records in (e.chains("heldout"), e.records))
    trained = Counter(talk["category"] for talk in e.talks[: e.training])
    kept = {row["category"]: row for row in acceptance.by_category(e.chains("heldout"), seed=seed)}
    faults, absent = [], []
    found = acceptance.by_category(e.records, seed=seed)
    for row in found:
        name = row["category"]
        below = row["value"] < (heldout.value if np.isnan(heldout.low) else heldout.low)
        if len(trained) > 1 and not trained[name]:  # with one kind alone the data has no categories
            absent.append(name)
            if below and (row["high"] is None or row["high"] < heldout.value):
                faults.append(f"{name} is not in training: {_told(row)}")
        elif (like := kept.get(name)) and min(row["n"], like["n"]) >= FEWEST_PAIRS:
            if row["high"] < like["low"] and row["value"] - 1 < LEAST_KEPT * (like["value"] - 1):
                faults.append(f"{name}: {_told(row)}, held-out {_told(like)}")
    apart = np.isnan(measured.high) or np.isnan(heldout.low) or measured.high < heldout.low
    if not faults and apart and measured.value - 1 < LEAST_REACHED * (heldout.value - 1):
        faults.append("the evaluation as a whole is far below")
    low = found[-1]
    figure = f"evaluation {measured}, held-out {heldout}; lowest: {low['category']} {_told(low)}, {trained[low['category']]:,} in training"
    figure += f"; not in training: {', '.join(absent)}" if absent else ""
    if e.parameters.answer_temperature:  # the chain then misses tokens that the verifier would not have chosen
        return Finding(None, f"training answers were sampled, the evaluation is greedy; {figure}")
    return Finding(not faults, "; ".join([*faults, figure]), "add prompts of these kinds to prompts_train: breadth before quantity")


def _told(row: dict[str, Any]) -> str:
    interval = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
    return f"{row['value']:.2f}{interval}, n = {row['n']}"


def quantity(e: Evidence) -> Finding:
    """Supervised tokens trained on, beside what others took."""
    tokens = sum(sum(mask) for _, mask in e.rows[: e.training])
    figure = f"{tokens:,} supervised tokens in {e.training:,} conversations; {PUBLISHED}"
    return Finding(
        tokens >= e.least_tokens, figure, f"at least {e.least_tokens:,}: more prompts of the kinds you serve, then longer answers"
    )


class Cause(NamedTuple):
    """A line of the diagnosis, and the later lines that its fault may make fail."""

    name: str
    judge: Callable[[Evidence], Finding]
    makes: tuple[str, ...]


LEARNT = ("overfit gate", "train against held-out", "data against evaluation")
CAUSES = (
    Cause("template and mask", causes.template_and_mask, ("vocabulary coverage", "d2t", *LEARNT, "quantity of data")),
    Cause("layer ids", causes.layer_ids, LEARNT),
    Cause("final norm", causes.final_norm, LEARNT),
    Cause("RoPE base and positions", causes.rope, LEARNT),
    Cause("vocabulary coverage", causes.vocabulary, LEARNT),
    Cause("d2t", causes.mapping, LEARNT),
    Cause("attention parity", reloaded.attention_parity, LEARNT),
    Cause("attention choice after reload", reloaded.attention_after_reload, LEARNT),
    Cause("norm flags", reloaded.norm_flags, LEARNT),
    Cause("overfit gate", overfit_gate, LEARNT[1:]),
    Cause("train against held-out", train_against_heldout, LEARNT[2:]),
    Cause("data against evaluation", data_against_evaluation, ()),
    Cause("quantity of data", quantity, ()),
)


def walk(
    parameters: Parameters,
    verifier: Verifier,
    draft_model: Any,
    records: Sequence[ChainRecord],
    *,
    draft_folder: Path | None = None,
    least_tokens: int = LEAST_TOKENS,
) -> list[dict[str, Any]]:
    """The known causes of low acceptance in order, each judged on the run that `parameters` name.

    Args:
        verifier, draft_model: as loaded for the evaluation; both are only read.
        records: the evaluation's chain records.
        draft_folder: the draft's checkpoint; None takes 04's `best`.
        least_tokens: supervised training tokens below which there are too few.

    Returns:
        One row per cause: cause; passed (None where what it needs is not there); figure; do (empty unless it failed);
        consequence_of (the first cause before it that failed and may make this one fail, else "").
    """
    e = Evidence(parameters, verifier, draft_model, records, draft_folder, least_tokens)
    rows: list[dict[str, Any]] = []
    said: set[str] = set()
    for cause in CAUSES:
        try:
            found = cause.judge(e)
        except WorkbookError as error:
            # what cannot be read fails the first line that needs it; a file that never was there fails none
            passed = None if isinstance(error, MissingInput) or error.what in said else False
            said.add(error.what)
            found = Finding(passed, error.what, error.do)
        row = {"cause": cause.name, "passed": found.passed, "figure": found.figure, "do": "" if found.passed else found.do}
        rows.append(row | {"consequence_of": _source(rows, cause.name) if found.passed is False else ""})
    return rows


def _source(before: Sequence[dict[str, Any]], name: str) -> str:
    """The first cause that failed and may make `name` fail."""
    failed = {row["cause"] for row in before if row["passed"] is False}
    return next((cause.name for cause in CAUSES if cause.name in failed and name in cause.makes), "")


def root(rows: Sequence[dict[str, Any]]) -> str | None:
    """The first cause that failed; None if none did."""
    return next((row["cause"] for row in rows if row["passed"] is False), None)


def sentence(rows: Sequence[dict[str, Any]]) -> str:
    """The diagnosis in words: the likely root, what may follow from it, what else is wrong, what could not be judged."""
    first = root(rows)
    failed = [row for row in rows if row["passed"] is False]
    unjudged = [row["cause"] for row in rows if row["passed"] is None]
    parts = [f"{sum(row['passed'] is True for row in rows)} of {len(rows)} known causes are ruled out."]
    if first:
        main = failed[0]
        parts.append(f"Likely root: {first} ({main['figure']}). To do: {main['do']}.")
        follow = [row["cause"] for row in failed[1:] if row["consequence_of"]]
        own = [row["cause"] for row in failed[1:] if not row["consequence_of"]]
        parts += [f"What may follow from it: {', '.join(follow)}."] * bool(follow) + [f"Wrong besides: {', '.join(own)}."] * bool(own)
    else:
        parts.append("None is at fault: what remains is how much data of the evaluation's kinds there was, and for how long it trained.")
    return " ".join(parts + [f"Not judged: {', '.join(unjudged)}."] * bool(unjudged))


def checks(rows: Sequence[dict[str, Any]]) -> list[tuple[str, bool | None, str, str]]:
    """The rows as `pages.checks` shows them; a line that may follow from another says so where it says what to do."""
    shown = []
    for row in rows:
        after = f"may follow from {row['consequence_of']}: mend that first; else " if row["consequence_of"] else ""
        shown.append((row["cause"], row["passed"], row["figure"], after + row["do"]))
    return shown
