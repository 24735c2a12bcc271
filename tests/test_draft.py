"""The draft's config from the verifier's, and the choices that have to survive save and load."""

import json

import pytest
import torch
from transformers import AutoConfig, DeepseekV3Config

from helpers import draft, params
from helpers.errors import DamagedInput, MissingInput, ParameterError


@pytest.fixture
def config(tiny_folder):
    return AutoConfig.from_pretrained(tiny_folder)


def test_every_field_comes_from_somewhere_and_positions_are_the_verifiers(config):
    proposal, rows = draft.propose(config, params.Parameters(draft_vocab_size=128), [2, 4, 5])
    layer = proposal["transformer_layer_config"]
    assert layer["rope_parameters"] == config.rope_parameters
    assert layer["max_position_embeddings"] == config.max_position_embeddings
    assert {r["field"] for r in rows} == set(layer) | {k for k in proposal if k != "transformer_layer_config"}
    assert all(r["from"] for r in rows)


def test_a_draft_vocabulary_above_the_verifiers_is_refused(config):
    with pytest.raises(ParameterError, match="larger than the verifier's vocabulary of 512"):
        draft.propose(config, params.Parameters(draft_vocab_size=513), [2, 4, 5])


def test_heads_of_a_verifier_with_latent_attention_are_chosen_deliberately():
    """Copied field by field, a DeepSeek-V3 text config gives 64 key-value heads; the parameters say otherwise."""
    kimi = DeepseekV3Config(hidden_size=7168, num_attention_heads=64, num_key_value_heads=64, vocab_size=163840)
    chosen = params.Parameters(draft_vocab_size=32000, draft_heads=56, draft_kv_heads=8, draft_intermediate_size=18432)
    layer = draft.propose(kimi, chosen, [2, 30, 58])[0]["transformer_layer_config"]
    assert (layer["num_attention_heads"], layer["num_key_value_heads"], layer["head_dim"]) == (56, 8, 128)


def test_heads_that_do_not_divide_are_refused(config):
    with pytest.raises(ParameterError, match="do not divide"):
        draft.propose(config, params.Parameters(draft_vocab_size=128, draft_heads=4, draft_kv_heads=3), [2, 4, 5])


def test_attention_and_weights_survive_save_and_load(make_draft, tiny_folder, tmp_path):
    model = make_draft(attention="eager")
    draft.save(model, tmp_path, attention="eager")
    again = draft.load(tmp_path, tiny_folder)
    assert again._attn_impl == again.config.transformer_layer_config._attn_implementation == "eager"
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_the_library_alone_forgets_the_attention_choice(make_draft, tmp_path):
    from speculators.models.eagle3 import Eagle3DraftModel

    draft.save(make_draft(attention="eager"), tmp_path, attention="eager")
    assert Eagle3DraftModel.from_pretrained(tmp_path)._attn_impl == "simple_flex_attention"


def test_the_verifiers_place_on_this_machine_replaces_the_stored_one(make_draft, tiny_folder, tmp_path):
    draft.save(make_draft(), tmp_path, attention="sdpa")
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["speculators_config"]["verifier"]["name_or_path"] = "/somewhere/else"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert draft.load(tmp_path, tiny_folder).config.speculators_config.verifier.name_or_path == str(tiny_folder)


def test_a_missing_a_spoilt_and_an_incomplete_draft_are_three_errors(make_draft, tiny_folder, tmp_path):
    with pytest.raises(MissingInput, match="no draft"):
        draft.load(tmp_path / "none", tiny_folder)
    model = make_draft()
    draft.save(model, tmp_path / "a", attention="sdpa")
    (tmp_path / "a" / draft.SIDE_FILE).unlink()
    with pytest.raises(DamagedInput, match="attention choice is unknown"):
        draft.load(tmp_path / "a", tiny_folder)
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    draft.save(model, tmp_path / "b", attention="sdpa")
    with pytest.raises(DamagedInput, match="fc.weight"):
        draft.load(tmp_path / "b", tiny_folder)


def test_rotary_frequencies_stay_exact_in_a_draft_loaded_in_bfloat16(make_draft, tiny_folder, tmp_path):
    """They are rounded with the weights otherwise: SmolLM2 then turns 0.28 rad too far or too short over 200 tokens."""
    model = make_draft()
    draft.save(model, tmp_path, attention="sdpa")
    again = draft.load(tmp_path, tiny_folder, dtype=torch.bfloat16)
    assert again.fc.weight.dtype == torch.bfloat16
    assert again.rotary_emb.inv_freq.dtype == torch.float32 and torch.equal(again.rotary_emb.inv_freq, model.rotary_emb.inv_freq)
