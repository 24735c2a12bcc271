"""The training step: ours over the library's, in tokens per second and in peak memory, on the rows that matter.

One llama layer with H = 576, 9 heads, 3 key-value heads, MLP 1,536; draft vocabulary 8,192 of 49,152; 3 TTT steps; bfloat16 compute
under autocast with float32 master weights. The library runs at its fastest CPU setting: sdpa, eager loss. Both take the same packed row;
the concatenating eager form takes its documents as padded rows. A step is forward and backward, the optimiser not included.

Time: settings take turns in one process; each round gives one ratio. Memory: a process for each setting and row, its peak above the
built model. All rows take about seven minutes on two quiet cores, half of it the library's steps of 8,192 tokens; a part is one row
(`training:8x256`, under two minutes but for 8,192 tokens), or one kind of it (`training:8x256/speed`, `training:8x256/memory`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import concatenated
import operations
import torch
from lines import Line, compared
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig

from helpers import ttt
from helpers.attention_costs import Memory
from helpers.attention_trial import apart

STEPS, ROUNDS, LIMIT = 3, 5, 300.0  # limit: seconds for a process that measures memory
SHAPE = operations.Shape(hidden=576, states=3, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocabulary=8192)
FULL_VOCABULARY = 49_152
SHARE = 0.85  # of the matrix-product rate


class Row(NamedTuple):
    """`documents` of `tokens` tokens each, the first `prompt` of them unsupervised; what is to be reached."""

    documents: int
    tokens: int
    prompt: int
    faster: float
    smaller: float
    eager: bool  # whether the concatenating form is measured: its time and memory grow with the square of the tokens


ROWS = {
    "8x256": Row(8, 256, 48, 2.6, 0.4, True),
    "1x2048": Row(1, 2048, 256, 2.5, 0.4, True),
    "1x4096": Row(1, 4096, 3072, 6, 0.2, False),
    "1x8192": Row(1, 8192, 7168, 10, 0.1, False),
}


def draft(seed: int = 0) -> Any:
    """A draft of SHAPE in float32 with random weights: they decide neither time nor memory."""
    shape = SHAPE
    layer = LlamaConfig(
        vocab_size=FULL_VOCABULARY, hidden_size=shape.hidden, intermediate_size=shape.mlp, num_hidden_layers=1,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, max_position_embeddings=8192,
    )  # fmt: skip
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=shape.vocabulary, norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=list(range(shape.states)),
    )  # fmt: skip
    model = Eagle3DraftModel(config)
    few = torch.arange(FULL_VOCABULARY) < shape.vocabulary
    model.load_vocab_mappings(few, torch.zeros(shape.vocabulary, dtype=torch.long))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # embedding and heads wait for a verifier's weights and hold NaN
            if "norm" not in name:
                parameter.normal_(std=0.02, generator=draw)
    return model.train()


def packed(row: Row) -> dict[str, torch.Tensor]:
    """A packed row [1, documents * tokens] as the library's collate function makes it, states in bfloat16."""
    draw, total = torch.Generator().manual_seed(1), row.documents * row.tokens
    at = torch.arange(row.tokens).repeat(row.documents)
    return {
        "hidden_states": torch.randn(1, total, SHAPE.states * SHAPE.hidden, generator=draw).bfloat16(),
        "verifier_last_hidden_states": torch.randn(1, total, SHAPE.hidden, generator=draw).bfloat16(),
        "input_ids": torch.randint(0, FULL_VOCABULARY, (1, total), generator=draw),
        "document_ids": torch.arange(row.documents).repeat_interleave(row.tokens)[None],
        "loss_mask": (at >= row.prompt)[None],
        "position_ids": (1 + at)[None],
    }


def as_rows(batch: dict[str, torch.Tensor], row: Row) -> dict[str, torch.Tensor]:
    """The same documents as rows [documents, tokens, …] of equal length."""
    return {name: x.unflatten(1, (row.documents, row.tokens))[0] for name, x in batch.items()}


def stepper(setting: str, model: Any, row: Row) -> Callable[[], None]:
    """One training step (forward, backward) of a setting: `ours`, `library` or `eager`."""
    batch = packed(row)
    if setting == "eager":
        batch = as_rows(batch, row)
        work = lambda: concatenated.loss(model, batch, STEPS)  # noqa: E731
    else:
        forward = ttt.forward if setting == "ours" else type(model).forward
        losses = resolve_loss_config("kl_div", "eager")
        work = lambda: forward(model, **batch, ttt_steps=STEPS, loss_config=losses)[1]  # noqa: E731

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = work()
        loss.backward()

    return step


