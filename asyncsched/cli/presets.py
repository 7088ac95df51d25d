"""`asyncsched presets`: the scenarios that come along."""

from __future__ import annotations

from asyncsched.cli.inputs import AsJson, print_json


def presets(as_json: AsJson = False) -> None:
    """List the scenarios that come along."""
    from sim.scenario import presets as known_presets

    known = known_presets()
    if as_json:
        print_json(known)
        return
    from asyncsched.cli.tables import print_table

    rows = [(name, description) for name, description in known.items()]
    print_table("Presets: asyncsched simulate --preset NAME", ("name", "what it is"), rows)
