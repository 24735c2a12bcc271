"""The same draft inside vLLM: its count of every verification step beside ours, on the same prompts.

What is counted at the end of an answer. vLLM judges every drafted slot of a step and adds the agreed ones to its counters
before it cuts the step at an end-of-turn token or at the length limit; live decoding here does the same, replay does not
(it has no text there). Steps are therefore compared in both ways: as counted, and without slots past the end, which are
worked out from the tokens vLLM returned: a step emits accepted + 1 of them, the last one what is left. In bfloat16 two
engines part at ties of the verifier; a third comparison ends where the texts do.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers import acceptance, comparison, draft, evaluation, exports, files, manifest, speculative
from helpers import verifier as verifiers
from helpers.chains import ChainRecord, check
from helpers.conversations import Prompt
from helpers.errors import EngineError, MissingInput
from helpers.launcher import Engine, engine, interpreter
from helpers.params import STAGES, Parameters
from helpers.verifier import Verifier

WITHIN = 0.03  # acceptance per position may differ by so much: rounding turns ties, and the texts part there
INSIDE, SAME = " inside the answer", " same text"  # suffixes of the columns of `positions`
FEWEST = 60  # prompts, for a difference of that size to mean something
FORMS = {"speculators": "vllm-speculators", "eagle": "vllm-eagle"}  # what vLLM reads, and the contract; the first is compared with ours


def records(
    found: Sequence[Prompt], ids: Sequence[Sequence[int]], served: dict[str, Any], inside: Sequence[bool] | None
) -> list[ChainRecord]:
    """vLLM's answers as chain records: what each step emitted is worked out from the tokens it returned.

    Args:
        served: `Engine.result`; inside: per verifier token, whether the draft can propose it.

    Raises:
        EngineError: steps and tokens, or steps and vLLM's own totals, do not add up.
    """
    made = []
    for prompt, asked, row in zip(found, ids, served["rows"], strict=True):
        tokens, emitted, miss, at = row["tokens"], [], [], 1
        for accepted, drafted in zip(row["accepted"], row["drafted"], strict=True):
            emitted.append(min(accepted + 1, len(tokens) - at))
            at += emitted[-1]
            refused = accepted < drafted and emitted[-1] == accepted + 1
            miss.append("" if not refused else "wrong" if inside is None or inside[tokens[at - 1]] else "outside")
        if at != len(tokens) or min(emitted, default=1) < 1:
            raise EngineError(
                f"{len(emitted)} verification steps that accepted {sum(row['accepted'])} tokens cannot have given {len(tokens)} tokens",
                where=f"vLLM's answer to prompt {prompt.id}",
                do="this vLLM decodes some steps without a draft: compare with the version in scripts/vllm-requirements.txt",
            )
        record = ChainRecord(id=prompt.id, category=prompt.category, prompt_tokens=len(asked), tokens=list(tokens))
        record.update(drafted=row["drafted"], accepted=row["accepted"], emitted=emitted, miss=miss)
        made.append(record)
    check(made)
    _agree(made, served["counters"])
    return made


def _agree(made: Sequence[ChainRecord], counters: dict[str, list[int]]) -> None:
    """vLLM's totals are the sums of its steps; otherwise one of the two counts something else."""
    slots = max((d for r in made for d in r["drafted"]), default=0)
    sums = {
        "num_drafts": [sum(len(r["drafted"]) for r in made)],
        "num_draft_tokens": [sum(map(sum, (r["drafted"] for r in made)))],
        "num_accepted_tokens": [sum(map(sum, (r["accepted"] for r in made)))],
        "num_accepted_tokens_per_pos": [sum(a > i for r in made for a in r["accepted"]) for i in range(slots)],
    }
    for name, value in sums.items():
        if counters.get(name) != value:
            raise EngineError(
                f"vLLM's counter {name} is {counters.get(name)}, its steps add up to {value}",
                where="vLLM's statistics",
                do="report it with vLLM's version: the comparison rests on both counting the same",
            )


