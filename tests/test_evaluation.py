"""The measurements of notebook 05 on the tiny verifier."""

import json

import pytest
import torch

from helpers import acceptance, decoding, evaluation, params, speculative, verifier
from helpers.errors import DataError


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
    sweep_prompts=4,
    speed_prompts=2,
    speed_tokens=8,
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
    exact = evaluation.lossless_float32(make_draft().eval(), rounded, found, SMALL)
    assert exact["identical"] == exact["prompts"] == 8
    assert next(rounded.model.parameters()).dtype == torch.bfloat16  # the loaded verifier stays as it was


def test_sweep_speeds_and_results_hang_together(tiny, drafter):
    found = evaluation.prompts("data/prompts/evaluation.jsonl", 8)
    ids = evaluation.first_turns(tiny, found, 12, 1024)
    chain = evaluation.measured(tiny, found, ids, drafter, 3, max_tokens=12, batch_rows=4)
    swept = evaluation.sweep(tiny, drafter, found, SMALL)
    speed = evaluation.speeds(tiny, drafter, found, SMALL, report=lambda _: None)
    assert [r["k"] for r in swept] == [1, 3]
    assert [r["method"] for r in speed["methods"]] == ["plain", "speculative, K = 1", "speculative, K = 3", "transformers generate"]
    assert speed["methods"][0]["speedup"] == 1.0
    positions = acceptance.by_position(chain["records"])
    _, modelled = evaluation.cost_rows(speed, [r["conditional"] or 0.0 for r in positions], range(1, 5))
    assert [r["k"] for r in modelled] == [1, 2, 3, 4]
    exact = {"identical": 8, "prompts": 8}
    results = evaluation.results(chain["records"], swept, speed, exact, chain["outputs"], [0.5, 0.4, 0.3], SMALL)
    assert results["accept_length"] == pytest.approx(acceptance.accept_length(chain["records"]).value)
    assert results["speedup"] == max(r["speedup"] for r in speed["methods"] if r["k"])
    assert set(results["accept_length_by_category"]) == {p.category for p in found}
    checks = evaluation.checks(exact, chain["outputs"], acceptance.accept_length(chain["records"]))
    assert (
        checks[0][1]
        and not evaluation.checks({"identical": 7, "prompts": 8}, chain["outputs"], acceptance.accept_length(chain["records"]))[0][1]
    )


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
