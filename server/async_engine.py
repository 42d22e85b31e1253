"""The engine beside the event loop: one thread runs the steps, streams carry the results to their clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import RequestError
from server.engine import Engine
from server.request import Delta, Request, RequestParams
from server.request_metrics import Progress, RequestMetrics
from server.watch import Watch

logger = logging.getLogger(__name__)

# After so many steps in a row that raised, the engine is asked whether it can run at all.
MAX_FAILED_STEPS = 3
MAX_RETRY_AFTER_S = 60
INTERNAL_ERROR = "internal error: the step that served this request failed"


class EngineDeadError(RuntimeError):
    """The engine thread has ended; nothing can be served."""


class QueueFullError(RuntimeError):
    """More requests wait than the server is told to hold. `retry_after` says in how many seconds to come back."""

    def __init__(self, max_queue: int, retry_after: int) -> None:
        super().__init__(f"the queue is full: at most {max_queue} requests wait; try again in {retry_after} s")
        self.retry_after = retry_after


class Stream:
    """What one request's client is told, in order: an async iterator of `Delta` that ends after the last one."""

    def __init__(self, owner: AsyncEngine, request: Request) -> None:
        self._owner, self.request, self.progress = owner, request, Progress()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._done = False

    def put(self, delta: Delta) -> None:
        """Called by the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, delta)
        except RuntimeError:  # the loop is closed: its clients are gone
            logger.debug("a delta came after its event loop had closed")

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._done:
            raise StopAsyncIteration
        delta = await self._queue.get()
        self._done = delta.last
        return delta

    def abort(self) -> None:
        """Free slot and memory before the next step. Harmless after the end, and when called twice."""
        if not self._done:
            with contextlib.suppress(EngineDeadError):  # its streams have ended all the same
                self._owner.abort(self.request)


class AsyncEngine:
    """Runs an engine in a thread of its own.

    Everything that changes the engine passes through one queue of commands, which the thread empties between steps.

    Args:
        max_queue: requests that may wait beside those that run; None for any number.
    """

    def __init__(self, engine: Engine, max_queue: int | None = None) -> None:
        self.engine, self.max_queue = engine, max_queue
        self.watch, self.requests = Watch(engine), RequestMetrics()
        self._commands: deque[Callable[[], None]] = deque()
        self._arriving = 0  # requests among the commands
        self._wake = threading.Condition()
        self._streams: dict[int, Stream] = {}
        self._stopping = False
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def info(self) -> dict[str, str]:
        return self.engine.info

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and not self._dead and not self._stopping

    @property
    def num_running(self) -> int:
        return len(self.engine.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, those included that the engine thread has yet to put there."""
        with self._wake:
            return self._arriving + len(self.engine.scheduler.waiting)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine thread; requests still running end with an error."""
        self._stopping = True
        with self._wake:
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, prompt_ids: list[int], params: RequestParams) -> Stream:
        """Queue a request; call it from the event loop that will read the stream.

        Raises:
            RequestError: the request does not fit the model.
            EngineDeadError: the engine does not run.
        """
        if not self.healthy:
            raise EngineDeadError("the engine is not running")
        request = self.engine.make_request(prompt_ids, params)
        stream = Stream(self, request)
        with self._wake:
            self._command(lambda: self._add(stream))
            self._arriving += 1
        return stream

    def check_queue(self, count: int = 1) -> None:
        """Refuse `count` requests that come together if they would have to wait behind too many.

        Raises:
            RequestError: they are more than could ever be taken at once.
            QueueFullError: too many wait already.
        """
        if self.max_queue is None:
            return
        scheduler = self.engine.scheduler
        if count > (most := scheduler.max_num_seqs + self.max_queue):
            expected = f"expected at most {most}, as many as may run and wait here"
            raise RequestError(f"found {count} choices (n for every prompt), {expected}", "n")
        with self._wake:
            waiting = self.num_waiting
            free = max(scheduler.max_num_seqs - self.num_running, 0)
        if waiting + count <= self.max_queue + free:
            return
        arrived = [request.arrived for request in list(scheduler.waiting)]
        # Who waits for so long has no hope to get through sooner.
        waited = math.ceil(time.monotonic() - min(arrived, default=time.monotonic()))
        self.requests.reject(count)
        raise QueueFullError(self.max_queue, min(max(waited, 1), MAX_RETRY_AFTER_S))

    def abort(self, request: Request) -> None:
        """End a request at its client's wish."""
        self._command(lambda: self._abort(request))

    def _command(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self._dead:
                raise EngineDeadError("the engine is not running")
            self._commands.append(action)
            self._wake.notify()

    def _add(self, stream: Stream) -> None:
        self._streams[id(stream.request)] = stream
        with self._wake:
            self._arriving -= 1
            self.engine.add(stream.request)

    def _abort(self, request: Request) -> None:
        if id(request) in self._streams and (delta := self.engine.abort(request)):
            self._tell(request, delta)

    def _tell(self, request: Request, delta: Delta) -> None:
        stream = self._streams[id(request)]
        self.requests.tell(request, delta, stream.progress)  # first: whoever has an answer finds it counted
        if delta.last:
            del self._streams[id(request)]
        stream.put(delta)

    def _run(self) -> None:
        try:
            failed_steps = 0
            while not self._stopping:
                self._wait_for_work()
                while self._commands:
                    self._commands.popleft()()
                if self.engine.has_work:
                    failed_steps = 0 if self._step() else failed_steps + 1
                if failed_steps == MAX_FAILED_STEPS:
                    self.engine.self_test()  # raises, and the engine is dead, or the requests were to blame
                    failed_steps = 0
        except Exception:
            logger.exception("the engine thread died")
        finally:
            with self._wake:
                self._dead = True  # from here on nobody can queue a command
            self._end_streams()

    def _wait_for_work(self) -> None:
        with self._wake:
            while not (self._commands or self.engine.has_work or self._stopping):
                self._wake.wait()

    def _step(self) -> bool:
        """One step; when it raises, the requests that ran in it fail and the others live on."""
        try:
            outcomes = self.engine.step()
            healthy = True
        except Exception:
            logger.exception("a step failed")
            self.engine.fail_running(INTERNAL_ERROR)
            # Requests that ended in this very step count too: what it had to tell them is lost.
            ended = [s.request for s in self._streams.values() if s.request.finished]
            outcomes = [(request, request.fail(INTERNAL_ERROR)) for request in ended]
            healthy = False
        for request, delta in outcomes:
            self._tell(request, delta)
        return healthy

    def _end_streams(self) -> None:
        """Nobody waits for ever: streams that are left, queued ones included, end with an error."""
        while self._commands:
            self._commands.popleft()()
        message = "the server is shutting down" if self._stopping else INTERNAL_ERROR
        left = [(stream, stream.request.fail(message)) for stream in self._streams.values()]
        self._streams.clear()
        for stream, delta in left:
            stream.put(delta)
        for stream, delta in left:  # when all have been told: should counting be what went wrong, nobody waits for it
            self.requests.tell(stream.request, delta, stream.progress)
