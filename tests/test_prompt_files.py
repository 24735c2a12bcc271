"""The prompts that come with the workbook: broad, balanced, and kept apart."""

import re
from collections import Counter

from helpers.conversations import read_prompts
from helpers.preflight import overlap

TRAIN = read_prompts("data/prompts/train.jsonl")
EVALUATION = read_prompts("data/prompts/evaluation.jsonl")

# The evaluation prompts are about these; the training prompts had to leave them alone.
TOPICS = (
    "lighthouse|beekeep|honeybee|glacier|sourdough|violin|chess|origami|volcano|coral reef|submarine|cheese|bicycle|owls?|tides?"
    "|earthquake|perfume|kites?|mushroom|penguin|pottery|comets?|opera|cartograph|photograph|libraries|deserts?"
)


def asked(prompt):
    return " ".join(m["content"] for m in prompt.messages if m["role"] == "user")


def test_every_row_can_be_used():
    assert TRAIN.rejected == EVALUATION.rejected == []
    assert len(TRAIN.rows) >= 800


def test_evaluation_is_balanced_over_eight_categories_at_any_multiple_of_eight():
    ordered = sorted(EVALUATION.rows, key=lambda p: p.line)
    for n in (8, 16, 96, 160):
        assert set(Counter(p.category for p in ordered[:n]).values()) == {n // 8}


def test_training_is_broad():
    categories = Counter(p.category for p in TRAIN.rows)
    assert len(categories) >= 15 and max(categories.values()) / len(TRAIN.rows) < 0.2
    assert sum(len(p.turns()) > 1 for p in TRAIN.rows) >= 80
    assert sum(p.messages[0]["role"] == "system" for p in TRAIN.rows) >= 50
    lengths = sorted(len(asked(p).split()) for p in TRAIN.rows)
    assert lengths[len(lengths) // 10] <= 12 and lengths[-len(lengths) // 10] >= 70
    openings = Counter(" ".join(asked(p).split()[:4]).lower() for p in TRAIN.rows)
    assert max(openings.values()) <= 6  # no template multiplied by topics


def test_training_and_evaluation_share_no_prompt_and_no_run_of_eight_words():
    table = overlap(TRAIN.rows, EVALUATION.rows)
    assert not table["exact"].any() and table["share"].max() == 0


def test_training_leaves_the_evaluations_topics_alone():
    found = {p.id: m.group() for p in TRAIN.rows if (m := re.search(rf"\b({TOPICS})\b", asked(p), re.I))}
    assert found == {}
    hits = sum(bool(re.search(rf"\b({TOPICS})", asked(p), re.I)) for p in EVALUATION.rows)
    assert hits > len(EVALUATION.rows) / 2  # the list is about these prompts, or the first assertion means nothing
