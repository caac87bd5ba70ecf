"""The lines of the figures have the numbers of the ledger."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from statistics import mean
from typing import Any, cast

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from made_ledger import HIGH, SCALE, ledger
from quacklr.lab.config import Config
from quacklr.lab.figures import RC
from quacklr.lab.ledger import Entry
from quacklr.lab.methods import Default, Method, Quack
from quacklr.lab.report.command import draw
from quacklr.lab.report.figures import (
    FIGURES,
    critical_rate,
    heatmaps,
    interventions,
    limit_y,
    logits,
    norms,
    positive,
    sensitivity,
)
from quacklr.lab.report.forest_figure import VERDICT_COLOURS, forest
from quacklr.lab.report.hero import hero
from quacklr.lab.report.markdown import table
from quacklr.lab.report.size_figure import sizes
from quacklr.lab.report.stress_figure import stress
from quacklr.lab.report.style import COLOURS, hide_empty_panels
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.comparison import MARGIN
from quacklr.lab.studies.limits import STRESSED
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.names import METHOD_NAMES, PAPER_METHODS, readable_number, settings_of
from quacklr.lab.studies.questions import CONSTANT_TAUS, DECADES, QUACK_TAUS, runs_of
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.sizes import WIDTHS
from quacklr.lab.sweep.sweep import missing
from swept_runs import made

WITH_MUON = {method: name for method, name in METHOD_NAMES.items() if name != "AdamW^2"}
"""The methods that the studies run with Muon."""


def by_size(config: Config) -> tuple[float, float, float]:
    """The default's largest logit is 100 at lr 0.1 * 64 / width; QuacK and the others keep a loss of 2.5."""
    critical = 0.1 * 64 / config.shape.d_model
    default = isinstance(config.method, Default)
    return (3.5 if default else 2.5, 100 * (config.optimizer.lr / critical) ** 2 if default else 20.0, 0.1)


def runs_of_sizes(widest: int = 512) -> list[Entry]:
    """All runs of the study of sizes with two seeds, up to a width."""
    known: dict[str, Entry] = {}
    while todo := [c for c in missing(runs_of("sizes", SCALE, known, 2), known) if c.shape.d_model <= widest]:
        known |= {(entry := made(config, *by_size(config))).key: entry for config in todo}
    return list(known.values())


def runs_of_stress(entries: list[Entry]) -> list[Entry]:
    """All runs of the study of stress with two seeds, and those that it selects by: the loss grows with lr."""
    known = {entry.key: entry for entry in entries}
    while todo := missing(runs_of("stress", SCALE, known, 2), known):
        for config in todo:
            entry = made(config, 2.0 + config.optimizer.lr * (1 + isinstance(config.method, Default)), 20.0, 0.1)
            known[entry.key] = entry
    return list(known.values())


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return ledger(budgets=True) + runs_of_sizes()


@pytest.fixture(scope="module")
def results(entries: list[Entry]) -> Results:
    return Results(entries, SCALE)


@pytest.fixture(scope="module")
def all_results(entries: list[Entry]) -> Results:
    """With the runs of the study of stress too, which change what is selected."""
    return Results(runs_of_stress(entries), SCALE)


