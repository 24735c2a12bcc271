"""One notebook in one fresh kernel through papermill, with its errors told apart: a cell's, a dead kernel's, a stop."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helpers import errors, stamps
from helpers.errors import WorkbookError
from helpers.params import ROOT

HEARTBEAT_SECONDS = 30.0
DEAD_KERNEL, INTERRUPTED, TERMINATED = 9, 130, 143


class NotebookError(WorkbookError):
    """A notebook failed; the exit code is that of the error in its cell, or says what became of its kernel."""

    def __init__(self, what: str, *, where: str = "", do: str = "", exit_code: int = 1):
        super().__init__(what, where=where, do=do)
        self.exit_code = exit_code


class UnfitPage(NotebookError):
    """A notebook ran to its end, but its page or its stage is not what they promise."""


class Terminated(KeyboardInterrupt):
    """SIGTERM (Slurm's and docker's way to stop a job), handled like Ctrl-C."""


def execute(notebook: Path, output: Path, parameters: dict[str, Any], say: Callable[[str], None]) -> None:
    """Execute a notebook into `output` in a fresh kernel, from the repository's folder.

    Args:
        parameters: what papermill injects after the parameters cell.
        say: prints a line of progress; called with the running cell every `HEARTBEAT_SECONDS`.

    Raises:
        NotebookError: a cell raised (with its error's exit code), or the kernel died or did not start.
        KeyboardInterrupt: stopped; the kernel is shut down.
    """
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import DeadKernelError

    name = notebook.stem
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it warns of every parameter a notebook does not declare
    braces = {ord("{"): "{{", ord("}"): "}}"}  # papermill formats both paths
    try:
        with _kernel_environment(), _Heartbeat(name, output, say):
            papermill.execute_notebook(
                str(notebook.resolve()).translate(braces),
                str(output).translate(braces),
                parameters=parameters,
                kernel_name="python3",
                cwd=str(ROOT),
                progress_bar=False,
                log_output=False,
                start_timeout=180,  # both seconds: a busy machine is slow, not broken
                iopub_timeout=60,
                extra_arguments=["--log-level=CRITICAL"],  # of the kernel: what it says of its sockets is not for the reader
            )
    except KeyboardInterrupt:
        # The cell's task ends later, with the kernel; nobody waits for it, and asyncio would print that as an error.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise
    except papermill.PapermillExecutionError as error:
        raise _cell_error(name, error) from None
    except DeadKernelError:
        number, of = _running_cell(output) or (0, 0)
        raise NotebookError(
            f"{name}: the kernel died in cell {number} of {of}",
            do="most often memory ran out (see dmesg): set smaller batches, then run again; finished stages are kept",
            exit_code=DEAD_KERNEL,
        ) from None
    except (NoSuchKernel, RuntimeError) as error:
        raise NotebookError(f"{name}: no kernel could be started: {error}", do="workbook doctor", exit_code=DEAD_KERNEL) from error


def _cell_error(name: str, error: Any) -> NotebookError:
    """The failing cell's error for the terminal: one of ours by its message alone, any other with its traceback."""
    known = getattr(errors, error.ename, None)
    if isinstance(known, type) and issubclass(known, WorkbookError):
        return NotebookError(f"{name}: {error.evalue}", exit_code=known.exit_code)
    trace = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", "\n".join(error.traceback)).strip().splitlines()
    lines = trace[-25:] if len(trace) > 25 else trace
    return NotebookError(f"{name}: cell {error.exec_count} raised {error.ename}: {error.evalue}\n" + "\n".join(lines))


def started(cell: Any) -> bool:
    """Whether papermill came to this cell; a kernel that dies at once never gave it an execution count."""
    return bool(cell.metadata.get("papermill", {}).get("start_time"))


def _running_cell(path: Path) -> tuple[int, int] | None:
    """Number of the code cell that is running or ran last, and of all; papermill writes its file at each cell's start."""
    if (page := stamps.read(path)) is None:
        return None
    return sum(map(started, stamps.code_cells(page))), len(stamps.code_cells(page))


class _Heartbeat:
    """Prints the running cell while a notebook runs, so that a long one does not look dead."""

    def __init__(self, name: str, path: Path, say: Callable[[str], None]):
        self._name, self._path, self._say, self._stop = name, path, say, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        start = time.monotonic()
        while not self._stop.wait(HEARTBEAT_SECONDS):
            cell = _running_cell(self._path)  # None while papermill is in the middle of writing
            what = f"cell {cell[0]} of {cell[1]}, " if cell else ""
            self._say(f"{self._name}: {what}{time.monotonic() - start:.0f} s")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def _kernel_environment() -> Iterator[None]:
    """Environment the kernel inherits: no MPLBACKEND (with Agg, figures vanish without an error), no progress bars.

    tqdm warns at import that widgets are missing, before a notebook can say that it does not want them.
    """
    kept = dict(os.environ)
    os.environ.pop("MPLBACKEND", None)
    os.environ.update(TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (kept.get("PYTHONWARNINGS"), "ignore:IProgress not found")))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM end the run as Ctrl-C does, so that no kernel is left behind."""

    def stop(number: int, frame: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
