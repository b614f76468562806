"""The page in a real browser: what is drawn, and what it says to a pointer, a keyboard and a screen reader."""

import json
import shutil
from pathlib import Path

import pytest
from pages import FIDELITY, HOSTILE, STUDY, write_run

from shoestring.reporting.page import page_data, page_html, run_data, study_data, with_fidelity

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
HOW = "`apt-get install chromium chromium-driver` gets them on Debian"
# The second frame has the layout of the first.
DRAWN = "requestAnimationFrame(() => requestAnimationFrame(arguments[{}]))"


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, one for all tests here."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    if BROWSER is None or DRIVER is None:
        pytest.skip(f"there is no chromium with its chromedriver: {HOW}")
    options = selenium.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1100,900"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser, tmp_path):
    """`show(data)` opens a page; at the end, nothing was written to the console and nothing but the file was read."""

    def open_page(data: dict, width: int = 1100, scheme: str = "light") -> Shown:
        path = tmp_path / "page.html"
        path.write_text(page_html(data))
        browser.get("about:blank")
        browser.get_log("browser"), browser.get_log("performance")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [_feature(scheme)]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(path.as_uri())
        browser.execute_async_script(DRAWN.format(0))  # charts learn their width from the browser's first layout
        return Shown(browser)

    yield open_page
    assert browser.get_log("browser") == []
    assert _requests(browser) <= {(tmp_path / "page.html").as_uri(), "data:,"}


def _feature(scheme: str) -> dict:
    return {"name": "prefers-color-scheme", "value": scheme}


def _requests(browser) -> set[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return {request["request"]["url"] for request in sent if request["request"]["url"] != "about:blank"}


class Shown:
    """A page that is open, in a few words."""

    def __init__(self, browser) -> None:
        self.browser = browser

    def all(self, selector: str) -> list:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str):
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def run(self, script: str, *arguments):
        return self.browser.execute_script(script, *arguments)

    def point_at(self, element, x: int = 0, click: bool = False) -> None:
        from selenium.webdriver import ActionChains

        scroll = "arguments[0].scrollIntoView({block: 'center'}); "  # a frame later, for it hides what is said
        self.browser.execute_async_script(scroll + DRAWN.format(1), element)
        chain = ActionChains(self.browser, duration=0).move_to_element_with_offset(element, x, 0)
        (chain.click() if click else chain).perform()

    def press(self, element, *keys: str) -> None:
        self.run("arguments[0].focus()", element)
        self.browser.switch_to.active_element.send_keys(*keys)


@pytest.fixture
def run(tmp_path, ledger) -> dict:
    return run_data(write_run(tmp_path / "run", ledger))


def test_every_chart_of_a_run_is_drawn(show, run):
    page = show(page_data("a run", [run]))
    kinds = len(run["steps"]["lean"]["parts"])
    assert len(page.all("svg.timeline")) == 2 and len(page.all("path.area")) == 2 * kinds
    assert len(page.all(".treemap .module")) == len(run["steps"]["lean"]["modules"])
    assert len(page.all("svg.lines")) == 4 and len(page.all(".bars .bar")) == 3
    boxes = page.run("return [...document.querySelectorAll('svg')].map((svg) => svg.getBoundingClientRect().height)")
    assert all(height > 50 for height in boxes)
    values = "return [...document.querySelectorAll('svg *')].flatMap((e) => [...e.attributes].map((a) => a.value))"
    assert not [value for value in page.run(values) if any(word in value for word in ("NaN", "undefined", "Infinity"))]


def test_the_budget_is_a_line_in_the_timeline(show, run):
    assert "budget 250 MB" in show(page_data("a run", [run])).text("svg.timeline .budget-line")


def test_pointing_at_a_moment_shows_its_bytes_and_the_button_goes_back_to_the_peak(show, run):
    page = show(page_data("a run", [run]))
    peak = page.text(".readout")
    assert "the peak): 213 MB alive" in peak
    chart = page.one("svg.timeline")
    page.point_at(chart, x=-380)
    first = page.text(".readout")
    assert "Moment 1 of" in first and "(forward)" in first
    page.point_at(chart, x=400, click=True)
    assert page.text(".readout") not in (first, peak)
    page.point_at(page.one("button.jump"), click=True)
    assert page.text(".readout") == peak


