"""One request from its choice to its answer: the target is asked, a fallback where it fails, and all of it is booked.

dispatcher = Dispatcher(policy, chooser, targets, ledger)
routed = await dispatcher.open(asked, held)
routed.choice.reason, await routed.whole()      # or async for chunk in routed.chunks()
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

from heedful.errors import ContextOverflow, HeedfulError, TargetFailed, UsageError
from heedful.router.choose import Choice, Chooser, Hop
from heedful.router.ledger import COUNTERFACTUAL, ROUTER, WASTED, Entry, RouteLedger, Tab
from heedful.router.policy import Draft, Policy
from heedful.router.signals import JSON, Asked
from heedful.router.target import Opened, Target, WholeAnswer, receipt_of, text_of_body

log = logging.getLogger("heedful.router")

MOST_COUNTERFACTUALS = 8
"""That wait or run; further ones are left out, which their lines' absence says."""


@dataclass
class Routed:
    """A routed answer that has begun."""

    choice: Choice
    entry: Entry
    _opened: Opened
    _tab: Tab
    _is_booked: bool
    finish: str = "cancelled"
    """How it ended: "cancelled" until it has."""
    _reason: Any = None

    async def whole(self) -> JSON:
        body = await self._opened.whole()
        self.finish = str(body["choices"][0].get("finish_reason"))
        return {**body, "usage": self._usage(body)}

    async def chunks(self) -> AsyncGenerator[JSON, None]:
        """The last one has no choices, and the usage."""
        async with aclosing(self._opened.chunks()) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    self._reason = choice.get("finish_reason")
                if not chunk["choices"]:
                    chunk = {**chunk, "usage": self._usage(chunk)}
                    self.finish = str(self._reason)
                yield chunk

    def _usage(self, body: JSON) -> JSON:
        """With the route in the receipt."""
        usage: JSON = dict(body.get("usage") or {})
        receipt = receipt_of(body)
        if receipt and not self._is_booked:
            self.entry.add(self._tab, receipt)
        usage["heedful"] = {**receipt, "route": self.choice.to_dict()}
        return usage


