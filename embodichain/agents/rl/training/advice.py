"""What to say about how a config collects: rollouts that are old when they are learned from, settings nobody heeds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.training.config import TrainCfg

_LOG = logging.getLogger(__name__)
_ALWAYS_HEEDED = ("pipeline_stages", "env_processes")


def tell_of_collection(cfg: TrainCfg) -> None:
    """Say where rollouts come from, if not from here, and warn of settings that do less than they could, or nothing."""
    trainer = cfg.trainer
    collector = trainer.collector
    if trainer.collects_apart:
        where = {"thread": "a thread", "process": "a process of its own", "ray": "a cluster"}[collector.worker]
        lag = collector.max_policy_lag
        _LOG.info("collecting in %s, by weights that are at most %d update(s) old", where, lag)
        if lag > 0 and cfg.algorithm.cfg.get("correction") == "none":
            _warn_of_lag(lag, cfg.algorithm.cfg)
        return
    usual = AsyncCfg().to_dict()
    changed = [name for name, value in collector.to_dict().items() if value != usual[name]]
    ignored = [name for name in changed if name not in _ALWAYS_HEEDED]
    if ignored:
        _LOG.warning(
            "this run collects and learns in turn, and does not heed trainer.collector.%s: add "
            "--trainer.model_type vla to do both at once (docs/async.md)",
            ", ".join(ignored),
        )


def _warn_of_lag(lag: int, settings: Mapping[str, Any]) -> None:
    """Warn of settings that learn less from old rollouts than they could."""
    kl_bounds = {
        "lr_schedule: adaptive": settings.get("lr_schedule") == "adaptive",
        "target_kl": settings.get("target_kl") is not None,
    }
    named = [name for name, is_set in kl_bounds.items() if is_set]
    if not named and settings.get("advantage_estimator") == "vtrace":
        return
    _LOG.warning(
        "rollouts may be %d update(s) old (max_policy_lag): %s mistakes what those updates changed for its own step, "
        "and the policy may learn far less. Add --algorithm.cfg.correction decoupled (docs/async.md)",
        lag,
        named[0] if named else "the clip",
    )
