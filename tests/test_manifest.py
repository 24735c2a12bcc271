"""Hand-over between stages: missing, stale and damaged are told apart, and writing is atomic and by one process."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import helpers.fingerprints
import helpers.manifest
from helpers import manifest, params
from helpers.errors import DamagedInput, DataError, DiskFull, LockedRun, MissingInput, StaleInput
from helpers.params import ROOT, Parameters

ONE, TWO, THREE, FOUR, FIVE = params.STAGES


@pytest.fixture
def run(tmp_path):
    """Makes the parameters of a run in a folder of its own, with prompt files of its own."""
    for name in ("train", "evaluation"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"id": "{name}"}}\n')

    def make(**changes):
        own = {"prompts_train": str(tmp_path / "train.jsonl"), "prompts_evaluation": str(tmp_path / "evaluation.jsonl")}
        return Parameters(**{"run": "t", "runs_folder": str(tmp_path / "runs"), **own, **changes})

    return make


def finish(stage, parameters, content="content", results=None):
    opened = manifest.open_stage(stage, parameters)
    opened.path("data", "out.txt").write_text(content)
    opened.finish(["data"], results or {"rows": 3})
    return opened


def finish_all(parameters, upto=FIVE):
    for stage in params.STAGES[: params.STAGES.index(upto) + 1]:
        finish(stage, parameters)


def test_finished_stage_can_be_read_with_its_results(run):
    finish(ONE, run(), results={"rows": np.int64(3), "share": np.float32(0.5), "none": float("nan"), "shape": (1, 2)})
    stage = manifest.require(ONE, run())
    assert stage.fresh
    assert stage.results == {"rows": 3, "share": 0.5, "none": None, "shape": [1, 2]}
    assert (stage.folder / "data" / "out.txt").read_text() == "content"


def test_manifest_records_parameters_inputs_outputs_and_provenance(run):
    finish(ONE, run(seed=7))
    made = json.loads((manifest.run_folder(run()) / ONE / "manifest.json").read_text())
    assert made["parameters"]["seed"] == made["seed"] == 7
    assert [v["bytes"] for v in made["inputs"].values()] == [len('{"id": "train"}\n')]
    # sha256 of b"content", from coreutils' sha256sum
    assert made["outputs"]["data/out.txt"]["sha256"] == "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    assert {"versions", "commit", "device", "machine", "seconds", "results_version", "upstream"} <= made.keys()


def test_stage_not_run_is_missing_and_the_message_names_file_notebook_and_command(run):
    with pytest.raises(MissingInput) as caught:
        manifest.open_stage(TWO, run())
    for text in ("01_extraction/manifest.json", "notebooks/01_extraction.ipynb", "--only 01"):
        assert text in str(caught.value)


def test_stage_begun_but_not_finished_is_missing_and_says_so(run):
    manifest.open_stage(ONE, run())
    with pytest.raises(MissingInput, match="begun, not finished"):
        manifest.require(ONE, run())


def test_other_parameters_make_a_stage_stale_and_both_values_are_named(run):
    finish(ONE, run())
    with pytest.raises(StaleInput) as caught:
        manifest.require(ONE, run(seed=5, answer_max_tokens=99))
    assert "seed: 0 then, 5 now" in str(caught.value)
    assert f"answer_max_tokens: {run().answer_max_tokens} then, 99 now" in str(caught.value)


def test_earlier_stage_s_parameter_makes_a_later_stage_stale(run):
    finish_all(run(), TWO)
    assert manifest.fingerprint(TWO, run(answer_max_tokens=99)) != manifest.fingerprint(TWO, run())
    with pytest.raises(StaleInput, match="answer_max_tokens"):
        manifest.require(TWO, run(answer_max_tokens=99))


def test_parameter_of_a_later_stage_leaves_earlier_stages_fresh(run):
    finish_all(run(), TWO)
    assert manifest.require(TWO, run(train_epochs=9, evaluation_max_tokens=50)).fresh


def test_edited_training_prompts_make_every_stage_stale_and_edited_evaluation_prompts_only_the_last(run, tmp_path):
    finish_all(run())
    (tmp_path / "evaluation.jsonl").write_text("{}\n")
    assert [manifest.state(s, run())[0] for s in params.STAGES] == ["fresh"] * 4 + ["stale"]
    assert "prompts_evaluation: the file" in manifest.state(FIVE, run())[1]
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert [manifest.state(s, run())[0] for s in params.STAGES] == ["stale"] * 5


def test_other_results_version_makes_a_stage_stale(run, monkeypatch):
    finish(ONE, run())
    for module in (helpers.manifest, helpers.fingerprints):
        monkeypatch.setattr(module, "RESULTS_VERSION", 10_000)
    with pytest.raises(StaleInput, match="results version: 1 then, 10000 now|results version: [0-9]+ then, 10000 now"):
        manifest.require(ONE, run())


def test_redone_stage_with_another_result_makes_later_stages_stale(run):
    finish_all(run(), THREE)
    finish(ONE, run(), content="other")
    with pytest.raises(StaleInput, match="another result of 01_extraction"):
        manifest.require(TWO, run())
    assert not manifest.Stage(THREE, manifest.run_folder(run()) / THREE, run()).fresh


def test_redone_stage_with_the_same_result_leaves_later_stages_fresh(run):
    finish_all(run(), TWO)
    finish(ONE, run())
    assert manifest.require(TWO, run()).fresh


def test_stage_whose_predecessor_was_deleted_names_the_predecessor(run):
    finish_all(run(), TWO)
    (manifest.run_folder(run()) / ONE / "manifest.json").unlink()
    with pytest.raises(MissingInput, match="stage 01_extraction has not been run"):
        manifest.require(TWO, run())


@pytest.mark.parametrize("damage", ["longer", "flipped", "gone"])
def test_changed_output_is_damaged_and_named(run, damage):
    path = finish(ONE, run()).folder / "data" / "out.txt"
    if damage == "gone":
        path.unlink()
    else:
        path.write_text("content and more" if damage == "longer" else "Content")
    with pytest.raises(DamagedInput, match="data/out.txt"):
        manifest.require(ONE, run())
    assert not manifest.Stage(ONE, manifest.run_folder(run()) / ONE, run()).fresh


def test_damage_that_keeps_size_and_time_is_found_by_hash_alone(run):
    path = finish(ONE, run()).folder / "data" / "out.txt"
    times = path.stat()
    path.write_text("Content")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    manifest.require(ONE, run(), sha=False)
    with pytest.raises(DamagedInput):
        manifest.require(ONE, run())


def test_touched_but_unchanged_output_stays_fresh(run):
    stage = finish(ONE, run())
    os.utime(stage.folder / "data" / "out.txt", (1, 1))
    assert stage.fresh


@pytest.mark.parametrize("text", ["{", "[]", "{}", ""])
def test_unreadable_manifest_is_damaged(run, text):
    stage = finish(ONE, run())
    (stage.folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedInput, match="cannot be read"):
        manifest.require(ONE, run())


def test_reopening_for_other_parameters_moves_the_folder_aside_and_says_so(run, capsys):
    finish(ONE, run(), content="old")
    stage = manifest.open_stage(ONE, run(seed=1))
    assert "01_extraction.previous" in capsys.readouterr().out
    assert (stage.folder.with_name(ONE + ".previous") / "data" / "out.txt").read_text() == "old"
    assert not (stage.folder / "data").exists()
    manifest.open_stage(ONE, run(seed=2))  # the older .previous gives way
    assert not (stage.folder.with_name(ONE + ".previous") / "data").exists()


def test_reopening_for_the_same_parameters_keeps_unfinished_work(run, capsys):
    manifest.open_stage(ONE, run()).path("partial.txt").write_text("half")
    assert (manifest.open_stage(ONE, run()).folder / "partial.txt").read_text() == "half"
    assert capsys.readouterr().out == ""


def test_unfinished_work_from_another_input_is_not_taken_up(run):
    finish(ONE, run())
    manifest.open_stage(TWO, run()).path("partial.txt").write_text("from the first input")
    finish(ONE, run(), content="other")
    assert not (manifest.open_stage(TWO, run()).folder / "partial.txt").exists()


def test_reopening_a_damaged_stage_sets_the_damaged_file_aside_and_drops_remembered_results(run, capsys):
    stage = manifest.open_stage(ONE, run())
    stage.remember("heavy", lambda: 1)
    finish(ONE, run())
    (stage.folder / "data" / "out.txt").write_text("broken!")
    again = manifest.open_stage(ONE, run())
    assert "data/out.txt" in capsys.readouterr().out
    assert (again.folder / "data" / "out.txt.damaged").read_text() == "broken!"
    assert again.remember("heavy", lambda: 2) == 2
    again.path("data", "out.txt").write_text("content")
    assert list(again.finish(["data"], {})["outputs"]) == ["data/out.txt"]


def test_remembered_result_is_read_not_computed_and_its_seconds_count(run, capsys):
    stage = manifest.open_stage(ONE, run())
    assert stage.remember("heavy", lambda: {"rate": np.float64(0.5), "rows": (1, 2)}) == {"rate": 0.5, "rows": [1, 2]}
    kept = stage.folder / "results" / "heavy.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "seconds": 100.0}))
    again = manifest.open_stage(ONE, run())
    assert again.remember("heavy", lambda: pytest.fail("computed again")) == {"rate": 0.5, "rows": [1, 2]}
    assert "read from" in capsys.readouterr().out
    made = again.finish([], {})
    assert made["seconds_reused"] == 100.0 and made["seconds"] >= 100.0


@pytest.mark.parametrize("why", ["other parameters", "recompute", "unreadable"])
def test_remembered_result_is_computed_again_when(run, why):
    manifest.open_stage(ONE, run()).remember("heavy", lambda: 1)
    changes = {"other parameters": {"seed": 1}, "recompute": {"recompute": True}, "unreadable": {}}[why]
    if why == "unreadable":
        (manifest.run_folder(run()) / ONE / "results" / "heavy.json").write_text("{")
    assert manifest.open_stage(ONE, run(**changes)).remember("heavy", lambda: 2) == 2


def test_failed_computation_leaves_no_result(run):
    stage = manifest.open_stage(ONE, run())
    with pytest.raises(ZeroDivisionError):
        stage.remember("heavy", lambda: 1 / 0)
    assert stage.remember("heavy", lambda: 2) == 2


@pytest.mark.parametrize("output", ["absent.txt", "../other", "/etc/hostname"])
def test_output_that_is_not_in_the_folder_cannot_be_recorded(run, output):
    with pytest.raises(DataError, match="output"):
        manifest.open_stage(ONE, run()).finish([output], {})


def test_prompts_edited_while_a_stage_runs_leave_it_stale_for_the_new_ones(run, tmp_path):
    stage = manifest.open_stage(ONE, run())
    (tmp_path / "train.jsonl").write_text('{"id": "edited"}\n')
    stage.finish([], {})
    state, why = manifest.state(ONE, run())
    assert state == "stale" and "prompts_train: the file" in why


HOLD = """
import sys, time
from helpers import files
from pathlib import Path
with files.lock(Path(sys.argv[1]), "stage"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_second_process_is_told_who_writes_and_a_killed_one_leaves_no_lock(run):
    stage = manifest.open_stage(ONE, run())
    path = stage.folder.with_name(ONE + ".lock")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout.readline() == "held\n"
        for write in (lambda: stage.finish([], {}), lambda: stage.remember("x", lambda: 1), lambda: manifest.open_stage(ONE, run())):
            with pytest.raises(LockedRun, match=f"process {other.pid}"):
                write()
        other.kill()
    assert stage.remember("x", lambda: 1) == 1


def test_writing_may_be_nested_in_one_process(run):
    stage = manifest.open_stage(ONE, run())
    with stage.writing(), stage.writing():
        assert stage.remember("x", lambda: stage.remember("y", lambda: 1)) == 1


def test_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    manifest.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(ValueError), manifest.atomic(tmp_path / "a.txt") as path:
        path.write_text("half")
        raise ValueError
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),  # safetensors
        RuntimeError("[enforce fail at inline_container.cc:778] . PytorchStreamWriter failed writing file data/0: file write failed"),
    ],
)
def test_full_disk_is_told_as_such_and_the_old_file_stays(tmp_path, error):
    manifest.write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(DiskFull, match="a.json"), manifest.atomic(tmp_path / "a.json") as path:
        path.write_text("half")
        raise error
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_folder_is_replaced_as_a_whole(tmp_path):
    for content in ("one", "two"):
        with manifest.atomic(tmp_path / "folder") as path:
            path.mkdir()
            (path / content).write_text(content)
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["two"]


def test_written_file_can_be_read_by_others_as_the_umask_allows(tmp_path):
    before = os.umask(0o022)
    try:
        with manifest.atomic(tmp_path / "weights") as path:
            path.touch(mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "weights").stat().st_mode & 0o777 == 0o644
