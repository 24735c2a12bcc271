"""What a notebook shows beside figures: tables, checks, boxes and the token view, as static HTML.

Everything that comes from data is escaped. Styles are written into the elements, in the forms that JupyterLab keeps for
notebooks it does not trust; colours are translucent, so that they read on a light and on a dark page; nothing needs
JavaScript. Dollar signs and backslashes of data sit in elements of their own, or the page would typeset them as formulas.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from IPython.display import HTML

from helpers.errors import DataError

LINE = "1px solid rgba(128, 128, 128, 0.4)"
TABLE = "border-collapse: collapse; margin: 8px 0px; font-size: 13px"
CELL = "padding: 4px 10px; vertical-align: top"
GREEN, RED, GREY = "rgba(0, 158, 115, 0.3)", "rgba(213, 94, 0, 0.35)", "rgba(128, 128, 128, 0.2)"
# Each kind has a line of its own under the token, for readers and printers without these colours.
KINDS = {
    "prefill": ("given by prefill, not counted", f"background-color: {GREY}"),
    "accepted": ("drafted and accepted", f"background-color: {GREEN}; border-bottom: 2px solid #009e73"),
    "corrected": ("guess refused: the verifier's token instead", f"background-color: {RED}; border-bottom: 2px dashed #d55e00"),
    "bonus": (
        "all guesses accepted: the verifier's token on top",
        "background-color: rgba(0, 114, 178, 0.3); border-bottom: 2px dotted #0072b2",
    ),
}


def escape(text: Any) -> str:
    """Text as HTML that shows it as it is, in a cell or a token."""
    return html.escape(str(text)).replace("$", "<span>$</span>").replace("\\", "<span>\\</span>")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def shown(value: Any, form: str | Callable[[Any], str] | None = None) -> str:
    """A value as a table writes it (not yet escaped): – for None and NaN, yes and no, thousands apart, four digits."""
    if value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float | np.floating) and math.isnan(value)):
        return "–"  # the two names are pandas' own kinds of nothing
    if callable(form):
        return str(form(value))
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if form:
        return form.format(value) if "{" in form else format(value, form)
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {shown(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(shown(v) for v in value)
    return str(value)


def _html_table(heads: Sequence[str], lines: Sequence[Sequence[tuple[str, str]]], caption: str) -> HTML:
    """Cells are (HTML, style); heads and caption are escaped here."""
    aligns = [cell[1] for cell in lines[0]] if lines else [""] * len(heads)
    align = ["text-align: right" if "right" in style else "text-align: left" for style in aligns]
    top = (
        f'<caption style="caption-side: top; text-align: left; font-weight: bold; padding: 4px 0px">{escape(caption)}</caption>'
        if caption
        else ""
    )
    head = "".join(f'<th style="{CELL}; {a}; border-bottom: {LINE}">{escape(h)}</th>' for h, a in zip(heads, align, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}; {style}; border-bottom: {LINE}">{cell}</td>' for cell, style in line) + "</tr>"
        for line in lines
    )
    return HTML(f'<table style="{TABLE}">{top}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def table(rows: Any, caption: str = "", formats: Mapping[str, str | Callable[[Any], str]] | None = None) -> HTML:
    """A table of rows.

    Args:
        rows: dicts (columns in the order they first appear) or a pandas DataFrame (a named index becomes a column).
        caption: what it shows, above it.
        formats: column → format (".2f", "{:.1%}") or function; see `shown` for what the others get.

    Raises:
        DataError: `formats` names a column that is not there.
    """
    if hasattr(rows, "to_dict"):
        frame = rows.reset_index() if any(rows.index.names) else rows
        columns, rows = (
            [str(c) for c in frame.columns],
            [dict(zip(map(str, frame.columns), r, strict=True)) for r in frame.itertuples(index=False)],
        )
    else:
        rows = list(rows)
        columns = list(dict.fromkeys(str(name) for row in rows for name in row))
    unknown = [name for name in formats or {} if name not in columns]
    if unknown and rows:
        raise DataError(f"formats for {', '.join(unknown)}, but the columns are {', '.join(columns)}", do="correct the column's name")
    numeric = {c for c in columns if all(_is_number(r.get(c)) or r.get(c) is None for r in rows)}
    lines = [
        [(escape(shown(r.get(c), (formats or {}).get(c))), "text-align: right" if c in numeric else "text-align: left") for c in columns]
        for r in rows
    ]
    if not rows:
        columns, lines = columns or [""], [[("no rows", "text-align: left")] + [("", "text-align: left")] * (max(len(columns), 1) - 1)]
    return _html_table([c.replace("_", " ") for c in columns], lines, caption)


def result_table(
    results: Mapping[str, Any], caption: str = "Result", formats: Mapping[str, str | Callable[[Any], str]] | None = None
) -> HTML:
    """Names and values of a notebook's result, one a line; `formats` by name."""
    lines = [
        [(escape(name), "text-align: left"), (escape(shown(value, (formats or {}).get(name))), "text-align: left")]
        for name, value in results.items()
    ]
    return _html_table(["figure", "value"], lines, caption)


