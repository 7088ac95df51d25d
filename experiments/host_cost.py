"""Sync against async over the cost of host work, 0.1 to 10 times that of the published run (preset hf-8b-bs32).

A synchronous step takes host + GPU, an asynchronous one the longer of the two. So async gains most, a factor of 2,
where both are equal: the crossover beyond which the host is the limit and the GPU idles again.
"""

from __future__ import annotations

from study import Row, options, report, run, sweep

from asyncsched.cli.figures import percent

PRESET = "hf-8b-bs32"
SCALES = [0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 3.17, 3.5, 4.0, 5.0, 7.0, 10.0]


def compare() -> list[Row]:
    """One row per scale."""
    columns = ("makespan_s", "steps", "gpu_active", "limiting_lane", "busy_s.host", "busy_s.compute")
    runs = sweep(PRESET, {"host.scale": SCALES, "mode": ["sync", "async"]}, columns)
    return [
        {
            "host scale": sync["host.scale"],
            "host ms/step": 1e3 * sync["busy_s.host"] / sync["steps"],
            "GPU ms/step": 1e3 * sync["busy_s.compute"] / sync["steps"],
            "sync s": sync["makespan_s"],
            "async s": overlapped["makespan_s"],
            "times faster": sync["makespan_s"] / overlapped["makespan_s"],
            "GPU active, sync": sync["gpu_active"],
            "GPU active, async": overlapped["gpu_active"],
            "async is limited by": overlapped["limiting_lane"],
        }
        for sync, overlapped in zip(runs[::2], runs[1::2], strict=True)
    ]


def simulated_crossover(rows: list[Row]) -> float:
    """The scale at which the flat part of the asynchronous curve meets its rising part.

    Both parts are taken from the results: the ends of the curve, of which one does not depend on the scale at all and
    the other is proportional to it.
    """
    cheapest, dearest = rows[0], rows[-1]
    return float(cheapest["async s"] / (dearest["async s"] / dearest["host scale"]))


def main() -> None:
    chosen = options(__doc__)
    rows = compare()
    simulated = simulated_crossover(rows)
    theory = rows[0]["GPU ms/step"] / (rows[0]["host ms/step"] / rows[0]["host scale"])
    there = {mode: run(PRESET, f"mode={mode}", f"host.scale={simulated}") for mode in ("sync", "async")}
    columns = {
        "host scale": "{:g}",
        "host ms/step": "{:.2f}",
        "GPU ms/step": "{:.2f}",
        "sync s": "{:.1f}",
        "async s": "{:.1f}",
        "times faster": "{:.2f}",
        "GPU active, sync": percent,
        "GPU active, async": percent,
        "async is limited by": "{}",
    }
    notes = {
        "crossover_scale_simulated": simulated,
        "crossover_scale_theory": theory,
        "times_faster_at_the_crossover": there["sync"].makespan_ns / there["async"].makespan_ns,
    }
    report(chosen.json, f"{PRESET}, host work scaled (simulated)", rows, columns, notes)
    if chosen.plot:
        from asyncsched.plotting import plot_curve

        points = [
            {"scale": row["host scale"], "mode": mode, "seconds": row[f"{mode} s"]}
            for row in rows
            for mode in ("sync", "async")
        ]
        plot_curve(
            points,
            "scale",
            "seconds",
            chosen.plot,
            series="mode",
            x_label="host work, times that of the published run",
            y_label="total time (s)",
            title="Async hides the host until the host is the limit",
            marks=[(simulated, f"host = GPU, at {simulated:.2f}x")],
        )


if __name__ == "__main__":
    main()
