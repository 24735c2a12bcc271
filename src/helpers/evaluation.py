"""The measurements of notebook 05: prompts in balance, losslessness with its ties, the K sweep, speeds interleaved."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from helpers import acceptance, comparison, costs, speculative
from helpers.chains import ChainRecord
from helpers.conversations import Prompt, prompt_ids, read_prompts
from helpers.errors import DataError
from helpers.params import Parameters
from helpers.speculative import Drafter
from helpers.verifier import Verifier


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


@torch.inference_mode()
def gap(verifier: Verifier, context: Sequence[int], one: int, other: int) -> tuple[float, float]:
    """Difference of the verifier's logits for two tokens after a context, from one plain forward pass, and the widest tie.

    A tie is up to four spacings of the dtype at the logits' size (bfloat16 between 16 and 32: 4 x 0.125): a pass over
    several tokens, a pass over one and the pass made here round differently, each by a spacing or so.
    """
    hidden = verifier.decoder(input_ids=torch.tensor([list(context)], device=verifier.device), use_cache=False).last_hidden_state[0, -1]
    logits = verifier.head(hidden).float()
    size = max(abs(float(logits[one])), abs(float(logits[other])), 2.0**-14)
    spacing = torch.finfo(verifier.dtype).eps * 2.0 ** math.floor(math.log2(size))
    return float(logits[one] - logits[other]), 4 * spacing


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


def lossless_float32(draft_model: Any, verifier: Verifier, found: Sequence[Prompt], parameters: Parameters) -> dict[str, Any]:
    """Speculative and plain greedy answers of the same verifier in float32, where no rounding excuses a difference."""
    exact = verifier.in_dtype(torch.float32)
    drafter = Drafter(copy.deepcopy(draft_model).float())
    ids = first_turns(exact, found, parameters.lossless_tokens, parameters.max_sequence_tokens)
    options = {"max_tokens": parameters.lossless_tokens, "batch_rows": parameters.evaluation_batch_rows}
    plain = speculative.decode(exact, ids, **options)
    chained = speculative.decode(exact, ids, drafter=drafter, k=parameters.speculative_tokens, **options)
    return compare_outputs(exact, found, ids, plain.tokens, chained.tokens)


def sweep(verifier: Verifier, drafter: Drafter, found: Sequence[Prompt], parameters: Parameters) -> list[dict[str, Any]]:
    """Accept length with interval for each K: rows {k, value, low, high, n, steps}."""
    chosen = list(found)[: parameters.sweep_prompts]
    ids = first_turns(verifier, chosen, parameters.evaluation_max_tokens, parameters.max_sequence_tokens)
    rows = []
    for k in parameters.evaluation_k_values:
        made = speculative.decode(
            verifier, ids, max_tokens=parameters.evaluation_max_tokens, drafter=drafter, k=k, batch_rows=parameters.evaluation_batch_rows
        )
        rows.append(
            {"k": k} | acceptance.accept_length(made.records([p.id for p in chosen], [p.category for p in chosen], drafter.inside)).row()
        )
    return rows


@torch.inference_mode()
def _generate(verifier: Verifier, ids: list[int], max_tokens: int) -> tuple[float, int]:
    began = time.perf_counter()
    out = verifier.model.generate(torch.tensor([ids], device=verifier.device), max_new_tokens=max_tokens, do_sample=False)
    return time.perf_counter() - began, out.shape[1] - len(ids)


def speeds(
    verifier: Verifier, drafter: Drafter, found: Sequence[Prompt], parameters: Parameters, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Decoding one prompt at a time, every method on a prompt before the next prompt: plain, each K, transformers' generate.

    Returns:
        `methods`: rows {method, k, tokens_per_second, speedup, low, high (of the speedup, over prompts)}; `rounds`: seconds
        of draft, verify and overhead per step by K; `plain_step`: seconds of one plain step; `plain_tokens_per_second`.
    """
    chosen = list(found)[: parameters.speed_prompts]
    ids = first_turns(verifier, chosen, parameters.speed_tokens, parameters.max_sequence_tokens)
    methods: list[tuple[str, int]] = [("plain", 0), *[(f"speculative, K = {k}", k) for k in parameters.evaluation_k_values]]
    seconds: dict[str, list[float]] = {name: [] for name, _ in methods} | {"transformers generate": []}
    emitted: dict[str, list[int]] = {name: [] for name in seconds}
    parts: dict[int, list[dict[str, float]]] = {k: [] for _, k in methods}
    rounds: dict[int, list[int]] = {k: [] for _, k in methods}
    speculative.decode(verifier, ids[:1], max_tokens=8, drafter=drafter, k=2)  # first use allocates and picks kernels
    for start in ids:
        for name, k in methods:
            made = speculative.decode(verifier, [start], max_tokens=parameters.speed_tokens, drafter=drafter, k=k)
            seconds[name].append(sum(v for part, v in made.seconds.items() if part != "prefill"))
            emitted[name].append(made.emitted)
            parts[k].append(made.seconds)
            rounds[k].append(len(made.steps[0]))
        whole, made_tokens = _generate(verifier, start, parameters.speed_tokens)
        # generate offers no time without prefill, so plain decoding's prefill of the same prompt is taken off
        seconds["transformers generate"].append(max(whole - parts[0][-1]["prefill"], 1e-9))
        emitted["transformers generate"].append(made_tokens - 1)
    rows = []
    base = sum(emitted["plain"]) / sum(seconds["plain"])
    ks = dict(methods)
    for name, spent in seconds.items():
        # speedup resampled over prompts: the ratio of two rates, each a ratio of sums
        rate = sum(emitted[name]) / sum(spent)
        low, high = _speedup_interval(emitted[name], spent, emitted["plain"], seconds["plain"], parameters.seed)
        rows.append({"method": name, "k": ks.get(name), "tokens_per_second": rate, "speedup": rate / base, "low": low, "high": high})
    split = [
        {"k": k} | {part: sum(p[part] for p in parts[k]) / max(1, sum(rounds[k])) for part in ("draft", "verify", "overhead")}
        for _, k in methods
        if k
    ]
    steps = [s / max(1, n) for s, n in zip(seconds["plain"], rounds[0], strict=True)]
    report(f"{len(ids)} prompts, one at a time, {len(seconds)} methods each: plain {base:.1f} tokens per second")
    return {"methods": rows, "rounds": split, "plain_step": median(steps), "plain_tokens_per_second": base}


