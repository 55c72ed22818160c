"""Where an ``AsyncCollector`` collects: a thread of this process, a process of its own, or actors of a Ray cluster."""
