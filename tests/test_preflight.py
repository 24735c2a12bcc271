"""Pre-flight: figures that can be checked by hand, problems named, and the two shares that stop a run."""

from __future__ import annotations

import json

import pytest
from tiny_chat import ALTERNATING, chat, tokenizer

from helpers.conversations import Tokenised, prompt_ids, tokenise
from helpers.errors import DataError
from helpers.messages import Prompt
from helpers.preflight import MAY_BE_CUT, overlap, plan, preflight, rate

TEXT = "one two three four five six seven eight nine ten"  # ten words: three shingles of eight


def prompt(name: str, text: str, **more) -> Prompt:
    return Prompt(name, "c", chat(text, **more))


def row(name: str, ids: list[int], mask: list[int], **more) -> Tokenised:
    return Tokenised(ids, mask, "boundaries", id=name, full_tokens=more.pop("full_tokens", len(ids)), **more)


GOOD = [row("a", [1, 2, 3, 4], [0, 0, 1, 1]), row("b", [1, 2, 3, 5, 6, 7], [0, 0, 0, 0, 0, 1])]
SIZES = {"vocab_size": 100, "hidden_size": 576, "max_tokens": 8}


def test_the_figures_of_a_clean_set():
    report = preflight(GOOD, **SIZES)
    figures = report.figures
    assert (figures["rows"], figures["answers"], figures["tokens"], figures["supervised"]) == (2, 2, 10, 3)
    assert figures["supervised_share"] == 0.3 and report.rows["supervised_share"].tolist() == [0.5, 1 / 6]
    # (3 + 1) layers · 576 · 2 bytes = 4,608 per token, the 4.6 kB of FIELD.md
    assert figures["bytes_per_token"] == 4608 and figures["disk_bytes"] == 46_080
    assert not report.problems and json.dumps(figures)
    assert "(3 + 1) layers · 576 · 2 bytes" in report.table.set_index("check").loc["disk", "detail"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("z", [1, 2], [0, 0]), "1 of 3 rows have no supervised token"),
        (row("z", [1, 2], [1, 1]), "100 %"),
        (row("z", [1, 100], [0, 1]), "outside the vocabulary of 100"),
        (row("z", [-1, 2], [0, 1]), "outside the vocabulary"),
    ],
)
def test_rows_that_would_spoil_training_stop_the_run_by_name(bad, message):
    with pytest.raises(DataError, match=message) as caught:
        preflight([*GOOD, bad], **SIZES)
    assert caught.value.where == "z"


def test_no_row_at_all_is_an_error():
    with pytest.raises(DataError, match="no row"):
        preflight([], **SIZES)


def test_duplicates_cut_and_unfinished_rows_and_notes_become_problems():
    rows = [
        *GOOD,
        row("c", [1, 2, 3, 4], [0, 0, 1, 1]),
        row("d", [9] * 8, [0] * 7 + [1], full_tokens=11, closed=False),
        row("e", [8, 8], [0, 1], closed=False, notes=["odd"], answers=3, supervised_answers=1),
    ]
    report = preflight(rows, **SIZES, rejected=[(7, "image")])
    assert (report.figures["duplicates"], report.figures["truncated"], report.figures["unclosed"]) == (1, 1, 2)
    assert report.figures["unsupervised_answers"] == 2 and report.figures["notes"] == {"odd": 1}
    assert report.problems == [
        "1 rows were left out, first: 7: image",
        "1 duplicate rows: c = a",
        "1 rows are longer than 8 tokens and were cut: d",
        "1 rows end without an end-of-turn token: the answer was cut: e",
        "1 rows: odd",
    ]


