"""A config that may be given by one of its fields alone: ``"collector": "ray"`` for ``{"worker": "ray"}``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema


@dataclass(frozen=True)
class Shorthand:
    """Marks a config, as in ``Annotated[AsyncCfg, Shorthand("worker")]``: a mere string is the value of that field.

    On the command line the config's name is then a flag for the field: ``--trainer.collector ray``.
    """

    field: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._expand, handler(source))

    def _expand(self, given: Any) -> Any:
        return {self.field: given} if isinstance(given, str) else given
