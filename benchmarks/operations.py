"""Floating-point operations of one training step of ours, product by product, so that its rate can be checked by hand.

Counted are matrix products alone, at two operations a multiply-add. Norms, activations, rotations, softmax and the merged
diagonals cost time and count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from helpers.ttt import Plan


class Product(NamedTuple):
    """`times` products [rows, inner] @ [inner, columns]."""

    name: str
    rows: int
    inner: int
    columns: int
    times: int = 1

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inner * self.columns * self.times


class Shape(NamedTuple):
    """Of a draft with one layer: H hidden, A states joined by fc, Q and G heads of width D, MLP width, V draft vocabulary."""

    hidden: int
    states: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int


def _linear(name: str, rows: int, inner: int, columns: int, times: int, backward: str = "xw") -> list[Product]:
    """A linear layer forward, and backward towards its input (x) and its weight (w)."""
    found = [Product(name, rows, inner, columns, times)]
    if "x" in backward:
        found.append(Product(f"{name}, input's gradient", rows, columns, inner, times))
    if "w" in backward:
        found.append(Product(f"{name}, weight's gradient", columns, rows, inner, times))
    return found


def products(plan: Plan, positions: int, supervised: int, s: Shape) -> list[Product]:
    """The linear layers' products of one step, forward and backward, the draft's head frozen.

    Args:
        positions: tokens of the packed row; supervised: those of them that are targets.
    """
    starts, steps = plan.starts.numel(), len(plan.targets)
    kv, q = 2 * s.kv_heads * s.head_dim, s.heads * s.head_dim
    found = [
        *_linear("fc", positions, s.states * s.hidden, s.hidden, 1, "w"),  # nothing upstream of it is trained
        *_linear("k and v, step 0", positions, 2 * s.hidden, kv, 1),
        *_linear("k and v, later steps", starts, 2 * s.hidden, kv, steps - 1),
        *_linear("q", starts, 2 * s.hidden, q, steps),
        *_linear("o", starts, q, s.hidden, steps),
        *_linear("gate and up", starts, s.hidden, 2 * s.mlp, steps),
        *_linear("down", starts, s.mlp, s.hidden, steps),
        Product("verifier's head", supervised, s.hidden, s.vocabulary),
    ]
    for rows in plan.targets:
        found += _linear("draft's head", rows.numel(), s.hidden, s.vocabulary, 1, "x")
    return [product for product in found if product.operations]


def attention(plan: Plan, s: Shape) -> int:
    """Operations of block 0's attention: 2 products a (query, key) pair forward, 5 backward (scores are computed again)."""
    pairs = 0
    for segment in plan.segments:
        length, prefix = segment.stop - segment.start, segment.start - segment.document
        pairs += length * prefix + length * (length + 1) // 2
    return len(plan.targets) * 7 * 2 * pairs * s.heads * s.head_dim


def total(found: Sequence[Product]) -> int:
    return sum(product.operations for product in found)
