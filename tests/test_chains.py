import copy

import pytest
from chain_data import record

from helpers.chains import check, flatten
from helpers.errors import DataError


def test_flatten_counts_steps_and_tells_why_a_guess_was_refused():
    in_draft_vocabulary = [True] * 50 + [False] * 50
    raw = {
        "id": "a",
        "category": "coding",
        "prompt_tokens": 7,
        "tokens": [1, 11, 12, 13, 14, 21, 77, 31, 99],
        "steps": [
            {"drafted": [11, 12, 13], "accepted": 3, "emitted": [11, 12, 13, 14]},  # all accepted, 14 is the bonus
            {"drafted": [21, 22, 23], "accepted": 1, "emitted": [21, 77]},  # 77 is outside the draft vocabulary
            {"drafted": [30, 32, 33], "accepted": 0, "emitted": [31]},  # 31 could have been drafted
            {"drafted": [99, 5, 6], "accepted": 1, "emitted": [99]},  # end-of-turn accepted: cut before slot 2
        ],
    }
    flat = flatten(raw, in_draft_vocabulary)
    assert flat["drafted"] == [3, 3, 3, 3]
    assert flat["accepted"] == [3, 1, 0, 1]
    assert flat["emitted"] == [4, 2, 1, 1]
    assert flat["miss"] == ["", "outside", "wrong", ""]
    assert flat["guesses"][1] == [21, 22, 23]
    assert flatten(raw)["miss"] == ["", "wrong", "wrong", ""]  # a draft with the full vocabulary has no outside


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.pop("miss"), "without miss"),
        (lambda r: r["accepted"].append(1), "one entry per verification step"),
        (lambda r: r["accepted"].__setitem__(0, 4), "accepted 4"),  # more than were drafted
        (lambda r: r["emitted"].__setitem__(0, 5), "emitted 5"),  # more than accepted + 1
        (lambda r: r["miss"].__setitem__(1, ""), "miss ''"),  # refused inside the answer without a reason
        (lambda r: r["miss"].__setitem__(0, "wrong"), "miss 'wrong'"),  # a reason, but nothing was refused
        (lambda r: r["tokens"].append(3), "expected prefill's and the 5"),
    ],
)
def test_records_that_contradict_themselves_are_refused(change, said):
    good = record("a", [(3, 3, 4, ""), (3, 0, 1, "wrong")])
    check([good])
    bad = copy.deepcopy(good)
    change(bad)
    with pytest.raises(DataError, match=said):
        check([bad])


def test_an_id_may_appear_once():
    row = record("a", [(1, 1, 2, "")])
    with pytest.raises(DataError, match="two chain records with id a"):
        check([row, row])
