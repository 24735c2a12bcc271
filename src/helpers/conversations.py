"""A conversation as one training row: token ids, the mask of what the verifier said itself, and how to look at both.

The door to what stands behind it: `read_prompts` (prompts), `render`, `prompt_ids` and `answer_text` (rendering).
"""

from __future__ import annotations

import html
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from helpers import masks
from helpers.errors import DataError
from helpers.messages import Message, Prompt
from helpers.prompts import PromptSet, read_prompts
from helpers.rendering import answer_text, decode, prompt_ids, render, specials

__all__ = ["Prompt", "PromptSet", "answer_text", "from_turns", "mask_html", "prompt_ids", "read_prompts", "render", "tokenise"]

RETOKENISED = "an earlier answer is supervised only as far as its text gave the same tokens again in the later prompt"
TWO_BOS = "the template writes its BOS token twice"


class Span(NamedTuple):
    """A run of tokens [start, stop) of one kind, with its text."""

    start: int
    stop: int
    supervised: bool
    text: str


@dataclass
class Tokenised:
    """One row: T token ids and a mask of T zeros and ones, 1 where the verifier produced the token.

    `source` says where the mask is from: template (its generation marks, which agree with the rendering boundaries),
    boundaries, or generated (the ids are the verifier's own). `notes` hold what is less than complete, in fixed words so
    that they can be counted. `closed` says whether the last answer ends with its end-of-turn token; `planned_tokens` are
    answers still to come.
    """

    input_ids: list[int]
    loss_mask: list[int]
    source: str
    spans: list[Span] = field(default_factory=list)
    id: str = ""
    answers: int = 1
    supervised_answers: int = 1
    full_tokens: int = 0
    planned_tokens: int = 0
    closed: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def truncated(self) -> int:
        """Tokens cut off at the end."""
        return self.full_tokens - len(self.input_ids)

    @property
    def supervised(self) -> int:
        """Tokens the draft is trained on."""
        return sum(self.loss_mask)