class Dispatcher:
    """For one loop. `ledger`: None where the policy keeps none. `draw`: which requests are of the random slice."""

    def __init__(
        self,
        policy: Policy,
        chooser: Chooser,
        targets: Mapping[str, Target],
        ledger: RouteLedger | None = None,
        *,
        draw: random.Random | None = None,
    ) -> None:
        assert set(targets) == set(policy.targets), (set(targets), set(policy.targets))
        self.policy = policy
        self.chooser = chooser
        self.targets = targets
        self.ledger = ledger
        seed = policy.counterfactual.seed if policy.counterfactual else 0
        self._draw = draw or random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Semaphore(1)

    async def open(self, asked: Asked, held: AsyncExitStack) -> Routed:
        """Raises UsageError for what is the caller's fault, else what the target and its fallback failed with."""
        entry = Entry(self.ledger, secrets.token_hex(8))
        with entry.charging("decider", ROUTER) as tab:
            choice = await self.chooser.choose(asked)
            if choice.receipt is not None:
                entry.add(tab, choice.receipt)
        try:
            routed = await self._answered(asked, choice, entry, held)
        except BaseException as error:
            entry.close(choice, {"finish": f"failed: {type(error).__name__}", **self._slice(False)})
            raise
        is_sliced = self._is_sliced()
        held.callback(lambda: self._close(routed, asked, is_sliced))
        self.chooser.answered(asked, routed.choice.target)
        return routed

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for target in self.targets.values():
            await target.aclose()
        if self.ledger is not None:
            self.ledger.close()

    async def settled(self) -> None:
        """All counterfactuals have been run."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- An answer ------------------------------------------------------------------------------------------------

    async def _answered(self, asked: Asked, choice: Choice, entry: Entry, held: AsyncExitStack) -> Routed:
        try:
            return await self._of_target(asked, choice, entry, held)
        except (UsageError, HeedfulError) as error:
            if isinstance(error, UsageError) and not isinstance(error, ContextOverflow):
                raise
            other = self.chooser.stand_in(choice, _words(error))
            if other is None:
                raise
            log.warning("heedful: %s; %s stands in", error.message, other.target)
            return await self._of_target(asked, other, entry, held)

    async def _of_target(self, asked: Asked, choice: Choice, entry: Entry, held: AsyncExitStack) -> Routed:
        draft = self.policy.targets[choice.target].draft
        if draft is None or draft.escalate in choice.forbidden:
            opened, tab = await self._opened(asked, choice, entry, held)
            return self._routed(choice, entry, opened, tab)
        return await self._checked(asked, choice, draft, entry, held)

    async def _checked(self, asked: Asked, choice: Choice, draft: Draft, entry: Entry, held: AsyncExitStack) -> Routed:
        """A draft is answered only where it passes; else it is a waste, and the next target begins anew."""
        async with AsyncExitStack() as mine:
            opened, tab = await self._opened(_unstreamed(asked), choice, entry, mine)
            body = await opened.whole()
        if draft.check.passes(text_of_body(body)):
            return self._routed(choice, entry, WholeAnswer(body), tab)
        tab.phase = WASTED
        self._book(choice.target, body, entry, tab)
        hops = (*choice.hops, Hop(choice.target, "the draft failed its check"))
        up = replace(
            choice,
            target=draft.escalate,
            cause=f"escalated from {choice.target} ({choice.cause})",
            hops=hops,
            max_tokens=None,
        )
        opened, tab = await self._opened(asked, up, entry, held)
        return self._routed(up, entry, opened, tab)

    async def _opened(self, asked: Asked, choice: Choice, entry: Entry, held: AsyncExitStack) -> tuple[Opened, Tab]:
        """`held` gets what the answer needs only once it has begun."""
        limited = limited_to(asked, choice.max_tokens, getattr(self.policy.targets[choice.target], "max_tokens", None))
        with entry.charging(choice.target) as tab:
            try:
                async with AsyncExitStack() as mine:
                    opened = await self.targets[choice.target].open(replace(limited, given=choice.given), mine)
                    held.push_async_exit(mine.pop_all())
            except BaseException:
                tab.phase = WASTED
                raise
        return opened, tab

    def _routed(self, choice: Choice, entry: Entry, opened: Opened, tab: Tab) -> Routed:
        return Routed(choice, entry, opened, tab, self.targets[choice.target].books_itself)

    def _book(self, target: str, body: JSON, entry: Entry, tab: Tab) -> None:
        """Of an answer that nobody gets."""
        receipt = receipt_of(body)
        if receipt and not self.targets[target].books_itself:
            entry.add(tab, receipt)

    def _close(self, routed: Routed, asked: Asked, is_sliced: bool) -> None:
        routed.entry.close(routed.choice, {"finish": routed.finish, **self._slice(is_sliced)})
        if is_sliced and routed.finish != "cancelled":
            self._begin_counterfactuals(asked, routed)

    # ---- The random slice -----------------------------------------------------------------------------------------

    def _is_sliced(self) -> bool:
        """Drawn for every request, so that one's luck says nothing of another's."""
        counterfactual = self.policy.counterfactual
        return counterfactual is not None and self._draw.random() < counterfactual.share

    def _slice(self, is_sliced: bool) -> JSON:
        counterfactual = self.policy.counterfactual
        return {"slice": None if counterfactual is None else {"share": counterfactual.share, "is_in": is_sliced}}

    def _begin_counterfactuals(self, asked: Asked, routed: Routed) -> None:
        assert self.policy.counterfactual is not None
        for name in self.policy.counterfactual.targets:
            if name == routed.choice.target or name in routed.choice.forbidden:
                continue
            if len(self._tasks) >= MOST_COUNTERFACTUALS:
                return
            other = replace(routed.choice, target=name)
            task = asyncio.create_task(self._counterfactual(asked, other, routed.entry.id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _counterfactual(self, asked: Asked, choice: Choice, line_id: str) -> None:
        """The same request, asked of another target, its answer thrown away."""
        choice = replace(choice, cause="counterfactual", p=None, threshold=None, hops=(), max_tokens=None)
        entry = Entry(self.ledger, line_id, COUNTERFACTUAL)
        finish = "failed"
        try:
            async with self._one_at_a_time, AsyncExitStack() as held:
                opened, tab = await self._opened(_unstreamed(asked), choice, entry, held)
                tab.phase = COUNTERFACTUAL
                body = await opened.whole()
                finish = str(body["choices"][0].get("finish_reason"))
                self._book(choice.target, body, entry, tab)
        except HeedfulError as error:
            finish = f"failed: {type(error).__name__}"
            log.info("heedful: the counterfactual at %s failed: %s", choice.target, error.message)
        finally:
            entry.close(choice, {"finish": finish})


def limited_to(asked: Asked, *most: int | None) -> Asked:
    """With at most so many tokens to answer in."""
    given = [limit for limit in (asked.max_tokens, *most) if limit is not None]
    if not given or min(given) == asked.max_tokens:
        return asked
    body = {key: value for key, value in asked.body.items() if key not in ("max_tokens", "max_completion_tokens")}
    name = "max_completion_tokens" if asked.body.get("max_completion_tokens") else "max_tokens"
    return replace(asked, max_tokens=min(given), body={**body, name: min(given)})


def _unstreamed(asked: Asked) -> Asked:
    body = {key: value for key, value in asked.body.items() if key not in ("stream", "stream_options")}
    return replace(asked, stream=False, body=body)


def _words(error: HeedfulError) -> str:
    return error.problem if isinstance(error, TargetFailed) else type(error).__name__
