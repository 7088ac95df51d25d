"""Planted faults in the life of requests: eviction, late tokens, stops, aborts, budgets, policies and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mutants.catalogue import Mutant, around, rewrite

GIVE_UP_SEATS = "scheduler.Scheduler._give_up_seats"
ADMIT = "scheduler.Scheduler._admit"
COMMIT = "scheduler.Scheduler.commit"
END = "scheduler.Scheduler._end"
EVICT = "scheduler.Scheduler._evict"
SEAT = "scheduler.Scheduler._seat"
SCRUTINISE = "stops.scrutinise"
DRAINED = "scheduler.Scheduler._release_drained"
ONE_BY_ONE = "stops.commit_one_by_one"
UNSEAT = "self._unseat(request)"
IN_FLIGHT = "if self.rows.last_step[row] > self._settled:"


def overshoot_is_delivered(commit: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, plan: Any, tokens: Any) -> Any:
        stopped = self.rows.stopped[plan.sampled]
        late, numbers = tokens[stopped], self.rows.request[plan.sampled[stopped]]
        output = commit(self, plan, tokens)
        return output._replace(
            requests=np.concatenate((output.requests, numbers)), tokens=np.concatenate((output.tokens, late))
        )

    return changed


def first_token_after_clear_is_lost(commit: Callable[..., Any]) -> Callable[..., Any]:
    """Of each request that was evicted with nothing in flight: a late token seems to be due."""

    def changed(self: Any, plan: Any, tokens: Any) -> Any:
        owners = {n: self.rows.owner[row] for n, row in zip(plan.requests.tolist(), plan.rows.tolist(), strict=True)}
        output = commit(self, plan, tokens)
        kept = [not vars(self).get("due", set()).intersection([owners[n]]) for n in output.requests.tolist()]
        vars(self).get("due", set()).difference_update(owners[n] for n in output.requests.tolist())
        return output._replace(requests=output.requests[kept], tokens=output.tokens[kept])

    return changed


def ends_twice(abort: Callable[..., Any]) -> Callable[..., Any]:
    """Aborting a request that has ended tells its user again."""

    def changed(self: Any, request_id: str) -> Any:
        notice = abort(self, request_id)
        return vars(self).setdefault("ended", {}).setdefault(request_id, notice)

    return changed


def goes_on(fail: Callable[..., Any]) -> Callable[..., Any]:
    """Requests of a failed step are not ended."""

    def changed(self: Any, plan: Any, cause: str, *, stuck: bool = False) -> Any:
        self._end = lambda *args: None
        output = fail(self, plan, cause, stuck=stuck)
        del self._end
        return output._replace(finished=())

    return changed


REQUESTS = (
    # ---- eviction
    Mutant(
        "late tokens land on counters that were reset",
        (
            rewrite(EVICT, (IN_FLIGHT, f"{IN_FLIGHT}\n        self.rows.known[row] = request.num_prompt_tokens")),
            rewrite(
                COMMIT,
                ("r.token_base[rows] + ends", "r.token_base[rows] + r.known[rows]"),
                ("r.known[rows] = r.after[ends]", "r.known[rows] += 1"),
            ),
        ),
        "01-evict-in-flight",
        1,
    ),
    Mutant(
        "late tokens are ignored",
        (rewrite(EVICT, (IN_FLIGHT, f"{IN_FLIGHT}\n        self.rows.live[row] = False")),),
        "01-evict-in-flight",
        1,
    ),
    Mutant(
        "late tokens count twice",
        (rewrite(DRAINED, (UNSEAT, f"{UNSEAT}; request.tokens = np.append(request.tokens, request.tokens[-1:])")),),
        "01-evict-in-flight",
        1,
    ),
    Mutant(
        "readmitted without its late token",
        (rewrite(DRAINED, (UNSEAT, f"{UNSEAT}; request.tokens = request.tokens[: max(len(request.tokens) - 1, 1)]")),),
        "01-evict-in-flight",
        1,
    ),
    Mutant(
        "admitted before its late token",
        (rewrite(ADMIT, ("if request.row >= 0:", "if False:")),),
        "room before the late token",
        1,
    ),
    Mutant(
        "the history of an evicted request ends where it was computed",
        (rewrite("scheduler.Scheduler._unseat", ("self.rows.known[row]", "self.rows.computed[row]")),),
        "02-evict-during-chunked-prefill",
        2,
    ),
    Mutant(
        "waits for a late token with nothing in flight",
        (rewrite(EVICT, (IN_FLIGHT, IN_FLIGHT.replace(">", ">="))),),
        "04-clear-with-nothing-in-flight",
        4,
    ),
    Mutant(
        "the first token after a clear is lost",
        (
            rewrite(
                EVICT,
                (
                    "else:\n        self._unseat",
                    "else:\n        vars(self).setdefault('due', set()).add(request)\n        self._unseat",
                ),
            ),
            around(COMMIT, first_token_after_clear_is_lost),
        ),
        "04-clear-with-nothing-in-flight",
        4,
    ),
    Mutant(
        "an evicted request starts over from its prompt",
        (rewrite("scheduler.Scheduler._unseat", ("self.rows.known[row]", "request.num_prompt_tokens")),),
        "06-evict-after-delivery",
        6,
    ),
    Mutant(
        "the row of an evicted request is free at once",
        (rewrite(EVICT, (IN_FLIGHT, "if False:")),),
        "01-evict-in-flight",
        10,
    ),
    Mutant(
        "the row of a request that ended is free at once",
        (rewrite(END, (IN_FLIGHT, "if False:")),),
        "10-row-recycled-in-flight",
        10,
    ),
    Mutant(
        "resumes a position too far",
        (rewrite(ADMIT, ("else len(shared) * size", "else len(shared) * size + (request.num_preemptions > 0)")),),
        "01-evict-in-flight",
        2,
    ),
    Mutant(
        "victims are in the plan being built",
        (
            rewrite(
                "scheduler.Scheduler._continue_prefill", ("*decodes.tolist(), *(chunk.row for chunk in chunks)", "")
            ),
        ),
        "17-victim-in-the-plan",
        17,
    ),
    Mutant(
        "nobody is ever evicted",
        (around("scheduler.Scheduler._choose_victim", lambda f: lambda self, taken: None),),
        "18-evicts-when-full",
        18,
    ),
    Mutant(
        "the victim is the one to keep",
        (rewrite("policy_set.PolicySet.choose_victim", ("max(keys)", "min(keys)")),),
        "priorities",
    ),
    Mutant("the queue runs backwards", (rewrite("queue.WaitingQueue.head", ("[0]", "[-1]")),), "priorities"),
    # ---- stops and ends
    Mutant("overshoot is delivered", (around(COMMIT, overshoot_is_delivered),), "stop tokens", 7),
    Mutant("overshoot is not told", (rewrite(COMMIT, ("r.stopped[rows].tobytes().count(True)", "0")),), "stop tokens"),
    Mutant(
        "length stops are one early",
        (rewrite(SEAT, ("max_total_tokens - 1", "max_total_tokens - 2")),),
        "20-length-stops-exactly",
        20,
    ),
    Mutant(
        "length stops are one late",
        (rewrite(SEAT, ("max_total_tokens - 1", "max_total_tokens")),),
        "20-length-stops-exactly",
        20,
    ),
    Mutant(
        "a step is planned past the last",
        (
            rewrite(
                "scheduler.Scheduler._give_up_seats", ("r.planned[self._decode] < r", "r.planned[self._decode] <= r")
            ),
        ),
        "20-length-stops-exactly",
        20,
        "KeyError",
    ),
    Mutant(
        "content stops are one late",
        (rewrite(COMMIT, ("tokens == r.stop_token[rows]", "r.tokens[rows, ends - 1] == r.stop_token[rows]")),),
        "stop tokens",
    ),
    Mutant(
        "only the first stop token stops",
        (rewrite(SEAT, ("len(params.stop_token_ids) > 1", "False")),),
        "second stop token",
    ),
    Mutant(
        "min_tokens is ignored",
        (rewrite(SCRUTINISE, ("outputs < request.params.min_tokens", "outputs < 0")),),
        "several stop tokens",
    ),
    Mutant(
        "min_tokens is one too many",
        (rewrite(SCRUTINISE, ("outputs < request", "outputs <= request")),),
        "several stop tokens",
    ),
    Mutant(
        "the matcher is fed twice",
        (
            rewrite(
                SCRUTINISE,
                ("request.matcher.feed(token) if", "(request.matcher.feed(token), request.matcher.feed(token))[1] if"),
            ),
        ),
        "21-processors-see-tokens",
    ),
    Mutant(
        "the matcher sees placeholders",
        (rewrite(SCRUTINISE, ("feed(token)", "feed(0)")),),
        "21-processors-see-tokens",
        21,
    ),
    Mutant("nothing is held back", (rewrite(ONE_BY_ONE, ("else held)", "else 0)")),), "patterns"),
    Mutant(
        "what is held back at the end is lost",
        (rewrite(ONE_BY_ONE, ("(0 if stopped or at_limit else held)", "(0 if stopped else held)")),),
        "patterns",
    ),
    Mutant(
        "tokens outside the vocabulary are delivered",
        (rewrite(COMMIT, ("tokens.view(UINT32) < self._vocab_size", "tokens == tokens")),),
        "bad token",
    ),
    Mutant(
        "what is out is delivered again beside a matcher",
        (rewrite(ONE_BY_ONE, (" if r.scrutinise[row] else position", "")),),
        "a matcher joins",
    ),
    # ---- aborts
    Mutant(
        "aborted requests get their late token",
        (rewrite(END, ("live[row] = False", "live[row] = reason is FinishReason.ABORT")),),
        "22-late-abort-and-late-result",
        22,
    ),
    Mutant(
        "aborting what has finished kills the engine",
        (rewrite("scheduler.Scheduler.abort", ("_active.get(request_id)", "_active[request_id]")),),
        "22-late-abort-and-late-result",
        22,
        "KeyError",
    ),
    Mutant(
        "aborting what has finished tells again",
        (around("scheduler.Scheduler.abort", ends_twice),),
        "22-late-abort-and-late-result",
        22,
    ),
    Mutant(
        "an abort leaves the request in the queue",
        (rewrite(END, ("self._waiting.remove(request)", "pass")),),
        "22-late-abort-and-late-result",
        22,
    ),
    # ---- admission
    Mutant(
        "decodes are not in the budget",
        (rewrite("scheduler.Scheduler._plan_prefills", (" - len(decodes)", "")),),
        "plain",
    ),
    Mutant(
        "a seat too many", (rewrite(ADMIT, (">= self.config.max_num_seqs", "> self.config.max_num_seqs")),), "plain"
    ),
    Mutant(
        "tokens in flight count twice",
        (
            rewrite(
                "scheduler.Scheduler._plan_decodes",
                (
                    "starts = self.rows.planned[rows]",
                    "starts = self.rows.planned[rows] + (self.rows.sampled_at[rows] > self._settled)",
                ),
            ),
        ),
        "plain",
    ),
    Mutant(
        "prompts are cut with chunked prefill off",
        (rewrite(ADMIT, ("if not self.config.enable_chunked_prefill and", "if False and")),),
        "whole prompts",
    ),
    Mutant(
        "static batches admit early",
        (rewrite("scheduler.Scheduler._open_static_batch", (" and not self._seated and not self._finishing", "")),),
        "static",
    ),
    Mutant(
        "what never fits waits for ever",
        (rewrite("room.why_never", ("if blocks > usable:", "if False:")),),
        "15-never-fits",
        15,
    ),
    Mutant(
        "plans while paused",
        (rewrite("scheduler.Scheduler.plan", ("if self._paused:", "if False:")),),
        "04-clear-with-nothing-in-flight",
        4,
    ),
    # ---- failures
    Mutant("requests of a failed step go on", (around("scheduler.Scheduler.fail", goes_on),), "failed step"),
    Mutant(
        "steps behind a failed one deliver",
        (rewrite(END, ("live[row] = False", "live[row] = reason is FinishReason.ERROR")),),
        "failed step",
    ),
    Mutant(
        "the slot of a stuck step is reused",
        (rewrite("pipeline.pipeline", ("if not (isinstance(result, StepFailure) and result.stuck):", "if True:")),),
        "stuck",
    ),
    Mutant(
        "rows of a stuck step are reused",
        (rewrite("scheduler.Scheduler._unseat", ("if row not in self._lost:", "if True:")),),
        "stuck",
    ),
    Mutant(
        "a policy that raises kills the engine",
        (rewrite("policy_set.PolicySet._ask", ("except Exception", "except MemoryError")),),
        "raising policy",
        0,
        "over two lines",
    ),
)
