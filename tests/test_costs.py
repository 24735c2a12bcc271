import pytest

from helpers.costs import Costs, best_k, does_it_pay, expected_tokens, expert_reads, fit_costs, model_error, node_case, speedup_model
from helpers.errors import DataError

COSTS = Costs(plain=10, draft=1, verify=((1, 10), (2, 10), (4, 12)))


def test_speedup_by_hand():
    rows = speedup_model([0.5, 0.5], COSTS, (1, 2, 3))
    # K=1: 1.5 tokens in 10 + 1; K=2: 1.75 in 11 (halfway from 10 to 12) + 2; K=3 (last rate repeated): 1.875 in 12 + 3
    assert [r["speedup"] for r in rows] == pytest.approx([15 / 11, 17.5 / 13, 18.75 / 15])
    assert [r["break_even"] for r in rows] == pytest.approx([1.1, 1.3, 1.5])
    assert rows[2]["draft_share"] == pytest.approx(3 / 15) and rows[2]["verify_share"] == pytest.approx(12 / 15)
    assert best_k(rows)["k"] == 1
    assert "K = 1 gives 1.36 times" in does_it_pay(rows)


def test_verification_goes_on_with_the_last_slope_and_never_falls():
    assert COSTS.verify_seconds(6) == pytest.approx(14)  # (12 - 10) / (4 - 2) = 1 per token
    assert Costs(10, 1, ((1, 10), (2, 9))).verify_seconds(5) == 9
    assert Costs(10, 1, ((1, 10),)).verify_seconds(5) == 10


def test_a_draft_nobody_accepts_does_not_pay():
    rows = speedup_model([0.0], COSTS, (1, 2))
    assert best_k(rows) == {"k": 0, "speedup": 1.0, "accept_length": 1.0}
    # K=1: one token in 11 instead of 10
    assert does_it_pay(rows).startswith("It does not pay: the best K, 1, gives 0.91") and "above 1.10 and has 1.00" in does_it_pay(rows)


def test_a_free_perfect_draft_gives_k_plus_one():
    rows = speedup_model([1.0], Costs(1, 0, ((1, 1),)), (1, 4))
    assert [r["speedup"] for r in rows] == [2, 5]


def test_overhead_is_paid_once_a_round():
    with_overhead = Costs(plain=10, draft=1, verify=((1, 10), (4, 12)), overhead=5)
    # K=3 with rate 0.5: 1.875 tokens in 12 + 3 + 5
    row = speedup_model([0.5], with_overhead, (3,))[0]
    assert row["seconds"] == 20 and row["speedup"] == pytest.approx(18.75 / 20) and row["overhead_share"] == pytest.approx(0.25)
    assert [r["k"] for r in speedup_model([0.5], with_overhead)] == list(range(1, 9))


def test_rates_are_needed():
    with pytest.raises(DataError):
        expected_tokens([], 1)


def test_fit_takes_medians_and_splits_the_drafts_fixed_part_off():
    costs = fit_costs([10, 10, 99], {1: [3], 2: [5, 5, 50], 4: [9]}, {2: [11], 4: [12, 12, 40]}, [0.5])
    # draft seconds 3, 5, 9 lie on 1 + 2K: slope 2 per token, 1 joins the overhead
    assert costs.draft == pytest.approx(2) and costs.overhead == pytest.approx(1.5)
    assert costs.plain == 10 and costs.verify == ((1, 10.0), (2, 11.0), (4, 12.0))


def test_fit_through_the_origin_where_no_fixed_part_shows():
    # least squares through the origin on (1, 2), (2, 4.5): (2 + 9) / 5; the free line has intercept -0.5
    assert fit_costs([10], {1: [2], 2: [4.5]}, {2: [11]}).draft == pytest.approx(11 / 5)
    one = fit_costs([10], {3: [6]}, {2: [11]})
    assert one.draft == pytest.approx(2) and one.overhead == 0


@pytest.mark.parametrize(
    "wrong", [([], {1: [1]}, {2: [1]}), ([1], {}, {2: [1]}), ([1], {1: [0.0]}, {2: [1]}), ([1], {1: [1]}, {2: [float("nan")]})]
)
def test_fit_refuses_what_was_not_timed(wrong):
    with pytest.raises(DataError):
        fit_costs(*wrong)


def test_the_error_against_measured_speedup_is_relative():
    rows = speedup_model([0.5, 0.5], COSTS, (1, 3))
    errors = model_error(rows, {3: 1.0, 7: 1.1})
    assert errors == [{"k": 3, "modelled": pytest.approx(1.25), "measured": 1.0, "error": pytest.approx(0.25)}]


def test_half_of_a_step_in_all_reduce_makes_verification_cheap():
    costs = node_case(20, 0.5, allreduce_growth=0, compute_growth=0.1, draft_ms=1)
    # four tokens: 10 of all-reduce as before, and 10 · (1 + 3 · 0.1) of the rest
    assert costs.verify_seconds(4) == pytest.approx(23)
    without = node_case(20, 0.0, allreduce_growth=0, compute_growth=0.1, draft_ms=1)
    assert without.verify_seconds(4) == pytest.approx(26)
    assert costs.verify[0] == (1, 20) and costs.verify[-1][0] == 9  # up to K = 8 without extrapolating
    gain, less = (best_k(speedup_model([0.7, 0.6], c)) for c in (costs, without))
    assert gain["speedup"] > less["speedup"]


def test_experts_make_verification_dear_at_batch_one_and_less_so_in_a_batch():
    assert expert_reads(1, 384, 8) == pytest.approx(8)
    assert expert_reads(2, 384, 8) == pytest.approx(8 + 8 * 376 / 384)  # the second token's share not read yet
    one = node_case(20, 0.5, expert_share=0.3, allreduce_growth=0, compute_growth=0)
    many = node_case(20, 0.5, expert_share=0.3, allreduce_growth=0, compute_growth=0, batch=64)
    assert one.verify_seconds(2) == pytest.approx(20 * (0.7 + 0.3 * (2 - 8 / 384)))
    # 64 tokens read 384 (1 - (376/384)^64) = 284.1 experts, 256 read 382.3
    assert many.verify_seconds(4) == pytest.approx(20 * (0.7 + 0.3 * 382.26 / 284.15), rel=1e-3)


def test_the_draft_is_taken_as_two_layers_unless_timed():
    assert node_case(61, 0.5, layers=61).draft == pytest.approx(2)
    assert node_case(61, 0.5, draft_ms=0.7, overhead_ms=2).overhead == 2
    assert node_case(61, 0.5, draft_ms=0.7).draft == 0.7
    # all-reduce and the rest each grow by one in a hundred per further token unless told otherwise
    assert node_case(100, 0.5).verify_seconds(2) == pytest.approx(101)
    assert node_case(1, 0.5, layers=1).draft == 2  # a verifier of one layer is allowed
    for wrong in ({"expert_share": 0.6}, {"batch": 0}, {"draft_ms": 0}, {"experts": 4}):
        with pytest.raises(DataError):
            node_case(20, 0.5, **wrong)
