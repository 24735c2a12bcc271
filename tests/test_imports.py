"""A draft trained elsewhere gives the logits it was trained to give, or is refused with the reason."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from foreign_drafts import edit_config, edit_tensors, logits, saved, specforge
from safetensors.torch import load_file, save_file

from helpers import draft, exports, formats, imports, speculative, verifier
from helpers.errors import DamagedInput, DataError, MissingInput

PLAIN = {"norm_before_residual": False}


@pytest.fixture
def source(make_draft, tmp_path):
    return saved(make_draft, tmp_path / "source", **PLAIN)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.midlayer."])
def test_specforge_and_eagle_naming_give_the_same_logits(source, tiny_folder, tmp_path, prefix, pickled):
    foreign = specforge(source, tmp_path / "foreign", prefix=prefix, pickled=pickled)
    model = imports.load(foreign, tiny_folder)
    assert torch.equal(exports.first_logits(model), logits(source, tiny_folder))
    assert model.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5] and not model.training


@pytest.mark.parametrize("flags", [{"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}], ids=str)
def test_norm_flags_of_an_eagle_config_are_honoured(make_draft, tiny_folder, tmp_path, flags):
    source = saved(make_draft, tmp_path / "source", **PLAIN, **flags)
    foreign = specforge(source, tmp_path / "foreign")
    assert torch.equal(exports.first_logits(imports.load(foreign, tiny_folder)), logits(source, tiny_folder))


def test_an_imported_draft_is_evaluated_as_our_own_is(source, tiny_folder, tmp_path):
    target = verifier.load("tiny", dtype="float32")
    ours, theirs = (
        speculative.decode(target, [[5, 9, 40], [7] * 20], max_tokens=12, drafter=speculative.Drafter(model), k=3)
        for model in (draft.load(source, tiny_folder), imports.load(specforge(source, tmp_path / "foreign"), tiny_folder))
    )
    assert ours.steps == theirs.steps and ours.steps[0]


def test_a_speculators_checkpoint_without_our_side_file_is_read_from_shards_too(source, tiny_folder, tmp_path):
    expected = logits(source, tiny_folder)
    (source / draft.SIDE_FILE).unlink()
    assert torch.equal(exports.first_logits(imports.load(source, tiny_folder)), expected)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, source / file)
    index = {"weight_map": {n: file for file, held in parts.items() for n in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(exports.first_logits(imports.load(source, tiny_folder)), expected)
    index["weight_map"]["fc.weight"] = "../source/a.safetensors"  # an index names files of its own folder only
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedInput, match=r"not there: \.\./source"):
        imports.load(source, tiny_folder)


def test_a_head_in_another_order_is_the_same_draft(source, tiny_folder, tmp_path):
    """The library compares the head with the verifier's rows in rising order, so the import sorts it."""
    foreign = specforge(source, tmp_path / "foreign")

    def shuffle(tensors):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
        ids = torch.arange(128) + tensors["d2t"]
        tensors.update({"d2t": ids[order] - torch.arange(128), "lm_head.weight": tensors["lm_head.weight"][order]})
        tensors.pop("t2d")

    edit_tensors(foreign, shuffle)
    model, ours = imports.load(foreign, tiny_folder), draft.load(source, tiny_folder)
    assert torch.equal(model.d2t, ours.d2t) and torch.equal(model.t2d, ours.t2d)
    assert torch.equal(exports.first_logits(model), exports.first_logits(ours))


IDS = formats.IDS


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, None),
        ({"eagle_config": {"use_aux_hidden_state": True}}, None),
        ({IDS: [3, 10, 20]}, (3, 10, 20)),
        ({"eagle_config": {IDS: [1, 11, 21]}}, (2, 12, 22)),
        ({"eagle_config": {IDS: [2, 12, 21]}}, (2, 12, 21)),  # the usual three of 24 layers, counted as here
        ({"eagle_config": {IDS: [6, 12, 24]}}, (6, 12, 24)),  # no layer 24 of 24: the state after all of them
        ({IDS: [2, 12, 21], "eagle_config": {IDS: [1, 11, 20]}}, (2, 12, 21)),
    ],
    ids=str,
)
def test_layer_ids_are_read_in_either_form(config, ids):
    assert formats.eagle_layer_ids(config, 24, "") == ids


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"eagle_config": {IDS: [3, 10, 20]}}, r"after \[3, 10, 20\] or after \[4, 11, 21\]"),
        ({IDS: [2, 12, 21], "eagle_config": {IDS: [3, 13, 22]}}, "but .* under eagle_config"),
        ({IDS: "2,12,21"}, "no list of layer ids"),
    ],
)
def test_layer_ids_that_could_mean_either_are_refused(config, reason):
    with pytest.raises(DataError, match=reason):
        formats.eagle_layer_ids(config, 24, "")


