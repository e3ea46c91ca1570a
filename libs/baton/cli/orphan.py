"""A supervised process ends with its supervisor, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

GRACE_S = 8.0  # longer than a service takes that heeds the signal
POLL_S = 1.0
ORPHANED = 3
_PR_SET_PDEATHSIG = 1


def end_with_parent(supervisor: int) -> None:
    """Arranges for this process to end when process `supervisor` (1: whoever the parent is) dies.

    Where the kernel can (Linux) SIGTERM comes at once, so that shared memory is given back; a thread that
    watches the parent is there for other systems and for a process that does not heed the signal: it ends
    this one a few seconds later.
    """
    parent = supervisor if supervisor > 1 else os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(ORPHANED)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    time.sleep(GRACE_S)
    os._exit(ORPHANED)
