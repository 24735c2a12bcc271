"""The command line: run, prepare, check, check-rendered, export, served, params, fetch, doctor."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from helpers import environment, kernels, manifest, params, profiles, runner, stamps
from helpers.errors import MissingInput, WorkbookError
from helpers.files import shown
from helpers.params import ROOT, STAGES, Parameters


def _run(arguments: argparse.Namespace) -> int:
    first, last = STAGES[0], STAGES[-1]
    if arguments.only:
        first = last = runner.stage_of(arguments.only)
    elif arguments.first:
        first = runner.stage_of(arguments.first)
    runner.Runner(arguments.params, rendered=arguments.rendered).run(first, last)
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    print(shown(runner.prepare(arguments.params)))
    return 0


def recorded_parameters(folder: Path) -> Parameters:
    """Parameters of a run as its last finished stage recorded them. Raises MissingInput."""
    for stage in reversed(STAGES):
        try:
            values = json.loads((folder / stage / "manifest.json").read_text(encoding="utf-8"))["parameters"]
        except (OSError, ValueError, KeyError):
            continue
        known = {n: v for n, v in values.items() if n in Parameters.model_fields}
        # The folder may have been moved since; where it lies now is what counts.
        known |= {"run": folder.name, "runs_folder": str(folder.resolve().parent)}
        return params.check(known, where=shown(folder / stage / "manifest.json"), complete=False)
    raise MissingInput(f"no finished stage in {shown(folder)}", where=shown(folder), do="workbook run PARAMS, or give a parameter file")


def parameters_of(run: str) -> Parameters:
    """Parameters of a run given as a parameter file, a name or a folder. Raises ParameterError, MissingInput."""
    given = Path(run)
    if given.suffix in (".yaml", ".yml"):
        return params.load(given)
    default = params.resolve(Parameters.model_fields["runs_folder"].default)
    return recorded_parameters(given if given.is_dir() else default / run)


def _check(arguments: argparse.Namespace) -> int:
    """Judge a run by a parameter file, or by what its last stage recorded."""
    parameters = parameters_of(arguments.run)
    states = []
    for stage in STAGES:
        state, why = manifest.state(stage, parameters)
        states.append(state)
        first, *rest = why.splitlines() or [""]
        print(f"{stage:32}{state:10}{first}")
        for line in rest:
            print(" " * 42 + line.strip())
    return 0 if set(states) == {"fresh"} else MissingInput.exit_code


def _export(arguments: argparse.Namespace) -> int:
    """Write the best draft of a run for an engine; tells which engines it serves, and why it does not serve the others."""
    from helpers import contract, exports, verifier

    parameters = parameters_of(arguments.run)
    trained = manifest.require(STAGES[3], parameters)
    out = Path(arguments.out) if arguments.out else manifest.run_folder(parameters) / "exports" / arguments.to
    only = [f"vllm-{arguments.to}" if name == "vllm" else name for name in arguments.engine]
    folder = verifier.ensure(parameters.verifier)
    # a hub id stays one; the workbook's own verifiers have a folder only
    name = parameters.verifier if "/" in parameters.verifier and not params.resolve(parameters.verifier).exists() else str(folder)
    done = exports.export(trained.folder / "best", arguments.to, out, folder, only=only, verifier_name=name)
    print(shown(done.folder))
    for engine, rows in done.checks.items():
        failed = contract.failed(rows)
        if engine in done.serves:
            print(f"{engine}: {sum(row[1] is True for row in rows)} checks passed, logits after reloading equal")
            print(f"  {exports.serve_command(engine, done.folder, name, parameters.speculative_tokens)}")
        else:
            print(f"{engine}: cannot serve this draft")
        for text in [*failed, *(str(row[2]) for row in rows if row[1] and "needs SGLang" in str(row[2]))]:
            print(f"  {text}")
    return 0


def _check_rendered(arguments: argparse.Namespace) -> int:
    faults = stamps.check_rendered()
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        print("mend it with: make run, then commit rendered/", file=sys.stderr)
        return 1
    print("rendered pages of the default run are current")
    return 0


def parameter_rows() -> list[tuple[str, str, str, str, str]]:
    """Name, type with range, default, notebooks and meaning of every parameter, from the schema."""
    rows = []
    for name, spec in Parameters.model_json_schema()["properties"].items():
        kind = " | ".join(map(str, spec["enum"])) if "enum" in spec else spec["type"]
        if kind == "array":
            kind = f"list of {spec['items']['type']}"
        bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
        limits = ", ".join(f"{sign} {spec[key]:.15g}" for key, sign in bounds.items() if key in spec)
        notebooks = " ".join(f"0{digit}" for digit in spec["stages"])
        rows.append((name, f"{kind} {limits}".strip(), json.dumps(spec["default"]), notebooks, spec["description"]))
    return rows


def _params(arguments: argparse.Namespace) -> int:
    if arguments.profile:
        print(profiles.lines(arguments.profile))
        return 0
    rows = [("parameter", "type and range", "default", "notebooks", "meaning"), *parameter_rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    from helpers import verifier

    name = arguments.verifier
    if Path(name).suffix in (".yaml", ".yml"):
        name = params.load(name).verifier
    print(shown(verifier.ensure(name)))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    checks = environment.doctor()
    for check in checks:
        print(f"{check.state:9}{check.name:16}{check.found}" + (f"\n{'':25}do: {check.do}" if check.do else ""))
    return 1 if any(check.state == "problem" for check in checks) else 0


def _served(arguments: argparse.Namespace) -> int:
    from helpers import served

    result = served.of_run(params.load(arguments.params))
    print(served.table(result))
    return served.verdict(result)


def parser() -> argparse.ArgumentParser:
    """The argument parser with its subcommands."""
    codes = "Exit codes: 2 to 8 as in helpers/errors.py, 9 the kernel died, 130 Ctrl-C, 143 SIGTERM, 1 any other failure."
    top = argparse.ArgumentParser(prog="workbook", description="The EAGLE-3 draft workbook.", epilog=codes)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        return command

    run = add("run", _run, "run the notebooks on a parameter set; what is fresh is skipped")
    run.add_argument("params", type=Path, metavar="PARAMS", help="parameter file, e.g. papermill_params/smollm2.yaml")
    which = run.add_mutually_exclusive_group()
    which.add_argument("--from", dest="first", metavar="NN", help="first notebook: 1..5, 01..05 or a stage name")
    which.add_argument("--only", metavar="NN", help="this notebook alone")
    run.add_argument("--rendered", type=Path, default=ROOT / "rendered", metavar="DIR", help="where the folder of pages goes (rendered)")
    prepare = add("prepare", _prepare, "write copies of the notebooks with a parameter set injected, without running them")
    prepare.add_argument("params", type=Path, metavar="PARAMS")
    check = add("check", _check, "state of every stage of a run: fresh, stale, damaged or missing (every file is hashed)")
    check.add_argument("run", metavar="RUN|PARAMS", help="name or folder of a run, or a parameter file")
    add("check-rendered", _check_rendered, "whether the committed pages of the default run are current")
    export = add("export", _export, "write a run's best draft for vLLM or SGLang, checked against what the engine reads")
    export.add_argument("run", metavar="RUN|PARAMS", help="name or folder of a run, or a parameter file")
    export.add_argument("--to", required=True, choices=("speculators", "eagle"), help="speculators: vLLM; eagle: SGLang and vLLM")
    export.add_argument("--engine", action="append", default=[], choices=("vllm", "sglang"), help="refuse unless this engine can serve it")
    export.add_argument("--out", metavar="FOLDER", help="where to write it (data/runs/<run>/exports/<format>)")
    served = add("served", _served, "run a run's best draft in vLLM on its evaluation prompts; its acceptance beside ours")
    served.add_argument("params", type=Path, metavar="PARAMS")
    listed = add("params", _params, "every parameter: type, range, default, notebooks, meaning")
    listed.add_argument("--profile", metavar="NAME", help=f"instead the lines of a published recipe: {', '.join(profiles.PROFILES)}")
    fetch = add("fetch", _fetch, "put the verifier on this disk, once; offline afterwards")
    fetch.add_argument("verifier", nargs="?", default=Parameters.model_fields["verifier"].default, metavar="VERIFIER|PARAMS")
    add("doctor", _doctor, "check versions, device, kernel, disk and memory for what is known to go wrong")
    return top


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.function(arguments)
    except WorkbookError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except kernels.Terminated:
        print("stopped by SIGTERM; finished stages and pages are kept, the same command goes on from there", file=sys.stderr)
        return kernels.TERMINATED
    except KeyboardInterrupt:
        print("stopped; finished stages and pages are kept, the same command goes on from there", file=sys.stderr)
        return kernels.INTERRUPTED
    except BrokenPipeError:  # `workbook params | head`
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
