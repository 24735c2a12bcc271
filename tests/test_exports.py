"""Exports give the same logits after reloading, and no folder is left that an engine would read wrong without a word."""

import json

import pytest
import torch
from foreign_drafts import edit_config, edit_tensors, logits, saved
from safetensors.torch import load_file
from transformers import AutoConfig

from helpers import contract, engines, exports, files, formats, imports, manifest, pages, params, weights, workbook
from helpers.errors import DamagedInput, DataError
from helpers.params import STAGES

PLAIN = {"norm_before_residual": False}


@pytest.fixture
def verifier_config(tiny_folder):
    return AutoConfig.from_pretrained(tiny_folder)


def state(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_before_fc": True, "draft_layers": 2}, {"fc_norm": True}, {"draft_layer_type": "qwen3"}, {"draft_vocab_size": 512}],
    ids=str,
)
def test_expected_tensors_are_those_of_the_library(make_draft, changes):
    model = make_draft(**changes)
    raw = json.loads(model.config.to_json_string(use_diff=False)) | {"speculators_model_type": "eagle3"}
    raw["transformer_layer_config"] = model.config.transformer_layer_config.to_dict()
    own = {n: tuple(x.shape) for n, x in model.state_dict().items() if not n.startswith("verifier_")}
    assert formats.expected(formats.anatomy(raw, "")) == own


FLAGS = [{}, PLAIN, {"norm_before_fc": True}, {"norm_output": True}, {"fc_norm": True}, {"fc_norm": True, "norm_output": True, **PLAIN}]


