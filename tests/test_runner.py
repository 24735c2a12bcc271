"""The runner, on throw-away notebooks: what papermill lets pass fails here, and the last good page stays."""

import base64
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import nbformat
import pytest
import yaml

from helpers import kernels, manifest, runner, stamps, workbook
from helpers.errors import LockedRun, MissingInput, ParameterError
from helpers.files import lock
from helpers.params import ROOT, STAGES, Parameters

ONE, TWO, FIVE = STAGES[0], STAGES[1], STAGES[4]


def png(width=1, height=1):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"\x00" + b"\xff" * 3 * width
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows * height)) + chunk(b"IEND", b"")


FIGURE = "from IPython.display import Image, display\nimport base64\n" + (
    f'display(Image(data=base64.b64decode("{base64.b64encode(png()).decode()}"), format="png"))'
)
OPEN = """from helpers import kernels, manifest, params
parameters = params.from_cell(globals())
stage = manifest.open_stage("{name}", parameters)"""
FINISH = 'stage.path("out.txt").write_text(str(parameters.seed))\nrecord = stage.finish(["out.txt"], {})'
HEADLINE = 'record = stage.finish([], {"accept_length": 1.75, "accept_length_interval": [1.6, 1.9], "speedup": 1.2, "by_k": {"3": 1.75}})'


# Another process that holds a lock until it is killed.
HOLD = """
import pathlib, sys, time
from helpers import files
with files.lock(pathlib.Path(sys.argv[1]), "x"):
    print(flush=True)
    time.sleep(60)
"""
# The command line, with the notebooks of the bench in place of the repository's.
COMMAND = """
import functools, pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell starts its children with Ctrl-C ignored
from helpers import runner, workbook
runner.Runner = functools.partial(runner.Runner, notebooks=pathlib.Path(sys.argv[1]))
sys.exit(workbook.main(sys.argv[2:]))
"""
SLEEP = """
import os, pathlib, time
pathlib.Path({marker!r}).write_text(str(os.getpid()))
time.sleep(120)
"""


class Bench:
    """A folder with five notebooks, a parameter file and the pages made from them."""

    def __init__(self, folder: Path):
        self.folder, self.notebooks, self.rendered = folder, folder / "notebooks", folder / "rendered"
        self.file = folder / "mini.yaml"
        self.lines: list[str] = []
        for name in ("train", "evaluation"):
            (folder / f"{name}.jsonl").write_text("{}\n")
        self.set()
        for name in STAGES:
            self.write(name, FINISH if name != FIVE else HEADLINE)

    def set(self, **changes):
        own = {"prompts_train": str(self.folder / "train.jsonl"), "prompts_evaluation": str(self.folder / "evaluation.jsonl")}
        values = {**Parameters().model_dump(), "run": "mini", "runs_folder": str(self.folder / "runs"), **own, **changes}
        self.file.write_text(yaml.safe_dump(values))

    def write(self, name, *cells, figures=0):
        open_cell = OPEN.format(name=name)
        code = [nbformat.v4.new_code_cell(source) for source in ("seed: int = 0  # a literal", open_cell, *cells)]
        code[0].metadata["tags"] = ["parameters"]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {name} of {ROOT}"), *code])
        notebook.metadata = {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
            "workbook": {"figures": figures},
        }
        self.notebooks.mkdir(exist_ok=True)
        nbformat.write(notebook, self.notebooks / f"{name}.ipynb")

    def runner(self):
        return runner.Runner(self.file, rendered=self.rendered, notebooks=self.notebooks, say=self.lines.append)

    def run(self, first=ONE, last=ONE):
        self.lines.clear()
        self.runner().run(first, last)

    def page(self, name=ONE, failed=False):
        return stamps.read((self.rendered / "_failed" / "mini" if failed else self.rendered / "mini") / f"{name}.ipynb")

    def leftovers(self):
        return [p for p in self.rendered.rglob("*") if p.name.startswith(".")]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def fails(bench, *cells, figures=0, error=kernels.NotebookError):
    bench.write(ONE, *cells, figures=figures)
    with pytest.raises(error) as caught:
        bench.run()
    assert bench.leftovers() == []
    return caught.value


