"""Memory maps of model files."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from baton.models.errors import ModelFileError


def map_file(path: Path) -> memoryview:
    """A read-only map of a whole regular file. It lives as long as any array made from it.

    Raises:
        ModelFileError: it is missing, empty, not a regular file, or cannot be read.
    """
    try:
        # Non-blocking, so that a named pipe cannot hold us; on a regular file it means nothing.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ModelFileError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: is not a regular file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: is empty")
        return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)