def test_overlap_between_training_and_evaluation_is_found_exact_and_near():
    train = [prompt("t1", TEXT), prompt("t2", "something else entirely")]
    asked = [
        prompt("exact", TEXT.upper().replace(" ", "  ")),
        prompt("near", TEXT.replace("ten", "eleven")),  # 2 of its 3 shingles
        prompt("far", TEXT.replace("five", "5")),  # every shingle holds the fifth word
        prompt("short", "something else"),
    ]
    found = overlap(train, asked).set_index("id")
    assert found["exact"].tolist() == [True, False, False, False]
    assert found["share"].round(3).tolist() == [1.0, 0.667, 0.0, 0.0]
    assert found.loc["near", "most_like"] == "t1" and found.loc["far", "most_like"] == ""
    report = preflight(GOOD, **SIZES, prompts=train, evaluation=asked)
    assert (report.figures["overlap_exact"], report.figures["overlap_near"]) == (1, 1)
    assert report.problems[0].startswith("1 of 4 evaluation prompts are also asked in training: exact ~ t1")


def test_a_shared_system_prompt_is_no_overlap():
    system = "you are a helpful assistant that answers every question with great care"
    found = overlap([prompt("t", "how", system=system)], [prompt("e", "why", system=system)])
    assert found["share"].tolist() == [0.0]


def test_chinese_characters_count_as_words():
    text = "今天天气怎么样我们去公园"  # 12 characters: 5 shingles
    found = overlap([prompt("t", text)], [prompt("e", text + "吗")])
    assert found["share"].tolist() == [5 / 6]


def test_a_plan_counts_what_answers_can_add_and_tries_the_template():
    tok = tokenizer()
    ids = prompt_ids(tok, chat("what is it"))
    planned = plan(tok, prompt("p", "what is it"), answer_max_tokens=10, max_tokens=len(ids) + 20)
    assert (planned.input_ids, planned.planned_tokens, planned.notes) == (ids, 10, [])
    tight = plan(tok, prompt("p", "what is it"), answer_max_tokens=10, max_tokens=len(ids) + 4)
    assert tight.planned_tokens == 4 and tight.notes == [MAY_BE_CUT]
    report = preflight([planned], vocab_size=len(tok), hidden_size=8, max_tokens=100, rates={"answering": 5, "extraction": 100})
    assert report.figures["supervised_share"] == 10 / (len(ids) + 10)
    assert report.figures["minutes"] == {"answering": 10 / 5 / 60, "extraction": (len(ids) + 10) / 100 / 60}


def test_a_plan_of_several_turns_answers_each_anew():
    tok = tokenizer()
    turns = Prompt("p", "c", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    given = Prompt("p", "c", chat("a", "given", "b", "given"))
    both = [plan(tok, p, answer_max_tokens=10, max_tokens=200) for p in (turns, given)]
    assert both[0].input_ids == both[1].input_ids and both[0].answers == 2 and both[0].planned_tokens == 20


def test_a_plan_refuses_long_prompts_and_refused_roles_by_name():
    with pytest.raises(DataError, match="5 are allowed") as caught:
        plan(tokenizer(), prompt("long", "what is it"), answer_max_tokens=2, max_tokens=5)
    assert caught.value.where == "long"
    with pytest.raises(DataError, match="alternate") as caught:
        plan(tokenizer(ALTERNATING), prompt("sys", "a", system="s"), answer_max_tokens=2, max_tokens=50)
    assert caught.value.where.startswith("sys")


def test_the_report_on_real_rows_says_where_the_first_supervised_token_stands():
    tok = tokenizer()
    rows = [tokenise(tok, chat(q, "the answer"), max_tokens=100, row=q) for q in ("what", "why")]
    table = preflight(rows, vocab_size=len(tok), hidden_size=8, max_tokens=100).table.set_index("check")["value"]
    assert table["first draftable position"] == "2 of 2" and table["end of turn"] == "2 of 2" and table["mask"] == "2 boundaries"


def test_the_probe_times_one_warm_call_of_about_the_budget():
    calls = []
    speed = rate(calls.append, [row(str(n), [1] * n, [0] * n) for n in range(1, 40)], budget=100)
    assert len(calls) == 2 and len(calls[0]) == 1 and 60 <= sum(map(len, calls[1])) <= 100 and speed > 0
