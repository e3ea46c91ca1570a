"""What every executor settles between the settings, the model and the KV pool."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.kvcache.pool import KvPool
from baton.models.catalogue import ModelPath
from baton.models.config import DecoderConfig
from baton.models.errors import UnsupportedModel
from baton.protocol.liveness import Geometry, ModelInfo


def num_blocks(settings: Settings, geometry: Geometry) -> int:
    """KV blocks that `worker.kv_memory_mb` has room for.

    Raises:
        ValueError: for none.
    """
    blocks = settings.worker.kv_memory_mb * 2**20 // geometry.block_bytes
    if not blocks:
        raise ValueError(
            f"--worker-kv-memory-mb {settings.worker.kv_memory_mb} holds not one KV block "
            f"of {geometry.block_bytes} bytes"
        )
    return blocks


def model_info(settings: Settings, found: ModelPath, config: DecoderConfig) -> ModelInfo:
    """What a worker says of its model.

    Raises:
        UnsupportedModel: `model.max_context` is more than the model was made for.
    """
    asked = settings.model.max_context
    if asked > config.max_context:
        raise UnsupportedModel(
            f"--model-max-context {asked}: {settings.model.name} takes at most {config.max_context} tokens"
        )
    return ModelInfo(
        name=found.name,
        max_context=asked or config.max_context,
        vocab_size=config.real_vocab,
        created=int(found.path.stat().st_mtime),
    )


def check_pool(pool: KvPool, geometry: Geometry) -> None:
    """
    Raises:
        ValueError: the pool's blocks are not of this geometry.
    """
    if pool.data.shape[1] != geometry.block_bytes:
        raise ValueError(
            f"the pool has blocks of {pool.data.shape[1]} bytes, the model {geometry.block_bytes}"
        )
