"""What notebook 01 shows: facts of template and verifier, speeds, shares, the two ways to the same logits."""

import pytest
import tiny_chat
import torch

from helpers import extraction, inspection, verifier
from helpers.answers import Answered
from helpers.conversations import PromptSet, Tokenised
from helpers.messages import Prompt

ASKED = [{"role": "user", "content": "why"}]


@pytest.fixture(scope="module")
def tiny():
    return verifier.load("tiny")


def prompt(name, category="facts", messages=ASKED):
    return Prompt(name, category, messages)


def row(tokens, answer, name="a"):
    return Tokenised(list(range(tokens)), [0] * (tokens - answer) + [1] * answer, "generated", id=name)


@pytest.mark.parametrize(
    "template, expected",
    [
        (tiny_chat.CHATML, {"adds a system prompt of its own": False, "begins with BOS": False}),
        (tiny_chat.CHATML, {"marks answers itself ({% generation %})": False}),
        (tiny_chat.DEFAULT_SYSTEM, {"adds a system prompt of its own": True}),
        (tiny_chat.TAGGED, {"marks answers itself ({% generation %})": True}),
        (tiny_chat.TWO_BOS, {"begins with BOS": True}),
    ],
)  # fmt: skip
def test_facts_of_a_template_are_read_off_its_rendering(template, expected):
    facts = inspection.template_facts(tiny_chat.tokenizer(template), ASKED)
    assert {name: facts[name] for name in expected} == expected
    assert facts["opening of an answer"] == repr("<|im_start|>assistant\n") and "<|im_end|>" in facts["special tokens it writes"]


def test_tokens_are_shown_where_context_turns_into_answer():
    tokenizer = tiny_chat.tokenizer()
    shown = inspection.token_rows(tokenizer, row(30, 10), around=3)
    assert [(r["position"], r["trained on"]) for r in shown] == [(17, False), (18, False), (19, False), (20, True), (21, True), (22, True)]
    assert [r["id"] for r in shown] == list(range(17, 23))
    assert len(inspection.token_rows(tokenizer, row(3, 2), around=9)) == 3


def test_verifier_facts_are_its_own(tiny):
    facts = inspection.verifier_facts(tiny)
    assert facts["folder"] == "data/models/tiny" and facts["decoder layers, n"] == 8 and facts["head"] == "tied to the embeddings"
    assert facts["parameters"] == sum(p.numel() for p in tiny.model.parameters()) and facts["end-of-turn tokens"] == "2 <|im_end|>"


def test_layers_are_explained_by_place_in_the_shard():
    rows = inspection.layer_rows([0, 4, 5], 8)
    assert [(r["slice"], r["layer id"]) for r in rows] == [(0, 0), (1, 4), (2, 5), (3, 8)]
    assert rows[0]["what"] == "token embeddings" and "before the final norm" in rows[3]["what"] and "target" in rows[3]["used as"]


