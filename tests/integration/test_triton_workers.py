"""Real workers with the GPU engine, interpreted: blocks handed over through the pools' twins."""

from __future__ import annotations

from pathlib import Path

import interpreted
import pytest
import tiny_llama
from worker_rig import Node, Rig

from baton.config.settings import BusSettings
from baton.protocol.liveness import Role
from baton.protocol.sampling import SamplingParams

PROMPT = [(5 * n * n + 1) % 259 for n in range(19)]  # a block and a part
TINY = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}


async def answers(rig: Rig, engine: str, folder: Path, transports: tuple[str, ...]) -> dict[str, list[int]]:
    """Two requests, one with two choices, prefilled by one worker and written by another, then moved on."""

    async def add(role: Role, name: str) -> Node:
        return await rig.add(
            role, name=f"{engine}-{name}", transports=transports, engine=engine, threads=1,
            model__name=str(folder), model__cache_dir=str(folder.parent), model__dtype="float32",
            step_timeout_ms=120_000,
        )  # fmt: skip

    prefill, decode, last = (
        await add(Role.PREFILL, "p"),
        await add(Role.DECODE, "d"),
        await add(Role.DECODE, "l"),
    )
    drawn = SamplingParams(seed=3, temperature=1.0, max_tokens=4)
    player = rig.player
    await player.run(prefill, f"{engine}-two", PROMPT, drawn, decode=decode, choices=2, deadline_ms=300_000)
    found = {str(n): await player.result(f"{engine}-two{n}", 240) for n in ("", ".1")}
    moved = f"{engine}-moved"
    longer = SamplingParams(seed=4, temperature=1.0, max_tokens=9)
    await player.run(prefill, moved, PROMPT[:17], longer, decode=decode, deadline_ms=300_000)
    await player.tokens(moved, 2, 120)
    await player.move(decode, last, moved, attempt=0, successor=1)
    found["moved"] = await player.result(moved, 240)
    return found


@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
async def test_answers_are_the_torch_engines(
    nats_server: BusSettings, tmp_path: Path, transports: tuple[str, ...]
) -> None:
    assert interpreted.DEVICE
    folder = tiny_llama.save(tmp_path / "models" / "tiny", seed=3, **TINY)
    rig = Rig(nats_server, tmp_path)
    await rig.start()
    try:
        expected = await answers(rig, "torch", folder, transports)
        assert await answers(rig, "triton", folder, transports) == expected
        assert len(expected["moved"]) == 9
    finally:
        await rig.stop()
