"""Planted faults of KV blocks: freed, fenced, shared, restored or counted when they should not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mutants.catalogue import Mutant, around, rewrite

ADMIT = "scheduler.Scheduler._admit"
RELEASE = "kv.BlockPool.release"
STUCK = "residency.Residency.stuck"
COMING = "pool.available + pool.num_coming"


def settles_the_next_too(settle: Callable[..., None]) -> Callable[..., None]:
    def changed(self: Any, step: int) -> None:
        settle(self, step)
        settle(self, step + 1)

    return changed


def without_fence(release: Callable[..., None]) -> Callable[..., None]:
    return lambda self, blocks, *, last_use=-1, fence=None: release(self, blocks, last_use=last_use)


def without_last_use(release: Callable[..., None]) -> Callable[..., None]:
    return lambda self, blocks, *, last_use=-1, fence=None: release(self, blocks, fence=fence)


def sharing_without_owning(share: Callable[..., None]) -> Callable[..., None]:
    def changed(self: Any, blocks: list[int]) -> None:
        share(self, blocks)
        for block in blocks:
            self._owners[block] = 1

    return changed


def registered_when_planned(seal: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, *args: Any) -> Any:
        plan = seal(self, *args)
        if self.config.enable_prefix_caching:
            self.residency._register_prefixes(plan)
        return plan

    return changed


def nothing(original: Callable[..., None]) -> Callable[..., None]:
    return lambda *args, **options: None


BLOCKS = (
    Mutant(
        "offloaded blocks are not fenced",
        (around("residency.Residency.offload", lambda offload: offload), around(RELEASE, without_fence)),
        "offload",
    ),
    Mutant("fences fall a step early", (around("kv.BlockPool.settle", settles_the_next_too),), "offload"),
    Mutant(
        "restored to blocks that are not quiet",
        (
            around("kv.BlockPool.num_quiet", lambda f: lambda self, collected: self.available),
            around("kv.BlockPool.allocate_quiet", lambda f: lambda self, count, collected: self.allocate(count)),
        ),
        "07-finish-at-N-while-N+1-writes",
        7,
    ),
    Mutant(
        "blocks of a request that has finished count as quiet",
        (around(RELEASE, without_last_use),),
        "07-finish-at-N-while-N+1-writes",
        7,
    ),
    Mutant(
        "restored while it is offloaded",
        (rewrite("residency.Residency.can_restore", ("copy.step <= self._collected and ", "")),),
        "restored soon",
    ),
    Mutant(
        "evicts to get blocks that are fenced",
        (rewrite("scheduler.Scheduler._plan_decodes", (COMING, "pool.available")),),
        "08-fenced-blocks-are-not-free",
        8,
    ),
    Mutant(
        "evicts where there are just enough blocks",
        (
            rewrite(
                "scheduler.Scheduler._plan_decodes",
                ("if lacking <= pool.available:", "if lacking < pool.available:"),
                (f"lacking > {COMING}", f"lacking >= {COMING}"),
            ),
        ),
        "18-evicts-when-full",
    ),
    Mutant(
        "fenced blocks count as free",
        (around("kv.BlockPool.available", lambda f: property(lambda self: f.fget(self) + self.num_fenced)),),
        "08-fenced-blocks-are-not-free",
        8,
        "StopIteration",
    ),
    Mutant(
        "window blocks are freed on the optimistic count",
        (rewrite("residency.Residency._free_outside_window", ("r.computed[rows]", "r.planned[rows]")),),
        "09-window-freed-on-the-optimistic-count",
        9,
    ),
    Mutant(
        "a window block is freed too early",
        (rewrite("residency.Residency.__init__", ("- window + 1, 0)", "- window + 1 + config.block_size, 0)")),),
        "09-window-freed-on-the-optimistic-count",
        9,
    ),
    Mutant(
        "a prefix is registered when it is planned",
        (around("scheduler.Scheduler._seal", registered_when_planned),),
        "13-prefix-registered-when-planned",
        13,
    ),
    Mutant(
        "a late commit registers blocks that were given up",
        (rewrite("residency.Residency._register_prefixes", ("if not r.num_blocks.item(row):", "if False:")),),
        "late commit",
        13,
    ),
    Mutant(
        "prefixes match by block, not by all before it",
        (rewrite("residency.Residency._hashes", ('hashes[-1] if hashes else b""', 'b""')),),
        "equal blocks",
    ),
    Mutant(
        "the whole prompt may be cached",
        (rewrite("residency.Residency.match_prefix", ("(len(request.tokens) - 1)", "len(request.tokens)")),),
        "14-whole-prompt-cached",
        14,
    ),
    Mutant(
        "a prefix is found after the chunk was cut",
        (rewrite(ADMIT, ("min(known, start + budget)", "start + min(known, budget)")),),
        "14-whole-prompt-cached",
        14,
    ),
    Mutant("shared blocks have one owner", (around("kv.BlockPool.share", sharing_without_owning),), "shared blocks"),
    Mutant(
        "an admission that fails keeps its prefix",
        (
            rewrite(
                ADMIT,
                ("copy = request.host_copy", "copy = request.host_copy\n    self.residency.pool.share(shared)"),
                ("self.residency.share(row, shared)", "self.rows.append_blocks(row, shared)"),
            ),
        ),
        "failed admission",
        16,
    ),
    Mutant(
        "an evicted request keeps its blocks",
        (rewrite("scheduler.Scheduler._evict", ("self.residency.give_up(row)", "pass")),),
        "16-waiting-requests-hold-no-blocks",
        16,
    ),
    Mutant(
        "blocks of a request evicted in flight leak",
        (
            rewrite(
                "scheduler.Scheduler._evict",
                ("if not offloaded:", "if not offloaded and self.rows.last_step[row] <= self._settled:"),
            ),
        ),
        "05-evict-while-N-is-not-committed",
        5,
    ),
    Mutant(
        "the null block is handed out",
        (rewrite("kv.BlockPool.__init__", ("range(num_blocks, 0, -1)", "range(num_blocks - 1, -1, -1)")),),
        "plain",
        19,
    ),
    Mutant(
        "a host copy is never dropped", (around("residency.Residency.drop_host_copy", nothing),), "offload, then abort"
    ),
    Mutant(
        "a host copy has one position more than was written",
        (rewrite("residency.Residency.offload", ("self.rows.planned.item(row)", "self.rows.planned.item(row) + 1")),),
        "offload",
    ),
    Mutant(
        "prefixes outlive new weights",
        (around("kv.BlockPool.forget_prefixes", nothing),),
        "04-clear-with-nothing-in-flight",
    ),
    Mutant(
        "prefixes of a step in flight outlive new weights",
        (rewrite("residency.Residency.forget_prefixes", ("self._shareable_from = next_step", "pass")),),
        "clear in flight",
    ),
    Mutant(
        "host copies outlive new weights",
        (rewrite("scheduler.Scheduler.pause", ("self.residency.drop_host_copy(request, self._settled)", "pass")),),
        "clear with copies",
    ),
    Mutant(
        "promises to running requests are forgotten",
        (around("room.outstanding_promises", lambda f: lambda *args: 0),),
        "worst case",
    ),
    Mutant(
        "a shared block loses its fence",
        (rewrite(RELEASE, ("self._copied[block] = until", "pass")),),
        "shared block offloaded",
    ),
    Mutant(
        "blocks of a stuck step are reused",
        (rewrite(STUCK, ("written.union(plan.restore.device.tolist())", "()")),),
        "stuck",
    ),
    Mutant(
        "blocks that a stuck step restores to are reused",
        (rewrite(STUCK, ("written.union(plan.restore.device.tolist())", "written")),),
        "stuck restore",
    ),
    Mutant(
        "blocks of a stuck step stay with who has them by now",
        (rewrite("scheduler.Scheduler.fail", ("if row in self._seated:", "if False:")),),
        "stuck behind an end",
    ),
    Mutant(
        "copies of a stuck step count as done",
        (rewrite("kv.BlockPool.quarantine", ("self._fences.pop(step, None)", "self.settle(step)")),),
        "stuck copy",
    ),
)
