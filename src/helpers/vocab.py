"""The draft's vocabulary: which of the verifier's tokens it can propose, and what leaving the others out costs.

V is the verifier's vocabulary (padding included), D the draft's, K the drafted tokens per step. `d2t` [D] int64 holds offsets,
verifier id = draft id + d2t[draft id]; `t2d` [V] bool marks the verifier's ids that the draft has. Both, and the token counts, are
files in speculators' layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers.errors import DamagedInput, DataError, MissingInput, ParameterError, StaleInput
from helpers.files import atomic, shown, write_json
from helpers.rendering import specials

MAP = "vocab_map.json"
COUNTS = "token_freq.pt"
MEND = "run notebook 02 again (`workbook run PARAMS --only 02`)"


def supervised_ids(row: Any) -> np.ndarray:
    """Token ids [N] int64 that the mask of a row selects; a row is (input_ids, loss_mask) or has both under those names."""
    ids, mask = (row["input_ids"], row["loss_mask"]) if hasattr(row, "keys") else row
    ids, mask = np.asarray(ids, dtype=np.int64), np.asarray(mask)
    if ids.shape != mask.shape:
        raise DataError(f"input_ids {ids.shape} and loss_mask {mask.shape} differ in length")
    return ids[mask == 1]


def token_counts(rows: Iterable[Any], vocab_size: int) -> np.ndarray:
    """How often each token is supervised: [V] int64.

    Raises:
        DataError: ids outside the vocabulary, ids and mask of unequal length (naming the row), or no supervised token at all.
    """
    counts, held, waiting = np.zeros(vocab_size, dtype=np.int64), [], 0
    for n, row in enumerate(rows):
        ids = supervised_ids(row)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise DataError(f"token id {wrong} in a vocabulary of {vocab_size:,}", where=f"row {n}", do="use the verifier's own tokenizer")
        held.append(ids)
        waiting += len(ids)
        if waiting > 4 * vocab_size:  # one pass over V for many rows, and never all rows in memory
            counts, held, waiting = counts + np.bincount(np.concatenate(held), minlength=vocab_size), [], 0
    counts += np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *held]), minlength=vocab_size)
    if not counts.any():
        raise DataError("no supervised token in any row", where="loss_mask", do="check the pre-flight report of notebook 01")
    return counts


def save_counts(counts: np.ndarray, path: str | Path) -> None:
    """Write counts as speculators' `token_freq.pt`: a dict of token id to count, tokens never seen left out. Raises DiskFull."""
    with atomic(path) as temporary:
        torch.save({int(i): int(counts[i]) for i in np.flatnonzero(counts)}, temporary)


