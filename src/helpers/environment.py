"""The machine and its packages: device, seeds, quiet notebooks, and what `workbook doctor` checks.

torch is imported inside functions, so that the command line starts at once.
"""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import sys
import warnings
from dataclasses import dataclass
from functools import partialmethod
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers.errors import ParameterError
from helpers.params import ROOT, Parameters
from helpers.provenance import cores, memory_gb, provenance, versions

if TYPE_CHECKING:
    import torch

INLINE = "module://matplotlib_inline.backend_inline"
DISK_GB = 3.0  # default run: states 0.4, verifier 0.4, checkpoints 0.6, the same again while a run is replaced
MEMORY_GB = 8.0  # the library's own attention at 2,048 tokens, the largest thing the default run tries


def stamp(device: str = "auto") -> dict[str, Any]:
    """Versions, commit (None outside git) with dirty flag, device, cores, memory and GPUs of this machine."""
    import torch  # noqa: F401  provenance asks the imported torch for its GPUs

    return provenance(device)


def pick_device(name: str) -> torch.device:
    """The device `name` (auto, cpu, cuda, cuda:N) means here; auto takes the first GPU if there is one.

    Raises:
        ParameterError: a GPU was asked for that is not there.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        there = f"GPUs 0..{count - 1}" if count else f"no GPU that torch {torch.__version__} can use"
        raise ParameterError(
            f"device {name} was asked for, this machine has {there}", where="parameter device", do="set device to auto or cpu"
        )
    return device


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's (CPU and GPU) generators."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def quiet() -> None:
    """No progress bars, no chatter below a warning: a page keeps what it means to show. Python warnings stay on."""
    from tqdm import TqdmExperimentalWarning
    from tqdm.rich import tqdm_rich
    from tqdm.std import tqdm

    for bar in (tqdm, tqdm_rich):  # tqdm's environment variable is read at import: too late here; the rich bar ignores it
        if not getattr(bar.__dict__["__init__"], "keywords", {}).get("disable"):
            bar.__init__ = partialmethod(bar.__init__, disable=True)
    warnings.filterwarnings("ignore", category=TqdmExperimentalWarning)
    warnings.filterwarnings("ignore", "IProgress not found")
    # Libraries yet to come read these when they are imported, so that being quiet costs no import; the rest is told directly.
    os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
    if "huggingface_hub" in sys.modules:
        sys.modules["huggingface_hub"].utils.disable_progress_bars()
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()
        sys.modules["transformers"].utils.logging.set_verbosity_error()
    for name in ("speculators", "datasets", "huggingface_hub", "httpx", "filelock", "matplotlib", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from loguru import logger

    logger.disable("speculators")  # its loader writes to stderr past logging, ten lines for every draft that is built


def _show_figures() -> None:
    """In a notebook, draw into the page even where MPLBACKEND names another backend: with Agg, figures vanish."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None and os.environ.get("MPLBACKEND", INLINE) != INLINE:
        os.environ["MPLBACKEND"] = INLINE
        shell.enable_matplotlib("inline")


def start(parameters: Parameters) -> None:
    """Begin a notebook: quiet, figures inline, seeded; prints one line with versions, device and commit.

    Raises:
        ParameterError: the device asked for is not there.
    """
    device = pick_device(parameters.device)
    quiet()
    _show_figures()
    seed_everything(parameters.seed)
    made = stamp(parameters.device)
    shown = " · ".join(f"{name} {made['versions'][name]}" for name in ("python", "torch", "transformers", "speculators"))
    gpus = made["machine"]["gpus"]
    where = f"{device} ({gpus[device.index or 0]})" if device.type == "cuda" else f"cpu ({made['machine']['cores']} cores)"
    commit = f"commit {made['commit'][:10]}{' with changes' if made['dirty'] else ''}" if made["commit"] else "not in git"
    print(f"{shown} · {where} · {commit} · seed {parameters.seed}")


@dataclass(frozen=True)
class Check:
    """One line of `workbook doctor`; `state` is ok, note (works, with a limit) or problem."""

    name: str
    state: str
    found: str
    do: str = ""


