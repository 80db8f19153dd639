"""The report in a real browser: it is complete, fetches nothing, runs nothing, fits its window, and can be read in
light and in dark. Needs chromium; skipped where there is none, unless FANSTORE_TEST_BROWSER=1 says that there must be.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser_in
from report_data import HOSTILE, SECTIONS, make_idle_node, make_job

from fanstore.report import figures, markup
from fanstore.report.page import report_page

#: Text and its ground must differ so much in lightness (WCAG 2.1, level AA); large text less.
CONTRAST, CONTRAST_LARGE = 4.5, 3.0

#: Elements that stick out of the window, or text that sticks out of its section; what scrolls inside may.
OVERFLOWS = """
(() => {
  const found = [];
  const scrolls = element => element.closest('.scroll') !== null;
  if (document.documentElement.scrollWidth > window.innerWidth)
    found.push('the page is ' + document.documentElement.scrollWidth + ' wide');
  for (const section of document.querySelectorAll('header, section')) {
    const box = section.getBoundingClientRect();
    for (const element of section.querySelectorAll('*')) {
      if (scrolls(element) || element.closest('svg') !== null && element.tagName !== 'svg') continue;
      const own = element.getBoundingClientRect();
      if (own.width === 0 || own.height === 0) continue;
      if (own.left < box.left - 0.5 || own.right > box.right + 0.5 || own.bottom > box.bottom + 0.5)
        found.push(section.id + ': ' + element.tagName + ' "' + element.textContent.slice(0, 40) + '"');
    }
    for (const element of section.querySelectorAll('.scroll'))
      if (element.getBoundingClientRect().right > box.right + 0.5) found.push(section.id + ': table');
  }
  return found;
})()
"""

#: Labels of one axis that lie on each other.
COLLISIONS = """
[...document.querySelectorAll('.plot .x, .plot .y, .heat .x, .heat .y')].flatMap(axis => {
  const boxes = [...axis.children].map(label => [label.textContent, label.getBoundingClientRect()])
    .filter(([_, box]) => box.width > 0);
  return boxes.flatMap(([text, a], k) => boxes.slice(k + 1)
    .filter(([_, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
    .map(([other]) => text + ' / ' + other));
})
"""

#: Every piece of text: its words, colour, the grounds under it from the top down, size in pixels and weight.
TEXTS = """
(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest('svg') !== null) continue;
    const style = getComputedStyle(element);
    const grounds = [];
    for (let up = element; up; up = up.parentElement) grounds.push(getComputedStyle(up).backgroundColor);
    found.push([walker.currentNode.data.trim().slice(0, 40), style.color, grounds, parseFloat(style.fontSize),
      parseInt(style.fontWeight)]);
  }
  return found;
})()
"""

#: The same for numbers in the squares of the heat map: the shade of the square before them.
SQUARES = """
[...document.querySelectorAll('.square text')].map(text => {
  const square = getComputedStyle(text.previousElementSibling);
  const ground = square.fill.replace('rgb(', 'rgba(').replace(')', ', ' + square.fillOpacity + ')');
  const card = getComputedStyle(text.closest('section')).backgroundColor;
  return [text.textContent, getComputedStyle(text).fill, [ground, card], 14, 400];
})
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser_in(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def hostile_job() -> dict[str, Any]:
    data = make_job(4)
    long = "/very/" + "long-name-without-a-space" * 20
    data["config"] |= {"prepared": long, "local": HOSTILE, "output": f"{HOSTILE}{long}"}
    data["nodes"][1]["host"] = HOSTILE
    data["nodes"][2]["host"] = "a" * 64
    data["nodes"][3] |= {"state": "lost", "events": [[3.0, "error", "data", f"cannot read '{HOSTILE}' from {long}"]]}
    for node in data["nodes"]:  # every shade of the matrix, with a number on it
        node["fetched"] = {
            str(peer): (1 + 3 * node["rank"] + number) * 90_000_000
            for number, peer in enumerate(peer for peer in range(4) if peer != node["rank"])
        }
    data["nodes"][0]["errors"]["failed_reads"] = 3
    data["nodes"][0]["outputs"] |= {"pending": 2, "trouble": HOSTILE}
    return data


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "one": lambda: make_job(1, 9.5, samples=37),
    "idle": lambda: make_job(1, nodes=[make_idle_node()]),
    "four": lambda: make_job(4, 3 * 86_400 + 5000),
    "hour": lambda: make_job(2, 5399),
    "many": lambda: make_job(64, 40_000),
    "hostile": hostile_job,
}


@pytest.fixture(scope="module", params=list(JOBS))
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    data = JOBS[request.param]()
    path = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    path.write_text(report_page(data), encoding="utf-8")
    return data, path


