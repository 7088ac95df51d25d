"""Tables on stdout. Where that is no terminal they are as wide as they need to be."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 120  # of tables that go to a file or a pipe


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Container[str] = ()
) -> None:
    """The columns named in `numbers` are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
