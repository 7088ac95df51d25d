"""The `asyncsched` command: where core, simulator and pictures are put together.

    app        the commands and how a call of one ends: exit status, one line for any error
    inputs     options that several commands share, and the scenario that they name
    files      output files: checked before the work, written whole or not at all
    progress   a bar on stderr for what takes long
    figures    what each figure of a summary is called and means
    simulate, sweep, presets   one command each

Importing this package loads nothing heavy, nor does asking for help: commands import what they need when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    from asyncsched.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
