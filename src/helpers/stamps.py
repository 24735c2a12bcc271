"""Stamped pages: what makes a rendered notebook current, whole and free of machine paths, and the HTML beside it."""

from __future__ import annotations

import hashlib
import html
import json
import re
import sys
from pathlib import Path
from typing import Any

from helpers import RESULTS_VERSION, params
from helpers.files import shown, write_text
from helpers.manifest import contents
from helpers.params import ROOT, STAGES, Parameters

DEFAULT_SET = ROOT / "papermill_params" / "smollm2.yaml"
MAX_LINES = 100  # of output in one cell: more is a log, not a page
ADDED_TAGS = {"injected-parameters", "papermill-error-cell-tag"}  # cells papermill adds to what the author wrote


def source_fingerprint(notebook: Any) -> str:
    """SHA-256 over the kind and source of every cell the author wrote: equal for a notebook and its render."""
    cells = [[cell.cell_type, cell.source] for cell in notebook.cells if not ADDED_TAGS & set(cell.metadata.get("tags", []))]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def parameters_fingerprint(parameters: Parameters, stage: str = STAGES[-1]) -> str:
    """SHA-256 over the parameters of a stage and of those before it; for the last stage, the whole set.

    So a new value reruns the notebooks that depend on it and no others. `runs_folder` and `recompute` are left out: they
    say where and how often, not what.
    """
    names = {name for earlier in STAGES[: STAGES.index(stage) + 1] for name in params.names(earlier)} - {"runs_folder", "recompute"}
    values = {name: getattr(parameters, name) for name in names}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _stamped(source: Any, stage: str, parameters: Parameters) -> dict[str, Any]:
    """The part of a stamp that can be known without running: what a render has to carry to be current."""
    return {
        "source_fingerprint": source_fingerprint(source),
        "parameters_fingerprint": parameters_fingerprint(parameters, stage),
        "results_version": RESULTS_VERSION,
        "prompts": {name: made["sha256"] for name, made in contents(stage, parameters).items()},
    }


def stamp(notebook: Any, source: Any, stage: str, parameters: Parameters, **more: Any) -> None:
    """Write the provenance of a render into its metadata under `workbook`."""
    notebook.metadata["workbook"] = {**notebook.metadata.get("workbook", {}), **_stamped(source, stage, parameters), **more}


def code_cells(notebook: Any) -> list[Any]:
    """Cells that have to be executed: code that is not blank."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def incomplete(notebook: Any) -> list[str]:
    """Cells that did not run to their end, papermill's word for it not taken: it calls pending cells completed."""
    faults = []
    for number, cell in enumerate(code_cells(notebook), start=1):
        errors = [out.ename for out in cell.outputs if out.output_type == "error"]
        if errors:
            faults.append(f"cell {number} ended with {errors[0]}")
        elif cell.execution_count is None or cell.metadata.get("papermill", {}).get("status", "completed") != "completed":
            faults.append(f"cell {number} was not executed")
    return faults


def _lines(output: Any) -> int:
    if output.output_type == "stream":
        return len(re.split(r"[\r\n]", output.text.rstrip("\n")))
    data = output.get("data", {})
    return 0 if any(kind.startswith("image/") or kind == "text/html" for kind in data) else len(data.get("text/plain", "").splitlines())


def unfit(notebook: Any) -> list[str]:
    """Why an executed notebook is no page: cells not run, promised figures missing, output that floods."""
    faults = incomplete(notebook)
    figures = sum("image/png" in out.get("data", {}) for cell in code_cells(notebook) for out in cell.outputs)
    promised = notebook.metadata.get("workbook", {}).get("figures", 0)
    if figures < promised:
        faults.append(f"{figures} figures, {promised} promised in its metadata (workbook.figures)")
    for number, cell in enumerate(code_cells(notebook), start=1):
        if (lines := sum(map(_lines, cell.outputs))) > MAX_LINES:
            faults.append(f"cell {number} printed {lines} lines, at most {MAX_LINES} are allowed")
    return faults


def outdated(notebook: Any, source: Any, stage: str, parameters: Parameters) -> list[str]:
    """Why a render is not what its notebook and parameters would give now; empty when it is current."""
    have, want = notebook.metadata.get("workbook", {}), _stamped(source, stage, parameters)
    if "source_fingerprint" not in have:
        return ["it carries no stamp: it was not made by the runner"]
    because = {
        "source_fingerprint": "the notebook has changed since",
        "parameters_fingerprint": "it came from other parameters",
        "results_version": f"results version {have.get('results_version')}, now {RESULTS_VERSION}",
        "prompts": "it came from other prompts",
    }
    reasons = [text for key, text in because.items() if have.get(key) != want[key]]
    if source_fingerprint(notebook) != have["source_fingerprint"]:
        reasons.append("its cells were edited after it was made")
    return reasons + incomplete(notebook)


