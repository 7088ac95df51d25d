"""`AsyncEngine`: submit while running, `async for` the pieces, abort, shut down. For asyncio programs.

One thread drives the engine; only it touches model, scheduler and frontend. Coroutines hand it calls and get
pieces back through queues of their own event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

from asyncsched.errors import AsyncschedError
from asyncsched.request import SamplingParams
from executors.garbage import old_objects_stay
from executors.llm import LLM, Prompt
from executors.outputs import RequestOutput, StreamPiece


class EngineStoppedError(AsyncschedError):
    """The engine was shut down, or the thread that drives it failed."""


@dataclass(frozen=True, slots=True)
class _Listener:
    """Where the pieces of one prompt go. None ends the stream, an exception fails it."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[StreamPiece | Exception | None]

    def put(self, item: StreamPiece | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """Drives an `LLM` in a thread of its own. Use it as an async context manager, or call `shutdown`."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._ids = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()  # for the driving thread, in order
        self._wake = threading.Event()
        self._stopping = False
        self._listeners: dict[str, _Listener] = {}
        self._thread = threading.Thread(target=self._drive, name="asyncsched-engine", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # a step that outlives the interpreter would crash it

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[StreamPiece]:
        """Pieces of the prompt's outputs as they arrive. Leaving the loop early aborts it. Raises ConfigError."""
        self._llm.require_usable()
        params = params or SamplingParams()
        token_ids = self._llm.check(prompt, params)
        name = request_id if request_id is not None else f"async-{next(self._ids)}"
        if name in self._listeners:
            raise AsyncschedError(f"request_id: {name!r} is in use")
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        self._listeners[name] = listener
        try:
            self._call(lambda: self._llm.submit(name, prompt, params, token_ids=token_ids))
            while (item := await listener.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if name in self._listeners and not self._stopping:  # the name is in use until the last notice is out
                self._call(lambda: self._llm.abort(name, params.n))

    async def abort(self, request_id: str) -> None:
        """Ends a prompt from outside; its stream gets the last notices. Unknown and finished prompts are left alone."""
        self._call(lambda: self._llm.abort(request_id, self._llm.frontend.num_outputs(request_id)))

    async def shutdown(self) -> None:
        """Stops after the step in flight. Streams that are open end with EngineStoppedError."""
        self._stopping = True
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join()
        atexit.unregister(self._stop)

    def _call(self, call: Callable[[], None]) -> None:
        if self._stopping or not self._thread.is_alive():
            raise EngineStoppedError("the engine was shut down")
        self._calls.append(call)
        self._wake.set()

    def _drive(self) -> None:
        """The driving thread: calls and steps, and the end of both."""
        cause: Exception = EngineStoppedError("the engine was shut down")
        try:
            gc.collect()  # what is garbage now would stay as long as the engine: models that are gone, for one
            with old_objects_stay():
                self._run()
                self._end_all()
        except Exception as error:  # whoever waits must learn of it, whatever it is
            cause = EngineStoppedError(f"the engine failed: {type(error).__name__}: {error}")
            cause.__cause__ = error
        self._stopping = True
        for listener in list(self._listeners.values()):
            listener.put(cause)

    def _run(self) -> None:
        """Until it is told to stop."""
        while True:
            self._wake.clear()  # before the question: who stops it sets this behind that
            if self._stopping:
                return
            while self._calls:
                self._calls.popleft()()
            results = self._llm.run()
            if results is None:
                self._wake.wait()
            else:
                self._deliver(results)

    def _end_all(self) -> None:
        """Nothing of this engine stays behind in the `LLM`, which may be used again."""
        for name in list(self._listeners):
            self._llm.abort(name, self._llm.frontend.num_outputs(name))
        while self._llm.run() is not None:
            pass

    def _deliver(self, results: list[StreamPiece | RequestOutput]) -> None:
        for result in results:
            listener = self._listeners.get(result.request_id)
            if listener is None:
                continue
            if isinstance(result, StreamPiece):
                listener.put(result)
            else:
                self._listeners.pop(result.request_id, None)
                listener.put(None)
