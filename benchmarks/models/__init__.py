"""Models that only benchmarks measure; the models that everything else uses are in `jaxckpt.models`."""
