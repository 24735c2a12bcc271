"""Sampled speculation has the verifier's distribution, and the test that says so fails for rules that break it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import distribution, rejection, speculative, verifier
from helpers.errors import DataError

# The tiny verifier with its vocabulary cut to four tokens and end-of-turn: all answers up to three tokens can be listed.
# Two of the four are outside the draft vocabulary, and the draft also proposes one that the verifier never says.
END, INSIDE, OUTSIDE, NEVER = 2, [40, 70], [300, 400], 90
CUT = [END, *INSIDE, *OUTSIDE]
PROMPT, LONGEST, DRAWS = [1, 77, 130, 45], 3, 3000


def cut(logits, kept):
    out = torch.full_like(logits, -torch.inf)
    out[..., kept] = logits[..., kept] * 0.35  # flat enough that every answer can come up
    return out


@pytest.fixture(scope="module")
def toy():
    tiny = verifier.load("tiny", dtype="float32")
    return replace(tiny, head=lambda hidden: cut(tiny.head(hidden), CUT))


class ToyDrafter(speculative.Drafter):
    says = (*INSIDE, NEVER)

    def propose(self, hidden):
        ids = self.to_verifier.tolist()
        return cut(super().propose(hidden), [ids.index(t) for t in self.says])


@pytest.fixture
def drafter(make_draft):
    return ToyDrafter(make_draft().eval())


@pytest.fixture(scope="module")
def exact(toy):
    """Probability of every answer: tokens until end-of-turn or the length limit."""
    found = {}

    def grow(answer, p):
        if len(answer) == LONGEST or (answer and answer[-1] == END):
            found[answer] = p
            return
        following = distribution.next_token(toy, [*PROMPT, *answer], 1.0)
        for token in CUT:
            grow((*answer, token), p * following[token])

    grow((), 1.0)
    return found


def test_the_toy_lists_every_answer(exact):
    # one answer of the end alone, 4 of a token and the end, 4 · 4 · 5 of three tokens
    assert len(exact) == 1 + 4 + 80 and sum(exact.values()) == pytest.approx(1, abs=1e-5)
    assert max(exact.values()) < 0.5


def held_against(exact, answers):
    places = {answer: i for i, answer in enumerate(exact)}
    return distribution.chi_square(np.bincount([places[tuple(a)] for a in answers], minlength=len(exact)), list(exact.values()))


def drawn(toy, drafter, **options):
    made = speculative.draws(toy, PROMPT, DRAWS, max_tokens=LONGEST, drafter=drafter, temperature=1.0, batch_rows=1000, **options)
    assert all(tokens[0] == PROMPT[-1] for tokens in made.tokens)
    return [tokens[1:] for tokens in made.tokens], made


@pytest.mark.parametrize("options", [{"k": 1}, {"k": 3}, {"k": 3, "confidence": 0.4}], ids=["one", "three", "stops early"])
def test_sampled_answers_have_the_verifiers_distribution(toy, drafter, exact, options):
    answers, made = drawn(toy, drafter, seed=1, **options)
    found = held_against(exact, answers)
    assert found["cells"] > 20 and found["p_value"] > distribution.SIGNIFICANT
    accepted = [s["accepted"] for steps in made.steps for s in steps]
    drafted = [len(s["drafted"]) for steps in made.steps for s in steps]
    assert 0.1 < np.mean(np.asarray(accepted) > 0) < 0.95  # both branches of the rule are at work
    assert (len(set(drafted)) > 1) == ("confidence" in options)


def test_sampling_without_a_draft_has_it_too_and_a_seed_repeats_it(toy, exact):
    options = {"max_tokens": LONGEST, "temperature": 1.0, "batch_rows": 1000}
    made = speculative.decode(toy, [PROMPT] * 1000, seed=3, **options)
    assert held_against(exact, made.tokens)["p_value"] > distribution.SIGNIFICANT
    assert speculative.decode(toy, [PROMPT] * 1000, seed=3, **options).tokens == made.tokens
    assert speculative.decode(toy, [PROMPT] * 1000, seed=4, **options).tokens != made.tokens


judge = rejection.verify
BROKEN = {
    # what no verifier refuses, though the bonus is right
    "accepts always": lambda p, q, *rest: judge(torch.cat([torch.ones_like(p[:, :-1]), p[:, -1:]], 1), q, *rest),
    "forgets the draft's probability": lambda p, q, *rest: judge(p, torch.ones_like(q), *rest),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(toy, drafter, exact, monkeypatch, name):
    monkeypatch.setattr(rejection, "verify", BROKEN[name])
    drafter.says = INSIDE  # else a token that cannot be would give it away
    answers, _ = drawn(toy, drafter, k=2, seed=1)
    assert held_against(exact, answers)["p_value"] < 1e-9


def test_replacing_from_p_without_taking_the_proposals_off_is_found(toy, drafter, exact, monkeypatch):
    monkeypatch.setattr(rejection, "residual", lambda p, q, to_verifier: p)
    assert held_against(exact, drawn(toy, drafter, k=1, seed=1)[0])["p_value"] < 1e-9


def test_the_rule_by_hand():
    """p = (1/2, 1/2, 0), q = (3/4, 0, 1/4): token 0 is kept two times in three, 2 never, and all that is refused becomes 1."""
    n = 30_000
    p = torch.tensor([0.5, 0.5, 0.0]).expand(n, 2, 3)
    q = torch.tensor([0.75, 0.25]).expand(n, 1, 2)  # draft ids 0, 1 are verifier ids 0, 2
    generator, to_verifier = torch.Generator().manual_seed(0), torch.tensor([0, 2])
    own = torch.tensor([0, 1]).repeat(n // 2)[:, None]
    accepted, tokens = rejection.verify(p, q, own, torch.ones(n, dtype=torch.long), to_verifier, generator)
    first = own[:, 0] == 0
    assert accepted[first].float().mean() == pytest.approx(2 / 3, abs=0.02) and not accepted[~first].any()
    assert (tokens[accepted == 0, 0] == 1).all()  # (p - q)+ = (0, 1/2, 0)
    assert torch.bincount(tokens[accepted == 1, 1], minlength=3).tolist()[2] == 0  # the bonus comes from p
    none, bonus = rejection.verify(p, q, own, torch.zeros(n, dtype=torch.long), to_verifier, generator)
    assert not none.any() and bonus[:, 0].float().mean() == pytest.approx(0.5, abs=0.02)  # not drafted: from p whole
    assert rejection.residual(p[:1, 0], p[:1, 0, :2], torch.tensor([0, 1])).tolist() == [[0.5, 0.5, 0.0]]  # nothing left: p


def test_chi_square_by_hand_and_its_limits():
    # expected 25 each: (5² + 5² + 0 + 0) / 25 = 2 with 3 degrees of freedom, p = 0.5724 (tables)
    found = distribution.chi_square([30, 20, 25, 25], [0.25] * 4)
    assert (found["statistic"], found["degrees"], found["p_value"]) == (2, 3, pytest.approx(0.5724, abs=1e-4))
    # 90, 4, 3, 3 expected: none of the last three fills a cell, together they make one of 10
    assert distribution.chi_square([90, 10, 0, 0], [0.9, 0.04, 0.03, 0.03])["statistic"] == 0
    # a rest of 2 joins the cell of 8
    assert distribution.chi_square([90, 8, 2], [0.9, 0.08, 0.02])["cells"] == 2
    assert distribution.chi_square([9, 1], [1.0, 0.0])["p_value"] == 0.0
    assert distribution.chi_square([3], [1.0])["p_value"] is None
    for wrong in (([], []), ([1, 2], [1.0]), ([0, 0], [0.5, 0.5]), ([1, 2], [0.5, 0.6])):
        with pytest.raises(DataError):
            distribution.chi_square(*wrong)


def test_right_draws_give_uniform_p_values():
    rng, p = np.random.default_rng(0), [0.4, 0.3, 0.2, 0.1]
    values = [distribution.chi_square(rng.multinomial(300, p), p)["p_value"] for _ in range(400)]
    # the mean of 400 uniform values has a standard error of 0.0144
    assert np.mean(values) == pytest.approx(0.5, abs=0.06) and np.mean(np.asarray(values) < 0.1) == pytest.approx(0.1, abs=0.05)


def test_first_tokens_pass_and_the_drafts_own_proposals_fail(toy, drafter):
    rows = distribution.first_tokens(toy, drafter, [PROMPT, PROMPT[:3]], k=2, draws=400, temperature=1.0, seed=5)
    assert [r["prompt"] for r in rows] == [0, 1, "all"] and rows[-1]["draws"] == 800
    assert rows[-1]["p_value"] > distribution.SIGNIFICANT > rows[-1]["proposals_p_value"]


def test_greedy_and_sampled_at_nearly_no_temperature_are_one(toy, drafter):
    greedy = speculative.decode(toy, [PROMPT, PROMPT[:2]], max_tokens=8, drafter=drafter, k=3)
    cold = speculative.decode(toy, [PROMPT, PROMPT[:2]], max_tokens=8, drafter=drafter, k=3, temperature=1e-4, seed=9)
    assert cold.tokens == greedy.tokens


def test_values_out_of_range_are_refused(toy, drafter):
    for wrong in ({"temperature": -1.0}, {"confidence": 1.5}):
        with pytest.raises(DataError):
            speculative.decode(toy, [PROMPT], max_tokens=2, drafter=drafter, k=1, **wrong)
    with pytest.raises(DataError, match="at least two"):
        speculative.draws(toy, [1], 2, max_tokens=1, drafter=drafter, k=1, temperature=1.0)
