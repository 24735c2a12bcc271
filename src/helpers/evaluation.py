"""The measurements of notebook 05: prompts in balance, losslessness with its ties, live acceptance, chains read again at other K."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from helpers import acceptance, comparison, distribution, draft, files, replaying, speculative, speeds
from helpers.chains import ChainRecord, flatten
from helpers.conversations import Prompt, prompt_ids, read_prompts
from helpers.drafting import Drafter
from helpers.errors import DataError, MissingInput
from helpers.extraction import batches
from helpers.params import Parameters, resolve
from helpers.replaying import Foreseen
from helpers.verifier import DTYPES, Verifier

READ = 4096  # tokens in one pass of `reread`, padding included
# Rounding moves a logit by more than a tie once in a while among thousands of tokens; a wrong cache or position moves most
# of them by far more.
APART = 1e-3


def prompts(path: str, limit: int = 0) -> list[Prompt]:
    """Evaluation prompts in the file's own order, so that a limit keeps what the file balances.

    Raises:
        DataError: the file holds fewer than two categories, by which the results are told apart.
    """
    found = sorted(read_prompts(path).rows, key=lambda p: p.line)
    found = found[: limit or None]
    if len({p.category for p in found}) < 2:
        raise DataError(
            f"only {len({p.category for p in found})} category among {len(found)} prompts",
            where="parameter prompts_evaluation",
            do="give every prompt a category, and at least two of them",
        )
    return found


def draft_folder(parameters: Parameters, own: Path) -> Path:
    """Where the draft to measure lies: the one that `evaluation_draft` names, else this run's `own`.

    Raises:
        MissingInput: it names no folder with a config.json.
    """
    if not parameters.evaluation_draft:
        return own
    folder = resolve(parameters.evaluation_draft)
    if not (folder / "config.json").is_file():
        raise MissingInput(
            "no config.json there, so no draft to measure",
            where=f"parameter evaluation_draft, {files.shown(folder)}",
            do="name the folder of a speculators or EAGLE checkpoint, or leave it empty for this run's draft",
        )
    return folder


def first_turns(verifier: Verifier, found: Sequence[Prompt], max_tokens: int, max_sequence_tokens: int) -> list[list[int]]:
    """Token ids of each prompt's first turn with the generation prompt.

    Raises:
        DataError: a prompt leaves no room for its answer.
    """
    ids = [prompt_ids(verifier.tokenizer, p.turns()[0], p.tools, row=p.id) for p in found]
    long = [f"{p.id} ({len(i)} tokens)" for p, i in zip(found, ids, strict=True) if len(i) + max_tokens > max_sequence_tokens]
    if long:
        raise DataError(
            f"{len(long)} prompt(s) leave no room for {max_tokens} tokens within {max_sequence_tokens}: {', '.join(long[:5])}",
            where="an evaluation prompt, or the example",
            do="raise max_sequence_tokens or shorten it",
        )
    return ids


def gap(verifier: Verifier, context: Sequence[int], one: int, other: int) -> tuple[float, float]:
    """Difference of the verifier's logits for two tokens after a context, from one plain forward pass, and the widest tie.

    A tie is up to four spacings of the dtype (see `tie`; bfloat16 between 16 and 32: 4 x 0.125): a pass over
    several tokens, a pass over one and the pass made here round differently, each by a spacing or so.
    """
    logits = verifier.next_logits(context).float()
    return float(logits[one] - logits[other]), tie(verifier.dtype, float(logits[one]), float(logits[other]))


def tie(dtype: torch.dtype, one: float, other: float) -> float:
    """The widest gap between two logits that is a tie: four spacings of the dtype at their size."""
    size = max(abs(one), abs(other), 2.0**-14)
    return 4 * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(size))


def compare_outputs(
    verifier: Verifier, found: Sequence[Prompt], ids: Sequence[list[int]], plain: Sequence[list[int]], chained: Sequence[list[int]]
) -> dict[str, Any]:
    """Plain and speculative answers held against each other; each first difference with the verifier's logit gap there."""
    pairs = []
    for prompt, start, a, b in zip(found, ids, plain, chained, strict=True):
        pair: dict[str, Any] = {"id": prompt.id, "plain": a, "speculative": b}
        at = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), None)
        if at is not None:
            pair["gap"], pair["allowed"] = gap(verifier, [*start, *a[:at]], a[at], b[at])
        pairs.append(pair)
    return comparison.losslessness(pairs)


