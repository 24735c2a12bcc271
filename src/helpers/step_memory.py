"""Peak memory of a training run from its sizes alone, before anything of them is built.

    peak = what stays + what a step saves for its backward + the largest passing tensors

*Stays*: float32 weights (trained ones, the frozen embeddings, both copies of the head), gradients (the library clears them
after the forward, so they are there while it runs), optimiser state (AdamW two moments, Muon one), the verifier's whole
head, the batch.

*Saved*, in the dtype of the arithmetic (c bytes a value) unless float32 is said. For every position at step 0 and for the
starts alone at later steps: the joined input of 2H values, k and v projected and k turned, the angles in float32; at step 0
also the projected state, and the joined input of the starts again. For the starts at every step: q and attention's output;
the state before and after the MLP in float32; the MLP's input, gate and up; the final norm's output and the gradient of the
loss by it. Once: a cast of every trained matrix (in float32, a copy of those that are stacked), and a trained head's gradient.

*Passing*: one block of rows of logits and what the loss makes of it, the casts of both heads; or the optimiser's own.

Only tensors are counted. A GPU's allocator and a CPU's keep freed blocks besides, so what is refused could not have run, and
what is let through may still need more (on a CPU up to half as much again was seen with glibc's own settings).

N tokens of a batch, M starts, K steps, H hidden, I width of the MLP, D draft vocabulary, V verifier's vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers import flash, headloss
from helpers.errors import WorkbookError
from helpers.params import Parameters

FLOAT = 4
FORMATS = dict.fromkeys(("this run", "Kimi-K2.5's draft"), lambda b: f"{b / 1e6:,.0f}")  # of `rows`, in MB


class Sizes(NamedTuple):
    """What decides the memory of a training step: the draft's shape, the batch's, and how it is trained."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    aux: int
    vocabulary: int
    draft_vocabulary: int
    tokens: int  # N: a batch is padded to it
    starts: int  # M: positions with a supervised target
    steps: int
    compute: int = 2  # bytes of a value of the arithmetic and of the stored states
    train_head: bool = False
    normed_input: bool = False  # norm_before_fc or fc_norm
    optimizer: str = "muon"
    dense: bool = False  # block 0 of attention by explicit scores, where no fused kernel serves it


# What is estimated beside every run: 56 heads of 128 and 8 key-value heads, since the verifier's latent attention gives none
# to copy, the MLP of its dense layers, and a batch of 8,192 tokens of which three quarters are answers.
KIMI_K2_5 = Sizes(
    hidden=7168,
    width=18432,
    heads=56,
    kv_heads=8,
    head_dim=128,
    layers=1,
    aux=3,
    vocabulary=163840,
    draft_vocabulary=32000,
    tokens=8192,
    starts=6144,
    steps=3,
)


def sizes(proposal: dict[str, Any], parameters: Parameters, *, starts: int, device: torch.device | None = None) -> Sizes:
    """Sizes of a run from the draft's config (notebook 03) and its parameters.

    Args:
        starts: supervised positions of the fullest batch.
    """
    layer, single = proposal["transformer_layer_config"], parameters.verifier_dtype == "float32"
    heads = layer["num_attention_heads"]
    dtype = torch.float32 if single else torch.bfloat16
    return Sizes(
        hidden=layer["hidden_size"],
        width=layer["intermediate_size"],
        heads=heads,
        kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        layers=layer["num_hidden_layers"],
        aux=len(proposal["eagle_aux_hidden_state_layer_ids"]),
        vocabulary=layer["vocab_size"],
        draft_vocabulary=proposal["draft_vocab_size"],
        tokens=parameters.train_batch_tokens,
        starts=min(starts, parameters.train_batch_tokens),
        steps=parameters.train_ttt_steps,
        compute=FLOAT if single else 2,
        train_head=parameters.train_head,
        normed_input=proposal["norm_before_fc"] or proposal.get("fc_norm", False),
        optimizer=parameters.train_optimizer,
        dense=device is not None and not flash.fused(device, dtype, layer["head_dim"]),
    )


