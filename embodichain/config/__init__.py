"""Configuration: typed classes, config files and command-line overrides, with errors that name the key."""

from dataclasses import field

from pydantic import Field

from embodichain.config.classes import (
    MISSING,
    Config,
    Count,
    Fraction,
    NotNegative,
    Positive,
    Shorthand,
    Threads,
    configclass,
    is_config,
    is_config_class,
    missing_fields,
    to_data,
)
from embodichain.config.command_line import parse_overrides
from embodichain.config.files import load_config, merge, save_config

__all__ = [
    "MISSING",
    "Config",
    "Count",
    "Field",
    "Fraction",
    "NotNegative",
    "Positive",
    "Shorthand",
    "Threads",
    "configclass",
    "field",
    "is_config",
    "is_config_class",
    "load_config",
    "merge",
    "missing_fields",
    "parse_overrides",
    "save_config",
    "to_data",
]
