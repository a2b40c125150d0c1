"""A report in a headless browser without a network: every view, filters, tokens, two runs, hostile text; and live."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from made_up_run import WRONG, WRONG_SAMPLES, MadeUp
from shown_rows import write_samples

import colograd.apps.report
from colograd.apps.report import write_report
from colograd.apps.report.serving import Server

ASSETS = Path(colograd.apps.report.__file__).parent / "assets"
SCREENS = pytest.mark.parametrize(("width", "dark"), [(1400, False), (1400, True), (390, False), (390, True)])
VIEWS = ("overview", "time", "completions", "groups", "advisor", "settings")

pytestmark = [
    pytest.mark.skipif(browser.found() is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is installed"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def chrome() -> Iterator[browser.Browser]:
    pytest.importorskip("websockets", reason="the browser is driven over a websocket")
    with browser.Browser() as found:
        yield found


@pytest.fixture
def page(chrome: browser.Browser) -> Iterator[browser.Browser]:
    """A browser page. At its end the console must be empty, and no request may have left the page."""
    chrome.problems.clear()
    chrome.requests.clear()
    yield chrome
    chrome.run("1")  # what is still on its way arrives
    assert chrome.problems == [] and chrome.requests == []


@pytest.fixture(scope="module")
def one(folder: Path) -> str:
    run = MadeUp(steps=40, ranks=2, tools=True, alarms=True).write(folder / "with tools")
    return write_report(run).as_uri()


@pytest.fixture(scope="module")
def two(folder: Path) -> str:
    first = MadeUp(steps=30, seed=1).write(folder / "first")
    second = MadeUp(steps=45, seed=2, learning_rate=1e-6, gain=0.5, ranks=2, tools=True, ended="stopped").write(
        folder / "second"
    )
    return write_report(first, second, out=folder / "two.html").as_uri()


def texts(page: browser.Browser, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)")


def count(page: browser.Browser, selector: str) -> int:
    return page.run(f"document.querySelectorAll({json.dumps(selector)}).length")


def colour(page: browser.Browser, selector: str, name: str) -> list[float]:
    """Red, green and blue of an element's style."""
    return page.run(
        f"getComputedStyle(document.querySelector({json.dumps(selector)})).{name}.match(/[\\d.]+/g).map(Number)"
    )[:3]


def contrast(*colours: list[float]) -> float:
    """Contrast ratio by WCAG, from 1 to 21. Text is readable from 4.5 on."""

    def light(channels: list[float]) -> float:
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(light, colours))
    return (high + 0.05) / (low + 0.05)


