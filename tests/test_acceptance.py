import json
import math

import numpy as np
import pytest
from chain_data import drawn, record
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import acceptance
from helpers.errors import DataError

# Five steps. In b's last one the draft's third token lay past the end of the answer, and live verification still judged it.
BY_HAND = [
    record("a", [(3, 3, 4, ""), (3, 0, 1, "wrong"), (3, 1, 2, "outside")], category="writing", prompt_tokens=60),
    record("b", [(3, 2, 3, "wrong"), (3, 3, 2, "")], category="coding", prompt_tokens=200),
]


def test_accept_length_counts_what_steps_emitted_without_prefills_token():
    estimate = acceptance.accept_length(BY_HAND)
    assert estimate.value == pytest.approx(12 / 5)  # (4 + 1 + 2) + (3 + 2) tokens in five steps
    assert (estimate.n, estimate.steps) == (2, 5)


def test_prompts_without_a_step_add_nothing_and_only_such_prompts_are_an_error():
    silent = record("c", [])
    assert acceptance.accept_length([*BY_HAND, silent]).n == 2
    with pytest.raises(DataError, match="no verification step in 1"):
        acceptance.accept_length([silent])


def test_one_prompt_gives_a_figure_but_no_interval():
    estimate = acceptance.accept_length(BY_HAND[:1])
    assert estimate.value == pytest.approx(7 / 3)
    assert math.isnan(estimate.low) and "no interval" in str(estimate)
    assert estimate.row()["low"] is None and json.dumps(estimate.row(), allow_nan=False)


def test_acceptance_by_position_divides_by_the_steps_that_drafted_it():
    rows = acceptance.by_position(BY_HAND)
    assert [(r["position"], r["drafted"], r["accepted"]) for r in rows] == [(1, 5, 4), (2, 5, 3), (3, 5, 2)]
    # accepted 3, 0, 1, 2, 3 of five steps that drafted three each
    assert [r["rate"] for r in rows] == pytest.approx([4 / 5, 3 / 5, 2 / 5])
    # position 2 was reached by the four that accepted position 1, position 3 by the three that accepted position 2
    assert [r["conditional"] for r in rows] == pytest.approx([4 / 5, 3 / 4, 2 / 3])


def test_slots_past_the_end_can_be_left_out():
    rows = acceptance.by_position(BY_HAND, past_end=False)
    # b's last step counts as two drafted, two accepted: position 3 was drafted by four steps and accepted in a's first
    assert [r["rate"] for r in rows] == pytest.approx([4 / 5, 3 / 5, 1 / 4])
    assert rows[2]["conditional"] == pytest.approx(1 / 2)  # reached inside the answer by a's first and b's first


def test_shorter_drafts_count_only_where_they_drafted():
    rows = acceptance.by_position([record("a", [(1, 1, 2, ""), (2, 1, 2, "wrong"), (0, 0, 1, "")])])
    assert [(r["drafted"], r["accepted"]) for r in rows] == [(2, 2), (1, 0)]
    assert acceptance.by_position([record("a", [(0, 0, 1, "")])]) == []  # a draft that was never sure


def test_misses_are_split_and_add_up():
    rows = acceptance.misses(BY_HAND)
    assert rows == [
        {"position": 1, "steps": 5, "accepted": 4, "outside": 0, "wrong": 1},
        {"position": 2, "steps": 4, "accepted": 3, "outside": 1, "wrong": 0},
        {"position": 3, "steps": 3, "accepted": 2, "outside": 0, "wrong": 1},
    ]
    assert acceptance.misses(BY_HAND, "category") == [
        {"category": "coding", "steps": 2, "accepted": 1, "outside": 0, "wrong": 1},
        {"category": "writing", "steps": 3, "accepted": 1, "outside": 1, "wrong": 1},
    ]
    with pytest.raises(DataError, match="by 'length'"):
        acceptance.misses(BY_HAND, "length")


def test_categories_stand_longest_first_with_their_own_n():
    rows = acceptance.by_category(BY_HAND)
    assert [(r["category"], r["n"], r["steps"]) for r in rows] == [("coding", 1, 2), ("writing", 1, 3)]
    assert [r["value"] for r in rows] == pytest.approx([5 / 2, 7 / 3])


def test_context_is_prompt_and_answer_before_the_step():
    rows = acceptance.by_context(BY_HAND, (0, 64, 66, 256))
    # a: 60 prompt tokens and prefill's: 61, then 65 after four more, then 66; b: 201 and 204
    assert [(r["context"], r["value"], r["steps"], r["n"]) for r in rows] == [
        ("0 to 63", 4.0, 1, 1),
        ("64 to 65", 1.0, 1, 1),
        ("66 to 255", pytest.approx((2 + 3 + 2) / 3), 3, 2),
    ]


def test_predicted_accept_length_sums_the_running_product():
    assert acceptance.predicted_accept_length([0.5, 0.5, 0.2]) == pytest.approx(1 + 0.5 + 0.25 + 0.05)
    assert acceptance.predicted_accept_length([0.5, 0.5, 0.2], 2) == pytest.approx(1.75)
    assert acceptance.predicted_accept_length([0.0, 0.9]) == 1  # nothing accepted at position 1, so nothing after it
    assert acceptance.predicted_accept_length([1.0] * 3) == 4  # a perfect draft gives K + 1
    for wrong, k in (([1.2], None), ([0.5], 2), ([float("nan")], None)):
        with pytest.raises(DataError):
            acceptance.predicted_accept_length(wrong, k)


