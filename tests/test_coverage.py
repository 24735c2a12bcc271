"""Coverage and the ceilings it implies, against hand-made answers and a plain simulation."""

from __future__ import annotations

import time

import numpy as np
import pytest

from helpers.coverage import candidate_sizes, chain_steps, coverage, emitted, head_cost, recommend
from helpers.errors import DataError, ParameterError

COUNTS = np.array([9, 8, 7, 6, 5, 4, 3, 2])  # size D holds the tokens below D


def simulated(answer: list[int], size: int, k: int) -> tuple[int, int]:
    """(tokens emitted, steps) of plain decoding by a draft that is right wherever its vocabulary allows."""
    at, steps = 1, 0
    while at < len(answer):
        accepted = 0
        while accepted < k and at + accepted < len(answer) and answer[at + accepted] < size:
            accepted += 1
        at, steps = min(at + accepted + 1, len(answer)), steps + 1
    return len(answer) - 1, steps


def test_a_step_emits_the_run_inside_the_vocabulary_the_token_after_it_and_no_more_than_is_left():
    inside = np.array([True, True, False])
    [found] = emitted([np.array([2, 0, 1, 0, 2, 1, 1])], inside, k=2)
    # from position 1: 0 1 then the verifier's 0; 2: 1 0, then 2; 3: 0 then 2; 4: only 2; 5: 1 1, nothing left; 6: 1
    assert found.tolist() == [3, 3, 2, 1, 2, 1]
    assert chain_steps(found) == 3  # positions 1, 4, 5


def test_ceilings_are_those_of_a_plain_simulation():
    draw = np.random.default_rng(1)
    answers = {"a": [draw.integers(0, 8, n).tolist() for n in (1, 2, 9, 30)], "b": [draw.integers(0, 4, 25).tolist()]}
    table = coverage(COUNTS, answers, [2, 5], k=3, vocab_size=8)
    assert table["size"].unique().tolist() == [2, 5, 8]
    for line in table.itertuples():
        chosen = sum(answers.values(), []) if line.category == "all" else answers[line.category]
        tokens = [t for a in chosen for t in a]
        share = sum(t < line.size for t in tokens) / len(tokens)
        results = [simulated(a, line.size, 3) for a in chosen]
        assert line.tokens == len(tokens) and line.answers == len(chosen) and line.covered == pytest.approx(share)
        assert line.ceiling == pytest.approx(sum(e for e, _ in results) / sum(s for _, s in results))
        assert line.ceiling_independent == pytest.approx(1 + share + share**2 + share**3)


def test_the_whole_vocabulary_reaches_k_plus_one_but_for_the_ends_of_answers():
    table = coverage(COUNTS, {"a": [[0] * 401]}, [], k=3, vocab_size=8)
    assert table["covered"].tolist() == [1.0, 1.0] and table["ceiling"].tolist() == [4.0, 4.0]  # 400 tokens in 100 steps
    # positions 1..397 emit 4, the last three 3, 2 and 1
    assert table["ceiling_positions"].tolist() == [pytest.approx((397 * 4 + 6) / 400)] * 2
    assert table["ceiling_independent"].tolist() == [4.0, 4.0]


def test_bunched_misses_cost_less_than_independence_says():
    answer = ([0] * 20 + [7] * 5) * 20
    line = coverage(COUNTS, {"a": [answer]}, [4], k=3, vocab_size=8).iloc[0]
    assert line["covered"] == 0.8 and line["ceiling_independent"] == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert line["ceiling_positions"] > line["ceiling_independent"]


def test_kept_tokens_are_inside_every_size():
    table = coverage(COUNTS, {"a": [[7, 7, 7]]}, [1], k=2, vocab_size=8, always_keep=[7])
    assert table[table["size"] == 1]["covered"].tolist() == [1.0, 1.0]


