"""The torch reference of every operation: the CPU engine, and the oracle that the CUDA engine is tested against.

Shapes: N requests, R rows (row 0 real, row 1 guide), H kv heads, G query heads per kv head, D head_dim, P page_size,
S slots per head, MP logical pages per request, C selection width. Page numbers are physical unless named logical; -1 is
"none" in every index tensor and never reaches memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sglang.srt.sparse_kv.ops.hysteresis import Last
from sglang.srt.sparse_kv.ops.landmarks import Landmarks, store, vectors

NONE = -1
NEVER = -1  # stamp of a free slot: older than any step
RESERVED = torch.iinfo(torch.int32).max  # stamp of a slot that must not be used
WORST = -3e38  # less than any score

# Columns of a counter row, one row a layer.
COUNTERS = (
    *("selected", "hit", "missed", "prefetched", "useful", "wasted", "evicted", "tokens_in"),
    *("prefix_host", "prefix_cache"),
)
SELECTED, HIT, MISSED, PREFETCHED, USEFUL, WASTED, EVICTED, TOKENS_IN, PREFIX_HOST, PREFIX_CACHE = range(len(COUNTERS))


@dataclass
class LayerView:
    """One layer's tensors. Layers that share a ring buffer share its kv and tables and differ in host and landmarks."""

    kv: torch.Tensor  # [H, S, 2, P, D] cached units
    slot_of: torch.Tensor  # int32 [H, NP] slot of a page's unit, or NONE
    page_of: torch.Tensor  # int32 [H, S] page of a slot, or NONE
    stamp: torch.Tensor  # int32 [H, S] step of last selection, NEVER when free
    ahead: torch.Tensor  # bool [H, S] prefetched and not selected since
    host: torch.Tensor  # [NP, H, 2, P, D] the truth, in host memory
    landmarks: Landmarks  # of [NP, H] units
    counters: torch.Tensor  # int64 [len(COUNTERS)]
    stalled: torch.Tensor  # int64 [], nanoseconds that steps waited for missing units


@dataclass
class Fetch:
    """Units to bring from the host: rows of (page, head, slot, tokens), tokens counted from the page's start."""

    units: torch.Tensor  # int32 [capacity, 4]
    count: torch.Tensor  # int32 [1]; rows beyond it are junk


@dataclass
class Prefetch:
    """A prefetch to plan, see `plan_prefetch`."""

    view: LayerView
    pages: torch.Tensor  # int32 [N, H, K] in order of rank, NONE padded
    step: torch.Tensor  # int32 [1], the stamp
    cap: torch.Tensor  # int32 [1], units fetched at most per request and head; negative: nothing is done at all
    table: torch.Tensor | None = None  # int32 [N, MP]: the pages are logical
    closed: torch.Tensor | None = None  # int [N], with table: logical pages from here on are skipped
    index: torch.Tensor | None = None  # int [N]: request i's pages are pages[index[i]]
    fetched: torch.Tensor | None = None  # int32 [slots, 2]: the units within the cap are added to [index[i], 1]
    tokens: torch.Tensor | None = None  # int32 [N, H, K] of each page, None when all are full
    fetch: Fetch | None = None  # the result of `plan_prefetches`


class CapacityError(RuntimeError):
    """A selection needs more slots than the cache has: the planner's capacity rule was broken."""


def lookup(table: torch.Tensor, logical: torch.Tensor) -> torch.Tensor:
    """Physical pages of logical ones. table int32 [N, MP], logical int [N, H, C] -> int32 [N, H, C], NONE kept."""
    n, heads, width = logical.shape
    flat = logical.clamp(min=0).reshape(n, heads * width).long()
    pages = table.gather(1, flat).view(n, heads, width)
    return torch.where(logical >= 0, pages, NONE)


# ---------------------------------------------------------------- scores and selection


