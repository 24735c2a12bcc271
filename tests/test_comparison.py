import numpy as np
import pytest
from chain_data import drawn, record

from helpers.acceptance import accept_length
from helpers.comparison import compare, losslessness
from helpers.errors import DataError


def one_step(lengths, prefix="p"):
    """One step per prompt that emits so many tokens: accept length is the mean."""
    return [record(f"{prefix}{i}", [(9, e - 1, e, "wrong")]) for i, e in enumerate(lengths)]


def test_a_constant_gain_is_better_although_prompts_differ_much():
    old = one_step([1, 2, 3, 4, 5, 6, 7, 8])
    new = one_step([2, 3, 4, 5, 6, 7, 8, 9])
    result = compare(new, old)
    assert result["verdict"] == "better"
    # every prompt gains one token per step, so every resample does too
    assert (result["difference"], result["low"], result["high"]) == pytest.approx((1, 1, 1))
    assert accept_length(new).low < accept_length(old).value  # unpaired intervals overlap and could not tell
    back = compare(old, new)
    assert (back["verdict"], back["difference"]) == ("worse", pytest.approx(-1))


def test_no_difference_cannot_be_told():
    result = compare(one_step([1, 2, 3, 4, 5, 6]), one_step([1, 2, 3, 4, 5, 6]))
    assert (result["verdict"], result["difference"], result["prompts_needed"]) == ("cannot tell at this n", 0, None)


def test_a_difference_within_its_interval_says_how_many_prompts_it_would_take():
    # gains of 2 and losses of 1 in turn: mean +0.5, standard deviation 1.5, so ±1.96·1.5/√24 = ±0.60 at 24 prompts
    result = compare(one_step([5, 2] * 12), one_step([3, 3] * 12))
    assert result["verdict"] == "cannot tell at this n"
    assert result["difference"] == pytest.approx(0.5)
    assert (result["low"], result["high"]) == pytest.approx((0.5 - 0.6, 0.5 + 0.6), abs=0.07)
    # the interval is as narrow as the difference at (1.96 · 1.5 / 0.5)² = 35 prompts
    assert 28 <= result["prompts_needed"] <= 42
    assert "cannot tell" in result["sentence"] and "n = 24" in result["sentence"]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_prompts_never_decide(n):
    assert compare(one_step([5] * n), one_step([2] * n))["verdict"] == "cannot tell at this n"
    assert compare(one_step([5] * 6), one_step([2] * 6))["verdict"] == "better"
    low = compare(one_step([5] * n), one_step([2] * n))["low"]
    assert low is None if n == 1 else low == pytest.approx(3)  # one prompt gives no interval


def test_two_equal_drafts_are_rarely_told_apart():
    rates, told, runs = [0.5, 0.4, 0.3], 0, 150
    for run in range(runs):
        new, old = (drawn(30, rates, seed=1000 * side + run, steps=10) for side in (1, 2))
        for a, b in zip(new, old, strict=True):
            a["prompt_tokens"] = b["prompt_tokens"]
        told += compare(new, old, seed=run, resamples=400)["verdict"] != "cannot tell at this n"
    assert told / runs <= 0.12  # 5 % by construction, and four standard errors of 150 runs


def test_only_shared_prompts_count_and_the_others_are_counted():
    new, old = one_step([3] * 7) + one_step([9] * 2, "new"), one_step([2] * 7) + one_step([9], "old")
    result = compare(new, old)
    assert (result["n"], result["left_out"], result["new"]) == (7, 3, 3.0)
    with pytest.raises(DataError, match="share no prompt"):
        compare(one_step([2]), one_step([2], "q"))


def test_prompts_tokenised_differently_are_not_compared():
    other = [r | {"prompt_tokens": 11} for r in one_step([2, 2])]
    with pytest.raises(DataError, match="2 prompts have other lengths"):
        compare(one_step([2, 2]), other)


def test_identical_answers_pass():
    result = losslessness([{"id": "a", "plain": [1, 2], "speculative": [1, 2]}, {"id": "b", "plain": [3], "speculative": [3]}])
    assert (result["passed"], result["identical"], result["rows"]) == (True, 2, [])
    assert result["verdict"].startswith("All 2 answers are identical")
    with pytest.raises(DataError):
        losslessness([])


def test_the_first_difference_is_found_also_where_one_answer_ends():
    pairs = [
        {"id": "a", "plain": [1, 2, 3, 4], "speculative": [1, 2, 9, 8]},
        {"id": "b", "plain": [1, 2], "speculative": [1, 2, 3]},
        {"id": "c", "plain": [1], "speculative": []},
    ]
    result = losslessness(pairs)
    assert [(r["position"], r["plain"], r["speculative"]) for r in result["rows"]] == [(2, 3, 9), (2, None, 3), (0, 1, None)]
    assert not result["passed"] and result["different"] == 3


def test_differences_at_ties_are_excused_and_only_those():
    pairs = [{"id": "a", "plain": [1, 2], "speculative": [1, 3], "gap": np.float32(0.125)}, {"id": "b", "plain": [1], "speculative": [1]}]
    result = losslessness(pairs)
    assert result["passed"] and (result["identical"], result["ties"]) == (1, 1)
    assert "1 differ at a tie (largest gap 0.125, at most 0.250 is one)" in result["verdict"]
    assert not losslessness(pairs, tie_gap=0.1)["passed"]
    assert not losslessness([pairs[0] | {"gap": None}])["passed"]  # a difference without a gap is not excused
