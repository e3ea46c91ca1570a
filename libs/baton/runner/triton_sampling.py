"""Sampling a step's rows on the device: what the kernels need of each row's rules, and one copy back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.masks import GrammarFailure
from baton.engine.penalties import Seen, penalised
from baton.engine.plan import FAILED, Sampled, SampleSpec
from baton.engine.sampling import GREEDY_BELOW, sample, uniform
from baton_kernels.gpu import sampling


def choose(logits: Tensor, vocab: int, specs: Sequence[SampleSpec]) -> list[Sampled]:
    """A token for each row, as `baton.engine.sampling.sample` would choose it.

    Rows whose log-probabilities are wanted go to the host and are sampled there; the others leave nothing
    but their tokens.

    Args:
        logits: float32 [rows, >= vocab] on the device, changed.
    """
    result: list[Sampled | None] = [None] * len(specs)
    on_device = []
    for row, spec in enumerate(specs):
        if spec.params.logprobs >= 0:
            result[row] = sample(logits[row, :vocab].cpu().numpy(), spec)
        else:
            on_device.append(row)
    words, failed = _masks(specs, on_device, vocab)
    tokens = torch.empty(len(specs), dtype=torch.int32, device=logits.device)
    if on_device:
        _edit(logits, specs, on_device)
        whole, real = _rules(specs, vocab)
        on = logits.device
        sampling.sample(
            logits, vocab, _to(whole, on), _to(real, on), tokens, None if words is None else _to(words, on)
        )
    chosen = tokens.tolist() if on_device else []
    for row in on_device:
        problem = failed.get(row, "")
        result[row] = Sampled(FAILED, problem=problem) if problem else Sampled(chosen[row])
    return [one for one in result if one is not None]


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    made = torch.from_numpy(array)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _rules(specs: Sequence[SampleSpec], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """`whole` and `real` as `sampling.sample` takes them."""
    whole = np.zeros((len(specs), 2), dtype=np.int32)
    real = np.ones((len(specs), 4), dtype=np.float64)
    for row, spec in enumerate(specs):
        params = spec.params
        whole[row] = params.temperature < GREEDY_BELOW, min(max(params.top_k, 0), vocab)
        low = math.log(min(params.min_p, 1.0)) if params.min_p > 0 else sampling.NO_MIN_P
        draw = uniform(params.seed, spec.choice, spec.index)
        real[row] = max(params.temperature, GREEDY_BELOW), params.top_p, low, draw
    return whole, real


def _masks(
    specs: Sequence[SampleSpec], rows: Sequence[int], vocab: int
) -> tuple[np.ndarray | None, dict[int, str]]:
    """Grammar masks int32 [rows, words], None without any; and why rows have failed that could have none."""
    bound = [row for row in rows if specs[row].allowed is not None]
    if not bound:
        return None, {}
    masks = np.full((len(specs), -(-vocab // 32)), -1, dtype=np.int32)
    failed = {}
    for row in bound:
        allowed = specs[row].allowed
        assert allowed is not None
        try:
            words = allowed.words().view(np.int32)[: masks.shape[1]]
        except GrammarFailure as error:
            failed[row] = str(error)
            continue
        masks[row] = 0
        masks[row, : len(words)] = words
    return masks, failed


def _edit(logits: Tensor, specs: Sequence[SampleSpec], rows: Sequence[int]) -> None:
    """Bias, then the stop mask of `min_tokens`, then penalties: a launch for each that any row needs."""
    biases, bans, seen = [], [], []
    for row in rows:
        spec = specs[row]
        params = spec.params
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, dtype=np.int32)
            biases.append((row, ids, np.fromiter(params.logit_bias.values(), dtype=np.float32), (0.0,) * 3))
        if spec.index < params.min_tokens and params.stop_token_ids:
            ids = np.unique(np.asarray(params.stop_token_ids, dtype=np.int32))
            bans.append((row, ids, np.zeros(len(ids), dtype=np.float32), (0.0,) * 3))
        if penalised(params):
            counted = spec.seen if spec.seen is not None else Seen(spec.tokens, spec.prompt_len)
            rates = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            seen.append((row, counted.ids.astype(np.int32), counted.counts, rates))
    for kind, edits in ((sampling.BIAS, biases), (sampling.BAN, bans), (sampling.PENALTY, seen)):
        if edits:
            _launch_edits(logits, kind, edits)


def _launch_edits(
    logits: Tensor, kind: int, edits: Sequence[tuple[int, np.ndarray, np.ndarray, tuple[float, ...]]]
) -> None:
    device = logits.device
    numbers, ids, amounts, rates = zip(*edits, strict=True)
    offsets = np.cumsum([0, *(len(part) for part in ids)], dtype=np.int32)
    sampling.edit_scores(
        logits, kind, _to(np.asarray(numbers, dtype=np.int32), device), _to(offsets, device),
        _to(np.concatenate(ids), device), _to(np.concatenate(amounts), device),
        _to(np.asarray(rates, dtype=np.float32), device),
    )  # fmt: skip