def score(q: torch.Tensor, landmarks: Landmarks, table: torch.Tensor, lo, hi, scale: float, inputs=None):
    """Log-probability of each candidate page under its landmark, the best of the query group.

    A page counts for the sum of exponentials over its landmark's vectors, as attention counts its keys.
    q [N, R, H, G, D]; landmarks of [NP, H] units; table int32 [N, MP]; lo, hi int [N, R] candidate bounds.
    Returns float32 [N, R, H, MP], -inf outside the bounds alone: a candidate whose scores are no numbers, since a query
    or a key has overflowed, is the worst one, so that heads agree how many pages a request selects. The logarithm keeps
    far pages apart where a float32 softmax would make them equal zeros. One request at a time: sums of another length
    round differently, and so might decide another way, so a request's scores must not depend on how long its neighbours
    are. inputs: of attend_inputs.
    """
    n, rows, heads, group, dim = q.shape
    out = q.new_full((n, rows, heads, table.shape[1]), float("-inf"), dtype=torch.float32)
    for i, span in enumerate(hi.amax(1).tolist()):
        if span == 0:
            continue
        pages = table[i, :span].long()
        keys = vectors(Landmarks(landmarks.codes[pages], landmarks.scales[pages]))  # [span, H, PARTS, D]
        keys = keys.permute(1, 3, 0, 2).reshape(heads, dim, -1)
        queries = q[i].float().transpose(0, 1).reshape(heads, rows * group, dim)
        logits = (torch.bmm(queries, keys).view(heads, rows, group, span, -1) * scale).logsumexp(-1)
        index = torch.arange(span, device=q.device)
        inside = (index >= lo[i, :, None]) & (index < hi[i, :, None])  # [R, span]
        logits = logits.masked_fill(~inside[:, None, :], float("-inf"))
        norm = torch.logsumexp(logits, dim=-1, keepdim=True)
        best = (logits - torch.where(norm.isinf(), 0.0, norm)).nan_to_num_(nan=WORST, neginf=WORST).amax(dim=2)
        out[i, :, :, :span] = best.transpose(0, 1).masked_fill(~inside[:, None, :], float("-inf"))
    return out


def top_pages(scores: torch.Tensor, budget_pages: int) -> torch.Tensor:
    """The best pages in order of rank, ties to the lower page. scores [..., MP] -> int32 [..., budget_pages]."""
    width = min(budget_pages, scores.shape[-1])
    values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    chosen = torch.where(values[..., :width] > float("-inf"), order[..., :width], NONE).to(torch.int32)
    if width < budget_pages:
        chosen = torch.nn.functional.pad(chosen, (0, budget_pages - width), value=NONE)
    return chosen


