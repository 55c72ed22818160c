"""Backends of ``AsyncCollector``: a thread, a separate process, or actors of a Ray cluster."""
