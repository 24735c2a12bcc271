"""What a figure came from: versions, commit, machine. Imports nothing heavy, so that every manifest can carry it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

from helpers.params import ROOT

PACKAGES = ("torch", "transformers", "speculators", "datasets", "papermill", "numpy")


def versions() -> dict[str, str | None]:
    """Installed version of Python and of each package that decides figures; None where it is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> tuple[str | None, bool | None]:
    """Commit of the repository and whether files differ from it; (None, None) outside git.

    Renders do not count as changes: a run writes the first of them before it starts the second notebook.
    """
    if _git("rev-parse", "--show-toplevel") != str(ROOT):
        return None, None
    status = _git("status", "--porcelain", "--", ".", ":(exclude)rendered")
    return _git("rev-parse", "HEAD"), None if status is None else bool(status)


def cores() -> int:
    """Cores this process may run on (Slurm and taskset narrow them), not what the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gb() -> float | None:
    """Memory of the machine in GB (10^9 bytes), or of the container where that is less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as stream:
            total = min(total, int(stream.read()))
    except (OSError, ValueError):  # no limit set, or no such file
        pass
    return round(total / 1e9, 1)


def machine(device: str) -> dict[str, Any]:
    """Cores, memory and GPUs that `device` (auto, cpu, cuda or cuda:N) means here.

    torch is asked only where the process has imported it already: a process without it has computed nothing on a GPU.
    """
    torch, gpus = sys.modules.get("torch"), []
    if torch is not None and device != "cpu" and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    used = "cpu" if not gpus else "cuda" if device == "auto" else device
    return {"device": used, "machine": {"cores": cores(), "memory_gb": memory_gb(), "gpus": gpus}}


def provenance(device: str) -> dict[str, Any]:
    """Versions, commit, dirty flag, device and machine, as manifests and renders record them."""
    sha, dirty = commit()
    return {"versions": versions(), "commit": sha, "dirty": dirty, **machine(device)}
