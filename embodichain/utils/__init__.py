"""Helpers of no particular room."""
