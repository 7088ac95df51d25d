"""A profile beside a table of runs of another version of the code: what `experiments/drift_h200.py` does."""

import csv
import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from asyncsched.cli.runs import load_profile

ROOT = Path(__file__).parent.parent
CAMPAIGN = ROOT / "experiments" / "results" / "h200-llama-8b-campaign.csv"
FIRST = ROOT / "experiments" / "results" / "h200-llama-8b-first-profile.toml"


@pytest.fixture
def drift(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module("drift_h200")


@pytest.fixture
def few(drift: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A few short workloads of each group."""
    for group, specs in drift.EARLIER.items():
        some = specs[1:4] if group == "fit" else [specs[0]._replace(delays_us=specs[0].delays_us[:2])]
        monkeypatch.setitem(drift.EARLIER, group, tuple(some))
    return drift


def planted(drift: ModuleType, path: Path, host: float, gpu: float) -> None:
    """A table of runs that took what the profile with these factors says, rounded as in a campaign's."""
    profile = load_profile(str(FIRST))
    lines = ["run,steps,seconds,tokens_per_s"]
    for group in drift.GROUPS:
        for name, run in drift._asked(group, profile):
            row = drift.Measured(group, run, 0, 0.0, 0.0)
            (seconds,) = drift._predicted(profile, [row], {"host": host, "gpu": gpu})
            lines.append(f"{name},1,{seconds:.2f},{row.tokens / seconds:.0f}")
    path.write_text("\n".join(lines) + "\n")


def test_planted_factors_come_back(few: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted(few, tmp_path / "table.csv", 0.6, 0.97)
    docs = tmp_path / "docs.md"
    docs.write_text("before\n<!-- drift_h200: begin -->\nold\n<!-- drift_h200: end -->\nafter\n")
    few.main(table=tmp_path / "table.csv", as_json=True, docs=docs)
    report = json.loads(capsys.readouterr().out)
    assert report["factors"]["as it is"] == {}
    assert report["factors"]["both factors"] == pytest.approx({"host": 0.6, "gpu": 0.97}, rel=5e-3)
    for row in report["rows"]:
        assert abs(row["makespan"]["both factors"]) < row["resolution"] + 0.1, row
        assert row["tokens_per_s"]["both factors"] == pytest.approx(-row["makespan"]["both factors"], abs=0.01)
    assert max(abs(row["makespan"]["as it is"]) for row in report["rows"]) > 2
    assert {one["group"] for one in report["groups"]} == set(few.GROUPS)
    text = docs.read_text()
    assert text.startswith("before\n<!-- drift_h200: begin -->\nFactors, from the group fit alone: ")
    assert text.endswith("<!-- drift_h200: end -->\nafter\n")
    assert "old" not in text


def test_factors_know_nothing_of_the_groups_that_are_judged(few: ModuleType, tmp_path: Path) -> None:
    """A table whose other groups are twice as slow gives the same factors, and shows the error."""
    path = tmp_path / "table.csv"
    planted(few, path, 0.6, 0.97)
    profile = load_profile(str(FIRST))
    before = few._measured(path, profile)
    slow = [row if row.group == "fit" else row._replace(seconds=2 * row.seconds) for row in before]
    first, second = (few._report(profile, rows) for rows in (before, slow))
    assert second["factors"] == first["factors"]
    errors = [row.makespan["both factors"] for row in second["rows"] if row.group != "fit"]
    assert len(errors) == 8
    assert np.allclose(errors, -50, atol=1.0)


BAD = {
    "run,steps,seconds,tokens_per_s\n": "--table: .*it has no run closed-28-long-sync",
    "": "--table: .*it has no run closed-28-long-sync",
    "name,steps\nclosed-1,1\n": "--table: .*use a table with a column run",
    "run,steps,seconds,tokens_per_s\nclosed-28-long-sync,x,1,2\n": "closed-28-long-sync: .*use a number each",
    "run,steps,seconds,tokens_per_s\nclosed-28-long-sync,1,nan,2\n": "closed-28-long-sync: .*do not take these seconds",
    "run,steps,seconds,tokens_per_s\nclosed-28-long-sync,1,1.16,2000\n": "do not take these seconds at this rate",
    "run,steps\nclosed-28-long-sync,1\n": "closed-28-long-sync: .*use a number each",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_table_is_one_line(
    drift: ModuleType, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(SystemExit, match=r"^2$"):
        drift.main(table=tmp_path / "table.csv")
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(BAD[text], error), error
    with pytest.raises(SystemExit, match=r"^2$"):
        drift.main(table=tmp_path)
    assert capsys.readouterr().err.startswith("error: --table")


def test_the_campaign_is_of_these_workloads(drift: ModuleType) -> None:
    """Tokens over seconds give the rates of all 90 runs, and requests that come all at once take as many steps as the
    simulator makes of them."""
    profile = load_profile(str(FIRST))
    rows: dict[str, Any] = {row["run"]: row for row in csv.DictReader(CAMPAIGN.read_text().splitlines())}
    asked = {name: (group, run) for group in drift.EARLIER for name, run in drift._asked(group, profile)}
    assert set(asked) == set(rows)
    assert len(rows) == 90
    for name, (group, run) in asked.items():
        one = drift._row(group, run, rows[name])
        assert one.half_width < 0.0055 * one.seconds
        if name.startswith("closed-") and run.requests.output_tokens.sum() < 2000:
            assert len(drift.predict(run, profile).steps) == one.steps, name


def test_the_published_table_is_what_the_script_writes() -> None:
    report = json.loads((ROOT / "experiments" / "results" / "drift-h200-llama-8b.json").read_text())
    text = (ROOT / "docs" / "fidelity.md").read_text()
    for one in report["groups"]:
        line = next(x for x in text.splitlines() if x.startswith(f"| {one['group']}") and f"| {one['prices']} |" in x)
        assert line.endswith(f"| {one['met']} of {one['limits']} |")
