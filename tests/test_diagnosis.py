"""Each known cause is built on purpose on one small healthy run: its line, and what may follow from it, must fail and no other."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from helpers import (
    audit,
    chains,
    curves,
    decoding,
    diagnosis,
    draft,
    embedded,
    evidence,
    extraction,
    forced,
    headloss,
    pages,
    params,
    speculative,
    ttt,
    verifier,
    vocab,
)
from helpers.conversations import from_turns, prompt_ids
from helpers.errors import DamagedInput

LAYERS, K, ANSWER = [2, 4, 5], 3, 16
WORDS = "rain river garden letter number window music paper history travel kitchen engine".split()
MAKES = {cause.name: set(cause.makes) for cause in diagnosis.CAUSES}
GATE = {"accept length, replayed": 3.9, "accept length, live": 3.8, "ceiling by vocabulary": 4.0, "K + 1": 4}
ENOUGH = 100  # supervised tokens; the run has a few hundred


class Run:
    """A run on disk, and how it is looked at."""

    def __init__(self, parameters, judge):
        self.parameters, self.verifier = parameters, judge

    def path(self, number, *names):
        return evidence.Evidence(self.parameters, None, None, []).stage(number).joinpath(*names)

    def load(self):
        return draft.load(self.path(4, "best"), self.verifier.folder)

    def records(self):
        return json.loads(self.path(5, "records.json").read_text())

    def walk(self, model=None, records=None, **options):
        options = {"least_tokens": ENOUGH} | options
        return diagnosis.walk(self.parameters, self.verifier, model or self.load(), records or self.records(), **options)

    def change_shards(self, change, places=None):
        for path in sorted(self.path(1, "dataset", "hidden_states").glob("*.safetensors")):
            if places is None or int(path.stem.removeprefix("hs_")) in places:
                made = load_file(path)
                save_file(made | {"hidden_states": change(made["hidden_states"]).contiguous()}, path)

    def change_json(self, number, *names, **changes):
        path = self.path(number, *names)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def learn(model, rows, places, folder):
    """Learn rows nearly by heart: the text of a random verifier cannot be guessed otherwise."""
    batch = forced._batch(rows, places, folder, model.fc.weight)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        ttt.forward(model.train(), **batch, ttt_steps=K)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """The tiny verifier with a final norm that is not all ones: leaving it out would change nothing otherwise."""
    folder = tmp_path_factory.mktemp("model") / "verifier"
    shutil.copytree(embedded.ensure("tiny"), folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    weights["model.norm.weight"] = (1 + 0.4 * torch.randn(64)).abs().to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return verifier.load(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def healthy(judge, tmp_path_factory):
    """Twelve conversations to train on, the same twelve held out and evaluated: what is learnt carries over by construction."""
    parameters = params.Parameters(
        run="healthy",
        runs_folder=str(tmp_path_factory.mktemp("runs")),
        verifier=str(judge.folder),
        verifier_dtype="float32",
        draft_vocab_size=256,
        heldout_share=0.5,
        max_sequence_tokens=128,
        train_batch_tokens=128,
        answer_max_tokens=ANSWER,
        speculative_tokens=K,
    )
    run = Run(parameters, judge)
    asked = [[{"role": "user", "content": f"{word} and {WORDS[i - 1]}"}] for i, word in enumerate(WORDS)]
    prompts = [prompt_ids(judge.tokenizer, messages) for messages in asked]
    answers = speculative.decode(judge, prompts, max_tokens=ANSWER).tokens
    end = min(judge.end_ids)
    answers = [[t for t in a if t not in judge.end_ids] + [end] * (i % 2) for i, a in enumerate(answers)]  # every second one ends
    rows = [from_turns(judge.tokenizer, [(p, a)]) for p, a in zip(prompts, answers, strict=True)] * 2
    categories = ["letters" if i < 6 else "numbers" for i in range(12)] * 2
    talks = []
    for i in range(len(rows)):
        answer = answers[i % 12]
        said = judge.tokenizer.decode([t for t in answer if t != end])
        messages = [*asked[i % 12], {"role": "assistant", "content": said}]
        talks.append({"id": f"row-{i}", "category": categories[i], "messages": messages, "ended": answer[-1] == end})
    data = run.path(1, "dataset")
    extraction.save_dataset(rows, data)
    extraction.extract(judge, rows, data, LAYERS, batch_tokens=1024, report=lambda _: None)
    run.path(1, "conversations.jsonl").write_text("".join(json.dumps(t) + "\n" for t in talks))
    write(run.path(1, "manifest.json"), {"results": {"layer_ids": LAYERS, "training_rows": 12}})
    stored = [(r.input_ids, r.loss_mask) for r in rows]
    counts = vocab.token_counts(stored[:12], 512)
    run.path(2).mkdir()
    vocab.save_counts(counts, run.path(2, vocab.COUNTS))
    words = vocab.build(counts, 256, 512, always_keep=judge.end_ids)
    words.save(run.path(2), verifier="v", data="d")
    proposal, _ = draft.propose(AutoConfig.from_pretrained(judge.folder), parameters, LAYERS)
    write(run.path(3, "draft_config.json"), proposal)
    write(run.path(3, "attention.json"), {"attention": "ttt"})
    model = draft.build(draft.speculator_config(proposal, judge.folder, "sdpa"), words.d2t, words.t2d)
    learn(model, stored, range(12), data)
    draft.save(model, run.path(4, "best"), attention="ttt")
    write(run.path(4, "results", "gate.json"), {"value": GATE})
    curves.write([{"step": i, "heldout_accept_length": 1.5 + i / 10} for i in range(4)], run.path(4, "curves.csv"))
    drafter = speculative.Drafter(run.load())
    made = speculative.decode(judge, prompts, max_tokens=ANSWER, drafter=drafter, k=K)
    write(run.path(5, "records.json"), made.records([f"eval-{i}" for i in range(12)], categories[:12], drafter.inside))
    return run


@pytest.fixture
def run(healthy, judge, tmp_path):
    """A copy to break."""
    shutil.copytree(healthy.path(1).parent, tmp_path / "healthy")
    return Run(healthy.parameters.model_copy(update={"runs_folder": str(tmp_path)}), judge)


def failing(rows):
    return {row["cause"] for row in rows if row["passed"] is False}


def only(rows, name, figure=""):
    """The line of `name`, which must be the root; all else that fails must be declared as its consequence and say so."""
    failed = failing(rows)
    assert diagnosis.root(rows) == name, rows
    assert failed - {name} <= MAKES[name], failed
    assert {row["consequence_of"] for row in rows if row["cause"] in failed - {name}} <= {name}
    line = next(row for row in rows if row["cause"] == name)
    assert line["do"] and line["consequence_of"] == "" and figure in line["figure"], line
    return line


def test_healthy_run_fails_no_line_and_every_line_is_judged(healthy):
    rows = healthy.walk()
    assert [(row["cause"], row["passed"]) for row in rows] == [(cause.name, True) for cause in diagnosis.CAUSES], rows
    assert diagnosis.root(rows) is None and "13 of 13 known causes are ruled out" in diagnosis.sentence(rows)
    assert all(row["figure"] and row["do"] == row["consequence_of"] == "" for row in rows)
    assert json.loads(json.dumps(rows)) == rows  # what the notebook keeps is what it shows


def test_lines_stand_in_the_order_of_the_pipeline_and_consequences_come_later():
    names = [cause.name for cause in diagnosis.CAUSES]
    for place, cause in enumerate(diagnosis.CAUSES):
        assert set(cause.makes) <= set(names[place + 1 :]), cause.name


def test_verifier_and_draft_are_left_as_they_were(healthy):
    model = healthy.load()
    drafter = speculative.Drafter(model)  # as notebook 05 holds it
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [(p.requires_grad, p.grad) for p in model.parameters()]
    assert failing(healthy.walk(model)) == set()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert [(p.requires_grad, p.grad) for p in model.parameters()] == flags and not model.training
    assert drafter.config.transformer_layer_config._attn_implementation == decoding.GROUPED


def test_walked_chains_are_those_that_replay_decodes(healthy):
    model, rows = healthy.load(), extraction.load_rows(healthy.path(1, "dataset"))
    with torch.no_grad():
        torch.manual_seed(0)
        model.fc.weight.add_(0.05 * torch.randn_like(model.fc.weight))  # so that some guesses miss
    walked = forced.chains(model, rows, [3, 0, 7, 1], healthy.path(1, "dataset"), K)
    drafter, accepted = speculative.Drafter(model), set()
    for i, record in zip([3, 0, 7, 1], walked, strict=True):
        ids, states = rows[i][0], extraction.load_states(healthy.path(1, "dataset"), i)
        start = record["prompt_tokens"]
        steps = speculative.replay(drafter, ids, states[:, :-1].flatten(1), start, K)
        wanted = chains.flatten({"id": "", "category": "", "prompt_tokens": start, "tokens": ids[start:], "steps": steps}, drafter.inside)
        assert {n: record[n] for n in wanted if n not in ("id", "guesses")} == {n: wanted[n] for n in wanted if n not in ("id", "guesses")}
        accepted |= set(record["accepted"])
    assert len(accepted) > 2  # or equality would say little


# --- 1 to 4: data, states, positions -------------------------------------------------------------------------------


@pytest.mark.parametrize(("by", "figure"), [(1, "begins 1 token(s) late"), (-1, "begins 1 token(s) early")])
def test_masks_off_by_one(run, by, figure):
    rows = extraction.load_rows(run.path(1, "dataset"))
    moved = [from_turns(run.verifier.tokenizer, [(ids[: (at := mask.index(1) + by)], ids[at:])]) for ids, mask in rows]
    extraction.save_dataset(moved, run.path(1, "dataset"))
    only(run.walk(), "template and mask", figure)


def test_mask_without_the_end_of_turn(run):
    rows = extraction.load_rows(run.path(1, "dataset"))
    cut = [from_turns(run.verifier.tokenizer, [(ids[: mask.index(1)], ids[mask.index(1) :])]) for ids, mask in rows]
    for row in cut[1::2]:
        row.loss_mask[-1] = 0
    extraction.save_dataset(cut, run.path(1, "dataset"))
    only(run.walk(), "template and mask", "12 of 24 rows: the end-of-turn token is not supervised")


def test_rows_of_another_template(run, monkeypatch):
    template = run.verifier.tokenizer.chat_template
    monkeypatch.setattr(run.verifier.tokenizer, "chat_template", "{{ '<|im_start|>' }}" + template)
    only(run.walk(), "template and mask", "the template renders other tokens")


def test_layer_ids_of_the_draft_swapped(run):
    run.change_json(4, "best", "config.json", eagle_aux_hidden_state_layer_ids=[4, 2, 5])
    only(run.walk(), "layer ids", "reads [4, 2, 5], it was trained on [2, 4, 5]")


def test_stored_layers_swapped(run):
    run.change_shards(lambda s: s[:, [1, 0, 2, 3]])
    only(run.walk(), "layer ids", audit.ORDER)


def test_last_state_stored_after_the_final_norm(run):
    norm = run.verifier.decoder.norm
    run.change_shards(lambda s: torch.cat([s[:, :-1], norm(s[:, -1:]).detach()], 1))
    only(run.walk(), "final norm", audit.AFTER_NORM)


def test_final_norm_dropped_from_the_targets(run):
    model = run.load()
    with torch.no_grad():
        model.verifier_norm.weight.fill_(1.0)  # what the library puts in place of a norm it does not find
    only(run.walk(model), "final norm", "from the verifier's")


def test_norm_epsilon_of_another_model(run):
    config = json.loads(run.path(4, "best", "config.json").read_text())
    config["transformer_layer_config"]["rms_norm_eps"] *= 10
    write(run.path(4, "best", "config.json"), config)
    only(run.walk(), "final norm", "rms_norm_eps")


@pytest.mark.parametrize("what", ["base", "positions", "rounded"])
def test_positions_of_another_model(run, what):
    config = json.loads(run.path(4, "best", "config.json").read_text())
    layer = config["transformer_layer_config"]
    if what == "base":
        layer["rope_parameters"]["rope_theta"] = 1e6
    if what == "positions":
        layer["max_position_embeddings"] = 64
    write(run.path(4, "best", "config.json"), config)
    model = run.load()
    if what == "rounded":
        model.rotary_emb.inv_freq = model.rotary_emb.inv_freq.bfloat16()
    only(run.walk(model), "RoPE base and positions", {"base": "base 1,000,000", "positions": "64 positions", "rounded": "rad apart"}[what])


# --- 5 and 6: vocabulary -------------------------------------------------------------------------------------------


def with_vocabulary(run, words):
    """The run's draft with another vocabulary: same layer, its own rows of the head."""
    proposal = json.loads(run.path(3, "draft_config.json").read_text()) | {"draft_vocab_size": words.size}
    model = draft.build(draft.speculator_config(proposal, run.verifier.folder, "sdpa"), words.d2t, words.t2d)
    trained = {n: p for n, p in run.load().state_dict().items() if n.startswith(("fc.", "layers.", "norm."))}
    assert model.load_state_dict(trained, strict=False).unexpected_keys == []
    return model.eval()


