"""When a run ends, and how near that is."""

from __future__ import annotations

from typing import Literal

from embodichain.agents.rl.training.config import TrainerCfg, num_iterations
from embodichain.agents.rl.training.state import Counters
from embodichain.agents.rl.utils.evaluation import Evaluation

StopReason = Literal["iterations", "total_steps", "max_seconds", "target", "interrupted"]


class Ending:
    """What ends a run, apart from an interruption."""

    def __init__(self, trainer: TrainerCfg, num_ranks: int = 1, in_chunks: bool = False) -> None:
        """Take a run's settings; ``in_chunks`` tells that a rollout has more steps than decisions."""
        self.trainer, self.num_ranks, self.in_chunks = trainer, num_ranks, in_chunks

    def reason(self, now: Counters, evaluation: Evaluation | None) -> StopReason | None:
        """Return why the run ends here, ``None`` if it goes on."""
        trainer = self.trainer
        if trainer.iterations is not None and now.iteration >= trainer.iterations:
            return "iterations"
        if trainer.total_steps is not None and now.global_step >= trainer.total_steps:
            return "total_steps"
        if trainer.max_seconds is not None and now.seconds >= trainer.max_seconds:
            return "max_seconds"
        return "target" if evaluation is not None and self._is_reached(evaluation) else None

    def progress(self, now: Counters) -> float:
        """Return the share of the training that is over: by the clock only if nothing else ends it."""
        limit = self._num_iterations(now)
        if limit is None:
            return self.share_of_time(now) or 0.0
        total = self.trainer.total_steps
        if total is not None and self.in_chunks:
            return min(1.0, max(now.iteration / limit, now.global_step / total))
        return min(1.0, now.iteration / limit)

    def share_of_time(self, now: Counters) -> float | None:
        """Return the share of the time that is over, where time is limited."""
        seconds = self.trainer.max_seconds
        return None if seconds is None else min(1.0, now.seconds / seconds)

    def _num_iterations(self, now: Counters) -> int | None:
        return num_iterations(self.trainer, self.num_ranks, now.iteration, now.global_step)

    def _is_reached(self, evaluation: Evaluation) -> bool:
        wanted_return, wanted_success = self.trainer.target_return, self.trainer.target_success
        if wanted_return is None and wanted_success is None:
            return False
        summary = evaluation.summary
        enough = wanted_return is None or summary.mean_return >= wanted_return
        return enough and (wanted_success is None or (summary.success_rate or 0.0) >= wanted_success)
