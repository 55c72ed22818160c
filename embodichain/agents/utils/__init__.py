"""Helpers shared by all agents."""