def test_predicted_from_measured_conditionals_is_the_measured_accept_length():
    """With every step drafting K and none cut, 1 + Σ∏ of the measured conditionals is the accept length exactly."""
    records = drawn(30, [0.6, 0.5, 0.3, 0.3], seed=3, spread=0.1)
    conditional = [r["conditional"] for r in acceptance.by_position(records)]
    assert acceptance.predicted_accept_length(conditional) == pytest.approx(acceptance.accept_length(records).value)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """K = 1, each prompt with its own acceptance p ~ Beta(4, 4), so the truth is 1 + E[p] = 1.5."""
    rng, hits, runs = np.random.default_rng(0), 0, 400
    for run in range(runs):
        steps = rng.integers(5, 40, 40)
        emitted = steps + rng.binomial(steps, rng.beta(4, 4, 40))
        _, low, high = acceptance.ratio_interval(emitted[:, None], steps[:, None], seed=run, resamples=400)
        hits += low[0] <= 1.5 <= high[0]
    # 95 % less a little for a percentile interval at 40 prompts; ± 3 standard errors of 400 runs is ± 0.033
    assert 0.90 <= hits / runs <= 0.98


def test_prompts_are_resampled_not_steps():
    """Forty prompts of 50 equal steps, half at 1 and half at 2: the mean moves by 1/√(4·40) = 0.079, not by a √50-th of it."""
    steps = np.full((40, 1), 50)
    emitted = np.where(np.arange(40) % 2, 50, 100)[:, None]
    value, low, high = acceptance.ratio_interval(emitted, steps)
    assert value[0] == pytest.approx(1.5)
    assert high[0] - low[0] == pytest.approx(2 * 1.96 * 0.0791, rel=0.1)


def test_the_same_seed_gives_the_same_interval_and_many_prompts_are_done_in_parts():
    records = drawn(40, [0.5, 0.4], seed=1)
    assert acceptance.accept_length(records, seed=5) == acceptance.accept_length(records, seed=5)
    assert acceptance.accept_length(records, seed=5) != acceptance.accept_length(records, seed=6)
    rng = np.random.default_rng(0)  # 5,000 prompts: 2,000 resamples do not fit one part of 4 million weights
    num = rng.normal(2, 1, (5000, 1))
    value, low, high = acceptance.ratio_interval(num, np.ones((5000, 1)))
    assert high[0] - low[0] == pytest.approx(2 * 1.96 / math.sqrt(5000), rel=0.1)


def squares(tail, period):
    """Plain reference for one period: every token of every block that is followed by itself."""
    covered = set()
    for s in range(len(tail) - 2 * period + 1):
        if tail[s : s + period] == tail[s + period : s + 2 * period]:
            covered |= set(range(s, s + 2 * period))
    return covered


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 12), st.integers(0, 8))
def test_repetition_is_found_as_the_plain_definition_finds_it(start, period, times):
    tokens = start + list(range(10, 10 + period)) * times
    tail = tokens[-64:]
    plain = any(len(squares(tail, p)) > 0.5 * len(tail) for p in range(4, 33))
    assert acceptance.repeats(tokens) == plain


def test_repetition_by_hand():
    varied = list(range(200))
    assert not acceptance.repeats(varied)
    assert not acceptance.repeats([])
    assert acceptance.repeats(varied + [1, 2, 3, 4, 5] * 8)  # 40 of the last 64
    assert not acceptance.repeats(varied + [1, 2, 3, 4] * 8)  # 32 of 64 is half, not more
    assert acceptance.repeats([7] * 20)  # period 1 shows at period 4
    assert acceptance.repeats([7, 8, 9] * 8)  # period 3 shows at period 6
    assert acceptance.repeats(list(range(32)) * 3)  # a sentence of 32 tokens, the longest that fits twice
    assert not acceptance.repeats(list(range(33)) * 3)
    assert not acceptance.repeats([1, 2, 3, 4] * 12 + varied[:64])  # it came out of it again
    assert not acceptance.repeats([x for i in range(20) for x in (1, 2, 3, 100 + i)])  # a list whose items differ


def test_figures_are_given_with_and_without_repeating_rows():
    loop = record("c", [(3, 3, 4, "")] * 5, tokens=[9] * 21)
    rows = acceptance.with_and_without_repeats([*BY_HAND, loop])
    assert [(r["rows"], r["n"]) for r in rows] == [("all", 3), ("without repetition", 2), ("repetition", 1)]
    assert [r["value"] for r in rows] == pytest.approx([32 / 10, 12 / 5, 4.0])
    assert [r["rows"] for r in acceptance.with_and_without_repeats([loop])] == ["all", "repetition"]


def test_summary_is_plain_json_with_the_same_figures():
    figures = acceptance.summary(BY_HAND)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["accept_length"] == pytest.approx(2.4)
    assert (figures["prompts"], figures["steps"], figures["repeating_rows"]) == (2, 5, 0)
    assert (figures["misses_outside"], figures["misses_wrong"]) == (1, 2)
