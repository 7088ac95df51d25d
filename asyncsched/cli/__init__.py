"""The `asyncsched` command: where core, simulator and pictures are put together.

    app        the commands and how a call of one ends: exit status, one line for any error
    inputs     options that several commands share, and the scenario that they name
    files      output files: checked before the work, written whole or not at all
    progress   a bar on stderr for what takes long
    figures    what each figure of a summary is called and means
    simulate, sweep, capacity, advise, report, presets, generate, bench   one command each
    cluster    where a sweep's runs go: this machine, Ray, Dask
    results, words, charts, pages   a report: files, what limits a run, plotly's figures, HTML

    calibrate, validate, whatif   what recorded runs teach, and how far from them the simulator is
    runs       the runs and profiles that these name
    importing  `import`: a scenario from a log of another engine's requests

For the commands that run a real model (`record` is one more):

    loading      options of its engine, and how it is loaded
    prompts      prompts and sampling parameters, from options and from lines of a file
    running      requests on a loaded model, until they end or the user interrupts
    answers      what came out, on stdout or as a file of lines
    chatting     a conversation on stdin and stdout
    measured     traces and pictures of what was measured
    kernels      how much of the time the GPU's kernels ran

Importing this package loads nothing heavy, nor does asking for help: commands import what they need when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    try:
        from asyncsched.cli.app import run
    except KeyboardInterrupt:  # while the command's modules are loaded
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
