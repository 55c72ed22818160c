"""What to say about a config whose rollouts are old when they are learned from."""

from __future__ import annotations

import logging

from embodichain.agents.rl.training.config import TrainCfg

_LOG = logging.getLogger(__name__)


def warn_of_lag(cfg: TrainCfg) -> None:
    """Warn of settings that learn less from old rollouts than they could."""
    trainer, settings = cfg.trainer, cfg.algorithm.cfg
    lag = trainer.collector.max_policy_lag
    if not trainer.collects_apart or lag == 0:
        return
    kl_bounds = {
        "lr_schedule: adaptive": settings.get("lr_schedule") == "adaptive",
        "target_kl": settings.get("target_kl") is not None,
    }
    named = [name for name, is_set in kl_bounds.items() if is_set]
    if named and settings.get("correction") == "none":
        _LOG.warning(
            "rollouts may be %d update(s) old (max_policy_lag): %s mistakes what those updates changed for its own "
            "step, and learns less. Add --algorithm.cfg.correction decoupled (docs/async.md)",
            lag,
            named[0],
        )