def test_run_gives_stamped_pages_index_and_summary_then_skips_what_is_fresh(bench):
    bench.set(seed=7)
    bench.write(ONE, f"print({str(ROOT)!r} + '/data/x')", FIGURE, FINISH, figures=1)
    bench.run(ONE, FIVE)
    page, parameters = bench.page(), bench.runner().parameters
    made = page.metadata["workbook"]
    assert made["source_fingerprint"] == stamps.source_fingerprint(stamps.read(bench.notebooks / f"{ONE}.ipynb"))
    assert made["parameters_fingerprint"] == stamps.parameters_fingerprint(parameters, ONE)
    assert {"results_version", "commit", "set", "seconds", "date", "figures"} <= made.keys()
    assert (manifest.run_folder(parameters) / ONE / "out.txt").read_text() == "7", "the set's value was injected"
    assert [out.text for cell in page.cells for out in cell.get("outputs", []) if out.output_type == "stream"] == ["data/x\n"]
    assert str(ROOT) not in json.dumps(page.metadata)
    html = (bench.rendered / "mini" / f"{ONE}.html").read_text()
    assert base64.b64encode(png()).decode()[:40] in html, "the figure is inside the page"
    summary = json.loads((bench.rendered / "mini" / "summary.json").read_text())
    assert (summary["accept_length"], summary["accept_length_interval"], summary["speedup"]) == (1.75, [1.6, 1.9], 1.2)
    assert summary["results"][FIVE]["by_k"] == {"3": 1.75}
    assert summary["seconds_total"] == pytest.approx(sum(summary["seconds"].values()), abs=0.1) and len(summary["seconds"]) == 5
    index = (bench.rendered / "mini" / "index.html").read_text()
    assert all(f'href="{name}.html"' in index for name in STAGES)
    assert bench.leftovers() == []

    times = {p: p.stat().st_mtime_ns for p in (bench.rendered / "mini").glob("*.ipynb")}
    bench.run(ONE, FIVE)
    assert sum("fresh, skipped" in line for line in bench.lines) == 5
    assert times == {p: p.stat().st_mtime_ns for p in (bench.rendered / "mini").glob("*.ipynb")}

    # the same five pages, judged as committed ones
    def check():
        return stamps.check_rendered(bench.rendered, bench.file, bench.notebooks)

    assert check() == []
    bench.write(TWO, "1 + 1", FINISH)
    assert [f for f in check() if "the notebook has changed" in f and TWO in f] == check()
    assert bench.runner().reasons(TWO) == ["the notebook has changed since"]
    bench.set(seed=7, evaluation_max_tokens=50)
    bench.write(TWO, FINISH)
    assert [f for f in check() if "other parameters" in f] == check() and all(FIVE in f or "summary" in f for f in check())
    bench.set(seed=8)
    assert sum("other parameters" in fault for fault in check()) == 6, "five pages and the summary"


def test_failing_cell_keeps_the_last_good_page_and_puts_the_failed_one_aside(bench):
    bench.run()
    good = (bench.rendered / "mini" / f"{ONE}.ipynb").read_bytes()
    error = fails(bench, "x = 1", "raise ValueError('no such thing')", FINISH)
    assert error.exit_code == 1
    assert "cell 5 raised ValueError: no such thing" in str(error)
    assert (bench.rendered / "mini" / f"{ONE}.ipynb").read_bytes() == good
    states = [cell.metadata.papermill["status"] for cell in stamps.code_cells(bench.page(failed=True))]
    assert states == ["completed"] * 4 + ["failed", "pending"]
    assert any("_failed/mini" in line for line in bench.lines)


def test_error_of_ours_ends_with_its_message_alone_and_its_exit_code(bench):
    error = fails(bench, "from helpers.errors import AttentionError\nraise AttentionError('no backward', where='cpu', do='take sdpa')")
    assert error.exit_code == 6
    assert str(error) == f"{ONE}: no backward\n  where: cpu\n  do:    take sdpa"


def test_dead_kernel_ends_with_code_9_and_its_cell_is_not_called_completed(bench):
    error = fails(bench, "import os\nos._exit(3)", FINISH)
    assert error.exit_code == 9
    assert "the kernel died in cell 4 of 5" in str(error)
    cells = stamps.code_cells(bench.page(failed=True))
    assert [cell.metadata.papermill["status"] for cell in cells][-2:] == ["failed", "pending"]


