"""Masks from any chat template: proven where they can be, said or refused where not."""

from __future__ import annotations

import re

import pytest
import tiny_chat
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import chat, tokenizer

from helpers import masks
from helpers.conversations import RETOKENISED, TWO_BOS, Tokenised, answer_text, from_turns, mask_html, prompt_ids, render, tokenise
from helpers.errors import DataError, VerifierError

THINKING = "<think>\nreasoning\n</think>\n\nthe answer"


def supervised(tok, row: Tokenised) -> list[str]:
    """Texts of the masked runs, decoded from ids and mask alone."""
    runs, previous = [], 0
    for token, mask in zip(row.input_ids, row.loss_mask, strict=True):
        if mask:
            runs = runs if previous else [*runs, []]
            runs[-1].append(token)
        previous = mask
    return [tok.decode(run) for run in runs]


def made(template: str, messages, **more) -> tuple[Tokenised, list[str]]:
    tok = tokenizer(template)
    row = tokenise(tok, messages, max_tokens=500, row="row-1", **more)
    return row, supervised(tok, row)


def test_the_mask_is_the_answers_and_their_end_of_turn_tokens():
    row, texts = made(tiny_chat.CHATML, chat("what is it", "the answer", "why", "because", system="you are"))
    assert texts == ["the answer<|im_end|>", "because<|im_end|>"]
    assert (row.source, row.answers, row.supervised_answers, row.closed, row.notes) == ("boundaries", 2, 2, True, [])


def test_the_row_starts_with_exactly_what_the_verifier_is_given_and_the_next_token_is_supervised():
    tok, messages = tokenizer(), chat("what is it", "the answer", "why", "because")
    row, prompt = tokenise(tok, messages, max_tokens=500), prompt_ids(tok, messages[:-1])
    assert row.input_ids[: len(prompt)] == prompt and row.loss_mask[len(prompt)] == 1
    assert row.input_ids[-1] == tok.eos_token_id and row.loss_mask[-1] == 1


def test_generation_marks_are_used_and_agree_with_the_boundaries():
    messages = chat("what is it", "the answer", "why", "because")
    tagged, texts = made(tiny_chat.TAGGED, messages)
    plain, _ = made(tiny_chat.CHATML, messages)
    assert tagged.source == "template" and texts == ["the answer<|im_end|>", "because<|im_end|>"]
    assert (tagged.input_ids, tagged.loss_mask) == (plain.input_ids, plain.loss_mask)


def test_generation_marks_that_leave_out_the_end_of_turn_give_way_to_the_boundaries():
    without_end = tiny_chat.TAGGED.replace("+ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "}}{% endgeneration %}{{ '<|im_end|>\n' }}")
    row, texts = made(without_end, chat("what is it", "the answer"))
    assert texts == ["the answer<|im_end|>"] and row.source == "boundaries" and row.notes == [masks.DIFFERENT_TAGS]


def test_generation_marks_that_reach_over_the_line_break_behind_are_cut():
    beyond = tiny_chat.TAGGED.replace("+ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "+ '<|im_end|>\n' }}{% endgeneration %}")
    row, texts = made(beyond, chat("what is it", "the answer", "why", "because"))
    assert row.source == "template" and texts == ["the answer<|im_end|>", "because<|im_end|>"]


def test_generation_marks_stand_alone_where_boundaries_cannot_be_told():
    row, texts = made(tiny_chat.SHIFTING, chat("what is it", "the answer", "why", "because"))
    assert row.source == "template" and texts == ["because<|im_end|>"]
    assert (row.answers, row.supervised_answers) == (2, 1) and "boundaries" in row.notes[0]
    with pytest.raises(DataError, match="changes what stands before the answer"):
        made(tiny_chat.SHIFTING.replace("{% generation %}", "").replace("{% endgeneration %}", ""), chat("what is it", "the answer"))


def test_generation_marks_alone_are_held_against_the_answers_text():
    beyond = tiny_chat.SHIFTING.replace("+ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "+ '<|im_end|>\n' }}{% endgeneration %}")
    assert made(beyond, chat("what is it", "the answer"))[1] == ["the answer<|im_end|>"]
    without_end = tiny_chat.SHIFTING.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}")
    assert made(without_end, chat("what is it", "the answer"))[1] == ["the answer<|im_end|>"]
    other_text = tiny_chat.SHIFTING.replace("{{ m['content'] + '<|im_end|>' }}{% endg", "{{ m['content'][2:] + '<|im_end|>' }}{% endg")
    no_end = tiny_chat.SHIFTING.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}")
    header = tiny_chat.SHIFTING.replace("{{ m['content'] + '<|im_end|>' }}{% endg", "{{ 'said: ' + m['content'] + '<|im_end|>' }}{% endg")
    for template in (other_text, no_end, header):
        with pytest.raises(DataError, match="cannot be told"):
            made(template, chat("what is it", "the answer"))


