"""What a user hands over: prompts and sampling parameters are checked where they enter, by name."""

from __future__ import annotations

import numpy as np
import pytest

from asyncsched.errors import ConfigError
from asyncsched.request import SamplingParams, as_tokens


@pytest.mark.parametrize(
    "prompt", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], dtype=np.int64), np.array([1, 2, 3], dtype=np.uint8)]
)
def test_a_prompt_becomes_int32(prompt):
    tokens = as_tokens(prompt)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [1, 2, 3]


def test_an_empty_prompt_is_left_to_the_scheduler():
    assert as_tokens([]).shape == (0,)


@pytest.mark.parametrize(
    "prompt",
    [
        "text",
        [1.0, 2.0],
        [[1, 2], [3, 4]],
        np.zeros((3, 3), dtype=np.int32),
        [1, [2]],
        7,
        None,
        [True],
        [2**31],
        [2**40],
        [2**70],
        [-1],
    ],
    ids=str,
)
def test_what_is_no_list_of_token_ids_is_refused_in_one_line(prompt):
    with pytest.raises(ConfigError) as caught:
        as_tokens(prompt)
    assert caught.value.field == "prompt"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 1.0}),
        ("max_tokens", {"max_tokens": True}),
        ("max_tokens", {"max_tokens": None}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 17}),
        ("min_tokens", {"min_tokens": 0.5}),
        ("stop_token_ids", {"stop_token_ids": ("a",)}),
        ("stop_token_ids", {"stop_token_ids": (1.0,)}),
        ("stop_token_ids", {"stop_token_ids": 5}),
        ("stop_token_ids", {"stop_token_ids": (2**31,)}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
    ],
)
def test_a_parameter_that_cannot_be_used_is_named(field, params):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**params)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_parameters_at_their_limits():
    assert SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=(0, 2**31 - 1)).min_tokens == 1