def test_cell_that_exits_with_0_is_a_failure(bench):
    error = fails(bench, "import sys\nsys.exit(0)", FINISH)
    assert "cell 4 ended with SystemExit" in str(error) and "cell 5 was not executed" in str(error)


def test_page_without_a_promised_figure_or_a_manifest_or_with_a_flood_is_refused(bench):
    error = fails(bench, "print('line\\n' * 101)", figures=2)
    assert "0 figures, 2 promised" in str(error)
    assert "cell 4 printed 101 lines" in str(error) or "cell 4 printed 102 lines" in str(error)
    assert "no new manifest.json" in str(error)
    assert bench.page() is None


def test_manifest_of_an_earlier_run_does_not_stand_in_for_a_new_one(bench):
    bench.run()
    assert "no new manifest.json" in str(fails(bench, "1 + 1"))


def test_first_stage_asked_for_names_its_missing_predecessor_without_starting_a_kernel(bench):
    with pytest.raises(MissingInput, match="01_extraction has not been run"):
        bench.run(TWO, TWO)
    assert not (bench.rendered / "mini").exists()


def test_second_run_on_one_folder_is_refused(bench):
    folder = manifest.run_folder(bench.runner().parameters)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", HOLD, str(folder / "run.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as other:
        other.stdout.readline()
        with pytest.raises(LockedRun, match=f"process {other.pid}"):
            bench.run()
        other.kill()
    with lock(folder / "run.lock", "x"):
        pass


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_run_shuts_its_kernel_down_and_leaves_the_last_good_page(bench, number, code):
    marker = bench.folder / "kernel.pid"
    bench.write(ONE, SLEEP.format(marker=str(marker)), FINISH)
    good = bench.rendered / "mini" / f"{ONE}.ipynb"
    good.parent.mkdir(parents=True)
    good.write_text("{}")
    command = ["run", str(bench.file), "--only", "01", "--rendered", str(bench.rendered)]
    command = [sys.executable, "-c", COMMAND, str(bench.notebooks), *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 180
        while not (marker.is_file() and marker.read_text()) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=180)
    assert process.returncode == code, errors.decode()
    assert b"the same command goes on" in errors and len(errors.splitlines()) == 1, errors.decode()
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)
    assert good.read_text() == "{}" and bench.leftovers() == []


def test_running_cell_is_told_while_a_notebook_runs(bench, monkeypatch):
    monkeypatch.setattr(kernels, "HEARTBEAT_SECONDS", 0.5)
    bench.write(ONE, "import time\ntime.sleep(1.5)", FINISH)
    bench.run()
    assert any(line.startswith(f"{ONE}: cell 4 of 5, ") for line in bench.lines)


