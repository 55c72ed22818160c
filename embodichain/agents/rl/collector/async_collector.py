"""Collects rollouts in the background while a learner updates its policy.

The way of a rollout: the ``desk`` issues a ticket -> the ``loop``, in a thread or in a process, adopts ``weights`` and
collects -> ``VLABuffer`` -> ``collect`` hands it to the learner.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase

from embodichain.agents.rl.buffer.vla_buffer import VLABuffer
from embodichain.agents.rl.collector.background.desk import Desk
from embodichain.agents.rl.collector.background.loop import Command
from embodichain.agents.rl.collector.background.places import EnvSource, make_place
from embodichain.agents.rl.collector.background.station import Setup
from embodichain.agents.rl.collector.background.worker import Worker
from embodichain.agents.rl.collector.base import BaseCollector, StepCallback
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.sync_collector import RolloutStart
from embodichain.agents.rl.models.policy import Policy
from embodichain.errors import BufferWaitError, CollectorError, ConfigError, RolloutError

_LOOK_SECONDS = 0.1
"""How often a waiting learner looks whether the collector is still alive."""
_UNBOUNDED = 1 << 62
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
"""All that were started; the thread of a worker keeps it alive."""


@atexit.register
def _stop_all() -> None:
    """End the threads of collectors that nobody stopped: Python's end would tear them out of C++ code, and abort."""
    for worker in list(_workers):
        worker.stop()


