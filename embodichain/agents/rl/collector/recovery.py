"""Replaces a collector's environment when it fails."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from embodichain.agents.processes.failure import FailureReport, drop_locals
from embodichain.agents.processes.pool import Restarts
from embodichain.agents.rl.collector.base import Recovery
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.envs.random import combine
from embodichain.envs.vec_env import StepsInHalves, VecEnv
from embodichain.errors import CollectorError, EnvironmentHungError, WorkerError

_POLL_SECONDS = 0.05
_NAME = "the environment"


def mixed_seed(seed: int, number: int) -> int:
    """Return a seed for worker or restart ``number``, derived from the common seed."""
    return int(combine(torch.tensor(seed), torch.tensor(number))) % 2**31


class EnvRecovery(Recovery):
    """Replaces an environment that failed, up to a number of restarts; see ``Restarts``.

    An environment in other processes restarts those that failed. Any other is rebuilt by ``make_env``, or reset if
    there is none. All envs start new episodes with new seeds.
    """

    def __init__(
        self,
        max_restarts: int,
        make_env: Callable[[], VecEnv] | None = None,
        pause: Callable[[float], object] = time.sleep,
        before_build: Callable[[], None] | None = None,
        silence: float = 0.0,
    ) -> None:
        """``pause`` waits between two attempts, ``before_build`` is called before each, ``silence`` is the time in
        seconds after which an environment that does not answer counts as failed."""
        self.seed = 0
        self._make, self._pause, self._before_build = make_env, pause, before_build
        self._restarts = Restarts(_NAME, 1, max_restarts, silence)
        self._restarts.due()  # the first start, which has happened already

    def replace(self, env: VecEnv, error: Exception) -> tuple[VecEnv, Observation]:
        """Return a working environment and its first observation; ``CollectorError`` if no restarts are left."""
        while True:
            report, count = FailureReport.of_exception(0, error), self._restarts.replaced[0]
            if isinstance(error, (WorkerError, EnvironmentHungError)):  # the message locates the fault already
                report = replace(report, traceback="")
            drop_locals(error)
            if not self._restarts.replace(report, count):
                raise report.as_error(_NAME, count, CollectorError) from error
            while not self._restarts.due():
                self._pause(_POLL_SECONDS)
            if self._before_build is not None:
                self._before_build()
            try:
                env = self._renewed(env)
                return env, env.reset(seed=mixed_seed(self.seed, count + 1))[0]
            except Exception as again:  # noqa: BLE001 - any error counts as another failure
                error = again

    def _renewed(self, env: VecEnv) -> VecEnv:
        if isinstance(env, StepsInHalves):
            env.restart()
            return env
        if self._make is None:
            return env
        with contextlib.suppress(Exception):  # it has failed already
            env.close()
        return self._make()