def checks(rows: Sequence[tuple[str, bool | None, Any, str]], caption: str = "Checks") -> HTML:
    """Gates as a table: (name, passed, figure, what to do); passed None means it did not apply. What to do shows on failure."""
    marks = {True: ("✓ passed", GREEN), False: ("✗ failed", RED), None: ("– not run", GREY)}
    lines = []
    for name, passed, figure, do in rows:
        mark, colour = marks[None if passed is None else bool(passed)]
        cells = [escape(name), f"<b>{mark}</b>", escape(shown(figure)), "" if passed or passed is None else escape(do)]
        styles = [
            "text-align: left",
            f"text-align: left; white-space: nowrap; background-color: {colour}",
            "text-align: left",
            "text-align: left",
        ]
        lines.append(list(zip(cells, styles, strict=True)))
    return _html_table(["check", "result", "figure", "what to do"], lines, caption)


def require(rows: Sequence[tuple[str, bool | None, Any, str]], *, where: str = "") -> None:
    """Stop the notebook unless every gate passed; one that did not run stops nothing.

    Raises:
        DataError: lists the failed ones with their figures and what to do.
    """
    failed = [(name, figure, do) for name, passed, figure, do in rows if passed is not None and not passed]
    if failed:
        found = "\n".join(f"  - {name}: {shown(figure)}" for name, figure, _ in failed)
        advice = "; ".join(dict.fromkeys(do for _, _, do in failed if do))
        raise DataError(f"{len(failed)} of {len(rows)} checks failed:\n{found}", where=where, do=advice)


