"""Parameters: wrong entries are refused all at once, and the fingerprint follows what changes a result."""

import pytest
import yaml

from helpers import params
from helpers.errors import ParameterError
from helpers.params import ROOT, STAGES, Parameters

SHIPPED = sorted((ROOT / "papermill_params").glob("*.yaml"))


def complete(**changes):
    return {**Parameters().model_dump(), **changes}


def refusal(values, *, complete_set=True):
    with pytest.raises(ParameterError) as caught:
        params.check(values, where="here", complete=complete_set)
    return str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_set_loads_and_is_named_for_its_run(path):
    assert params.load(path).run == path.stem


def test_the_three_sets_of_the_default_workbook_are_shipped():
    assert {"smollm2", "smoke", "ten_samples"} <= {path.stem for path in SHIPPED}


def test_default_set_equals_the_schema_defaults():
    assert params.load(ROOT / "papermill_params" / "smollm2.yaml") == Parameters()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_comments_in_a_shipped_set_stand_on_their_own_line_without_an_equals_sign(path):
    # papermill's parameter parser stumbles over a second `=` on a line, and these comments get copied into cells
    for line in path.read_text(encoding="utf-8").splitlines():
        if "#" in line:
            assert line.startswith("#") and "=" not in line


def test_misspelt_name_is_refused_with_the_nearest_one():
    values = complete()
    values["train_learning_rat"] = values.pop("train_learning_rate")
    message = refusal(values)
    assert "train_learning_rat: unknown parameter, did you mean train_learning_rate?" in message
    assert "train_learning_rate: missing" in message


def test_all_problems_are_listed_at_once():
    message = refusal(complete(seed=-1, train_epochs="five", attention="", nonsense=1))
    assert message.startswith("4 problem(s)")
    assert all(name in message for name in ("seed", "train_epochs", "attention", "nonsense"))


def test_rate_that_yaml_reads_as_text_is_explained():
    values = complete(train_learning_rate=yaml.safe_load("3e-4"))
    assert "write 3.0e-4" in refusal(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 1.0), ("seed", True), ("train_epochs", "5"), ("recompute", 1), ("evaluation_k_values", "1"), ("run", 3), ("verifier", None)],
)
def test_wrong_type_is_refused_not_converted(name, value):
    assert name in refusal(complete(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heldout_share", 0.0),
        ("heldout_share", 0.9),
        ("max_sequence_tokens", 15),
        ("speculative_tokens", 0),
        ("device", "tpu"),
        ("run", "../elsewhere"),
        ("attention_trial_tokens", []),
    ],
)
def test_value_out_of_range_is_refused(name, value):
    assert name in refusal(complete(**{name: value}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"aux_layer_ids": [5, 2, 9]}, "aux_layer_ids"),
        ({"aux_layer_ids": [2, 2, 9]}, "aux_layer_ids"),
        ({"answer_max_tokens": 1024}, "answer_max_tokens"),
        ({"train_batch_tokens": 512}, "train_batch_tokens"),
        ({"evaluation_k_values": [1, 2]}, "speculative_tokens"),
        ({"evaluation_k_values": [3, 17]}, "evaluation_k_values"),
        ({"attention_trial_tokens": [8]}, "attention_trial_tokens"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(changes, named):
    assert named in refusal(complete(**changes))


def test_absent_file_lists_the_shipped_sets(tmp_path):
    with pytest.raises(ParameterError, match="smollm2.yaml"):
        params.load(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text", "a: [1", "1: 2\n"])
def test_file_that_is_not_flat_yaml_is_refused(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ParameterError):
        params.load(path)


def test_cell_takes_defaults_for_what_it_does_not_declare_and_ignores_what_is_no_plain_value():
    namespace = {"seed": 3, "_": 1, "In": [], "Out": {}, "exit": "x", "Path": object, "yaml": yaml}
    assert params.from_cell(namespace) == Parameters(seed=3)


def test_cell_with_a_name_that_is_no_parameter_is_refused():
    with pytest.raises(ParameterError, match="did you mean seed"):
        params.from_cell({"sed": 3})


def test_every_parameter_belongs_to_a_stage_and_says_what_it_means():
    declared = {name for stage in STAGES for name in params.names(stage)}
    assert declared == set(Parameters.model_fields)
    assert all(len(field.description) > 10 for field in Parameters.model_fields.values())


@pytest.mark.parametrize("stage", STAGES)
def test_fingerprint_changes_with_the_stage_s_own_values_only(stage):
    before = params.fingerprint(Parameters(), stage)
    own = "05_acceptance_evaluation" == stage
    assert (params.fingerprint(Parameters(evaluation_max_tokens=50), stage) != before) is own
    assert params.fingerprint(Parameters(seed=1), stage) != before


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"recompute": True}, {"run": "other"}, {"runs_folder": "/elsewhere"}])
def test_fingerprint_ignores_what_changes_no_result(changes):
    assert all(params.fingerprint(Parameters(**changes), stage) == params.fingerprint(Parameters(), stage) for stage in STAGES)


def test_relative_paths_start_at_the_repository_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert params.resolve("data/runs") == ROOT / "data" / "runs"
    assert params.resolve(tmp_path) == tmp_path
