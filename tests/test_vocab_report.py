"""What notebook 02 shows: counts and ranks as text, cost by size, the map walked through, its checks."""

import numpy as np
import pytest
import tiny_chat

from helpers import coverage, vocab, vocab_report

COUNTS = np.array([0, 5, 0, 9, 5, 1, 0, 0])


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chat.tokenizer()


def test_answers_are_gathered_by_category_run_by_run():
    rows = [([1, 2, 3, 4], [0, 1, 0, 1]), ([5, 6], [0, 1])]
    found = vocab_report.by_category(rows, [{"category": "a"}, {"category": "b"}])
    assert found == {"a": [[2], [4]], "b": [[6]]}
    with pytest.raises(ValueError):
        vocab_report.by_category(rows, [{"category": "a"}])


def test_split_counts_conversations_tokens_and_supervised_tokens():
    rows = [([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1]), ([6], [1])]
    training, held_out = vocab_report.split_rows(rows, 2)
    assert (training["conversations"], training["tokens"], training["supervised"]) == (2, 5, 3)
    assert (held_out["conversations"], held_out["tokens"], held_out["supervised"]) == (1, 1, 1)


def test_ranks_go_by_count_then_by_id(tokenizer):
    frequent = vocab_report.frequent(COUNTS, tokenizer, 3)
    assert [(r["rank"], r["id"], r["count"]) for r in frequent] == [(1, 3, 9), (2, 1, 5), (3, 4, 5)]
    assert [r["together"] for r in frequent] == ["45.0%", "70.0%", "95.0%"]  # 9, 14 and 19 of 20
    ranked = vocab_report.ranked([4, 7, 5], COUNTS, [7], tokenizer, size=3)
    # the draft vocabulary of three has the kept 7, then 3 and 1: token 4 ranks third by count and is outside
    assert [(r["id"], r["rank"], r["in the draft vocabulary"]) for r in ranked] == [(4, 3, False), (7, 8, True), (5, 4, False)]


def test_kept_tokens_that_end_a_turn_come_first(tokenizer):
    rows = vocab_report.kept_rows([0, 2, 5], [5], COUNTS, tokenizer)
    assert [(r["id"], r["why"]) for r in rows] == [(5, "ends a turn"), (0, "special token"), (2, "special token")]


def test_categories_at_a_size_with_what_it_loses():
    counts = np.array([9, 8, 7, 6, 5, 4, 3, 2])
    table = coverage.coverage(counts, {"in": [[0, 1] * 8], "out": [[0, 7] * 8]}, [4], k=3, vocab_size=8)
    rows = vocab_report.by_size(table, 4)
    assert [r["category"] for r in rows] == ["in", "out", "all"] and rows[0]["lost"] == 0.0
    full = table[(table["size"] == 8) & (table["category"] == "out")]["ceiling"].item()
    assert rows[1]["covered"] == 0.5 and rows[1]["lost"] == pytest.approx(1 - rows[1]["ceiling"] / full) and rows[1]["lost"] > 0.3
    total = table[table["category"] == "all"].set_index("size")
    costs = vocab_report.costs(total, coverage.head_cost(1000, total.index), {"this run": 4, "recommended": 8})
    assert [(r["size"], r["chosen"], r["head_parameters"]) for r in costs] == [
        (4, "this run", "0.00 million"),
        (8, "recommended", "0.01 million"),
    ]
    assert costs[0]["lost"] == pytest.approx(1 - costs[0]["ceiling"] / costs[1]["ceiling"]) and costs[1]["lost"] == 0


def test_synthetic_case_covers_what_its_law_says():
    found = vocab_report.synthetic(5000, 1000, hidden_size=10, k=3)
    law = (np.arange(1, 5001) + 2.7) ** -1.2
    # 50,000 tokens are drawn, so the share has a standard deviation of 0.0011; the twenty million counted rank tokens well
    assert found["covered"] == pytest.approx(law[:1000].sum() / law.sum(), abs=0.006)
    assert 1 < found["ceiling"] < 4 and 0 < found["lost"] < 1 and found["head"].startswith("0 of 0")
    assert (
        vocab_report.synthetic(5000, 1000, hidden_size=10, k=3) == found != vocab_report.synthetic(5000, 1000, hidden_size=10, k=3, seed=1)
    )


def test_tokens_walk_through_the_map_and_back(tokenizer):
    mapping = vocab.build(COUNTS, 3, 8)
    assert mapping.ids.tolist() == [1, 3, 4]
    rows = vocab_report.through_the_map([3, 4, 0], mapping, tokenizer)
    assert [(r["draft id"], r["offset"]) for r in rows] == [(1, 2), (2, 2), (None, None)]
    assert rows[0]["back"] == rows[0]["token"] and rows[2]["back"].startswith("outside")


def test_map_differs_from_the_librarys_in_kept_tokens_alone(tmp_path):
    vocab.save_counts(COUNTS, tmp_path / "token_freq.pt")
    same = vocab_report.by_the_library(tmp_path / "token_freq.pt", vocab.build(COUNTS, 4, 8))
    assert same == {"tokens in both": 4, "ours alone": 0, "ours alone and not among those always kept": 0, "theirs alone": 0}
    kept = vocab_report.by_the_library(tmp_path / "token_freq.pt", vocab.build(COUNTS, 4, 8, always_keep=[7]))
    assert kept == {"tokens in both": 3, "ours alone": 1, "ours alone and not among those always kept": 0, "theirs alone": 1}
    strange = vocab_report.by_the_library(tmp_path / "token_freq.pt", vocab.build(COUNTS[::-1], 4, 8))
    assert strange["ours alone and not among those always kept"] > 0


def test_gates_pass_on_a_good_map_and_each_fails_on_its_fault(tmp_path):
    training = [([1, 3, 3, 4], [0, 1, 1, 1])]
    counts = vocab.token_counts(training, 8)
    mapping, twice = vocab.build(counts, 3, 8, always_keep=[7]), {"ours alone and not among those always kept": 0}

    def failed(mapping=mapping, read=mapping, ends=(7,), training=training, twice=twice):
        return [n for n, (_, passed, _, _) in enumerate(vocab_report.gates(mapping, read, ends, training, counts, twice)) if not passed]

    assert failed() == []
    assert failed(training=training * 2) == [0]
    twisted = vocab.VocabMap(np.array([3, 3, 7]), 8)
    assert failed(mapping=twisted, read=twisted) == [1]
    assert failed(read=vocab.build(counts, 3, 8, always_keep=[6])) == [2]
    assert failed(ends=(7, 6)) == [3]
    assert failed(twice={"ours alone and not among those always kept": 1}) == [4]