def shared(ours: Sequence[ChainRecord], theirs: Sequence[ChainRecord]) -> tuple[list[ChainRecord], list[ChainRecord]]:
    """Both sides' steps as far as they wrote the same text: whole steps before the first token in which they part.

    Beyond it the same draft guesses at another text, which says nothing of the engine; a draft that has learnt its prompts
    by heart then accepts less wherever the text is not the one it learnt.
    """
    cut: tuple[list[ChainRecord], list[ChainRecord]] = ([], [])
    for pair in zip(ours, theirs, strict=True):
        common = len(os.path.commonprefix([r["tokens"] for r in pair]))
        for record, kept in zip(pair, cut, strict=True):
            ends = 1 + np.cumsum(record["emitted"])
            steps = int((ends <= common).sum())
            part = {name: record[name][:steps] for name in ("drafted", "accepted", "emitted", "miss")}
            kept.append(ChainRecord(**record | part | {"tokens": record["tokens"][: 1 + sum(part["emitted"])]}))
    return cut


def positions(ours: Sequence[ChainRecord], theirs: Sequence[ChainRecord]) -> list[dict[str, Any]]:
    """Acceptance by position on both sides: rows {position, ours, vllm, difference}, the three again for two other counts.

    The plain names count as vLLM does; "… inside the answer" leaves out slots past its end, and "… same text" what comes
    after the texts have parted (None where that leaves no step).
    """
    rows: list[dict[str, Any]] = []
    same = shared(ours, theirs)
    for suffix, sides, past_end in (("", (ours, theirs), True), (INSIDE, (ours, theirs), False), (SAME, same, True)):
        known = all(any(r["emitted"] for r in side) for side in sides)
        counts = [acceptance.by_position(side, past_end=past_end) for side in sides] if known else [[{"rate": None}] * len(rows)] * 2
        for i, (a, b) in enumerate(zip(*counts, strict=True)):
            if not suffix:
                rows.append({"position": a["position"]})
            difference = b["rate"] - a["rate"] if known else None
            rows[i] |= {f"ours{suffix}": a["rate"], f"vllm{suffix}": b["rate"], f"difference{suffix}": difference}
    return rows


def texts(
    verifier: Verifier, found: Sequence[Prompt], ids: Sequence[list[int]], ours: Sequence[ChainRecord], theirs: Sequence[ChainRecord]
) -> dict[str, Any]:
    """Both answers held against each other: identical, parted at a tie of the verifier, or different; and steps where identical."""
    held = evaluation.compare_outputs(verifier, found, ids, [r["tokens"] for r in ours], [r["tokens"] for r in theirs])
    same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a["tokens"] == b["tokens"]]
    parted = [{name: row[name] for name in ("id", "position", "gap", "allowed", "tie")} for row in held["rows"]]
    return {
        "prompts": held["prompts"],
        "identical": held["identical"],
        "ties": held["ties"],
        "different": held["different"],
        "identical_with_identical_steps": sum(a["accepted"] == b["accepted"] for a, b in same),
        "parted": parted,
    }


def speed(drafted: Engine, plain: Engine, prompts: int, k: int) -> dict[str, Any]:
    """vLLM's tokens per second one prompt at a time, with and without the draft, in turns; prefill left out of both."""
    both = (drafted, plain)
    for one in both:
        one.one(0)  # the first use allocates
    taken = [[one.one(i) for one in both] for i in range(prompts)]
    rates = [sum(row["tokens"] - 1 for row in rows) / max(sum(row["seconds"] for row in rows), 1e-9) for rows in zip(*taken, strict=True)]
    return {
        "prompts": prompts,
        "k": k,
        "tokens_per_second_with_draft": rates[0],
        "tokens_per_second_plain": rates[1],
        "speedup": rates[0] / rates[1],
    }


