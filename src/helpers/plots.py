"""Figures of the five notebooks. Each takes plain values or rows, labels its axes with units and returns the figure.

Accept length is in tokens per verification step throughout; intervals are 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from helpers.canvas import BLACK, BLUE, COLOURS, GREY, ORANGE, RED, canvas, colours, errors, label, legend

Rows = Sequence[Mapping[str, Any]]
ACCEPT_LENGTH = "accept length (tokens per step)"
BAR = {"error_kw": {"elinewidth": 1.2, "capsize": 3, "ecolor": "#333333"}}


def sequence_lengths(tokens: Sequence[int], supervised: Sequence[int], limit: int | None = None) -> Figure:
    """Tokens of each row and the supervised ones among them; share of each row that is supervised.

    Args:
        tokens, supervised: one count per row. limit: max_sequence_tokens, marked if given.
    """
    tokens, supervised = np.asarray(tokens), np.asarray(supervised)
    figure, (left, right) = canvas(2, width=9.5)
    edges = np.histogram_bin_edges(np.concatenate([tokens, supervised]), bins=30)
    left.hist(tokens, edges, color=COLOURS["not supervised"], alpha=0.7, label=f"all tokens ({tokens.sum():,})")
    left.hist(supervised, edges, color=COLOURS["supervised"], alpha=0.7, label=f"supervised ({supervised.sum():,})")
    if limit is not None:
        left.axvline(limit, color=RED, linestyle="--", label=f"limit ({limit:,})")
    label(left, "tokens per row", "rows", f"Length of rows (n = {len(tokens):,})", key=True)
    right.hist(supervised / np.maximum(tokens, 1), np.linspace(0, 1, 26), color=COLOURS["supervised"])
    right.xaxis.set_major_formatter(PercentFormatter(1))
    overall = supervised.sum() / max(1, tokens.sum())
    right.axvline(overall, color=BLACK, linestyle="--", label=f"all tokens: {overall:.0%}")
    label(right, "supervised share of the row", "rows", "Supervised share", key=True)
    return figure


def answer_lengths(by_category: Mapping[str, Sequence[int]], limit: int | None = None) -> Figure:
    """Answer tokens by category: box from quarter to quarter with the median, whiskers to the 5th and 95th percentile."""
    names = sorted(by_category, key=lambda name: float(np.median(by_category[name])))
    figure, (ax,) = canvas(height=max(2.5, 1 + 0.34 * len(names)))
    labels = [f"{name} (n = {len(by_category[name])})" for name in names]
    style = {"boxprops": {"facecolor": BLUE, "alpha": 0.4}, "medianprops": {"color": BLACK}}
    values = [list(by_category[name]) for name in names]
    ax.boxplot(values, orientation="horizontal", tick_labels=labels, whis=(5, 95), patch_artist=True, showfliers=False, **style)
    if limit is not None:
        ax.axvline(limit, color=RED, linestyle="--", label=f"limit ({limit:,} tokens)")
    total = sum(len(v) for v in values)
    label(ax, "tokens per answer", "category", f"Length of answers by category (n = {total:,}): middle half, 5th to 95th percentile")
    if limit is not None:
        legend(figure)
    return figure


def coverage(sizes: Sequence[int], covered: Sequence[float], ceiling: Sequence[float], chosen: int, *, k: int, tokens: int) -> Figure:
    """Share of held-out answer tokens inside the draft vocabulary, and the accept length it allows, by size.

    Args:
        sizes: draft vocabulary sizes, rising. covered: shares in 0 to 1. ceiling: accept length of a perfect draft at K = k.
        chosen: the size taken. tokens: held-out answer tokens counted.
    """
    sizes, covered, ceiling = list(sizes), list(covered), list(ceiling)
    figure, (ax,) = canvas()
    ax.plot(sizes, covered, color=BLUE, marker="o", markersize=4, label="covered (left)")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    right = ax.twinx()
    right.plot(sizes, ceiling, color=ORANGE, marker="s", markersize=4, label="ceiling (right)")
    right.axhline(k + 1, color=GREY, linestyle=":", linewidth=1)
    right.set_ylabel(f"ceiling of the accept length, K = {k}\n(tokens per step)")
    right.spines["top"].set_visible(False)
    at = int(np.argmin(np.abs(np.asarray(sizes) - chosen)))
    ax.axvline(chosen, color=BLACK, linestyle="--", label=f"chosen: {chosen:,} ({covered[at]:.1%}, ceiling {ceiling[at]:.2f})")
    label(
        ax,
        "draft vocabulary (tokens)",
        "share of held-out answer tokens covered",
        f"What a smaller vocabulary costs (n = {tokens:,} tokens)",
    )
    handles = [*ax.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    ax.legend(handles=handles, frameon=False, fontsize=9, loc="lower right")
    return figure


def attention_costs(rows: Rows) -> Figure:
    """Seconds and peak memory of each attention implementation by sequence length.

    Args:
        rows: {implementation, tokens, seconds, bytes}; a row without seconds (did not run) is left out.
    """
    ran = [r for r in rows if r.get("seconds") is not None]
    figure, axes = canvas(2, width=9.5)
    shades = colours(r["implementation"] for r in ran)
    for ax, key, scale, unit, what in zip(
        axes, ("seconds", "bytes"), (1, 2**30), ("seconds, forward and backward", "peak memory (GiB)"), ("Time", "Memory"), strict=True
    ):
        for marker, (name, shade) in zip("osD^vPX*" * len(shades), shades.items(), strict=False):
            points = sorted((r["tokens"], r[key] / scale) for r in ran if r["implementation"] == name and r.get(key) is not None)
            if points:
                ax.plot(*zip(*points, strict=True), color=shade, marker=marker, markersize=5, label=name)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        label(ax, "sequence length (tokens)", unit, f"{what} by attention implementation", key=bool(ran))
    return figure


def _smooth(values: Sequence[float], share: float = 0.05) -> np.ndarray:
    """Running mean over about a twentieth of the series, narrower at its ends so that it starts and ends with it."""
    series, half = np.asarray(values, float), max(1, int(len(values) * share / 2))
    return np.array([np.nanmean(series[max(0, i - half) : i + half + 1]) for i in range(len(series))])


def training_curves(
    steps: Sequence[int],
    losses: Sequence[Sequence[float]],
    accuracies: Sequence[Sequence[float]],
    learning_rate: Sequence[float],
    held_out: Rows,
    best_step: int | None = None,
    *,
    k: int,
) -> Figure:
    """Loss and accuracy of each TTT step (raw faint under smooth), learning rate, predicted accept length on held-out rows.

    Args:
        steps: optimiser steps, [S]. losses, accuracies: one series [S] per TTT step. learning_rate: [S].
        held_out: {step, accept_length}, one per validation. best_step: step of the checkpoint kept.
        k: K of the predicted accept length.
    """
    figure, axes = canvas(2, 2, width=9.5, height=6.2)
    for ax, series, unit, title in (
        (axes[0], losses, "loss per supervised token", "Loss by TTT step"),
        (axes[1], accuracies, "share of supervised tokens", "Accuracy by TTT step"),
    ):
        for j, (values, shade) in enumerate(zip(series, colours(f"ttt {j}" for j in range(len(series))).values(), strict=True)):
            ax.plot(steps, values, color=shade, alpha=0.2, linewidth=0.8)
            ax.plot(steps, _smooth(values), color=shade, label=f"TTT step {j}")
        label(ax, "optimiser step", unit, title, key=bool(len(series)))
    axes[1].yaxis.set_major_formatter(PercentFormatter(1))
    axes[2].plot(steps, learning_rate, color=BLACK)
    label(axes[2], "optimiser step", "learning rate", "Learning rate")
    at, lengths = [r["step"] for r in held_out], [r["accept_length"] for r in held_out]
    axes[3].plot(at, lengths, color=COLOURS["predicted"], marker="o", markersize=4)
    if best_step in at:
        best = lengths[at.index(best_step)]
        axes[3].plot(
            [best_step], [best], color=RED, marker="*", markersize=13, linestyle="none", label=f"kept: step {best_step:,}, {best:.2f}"
        )
    label(axes[3], "optimiser step", ACCEPT_LENGTH, f"Predicted accept length, held-out rows, K = {k}", key=best_step in at)
    return figure


def acceptance_by_position(series: Mapping[str, Rows], predicted: Sequence[float] | None = None) -> Figure:
    """Acceptance at each position, of all steps that drafted it and given that all before it were accepted.

    Args:
        series: method → rows of acceptance.by_position, drawn side by side.
        predicted: teacher-forced conditional accuracies by position; their running product stands beside the rate.
    """
    figure, axes = canvas(2, width=9.5, sharey=True)
    groups = dict(series) | ({"predicted": []} if predicted is not None else {})
    shades, width = colours(groups), 0.8 / len(groups)
    for ax, key, low, high, title in (
        (axes[0], "rate", "low", "high", "Accepted, of steps that drafted i (95 % intervals)"),
        (axes[1], "conditional", "conditional_low", "conditional_high", "Accepted, given that all before were"),
    ):
        for g, (name, rows) in enumerate(groups.items()):
            rows = [r for r in rows if r[key] is not None]
            where, heights, bars = [r["position"] for r in rows], [r[key] for r in rows], errors(rows, key, low, high) if rows else None
            text = f"{name} ({rows[0]['drafted']:,} steps)" if rows else name
            if name == "predicted":
                heights = np.cumprod(predicted) if key == "rate" else list(predicted)
                where, text = list(range(1, len(heights) + 1)), "predicted (teacher-forced)"
            shift = (g - (len(groups) - 1) / 2) * width
            ax.bar(np.asarray(where) + shift, heights, width * 0.92, yerr=bars, color=shades[name], label=text, **BAR)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        label(ax, "drafted position i", "acceptance", title)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _by(rows: Rows, key: str, overall: Any, title: str, what: str) -> Figure:
    figure, (ax,) = canvas(height=max(3.0, 1.2 + 0.34 * len(rows)))
    names = [f"{row[key]} (n = {row['n']})" for row in rows]
    ax.barh(names, [row["value"] for row in rows], xerr=errors(rows), color=COLOURS["speculative"], alpha=0.85, **BAR)
    if overall is not None:
        ax.axvline(overall.value, color=BLACK, linestyle="--", label=f"all: {overall}")
    ax.axvline(1, color=GREY, linewidth=1)
    ax.invert_yaxis()
    label(ax, "accept length (tokens per step; 1 = nothing accepted)", what, f"{title}, with 95 % intervals")
    if overall is not None:
        legend(figure)
    return figure


def by_category(rows: Rows, overall: Any = None) -> Figure:
    """Accept length by category with intervals (rows of acceptance.by_category) and the overall Estimate as a dashed line."""
    return _by(rows, "category", overall, "Accept length by category", "category (n prompts)")


def by_context(rows: Rows, overall: Any = None) -> Figure:
    """Accept length by tokens before the step (rows of acceptance.by_context) and the overall Estimate as a dashed line."""
    return _by(rows, "context", overall, "Accept length by context", "tokens before the step")


def misses(rows: Rows) -> Figure:
    """Shares of accepted, wrong and outside-vocabulary slots (rows of acceptance.misses, by position or by category)."""
    key = "position" if "position" in rows[0] else "category"
    figure, (ax,) = canvas(height=max(3.0, 1.3 + 0.34 * len(rows)))
    names, left = [f"{row[key]} ({row['steps']:,} steps)" for row in rows], np.zeros(len(rows))
    for kind, text in (("accepted", "accepted"), ("wrong", "wrong token"), ("outside", "outside the draft vocabulary")):
        shares = np.array([row[kind] / max(1, row["steps"]) for row in rows])
        ax.barh(names, shares, left=left, color=COLOURS[kind], label=text)
        left += shares
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    label(ax, "share of steps", "drafted position" if key == "position" else "category", "Why chains end")
    legend(figure)
    return figure


def k_sweep(rows: Rows, model: Rows = (), *, prompts: int | None = None, source: str = "measured") -> Figure:
    """Accept length and speedup by K, with the cost model's curve.

    Args:
        rows: {k, value (accept length), low, high, speedup}; low, high and speedup may be missing or None.
        model: rows of costs.speedup_model. prompts: n, for the title. source: where the accept lengths come from.
    """
    figure, (left, right) = canvas(2, width=9.5)
    shade, n = COLOURS["speculative"], f" (n = {prompts} prompts)" if prompts else ""
    ks = [row["k"] for row in rows]
    left.errorbar(ks, [row["value"] for row in rows], yerr=errors(rows), color=shade, marker="o", capsize=3, label=source)
    timed = [row for row in rows if row.get("speedup") is not None]
    right.plot([r["k"] for r in timed], [r["speedup"] for r in timed], color=shade, marker="o", label="measured")
    if len(model):
        for ax, key in ((left, "accept_length"), (right, "speedup")):
            ax.plot([r["k"] for r in model], [r[key] for r in model], color=COLOURS["predicted"], linestyle="--", label="model")
    right.axhline(1, color=COLOURS["plain"], linewidth=1, label="plain decoding")
    for ax in (left, right):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(left, "drafted tokens per step, K", ACCEPT_LENGTH, f"Accept length{n}", key=True)
    label(right, "drafted tokens per step, K", "speedup (times plain decoding)", "Speedup", key=True)
    return figure


def speeds(rows: Rows, title: str = "Decoding speed, batch 1") -> Figure:
    """Tokens per second by method: rows {method, tokens_per_second, low, high}; the interval may be missing.

    Beside each bar stands its ratio to the row named "plain", if there is one.
    """
    figure, (ax,) = canvas(height=max(2.4, 1.1 + 0.4 * len(rows)))
    shades, plain = colours(row["method"] for row in rows), {row["method"]: row["tokens_per_second"] for row in rows}.get("plain")
    bars = errors(rows, "tokens_per_second")
    names, values = [row["method"] for row in rows], [row["tokens_per_second"] for row in rows]
    drawn = ax.barh(names, values, xerr=bars, color=[shades[name] for name in names], alpha=0.9, **BAR)
    ax.bar_label(drawn, [f"{v:.1f}" + (f" ({v / plain:.2f}×)" if plain else "") for v in values], padding=6, fontsize=9)
    ax.margins(x=0.18)
    ax.invert_yaxis()
    label(ax, "tokens per second", "method", title)
    return figure


def time_split(rows: Rows) -> Figure:
    """Where a round's time goes by K: rows {k, draft, verify, overhead} in seconds; shown in milliseconds."""
    figure, (ax,) = canvas()
    base = np.zeros(len(rows))
    for part in ("verify", "draft", "overhead"):
        height = np.array([1e3 * row[part] for row in rows])
        ax.bar([row["k"] for row in rows], height, bottom=base, color=COLOURS[part], label=part)
        base += height
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(ax, "drafted tokens per step, K", "milliseconds per round", "Time of one round of speculation", key=True)
    return figure


def cost_model(curves: Mapping[str, Rows], measured: Mapping[int, float] | None = None) -> Figure:
    """Expected speedup by K, one curve per case (rows of costs.speedup_model), the best K starred, measured points on top."""
    figure, (ax,) = canvas()
    for (name, rows), shade in zip(curves.items(), colours(curves).values(), strict=True):
        best = max(rows, key=lambda row: row["speedup"])
        text = f"{name}: best K = {best['k']}, {best['speedup']:.2f}×" if best["speedup"] > 1 else f"{name}: does not pay"
        ax.plot([r["k"] for r in rows], [r["speedup"] for r in rows], color=shade, label=text)
        if best["speedup"] > 1:
            ax.plot([best["k"]], [best["speedup"]], color=shade, marker="*", markersize=12)
    if measured:
        ax.plot(list(measured), list(measured.values()), color=BLACK, marker="o", linestyle="none", label="measured here")
    ax.axhline(1, color=COLOURS["plain"], linewidth=1, linestyle="--", label="plain decoding")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(ax, "drafted tokens per step, K", "speedup (times plain decoding)", "Does speculation pay? Cost model")
    legend(figure, "outside right upper")
    return figure
