"""How a step's tokens are drawn: upstream's filters, one noise for both rows, and the guide's own draw.

Row 1 of a step stands where row 0 of the next step will stand. If both drew with noise of their own, a guide at
temperature 1 would be wrong most of the time. So the noise is a function of (request, position, token): the race
argmax(p / E) with E ~ Exp(1) draws from p exactly, and rows with one p at one position draw one token.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarMask
from sglang.srt.layers import sampler as upstream
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import DynamicGradMode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.spec_utils import GrammarTree


def _signed(value: int) -> int:
    """The 64-bit pattern of `value` as torch's int64 writes it."""
    return value - 2**64 if value >= 2**63 else value


# SplitMix64: the token-th output of a stream that the request and the position seed.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_POSITION = _signed(0xD1342543DE82EF95)
_MIX = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
_BITS = 53


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask makes it logical.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, a bijection of int64 that spreads every bit. int64 [...] -> int64 [...]."""
    for bits, factor in _MIX:
        value = (value ^ _shift(value, bits)) * factor
    return value ^ _shift(value, 31)


def exponential(keys: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Exp(1) noise of each (request, position, token).

    keys int64 [N], one per request; positions int [N]; tokens int64 [V]. Returns float32 [N, V], within 5e-17..17.
    """
    stream = mix(keys + positions.long() * _POSITION)
    bits = mix(stream[:, None] + tokens * _GOLDEN)
    uniform = (_shift(bits, 64 - _BITS).to(torch.float32) + 0.5) * 2.0**-_BITS
    # Small values keep their relative precision, so that rare tokens win as often as they should; 1.0 would give an
    # infinite E and lose even against a token of probability 0.
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))


