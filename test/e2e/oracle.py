"""What sparse decoding means, said once more on top of transformers: no pages, no cache, no host, no guide.

Prefill attends to everything. A decode step attends, per layer and kv head, to the sinks, to the recent window with the
open page, and to the budget's best of the closed pages between, to all of them in a step that has fewer than `whole`
tokens before its own. A page's weight for a query is the sum of exponentials
over four keys, each a mean of a quarter of its own, in which those that stand out count for more, rounded to fifteen
steps; the best have the largest share of all such weights, for any query head of the group. A page that was among the
best a step ago, where not all were, counts for e times as much.
"""

from __future__ import annotations

import torch


class Oracle:
    """Greedy sparse decoding with the model at `path`, in float32. budget, sinks and window in tokens."""

    def __init__(
        self,
        path: str,
        budget: int,
        page: int = 16,
        sinks: int = 16,
        window: int = 64,
        hysteresis: float = 2.0,
        whole: int = 0,
    ):
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        self.page, self.window, self.hysteresis, self.whole = page, window, hysteresis, whole
        self.best: dict[tuple[int, int], set[int]] = {}  # of each layer and head a step ago
        self.budget_pages, self.sink_pages = budget // page, -(-sinks // page)
        AttentionInterface.register("sparse_oracle", self._attention)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.model.set_attn_implementation("sparse_oracle")
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @torch.inference_mode()
    def generate(self, prompt: str, tokens: int) -> list[int]:
        """The greedy continuation of a prompt, `tokens` long or up to the end of the text."""
        ids = torch.tensor([self.tokenizer.encode(prompt)])
        self.best.clear()
        step = self.model(ids, use_cache=True, logits_to_keep=1)
        found: list[int] = []
        while True:
            found.append(int(step.logits[0, -1].argmax()))
            if len(found) == tokens or found[-1] == self.model.generation_config.eos_token_id:
                return found
            step = self.model(torch.tensor([found[-1:]]), past_key_values=step.past_key_values, use_cache=True)

    def _attention(self, module, query, key, value, attention_mask, scaling, **kwargs):
        """transformers' interface: query [1, Hq, T, D]; key, value [1, H, L, D]. Returns [1, T, Hq, D]."""
        heads, group = key.shape[1], query.shape[1] // key.shape[1]
        tokens, length = query.shape[2], key.shape[2]
        allowed = torch.ones(heads, tokens, length, dtype=torch.bool).tril(length - tokens)
        if tokens == 1:
            for head in range(heads):
                own = query[0, head * group : (head + 1) * group, 0] * scaling
                allowed[head, 0] = self._attended(own, key[0, head], (module.layer_idx, head))
        mask = allowed.repeat_interleave(group, 0)[None]
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
        return out.transpose(1, 2), None

    def _attended(self, query: torch.Tensor, keys: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
        """Which tokens one kv head attends to. query [G, D], scaled; keys [L, D], the own one last; place: its layer
        and number. bool [L].
        """
        length, page = keys.shape[0], self.page
        first_recent = max(0, length - self.window) // page
        chosen = set(range(min(self.sink_pages, first_recent))) | set(range(first_recent, -(-length // page)))
        between = range(self.sink_pages, first_recent)
        if length <= self.whole:  # the own token among them
            chosen.update(between)
        elif len(between):
            means = torch.stack([keys[number * page : (number + 1) * page] for number in between])
            means = self._rounded(self._weighted(means.unflatten(1, (4, page // 4))))  # [pages, 4, D]
            weights = torch.einsum("gd,pkd->gpk", query, means).logsumexp(-1)
            shares = torch.log_softmax(weights, dim=-1).amax(0)
            before = self.best.get(place, set())
            shares += self.hysteresis * torch.tensor([float(number in before) for number in between])
            order = shares.argsort(descending=True, stable=True)[: self.budget_pages]
            best = {between[int(each)] for each in order}
            chosen |= best
            self.best[place] = best if len(between) > self.budget_pages else set()
        attended = torch.zeros(len(keys), dtype=torch.bool)
        for number in chosen:
            attended[number * page : (number + 1) * page] = True
        return attended

    @staticmethod
    def _weighted(keys: torch.Tensor) -> torch.Tensor:
        """[..., N, D] -> [..., D]: a key counts (1 + r/10)^8, r its squared distance from the mean over the average's,
        in the dimensions that turn slowly.
        """
        dim = keys.shape[-1]
        slow = [d for d in range(dim) if d % (dim // 2) >= dim // 4]
        distance = (keys - keys.mean(-2, keepdim=True))[..., slow].pow(2).sum(-1)
        counts = (1 + distance / distance.mean(-1, keepdim=True).clamp(min=1e-30) / 10) ** 8
        return (counts[..., None] * keys).sum(-2) / counts.sum(-1, keepdim=True)

    @staticmethod
    def _rounded(vectors: torch.Tensor) -> torch.Tensor:
        """[..., D]: each value to the next multiple of a step, the largest being seven of it; a step has eight bits."""
        step = (vectors.abs().amax(-1, keepdim=True) / 7).bfloat16().float().clamp(min=1e-30)
        return (vectors / step).round().clamp(-7, 7) * step
