"""Where a decode step's time goes, layer by layer: what computes, what is fetched, and what lies under what."""
