"""What prices are of: the model and the device that a profile, a recorded run or a scenario names.

Only what both sides say is compared. A profile of something else is nobody's mistake for certain ("what would this run
have been over there?"), so it is said and not refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncsched.errors import ConfigError
from asyncsched.runs import Run
from sim.hardware import Device, ModelShape, shape_by_name
from sim.profile import Profile
from sim.spec import validate

FACTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "kv_bytes_per_token",
    "dtype",
)
"""Of a model, as a recorded run has them."""
MOST_SHOWN = 3


class Subject(NamedTuple):
    """A model (`name` and FACTS) and a device's name in the words of a recorded run, as far as somebody said."""

    model: Mapping[str, Any]
    device: str = ""


def of_profile(profile: Profile) -> Subject:
    return Subject(profile.model, _device(profile.device))


def of_run(run: Run) -> Subject:
    return Subject(run.info.model, _device(run.info.device))


def of_scenario(data: Mapping[str, Any]) -> Subject:
    """Of unchecked scenario data: its profile's, or what its roofline is of. What is wrong with either is for whoever
    prices by it to say."""
    profile, gpu = data.get("profile"), data.get("gpu")
    try:
        if isinstance(profile, Mapping):
            return of_profile(Profile.from_dict(profile))
        if isinstance(gpu, Mapping) and gpu.get("kind") == "roofline":
            shape, device = validate(ModelShape, gpu["model"]), validate(Device, gpu["device"])
            return Subject({**_facts(shape), "kv_bytes_per_token": round(shape.kv_bytes_per_token)}, device.name or "")
    except (ConfigError, KeyError):
        pass
    return Subject({})


def warning(prices: Subject, other: Subject, what: str) -> str:
    """One line on prices that are of another model or device than `other`, which is a `what`; "" where they are not,
    or nobody says."""
    model = differing_facts(prices.model, other.model)
    parts = []
    if model:
        shown = [f"{fact} {mine} and not {theirs}" for fact, mine, theirs in model[:MOST_SHOWN]]
        parts.append(f"another model than the {what} ({', '.join(shown)})")
    elif model is None:
        mine, theirs = prices.model["name"], other.model["name"]
        parts.append(f"{mine}, and nobody can tell whether that is the {what}'s model, {theirs}")
    if not _same_device(prices.device, other.device):
        parts.append(f"another device than the {what} ({prices.device} and not {other.device})")
    return f"the profile is of {', and of '.join(parts)}; its prices are taken all the same" if parts else ""


def differing_facts(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]] | None:
    """Each fact in which two models differ, and both values; None where there are two names and no facts to compare."""
    mine, theirs = _known(one), _known(other)
    shared = [fact for fact in FACTS if fact in mine and fact in theirs]
    if shared:
        return [(fact, mine[fact], theirs[fact]) for fact in shared if mine[fact] != theirs[fact]]
    names = one.get("name"), other.get("name")
    return None if all(names) and names[0] != names[1] else []


def _known(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its facts; an imported log names a model of the Hub and has none."""
    if any(fact in model for fact in FACTS):
        return model
    shape = shape_by_name(str(model.get("name", "")))
    return model if shape is None else _facts(shape)


def _facts(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name or "",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
    }


def _device(device: Mapping[str, Any]) -> str:
    """Its name, as our runs or an imported log have it."""
    return str(device.get("name") or device.get("device_name") or "")


def _same_device(one: str, other: str) -> bool:
    """`h200` is the NVIDIA H200, and `rtx4090` the RTX 4090; `l40` is no L40S. Full names must be equal: an H200 NVL is
    another device."""
    (short, mine), (_, theirs) = sorted(
        ((name, _words(name)) for name in (one, other)), key=lambda of: len("".join(of[1]))
    )
    if not mine or "".join(mine) == "".join(theirs):
        return True
    parts = ("".join(theirs[i:j]) for i in range(len(theirs)) for j in range(i + 1, len(theirs) + 1))
    return " " not in short.strip() and "".join(mine) in parts


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
