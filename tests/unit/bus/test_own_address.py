"""`auto`: the address by which the rest of the cluster reaches this process."""

from __future__ import annotations

import socket

import pytest

from baton.bus.address import own_address


def test_an_address_that_is_set_is_taken() -> None:
    assert own_address("10.1.2.3", "nats://nowhere.invalid:4222") == "10.1.2.3"


@pytest.mark.parametrize("url", ["nats://127.0.0.1:4222", "127.0.0.1", "tls://u:p@127.0.0.1:1,nats://x:2"])
def test_the_one_that_leads_to_the_bus(url: str) -> None:
    assert own_address("auto", url) == "127.0.0.1"


def test_no_way_is_an_error() -> None:
    with pytest.raises(OSError):
        own_address("auto", "nats://nowhere.invalid:4222")


def test_it_can_be_bound() -> None:
    with socket.socket() as sock:
        sock.bind((own_address("auto", "nats://127.0.0.1:4222"), 0))
