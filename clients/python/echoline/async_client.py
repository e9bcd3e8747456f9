"""The calls of `Client` for asyncio."""
from __future__ import annotations

import asyncio
import functools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Mapping, Optional, TypeVar, Union

from .batch import Batch
from .client import LONGEST_WAIT_S, Client, Error, Stale, Status

# The longest wait within one call of `Client`. It bounds the wait for a cancelled take(), which must end before the
# next call begins.
_WAIT_S = 1.0

_T = TypeVar("_T")


class AsyncClient:
    """One trainer of a run, for use by one event loop. Its calls are those of `Client`, one after another on one
    connection and one thread.

        async with echoline.AsyncClient("runs/quickstart") as client:
            batch = await client.take()

    A call that has begun goes on if its task is cancelled, so the learner may still execute it. A cancelled take()
    loses no batch: the next take() returns it, and close() gives it back to the learner."""

    def __init__(self, run: Union[str, "os.PathLike[str]"], timeout: float = 600.0, patience: float = 60.0):
        """As in `Client`, but the first call connects."""
        self._connect = functools.partial(Client, run, timeout, patience)
        self._client: Optional[Client] = None  # used only by the thread, which makes it at the first call
        self._unclaimed: Optional[Batch] = None  # a batch that no take() has returned yet
        self._thread = ThreadPoolExecutor(1, "echoline")

    async def __aenter__(self) -> AsyncClient:
        await self.status()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Gives back a batch that no take() has returned, and ends the connection. Without an earlier call, it connects
        first."""
        try:
            await self._call(self._give_back_and_close)
        finally:
            self._thread.shutdown(wait=False)

    async def status(self) -> Status:
        return await self._call(lambda client: client.status())

    async def metrics(self, after: int = 0, last: Optional[int] = None) -> List[Dict[str, Any]]:
        return await self._call(lambda client: client.metrics(after, last))

    async def take(self, wait: float = LONGEST_WAIT_S, lease: float = 600.0, takeover: bool = False) -> Optional[Batch]:
        deadline = time.monotonic() + wait
        while True:
            wait_s = max(0.0, min(_WAIT_S, deadline - time.monotonic()))
            await self._call(lambda client: self._refill_unclaimed(client, wait_s, lease, takeover))
            batch, self._unclaimed = self._unclaimed, None
            if batch is not None or time.monotonic() >= deadline:
                return batch

    async def renew(self, batch: Batch, lease: float = 600.0) -> None:
        await self._call(lambda client: client.renew(batch, lease))

    async def score(self, batch: Batch, logprobs: Any, entropies: Any = None) -> None:
        await self._call(lambda client: client.score(batch, logprobs, entropies))

    async def consume(self, batch: Batch, figures: Optional[Mapping[str, float]] = None) -> Status:
        return await self._call(lambda client: client.consume(batch, figures))

    async def give_back(self, batch: Batch) -> None:
        await self._call(lambda client: client.give_back(batch))

    async def publish(self, version: int, policy: Union[str, "os.PathLike[str]", Mapping[str, Any]],
                      keep_types: bool = False) -> None:
        """As in `Client`. Do not change the tensors until publish() returns. If it is cancelled, do not change them
        until the next call has returned."""
        await self._call(lambda client: client.publish(version, policy, keep_types))

    async def publish_adapter(self, version: int, adapter: Any, name: str = "default") -> None:
        await self._call(lambda client: client.publish_adapter(version, adapter, name))

    async def publish_shards(self, version: int, state: Mapping[str, Any], rank: int, ranks: int, attempt: str) -> None:
        await self._call(lambda client: client.publish_shards(version, state, rank, ranks, attempt))

    async def held_out(self) -> Dict[str, Any]:
        return await self._call(lambda client: client.held_out())

    async def evaluated(self, version: int, responses: Optional[Mapping[str, Any]] = None, **figures: float) -> float:
        return await self._call(lambda client: client.evaluated(version, responses, **figures))

    async def _call(self, function: Callable[[Client], _T]) -> _T:
        """Runs the function on the client's thread and returns its result."""

        def run() -> _T:
            if self._client is None:
                self._client = self._connect()
            return function(self._client)

        return await asyncio.wrap_future(self._thread.submit(run))

    def _refill_unclaimed(self, client: Client, wait: float, lease: float, takeover: bool) -> None:
        if self._unclaimed is not None:
            try:
                client.renew(self._unclaimed, lease)
                return
            except Stale:  # the learner hands the batch out again
                self._unclaimed = None
        self._unclaimed = client.take(wait, lease, takeover)

    def _give_back_and_close(self, client: Client) -> None:
        batch, self._unclaimed = self._unclaimed, None
        try:
            if batch is not None:
                client.give_back(batch)
        except Error:
            pass  # the learner takes the batch back when its lease ends
        client.close()
