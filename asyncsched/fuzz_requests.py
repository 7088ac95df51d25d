"""The fuzzer's own view of every request: what it must get, has got and was told, whatever the scheduler believes."""

from __future__ import annotations

from collections.abc import Callable

from asyncsched.config import EngineConfig
from asyncsched.fuzz_accounts import Quarantine, fail
from asyncsched.fuzz_scenario import Submission
from asyncsched.oracle import PatternMatcher, Reference
from asyncsched.request import Finished, FinishReason


class Track:
    """One request.

    sampled   epoch of every output token planned so far
    end       where its last planned rows end; most_end: where they may end at most
    got       output tokens handed out
    notice    the last word about it
    cause     the message its notice must have, once a fault has hit it
    matcher   of its stop pattern, if it has one; `safe` output tokens so far can't become part of a match any more
    """

    __slots__ = (
        "cause",
        "end",
        "got",
        "matcher",
        "most_end",
        "notice",
        "number",
        "outputs",
        "prompt",
        "reference",
        "safe",
        "sampled",
        "settled",
        "spec",
    )

    def __init__(self, number: int, spec: Submission, reference: Reference) -> None:
        self.number = number
        self.spec = spec
        self.reference = reference
        self.outputs = reference.outputs
        self.prompt = len(spec.prompt)
        self.most_end = self.prompt + spec.max_tokens - 1
        self.sampled: list[int] = []
        self.end = 0
        self.got = 0
        self.notice: Finished | None = None
        self.cause: str | None = None
        self.matcher = PatternMatcher(spec.pattern) if spec.pattern else None
        self.settled = 0
        self.safe = 0

    def feed(self, token: int) -> None:
        """One more output token is known. Only for requests with a matcher."""
        assert self.matcher is not None
        self.settled += 1
        self.safe = self.settled - self.matcher.feed(token).held

    def reaches(self, count: int) -> bool:
        """Whether the request alone has so many output tokens, as far as they were sampled; `outputs` has them then."""
        alone, outputs, sampled = self.reference, self.outputs, self.sampled
        while (at := len(outputs)) < count:
            if alone.reason is not None or at >= len(sampled):
                return False
            alone.advance(sampled[at])
        return True

    def expected(self, count: int) -> list[int]:
        """The first `count` output tokens of the request alone; fewer where it ends sooner or none was sampled."""
        self.reaches(count)
        return self.outputs[:count]