def pins(path: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """Exact version of each package in the constraints file, by normalised name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = [line.split(";")[0].strip().split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {_normal(name): version for name, version in found}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _release(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", (version or "0").split("+")[0])[:3])


def installed() -> dict[str, str]:
    """Version of every installed package, by normalised name."""
    return {_normal(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}


def check_packages(found: dict[str, str], pinned: dict[str, str], python: tuple[int, ...]) -> list[Check]:
    """Versions against the pins, and the combinations known not to work.

    Sources, read or run on 2026-12-01: a fresh environment of these pins; torch 2.13.0 (CPU) beside torchvision; the
    private names that training on a CPU has to replace in speculators 0.9.0; transformers 5.0.0 and hub 1.3.0.
    """
    checks = [
        Check(
            "python", "ok" if python >= (3, 11) else "problem", ".".join(map(str, python)), "" if python >= (3, 11) else "use 3.11 or later"
        )
    ]
    other = [
        f"{name} {found[name]} (pin {pin})"
        for name, pin in pinned.items()
        if name in found and found[name].split("+")[0] != pin.split("+")[0]
    ]
    here = sum(name in found for name in pinned)
    if not pinned:
        checks.append(Check("pins", "note", "no constraints.txt: versions are not compared"))
    elif other:
        checks.append(
            Check("pins", "problem", "; ".join(other[:6]) + (f"; {len(other) - 6} more" if len(other) > 6 else ""), "run make again")
        )
    else:
        checks.append(Check("pins", "ok", f"{here} packages at the version in constraints.txt"))
    torch, vision, library = found.get("torch"), found.get("torchvision"), found.get("speculators")
    if torch is None or library is None:
        checks.append(Check("torch and speculators", "problem", f"torch {torch}, speculators {library}", "run make again"))
    if _release(torch)[:2] == (2, 13) and vision:
        text = f"torch {torch} with torchvision {vision}: importing transformers fails (operator torchvision::nms does not exist)"
        checks.append(Check("torchvision", "problem", text, "uninstall torchvision, or take the pinned pair"))
    if library and _release(library) != (0, 9, 0):
        text = f"speculators {library}: training on a CPU replaces private names of 0.9.0 and refuses others"
        checks.append(Check("speculators", "problem", text, "install speculators==0.9.0"))
    hub = _release(found.get("huggingface-hub"))
    if _release(found.get("transformers")) == (5, 0, 0) and hub >= (2,):
        checks.append(Check("transformers", "problem", "transformers 5.0.0 needs huggingface_hub below 2", "take the pinned versions"))
    if hub == (1, 3, 0) and _release(found.get("datasets"))[:2] == (5, 1):
        checks.append(Check("datasets", "problem", "huggingface_hub 1.3.0 breaks datasets 5.1", "take the pinned versions"))
    return checks


def _check_imports() -> list[Check]:
    try:
        import torch
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return [Check("import", "problem", f"torch and torchvision do not import: {error}", "remove .venv and run make again")]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    checks = [Check("device", "ok", ", ".join(gpus) or "cpu")]
    if not gpus:
        checks.append(Check("flex attention", "note", "has no backward on a CPU; attention auto leaves it out (stage 03 shows this)"))
    elif any(torch.cuda.get_device_capability(i)[0] == 12 for i in range(len(gpus))):
        text = "backward with head_dim above 128 exceeds shared memory on SM12x (pytorch#198224); stage 03 tries it"
        checks.append(Check("flex attention", "note", text))
    return checks


def _check_machine() -> list[Check]:
    free = shutil.disk_usage(ROOT).free / 1e9
    memory, count = memory_gb(), cores()
    backend = os.environ.get("MPLBACKEND", INLINE)
    return [
        Check("disk", "ok" if free >= DISK_GB else "problem", f"{free:.1f} GB free, the default run needs {DISK_GB:.0f}"),
        Check("memory", "ok" if (memory or 0) >= MEMORY_GB else "note", f"{memory} GB, the default run is made for {MEMORY_GB:.0f}"),
        Check("cores", "ok" if count >= 2 else "note", f"{count}; minutes in the README are for 2"),
        Check(
            "MPLBACKEND",
            "ok" if backend == INLINE else "note",
            "figures go into the page" if backend == INLINE else f"{backend}: overridden",
        ),
    ]


def _check_kernel() -> Check:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        argv = KernelSpecManager().get_kernel_spec("python3").argv
    except NoSuchKernel:
        return Check("kernel", "problem", "no kernel named python3", "python -m ipykernel install --sys-prefix --name python3")
    # A bare `python` is replaced by the running interpreter; a full path must be this environment's.
    own = "/" not in argv[0] or Path(argv[0]).parent == Path(sys.executable).parent
    found = "python3 of this environment" if own else f"python3 starts {argv[0]}"
    return Check("kernel", "ok" if own else "problem", found, "" if own else "python -m ipykernel install --sys-prefix --name python3")


def doctor() -> list[Check]:
    """Everything known to go wrong with an environment, checked here; imports torch (seconds)."""
    made = versions()
    checks = check_packages(installed(), pins(), _release(made["python"]))
    return [*checks, *_check_imports(), _check_kernel(), *_check_machine()]
