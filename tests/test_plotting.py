"""Pictures: what is drawn where, from hand-made timelines and rows; files that are whole, or as they were."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from asyncsched import plotting, plotting_fleet, plotting_runs
from asyncsched.errors import ConfigError
from asyncsched.plotting import axis_label, plot_curve, plot_heatmap, plot_timeline
from asyncsched.timeline import Span, Timeline

MS = 1_000_000
MAGIC = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF"}


def timeline(steps: int, *, depth: int, host_ms: int = 10, gpu_ms: int = 30, copy_ms: int = 0) -> Timeline:
    """A pipeline by hand. Depth 1 takes turns; at depth 2 the host works beside the GPU and is done before it."""
    spans = []
    free = 0  # of the GPU
    for step in range(steps):
        planned = free if depth == 1 or step == 0 else free - gpu_ms * MS
        slot = step % depth
        ready = planned + host_ms * MS
        spans.append(Span("host", "plan", step, slot, planned, planned + 4 * MS, 8))
        spans.append(Span("host", "fill", step, slot, planned + 4 * MS, planned + 5 * MS, 8))
        spans.append(Span("h2d", "h2d", step, slot, planned + 5 * MS, planned + 5 * MS + copy_ms * MS, 8))
        spans.append(Span("host", "launch", step, slot, planned + 5 * MS, ready, 8))
        start = max(ready, free)
        free = start + gpu_ms * MS
        spans.append(Span("compute", "forward", step, slot, start, free, 8))
        spans.append(Span("d2h", "d2h", step, slot, free, free + copy_ms * MS, 8))
        spans.append(Span("host", "collect", step, slot, ready, free, 8))
    return Timeline(spans)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they would be saved, instead of files."""
    saved: list[Figure] = []
    monkeypatch.setattr(plotting, "_save", lambda figure, path: saved.append(figure))
    return saved


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("suffix", MAGIC)
def test_equal_inputs_give_equal_files(suffix: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        plot_timeline([("sync", timeline(4, depth=1))], path, steps=(0, 3))
    assert paths[0].read_bytes().startswith(MAGIC[suffix])
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sorted(tmp_path.iterdir()) == paths


def test_idle_shares_are_those_of_the_window(figures: list[Figure]) -> None:
    both = [("sync", timeline(9, depth=1)), ("async", timeline(9, depth=2))]
    plot_timeline(both, Path("x.png"), steps=(2, 4))
    sync, overlapped = figures[0].axes
    assert sync.get_title("left") == "sync"
    # 3 steps of 10 + 30 ms; in the same 120 ms, without a gap, 4 steps of 30 ms
    assert sync.get_title("right") == "GPU active 75.0%, idle 25.0%; 3.0 steps done"
    assert overlapped.get_title("right") == "GPU active 100.0%, idle 0.0%; 4.0 steps done"
    assert sync.get_xlim() == overlapped.get_xlim() == (0, 120)


def test_a_picture_without_a_gpu_names_none_and_long_labels_leave_room(figures: list[Figure]) -> None:
    name = "a-model-with-a-name-that-says-all-about-it-and-more.Q4_1.gguf, depth 3: measured"
    plot_timeline([(name, timeline(9, depth=1))], Path("x.png"), steps=(2, 4), device="compute lane", title="On a CPU")
    (panel,) = figures[0].axes
    assert panel.get_title("left") == f"...{name[-47:]}"
    texts = [panel.get_title("right"), *[tick.get_text() for tick in panel.get_yticklabels()]]
    texts += [text.get_text() for legend in figures[0].legends for text in legend.get_texts()]
    assert "compute lane active 75.0%, idle 25.0%; 3.0 steps done" in texts
    assert not any("GPU" in text for text in texts)


def test_gaps_are_hatched_and_named(figures: list[Figure]) -> None:
    plot_timeline([("sync", timeline(4, depth=1))], Path("x.png"), steps=(1, 3))
    (axes,) = figures[0].axes
    hatched = sorted(patch.get_x() for patch in axes.patches if patch.get_hatch())
    assert hatched == [0, 40, 80]
    assert texts(axes).count("idle") == 3
    assert "25.0%" in figures[0].get_suptitle()


def test_a_text_is_as_long_as_its_box_allows(figures: list[Figure]) -> None:
    for last, written in ((1, "idle 10.0 ms"), (4, "idle")):
        plot_timeline([("sync", timeline(20, depth=1))], Path("x.png"), steps=(1, last))
        assert written in texts(figures[-1].axes[0])
    plot_timeline([("sync", timeline(20, depth=1))], Path("x.png"), steps=(0, 19))
    assert "idle" not in texts(figures[-1].axes[0])


def test_spans_carry_step_numbers_and_slot_colours(figures: list[Figure]) -> None:
    plot_timeline([("deep", timeline(7, depth=3))], Path("x.png"), steps=(3, 5))
    (axes,) = figures[0].axes
    assert {"step 3", "step 4", "step 5"} <= set(texts(axes))
    row = plotting.ROWS["compute"].centre
    colours = {
        patch.get_facecolor() for patch in axes.patches if patch.get_y() < row < patch.get_y() + patch.get_height()
    }
    assert len(colours) == 3 + 1  # a colour per slot, and the lane's background


def test_host_work_before_a_launch_is_one_span(figures: list[Figure]) -> None:
    plot_timeline([("sync", timeline(2, depth=1))], Path("x.png"), steps=(0, 0))
    (axes,) = figures[0].axes
    assert "prepare 0" in texts(axes)
    assert "waits for step 0" in texts(axes)


@pytest.mark.parametrize("copy_ms", [0, 2])
def test_copies_of_no_time_are_drawn_as_ticks(copy_ms: int, figures: list[Figure]) -> None:
    plot_timeline([("sync", timeline(3, depth=1, copy_ms=copy_ms))], Path("x.png"), steps=(0, 2))
    (axes,) = figures[0].axes
    row = plotting.ROWS["h2d"].centre
    boxes = [patch for patch in axes.patches if patch.get_y() < row < patch.get_y() + patch.get_height()]
    background, *boxes = boxes
    assert background.get_linewidth() == 0
    assert [patch.get_width() for patch in boxes] == [copy_ms] * 3
    assert all(patch.get_linewidth() > 0 for patch in boxes)


def test_a_run_that_takes_no_time_is_drawn(tmp_path: Path) -> None:
    free = Timeline([Span(lane, name, 0, 0, 5, 5, 1) for lane, name in (("host", "plan"), ("compute", "forward"))])
    plot_timeline([("free", free)], tmp_path / "x.png", steps=(0, 0))
    assert (tmp_path / "x.png").stat().st_size


def test_steps_that_never_ran_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the steps 7 to 9"):
        plot_timeline([("sync", timeline(3, depth=1))], tmp_path / "x.png", steps=(7, 9))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("values", "scale"), [([1, 2, 30], "linear"), ([1, 10, 40], "log"), ([0, 10, 40], "linear")])
