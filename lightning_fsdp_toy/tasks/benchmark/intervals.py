"""Ratios within rounds, their medians, and how sure these are."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Interval", "median_interval", "paired_ratios", "widest"]

_NUM_DRAWS = 4000
_TAIL = 2.5  # per cent on each side


class Interval(NamedTuple):
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Width of the interval, as a part of the median."""
        return (self.high - self.low) / self.median


def paired_ratios(step_s: Mapping[str, Sequence[float]], base: str) -> dict[str, list[float]]:
    """Return time of each other variant / time of `base` in the same round: above 1, `base` wins.

    >>> paired_ratios({"a": [1.0, 2.0], "b": [2.0, 3.0]}, "a")
    {'b': [2.0, 1.5]}
    """
    return {
        name: [each / own for each, own in zip(seconds, step_s[base], strict=True)]
        for name, seconds in step_s.items()
        if name != base
    }


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median with its bootstrap 95 % interval (percentiles, always the same draws).

    Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 1979.
    """
    draw = np.random.default_rng(0).choice(np.asarray(values), (_NUM_DRAWS, len(values)))
    low, high = np.percentile(np.median(draw, axis=1), [_TAIL, 100 - _TAIL])
    return Interval(statistics.median(values), float(low), float(high))


def widest(ratios: Mapping[str, Interval]) -> tuple[str, float]:
    """Return the variant whose ratio is least sure, and its spread; no name if there is none."""
    return max(
        ((name, interval.spread) for name, interval in ratios.items()),
        key=lambda each: each[1],
        default=("", 0.0),
    )