class Requests:
    """All requests of an episode, by number. `num_usable` asks how many KV blocks are not in quarantine."""

    def __init__(
        self, config: EngineConfig, counts: dict[str, int], lost: Quarantine, num_usable: Callable[[], int]
    ) -> None:
        self.tracks: list[Track] = []
        self._config = config
        self._counts = counts
        self._lost = lost
        self._num_usable = num_usable
        self._aborts: list[tuple[str, int]] = []  # to be seen before the next plan: id, requests submitted by then
        self._aborted_ids: set[str] = set()
        self.some_match = False  # some request has a stop pattern

    # ---- what enters -----------------------------------------------------------------------------------------------

    def submitted(self, spec: Submission) -> None:
        config = self._config
        alone = Reference(
            spec.prompt, spec.params, pattern=spec.pattern, window=config.sliding_window, vocab_size=config.vocab_size
        )
        self.tracks.append(Track(len(self.tracks), spec, alone))
        self._counts["requests"] += 1
        self.some_match = self.some_match or bool(spec.pattern)

    def aborting(self, request_id: str) -> None:
        self._aborts.append((request_id, len(self.tracks)))
        self._aborted_ids.add(request_id)

    def check_aborted(self) -> None:
        """A plan is made: every abort before it has been heard."""
        for request_id, submitted in self._aborts:
            for track in self.tracks[:submitted]:
                if track.spec.request_id == request_id and track.notice is None:
                    fail("I6", f"request {track.number}, {request_id!r}, was aborted and goes on")
        self._aborts.clear()

    # ---- what leaves -----------------------------------------------------------------------------------------------

    def token(self, number: int, token: int) -> None:
        """One token is handed out."""
        track = self.tracks[number]
        if track.notice is not None:
            fail("I6", f"request {number} gets token {token} after its {track.notice.reason.value} notice")
        outputs, at = track.outputs, track.got
        track.got = at + 1
        if len(outputs) <= at and not track.reaches(at + 1):
            fail("I5", f"request {number} gets output {at}, {token}, which is one too many")
        if outputs[at] != token:
            fail("I1", f"output {at} of request {number} is {token}; alone it is {outputs[at]}")

    def notice(self, notice: Finished, causes: dict[int, str]) -> None:
        """A request ends. `causes`: of the requests that the step just settled must end."""
        track, reason = self.tracks[notice.number], notice.reason
        if track.notice is not None:
            fail("I6", f"request {track.number} ends twice: {track.notice.reason.value}, {reason.value}")
        if notice.request_id != track.spec.request_id:
            fail("I6", f"the notice of request {track.number} names {notice.request_id!r}")
        self._check_tokens(track, notice)
        if reason is FinishReason.LENGTH or reason is FinishReason.STOP:
            self._check_finish(track, notice)
        elif reason is FinishReason.ABORT:
            if notice.request_id not in self._aborted_ids:
                fail("I6", f"request {track.number} ends as aborted; nobody aborted it")
        elif reason is FinishReason.ERROR:
            self._check_error(track, notice, causes.get(track.number))
        else:
            self._check_rejection(track, notice)
        track.notice = notice

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _check_tokens(self, track: Track, notice: Finished) -> None:
        tokens = notice.token_ids.tolist()
        alone = track.expected(len(tokens))
        if tokens != alone:
            fail("I1", f"request {track.number} ends ({notice.reason.value}) with {tokens}; alone with {alone}")
        if track.got != len(tokens):
            fail("I6", f"request {track.number} got {track.got} tokens, its notice has {len(tokens)}")

    def _check_finish(self, track: Track, notice: Finished) -> None:
        alone, number, reason = track.reference, track.number, notice.reason
        if track.cause is not None:
            fail("fault", f"request {number} was hit by a fault ({track.cause}) and ends with {reason.value}")
        count = len(notice.token_ids)
        if alone.reason is not reason or count != len(alone.outputs) or track.got != count:
            why = alone.reason.value if alone.reason else "not yet"
            fail(
                "I1",
                f"request {number} ends ({reason.value}) with {count} tokens, {track.got} handed out; "
                f"alone ({why}) with {len(alone.outputs)}",
            )
        self._counts["length_stops" if reason is FinishReason.LENGTH else "content_stops"] += 1

    def _check_error(self, track: Track, notice: Finished, cause: str | None) -> None:
        self._counts["failed_requests"] += 1
        if cause is not None:
            if notice.message != cause:
                fail("fault", f"request {track.number} fails with {notice.message!r} and not with {cause!r}")
            return
        all_lost = len(self._lost.slots) == self._config.depth
        unfit = bool(self._lost.slots) and self._least_blocks(track) > self._num_usable()
        self._counts["engine_losses"] += all_lost
        if not all_lost and not unfit:
            fail("fault", f"request {track.number} fails without a reason: {notice.message}")

    def _check_rejection(self, track: Track, notice: Finished) -> None:
        self._counts["rejected"] += 1
        config, spec = self._config, track.spec
        total = track.prompt + spec.max_tokens
        in_use = any(
            other.spec.request_id == spec.request_id and other.notice is None for other in self.tracks[: track.number]
        )
        never = (
            track.prompt == 0
            or total > config.max_model_len
            or self._least_blocks(track) > self._num_usable()
            or (not config.enable_chunked_prefill and total - 1 > config.max_num_batched_tokens)
        )
        if not in_use and not never:
            fail("I8", f"request {track.number} is rejected and would fit: {notice.message}")

    def _least_blocks(self, track: Track) -> int:
        config = self._config
        blocks = -(-track.most_end // config.block_size)
        if config.sliding_window is None or not config.enable_chunked_prefill:
            return blocks
        return min(blocks, -(-(config.sliding_window - 1) // config.block_size) + 1)
