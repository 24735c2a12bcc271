"""Profiles say what the recipes set, in parameters this workbook knows; nothing of theirs is lost or invented."""

import pytest
import yaml

from helpers import params, profiles, workbook
from helpers.errors import ParameterError
from helpers.params import ROOT, Parameters


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_pasted_lines_make_a_parameter_set_that_is_the_profile(name):
    base = yaml.safe_load((ROOT / "papermill_params" / "smollm2.yaml").read_text(encoding="utf-8"))
    pasted = base | yaml.safe_load(profiles.lines(name))
    found = params.check(pasted, where="here", complete=True)
    assert {key: getattr(found, key) for key in profiles.PROFILES[name].settings} == profiles.PROFILES[name].settings
    assert profiles.nearest(found) == (name, [])


def test_the_speculators_profile_is_what_the_installed_library_defaults_to():
    from speculators.train.config import schema

    made, there = profiles.PROFILES["speculators"].settings, schema.TrainConfig.model_fields
    groups = {name: there[name].annotation.model_fields for name in ("draft", "loss", "optimizer", "scheduler", "trainer")}
    pairs = {
        "draft_window": ("draft", "sliding_window"),
        "norm_before_residual": ("draft", "norm_before_residual"),
        "fc_norm": ("draft", "fc_norm"),
        "train_ttt_steps": ("loss", "ttt_steps"),
        "train_step_decay": ("loss", "ttt_step_loss_decay"),
        "train_optimizer": ("optimizer", "optimizer"),
        "train_learning_rate": ("optimizer", "lr"),
        "train_weight_decay": ("optimizer", "weight_decay"),
        "train_muon_weight_decay": ("optimizer", "muon_weight_decay"),
        "train_scheduler": ("scheduler", "scheduler_type"),
        "train_epochs": ("trainer", "epochs"),
    }
    for ours, (group, theirs) in pairs.items():
        assert made[ours] == groups[group][theirs].default, ours


def test_the_paper_s_profile_trains_the_head_over_seven_weighted_steps():
    made = Parameters(**profiles.PROFILES["eagle3_paper"].settings)
    assert (made.train_head, made.train_ttt_steps, made.train_step_decay, made.draft_window) == (True, 7, 0.8, 0)
    assert (made.train_optimizer, made.train_learning_rate, made.train_betas, made.train_clip) == ("adamw", 5e-5, [0.9, 0.95], 0.5)


def test_the_table_shows_where_the_recipes_differ_and_what_this_run_uses():
    rows = {row["parameter"]: row for row in profiles.differences(Parameters(train_clip=0.7))}
    assert rows["train_head"] == {
        "parameter": "train_head",
        "eagle3_paper": "True",
        "speculators": "False",
        "eagle3_1": "False",
        "this run": "False",
    }
    assert rows["train_clip"]["this run"] == "0.7"
    assert "draft_layers" not in rows  # the same in all and here


def test_the_command_prints_the_lines_and_refuses_another_name(capsys):
    assert workbook.main(["params", "--profile", "eagle3_1"]) == 0
    printed = capsys.readouterr().out
    assert "fc_norm: true" in printed and "2605.09992" in printed
    assert workbook.main(["params", "--profile", "eagle4"]) == ParameterError.exit_code
    assert "eagle3_paper" in capsys.readouterr().err


def test_one_norm_before_the_projection_or_one_for_each_state_not_both():
    with pytest.raises(ParameterError, match="norm_before_fc and fc_norm"):
        params.check({"norm_before_fc": True, "fc_norm": True}, where="here", complete=False)
    with pytest.raises(ParameterError, match="train_betas"):
        params.check({"train_betas": [0.9, 1.0]}, where="here", complete=False)
