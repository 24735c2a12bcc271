import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from chain_data import drawn
from matplotlib._pylab_helpers import Gcf

from helpers import acceptance, canvas, costs, plots

RECORDS = drawn(8, [0.5, 0.4], seed=0, steps=6)
POSITIONS = acceptance.by_position(RECORDS)
OVERALL = acceptance.accept_length(RECORDS)
COSTS = costs.Costs(10, 1, ((1, 10), (4, 12)))
MODEL = costs.speedup_model([0.5, 0.4], COSTS)
ATTENTION = [
    {"implementation": name, "tokens": tokens, "seconds": tokens / 1000, "bytes": tokens * 2**20}
    for name in ("fast", "sdpa", "somebody_else")
    for tokens in (256, 1024)
]
ATTENTION.append({"implementation": "simple_flex_attention", "tokens": 256, "seconds": None, "bytes": None})
STEPS = list(range(1, 41))
CURVES = [[5 - 0.1 * s + j for s in STEPS] for j in range(2)]
HELD_OUT = [{"step": 20, "accept_length": 1.5}, {"step": 40, "accept_length": 1.4}]

FIGURES = {
    "sequence_lengths": lambda: plots.sequence_lengths([30, 50, 90], [10, 20, 60], limit=128),
    "answer_lengths": lambda: plots.answer_lengths({"writing": [5, 9, 12], "coding": [20, 30]}, limit=40),
    "coverage": lambda: plots.coverage([1024, 4096, 8192], [0.7, 0.9, 0.95], [2.1, 2.9, 3.2], 4096, k=3, tokens=900),
    "attention_costs": lambda: plots.attention_costs(ATTENTION),
    "training_curves": lambda: plots.training_curves(STEPS, CURVES, CURVES, [1e-3] * 40, HELD_OUT, 20, k=3),
    "acceptance_by_position": lambda: plots.acceptance_by_position({"speculative": POSITIONS}, [0.6, 0.5]),
    "by_category": lambda: plots.by_category(acceptance.by_category(RECORDS), OVERALL),
    "by_context": lambda: plots.by_context(acceptance.by_context(RECORDS)),
    "misses": lambda: plots.misses(acceptance.misses(RECORDS)),
    "misses by category": lambda: plots.misses(acceptance.misses(RECORDS, "category")),
    "k_sweep": lambda: plots.k_sweep(
        [{"k": k, "value": 1.5 + k / 10, "speedup": 1.2} for k in (1, 2, 3)], MODEL, prompts=8, source="replayed"
    ),
    "speeds": lambda: plots.speeds([{"method": "plain", "tokens_per_second": 20.0}, {"method": "speculative", "tokens_per_second": 30.0}]),
    "time_split": lambda: plots.time_split([{"k": 1, "draft": 0.002, "verify": 0.04, "overhead": 0.001}]),
    "cost_model": lambda: plots.cost_model({"here": MODEL, "node": MODEL}, {1: 1.2}),
}


def texts(figure):
    """All words of a figure: legends, titles and bar labels."""
    return " | ".join(t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text())


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws_and_names_its_axes(name):
    figure = FIGURES[name]()
    figure.canvas.draw()
    for ax in figure.axes:
        assert ax.get_ylabel(), f"{name}: y axis without a name"
        assert ax.get_xlabel() or ax.get_shared_x_axes().get_siblings(ax) != [ax], f"{name}: x axis without a name"
        assert ax.has_data() or ax.get_lines() or ax.patches
    assert any(ax.get_title(loc="left") for ax in figure.axes)
    assert figure.get_size_inches()[0] * figure.dpi <= 1100  # fits the column of a page


def test_every_figure_of_the_module_is_tried_here():
    public = {n for n, f in vars(plots).items() if callable(f) and getattr(f, "__module__", "") == plots.__name__ and not n.startswith("_")}
    assert public == {name.split(" ")[0] for name in FIGURES}


def test_figures_show_themselves_and_stay_out_of_pyplot():
    figure = FIGURES["speeds"]()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert Gcf.get_all_fig_managers() == []  # nothing for the inline backend to show a second time, nothing kept open


def test_a_method_keeps_its_colour_and_strangers_take_free_ones():
    names = ["sdpa", "new one", "fast", "other one"]
    found = canvas.colours(names)
    assert found["fast"] == canvas.COLOURS["fast"] and found["sdpa"] == canvas.COLOURS["sdpa"]
    assert len(set(found.values())) == 4
    decoding = ["plain", "generate", "prompt lookup", "untrained", "speculative", "predicted", "replayed", "served"]
    assert len({canvas.COLOURS[name] for name in decoding}) == len(decoding)


def test_bars_of_categories_are_their_values_with_their_intervals():
    rows = [
        {"category": "a", "value": 2.0, "low": 1.5, "high": 2.7, "n": 4, "steps": 40},
        {"category": "b", "value": 1.2, "low": None, "high": None, "n": 1, "steps": 9},
    ]
    figure = plots.by_category(rows, OVERALL)
    ax = figure.axes[0]
    assert [bar.get_width() for bar in ax.patches] == [2.0, 1.2]
    bars = [line for line in ax.collections if isinstance(line, matplotlib.collections.LineCollection)][0].get_segments()
    np.testing.assert_allclose([s[:, 0] for s in bars], [[1.5, 2.7], [1.2, 1.2]])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a (n = 4)", "b (n = 1)"]
    assert str(OVERALL) in texts(figure)


def test_predicted_stands_beside_measured_as_the_running_product():
    figure = FIGURES["acceptance_by_position"]()
    heights = [[round(bar.get_height(), 6) for bar in ax.patches] for ax in figure.axes]
    assert heights[0][2:] == [0.6, 0.3]  # 0.6 and 0.6 · 0.5
    assert heights[1][2:] == [0.6, 0.5]
    assert heights[0][:2] == [round(r["rate"], 6) for r in POSITIONS]
    assert f"{POSITIONS[0]['drafted']} steps" in texts(figure)


def test_shares_of_misses_fill_each_bar():
    rows = acceptance.misses(RECORDS)
    figure = FIGURES["misses"]()
    widths = np.array([bar.get_width() for bar in figure.axes[0].patches]).reshape(3, len(rows))
    np.testing.assert_allclose(widths.sum(0), 1)


def test_the_chosen_size_and_the_kept_checkpoint_are_marked_with_their_figures():
    assert "chosen: 4,096 (90.0%, ceiling 2.90)" in texts(FIGURES["coverage"]())
    assert "kept: step 20, 1.50" in texts(FIGURES["training_curves"]())


def test_what_did_not_run_is_left_out_of_the_attention_figure():
    words = texts(FIGURES["attention_costs"]())
    assert "somebody_else" in words and "simple_flex_attention" not in words


def test_speed_bars_say_the_ratio_to_plain():
    assert "30.0 (1.50×)" in texts(FIGURES["speeds"]())


def test_smoothing_keeps_level_and_ends():
    np.testing.assert_allclose(plots._smooth([2.0] * 100), 2.0)
    ramp = np.arange(100.0)
    np.testing.assert_allclose(plots._smooth(ramp)[10:-10], ramp[10:-10])  # a symmetric mean leaves a line where it was