def test_generation_marks_do_not_hide_that_the_template_leaves_out_the_reasoning():
    with pytest.raises(DataError, match="drops or changes"):
        made(tiny_chat.TAGGED, [*chat("what is it"), {"role": "assistant", "content": "yes", "reasoning_content": "because"}])


def test_an_answer_closed_by_two_special_tokens_is_supervised_up_to_eos():
    assert made(tiny_chat.TWO_ENDS, chat("what is it", "the answer"))[1] == ["the answer<tool><|im_end|>"]
    apart = tiny_chat.TWO_ENDS.replace("<tool><|im_end|>", "<tool> <|im_end|>")
    assert made(apart, chat("what is it", "the answer"))[1] == ["the answer<tool>"]


def test_a_default_system_prompt_is_context():
    row, texts = made(tiny_chat.DEFAULT_SYSTEM, chat("what is it", "the answer"))
    assert texts == ["the answer<|im_end|>"] and "helpful assistant" in row.spans[0].text and not row.notes


def test_earlier_reasoning_dropped_by_the_template_leaves_that_answer_unsupervised_and_says_so():
    row, texts = made(tiny_chat.DROPS_REASONING, chat("what is it", THINKING, "why", "because"))
    assert texts == ["because<|im_end|>"] and row.supervised_answers == 1
    assert row.notes == [masks.EARLIER.format(masks.ALTERED)]
    assert row.spans[0].text.count("the answer") == 1 and "reasoning" not in row.spans[0].text


def test_reasoning_is_supervised_in_the_last_answer():
    _, texts = made(tiny_chat.DROPS_REASONING, chat("what is it", "the answer", "why", THINKING))
    assert texts == ["the answer<|im_end|>", THINKING + "<|im_end|>"]


def test_a_template_that_drops_part_of_the_last_answer_has_its_row_refused():
    with pytest.raises(DataError, match="drops or changes part of the answer") as caught:
        made(tiny_chat.ALWAYS_DROPS_REASONING, chat("what is it", THINKING))
    assert caught.value.where == "row-1"


def test_reasoning_in_its_own_field_is_refused_where_the_template_leaves_it_out():
    messages = [*chat("what is it"), {"role": "assistant", "content": "yes", "reasoning_content": "because"}]
    with pytest.raises(DataError, match="drops or changes"):
        made(tiny_chat.CHATML, messages)
    block = "('<think>' + m['reasoning_content'] + '</think>' if m['reasoning_content'] else '')"
    shows = tiny_chat.CHATML.replace("+ m['content']", f"+ {block} + m['content']")
    assert made(shows, messages)[1] == ["<think>because</think>yes<|im_end|>"]


def test_a_prompt_that_already_opens_the_reasoning_leaves_only_the_rest_supervised():
    opened = tiny_chat.CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    row, texts = made(opened, chat("what is it", THINKING))
    assert texts == [THINKING.removeprefix("<think>\n") + "<|im_end|>"] and not row.notes


def test_text_the_template_inserts_before_an_answer_is_not_supervised():
    row, texts = made(tiny_chat.INSERTS_BLOCK, chat("what is it", "the answer"))
    assert texts == ["the answer<|im_end|>"] and masks.INSERTED in row.notes


def test_a_prompt_opening_that_the_finished_answer_lacks_is_noted():
    row, texts = made(tiny_chat.ALWAYS_DROPS_REASONING, chat("what is it", "the answer"))
    assert texts == ["the answer<|im_end|>"] and row.notes == [masks.SCAFFOLD]


def test_the_tokenizer_adds_no_second_bos_and_a_templates_own_is_noted():
    tok = tokenizer(tiny_chat.ALTERNATING)
    assert tok("x").input_ids[0] == tok.bos_token_id  # it would add one if asked
    row = tokenise(tok, chat("what is it", "the answer"), max_tokens=500)
    assert row.input_ids.count(tok.bos_token_id) == 1 and not row.notes
    twice, texts = made(tiny_chat.TWO_BOS, chat("what is it", "the answer"))
    assert twice.notes == [TWO_BOS] and texts == ["the answer<|im_end|>"]


