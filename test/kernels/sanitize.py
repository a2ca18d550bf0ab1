"""One call of every kernel on small sizes, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python test/kernels/sanitize.py

Without torch's caching allocator every tensor is an allocation of its own, so that a step beyond its end is seen.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from layers import copied, make_layer, random_selection
from sglang.srt.sparse_kv.geometry import SelectionShape
from sglang.srt.sparse_kv.ops import cuda, cuda_prefill
from sglang.srt.sparse_kv.ops.attend import Inputs
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sglang.srt.sparse_kv.ops.reference import Prefetch
from sglang.srt.sparse_kv.ops.workspace import workspace


def run(gpu: torch.device, page_size: int, dim: int, dtype: torch.dtype, rows: int, heads: int, group: int) -> None:
    shape = SelectionShape.from_tokens(page_size, 16 * page_size, page_size, 3 * page_size)
    n, max_pages = 3, 90
    pages = n * max_pages + 1
    view = make_layer(0, gpu, heads, 88, pages, page_size, dim, dtype)
    table = (torch.randperm(pages - 1) + 1).view(n, max_pages).to(torch.int32).to(gpu)
    length = torch.tensor([max_pages * page_size - 2, 1, 40 * page_size - 1], device=gpu)
    active = torch.tensor([True, False, True], device=gpu)
    clock = torch.tensor([50], dtype=torch.int32, device=gpu)
    cap = torch.tensor([5], dtype=torch.int32, device=gpu)
    q = torch.randn((n, rows, heads, group, dim), device=gpu).to(dtype)
    k, v = (torch.randn((n, rows, heads, dim), device=gpu).to(dtype) for _ in range(2))
    page = table.gather(1, (length // page_size)[:, None])[:, 0]

    others = [make_layer(seed, gpu, heads, 88, pages, page_size, dim, dtype) for seed in (1, 2)]
    store = random_selection(4, 5, heads, shape.budget_pages, max_pages).to(gpu)
    index = torch.tensor([4, 0, 2], device=gpu)
    plans = [Prefetch(other, store, clock, cap, table, length // page_size, index) for other in others]
    cuda.append(view, k[:, 0], v[:, 0], page, length % page_size, active, clock)
    cuda.plan_prefetches(plans)
    for plan in plans:
        cuda.gather(plan.view, plan.fetch)
        copied(plan.view, plan.fetch)
    lo, hi = shape.candidate_bounds(length[:, None] + torch.arange(rows, device=gpu))
    scores = cuda.score(q, view.landmarks, table, lo, hi, dim**-0.5)
    dense = scores.dense()

    def select(of, keep=None, last=None):
        alone = keep if rows == 1 else None
        chosen = cuda.select(of, table, length, active, shape, shape.budget_pages, alone, last)
        if rows == 2:
            chosen.predicted = cuda.predict(of, length, active, shape, shape.budget_pages, keep, last)
        return chosen

    chosen = select(scores)
    select(dense)
    select(dense.mul(0))
    bits = torch.zeros((5, 2, heads, -(-table.shape[1] // 32)), dtype=torch.int32, device=gpu)
    last = Last(bits, index, torch.ones(1, device=gpu))
    for _ in range(2):
        select(scores, (store, index), last)
    cuda.set_miss_rate(gpu, 0.5)
    cuda.resolve(view, chosen.pages, None, clock, move=True)
    cuda.set_miss_rate(gpu, 0)
    cuda.resolve(others[0], chosen.pages, None, clock + 1, move=True)
    ahead = cuda.plan_prefetch(Prefetch(view, chosen.predicted, clock, cap, table, length // page_size))
    cuda.gather(view, ahead)
    _, fetch = cuda.resolve(view, random_selection(1, n, heads, 20, pages).to(gpu), None, clock + 1)
    cuda.gather(view, fetch, blocks=2)
    copied(view, fetch)
    cuda.invalidate(view, torch.tensor([3, -1, 3, 9], device=gpu))
    part = cuda.install(view, torch.tensor([3, 9], device=gpu), torch.tensor([page_size, 1], device=gpu), clock)
    cuda.gather(view, part)
    loc = torch.arange(5 * page_size + 3, 8 * page_size, device=gpu)
    chunk = torch.randn((loc.numel(), heads, dim), device=gpu).to(dtype)
    cuda_prefill.store_chunk(view, chunk, chunk, loc)
    cuda_prefill.fill(view, chunk, chunk, loc)
    target = torch.empty((2, heads, 7 * page_size, dim), dtype=dtype, device=gpu)
    cuda_prefill.stage(view, cuda_prefill.plan_stage(view, loc[:7] // page_size), target)
    cuda_prefill.stage_cached(view, loc[:7] // page_size, target)
    full = torch.full((7,), page_size, device=gpu)
    cuda_prefill.stage(view, cuda_prefill.plan_stage(view, torch.arange(7, device=gpu) + 11, full, clock), target)
    prefix = torch.arange(7, device=gpu) + 21
    absent = cuda_prefill.absent([view, *others], prefix)
    plan = cuda_prefill.plan_stage(view, prefix, full, clock, absent[0])
    place = torch.zeros((7, *view.host.shape[1:]), dtype=dtype, device=gpu)
    cuda_prefill.stage(view, plan, target, parts="resident")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        cuda_prefill.land(view, np.array([[21, 0, 7]]), place)
    torch.cuda.synchronize()
    cuda_prefill.stage_landed(view, plan, target, place, 0, 7)
    cuda_prefill.stage(view, plan, target, parts="missing")
    cuda_prefill.refresh(view, chunk, chunk, loc, loc[-1:] // page_size, torch.tensor([page_size], device=gpu), clock)
    slots = torch.zeros((n, heads), dtype=torch.int32, device=gpu)
    cuda.write_token(view, k[:, 0], v[:, 0], page, slots, length % page_size, active)
    last = torch.tensor([chosen.pages.shape[2], 0, 3], device=gpu)
    cuda.resolve(view, chosen.pages, None, clock + 2, num_pages=last, open_tokens=length % page_size, move=True)
    inputs = Inputs(None, q[:, 0], q.new_empty((n * heads, group, dim)), length)
    cuda.write_token(view, k[:, 0], v[:, 0], page, None, length % page_size, active, inputs=inputs)
    cuda.close_pages(view, page, length * 0 + page_size - 1, active)
    tokens = torch.randint(0, 10**6, (5, max_pages * page_size - 3), dtype=torch.int32, device=gpu)
    cuda.decode_step(shape, max_pages, rows, tokens, index, length)
    cuda.count_guides(torch.zeros(2, dtype=torch.int64, device=gpu), index - 1, length)
    assert int(cuda.check(view)) == 0
    cuda.clear(view)
    assert int(cuda.check(view)) == 0
    workspace(gpu).check()


if __name__ == "__main__":
    device = torch.device("cuda", torch.cuda.current_device())
    run(device, 16, 128, torch.bfloat16, 2, 2, 4)
    run(device, 8, 64, torch.float16, 2, 3, 8)
    run(device, 32, 96, torch.bfloat16, 1, 1, 1)
    torch.cuda.synchronize()
    print("every kernel ran")
    sys.exit(0)