def line(axes: Any, label: str) -> Any:
    (found,) = [each for each in axes.lines if each.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def mean_curve(results: Results, attention: str, method: Any, *names: str) -> dict[float, Any]:
    runs = results.best(attention, method, HIGH).runs.values()
    return {step: mean(dict(run.curve(*names))[step] for run in runs) for step, _ in next(iter(runs)).curve(*names)}


def test_a_curve_is_the_mean_over_seeds_and_its_band_their_range(results: Results) -> None:
    panel: Any = interventions(results).axes[6]
    assert panel.get_title() == "MLA, lr 0.1"
    expected = mean_curve(results, "mla", Quack, "val_loss")
    assert line(panel, "QuacK") == (list(expected)[1:], pytest.approx(list(expected.values())[1:]))
    band: Any = panel.collections[PAPER_METHODS.index(Quack)].get_paths()[0].vertices
    finals = [run.result["val_loss"] for run in results.best("mla", Quack, HIGH).runs.values()]
    at_the_end = [y for x, y in band if x == SCALE.base.training.steps]
    assert (min(at_the_end), max(at_the_end)) == pytest.approx((min(finals), max(finals)))


def test_final_losses_stand_over_their_learning_rates_for_every_method(results: Results) -> None:
    figure = interventions(results)
    for method, name in WITH_MUON.items():
        rates, losses = line(figure.axes[7], name)
        assert rates == list(SCALE.rates)
        runs = results.best("mla", method, HIGH).runs.values()
        assert losses[-1] == pytest.approx(mean(run.result["val_loss"] for run in runs))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(WITH_MUON.values())


@pytest.mark.parametrize(
    ("ends", "limits"), [([2.0, 1.0], (0.95, 2.2)), ([1.0, 9.0], (0.95, 2.6)), ([3.0], (2.95, 3.2))]
)
def test_an_axis_has_the_ends_of_all_lines_but_those_far_above(ends: list[float], limits: tuple[float, float]) -> None:
    axes = Figure().subplots()
    for end in ends:
        axes.plot([0, 1], [50.0, end])
    limit_y(axes)
    assert axes.get_ylim() == pytest.approx(limits)


def test_a_logit_on_a_logarithmic_scale_is_positive_and_what_is_no_number_is_large() -> None:
    assert [positive(value) for value in (-2.0, 0.0, 5.0, None)] == [0.001, 0.001, 5.0, 1e9]


def test_a_bar_in_a_cell_does_not_end_the_cell() -> None:
    assert table(("mean |change|", "x"), [("a|b", "1")]) == "| mean /change/ | x |\n| --- | --- |\n| a/b | 1 |\n"


def test_figure_1_has_the_papers_four_lines(results: Results) -> None:
    (panel,) = critical_rate(results).axes
    assert len(panel.lines) == 4
    _, losses = line(panel, "the same rate for queries and keys")
    assert losses == pytest.approx(list(mean_curve(results, "mha", Default, "val_loss").values())[1:])


def test_figure_3_has_every_tau_and_the_default_as_a_constant_tau_of_1(results: Results) -> None:
    right = norms(results).axes[1]
    assert line(right, "QuacK, spectral")[0] == list(DECADES)
    assert line(right, "QuacK, Frobenius")[0] == list(QUACK_TAUS)
    taus, losses = line(right, "constant tau")
    assert taus == list(CONSTANT_TAUS)
    defaults = results.best("mha", Default, HIGH).runs.values()
    assert losses[CONSTANT_TAUS.index(1.0)] == pytest.approx(mean(run.result["val_loss"] for run in defaults))


def test_figure_4_follows_one_head(results: Results) -> None:
    left, right = logits(results).axes
    assert left.get_title() == "MLA, lr 0.1, layer 1, head 1"
    runs = list(results.best("mla", Quack, HIGH).runs.values())
    for panel, name in ((left, "max"), (right, "step_change")):
        expected: Any = {step: table[1][1] for step, table in runs[0].curve("logits", name) if step}
        assert line(panel, "QuacK") == (list(expected), pytest.approx(list(expected.values())))


def test_figure_5_has_a_bar_for_every_method(results: Results) -> None:
    left, right = sensitivity(results).axes
    for panel, others in ((left, {"absorbed QK norm"}), (right, set[str]())):
        names = [name for name in WITH_MUON.values() if name not in others]
        assert [tick.get_text() for tick in panel.get_xticklabels()] == names
    first: Any = left.patches[0]
    # 3.01 at the lowest rate, 5.3 in the middle, 5 at the highest
    assert first.get_height() == pytest.approx((3.01 + 5.3 + 5.0) / 3 - 3.01)


def test_figure_6_shows_every_layer_and_head(results: Results) -> None:
    panel = next(axes for axes in heatmaps(results).axes if axes.get_title() == "MHA, default")
    table: Any = panel.images[0].get_array()
    assert table.tolist() == [pytest.approx(row) for row in [[1250.025, 2500.05], [2500.05, 5000.1]]]


def test_the_hero_has_logits_and_losses_with_the_numbers_at_the_end(results: Results) -> None:
    left, right = hero(results).axes
    assert (left.get_yscale(), right.get_yscale()) == ("log", "linear")
    for place, method in enumerate((Default, Quack)):
        losses = mean_curve(results, "mla", method, "val_loss")
        drawn: Any = right.lines[place]
        assert list(drawn.get_ydata()) == pytest.approx(list(losses.values())[1:])
        runs = results.best("mla", method, HIGH).runs.values()
        at_the_end = [max(max(row) for row in list(run.curve("logits", "max"))[-1][1]) for run in runs]
        largest: Any = left.lines[place]
        assert largest.get_ydata()[-1] == pytest.approx(mean(at_the_end))
        labels = [panel.texts[place].get_text().split("\n") for panel in (left, right)]
        final = mean(run.result["val_loss"] for run in runs)
        assert labels == [
            [METHOD_NAMES[method], readable_number(mean(at_the_end))],
            [METHOD_NAMES[method], f"{final:.3f}"],
        ]


def test_the_text_of_the_hero_is_large_enough_for_a_phone(results: Results) -> None:
    figure = hero(results)
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in axes.findobj(Text) if text.get_text()]
    smallest = min(float(text.get_fontsize()) for text in texts)
    assert smallest / 72 * 360 / figure.get_figwidth() >= 10, "pixels, at a width of 360"