def test_figures_stay_in_the_page_whatever_mplbackend_says(bench, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    draw = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    # the second time as under papermill alone, where nobody cleans the kernel's environment
    bench.write(ONE, draw, FINISH, figures=1)
    bench.write(
        TWO, "import os\nos.environ['MPLBACKEND'] = 'Agg'", "from helpers import environment\nenvironment._show_figures()", draw, FINISH
    )
    bench.run(ONE, TWO)
    for name in (ONE, TWO):
        assert sum("image/png" in out.get("data", {}) for cell in stamps.code_cells(bench.page(name)) for out in cell.outputs) == 1
    assert os.environ["MPLBACKEND"] == "Agg", "the caller's own environment is put back"


def test_duration_of_a_page_made_again_counts_what_was_reused(bench):
    bench.write(ONE, "stage.remember('heavy', lambda: 1)", FINISH)
    bench.run()
    kept = manifest.run_folder(bench.runner().parameters) / ONE / "results" / "heavy.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "seconds": 400.0}))
    bench.write(ONE, "stage.remember('heavy', lambda: 1)", "1 + 1", FINISH)
    bench.run()
    made = bench.page().metadata["workbook"]
    assert made["seconds_reused"] == 400.0 and 400.0 < made["seconds"] < 500.0


def test_page_edited_by_hand_is_not_current(bench):
    bench.run()
    page, source = bench.page(), stamps.read(bench.notebooks / f"{ONE}.ipynb")
    assert stamps.outdated(page, source, ONE, bench.runner().parameters) == []
    page.cells[0].source += " with a better figure"
    assert stamps.outdated(page, source, ONE, bench.runner().parameters) == ["its cells were edited after it was made"]


def test_prepared_copies_carry_the_set_and_survive_until_the_set_changes(bench):
    bench.set(seed=5)
    folder = runner.prepare(bench.file, notebooks=bench.notebooks)
    copy = stamps.read(folder / f"{ONE}.ipynb")
    assert "seed = 5" in copy.cells[2].source and copy.cells[2].metadata.tags == ["injected-parameters"]
    copy.cells[2].outputs = [nbformat.v4.new_output("stream", text="worked in")]
    nbformat.write(copy, folder / f"{ONE}.ipynb")
    runner.prepare(bench.file, notebooks=bench.notebooks)
    assert stamps.read(folder / f"{ONE}.ipynb").cells[2].outputs, "an unchanged copy keeps its outputs"
    bench.set(seed=6)
    runner.prepare(bench.file, notebooks=bench.notebooks)
    assert "seed = 6" in stamps.read(folder / f"{ONE}.ipynb").cells[2].source
    assert stamps.read(folder / f"{ONE}.previous.ipynb").cells[2].outputs, "work in the old one is kept"


def test_paths_of_this_machine_are_made_relative_and_pictures_left_alone():
    picture = base64.b64encode(b"any").decode() + str(ROOT) + "/"
    warning = "/tmp/ipykernel_12/345.py:3: UserWarning"
    texts = [f"{ROOT}/data/a", f"in {ROOT}.", f"{ROOT}2/b", f"{sys.prefix}/lib/x.py", warning, str(ROOT)]
    outputs = [nbformat.v4.new_output("display_data", {"image/png": picture, "text/plain": text}) for text in texts]
    cell = nbformat.v4.new_code_cell("x", outputs=outputs)
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"papermill": {"output_path": f"{ROOT}/rendered/x"}})
    stamps.strip_paths(notebook)
    shown = [out.data["text/plain"] for out in notebook.cells[0].outputs]
    assert shown == ["data/a", "in ..", f"{ROOT}2/b", ".venv/lib/x.py", "<cell>:3: UserWarning", "."]
    assert {out.data["image/png"] for out in notebook.cells[0].outputs} == {picture}
    assert notebook.metadata.papermill.output_path == "rendered/x"


@pytest.mark.parametrize("text", ["3", "03", "03_draft_config_and_attention", "draft_config_and_attention"])
def test_notebook_may_be_named_by_number_or_stage(text):
    assert runner.stage_of(text) == STAGES[2]


@pytest.mark.parametrize("text", ["0", "6", "3.0", "training.ipynb", ""])
def test_unknown_notebook_is_refused(text):
    with pytest.raises(ParameterError, match="no notebook"):
        runner.stage_of(text)


def test_command_line_prints_the_error_and_returns_its_code(tmp_path, capsys):
    assert workbook.main(["run", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: no parameter file")


def test_params_command_lists_every_parameter(capsys):
    assert workbook.main(["params"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in Parameters.model_fields)
    assert "number > 0, <= 1 " in out and "integer >= 16, <= 1048576 " in out


def test_check_command_tells_fresh_missing_and_damaged_stages_from_the_run_s_own_parameters(bench, capsys):
    parameters = bench.runner().parameters
    for name in STAGES[:2]:
        stage = manifest.open_stage(name, parameters)
        stage.path("out.txt").write_text("x")
        stage.finish(["out.txt"], {})
    folder = manifest.run_folder(parameters)
    (folder / TWO / "out.txt").write_text("y")
    assert workbook.main(["check", str(folder)]) == 5
    states = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line[:2].isdigit()]
    assert states == ["fresh", "damaged", "missing", "missing", "missing"]
    assert workbook.main(["check", str(bench.file)]) == 5
    bench.set(seed=1)
    capsys.readouterr()
    workbook.main(["check", str(bench.file)])
    assert "seed: 0 then, 1 now" in capsys.readouterr().out
