"""Logits -> token: the sampling rules, on one row of logits at a time.

The order is vLLM's (V1 sampler): log-probabilities from the raw logits; logit bias and the stop mask of
`min_tokens`; penalties; what a grammar allows; greedy stops here; temperature; then the filters min-p,
top-k, top-p, each on what the one before has left; one draw. (min-p compares ratios to the most likely
token, so whether it comes before or after top-k makes no difference, and top-k, which leaves less to do,
goes first here.)

Randomness is a pure function of (seed, choice, output index): the same draw in any batch, on any worker.
Ties are settled by the lower id everywhere, so a row has one answer.
"""

from __future__ import annotations

import math
import struct
import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from baton.engine.masks import GrammarFailure, restrict
from baton.engine.penalties import Seen, penalised
from baton.engine.plan import FAILED, Sampled, SampleSpec
from baton.protocol.sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from baton.engine.sequence import Sequence

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
_BINS = 2_048  # of the histogram that finds a top-p set
_BINS_PER_NAT = 51.2  # 40 nats in all: what lies deeper weighs nothing beside the rest
_BLOCK = 256  # weights summed together in a draw
_COUNTER = struct.Struct("<QIQ")
_MASK64 = (1 << 64) - 1
_scratch = threading.local()


def sample(logits: Logits, spec: SampleSpec) -> Sampled:
    """Choose one token.

    Args:
        logits: float32 [vocab], left as they are; -inf marks ids that can never be chosen (padding).
        spec: the rules and the output position.

    Returns:
        The token, with log-probabilities if asked for; `FAILED` when the logits are not finite, or a grammar
        cannot go on.
    """
    params = spec.params
    scores = adjust(logits, spec)
    if spec.allowed is not None:
        try:
            scores = restrict(scores, spec.allowed.words())
        except GrammarFailure as error:
            return Sampled(FAILED, problem=str(error))
    best = int(scores.argmax())  # the first of the maxima; of a NaN, if there is one
    peak = float(scores[best])
    if not math.isfinite(peak):
        return Sampled(FAILED)
    token = best
    if params.temperature >= GREEDY_BELOW:
        ids, weights = keep(scores, peak, params)
        at = draw(weights, uniform(params.seed, spec.choice, spec.index))
        token = at if ids is None else int(ids[at])
    if params.logprobs < 0:
        return Sampled(token)
    return Sampled(token, token_logprobs(logits, token, params.logprobs))


def adjust(logits: Logits, spec: SampleSpec) -> Logits:
    """Logits after bias, the stop mask and penalties; the same array when none of them applies."""
    params = spec.params
    masked = spec.index < params.min_tokens and bool(params.stop_token_ids)
    punished = penalised(params)
    if not (params.logit_bias or masked or punished):
        return logits
    scores = logits.copy()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if masked:
        scores[params.stop_token_ids] = -np.inf
    if punished:
        seen = spec.seen if spec.seen is not None else Seen(spec.tokens, spec.prompt_len)
        seen.penalise(scores, params)
    return scores


def keep(scores: Logits, peak: float, params: SamplingParams) -> tuple[Ids | None, Weights]:
    """The ids that pass temperature and filters, in id order, and their weights.

    Args:
        scores: float32 [vocab]; `peak` is their maximum.

    Returns:
        ids [n] (None: all of them) and weights float64 [n], the most likely one's being 1. They may lie in
        this thread's buffer, behind zeros up to a whole block: good until the next call.
    """
    ids: Ids | None = None
    if 0 < params.top_k < len(scores):
        ids = largest(scores, params.top_k)
        scores = scores[ids]
    if params.min_p > 0:
        lowest = peak + params.temperature * math.log(min(params.min_p, 1.0))
        kept = np.flatnonzero(scores >= min(lowest, peak))
        ids, scores = _select(ids, kept), scores[kept]
    weights = _whole_blocks(scores)
    weights -= peak
    weights /= params.temperature
    np.exp(weights, out=weights)
    if params.top_p < 1:
        depth = np.float32(peak) - scores
        depth /= np.float32(params.temperature)
        kept = nucleus(weights[: len(scores)], depth, params.top_p)
        ids, weights = _select(ids, kept), weights[kept]
    return ids, weights


def _select(ids: Ids | None, kept: Ids) -> Ids:
    return kept if ids is None else ids[kept]


