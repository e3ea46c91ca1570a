"""Sources, their precedence, and refusals that name the option, the source and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.pretty import pretty_repr

from baton.config.environ import to_environ
from baton.config.load import ConfigError, load
from baton.config.options import OPTIONS
from baton.config.secrets import redact
from baton.config.settings import Settings


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "baton.toml"
    path.write_text(text)
    return path


def test_nothing_given_means_the_defaults() -> None:
    assert load(None, {"PATH": "/bin", "HOME": "/"}, {}) == Settings()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "[gateway]\nport = 1\nhost = '0.0.0.0'\nmax_requests = 7\n")
    settings = load(path, {"BATON_GATEWAY_PORT": "2", "BATON_GATEWAY_HOST": "::1"}, {"gateway.port": "3"})
    assert (settings.gateway.port, settings.gateway.host, settings.gateway.max_requests) == (3, "::1", 7)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = _file(tmp_path, "[model]\nname = 'mock'\n")
    assert load(None, {"BATON_CONFIG": str(path), "BATON_SUPERVISED": "1"}, {}).model.name == "mock"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("BATON_WORKER_PREFIX_CACHE", "off", False),
        ("BATON_WORKER_PREFIX_CACHE", "True", True),
        ("BATON_WORKER_TRANSPORTS", "tcp, shm", ["tcp", "shm"]),
        ("BATON_WORKER_TRANSPORTS", "tcp", ["tcp"]),
        ("BATON_MODEL_BLOCK_SIZE", "32", 32),
        ("BATON_GATEWAY_PORT", " 0 ", 0),
        ("BATON_TELEMETRY_TRACE_RATIO", "0.5", 0.5),
        ("BATON_TELEMETRY_TRACE_RATIO", "1", 1.0),
        ("BATON_BUS_PASSWORD", " spaces stay ", " spaces stay "),
    ],
)
def test_environment_values_are_parsed(variable: str, text: str, value: Any) -> None:
    settings = load(None, {variable: text}, {})
    option = next(option for option in OPTIONS.values() if option.environment == variable)
    assert getattr(getattr(settings, option.section), option.name) == value


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("BATON_GATEWAY_PORT", "70000", "a whole number from 0 to 65535, not '70000'"),
        ("BATON_GATEWAY_PORT", "http", "a whole number from 0 to 65535, not 'http'"),
        ("BATON_GATEWAY_MAX_REQUESTS", "0", "a whole number above 0"),
        ("BATON_WORKER_PREFIX_CACHE", "maybe", "true or false, not 'maybe'"),
        ("BATON_WORKER_TRANSPORTS", "rdma", "a list of shm, tcp, not empty"),
        ("BATON_WORKER_TRANSPORTS", "", "a list of shm, tcp, not empty"),
        ("BATON_MODEL_BLOCK_SIZE", "17", "one of 8, 16, 32, 64"),
        ("BATON_TELEMETRY_TRACE_RATIO", "nan", "a number from 0 to 1"),
        ("BATON_TELEMETRY_LOG_LEVEL", "loud", "one of debug, error, info, warning"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(None, {variable: text}, {})
    message = str(refusal.value)
    assert said in message and f"from environment, {variable}" in message and "\n" not in message


@pytest.mark.parametrize(
    ("variable", "hint"),
    [("BATON_GATEWAY_PROT", "BATON_GATEWAY_PORT"), ("BATON_FOO", "docs/configuration.md")],
)
def test_an_unknown_variable_is_refused(variable: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=variable) as refusal:
        load(None, {variable: "1"}, {})
    assert hint in str(refusal.value)


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="--gateway-prot; did you mean --gateway-port"):
        load(None, {}, {"gateway.prot": 1})


def test_a_flag_may_be_typed_but_not_of_another_type() -> None:
    assert load(None, {}, {"gateway.port": 5, "worker.prefix_cache": False}).gateway.port == 5
    with pytest.raises(ConfigError, match=r"worker.prefix_cache \(from flag --worker-prefix-cache\)"):
        load(None, {}, {"worker.prefix_cache": 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gatway]\nport = 1\n", r"unknown section \[gatway\]; known are bus, model"),
        ("[gateway]\nprot = 1\n", "unknown option gateway.prot; known are host, port"),
        ("[gateway]\nport = '1'\n", "gateway.port .* takes a whole number from 0 to 65535, not '1'"),
        ("[gateway]\nport = true\n", "gateway.port"),
        ("[worker]\nprefix_cache = 1\n", "worker.prefix_cache .* takes true or false"),
        ("[worker]\ntransports = 'tcp'\n", "worker.transports .* takes a list"),
        ("gateway = 1\n", "gateway is a section"),
        ("[gateway\n", "not TOML"),
        ("x = " + "[" * 100_000, "not TOML"),
        ("#" * (1 << 21), "larger than"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as refusal:
        load(path, {}, {})
    assert str(path) in str(refusal.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.toml", {}, {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        load(tmp_path / "binary.toml", {}, {})


SECRETS = {
    "BATON_BUS_PASSWORD": "hush-bus",
    "BATON_GATEWAY_API_KEY": "hush-key",
    "BATON_KVSTORE_REDIS_URL": "redis://:hush-redis@cache:6379/0",
    "BATON_BUS_URL": "nats://me:hush-nats@bus:4222",
}


def test_no_secret_is_ever_shown() -> None:
    settings = load(None, SECRETS, {})
    assert settings.kvstore.redis_url == SECRETS["BATON_KVSTORE_REDIS_URL"]
    for shown in (repr(settings), str(settings), pretty_repr(settings), repr(settings.bus)):
        assert "hush" not in shown
    assert "redis://:****@cache:6379/0" in repr(settings) and "nats://me:****@bus:4222" in repr(settings)


def test_a_secret_of_the_wrong_type_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"bus\.password") as refusal:
        load(None, {}, {"bus.password": 123456789})
    assert "123456789" not in str(refusal.value)
    assert refusal.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://token@host:4222", "nats://****@host:4222"),
        ("redis://user:p@ss@host/0", "redis://user:****@host/0"),
        ("nats://host:4222", "nats://host:4222"),
        ("nats://u:a@one,nats://u:b@two", "nats://u:****@one,nats://u:****@two"),
    ],
)
def test_passwords_in_urls_are_hidden(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_the_environment_for_children_gives_the_same_settings() -> None:
    settings = load(
        None, SECRETS, {"worker.transports": ["tcp"], "worker.prefix_cache": False, "gateway.port": 0}
    )
    environ = to_environ(settings)
    assert load(None, environ, {}) == settings
    assert set(environ) == {
        *SECRETS,
        "BATON_WORKER_TRANSPORTS",
        "BATON_WORKER_PREFIX_CACHE",
        "BATON_GATEWAY_PORT",
    }
    assert to_environ(Settings()) == {}
