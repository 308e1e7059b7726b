"""Where a search is kept, and all that Optuna does for it: drawing, pruning, and noticing trials that died.

The default is an SQLite file; any database that SQLAlchemy knows can be given instead. Both know a heartbeat, so that a
trial whose machine is gone is noticed by the others. SQLite's locks hold between the processes of one machine, but not
on most network folders: machines share a search through a database server.
"""

from __future__ import annotations

import os
import platform
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from smallbert.errors import UserError
from smallbert.tuning.records import DIED, TRIES, record_of

try:
    import optuna
except ImportError as error:
    raise UserError("tuning needs optuna; run: pip install -e '.[tune]'") from error

from optuna.trial import TrialState

BEAT, GRACE = 10, 60  # seconds between two heartbeats, and after which a silent trial is taken for dead
PATIENCE = 60.0  # seconds that a process waits for another to let go of an SQLite file
FIRST = 10  # trials drawn at random before the sampler models what came of them
BEFORE_PRUNING = 5  # trials that run to their end before any is cut short
ME = f"{platform.node()}:{os.getpid()}"


@contextmanager
def _without_warnings() -> Iterator[None]:
    """What is used here is called experimental, or has other defaults in other versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Seeded(optuna.samplers.BaseSampler):
    """Draws trial n with random numbers of its own: a function of the seed, n, and what was finished by then.

    So a search that is stopped between two trials goes on as if it had not been, and processes that share one never
    draw the same. A trial that was killed is tried again under a new number, so that later ones are drawn otherwise.
    """

    def __init__(self, seed: int, every: bool, defaults: dict[str, Any]) -> None:
        """Draw by TPE, or with `every` each recipe once; the first trial is given the defaults."""
        self.seed, self.every, self.defaults = seed, every, defaults
        self.inner: Any = None

    def before_trial(self, study: Any, trial: Any) -> None:
        """Begin anew for each trial."""
        seed, samplers = self.seed * 1_000_003 + trial.number, optuna.samplers
        how: dict[str, Any] = {"n_startup_trials": FIRST, "multivariate": True, "group": True, "constant_liar": True}
        with _without_warnings():
            self.inner = samplers.BruteForceSampler(seed) if self.every else samplers.TPESampler(seed=seed, **how)
        self.inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
        """As the inner sampler does."""
        return {} if _is_first(trial) else self.inner.infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
        """As the inner sampler does."""
        return {} if _is_first(trial) else self.inner.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        """As the inner sampler does."""
        if _is_first(trial) and param_name in self.defaults:
            return self.defaults[param_name]
        return self.inner.sample_independent(study, trial, param_name, param_distribution)


def _is_first(trial: Any) -> bool:
    """Whether it is the first trial, or takes its place since that one died."""
    return trial.number == 0 or trial.user_attrs.get("again") == 0


def open_study(
    url: str,
    name: str,
    about: dict[str, Any],
    defaults: dict[str, Any],
    seed: int = 0,
    every: bool = False,
    prune: bool = True,
) -> Any:
    """Open a search in a storage, or begin it; one of that name about something else is refused."""
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    pruners = optuna.pruners
    pruner = pruners.MedianPruner(n_startup_trials=BEFORE_PRUNING) if prune else pruners.NopPruner()
    with _without_warnings():
        study = optuna.create_study(
            storage=_open_storage(url),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
            sampler=Seeded(seed, every, defaults),
            pruner=pruner,
        )
    known = study.user_attrs.get("about")
    if known is None:
        study.set_user_attr("about", about)
    elif known != about:
        other = ", ".join(name for name in about if known.get(name) != about[name])
        raise UserError(f"the storage has a search called {name!r} with another {other}; give another --name")
    return study


def _open_storage(url: str) -> Any:
    if "://" not in url:
        raise UserError(f"--storage was given {url!r}; write sqlite:///study.db, or the address of another database")
    options: dict[str, Any] = {}
    if url.startswith("sqlite:///"):
        _prepare_file(Path(url.removeprefix("sqlite:///")))
        options = {"connect_args": {"timeout": PATIENCE}}
    for left in (3, 2, 1, 0):  # two processes that begin at once both make the tables, and one of them fails
        try:
            return optuna.storages.RDBStorage(url, options, heartbeat_interval=BEAT, grace_period=GRACE)
        except Exception as error:
            if not left or isinstance(error, ImportError | ValueError):
                why = " ".join(str(error).split("\n")[0].split())[:200]
                raise UserError(f"--storage {without_password(url)} cannot be opened: {why}") from None
            time.sleep(0.3)
    raise AssertionError


def _prepare_file(path: Path) -> None:
    """Make an SQLite file that writes ahead: four times as fast, and readers never wait for writers."""
    import sqlite3

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=PATIENCE)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"--storage: {path} cannot be used: {error}; give another file") from None


def without_password(text: str) -> str:
    """A text with the passwords of addresses in it hidden.

    >>> without_password("postgresql://me:secret@host/db")
    'postgresql://me:***@host/db'
    """
    return re.sub(r"(://[^:/@\s]+):[^@\s]+@", r"\1:***@", text)


def revive(study: Any) -> None:
    """Mark trials whose process is gone as dead, and give each another chance."""
    with _without_warnings():
        optuna.storages.fail_stale_trials(study)  # those of other machines, by their heartbeat
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _is_gone(trial.user_attrs.get("by")) or not is_alive(trial):
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
    trials = study.get_trials(deepcopy=False)
    begun_again = {trial.user_attrs.get("again") for trial in trials}
    for trial in trials:
        if trial.number in begun_again or record_of(trial).status != DIED:
            continue
        tries = trial.user_attrs.get("tries", 1) + (not trial.user_attrs.get("interrupted"))
        if tries <= TRIES:
            study.enqueue_trial(trial.params, user_attrs={"again": trial.number, "tries": tries})


def _is_gone(by: str | None) -> bool:
    """Whether a trial belongs to a process of this machine that is no more."""
    node, _, number = (by or "").rpartition(":")
    if node != platform.node() or by == ME or os.name != "posix":
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is another user's
    return False


def is_alive(trial: Any) -> bool:
    """Whether a running trial is worth waiting for; one that never said whose it is was killed as it began."""
    age = time.time() - trial.datetime_start.timestamp() if trial.datetime_start else 0.0
    return "by" in trial.user_attrs or age < GRACE