def _speedup_interval(tokens, spent, base_tokens, base_spent, seed: int) -> tuple[float | None, float | None]:
    if len(tokens) < 2:
        return None, None
    pick = np.random.default_rng(seed).integers(0, len(tokens), (2000, len(tokens)))
    a, b, c, d = (np.asarray(x, float)[pick].sum(1) for x in (tokens, spent, base_tokens, base_spent))
    low, high = np.percentile((a / b) / (c / d), [2.5, 97.5])
    return float(low), float(high)


def cost_rows(speed: dict[str, Any], conditional: Sequence[float | None], ks: Sequence[int]) -> tuple[costs.Costs, list[dict[str, Any]]]:
    """Costs fitted to measured rounds, and the model's rows for `ks`."""
    split = speed["rounds"]
    fitted = costs.fit_costs(
        [speed["plain_step"]],
        {r["k"]: [r["draft"]] for r in split},
        {r["k"] + 1: [r["verify"]] for r in split},
        [r["overhead"] for r in split],
    )
    # a position never reached has no conditional acceptance; the model then expects nothing there
    return fitted, costs.speedup_model([c or 0.0 for c in conditional], fitted, ks)


def measured(
    verifier: Verifier, found: Sequence[Prompt], ids: Sequence[list[int]], drafter: Drafter, k: int, *, max_tokens: int, batch_rows: int
) -> dict[str, Any]:
    """The measured run: chain speculation, plain decoding of the same prompts, and both outputs held against each other."""
    options = {"max_tokens": max_tokens, "batch_rows": batch_rows}
    chained = speculative.decode(verifier, ids, drafter=drafter, k=k, **options)
    plain = speculative.decode(verifier, ids, **options)
    outputs = compare_outputs(verifier, found, ids, plain.tokens, chained.tokens)
    made = chained.records([p.id for p in found], [p.category for p in found], drafter.inside)
    return {"records": made, "outputs": outputs}


def results(
    records: Sequence[ChainRecord],
    sweep_rows: Sequence[dict[str, Any]],
    speed: dict[str, Any],
    exact: dict[str, Any],
    outputs: dict[str, Any],
    predicted: Sequence[float],
    parameters: Parameters,
) -> dict[str, Any]:
    """The run in numbers, as `summary.json` keeps them."""
    overall = acceptance.accept_length(records, seed=parameters.seed)
    known = acceptance.summary(records, seed=parameters.seed)
    fastest = max((r for r in speed["methods"] if r["k"]), key=lambda r: r["speedup"])
    return {
        "accept_length": overall.value,
        "accept_length_interval": [overall.low, overall.high],
        "speedup": fastest["speedup"],
        "speedup_interval": [fastest["low"], fastest["high"]],
        "speedup_k": fastest["k"],
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
        "tokens_per_second_plain": speed["plain_tokens_per_second"],
        "tokens_per_second_speculative": fastest["tokens_per_second"],
        "speedup_by_k": {str(r["k"]): r["speedup"] for r in speed["methods"] if r["k"]},
        "float32_identical": exact["identical"],
        "float32_prompts": exact["prompts"],
        "outputs_identical": outputs["identical"],
        "outputs_ties": outputs["ties"],
    }


def checks(exact: dict[str, Any], outputs: dict[str, Any], overall: acceptance.Estimate) -> list[tuple[str, bool | None, Any, str]]:
    """Gates of the notebook. A draft that is never accepted is a result, told but no reason to stop: the pages say why."""
    caches = "report it: caches or positions of the decoding loop are wrong"
    worst = max((abs(r["gap"]) for r in outputs["rows"] if r["gap"] is not None), default=0.0)
    return [
        (
            "float32: output unchanged, token for token",
            exact["identical"] == exact["prompts"],
            f"{exact['identical']} of {exact['prompts']} prompts",
            caches,
        ),
        ("differences in the run's dtype are ties", outputs["passed"], f"{outputs['ties']} ties, widest gap {worst:.3f}", caches),
        (
            "the draft is accepted at all",
            True if overall.value > 1.0 else None,
            str(overall) if overall.value > 1.0 else f"{overall}: nothing was accepted",
            "look at notebook 04: gate, curve and held-out accept length",
        ),
    ]
