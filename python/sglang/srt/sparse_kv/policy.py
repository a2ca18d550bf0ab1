"""What may be switched while the server runs, for measurements and tests (config `debug`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.sparse_kv.config import SparseKVConfig

GUIDES = ("chain", "random", "frozen", "forced")
TRANSFERS = ("plain", "delayed", "reordered", "failing", "oracle")
# SGLang's endpoint for internal state carries numbers only, so a name may be given as its place in the list.
NAMED = {"guide": GUIDES, "transfer": TRANSFERS}


@dataclass
class Policy:
    """Run-time policy. Everything below `budget` changes no token; everything below `shuffle_predictions` is sabotage.

    budget: tokens, at most the started one, a multiple of the page. residency: as in the configuration. cache_slots:
    usable slots per layer and kv head, 0 for all that were allocated.
    """

    budget: int
    guide: str = "chain"
    prefetch: bool = True
    prefetch_cap: float = 1.0
    residency: Any = "all"
    cache_slots: int = 0
    transfer: str = "plain"
    seed: int = 0
    check: bool = False  # verify tables and contents after every step
    poison: bool = False  # overwrite pages that the allocator got back
    shuffle_predictions: bool = False
    skip_write_through: bool = False
    skip_invalidation: bool = False
    forced_guides: list[int] = field(default_factory=list)

    @classmethod
    def from_config(cls, config: SparseKVConfig) -> Policy:
        return cls(
            budget=config.budget,
            prefetch=config.prefetch,
            prefetch_cap=config.prefetch_cap,
            residency=config.residency,
            seed=config.seed,
        )

    def changed(self, update: dict[str, Any], started: SparseKVConfig, page_size: int) -> Policy:
        """A copy with `update` applied. Raises ValueError, one sentence, on unknown keys or values out of range."""
        known = {f.name for f in dataclasses.fields(self)}
        values = {}
        for key, value in update.items():
            if key not in known:
                raise ValueError(f"unknown sparse_kv policy {key!r}; known: {', '.join(sorted(known))}")
            if isinstance(getattr(self, key), bool):
                if value not in (0, 1):
                    raise ValueError(f"sparse_kv policy {key} takes 0 or 1, got {value!r}")
                value = bool(value)
            elif key in NAMED and isinstance(value, (int, float)):
                if value not in range(len(NAMED[key])):
                    raise ValueError(
                        f"sparse_kv policy {key} is one of {', '.join(NAMED[key])}, or its place in that list, got {value}"
                    )
                value = NAMED[key][int(value)]
            elif key == "residency":
                value = float(value) if isinstance(value, (int, float)) else value
            elif key in ("budget", "cache_slots", "seed"):
                value = int(value)
            values[key] = value
        new = dataclasses.replace(self, **values)
        if new.guide not in GUIDES:
            raise ValueError(f"sparse_kv policy guide must be one of {', '.join(GUIDES)}, got {new.guide!r}")
        if new.transfer not in TRANSFERS:
            raise ValueError(f"sparse_kv policy transfer must be one of {', '.join(TRANSFERS)}, got {new.transfer!r}")
        if not page_size <= new.budget <= started.budget or new.budget % page_size:
            raise ValueError(
                f"sparse_kv policy budget must be a multiple of the page ({page_size}) up to the started "
                f"{started.budget} tokens, got {new.budget}"
            )
        if not 0.0 <= new.prefetch_cap <= 1.0:
            raise ValueError(f"sparse_kv policy prefetch_cap must be within 0..1, got {new.prefetch_cap}")
        return new