@pytest.mark.parametrize("to", ["speculators", "eagle"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_an_export_reloads_to_the_same_logits_with_every_norm_flag(make_draft, tiny_folder, tmp_path, to, flags):
    source = saved(make_draft, tmp_path / "best", **flags)
    done = exports.export(source, to, tmp_path / "out", tiny_folder)
    assert f"vllm-{to}" in done.serves
    again = imports.load(tmp_path / "out", tiny_folder)
    expected = logits(source, tiny_folder)
    assert torch.equal(exports.first_logits(again), expected) and expected.std() > 0.1
    maps = load_file(source / "model.safetensors")
    assert torch.equal(again.d2t, maps["d2t"]) and torch.equal(again.t2d, maps["t2d"])
    # the comparison can fail: the other residual gives other logits from the first step on
    edit_config(tmp_path / "out", lambda c: c.update(norm_before_residual=not c["norm_before_residual"]))
    assert not torch.equal(exports.first_logits(imports.load(tmp_path / "out", tiny_folder)), expected)


def test_a_whole_vocabulary_is_exported_without_maps(make_draft, tiny_folder, tmp_path):
    source = saved(make_draft, tmp_path / "best", draft_vocab_size=512, **PLAIN)
    assert exports.export(source, "eagle", tmp_path / "out", tiny_folder).serves == ["vllm-eagle", "sglang"]
    assert not {"d2t", "t2d"} & weights.headers(tmp_path / "out").keys()


def test_float32_weights_are_cast_to_what_the_engines_run(make_draft, tiny_folder, tmp_path):
    source = saved(make_draft, tmp_path / "best")
    edit_tensors(source, lambda t: t.update({n: x.float() for n, x in t.items() if x.is_floating_point()}))
    exports.export(source, "speculators", tmp_path / "out", tiny_folder)
    assert {dtype for dtype, _ in weights.headers(tmp_path / "out").values()} == {"bfloat16", "int64", "bool"}


def test_the_speculators_folder_is_self_contained_and_names_the_verifier(make_draft, tiny_folder, tmp_path):
    exports.export(saved(make_draft, tmp_path / "best"), "speculators", tmp_path / "out", tiny_folder, verifier_name="owner/model")
    config = formats.read_config(tmp_path / "out")
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/model" and "auto_map" not in config
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "draft.json", "export.json"}
    # the library alone reads it too
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    edit_config(tmp_path / "out", lambda c: c["speculators_config"]["verifier"].update(name_or_path=str(tiny_folder)))
    alone = Eagle3DraftModel.from_pretrained(tmp_path / "out", config=Eagle3SpeculatorConfig.from_pretrained(tmp_path / "out"))
    assert torch.equal(alone.lm_head.weight.float(), imports.load(tmp_path / "out", tiny_folder).lm_head.weight)


def test_the_eagle_folder_has_names_and_ids_for_both_engines(make_draft, tiny_folder, tmp_path, verifier_config):
    done = exports.export(saved(make_draft, tmp_path / "best", **PLAIN), "eagle", tmp_path / "out", tiny_folder)
    config = formats.read_config(done.folder)
    assert done.serves == ["vllm-eagle", "sglang"] and config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config[formats.IDS] == [2, 4, 5] and config["eagle_config"][formats.IDS] == [1, 3, 4]  # 2, n/2, n-3 of 8 layers
    assert config["tie_word_embeddings"] is False and config["draft_vocab_size"] == 128
    names = weights.headers(done.folder)
    assert not [n for n in names if n.startswith("layers.")] and "midlayer.self_attn.q_proj.weight" in names
    # transformers, through which both engines read it, finds the verifier's RoPE base under either spelling
    assert AutoConfig.from_pretrained(done.folder).rope_parameters["rope_theta"] == verifier_config.rope_parameters["rope_theta"]
    assert config["rope_theta"] == verifier_config.rope_parameters["rope_theta"]


def test_scaled_rope_is_written_in_both_spellings():
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    old = {name: value for name, value in rope.items() if name != "rope_theta"}
    assert formats.rope_of({"rope_parameters": rope}) == formats.rope_of({"rope_scaling": old, "rope_theta": 500000}) == rope
    legacy = {"type": "linear", "factor": 2.0}
    assert formats.rope_of({"rope_scaling": legacy}) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


def test_a_draft_sglang_cannot_express_is_exported_for_vllm_under_a_name_sglang_refuses(make_draft, tiny_folder, tmp_path):
    source = saved(make_draft, tmp_path / "best")  # norm_before_residual is the default
    done = exports.export(source, "eagle", tmp_path / "out", tiny_folder)
    assert done.serves == ["vllm-eagle"] and formats.read_config(done.folder)["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert any("norm_before_residual has no counterpart" in line for line in contract.failed(done.checks["sglang"]))
    with pytest.raises(DataError, match="sglang: norm flags: norm_before_residual has no counterpart"):
        exports.export(source, "eagle", tmp_path / "other", tiny_folder, only=["sglang"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "out"]  # nothing half-made


def test_what_the_format_cannot_carry_is_refused_by_reason(make_draft, tiny_folder, tmp_path):
    two = saved(make_draft, tmp_path / "two", draft_layers=2, **PLAIN)
    with pytest.raises(DataError, match="sglang: layers: 2 of type llama"):
        exports.export(two, "eagle", tmp_path / "out", tiny_folder, only=["sglang"])
    assert exports.export(two, "eagle", tmp_path / "out", tiny_folder).serves == ["vllm-eagle"]
    qwen = saved(make_draft, tmp_path / "qwen", draft_layer_type="qwen3", **PLAIN)
    with pytest.raises(DataError, match="vllm-eagle: .*layers of type 'qwen3'"):
        exports.export(qwen, "eagle", tmp_path / "none", tiny_folder)
    assert exports.export(qwen, "speculators", tmp_path / "none", tiny_folder).serves == ["vllm-speculators"]
    with pytest.raises(DataError, match="cannot export for sglang"):
        exports.export(qwen, "speculators", tmp_path / "none", tiny_folder, only=["sglang"])


def test_newer_norms_are_told_to_need_a_newer_sglang(make_draft, tiny_folder, tmp_path):
    done = exports.export(saved(make_draft, tmp_path / "best", norm_output=True, **PLAIN), "eagle", tmp_path / "out", tiny_folder)
    row = next(r for r in done.checks["sglang"] if r[0] == "norm flags")
    assert row[1] and "norm_output needs SGLang with #24663" in row[2]


def test_only_an_earlier_export_is_replaced(make_draft, tiny_folder, tmp_path):
    source = saved(make_draft, tmp_path / "best")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match="something else than an earlier export"):
        exports.export(source, "eagle", mine, tiny_folder)
    assert (mine / "thesis.txt").read_text() == "x"
    exports.export(source, "speculators", tmp_path / "out", tiny_folder)
    before = state(tmp_path / "out")
    edit_tensors(source, lambda t: t["fc.weight"].fill_(float("nan")))
    with pytest.raises(DataError, match="values finite: fc.weight"):
        exports.export(source, "speculators", tmp_path / "out", tiny_folder)
    assert state(tmp_path / "out") == before


def test_an_export_whose_logits_differ_is_not_left(make_draft, tiny_folder, tmp_path, monkeypatch):
    def swap(found):
        found = {n.replace("layers.0.", "midlayer."): x for n, x in found.items()}
        gate, up = (f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up"))
        return found | {gate: found[up], up: found[gate]}  # same names, shapes and dtypes: no contract sees it

    monkeypatch.setattr(exports, "eagle_names", swap)
    with pytest.raises(DataError, match="logits differ by up to"):
        exports.export(saved(make_draft, tmp_path / "best"), "eagle", tmp_path / "out", tiny_folder)
    assert not (tmp_path / "out").exists()


def put(**values):
    return lambda folder: edit_config(folder, lambda c: c.update(values))


def tensor(change):
    return lambda folder: edit_tensors(folder, change)


def absolute(tensors):
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def repeat(tensors):
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def rename(old, new):
    def change(tensors):
        for name in [n for n in tensors if n.startswith(old)]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


FC = {"dtype": torch.bfloat16}
BREAKS = {
    "missing tensor": (tensor(lambda t: t.pop("midlayer.hidden_norm.weight")), {"required tensors"}),
    "unknown tensor": (tensor(lambda t: t.update({"fc.bias": torch.zeros(64, **FC)})), {"no other tensors"}),
    "shape": (tensor(lambda t: t.update({"fc.weight": torch.zeros(64, 128, **FC)})), {"shapes"}),
    "one float32 tensor": (tensor(lambda t: t.update({"norm.weight": torch.ones(64)})), {"dtypes"}),
    "int32 map": (tensor(lambda t: t.update(d2t=t["d2t"].int())), {"dtypes"}),
    "infinity": (tensor(lambda t: t["norm.weight"].fill_(float("inf"))), {"values finite"}),
    "d2t holds ids": (tensor(absolute), {"d2t within the vocabulary"}),
    "d2t repeats": (tensor(repeat), {"d2t without repeats", "t2d agrees with d2t"}),
    "t2d marks another": (tensor(lambda t: t.update(t2d=t["t2d"].roll(1))), {"t2d agrees with d2t"}),
    "no d2t": (tensor(lambda t: t.pop("d2t")), {"required tensors", "d2t within the vocabulary"}),
    "architecture": (put(architectures=["Eagle3LlamaForCausalLM"]), {"architecture"}),
    "EAGLE-1": (put(architectures=["LlamaForCausalLMEagle"]), {"folder can be read"}),
    "speculators' names": (tensor(rename("midlayer.", "layers.0.")), {"name of the first layer"}),
    "RoPE base": (put(rope_parameters={"rope_type": "default", "rope_theta": 1e6}), {"RoPE"}),
    "positions": (put(max_position_embeddings=1024), {"max_position_embeddings"}),
    "ids as vLLM counts": (put(eagle_config={formats.IDS: [2, 4, 5]}), {"layer ids in the engine's counting"}),
    "tied": (put(tie_word_embeddings=True), {"head not tied to the embeddings"}),
    "no draft_vocab_size": (put(draft_vocab_size=None), {"config fields", "shapes"}),
    "residual norm": (put(norm_before_residual=True), {"norm flags"}),
    "config.json torn": (lambda f: (f / "config.json").write_text('{"arch'), {"folder can be read"}),
}
VLLM_MINDS_NOT = {"architecture", "speculators' names", "ids as vLLM counts", "residual norm"}


_made = []


@pytest.fixture
def exported(make_draft, tiny_folder, tmp_path_factory):
    """One EAGLE export that every engine takes, made once; tests copy it before they spoil it."""
    if not _made:
        folder = tmp_path_factory.mktemp("exported")
        source = saved(make_draft, folder / "best", **PLAIN)
        _made.append(exports.export(source, "eagle", folder / "out", tiny_folder).folder)
    return _made[0]


@pytest.mark.parametrize("engine", ["sglang", "vllm-eagle"])
@pytest.mark.parametrize("name", BREAKS)
def test_each_break_fails_its_row_and_no_other(exported, verifier_config, tmp_path, name, engine):
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spoil, rows = BREAKS[name]
    spoil(tmp_path)
    found = contract.check_contract(tmp_path, engine, verifier_config=verifier_config)
    if name == "no draft_vocab_size":  # then the whole vocabulary is meant, and the maps are one tensor too many for vLLM
        rows = rows | ({"no other tensors"} if engine == "vllm-eagle" else set())
    if engine == "vllm-eagle" and name in VLLM_MINDS_NOT:
        rows = set()
    assert {what for what, passed, _, _ in found if passed is False} == rows
    assert all(do for _, passed, _, do in found if passed is False)


SPECULATORS_BREAKS = {
    "implicit residual norm": (lambda c: c.pop("norm_before_residual"), {"config fields"}),
    "no verifier": (lambda c: c["speculators_config"]["verifier"].pop("name_or_path"), {"config fields"}),
    "no K": (lambda c: c["speculators_config"].update(proposal_methods=[]), {"config fields"}),
    "falling ids": (lambda c: c.update({formats.IDS: [5, 4, 2]}), {"layer ids in the engine's counting"}),
    "ids beyond": (lambda c: c.update({formats.IDS: [2, 4, 9]}), {"layer ids within the verifier"}),
    "RoPE": (lambda c: c["transformer_layer_config"]["rope_parameters"].update(rope_theta=1e6), {"RoPE"}),
    "dtype": (lambda c: c.update(dtype="float16"), {"dtypes"}),
    "another algorithm": (lambda c: c.update(speculators_model_type="peagle"), {"folder can be read"}),
}


@pytest.mark.parametrize("name", SPECULATORS_BREAKS)
def test_each_break_of_a_speculators_config_fails_its_row(make_draft, tiny_folder, verifier_config, tmp_path, name):
    folder = exports.export(saved(make_draft, tmp_path / "best"), "speculators", tmp_path / "out", tiny_folder).folder
    change, rows = SPECULATORS_BREAKS[name]
    edit_config(folder, change)
    found = contract.check_contract(folder, "vllm-speculators", verifier_config=verifier_config)
    assert {what for what, passed, _, _ in found if passed is False} == rows


def test_without_a_verifier_the_comparisons_are_not_run_and_the_rows_are_a_page(exported):
    rows = contract.check_contract(exported, "sglang")
    assert {what for what, passed, _, _ in rows if passed is None} >= {"RoPE", "max_position_embeddings"}
    assert "not run" in pages.checks(rows).data and "sglang" in pages.table(engines.table()).data
    assert contract.check_contract(exported, "vllm-speculators")[0][1] is False  # the other format
    with pytest.raises(DataError, match="unknown engine 'trt'"):
        contract.check_contract(exported, "trt")


def test_gpt_oss_verifiers_are_refused_for_sglang(exported, verifier_config):
    """SGLang reads their ids as they are since pull request 32334 and one higher before: no form is right for both."""
    verifier_config.model_type = "gpt_oss"
    rows = contract.check_contract(exported, "sglang", verifier_config=verifier_config)
    assert {what for what, passed, _, _ in rows if passed is False} == {"layer ids in the engine's counting"}


@pytest.fixture
def finished_run(make_draft, tmp_path):
    """A run of the tiny verifier whose fourth stage holds a draft; its parameter file."""
    for name in ("train", "evaluation"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    chosen = params.Parameters(
        run="mine", runs_folder=str(tmp_path / "runs"), verifier="tiny", draft_vocab_size=128,
        prompts_train=str(tmp_path / "train.jsonl"), prompts_evaluation=str(tmp_path / "evaluation.jsonl"),
    )  # fmt: skip
    for name in STAGES[:4]:
        stage = manifest.open_stage(name, chosen)
        made = [f"best/{p.name}" for p in saved(make_draft, stage.path("best", "x").parent).iterdir()] if name == STAGES[3] else []
        stage.finish(made, {})
    file = tmp_path / "mine.yaml"
    files.write_json(file, chosen.model_dump())  # JSON is YAML
    return file


def test_the_command_exports_a_run_and_tells_what_it_serves(finished_run, tmp_path, capsys):
    assert workbook.main(["export", str(finished_run), "--to", "eagle"]) == 0
    said = capsys.readouterr().out
    assert "vllm serve" in said and "sglang: cannot serve this draft" in said and "norm_before_residual" in said
    assert (tmp_path / "runs/mine/exports/eagle/model.safetensors").is_file()
    assert workbook.main(["export", str(tmp_path / "runs/mine"), "--to", "eagle", "--engine", "sglang", "--out", str(tmp_path / "o")]) == 3
    assert not (tmp_path / "o").exists()
    (tmp_path / "runs/mine/04_training/best/model.safetensors").write_bytes(b"torn")
    assert workbook.main(["export", str(finished_run), "--to", "speculators"]) == DamagedInput.exit_code
    assert "no longer as recorded" in capsys.readouterr().err


def test_sglang_counts_the_verified_token_in():
    command = exports.serve_command("sglang", params.ROOT, "owner/model", 3)
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in command