def test_it_is_complete_and_needs_nothing_else(browser: Browser, job: tuple[dict[str, Any], Path]) -> None:
    data, path = job
    browser.open(path, 1280)
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()]
    assert browser.evaluate("document.scripts.length") == 0
    assert browser.evaluate("[...document.querySelectorAll('section')].map(s => s.id)") == SECTIONS
    text = browser.evaluate("document.body.innerText")
    read = sum(figures.by_source(data["nodes"], "bytes").values())
    assert markup.size(read) in text
    for name, count in figures.by_source(data["nodes"], "reads").items():
        assert f"{count:,}" in text, name
    assert data["config"]["prepared"] in browser.evaluate("document.querySelector('header').textContent")
    size = len(data["nodes"])
    assert browser.evaluate("document.querySelectorAll('.nodes tbody tr').length") == size
    squares = browser.evaluate("document.querySelectorAll('.square rect').length")
    assert squares == (size * size if figures.matrix(data["nodes"]).most() else 0)
    # What is drawn has a size, and a picture of throughput is there exactly if something was read.
    heights = "[...document.querySelectorAll('#throughput path.area')].map(path => path.getBoundingClientRect().height)"
    drawn = browser.evaluate(heights)
    assert bool(drawn) == bool(read) and all(height > 0 for height in drawn)


@pytest.mark.parametrize("width", [1280, 400, 320])
def test_nothing_sticks_out_of_its_box(browser: Browser, job: tuple[dict[str, Any], Path], width: int) -> None:
    browser.open(job[1], width)
    assert browser.evaluate("window.innerWidth") == width
    assert browser.evaluate(OVERFLOWS) == []
    assert browser.evaluate(COLLISIONS) == []


@pytest.mark.parametrize("name", ["four", "hostile"])
def test_light_and_dark_differ_and_both_can_be_read(browser: Browser, tmp_path: Path, name: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(report_page(JOBS[name]()), encoding="utf-8")
    grounds = {}
    for dark in (False, True):
        browser.open(path, 1280, dark=dark)
        grounds[dark] = luminance(over([browser.evaluate("getComputedStyle(document.body).backgroundColor")]))
        texts = browser.evaluate(TEXTS)
        assert len(texts) > 100
        weak = []
        squares = browser.evaluate(SQUARES)
        assert len({tuple(below) for _, _, below, *_ in squares}) == 10 or name != "hostile", "all shades"
        for words, colour, below, pixels, weight in [*texts, *squares]:
            wanted = CONTRAST_LARGE if pixels >= 24 or (pixels >= 18.7 and weight >= 700) else CONTRAST
            found = contrast(over([colour, *below]), over(below))
            if found < wanted:
                weak.append(f"{words}: {found:.2f}")
        assert weak == [], f"too little contrast in {'dark' if dark else 'light'}"
    assert grounds[False] > 0.8 and grounds[True] < 0.05


def test_on_paper_it_is_light_whatever_the_screen_is(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(report_page(make_job(4)), encoding="utf-8")
    browser.open(path, 800, dark=True, media="print")
    assert luminance(over([browser.evaluate("getComputedStyle(document.body).backgroundColor")])) > 0.99
    assert 2 <= browser.print(tmp_path / "page.pdf") <= 8


def test_the_pointer_shows_numbers(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(report_page(make_job(3, 100)), encoding="utf-8")
    browser.open(path, 1280)
    under = "document.elementFromPoint(box.left + box.width * 0.3, box.top + box.height * 0.5)"
    title = browser.evaluate(
        "(() => { const svg = document.querySelector('#throughput svg'); svg.scrollIntoView({block: 'center'});"
        f" const box = svg.getBoundingClientRect(); return {under}.querySelector('title').textContent; }})()"
    )
    assert re.fullmatch(r"[\d.]+ s: [\d,.]+ MB/s in all\. .*another node: [\d,.]+ MB/s.*", title), title


def test_the_checks_see_what_is_wrong(browser: Browser, tmp_path: Path) -> None:
    """A page with all these faults: each check must find its own."""
    page = report_page(make_job(2))
    faults = (
        "<section id='bad'><p style='width:3000px'>wide</p><p style='color:#999;background:#aaa'>weak</p>"
        "<div class='plot'><div class='x'><span style='left:10%'>one label</span><span style='left:11%'>two</span>"
        "</div></div><img src='http://127.0.0.1:9/x.png'><script>document.title = 'ran'</script></section></main>"
    )
    path = tmp_path / "bad.html"
    path.write_text(page.replace("</main>", faults), encoding="utf-8")
    browser.open(path, 1280)
    assert any("wide" in line for line in browser.evaluate(OVERFLOWS))
    assert browser.evaluate(COLLISIONS) == ["one label / two"]
    assert any(
        contrast(over([c, *below]), over(below)) < 2 for w, c, below, *_ in browser.evaluate(TEXTS) if w == "weak"
    )
    assert browser.complaints() != [], "the page forbids itself to load pictures and to run scripts"
    assert "FanStore" in browser.evaluate("document.title")


# --- colours ---


def over(colours: list[str]) -> tuple[float, float, float]:
    """Colours on top of each other, the first on top, on white: what is seen, 0 … 255."""
    red, green, blue = 255.0, 255.0, 255.0
    for colour in reversed(colours):
        numbers = [float(number) for number in re.findall(r"[\d.]+", colour)]
        alpha = numbers[3] if len(numbers) > 3 else 1.0
        red, green, blue = (
            alpha * new + (1 - alpha) * old for new, old in zip(numbers, (red, green, blue), strict=False)
        )
    return red, green, blue


def luminance(colour: tuple[float, float, float]) -> float:
    """As WCAG defines it: 0 for black, 1 for white."""
    linear = [
        value / 255 / 12.92 if value / 255 <= 0.04045 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in colour
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
