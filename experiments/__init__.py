"""Command-line programs: benchmarks for now; training, sweeps and reports follow."""