def assemble(chosen: torch.Tensor, length: torch.Tensor, sink_pages: int, window: int, page_size: int, width: int):
    """A selection in ascending logical order: sinks, chosen pages, window, the open page last.

    chosen int32 [N, H, K] logical, NONE padded; length int [N] committed tokens.
    Returns (int32 [N, H, width] logical, NONE padded at the end; int32 [N] pages in each row).
    """
    n, heads, _ = chosen.shape
    open_page = length // page_size
    first_window = torch.div((length + 1 - window).clamp(min=0), page_size, rounding_mode="floor")
    sinks = torch.arange(sink_pages, device=chosen.device).expand(n, -1)
    sinks = torch.where(sinks < first_window[:, None], sinks, NONE)
    window_pages = -(-(window - 1) // page_size) + 1
    recent = first_window[:, None] + torch.arange(window_pages, device=chosen.device)
    recent = torch.where(recent <= open_page[:, None], recent, NONE)
    forced = torch.cat([sinks, recent], 1)[:, None, :].expand(n, heads, -1)
    pages = torch.cat([forced.to(torch.int32), chosen], 2)
    last = torch.iinfo(torch.int32).max
    pages = torch.where(pages < 0, last, pages).sort(dim=-1).values[..., :width]
    pages = torch.where(pages == last, NONE, pages)
    return pages, (pages[:, 0] >= 0).sum(-1, dtype=torch.int32)


def take_whole(chosen: torch.Tensor, whole: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """What is chosen where some requests take all candidates.

    chosen int32 [N, H, K] logical; whole bool [N]: those requests; candidates bool [N, 1 or H, MP].
    Returns int32 [N, H, K + MP], NONE in between.
    """
    whole = whole[:, None, None]
    pages = torch.arange(candidates.shape[2], dtype=torch.int32, device=chosen.device)
    every = torch.where(whole & candidates, pages, NONE).expand(-1, chosen.shape[1], -1)
    return torch.cat([torch.where(whole, NONE, chosen), every], 2)


@dataclass
class Selection:
    pages: torch.Tensor  # int32 [N, H, C] physical, ascending logical order, NONE padded: row 0's true selection
    num_pages: torch.Tensor  # int32 [N] pages in each row of `pages`, 0 for padded rows
    # Where R == 1, int32 [N, H, K] logical, best rank first, NONE padded: what was chosen. None when it was kept.
    predicted: torch.Tensor | None = None


def select(scores, table, length, active, shape, budget_pages: int, keep=None, last: Last | None = None) -> Selection:
    """Row 0's selection; where R == 1 it is also what the next step's is expected to be. scores [N, R, H, MP]; active
    bool [N].

    keep: (int32 [rows, H, >= K], int64 [N]) takes each request's prediction into its row; rows of padded requests may
    repeat. last: what the request's step before selected, which counts for more, and beside it what this one selects.
    A request shorter than shape.whole selects all of its candidates; predictions hold the best K all the same. Raises
    ValueError when R == 2 and there is a keep: that is for `predict`.
    """
    if scores.shape[1] == 2 and keep is not None:
        raise ValueError("select: row 1's predictions are kept by predict")
    whole = active & (length < shape.whole)
    rows, scores = scores.shape[1], scores[:, 0]
    if last is not None:
        scores = last.favoured(scores, length, shape.sink_pages)
    best = torch.where(active[:, None, None], top_pages(scores, budget_pages), NONE)  # [N, H, K]
    if last is not None:
        competed = active & ~whole & ((scores[:, 0] > float("-inf")).sum(-1) > budget_pages)
        last.remember(best, competed, length, shape.sink_pages)
    chosen = best
    if shape.whole:
        chosen = take_whole(chosen, whole, scores > float("-inf"))
    logical, num_pages = assemble(chosen, length, shape.sink_pages, shape.window, shape.page_size, shape.width)
    logical = torch.where(active[:, None, None], logical, NONE)
    predicted = _kept(best, keep) if rows == 1 else None
    return Selection(lookup(table, logical), torch.where(active, num_pages, 0), predicted)


def predict(scores, length, active, shape, pages: int, keep=None, last: Last | None = None) -> torch.Tensor | None:
    """Row 1's best pages, which the step after this one will select if its token was guessed right.

    scores [N, 2, H, MP]; length int [N] committed tokens; active bool [N]. last: holds what `select` has chosen in this
    step, which counts for more in the next. Returns int32 [N, H, pages] logical, best rank first, NONE padded, unless
    they are kept (see `select`).
    """
    scores = scores[:, 1]
    if last is not None:
        scores = last.favoured(scores, length + 1, shape.sink_pages)
    return _kept(torch.where(active[:, None, None], top_pages(scores, pages), NONE), keep)


def _kept(best: torch.Tensor, keep) -> torch.Tensor | None:
    """The predictions int32 [N, H, K], or None when they went to the rows of `keep`."""
    if keep is None:
        return best
    keep[0][keep[1], :, : best.shape[2]] = best
    return None


# ---------------------------------------------------------------- the page cache's tables


def own_slots(view: LayerView, chosen: torch.Tensor, table: torch.Tensor, length: torch.Tensor, shape) -> torch.Tensor:
    """Slots of the pages that the next step would select if row 1's queries were its own, of those that are cached.

    chosen int32 [N, H, >= K] logical, row 1's best; table int32 [N, MP]; length int [N] committed tokens. Returns int32
    [N, H, C] in ascending logical order, the open page of row 0 last, with NONE where a page is not cached. Nothing is
    stamped, claimed or fetched.
    """
    chosen = chosen[..., : shape.budget_pages]
    if shape.whole:
        lo, hi = (bound[:, None, None] for bound in shape.candidate_bounds(length + 1))
        pages = torch.arange(table.shape[1], device=table.device)
        chosen = take_whole(chosen, length + 1 < shape.whole, (pages >= lo) & (pages < hi))
    logical, _ = assemble(chosen, length + 1, shape.sink_pages, shape.window, shape.page_size, shape.width)
    begun = logical <= (length // shape.page_size)[:, None, None]  # row 1's own page may be yet to begin
    return _slots_of(view, lookup(table, torch.where(begun, logical, NONE)))


def _slots_of(view: LayerView, pages: torch.Tensor) -> torch.Tensor:
    """Slots of pages' units, NONE where not resident or not a page. pages int32 [N, H, C] -> int32 [N, H, C]."""
    table = view.slot_of.expand(pages.shape[0], -1, -1)
    return torch.where(pages >= 0, table.gather(2, pages.clamp(min=0).long()), NONE)


def _distinct(
    view: LayerView, missing: torch.Tensor, pages: torch.Tensor, tokens, by_rank: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The units marked in `missing`, once each: (head, page, tokens). Heads ascend, then pages or, by_rank, ranks and
    requests.

    missing bool, pages int32 [N, H, C]; tokens int32 [N, H, C], or None when all are full.
    """
    missing = missing.permute((1, 2, 0) if by_rank else (1, 0, 2))
    pages = pages.permute((1, 2, 0) if by_rank else (1, 0, 2))
    head, *_ = place = missing.nonzero(as_tuple=True)
    page = pages[place].long()
    if tokens is None:
        tokens = torch.full_like(page, view.kv.shape[3])
    else:
        tokens = tokens.permute((1, 2, 0) if by_rank else (1, 0, 2))[place].long()
    key = head * view.slot_of.shape[1] + page
    unique, inverse = torch.unique(key, return_inverse=True)
    position = torch.arange(key.numel(), device=key.device)
    first = torch.full_like(unique, key.numel()).scatter_reduce(0, inverse, position, "amin")
    if by_rank:
        first = first.sort().values
    return head[first], page[first], tokens[first]


def enter(view: LayerView, head, page, tokens, step: torch.Tensor, ahead: bool, must: bool) -> Fetch:
    """Gives each unit (heads ascending) a victim: the oldest slots with stamp < step, ties to the lower slot."""
    heads, slots = view.stamp.shape
    wanted = torch.bincount(head, minlength=heads)  # [H]
    usable = (view.stamp < step).sum(1)
    if must and bool((wanted > usable).any()):
        worst = int((wanted - usable).argmax())
        raise CapacityError(
            f"kv head {worst} needs {int(wanted[worst])} slots and {int(usable[worst])} of {slots} may be evicted; "
            "lower --max-running-requests or --sparse-kv-budget, or raise cache_memory"
        )
    start = torch.cumsum(wanted, 0) - wanted
    rank = torch.arange(head.numel(), device=head.device) - start[head]
    kept = rank < usable[head]
    head, page, tokens, rank = head[kept], page[kept], tokens[kept], rank[kept]
    slot = view.stamp.argsort(dim=1, stable=True)[head, rank]
    old = view.page_of[head, slot].long()
    evicted = old >= 0
    view.slot_of[head[evicted], old[evicted]] = NONE  # cleared before the new unit is entered
    view.counters[EVICTED] += evicted.sum()
    view.counters[WASTED] += (view.ahead[head, slot] & evicted).sum()
    view.slot_of[head, page] = slot.to(torch.int32)
    view.page_of[head, slot] = page.to(torch.int32)
    view.stamp[head, slot] = step
    view.ahead[head, slot] = ahead
    # A page that only begins has nothing to fetch and is no miss.
    view.counters[PREFETCHED if ahead else MISSED] += (tokens > 0).sum()
    view.counters[TOKENS_IN] += tokens.sum()
    units = torch.stack([page, head, slot, tokens], 1).to(torch.int32)
    return Fetch(units, torch.tensor([units.shape[0]], dtype=torch.int32, device=units.device))


def _enter_missing(view: LayerView, missing, pages, tokens, step: torch.Tensor, ahead: bool) -> Fetch:
    """Enters the units marked in `missing`: predicted ones (ahead) as far as slots reach, selected ones all."""
    if not bool(missing.any()):
        return Fetch(pages.new_zeros((0, 4)), pages.new_zeros(1))
    return enter(view, *_distinct(view, missing, pages, tokens, by_rank=ahead), step, ahead, must=not ahead)


def resolve(
    view: LayerView,
    pages,
    tokens,
    step: torch.Tensor,
    count: bool = True,
    inputs=None,
    num_pages=None,
    fetched=None,
    owner=None,
    open_tokens=None,
    waited: bool = True,
):
    """Slots for a true selection: all hits are stamped, then every missing unit gets one victim and is to be fetched.

    pages int32 [N, H, C], NONE for padding and padded rows; tokens int32 [N, H, C] committed tokens of each page, None
    when all are full; step int32 [1].
    A unit in flight is already in the table and counts as a hit: the caller joins the layer's transfers before it
    attends. inputs: of attend_inputs, for selections of num_pages int [N] pages a row. fetched: int32 [slots, 2], where
    each request's missing units are added in column 0, in the row owner[i] int [N].
    open_tokens: int [N], with num_pages and instead of tokens: the last page of each row is the one that a token is
    about to be written to, and has so many committed tokens. It is a hit as after an append, on nobody's account, and a
    miss only if it must be fetched. waited: whether the step waits for the result, rather than run beside it.
    Returns (slots int32 [N, H, C], Fetch). Raises CapacityError when the capacity rule was broken.
    """
    slots = _slots_of(view, pages)
    _, head, _ = place = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[place].long()
    unused = view.ahead.sum()
    view.ahead[head, slot] = False
    view.counters[USEFUL] += unused - view.ahead.sum()
    view.stamp[head, slot] = step
    valid = pages >= 0
    missing = valid & (slots < 0)
    others = missing
    if open_tokens is not None:
        last = (torch.arange(pages.shape[2], device=pages.device) == num_pages[:, None] - 1)[:, None, :]  # [N, 1, C]
        tokens = torch.where(last, open_tokens[:, None, None], view.kv.shape[3]).expand_as(pages)
        others = missing & ~last
    if count:
        view.counters[SELECTED] += valid.sum()
        view.counters[HIT] += valid.sum() - others.sum()
    if fetched is not None:
        _charge(fetched[:, 0], owner, others)
    fetch = _enter_missing(view, missing, pages, tokens, step, ahead=False)
    return _slots_of(view, pages) if fetch.units.shape[0] else slots, fetch


def _charge(account: torch.Tensor, owner: torch.Tensor, missing: torch.Tensor) -> None:
    """Adds each request's units marked in `missing`, bool [N, H, C], to account[owner[i]], int32 [slots]."""
    account.index_add_(0, owner.long(), missing.sum((1, 2), dtype=account.dtype))


def plan_prefetch(plan: Prefetch) -> Fetch:
    """Enters predicted units that are not resident, best rank first, as far as slots with stamp < step reach.

    Resident units are stamped, so that what is predicted stays.
    """
    view, pages, step, cap = plan.view, plan.pages, plan.step, plan.cap
    if int(cap) < 0:
        return Fetch(cap.new_zeros((0, 4)), cap.new_zeros(1))
    if plan.index is not None:
        pages = pages[plan.index]
    if plan.table is not None:
        assert plan.closed is not None, "logical pages come with how many are closed"
        pages = lookup(plan.table, torch.where(pages < plan.closed[:, None, None], pages, NONE))
    slots = _slots_of(view, pages)
    _, head, _ = place = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[place].long()
    view.stamp[head, slot] = view.stamp[head, slot].clamp(min=step)
    missing = (pages >= 0) & (slots < 0)
    missing &= missing.cumsum(-1) <= cap
    if plan.fetched is not None:
        assert plan.index is not None, "units are charged to the owners of slots"
        _charge(plan.fetched[:, 1], plan.index, missing)
    return _enter_missing(view, missing, pages, plan.tokens, step, ahead=True)


def plan_prefetches(plans: Sequence[Prefetch]) -> None:
    """Plans one or two prefetches, of layers whose tables are not shared, and tells them their fetches."""
    for plan in plans:
        plan.fetch = plan_prefetch(plan)


def invalidate(view: LayerView, pages: torch.Tensor) -> None:
    """Clears the entries of pages, in every head. pages int [M], NONE skipped, repeats allowed."""
    pages = pages[pages >= 0].long().unique()
    slots = view.slot_of[:, pages].long()  # [H, M]
    head = torch.arange(slots.shape[0], device=slots.device)[:, None].expand_as(slots)[slots >= 0]
    slot = slots[slots >= 0]
    view.counters[WASTED] += view.ahead[head, slot].sum()
    view.slot_of[:, pages] = NONE
    view.page_of[head, slot] = NONE
    view.stamp[head, slot] = NEVER
    view.ahead[head, slot] = False


def clear(view: LayerView) -> None:
    """Empties the cache; reserved slots stay reserved."""
    view.counters[WASTED] += view.ahead.sum()
    view.slot_of.fill_(NONE)
    view.page_of.fill_(NONE)
    view.stamp[view.stamp != RESERVED] = NEVER
    view.ahead.fill_(False)


# ---------------------------------------------------------------- data


def gather(view: LayerView, fetch: Fetch) -> None:
    """Copies units from the host into their slots; of each page only the tokens that the fetch names."""
    units = fetch.units[: int(fetch.count)].long()
    if not units.shape[0]:
        return
    page_size = view.kv.shape[3]
    full = units[units[:, 3] == page_size]
    view.kv[full[:, 1], full[:, 2]] = view.host[full[:, 0], full[:, 1]].to(view.kv.device)
    for page, head, slot, tokens in units[units[:, 3] < page_size].tolist():
        view.kv[head, slot, :, :tokens] = view.host[page, head, :, :tokens].to(view.kv.device)


def write_token(view: LayerView, k, v, page, slots, offset, active, through: bool = True, inputs=None) -> None:
    """Writes row 0's K/V into its cache slot and through to the host; makes the landmark of a page that closes.

    k, v [N, H, D]; page, offset int [N] of the token; slots int [N, H] of the open units; active bool [N].
    slots None: the open pages are resident, and the landmark is left to `close_pages`. inputs: of attend_inputs.
    """
    row = active.nonzero()[:, 0]
    head = torch.arange(view.kv.shape[0], device=k.device)[None, :]
    off, pg = offset[row].long()[:, None], page[row].long()[:, None]
    slot = (view.slot_of[head, pg] if slots is None else slots[row]).long()
    assert bool((slot >= 0).all()), "an open page has no slot"
    both = torch.stack([k[row], v[row]], 2)  # [M, H, 2, D]
    view.kv[head, slot, :, off] = both
    if through:
        view.host[pg, head, :, off] = both.to(view.host.device)
    if slots is not None:
        close_pages(view, page, offset, active, slots)


def close_pages(view: LayerView, page, offset, active, slots=None) -> None:
    """Makes the landmarks of pages that their last token was written to, from their slots. As write_token otherwise."""
    row = (active & (offset == view.kv.shape[3] - 1)).nonzero()[:, 0]
    if not row.numel():
        return
    head, pg = torch.arange(view.kv.shape[0], device=page.device)[None, :], page[row].long()
    slot = (view.slot_of[head, pg[:, None]] if slots is None else slots[row]).long()
    store(view.landmarks, pg, view.kv[head, slot, 0])  # [M, H, P, D]


def append(view: LayerView, k, v, page, offset, active, step, fetch_now, through: bool = True) -> torch.Tensor:
    """Makes the open pages resident, then writes row 0's token. Returns the open units' slots, int32 [N, H].

    A page that begins (offset 0) needs no fetch, and whatever its entry still holds from an earlier owner is dead.
    fetch_now: callable(view, Fetch) that returns once the units have landed, so that a fetch cannot overtake the write.
    """
    heads = view.kv.shape[0]
    pages = torch.where(active, page, NONE)[:, None, None].expand(-1, heads, 1).to(torch.int32)
    tokens = offset[:, None, None].expand_as(pages).to(torch.int32)
    slots, fetch = resolve(view, pages, tokens, step, count=False)
    fetch_now(view, fetch)
    write_token(view, k, v, page, slots[..., 0], offset, active, through)
    return slots[..., 0]
