"""Runs the five notebooks, skips what is current, and keeps the pages whole.

A page is replaced only by a whole one: a notebook runs into a temporary file, is checked cell by cell, stamped, freed of
machine paths, and only then put in place. What fails goes to `_failed/`, with the last good page left where it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from helpers import RESULTS_VERSION, kernels, manifest, params, stamps
from helpers.errors import DiskFull, MissingInput, ParameterError, WorkbookError
from helpers.files import atomic, disk_full, lock, shown, write_json
from helpers.kernels import NotebookError, UnfitPage
from helpers.params import ROOT, STAGES, Parameters
from helpers.provenance import commit


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
        with lock(run_folder / "run.lock", f"run {self.parameters.run}"), kernels.terminable():
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
            kernels.execute(self.notebooks / f"{name}.ipynb", temporary, self.parameters.model_dump(), self.say)
            page = stamps.read(temporary)
            self._check(name, page, began)
            seconds = time.monotonic() - start
            self._keep(name, page, source, seconds)
        except BaseException as error:
            if disk_full(error) and not isinstance(error, WorkbookError):
                raise DiskFull(
                    f"no space left while running {name}", where=shown(self.folder), do="free some space and run again"
                ) from error
            kept = None
            with contextlib.suppress(Exception):  # whatever fails here must not hide why the notebook failed
                kept = self._put_aside(name, temporary, error)
            if kept is not None:
                self.say(f"{name}: stopped after {time.monotonic() - start:.0f} s; what ran is in {shown(kept)}")
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return seconds

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
        # What remembered results once took belongs to the duration: a page made again from them did not become cheaper. A
        # stage that resumes by other means gives its whole duration to finish(seconds=).
        reused = made.get("seconds_reused", 0.0)
        more |= {"seconds": round(max(seconds + reused, made["seconds"]), 1), "seconds_reused": reused, "stage_made": made["made"]}
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
        started = [cell for cell in stamps.code_cells(page) if kernels.started(cell)]
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