def test_a_curve_is_logarithmic_over_many_decades(values: list[int], scale: str, figures: list[Figure]) -> None:
    plot_curve([{"x": x, "y": 5} for x in values], "x", "y", Path("x.png"))
    (axes,) = figures[0].axes
    assert axes.get_xscale() == scale
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("values", "zero"), [([7.0, -0.8], True), ([-3.0, -1.0], False), ([1.0, 2.0], False), ([0.0, 0.0], False)]
)
def test_no_point_of_a_curve_is_cut_off_and_zero_is_in_sight(
    values: list[float], zero: bool, figures: list[Figure]
) -> None:
    plot_curve([{"x": x, "y": y} for x, y in enumerate(values)], "x", "y", Path("x.png"))
    (axes,) = figures[0].axes
    low, high = axes.get_ylim()
    room = 0.05 * (high - low)
    assert low <= 0 <= high
    assert low + (room if min(values) < 0 else 0) <= min(values)
    assert max(values) <= high - (room if max(values) > 0 else 0)
    assert (len(axes.lines) == 2) == zero  # a line at zero where errors have either sign


@pytest.mark.parametrize("places", [(20.0, 55.0), (20.0, 30.0), (20.0, 20.5), (160.0, 20.0)])
def test_what_marks_say_crosses_nothing(places: tuple[float, float], figures: list[Figure]) -> None:
    rows = [{"x": x, "y": x, "run": run} for x in range(10, 190, 5) for run in ("a", "b")]
    marks = [(place, f"cut, RTXPRO{number}000") for number, place in enumerate(places)]
    plot_curve(rows, "x", "y", Path("x.png"), series="run", title="A title", marks=marks)
    figure = figures[0]
    figure.draw_without_rendering()
    (axes,) = figure.axes
    first, second = (text.get_window_extent() for text in axes.texts)
    assert not first.overlaps(second)
    title = figure._suptitle.get_window_extent()
    for box in (first, second):
        assert box.y0 >= axes.bbox.y1  # above every line and marker
        assert box.y1 <= title.y0
        assert box.x1 <= figure.bbox.x1


