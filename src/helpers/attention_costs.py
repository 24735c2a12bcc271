"""What a training step costs with one attention implementation: seconds and peak memory by sequence length."""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from helpers.probe import Job, Probe, Save, in_words, packed

RUNS = 3  # of each length, while they fit into SECONDS; then one
SECONDS = 30.0


class Memory:
    """Peak memory of this process (or of the GPU) above what was held when this object was made, in bytes."""

    def __init__(self, device: torch.device):
        self.device = device
        gc.collect()
        self.base = self._peak()

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):  # without it the peak only rises, which rising lengths do anyway
                Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> int:
        self.reset()
        return self.read(0)

    def read(self, base: int | None = None) -> int:
        base = self.base if base is None else base
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - base
        status = Path("/proc/self/status")
        if status.is_file():
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            return int(lines["VmHWM"].split()[0]) * 1024 - base
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, in kilobytes elsewhere
        return peak * (1 if sys.platform == "darwin" else 1024) - base


def _available(device: torch.device) -> float:
    """Bytes that can still be had."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), float("inf"))


def cost(entry: dict[str, Any], job: Job, save: Save = lambda _: None) -> dict[str, Any]:
    """Seconds of a training step (forward and backward, median) and peak memory above the built draft, by sequence length.

    Returns:
        `timings`, one {tokens, seconds, bytes, runs, note} per length. Costs may grow with the square of the length: a length
        at which a step would then outlast the job's seconds, or the memory there is, is left out (`seconds` None), and the note
        says so.
    """
    probe = Probe(entry, job)
    memory, found, begun = Memory(probe.device), {"timings": []}, time.perf_counter()
    last: dict[str, Any] | None = None
    for tokens in sorted(job["lengths"]):
        line: dict[str, Any] = {"tokens": tokens, "seconds": None, "bytes": None, "runs": 0, "note": ""}
        found["timings"].append(line)
        growth = (tokens / last["tokens"]) ** 2 if last else 0.0
        expected = last["seconds"] * growth if last else 0.0
        if expected > job["seconds"]:
            line["note"] = f"left out: up to {expected:.0f} s a step, {job['seconds']:.0f} s allowed"
            continue
        if last and last["bytes"] * growth > _available(probe.device):
            line["note"] = f"left out: up to {last['bytes'] * growth / 2**30:.1f} GiB, more than is free"
            continue
        save(found | {"stage": f"a step of {tokens:,} tokens"})
        runs = RUNS if RUNS * expected < SECONDS - (time.perf_counter() - begun) else 1
        try:
            row = packed([tokens], 0, job["proposal"], probe.device, job["seed"])
            if last is None:
                _timed(probe, row, job["dtype"])  # first call: threads, kernels, compilation
            memory.reset()
            seconds = [_timed(probe, row, job["dtype"]) for _ in range(runs)]
        except Exception as error:  # as in `check`
            line["note"] = in_words(error)
            continue
        line |= {"seconds": statistics.median(seconds), "bytes": memory.read(), "runs": runs}
        last = line
    return found


def _timed(probe: Probe, row: dict[str, torch.Tensor], dtype: str) -> float:
    synchronise = torch.cuda.synchronize if probe.device.type == "cuda" else lambda: None
    probe.model.zero_grad(set_to_none=True)
    synchronise()
    begun = time.perf_counter()
    probe.loss(row, dtype).backward()
    synchronise()
    probe.seen.clear()
    return time.perf_counter() - begun
