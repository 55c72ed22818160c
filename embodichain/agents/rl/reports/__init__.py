"""Reports of runs: one HTML file that compares them and can be sent to somebody else."""
