"""Text that arrives in pieces: characters over several tokens, stop strings over several tokens, and tokenizers that
write the same token differently at the beginning.
"""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from asyncsched import EngineConfig, FinishReason, SamplingParams, Scheduler
from executors.text import Decode, Detokenizer, OutputText, StopStrings, decoder_of

TEXT = "The fox: größer 你好世界 😀👩\u200d👩\u200d👧 stops.\n\nEND of it"


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """A Llama-like tokenizer: spaces inside tokens, one stripped at the beginning, unknown characters as bytes."""
    pieces = [
        "<eos>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁world",
        *"abcdefghijklmnopqrstuvwxyzTEND:.\n",
    ]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def pieces_of(decode: Decode, tokens: list[int], context: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(decode, context)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


def bytes_decoder(parts: list[bytes]) -> Decode:
    """Token i is `parts[i]`."""
    return lambda tokens: b"".join(parts[token] for token in tokens).decode("utf-8", errors="replace")


# ---- detokenizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_pieces_make_up_the_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    decode = decoder_of(tokenizer)
    pieces = pieces_of(decode, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(not piece for piece in pieces) >= 5  # characters over several tokens
    assert pieces_of(tokenizer.decode, tokens) == pieces  # a tokenizer without a fast side


@pytest.mark.parametrize("seed", range(30))
def test_random_tokens_make_up_the_text_of_all(byte_level: PreTrainedTokenizerFast, seed: int) -> None:
    """Most random byte tokens are no valid text."""
    draw = random.Random(seed)
    few = draw.sample(range(1, len(byte_level)), draw.choice([3, 20, 250]))
    tokens = [draw.choice(few) for _ in range(200)]
    decode = decoder_of(byte_level)
    assert "".join(pieces_of(decode, tokens)) == decode(tokens)


@given(text=st.text(min_size=1, max_size=40), cuts=st.lists(st.integers(0, 200), max_size=60))
def test_text_is_released_as_soon_as_it_is_complete(text: str, cuts: list[int]) -> None:
    parts = split(text.encode(), cuts)
    detokenizer = Detokenizer(bytes_decoder(parts))
    written, released = b"", ""
    for token, part in enumerate(parts):
        written += part
        released += detokenizer.feed(token)
        if not written.decode("utf-8", errors="replace").endswith("\ufffd"):
            assert released.encode() == written
    assert released + detokenizer.flush() == text


@given(data=st.binary(min_size=1, max_size=80), cuts=st.lists(st.integers(0, 80), max_size=80))
def test_any_split_of_any_bytes_makes_up_what_they_decode_to(data: bytes, cuts: list[int]) -> None:
    parts = split(data, cuts)
    assert "".join(pieces_of(bytes_decoder(parts), list(range(len(parts))))) == data.decode("utf-8", errors="replace")


def test_a_long_run_of_invalid_bytes_is_released_while_it_goes_on() -> None:
    detokenizer = Detokenizer(lambda tokens: bytes([0xFF] * len(tokens)).decode("utf-8", errors="replace"))
    released = sum(len(detokenizer.feed(0)) for _ in range(500))
    assert released > 480
    assert released + len(detokenizer.flush()) == 500


@pytest.mark.parametrize("before", range(1, 30))
def test_text_after_invalid_bytes_is_whole(before: int) -> None:
    data = b"\xff" * before + "你好".encode() + b"\xe4\xbd" * 5 + "😀".encode()
    parts = [data[i : i + 1] for i in range(len(data))]
    assert "".join(pieces_of(bytes_decoder(parts), list(range(len(parts))))) == data.decode("utf-8", errors="replace")


def test_the_prompt_decides_about_the_leading_space(byte_fallback: PreTrainedTokenizerFast) -> None:
    decode = decoder_of(byte_fallback)
    prompt = byte_fallback.encode("a b c", add_special_tokens=False)
    output = [byte_fallback.convert_tokens_to_ids("▁world")]
    assert "".join(pieces_of(decode, output)) == "world"
    assert "".join(pieces_of(decode, output, tuple(prompt))) == " world"


def test_special_tokens_have_no_text_and_change_none(byte_fallback: PreTrainedTokenizerFast) -> None:
    decode = decoder_of(byte_fallback)
    eos, world, space = byte_fallback.convert_tokens_to_ids(["<eos>", "▁world", "▁"])
    for tokens in (
        [eos, world],
        [world, eos, eos, world],
        [space, world],
        [space, eos, world],
        [eos] * 70 + [world] * 2,
        [world, *[eos] * 70, world],
    ):
        assert "".join(pieces_of(decode, tokens)) == decode(tokens), tokens
    shown = decoder_of(byte_fallback, skip_special_tokens=False)
    assert "".join(pieces_of(shown, [world, eos, world])) == "world<eos> world"


def test_a_token_costs_the_same_late_in_a_long_output() -> None:
    lengths: list[int] = []

    def decode(tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return "".join(chr(97 + token) for token in tokens)

    detokenizer = Detokenizer(decode, range(20))
    assert "".join(detokenizer.feed(i % 26) for i in range(1000))[-3:] == chr(97 + 997 % 26) + "kl"
    assert max(lengths) < 10


# ---- stop strings ----------------------------------------------------------------------------------------------------


def cut_at(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By trying every end: the text before the first stop string to be complete, and that string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


LETTERS = st.text(alphabet="abé你", max_size=24)
STOPS = st.lists(st.text(alphabet="abé你", min_size=1, max_size=4), min_size=1, max_size=4)


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=24))
@settings(max_examples=400)
def test_stop_strings_cut_any_split_of_the_text_at_the_same_place(text: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopStrings(stops)
    released = ""
    bounds = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    for a, b in pairwise(bounds):
        released += finder.feed(text[a:b])
        if finder.found:
            break
    assert (released + finder.flush(), finder.found) == cut_at(text, stops)


def test_as_little_as_possible_is_kept_back() -> None:
    finder = StopStrings(["END", "</s>"])
    assert [finder.feed(piece) for piece in ("a", "E", "N", "E", "</", "s", "b", "</", "s> tail")] == [
        *("a", "", "", "EN", "E", "", "</sb", "", "")
    ]
    assert finder.found == "</s>"


def test_a_string_that_may_not_stop_yet_is_text() -> None:
    finder = StopStrings(["abc-def", "bc"])
    assert finder.feed("abc", may_stop=False) == ""
    assert finder.feed("-") == ""
    assert finder.found is None
    assert finder.feed("x bc") == "abc-x "
    assert finder.found == "bc"


# ---- tokens and text together ----------------------------------------------------------------------------------------


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 60), max_size=60), min_tokens=st.integers(1, 6))
@settings(max_examples=400)
def test_no_token_of_a_stop_string_is_let_go(text: str, stops: list[str], cuts: list[int], min_tokens: int) -> None:
    """Tokens are any split of the bytes. What was let go before the stop lies wholly before the stop string."""
    parts = split(text.encode(), cuts) if text else []
    params = SamplingParams(stop=tuple(stops), max_tokens=100, min_tokens=min_tokens)
    output = OutputText(bytes_decoder(parts), params)
    let_go, shown, ends = 0, "", np.cumsum([len(part) for part in parts])
    for token in range(len(parts)):
        match = output.feed(token)
        assert 0 <= match.held <= token + 1 - let_go or match.stopped
        if match.stopped:
            break
        let_go = token + 1 - match.held
        shown += output.deliver([])
        assert text.startswith(shown)
        assert len(shown.encode()) >= (ends[let_go - 1] if let_go else 0)
    final = shown + output.finish()
    if output.stop_string is None:
        assert final == text
    else:
        start = len(final.encode())
        assert text.encode()[start:].startswith(output.stop_string.encode())
        assert let_go == 0 or ends[let_go - 1] <= start
        assert token + 1 >= min_tokens
    if min_tokens == 1:
        assert (final, output.stop_string) == cut_at(text, stops)