def test_a_curve_has_a_line_per_series_in_order_of_x(figures: list[Figure]) -> None:
    rows = [{"x": x, "mode": mode, "y": x * k} for x in (3, 1, 2) for k, mode in enumerate(("sync", "async"), 1)]
    rows.append({"x": 4, "mode": "sync", "y": None})  # a run that failed
    plot_curve(rows, "x", "y", Path("x.png"), series="mode")
    (axes,) = figures[0].axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines == {"sync": ([1, 2, 3], [1, 2, 3]), "async": ([1, 2, 3], [2, 4, 6])}
    assert axes.get_legend().get_title().get_text() == "mode"


def test_a_curve_over_words_joins_no_points(figures: list[Figure]) -> None:
    plot_curve([{"x": word, "y": 1} for word in ("sync", "async")], "x", "y", Path("x.png"))
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["sync", "async"]
    assert axes.lines[0].get_linestyle() == "None"


def test_a_heat_map_has_a_cell_per_pair_in_order_of_value(figures: list[Figure]) -> None:
    rows = [{"x": x, "y": y, "z": x * y} for x in (10, 2) for y in (5, 1)]
    rows[0]["z"] = None  # 10, 5: failed
    plot_heatmap(rows, "x", "y", "z", Path("x.png"), z_label="product (ms)")
    axes, bar = figures[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "10"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "5"]
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    assert cells == {(0.5, 0.5): "2", (1.5, 0.5): "10", (0.5, 1.5): "10"}
    assert bar.get_ylabel() == "product (ms)"


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("host.plan_us", "host.plan (us)"),
        ("ttft_ms.p50", "ttft.p50 (ms)"),
        ("workload.arrivals.rate_per_s", "workload.arrivals.rate (1/s)"),
        ("copy.h2d_gb_s", "copy.h2d (GB/s)"),
        ("gpu.device.hbm_tb_s", "gpu.device.hbm (TB/s)"),
        ("host.scale", "host.scale"),
    ],
)
def test_labels_have_units(key: str, label: str) -> None:
    assert axis_label(key) == label


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        plot_curve([{"x": 1, "y": 1}], "x", "y", path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_below_an_axis_of_a_validation_do_not_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(plotting_runs, "_save", lambda figure, path: saved.append(figure))
    names = ("time to first token (ms)", "time per output token (ms)", "end-to-end latency (ms)")
    for low, high in ((1242.3, 1255.9), (10123.4, 10127.1), (5.123, 5.129), (180.0, 400.0)):
        occupancy = {name: ([0, 1], [1, 0]) for name in ("running", "waiting")}
        side = plotting_runs.Side(occupancy, {name: [low, high] for name in names})
        plotting_runs.plot_validation(side, side, Path("x.png"), title="A run")
    for figure in saved:
        figure.draw_without_rendering()
        for axes in figure.axes:
            shown = [text for text in axes.get_xticklabels() if text.get_text()]
            low, high = axes.get_xlim()
            boxes = [text.get_window_extent() for text in shown if low <= text.get_position()[0] <= high]
            assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


def test_legends_cover_no_line_where_lines_are_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    for module in (plotting_runs, plotting_fleet):
        monkeypatch.setattr(module, "_save", lambda figure, path: saved.append(figure))
    times = list(range(60))
    occupancy = {name: (times, [8 - time % 2 for time in times]) for name in ("running", "waiting")}
    side = plotting_runs.Side(occupancy, {"time to first token (ms)": [1.0, 2.0]})
    plotting_runs.plot_validation(side, side, Path("x.png"), title="A run")
    waits = {"requests": 3, "gpu_active": 0.5, "ttft_ms": {"p50": 9.0, "p99": 10.0}}
    plotting_fleet.plot_replicas("A fleet", [{"replica": number, **waits} for number in range(12)], Path("x.png"))
    for figure in saved:
        figure.draw_without_rendering()
        for axes in figure.axes:
            legend = axes.get_legend()
            if legend is not None:
                highest = max(axes.transData.transform(line.get_xydata())[:, 1].max() for line in axes.lines)
                assert all(text.get_window_extent().y0 > highest for text in legend.get_texts())
                assert legend.get_window_extent().y0 < figure._suptitle.get_window_extent().y0
    assert sum(axes.get_legend() is not None for figure in saved for axes in figure.axes) == 3
