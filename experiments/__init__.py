"""Command-line programs: train, predict, plan, bench, sweep, report and their parts."""