def lossless(draft_model: Any, verifier: Verifier, found: Sequence[Prompt], parameters: Parameters, dtype: str = "") -> dict[str, Any]:
    """Speculative and plain greedy answers of the same prompts from one prefill, held against each other.

    Args:
        dtype: compute in this one; in float32 no rounding excuses a difference. Empty takes the verifier's own.

    Returns:
        What `comparison.losslessness` gives, and `rates`: {batch, plain, speculative} in tokens per second, without prefill.
    """
    if dtype and DTYPES[dtype] != verifier.dtype:
        verifier, draft_model = verifier.in_dtype(DTYPES[dtype]), draft.in_dtype(copy.deepcopy(draft_model), DTYPES[dtype])
    drafter, batch = Drafter(draft_model), min(len(found), parameters.evaluation_batch_rows)
    ids = first_turns(verifier, found, parameters.lossless_tokens, parameters.max_sequence_tokens)
    plain, chained = speculative.decode_both(
        verifier, ids, max_tokens=parameters.lossless_tokens, drafter=drafter, k=parameters.speculative_tokens, batch_rows=batch
    )
    outputs = compare_outputs(verifier, found, ids, plain.tokens, chained.tokens)
    spent = [sum(v for part, v in made.seconds.items() if part != "prefill") for made in (plain, chained)]
    rates = {"batch": batch, "plain": plain.emitted / max(spent[0], 1e-9), "speculative": chained.emitted / max(spent[1], 1e-9)}
    return outputs | {"rates": rates}


def measured(
    verifier: Verifier, found: Sequence[Prompt], ids: Sequence[list[int]], drafter: Drafter, k: int, **options: Any
) -> list[ChainRecord]:
    """Chain records of live speculation on these prompts; `options` are those of `speculative.decode`."""
    made = speculative.decode(verifier, ids, drafter=drafter, k=k, **options)
    return made.records([p.id for p in found], [p.category for p in found], drafter.inside)


def untrained(draft_model: Any, verifier: Verifier, seed: int) -> Drafter:
    """A draft of the same config and vocabulary with new random weights: what training has to beat."""
    # a draft of the whole vocabulary has no maps, and its new one ignores what it is given
    maps = [torch.zeros(0) if m is None else m.cpu() for m in (draft_model.d2t, draft_model.t2d)]
    model = draft.build(draft_model.config, *maps, seed=seed)
    return Drafter(draft.in_dtype(model, verifier.dtype).to(verifier.device).eval())


@torch.inference_mode()
def reread(
    verifier: Verifier,
    ids: Sequence[list[int]],
    records: Sequence[ChainRecord],
    drafters: Mapping[str, tuple[Drafter, int]],
    foreseen_rows: int,
) -> dict[str, Any]:
    """One plain pass over the answers that speculation gave: are the tokens the verifier's, and what would other chains do?

    The pass knows nothing of drafts, caches or batches of decoding. Its logits judge every emitted token; its hidden states
    are those that notebook 01 would store, over which each draft's chains are replayed.

    Args:
        records: greedy ones, with one prompt of `ids` each. drafters: name → (draft, K to foresee).
        foreseen_rows: replay chains over the first so many answers; all are judged.

    Returns:
        `tokens` judged, `first` (how many are the pass's own first choice), `ties`, `apart` (neither), `widest` gap between
        the logits of first choice and emitted token; `foreseen`: name → rows of `Foreseen.row`.
    """
    aux = list(next(iter(drafters.values()))[0].config.eagle_aux_hidden_state_layer_ids)
    rows = [[*prompt, *record["tokens"]] for prompt, record in zip(ids, records, strict=True)]
    found: dict[str, Any] = {"tokens": 0, "first": 0, "ties": 0, "apart": 0, "widest": 0.0}
    foreseen: dict[str, list[Any]] = {name: [None] * min(len(rows), foreseen_rows) for name in drafters}
    for batch in batches([len(row) for row in rows], budget=READ):
        states = verifier.states(verifier.padded([rows[i] for i in batch]), aux)
        for b, i in enumerate(batch):
            start, length = len(ids[i]), len(rows[i])
            logits_AV = verifier.logits(states[b, start - 1 : length - 1, -1]).float()
            said = logits_AV.gather(1, torch.tensor(rows[i][start:], device=logits_AV.device)[:, None])[:, 0]
            gaps = logits_AV.amax(1) - said
            allowed = torch.tensor([tie(verifier.dtype, x, y) for x, y in zip(said.tolist(), logits_AV.amax(1).tolist(), strict=True)])
            ties = (gaps > 0) & (gaps.cpu() <= allowed).to(gaps.device)
            counts = {"tokens": len(gaps), "first": int((gaps == 0).sum()), "ties": int(ties.sum())}
            counts["apart"] = counts["tokens"] - counts["first"] - counts["ties"]
            found |= {name: found[name] + count for name, count in counts.items()}
            found["widest"] = max(found["widest"], float(gaps.max()))
            for name, (drafter, k) in drafters.items() if i < foreseen_rows else ():
                made = replaying.foresee(drafter, rows[i], states[b, :length, :-1].flatten(1), start, k)
                foreseen[name][i] = made.row()
    return found | {"foreseen": foreseen}


def replayed(
    found: Sequence[Mapping[str, Any]], records: Sequence[ChainRecord], k: int, inside: Sequence[bool] | None, confidence: float = 0.0
) -> list[ChainRecord]:
    """Records of the same answers with other chains, from rows of `reread`, of as many records as it foresaw."""
    rows = []
    for row, record in zip(found, records[: len(found)], strict=True):
        steps = replaying.walk(Foreseen.of(row), k, confidence)
        rows.append(flatten({**{n: record[n] for n in ("id", "category", "prompt_tokens", "tokens")}, "steps": steps}, inside))
    return rows