def read(path: Path) -> Any | None:
    """Notebook in `path`; None if it is absent or not a notebook."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except Exception:  # nbformat lets errors of several libraries through; to the caller, each means no usable notebook
        return None


def strip_paths(notebook: Any) -> None:
    """Make the paths of this machine relative, in outputs and metadata; pictures are left alone."""
    rules = [(re.compile(r"/\S*?ipykernel_\d+/\d+\.py"), "<cell>")]
    for folder, instead in ((ROOT, ""), (Path(sys.prefix), ".venv/"), (Path.home(), "~/")):
        # Whole path components only: with /a/main, /a/main2 stays. Alone, the folder becomes "." or its new name.
        alone = instead.rstrip("/") or "."
        rules.append((re.compile(re.escape(f"{folder}/")), instead))
        if folder != Path.home():
            rules.append((re.compile(re.escape(str(folder)) + r"(?![\w-]|\.\w)"), alone))

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            for pattern, instead in rules:
                value = pattern.sub(instead, value)
        elif isinstance(value, list):
            value = [walk(item) for item in value]
        elif isinstance(value, dict):
            for key in value:
                if not (key.startswith("image/") and key != "image/svg+xml"):
                    value[key] = walk(value[key])
        return value

    walk(notebook.metadata)
    for cell in notebook.cells:
        walk(cell.metadata)
        if "outputs" in cell:
            cell.outputs = walk(cell.outputs)


def write_html(notebook: Any, path: Path) -> None:
    """The page as one HTML file, figures inside it; readable without a network (formulas need one)."""
    from nbconvert import HTMLExporter

    body, _ = HTMLExporter(template_name="lab", embed_images=True).from_notebook_node(
        notebook, resources={"metadata": {"name": path.stem, "path": str(ROOT)}}
    )
    write_text(path, body)


def title(notebook: Any) -> str:
    """First heading of a notebook."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^#\s+(.+)$", cell.source, re.MULTILINE)):
            return found[1].strip()
    return "untitled"


def _table(rows: list[list[str]], head: list[str]) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def write_index(folder: Path, parameters: Parameters) -> None:
    """`index.html` of a set: its result, links to its pages, and the parameters that differ from the defaults."""
    rows = []
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        if (page := read(path)) is not None:
            made = page.metadata.get("workbook", {})
            link = f'<a href="{html.escape(path.stem)}.html">{html.escape(title(page))}</a>'
            rows.append([link, f"{made.get('seconds', 0):.0f}", html.escape(str(made.get("date", ""))[:16]), html.escape(path.name)])
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    figures = [[html.escape(k), html.escape(json.dumps(v))] for k, v in summary.items() if not isinstance(v, dict)]
    fields = Parameters.model_fields
    changed = [[html.escape(n), html.escape(json.dumps(v))] for n, v in parameters.model_dump().items() if v != fields[n].default]
    style = "body{font-family:sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em 1em .2em 0;text-align:left}"
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(folder.name)}</title><style>{style}</style>',
        f"<h1>Run {html.escape(folder.name)}</h1>",
        _table(rows, ["page", "seconds", "made (UTC)", "notebook"]),
        "<h2>Result</h2>" + (_table(figures, ["figure", "value"]) if figures else "<p>Not there yet: notebook 05 writes it.</p>"),
        "<h2>Parameters</h2>" + (_table(changed, ["differs from the default", "value"]) if changed else "<p>All at their defaults.</p>"),
    ]
    write_text(folder / "index.html", "\n".join(parts) + "</html>\n")


def check_rendered(
    rendered: Path = ROOT / "rendered", parameter_file: Path = DEFAULT_SET, notebooks: Path = ROOT / "notebooks"
) -> list[str]:
    """Faults of the committed pages of the default run; empty when each is what its notebook would give now."""
    parameters, folder = params.load(parameter_file), rendered / parameter_file.stem
    faults = []
    for stage in STAGES:
        path, source = folder / f"{stage}.ipynb", read(notebooks / f"{stage}.ipynb")
        page = read(path)
        if source is None or page is None:
            faults.append(f"{shown(path if source is not None else notebooks / f'{stage}.ipynb')}: missing or not a notebook")
        else:
            faults += [f"{shown(path)}: {reason}" for reason in outdated(page, source, stage, parameters)]
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [*faults, f"{shown(folder / 'summary.json')}: missing or not JSON"]
    if summary.get("parameters_fingerprint") != parameters_fingerprint(parameters) or summary.get("results_version") != RESULTS_VERSION:
        faults.append(f"{shown(folder / 'summary.json')}: it came from other parameters or another results version")
    return faults