def test_vocabulary_too_small(run):
    counts = vocab.load_counts(run.path(2, vocab.COUNTS), 512)
    words = vocab.build(counts, 24, 512, always_keep=run.verifier.end_ids)
    words.save(run.path(2), verifier="v", data="d")
    line = only(run.walk(with_vocabulary(run, words)), "vocabulary coverage")
    share = float(line["figure"].split("cover ")[1].split("%")[0]) / 100
    assert share == pytest.approx(counts[words.ids].sum() / counts.sum(), abs=1e-3)  # the held-out rows are the training rows


def test_vocabulary_without_the_end_of_turn(run):
    counts = vocab.load_counts(run.path(2, vocab.COUNTS), 512)
    seen = np.flatnonzero(counts)
    seen = seen[~np.isin(seen, list(run.verifier.end_ids))]
    words = vocab.VocabMap(np.sort(seen).astype(np.int64), 512)
    rows = run.walk(with_vocabulary(run, words))
    line = next(row for row in rows if row["cause"] == "vocabulary coverage")
    assert diagnosis.root(rows) == "vocabulary coverage" and "end-of-turn tokens [2] are outside" in line["figure"]


def test_d2t_permuted(run):
    model = run.load()
    model.d2t.copy_((torch.arange(256) + model.d2t).roll(1) - torch.arange(256))
    only(run.walk(model), "d2t", "do not rise")