def no_wider(page: browser.Browser) -> bool:
    """Whether the page needs no scrolling to the side."""
    return page.run("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_every_view_opens_by_a_click(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    page.open(one, width, dark=dark)
    assert "Entropy collapse" in texts(page, ".alarm-line")[0], "alarms stand at the top"
    shown = {}
    for view in VIEWS:
        page.click(f"[data-view={view}]")
        main = "document.querySelector('#main')"
        page.wait(f"{main}.dataset.view === '{view}' && {main}.innerText.length > 60")
        shown[view] = page.run("document.querySelector('#main').innerText")
        assert no_wider(page), view
    assert "pass@k" in shown["overview"] and "Model FLOP utilisation" in shown["time"]
    assert "optimizer state" in shown["time"] and "Raise max_completion_length" in shown["advisor"]
    assert "learning_rate" in shown["settings"] and "Half of all reward difference" in shown["groups"]


@SCREENS
def test_a_solved_task_is_a_green_note(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    page.open(one, width, dark=dark)
    lines = texts(page, ".alarm-line")
    assert len(lines) == 3 and "Solved" in lines[-1] and "✓" in lines[-1], "after the alarms"
    red, green, blue = colour(page, ".alarm-line[data-severity=note] .icon", "backgroundColor")
    assert green > 1.3 * max(red, blue)
    red, green, blue = colour(page, ".alarm-line[data-severity=note]", "backgroundColor")
    assert green > max(red, blue)


@SCREENS
def test_the_advisors_tab_counts_the_open_alarms(
    page: browser.Browser, one: str, two: str, width: int, dark: bool
) -> None:
    page.open(one, width, dark=dark)
    assert texts(page, "[data-view=advisor]") == ["Advisor 2"], "neither a note nor an alarm that is over"
    assert contrast(colour(page, ".badge", "color"), colour(page, ".badge", "backgroundColor")) > 4.5
    page.open(two, width, dark=dark)
    assert texts(page, "[data-view=advisor]") == ["Advisor"]


@SCREENS
def test_prompts_are_named_by_their_text(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    page.open(one + "#view=groups&step=20", width, dark=dark)
    page.wait("document.querySelectorAll('table.prompts button.open').length === 20")
    names = texts(page, "table.prompts button.open")
    assert all(name.startswith("What is ") for name in names)
    page.click("table.prompts button.open")
    assert texts(page, ".history h4") == names[:1]
    drawing = "[aria-label^='Mean rewards of']"
    page.wait(f"document.querySelector({json.dumps(drawing)})")
    page.run(
        f"((e) => {{ const {{left, top}} = e.getBoundingClientRect(); "
        f"const at = {{bubbles: true, clientX: left + 56, clientY: top + 40}}; "
        f"e.dispatchEvent(new MouseEvent('mousemove', at)); }})(document.querySelector({json.dumps(drawing)}))"
    )
    assert "What is" in texts(page, "#tip")[0]
    assert no_wider(page)


@SCREENS
def test_settings_that_were_set_come_first(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    page.open(one + "#view=settings", width, dark=dark)
    run = MadeUp().start()["run"]
    names = "#main > :first-child table.settings td.name"
    assert texts(page, names) == sorted(run["changed"]), "they alone, at first"
    page.fill("select[aria-label='Which settings']", "all")
    assert texts(page, names) == [*sorted(run["changed"]), *sorted({*run["settings"]} - {*run["changed"]})]
    weights = page.run(f"[...document.querySelectorAll('{names} code')].map((e) => getComputedStyle(e).fontWeight)")
    assert weights == ["700"] * 4 + ["400"] * (len(weights) - 4)
    assert no_wider(page)


@SCREENS
def test_the_worst_completion_is_open_at_first(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    page.open(one + "#view=completions&step=30", width, dark=dark)
    page.wait("document.querySelector('article.one .tokens')")
    rows = "table.list tbody tr:not(.group)"
    rewards = page.run(f"[...document.querySelectorAll('{rows}')].map((r) => r.completion.reward)")
    opened = "[...document.querySelectorAll('tr.chosen')].map((r) => r.completion.reward)"
    assert page.run(opened) == [min(rewards)] and texts(page, ".why-open") == ["The lowest reward"]
    assert page.run("window.scrollY") == 0, "what stands above isn't scrolled away"
    page.click("button.open", rewards.index(max(rewards)))
    assert page.run(opened) == [max(rewards)] and count(page, ".why-open") == 0
    page.click("[aria-label='Next step']")
    page.wait("document.querySelector('#main').innerText.includes('Step 31: 16') && document.querySelector('.tokens')")
    rewards = page.run(f"[...document.querySelectorAll('{rows}')].map((r) => r.completion.reward)")
    assert page.run(opened) == [min(rewards)], "of the next step, too"
    page.click(".detail [aria-label=Close]")
    page.click("[aria-label='Next step']")
    page.wait("document.querySelector('#main').innerText.includes('Step 32: 16')")
    assert count(page, "article.one") == 0, "what was closed stays closed"
    assert no_wider(page)


@SCREENS
def test_numbers_have_their_units(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    page.open(one + "#view=overview&step=20", width, dark=dark)
    units = {"Completion length": "tokens", "Entropy": "nats", "Sampler and trainer": "nats", "pass@k": "%"}
    for title, unit in units.items():
        said = page.run(f"document.querySelector('[aria-label^=\"{title}\"]').ariaLabel")
        assert said.count(f" {unit}") == said.count(",") + 1, said
        place = texts(page, ".card h3").index(f"{title}, {unit}")
        page.run(f"document.querySelectorAll('.card h3')[{place}].scrollIntoView()")
        legend = f"document.querySelectorAll('.card h3')[{place}].closest('.card').querySelector('.u-legend')"
        page.wait(f"{legend}?.innerText.includes(' {unit}')")
    names, facts = texts(page, ".step-panel dt"), texts(page, ".step-panel dd")
    ends = {"Length": "tokens", "Truncated": "%", "Entropy": "nats", "Sampler–trainer": "nats", "Time": "s"}
    assert all(dict(zip(names, facts, strict=True))[name].endswith(f" {unit}") for name, unit in ends.items())
    page.open(one + "#view=time&step=20", width, dark=dark)
    cells = texts(page, "table.numbers td:nth-child(n + 2)")
    assert len(cells) == 11 and all(cell.endswith(" GiB") for cell in cells)
    assert {"Speed, tokens/s", "Model FLOP utilisation, %", "Measured memory, GiB"} <= {*texts(page, ".card h3")}
    page.open(one + "#view=completions&step=20", width, dark=dark)
    page.wait("document.querySelector('.token')")
    page.click(".token")
    assert " nats (" in texts(page, ".told")[0]
    assert no_wider(page)


@SCREENS
def test_tabs_that_are_out_of_sight_have_a_cue(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    def cues() -> list[str]:
        style = "getComputedStyle(document.querySelector('.tabs-box'), '::{}').content"
        return [page.run(style.format(name)).strip('"') for name in ("before", "after")]

    page.open(one, width, height=844, dark=dark)
    page.wait("document.querySelector('.tabs-box').dataset.after")
    assert cues() == (["none", "›"] if width < 700 else ["none", "none"])
    page.click("[data-view=settings]")
    page.wait("document.querySelector('.tabs-box').dataset.after === 'false'")
    assert cues() == (["‹", "none"] if width < 700 else ["none", "none"])
    assert no_wider(page)


@SCREENS
def test_the_head_leaves_room_for_the_page(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    page.open(one, width, height=844, dark=dark)
    assert count(page, ".alarm-line") == 3
    assert page.run("document.querySelector('#main').getBoundingClientRect().top") < 0.4 * 844


@SCREENS
def test_help_is_said_by_a_touch(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    page.open(one, width, dark=dark)
    press = page.tap if width < 700 else page.click
    press(".help")
    page.wait("!document.querySelector('#tip').hidden")
    assert texts(page, "#tip") == [page.run("document.querySelector('.help').title")]
    left, right = page.run("((b) => [b.left, b.right])(document.querySelector('#tip').getBoundingClientRect())")
    assert 0 <= left < right <= width
    assert contrast(colour(page, "#tip", "color"), colour(page, "#tip", "backgroundColor")) > 4.5
    press(".tile")
    page.wait("document.querySelector('#tip').hidden")
    page.run("document.querySelector('.help').click()")
    page.key("Escape")
    page.wait("document.querySelector('#tip').hidden")


@SCREENS
def test_legends_of_charts_are_readable(page: browser.Browser, one: str, width: int, dark: bool) -> None:
    page.open(one, width, dark=dark)
    page.run("document.querySelector('.plot').scrollIntoView()")
    page.wait("document.querySelector('.plot .u-series:not(:first-child):not(.edge)')")
    row, card = ".plot .u-series:not(:first-child):not(.edge)", colour(page, ".card:has(.plot)", "backgroundColor")
    assert contrast(colour(page, f"{row} .u-label", "color"), card) > 7
    assert contrast(colour(page, f"{row} .u-value", "color"), card) > 7
    assert contrast(colour(page, f"{row} .u-marker", "backgroundColor"), card) > 4.5, "it is filled"


def test_a_click_on_a_step_opens_it_everywhere(page: browser.Browser, one: str) -> None:
    page.open(one)
    page.wait("document.querySelectorAll('.u-over').length > 2")
    page.click(".u-over")
    page.wait("document.querySelector('.step-panel')")
    step = texts(page, ".step-panel h3")[0]
    assert step in ("Step 20", "Step 21") and count(page, ".step-panel canvas") == 2
    assert page.run("[...document.querySelectorAll('.marker')].every((m) => !m.hidden)")
    page.click("[data-view=time]")
    page.wait(f"document.querySelector('#main').innerText.includes('The rollout of {step.lower()}.')")
    assert count(page, ".lane canvas") == 2, "a lane per rank"
    page.click("[data-view=completions]")
    page.wait(f"document.querySelector('#main').innerText.includes('{step}: 16 completions')")
    page.click("[aria-label='Next step']")
    page.wait(f"document.querySelector('#main').innerText.includes('Step {int(step[5:]) + 1}: 16 completions')")
    assert page.run("location.hash").endswith(f"step={int(step[5:]) + 1}")


def test_a_band_stays_where_rewards_were(page: browser.Browser, one: str) -> None:
    """The drawing functions are called, because a canvas doesn't show what is drawn on it."""
    page.open(one)
    source = (ASSETS / "overview.js").read_text().split("const range")[0]
    columns = {"reward": [0.25, 0.5], "reward_std": [0.4, 0.3], "rewards/right/mean": [0.9], "rewards/right/std": [0.3]}
    seen = {"rewards": {"edges": [0, 0.5, 1], "counts": [3, 1]}, "functions": {"right": [0, 1]}}
    run = {"columns": columns, "spreads": {"1": seen}}

    def fill(name: str, run: Any) -> list[list[float]]:
        asked = f"band({json.dumps(name)})({json.dumps(run)}).fill"
        isolated = f"{source}; const isNumber = Number.isFinite; return {asked};"
        return [[round(value, 6) for value in edge] for edge in page.run(f"(() => {{ {isolated} }})()")]

    assert fill("reward", run) == [[0, 0.2], [0.65, 0.8]], "not below 0, and not stretched to 1"
    assert fill("rewards/right/mean", run) == [[0.6], [1]]
    alone = {"rewards": {"edges": [0.5, 1.5], "counts": [9]}}  # of rewards that are all 1
    assert fill("reward", run | {"spreads": {"1": alone}}) == [[0.25, 0.5], [0.65, 0.8]]
    assert fill("reward", run | {"spreads": {}}) == [[-0.15, 0.2], [0.65, 0.8]], "of an old run nobody knows"


def test_smoothing_draws_the_raw_values_behind(page: browser.Browser, one: str) -> None:
    page.open(one)
    raw = "[...document.querySelectorAll('.u-label')].filter((e) => e.textContent === 'raw').length"
    page.wait("document.querySelectorAll('.u-over').length > 2")
    before = page.run(raw)
    page.fill("#smoothing", "0.8")
    page.wait(f"{raw} > {before} + 2")
    page.fill("#smoothing", "0")
    page.wait(f"{raw} === {before}")


def test_completions_are_filtered_and_sorted(page: browser.Browser, one: str) -> None:
    page.open(one + "#view=completions&step=30")
    rows = "table.list tbody tr:not(.group)"
    page.wait(f"document.querySelectorAll('{rows}').length === 16")
    facts = "[r.completion.reward, r.completion.finish, r.completion.text]"
    every = page.run(f"[...document.querySelectorAll('{rows}')].map((r) => {facts})")
    page.fill("select[aria-label=Order]", "reward-high")
    rewards = page.run(f"[...document.querySelectorAll('{rows}')].map((r) => r.completion.reward)")
    assert rewards == sorted((reward for reward, _, _ in every), reverse=True)
    page.fill("input[aria-label='reward ≥']", "1")
    assert count(page, rows) == sum(reward >= 1 for reward, _, _ in every)
    page.fill("input[aria-label='reward ≥']", "")
    page.fill("select[aria-label='How it ended']", "length")
    assert count(page, rows) == sum(finish == "length" for _, finish, _ in every)
    page.fill("select[aria-label='How it ended']", "")
    page.fill("input[type=search]", "Seven And")
    wanted = sum("seven and" in text.lower() for _, _, text in every)
    assert count(page, rows) == wanted < 16 and count(page, "mark") <= wanted
    page.fill("input[type=search]", "no such words")
    assert count(page, rows) == 0 and "0 completions of 16" in texts(page, ".count")[0]
    page.fill("input[type=search]", "")
    page.click(".check input")
    page.wait("document.querySelector('.count').innerText.startsWith('640')")


def test_a_completion_is_seen_token_by_token(page: browser.Browser, one: str) -> None:
    page.open(one + "#view=completions&step=30")
    page.wait("document.querySelectorAll('button.open').length === 16")
    page.click("button.open", 3)
    page.wait("document.querySelector('.tokens')")
    told = page.run("document.querySelector('.detail').innerText")
    assert "calculator({" in told and "tool · calculator" in told
    given = page.run("document.querySelectorAll('.token.given').length")
    assert given == 4, "a tool's words"
    colours = set()
    for mode in ("sampler", "difference", "advantage", "mask"):
        page.click(f"[data-mode={mode}]")
        colours.add(page.run("[...document.querySelectorAll('.token')].map((t) => t.style.backgroundColor).join()"))
    assert len(colours) == 4 and count(page, ".tokens.masks .unmasked") == 4
    page.run("document.querySelector('.tokens').focus()")
    for _ in range(3):
        page.key("ArrowRight")
    told = texts(page, ".told")[0]
    assert told.startswith("Token 3 of") and "sampler -" in told and "difference" in told and "in the loss" in told
    page.click("button.beside", 5)
    page.wait("document.querySelectorAll('article.one').length === 2")
    assert no_wider(page)


def test_two_runs_stand_side_by_side(page: browser.Browser, two: str) -> None:
    page.open(two)
    page.wait("document.querySelectorAll('.u-over').length > 2")
    legend = page.run("document.querySelector('.plot .u-legend').innerText")
    assert "first · reward" in legend and "second · reward" in legend
    table = page.run("document.querySelector('table').innerText")
    assert "first" in table and "second" in table and "stopped" in table
    page.click("[data-view=settings]")
    assert page.run("[...document.querySelectorAll('table.settings td.name')].map((e) => e.innerText)") == [
        "learning_rate",
        "seed",
    ]
    page.click("[data-view=time]")
    page.fill("select[aria-label=Run]", "1")
    page.wait("document.querySelectorAll('.lane').length === 2")
    page.click("[data-view=completions]")
    page.wait("document.querySelector('#main').innerText.includes('Step 45: 16 completions')")


def test_what_a_model_wrote_stays_text(page: browser.Browser, folder: Path) -> None:
    run = MadeUp(steps=6, hostile=True, alarms=True).write(
        folder / "<img src=x onerror='window.hacked=1'>".replace("/", "")
    )
    page.open(write_report(run, out=folder / "hostile.html").as_uri())
    for view in VIEWS:
        page.click(f"[data-view={view}]")
        page.wait(f"document.querySelector('#main').dataset.view === '{view}'")
        page.run("new Promise((done) => setTimeout(done, 150))")
        if view == "overview":
            page.run("document.querySelector('details.more').open = true")
        if view == "completions":
            page.click("button.open")
            page.wait("document.querySelector('.tokens')")
            shown = page.run("document.querySelector('.tokens').innerText + document.querySelector('#main').innerText")
            assert "<script>" in shown or "<img" in shown
            assert "\u202e" not in shown and "\u0000" not in shown, "what steers is named instead"
        if view == "advisor":
            assert count(page, "#main a") == 0, "a source that is no address of the web is no link"
    assert page.run("typeof window.hacked") == "undefined"
    assert count(page, "#main img, #head img, #main script, #head script") == 0


def test_old_and_empty_runs_are_shown(page: browser.Browser, folder: Path) -> None:
    old = folder / "old"
    old.mkdir()
    history = [{"step": step, "reward": step / 9, "time/generate": 1.0} for step in range(1, 9)]
    (old / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for uri in (write_report(old).as_uri(), write_report(begun(folder / "begun")).as_uri()):
        for view in VIEWS:
            page.open(f"{uri}#view={view}&step=5")
            assert page.run("document.querySelector('#main').innerText.length") > 30, view


def test_what_no_run_should_have_written_is_survived(page: browser.Browser, folder: Path) -> None:
    run = MadeUp(steps=3, alarms=True).write(folder / "wrong")
    with (run / "_report" / "events.jsonl").open("ab") as file:
        file.writelines(WRONG)
    write_samples(run, *WRONG_SAMPLES)
    page.open(write_report(run).as_uri())
    for view in VIEWS:
        for step in (1, 2, 3):
            page.open(f"{(run / 'report.html').as_uri()}#view={view}&step={step}")
            page.run("new Promise((done) => setTimeout(done, 60))")
            if view == "completions":
                page.run("document.querySelectorAll('button.open').forEach((e) => e.click())")


def begun(folder: Path) -> Path:
    """A run before its first step."""
    (folder / "_report").mkdir(parents=True)
    (folder / "_report" / "events.jsonl").write_text(json.dumps(MadeUp().start()) + "\n")
    return folder


def test_a_live_page_shows_a_step_when_it_ends(folder: Path) -> None:
    pytest.importorskip("websockets", reason="the browser is driven over a websocket")
    run, where = MadeUp(steps=9, alarms=True), folder / "live"
    with Server(where) as server, browser.Browser(allowed=["127.0.0.1"]) as page:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            page.open(f"http://127.0.0.1:{server.server_port}/")
            assert "waiting for its first step" in page.run("document.body.innerText")
            begun(where)
            page.wait("document.querySelector('#head').innerText.includes('SmolLM2')", 5)
            write(where, run, 1)
            page.wait("document.querySelector('#head').innerText.includes('step 1 of')", 5)
            page.click("[data-view=time]")
            for step in range(2, 5):
                write(where, run, step)
            page.wait("document.querySelector('#head').innerText.includes('Entropy collapse')", 5)
            page.wait("document.querySelector('#main').innerText.includes('The rollout of step 4.')", 5)
            page.click("[data-view=completions]")
            page.wait("document.querySelector('#main').innerText.includes('Step 4: 1 completion.')", 5)
            assert all(address.startswith(f"http://127.0.0.1:{server.server_port}/") for address in page.requests)
            assert page.problems == []
        finally:
            server.shutdown()
            thread.join()


def write(folder: Path, run: MadeUp, step: int) -> None:
    write_samples(folder, {"step": step, "position": 0, "index": 0, **run.completion(step, 0, 0)})
    with (folder / "_report" / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in run.step_events(step))
