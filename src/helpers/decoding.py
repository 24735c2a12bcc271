"""Key-value cache without copies and grouped-query attention: what decoding on a CPU (and long batches) needs.

transformers' growing cache concatenates every key and value at every token, and its sdpa path repeats the keys once per
query group; with a small model those copies cost more than the arithmetic. Both pieces here plug into transformers'
own interfaces, so `generate` and any model with the usual attention layers can use them.

Shapes: B rows, T new tokens, L slots, G query heads per key-value head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GROUPED = "grouped_sdpa"


def grouped_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):
    """Attention of a few new tokens over a cache, without repeating keys for grouped queries.

    The G query heads that share a key-value head are folded into the query length, so the kernel sees as many heads as
    there are keys. Anything that is not such a step (a causal prefill) goes to transformers' own sdpa.

    Args:
        query: [B, heads, T, D]; key, value: [B, key-value heads, L, D]; attention_mask: bool or additive, or None.

    Returns:
        (output [B, T, heads, D], None), as transformers' attention interface asks.
    """
    rows, heads, tokens, width = query.shape
    kv_heads = key.shape[1]
    causal_prefill = attention_mask is None and tokens > 1
    if heads == kv_heads or causal_prefill or dropout:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    groups = heads // kv_heads
    folded = query.reshape(rows, kv_heads, groups * tokens, width)
    mask = attention_mask
    if mask is not None and tokens > 1:
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).reshape(mask.shape[0], mask.shape[1], groups * tokens, -1)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, tokens, width).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `grouped_sdpa` known to transformers (idempotent)."""
    ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, sdpa_mask)


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values in a buffer that is written in place and read as a view."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: RowCache):
        super().__init__()
        self.owner = owner
        self.length = 0

    def lazy_initialization(self, key_states, value_states) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(*key_states.shape[:2], self.owner.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], self.owner.capacity, value_states.shape[3])
        self.is_initialized = True

    def _reserve(self, needed: int) -> None:
        if needed <= self.keys.shape[2]:
            return
        room = max(needed, 2 * self.keys.shape[2])
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], room, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens, starts = key_states.shape[2], self.owner.starts
        end = (self.length if starts is None else self.owner.longest) + tokens
        self._reserve(end)
        if starts is None:
            self.keys[:, :, end - tokens : end] = key_states
            self.values[:, :, end - tokens : end] = value_states
        else:
            rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
            slots = starts[:, None] + torch.arange(tokens, device=key_states.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]


class RowCache(Cache):
    """A cache whose rows may have different lengths, rolled back by setting them.

    Rows of one length (`starts` is None) work with `generate` like any cache. After `set_lengths` each row writes its
    next tokens at its own slot: pass `positions(T)` and `mask(T)` to the model then.

    Args:
        capacity: slots to reserve at first; the buffer doubles when they run out.
    """

    def __init__(self, capacity: int = 512):
        super().__init__(layers=[])
        self.capacity = capacity
        self.starts: torch.Tensor | None = None
        self.longest = 0

    @classmethod
    def padded_left(cls, parts: Sequence[tuple[list[int], list[int], RowCache]], width: int, capacity: int) -> RowCache:
        """One cache of rows that all end at slot `width`, from caches of rows that begin at slot 0.

        Args:
            parts: (places of its rows in the new cache, their lengths, cache) each; the places are 0..B-1 in all.
            width: slots taken afterwards; a row's first `width` - length of them hold nothing and must be masked.
            capacity: slots to reserve.
        """
        whole = cls(capacity)
        rows = sum(len(places) for places, _, _ in parts)
        for number, first in enumerate(parts[0][2].layers):
            layer = _SlotLayer(whole)
            heads, size = first.keys.shape[1], first.keys.shape[3]
            layer.lazy_initialization(first.keys.new_empty(rows, heads, 0, size), first.values.new_empty(rows, heads, 0, size))
            for places, lengths, part in parts:
                shift = width - torch.tensor(lengths, device=layer.device)
                # slots before a row repeat its first key: finite, and masked
                source = (torch.arange(width, device=layer.device) - shift[:, None]).clamp_min(0)
                source = source[:, None, :, None].expand(-1, heads, -1, size)
                layer.keys[places, :, :width] = part.layers[number].keys.gather(2, source)
                layer.values[places, :, :width] = part.layers[number].values.gather(2, source)
            layer.length = width
            whole.layers.append(layer)
        return whole

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        while len(self.layers) <= layer_idx:
            self.layers.append(_SlotLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)

    def set_lengths(self, lengths: torch.Tensor) -> None:
        """Keep the first `lengths[b]` slots of row b [B]; what was written after them is forgotten."""
        values = lengths.tolist()
        self.longest = max(values)
        # one length for all rows is the fast case: plain slices instead of scattered writes
        self.starts = None if min(values) == self.longest else lengths.clone()
        for layer in self.layers:
            layer.length = self.longest

    def step(self, tokens: int) -> None:
        """Count `tokens` just written to every row as kept (rows of one length count by themselves)."""
        if self.starts is not None:
            self.starts = self.starts + tokens
            self.longest += tokens

    def _starts(self, rows: int, device) -> torch.Tensor:
        if self.starts is not None:
            return self.starts
        return torch.full((rows,), self.get_seq_length(), device=device, dtype=torch.long)

    def positions(self, rows: int, tokens: int, device) -> torch.Tensor:
        """Position of each next token, [rows, tokens]."""
        return self._starts(rows, device)[:, None] + torch.arange(tokens, device=device)

    def mask(self, rows: int, tokens: int, device) -> torch.Tensor | None:
        """Which slots each next token may look at: bool [rows, 1, tokens, L], or None when all may see all."""
        if self.starts is None and tokens == 1:
            return None
        positions = self.positions(rows, tokens, device)
        slots = torch.arange(int(self.longest if self.starts is not None else self.get_seq_length()) + tokens, device=device)
        return (slots <= positions[:, :, None])[:, None]


register()
