"""Reports that compare runs, each a single HTML file."""