def test_d2t_of_other_counts(run):
    other = vocab.build(np.arange(512), 256, 512, always_keep=run.verifier.end_ids)
    other.save(run.path(2), verifier="v", data="d")
    only(run.walk(), "d2t", "not the one of notebook 02")


def test_head_rows_of_other_tokens(run):
    model = run.load()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    only(run.walk(model), "d2t", "255 of 255 head rows are other tokens' rows")


def test_counts_of_other_rows(run):
    vocab.save_counts(np.arange(512) % 7, run.path(2, vocab.COUNTS))
    only(run.walk(), "d2t", "stored counts hold")


# --- 7 to 9: attention and flags -----------------------------------------------------------------------------------


def test_gradient_that_lacks_a_part(run, monkeypatch):
    right = headloss._kl

    def short(raw, *arguments):
        found = right(raw, *arguments)  # the logits become the gradient
        raw.mul_(0.99)
        return found

    monkeypatch.setattr(headloss, "_kl", short)
    assert failing(run.walk()) == {"attention parity"}


def test_attention_that_loses_its_later_keys(run, monkeypatch):
    right = ttt.attend
    monkeypatch.setattr(ttt, "attend", lambda q, k, v, segments, scale, window=None, diagonals=(): right(q, k, v, segments, scale, window))
    only(run.walk(), "attention parity", "ttt: outputs")