def test_tokens_are_let_go_as_soon_as_they_can_be() -> None:
    parts = [b"ab", b"c", b"\xc3", b"\xa9", b"", b"E", b"x", b"EN", b"D!"]
    output = OutputText(bytes_decoder(parts), SamplingParams(stop=("END",)))
    matches = [output.feed(token) for token in range(len(parts))]
    assert [match.held for match in matches] == [0, 0, 1, 0, 0, 1, 0, 1, 0]
    assert [match.stopped for match in matches] == [False] * 8 + [True]
    assert output.deliver([]) + output.finish() == "abcéEx"


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_the_stop_id_that_ended_the_output_has_no_text(stop: tuple[str, ...]) -> None:
    parts = [b"a", b".", b"b", b"."]
    params = SamplingParams(stop=stop, stop_token_ids=(1, 3), min_tokens=3)
    output = OutputText(bytes_decoder(parts), params)
    text = ""
    for token in (0, 1, 2, 3):
        if stop:
            output.feed(token)
        text += output.deliver([token])
    assert text + output.finish() == "a.b"


def test_what_is_left_is_shown_at_the_end() -> None:
    output = OutputText(bytes_decoder([b"a E", b"N", b"\xe4\xbd"]), SamplingParams(stop=("END",)))
    for token in range(3):
        output.feed(token)
    assert output.deliver([0]) == "a "
    assert output.finish() == "EN\ufffd"