def test_a_template_without_generation_prompt_keeps_the_answers_leading_space():
    _, texts = made(tiny_chat.ALTERNATING, chat("what is it", "the answer", "why", "because"))
    assert texts == [" the answer<|im_end|>", " because<|im_end|>"]


def test_an_order_of_roles_the_template_refuses_names_row_and_roles():
    with pytest.raises(DataError, match="Roles must alternate") as caught:
        made(tiny_chat.ALTERNATING, chat("what is it", "the answer", system="you are"))
    assert caught.value.where == "row-1 (roles: system, user, assistant)"


def test_an_answer_without_end_of_turn_token_is_refused():
    with pytest.raises(DataError, match="no end-of-turn token"):
        made(tiny_chat.NO_END, chat("what is it", "the answer"))


def test_an_answer_that_quotes_the_end_of_turn_token_is_refused():
    with pytest.raises(DataError, match="text of its end-of-turn token"):
        made(tiny_chat.CHATML, chat("how does it end", "with <|im_end|> of course"))


def test_a_token_over_the_edge_of_prompt_and_answer_is_split_as_in_serving():
    tok, messages = tokenizer(), chat("what is it", "\n\nthe answer")
    prompt = prompt_ids(tok, messages[:1])
    together = tok(render(tok, messages), add_special_tokens=False).input_ids
    assert together[: len(prompt)] != prompt  # a line break of each makes one token
    row, texts = made(tiny_chat.CHATML, messages)
    assert row.input_ids[: len(prompt)] == prompt and texts == ["\n\nthe answer<|im_end|>"] and row.notes == [masks.SPLIT]


def test_a_tokenizer_that_puts_a_space_before_lone_text_adds_none_to_an_answer():
    tok = tiny_chat.sentencepiece_like(tiny_chat.ALTERNATING)
    messages = chat("what is it", "the answer", "why", "because")
    row = tokenise(tok, messages, max_tokens=500)
    assert row.input_ids == tok(render(tok, messages), add_special_tokens=False).input_ids
    assert [text.strip() for text in supervised(tok, row)] == ["the answer<|im_end|>", "because<|im_end|>"]
    tok = tiny_chat.sentencepiece_like(tiny_chat.CHATML)
    with pytest.raises(DataError, match="reaches from the prompt into the answer"):  # split, the answer would begin with that space
        tokenise(tok, chat("what is it", "\nthe answer"), max_tokens=500)


def test_a_tokenizer_in_plain_python_without_offsets_gives_the_same_masks():
    tok = tiny_chat.Slow(bos_token="<s>", eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])
    tok.chat_template = tiny_chat.TAGGED
    row = tokenise(tok, chat("what is it", "the answer", "why", "because"), max_tokens=500)
    assert not tok.is_fast and row.source == "boundaries"
    assert supervised(tok, row) == ["the answer<|im_end|>", "because<|im_end|>"]


def test_tool_calls_are_supervised_with_their_arguments_and_results_are_not():
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Zürich"}}}
    messages = [
        *chat("weather"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "it is sunny"},
    ]
    row, texts = made(tiny_chat.TOOLS, messages, tools=[{"type": "function", "function": {"name": "look"}}])
    assert texts == ['<tool>look {"city": "Zürich"}<tool><|im_end|>', "it is sunny<|im_end|>"]
    assert row.spans[0].text.startswith("tools: ") and row.supervised_answers == 2
    with pytest.raises(DataError, match="tool call"):
        made(tiny_chat.CHATML, messages[:2])  # this template knows no tools


