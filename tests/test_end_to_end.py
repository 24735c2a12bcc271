"""The five notebooks through the command line, as a user runs them: smoke set and ten samples (minutes)."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from helpers import manifest, params
from helpers.params import ROOT, STAGES
from helpers.stamps import incomplete, read

pytestmark = pytest.mark.slow

HEADLINE = {"accept_length", "accept_length_interval", "speedup", "seconds_total"}


class Shipped:
    """A shipped parameter set with its run and its pages in a folder of the test's own."""

    def __init__(self, name, folder):
        self.name, self.folder, self.rendered = name, folder, folder / "rendered"
        self.file = folder / f"{name}.yaml"
        self.set()

    def set(self, **changes):
        shipped = yaml.safe_load((ROOT / "papermill_params" / f"{self.name}.yaml").read_text(encoding="utf-8"))
        self.file.write_text(yaml.safe_dump({**shipped, "runs_folder": str(self.folder / "runs"), **changes}))

    @property
    def parameters(self):
        return params.load(self.file)

    def command(self, *arguments):
        # From another working directory: where a run is started from must not matter.
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=1200, check=False)

    def workbook(self, *arguments):
        return self.command("helpers.workbook", *map(str, arguments))

    def run(self, *arguments):
        return self.workbook("run", self.file, "--rendered", self.rendered, *arguments)

    def states(self):
        return [manifest.state(stage, self.parameters)[0] for stage in STAGES]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    shipped = Shipped("smoke", tmp_path_factory.mktemp("smoke"))
    done = shipped.run()
    assert done.returncode == 0, done.stdout + done.stderr
    return shipped


def holds_a_whole_run(shipped):
    assert shipped.states() == ["fresh"] * 5
    for stage in STAGES:
        page = read(shipped.rendered / shipped.name / f"{stage}.ipynb")
        assert incomplete(page) == [] and str(ROOT) not in json.dumps(page.metadata)
        assert (shipped.rendered / shipped.name / f"{stage}.html").stat().st_size > 10_000
    summary = json.loads((shipped.rendered / shipped.name / "summary.json").read_text(encoding="utf-8"))
    assert HEADLINE <= summary.keys() and summary["attention"] and set(summary["seconds"]) == set(STAGES)
    low, high = summary["accept_length_interval"]
    # a verification step emits the bonus token at least, and all K drafted tokens with it at most
    assert 1.0 <= low <= summary["accept_length"] <= high <= 1 + shipped.parameters.speculative_tokens


def test_smoke_set_runs_through_all_five_notebooks(smoke):
    holds_a_whole_run(smoke)


def test_second_run_skips_all_five(smoke):
    done = smoke.run()
    assert done.returncode == 0 and done.stdout.count("fresh, skipped") == 5, done.stdout + done.stderr


def test_evaluation_parameter_reruns_the_evaluation_alone(smoke):
    smoke.set(evaluation_prompts=12)
    try:
        assert smoke.states() == ["fresh"] * 4 + ["stale"]
        done = smoke.run()
        assert done.returncode == 0 and done.stdout.count("fresh, skipped") == 4, done.stdout + done.stderr
        assert smoke.states() == ["fresh"] * 5
    finally:
        smoke.set()


def test_later_stage_alone_refuses_a_predecessor_made_with_other_parameters(smoke):
    smoke.set(draft_vocab_size=128)
    try:
        done = smoke.run("--only", "03")
        assert done.returncode == 5 and "draft_vocab_size: 384 then, 128 now" in done.stderr, done.stdout + done.stderr
    finally:
        smoke.set()


def test_damaged_hidden_states_are_named_and_made_again(smoke):
    folder = manifest.run_folder(smoke.parameters) / STAGES[0]
    made = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["outputs"]
    name = next(name for name in made if name.endswith(".safetensors"))
    with open(folder / name, "r+b") as stream:
        stream.truncate(made[name]["bytes"] // 2)
    checked = smoke.workbook("check", smoke.file)
    assert checked.returncode == 5 and name in checked.stdout
    done = smoke.run("--only", "01")
    assert done.returncode == 0, done.stdout + done.stderr
    assert smoke.states()[0] == "fresh"


def test_papermill_alone_runs_a_notebook_from_another_directory(smoke, tmp_path):
    notebook = ROOT / "notebooks" / f"{STAGES[1]}.ipynb"
    done = smoke.command("papermill", str(notebook), str(tmp_path / "out.ipynb"), "-f", str(smoke.file), "--no-progress-bar")
    assert done.returncode == 0, done.stderr
    assert incomplete(read(tmp_path / "out.ipynb")) == []
    assert os.listdir(tmp_path) == ["out.ipynb"]


def test_ten_samples_of_the_real_verifier_run_through_all_five_notebooks(tmp_path):
    shipped = Shipped("ten_samples", tmp_path)
    done = shipped.run()
    assert done.returncode == 0, done.stdout + done.stderr
    holds_a_whole_run(shipped)