def load_counts(path: str | Path, vocab_size: int) -> np.ndarray:
    """Read `token_freq.pt`, ours or speculators', as [V] int64.

    Raises:
        MissingInput, DamagedInput: no such file, or not a dict of ids within the vocabulary to counts.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingInput(f"no token counts {path.name}", where=shown(path), do=MEND)
    try:
        found = torch.load(path, weights_only=True)
        ids, values = np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.int64)
        counts = np.zeros(vocab_size, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or values.min() < 0):
            raise ValueError("a negative id or count")
        counts[ids] = values
    except Exception as error:  # unpickling raises many kinds
        raise DamagedInput(f"token counts cannot be read: {type(error).__name__}: {error}", where=shown(path), do=MEND) from error
    return counts


def special_ids(tokenizer: Any, more: Iterable[int] = (), *, vocab_size: int) -> list[int]:
    """Ids the draft must be able to propose whatever their count: special tokens, and `more` (the verifier's end-of-turn ids)."""
    return sorted(i for i in {*specials(tokenizer).values(), *(int(i) for i in more)} if 0 <= i < vocab_size)


def entry_order(counts: np.ndarray, vocab_size: int, always_keep: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """All V ids in the order they enter a draft vocabulary (kept ones, then by count, ties by id), and the counts padded to V.

    Raises:
        DataError, ParameterError: counts, or ids to keep, beyond the vocabulary.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts[vocab_size:].any():
        do = "count with the verifier's own tokenizer"
        raise DataError(f"counts of shape {counts.shape} do not fit a vocabulary of {vocab_size:,}", where=COUNTS, do=do)
    padded = np.zeros(vocab_size, dtype=np.int64)
    padded[: len(counts)] = counts[:vocab_size]
    keep = np.zeros(vocab_size, dtype=bool)
    kept = np.array(sorted({int(i) for i in always_keep}), dtype=np.int64)
    if len(kept) and not 0 <= kept[0] <= kept[-1] < vocab_size:
        what = f"tokens to keep have ids from {kept[0]} to {kept[-1]}, the vocabulary has {vocab_size:,}"
        raise ParameterError(what, where="always_keep", do="use the tokenizer that belongs to the verifier")
    keep[kept] = True
    return np.lexsort((np.arange(vocab_size), -padded, ~keep)), padded


@dataclass(frozen=True)
class VocabMap:
    """A draft vocabulary: `ids` [D] ascending verifier ids, out of V; `kept` whatever their count, `filled` never seen in training."""

    ids: np.ndarray
    vocab_size: int
    kept: list[int] = field(default_factory=list)
    filled: int = 0

    @property
    def size(self) -> int:
        """D."""
        return len(self.ids)

    @property
    def d2t(self) -> np.ndarray:
        """[D] int64 offsets: verifier id minus draft id."""
        return self.ids - np.arange(self.size, dtype=np.int64)

    @property
    def t2d(self) -> np.ndarray:
        """[V] bool: the verifier's ids that the draft has."""
        marks = np.zeros(self.vocab_size, dtype=bool)
        marks[self.ids] = True
        return marks

    def save(self, folder: str | Path, *, verifier: str, data: str) -> list[Path]:
        """Write `d2t-<D>.npy`, `t2d-<D>.npy` and `vocab_map.json`, which names the verifier and the data's fingerprint.

        Returns: the three paths. Raises DiskFull.
        """
        check(self.d2t, self.t2d)
        paths = [Path(folder) / f"{name}-{self.size}.npy" for name in ("d2t", "t2d")]
        for path, array in zip(paths, (self.d2t, self.t2d), strict=True):
            with atomic(path) as temporary:
                np.save(temporary, array)
        facts = {"verifier": verifier, "data": data, "draft_vocab_size": self.size, "vocab_size": self.vocab_size}
        write_json(Path(folder) / MAP, facts | {"filled": self.filled, "kept": self.kept})
        return [*paths, Path(folder) / MAP]


def check(d2t: np.ndarray, t2d: np.ndarray) -> None:
    """Hold a map against what the draft and the engines assume: range, uniqueness, and that both arrays say the same.

    Raises:
        DataError: lists every fault.
    """
    if d2t.ndim != 1 or t2d.ndim != 1 or d2t.dtype != np.int64 or t2d.dtype != bool or not len(d2t):
        raise DataError(f"d2t {d2t.dtype}{d2t.shape} and t2d {t2d.dtype}{t2d.shape} must be int64 [D] and bool [V]", do=MEND)
    ids = d2t + np.arange(len(d2t), dtype=np.int64)
    inside = ids[(ids >= 0) & (ids < len(t2d))]
    faults = []
    if len(inside) < len(ids):
        faults.append(f"{len(ids) - len(inside)} draft tokens point outside the vocabulary of {len(t2d):,}")
    if repeated := len(ids) - len(np.unique(ids)):
        faults.append(f"{repeated} draft tokens share a verifier token with another")
    if (ids[1:] <= ids[:-1]).any():
        faults.append("verifier ids do not rise with draft ids")
    if int(t2d.sum()) != len(d2t) or not t2d[inside].all():
        faults.append(f"t2d marks {int(t2d.sum()):,} tokens, {int((~t2d[inside]).sum())} of d2t's {len(d2t):,} are not among them")
    if faults:
        raise DataError("the vocabulary map is not consistent: " + "; ".join(faults), where="d2t and t2d", do=MEND)


def build(counts: np.ndarray, draft_vocab_size: int, vocab_size: int, always_keep: Iterable[int] = ()) -> VocabMap:
    """The D tokens of the draft: those always kept, then the most frequent, ties to the lower id, and unseen ones from id 0 up.

    With nothing to keep this is speculators' own mapping. D = V gives the identity. `counts` may end before V (a tokenizer
    smaller than the padded embedding).

    Raises:
        ParameterError: D below 1, above V, or too small for the tokens to keep. DataError: counts that do not fit V.
    """
    keep = sorted({int(i) for i in always_keep})
    if not 1 <= draft_vocab_size <= vocab_size:
        raise ParameterError(
            f"draft vocabulary of {draft_vocab_size:,} tokens; the verifier has {vocab_size:,}",
            where="draft_vocab_size",
            do=f"choose 1 to {vocab_size}",
        )
    if len(keep) > draft_vocab_size:
        raise ParameterError(
            f"draft vocabulary of {draft_vocab_size:,} tokens, but {len(keep):,} special and end-of-turn tokens are always kept",
            where="draft_vocab_size",
            do=f"choose at least {len(keep)}",
        )
    order, padded = entry_order(counts, vocab_size, keep)
    ids = np.sort(order[:draft_vocab_size]).astype(np.int64)
    unseen = ids[padded[ids] == 0]
    found = VocabMap(ids, vocab_size, keep, int((~np.isin(unseen, keep)).sum()))
    check(found.d2t, found.t2d)
    return found


def load(folder: str | Path, *, verifier: str, data: str) -> VocabMap:
    """Read a map back and refuse one made for another verifier or from other data.

    Raises:
        MissingInput: no map there. DamagedInput: unreadable or inconsistent files. StaleInput: another verifier's or data's map.
    """
    folder = Path(folder)
    if not (folder / MAP).is_file():
        raise MissingInput("no vocabulary map", where=shown(folder / MAP), do=MEND)
    try:
        facts = json.loads((folder / MAP).read_text(encoding="utf-8"))
        found = {"verifier": facts["verifier"], "data": facts["data"]}
        size = int(facts["draft_vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedInput(f"{MAP} cannot be read: {error!r}", where=shown(folder / MAP), do=MEND) from error
    wrong = [f"{key} {found[key]}, this run has {here}" for key, here in (("verifier", verifier), ("data", data)) if found[key] != here]
    if wrong:
        raise StaleInput("the vocabulary map was made for " + " and for ".join(wrong), where=shown(folder / MAP), do=MEND)
    try:
        d2t, t2d = (np.load(folder / f"{name}-{size}.npy") for name in ("d2t", "t2d"))
        check(d2t, t2d)
        if (len(d2t), len(t2d)) != (size, facts["vocab_size"]):
            raise DataError(f"sizes {len(d2t)} and {len(t2d)} instead of {size} and {facts['vocab_size']}")
    except FileNotFoundError as error:
        raise MissingInput(f"no {Path(error.filename).name}", where=shown(folder), do=MEND) from error
    except (ValueError, OSError, EOFError, DataError) as error:
        raise DamagedInput(f"the vocabulary map cannot be used: {error}", where=shown(folder), do=MEND) from error
    return VocabMap(d2t + np.arange(size, dtype=np.int64), len(t2d), list(facts.get("kept", [])), int(facts.get("filled", 0)))