def example_box(title: str, text: str) -> HTML:
    """A text with its line breaks, in a box under a title."""
    style = f"border: {LINE}; border-radius: 4px; padding: 8px 12px; margin: 8px 0px; max-width: 900px"
    body = "white-space: pre-wrap; font-family: monospace; font-size: 13px; margin: 4px 0px"
    return HTML(f'<div style="{style}"><b>{escape(title)}</b><div style="{body}">{escape(text)}</div></div>')


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text each token adds. Tokens that end inside a character give "" and the one that completes it gives all of it."""
    found, start, end = [], 0, 0  # text of tokens[start:end] is written; decoding from `start` keeps spaces between words
    for i in range(len(tokens)):
        before = tokenizer.decode(list(tokens[start:end]), skip_special_tokens=False)
        now = tokenizer.decode(list(tokens[start : i + 1]), skip_special_tokens=False)
        if now.endswith("\ufffd") and i + 1 < len(tokens) and i - end < 3:  # a character has at most four bytes
            found.append("")
            continue
        found.append(now[len(before) :])
        start, end = end, i + 1
    return found


def _quoted(tokenizer: Any, token: int) -> str:
    text = tokenizer.decode([int(token)], skip_special_tokens=False)
    return "‘" + text.replace("\n", "⏎").replace("\t", "⇥") + "’"


def _token(text: str, kind: str, title: str, special: bool) -> str:
    visible = text if text else "‥"
    inner = escape(visible).replace("\n", "⏎<br>").replace("\t", "⇥")
    style = KINDS[kind][1] + ("; border: 1px solid rgba(128, 128, 128, 0.8); border-radius: 3px; font-size: 11px" if special else "")
    return f'<span class="{kind}" style="{style}" title="{html.escape(title)}">{inner}</span>'


def token_view(tokenizer: Any, record: Mapping[str, Any], guesses: Sequence[Sequence[int]] | None = None) -> HTML:
    """One answer, token by token: which were accepted, where a guess was refused and what it was (on hover).

    Args:
        tokenizer: the verifier's; `decode` and `all_special_ids` are used.
        record: its chain record (see `chains`).
        guesses: drafted ids of each step in the verifier's vocabulary; None takes `record["guesses"]`.

    Raises:
        DataError: no guesses, or not as many per step as the record says were drafted.
    """
    guesses = record.get("guesses") if guesses is None else guesses
    if guesses is None or [len(g) for g in guesses] != list(record["drafted"]):
        raise DataError("guesses do not fit the record's steps", where=f"record {record['id']}", do="pass the drafted ids of every step")
    tokens, special = list(record["tokens"]), set(tokenizer.all_special_ids)
    labels = [("prefill", KINDS["prefill"][0])]
    for number, (accepted, emitted, miss, guess) in enumerate(
        zip(record["accepted"], record["emitted"], record["miss"], guesses, strict=True), 1
    ):
        for slot in range(min(accepted, emitted)):
            labels.append(("accepted", f"step {number}, position {slot + 1}: accepted"))
        if emitted > accepted and accepted < len(guess):
            why = "the verifier's token is outside the draft vocabulary" if miss == "outside" else "wrong token"
            rest = ", ".join(_quoted(tokenizer, t) for t in guess[accepted + 1 :])
            text = f"step {number}, position {accepted + 1}: the draft guessed {_quoted(tokenizer, guess[accepted])} ({why})"
            labels.append(("corrected", text + (f"; then {rest}, not used" if rest else "")))
        elif emitted > accepted:
            labels.append(
                ("bonus", f"step {number}: all {accepted} guesses accepted" if accepted else f"step {number}: nothing was drafted")
            )
    if len(labels) != len(tokens):
        raise DataError(f"{len(tokens)} tokens, but the steps emitted {len(labels) - 1} after prefill's", where=f"record {record['id']}")
    spans = [_token(p, kind, title, t in special) for p, t, (kind, title) in zip(pieces(tokenizer, tokens), tokens, labels, strict=True)]
    legend = " &nbsp; ".join(f'<span style="{style}; padding: 0px 4px">{escape(meaning)}</span>' for meaning, style in KINDS.values())
    steps = len(record["emitted"])
    length = f"{sum(record['emitted']) / steps:.2f} tokens per step over {steps} steps" if steps else "no verification step"
    head = f"<b>{escape(record['category'])}</b> · {escape(record['id'])} · {length}"
    box = f"border: {LINE}; border-radius: 4px; padding: 8px 12px; margin: 8px 0px; max-width: 900px"
    text = "white-space: pre-wrap; font-family: monospace; font-size: 13px; line-height: 1.7; margin: 8px 0px"
    note = '<div style="font-size: 11px">Hover a token for the draft\'s guess. ⏎ line break, ‥ part of a character.</div>'
    body = f'<div>{head}</div><div style="{text}">{"".join(spans)}</div><div style="font-size: 11px">{legend}</div>{note}'
    return HTML(f'<div style="{box}">{body}</div>')
