"""Entry point of the DualDecoder plugin for SGLang."""


def register() -> None:
    """Called by SGLang's plugin loader in every process that loads plugins."""