def test_a_hero_without_measurements_of_a_method_is_not_drawn(results: Results) -> None:
    some = [
        replace(entry, history=[]) if isinstance(entry.config.method, Quack) else entry for entry in results.entries
    ]
    with pytest.raises(NotRun, match="no run of QuacK .* was measured"):
        hero(Results(some, SCALE))


def test_stress_has_the_losses_at_multiples_of_the_best_learning_rate(all_results: Results) -> None:
    axes, _ = stress(all_results).axes
    for method in STRESSED:
        best = all_results.planned_best("mla", method).cell.lr
        times, shown = line(axes, METHOD_NAMES[method])
        assert times == [1, 2, 4, 8]
        assert shown[1:] == pytest.approx([2.0 + n * best * (1 + (method is Default)) for n in (2, 4, 8)], abs=1e-3)


@pytest.mark.parametrize("name", FIGURES)
def test_a_legend_is_within_its_figure(name: str, all_results: Results) -> None:
    figure = FIGURES[name](all_results)
    hide_empty_panels(figure)
    figure.savefig(BytesIO())
    for legend in figure.legends:
        extent = legend.get_window_extent()
        assert extent.x0 >= 0
        assert extent.x1 <= figure.bbox.width


def test_every_method_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(METHOD_NAMES.values())
    assert len({to_hex(colour) for colour in COLOURS.values()}) == len(METHOD_NAMES)


def test_figures_are_written_in_three_formats_and_the_same_twice(all_results: Results, tmp_path: Path) -> None:
    drawn = draw(FIGURES, all_results, tmp_path / "one")
    draw(FIGURES, all_results, tmp_path / "two")
    assert [figure.name for figure in drawn] == list(FIGURES)
    starts = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}
    for name in FIGURES:
        for kind, start in starts.items():
            one, two = ((tmp_path / way / f"{name}.{kind}").read_bytes() for way in ("one", "two"))
            assert one.startswith(start)
            assert one == two, f"{name}.{kind}"
    titles = {figure.name: figure.title for figure in drawn}
    first = "Figure 1. Is the learning rate of queries and keys the critical one?"
    assert titles["figure-1-critical-rate"] == first
    assert drawn[0].svg.startswith("<?xml")
    assert "figure.dpi" not in RC, "sizes are the figures' own"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_without_runs_is_left_out_and_one_with_some_shows_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotRun):
        FIGURES[name](Results([], SCALE))
    some = [entry for entry in ledger() if entry.config.training.seed < 2 and entry.config.optimizer.lr == HIGH]
    if name not in ("figure-5-sensitivity", "figure-7-sizes", "figure-9-stress"):  # they need several learning rates
        assert FIGURES[name](Results(some, SCALE)).axes
    assert draw({name: FIGURES[name]}, Results([], SCALE), tmp_path) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (Default(), ""),
        (Quack(), "tau 1"),
        (Quack(0.3, norm="spectral"), "tau 0.3, norm spectral"),
        (Quack(floor=0.5, literal=True), "tau 1, floor 0.5, literal"),
    ],
)
def test_the_settings_of_a_method_are_its_first_and_those_that_are_not_at_their_default(
    method: Method, text: str
) -> None:
    assert settings_of(method) == text


