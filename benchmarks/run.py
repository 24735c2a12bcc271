"""Runs the benchmarks one after another, each in a fresh process: `python benchmarks/run.py [NAME[:PART] …]`, or `make bench`.

A benchmark is a module in this folder with `measure(part, report)`, which gives its lines: `part` picks one of its cases
(None: all), `report` prints progress. Results go to `benchmarks/results.json`.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import lines

from helpers.errors import ParameterError

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"


def benchmarks(folder: Path = HERE) -> list[str]:
    """Names of the modules in `folder` that define `measure`."""

    def measures(path: Path) -> bool:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body)

    return sorted(path.stem for path in folder.glob("*.py") if measures(path))


def chosen(wanted: list[str], there: list[str]) -> list[str]:
    """What to run: `wanted`, or all; raises ParameterError for a name that is not there."""
    unknown = sorted({w for w in wanted if w.split(":")[0] not in there})
    if unknown:
        raise ParameterError(f"no benchmark {', '.join(unknown)}", where="ONLY", do=f"choose from {', '.join(there)}")
    return wanted or there


def alone(target: str, into: Path) -> None:
    """Measure one benchmark in this process and write its lines."""
    name, _, part = target.partition(":")
    found = import_module(name).measure(part or None, lambda text: print(f"  {text}", flush=True))
    lines.keep(into, [dataclasses.replace(line, machine=lines.machine()) for line in found])


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--alone"]:
        alone(arguments[1], Path(arguments[2]))
        return 0
    try:
        targets = chosen(arguments, benchmarks())
    except ParameterError as error:
        print(error, file=sys.stderr)
        return 2
    found, failed = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number, target in enumerate(targets):
            print(target, flush=True)
            begun, into = time.monotonic(), Path(scratch) / f"{number}.json"
            done = subprocess.run([sys.executable, str(HERE / "run.py"), "--alone", target, str(into)], check=False)
            print(f"  {time.monotonic() - begun:.0f} s", flush=True)
            if done.returncode:
                failed.append(target)
            found += lines.read(into)
    if found:
        print(f"\n{found[0].machine}\n\n{lines.table(found)}")
        lines.keep(RESULTS, found)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
