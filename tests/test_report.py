"""Reports: one page that loads nothing and says what limits a run; looked at in a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from asyncsched.cli import main
from asyncsched.cli.charts import distributions, sweep, timeline
from asyncsched.cli.words import explain
from sim.run import simulate
from sim.scenario import load_preset

pytest.importorskip("plotly", reason="plotly is not installed: pip install '.[report]'")

SCENARIO = """
mode = "async"
[engine]
max_num_seqs = 4
[host]
plan_us = 900
[gpu]
kind = "constant"
step_us = 2000
[workload]
kind = "synthetic"
num_requests = 30
prompt = { kind = "uniform", min_tokens = 4, max_tokens = 40 }
output = { kind = "uniform", min_tokens = 1, max_tokens = 20 }
arrivals = { kind = "poisson", rate_per_s = 200 }
[goodput]
ttft_ms = 60
"""


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of every kind that a report takes, and the report of all of them."""
    folder = tmp_path_factory.mktemp("results")
    scenario = folder / "small.toml"
    scenario.write_text(SCENARIO)

    def keep(name: str, *arguments: str) -> None:
        import contextlib
        import io

        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert command(arguments[0], str(scenario), *arguments[1:]) == 0
        (folder / name).write_text(said.getvalue())

    keep("sync.json", "simulate", "--set", "mode=sync", "--json", "--trace", str(folder / "trace.json"))
    keep("async.json", "simulate", "--json")
    keep("grid.json", "sweep", "--vary", "host.scale=0.5,1,2", "--vary", "max_num_seqs=2,4", "--json")
    cloud = ["--range", "host.scale=0.1:10:log", "--vary", "mode=sync,async", "--sample", "12"]
    keep("ignored", "sweep", *cloud, "--results", str(folder / "cloud.jsonl"))
    keep("capacity.json", "capacity", "--seeds", "2", "--tolerance", "0.2", "--gpu-hour", "3.5", "--json")
    keep("advise.json", "advise", "--depths", "1,2", "--json")
    names = ["sync.json", "async.json", "trace.json", "grid.json", "cloud.jsonl", "capacity.json", "advise.json"]
    files = [str(folder / name) for name in names]
    assert command("report", *files, "-o", str(folder / "report.html"), "--title", "A <title> & more") == 0
    return folder


