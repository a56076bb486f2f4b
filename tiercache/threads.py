"""Worker threads of the store: jobs that bring pages up go before jobs that write them down."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tiercache.clock import Clock
from tiercache.errors import StoreTimeoutError

Job = Callable[[], None]


class WorkerThreads:
    """Threads that run jobs; started at the first job, joined by `close`.

    With several threads the first serves upward jobs alone, so that writes can never starve reads.

    Args:
        num_threads: how many.
        on_error: given what a job raised; a job's own errors are its own business, so this is for bugs.
    """

    NAME = "tiercache-transfer-"

    def __init__(self, num_threads: int, on_error: Callable[[BaseException], None]) -> None:
        self._num_threads = num_threads
        self._on_error = on_error
        self._changed = threading.Condition(threading.Lock())
        self._up: deque[Job] = deque()
        self._down: deque[Job] = deque()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._closed = False

    def submit(self, job: Job, *, up: bool) -> bool:
        """Queues a job; False after close."""
        with self._changed:
            if self._closed:
                return False
            (self._up if up else self._down).append(job)
            if not self._threads:
                for number in range(self._num_threads):
                    thread = threading.Thread(
                        target=self._work,
                        args=(number > 0 or self._num_threads == 1,),
                        name=f"{self.NAME}{number}",
                        daemon=True,
                    )
                    self._threads.append(thread)
                    thread.start()
            self._changed.notify_all()
            return True

    def drain(self, deadline: float, clock: Clock) -> None:
        """Waits until no job is queued or running. Raises StoreTimeoutError."""
        with self._changed:
            while self._up or self._down or self._running:
                left_s = deadline - clock.now()
                if left_s <= 0:
                    raise StoreTimeoutError("flush: transfers did not end", remedy="raise timeout_s")
                clock.wait(self._changed, left_s)

    def close(self, timeout_s: float) -> bool:
        """Drops queued downward jobs and joins the threads; False when one did not end in time."""
        with self._changed:
            self._closed = True
            self._down.clear()  # jobs upward still run: some end what a copy to a device has pinned
            self._changed.notify_all()
        share_s = timeout_s / max(1, len(self._threads))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(share_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _next(self, *, takes_down: bool) -> Job | None:
        with self._changed:
            while True:
                if self._up:
                    job = self._up.popleft()
                elif self._closed:
                    return None
                elif self._down and takes_down:
                    job = self._down.popleft()
                else:
                    self._changed.wait()
                    continue
                self._running += 1
                return job

    def _work(self, takes_down: bool) -> None:
        while (job := self._next(takes_down=takes_down)) is not None:
            try:
                job()
            except BaseException as error:
                self._on_error(error)
            finally:
                del job
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()
