"""What may be switched while the server runs, for measurements and tests (config `debug`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sglang.srt.sparse_kv.config import ROWS, SparseKVConfig

GUIDES = ("chain", "random", "frozen", "forced", "greedy", "lookup", "resync")
TRANSFERS = ("plain", "delayed", "reordered", "failing", "oracle", "faulty", "broken")
# SGLang's endpoint for internal state carries numbers only, so a name may be given as its place in the list.
ATTENDS = ("selected", "own")
# What one tensor parallel rank may do otherwise than another: when and how often its own bytes move. Not its slots: by
# them a step may choose its rows, which all ranks must have alike.
OF_ONE_RANK = ("prefetch", "prefetch_cap", "landing", "transfer", "miss_rate", "seed")
NAMED = {"guide": GUIDES, "guide_attends": ATTENDS, "rows": ROWS, "transfer": TRANSFERS}


@dataclass
class Policy:
    """Run-time policy. Nothing below `hysteresis` changes a token but the transfer "oracle" and what is for sabotage:
    the names from `shuffle_predictions` on.

    budget: tokens, at most the started one, counted in whole pages. whole: tokens, at most the started ones; where the
    budget alone is switched, what a server of that budget starts with. residency: as in the configuration. cache_slots:
    usable slots per layer and kv head, 0 for all that were allocated. rows: as configured. skip_scores: compute
    none where one row is enough and every page is selected.
    """

    budget: int
    whole: int = 0
    hysteresis: float = 0.0
    guide: str = "chain"
    guide_attends: str = "selected"
    rows: str | int = 2
    skip_scores: bool = False
    prefetch: bool = True
    prefetch_floor: float = 0.0
    prefetch_cap: float = 1.0
    landing: bool = True
    residency: Any = "all"
    cache_slots: int = 0
    transfer: str = "plain"
    miss_rate: float = 0.0  # share of hits that are brought from the host again, to see what worse predictions cost
    seed: int = 0
    check: bool = False  # verify tables and contents after every step
    poison: bool = False  # overwrite pages that the allocator got back
    shuffle_predictions: bool = False
    skip_write_through: bool = False
    skip_invalidation: bool = False

    @classmethod
    def from_config(cls, config: SparseKVConfig) -> Policy:
        return cls(
            budget=config.budget,
            whole=config.whole_at(config.budget),
            hysteresis=config.hysteresis,
            guide=config.guide if config.most_rows == 2 else "chain",
            guide_attends=config.guide_attends,
            rows="auto" if config.rows == "auto" else config.most_rows,
            skip_scores=config.rows == "auto",
            prefetch=config.prefetch,
            prefetch_floor=config.prefetch_floor,
            prefetch_cap=config.prefetch_cap,
            landing=config.landing,
            residency=config.residency,
            seed=config.seed,
        )

    def changed(self, update: dict[str, Any], started: SparseKVConfig, page_size: int) -> Policy:
        """A copy with `update` applied. Raises ValueError, one sentence, on unknown keys or values out of range."""
        new = dataclasses.replace(self, **{key: self._read(key, value) for key, value in update.items()})
        if not page_size <= new.budget <= started.budget:
            raise ValueError(
                f"sparse_kv policy budget must be from one page ({page_size}) up to the {started.budget} tokens of the "
                f"start, got {new.budget}"
            )
        if new.landing and not started.landing:
            raise ValueError(
                "sparse_kv policy landing is 1, and this server was started without places to land; restart it with "
                "landing true"
            )
        if "budget" in update and "whole" not in update:
            new.whole = started.whole_at(new.budget)
        if not 0 <= new.whole <= started.whole_at(started.budget):
            raise ValueError(
                f"sparse_kv policy whole must be from 0 to the {started.whole_at(started.budget)} tokens of the start, "
                f"got {new.whole}"
            )
        if new.rows == 2 and started.most_rows == 1:
            raise ValueError(
                "sparse_kv policy rows is 2, and this server was started for one row a request, which has no guide; "
                "restart it with rows 2"
            )
        return new

    def _read(self, key: str, value: Any) -> Any:
        """A value of the kind that `key` takes. What residency means depends on the model; the cache checks it."""
        known = [f.name for f in dataclasses.fields(self)]
        if key not in known:
            raise ValueError(f"unknown sparse_kv policy {key!r}; known: {', '.join(sorted(known))}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key in NAMED:
            names = NAMED[key]
            if number and value in range(len(names)):
                value = names[int(value)]
            if value not in names:
                raise ValueError(
                    f"sparse_kv policy {key} is one of {', '.join(map(str, names))}, or its place in that list, "
                    f"got {value!r}"
                )
        elif isinstance(getattr(self, key), bool):
            if value not in (0, 1):
                raise ValueError(f"sparse_kv policy {key} takes 0 or 1, got {value!r}")
            value = bool(value)
        elif key in ("budget", "whole", "cache_slots", "seed"):
            if not number or value != value // 1:
                raise ValueError(f"sparse_kv policy {key} takes a whole number, got {value!r}")
            value = int(value)
        elif key in ("prefetch_cap", "prefetch_floor", "miss_rate") and not (number and 0 <= value <= 1):
            raise ValueError(f"sparse_kv policy {key} takes a number from 0 to 1, got {value!r}")
        elif key == "hysteresis" and not (number and 0 <= value <= 10):
            raise ValueError(f"sparse_kv policy {key} takes a number from 0 to 10, got {value!r}")
        return value
