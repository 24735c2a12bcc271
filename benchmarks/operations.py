"""Floating-point operations of one training step of ours, product by product, so that its rate can be checked by hand.

Counted are matrix products alone, at two operations a multiply-add. Norms, activations, rotations, softmax and the merged
diagonals cost time and count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from helpers.ttt import Plan


class Product(NamedTuple):
    """`times` products [rows, inner] @ [inner, columns].

    `stored` says how the operands lie in memory, as the step has them: "nt" the second one transposed (a layer's forward), "nn" neither
    (its input's gradient), "tn" the first one (its weight's gradient).
    """

    name: str
    rows: int
    inner: int
    columns: int
    times: int = 1
    stored: str = "nt"

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
        found.append(Product(f"{name}, input's gradient", rows, columns, inner, times, "nn"))
    if "w" in backward:
        found.append(Product(f"{name}, weight's gradient", columns, rows, inner, times, "tn"))
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


def attention(plan: Plan, s: Shape) -> list[Product]:
    """Block 0's products: 2 forward, and 5 backward, where scores are computed again.

    The queries of a segment's group of heads are the rows. Of its own keys a query sees those up to itself: half of them, which is
    the number counted here (to half a key).
    """
    found = []
    for segment in plan.segments:
        length, prefix = segment.stop - segment.start, segment.start - segment.document
        rows, keys, width = length * s.heads // s.kv_heads, prefix + (length + 1) // 2, s.head_dim
        times = len(plan.targets) * s.kv_heads
        found += [
            Product("scores, again in the backward, and towards values", rows, width, keys, 3 * times, "nt"),
            Product("values, and queries' gradient", rows, keys, width, 2 * times, "nn"),
            Product("keys' and values' gradient", keys, rows, width, 2 * times, "tn"),
        ]
    return found


def total(found: Sequence[Product]) -> int:
    return sum(product.operations for product in found)
