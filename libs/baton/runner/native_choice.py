"""Whether the native engine can serve what the settings ask for. Light: imports neither numpy nor torch."""

from __future__ import annotations

from baton.config.settings import Settings
from baton.models.catalogue import default_cache_dir
from baton_kernels.cpu import build


def reason_against(settings: Settings) -> str:
    """Why the settings or the machine rule the native engine out; empty if they do not."""
    model = settings.model
    if model.dtype != "auto":
        return f"--model-dtype {model.dtype} is set, and it computes with 4 and 8 bit"
    if model.kv_dtype not in ("auto", "float16"):
        return f"--model-kv-dtype {model.kv_dtype} is set, and it keeps KV in float16"
    if not build.available(default_cache_dir(model.cache_dir)):
        return "no C++ compiler is here for its kernels: install g++ or clang++"
    return ""


def have_kernels(settings: Settings) -> None:
    """Compiles the kernels now if a worker would need them; what fails is told by the worker itself.

    Prints one line when that takes a while: workers that start together would all wait for it.
    """
    if settings.worker.engine not in ("auto", "native") or reason_against(settings):
        return
    cache_dir = default_cache_dir(settings.model.cache_dir)
    if not build.is_built(cache_dir):
        print("compiling the CPU kernels (once, some seconds)", flush=True)
    try:
        build.build(cache_dir)
    except build.BuildError as error:
        print(error, flush=True)