def test_speeds_count_every_row_of_the_batch(tiny, monkeypatch):
    calls = []
    monkeypatch.setattr(inspection, "generate", lambda v, batch, max_tokens: calls.append(len(batch)) or [[1] * max_tokens] * len(batch))
    clock = iter([10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(inspection.time, "perf_counter", lambda: next(clock))
    found = inspection.speeds(tiny, [prompt(str(i)) for i in range(9)], [row(20, 5)] * 3, [2, 4, 5], batch_rows=6)
    assert calls == [1, 6]
    # six rows of twelve tokens in two seconds; three rows of twenty tokens in four
    assert found == {"answering": 36.0, "hidden states": 15.0}


def test_shares_of_answers_that_ended_were_cut_and_repeat():
    two = [{"role": "user", "content": "why"}, {"role": "user", "content": "how"}]
    answered = [
        Answered(prompt("a"), [([1], list(range(40)))], ended=True),
        Answered(prompt("b", "code", two), [([1], [5, 2]), ([1, 5, 2], [9, 8, 7, 6] * 10)], ended=False),
        Answered(prompt("c", "code", two), [([1], [3, 4])], ended=False),
    ]
    facts = inspection.answer_facts(answered)
    assert facts == {
        "conversations": 3,
        "answers": 4,
        "answer_tokens": 84,
        "longest_answer": 40,
        "answers_ended_share": 0.5,
        "answers_cut_share": 0.5,
        "repeat_share": 0.25,
        "turns_not_asked": 1,
    }
    assert inspection.lengths_by_category(answered) == {"facts": [40], "code": [2, 40, 2]}


def test_prompts_are_counted_by_category():
    told = [{"role": "system", "content": "be brief"}, *ASKED]
    rows = inspection.prompt_rows([prompt("a"), prompt("b", "code", told), prompt("c", "code", ASKED * 2)])
    assert rows == [
        {"category": "code", "prompts": 2, "several_turns": 1, "system_prompt": 1},
        {"category": "facts", "prompts": 1, "several_turns": 0, "system_prompt": 0},
    ]
    found = PromptSet("p", [prompt("a"), prompt("b"), prompt("c")], rejected=[(4, "no text")])
    counts = inspection.prompt_counts(found, 2)
    assert (counts["found"], counts["taken"], counts["beyond_limit"], counts["rejected"]) == (4, 2, 1, 1)


def test_stored_state_and_model_give_the_same_next_tokens(tiny):
    ids = list(range(5, 45))
    states = tiny.states(torch.tensor([ids]), [2, 4, 5])[0][:, -1]
    rows = inspection.two_ways(tiny, ids, states, at=20, top=4)
    real = tiny.model(input_ids=torch.tensor([ids[:21]])).logits[0, -1].float()
    assert [r["by the model"] for r in rows] == [repr(tiny.tokenizer.decode([t])) for t in real.topk(4).indices.tolist()]
    assert all(r["from the stored state"] == r["by the model"] and abs(r["logit"] - r["its logit"]) < 0.1 for r in rows)
    moved = inspection.two_ways(tiny, ids, states.roll(1, 0), at=20, top=4)
    assert [r["from the stored state"] for r in moved] != [r["by the model"] for r in moved]


def test_norms_are_those_of_each_layers_states(tiny):
    ids = list(range(5, 25))
    rows = inspection.layer_norms(tiny, ids)
    embedded = tiny.decoder.embed_tokens(torch.tensor(ids)).float().norm(dim=-1)
    assert [r["layer"] for r in rows] == list(range(9))
    assert rows[0]["median"] == pytest.approx(embedded.median().item()) and rows[0]["first"] == pytest.approx(embedded[0].item())
    last = tiny.states(torch.tensor([ids]), [2])[0, :, -1].float().norm(dim=-1)
    assert rows[8]["median"] == pytest.approx(last.median().item())
    axes = inspection.norms_figure(rows, [2, 4, 5, 8], len(ids)).axes[0]
    assert axes.get_xlabel() and axes.get_ylabel() and list(axes.lines[2].get_xdata()) == [2, 4, 5, 8]


@pytest.fixture
def stored(tiny, tmp_path):
    rows = [row(20, 5), row(30, 10, "b")]
    extraction.extract(tiny, rows, tmp_path, [2, 4, 5], batch_tokens=64, report=lambda _: None)
    return rows, tmp_path


def test_gates_pass_on_a_whole_folder_and_each_fails_on_its_fault(stored):
    rows, folder = stored
    counts = {"found": 4, "taken": 2, "beyond_limit": 1, "rejected": 1}

    def failed(counts=counts, overlap=0, rows=rows):
        return [n for n, (_, passed, _, _) in enumerate(inspection.gates(counts, overlap, rows, folder, 4, 64)) if not passed]

    assert failed() == []
    assert failed(counts | {"rejected": 0}) == [0]
    assert failed(overlap=1) == [1]
    assert failed(rows=[rows[0], Tokenised(rows[1].input_ids, [1] * 30, "generated")]) == [2]
    extraction.shard(folder, 1).unlink()
    assert failed() == [3]


def test_results_hold_what_later_notebooks_read(tiny):
    said = inspection.answer_facts([Answered(prompt("a"), [([1], [5, 6])], ended=True)])
    found = inspection.results(tiny, [row(20, 5), row(30, 10)], said, [{"top1": 0.99, "cosine": 0.9}, {"top1": 1.0, "cosine": 1.0}], 1)
    assert (found["rows"], found["training_rows"], found["heldout_rows"]) == (2, 1, 1)
    assert (found["tokens"], found["supervised_tokens"], found["supervised_share"]) == (50, 15, 0.3)
    assert (found["audit_top1"], found["audit_cosine"], found["end_ids"], found["hidden_size"]) == (0.99, 0.9, [2], 64)
    assert not found["verifier_folder"].startswith("/")
