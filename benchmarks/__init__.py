"""Speed, as ratios: ``python -m benchmarks``."""
