"""Names for things: one small registry serves methods, presets and whatever else is looked up by name."""

import difflib
import importlib
import pkgutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from smallbert.errors import UserError

Thing = TypeVar("Thing")


class UnknownName(UserError, KeyError):
    """A name that a registry does not hold; also a KeyError, so that `in` and `get` work as in any mapping."""

    __str__ = Exception.__str__  # a KeyError would show the sentence in quotes


class Registry(Mapping[str, Thing], Generic[Thing]):
    """Things of one kind by name; the first look into it imports every file of its package, so that each adds itself.

    >>> METHODS["drop_layer"]
    UnknownName: no method is called 'drop_layer'. Did you mean 'drop_layers'? Known: distill, drop_layers, finetune
    """

    def __init__(self, kind: str, package: str = "") -> None:
        self.kind = kind
        self._things: dict[str, Thing] = {}
        self._unread = package
        self._lock = threading.RLock()

    def add(self, name: str, thing: Thing) -> Thing:
        """Hold a thing under a name; a second one of that name is refused unless it is the same one imported again."""
        name = plain(name)
        old = self._things.get(name)
        if old is not None and _origin(old) != _origin(thing):
            raise UserError(
                f"two {self.kind}s are called {name!r}, in {_origin(old)[0]} and in {_origin(thing)[0]}; rename one"
            )
        self._things[name] = thing
        return thing

    def __getitem__(self, name: str) -> Thing:
        self._read()
        try:
            return self._things[plain(name)]
        except KeyError:
            raise UnknownName(f"no {self.kind} is called {name!r}.{suggest(name, self)}") from None

    def __iter__(self) -> Iterator[str]:
        self._read()
        return iter(list(self._things))

    def __len__(self) -> int:
        self._read()
        return len(self._things)

    @contextmanager
    def for_now(self) -> Iterator[None]:
        """Forget afterwards what is added inside, as a test with methods of its own wants."""
        self._read()
        before = dict(self._things)
        try:
            yield
        finally:
            self._things = before

    def _read(self) -> None:
        """Import every module of the package once; an import that fails is not hidden and is tried again next time."""
        with self._lock:
            package, self._unread = self._unread, ""  # emptied first: a file may itself look into the registry
            if not package:
                return
            try:
                for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
                    importlib.import_module(module.name)
            except BaseException:
                self._unread = package
                raise
            # Sorted, since the order of imports depends on what the program happened to import before.
            self._things = dict(sorted(self._things.items()))


def plain(name: str) -> str:
    """A name as it can stand in a recipe: `half-int8` and `half_int8` are the same thing."""
    return str(name).strip().replace("-", "_")


MANY = 12  # names; more are not listed behind a hint


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint such as " Did you mean 'distill'?", or nothing where no known name is near or the very name is known."""
    near = difflib.get_close_matches(str(name), list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near and near[0] != str(name) else ""


def suggest(name: str, names: Iterable[str]) -> str:
    """The hint, and a list such as " Known: distill, finetune"; behind a hint, many names are not listed."""
    names = sorted(names)
    near = did_you_mean(name, names)
    if near and len(names) > MANY:
        return f"{near} All are in: smallbert list"
    return f"{near} Known: {', '.join(names) or 'none'}"


def _origin(thing: Any) -> tuple[str, str]:
    return thing.__module__, getattr(thing, "__qualname__", str(thing))
