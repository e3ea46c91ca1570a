"""`baton secrets`: what it writes, that it keeps what is there, and who may read it."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest
import yaml

from baton.bus.server_config import server_config
from baton.cli.main import main
from baton.config.load import load
from baton.protocol.access import USERS


def test_each_service_gets_its_own_password(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert main(["secrets", str(folder), "--redis", "cache:6380"]) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    passwords = set()
    for user in USERS:
        path = folder / user / "baton.toml"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        settings = load(path, {}, {})
        assert settings.bus.user == user
        passwords.add(settings.bus.password)
        redis = (folder / "redis" / "password").read_text().strip()
        expected = f"redis://:{redis}@cache:6380/0" if user == "kvstore" else ""
        assert settings.kvstore.redis_url == expected
        assert f'user: {user}, password: "{settings.bus.password}"' in (folder / "nats/nats.conf").read_text()
    assert len(passwords) == len(USERS)
    assert f"requirepass {redis}\n" in (folder / "redis" / "redis.conf").read_text()


def test_again_it_keeps_passwords_and_brings_the_rest_up_to_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["secrets", str(tmp_path)]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "nats" / "nats.conf").write_text("old")
    (tmp_path / "metrics" / "baton.toml").unlink()
    capsys.readouterr()
    assert main(["secrets", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip().endswith("new passwords for metrics")
    changed = {path.parent.name for path, content in before.items() if path.read_bytes() != content}
    assert changed == {"metrics", "nats"}


def test_further_users_stay(tmp_path: Path) -> None:
    (tmp_path / "nats").mkdir()
    entry = '{"user": "abc", "password": "x", "permissions": {}}'
    (tmp_path / "nats" / "clients.conf").write_text(entry + "\n")
    assert main(["secrets", str(tmp_path)]) == 0
    assert entry in (tmp_path / "nats" / "nats.conf").read_text()


def test_a_file_that_was_tampered_with_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "router").mkdir()
    for text in ("[bus]\npassword = 'a\"}'\n", "[bus]\npassword = 5\n", "nonsense", "[bus]\n"):
        (tmp_path / "router" / "baton.toml").write_text(text)
        assert main(["secrets", str(tmp_path)]) == 1
        assert "error: " in capsys.readouterr().err
        assert not (tmp_path / "nats").exists()


def test_a_kubernetes_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secrets", "--kubernetes", "baton-auth"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert (made["kind"], made["metadata"]["name"]) == ("Secret", "baton-auth")
    assert set(made["stringData"]) == {*USERS, "redis"}
    assert len(set(made["stringData"].values())) == len(USERS) + 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["d", "--kubernetes", "n"], ["d", "--nats-tls-cert", "c"], ["d", "--nats-tls-ca", "c"]],
)
def test_wrong_usage(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["secrets", *arguments]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("password", ["", 'a"b\n', "$2a$11$hash"])
def test_passwords_that_cannot_stand_in_the_servers_file(password: str) -> None:
    with pytest.raises(ValueError, match="password"):
        server_config(dict.fromkeys(USERS, password))


def test_the_file_of_a_service_is_toml(tmp_path: Path) -> None:
    assert main(["secrets", str(tmp_path)]) == 0
    tree = tomllib.loads((tmp_path / "operator" / "baton.toml").read_text())
    assert tree["bus"]["user"] == "operator"
