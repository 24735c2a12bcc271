"""Prompt files and hub data sets: every row becomes a prompt, or is listed with its line and the reason it cannot be used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from helpers.errors import DataError, ParameterError
from helpers.files import shown
from helpers.messages import SHAPES, Prompt, Unusable, read_row
from helpers.params import resolve

WRAPPERS = ("data", "rows", "prompts", "examples")


@dataclass
class PromptSet:
    """What a source held: rows taken (shuffled), rows refused as (line, reason), and where every other one went."""

    source: str
    rows: list[Prompt]
    rejected: list[tuple[int, str]] = field(default_factory=list)
    renamed: list[tuple[int, str, str]] = field(default_factory=list)
    beyond_limit: int = 0
    blank_lines: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """`found` is `taken` + `beyond_limit` + `rejected`; blank lines are no rows."""
        taken, rejected = len(self.rows), len(self.rejected)
        return {
            "found": taken + self.beyond_limit + rejected,
            "taken": taken,
            "beyond_limit": self.beyond_limit,
            "rejected": rejected,
            "renamed": len(self.renamed),
            "blank_lines": self.blank_lines,
        }


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        return Unusable(f"not JSON: {error}")
    except RecursionError:
        return Unusable("not JSON: nested too deeply")


def _scan(text: str, at: int) -> Iterator[tuple[int, Any]]:
    """JSON values one after another from `at`, commas between them or not; after a broken one it goes on with the next like it."""
    decoder, gap, number, seen, line = json.JSONDecoder(), re.compile(r"[\s,]*"), 0, 0, 1
    bracket = at > 0
    while (at := gap.match(text, at).end()) < len(text):
        line, seen = line + text.count("\n", seen, at), at
        if bracket and text[at] == "]":
            if text[at + 1 :].strip():
                yield line, Unusable("text behind the closing bracket of the array")
            return
        number += 1
        try:
            value, at = decoder.raw_decode(text, at)
            yield line, value
        except (ValueError, RecursionError) as error:
            margin = text[text.rfind("\n", 0, at) + 1 : at]
            following = re.compile(r"\n" + re.escape(margin) + r"\{").search(text, at) if not margin.strip() else None
            lost = "" if following else "; nothing behind it was read"
            yield line, Unusable(f"element {number} is not JSON: {error}{lost}")
            if following is None:
                return
            at = following.end() - 1
    if bracket:
        yield line, Unusable("the file ends inside its array")


def _values(text: str) -> Iterator[tuple[int, Any]]:
    """(line, value or reason) of every row in a JSONL or JSON text that is not empty."""
    lines = text.split("\n")  # never splitlines(): U+2028 may stand inside a JSON text
    filled = [(n, stripped) for n, raw in enumerate(lines, start=1) if (stripped := raw.strip())]
    first = filled[0][1]
    whole = _json(text) if len(filled) == 1 or isinstance(_json(first.removesuffix(",")), Unusable) else None
    if isinstance(whole, dict):
        wrapped = not any(k in whole for k in SHAPES)
        inner = next((whole[k] for k in WRAPPERS if wrapped and isinstance(whole.get(k), list)), None)
        yield from [(filled[0][0], whole)] if inner is None else ((n, value) for n, value in enumerate(inner, start=1))
    elif isinstance(whole, list) and _conversation(whole):
        yield filled[0][0], whole
    elif whole is not None and first[0] == "[":
        yield from _scan(text, text.index("[") + 1)
    elif whole is not None and _spans_lines(text):
        yield from _scan(text, 0)
    else:
        yield from ((n, _json(stripped.removesuffix(",").rstrip())) for n, stripped in filled)


def _conversation(value: list[Any]) -> bool:
    """Whether a list is the messages of one row rather than rows."""
    return bool(value) and all(isinstance(m, dict) and ({"role", "content"} <= m.keys() or {"from", "value"} <= m.keys()) for m in value)


def _spans_lines(text: str) -> bool:
    """Whether the text opens with one JSON value over several lines (objects printed one after another)."""
    text = text.lstrip()
    try:
        return "\n" in text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return False


def _decoded(raw: bytes) -> str:
    utf16 = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    text = raw.decode("utf-16" if utf16 else "utf-8-sig", errors="replace" if utf16 else "surrogateescape")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _hub_rows(source: str) -> Iterator[tuple[int, Any]]:
    from datasets import load_dataset  # here, since its import takes seconds that files do not need

    name, *rest = source.removeprefix("hf:").split(":")
    if not name or len(rest) > 2 or not all(rest):
        do = "write hf:owner/name, hf:owner/name:split or hf:owner/name:subset:split"
        raise DataError(f"not a data set: {source}", where=source, do=do)
    subset, split = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0] if rest else "train")
    try:
        table = load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises a dozen kinds for a wrong name, no network, no permission
        raise DataError(
            f"the data set could not be loaded: {type(error).__name__}: {error}",
            where=source,
            do="check its name, split and your access, or download it once and give the file",
        ) from error
    yield from enumerate(table, start=1)


def _file_rows(path: Path) -> tuple[Iterator[tuple[int, Any]], int]:
    do = "give a JSONL or JSON file of prompts, or hf:owner/name"
    if not path.is_file():
        raise DataError(f"no prompt file {shown(path)}", where=shown(path), do=do)
    text = _decoded(path.read_bytes())
    if not text.strip():
        raise DataError(f"the prompt file {shown(path)} is empty", where=shown(path), do=do)
    blank = sum(not line.strip() for line in text.removesuffix("\n").split("\n"))
    return _values(text), blank


def _unique(prompts: list[Prompt], given: set[str]) -> tuple[list[Prompt], list[tuple[int, str, str]]]:
    """The same prompts with every id once: the second `a` becomes `a-2`, or the next number no row has."""
    seen: set[str] = set()
    number: dict[str, int] = {}
    renamed, out = [], []
    for prompt in prompts:
        name = prompt.id
        while name in seen or (name != prompt.id and name in given):
            number[prompt.id] = number.get(prompt.id, 1) + 1
            name = f"{prompt.id}-{number[prompt.id]}"
        seen.add(name)
        if name != prompt.id:
            renamed.append((prompt.line, prompt.id, name))
            prompt = replace(prompt, id=name)
        out.append(prompt)
    return out, renamed


def read_prompts(path: str | Path, *, limit: int = 0, seed: int = 0, first: str = "") -> PromptSet:
    """Read a prompt file, or `hf:owner/name[:[subset:]split]`, shuffle by `seed` and take the first `limit` (0 takes all).

    Rows are ordered by a hash of seed and id, so a smaller limit gives a prefix and a row more or less moves no other.

    Args:
        first: id of a prompt that leads the order whatever the seed, so that no limit cuts it (the example followed through the pages).

    Raises:
        DataError: no such file or data set, an empty one, or one without a usable row (the first reasons are listed).
        ParameterError: a negative limit, or no usable row with the id `first`.
    """
    if limit < 0:
        raise ParameterError(f"limit {limit} is negative", where="prompts_limit", do="give 0 to take every prompt")
    source, blank = str(path), 0
    if source.startswith("hf:"):
        stem, found = source.removeprefix("hf:").split(":")[0].rsplit("/", 1)[-1], _hub_rows(source)
    else:
        file = resolve(path)
        source, stem = shown(file), file.stem
        found, blank = _file_rows(file)
    prompts: list[Prompt] = []
    rejected: list[tuple[int, str]] = []
    for line, value in found:
        try:
            if isinstance(value, Unusable):
                raise value
            prompts.append(read_row(value, line=line, default_id=f"{stem}-{line}"))
        except Unusable as reason:
            rejected.append((line, str(reason)))
        except RecursionError:
            rejected.append((line, "nested too deeply"))
    if not prompts:
        first = "\n".join(f"  - line {line}: {reason}" for line, reason in rejected[:5])
        more = f"\n  - and {len(rejected) - 5} more" if len(rejected) > 5 else ""
        do = f"give rows with one of: {', '.join(SHAPES)}"
        what = f"none of {len(rejected)} rows can be used:\n{first}{more}" if rejected else "no row in it"
        raise DataError(what, where=source, do=do)
    prompts, renamed = _unique(prompts, {p.id for p in prompts})
    prompts.sort(key=lambda p: (p.id != first, hashlib.sha256(f"{seed}\0{p.id}".encode()).digest()))
    if first and prompts[0].id != first:
        some = ", ".join(p.id for p in prompts[:5])
        raise ParameterError(f"no prompt {first!r} in {source}", where="example_id", do=f"name one that is there, such as {some}")
    taken = prompts[:limit] if limit else prompts
    return PromptSet(source, taken, rejected, renamed, len(prompts) - len(taken), blank)
