"""Runs the five notebooks through papermill, each in a fresh kernel, and adds what papermill lacks.

A page is replaced only by a whole one: a notebook runs into a temporary file, is checked cell by cell, stamped, freed of
machine paths, and only then put in place. What fails goes to `_failed/`, with the last good page left where it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from helpers import RESULTS_VERSION, errors, manifest, params, stamps
from helpers.errors import DiskFull, MissingInput, ParameterError, WorkbookError
from helpers.files import atomic, disk_full, lock, shown, write_json
from helpers.params import ROOT, STAGES, Parameters
from helpers.provenance import commit

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


@dataclass
class Runner:
    """One parameter set, its run folder and its folder of pages.

    Args:
        parameter_file: YAML of the set; its stem names the folder of pages.
        rendered: folder that holds one folder of pages per set.
        notebooks: folder of the source notebooks.
        say: prints a line of progress.
    """

    parameter_file: Path
    rendered: Path = ROOT / "rendered"
    notebooks: Path = ROOT / "notebooks"
    say: Callable[[str], None] = lambda line: print(line, flush=True)
    parameters: Parameters = field(init=False)

    def __post_init__(self) -> None:
        self.parameter_file, self.rendered = Path(self.parameter_file), Path(self.rendered).absolute()
        self.parameters = params.load(self.parameter_file)

    @property
    def set_name(self) -> str:
        """Name of the parameter set: the stem of its file."""
        return self.parameter_file.stem

    @property
    def folder(self) -> Path:
        """Folder of this set's pages."""
        return self.rendered / self.set_name

    def stage(self, name: str) -> manifest.Stage:
        """The stage's folder in this run, whatever state it is in."""
        return manifest.Stage(name, manifest.run_folder(self.parameters) / name, self.parameters)

    def source(self, name: str) -> Any:
        """The notebook as its author wrote it. Raises MissingInput."""
        path = self.notebooks / f"{name}.ipynb"
        if (found := stamps.read(path)) is None:
            raise MissingInput(f"no notebook {path.name}, or it cannot be read", where=shown(path), do=f"git checkout -- {shown(path)}")
        return found

    def reasons(self, name: str) -> list[str]:
        """Why a notebook has to run; empty when its stage and its page are both current."""
        if self.parameters.recompute:
            return ["recompute is set"]
        stage = self.stage(name)
        if fault := stage.fault(sha=True):
            return [fault.what.splitlines()[0].rstrip(":")]
        if (page := stamps.read(self.folder / f"{name}.ipynb")) is None:
            return ["no page yet"]
        if page.metadata.get("workbook", {}).get("stage_made") != stage.manifest["made"]:
            return ["its page shows another result of the stage"]
        return stamps.outdated(page, self.source(name), name, self.parameters)

    def run(self, first: str = STAGES[0], last: str = STAGES[-1]) -> None:
        """Run the notebooks from `first` to `last`, skipping those that are current; after 05, write the summary.

        Raises:
            WorkbookError: of the family of `errors`, or NotebookError; `exit_code` says which.
            KeyboardInterrupt: stopped; the kernel is shut down and finished stages and pages stay.
        """
        chosen = STAGES[STAGES.index(first) : STAGES.index(last) + 1]
        run_folder = manifest.run_folder(self.parameters)
        expected = _summary(self.folder).get("seconds") or {}
        start, ran = time.monotonic(), False
        with lock(run_folder / "run.lock", f"run {self.parameters.run}"), _terminable():
            for name in chosen:
                if not (because := self.reasons(name)):
                    made = stamps.read(self.folder / f"{name}.ipynb").metadata["workbook"]
                    self.say(f"{name}: fresh, skipped (made {made['date'][:16]} UTC in {made['seconds']:.0f} s)")
                    continue
                if STAGES.index(name):
                    manifest.require(STAGES[STAGES.index(name) - 1], self.parameters, sha=False)
                about = f", about {expected[name] / 60:.1f} min" if expected.get(name) else ""
                self.say(f"{name}: running ({because[0]}){about}")
                ran = True
                self.say(f"{name}: done in {self._run_one(name):.0f} s, {shown(self.folder / f'{name}.html')}")
            if chosen[-1] == STAGES[-1] and (ran or not _summary(self.folder)):
                write_json(self.folder / "summary.json", self.summary())
            stamps.write_index(self.folder, self.parameters)
        self.say(f"{self.set_name}: {time.monotonic() - start:.0f} s, pages in {shown(self.folder / 'index.html')}")

    def _run_one(self, name: str) -> float:
        source, start = self.source(name), time.monotonic()
        began = datetime.now(UTC) - timedelta(milliseconds=1)  # manifests give milliseconds
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{os.getpid()}.{name}.ipynb"
        try:
            with _Heartbeat(name, temporary, self.say):
                self._papermill(name, temporary)
            page = stamps.read(temporary)
            self._check(name, page, began)
            seconds = time.monotonic() - start
            self._keep(name, page, source, seconds)
        except BaseException as error:
            if disk_full(error) and not isinstance(error, WorkbookError):
                raise DiskFull(
                    f"no space left while running {name}", where=shown(self.folder), do="free some space and run again"
                ) from error
            if (kept := self._put_aside(name, temporary, error)) is not None:
                self.say(f"{name}: stopped after {time.monotonic() - start:.0f} s; what ran is in {shown(kept)}")
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return seconds

    def _papermill(self, name: str, output: Path) -> None:
        """Execute one notebook into `output`. Raises NotebookError, KeyboardInterrupt."""
        import logging

        import papermill
        from jupyter_client.kernelspec import NoSuchKernel
        from nbclient.exceptions import DeadKernelError

        logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it warns of every parameter a notebook does not declare
        braces = {ord("{"): "{{", ord("}"): "}}"}  # papermill formats both paths
        try:
            with _kernel_environment():
                papermill.execute_notebook(
                    str((self.notebooks / f"{name}.ipynb").resolve()).translate(braces),
                    str(output).translate(braces),
                    parameters=self.parameters.model_dump(),
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

    def _check(self, name: str, page: Any, began: datetime) -> None:
        """Hold an executed notebook and its stage against what they promise. Raises NotebookError."""
        faults = stamps.unfit(page)
        made, want = self.stage(name).manifest, manifest.fingerprint(name, self.parameters)
        if not made or datetime.fromisoformat(made.get("made", "1970-01-01T00:00:00+00:00")) < began:
            faults.append("it did not finish its stage (no new manifest.json)")
        elif made.get("fingerprint") != want:
            faults.append(f"its manifest is for fingerprint {made.get('fingerprint')}, this run's is {want}")
        if faults:
            what = f"{name} ran, but is no page to show:\n" + "\n".join(f"  - {fault}" for fault in faults)
            raise UnfitPage(what, where=shown(self.notebooks / f"{name}.ipynb"), do="mend the notebook and run again")

    def _keep(self, name: str, page: Any, source: Any, seconds: float) -> None:
        """Stamp the page, free it of machine paths and put it in place, with its HTML beside it."""
        import nbformat

        made, (sha, dirty) = self.stage(name).manifest, commit()
        more = {"commit": sha, "dirty": dirty, "set": self.set_name, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        # What remembered results once took belongs to the duration: a page made again from them did not become cheaper.
        reused = made.get("seconds_reused", 0.0)
        more |= {"seconds": round(seconds + reused, 1), "seconds_reused": reused, "stage_made": made["made"]}
        stamps.stamp(page, source, name, self.parameters, **more)
        page.metadata.get("papermill", {}).update(input_path=f"notebooks/{name}.ipynb", output_path=shown(self.folder / f"{name}.ipynb"))
        stamps.strip_paths(page)
        with atomic(self.folder / f"{name}.ipynb") as path:
            nbformat.write(page, path)
        stamps.write_html(page, self.folder / f"{name}.html")

    def _put_aside(self, name: str, temporary: Path, error: BaseException) -> Path | None:
        """Keep what ran of a failed notebook in `_failed/<set>/`; None if nothing did."""
        import nbformat

        page = stamps.read(temporary)
        if page is None or isinstance(error, DiskFull):
            return None
        # papermill calls cells completed that never started, and the one that was running when its kernel went.
        started = [cell for cell in stamps.code_cells(page) if _started(cell)]
        for cell in stamps.code_cells(page)[len(started) :]:
            cell.metadata.setdefault("papermill", {})["status"] = "pending"
        if started and not isinstance(error, UnfitPage):
            started[-1].metadata["papermill"]["status"] = "failed"
        stamps.strip_paths(page)
        target = self.rendered / "_failed" / self.set_name / f"{name}.ipynb"
        with atomic(target) as path:
            nbformat.write(page, path)
        stamps.write_html(page, target.with_suffix(".html"))
        return target

    def summary(self) -> dict[str, Any]:
        """Headline figures on top, everything the stages recorded below. Raises NotebookError if 05 lacks a headline."""
        made = {name: self.stage(name).manifest or {} for name in STAGES}
        results = {name: m.get("results", {}) for name, m in made.items()}
        headline = {key: results[STAGES[4]].get(key) for key in ("accept_length", "accept_length_interval", "speedup")}
        if absent := [key for key, value in headline.items() if value is None]:
            where = shown(self.stage(STAGES[4]).folder / "manifest.json")
            raise NotebookError(f"stage 05 recorded no {', '.join(absent)}", where=where, do="its notebook has to give them to finish()")
        seconds = {name: self._seconds(name, made[name]) for name in STAGES}
        last = made[STAGES[4]]
        return {
            **headline,
            "seconds_total": round(sum(seconds.values()), 1),
            "attention": results[STAGES[2]].get("attention"),
            "coverage": results[STAGES[1]].get("coverage"),
            "seconds": seconds,
            "results": results,
            "set": self.set_name,
            "parameters_fingerprint": stamps.parameters_fingerprint(self.parameters),
            "results_version": RESULTS_VERSION,
            **{key: last.get(key) for key in ("versions", "commit", "dirty", "device", "machine")},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _seconds(self, name: str, made: dict[str, Any]) -> float:
        """Duration stamped in the page, or the stage's own where there is no page in this folder."""
        page = stamps.read(self.folder / f"{name}.ipynb")
        stamped = page.metadata.get("workbook", {}).get("seconds") if page is not None else None
        return float(stamped if stamped is not None else made.get("seconds", 0.0))


def stage_of(text: str) -> str:
    """Stage named by `3`, `03`, `03_draft_config_and_attention` or `draft_config_and_attention`. Raises ParameterError."""
    for number, name in enumerate(STAGES, start=1):
        if text in (str(number), f"0{number}", name, name[3:]):
            return name
    raise ParameterError(f"no notebook {text!r}", where="--from or --only", do=f"give 1..5, 01..05 or one of {', '.join(STAGES)}")


def prepare(parameter_file: Path, notebooks: Path = ROOT / "notebooks") -> Path:
    """Copies of the notebooks with this set injected, not run, in `<run>/notebooks/`; returns that folder.

    A copy that somebody has worked in and that differs from what would be written is kept as `<name>.previous.ipynb`.
    """
    import logging

    import nbformat
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    runner = Runner(parameter_file, notebooks=notebooks)
    folder = manifest.run_folder(runner.parameters) / "notebooks"
    for name in STAGES:
        runner.source(name)
        copy = parameterize_notebook(load_notebook_node(str(notebooks / f"{name}.ipynb")), runner.parameters.model_dump())
        target = folder / f"{name}.ipynb"
        there = stamps.read(target)
        if there is not None:
            if [c.source for c in there.cells] == [c.source for c in copy.cells]:
                continue  # the same cells: keep it, with the outputs it may have
            target.replace(target.with_suffix(".previous.ipynb"))
        with atomic(target) as path:
            nbformat.write(copy, path)
    return folder


def _summary(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _cell_error(name: str, error: Any) -> NotebookError:
    """The failing cell's error for the terminal: one of ours by its message alone, any other with its traceback."""
    known = getattr(errors, error.ename, None)
    if isinstance(known, type) and issubclass(known, WorkbookError):
        return NotebookError(f"{name}: {error.evalue}", exit_code=known.exit_code)
    trace = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", "\n".join(error.traceback)).strip().splitlines()
    lines = trace[-25:] if len(trace) > 25 else trace
    return NotebookError(f"{name}: cell {error.exec_count} raised {error.ename}: {error.evalue}\n" + "\n".join(lines))


def _started(cell: Any) -> bool:
    """Whether papermill came to this cell; a kernel that dies at once never gave it an execution count."""
    return bool(cell.metadata.get("papermill", {}).get("start_time"))


def _running_cell(path: Path) -> tuple[int, int] | None:
    """Number of the code cell that is running or ran last, and of all; papermill writes its file at each cell's start."""
    if (page := stamps.read(path)) is None:
        return None
    return sum(map(_started, stamps.code_cells(page))), len(stamps.code_cells(page))


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
def _terminable() -> Iterator[None]:
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
