"""The environment: devices refused in words, known bad combinations named, one line that says what a page ran on."""

import random

import numpy
import pytest
import torch

from helpers import environment, provenance
from helpers.errors import ParameterError
from helpers.params import Parameters

GOOD = {
    "torch": "2.14.1+cu130",
    "torchvision": "0.29.1",
    "transformers": "5.19.0",
    "speculators": "0.9.0",
    "huggingface-hub": "2.4.0",
    "datasets": "5.1.0",
}
PINS = {"torch": "2.14.1", "speculators": "0.9.0", "nvidia-cublas": "13.1.1.3"}


def problems(found=GOOD, pinned=PINS, python=(3, 11, 7)):
    return {check.name: check.found for check in environment.check_packages(found, pinned, python) if check.state == "problem"}


def test_pinned_environment_has_no_problem_and_a_build_tag_or_an_absent_gpu_package_is_none():
    assert problems() == {}


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({"torch": "2.13.0+cpu"}, "torchvision", "torchvision::nms"),
        ({"speculators": "0.9.1"}, "speculators", "private names of 0.9.0"),
        ({"transformers": "5.0.0"}, "transformers", "huggingface_hub below 2"),
        ({"huggingface-hub": "1.3.0"}, "datasets", "breaks datasets 5.1"),
        ({"torch": "2.14.0"}, "pins", "torch 2.14.0 (pin 2.14.1)"),
    ],
)
def test_known_bad_combination_is_named(changes, name, text):
    assert text in problems({**GOOD, **changes})[name]


def test_old_python_and_missing_packages_are_problems():
    assert set(problems({}, {}, (3, 10, 2))) == {"python", "torch and speculators"}


def test_torch_2_13_without_torchvision_is_allowed():
    assert "torchvision" not in problems({k: v for k, v in GOOD.items() if k != "torchvision"} | {"torch": "2.13.0"})


def test_pins_are_read_from_the_constraints_by_normalised_name():
    pins = environment.pins()
    assert (pins["torch"], pins["torchvision"], pins["transformers"], pins["speculators"]) == ("2.14.1", "0.29.1", "5.19.0", "0.9.0")
    assert "typing-extensions" in pins and "jinja2" in pins


def test_missing_gpu_is_refused_in_words_and_auto_takes_what_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.pick_device("auto") == torch.device("cpu") == environment.pick_device("cpu")
    with pytest.raises(ParameterError, match="device cuda was asked for, this machine has no GPU"):
        environment.pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert environment.pick_device("auto").type == "cuda"
    assert environment.pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ParameterError, match=r"GPUs 0\.\.1"):
        environment.pick_device("cuda:2")


def test_same_seed_gives_the_same_draws_and_another_seed_others():
    def draws(seed):
        environment.seed_everything(seed)
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    first, other = draws(3), draws(2**40)
    assert draws(3) == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_start_prints_one_line_with_versions_device_commit_and_seed(capsys):
    environment.start(Parameters(device="cpu", seed=4))
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and torch.__version__.split("+")[0] in out
    assert all(word in out for word in ("python 3.", "transformers ", "speculators ", "cpu (", "seed 4"))
    assert ("commit " in out) != ("not in git" in out)


def test_progress_bars_are_off_after_quiet(capfd):
    environment.quiet()
    environment.quiet()
    from tqdm.auto import tqdm
    from tqdm.rich import tqdm as rich

    assert [list(bar(range(3), desc="bar")) for bar in (tqdm, rich)] == [[0, 1, 2]] * 2
    assert capfd.readouterr() == ("", "")


def test_stamp_outside_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    made = environment.stamp("cpu")
    assert made["commit"] is None and made["dirty"] is None
    assert made["device"] == "cpu" and made["machine"]["cores"] >= 1 and made["versions"]["torch"].startswith("2.")


def test_commit_is_clean_then_dirty_and_renders_do_not_count(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "--allow-empty", "-m", "x")):
        assert provenance._git(*arguments) is not None
    sha, dirty = provenance.commit()
    assert len(sha) == 40 and dirty is False
    (tmp_path / "rendered").mkdir()
    (tmp_path / "rendered" / "page.ipynb").touch()
    assert provenance.commit() == (sha, False)
    (tmp_path / "helper.py").touch()
    assert provenance.commit() == (sha, True)