def matrices(s: Sizes) -> dict[str, int]:
    """Values of the trained matrices by name; norms are left out (a few times H)."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    found = {"fc": s.aux * s.hidden * s.hidden}
    for i in range(s.layers):
        inputs = 2 * s.hidden if i == 0 else s.hidden
        found |= {f"{i}.q": inputs * q, f"{i}.k": inputs * kv, f"{i}.v": inputs * kv, f"{i}.o": q * s.hidden}
        found |= {f"{i}.{name}": s.hidden * s.width for name in ("gate", "up", "down")}
    return found


def _saved_by_layer(s: Sizes, index: int, j: int) -> int:
    """Bytes one decoder layer saves at TTT step j: its input rows are all positions at step 0, its queries' the starts.

    A layer below the last needs its output everywhere at step 0.
    """
    h, c, q, kv = s.hidden, s.compute, s.heads * s.head_dim, s.kv_heads * s.head_dim
    before = s.tokens if j == 0 else s.starts
    after = before if index + 1 < s.layers else s.starts
    again = after if before > after else 0
    total = (before + again) * ((2 if index == 0 else 1) * h * c + 2 * s.head_dim * FLOAT)  # input of the projections, angles
    total += 3 * before * kv * c + 2 * after * q * c + after * s.heads * FLOAT
    return total + 2 * after * h * FLOAT + after * (h + 2 * s.width) * c


def parts(s: Sizes) -> dict[str, int]:
    """Bytes by part; their sum is the expected peak of tensors on the device."""
    h, c, n, m, d = s.hidden, s.compute, s.tokens, s.starts, s.draft_vocabulary
    by_name = matrices(s)
    trained = sum(by_name.values()) + (d * h if s.train_head else 0)
    frozen = s.vocabulary * h + d * h * (1 if s.train_head else 2)
    moments = sum(by_name.values()) * (1 if s.optimizer == "muon" else 2) + (2 * d * h if s.train_head else 0)
    saved = n * h * c + sum(_saved_by_layer(s, i, j) for j in range(s.steps) for i in range(s.layers))
    saved += s.steps * 2 * m * h * c + (d * h * FLOAT if s.train_head else 0)
    if s.normed_input:
        saved += n * s.aux * h * c
    stacked = sum(v for name, v in by_name.items() if name.split(".")[-1] in ("k", "v", "gate", "up"))
    casts = sum(by_name.values()) * c if c < FLOAT else stacked * FLOAT
    block = min(headloss.ROWS, m) * d * (2 * c + FLOAT) + 3 * headloss.SLICE * d * FLOAT
    passing = block + m * h * c + (2 * d * h * c if c < FLOAT else 0)
    passing += d * h * (c + FLOAT) if s.train_head else 0
    if s.dense:
        passing += 3 * s.heads * m * n * FLOAT
    stepping = 4 * max(by_name.values()) * FLOAT if s.optimizer == "muon" else trained * FLOAT
    return {
        "weights, trained": trained * FLOAT,
        "weights, frozen": frozen * FLOAT + s.vocabulary * h * c,
        "gradients": trained * FLOAT,
        "optimiser state": moments * FLOAT,
        "batch": n * (s.aux + 1) * h * c,
        "saved for the backward": saved + casts,
        "passing": max(passing, stepping - saved - casts),
    }


def peak(s: Sizes) -> int:
    """Expected peak in bytes."""
    return sum(parts(s).values())


def rows(s: Sizes) -> list[dict[str, Any]]:
    """Bytes by part for this run and for Kimi-K2.5's draft, the sum last."""
    both = {"this run": parts(s), "Kimi-K2.5's draft": parts(KIMI_K2_5)}
    table = [{"part": name} | {who: found[name] for who, found in both.items()} for name in parts(s)]
    return [*table, {"part": "peak"} | {who: sum(found.values()) for who, found in both.items()}]


def available(device: torch.device) -> float:
    """Bytes that can still be had on the device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    path = Path("/proc/meminfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable")), float("inf"))


def require(s: Sizes, device: torch.device, *, held: int = 0) -> dict[str, float]:
    """What the run needs and what is free, in bytes.

    Args:
        held: bytes of it that this process holds already (a model that is built).

    Raises:
        WorkbookError: it cannot suffice; the message names both numbers and what would make it smaller.
    """
    needed, free = peak(s), available(device)
    if needed - held > free:
        largest = max((name for name in parts(s) if name != "weights, trained"), key=parts(s).get)
        raise WorkbookError(
            f"training needs about {needed / 2**30:.1f} GiB, of which {(needed - held) / 2**30:.1f} GiB are still to come; "
            f"{free / 2**30:.1f} GiB are free on {device} (largest part: {largest}, {parts(s)[largest] / 2**30:.1f} GiB)",
            where="notebook 04, section 4",
            do="lower train_batch_tokens or train_ttt_steps (saved), draft_vocab_size or train_head (head), or take a larger device",
        )
    return {"needed": needed, "free": free, "held": held}
