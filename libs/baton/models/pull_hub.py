"""A model of the Hugging Face hub, through huggingface_hub and with the user's own settings of it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

from baton.models.errors import PullError
from baton.models.transfer import Report, ensure_space, watching

# What is read, and no other format of the same weights; not what lies in sub-folders either.
WANTED = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "*.jinja",
]
UNWANTED = ["*/*"]

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def fetch_hub(name: str, target: Path, report: Report) -> None:
    """Put a hub model into the folder `target`: whole, or not at all. A broken download is resumed.

    Raises:
        PullError: it cannot be had, or is of no kind that is read; the text names the fix.
        OSError: the cache cannot be written.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # `report` takes their place
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(exist_ok=True)
    try:
        revision, total = _choose(name, HfApi().model_info(name, files_metadata=True))
        ensure_space(target.parent, total)
        with watching(partial, total, report):
            snapshot_download(
                name, revision=revision, local_dir=partial, allow_patterns=WANTED, ignore_patterns=UNWANTED
            )
    except HfHubHTTPError as error:
        raise PullError(_refusal(name, error)) from error
    except PullError:
        raise
    except Exception as error:  # each version of huggingface_hub has another HTTP library's errors
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        raise PullError(
            f"the hub cannot be reached to fetch {name!r} ({type(error).__name__}); check the network,"
            " HF_ENDPOINT and HF_HUB_OFFLINE, or name a model that is here by its path"
        ) from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # its notes for resuming
    if target.exists():
        shutil.rmtree(target)
    partial.replace(target)


def _choose(name: str, info: Any) -> tuple[str | None, int]:
    """The revision to fetch, and its size in bytes."""
    from huggingface_hub.utils import filter_repo_objects

    wanted = list(
        filter_repo_objects(
            info.siblings or [],
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            key=lambda file: file.rfilename,
        )
    )
    names = {file.rfilename for file in wanted}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise PullError(
            f"{name!r} has no config.json with model*.safetensors, so it cannot be loaded from the hub;"
            " of a GGUF repository, download one file and name its path"
        )
    return info.sha, sum(file.size or 0 for file in wanted)


def _refusal(name: str, error: Any) -> str:
    """What to do about the hub's answer."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"the hub does not give {name!r} to you (HTTP {status}): check the name, accept the model's terms"
            " on its page, and set HF_TOKEN"
        )
    if status == 404:
        return f"the hub has no model {name!r}"
    return f"the hub answered HTTP {status} for {name!r}; try again later"
