"""What a server counts, as text that Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """How many values lie at or below each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Lines such as `batch_size_bucket{le="8"} 3`; each bucket counts those below it too."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum!r}"  # with all digits, which :g would round to six
        yield f"{name}_count {total}"


class Metrics:
    """Everything that is counted; only the event loop writes here, so nothing needs a lock."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.texts = self.cut = 0
        self.batches, self.seconds = Histogram(SIZES), Histogram(SECONDS)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count one request."""
        self.requests[path, status] += 1
        if path == "/predict":
            self.seconds.add(seconds)

    def render(self, queue: int, ready: bool) -> str:
        """The page: a few counters, two histograms, two gauges."""
        errors: Counter[int] = Counter()
        for (_, status), count in self.requests.items():
            if status >= 400:
                errors[status] += count
        rows = [
            f'{{path="{path}",status="{status}"}} {count}' for (path, status), count in sorted(self.requests.items())
        ]
        wrong = [f'{{status="{status}"}} {count}' for status, count in sorted(errors.items())]
        return "\n".join(
            [
                *_family("requests_total", "counter", "Requests answered.", rows),
                *_family("errors_total", "counter", "Requests answered with a status of 400 or more.", wrong),
                *_family("texts_total", "counter", "Texts predicted.", [f" {self.texts}"]),
                *_family("texts_cut_total", "counter", "Texts that were too long and truncated.", [f" {self.cut}"]),
                *_family("queue_length", "gauge", "Texts that wait for the model.", [f" {queue}"]),
                *_family("ready", "gauge", "Whether predictions are made.", [f" {int(ready)}"]),
                *_family("batch_size", "histogram", "Texts that ran together.", []),
                *self.batches.lines("smallbert_batch_size"),
                *_family("predict_seconds", "histogram", "From request to answer of /predict.", []),
                *self.seconds.lines("smallbert_predict_seconds"),
                "",
            ]
        )


def _family(name: str, kind: str, about: str, rows: list[str]) -> list[str]:
    name = f"smallbert_{name}"
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *(name + row for row in rows)]
