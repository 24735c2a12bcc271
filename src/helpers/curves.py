"""What a training run left behind: its curve as CSV and figure, its result in numbers, its checks."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from helpers import files, plots
from helpers.params import Parameters


def write(curve: list[dict[str, Any]], path: Path) -> None:
    """All recorded steps as CSV, held-out figures in the rows they were measured at."""
    names = list(dict.fromkeys(name for row in curve for name in row))
    with files.atomic(path) as scratch, open(scratch, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(curve)


def held_out(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The validations of a run: step, epoch, loss and predicted accept length."""
    return [
        {"step": r["step"], "epoch": r["epoch"], "loss": r["heldout_loss"], "accept_length": r["heldout_accept_length"]}
        for r in curve
        if r.get("heldout_accept_length") is not None
    ]


def figure(curve: list[dict[str, Any]], parameters: Parameters) -> Figure:
    """Loss and accuracy by TTT step, learning rate and predicted accept length."""
    steps = range(parameters.train_ttt_steps)
    seen = held_out(curve)
    best = max(seen, key=lambda r: r["accept_length"])["step"] if seen else None
    return plots.training_curves(
        [r["step"] for r in curve],
        [[r.get(f"loss_{j}", math.nan) for r in curve] for j in steps],
        [[r.get(f"full_acc_{j}", math.nan) for r in curve] for j in steps],
        [r["learning_rate"] for r in curve],
        seen,
        best,
        k=parameters.train_ttt_steps,
    )


def summary(trainer: Any, plan: dict[str, Any], gate: dict[str, Any]) -> dict[str, Any]:
    """The run in numbers: steps, first and last loss, held-out predictions, throughput."""
    curve, seen = trainer.curve, held_out(trainer.curve)
    kept = max(seen, key=lambda r: r["accept_length"])
    tenth = max(1, len(curve) // 10)
    last = next(r for r in curve if r["step"] == kept["step"])
    speeds = sorted(r["tokens_per_second"] or 0.0 for r in curve)
    return {
        "steps": len(curve),
        "loss_first_tenth": sum(r["loss"] for r in curve[:tenth]) / tenth,
        "loss_last_tenth": sum(r["loss"] for r in curve[-tenth:]) / tenth,
        "kept_epoch": kept["epoch"] + 1,
        "predicted_accept_length": kept["accept_length"],
        "predicted_conditional_accuracies": [last[k] for k in sorted(last) if k.startswith("heldout_cond_acc_")],
        "held_out": seen,
        "median_tokens_per_second": speeds[len(speeds) // 2],
        "tokens_per_epoch": plan["tokens per epoch"],
        "trained_parameters": plan["trained parameters"],
        "gate_accept_length": gate["accept length, replayed"],
    }


def checks(trainer: Any, both: list[dict[str, Any]]) -> list[tuple[str, bool | None, Any, str]]:
    """Gates of the notebook: agreement with the library, falling loss, moving norms, acceptance that held."""
    curve, seen = trainer.curve, held_out(trainer.curve)
    tenth = max(1, len(curve) // 10)
    first, last = (sum(r["loss"] for r in part) / tenth for part in (curve[:tenth], curve[-tenth:]))
    worst = max((r["relative difference"] for r in both), default=None)
    moved = (trainer.model.norm.weight.detach() - trainer.norm_at_start.to(trainer.model.norm.weight)).abs().max().item()
    rises = seen[-1]["accept_length"] >= 0.9 * max(r["accept_length"] for r in seen)
    return [
        (
            "fast step and library agree in float32",
            None if worst is None else worst < 1e-3,
            "not run" if worst is None else f"{worst:.1e} relative",
            "do not train: report both versions",
        ),
        ("training loss fell", last < first, f"{first:.3f} → {last:.3f}", "raise the learning rate or look at the mask in notebook 01"),
        # in the float32 weights that were trained: the bfloat16 ones of the kept draft could have been rounded to where they began
        ("norm weights moved", moved > 1e-3, f"{moved:.4f} at most", "weights have to be float32 while training"),
        (
            "accept length has not collapsed at the end",
            rises,
            f"{seen[-1]['accept_length']:.3f} last, {max(r['accept_length'] for r in seen):.3f} best",
            "fewer epochs or more data; the best epoch was kept",
        ),
    ]