def test_the_figure_of_claims_has_a_row_for_each_claim_about_losses(results: Results) -> None:
    claims = {claim.name: claim for claim in claim_results(results)}
    figure = forest(results)
    hide_empty_panels(figure)
    figure.draw_without_rendering()
    (axes,) = cast(Any, figure.axes)
    (right,) = axes.child_axes
    assert right.get_visible()
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert {"a", "f", "sigma-Reparam", "tuned"} <= set(names)
    assert not {"i", "j", "cosine"} & set(names), "nothing about logits or times, and nothing that was not run"
    row, rival = names.index("sigma-Reparam"), claims["sigma-Reparam"].evidence[0]
    assert right.get_yticklabels()[row].get_text() == "MHA: sigma-Reparam (scope all) - QuacK (tau 1)"
    lines = [line for line in axes.lines if list(line.get_ydata()) == [row, row]]
    assert [list(line.get_xdata()) for line in lines] == [[rival.low, rival.high]]
    assert {line.get_color() for line in lines} == {VERDICT_COLOURS["holds"]}
    (limit,) = [line for line in axes.lines if list(line.get_ydata()) == [row - 0.35, row + 0.35]]
    assert list(limit.get_xdata()) == [MARGIN, MARGIN]
    (seeds,) = [each for each in axes.collections if len(each.get_offsets()) and each.get_offsets()[0][1] == row + 0.28]
    assert sorted(x for x, _ in seeds.get_offsets()) == pytest.approx(sorted(rival.differences))


def test_the_figure_of_sizes_shows_the_critical_rates_their_power_law_and_the_losses_above(results: Results) -> None:
    left, right = cast(Any, sizes(results).axes)
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["width^-1.00"]
    widths, rates = left.lines[0].get_data()
    assert list(widths) == list(WIDTHS.values())
    assert list(rates) == pytest.approx([0.1 * 64 / width for width in WIDTHS.values()], rel=1e-3)
    named = [each for each in right.lines if not each.get_label().startswith("_")]
    assert [each.get_label() for each in named] == ["default", "QuacK", "budget", "QK norm"]
    assert [set(each.get_ydata()) for each in named] == [{3.5}, {2.5}, {2.5}, {2.5}]
    texts = [text.get_text().split("\n") for text in right.get_xticklabels()]
    rates = {int(width): lr for width, _, lr in texts}
    joined = [list(map(int, each.get_xdata())) for each in right.lines if each.get_color() == named[0].get_color()]
    assert sorted(width for widths in joined for width in widths) == list(WIDTHS.values())
    assert len(joined) == len(set(rates.values())) > 1
    assert all(len({rates[width] for width in widths}) == 1 for widths in joined), "only losses at one learning rate"


def test_a_critical_rate_that_is_known_from_the_tuning_seed_only_is_a_circle(results: Results) -> None:
    largest = [entry for entry in results.ledger if entry.config.shape.d_model == 512]
    judged = [entry for entry in largest if entry.config.training.seed and entry.config.optimizer.lr < 0.1]
    assert judged
    left, right = cast(Any, sizes(Results([each for each in results.ledger if each not in judged], SCALE)).axes)
    (circle,) = [each for each in left.collections if each.get_label() == "seed 0 only"]
    assert circle.get_offsets().tolist() == [pytest.approx([512, 0.1 * 64 / 512], rel=1e-3)]
    assert list(left.lines[0].get_xdata()) == [64, 128, 256], "it is not among the others, nor fitted"
    assert any(512 in each.get_xdata() for each in right.lines)


def test_the_figure_of_sizes_shows_the_sizes_that_were_run() -> None:
    left, _ = cast(Any, sizes(Results(runs_of_sizes(widest=128), SCALE)).axes)
    assert list(left.lines[0].get_xdata()) == [64, 128]
