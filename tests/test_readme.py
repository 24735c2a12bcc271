"""README's figures are the committed run's, to the digit."""

import json
import re

import pytest

from helpers.params import ROOT, STAGES

README = (ROOT / "README.md").read_text(encoding="utf-8")
SUMMARY = json.loads((ROOT / "rendered" / "smollm2" / "summary.json").read_text(encoding="utf-8"))

RESULTS = SUMMARY["results"][STAGES[4]]


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


@pytest.mark.parametrize(
    "expected",
    [
        f"accept length **{SUMMARY['accept_length']:.3f}**",
        "95 % interval {:.2f} to {:.2f}, {} prompts".format(*SUMMARY["accept_length_interval"], RESULTS["prompts"]),
        f"**{SUMMARY['speedup']:.2f} times** as fast",
        f"(K = {RESULTS['speedup_k']})",
        f"{minutes(SUMMARY['seconds_total'])} minutes",
    ],
)
def test_the_measured_result_stands_in_the_readme(expected):
    assert expected in " ".join(README.split())


@pytest.mark.parametrize("stage", STAGES)
def test_minutes_of_each_notebook_stand_in_the_table(stage):
    row = next(line for line in README.splitlines() if f"rendered/smollm2/{stage}.ipynb" in line)
    assert row.rstrip(" |").rsplit("|", 1)[1].strip() == minutes(SUMMARY["seconds"][stage])


def test_every_file_the_readme_links_to_exists():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
