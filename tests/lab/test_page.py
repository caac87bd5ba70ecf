"""The page in a real browser: it shows the numbers of the ledger, and hostile text stays text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from browsers import PATIENCE
from lab_runs import ATTENTIONS, make_corpus, small
from quacklr.lab.config import Config
from quacklr.lab.ledger import Entry, entry_of
from quacklr.lab.methods import Default, QKNorm, Quack
from quacklr.lab.optim import AdamWRecipe
from quacklr.lab.report.page import CLAIMS_FIGURE, PageFigure, overview, page, unusual_options
from quacklr.lab.studies.comparison import Comparison, less
from quacklr.lab.studies.names import describe
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult
from quacklr.lab.sweep.code_version import code_version
from quacklr.lab.train.runner import run

HOSTILE = '</script><script>window.hacked=1</script>"><img src=x onerror="window.hacked=1">{{7*7}}&amp;'
SVG = '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="300" height="200"><path d="M0 0H9"/></svg>'
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
EVIDENCE = (
    ClaimPart(less, Comparison("QuacK - default", -0.5, -0.61, -0.39, (-0.4, -0.5, -0.6), same_within=0.02)),
    ClaimPart(less, Comparison("once", 0.1, -math.inf, math.inf, (0.1,))),
)
FINDINGS = (
    ClaimResult("rivals", "Is soft-capping enough?", "own", "not run", "cpu", "Nobody has looked."),
    ClaimResult("A", "QuacK lowers the loss.", "paper", "holds", "cpu", "By 0.5.", EVIDENCE),
)


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """A real run, and made-up ones of other kinds and endings."""
    folder = tmp_path_factory.mktemp("page")
    config = small(make_corpus(folder), Quack(tau=0.5), ATTENTIONS["mla"])
    run(config, folder / "run")
    real = entry_of(config, folder / "run")
    mha = replace(config, attention=ATTENTIONS["mha"])
    slower = replace(mha, method=Default(), optimizer=AdamWRecipe(lr=0.003))
    diverged = {"status": "diverged", "step": 12, "val_loss": None, "max_logit": 1e30}
    return [
        real,
        replace(real, config=seed(config, 1), result=real.result | {"val_loss": 10.5}),
        replace(real, config=replace(mha, method=QKNorm()), result=real.result | {"val_loss": 9.25, "max_logit": None}),
        Entry(slower, "diverged", "the loss is nan at step 12", diverged, real.history[:2], [3.0, None]),
        Entry(seed(slower, 1), "crashed", "out of memory"),
    ]


def seed(config: Config, number: int) -> Config:
    return replace(config, training=replace(config.training, seed=number))


@dataclass(frozen=True)
class Study:
    """A page on the disk, and what it was made from."""

    browser: Browser
    file: Path
    entries: list[Entry]

    @contextmanager
    def open(self, run: int | None = None, **context: Any) -> Iterator[Page]:
        """The page in a tab of its own, which must neither complain nor ask for anything but the file."""
        wrong: list[str] = []
        address = self.file.as_uri()
        with self.browser.new_context(**context) as tabs:
            tabs.set_default_timeout(PATIENCE)
            tab = tabs.new_page()
            tab.on("console", lambda message: wrong.append(message.text))
            tab.on("pageerror", lambda error: wrong.append(str(error)))
            tab.on("request", lambda request: wrong.extend([request.url] * (not request.url.startswith(address))))
            tab.goto(address if run is None else f"{address}#run={self.entries[run].key}")
            yield tab
            assert wrong == []

    def name(self, number: int) -> str:
        return describe(self.entries[number].config)


def made(browser: Browser, folder: Path, entries: list[Entry], *rest: Any) -> Study:
    path = folder / "page.html"
    path.write_text(page(entries, *rest), encoding="utf-8")
    return Study(browser, path, entries)


@pytest.fixture(scope="module")
def study(browser: Browser, entries: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> Study:
    figures = [PageFigure("loss", "Figure 1", "Lower is better.", SVG), PageFigure(CLAIMS_FIGURE, "All", "", SVG)]
    return made(browser, tmp_path_factory.mktemp("page"), entries, FINDINGS, figures, "A study")


def column(tab: Page, number: int) -> list[str]:
    """The cells of a column, in the rows that are shown."""
    return tab.locator(f"#table tbody tr:visible > :nth-child({number})").all_inner_texts()


def plots(tab: Page) -> Any:
    """The points that plotly has, by title and name of the curve."""
    return tab.locator("#curves figure").evaluate_all(
        """figures => Object.fromEntries(figures.map((figure) => [figure.querySelector("h3").textContent,
        Object.fromEntries(figure.querySelector(".plot").data.map(({name, x, y}) => [name, {x, y}]))]))"""
    )


def heat(tab: Page) -> Any:
    return tab.locator("#heatmap tbody tr").evaluate_all(
        "rows => rows.map((row) => [...row.querySelectorAll('td')].map((cell) => Number(cell.textContent)))"
    )


def test_the_figure_of_the_claims_stands_with_them_and_the_others_in_their_section(study: Study) -> None:
    with study.open() as tab:
        titles = {name: tab.locator(f"#{name} .plate h3").all_inner_texts() for name in ("claims", "figures")}
    assert titles == {"claims": ["All"], "figures": ["Figure 1"]}


def test_the_page_opens_from_disk_without_an_error_or_a_request(study: Study) -> None:
    with study.open() as tab:
        assert tab.title() == "A study"
        assert "5 runs with 2 seeds, of 1 size (2 layers of width 16)" in tab.locator("header").inner_text()
        assert tab.locator("#figures figure img").evaluate("image => image.complete && image.naturalWidth > 100")
        assert tab.locator("#run").is_hidden()


def test_the_papers_claims_come_first_with_their_verdict_in_words_and_their_evidence(study: Study) -> None:
    with study.open() as tab:
        first, second = tab.locator("article").all()
        assert first.inner_text().split("\n\n")[-3:-1] == ["QuacK lowers the loss.", "By 0.5."]
        assert ("holds" in first.inner_text(), "not run" in second.inner_text()) == (True, True)
        first.locator("summary").click()
        rows = first.locator("tbody tr").all_inner_texts()
        assert rows[0].split() == ["QuacK", "-", "default", "holds", "-0.5", "-0.61", "to", "-0.39", "3", "0.1"]
        assert "undecided" in rows[1]
        assert "too few seeds for an interval" in rows[1]
        assert [svg.locator(".ends").count() for svg in first.locator("svg").all()] == [1, 0]
        assert [svg.locator(".seed").count() for svg in first.locator("svg").all()] == [3, 1]
        assert [svg.locator(".same").count() for svg in first.locator("svg").all()] == [1, 0]


def test_a_header_sorts_by_its_column_both_ways_and_runs_without_a_number_stay_last(study: Study) -> None:
    with study.open() as tab:
        header = tab.locator("th", has=tab.get_by_role("button", name="validation loss"))
        numbers = [text for text in column(tab, 8) if text != "-"]
        header.locator("button").click()
        assert column(tab, 8) == [*sorted(numbers, key=float), "-", "-"]
        assert header.get_attribute("aria-sort") == "ascending"
        tab.keyboard.press("Enter")
        assert column(tab, 8) == [*sorted(numbers, key=float, reverse=True), "-", "-"]
        assert header.get_attribute("aria-sort") == "descending"
        assert tab.locator("[aria-sort]").count() == 1


def test_filters_narrow_the_table_and_say_how_many_runs_are_left(study: Study) -> None:
    with study.open() as tab:
        shown = tab.locator("#shown")
        assert shown.inner_text() == "5 of 5 runs"
        tab.get_by_label("Attention").select_option("MLA")
        assert column(tab, 1) == ["MLA"] * 2
        tab.get_by_label("Search").fill("tau 0")  # is not tau 0.5
        assert shown.inner_text() == "0 of 5 runs"
        tab.get_by_label("Search").fill("quack, seed 1")
        assert (column(tab, 6), shown.inner_text()) == (["1"], "1 of 5 runs")
        tab.get_by_role("button", name="Show all").click()
        expect(shown).to_have_text("5 of 5 runs")
        tab.get_by_label("Optimizer, rate").select_option("adamw, lr 0.003")
        assert column(tab, 2) == ["default"] * 2
        tab.get_by_label("Status").select_option("crashed")
        assert [text.split("\n") for text in column(tab, 7)] == [["crashed", "out of memory"]]
        tab.get_by_label("Method").select_option("QK norm")
        assert (column(tab, 1), shown.inner_text()) == ([], "0 of 5 runs")


def test_an_opened_run_draws_the_curves_of_the_ledger(study: Study) -> None:
    real = study.entries[0]
    with study.open(0) as tab:
        drawn = plots(tab)
        assert drawn["Loss"]["training"] == {"x": [*range(1, 37)], "y": real.losses}
        assert [*zip(*drawn["Loss"]["validation"].values(), strict=True)] == [*real.curve("val_loss")]
        logits = {step: max(map(max, table)) for step, table in real.curve("logits", "max")}
        assert drawn["Largest logit"]["all heads"] == {"x": [*logits], "y": [*logits.values()]}
        rates = drawn["Learning rates of heads, relative to the base"]
        assert rates.keys() == real.history[0]["rate"].keys()
        assert rates["uq"]["y"][: len(logits)] == [table[0][0] for _, table in real.curve("rate", "uq")]
        assert tab.locator(".plot svg.main-svg").first.is_visible()
        assert "tau 0.5" in tab.locator("#config").inner_text()


def test_the_slider_shows_every_head_as_the_ledger_has_it(study: Study) -> None:
    with study.open(0) as tab:
        for group, name in (("logits", "max"), ("logits", "step_change"), ("rate", "dq"), ("norm", "uk")):
            tab.locator("#measure").select_option(f"{group}.{name}")
            for place, (step, table) in enumerate(study.entries[0].curve(group, name)):
                tab.locator("#slider").fill(str(place))
                assert tab.locator("#step").inner_text() == str(step)
                assert heat(tab) == table
        tab.locator("#slider").press("ArrowLeft")
        assert heat(tab) == [*study.entries[0].curve("norm", "uk")][-2][1]


def test_a_link_to_a_run_survives_a_reload_and_back_closes_it(study: Study) -> None:
    with study.open() as tab:
        tab.locator("#table tbody tr").nth(4).locator("td").last.click()
        tab.wait_for_url(f"**#run={study.entries[4].key}")
        tab.reload()
        expect(tab.locator("#run-title")).to_have_text(study.name(4))
        tab.go_back()
        expect(tab.locator("#run")).to_be_hidden()
        tab.get_by_role("link", name=study.name(4)).press("Enter")
        expect(tab.locator("#run-title")).to_be_focused()
        assert tab.locator("tr[aria-current=true]").count() == 1
        tab.evaluate("location.hash = 'run=nonsense'")
        tab.get_by_role("heading", name="There is no run nonsense").wait_for()


def test_a_run_that_broke_off_shows_why_and_the_run_opened_before(study: Study) -> None:
    with study.open(3) as tab:
        assert "the loss is nan at step 12" in tab.locator("#run-facts").inner_text()
        assert plots(tab)["Loss"]["training"]["y"] == [3.0, None]
        tab.get_by_role("link", name=study.name(4)).click()
        expect(tab.locator("#run-facts")).to_contain_text("out of memory")
        expect(tab.locator("#run-facts")).to_contain_text(f"opened before: {study.name(3)}")
        before = plots(tab)["Loss"]["validation, dotted run"]
        assert [*zip(*before.values(), strict=True)] == [*study.entries[3].curve("val_loss")]


def test_hostile_text_is_shown_as_text_and_runs_nothing(browser: Browser, entries: list[Entry], tmp_path: Path) -> None:
    config = replace(entries[0].config, training=replace(entries[0].config.training, corpus=HOSTILE))
    history = [row | {"rate": {HOSTILE: row["norm"]["uq"]}} for row in entries[0].history if "norm" in row]
    bad = Entry(config, "crashed", HOSTILE, {}, history, environment={"system": HOSTILE})
    hostile = ClaimPart(less, replace(EVIDENCE[0].comparison, label=HOSTILE))
    finding = ClaimResult(HOSTILE, HOSTILE, "paper", "holds", HOSTILE, HOSTILE, (hostile,))
    study = made(browser, tmp_path, [bad], [finding], [PageFigure(HOSTILE, HOSTILE, HOSTILE, SVG)], HOSTILE)
    claim = (".name", "h4", ".claim .quiet", ".claim > p:nth-of-type(2)", ".evidence tbody th")
    run = ("#table .reason", "#run-facts", "#config", "#measure", ".plot .legendtext >> nth=-1")
    with study.open(0) as tab:
        assert tab.title() == HOSTILE
        for place in ("h1", ".lead", *claim, ".plate h3", "figcaption", *run):
            expect(tab.locator(place), place).to_contain_text(HOSTILE)
        assert tab.evaluate("window.hacked") is None
        assert tab.locator("img").count() == 1
        assert tab.locator("body script").count() == 4  # one run, plotly's text, and our two


def test_nothing_scrolls_sideways_on_a_phone(study: Study) -> None:
    with study.open(0, viewport={"width": 360, "height": 800}) as tab:
        tab.locator("details").evaluate_all("all => all.forEach((each) => { each.open = true })")
        assert tab.evaluate(WIDER) == 0
        assert tab.locator(".box.tall").evaluate("box => box.scrollWidth > box.clientWidth")


def test_the_page_and_its_plots_follow_a_dark_scheme(study: Study) -> None:
    with study.open(3, color_scheme="light") as tab:
        body, curve = tab.locator("body"), tab.locator(".plot path.js-line").first
        ground = body.evaluate("body => getComputedStyle(body).backgroundColor")
        stroke = curve.evaluate("curve => getComputedStyle(curve).stroke")
        tab.emulate_media(color_scheme="dark")
        expect(body).not_to_have_css("background-color", ground)
        expect(curve).not_to_have_css("stroke", stroke)


def test_a_printed_page_has_claims_figures_and_the_whole_table_but_no_controls(study: Study) -> None:
    with study.open(4, viewport={"width": 700, "height": 900}) as tab:
        tab.emulate_media(media="print", color_scheme="dark")
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert tab.locator(".evidence:visible, figure.plate:visible").count() == 3
        assert len(column(tab, 1)) == 5
        for hidden in ("#filters", "nav", "#run"):
            assert tab.locator(hidden).is_hidden(), hidden
        assert tab.evaluate(WIDER) == 0
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        tab.evaluate("dispatchEvent(new Event('afterprint'))")
        assert tab.locator(".evidence").is_hidden()


def test_an_empty_ledger_gives_a_page_that_says_so(browser: Browser, tmp_path: Path) -> None:
    with made(browser, tmp_path, [], [], [], "Nothing").open() as tab:
        tab.goto(f"{tab.url}#run=abc")
        assert "laim" not in tab.locator("body").inner_text(), "the demo has none"
        for said in ("No run has ended yet", "No figure", "The ledger is empty", "There is no run abc"):
            expect(tab.locator("body")).to_contain_text(said)


def test_runs_that_differ_in_an_option_without_a_column_look_different(entries: list[Entry]) -> None:
    config = entries[0].config
    wider = replace(config, shape=replace(config.shape, d_model=32))
    longer = replace(config, training=replace(config.training, steps=50), machine=replace(config.machine, threads=2))
    assert unusual_options([config, wider, config, seed(longer, 3)]) == ["", "d_model 32", "", "steps 50"]
    assert "of 2 sizes (2 layers of width 16; 2 layers of width 32)" in overview([config, wider])


def test_a_run_of_other_code_is_marked(entries: list[Entry]) -> None:
    old, new = (replace(entries[0], environment={"code": code}) for code in ("00000000", code_version()))
    unknown = replace(new, environment={})
    for entry, mark in ((old, "code 00000000"), (unknown, "code not recorded")):
        assert mark in page([entry], [], [], "x")
        assert mark not in page([new], [], [], "x")
    assert f"code {code_version()}" not in page([new], [], [], "x")