def test_the_timeline_is_walked_through_with_the_keyboard(show, run):
    page = show(page_data("a run", [run]))
    chart, width = page.one("svg.timeline"), len(run["steps"]["plain"]["totals"])
    page.press(chart, "\ue011")  # Home
    assert page.text(".readout").startswith("Moment 1 of ")
    page.press(chart, "\ue014")  # right
    assert page.text(".readout").startswith("Moment 2 of ")
    page.press(chart, "\ue010")  # End
    assert page.text(".readout").startswith(f"Moment {width} of {width} ")
    page.press(chart, "p")
    assert "the peak" in page.text(".readout")


def test_what_is_alive_at_the_peak_is_told_by_layer_operation_and_bytes(show, run):
    page = show(page_data("a run", [run]))
    page.point_at(page.one("details summary"), click=True)
    rows = [row.text for row in page.all("details[open] tbody tr")]
    assert rows[0].startswith("first convolution forward activations 100 MB")
    assert len(rows) == len(run["steps"]["plain"]["alive"])


def test_what_a_codec_stores_is_told_exact_and_as_it_is_stored_with_its_fidelity(show, run):
    with_fidelity(run, FIDELITY)
    page = show(page_data("a run", [run]))
    cells = [[cell.text for cell in row.find_elements("css selector", "th, td")] for row in page.all("#saved tbody tr")]
    assert cells == [
        ["first", "conv2d", "int4", "40 MB", "5 MB", "12.5%", "0.9987"],
        ["(the model as a whole)", "input of a region", "pool2", "40 MB", "10 MB", "25.0%", "-"],
    ]
    assert "15 MB in place of 80 MB" in page.text("#saved p")


def test_a_layer_tells_its_bytes_to_pointer_and_keyboard(show, run):
    page = show(page_data("a run", [run]))
    largest = page.one(".treemap .module")
    page.point_at(largest, click=True)
    assert page.one("#tip").text.startswith("first\n")
    page.press(page.one("body"), "\ue00c")  # Escape
    assert not page.one("#tip").is_displayed()
    page.run("arguments[0].focus()", page.all(".treemap .module")[1])
    assert page.one("#tip").text.startswith("second\n")
    assert page.all(".treemap .module")[1].get_attribute("aria-label").startswith("second, 1")


def test_pointing_at_a_curve_shows_its_value(show, run):
    page = show(page_data("a run", [run]))
    chart = page.one("svg.lines")
    page.press(chart, "\ue011")
    assert page.text("#course .readout") == "Update 1: 2"
    page.point_at(chart, x=200)
    assert page.text("#course .readout") == "Update 4: 0.5"


def test_the_data_is_downloaded_as_it_is_embedded(show, run, browser, tmp_path):
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    data = page_data("a run", [run])
    page = show(data)
    page.point_at(page.one("#download"), click=True)
    assert _appears(tmp_path / "shoestring.json") == json.loads(json.dumps(data))
    browser.get_log("performance")  # the blob is no request that leaves the page


def _appears(path: Path) -> dict:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(None, 10).until(lambda _: path.exists())
    return json.loads(path.read_text())


def test_rows_of_a_study_are_sorted_by_number_and_what_is_unknown_comes_last(show):
    page = show(page_data("a study", study=study_data(STUDY)))

    def order(column: str) -> list[str]:
        button = next(b for b in page.all("#rows th button") if b.text == column)
        page.point_at(button, click=True)
        return [head.text for head in page.all("#rows tbody th")]

    assert order("measured") == ["small", "middle", "large"]
    assert order("measured") == ["large", "middle", "small"]
    assert order("accuracy, ours") == ["middle", "large", "small"]
    assert order("accuracy, ours") == ["large", "middle", "small"]
    sorted_by = [head.text for head in page.all("#rows th[aria-sort=descending]")]
    assert sorted_by == ["accuracy, ours"]