def test_answers_of_one_token_have_coverage_but_no_ceiling():
    table = coverage(COUNTS, {"a": [[0]], "b": [[0, 1, 2]], "c": [[]]}, [2], k=2, vocab_size=8)
    assert table["category"].unique().tolist() == ["a", "b", "all"]
    assert np.isnan(table[table["category"] == "a"]["ceiling"]).all()


def test_nothing_held_out_wrong_ids_and_wrong_sizes_are_errors():
    for nothing in ({}, {"a": []}, {"a": [[]]}):
        with pytest.raises(DataError, match="no held-out answer"):
            coverage(COUNTS, nothing, [2], k=3, vocab_size=8)
    with pytest.raises(DataError, match="outside the vocabulary"):
        coverage(COUNTS, {"a": [[8]]}, [2], k=3, vocab_size=8)
    for sizes, keep in (([0], []), ([9], []), ([1], [1, 2])):
        with pytest.raises(ParameterError, match="each must lie in"):
            coverage(COUNTS, {"a": [[0, 1]]}, sizes, k=3, vocab_size=8, always_keep=keep)


def test_candidate_sizes_are_powers_of_two_the_usual_one_and_the_whole():
    assert candidate_sizes(163_840) == [1024, 2048, 4096, 8192, 16384, 32000, 32768, 65536, 131072, 163840]
    assert candidate_sizes(49_152, more=[10_000], at_least=2000) == [2048, 4096, 8192, 10_000, 16384, 32768, 49152]
    assert candidate_sizes(300) == [16, 32, 64, 128, 256, 300]


def test_the_head_costs_hidden_times_size():
    cost = head_cost(576, [8192, 49_152]).iloc[0]
    assert (cost["parameters"], cost["bytes"], cost["flops"]) == (4_718_592, 9_437_184, 9_437_184)


def test_the_recommendation_is_the_smallest_size_within_one_per_cent_and_says_why():
    # token 7 once in 1000: leaving it out costs well under 1 %; token 5 every tenth token costs more
    answer = [0] + [5 if n % 10 == 0 else 7 if n == 555 else n % 5 for n in range(1000)]
    table = coverage(COUNTS, {"a": [answer], "b": [[0] * 41]}, [4, 5, 6, 7], k=3, vocab_size=8)
    found = recommend(table, k=3, hidden_size=1000)
    assert found.size == 6 and found.ceiling >= 0.99 * found.full
    lost = 1 - table[(table["size"] == 5) & (table["category"] == "all")]["ceiling"].item() / found.full
    assert lost > 0.01 and f"5 would lose {lost:.1%}" in found.reason
    assert "1,042 held-out tokens (K = 3)" in found.reason and "loses most is a" in found.reason


def test_a_size_that_passes_by_luck_below_one_that_fails_is_not_recommended():
    table = coverage(COUNTS, {"a": [[0] * 41]}, [2, 4], k=3, vocab_size=8)
    table.loc[(table["size"] == 4), "ceiling"] = 3.0
    assert recommend(table, k=3).size == 8


def test_without_a_ceiling_there_is_nothing_to_recommend():
    with pytest.raises(DataError, match="one token"):
        recommend(coverage(COUNTS, {"a": [[0]]}, [2], k=3, vocab_size=8), k=3)


def test_the_full_size_case_takes_seconds():
    vocab = 163_840
    draw = np.random.default_rng(0)
    ids = np.minimum(draw.zipf(1.2, 200_000) - 1, vocab - 1)
    counts, heldout = np.bincount(ids[:150_000], minlength=vocab), ids[150_000:].reshape(-1, 250)
    start = time.perf_counter()
    table = coverage(counts, {"a": list(heldout[:100]), "b": list(heldout[100:])}, candidate_sizes(vocab), k=3, vocab_size=vocab)
    assert time.perf_counter() - start < 5
    whole = table[table["category"] == "all"].sort_values("size")
    assert whole["covered"].is_monotonic_increasing and whole["ceiling_positions"].is_monotonic_increasing
