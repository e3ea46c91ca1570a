"""One process under supervision: started, its lines passed on, started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.cli.supervisor.backoff import RestartPolicy

KEPT_LINES = 30
HELD_LINES = 500
MAX_LINE = 8_192
USAGE_ERROR = 2  # a setting or argument is wrong: the same again would fail the same way


class GaveUp(Exception):
    """A process cannot be started; holds why, in lines for people."""


@dataclass(frozen=True)
class Spec:
    """What to start: a service's role and id, its command line and whole environment."""

    role: str
    id: str
    command: tuple[str, ...]
    environ: dict[str, str] = field(repr=False)  # holds credentials


class Child:
    """Keeps one process alive until told to stop.

    `say` takes one-line news for people, `line` (id, text) each line that the process writes; `changed` is
    called when the process starts, dies or leaves.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        say: Callable[[str], None],
        line: Callable[[str, str], None],
        changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.policy = RestartPolicy()
        self.restarts = 0
        self.left = False  # by itself, in good order: drained by someone
        self._say = say
        self._line = line
        self._changed = changed
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._held: list[str] = []
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int:
        """The live process's id, 0 when there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    @property
    def ready(self) -> bool:
        return self.policy.ready_at is not None

    def heartbeat(self, pid: int) -> None:
        """The process of this id says that it is ready."""
        if pid == self.pid and not self.ready:
            self.policy.ready(time.monotonic())
            self._release()

    async def run(self) -> None:
        """Starts the process, and again when it dies, until `stop` or until it leaves in good order.

        Raises:
            GaveUp: it cannot be started, or fails at start again and again for one reason.
        """
        while not self._stopping.is_set():
            code = await self._run_once()
            if self._stopping.is_set():
                return
            if code == 0 and self.ready:
                self.left = True
                self._say(f"{self.spec.id} was asked to leave, and has")
                self._changed()
                return
            reason = self._reason(code)
            if reason != self.policy.reason:
                self._release()
            delay = self.policy.died(time.monotonic(), reason)
            if delay is None or (code == USAGE_ERROR and self.restarts == 0):
                raise GaveUp(self._epitaph(code))
            self.restarts += 1
            when = "at once" if not delay else f"in {delay:g} s"
            self._say(f"{self.spec.id} {describe_exit(code)}; starting it again {when}")
            self._changed()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _run_once(self) -> int:
        self._lines.clear()
        self._held.clear()
        try:
            process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                env=self.spec.environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the supervisor, which stops in order
            )
        except OSError as error:
            raise GaveUp(f"{self.spec.id} cannot be started: {error}") from error
        self._process = process
        self._changed()
        try:
            assert process.stdout is not None
            await self._read(process.stdout)
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(65_536):
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE:
                whole.append(rest)
                rest = b""
            for raw in whole:
                self._pass_on(raw)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, raw: bytes) -> None:
        text = raw[:MAX_LINE].decode(errors="replace").rstrip()
        if text:
            self._lines.append(text)
            if self.policy.failed_starts and not self.ready and len(self._held) < HELD_LINES:
                self._held.append(text)  # the same failure is not printed five times
            else:
                self._line(self.spec.id, text)

    def _release(self) -> None:
        for text in self._held:
            self._line(self.spec.id, text)
        self._held.clear()

    def _reason(self, code: int) -> str:
        return f"{code} {self._lines[-1][-120:] if self._lines and not self.ready else ''}"

    def _epitaph(self, code: int) -> str:
        last = "\n".join(f"    {line}" for line in list(self._lines)[-12:]) or "    (it wrote nothing)"
        return f"{self.spec.id} {describe_exit(code)} and does not get to work. Its last lines:\n{last}"

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, and after `grace_s` SIGKILL. True if it left by itself."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
            return True
        except TimeoutError:
            self.kill()
            await process.wait()
            return False

    def kill(self) -> None:
        """SIGKILL, now."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def describe_exit(code: int) -> str:
    """An exit code in words, as asyncio gives it: negative for a signal."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    return f"left with exit code {code}"
