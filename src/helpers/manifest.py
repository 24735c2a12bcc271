"""Hand-over between notebooks: where a stage's files lie, what made them, whether they still hold, who writes.

A run is a folder, a stage a folder in it, and a stage is finished when its `manifest.json` is there. The fingerprint
covers the parameters of this and all earlier stages, the content of the prompt files, and the results version. The
digest covers what a stage wrote: when it changes, later stages are stale although no parameter changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from helpers import RESULTS_VERSION, params
from helpers.errors import DamagedInput, DataError, MissingInput, StaleInput, WorkbookError
from helpers.files import atomic, file_sha256, lock, plain, shown, write_bytes, write_json, write_text
from helpers.fingerprints import CONTENT_FROM, contents, fingerprint, run_folder, upto
from helpers.params import Parameters
from helpers.provenance import provenance

__all__ = [
    "Stage", "atomic", "contents", "fingerprint", "lock", "open_stage", "plain", "require", "run_folder", "shown", "state", "write_bytes",
    "write_json", "write_text",
]  # fmt: skip


def _read(path: Path) -> dict[str, Any] | None:
    """JSON object in `path`; None if it is not there, an empty one if it cannot be read as such."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class Stage:
    """One stage's folder of one run. Make it with `open_stage` (to write) or `require` (to read)."""

    name: str
    folder: Path
    parameters: Parameters
    aim: dict[str, Any] | None = field(default=None, repr=False)
    _opened: float = field(default_factory=time.monotonic, repr=False)
    _reused: float = field(default=0.0, repr=False)

    def path(self, *parts: str) -> Path:
        """A path below the stage's folder; its parent folders are made."""
        path = self.folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def writing(self) -> AbstractContextManager[None]:
        """Context in which this process alone writes to the stage; may be nested. Raises LockedRun."""
        return lock(self.folder.with_name(self.folder.name + ".lock"), f"stage {self.name}")

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The manifest as it lies on disk; None before the stage has finished."""
        return _read(self.folder / "manifest.json")

    @property
    def results(self) -> dict[str, Any]:
        """Results recorded by the finished stage. Raises MissingInput."""
        manifest = self.manifest
        if not manifest:
            raise self._missing()
        return manifest["results"]

    @property
    def fresh(self) -> bool:
        """Finished, with these parameters, from the predecessors as they are now, and its files untouched (by size and time)."""
        return self.fault(sha=False) is None

    def _mend(self, stage: str | None = None) -> str:
        stage = stage or self.name
        usual = params.ROOT / "papermill_params" / f"{self.parameters.run}.yaml"
        return f"workbook run {shown(usual) if usual.is_file() else 'PARAMS'} --only {stage[:2]}, or run notebooks/{stage}.ipynb"

    def _missing(self) -> MissingInput:
        begun = " (begun, not finished)" if (self.folder / "stage.json").is_file() else ""
        return MissingInput(f"stage {self.name} has not been run{begun}", where=shown(self.folder / "manifest.json"), do=self._mend())

    def damaged(self, *, sha: bool) -> list[str]:
        """Recorded outputs that are gone or changed. Without `sha`, files of the same size and time are taken as unchanged."""
        found = []
        for name, made in ((self.manifest or {}).get("outputs") or {}).items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != made["bytes"]:
                found.append(name)
            elif (sha or path.stat().st_mtime_ns != made["mtime_ns"]) and file_sha256(path) != made["sha256"]:
                found.append(name)
        return found

    def fault(self, *, sha: bool) -> WorkbookError | None:
        """Why a later stage may not read this one: missing, damaged or stale; None when it is fresh."""
        manifest, where = self.manifest, shown(self.folder / "manifest.json")
        if manifest is None:
            return self._missing()
        if not {"fingerprint", "upstream", "outputs", "digest", "results", "parameters"} <= manifest.keys():
            return DamagedInput(f"the manifest of stage {self.name} cannot be read", where=where, do=self._mend())
        if manifest["fingerprint"] != fingerprint(self.name, self.parameters):
            what = f"stage {self.name} was made with other parameters:\n" + "\n".join(f"  - {d}" for d in self._differences(manifest))
            return StaleInput(what, where=where, do=self._mend())
        for earlier, made in manifest["upstream"].items():
            before = Stage(earlier, self.folder.with_name(earlier), self.parameters)
            if not (now := before.manifest):
                return before._missing()
            if now.get("digest") != made["digest"]:
                mend = self.name if now.get("fingerprint") == fingerprint(earlier, self.parameters) else earlier
                what = f"stage {self.name} was made from another result of {earlier} than the one that is there now"
                return StaleInput(what, where=where, do=self._mend(mend))
        if bad := self.damaged(sha=sha):
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            what = f"stage {self.name}: {', '.join(bad[:5])}{more} no longer as recorded (gone or changed)"
            return DamagedInput(what, where=shown(self.folder / bad[0]), do=self._mend())
        return None

    def _differences(self, manifest: dict[str, Any]) -> list[str]:
        """One line per parameter, prompt file or version that differs: value then, value now."""
        then, lines = manifest["parameters"], []
        for stage in upto(self.name):
            for parameter in params.names(stage):
                now, enters = getattr(self.parameters, parameter), Parameters.model_fields[parameter].json_schema_extra["fingerprint"]
                line = f"{parameter}: {then.get(parameter, 'not recorded')!r} then, {now!r} now"
                if enters and then.get(parameter, "not recorded") != now and line not in lines:
                    lines.append(line)
        recorded = {p: made["sha256"] for p, made in manifest.get("contents", {}).items()}
        now = {p: made["sha256"] for p, made in contents(self.name, self.parameters).items()}
        lines += [
            f"{p}: the file {getattr(self.parameters, p)} has other content now" for p in CONTENT_FROM if recorded.get(p) != now.get(p)
        ]
        if manifest.get("results_version") != RESULTS_VERSION:
            lines.append(f"results version: {manifest.get('results_version')} then, {RESULTS_VERSION} now")
        return lines or ["a parameter that no longer exists"]

    def _aim(self) -> dict[str, Any]:
        """What this stage is being made for: its fingerprint, its prompt files and the digests of the stages before it.

        Fixed when the stage is opened, since what a notebook has read stays what it was when a file changes under it.
        """
        if self.aim is not None:
            return self.aim
        upstream = {}
        for earlier in upto(self.name)[:-1]:
            made = _read(self.folder.with_name(earlier) / "manifest.json") or {}
            upstream[earlier] = {"fingerprint": made.get("fingerprint"), "digest": made.get("digest")}
        return {
            "stage": self.name,
            "fingerprint": fingerprint(self.name, self.parameters),
            "contents": contents(self.name, self.parameters),
            "upstream": upstream,
        }

    def remember(self, name: str, compute: Callable[[], Any]) -> Any:
        """Result of a heavy cell, kept in `results/<name>.json`: read if it was made for the same aim, else computed.

        Args:
            name: file name of the result.
            compute: makes it; the value has to be JSON-able (numpy and torch arrays become lists, a number that is
                not finite becomes None). Read or computed, the value has been through JSON, so both are alike.

        Raises:
            LockedRun: another process is writing to this stage.
        """
        path = self.folder / "results" / f"{name}.json"
        kept = _read(path)
        if kept and not self.parameters.recompute and kept.get("aim") == self._aim() and "value" in kept:
            self._reused += kept["seconds"]
            print(f"{name}: read from {shown(path)}, computed {kept['made']} in {kept['seconds']:.0f} s")
            return kept["value"]
        with self.writing():
            start = time.monotonic()
            value = json.loads(json.dumps(plain(compute())))
            write_json(path, {"aim": self._aim(), "made": _now(), "seconds": round(time.monotonic() - start, 3), "value": value})
        return value

    def finish(self, outputs: list[str | Path], results: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Record the stage as finished.

        Args:
            outputs: files and folders of this stage that later stages read (a folder stands for every file under it).
            results: figures of the stage, JSON-able.
            seconds: its duration; None takes the time since `open_stage` plus what remembered results once took.

        Returns:
            The manifest.

        Raises:
            DataError: an output is not there or lies outside the stage's folder.
            LockedRun: another process is writing to this stage.
        """
        with self.writing():
            files = self._files(outputs)
            listed = {n: {"sha256": file_sha256(p), "bytes": p.stat().st_size, "mtime_ns": p.stat().st_mtime_ns} for n, p in files.items()}
            digest = hashlib.sha256(json.dumps({n: made["sha256"] for n, made in listed.items()}, sort_keys=True).encode()).hexdigest()
            spent = time.monotonic() - self._opened + self._reused if seconds is None else seconds
            known = dict.fromkeys(n for stage in upto(self.name) for n in params.names(stage))
            manifest = {
                **self._aim(),
                "run": self.parameters.run,
                "made": _now(),
                "results_version": RESULTS_VERSION,
                "parameters": {n: getattr(self.parameters, n) for n in known},
                "inputs": {made["path"]: {k: made[k] for k in ("sha256", "bytes")} for made in self._aim()["contents"].values()},
                "outputs": listed,
                "digest": digest,
                "results": plain(results),
                "seed": self.parameters.seed,
                "seconds": round(spent, 1),
                "seconds_reused": round(self._reused, 1),
                **provenance(self.parameters.device),
            }
            write_json(self.folder / "manifest.json", manifest)
        return manifest

    def _files(self, outputs: list[str | Path]) -> dict[str, Path]:
        found = {}
        for output in outputs:
            path = self.folder / output
            if not path.exists() or not path.is_relative_to(self.folder) or ".." in Path(output).parts:
                raise DataError(
                    f"stage {self.name} cannot finish: its output {output} is not in the stage's folder",
                    where=shown(self.folder),
                    do="run the notebook again from the top",
                )
            for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
                if file.suffix != ".damaged":
                    found[file.relative_to(self.folder).as_posix()] = file
        return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def require(name: str, parameters: Parameters, *, sha: bool = True) -> Stage:
    """A finished predecessor whose files have the content its manifest recorded.

    Args:
        sha: hash every file; otherwise only those whose time has changed.

    Raises:
        MissingInput, StaleInput, DamagedInput: each names the file, the notebook and the command that mends it.
    """
    stage = Stage(name, run_folder(parameters) / name, parameters)
    if fault := stage.fault(sha=sha):
        raise fault
    return stage


