"""A TCP proxy on loopback that plays a bad network: it delays, goes silent, or drops connections, on command.

    with TcpProxy(sshd.port, delay_s=0.03) as proxy:      # 60 ms round trip
        proxy.drop_after(100_000)                         # cut every connection after so many bytes have come back
        proxy.fall_silent()                               # connections stay open, nothing passes any more
        proxy.fall_silent_after(100_000)                  # the same, once so many bytes have come back on one
        proxy.reached.wait(60)                            # until a limit was met for the first time
        proxy.drop_all(); proxy.heal()

Side effects: one thread with an event loop, sockets on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

HOST = "127.0.0.1"
_CHUNK = 2**16
_IN_FLIGHT = 64  # chunks that a direction holds before it reads no more: 4 MB, about a long line's worth


class TcpProxy:
    """Forwards to `target_port`, each chunk `delay_s` later, in both directions.

    `accepted` counts connections, `carried` the bytes that all of them carried `forth` and `back`.
    """

    def __init__(self, target_port: int, *, delay_s: float = 0.0) -> None:
        self.accepted = 0
        self.carried = {"forth": 0, "back": 0}
        self.reached = threading.Event()
        self._target_port = target_port
        self._delay_s = delay_s
        self._limits: dict[str, int | None] = {"forth": None, "back": None}
        self._is_cutting = True
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._is_passing = asyncio.Event()
        self._is_passing.set()
        self._links: set[_Link] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        self._do(asyncio.start_server(self._serve, sock=self._listener))
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def drop_after(self, came_back: int | None, *, went_forth: int | None = None) -> None:
        """Cut every connection once so many bytes have passed from the server, or to it; None: never."""
        self._is_cutting = True
        self._limits.update(back=came_back, forth=went_forth)

    def fall_silent_after(self, came_back: int | None, *, went_forth: int | None = None) -> None:
        """Let nothing pass any more once so many bytes have passed on one connection."""
        self._is_cutting = False
        self._limits.update(back=came_back, forth=went_forth)

    def fall_silent(self) -> None:
        """Keep the connections open and let nothing pass."""
        self._call(self._is_passing.clear)

    def heal(self) -> None:
        """Let everything pass again."""
        self.drop_after(None)
        self._call(self._is_passing.set)

    def drop_all(self) -> None:
        """Reset every connection that is open now."""
        self._call(self._cut_all)

    def _cut_all(self) -> None:
        for link in tuple(self._links):
            link.cut()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _call(self, function: Callable[[], object]) -> None:
        async def call() -> None:
            function()

        self._do(call())

    async def _end(self) -> None:
        self._listener.close()
        self._cut_all()
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        with suppress(OSError, asyncio.CancelledError):
            there = await asyncio.open_connection(HOST, self._target_port)
            link = _Link(writer, there[1])
            self._links.add(link)
            try:
                await asyncio.gather(
                    self._carry("forth", reader, there[1], link), self._carry("back", there[0], writer, link)
                )
            finally:
                self._links.discard(link)
                link.cut()

    async def _carry(
        self, direction: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter, link: _Link
    ) -> None:
        """Carry one direction; the end of the stream is carried too."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT)
        reading = asyncio.ensure_future(_read(source, waiting, self._delay_s))
        passed = 0
        try:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._is_passing.wait()
                if not data:
                    with suppress(OSError):
                        sink.write_eof()
                    return
                limit = self._limits[direction]
                if limit is not None and self._is_cutting:
                    data = data[: max(0, limit - passed)]
                sink.write(data)
                await sink.drain()
                passed += len(data)
                self.carried[direction] += len(data)
                if limit is not None and passed >= limit:
                    self.reached.set()
                    if self._is_cutting:
                        link.cut()
                        return
                    self._is_passing.clear()
        except OSError:
            link.cut()
        finally:
            reading.cancel()


class _Link:
    """The two ends of one connection."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self._writers = writers

    def cut(self) -> None:
        """Reset both ends."""
        for writer in self._writers:
            writer.transport.abort()


async def _read(source: asyncio.StreamReader, waiting: asyncio.Queue[tuple[float, bytes]], delay_s: float) -> None:
    data = b"x"
    while data:
        try:
            data = await source.read(_CHUNK)
        except OSError:
            data = b""
        await waiting.put((time.monotonic() + delay_s, data))
