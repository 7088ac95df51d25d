"""Output files: checked before the work begins, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from asyncsched.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def check_output(option: str, path: Path | None, suffixes: tuple[str, ...]) -> None:
    """Raises ConfigError when `write_output` could not write the file; leaves no trace. None is no file."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise ConfigError(option, str(path), f"its name must end in {' or '.join(suffixes)}")
    try:
        if path.is_dir():
            raise ConfigError(option, str(path), "it is a directory; name a file")
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise ConfigError(option, str(path), "it exists and cannot be replaced; name another file")
        if not path.parent.is_dir():
            raise ConfigError(option, str(path), f"the folder {str(path.parent)!r} does not exist; create it first")
        temporary = _temporary(path)
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise _unwritable(option, path, error) from None


def check_distinct(files: Mapping[str, Path | None]) -> None:
    """Raises ConfigError where two are one file: what is written later would replace it. By option, inputs first."""
    named: dict[str, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        other = named.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(option, str(path), f"it is the file of {other} too; name another file")


def write_output(option: str, path: Path, content: bytes) -> None:
    """Replaces the file, or leaves it as it was. Raises ConfigError."""
    temporary = _temporary(path)
    try:
        with temporary.open("xb") as file:
            file.write(content)
        temporary.replace(path.resolve())  # a link stays one
    except OSError as error:
        raise _unwritable(option, path, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """Beside the file itself, since only there a rename is atomic."""
    return path.resolve().with_name(f".asyncsched-{os.getpid()}.tmp")


def _unwritable(option: str, path: Path, error: OSError | RuntimeError) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(option, str(path), f"it cannot be written ({reason}); name a file elsewhere")
