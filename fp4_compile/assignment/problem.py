"""The problem: items that may be chosen, what they share, and what must agree.

Choosing an item adds its change to every metric; a shared thing (a quantizer) adds its own once, if any chosen
item needs it. Everything is exact: floats are turned into integers of a common unit, so that no answer hangs on
the magnitude of a metric or on the order of a sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction


@dataclasses.dataclass(frozen=True)
class Item:
    """Something to choose or not; ``change`` is what choosing it adds to each metric, 0 where it is silent."""

    key: str
    change: Mapping[str, float]
    needs: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Shared:
    """Something that is paid for once if any chosen item needs it; no change is negative."""

    key: str
    change: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Items, what they share, groups of keys that must agree, and keys that are decided already.

    Raises:
        ValueError: a change is not finite, a shared one negative, a key unknown or double, or pins inside a group
            that contradict each other.
    """

    items: tuple[Item, ...]
    shared: tuple[Shared, ...] = ()
    groups: tuple[frozenset[str], ...] = ()
    pinned: Mapping[str, bool] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        everything: tuple[Item | Shared, ...] = (*self.items, *self.shared)
        for each in everything:
            for metric, value in each.change.items():
                if not math.isfinite(value):
                    raise ValueError(f"{each.key}: the change of {metric} is {value}")
        for shared in self.shared:
            if any(value < 0 for value in shared.change.values()):
                raise ValueError(f"{shared.key}: a shared cost is negative: {dict(shared.change)}")
        keys, costs = {item.key for item in self.items}, {shared.key for shared in self.shared}
        if len(keys) < len(self.items) or len(costs) < len(self.shared):
            raise ValueError("two items, or two shared costs, have the same key")
        unknown = set(self.pinned).union(*self.groups) - keys
        unknown |= set().union(*(item.needs for item in self.items)) - costs
        if unknown:
            raise ValueError(f"unknown keys: {sorted(unknown)[:5]}")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that something changes."""
        everything: tuple[Item | Shared, ...] = (*self.items, *self.shared)
        return tuple(dict.fromkeys(metric for each in everything for metric in each.change))


@dataclasses.dataclass(frozen=True)
class Unit:
    """Items that are chosen together, with exact changes of two metrics."""

    keys: tuple[str, ...]
    x: int
    y: int
    needs: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Component:
    """Units that are tied to each other by shared costs, and to nothing else; ``costs``: (x, y) of each shared one."""

    units: tuple[Unit, ...]
    costs: Mapping[str, tuple[int, int]]

    def totals(self, chosen: Iterable[int]) -> tuple[int, int]:
        """(x, y) of a choice of units, shared costs included."""
        units = [self.units[i] for i in chosen]
        paid = [self.costs[key] for key in frozenset().union(*(unit.needs for unit in units))]
        return (
            sum(unit.x for unit in units) + sum(cost[0] for cost in paid),
            sum(unit.y for unit in units) + sum(cost[1] for cost in paid),
        )


@dataclasses.dataclass(frozen=True)
class Exact:
    """A problem reduced to two metrics in integers: what is free, by component, and what the pins come to."""

    components: tuple[Component, ...]
    fixed: frozenset[str]
    """Keys pinned to be chosen."""
    base: tuple[int, int]
    """(x, y) of those, with what they need."""
    units: tuple[Fraction, Fraction]
    """What an integer 1 stands for in x and in y."""


def exact(problem: Problem, x: str, y: str) -> Exact:
    """Reduce a problem to two metrics.

    Raises:
        ValueError: pins inside a group contradict each other.
    """
    everything: tuple[Item | Shared, ...] = (*problem.items, *problem.shared)
    scales = [_common_denominator(each.change.get(metric, 0.0) for each in everything) for metric in (x, y)]

    def changes(each: Item | Shared) -> tuple[int, int]:
        first, second = (int(Fraction(each.change.get(m, 0.0)) * s) for m, s in zip((x, y), scales, strict=True))
        return first, second

    costs = {shared.key: changes(shared) for shared in problem.shared}
    fixed: set[str] = set()
    paid: set[str] = set()
    units = []
    for members in _united(problem):
        pins = {problem.pinned[item.key]: item.key for item in members if item.key in problem.pinned}
        if len(pins) == 2:
            raise ValueError(f"{pins[True]!r} and {pins[False]!r} must agree, and are pinned to differ")
        if True in pins:
            fixed.update(item.key for item in members)
            paid.update(*(item.needs for item in members))
        elif not pins:
            pairs = [changes(item) for item in members]
            needs = frozenset().union(*(item.needs for item in members))
            keys = tuple(sorted(item.key for item in members))
            units.append(Unit(keys, sum(a for a, _ in pairs), sum(b for _, b in pairs), needs))
    pairs = [changes(item) for item in problem.items if item.key in fixed] + [costs[key] for key in paid]
    free = [dataclasses.replace(unit, needs=unit.needs - paid) for unit in units]
    return Exact(
        tuple(_components(sorted(free, key=lambda unit: unit.keys), costs)),
        frozenset(fixed),
        (sum(a for a, _ in pairs), sum(b for _, b in pairs)),
        (Fraction(1, scales[0]), Fraction(1, scales[1])),
    )


def _common_denominator(values: Iterable[float]) -> int:
    """Every float is an integer over a power of two; the largest such power."""
    return max((Fraction(value).denominator for value in values), default=1)


def _united(problem: Problem) -> list[list[Item]]:
    """The items, those of overlapping groups together."""
    parent = {item.key: item.key for item in problem.items}
    for group in problem.groups:
        first, *rest = sorted(group) if group else [""]
        for key in rest:
            parent[_root(parent, key)] = _root(parent, first)
    members: dict[str, list[Item]] = defaultdict(list)
    for item in problem.items:
        members[_root(parent, item.key)].append(item)
    return list(members.values())


def _root(parent: dict[str, str], key: str) -> str:
    while parent[key] != key:
        parent[key] = parent[parent[key]]
        key = parent[key]
    return key


def _components(units: list[Unit], costs: Mapping[str, tuple[int, int]]) -> Iterable[Component]:
    parent = {key: key for unit in units for key in unit.needs}
    for unit in units:
        first, *rest = sorted(unit.needs) if unit.needs else [""]
        for key in rest:
            parent[_root(parent, key)] = _root(parent, first)
    together: dict[str, list[Unit]] = defaultdict(list)
    for i, unit in enumerate(units):
        together[_root(parent, min(unit.needs)) if unit.needs else f"\0{i}"].append(unit)
    for members in together.values():
        yield Component(tuple(members), {key: costs[key] for unit in members for key in unit.needs})
