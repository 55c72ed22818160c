"""Collects rollouts in the background while a learner updates its policy.

Data flow: ``AsyncCollector`` sends a request -> a ``RolloutWorker`` in a thread, a process or a Ray actor
(``backends/``) loads the weights and collects -> the result goes into a ``VLABuffer`` -> ``collect`` returns it.
"""

import atexit
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase

from embodichain.agents.rl.buffer.rollout_buffer import evaluate_rollout
from embodichain.agents.rl.buffer.vla_buffer import VLABuffer
from embodichain.agents.rl.collector.backends.process import ProcessBackend
from embodichain.agents.rl.collector.backends.thread import Backend, ThreadBackend
from embodichain.agents.rl.collector.base import BaseCollector, StepCallback
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.rollout_worker import Command, RolloutRequest, RolloutResult, WorkerSpec
from embodichain.agents.rl.collector.sync_collector import RolloutStart
from embodichain.agents.rl.collector.weights import WeightStore
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils.ratios import kl_estimate, log_ratio
from embodichain.envs.vec_env import StepsInHalves, VecEnv
from embodichain.errors import BufferWaitError, CollectorError, ConfigError, RolloutError, WeightsError
from embodichain.utils.torch_runtime import get_random_state, set_random_state

EnvSource = VecEnv | Callable[[], VecEnv]
"""An environment, or a function that returns one."""

_POLL_SECONDS = 0.1
"""How often a waiting learner checks that the collector is alive."""
_UNBOUNDED = 1 << 62
_EMPTY = TensorDict({"return": torch.zeros(0), "length": torch.zeros(0)}, batch_size=[0])
_SAVED_FIELDS = ("number", "statistics", "episodes", "seconds", "waited")
_backends: weakref.WeakSet[Backend] = weakref.WeakSet()
"""All started backends; a backend's thread keeps it alive."""


@atexit.register
def _stop_all() -> None:
    """Stop the threads of running collectors: the interpreter's exit would kill them inside C++ code, and abort."""
    for backend in list(_backends):
        backend.stop()


class Pacing:
    """Limits how far a collector may run ahead of its learner.

    Request ``k`` is issued once ``k - consumed <= max_policy_lag``, where ``consumed`` counts the rollouts that the
    learner has trained on. Each update creates one new version of the policy. So no transition is older than
    ``max_policy_lag`` versions when it is consumed, and none is discarded. At most ``capacity`` rollouts are queued or
    being collected at any time.
    """

    def __init__(self, max_policy_lag: int, capacity: int, first: int = 0) -> None:
        self.max_policy_lag, self.capacity = max_policy_lag, capacity
        self.consumed = self.taken = self.next = first

    def issue(self, version: int) -> list[RolloutRequest]:
        """Return the requests that may be sent now, with the latest version of the weights."""
        last = min(self.consumed + self.max_policy_lag, self.taken + self.capacity - 1)
        requests = [RolloutRequest(number, version) for number in range(self.next, last + 1)]
        self.next = max(self.next, last + 1)
        return requests