class Outline(HTMLParser):
    """Headings, everything the page refers to, and the text of its charts."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.charts = ""
        self._inside = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self._inside = "charts" if given.get("id") == "charts" else tag
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "action", "data")]
        self.ids += [value or "" for name, value in attributes if name == "id"]

    def handle_data(self, data: str) -> None:
        if self._inside == "h2":
            self.headings.append(data)
        elif self._inside == "charts":
            self.charts += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def outline(folder: Path) -> Outline:
    page = Outline()
    page.feed((folder / "report.html").read_text(encoding="utf-8"))
    return page


def test_a_page_has_a_section_per_result_and_refers_to_itself_alone(results: Path) -> None:
    page = outline(results)
    assert page.headings == [
        "capacity",
        "advice",
        "sync: what limits it",
        "async: what limits it",
        "Latencies",
        "Figures",
        "trace: timeline",
        "grid: sweep",
        "cloud: sweep",
        "Settings",
    ]
    assert page.references
    assert all(reference.startswith("#") for reference in page.references)
    assert len(page.ids) == len(set(page.ids))
    charts = json.loads(page.charts)
    assert set(charts) <= set(page.ids)
    text = (results / "report.html").read_text(encoding="utf-8")
    assert "<title>A &lt;title&gt; &amp; more</title>" in text
    assert "default-src 'none'" in text


def test_equal_results_give_equal_pages(results: Path) -> None:
    files = [str(results / name) for name in ("sync.json", "grid.json")]
    for name in ("a.html", "b.html"):
        assert command("report", *files, "-o", str(results / name)) == 0
    assert (results / "a.html").read_bytes() == (results / "b.html").read_bytes()


# ---- what charts and words say -------------------------------------------------------------------------------------


def test_a_timeline_has_the_spans_of_the_trace(results: Path) -> None:
    events = json.loads((results / "trace.json").read_text())["traceEvents"]
    chart, part = timeline(events, 0)
    spans = [event for event in events if event["ph"] == "X"]
    assert part == ""
    assert sum(len(lane["x"]) for lane in chart["data"]) == len(spans)
    gpu = next(lane for lane in chart["data"] if lane["name"] == "GPU")
    computed = [span for span in spans if span["name"] == "forward"]
    assert sum(gpu["x"]) == pytest.approx(sum(span["dur"] for span in computed) / 1e3)
    assert gpu["base"] == pytest.approx([span["ts"] / 1e3 for span in computed])


def test_a_distribution_is_that_of_the_requests(results: Path) -> None:
    run = json.loads((results / "sync.json").read_text())
    (label, chart), *_ = distributions([("sync", run)])
    assert label == "time to first token"
    (line,) = chart["data"]
    at = dict(zip(line["y"], line["x"], strict=True))
    assert at[0.5] == pytest.approx(run["ttft_ms"]["p50"])
    assert at[0.99] == pytest.approx(run["ttft_ms"]["p99"])
    assert line["x"] == sorted(line["x"])


def test_a_map_puts_every_point_where_it_belongs(results: Path) -> None:
    swept = json.loads((results / "grid.json").read_text())
    figure, chart = sweep(swept["points"], list(swept["vary"]))[0]
    assert figure.key == "output_throughput"
    (cells,) = chart["data"]
    assert cells["type"] == "heatmap"
    for point in swept["points"]:
        row, column = cells["y"].index(str(point["max_num_seqs"])), cells["x"].index(str(point["host.scale"]))
        assert cells["z"][row][column] == point["output_throughput"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mode=sync"], "Host and GPU took turns. A second step in flight could hide up to 24.0% of the time."),
        ([], "The GPU is the limit: its lane was busy longest"),
        (["host.scale=9"], "The host is the limit: its lane was busy longest"),
    ],
)
def test_the_limit_is_said_in_words(overrides: list[str], said: str) -> None:
    run = simulate(load_preset("hf-8b-bs32", ["workload.output.tokens=200", *overrides]))
    assert said in " ".join(explain(run.summary()))


def test_arrivals_are_the_limit_where_the_engine_waits_for_them() -> None:
    said = " ".join(explain(simulate(load_preset("h200-llama-8b", ["workload.limit=20"])).summary()))
    assert "Requests come more slowly than it could serve them, so no lane is the limit" in said


# ---- bad input -----------------------------------------------------------------------------------------------------

HALF = '{"makespan_s": 1'


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("empty.json", "", "it is empty"),
        ("half.json", HALF, "it is no JSON"),
        ("list.json", "[]", "it is no JSON object"),
        ("other.json", "{}", "it is none of: the --json of simulate"),
        ("lines.jsonl", '{"a": 1}\n{"a": 2}\n', "its lines are not those of a sweep's result file"),
        ("binary.json", "\udcff", "it cannot be read"),
    ],
)
def test_other_files_are_refused(name: str, content: str, error: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert command("report", str(tmp_path / name), "-o", str(tmp_path / "r.html")) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: RESULT: ")
    assert error in said
    assert said.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-o", "r.html"], "RESULT: missing; name result files"),
        (["none.json"], "--out: missing; name the page"),
        (["none.json", "-o", "r.pdf"], "--out: 'r.pdf' is not allowed; its name must end in .html"),
        (["none.json", "-o", "no/r.html"], "--out: 'no/r.html' is not allowed; the folder 'no' does not exist"),
        (["a.json", "b.json", "a.json", "-o", "r.html"], "RESULT: 'a.json' is not allowed; it is named twice"),
        (["none.json", "-o", "r.html"], "RESULT: 'none.json' is not allowed; it cannot be read (No such file"),
        ([".", "-o", "r.html"], "RESULT: '.' is not allowed; it cannot be read (Is a directory)"),
    ],
)
def test_bad_arguments(
    arguments: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("report", *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {error}")
    assert said.count("\n") == 1


def test_names_are_told_apart_and_odd_text_does_no_harm(results: Path, tmp_path: Path) -> None:
    run = json.loads((results / "sync.json").read_text())
    run["notes"] = ["</script><script>alert(1)</script>"]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.json").write_text(json.dumps(run))
    files = [str(tmp_path / folder / "x.json") for folder in ("a", "b")]
    assert command("report", *files, "-o", str(tmp_path / "report.html")) == 0
    page = outline(tmp_path)
    assert page.headings[:2] == ["x: what limits it", "x (2): what limits it"]
    assert "<script>alert(1)" not in (tmp_path / "report.html").read_text(encoding="utf-8")


# ---- in a browser --------------------------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in BROWSERS if (path := shutil.which(name))), None)
REACHABLE = "a[href^='#'], button[data-chart], select, summary, .chart"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, results: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page in light or dark, having asked for nothing and complained about nothing."""
    context = browser.new_context(
        color_scheme=getattr(request, "param", "light"), viewport={"width": 1100, "height": 800}
    )
    page = context.new_page()
    asked, complaints = [], []
    page.on("request", lambda one: asked.append(one.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    address = (results / "report.html").as_uri()
    page.goto(address)
    page.wait_for_selector("html[data-drawn=yes]")
    page.wait_for_selector(".chart .main-svg")
    yield page
    assert asked == [address]
    assert complaints == []
    context.close()


def until(page: Any, condition: str) -> None:
    """Waits until a condition holds in the page, which forbids a browser's own waiting to evaluate it there."""
    deadline = time.monotonic() + 10
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def brightness(colour: str) -> float:
    red, green, blue = (float(part) for part in re.findall(r"[\d.]+", colour)[:3])
    return (red + green + blue) / 3


@pytest.mark.parametrize("opened", ["light", "dark"], indirect=True)
def test_every_chart_is_drawn_and_can_be_read(opened: Any, request: pytest.FixtureRequest) -> None:
    shown = opened.locator(".chart:visible")
    assert shown.count() >= 7
    for number in range(shown.count()):
        box = shown.nth(number)
        assert box.locator(".main-svg").count() >= 1
        assert box.locator(".trace path, .bars path, image, .points path").count() > 0
    back = brightness(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
    text = brightness(opened.evaluate("getComputedStyle(document.body).color"))
    ticks = brightness(opened.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill"))
    dark = request.node.callspec.params["opened"] == "dark"
    assert (back < 60 and text > 180 and ticks > 180) if dark else (back > 220 and text < 60 and ticks < 60)
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_colours_follow_when_the_system_turns_dark(opened: Any) -> None:
    opened.emulate_media(color_scheme="dark")
    until(opened, "getComputedStyle(document.querySelector('.xtick text')).fill === 'rgb(232, 232, 232)'")


def test_charts_are_zoomed_from_the_keyboard(opened: Any) -> None:
    chart = opened.locator("section:has(h2:text('trace: timeline')) .chart")
    name = chart.get_attribute("id")

    def seen() -> tuple[float, float]:
        low, high = opened.evaluate(f"document.getElementById('{name}').layout.xaxis.range.map(Number)")
        return low, high

    low, high = seen()
    chart.focus()
    opened.keyboard.press("+")
    until(opened, f"document.getElementById('{name}').layout.xaxis.range[0] > {low}")
    assert seen()[1] - seen()[0] == pytest.approx((high - low) / 2)
    before = seen()[0]
    opened.keyboard.press("ArrowRight")
    until(opened, f"document.getElementById('{name}').layout.xaxis.range[0] > {before}")
    opened.keyboard.press("0")
    until(opened, f"document.getElementById('{name}').layout.xaxis.range[0] == {low}")
    opened.locator(f"button[data-chart={name}][data-move=out]").focus()
    opened.keyboard.press("Enter")
    until(opened, f"document.getElementById('{name}').layout.xaxis.range[0] < {low}")


def test_everything_can_be_reached_with_the_tab_key(opened: Any) -> None:
    wanted = opened.locator(REACHABLE).filter(visible=True).count()
    assert wanted > 40
    opened.evaluate("window.reached = new Set()")
    opened.evaluate("document.addEventListener('focusin', (event) => window.reached.add(event.target))")
    for _ in range(wanted + 60):  # plotly has things of its own to reach
        opened.keyboard.press("Tab")
    reached = opened.evaluate("(wanted) => [...window.reached].filter((one) => one.matches(wanted)).length", REACHABLE)
    assert reached == wanted


def test_another_figure_of_a_sweep_is_chosen_from_the_keyboard(opened: Any) -> None:
    section = opened.locator("section:has(h2:text('grid: sweep'))")
    assert section.locator("figcaption:visible").inner_text().startswith("throughput")
    section.locator("select").focus()
    opened.keyboard.press("ArrowDown")
    until(opened, "document.activeElement.value === 'makespan_s'")
    assert section.locator("figcaption:visible").inner_text().startswith("total time")
    section.locator(".chart:visible .main-svg").first.wait_for()
