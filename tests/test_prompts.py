"""Reading prompts: every shape, every defect of a file, and counts that add up."""

from __future__ import annotations

import json
import random
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.errors import DataError, ParameterError
from helpers.messages import Prompt, Unusable, read_row
from helpers.prompts import read_prompts


def said(row) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in read_row(row).messages]


@pytest.fixture
def write(tmp_path):
    def to(content: str | bytes, name: str = "asked.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to


USER = [("user", "hi")]
SHAPES = {
    "openai": ({"messages": [{"role": "user", "content": "hi"}]}, USER),
    "request log": ({"request": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}}, USER),
    "batch body": ({"custom_id": "r1", "body": {"messages": [{"role": "user", "content": "hi"}]}}, USER),
    "log with body in request": ({"request": {"body": {"messages": [{"role": "user", "content": "hi"}]}}}, USER),
    "sharegpt": (
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        [("system", "s"), ("user", "hi"), ("assistant", "yo")],
    ),
    "sharegpt as text": ({"conversations": '[{"from": "human", "value": "hi"}]'}, USER),
    "role and content under conversation": ({"conversation": [{"role": "user", "content": "hi"}]}, USER),
    "turns": ({"question_id": 81, "turns": ["hi", "and then?"]}, [("user", "hi"), ("user", "and then?")]),
    "turns and system": ({"turns": ["hi"], "system": "s"}, [("system", "s"), ("user", "hi")]),
    "prompt": ({"prompt": "hi"}, USER),
    "prompt and completion": ({"prompt": "hi", "completion": "yo"}, [("user", "hi"), ("assistant", "yo")]),
    "prompt as messages": ({"prompt": [{"role": "user", "content": "hi"}]}, USER),
    "instruction and input": ({"instruction": "add", "input": "1 2", "output": "3"}, [("user", "add\n\n1 2"), ("assistant", "3")]),
    "instruction, empty input": ({"instruction": "hi", "input": ""}, USER),
    "typed parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        [("user", "a\nb")],
    ),
    "developer": (
        {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": "hi"}]},
        [("system", "s"), ("user", "hi")],
    ),
    "table with nulls": ({"messages": None, "prompt": "hi", "tools": None, "category": None}, USER),
    "list of messages": ([{"role": "user", "content": "hi"}], USER),
    "bare text": ("hi", USER),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_the_same_messages(name):
    row, expected = SHAPES[name]
    assert said(row) == expected


LOOK = {"name": "look", "arguments": '{"city": "Bern"}'}


def test_tool_calls_and_results_keep_their_structure():
    row = {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": LOOK}]},
            {"role": "tool", "tool_call_id": "c1", "content": {"sky": "blau"}},
        ],
        "tools": [{"name": "look", "parameters": {}}],
    }
    prompt = read_row(row)
    call = prompt.messages[1]["tool_calls"][0]
    assert call == {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"city": "Bern"}}}
    assert prompt.messages[2] == {"role": "tool", "content": '{"sky": "blau"}', "tool_call_id": "c1"}
    assert prompt.tools == [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def test_sharegpt_function_calls_become_tool_calls():
    row = {
        "conversations": [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"city": "Bern"}}'},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "it is sunny"},
        ]
    }
    messages = read_row(row).messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"city": "Bern"}}


def test_a_tools_own_data_may_have_a_key_named_type():
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": [{"type": "flight", "price": 1}]}]}
    assert read_row(row).messages[1]["content"] == '[{"type": "flight", "price": 1}]'


def test_a_logged_answer_is_taken_only_when_it_was_finished():
    def log(reason):
        choice = {"message": {"role": "assistant", "content": "yo"}, "finish_reason": reason}
        return {"request": {"messages": [{"role": "user", "content": "hi"}]}, "response": {"choices": [choice]}}

    assert read_row(log("stop")).answered
    assert not read_row(log("length")).answered