def test_attention_lost_in_a_reload_by_the_library(run):
    from speculators.models.eagle3 import Eagle3DraftModel

    model = Eagle3DraftModel.from_pretrained(run.path(4, "best")).eval()
    only(run.walk(model), "attention choice after reload", "computes with simple_flex_attention; chosen was ttt")


def test_attention_choice_of_another_run_beside_the_weights(run):
    run.change_json(4, "best", "draft.json", attention="eager")
    only(run.walk(), "attention choice after reload", "says eager, notebook 03 chose ttt")


def test_decoding_attention_that_sees_too_little(run, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    right = ALL_ATTENTION_FUNCTIONS[decoding.GROUPED]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping,
        decoding.GROUPED,
        lambda module, q, k, v, mask, **kw: (
            right(module, q, k[:, :, 1:], v[:, :, 1:], None if mask is None else mask[..., 1:], **kw)
            if k.shape[2] > q.shape[2] and module.o_proj.in_features != module.q_proj.in_features
            else right(module, q, k, v, mask, **kw)
        ),
    )
    only(run.walk(), "attention choice after reload", "from float64")


def test_norm_flag_switched(run):
    run.change_json(4, "best", "config.json", norm_before_residual=False)
    only(run.walk(), "norm flags", "norm_before_residual is")