def test_a_study_shows_its_claims_and_the_papers_points_beside_ours(show):
    page = show(page_data("a study", study=study_data(STUDY)))
    assert "not confirmed" in page.text("#claims tbody")
    by_memory = "svg[aria-label='accuracy by memory'] "
    assert len(page.all(f"{by_memory} .point:not(.paper)")) == 2 and len(page.all(f"{by_memory} .point.paper")) == 3
    page.point_at(page.one(".scatter .paper"))
    assert page.one("#tip").text == "middle (the paper)\n7 MB\naccuracy 94 ± 0.1"


def test_trained_rows_of_a_study_are_drawn_by_their_time_too(show):
    page = show(page_data("a study", study=study_data(STUDY)))
    points = page.all("svg[aria-label='accuracy by time'] .point")
    assert len(points) == 2
    page.point_at(points[0])
    assert page.one("#tip").text == "middle (ours)\n0.07 s\naccuracy 81 ± 0.5"


def test_two_runs_share_their_charts_and_what_differs_is_marked(show, tmp_path, ledger, run):
    settings = {"task": "net", "updates": 4, "seed": 1, "techniques": {}}
    other = run_data(write_run(tmp_path / "other", ledger, settings=settings))
    page = show(page_data("both", [run, other]))
    assert len(page.all("#course figure:first-child path.curve")) == 2
    marked = [row.text.split()[0] for row in page.all("tr.differs")]
    assert "seed" in marked and "technique:" in marked and "task" not in marked


def test_a_run_that_has_done_nothing_yet_opens_and_says_so(show, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "plan.json").write_text("{")
    page = show(page_data("empty", [run_data(path)]))
    assert "no save of it yet" in page.text("main") and page.all("svg") == []


def test_what_a_run_folder_holds_is_never_run_as_a_script(show, tmp_path, ledger):
    hostile = {"task": HOSTILE, "settings": {HOSTILE: HOSTILE, "techniques": {HOSTILE: 1}}, "quality_name": HOSTILE}
    page = show(page_data(HOSTILE, [run_data(write_run(tmp_path / "run", ledger, **hostile))]))
    assert page.run("return window.hurt") is None and page.all("img") == []
    assert HOSTILE[:30] in page.text("h1") and HOSTILE[:30] in page.text("#settings")


@pytest.mark.parametrize("width", (360, 1100))
@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_it_fits_a_phone_and_follows_the_colours_of_the_system(show, run, width, scheme):
    page = show(page_data("a run with quite a long name " * 3, [run], study_data(STUDY)), width, scheme)
    assert page.run("return document.documentElement.scrollWidth") <= width
    red = page.run("return Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert (red < 64) == (scheme == "dark")


CROSSED = """return [...document.querySelectorAll('svg')].flatMap((svg) => {
  const box = (e) => e.getBoundingClientRect(), lines = [...svg.querySelectorAll('line:is(.budget, .cursor)')].map(box);
  return [...svg.querySelectorAll('text')].filter((text) => lines.some((line) =>
    line.left < box(text).right && line.right > box(text).left &&
    line.top < box(text).bottom && line.bottom > box(text).top)).map((text) => text.textContent); })"""


@pytest.mark.parametrize("width", (360, 1100))
@pytest.mark.parametrize("share", (0.9, 1.05, 1.2))
def test_no_line_of_a_budget_or_of_the_chosen_moment_crosses_a_word(show, tmp_path, ledger, width, share):
    budget = round(share * ledger.peak().bytes)
    run = run_data(write_run(tmp_path / "run", ledger, budget_bytes=budget, measured_peak_bytes=ledger.peak().bytes))
    page = show(page_data("a run", [run]), width)
    assert page.run(CROSSED) == []


def test_whatever_can_be_focused_has_a_name(show, run):
    page = show(page_data("a run", [run], study_data(STUDY)))
    unnamed = """return [...document.querySelectorAll('main :is([tabindex="0"], button, select, svg)')].filter(
        (e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).length"""
    assert page.run(unnamed) == 0
    assert page.run("return document.querySelectorAll('h1').length") == 1