REFUSED = {
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
    "unknown role": ({"messages": [{"role": "narrator", "content": "x"}]}, "narrator"),
    "empty user": ({"prompt": "  "}, "message 1 (user) is empty"),
    "no user": ({"messages": [{"role": "system", "content": "x"}]}, "no message of a user"),
    "assistant first": ({"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]}, "starts with"),
    "no known key": ({"foo": 1, "bar": 2}, "foo, bar"),
    "number": (3, "int"),
    "content a number": ({"messages": [{"role": "user", "content": 3}]}, "type int"),
    "messages no list": ({"messages": "hello"}, "no list"),
    "arguments no object": (
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{x"}]}]},
        "no JSON object",
    ),
    "half a surrogate pair": (json.loads('{"prompt": "a \\ud83d b"}'), "Unicode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unusable_row_says_why(name):
    row, reason = REFUSED[name]
    with pytest.raises(Unusable, match=reason.replace("(", r"\(").replace(")", r"\)")):
        read_row(row)


def test_turns_end_where_the_verifier_has_to_speak():
    prompt = read_row({"turns": ["a", "b"], "system": "s"})
    assert [[m["content"] for m in chunk] for chunk in prompt.turns()] == [["s", "a"], ["b"]]
    given = Prompt("x", "c", [{"role": r, "content": r[0]} for r in ("user", "assistant", "user", "assistant")])
    assert [[m["role"] for m in chunk] for chunk in given.turns()] == [["user"], ["user"]]
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    messages = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "r"}, {"role": "user", "content": "w"}]
    assert [[m["role"] for m in chunk] for chunk in Prompt("x", "c", messages).turns()] == [["user", "assistant", "tool"], ["user"]]
    assert Prompt("x", "c", messages[:2]).turns() == [messages[:1]]  # the call is the answer


def test_a_mixed_file_is_told_apart_row_by_row_and_its_counts_add_up(write):
    lines = [json.dumps(row, ensure_ascii=False) for row, _ in SHAPES.values()]
    bad = [json.dumps(row) for row, _ in list(REFUSED.values())[:3]]
    path = write("\n".join([lines[0], bad[0], "", *lines[1:], "{broken", *bad[1:]]))
    found = read_prompts(path, limit=5)
    assert found.counts == {
        "found": len(SHAPES) + 4,
        "taken": 5,
        "beyond_limit": len(SHAPES) - 5,
        "rejected": 4,
        "renamed": 0,
        "blank_lines": 1,
    }
    assert found.rejected[0][0] == 2 and "image_url" in found.rejected[0][1]
    assert found.rejected[1][0] == len(SHAPES) + 3 and "not JSON" in found.rejected[1][1]


def test_bom_crlf_blank_lines_unicode_and_a_trailing_comma_are_read(write):
    text = '\r\n{"prompt": "Zürich\u2028東京 🎉"}\r\n\r\n{"prompt": "zwei"},\r\n'
    for raw in (b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16")):
        found = read_prompts(write(raw))
        assert sorted(p.messages[0]["content"] for p in found.rows) == ["Zürich\u2028東京 🎉", "zwei"]
        assert sorted(p.line for p in found.rows) == [2, 4] and not found.rejected


def test_bytes_that_are_no_utf8_spoil_only_their_row(write):
    found = read_prompts(write(b'{"prompt": "caf\xe9"}\n{"prompt": "good"}\n'))
    assert [p.messages[0]["content"] for p in found.rows] == ["good"]
    assert found.rejected[0][0] == 1 and "Unicode" in found.rejected[0][1]


def test_json_arrays_are_read_with_line_numbers_and_trailing_commas(write):
    text = '[\n  {"prompt": "a"},\n  {"prompt": oops},\n  {\n    "prompt": "b"\n  },\n  {"prompt": "c"},\n]\n'
    found = read_prompts(write(text, "asked.json"))
    assert sorted((p.messages[0]["content"], p.line) for p in found.rows) == [("a", 2), ("b", 4), ("c", 7)]
    assert [line for line, _ in found.rejected] == [3]


def test_a_json_array_cut_short_is_named(write):
    found = read_prompts(write('[\n{"prompt": "a"},\n', "cut.json"))
    assert len(found.rows) == 1 and "ends inside" in found.rejected[0][1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"prompt": "a"}, {"prompt": "b"}]', ["a", "b"]),
        ('{"data": [{"prompt": "a"}, {"prompt": "b"}]}', ["a", "b"]),
        ('{\n  "prompt": "a"\n}', ["a"]),
        ('{\n  "prompt": "a"\n}\n{\n  "prompt": "b"\n}\n', ["a", "b"]),
        ('[{"role": "user", "content": "a"}]', ["a"]),
        ('[{"role": "user", "content": "a"}]\n[{"role": "user", "content": "b"}]\n', ["a", "b"]),
        ('"a"\n"b"\n', ["a", "b"]),
    ],
)
def test_json_in_other_layouts_is_read(write, text, expected):
    found = read_prompts(write(text, "asked.json"))
    assert sorted(p.messages[0]["content"] for p in found.rows) == expected and not found.rejected


def test_ids_are_given_or_made_and_duplicates_are_renamed(write):
    rows = [{"id": "a", "prompt": "1"}, {"id": "a", "prompt": "2"}, {"id": "a-2", "prompt": "3"}]
    rows += [{"prompt": "4"}, {"question_id": 7, "prompt": "5"}]
    found = read_prompts(write("\n".join(map(json.dumps, rows))))
    assert {p.id: p.messages[0]["content"] for p in found.rows} == {"a": "1", "a-3": "2", "a-2": "3", "asked-4": "4", "7": "5"}
    assert found.renamed == [(2, "a", "a-3")]


def test_categories_are_kept_or_named_uncategorised(write):
    found = read_prompts(write('{"prompt": "a", "category": "coding"}\n{"prompt": "b"}\n'))
    assert sorted(p.category for p in found.rows) == ["coding", "uncategorised"]


def test_the_limit_takes_a_prefix_of_one_shuffled_order(write):
    path = write("\n".join(json.dumps({"id": f"r{n}", "prompt": f"q{n}"}) for n in range(50)))
    whole = [p.id for p in read_prompts(path, seed=3).rows]
    assert [p.id for p in read_prompts(path, seed=3, limit=7).rows] == whole[:7]
    assert whole != [f"r{n}" for n in range(50)] and sorted(whole) == sorted(f"r{n}" for n in range(50))
    assert [p.id for p in read_prompts(path, seed=4).rows] != whole
    led = [p.id for p in read_prompts(path, seed=3, first="r9", limit=7).rows]
    assert led == ["r9", *[i for i in whole if i != "r9"][:6]]
    with pytest.raises(ParameterError, match="no prompt 'r50'"):
        read_prompts(path, first="r50")


def test_files_without_use_are_errors_with_their_reasons(write, tmp_path):
    with pytest.raises(DataError, match="no prompt file"):
        read_prompts(tmp_path / "absent.jsonl")
    for empty in ("", "\n \n", "\ufeff"):
        with pytest.raises(DataError, match="is empty"):
            read_prompts(write(empty))
    with pytest.raises(DataError, match="no row"):
        read_prompts(write("[]"))
    with pytest.raises(DataError, match="line 1: .*foo") as caught:
        read_prompts(write('{"foo": 1}\n' * 7))
    assert "none of 7 rows" in caught.value.what and "and 2 more" in caught.value.what
    with pytest.raises(ParameterError, match="negative"):
        read_prompts(write('"a"'), limit=-1)


def test_hub_data_sets_are_read_by_name_subset_and_split(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        if name == "no/such":
            raise FileNotFoundError("not there")
        return [{"prompt": "a"}, {"prompt": None, "conversations": [{"from": "human", "value": "b"}]}]

    monkeypatch.setitem(__import__("sys").modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for source in ("hf:o/n", "hf:o/n:test", "hf:o/n:sub:test"):
        assert sorted(p.id for p in read_prompts(source).rows) == ["n-1", "n-2"]
    assert asked == [("o/n", None, "train"), ("o/n", None, "test"), ("o/n", "sub", "test")]
    with pytest.raises(DataError, match="not there"):
        read_prompts("hf:no/such")
    with pytest.raises(DataError, match="not a data set"):
        read_prompts("hf:o/n:")


WORDS = st.sampled_from(
    "messages conversations turns prompt instruction input role from content value user human gpt tool system request body response "
    "choices tools tool_calls function arguments name type text image id category".split()
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | WORDS | st.just("[{"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_no_json_row_gets_past_with_anything_but_messages_or_a_reason(row):
    try:
        prompt = read_row(row)
    except Unusable:
        return
    assert all(isinstance(m["content"], str) and m["role"] in ("user", "assistant", "system", "tool") for m in prompt.messages)
    assert all(chunk[-1]["role"] in ("user", "tool") for chunk in prompt.turns())


def test_a_file_damaged_anywhere_still_accounts_for_every_line(write):
    rows = [json.dumps({"id": f"r{n}", "prompt": "x" * n + "\n"}) for n in range(1, 9)]
    draw = random.Random(0)
    raw = "\n".join(rows).encode()
    for _ in range(100):
        at = draw.choice([i for i, byte in enumerate(raw) if byte != ord("\n")])
        found = read_prompts(write(raw[:at] + bytes([draw.choice(b'{}[]",:\\ \xff')]) + raw[at + 1 :]))
        assert found.counts["found"] == len(rows) and found.counts["taken"] >= len(rows) - 1