def test_norm_flag_whose_weights_are_not_there_is_refused_at_loading(run):
    run.change_json(4, "best", "config.json", norm_before_fc=True)
    with pytest.raises(DamagedInput, match="missing: input_norm.weight"):
        run.walk()


def test_flag_that_is_refuted_by_its_own_chains_where_no_config_was_kept(run):
    run.path(3, "draft_config.json").unlink()
    run.change_json(4, "best", "config.json", norm_before_residual=False)
    only(run.walk(), "norm flags", "norm_before_residual True is accepted more")


# --- 10 to 13: gate, training, data --------------------------------------------------------------------------------


def test_gate_failed(run):
    run.change_json(4, "results", "gate.json", value=GATE | {"accept length, replayed": 1.4})
    assert failing(run.walk()) == {"overfit gate"}


def test_held_out_curve_turned_down(run):
    curves.write([{"step": i, "heldout_accept_length": x} for i, x in enumerate([1.6, 2.4, 2.0, 1.7])], run.path(4, "curves.csv"))
    assert failing(run.walk()) == {"train against held-out"}


def test_rows_learnt_by_heart_and_held_out_rows_unlike_them(run):
    """The held-out answers become shuffled ones: same tokens, so that the vocabulary covers them, in an order never seen."""
    found, talks = extraction.load_rows(run.path(1, "dataset")), extraction.load_conversations(run.path(1, "conversations.jsonl"))
    tokenizer, draw, rows = run.verifier.tokenizer, random.Random(0), []
    for i, (ids, mask) in enumerate(found):
        first, ended = mask.index(1), talks[i]["ended"]
        answer = ids[first : len(ids) - ended]
        if i >= 12:
            draw.shuffle(answer)
            talks[i]["messages"][-1]["content"] = tokenizer.decode(answer)
        rows.append(from_turns(tokenizer, [(ids[:first], [*answer, *ids[len(ids) - ended :]])]))
    run.path(1, "conversations.jsonl").write_text("".join(json.dumps(t) + "\n" for t in talks))
    extraction.save_dataset(rows, run.path(1, "dataset"))
    assert extraction.extract(run.verifier, rows, run.path(1, "dataset"), LAYERS, batch_tokens=1024, report=lambda _: None) == 12
    line = only(run.walk(), "train against held-out")
    assert "memorised" in line["do"]


