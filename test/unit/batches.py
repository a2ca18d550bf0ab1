"""Batches and requests as SGLang's sampler sees them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.sparse_kv import sampling


def batch_info(rows, temperature=1.0, top_p=1.0, top_k=TOP_K_ALL, min_p=0.0, vocab=50, **more):
    def per_row(value, dtype=torch.float32):
        return torch.tensor([value] * rows if not isinstance(value, list) else value, dtype=dtype)

    top_ks, top_ps, min_ps = per_row(top_k, torch.int32), per_row(top_p), per_row(min_p)
    return SamplingBatchInfo(
        temperatures=per_row(temperature).view(-1, 1),
        top_ps=top_ps,
        top_ks=top_ks,
        min_ps=min_ps,
        is_all_greedy=bool((top_ks <= 1).all()),
        is_any_greedy=bool((top_ks <= 1).any()),
        need_top_p_sampling=bool((top_ps != 1).any()),
        need_top_k_sampling=bool((top_ks != TOP_K_ALL).any()),
        need_min_p_sampling=bool((min_ps > 0).any()),
        vocab_size=vocab,
        device="cpu",
        **more,
    )


def coupled_sampler():
    # Upstream's constructor wants a process group, which only synchronising ranks needs.
    sampler = sampling.CoupledSampler.__new__(sampling.CoupledSampler)
    torch.nn.Module.__init__(sampler)
    return sampler


def request(rid="r", seed=None, frequency=0.0, presence=0.0, repetition=1.0, max_new_tokens=100):
    params = SimpleNamespace(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=0,
        stop_token_ids=set(),
        sampling_seed=seed,
        max_new_tokens=max_new_tokens,
    )
    return SimpleNamespace(rid=rid, sampling_params=params)