def absolute(tensors):
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


SPOILT = {
    "missing": (lambda t: t.pop("midlayer.mlp.up_proj.weight"), "missing: layers.0.mlp.up_proj.weight"),
    "unknown": (lambda t: t.update({"fc.bias": torch.zeros(64)}), "unknown: fc.bias"),
    "mis-shaped": (lambda t: t.update({"fc.weight": torch.zeros(64, 64)}), r"mis-shaped: fc.weight \[64, 64\], expected \[64, 192\]"),
    "two layers": (lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(64)}), "two tensors for layers.0.hidden_norm.weight"),
    "no head": (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
    "no d2t": (lambda t: t.pop("d2t"), "no d2t"),
    "d2t holds ids": (absolute, "these look like the verifier's ids themselves"),
    "t2d of another": (lambda t: t.update(t2d=t["t2d"].roll(1)), "t2d agrees with d2t"),
    "short d2t": (lambda t: t.update(d2t=t["d2t"][:64], t2d=torch.zeros(512, dtype=torch.bool)), "maps are wrong"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_wrong_tensors_are_named(source, tiny_folder, tmp_path, name):
    foreign = specforge(source, tmp_path / "foreign")
    spoil, reason = SPOILT[name]
    edit_tensors(foreign, spoil)
    with pytest.raises(DataError, match=reason):
        imports.load(foreign, tiny_folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "neither a speculators draft nor"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}, "neither a speculators draft nor"),
        ({"speculators_model_type": "dflash"}, "not eagle3"),
        ({"hidden_size": "64"}, "lacks hidden_size"),
        ({"target_hidden_size": 128}, "target_hidden_size 128"),
        ({"fc_norm": True, "norm_before_fc": True}, "both on"),
        ({"vocab_size": 1024}, "made for another verifier: width 64 and vocabulary 1024, the verifier has 64 and 512"),
        ({"eagle_config": {IDS: [1, 30, 57]}}, "reads layers .2, 31, 58., the verifier has 8"),
    ],
    ids=str,
)
def test_other_drafts_are_refused_by_reason(source, tiny_folder, tmp_path, change, reason):
    foreign = specforge(source, tmp_path / "foreign")
    edit_config(foreign, lambda c: c.update(change))
    with pytest.raises(DataError, match=reason):
        imports.load(foreign, tiny_folder)


class Bomb:
    """Unpickled carelessly, it leaves a file behind."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (Path(self.target),)


def test_a_pickle_that_holds_more_than_tensors_is_not_run(source, tiny_folder, tmp_path):
    foreign = specforge(source, tmp_path / "foreign", pickled=True)
    torch.save({"fc.weight": Bomb(tmp_path / "ran")}, foreign / "pytorch_model.bin")
    with pytest.raises(DamagedInput, match="holds more than tensors"):
        imports.load(foreign, tiny_folder)
    (foreign / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(DamagedInput):
        imports.load(foreign, tiny_folder)
    assert not (tmp_path / "ran").exists()


def test_absent_torn_and_spoilt_drafts_are_told_apart(source, tiny_folder, tmp_path):
    with pytest.raises(MissingInput, match=r"config\.json is not there"):
        imports.load(tmp_path / "none", tiny_folder)
    foreign = specforge(source, tmp_path / "foreign")
    edit_tensors(foreign, lambda t: t["norm.weight"].fill_(float("nan")))
    with pytest.raises(DamagedInput, match=r"NaN or infinity in norm\.weight"):
        imports.load(foreign, tiny_folder)
    (foreign / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(DamagedInput, match=r"model\.safetensors cannot be read"):
        imports.load(foreign, tiny_folder)
    (foreign / "model.safetensors").unlink()
    with pytest.raises(MissingInput, match="neither"):
        imports.load(foreign, tiny_folder)


def test_the_verifiers_head_serves_a_draft_of_the_whole_vocabulary_without_one(make_draft, tiny_folder, tmp_path):
    source = saved(make_draft, tmp_path / "source", draft_vocab_size=512, **PLAIN)
    foreign = specforge(source, tmp_path / "foreign")
    edit_tensors(foreign, lambda t: t.pop("lm_head.weight"))
    model = imports.load(foreign, tiny_folder)
    assert torch.equal(model.lm_head.weight, model.verifier_lm_head.weight) and model.d2t is None
