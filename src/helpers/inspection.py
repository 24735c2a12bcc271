"""What notebook 01 shows of the verifier and of its data: facts, a token by token view, speeds, shares, norms.

Shapes: T tokens, L stored slices, n decoder layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from helpers import canvas, masks, rendering
from helpers.acceptance import repeats
from helpers.answers import Answered, generate
from helpers.conversations import Prompt, PromptSet, Tokenised
from helpers.extraction import shard, shard_fault
from helpers.preflight import rate
from helpers.verifier import Verifier, portable

PROBE_TOKENS = 12  # read and then decoded by each row of the probe


def template_facts(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the chat template does around these messages, read off its rendering."""
    text = rendering.render(tokenizer, messages, generation_prompt=True)
    ids = rendering.encode(tokenizer, text)
    opening = text.removeprefix(rendering.render(tokenizer, messages))
    special = {i: t for t, i in rendering.specials(tokenizer).items()}
    alone = rendering.render(tokenizer, [{"role": "user", "content": "?"}])
    return {
        "opening of an answer": repr(opening),
        "special tokens it writes": sorted({special[i] for i in ids if i in special}),
        "begins with BOS": bool(ids) and ids[0] == tokenizer.bos_token_id,
        "adds a system prompt of its own": "system" in alone.partition("?")[0],
        "marks answers itself ({% generation %})": bool(masks.TAGS.search(rendering.template(tokenizer))),
        "template": f"{len(rendering.template(tokenizer)):,} characters",
    }


def token_rows(tokenizer: Any, row: Tokenised, *, around: int = 6) -> list[dict[str, Any]]:
    """The row token by token where context turns into answer: the last `around` tokens before, the first ones after."""
    first = row.loss_mask.index(1)
    shown = range(max(0, first - around), min(len(row.input_ids), first + around))
    texts = [repr(rendering.decode(tokenizer, [row.input_ids[i]])) for i in shown]
    return [
        {"position": i, "token": text, "id": row.input_ids[i], "trained on": bool(row.loss_mask[i])}
        for i, text in zip(shown, texts, strict=True)
    ]


def verifier_facts(verifier: Verifier) -> dict[str, Any]:
    """Where the verifier came from and what it is."""
    origin = verifier.folder / "origin.json"
    source = json.loads(origin.read_text(encoding="utf-8")) if origin.is_file() else {}
    config = verifier.config
    tied = verifier.head.weight.data_ptr() == verifier.decoder.embed_tokens.weight.data_ptr()
    return {
        "folder": portable(verifier.folder),
        **{key: source[key] for key in ("source", "file", "sha256", "licence") if key in source},
        "architecture": type(verifier.model).__name__,
        "parameters": sum(p.numel() for p in verifier.model.parameters()),
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "decoder layers, n": verifier.depth,
        "hidden size, H": config.hidden_size,
        "heads, key-value heads": [config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)],
        "vocabulary, V": f"{config.vocab_size:,} (tokenizer {len(verifier.tokenizer):,})",
        "head": "tied to the embeddings" if tied else "its own",
        "end-of-turn tokens": ", ".join(f"{i} {verifier.tokenizer.decode([i])}" for i in sorted(verifier.end_ids)),
    }


def layer_rows(layer_ids: Sequence[int], depth: int) -> list[dict[str, Any]]:
    """What each stored slice is: its layer id and place in a shard."""

    def what(k: int) -> str:
        return "token embeddings" if k == 0 else f"residual stream after {k} of {depth} decoder layers"

    rows = [{"slice": j, "layer id": k, "what": what(k), "used as": "input of the draft"} for j, k in enumerate(layer_ids)]
    last = f"residual stream after all {depth} layers, before the final norm"
    return [*rows, {"slice": len(rows), "layer id": depth, "what": last, "used as": "target: final norm and head make the logits"}]


