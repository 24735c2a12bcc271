"""What a training run is made of, looked at before and after it: one row step by step, two ways, the gate."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from helpers import draft, speculative, training, ttt
from helpers.params import Parameters
from helpers.verifier import Verifier

PASS = 0.8  # share of its ceiling a row learnt by heart has to reach: bfloat16 leaves ties, a broken chain stays far below


def packed(row: dict[str, torch.Tensor], hidden_size: int, size: int = 0) -> dict[str, torch.Tensor]:
    """A batch that holds one dataset row alone, shifted as the trainer shifts it: [1, N] each, padded to `size` if larger."""
    from speculators.train.data import CollateFn

    size = max(size, len(row["input_ids"]) - 1)
    batch = CollateFn(size, hidden_size, dtype=row["hidden_states"].dtype, preprocess=training.Preparation())([dict(row)])
    return {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}


def one_row(data: Any, i: int, parameters: Parameters, hidden_size: int) -> dict[str, torch.Tensor]:
    """Row i of a dataset as a batch of `train_batch_tokens`."""
    return packed(data[i], hidden_size, parameters.train_batch_tokens)


def gate_row(data: Any, inside: Sequence[bool] | None, *, among: int = 64) -> int:
    """Index of the row to overfit: the longest single answer, among the first rows, that the draft vocabulary holds whole.

    A short answer would make an easy gate, and a token the draft cannot propose ends a chain however well it has learnt.
    Where no row is whole, the longest answer is taken; the gate is held against its ceiling then.

    Args:
        inside: per verifier token, whether the draft can propose it; None when all.
    """
    known = None if inside is None else torch.as_tensor(inside)

    def worth(i: int) -> tuple[bool, bool, int]:
        mask = data[i]["loss_mask"].bool()
        answer = data[i]["input_ids"][mask]
        single = bool(mask[int(mask.long().argmax()) :].all())  # a question between two answers is never trained
        return single, known is None or bool(known[answer].all()), len(answer)

    return max(range(min(among, len(data))), key=worth)


def ceiling(ids: Sequence[int], first: int, k: int, inside: Sequence[bool] | None) -> float:
    """Accept length, over whole steps, of a draft that is right wherever its vocabulary allows."""
    lengths, at = [], first
    while at + 1 < len(ids):
        room = min(k, len(ids) - 1 - at)
        m = next((i for i in range(room) if inside is not None and not inside[ids[at + 1 + i]]), room)
        if at + m + 1 < len(ids):
            lengths.append(m + 1)
        at += m + 1
    return sum(lengths) / max(1, len(lengths))


def proposals(model: Any, batch: dict[str, torch.Tensor], parameters: Parameters) -> tuple[float, list[list[int]]]:
    """Loss of a batch, and the draft's first choice per TTT step in the verifier's ids ([N] each, -1 where none)."""
    drafted, loss, _ = _seen(model, batch, parameters)
    ids = draft.verifier_ids(model)
    return loss.item(), [torch.where(d[0] >= 0, ids[d[0].clamp_min(0)], -1).tolist() for d in drafted]


def by_step(model: Any, batch: dict[str, torch.Tensor], parameters: Parameters) -> list[dict[str, Any]]:
    """Per TTT step of a batch: its loss, the supervised targets, and how many the draft's first choice meets."""
    _, _, metrics = _seen(model, batch, parameters)
    found = []
    for j in range(parameters.train_ttt_steps):
        hits, targets = (int(metrics[f"full_acc_{j}_{part}"]) for part in ("sum", "total"))
        found.append({"TTT step": j, "loss": metrics[f"loss_{j}_sum"].item(), "targets": targets, "right": hits})
    return found


def _seen(model: Any, batch: dict[str, torch.Tensor], parameters: Parameters) -> Any:
    """(drafted ids, loss, metrics) of our step in evaluation mode, without gradient."""
    was_training = model.training
    with torch.no_grad(), training.autocast(batch["hidden_states"].device, parameters):
        found = ttt.forward(model.eval(), **batch, **training.step_arguments(parameters))
    model.train(was_training)
    return found


def walk(batch: dict[str, torch.Tensor], guesses: Sequence[Sequence[int]], tokenizer: Any, *, rows: int = 10) -> list[dict[str, Any]]:
    """The first supervised positions as text: what the draft is given, what the verifier says next, what the draft says.

    Args:
        batch: from `one_row`; guesses: from `proposals`.
    """
    ids, mask = batch["input_ids"][0].tolist(), batch["loss_mask"][0].tolist()

    def text(i: int) -> str:
        return "" if not 0 <= i < len(ids) else repr(tokenizer.decode([ids[i]]))

    def said(j: int, i: int) -> str:
        return "—" if guesses[j][i] < 0 else repr(tokenizer.decode([guesses[j][i]]))

    table = []
    for i in [i for i, m in enumerate(mask) if m][:rows]:
        row = {"given": text(i), "verifier then says": " ".join(text(i + 1 + j) for j in range(len(guesses)))}
        table.append(row | {f"draft, step {j + 1}": said(j, i) for j in range(len(guesses))})
    return table


