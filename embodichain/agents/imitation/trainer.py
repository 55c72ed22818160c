"""The training loop of an imitation: sample chunks, update, log, evaluate, save."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from tensordict import TensorDict
from torch import Tensor

from embodichain.agents.imitation.config import ImitateCfg
from embodichain.agents.imitation.sources import ChunkSource
from embodichain.agents.rl.algo.imitation import MASK, Imitation
from embodichain.agents.rl.checkpoint import load_weights, reading_checkpoint, save_checkpoint
from embodichain.agents.rl.models.tokens import FastTokenHead, fit_tokenizer
from embodichain.agents.rl.run_loop import Counters, RunLoop, StopReason, TrainingResult, crossed
from embodichain.agents.rl.runs import RunFolder, StopSignals
from embodichain.agents.rl.utils.tensordicts import space_to_data
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import NotFiniteError
from embodichain.utils.torch_runtime import get_random_state, set_random_state, torch_threads, update_threads

Spaces = Mapping[str, Any]
_FITTED_CHUNKS = 4096
"""Number of chunks on which FAST-like tokens are fitted."""


class ImitationTrainer(RunLoop):
    """Trains one policy by imitation; steps are gradient steps."""

    cfg: ImitateCfg

    def __init__(
        self,
        cfg: ImitateCfg,
        learner: Imitation,
        source: ChunkSource,
        spaces: Spaces,
        folder: RunFolder,
        eval_env: VecEnv | None = None,
        console: Console | None = None,
    ) -> None:
        """``spaces`` has the ``observation`` and ``action`` spaces that the policy was built for."""
        super().__init__(cfg, learner.policy, folder, eval_env, console)
        self.learner, self.source, self.spaces = learner, source, spaces
        self.policy.train()
        batch_size = cfg.algorithm.cfg.batch_size
        self._threads = cfg.trainer.update_threads or update_threads(self.policy, batch_size)
        self._chunks: TensorDict | None = None
        """The chunks of the last update."""
        self._sums: dict[str, Tensor] = {}
        self._count = 0
        self._waited = 0.0
        self._logged_at = time.perf_counter()

    def train(self) -> TrainingResult:
        """Imitate until a stop criterion is met or a signal interrupts the run, and save the state at the end."""
        settings, batch_size = self.cfg.trainer, self.cfg.algorithm.cfg.batch_size
        self._began = time.perf_counter() - self.counters.seconds
        self._logged_at = time.perf_counter()
        self.folder.lock.acquire()
        try:
            with StopSignals() as signals, self.view:
                if self._resumed_at is None:
                    self._fit_tokenizer()
                    self.save_checkpoint()
                while (reason := self._stop_reason(signals)) is None:
                    before = self.global_step
                    self._learn(batch_size)
                    if crossed(settings.publish_freq, before, self.global_step):
                        self.source.publish(self.policy)
                    if crossed(settings.log_freq, before, self.global_step):
                        self._write_log()
                    self._evaluate_and_save(before)
                self._finish(reason)
        finally:
            self._close_log()
            self.folder.lock.release()
        return self._result(reason)

    def _fit_tokenizer(self) -> None:
        """Fit FAST-like tokens, unless they are fitted, on the first chunks of the source."""
        heads = [module for module in self.policy.modules() if isinstance(module, FastTokenHead)]
        if heads and not any(head.tokenizer.is_fitted for head in heads):
            chunks = self.source.sample(_FITTED_CHUNKS)
            whole = chunks["action"][chunks[MASK].all(1)]  # empty if all episodes are shorter than a chunk
            fit_tokenizer(self.policy, (whole if len(whole) else chunks["action"]).to(self.policy.device))

    def _learn(self, batch_size: int) -> None:
        """Sample chunks and take one gradient step."""
        began = time.perf_counter()
        chunks = self._chunks = self.source.sample(batch_size)
        self._waited += time.perf_counter() - began
        with torch_threads(self._threads):
            measures = self.learner.update(chunks)
        for name, value in measures.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._count += 1
        self.counters.global_step += 1
        self.counters.iteration += 1
        self.policy.version += 1

    def _stop_reason(self, signals: StopSignals) -> StopReason | None:
        """Return the reason to stop now, if any."""
        self._update_clock()
        if signals.received is not None:
            return "interrupted"
        return "total_steps" if self.global_step >= self.cfg.trainer.total_steps else self.limit_met()

    def _write_log(self) -> None:
        """Log the means over the steps since the last entry, and update the progress bar."""
        if not self._count:
            return
        values = (torch.stack(list(self._sums.values())) / self._count).tolist()
        means = dict(zip(self._sums, values, strict=True))
        seconds = max(time.perf_counter() - self._logged_at, 1e-9)
        scalars = {f"update/{name}": value for name, value in means.items()}
        scalars |= {"update/learning_rate": self.learner.learning_rate} | self.source.statistics()
        scalars |= {
            "time/sample_seconds": self._waited / self._count,
            "time/steps_per_second": self._count / seconds,
            "time/total_seconds": self._update_clock(),
        }
        self.log.write(self.global_step, scalars)
        self._sums, self._count, self._waited, self._logged_at = {}, 0, 0.0, time.perf_counter()
        if self.cfg.trainer.nan_guard and not all(map(math.isfinite, means.values())):
            self._stop_at_nan(means)
        share = max(self.global_step / self.cfg.trainer.total_steps, self._share_of_time())
        self.view.show(self.global_step, min(1.0, share), *(self.counters.evaluated or (None, None)))

    def _stop_at_nan(self, means: Mapping[str, float]) -> None:
        folder = self.folder.path / "failure"
        batch = {} if self._chunks is None else {"batch": self._chunks.clone()}
        save_checkpoint(folder, {"policy": self.policy.state_dict()} | batch)
        names = ", ".join(name for name, value in means.items() if not math.isfinite(value))
        raise NotFiniteError(
            f"{names} became NaN or infinite before step {self.global_step}; the policy is saved in {folder}. A "
            "smaller --algorithm.cfg.learning_rate, or fewer outliers in the demonstrations, may help"
        )

    def evaluate(self) -> None:
        """Log all steps so far, then evaluate the policy."""
        self._write_log()
        super().evaluate()

    def save_checkpoint(self, best: bool = False) -> None:
        """Log all steps so far, then write a checkpoint of everything that the next step depends on."""
        self._write_log()
        super().save_checkpoint(best)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint of this run; with recorded sources, training continues exactly.

        The random generators are restored last, as everything else may draw from them.
        """
        with reading_checkpoint("the checkpoint"):
            self.counters = Counters.from_data(state["trainer"])
            load_weights(self.policy, state["policy"], "the checkpoint")
            self.learner.load_state_dict(state["algorithm"])
            self.source.load_state_dict(state["source"])
            set_random_state(state["random"])
        if self.global_step >= self.cfg.trainer.publish_freq:
            self.source.publish(self.policy)
        if not self.source.is_exact:
            self.view.print("a live stream is not saved: the run continues with new episodes")
        self._saved_at = self._resumed_at = self.global_step
        self.folder.forget_after(self.global_step)

    def _state(self) -> dict[str, Any]:
        return {
            "config": self.cfg.to_dict(),
            "spaces": {name: space_to_data(space) for name, space in self.spaces.items()},
            "policy": self.policy.state_dict(),
            "algorithm": self.learner.state_dict(),
            "source": self.source.state_dict(),
            "random": get_random_state(),
            "trainer": self.counters.to_data(),
        }