def speeds(
    verifier: Verifier, prompts: Sequence[list[int]], rows: Sequence[Tokenised], layer_ids: list[int], *, batch_rows: int
) -> dict[str, float]:
    """Tokens per second of answering (at the run's batch) and of extraction, from a probe of seconds."""
    # prompts cut to their ends: reading them would take most of the probe, and is not what it measures
    batch = [rendering.prompt_ids(verifier.tokenizer, p.turns()[0], p.tools, row=p.id)[-PROBE_TOKENS:] for p in prompts[:batch_rows]]
    generate(verifier, batch[:1], max_tokens=1)
    start = time.perf_counter()
    made = sum(map(len, generate(verifier, batch, max_tokens=PROBE_TOKENS)))
    answering = made / max(time.perf_counter() - start, 1e-9)

    def forward(picked: list[list[int]]) -> None:
        width = max(map(len, picked))
        verifier.states(torch.tensor([row + [0] * (width - len(row)) for row in picked]), layer_ids)

    return {"answering": answering, "hidden states": rate(forward, rows, budget=1024)}


def answer_facts(answered: Sequence[Answered]) -> dict[str, Any]:
    """Counts and shares over all answers: how many ended, were cut, repeat themselves; how many turns were left unasked."""
    ids = [a for row in answered for _, a in row.turns]
    cut = sum(not row.ended for row in answered)  # an answer that was cut is the last of its conversation
    return {
        "conversations": len(answered),
        "answers": len(ids),
        "answer_tokens": sum(map(len, ids)),
        "longest_answer": max(map(len, ids)),
        "answers_ended_share": 1 - cut / len(ids),
        "answers_cut_share": cut / len(ids),
        "repeat_share": sum(map(repeats, ids)) / len(ids),
        "turns_not_asked": sum(len(row.prompt.turns()) - len(row.turns) for row in answered),
    }


def lengths_by_category(answered: Sequence[Answered]) -> dict[str, list[int]]:
    """Tokens of each answer by its prompt's category."""
    found: dict[str, list[int]] = {}
    for row in answered:
        found.setdefault(row.prompt.category, []).extend(len(a) for _, a in row.turns)
    return found


def prompt_rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Prompts by category, with those of several turns and of a system prompt counted."""
    found: dict[str, dict[str, Any]] = {}
    for p in prompts:
        row = found.setdefault(p.category, {"category": p.category, "prompts": 0, "several_turns": 0, "system_prompt": 0})
        row["prompts"] += 1
        row["several_turns"] += len(p.turns()) > 1
        row["system_prompt"] += p.messages[0]["role"] == "system"
    return sorted(found.values(), key=lambda row: -row["prompts"])


@torch.inference_mode()
def two_ways(verifier: Verifier, ids: Sequence[int], last_TH: torch.Tensor, *, at: int, top: int = 5) -> list[dict[str, Any]]:
    """The verifier's next tokens at position `at` computed twice: from the stored last state, and by the model itself.

    Args:
        ids: the row's token ids. last_TH: its stored states before the final norm.
    """
    rebuilt = verifier.logits(last_TH[None, at : at + 1].to(verifier.device))[0, 0].float()
    prefix = torch.tensor([list(ids[: at + 1])], device=verifier.device)
    real = verifier.model(input_ids=prefix, use_cache=False).logits[0, -1].float()
    rows = []
    for rank, (a, b) in enumerate(zip(rebuilt.topk(top).indices.tolist(), real.topk(top).indices.tolist(), strict=True), 1):
        text = [repr(verifier.tokenizer.decode([t])) for t in (a, b)]
        rows.append(
            {
                "rank": rank,
                "from the stored state": text[0],
                "logit": rebuilt[a].item(),
                "by the model": text[1],
                "its logit": real[b].item(),
            }
        )
    return rows


@torch.inference_mode()
def layer_norms(verifier: Verifier, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Length of the states of one row by layer 0..n: median over tokens, and the first token's."""
    layers = list(range(verifier.depth + 1))
    with verifier.capture(layers) as found:
        verifier.decoder(input_ids=torch.tensor([list(ids)], device=verifier.device), use_cache=False)
    norms = [found[k][0].float().norm(dim=-1) for k in layers]
    return [{"layer": k, "median": norm.median().item(), "first": norm[0].item()} for k, norm in zip(layers, norms, strict=True)]