def _whole_blocks(scores: Logits) -> Weights:
    """A float64 copy in this thread's buffer, filled up to whole blocks with -inf.

    Kept between calls because fresh pages for a vocabulary cost as much as the exponentials.
    """
    size = -(-len(scores) // _BLOCK) * _BLOCK
    buffer: Weights | None = getattr(_scratch, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _scratch.buffer = np.empty(size, dtype=np.float64)
    buffer[: len(scores)] = scores
    buffer[len(scores) : size] = -np.inf
    return buffer[:size]


def largest(values: Logits, count: int) -> Ids:
    """Indices of the `count` largest of `values` [n], 0 < count < n, in index order; ties go to the lower."""
    edge = np.partition(values, len(values) - count)[len(values) - count]
    kept = np.flatnonzero(values >= edge)
    if len(kept) > count:
        ties = np.flatnonzero(values[kept] == edge)
        kept = np.delete(kept, ties[count - len(kept) :])
    return kept


def nucleus(weights: Weights, depth: Logits, share: float) -> Ids:
    """Indices, in order, of the smallest set of the largest weights that holds `share` of their sum.

    At least one; among equals the lower index goes first. A histogram finds the bin in which the sum is
    reached, and only that bin is sorted: a full sort of a vocabulary costs more than all the rest.

    Args:
        weights: float64 [n].
        depth: float32 [n], how far each one's logarithm lies under the largest's.
    """
    depth = depth * np.float32(_BINS_PER_NAT)
    bins = np.minimum(depth, np.float32(_BINS - 1), out=depth).astype(np.int32)
    reached = np.cumsum(np.bincount(bins, weights=weights, minlength=_BINS))
    goal = share * float(reached[-1])
    edge = int(np.searchsorted(reached, goal))
    above = np.flatnonzero(bins < edge)
    border = np.flatnonzero(bins == edge)
    border = border[np.argsort(-weights[border], kind="stable")]
    before = float(reached[edge - 1]) if edge else 0.0
    count = int(np.searchsorted(before + np.cumsum(weights[border]), goal)) + 1
    return np.sort(np.concatenate([above, border[:count]]))


def uniform(seed: int, choice: int, index: int) -> float:
    """The draw of one output position, in [0, 1): XXH3-64 of the three, little-endian, to 53 bits."""
    packed = _COUNTER.pack(seed & _MASK64, choice, index)
    return (xxhash.xxh3_64_intdigest(packed) >> 11) * 2.0**-53


def draw(weights: Weights, where: float) -> int:
    """The index that `where` in [0, 1) falls on, by the inverse of the running sum of float64 weights [n].

    Sums blocks first and then looks inside one. Zeros at the end change nothing, down to the last bit, as
    long as they come in whole blocks.
    """
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    target = where * float(blocks[-1])
    block = _first_beyond(blocks, target)
    before = float(blocks[block - 1]) if block else 0.0
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK])
    return block * _BLOCK + _first_beyond(inside, target - before)


def _first_beyond(reached: Weights, target: float) -> int:
    """The first index whose running sum exceeds `target`; where rounding left none, the last with weight."""
    at = int(np.searchsorted(reached, target, side="right"))
    return at if at < len(reached) else int(np.searchsorted(reached, reached[-1]))


def token_logprobs(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of `token` and of the `count` most likely, from raw logits float32 [vocab]."""
    peak = float(logits.max())
    exact = _whole_blocks(logits)
    exact -= peak
    np.exp(exact, out=exact)
    norm = peak + float(np.log(exact.sum()))
    chosen = float(logits[token]) - norm
    if count == 0:
        return TokenLogprobs(chosen=chosen)
    top = largest(logits, count) if count < len(logits) else np.arange(len(logits))
    top = top[np.argsort(-logits[top], kind="stable")]
    return TokenLogprobs(
        chosen=chosen, top_ids=top.tolist(), top=(logits[top].astype(np.float64) - norm).tolist()
    )


def finish_reason(seq: Sequence) -> str:
    """Why a sequence ends with its last token: "stop", "length", or "" if it goes on.

    A stop id counts only where `min_tokens` does not mask it.
    """
    index = len(seq.tokens) - seq.prompt_len - 1
    if index < 0:
        return ""
    params = seq.sampling
    if index >= params.min_tokens and seq.tokens[-1] in params.stop_token_ids:
        return "stop"
    return "length" if len(seq.tokens) >= seq.max_len else ""
