"""The library's trainer on any device: its private names replaced in one place, guarded by version.

It refuses or breaks on a CPU (device, timer, autocast), and its progress bars would flood a page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from helpers.errors import WorkbookError

SUPPORTED = ("0.9",)  # speculators versions whose private names the shim was written against


def shim(device: torch.device) -> None:
    """Point the library's trainer at `device`; on a CPU also replace its accelerator calls.

    Raises:
        WorkbookError: another speculators version, whose private names may mean something else.
    """
    import importlib.metadata

    version = importlib.metadata.version("speculators")
    if not version.startswith(SUPPORTED):
        raise WorkbookError(
            f"speculators {version} is installed; the training shim was written against {' and '.join(SUPPORTED)}",
            where="helpers.library_shim",
            do="install the pinned version (constraints.txt), or read the Trainer's seams again and extend SUPPORTED",
        )
    from speculators.train import checkpointer, distributed, trainer

    # one quiet line per interval is ours to print; its progress bars would flood a rendered page
    trainer.tqdm = lambda iterable, **_: iterable
    logging.getLogger("speculators").setLevel(logging.WARNING)
    if device.type == "cpu":
        distributed._local_rank = "cpu"
        checkpointer.get_current_device = lambda: "cpu"
        trainer._StepTimer = _CpuTimer
    else:
        torch.cuda.set_device(device.index or 0)
        distributed._local_rank = device.index or 0


class _CpuTimer:
    """The library's step timer without accelerator synchronisation."""

    def __init__(self, enabled: bool = False):
        self.enabled, self._marks = enabled, {}

    def reset(self, enabled: bool) -> None:
        self.enabled, self._marks = enabled, {}

    def mark(self, name: str) -> None:
        self._marks[name] = time.perf_counter()

    def mark_value(self, name: str, value: float) -> None:
        self._marks[name] = value

    def now(self) -> float:
        return time.perf_counter()

    def profile(self, num_tokens: int) -> dict[str, float] | None:
        if not self.enabled:
            return None
        seconds = self._marks["opt"] - self._marks["start"]
        fetch = self._marks["fetch"] - self._marks["start"]
        return {"tokens_per_s": num_tokens / seconds, "step_ms": seconds * 1000, "fetch_frac": fetch / seconds}


class _Collector(logging.Handler):
    def __init__(self, record: Callable[[dict[str, Any]], None]):
        super().__init__()
        self.keep = record

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict) and "train" in record.msg:
            self.keep(record.msg)


def collect(logger: logging.Logger, record: Callable[[dict[str, Any]], None]) -> None:
    """Hand every training step of the library's metric log to `record`, and to nobody else."""
    logger.handlers = [_Collector(record)]
    logger.setLevel(logging.INFO)
    logger.propagate = False