def sweep(
    found: Sequence[Mapping[str, Any]], records: Sequence[ChainRecord], ks: Sequence[int], inside: Sequence[bool] | None, seed: int
) -> list[dict[str, Any]]:
    """Accept length with interval for each K, replayed over the same answers: rows {k, value, low, high, n, steps}."""
    return [{"k": k} | acceptance.accept_length(replayed(found, records, k, inside), seed=seed).row() for k in ks]


def results(
    records: Sequence[ChainRecord],
    sweep_rows: Sequence[dict[str, Any]],
    speed: dict[str, Any],
    exact: dict[str, Any],
    outputs: dict[str, Any],
    read: dict[str, Any],
    predicted: Sequence[float],
    parameters: Parameters,
) -> dict[str, Any]:
    """The run in numbers, as `summary.json` keeps them."""
    overall = acceptance.accept_length(records, seed=parameters.seed)
    known = acceptance.summary(records, seed=parameters.seed)
    by_name = {r["method"]: r for r in speed["methods"]}
    fastest = fastest_of(speed)
    return {
        "accept_length": overall.value,
        "accept_length_interval": [overall.low, overall.high],
        "speedup": fastest["speedup"],
        "speedup_interval": [fastest["low"], fastest["high"]],
        "speedup_k": fastest["k"],
        "speedup_confidence": fastest["confidence"],
        "speedup_over_generate": fastest["over_generate"],
        "k": parameters.speculative_tokens,
        "prompts": overall.n,
        "verification_steps": overall.steps,
        "accept_length_without_repetition": known["accept_length_without_repetition"],
        "repeating_rows": known["repeating_rows"],
        "predicted_accept_length_heldout": acceptance.predicted_accept_length(predicted),
        "acceptance_by_position": known["acceptance_by_position"],
        "misses_outside": known["misses_outside"],
        "misses_wrong": known["misses_wrong"],
        "accept_length_by_category": {r["category"]: r["value"] for r in acceptance.by_category(records, seed=parameters.seed)},
        "accept_length_by_k": {str(r["k"]): r["value"] for r in sweep_rows},
        "tokens_per_second_plain": speed["methods"][0]["tokens_per_second"],
        "tokens_per_second_speculative": fastest["tokens_per_second"],
        "tokens_per_second_generate": by_name[speeds.GENERATE]["tokens_per_second"],
        "tokens_per_second_prompt_lookup": by_name[speeds.LOOKUP]["tokens_per_second"],
        "speedup_by_k": measured_gains(speed),
        "float32_identical": exact["identical"],
        "float32_prompts": exact["prompts"],
        "outputs_identical": outputs["identical"],
        "outputs_ties": outputs["ties"],
        "tokens_first_choice": read["first"],
        "tokens_judged": read["tokens"],
    }


def fastest_of(speed: dict[str, Any]) -> dict[str, Any]:
    """The fastest row of `speeds.interleaved` that speculates with the trained draft."""
    return max((r for r in speed["methods"] if r["method"].startswith("speculative")), key=lambda r: r["speedup"])


def measured_gains(speed: dict[str, Any]) -> dict[int, float]:
    """Measured speedup of the trained draft by fixed K."""
    return {r["k"]: r["speedup"] for r in speed["methods"] if r["method"].startswith("speculative") and not r["confidence"]}


def checks(
    exact: dict[str, Any], outputs: dict[str, Any], read: dict[str, Any], sampled: dict[str, Any], overall: acceptance.Estimate
) -> list[tuple[str, bool | None, Any, str]]:
    """Gates of the notebook. A draft that is never accepted is a result, told but no reason to stop: the pages say why."""
    caches = "report it: caches or positions of the decoding loop are wrong"
    worst = max((abs(r["gap"]) for r in outputs["rows"] if r["gap"] is not None), default=0.0)
    p, told = (
        sampled["p_value"],
        f"p = {sampled['p_value']:.3f}, {sampled['draws']} draws" if sampled["p_value"] is not None else "one cell",
    )
    return [
        (
            "float32: output unchanged, token for token",
            exact["identical"] == exact["prompts"],
            f"{exact['identical']} of {exact['prompts']} prompts",
            caches,
        ),
        ("differences in the run's dtype are ties", outputs["passed"], f"{outputs['ties']} ties, widest gap {worst:.3f}", caches),
        (
            "every emitted token is the verifier's first choice or a tie",
            read["apart"] <= APART * read["tokens"],
            f"{read['first']:,} first choices and {read['ties']:,} ties among {read['tokens']:,}, widest gap {read['widest']:.3f}",
            caches,
        ),
        (
            "sampled: first tokens have the verifier's distribution",
            None if p is None else p > distribution.SIGNIFICANT,
            told,
            "report it: the rejection rule or the map of the draft vocabulary is wrong",
        ),
        (
            "the draft is accepted at all",
            True if overall.value > 1.0 else None,
            str(overall) if overall.value > 1.0 else f"{overall}: nothing was accepted",
            "look at notebook 04: gate, curve and held-out accept length",
        ),
    ]