def deliver_all(
    tokens: list[int], params: SamplingParams, matcher: OutputText, depth: int
) -> tuple[list[int], FinishReason]:
    """What the core delivers of a request whose sampled tokens are these."""
    scheduler = Scheduler(EngineConfig(depth=depth, max_num_seqs=1, max_model_len=256))
    scheduler.submit("a", np.array([5], dtype=np.int32), params, matcher=matcher)
    plans, delivered = [], list[int]()
    while True:
        plan = scheduler.plan(len(plans) % depth) if len(plans) < depth else None
        if plan is not None:
            plans.append(plan)
            continue
        plan = plans.pop(0)
        sampled = [tokens[end - 1] if end <= len(tokens) else 0 for end in plan.sampled_ends.tolist()]
        out = scheduler.commit(plan, np.array(sampled, dtype=np.int32))
        delivered += out.tokens.tolist()
        if out.finished:
            return delivered, out.finished[0].reason


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("The fox stops here. END of it", "END", "The fox stops here. "),
        ("größer 你好世界 😀", "世", "größer 你好"),
        ("a\n\nb\n\n\nc", "\n\n\n", "a\n\nb"),
        ("no such thing", "END", "no such thing"),
    ],
)
def test_the_core_stops_where_the_text_does(
    byte_level: PreTrainedTokenizerFast, depth: int, text: str, stop: str, expected: str
) -> None:
    tokens = byte_level.encode(text, add_special_tokens=False)
    params = SamplingParams(stop=(stop,), max_tokens=len(tokens), min_tokens=0)
    output = OutputText(decoder_of(byte_level), params)
    delivered, reason = deliver_all(tokens, params, output, depth)
    assert output.deliver(delivered) + output.finish() == expected
    assert reason is (FinishReason.LENGTH if expected == text else FinishReason.STOP)
    assert delivered == tokens[: len(delivered)]
    assert decoder_of(byte_level)(delivered).startswith(expected)


def test_reference_cuts_as_it_should() -> None:
    assert cut_at("xabcd", ["bcd", "abc"]) == ("x", "abc")
    assert cut_at("xabc", ["bc", "abc"]) == ("x", "abc")
    assert cut_at("xabc", ["d"]) == ("xabc", None)