def _scores(weights: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return weights / exponential(keys, positions, tokens)


@functools.lru_cache(maxsize=1)
def _compiled_scores():
    # Twenty element-wise kernels over the vocabulary become one.
    return torch.compile(_scores, dynamic=True)


@functools.lru_cache(maxsize=4)
def _token_ids(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64, device=device)


def draw(weights: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row with probability proportional to its weight.

    weights float32 [N, V], non-negative, at least one positive per row; keys int64 [N]; positions int [N].
    Returns int32 [N], a function of the arguments alone.
    """
    scores = _compiled_scores() if weights.is_cuda else _scores
    tokens = _token_ids(weights.shape[1], weights.device)
    return scores(weights, keys, positions, tokens).argmax(dim=-1).to(torch.int32)


@DynamicGradMode()
def warm_up(vocab_size: int, device: torch.device) -> None:
    """Compile what `draw` needs on a GPU, so that the first request at a temperature does not wait for it.

    The compiler keeps its results by gradient mode too, so this runs in the scheduler's.
    """
    for rows in (1, 2):  # the compiler treats one row as a case of its own
        weights = torch.ones(rows, vocab_size, device=device)
        keys = torch.zeros(rows, dtype=torch.int64, device=device)
        draw(weights, keys, keys)


def filtered(probs: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Upstream's top-k, top-p and min-p: `probs` with what they exclude at zero, rescaled or not.

    probs float32 [N, V], left as it is. Each sampling backend keeps its own order: flashinfer applies top-k and top-p
    to the same distribution unless there is a min-p, torch sorts once and cuts.
    """
    if get_exec().kernel.sampling_backend == "flashinfer":
        top_k = upstream.top_k_renorm_prob(probs, info.top_ks)
        if not info.need_min_p_sampling:
            return torch.where(top_k > 0, upstream.top_p_renorm_prob(probs, info.top_ps), 0.0)
        kept = upstream.top_p_renorm_prob(top_k, info.top_ps)
        return torch.where(kept >= kept.amax(dim=-1, keepdim=True) * info.min_ps[:, None], kept, 0.0)
    ordered, tokens = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    rank = torch.arange(probs.shape[1], device=probs.device)
    keep = (rank < info.top_ks[:, None]) & (before <= info.top_ps[:, None])
    if info.need_min_p_sampling:
        keep &= ordered >= ordered[:, :1] * info.min_ps[:, None]
    return torch.zeros_like(probs).scatter_(-1, tokens, torch.where(keep, ordered, 0.0))


def is_unfiltered(info: SamplingBatchInfo) -> bool:
    """No request of the batch cuts its distribution."""
    return not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling)


class CoupledSampler(upstream.Sampler):
    """Upstream's sampler, drawing with shared noise where `couple` gave the batch its keys."""

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> torch.Tensor:
        keys = getattr(sampling_info, _KEYS, None)
        # Deterministic inference has noise by seed and position already, and promises exactly that noise.
        if keys is None or sampling_info.sampling_seed is not None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        weights = probs if simple_sampling_case else filtered(probs, sampling_info)
        return draw(weights, keys, positions)


_KEYS = "_sparse_kv_noise_keys"


def couple(info: SamplingBatchInfo, keys: torch.Tensor) -> None:
    """Let a `CoupledSampler` draw this forward's tokens with shared noise. keys int64 [N]."""
    setattr(info, _KEYS, keys)


def draw_guess(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, sampler: torch.nn.Module | None
) -> torch.Tensor:
    """The token that the sampler would draw from `logits`, or the likeliest one where its noise is not shared.

    logits float [N, V], overwritten; positions int [N] of the tokens that produced them. Returns int [N]. Custom logit
    processors are left out: they may keep state, and calling them once more would change the text.
    """
    info.apply_logits_bias(logits)
    if info.is_all_greedy or not isinstance(sampler, CoupledSampler):
        return logits.argmax(dim=-1)
    probs = torch.softmax(logits.div_(info.temperatures), dim=-1)
    return sampler._sample_from_probs(probs, info, positions, is_unfiltered(info))


def has_penalties(info: SamplingBatchInfo) -> bool:
    """Some request of the batch has a penalty or a minimum length."""
    return info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None


def advance_penalties(info: SamplingBatchInfo, tokens: torch.Tensor, rates: torch.Tensor) -> None:
    """Bring a forward's penalties, which row 0 has used, to what they will be one step later.

    tokens int [N], the ones not counted yet; rates float32 [N, 3]: frequency, presence and repetition penalty.
    """
    column = tokens.long()[:, None]
    frequency, presence, repetition = rates.split(1, dim=1)
    if info.acc_additive_penalties is not None:
        unseen = info.acc_additive_penalties.gather(1, column) == 0
        info.acc_additive_penalties.scatter_add_(1, column, -(frequency + presence * unseen))
    if info.acc_scaling_penalties is not None:
        info.acc_scaling_penalties.scatter_(1, column, repetition)


def select(info: SamplingBatchInfo, rows: Sequence[int], index: torch.Tensor) -> SamplingBatchInfo:
    """The parameters of some of a batch's requests. rows: their places; index: the same, int64 on the device."""
    tensors = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")
    penalties = ("acc_additive_penalties", "acc_scaling_penalties")
    taken = {name: value[index] for name in (*tensors, *penalties) if (value := getattr(info, name)) is not None}
    grammars = [info.grammars[row] for row in rows] if info.grammars else None
    part = dataclasses.replace(info, **taken, grammars=grammars if grammars and any(grammars) else None)
    keys = getattr(info, _KEYS, None)
    if keys is not None:
        couple(part, keys[index])
    return part


def can_rewind(grammars: Iterable[BaseGrammarObject | None]) -> bool:
    """Whether upstream can try a token on each grammar and take it back. A reasoning grammar wraps the one to ask."""
    inner = [getattr(grammar, "grammar", None) or grammar for grammar in grammars if grammar is not None]
    return all(type(grammar).rollback is not BaseGrammarObject.rollback for grammar in inner)


def guess_grammar_mask(
    reqs: Sequence[Req], tree: GrammarTree, info: SamplingBatchInfo, device: torch.device
) -> GrammarMask | None:
    """What the grammars allow after the guide's token; behind a guide that its grammar refuses, anything.

    tree: upstream's, over int64 [N, 2] (committed token, guide). Host work, to be done while the forward runs.
    """
    from sglang.srt.speculative.spec_utils import build_grammar_vocab_mask

    mask = build_grammar_vocab_mask(reqs=reqs, tree=tree, sampling_info=info, device=device, barrier=None)
    return None if mask is None else mask._replace(vocab_mask=mask.vocab_mask[1::2].contiguous())


class NoiseKeys:
    """Gives each request the key of its noise, and keeps it through retraction.

    A request with a sampling seed has the key of its seed, so that the same seed gives the same text; the n samples of
    one request share the seed, so each also counts its place among them. Others take the next key of the server's.
    """

    _SAMPLE = re.compile(r"(.+)_[0-9a-f]{32}")  # how upstream names one of n samples
    _REMEMBERED = 4096
    _ATTRIBUTE = "_sparse_kv_noise_key"

    def __init__(self, *seeds: int | None) -> None:
        self._seeds = seeds
        self._arrivals = 0
        self._samples: OrderedDict[str, int] = OrderedDict()

    def of(self, req: Req) -> int:
        """The key of a request, a signed 64-bit number; equal on all ranks, which meet requests in one order."""
        key = getattr(req, self._ATTRIBUTE, None)
        if key is None:
            seed = req.sampling_params.sampling_seed
            key = self._hash("seed", seed, self._place(req)) if seed is not None else self._next()
            setattr(req, self._ATTRIBUTE, key)
        return key

    def _next(self) -> int:
        self._arrivals += 1
        return self._hash("server", *self._seeds, self._arrivals)

    def _place(self, req: Req) -> int:
        match = self._SAMPLE.fullmatch(str(req.rid))
        # Upstream first sends the prompt alone, to cache it; it draws nothing that anyone sees.
        if match is None or req.sampling_params.max_new_tokens == 0:
            return 0
        place = self._samples.pop(match.group(1), 0)
        self._samples[match.group(1)] = place + 1
        if len(self._samples) > self._REMEMBERED:
            self._samples.popitem(last=False)
        return place

    @staticmethod
    def _hash(*parts: object) -> int:
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)