def test_draft_that_was_never_trained(run):
    fresh = draft.build(run.load().config, run.load().d2t, run.load().t2d, seed=3).eval()
    line = only(run.walk(fresh), "train against held-out")
    assert "train longer" in line["do"]


def refused(record):
    """The same answer with every guess refused."""
    steps = len(record["tokens"]) - 1
    made = {"drafted": [K] * steps, "accepted": [0] * steps, "emitted": [1] * steps, "miss": ["wrong"] * steps}
    return record | made | {"guesses": [[]] * steps}


def test_categories_that_training_lacks(run):
    path = run.path(1, "conversations.jsonl")
    talks = [json.loads(line) for line in path.read_text().splitlines()]
    for talk in talks:
        talk["category"] = talk["category"].replace("numbers", "figures")
    path.write_text("".join(json.dumps(t) + "\n" for t in talks))
    records = [refused(r) if r["category"] == "numbers" else r for r in run.records()]
    rows = run.walk(records=records)
    assert failing(rows) == {"data against evaluation"}
    only(rows, "data against evaluation", "numbers is not in training: 1.00")
    assert failing(run.walk()) == set()  # missing, but accepted as well as any


def test_category_below_its_own_held_out_rows(run):
    records = [refused(r) if r["category"] == "numbers" else r for r in run.records()]
    rows = run.walk(records=records)
    assert failing(rows) == {"data against evaluation"}
    only(rows, "data against evaluation", "numbers: 1.00 (1.00 to 1.00), n = 6, held-out")


def test_sampled_training_answers_are_not_held_against_a_greedy_evaluation(run):
    run.parameters = run.parameters.model_copy(update={"answer_temperature": 1.0})
    rows = run.walk(records=[refused(r) for r in run.records()])
    assert {row["cause"]: row["passed"] for row in rows}["data against evaluation"] is None and failing(rows) == set()


def test_few_tokens(run):
    rows = run.walk(least_tokens=diagnosis.LEAST_TOKENS)
    assert failing(rows) == {"quantity of data"}
    supervised = sum(sum(mask) for _, mask in extraction.load_rows(run.path(1, "dataset"))[:12])
    only(rows, "quantity of data", f"{supervised} supervised tokens in 12 conversations")


# --- what is shown -------------------------------------------------------------------------------------------------


def test_lines_whose_files_are_not_there_are_not_judged(run):
    for number, name in ((1, "conversations.jsonl"), (3, "attention.json"), (4, "results"), (2, "vocab_map.json")):
        path = run.path(number, name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    rows = run.walk()
    unjudged = {row["cause"] for row in rows if row["passed"] is None}
    assert failing(rows) == set() and {"template and mask", "d2t", "attention parity", "overfit gate"} <= unjudged
    assert "Not judged: template and mask" in diagnosis.sentence(rows)


def test_damaged_shard_is_named_once(run):
    extraction.shard(run.path(1, "dataset"), 5).write_bytes(b"cut")
    rows = run.walk()
    told = [row for row in rows if row["passed"] is False and "hidden states cannot be read" in row["figure"]]
    assert len(told) == 1 and told[0]["do"] == extraction.MEND


def test_two_faults_are_told_apart(run):
    run.change_json(4, "best", "config.json", eagle_aux_hidden_state_layer_ids=[4, 2, 5])
    run.change_json(4, "results", "gate.json", value=GATE | {"accept length, replayed": 1.4})
    rows = run.walk(least_tokens=diagnosis.LEAST_TOKENS)
    after = {row["cause"]: row["consequence_of"] for row in rows if row["passed"] is False}
    assert after == {"layer ids": "", "overfit gate": "layer ids", "quantity of data": ""}
    text = diagnosis.sentence(rows)
    assert "Likely root: layer ids" in text and "What may follow from it: overfit gate." in text
    assert "Wrong besides: quantity of data." in text
    page = pages.checks(diagnosis.checks(rows)).data
    assert "may follow from layer ids: mend that first" in page and page.count("✗ failed") == 3
