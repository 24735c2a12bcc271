"""Where a draft starts: the verifier's layer computes what the verifier computes; another draft's weights are taken whole or refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained_rows import model_for, settings, store, trainer_for

from helpers import draft, initialisation, ttt
from helpers.errors import DamagedInput, MissingInput, ParameterError
from helpers.verifier import load


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return folder, store(tiny, folder)


@pytest.fixture(scope="module")
def trained(made, tiny_folder, tmp_path_factory):
    """A draft after an epoch, in the float32 of its checkpoint and the bfloat16 of its best."""
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_for(made, tiny_folder, folder, train_epochs=1)
    trainer.run_training()
    return folder, trainer.model


def test_random_leaves_a_built_draft_as_it_is(made, tiny_folder):
    model = model_for(made[1], tiny_folder, settings())
    before = {n: p.clone() for n, p in model.named_parameters()}
    assert initialisation.start(model, settings())["tensors_set"] == 0
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_from_the_verifier_the_first_step_is_the_verifiers_last_layer(tiny, made, tiny_folder):
    """Fed the state below the last of eight layers, and with its residual, the draft's state is what the verifier's last layer puts out."""
    parameters = settings(draft_init="verifier", norm_before_residual=False)
    model = model_for(made[1], tiny_folder, parameters, layers=[2, 4, 7])
    facts = initialisation.start(model, parameters)
    ids = torch.tensor([made[1][0].input_ids])
    with tiny.capture([2, 4, 7, 8]) as states, torch.no_grad():
        tiny.decoder(input_ids=ids)
        below, above = torch.cat([states[i] for i in (2, 4, 7)], -1), states[8]
    seen = []
    model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    n = ids.shape[1]
    batch = {"hidden_states": below, "verifier_last_hidden_states": above, "input_ids": ids, "document_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        ttt.forward(model, **batch, loss_mask=torch.ones_like(ids), position_ids=torch.arange(n)[None], ttt_steps=1)
    assert torch.allclose(seen[0], above[0], atol=1e-5)
    assert facts == {"draft_init": "verifier", "tensors_set": 11}  # fc, q k v o, gate up down, three norms


def test_two_layers_start_as_the_last_two(made, tiny_folder, tiny):
    parameters = settings(draft_init="verifier", draft_layers=2)
    model = model_for(made[1], tiny_folder, parameters)
    initialisation.start(model, parameters)
    for ours, theirs in ((0, 6), (1, 7)):
        assert torch.equal(model.layers[ours].mlp.up_proj.weight, tiny.decoder.layers[theirs].mlp.up_proj.weight)


def test_other_heads_than_the_verifiers_are_named_with_both_shapes(made, tiny_folder):
    parameters = settings(draft_init="verifier", draft_intermediate_size=96)
    with pytest.raises(ParameterError, match=r"up_proj.weight: \[\d+, 64\] there, \[96, 64\] in this draft"):
        initialisation.start(model_for(made[1], tiny_folder, parameters), parameters)


def test_an_existing_draft_is_gone_on_from_exactly(made, tiny_folder, trained, tmp_path):
    folder, source = trained
    parameters = settings(draft_init=str(folder / "checkpoints" / "0"))
    model = model_for(made[1], tiny_folder, parameters)
    facts = initialisation.start(model, parameters)
    for name, value in source.named_parameters():
        assert torch.equal(value, dict(model.named_parameters())[name]), name
    assert facts["head_rows_taken"] == 0 and len(facts["sha256"]) == 64
    trainer = trainer_for(made, tiny_folder, tmp_path, model=model, train_epochs=1)
    trainer.run_training()
    rounded = settings(draft_init=str(folder / "best"))
    again = model_for(made[1], tiny_folder, rounded)
    initialisation.start(again, rounded)
    assert torch.equal(again.fc.weight, source.fc.weight.bfloat16().float())


def test_rows_of_a_trained_head_follow_their_tokens_into_another_vocabulary(made, tiny_folder, tmp_path):
    trainer = trainer_for(made, tiny_folder, tmp_path, train_epochs=1, train_head=True)
    trainer.run_training()
    source = trainer.model
    parameters = settings(draft_init=str(tmp_path / "checkpoints" / "0"), draft_vocab_size=96, train_head=True)
    model = model_for(made[1], tiny_folder, parameters)
    before = model.lm_head.weight.clone()
    facts = initialisation.start(model, parameters)
    tokens = [(torch.arange(m.draft_vocab_size) + m.d2t).tolist() for m in (source, model)]
    shared = [t for t in tokens[1] if t in tokens[0]]
    assert facts["head_rows_taken"] == len(shared) > 0
    for row, token in enumerate(tokens[1]):
        expected = source.lm_head.weight[tokens[0].index(token)] if token in shared else before[row]
        assert torch.equal(model.lm_head.weight[row], expected)


def test_settings_that_no_shape_shows_and_missing_tensors_are_refused_together(made, tiny_folder, trained):
    folder, _ = trained
    parameters = settings(draft_init=str(folder / "best"), norm_before_residual=False, norm_before_fc=True)
    with pytest.raises(ParameterError) as caught:
        initialisation.start(model_for(made[1], tiny_folder, parameters), parameters)
    message = str(caught.value)
    assert "norm_before_residual: True there, False here" in message and "input_norm.weight: not in the checkpoint" in message


def test_no_checkpoint_a_spoilt_one_and_another_form_are_three_errors(made, tiny_folder, trained, tmp_path):
    model = model_for(made[1], tiny_folder, settings())
    with pytest.raises(MissingInput, match="no draft checkpoint"):
        initialisation.start(model, settings(draft_init=str(tmp_path / "none")))
    copy = shutil.copytree(trained[0] / "best", tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"] * float("nan")}, copy / "model.safetensors")
    with pytest.raises(DamagedInput, match="fc.weight"):
        initialisation.start(model, settings(draft_init=str(copy)))
    save_file({"midlayer.mlp.up_proj.weight": tensors["fc.weight"]}, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(ParameterError, match="midlayer"):
        initialisation.start(model, settings(draft_init=str(copy)))


def test_a_draft_of_another_width_is_refused_by_tensor(made, tiny_folder, trained):
    parameters = settings(draft_init=str(trained[0] / "best"), draft_intermediate_size=96)
    with pytest.raises(ParameterError, match=r"down_proj.weight: \[64, \d+\] there, \[64, 96\] in this draft"):
        initialisation.start(model_for(made[1], tiny_folder, parameters), parameters)


def test_a_changed_checkpoint_makes_the_training_stale(trained, tmp_path):
    from helpers import fingerprints

    copy = shutil.copytree(trained[0] / "best", tmp_path / "copy")
    parameters = settings(draft_init=str(copy))
    before = [fingerprints.fingerprint(stage, parameters) for stage in ("03_draft_config_and_attention", "04_training")]
    with open(copy / "model.safetensors", "ab") as stream:
        stream.write(b"more")
    after = [fingerprints.fingerprint(stage, parameters) for stage in ("03_draft_config_and_attention", "04_training")]
    assert before[0] == after[0] and before[1] != after[1]


def test_a_loaded_draft_keeps_the_trained_head(make_draft, tiny_folder, tmp_path):
    model = make_draft()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    draft.save(model, tmp_path, attention="sdpa")
    assert torch.equal(draft.load(tmp_path, tiny_folder).lm_head.weight, model.lm_head.weight)
