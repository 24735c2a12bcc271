import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from chain_data import record
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import pages
from helpers.acceptance import Estimate
from helpers.errors import DataError

EOT = 256


class Bytes:
    """A tokenizer whose tokens are bytes, and 256 its end-of-turn: characters beyond ASCII take several tokens."""

    all_special_ids = [EOT]

    def decode(self, ids, skip_special_tokens=False):
        parts, run = [], bytearray()
        for i in [*ids, None]:
            if i is None or i == EOT:
                parts.append(run.decode(errors="replace"))
                run = bytearray()
                if i == EOT and not skip_special_tokens:
                    parts.append("<|im_end|>")
            else:
                run.append(i)
        return "".join(parts)


class Page(HTMLParser):
    """Text, tags, titles and styles of a page; fails on tags that are not closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.titles, self.styles, self.kinds, self.text = [], [], [], [], [], ""
        self.feed(page.data)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        assert not any(name.startswith("on") for name in given)
        self.tags.append(tag)
        self.styles.append(given.get("style", ""))
        if "title" in given:
            self.titles.append(given["title"])
            self.kinds.append(given["class"])
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def one_by_one(text, **extra):
    """A record that emits the bytes of `text` by steps without drafts, one token each."""
    tokens = list(text.encode())
    return record("a", [(0, 0, 1, "")] * (len(tokens) - 1), tokens=tokens, guesses=[[]] * (len(tokens) - 1), **extra)


def test_model_output_stays_text():
    evil = "<script>alert('x')</script> & \"q\""
    page = Page(pages.token_view(Bytes(), one_by_one(evil, category="<b>")))
    assert "script" not in page.tags and evil in page.text
    for shown in (pages.table([{"<i>": evil}], evil), pages.example_box(evil, evil), pages.result_table({evil: evil})):
        page = Page(shown)
        assert "script" not in page.tags and "i" not in page.tags
        assert page.text.count(evil) >= 2 - ("<i>" in page.text) and evil in page.text
    page = Page(pages.checks([(evil, False, evil, evil)]))
    assert "script" not in page.tags and page.text.count(evil) == 3


def test_a_guess_cannot_leave_its_title():
    (quote,) = b'"'
    shown = record("a", [(1, 0, 1, "wrong")], tokens=[65, 66], guesses=[[quote]])
    page = Page(pages.token_view(Bytes(), shown))
    assert any('guessed ‘"’' in title for title in page.titles)


def test_dollars_and_backslashes_are_not_typeset_as_formulas():
    for shown in (pages.table([{"a": "$x$ \\(y\\)"}]), pages.example_box("a", "$x$ \\(y\\)"), pages.token_view(Bytes(), one_by_one("$x$"))):
        assert not re.search(r"\$[^<]", shown.data) and not re.search(r"\\[^<]", shown.data)
        assert "$x$" in Page(shown).text


VIEW = record(
    "a7",
    [(3, 3, 4, ""), (3, 1, 2, "outside"), (2, 0, 1, "wrong"), (0, 0, 1, ""), (3, 3, 2, "")],
    category="coding",
    tokens=[*b"Hello wor\n", EOT],  # prefill's, then 4, 2, 1, 1 and 2 by the steps; the last is cut at end-of-turn
    guesses=[[*b"ell"], [*b" xy"], [*b"ab"], [], [10, EOT, 65]],
)


def test_each_token_is_marked_for_what_happened_to_it():
    page = Page(pages.token_view(Bytes(), VIEW))
    # H | ell o | _ w (x refused) | o (a refused) | r (nothing drafted) | \n <end> (two of three accepted, then cut)
    wanted = ["prefill", *["accepted"] * 3, "bonus", "accepted", "corrected", "corrected", "bonus", "accepted", "accepted"]
    assert page.kinds == wanted
    assert (
        page.titles[6]
        == "step 2, position 2: the draft guessed ‘x’ (the verifier's token is outside the draft vocabulary); then ‘y’, not used"
    )
    assert page.titles[7] == "step 3, position 1: the draft guessed ‘a’ (wrong token); then ‘b’, not used"
    assert page.titles[1] == "step 1, position 1: accepted" and page.titles[4] == "step 1: all 3 guesses accepted"
    assert page.titles[8] == "step 4: nothing was drafted"
    assert "coding · a7 · 2.00 tokens per step over 5 steps" in page.text
    for meaning, _ in pages.KINDS.values():
        assert meaning in page.text  # the legend


def test_a_step_cut_after_its_accepted_tokens_has_neither_bonus_nor_corrected_token():
    cut = record("a", [(3, 2, 2, ""), (2, 2, 2, "")], tokens=[*b"abcde"], guesses=[[*b"bcx"], [*b"de"]])
    assert Page(pages.token_view(Bytes(), cut)).kinds == ["prefill", *["accepted"] * 4]


def test_line_breaks_and_special_tokens_are_visible():
    page = pages.token_view(Bytes(), VIEW)
    assert "⏎<br>" in page.data
    special = next(s for s in page.data.split("<span ") if "&lt;|im_end|&gt;" in s)
    assert "border: 1px solid" in special


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=20))
def test_the_pieces_of_an_answer_are_its_text(text):
    tokens = list(text.encode())
    pieces = pages.pieces(Bytes(), tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == Bytes().decode(tokens)


def test_a_character_of_several_tokens_shows_once_where_it_is_complete():
    assert pages.pieces(Bytes(), list("é🙂".encode())) == ["", "é", "", "", "", "🙂"]
    assert pages.pieces(Bytes(), [65, 0xF0, 0x9F]) == ["A", "", "\ufffd"]  # the answer ends inside one
    bad = "\ufffd"  # bytes that are no text are held for four tokens, no longer
    assert pages.pieces(Bytes(), [0x80] * 5 + [65]) == ["", "", "", bad * 4, "", bad + "A"]


def test_guesses_must_fit_the_record():
    with pytest.raises(DataError, match="guesses do not fit"):
        pages.token_view(Bytes(), VIEW, [[1, 2, 3]])
    with pytest.raises(DataError, match="guesses do not fit"):
        pages.token_view(Bytes(), {k: v for k, v in VIEW.items() if k != "guesses"})
    with pytest.raises(DataError, match="12 tokens"):
        pages.token_view(Bytes(), VIEW | {"tokens": VIEW["tokens"] + [1]})


def cells(page):
    return [re.sub("<[^>]+>", "", c) for c in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", page.data)]


def test_tables_write_values_as_a_reader_expects():
    rows = [
        {"name": "a", "n": 48211, "share": 0.25, "low": None, "ok": True},
        {"name": "b", "n": 7, "share": float("nan"), "low": 1.23456, "ok": False},
    ]
    page = pages.table(rows, "Caption", {"share": "{:.1%}"})
    assert cells(page) == ["name", "n", "share", "low", "ok", "a", "48,211", "25.0%", "–", "yes", "b", "7", "–", "1.235", "no"]
    assert "Caption" in Page(page).text
    sides = re.findall(r"<t[hd] style=\"[^\"]*text-align: (\w+)", page.data)
    assert sides == ["left", "right", "right", "right", "left"] * 3  # numbers at the right, their heads too
    assert cells(pages.table(rows, formats={"n": lambda v: f"{v} rows", "low": ".1f"}))[11] == "7 rows"


def test_a_frame_gives_the_same_table_as_its_rows():
    frame = pd.DataFrame({"a_b": [1, 2], "c": [0.5, None]}, index=pd.Index(["x", "y"], name="size"))
    assert cells(pages.table(frame)) == ["size", "a b", "c", "x", "1", "0.5", "y", "2", "–"]


def test_columns_of_later_rows_are_shown_and_no_rows_say_so():
    assert cells(pages.table([{"a": 1}, {"b": 2}])) == ["a", "b", "1", "–", "–", "2"]
    assert "no rows" in Page(pages.table([])).text
    with pytest.raises(DataError, match="formats for shara, but the columns are share"):
        pages.table([{"share": 1}], formats={"shara": ".1f"})


def test_checks_show_what_to_do_only_on_failure_and_require_stops_on_it():
    rows = [
        ("final norm", np.bool_(True), 0.999, "look at A"),
        ("layer ids", np.bool_(False), 0.2, "redo 01"),
        ("served", None, None, "install vLLM"),
    ]
    found = cells(pages.checks(rows))[4:]
    assert found == ["final norm", "✓ passed", "0.999", "", "layer ids", "✗ failed", "0.2", "redo 01", "served", "– not run", "–", ""]
    with pytest.raises(DataError, match="1 of 3 checks failed:\n  - layer ids: 0.2") as error:
        pages.require(rows)
    assert "redo 01" in str(error.value) and "look at A" not in str(error.value)
    pages.require([rows[0], rows[2]])


def test_results_show_estimates_with_their_interval():
    found = cells(pages.result_table({"accept length": Estimate(1.734, 1.65, 1.812, 96, 4000), "speed": 21.5}, formats={"speed": ".1f"}))
    assert found == ["figure", "value", "accept length", "1.73 (1.65 to 1.81, n = 96)", "speed", "21.5"]


def test_styles_are_ones_that_an_untrusted_notebook_keeps():
    """JupyterLab's sanitiser drops <style>, var(), and alpha values without a leading zero."""
    shown = [pages.table([{"a": 1}], "c"), pages.checks([("a", True, 1, "")]), pages.token_view(Bytes(), VIEW), pages.example_box("a", "b")]
    for page in map(Page, shown):
        assert not {"style", "script", "link"} & set(page.tags)
        for style in page.styles:
            assert "var(" not in style and not re.search(r"[ (,]\.\d", style)
