"""What a benchmark gives: lines that compare two measured values, the table they are shown in and the file they are kept in."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from helpers import files, provenance


@dataclass(frozen=True)
class Line:
    """One comparison: `ratio` is ours over the other's, `spread` its smallest and largest value over the rounds."""

    benchmark: str
    name: str
    unit: str
    ours: float
    other: float
    against: str  # what `other` was measured on
    ratio: float
    spread: tuple[float, float]
    n: int
    aim: str  # e.g. ">= 2.6"; empty where there is none
    machine: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the ratio meets the aim; None without one."""
        if not self.aim:
            return None
        sign, limit = self.aim.split()
        return self.ratio >= float(limit) if sign == ">=" else self.ratio <= float(limit)


def compared(benchmark: str, name: str, unit: str, ours: Sequence[float], other: Sequence[float], *, against: str, aim: str = "") -> Line:
    """A line from paired rounds: medians of both, their ratio, and the ratios of single rounds as spread.

    Args:
        ours, other: one value per round, measured next to each other.
    """
    if len(ours) != len(other) or not ours:
        raise ValueError(f"{len(ours)} rounds of ours, {len(other)} of the other")
    a, b = statistics.median(ours), statistics.median(other)
    pairs = [x / y for x, y in zip(ours, other, strict=True)]
    return Line(benchmark, name, unit, a, b, against, a / b, (min(pairs), max(pairs)), len(ours), aim)


def machine() -> str:
    """The machine in words: cores, processor and what it has for bfloat16, memory, torch. No host name, no path."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(found.get("flags", "").split())
    has = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    parts = [
        f"{provenance.cores()} cores, {torch.get_num_threads()} threads",
        " ".join([found.get("model name", platform.machine()), *has[-2:]]),
        f"{provenance.memory_gb()} GB",
        *gpus,
        f"torch {torch.__version__}",
    ]
    return ", ".join(parts)


def table(found: Sequence[Line]) -> str:
    """All lines as one text table."""
    head = ["benchmark", "what", "ours", "other", "unit", "against", "ratio", "spread", "n", "aim", ""]
    rows = [
        [
            line.benchmark, line.name, f"{line.ours:,.4g}", f"{line.other:,.4g}", line.unit, line.against, f"{line.ratio:.2f}",
            f"{line.spread[0]:.2f}–{line.spread[1]:.2f}", str(line.n), line.aim, {None: "", True: "reached", False: "missed"}[line.reached],
        ]
        for line in found
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def read(path: Path) -> list[Line]:
    """Lines of a results file; none where there is no file."""
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [Line(**row | {"spread": tuple(row["spread"])}) for row in rows]


def keep(path: Path, found: Sequence[Line]) -> None:
    """Write lines; those of the file that were not measured this time stay as they are, with the machine they name."""
    fresh = {(line.benchmark, line.name): line for line in found}
    old = [line for line in read(path) if (line.benchmark, line.name) not in fresh]
    files.write_json(path, [asdict(line) for line in sorted([*old, *found], key=lambda line: line.benchmark)])