def memory(setting: str, row: Row) -> float:
    """Peak memory in MB of a step above the built model, in a process of its own."""

    def work(_save: Any) -> dict[str, Any]:
        model = draft()
        step = stepper(setting, model, row)
        held = Memory(torch.device("cpu"))
        step()
        return {"bytes": held.read()}

    with tempfile.TemporaryDirectory() as scratch:
        found = apart(work, Path(scratch) / "memory.json", LIMIT)
    if "bytes" not in found:
        raise RuntimeError(f"memory of {setting}: {found['ended']}")
    return found["bytes"] / 1e6


def seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def multiplier(found: list[operations.Product]) -> Callable[[], None]:
    """Runs matrix products alone, bfloat16, in the step's shapes and with their operands as they lie there."""

    def operands(p: operations.Product) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.zeros(p.inner, p.rows).T if p.stored == "tn" else torch.zeros(p.rows, p.inner)
        b = torch.zeros(p.columns, p.inner).T if p.stored == "nt" else torch.zeros(p.inner, p.columns)
        return tuple(x.bfloat16().normal_() for x in (a, b))

    pairs = [(*operands(p), p.times) for p in dict.fromkeys(found)]
    counts = [found.count(p) for p in dict.fromkeys(found)]

    def work() -> None:
        for (a, b, times), count in zip(pairs, counts, strict=True):
            for _ in range(times * count):
                a @ b

    return work


def timed(name: str, row: Row, model: Any, report: Callable[[str], None]) -> list[Line]:
    """Tokens per second of each setting, and our step's share of the matrix-product rate; settings take turns."""
    tokens = row.documents * row.tokens
    settings = {s: stepper(s, model, row) for s in ["ours", "library", *["eager"] * row.eager]}
    batch = packed(row)
    plan = ttt.plan(batch["document_ids"][0], batch["loss_mask"][0], STEPS)
    counted = operations.products(plan, tokens, int(batch["loss_mask"].sum()), SHAPE) + operations.attention(plan, SHAPE)
    settings["products"] = multiplier(counted)
    for setting, step in settings.items():
        if setting != "library" or tokens < 8192:  # its first step of 8,192 tokens takes as long as any other
            step()
    rounds: dict[str, list[float]] = {s: [] for s in settings}
    for _ in range(ROUNDS):
        for setting, step in settings.items():
            rounds[setting].append(seconds(step))
        report(f"{name}: " + ", ".join(f"{s} {found[-1]:.2f} s" for s, found in rounds.items()))
    speeds = {s: [tokens / x for x in found] for s, found in rounds.items()}
    said = {"against": "library sdpa", "aim": f">= {row.faster}"}
    lines = [compared("training", f"{name} speed", "tokens/s", speeds["ours"], speeds["library"], **said)]
    if row.eager:
        said = {"against": "concatenating eager"}
        lines.append(compared("training", f"{name} speed, eager", "tokens/s", speeds["ours"], speeds["eager"], **said))
    rates = {s: [operations.total(counted) / x / 1e9 for x in rounds[s]] for s in ("ours", "products")}
    said = {"against": "products alone", "aim": f">= {SHARE}"}
    lines.append(compared("training", f"{name} products", "GFLOP/s", rates["ours"], rates["products"], **said))
    return lines


def measure(part: str | None, report: Callable[[str], None]) -> list[Line]:
    """Lines of every row, or of the row named `part`. `part` may end in `/memory` or `/speed` for one kind alone."""
    part, _, kind = (part or "").partition("/")
    rows = {part: ROWS[part]} if part else ROWS
    found: dict[str, list[Line]] = {name: [] for name in rows}
    if kind != "speed":  # first, while this process has started no threads: it forks
        for name, row in rows.items():
            peak = {s: memory(s, row) for s in ["ours", "library", *["eager"] * row.eager]}
            report(f"{name}: " + ", ".join(f"{s} {mb:,.0f} MB" for s, mb in peak.items()))
            others = {"library": ("library sdpa", f"<= {row.smaller}"), "eager": ("concatenating eager", "")}
            for s, (against, aim) in others.items():
                if s in peak:
                    label = f"{name} memory" + ", eager" * (s == "eager")
                    found[name].append(compared("training", label, "MB", [peak["ours"]], [peak[s]], against=against, aim=aim))
    if kind != "memory":
        model = draft()
        for name, row in rows.items():
            found[name] = timed(name, row, model, report) + found[name]
    return [line for name in rows for line in found[name]]
