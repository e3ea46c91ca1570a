"""The file of API keys, and the command that writes it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from baton.cli.main import main
from baton.config.keys import KeyEntry, KeyFileError, add, digest, new_secret, read, remove


def entry(secret: str = "s", **fields: Any) -> KeyEntry:
    return KeyEntry(sha256=digest(secret), **fields)


def test_what_is_added_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.toml"
    limited = entry(
        "b", models=["a/b", 'q"é'], requests_per_minute=3, tokens_per_minute=9, concurrent=2, priority=-5
    )
    add(path, "one", entry("a"))
    add(path, "two", limited)
    add(path, "none", entry("c", models=[]))
    assert read(path) == {"one": entry("a"), "two": limited, "none": entry("c", models=[])}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(KeyFileError, match="there is a key one"):
        add(path, "one", entry("x"))


def test_removing_keeps_everything_else(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("# ours\n")
    for name in ("one", "two", "three"):
        add(path, name, entry(name))
    remove(path, "two")
    assert list(read(path)) == ["one", "three"]
    assert path.read_text().startswith("# ours\n")
    with pytest.raises(KeyFileError, match="no key two"):
        remove(path, "two")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\n", "sha256"),
        ("[a]\nsha256 = 'x'\n", "sha256"),
        (f"[a]\nsha256 = '{'0' * 64}'\nlimit = 3\n", "limit"),
        (f"[a]\nsha256 = '{'0' * 64}'\nconcurrent = -1\n", "concurrent"),
        (f"['a b']\nsha256 = '{'0' * 64}'\n", "name"),
        (f"[a]\nsha256 = '{'0' * 64}'\n[b]\nsha256 = '{'0' * 64}'\n", "same key"),
        ("a\n", "keys.toml"),
        ("\xff", "keys.toml"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(KeyFileError, match=words):
        read(path)


def test_keys_are_drawn_at_random() -> None:
    drawn = {new_secret() for _ in range(100)}
    assert len(drawn) == 100
    assert min(map(len, drawn)) >= 40


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys.toml")
    options = [
        "--models",
        "m, n",
        "--requests-per-minute",
        "5",
        "--tokens-per-minute",
        "100",
        "--concurrent",
        "2",
    ]
    assert main(["key", "new", "ann", "--keys-file", file, *options]) == 0
    secret = capsys.readouterr().out.strip()
    assert secret not in Path(file).read_text()
    found = read(Path(file))["ann"]
    assert found == entry(
        secret, models=["m", "n"], requests_per_minute=5, tokens_per_minute=100, concurrent=2
    )
    assert main(["key", "list", "--keys-file", file]) == 0
    assert capsys.readouterr().out == "ann  models m,n, 5 requests/min, 100 tokens/min, 2 at once\n"
    assert main(["key", "new", "ann", "--keys-file", file]) == 1
    assert main(["key", "revoke", "ann", "--keys-file", file]) == 0
    assert main(["key", "revoke", "ann", "--keys-file", file]) == 1
    assert main(["key", "new", "--keys-file", file]) == 2
    assert main(["key", "list"]) == 2
    assert "no key ann" in capsys.readouterr().err