class AsyncCollector(BaseCollector):
    """Collects in the background: ``AsyncCollector(env, policy, buffer, device, callback)``, ``start``, ``collect``.

    The learner alternates between ``collect`` (or ``buffer.get``) and updates of the policy, in one thread. New weights
    are published to the collector's copy of the policy when the learner calls a method here, so never during an update.
    ``callback`` is called where the rollouts are collected, not in the learner's thread.
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
        make_env: Callable[[], VecEnv] | None = None,
        return_discount: float | None = None,
    ) -> None:
        """Create a collector that fills ``buffer``; ``device`` is where rollouts are stored while they are collected.

        ``env`` is an environment or a function that returns one. Worker processes need the function, and call it again
        to replace a simulator that died; ``env``, ``callback`` and ``start_rollout`` must then be picklable. A worker
        thread calls ``env`` or ``make_env`` to replace an environment that raised; without either, it resets it.
        """
        self.policy, self.buffer = policy, buffer
        self.cfg = cfg = AsyncCfg.from_dict(cfg, source="cfg") if isinstance(cfg, Mapping) else cfg or AsyncCfg()
        self.device = torch.device(device) if device is not None else buffer.device
        self.num_steps = cfg.num_steps
        """Steps per environment and rollout; ``None`` until it is known."""
        make_first, make_another = ((lambda: env), make_env) if isinstance(env, VecEnv) else (env, env)
        spec = WorkerSpec(
            make_first,
            policy,
            self.device,
            callback,
            start_rollout,
            cfg,
            make_another=make_another,
            return_discount=return_discount,
        )
        self._backend = _make_backend(spec, isinstance(env, VecEnv))
        self.is_running = self._paused = False
        """Whether the collector is started."""
        self._saved_state: dict[str, Any] | None = None
        """The worker's state inside ``hold``."""
        self._store = WeightStore(self.policy, self.cfg)
        self._pacing = Pacing(cfg.max_policy_lag, 0)
        self._results: dict[int, RolloutResult] = {}
        """Metadata of the rollouts in the buffer, by number."""
        self._pending_requests: Sequence[Sequence[int]] = ()
        """Number and version of the requests that were pending in a restored checkpoint."""
        self.episodes = _EMPTY
        """``return`` and ``length`` of the episodes that ended in the last rollout taken."""
        self._statistics: dict[str, float] = {}

    def start(self) -> None:
        """Start collecting; does nothing if it is running."""
        if self.is_running:
            return
        num_steps = self._resolve_num_steps()
        _backends.add(self._backend)
        self._backend.start(num_steps, self._store, self._on_result)
        try:
            self._begin(self._capacity(num_steps))
        except BaseException:
            self.is_running = True
            self.stop()
            raise

    def _begin(self, capacity: int) -> None:
        """Send the weights and the first requests, as many as ``capacity`` rollouts allow."""
        self._store.publish()
        self.is_running, self.buffer.producer = True, self
        self._pacing = Pacing(self.cfg.max_policy_lag, capacity, self.buffer.first)
        self._pacing.next = self.buffer.next
        for snapshot in self._store.kept():
            self._backend.send(snapshot)
        for number, version in self._pending_requests:
            self._backend.send(RolloutRequest(number, version))
            self._pacing.next = number + 1
        self._pending_requests = ()
        if self.cfg.max_policy_lag > 0:  # with lag 0, the first request waits for collect()
            self._issue()

    def stop(self) -> None:
        """Stop collecting, within 5 seconds even if a worker hangs. Complete rollouts stay in the buffer."""
        running, self.is_running, self._paused = self.is_running, False, False
        if self.buffer.producer is self:
            self.buffer.producer = None
        if running:
            self._backend.stop()

    def close(self) -> None:
        """Stop, and close an environment that replaced the given one."""
        self.stop()
        self._backend.close()

    def pause(self) -> None:
        """Pause after the current step; return once the collector is paused."""
        if not self._paused:
            self._command("pause", self.cfg.start_timeout)
            self._paused = True

    def resume(self) -> None:
        """Continue after ``pause``."""
        if self._paused:
            self._backend.send("resume")
            self._paused = False

    def reset(self, seed: int | None = None) -> None:
        """Reset all envs; only while the collector is stopped."""
        self._check_stopped("reset()")
        self._backend.reset(seed)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def collect(self, num_steps: int | None = None) -> TensorDictBase:
        """Wait for the next rollout ``[num_envs, num_steps]`` and return it; ``CollectorError`` if collection failed.

        The caller owns the rollout. Starts the collector if it is not running.
        """
        self._resolve_num_steps(num_steps)
        self.start()
        if self._paused:
            raise CollectorError("the collector is paused: call resume() first")
        began = time.monotonic()
        while True:
            self.raise_failure()
            if not self.is_running:
                raise CollectorError("the collector was stopped while a rollout was waited for")
            try:
                rollout = self.buffer.take(timeout=_POLL_SECONDS)[0][1]
            except BufferWaitError:
                continue
            self._statistics["time/learner_wait_seconds"] = time.monotonic() - began
            return rollout

    def publish(self) -> None:
        """Publish the policy's weights right after an update, instead of at the next ``collect``."""
        if self.is_running:
            self._publish()
            if self.cfg.max_policy_lag > 0:
                self._mark_consumed()

    def statistics(self) -> dict[str, float]:
        """Return statistics of the last rollout taken.

        In addition to ``SyncCollector.statistics``: ``async/lag_min``, ``lag_mean`` and ``lag_max`` in updates,
        ``async/behaviour_kl`` from the policy that collected to the current one, ``async/restarts`` of simulators, and
        ``time/learner_wait_seconds`` and ``time/collector_wait_seconds``, the time that each side waited for the other.
        """
        return dict(self._statistics)

    def _publish(self) -> None:
        """Send the current weights to the workers, if they have changed."""
        before, snapshot = self._store.latest, self._store.publish()
        if snapshot is not before:
            self._backend.send(snapshot)

    def _mark_consumed(self) -> None:
        """Mark all taken rollouts as consumed, and send the requests that this allows."""
        self._pacing.consumed = self._pacing.taken = self.buffer.first
        self._issue()

    def _issue(self) -> None:
        """Send the requests that the policy lag and the free space allow."""
        if not self.is_running or self._store.latest is None:
            return
        shares_random = self.cfg.max_policy_lag == 0 and self.cfg.worker != "thread"
        for request in self._pacing.issue(self._store.latest.version):
            self._backend.send(replace(request, random=get_random_state() if shares_random else None))

    def before_get(self) -> None:
        """Publish new weights and send new requests; the learner is between two updates."""
        self.raise_failure()
        if self._store.is_new():
            self._publish()
        self._mark_consumed()

    def after_get(self, taken: Sequence[tuple[int, TensorDictBase]]) -> None:
        """Check the rollouts that were taken, and send requests for the freed space."""
        for number, rollout in taken:
            result = self._results.pop(number, None)
            if result is not None:
                self._adopt_result(result, rollout)
        first = self._pacing.taken = self.buffer.first
        for number in tuple(self._results):  # a copy, as the backend's thread may add to them
            if number < first:  # cleared or overwritten
                self._results.pop(number)
        if self.cfg.max_policy_lag > 0:
            self._issue()

    def raise_failure(self) -> None:
        """Raise the error that stopped the collector, if any."""
        if self.is_running:
            self._backend.check()

    def _adopt_result(self, result: RolloutResult, rollout: TensorDictBase) -> None:
        """Prepare a rollout that was taken for the learner: streams, random state, check of its age, statistics."""
        if result.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(result.ready)
            for leaf in rollout.values(include_nested=True, leaves_only=True):
                leaf.record_stream(stream)
        if result.random is not None:
            set_random_state(result.random)
        versions = rollout["policy_version"][0].tolist()  # equal for all envs of a step
        self._statistics = result.statistics | self._staleness(rollout, versions)
        self._store.check_stamps(versions)
        self._store.forget_before(min(versions))
        self.episodes = result.episodes
        self._statistics |= {
            "time/rollout_seconds": result.seconds,
            "time/collector_wait_seconds": result.waited,
            "async/restarts": float(self._backend.restarts) if self.is_running else 0.0,
            "async/workers": float(self._backend.num_workers) if self.is_running else 0.0,
        }

    def _staleness(self, rollout: TensorDictBase, versions: list[int]) -> dict[str, float]:
        """Return the age of a rollout in updates, and the KL divergence of the policy since."""
        now, oldest, limit = int(self.policy.version), min(versions), self.cfg.max_policy_lag
        if now - oldest > limit:
            raise WeightsError(
                f"a rollout of version {oldest} was taken at version {now}, but max_policy_lag is {limit}: the policy "
                "is updated more than once per rollout; raise max_policy_lag"
            )
        scalars = {
            "async/lag_min": float(now - max(versions)),
            "async/lag_mean": sum(now - version for version in versions) / len(versions),
            "async/lag_max": float(now - oldest),
        }
        if self.cfg.kl_rows:
            moved = 0.0 if oldest == now else behaviour_kl(self.policy, rollout, self.cfg.kl_rows)
            scalars["async/behaviour_kl"] = moved
        return scalars

    def _on_result(self, result: RolloutResult, timeout: float) -> None:
        """Put a rollout into the buffer; called in the backend's thread."""
        self._results[result.number] = replace(result, rollout=_EMPTY)
        number = self.buffer.add_rollout(result.rollout, timeout, copy=False)
        if number != result.number:
            raise CollectorError(f"rollout {result.number} became entry {number}: somebody else fills the buffer, too")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Pause the collector between two rollouts, so that its state can be saved."""
        if not self.is_running:
            yield
            return
        self._saved_state = self._command(
            "save", self.cfg.start_timeout + (self.num_steps or 1) * self.cfg.step_timeout
        )
        try:
            yield
        finally:
            self._saved_state = None
            if self.is_running and not self._paused:
                self._backend.send("resume")

    def env_state(self) -> TensorDict | None:
        """Return the environment's state, ``None`` if it cannot be saved; call it inside ``hold``."""
        state: TensorDict | None = self._paused_state()["env"]
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state: queue, results, weights, pending requests; call it inside ``hold``."""
        state = self._paused_state()
        needed = {version for _, version in state["requests"]}
        older = [s for s in self._store.kept() if s.version in needed and s is not self._store.latest]
        results = [self._results[number] for number in sorted(self._results)]
        return {name: value for name, value in state.items() if name != "env"} | {
            "queue": self.buffer.state_dict(),
            "results": [{name: getattr(result, name) for name in _SAVED_FIELDS} for result in results],
            "weights": [[snapshot.version, snapshot.data.clone()] for snapshot in older],  # slots are written to again
        }

    def load_state_dict(self, state: Mapping[str, Any], env_state: TensorDictBase | None = None) -> None:
        """Restore ``state_dict`` and ``env_state``; the policy must be restored first."""
        self._check_stopped("load_state_dict()")
        self._backend.load_state({**state, "env": env_state})
        self.buffer.load_state_dict(state["queue"])
        self._results = {result["number"]: RolloutResult(rollout=_EMPTY, **result) for result in state["results"]}
        self._pending_requests = state["requests"]
        self._store = WeightStore(self.policy, self.cfg)
        for version, data in state["weights"]:
            self._store.keep(version, data.to(self.policy.device))
        stamps = [entry["policy_version"].unique().tolist() for entry in state["queue"]["entries"]]
        self._store.acknowledged.update(*stamps)

    def seed_recovery(self, seed: int) -> None:
        """Set the seed for environments that replace failed ones; ``reset`` with a seed does so, too."""
        self._check_stopped("seed_recovery()")
        self._backend.seed_recovery(seed)

    def _command(self, name: Command, timeout: float) -> dict[str, Any] | None:
        if not self.is_running:
            raise CollectorError("the collector is not running: call start() first")
        self._backend.send(name)
        return self._backend.wait_until_paused(timeout)

    def _paused_state(self) -> dict[str, Any]:
        state = self._saved_state if self.is_running else self._backend.state()
        if state is None:
            raise CollectorError("saving a running collector needs hold() around it")
        return state

    def _check_stopped(self, what: str) -> None:
        if self.is_running:
            raise CollectorError(f"{what} needs a collector that is not running: call stop() first")

    def _capacity(self, num_steps: int) -> int:
        """Return how many rollouts the buffer holds; ``RolloutError`` if not even one."""
        size = (self._backend.num_envs or 1) * num_steps
        if size > self.buffer.buffer_size:
            raise RolloutError(
                f"a rollout of {num_steps} steps has {size} transitions, the buffer holds {self.buffer.buffer_size}: "
                "enlarge buffer_size"
            )
        return _UNBOUNDED if self.buffer.overwrite else self.buffer.buffer_size // size

    def _resolve_num_steps(self, asked: int | None = None) -> int:
        """Return the length of rollouts: the configured one, the first one ``asked`` for, or what fills the buffer."""
        if asked is not None and (asked < 1 or asked != (self.num_steps or asked)):
            raise RolloutError(f"expected num_steps to be {self.num_steps or 'at least 1'}, got {asked}")
        if self.num_steps is None and asked is None:
            if self._backend.num_envs is None:
                raise ConfigError("worker 'process' needs num_steps, the length of rollouts", "collector")
            asked = max(1, self.buffer.buffer_size // self._backend.num_envs)
        self.num_steps = self.num_steps or asked or 1
        return self.num_steps


def behaviour_kl(policy: Policy, rollout: TensorDictBase, rows: int) -> float:
    """Return ``KL(mu || pi) = E[pi/mu - 1 - log pi/mu]``, estimated on the first envs with about ``rows`` steps."""
    part = rollout[: max(1, rows // rollout.batch_size[1])].to(policy.device)
    log_importance = log_ratio(evaluate_rollout(policy, part)[0], part["sample_log_prob"], part, "chunk")
    return float(kl_estimate(log_importance).mean())


def _make_backend(spec: WorkerSpec, is_made: bool) -> Backend:
    cfg = spec.cfg
    cfg.check()
    if cfg.worker != "thread" and is_made:
        raise ConfigError(
            f"worker {cfg.worker!r} needs a function that makes the environment, to be called there; got an "
            "environment",
            "collector",
        )
    if cfg.worker == "process":
        return ProcessBackend(spec)
    if cfg.worker == "ray":
        from embodichain.agents.rl.collector.backends.ray import RayBackend  # needs the extra

        return RayBackend(spec)
    backend = ThreadBackend(spec)
    if cfg.env_processes and not isinstance(backend.env, StepsInHalves):
        raise ConfigError(
            "env_processes is for a trainer, which makes environments; here, give RemoteGroups of RemoteEnvs",
            "collector",
        )
    return backend