def _spans(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[Span]:
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [Span(a, b, bool(mask[a]), decode(tokenizer, ids[a:b])) for a, b in zip(edges, edges[1:], strict=False)]


def _row(tokenizer: Any, found: masks.Mask, max_tokens: int, row: str) -> Tokenised:
    ids, mask = found.ids[:max_tokens], found.mask[:max_tokens]
    if not any(mask):
        raise DataError(
            f"no token of an answer within {max_tokens} tokens: the prompt alone has {found.mask.index(1)}",
            where=row,
            do="leave the row out, shorten its prompt or raise max_sequence_tokens",
        )
    twice = len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id
    notes = list(dict.fromkeys(found.notes + [TWO_BOS] * twice))
    closed = len(ids) == len(found.ids) and ids[-1] in specials(tokenizer).values()
    counts = {"answers": found.answers, "supervised_answers": found.supervised_answers, "full_tokens": len(found.ids)}
    return Tokenised(ids, mask, found.source, _spans(tokenizer, ids, mask), row, **counts, closed=closed, notes=notes)


def tokenise(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    tools: list[dict[str, Any]] | None = None,
    row: str = "",
    arguments: Mapping[str, Any] | None = None,
) -> Tokenised:
    """Ids and loss mask of a conversation whose answers are the verifier's own, up to its last end-of-turn token.

    Args:
        max_tokens: longer rows are cut there; `truncated` says by how much.
        tools: function descriptions the template writes into the prompt.
        row: name of the row, for messages.
        arguments: what else the template takes, as in serving.

    Raises:
        VerifierError: no chat template.
        DataError: naming the row: no answer, one whose tokens cannot be told for certain, or none within `max_tokens`.
    """
    return _row(tokenizer, masks.derive(tokenizer, messages, tools, arguments=arguments, row=row), max_tokens, row)


def from_turns(
    tokenizer: Any, turns: Sequence[tuple[Sequence[int], Sequence[int]]], *, max_tokens: int = 1 << 30, row: str = ""
) -> Tokenised:
    """A row from what the verifier was given and what it generated: the last prompt and answer, earlier answers found in it.

    An earlier answer reaches the later prompt as text. It is supervised where that text gave the same tokens after the same
    prompt, and only that far: there the verifier's own states are the ones it had when it spoke.

    Args:
        turns: (prompt ids, answer ids) in order; the prompt as `prompt_ids` gives it, the answer with its end-of-turn token.

    Raises:
        DataError: no turn, an empty prompt or answer, or none of the last answer within `max_tokens`.
    """
    if not turns or not all(len(prompt) and len(answer) for prompt, answer in turns):
        raise DataError("a turn without prompt or answer", where=row, do="leave the row out, or let the verifier answer it again")
    ids = [int(i) for i in (*turns[-1][0], *turns[-1][1])]
    mask = [0] * len(turns[-1][0]) + [1] * len(turns[-1][1])
    whole = 1
    for prompt, answer in turns[:-1]:
        start = len(prompt)
        same = max(0, len(os.path.commonprefix([ids, [*prompt, *answer]])) - start)
        mask[start : start + same] = [1] * same
        whole += same == len(answer)
    notes = [RETOKENISED] * (whole < len(turns))
    return _row(tokenizer, masks.Mask(ids, mask, "generated", len(turns), whole, notes), max_tokens, row)


def _cut(text: str, limit: int) -> str:
    """Text with its middle left out beyond `limit` characters, escaped."""
    if len(text) <= limit:
        return html.escape(text)
    half = limit // 2
    return f"{html.escape(text[:half])}<i> … {len(text) - 2 * half:,} characters … </i>{html.escape(text[-half:])}"


def mask_html(tokenizer: Any, tokenised: Tokenised, *, run_characters: int = 600, limit: int = 6000) -> str:
    """The row as coloured text: what is trained on against what is context, special tokens framed.

    Self-contained and readable on light and dark pages (translucent colours, no fixed text colour). Every text is escaped.

    Args:
        run_characters: a longer run loses its middle.
        limit: characters of text in all; what is behind them is counted, not shown.
    """
    special = set(specials(tokenizer).values())
    ids, mask = tokenised.input_ids, tokenised.loss_mask
    kinds = [(bool(m), t in special, i if t in special else -1) for i, (t, m) in enumerate(zip(ids, mask, strict=True))]
    edges = [0, *(i for i in range(1, len(ids)) if kinds[i] != kinds[i - 1]), len(ids)]
    colour = {True: "background:rgba(46,160,67,.3)", False: "opacity:.75"}
    frame = ";border:1px solid currentColor;border-radius:3px;padding:0 2px;font-size:85%"
    parts, shown = [], 0
    for start, stop in zip(edges, edges[1:], strict=False):
        if shown >= limit:
            parts.append(f"<i> … {len(ids) - start:,} more tokens</i>")
            break
        supervised, framed, _ = kinds[start]
        text = decode(tokenizer, ids[start:stop])
        shown += min(len(text), run_characters)
        style = f"unicode-bidi:isolate;{colour[supervised]}{frame if framed else ''}"
        parts.append(f'<span style="{style}">{_cut(text, run_characters)}</span>')
    share = f"{tokenised.supervised:,} of {len(ids):,} tokens supervised; mask from {html.escape(tokenised.source)}"
    legend = f'<span style="{colour[True]}">trained on</span> · <span style="{colour[False]}">context</span> · {share}'
    name = f"<b>{html.escape(tokenised.id)}</b> · " if tokenised.id else ""
    box = "border:1px solid rgba(128,128,128,.5);border-radius:4px;padding:8px;line-height:1.6"
    text_box = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;max-height:28em;overflow:auto"
    return f'<div style="{box}"><div>{name}{legend}</div><div style="{text_box}">{"".join(parts)}</div></div>'