def two_ways(config: Any, words: Any, batch: dict[str, torch.Tensor], parameters: Parameters) -> list[dict[str, Any]]:
    """Loss and gradient norms of the library's forward and of the fast step on one batch, float32, same weights."""
    model = draft.build(config, words.d2t, words.t2d, seed=parameters.seed, train_head=parameters.train_head).train()
    if config.transformer_layer_config._attn_implementation == "simple_flex_attention" and batch["input_ids"].device.type == "cpu":
        return []  # flex has no backward on a CPU, so there is nothing to hold the fast step against
    valid = int((batch["document_ids"] >= 0).sum())
    batch = {k: (v[:, :valid].float() if v.is_floating_point() else v[:, :valid]) for k, v in batch.items()}
    arguments = training.step_arguments(parameters)

    def run(forward: Any) -> dict[str, float]:
        model.zero_grad()
        _, loss, _ = forward(**batch, **arguments)
        loss.backward()
        norms = {f"gradient norm, {n}": p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.item()} | norms

    library, fast = run(model), run(lambda **kwargs: ttt.forward(model, **kwargs))
    return [
        {
            "quantity": name,
            "library": library[name],
            "fast step": fast[name],
            "relative difference": abs(fast[name] - library[name]) / max(abs(library[name]), 1e-12),
        }
        for name in library
    ]


def gate(
    config: Any, words: Any, verifier: Verifier, row: dict[str, torch.Tensor], folder: Path, parameters: Parameters, *, steps: int = 400
) -> dict[str, Any]:
    """Overfit one row, save it, reload it, decode its prompt: the accept length has to come close to K + 1.

    A chain of wrong layer ids, a shifted mask, a lost final norm, a wrong rotary base or a vocabulary map of another run
    cannot pass it, however well its loss falls.

    Args:
        row: one row of the training dataset; folder: scratch.
        steps: most steps; it stops earlier once nearly every chain of the row has been right five times running.

    Returns:
        loss before and after, steps, accept length replayed over the stored states and decoded live, and the K + 1 they are
        held against.
    """
    model = draft.build(config, words.d2t, words.t2d, seed=parameters.seed, train_head=parameters.train_head).to(verifier.device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, betas=(0.9, 0.95))
    batch = {name: x.to(verifier.device) for name, x in packed(row, model.hidden_size).items()}
    arguments = training.step_arguments(parameters) | {"ttt_steps": max(parameters.train_ttt_steps, parameters.speculative_tokens)}
    heads = [f"cond_acc_{j}" for j in range(arguments["ttt_steps"])]
    losses, right = [], 0
    while len(losses) < steps and right < 5:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (len(losses) + 1) / 10)
        with training.autocast(batch["hidden_states"].device, parameters):
            _, loss, metrics = ttt.forward(model, **batch, **arguments)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        # nearly every chain of the row right, five times running: learnt by heart, but for the verifier's own ties
        right = right + 1 if all(metrics[f"{h}_sum"] >= 0.98 * metrics[f"{h}_total"] for h in heads) else 0
    draft.save(copy.deepcopy(model).to(verifier.dtype), folder, attention="sdpa")
    drafter = speculative.Drafter(draft.load(folder, verifier.folder, dtype=verifier.dtype).to(verifier.device))
    k, first = parameters.speculative_tokens, int(row["loss_mask"].long().argmax())
    ids = row["input_ids"].tolist()
    # over the stored states first: decoded alone, a text may part from the stored one at a tie of the verifier
    replayed = speculative.replay(drafter, ids, row["hidden_states"], first, k)
    live = speculative.decode(verifier, [ids[:first]], max_tokens=min(len(ids) - first, 64), drafter=drafter, k=k)
    same = len(os.path.commonprefix([live.tokens[0], ids[first:]]))
    ends, at = [], 1
    for step in live.steps[0]:
        at += len(step["emitted"])
        ends.append(at)
    followed = [s for s, end in zip(live.steps[0], ends, strict=True) if end <= same]
    return {
        "loss before": losses[0],
        "loss after": losses[-1],
        "steps": len(losses),
        "accept length, replayed": _length(replayed),
        "accept length, live": _length(followed) if any(map(_whole, followed)) else None,
        "live tokens before a tie": same,
        "ceiling by vocabulary": ceiling(ids, first, k, drafter.inside),
        "K + 1": k + 1,
    }


def _whole(step: dict[str, Any]) -> bool:
    """Whether a step drafted and judged all it could: neither cut by the end of the text nor by the token limit."""
    return len(step["emitted"]) == step["accepted"] + 1


def _length(steps: Sequence[dict[str, Any]]) -> float:
    """Accept length over whole steps."""
    whole = [s for s in steps if _whole(s)]
    return sum(len(s["emitted"]) for s in whole) / max(1, len(whole))


SUSPECTS = (
    "in this order: layer ids (the audit of notebook 01), the mask and its shift, the final norm, rotary base and positions, "
    "the vocabulary map, the attention choice after reload, the norm flags"
)


def gate_checks(gate: dict[str, Any]) -> list[tuple[str, bool | None, Any, str]]:
    """The gate as checks; live decoding does not apply where its text left the stored one before a whole step."""
    most, live = gate["ceiling by vocabulary"], gate["accept length, live"]
    least = PASS * most
    replayed = gate["accept length, replayed"]
    return [
        (
            "an overfitted row is accepted, replayed over its stored states",
            replayed >= least,
            f"{replayed:.2f} of {most:.2f}",
            SUSPECTS,
        ),
        (
            "and decoded live with the verifier",
            None if live is None else live >= least,
            "its text parts at a tie" if live is None else f"{live:.2f} of {most:.2f}",
            SUSPECTS,
        ),
    ]
