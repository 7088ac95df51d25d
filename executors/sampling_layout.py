"""What host and device agree on about sampling: features, the words of a row's parameters, and resets."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from asyncsched.inputs import Int32s

MAX_EDITS = 1024  # logit biases and suppressed stop ids of one request
IN_PROMPT = 1 << 30  # in a token's count: the prompt has it


class Features(IntEnum):
    """What the rows of a step use beyond the largest logit, as bits of an int. What nobody uses is not computed.

    Not an IntFlag: an operation of those costs a step on the host ten times one of ints.
    """

    NONE = 0
    RANDOM = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    PENALTIES = 16
    EDITS = 32
    LOGPROBS = 64
    ALL = 127


class Word(IntEnum):
    """Columns of the parameters, int32; from INV_TEMPERATURE on they are the bits of a float32.

    INV_TEMPERATURE is 0 for greedy rows; TOP_K is the vocabulary's size for rows without it.
    """

    ROW = 0
    NUM_EDITS = 1
    KEY = 2  # and 3
    TOP_K = 4
    INV_TEMPERATURE = 5
    TOP_P = 6
    MIN_P = 7
    REPETITION = 8
    PRESENCE = 9
    FREQUENCY = 10


NUM_WORDS = 11


class Resets(NamedTuple):
    """What to reset on the device: `words` holds, one after the other,

    rows    int32[num_rows]       rows whose counts start from zero
    counts  int32[num_counts, 3]  row, token, occurrences in the output (plus IN_PROMPT); each pair once
    edits   int32[num_edits, 4]   row, index of the edit, token, float32 bits of what is added to its logit
    """

    words: Int32s
    num_rows: int
    num_counts: int
    num_edits: int


NO_RESETS = Resets(np.zeros(0, dtype=np.int32), 0, 0, 0)
