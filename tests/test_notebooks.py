"""The five notebooks as their authors left them: the shape STYLE asks for, held without running them."""

import ast
import io
import re
import statistics
import tokenize

import nbformat
import papermill
import pytest

from helpers import params
from helpers.params import ROOT, STAGES, Parameters
from helpers.stamps import code_cells

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def parameters_cell(path):
    tagged = [cell for cell in read(path).cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1, "papermill replaces one tagged cell and undoes itself with two"
    return tagged[0]


def headings(path):
    cells = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    return re.findall(r"^#{1,3} +(.+?)\s*$", "\n".join(cells), re.MULTILINE)


def test_there_is_one_notebook_per_stage():
    assert [path.stem for path in PATHS] == list(STAGES)


@each
def test_parameters_cell_declares_the_stage_s_parameters_with_the_schema_s_defaults(path):
    statements = ast.parse(parameters_cell(path).source).body
    assert all(isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name) for s in statements), "name: type = literal, nothing else"
    declared = {s.target.id: ast.literal_eval(s.value) for s in statements}
    assert len(declared) == len(statements), "a name declared twice"
    assert set(declared) == set(params.names(path.stem))
    defaults = Parameters()
    assert {n: (type(v), v) for n, v in declared.items()} == {n: (type(getattr(defaults, n)), getattr(defaults, n)) for n in declared}


@each
def test_papermill_reads_the_same_parameters_as_python(path):
    found = papermill.inspect_notebook(str(path))
    assert {name: ast.literal_eval(made["default"]) for name, made in found.items()} == {
        name: getattr(Parameters(), name) for name in params.names(path.stem)
    }


@each
def test_comments_of_the_parameters_cell_hold_no_equals_sign_and_say_what_each_means(path):
    source = parameters_cell(path).source
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    assert not [comment for comment in comments if "=" in comment]
    assert len(comments) >= len(params.names(path.stem))


@each
def test_notebook_is_valid_without_outputs_or_paths_of_a_machine(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert not [cell.source for cell in code_cells(notebook) if cell.outputs or cell.execution_count is not None]
    assert str(ROOT) not in path.read_text(encoding="utf-8")


@each
def test_no_cell_calls_a_shell_sets_a_backend_or_leaves_the_kernel(path):
    forbidden = re.compile(
        r"^\s*[!%]|get_ipython|sys\.exit|os\._exit|\b(quit|exit)\(|matplotlib\.use|switch_backend|MPLBACKEND", re.MULTILINE
    )
    assert not [cell.source for cell in code_cells(read(path)) if forbidden.search(cell.source)]


@each
def test_cells_are_short(path):
    lengths = [len(cell.source.splitlines()) for cell in code_cells(read(path)) if "parameters" not in cell.metadata.get("tags", [])]
    assert max(lengths) <= 20 and statistics.median(lengths) <= 8, sorted(lengths)


@each
def test_metadata_names_kernel_language_and_figures(path):
    metadata = read(path).metadata
    assert metadata.kernelspec.name == "python3"
    assert metadata.kernelspec.get("language", "python") == "python" and metadata.language_info.name == "python"
    assert isinstance(metadata.workbook.figures, int) and metadata.workbook.figures >= 0


@each
def test_notebook_opens_with_what_it_reads_and_writes_and_ends_with_result_checks_limits_next(path):
    first = read(path).cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert all(word in first.source for word in ("Reads", "Writes", "Takes", "Next"))
    assert headings(path)[-4:] == ["Result", "Checks", "Limits", "Next"]