def test_text_inserted_before_a_tool_call_is_not_supervised():
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    block = "('<think>\n</think>' if m['role'] == 'assistant' else '')"
    inserts = tiny_chat.TOOLS.replace("'\n' + m['content'] }}", f"'\n' + {block} + m['content'] }}}}")
    row, texts = made(inserts, [*chat("weather"), {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert texts == ["<tool>look {}<tool><|im_end|>"] and row.notes == [masks.INSERTED]


def test_templates_that_want_tool_arguments_as_text_get_them():
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Zürich"}}}
    joins = tiny_chat.TOOLS.replace("+ c.function.arguments | tojson +", "+ c.function.arguments +")
    _, texts = made(joins, [*chat("weather"), {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert texts == ['<tool>look {"city": "Zürich"}<tool><|im_end|>']


def test_messages_behind_the_last_answer_and_answers_before_any_question_are_noted():
    row, texts = made(tiny_chat.CHATML, chat("what is it", "the answer", "why"))
    assert texts == ["the answer<|im_end|>"] and row.notes == [masks.TRAILING]
    row, texts = made(tiny_chat.CHATML, [{"role": "assistant", "content": "hello"}, *chat("what is it", "the answer")])
    assert texts == ["the answer<|im_end|>"] and row.notes == [masks.OPENING]
    with pytest.raises(DataError, match="no answer"):
        made(tiny_chat.CHATML, chat("what is it"))


def test_rows_over_the_limit_are_cut_and_refused_when_nothing_is_left_to_learn():
    tok, messages = tokenizer(), chat("what is it", "the answer " * 20)
    whole, prompt = tokenise(tok, messages, max_tokens=500), prompt_ids(tok, messages[:1])
    cut = tokenise(tok, messages, max_tokens=len(prompt) + 3)
    two = tokenise(tok, [*messages, *chat("why", "because")], max_tokens=len(whole.input_ids))
    assert two.input_ids[-1] == tok.eos_token_id and not two.closed  # the end of an earlier answer, not of the last
    assert cut.truncated == len(whole.input_ids) - len(prompt) - 3 and cut.supervised == 3 and not cut.closed
    with pytest.raises(DataError, match=f"prompt alone has {len(prompt)}"):
        tokenise(tok, messages, max_tokens=len(prompt), row="long")


def test_a_verifier_without_chat_template_is_an_error_that_says_what_to_do():
    for call in (prompt_ids, render):
        with pytest.raises(VerifierError, match="no chat template") as caught:
            call(tokenizer(None), chat("x"))
        assert "chat_template.jinja" in caught.value.do


def test_prompt_ids_want_something_to_answer():
    with pytest.raises(DataError, match="nothing to answer"):
        prompt_ids(tokenizer(), chat("a", "b"))


def test_templates_that_want_typed_parts_get_them():
    assert "what is it" in render(tokenizer(tiny_chat.PARTS), chat("what is it"))
    assert made(tiny_chat.PARTS, chat("what is it", "the answer"))[1] == ["the answer<|im_end|>"]


def test_a_template_that_leaves_out_the_question_is_refused():
    with pytest.raises(DataError, match="leaves out what the user says"):
        prompt_ids(tokenizer("{{ bos_token }}"), chat("what is it"))


def test_template_arguments_reach_the_template():
    switch = tiny_chat.CHATML.replace("assistant\n' }}{% endif %}", "assistant\n' + ('' if thinking else '<think></think>') }}{% endif %}")
    tok = tokenizer(switch)
    assert tok.decode(prompt_ids(tok, chat("a"), arguments={"thinking": False})).endswith("<think></think>")
    assert tok.decode(prompt_ids(tok, chat("a"), arguments={"thinking": True})).endswith("assistant\n")


WORDS = st.text(alphabet="abthe <>\nü東🎉|{}'\u2028", min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=2, max_size=6), st.sampled_from([tiny_chat.CHATML, tiny_chat.TAGGED, tiny_chat.DEFAULT_SYSTEM]))
def test_whatever_is_said_the_mask_reads_back_as_the_answers(texts, template):
    texts = texts[: len(texts) // 2 * 2]
    row, runs = made(template, chat(*texts))
    said = [text + "<|im_end|>" for text in texts[1::2]]
    assert runs[-1] == said[-1]
    assert [run for run in said if run in runs] == runs or row.supervised_answers < row.answers
    assert len(runs) == row.supervised_answers


def answered(tok, messages, *answers: str, end: bool = True) -> list[tuple[list[int], list[int]]]:
    """Turns as a decoding loop would leave them: each answer's ids generated, its text put into the next prompt."""
    turns, talk = [], []
    for question, answer in zip(messages, answers, strict=True):
        talk.append({"role": "user", "content": question})
        ids = tok(answer, add_special_tokens=False).input_ids + [tok.eos_token_id] * end
        turns.append((prompt_ids(tok, talk), ids))
        talk.append({"role": "assistant", "content": answer_text(tok, ids)})
    return turns


def test_a_generated_row_is_the_verifiers_own_ids():
    tok = tokenizer()
    [(prompt, answer)] = answered(tok, ["what is it"], "the answer")
    odd = [tok.convert_tokens_to_ids(c) for c in "the"] + [tok.eos_token_id]  # a tokenisation no encoder would choose
    row = from_turns(tok, [(prompt, odd)], row="r")
    assert row.input_ids == prompt + odd and row.loss_mask == [0] * len(prompt) + [1] * len(odd)
    assert (row.source, row.closed, row.id) == ("generated", True, "r") and answer_text(tok, odd) == "the"
    assert from_turns(tok, [(prompt, answer[:-1])]).closed is False


def test_earlier_generated_answers_are_supervised_where_the_later_prompt_gives_the_same_tokens():
    tok = tokenizer()
    turns = answered(tok, ["what is it", "why"], "the answer", "because")
    row = from_turns(tok, turns)
    assert supervised(tok, row) == ["the answer<|im_end|>", "because<|im_end|>"]
    assert (row.answers, row.supervised_answers, row.notes) == (2, 2, [])
    assert row.input_ids == tokenise(tok, chat("what is it", "the answer", "why", "because"), max_tokens=500).input_ids


def test_an_earlier_answer_that_retokenises_differently_is_supervised_only_as_far_as_it_agrees():
    tok = tokenizer()
    (prompt, answer), second = answered(tok, ["what is it", "why"], "the answer", "because")
    letters = [tok.convert_tokens_to_ids(c) for c in "the"]
    row = from_turns(tok, [(prompt, letters + answer[1:]), second])
    assert supervised(tok, row) == ["because<|im_end|>"]
    late = answer[:1] + tok("x", add_special_tokens=False).input_ids + answer[1:]
    cut = from_turns(tok, [(prompt, late), second])
    assert supervised(tok, cut) == ["the", "because<|im_end|>"]
    for other in (row, cut):
        assert other.supervised_answers == 1 and other.notes == [RETOKENISED]


def test_an_earlier_answer_in_another_context_is_not_supervised():
    tok = tokenizer(tiny_chat.DROPS_REASONING)
    row = from_turns(tok, answered(tok, ["what is it", "why"], THINKING, "because"))
    assert supervised(tok, row)[-1] == "because<|im_end|>" and row.supervised_answers == 1
    other = answered(tokenizer(), ["what is it", "why"], "the answer", "because")
    assert len(supervised(tok, from_turns(tok, other))) == 2
    other[0] = ([tok.bos_token_id, *other[0][0][1:]], other[0][1])  # another first token, the answer in the same place
    assert supervised(tok, from_turns(tok, other)) == ["because<|im_end|>"]


def test_an_earlier_answer_cut_short_lends_no_end_of_turn_token():
    tok = tokenizer()
    turns = answered(tok, ["what is it", "why"], "the answer", "because", end=False)
    assert supervised(tok, from_turns(tok, turns)) == ["the answer", "because"]


def test_turns_without_tokens_are_refused():
    for turns in ([], [([1], [])], [([], [1])]):
        with pytest.raises(DataError, match="without prompt or answer"):
            from_turns(tokenizer(), turns, row="r")


def test_the_coloured_view_escapes_text_shows_special_tokens_and_marks_what_is_trained():
    tok = tokenizer()
    row = tokenise(tok, chat("<script>alert(1)</script>", "a & b </span>"), max_tokens=500, row="<img src=x>")
    page = mask_html(tok, row)
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("&lt;|im_end|&gt;") == 2 and "a &amp; b &lt;/span&gt;" in page
    green = re.findall(r'<span style="[^"]*rgba\(46[^"]*">([^<]*)</span>', page)
    assert green == ["trained on", "a &amp; b &lt;/span&gt;", "&lt;|im_end|&gt;"]
    assert not re.search(r"(?<!-)\bcolor\s*:", page)  # text keeps the page's own colour, light or dark


def test_the_coloured_view_is_limited_and_shows_characters_of_several_tokens_whole():
    tok = tokenizer()
    row = tokenise(tok, chat("word " * 3000, "東京 🎉"), max_tokens=50_000)
    page = mask_html(tok, row)
    long = mask_html(tok, tokenise(tok, chat("<b>" + "word " * 3000 + "<b>", "yes"), max_tokens=50_000))
    assert "<b>" not in long and long.count("&lt;b&gt;") == 2
    assert len(page) < 5000 and "東京 🎉" in page and "characters …" in page
    assert len(mask_html(tok, tokenise(tok, chat(*["x " * 200] * 20), max_tokens=10**6), limit=2000)) < 6000
