"""Benchmarks: speed against the machine's own matrix product, compilations, memory."""
