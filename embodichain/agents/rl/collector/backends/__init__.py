"""Where an ``AsyncCollector`` collects."""