def there() -> bool:
    """Whether an environment with vLLM is found, so that `measure` can run."""
    try:
        return interpreter().is_file()
    except MissingInput:
        return False


def measure(
    verifier: Verifier,
    draft_folder: Path,
    found: Sequence[Prompt],
    parameters: Parameters,
    *,
    python: str | Path = "",
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Decode the prompts here and in vLLM with one draft, and compare: counts by position, accept length, texts, vLLM's speed.

    vLLM runs the draft as `exports` writes it, in speculators' format and in EAGLE's; both have to accept the same.

    Raises:
        MissingInput, EngineError: see `launcher.engine`. DataError: the draft cannot be exported, or a prompt is too long.
    """
    where = interpreter(python)  # before anything that takes long
    k, most = parameters.speculative_tokens, parameters.evaluation_max_tokens
    ids = evaluation.first_turns(verifier, found, most, parameters.max_sequence_tokens)
    drafter = speculative.Drafter(draft.load(draft_folder, verifier.folder, dtype=verifier.dtype).to(verifier.device))
    rows, timed = parameters.evaluation_batch_rows, min(parameters.speed_prompts, len(ids))
    made = speculative.decode(verifier, ids, max_tokens=most, drafter=drafter, k=k, batch_rows=rows)
    ours = made.records([p.id for p in found], [p.category for p in found], drafter.inside)
    report(f"decoded {len(ids)} prompts here: {made.emitted + len(ids):,} tokens")
    options = {"max_tokens": most, "end_ids": verifier.end_ids, "dtype": parameters.verifier_dtype, "python": where}
    served: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for form, contract in FORMS.items():
            folder = Path(scratch, form)
            exports.export(draft_folder, form, folder, verifier.folder, only=[contract])
            with engine(verifier.folder, ids, draft_folder=folder, k=k, batch_rows=rows, **options) as drafted:
                spent, version = (drafted.result[name] for name in ("seconds", "vllm"))
                report(f"in vLLM {version}, {form} format: loaded in {spent['load']:.0f} s, decoded in {spent['decode']:.0f} s")
                if not served:
                    with engine(verifier.folder, ids[:timed], batch_rows=0, **options) as plain:
                        rates = speed(drafted, plain, timed, k)
                served[form] = drafted.result
    both = [records(found, ids, served[form], drafter.inside) for form in FORMS]
    theirs = both[0]
    lengths = [acceptance.accept_length(side, seed=parameters.seed).row() for side in (ours, theirs)]
    return {
        "vllm": version,
        "prompts": len(ids),
        "k": k,
        "positions": positions(ours, theirs),
        "accept_length": dict(zip(("ours", "vllm"), lengths, strict=True)),
        "difference": comparison.compare(theirs, ours, seed=parameters.seed),
        "formats": {form: served[form]["counters"] for form in FORMS},
        "formats_largest_difference": max(abs(row["difference"]) for row in positions(*both)),
        "texts": texts(verifier, found, ids, ours, theirs),
        "speed": rates,
        "rows": [
            {"id": a["id"], **{name: {key: r[key] for key in ("tokens", "accepted")} for name, r in (("ours", a), ("vllm", b))}}
            for a, b in zip(ours, theirs, strict=True)
        ],
        "seconds": {form: served[form]["seconds"] for form in FORMS},
    }


def of_run(parameters: Parameters, *, python: str | Path = "", report: Callable[[str], None] = print) -> dict[str, Any]:
    """`measure` for a run's best draft on its evaluation prompts; the result is kept as `served.json` in the run's folder.

    Raises:
        MissingInput, StaleInput, DamagedInput: notebook 04 has not finished for these parameters, or vLLM is not there.
    """
    interpreter(python)
    best = manifest.require(STAGES[3], parameters).folder / "best"
    model = verifiers.load(parameters.verifier, dtype=parameters.verifier_dtype)
    found = evaluation.prompts(parameters.prompts_evaluation, parameters.evaluation_prompts)
    result = measure(model, best, found, parameters, python=python, report=report)
    files.write_json(manifest.run_folder(parameters) / "served.json", result)
    return result


def checks(result: dict[str, Any]) -> list[tuple[str, bool | None, Any, str]]:
    """Gates: acceptance by position within 0.03 of ours, texts that part at ties alone, enough prompts to say so."""
    whole, same = (max(result["positions"], key=lambda row: abs(row[f"difference{suffix}"] or 0.0)) for suffix in ("", SAME))
    held, n = result["texts"], result["prompts"]
    gap = same[f"difference{SAME}"]
    reads = "compare the draft's config with what vLLM reads: layer ids, norm flags, RoPE base, d2t; then its `layers.0` weights"
    return [
        (
            f"acceptance by position in vLLM is within {WITHIN} of ours, as far as the texts are the same",
            None if gap is None else abs(gap) <= WITHIN,
            "no step in common" if gap is None else f"{gap:+.3f} at position {same['position']}",
            reads,
        ),
        (
            f"and within {WITHIN} over the whole answers",
            abs(whole["difference"]) <= WITHIN or None,
            f"{whole['difference']:+.3f} at position {whole['position']}",
            "the texts part at ties, and beyond them the draft guesses at another text: one that knows ours by heart loses there",
        ),
        (
            "texts part at ties of the verifier alone",
            held["different"] == 0,
            f"{held['identical']} of {n} identical, {held['ties']} part at a tie, {held['different']} elsewhere",
            "look at the gaps in `texts.parted`; beyond a few spacings the engine runs another model, template or dtype",
        ),
        (
            "both formats accept the same in vLLM",
            result["formats_largest_difference"] <= WITHIN / 3,
            f"{result['formats_largest_difference']:.3f} at most",
            "the same weights under other names: compare layer ids, `d2t` and the norm flags of the two exports",
        ),
        (
            f"on {FEWEST} prompts or more",
            n >= FEWEST or None,
            f"{n} prompts",
            "raise evaluation_prompts: on few prompts a difference of that size is chance",
        ),
    ]


def table(result: dict[str, Any]) -> str:
    """The comparison as text for a terminal."""
    groups = {"": "as vLLM counts", INSIDE: INSIDE.strip(), SAME: "while the text is the same"}
    lines = [" " * 8 + "".join(f"  {name:^27}" for name in groups.values())]
    lines.append(f"{'position':>8}" + f"  {'ours':>9}{'vLLM':>9}{'diff.':>9}" * len(groups))
    for row in result["positions"]:
        cells = []
        for suffix in groups:
            a, b, c = (row[f"{name}{suffix}"] for name in ("ours", "vllm", "difference"))
            cells.append(f"  {'—':>9}{'—':>9}{'—':>9}" if c is None else f"  {a:>9.3f}{b:>9.3f}{c:>+9.3f}")
        lines.append(f"{row['position']:>8}" + "".join(cells))
    a, b = result["accept_length"]["ours"]["value"], result["accept_length"]["vllm"]["value"]
    fast = result["speed"]
    lines.append(f"accept length: ours {a:.3f}, vLLM {b:.3f} ({result['prompts']} prompts, K = {result['k']})")
    lines.append(
        f"vLLM at batch 1 ({fast['prompts']} prompts): {fast['tokens_per_second_with_draft']:.1f} tokens per second with the draft, "
        f"{fast['tokens_per_second_plain']:.1f} without: {fast['speedup']:.2f} times"
    )
    return "\n".join(lines)


def verdict(result: dict[str, Any], report: Callable[[str], None] = print) -> int:
    """Print each gate with its figure; 0 when none failed, else 1."""
    found = checks(result)
    for name, passed, value, do in found:
        word = "note" if passed is None else "passed" if passed else "FAILED"
        report(f"{word:<7} {name}: {value}" + ("" if passed else f"\n        {do}"))
    return int(any(passed is False for _, passed, *_ in found))
