"""Reading ahead: what the next step needs comes from disk while this one is learned from."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def reading_ahead(make: Callable[[int], Any], total: int) -> Iterator[Callable[[int], Any]]:
    """What `make` gives for a step below `total`, that of the next step begun in another thread meanwhile."""
    ready: dict[int, Future[Any]] = {}
    reader = ThreadPoolExecutor(1)

    def get(step: int) -> Any:
        made = (ready.pop(step, None) or reader.submit(make, step)).result()
        ready.clear()
        if step + 1 < total:
            ready[step + 1] = reader.submit(make, step + 1)
        return made

    try:
        yield get
    finally:
        reader.shutdown(cancel_futures=True)