def state(name: str, parameters: Parameters) -> tuple[str, str]:
    """`fresh`, `stale`, `damaged` or `missing`, with the reason; every file is hashed."""
    fault = Stage(name, run_folder(parameters) / name, parameters).fault(sha=True)
    kinds = {MissingInput: "missing", StaleInput: "stale", DamagedInput: "damaged"}
    return ("fresh", "") if fault is None else (kinds[type(fault)], fault.what)


def open_stage(name: str, parameters: Parameters) -> Stage:
    """The stage about to be written, its predecessor checked and its folder made.

    A folder made for other parameters, or from other results of the stages before, is moved to `<folder>.previous`.
    Unfinished work for the same aim stays, so that a stage can go on where it was. Recorded outputs that are damaged are
    renamed to `<file>.damaged` and the remembered results dropped, so that the stage makes them again.

    Raises:
        MissingInput, StaleInput, DamagedInput: the predecessor cannot be read.
        LockedRun: another process is writing to this stage.
    """
    earlier = upto(name)[:-1]
    if earlier:
        require(earlier[-1], parameters)
    stage = Stage(name, run_folder(parameters) / name, parameters)
    stage.aim = stage._aim()
    with stage.writing():
        kept = _read(stage.folder / "stage.json") or {}
        same = kept.get("aim") == stage.aim
        if stage.folder.is_dir() and any(stage.folder.iterdir()) and not same:
            previous = stage.folder.with_name(name + ".previous")
            shutil.rmtree(previous, ignore_errors=True)
            stage.folder.rename(previous)
            print(f"{name}: what was there was made for other parameters or inputs; it is now {shown(previous)}")
        elif bad := stage.damaged(sha=True):
            for file in bad:
                if (stage.folder / file).is_file():
                    (stage.folder / file).rename(stage.folder / f"{file}.damaged")
            shutil.rmtree(stage.folder / "results", ignore_errors=True)
            print(f"{name}: {len(bad)} file(s) gone or damaged ({', '.join(bad[:3])}{', …' if len(bad) > 3 else ''}), to be made again")
        stage.folder.mkdir(parents=True, exist_ok=True)
        write_json(stage.folder / "stage.json", {"aim": stage.aim, "begun": kept["begun"] if same else _now()})
    return stage
