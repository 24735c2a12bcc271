"""What all figures share: one colour per method, sizes, intervals, and a figure that a page always shows.

Figures are made without pyplot: they show once, where a cell names them last (or `display`s them), whatever MPLBACKEND
says, and none stays open in the process.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with every common colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000", "#999999")
BLUE, ORANGE, GREEN, RED, SKY, PINK, BLACK, GREY = PALETTE
COLOURS = {
    # ways to decode
    "plain": BLACK,
    "generate": GREY,
    "prompt lookup": PINK,
    "untrained": ORANGE,
    "speculative": BLUE,
    "predicted": SKY,
    "replayed": GREEN,
    "served": RED,
    # attention implementations and training steps
    "fast": BLUE,
    "sdpa": GREEN,
    "eager": ORANGE,
    "library": ORANGE,
    "simple_flex_attention": RED,
    "flex_attention": PINK,
    "flash_attention_2": SKY,
    "flash_attention_3": GREY,
    "flash_attention_4": BLACK,
    # parts of a whole
    "supervised": BLUE,
    "not supervised": GREY,
    "accepted": BLUE,
    "wrong": ORANGE,
    "outside": PINK,
    "draft": ORANGE,
    "verify": BLUE,
    "overhead": GREY,
}


class PageFigure(Figure):
    """A matplotlib figure that shows itself on a notebook page without any backend."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: its own if it has one, else one that no other of these names has, in order."""
    names = list(dict.fromkeys(names))
    found = {name: COLOURS[name] for name in names if name in COLOURS}
    free = [c for c in PALETTE if c not in found.values()] or list(PALETTE)
    others = [name for name in names if name not in found]
    return {name: found.get(name) or free[others.index(name) % len(free)] for name in names}


def canvas(columns: int = 1, rows: int = 1, *, width: float = 9.0, height: float = 4.0, **options: Any) -> tuple[PageFigure, list[Axes]]:
    """A figure and its axes (row by row), with a light grid and no frame on top and right."""
    figure = PageFigure(figsize=(width, height), dpi=110, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def label(ax: Axes, x: str, y: str, title: str = "", key: bool = False) -> None:
    """Names of the axes with their units, a title at the left, and with `key` a legend inside the axes."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if title:
        ax.set_title(title, loc="left", fontsize=10.5)
    if key:
        ax.legend(frameon=False, fontsize=9)


def legend(figure: Figure, where: str = "outside upper right") -> None:
    """A legend beside the axes, for figures whose marks fill them."""
    columns = 1 if "right upper" in where else 3
    figure.legend(frameon=False, fontsize=9, ncols=columns, loc=where)


def errors(rows: Sequence[Mapping[str, Any]], value: str = "value", low: str = "low", high: str = "high") -> list[list[float]] | None:
    """Lengths of the error bars below and above each value, for matplotlib; 0 where a row has no interval, None if none has."""
    if all(row.get(low) is None for row in rows):
        return None
    below = [row[value] - row[low] if row.get(low) is not None else 0.0 for row in rows]
    above = [row[high] - row[value] if row.get(high) is not None else 0.0 for row in rows]
    return [[max(0.0, v) for v in below], [max(0.0, v) for v in above]]  # a percentile interval may just miss its value