def norms_figure(rows: Sequence[Mapping[str, Any]], chosen: Sequence[int], tokens: int) -> Figure:
    """Length of the states by layer, the stored layers marked; rows of `layer_norms`."""
    figure, (ax,) = canvas.canvas(height=3.2)
    layers, median = [r["layer"] for r in rows], [r["median"] for r in rows]
    ax.plot(layers, [r["first"] for r in rows], color=canvas.GREY, linestyle="--", label="first token")
    ax.plot(layers, median, color=canvas.BLUE, label="median over tokens")
    ax.plot(chosen, [median[k] for k in chosen], color=canvas.RED, marker="o", linestyle="none", label="stored")
    ax.set_yscale("log")
    canvas.label(
        ax,
        "layer id (0 = embeddings)",
        "length of the state (L2 norm)",
        f"States of the example by layer (n = {tokens:,} tokens)",
        key=True,
    )
    return figure


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def prompt_counts(found: PromptSet, taken: int) -> dict[str, int]:
    """Where every row of a prompt file went, once `taken` of the usable ones are used."""
    return found.counts | {"taken": taken, "beyond_limit": len(found.rows) - taken}


def results(
    verifier: Verifier, rows: Sequence[Tokenised], said: Mapping[str, Any], audited: Sequence[Mapping[str, Any]], training: int
) -> dict[str, Any]:
    """What notebook 01 hands on: sizes, shares and facts that later notebooks read from its manifest.

    Args:
        said: of `answer_facts`. audited: of `audit.audit`. training: rows to train on; the others, at the end, are held out.
    """
    tokens, supervised = sum(len(r.input_ids) for r in rows), sum(r.supervised for r in rows)
    return {
        "rows": len(rows),
        "training_rows": training,
        "heldout_rows": len(rows) - training,
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / tokens,
        **{name: said[name] for name in ("answers", "answer_tokens", "answers_ended_share", "repeat_share", "turns_not_asked")},
        "audited_rows": len(audited),
        "audit_top1": min(r["top1"] for r in audited),
        "audit_cosine": min(r["cosine"] for r in audited),
        "verifier_folder": portable(verifier.folder),
        "state_dtype": str(verifier.dtype).removeprefix("torch."),
        "num_layers": verifier.depth,
        "hidden_size": verifier.config.hidden_size,
        "vocab_size": verifier.config.vocab_size,
        "end_ids": sorted(verifier.end_ids),
    }


def gates(
    counts: Mapping[str, int], overlap: int, rows: Sequence[Tokenised], folder: Path, slices: int, hidden: int
) -> list[tuple[str, bool, str, str]]:
    """Checks of notebook 01 on prompts, rows and shards, for `pages.checks`; the audit brings its own.

    Args:
        counts: of `prompt_counts`. overlap: evaluation prompts that training asks too. folder: the dataset.
    """
    accounted = counts["found"] == counts["taken"] + counts["beyond_limit"] + counts["rejected"]
    mixed = sum(0 < r.supervised < len(r.input_ids) for r in rows)
    whole = sum(shard_fault(shard(folder, i), r.input_ids, slices, hidden) is None for i, r in enumerate(rows))
    again = "run this notebook again: shards that are not whole are made again"
    apart = "take these prompts out of one of the two files"
    return [
        (
            "every row of the prompt file is accounted for",
            accounted,
            f"{counts['found']:,} rows",
            "report this: it is a fault of the reader",
        ),
        ("no evaluation prompt is asked in training", overlap == 0, f"{overlap} are", apart),
        ("every row has context and supervised tokens", mixed == len(rows), f"{mixed:,} of {len(rows):,}", "see the masks in section 6"),
        ("every row has a whole shard", whole == len(rows), f"{whole:,} of {len(rows):,}", again),
    ]
