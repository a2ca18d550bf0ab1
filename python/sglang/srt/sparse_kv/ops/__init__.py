"""The operations on pages and landmarks: one meaning, a torch engine and a CUDA engine."""
