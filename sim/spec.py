"""What every section of a scenario has in common: strict fields, and errors in one line.

A section is a frozen pydantic model. Numbers are never made from text, NaN and infinity are refused, and a key that the
section does not know is an error. Whatever pydantic finds becomes one `ConfigError` that names the dotted field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from asyncsched.errors import MISSING, ConfigError

# The upper limits keep every product of allowed values finite; nothing real comes near them.
Time = Annotated[float, Field(ge=0, le=1e12)]
"""A duration, in the unit its name tells."""
Rate = Annotated[float, Field(ge=1e-3, le=1e12)]
"""Something per second, in the unit its name tells."""
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(gt=0, le=1)]

BY_KIND = BeforeValidator(lambda data: {"kind": None, **data} if isinstance(data, Mapping) else data)
"""Goes with a union of sections told apart by `kind`: without one, the error then lists the kinds there are."""

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Section(BaseModel):
    """Base of all sections. Unknown keys are named with the nearest known ones, which pydantic would not do."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = [info.alias or name for name, info in cls.model_fields.items()]
            for key, value in data.items():
                if key not in known:
                    raise ConfigError(str(key), value, unknown("key", key, known))
        return data


SectionT = TypeVar("SectionT", bound=BaseModel)


def validate(model: type[SectionT], data: Mapping[str, object]) -> SectionT:
    """`model` from plain data. Raises ConfigError for the first problem found."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise config_error(error, data) from None


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The `allowed` part of an error about a name: near matches if any, else all known names."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, cutoff=0.6)
    return f"unknown {what}, " + (f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(known)}")


def config_error(error: ValidationError, data: object) -> ConfigError:
    """The first problem in `error`, found while validating `data`."""
    first = error.errors()[0]
    field, value, kind, context = _dotted(first["loc"], data), first["input"], first["type"], first.get("ctx", {})
    inner = context.get("error")
    if isinstance(inner, ConfigError):  # from a validator of ours, which knows the field from its section down
        return ConfigError(_join(field, inner.field), inner.value, inner.allowed)
    match kind:
        case "missing":
            return ConfigError(field, MISSING, "a value is required, there is no default")
        case "union_tag_invalid":
            given = MISSING if value["kind"] is None else value["kind"]
            return ConfigError(_join(field, "kind"), given, f"use one of {context['expected_tags']}")
        case "model_type" | "model_attributes_type" | "dict_type":
            return ConfigError(field, value, "it must be a table of keys")
    return ConfigError(field, value, first["msg"].replace("Input should", "it must").replace("tuple", "list"))


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _dotted(loc: tuple[int | str, ...], data: object) -> str:
    """`loc` as the user would write it: without the `kind` that pydantic puts into the path of a union of sections."""
    parts: list[str] = []
    told: object = None  # the section whose `kind` has been left out: a key may be called like it
    for part in loc:
        if isinstance(data, Mapping):
            if data.get("kind") == part and told is not data:
                told = data
                continue
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        parts.append(str(part))
    return ".".join(parts)