class AsyncCollector(BaseCollector):
    """Collects in the background: ``AsyncCollector(env, policy, buffer, device, callback)``, ``start``, ``collect``.

    The learner calls ``collect`` (or ``buffer.get``) and updates the policy, in turn and in one thread: whenever it
    calls something here it is between two updates, and that is when new weights are published. The collector has a
    copy of the policy and never touches the learner's. ``callback`` is called where it collects, not in the learner's
    thread.
    """

    def __init__(
        self,
        env: EnvSource,
        policy: Policy,
        buffer: VLABuffer,
        device: torch.device | str | None = None,
        callback: StepCallback | None = None,
        *,
        cfg: AsyncCfg | Mapping[str, Any] | None = None,
        start_rollout: RolloutStart | None = None,
    ) -> None:
        """Prepare to collect rollouts into ``buffer``; ``device`` is where they are stored while they grow.

        ``env`` may be a function that makes the environment. A collecting process needs that, and calls it again to
        replace a simulator that died; it, ``callback`` and ``start_rollout`` must be picklable then.
        """
        self.policy, self.buffer = policy, buffer
        self.cfg = AsyncCfg.from_dict(cfg, source="cfg") if isinstance(cfg, Mapping) else cfg or AsyncCfg()
        self.device = torch.device(device) if device is not None else buffer.device
        self.num_steps = self.cfg.num_steps
        """Steps per environment and rollout; ``None`` as long as nobody said."""
        self._place = make_place(env, Setup(policy, self.device, callback, start_rollout, self.cfg))
        self._desk = Desk(policy, buffer, self.device, self.cfg)
        self._paused = False
        self._held: dict[str, Any] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._desk.worker is not None

    def start(self) -> None:
        """Begin to collect; calling it again does nothing."""
        if self.is_running:
            return
        num_steps = self._settle_num_steps()
        worker = self._place.start(num_steps, self._desk)
        _workers.add(worker)
        try:
            self._desk.open(worker, self._capacity(num_steps))
        except BaseException:
            self.stop()
            worker.stop()
            raise

    def stop(self) -> None:
        """Stop collecting; it always returns, within 5 seconds. Complete rollouts stay in the buffer."""
        self._paused = False
        worker = self._desk.close()
        if worker is not None:
            worker.stop()

    def pause(self) -> None:
        """Let the collector stand still after its present step; return when it does."""
        if not self._paused:
            self._worker().send(Command("pause"))
            self._worker().wait_until_standing(self.cfg.start_timeout)
            self._paused = True

    def resume(self) -> None:
        """Go on after ``pause``."""
        if self._paused:
            self._worker().send(Command("resume"))
            self._paused = False

    def reset(self, seed: int | None = None) -> None:
        """Begin with new episodes, before it is started."""
        self._need_rest("reset()")
        self._place.reset(seed)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- the learner's loop ---------------------------------------------------------------------------------------

    def collect(self, num_steps: int | None = None) -> TensorDictBase:
        """Return the next rollout ``[num_envs, num_steps]``, waiting for it; it belongs to the caller.

        Starts the collector if need be. Raises ``CollectorError``, with the collector's traceback, when it failed.
        """
        self._settle_num_steps(num_steps)
        self.start()
        if self._paused:
            raise CollectorError("the collector is paused: call resume() first")
        began = time.monotonic()
        while True:
            self._desk.raise_failure()
            if not self.is_running:
                raise CollectorError("the collector was stopped while a rollout was waited for")
            try:
                rollout = self.buffer.take(timeout=_LOOK_SECONDS)[0][1]
            except BufferWaitError:
                continue
            self._desk.statistics["time/learner_wait_seconds"] = time.monotonic() - began
            return rollout

    def publish(self) -> None:
        """Give the collector the policy's present weights; the learner calls it right after an update.

        ``collect`` and ``buffer.get`` do so as well, but whatever the learner does in between, such as an evaluation,
        need not keep the collector waiting.
        """
        self._desk.publish()

    def statistics(self) -> dict[str, float]:
        """Return averages of the rollout that was taken last, and how it came about.

        Besides what ``SyncCollector.statistics`` has: ``async/lag_min``, ``lag_mean`` and ``lag_max`` in updates,
        ``async/behaviour_kl`` between the policy that collected and the present one, ``async/restarts`` of simulators,
        and ``time/learner_wait_seconds`` and ``time/collector_wait_seconds``, which each side waited for the other.
        """
        return dict(self._desk.statistics)

    @property
    def episodes(self) -> TensorDict:
        """``return`` and ``length`` of the episodes that ended in the rollout that was taken last."""
        return self._desk.episodes

    # --- saving ---------------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the collector between two rollouts, so that everything can be saved as it is."""
        if not self.is_running:
            yield
            return
        worker = self._worker()
        worker.send(Command("save"))
        patience = self.cfg.start_timeout + (self.num_steps or 1) * self.cfg.step_timeout
        self._held = worker.wait_until_standing(patience)
        try:
            yield
        finally:
            self._held = None
            if not self._paused:
                worker.send(Command("resume"))

    def env_state(self) -> TensorDict | None:
        """Return the environment's state, ``None`` where it cannot be saved; inside ``hold``."""
        state: TensorDict | None = self._quiet_state()["env"]
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return everything else that the next rollouts depend on, the queue included; inside ``hold``."""
        state = self._quiet_state()
        own = {name: value for name, value in state.items() if name not in ("env", "tickets")}
        return own | self._desk.state(state["tickets"])

    def load_state_dict(self, state: Mapping[str, Any], env_state: TensorDictBase | None = None) -> None:
        """Go on from what ``state_dict`` and ``env_state`` returned; the policy has been restored before."""
        self._need_rest("load_state_dict()")
        self._place.load({**state, "env": env_state})
        self._desk.load(state)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _quiet_state(self) -> dict[str, Any]:
        state = self._held if self.is_running else self._place.state()
        if state is None:
            raise CollectorError("saving a running collector needs hold() around it")
        return state

    def _worker(self) -> Worker:
        if self._desk.worker is None:
            raise CollectorError("the collector is not running: call start() first")
        return self._desk.worker

    def _need_rest(self, what: str) -> None:
        if self.is_running:
            raise CollectorError(f"{what} needs a collector that is not running: call stop() first")

    def _capacity(self, num_steps: int) -> int:
        """Return how many rollouts may be waiting or under way."""
        size = (self._place.num_envs or 1) * num_steps
        if size > self.buffer.buffer_size:
            raise RolloutError(
                f"a rollout of {num_steps} steps has {size} transitions, the buffer holds {self.buffer.buffer_size}: "
                "enlarge buffer_size"
            )
        return _UNBOUNDED if self.buffer.overwrite else self.buffer.buffer_size // size

    def _settle_num_steps(self, asked: int | None = None) -> int:
        """Return the length of rollouts: what is configured, what is asked for first, or what fills the buffer."""
        if asked is not None and (asked < 1 or asked != (self.num_steps or asked)):
            raise RolloutError(f"expected num_steps to be {self.num_steps or 'at least 1'}, got {asked}")
        if self.num_steps is None and asked is None:
            if self._place.num_envs is None:
                raise ConfigError("worker 'process' needs num_steps, the length of rollouts", "collector")
            asked = max(1, self.buffer.buffer_size // self._place.num_envs)
        self.num_steps = self.num_steps or asked or 1
        return self.num_steps
