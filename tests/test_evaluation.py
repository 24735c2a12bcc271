"""The measurements of notebook 05 on the tiny verifier."""

import json

import pytest
import torch

from helpers import acceptance, costs, decoding, evaluation, params, speculative, speeds, verifier
from helpers.errors import DataError, MissingInput


@pytest.fixture(scope="module")
def tiny():
    return verifier.load("tiny", dtype="float32")


@pytest.fixture
def drafter(make_draft):
    return speculative.Drafter(make_draft().eval())


SMALL = params.Parameters(
    verifier="tiny",
    evaluation_max_tokens=12,
    evaluation_batch_rows=4,
    lossless_tokens=12,
    evaluation_k_values=[1, 3],
)


def test_prompts_keep_the_files_order_so_that_a_limit_stays_balanced():
    found = evaluation.prompts("data/prompts/evaluation.jsonl", 16)
    assert [p.category for p in found[:8]] == [p.category for p in found[8:]]
    assert len({p.category for p in found}) == 8


def test_prompts_of_a_single_category_are_refused(tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {i}", "category": "a"}) + "\n" for i in range(3)))
    with pytest.raises(DataError, match="only 1 category"):
        evaluation.prompts(str(file))


def test_a_prompt_without_room_for_its_answer_is_named(tiny):
    found = evaluation.prompts("data/prompts/evaluation.jsonl", 8)
    with pytest.raises(DataError, match="eval-"):
        evaluation.first_turns(tiny, found, 12, 40)


def test_a_difference_is_reported_with_the_verifiers_own_gap_there(tiny):
    found = evaluation.prompts("data/prompts/evaluation.jsonl", 8)[:2]
    ids = evaluation.first_turns(tiny, found, 12, 1024)
    plain = speculative.decode(tiny, ids, max_tokens=6).tokens
    wrong = [list(t) for t in plain]
    wrong[1][3] = (wrong[1][3] + 1) % 512
    outputs = evaluation.compare_outputs(tiny, found, ids, plain, wrong)
    row = outputs["rows"][0]
    context = torch.tensor([[*ids[1], *plain[1][:3]]])
    logits = tiny.model(context).logits[0, -1]
    assert (row["id"], row["position"], outputs["identical"]) == (found[1].id, 3, 1)
    assert row["gap"] == pytest.approx((logits[plain[1][3]] - logits[wrong[1][3]]).item(), rel=1e-4)


def test_float32_check_decodes_in_float32_and_finds_nothing(tiny, make_draft):
    rounded = tiny.in_dtype(torch.bfloat16)
    found = evaluation.prompts("data/prompts/evaluation.jsonl", 8)
    exact = evaluation.lossless(make_draft().eval(), rounded, found, SMALL, "float32")
    assert exact["identical"] == exact["prompts"] == 8
    assert next(rounded.model.parameters()).dtype == torch.bfloat16  # the loaded verifier stays as it was
    assert exact["rates"]["batch"] == 4 and exact["rates"]["plain"] > 0


def test_both_ways_from_one_prefill_give_what_each_gives_alone(tiny, drafter, ids):
    plain, chained = speculative.decode_both(tiny, ids, max_tokens=10, drafter=drafter, k=3, batch_rows=3)
    alone = [speculative.decode(tiny, ids, max_tokens=10, drafter=d, k=3, batch_rows=3) for d in (None, drafter)]
    assert (plain.tokens, chained.tokens) == (alone[0].tokens, alone[1].tokens)
    assert (plain.steps, chained.steps) == (alone[0].steps, alone[1].steps)


@pytest.fixture(scope="module")
def found():
    return evaluation.prompts("data/prompts/evaluation.jsonl", 8)


@pytest.fixture(scope="module")
def ids(tiny, found):
    return evaluation.first_turns(tiny, found, 12, 1024)


class Pairs(speculative.Drafter):
    """Proposes what most often follows a token in these answers, and so is right at times; a state carries its token."""

    def learn(self, answers):
        self.follows = torch.zeros(512, 512)
        for answer in answers:
            for a, b in zip(answer, answer[1:], strict=False):
                self.follows[a, b] += 1
        return self

    def advance(self, cache, tokens_BT, features_BTH):
        out = super().advance(cache, tokens_BT, features_BTH).clone()
        out[..., 0] = tokens_BT
        return out

    def propose(self, hidden):
        return super().propose(hidden) * 1e-3 + self.follows[hidden[..., 0].long()]


@pytest.fixture(scope="module")
def answers(tiny, ids):
    return speculative.decode(tiny, ids, max_tokens=12).tokens


@pytest.fixture
def leaning(make_draft, answers):
    return Pairs(make_draft(draft_vocab_size=512).eval()).learn(answers[::2])


def test_reading_the_answers_again_finds_the_verifiers_own_tokens_and_the_chains_that_were_run(tiny, found, ids, leaning, monkeypatch):
    records = evaluation.measured(tiny, found, ids, leaning, 3, max_tokens=12, batch_rows=4)
    read = evaluation.reread(tiny, ids, records, {"trained": (leaning, 8)}, 6)
    judged = sum(len(r["tokens"]) for r in records)
    assert (read["tokens"], read["apart"]) == (judged, 0) and read["first"] >= judged - 1
    again = evaluation.replayed(read["foreseen"]["trained"], records, 3, None)
    assert len(again) == 6
    for a, b in zip(again, records, strict=False):
        assert (a["emitted"], [min(m, e) for m, e in zip(b["accepted"], b["emitted"], strict=True)]) == (b["emitted"], a["accepted"])
    assert {m for r in again for m in r["accepted"]} > {0, 1}  # there were right and wrong guesses to replay
    swept = evaluation.sweep(read["foreseen"]["trained"], records, [1, 3, 8], None, seed=0)
    live = evaluation.measured(tiny, found, ids, leaning, 1, max_tokens=12, batch_rows=4)
    assert swept[0]["value"] == pytest.approx(acceptance.accept_length(live[:6]).value)
    assert swept[0]["value"] <= swept[1]["value"] <= swept[2]["value"]
    seeds, interval = [], acceptance.accept_length
    monkeypatch.setattr(acceptance, "accept_length", lambda rows, seed: seeds.append(seed) or interval(rows, seed=seed))
    evaluation.sweep(read["foreseen"]["trained"], records, [1, 3], None, seed=7)
    assert seeds == [7, 7]  # its intervals are drawn with the run's seed


def test_a_token_that_is_not_the_verifiers_is_found_apart(tiny, found, ids, leaning):
    records = evaluation.measured(tiny, found, ids, leaning, 3, max_tokens=12, batch_rows=4)
    for record in records:
        record["tokens"][2] = (record["tokens"][2] + 1) % 512
    read = evaluation.reread(tiny, ids, records, {"trained": (leaning, 1)}, 1)
    assert read["apart"] >= len(records) and read["widest"] > 0.01
    overall = acceptance.accept_length(records)
    whole, sampled = {"identical": 8, "prompts": 8}, {"p_value": 0.4, "draws": 100}
    outputs = {"passed": True, "ties": 0, "rows": []}
    assert [c[1] for c in evaluation.checks(whole, outputs, read, sampled, overall)][:4] == [True, True, False, True]
    good = read | {"apart": 0}
    assert not evaluation.checks({"identical": 7, "prompts": 8}, outputs, good, sampled, overall)[0][1]
    assert not evaluation.checks(whole, outputs, good, {"p_value": 1e-6, "draws": 100}, overall)[3][1]
    assert evaluation.checks(whole, outputs, good, {"p_value": None, "draws": 100}, overall)[3][1] is None


def test_an_untrained_draft_has_the_config_and_vocabulary_but_not_the_weights(tiny, make_draft):
    kept = make_draft(seed=1).eval()
    bare = evaluation.untrained(kept, tiny, seed=2)
    assert torch.equal(bare.model.d2t, kept.d2t) and bare.model.fc.weight.shape == kept.fc.weight.shape
    assert not torch.allclose(bare.model.fc.weight, kept.fc.weight)
    assert torch.equal(bare.model.embed_tokens.weight, kept.embed_tokens.weight)
    assert evaluation.untrained(make_draft(draft_vocab_size=512).eval(), tiny, seed=2).model.draft_vocab_size == 512


def test_costs_settings_speeds_and_results_hang_together(tiny, found, ids, leaning, drafter):
    records = evaluation.measured(tiny, found, ids, leaning, 3, max_tokens=12, batch_rows=4)
    read = evaluation.reread(tiny, ids, records, {"trained": (leaning, 3)}, 8)
    here = speeds.fitted(speeds.probe(tiny, leaning, ids[:1], max_tokens=6))
    assert [tokens for tokens, _ in here.verify] == [1, 2, 5, 9] and here.plain > 0
    expected = speeds.settings(read["foreseen"]["trained"], here, [1, 3])
    assert [(r["k"], r["confidence"]) for r in expected] == [(1, 0), (3, 0)] + [(3, c) for c in speeds.CONFIDENCES]
    chosen = speeds.methods(leaning, drafter, expected, 3)
    speed = speeds.interleaved(tiny, ids[:2], chosen, max_tokens=8, lookup=3, report=lambda _: None)
    assert [r["method"] for r in speed["methods"]] == [m.name for m in chosen] + [speeds.GENERATE, speeds.LOOKUP]
    assert speed["methods"][0]["speedup"] == 1.0 and {r["k"] for r in speed["rounds"]} == {1, 3}
    exact = {"identical": 8, "prompts": 8, "ties": 0}
    results = evaluation.results(
        records, [{"k": 3, "value": 1.5}], speed, exact, exact, read, [0.5, 0.4, 0.3], SMALL.model_copy(update={"seed": 3})
    )
    assert results["accept_length"] == pytest.approx(acceptance.accept_length(records).value)
    assert results["speedup"] == max(r["speedup"] for r in speed["methods"] if r["method"].startswith("speculative"))
    assert set(results["accept_length_by_category"]) == {p.category for p in found}
    assert set(results["speedup_by_k"]) == {1, 3}


def test_expected_speedup_of_a_setting_by_hand():
    """Text 5 6 7 8 after prefill's 5; chains guess right once everywhere, then wrong, surely first and hardly after."""
    row = {"ids": [1, 5, 6, 7, 8], "first": 1, "k": 2, "guesses": [[6, 0], [7, 0], [8, 0]], "certainty": [[0.9, 0.25]] * 3}
    here = costs.Costs(plain=10, draft=1, verify=((1, 10), (2, 11), (3, 12)), overhead=0.5)
    rows = {(r["k"], r["confidence"]): r for r in speeds.settings([row], here, [1, 2])}
    # two rounds each: 6 accepted and 7; then 8, after which the text ends
    assert rows[1, 0.0]["speedup"] == pytest.approx(3 * 10 / (2 * (11 + 1 + 0.5)))
    assert rows[2, 0.0]["speedup"] == pytest.approx(3 * 10 / (2 * (12 + 2 + 0.5)))
    # below 0.3 it stops: one token verified, two drafted
    assert rows[2, 0.3]["drafted"] == 1 and rows[2, 0.3]["speedup"] == pytest.approx(3 * 10 / (2 * (11 + 2 + 0.5)))
    assert rows[2, 0.1]["drafted"] == pytest.approx(1.5)  # both slots, the last one past the end left out


def test_grouped_attention_equals_plain_attention_for_any_lengths(tiny):
    """Ragged rows over the copy-free cache against one row at a time without a cache."""
    torch.manual_seed(0)
    rows = [torch.randint(0, 512, (n,)) for n in (5, 11, 8)]
    more = torch.randint(0, 512, (3, 4))
    cache = decoding.RowCache(6)  # smaller than needed: the buffers have to grow
    ids = torch.zeros(3, 11, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    with torch.inference_mode():
        tiny.decoder(input_ids=ids, past_key_values=cache, use_cache=True)
        cache.set_lengths(torch.tensor([5, 11, 8]))
        out = tiny.decoder(
            input_ids=more,
            position_ids=cache.positions(3, 4, "cpu"),
            attention_mask=cache.mask(3, 4, torch.device("cpu")),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        for b, row in enumerate(rows):
            alone = tiny.decoder(input_ids=torch.cat([row, more[b]])[None], use_cache=False).last_hidden_state[0, -4:]
            assert torch.allclose(out[b], alone, atol=1e-4)


def test_the_draft_to_measure_is_the_runs_own_or_the_one_named(tmp_path):
    own = tmp_path / "best"
    assert evaluation.draft_folder(params.Parameters(), own) == own
    other = tmp_path / "other"
    with pytest.raises(MissingInput, match="no draft to measure") as caught:
        evaluation.draft_folder(params.Parameters(evaluation_draft=str(other)), own)
    assert "evaluation_draft" in caught.value.where
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert evaluation.draft_folder(params.Parameters(evaluation_draft=str(other)), own) == other
