"""What ``sim.py`` compares: the package's environment, raw MuJoCo in three forms, and Gymnasium's vector environments.

All of them simulate the same model from the same states. The raw ones replay the controls that the environment itself
sent while it was recorded, so that they meet the same contacts; the environments choose theirs from random actions.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import mujoco
import numpy as np
import torch
from mujoco import batch, rollout

from benchmarks.plain_envs import PLAIN, SUBSTEPS, PlainEnv
from embodichain.envs.registration import list_envs, load_gym_config, make
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import EnvContractError

_RECORDED = 32  # env steps that the raw candidates repeat
_FULL = int(mujoco.mjtState.mjSTATE_FULLPHYSICS)
_MAX_LOOP = 64  # MjData of the Python loop; its speed does not depend on their number, and each takes 15 MB
Call = Callable[[], object]


@dataclass
class Recording:
    """Where the envs were, and what their motors got in the steps that followed."""

    model: mujoco.MjModel
    physics: np.ndarray
    """Positions, velocities and time, ``[num_envs, nstate]``."""
    integration: np.ndarray
    """The same with controls and the solver's warm start, ``[num_envs, nstate]``."""
    controls: np.ndarray
    """``[steps, num_envs, nu]``."""
    substeps: int
    """Steps of physics for each of them."""


@dataclass
class Candidate:
    """One way to simulate: a call steps ``num_envs`` envs once."""

    step: Call
    num_envs: int
    close: Call


def make_env(task: str, num_envs: int) -> TaskEnv:
    """Return the environment, in the midst of its episodes: at every step some of them end."""
    cfg = load_gym_config(task, num_envs=num_envs, seed=0)
    task_class = next(spec.task for spec in list_envs() if spec.id == task)
    # A step takes as long as the task's own, in ten substeps.
    step = task_class.build_model(cfg).opt.timestep * cfg.env.substeps
    return _staggered(make(cfg, env={"substeps": SUBSTEPS, "timestep": step / SUBSTEPS}), task)


def make_suite_env(id: str, num_envs: int) -> TaskEnv:
    """Return an environment of Gymnasium's MuJoCo suite as ``make`` does: on this package's physics."""
    return _staggered(make(load_gym_config(id, num_envs=num_envs, seed=0)), id)


def _staggered(env: VecEnv, task: str) -> TaskEnv:
    if not isinstance(env, TaskEnv):
        raise TypeError(f"{task} is no task of this package")
    num_envs, state = env.num_envs, env.get_state()
    state["step"] = torch.arange(num_envs) * env.max_episode_steps // num_envs
    env.set_state(state)
    for action in actions(env, 20):
        env.step(action)
    return env


def actions(env: TaskEnv, count: int) -> list[torch.Tensor]:
    """Return random actions ``[num_envs, action_dim]``."""
    generator = torch.Generator().manual_seed(0)
    return [2.0 * torch.rand(env.action_manager.shape, generator=generator) - 1.0 for _ in range(count)]


def record(env: TaskEnv) -> Recording:
    """Write down the states of the envs and the controls of the next steps."""
    model, data = env.physics.model, mujoco.MjData(env.physics.model)
    physics = np.empty((env.num_envs, mujoco.mj_stateSize(model, _FULL)))
    for i in range(env.num_envs):
        env.physics.load(data, i)
        mujoco.mj_getState(model, data, physics[i], _FULL)
    size = mujoco.mj_stateSize(model, int(mujoco.mjtState.mjSTATE_INTEGRATION))  # outputs of the physics follow it
    integration, controls = env.physics.state().numpy()[:, :size], []
    for action in actions(env, _RECORDED):
        env.step(action)
        controls.append(env.physics.ctrl.numpy().copy())
    # An env that ended was put back to rest, controls included: let it go on with its last command.
    for before, after in itertools.pairwise(controls):
        rested = ~after.any(axis=1)
        after[rested] = before[rested]
    return Recording(model, physics, integration, np.stack(controls), env.task.substeps)


def embodichain_env(env: TaskEnv) -> Candidate:
    """The full step of this package: control, physics, observation, reward, reset."""
    cycle = itertools.cycle(actions(env, 16))
    return Candidate(lambda: env.step(next(cycle)), env.num_envs, env.close)


def raw_rollout(recording: Recording, threads: int) -> Candidate:
    """``mujoco.rollout.Rollout`` without checks, on preallocated arrays."""
    model, count = recording.model, recording.physics.shape[0]
    pool, datas, models = (
        rollout.Rollout(nthread=threads),
        [mujoco.MjData(model) for _ in range(threads)],
        [model] * count,
    )
    state, warm, substeps = recording.physics.copy(), np.zeros((count, model.nv)), recording.substeps
    states = np.empty((count, substeps, state.shape[1]))
    sensors = np.empty((count, substeps, model.nsensordata))
    controls = np.empty((count, substeps, model.nu))
    numbers = itertools.cycle(range(_RECORDED))

    def step() -> None:
        number = next(numbers)
        if number == 0:
            state[:] = recording.physics
        controls[:] = recording.controls[number][:, None]
        pool.rollout(
            models,
            datas,
            state,
            controls,
            skip_checks=True,
            nstep=substeps,
            initial_warmstart=warm,
            state=states,
            sensordata=sensors,
        )
        state[:] = states[:, -1]

    return Candidate(step, count, pool.close)


def raw_batch(recording: Recording, threads: int) -> Candidate:
    """``mujoco.batch.Batch``, which also carries the solver's warm start."""
    count = recording.physics.shape[0]
    simulations = batch.Batch(recording.model, nsim=count, nthread=threads)
    control, numbers = simulations.bind("ctrl"), itertools.cycle(range(_RECORDED))

    def step() -> None:
        number = next(numbers)
        if number == 0:
            simulations.state[:] = recording.integration
        control[:] = recording.controls[number]
        simulations.step(nstep=recording.substeps)

    return Candidate(step, count, lambda: None)


def python_loop(recording: Recording) -> Candidate:
    """A Python loop of ``mj_step``, one ``MjData`` per env."""
    model, count = recording.model, min(_MAX_LOOP, recording.physics.shape[0])
    datas, numbers = [mujoco.MjData(model) for _ in range(count)], itertools.cycle(range(_RECORDED))

    def step() -> None:
        number = next(numbers)
        if number == 0:
            for data, row in zip(datas, recording.physics, strict=False):
                mujoco.mj_setState(model, data, row, _FULL)
        for data, row in zip(datas, recording.controls[number], strict=False):
            data.ctrl[:] = row
            mujoco.mj_step(model, data, recording.substeps)

    return Candidate(step, count, lambda: None)


def gymnasium_vector(task: str, env: TaskEnv, mode: Literal["sync", "async"]) -> Candidate:
    """What ``gymnasium.make_vec`` makes of the plain task, in the ordinary way."""
    name = f"benchmark/{task}-v0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a name that is taken again
        gym.register(name, lambda: plain_env(task, env, flat=False), max_episode_steps=PLAIN[task].limit)
        vector = gym.make_vec(name, env.num_envs, vectorization_mode=mode)
    return _vector(vector, env, "_elapsed_steps")


def gymnasium_suite(id: str, env: TaskEnv) -> Candidate:
    """``SyncVectorEnv`` of Gymnasium's own environment, as ``gymnasium.make_vec`` makes it."""
    logging.getLogger("embodichain.envs.physics").setLevel(logging.ERROR)  # deprecated words in Gymnasium's files
    return _vector(gym.make_vec(id, env.num_envs, vectorization_mode="sync"), env, "_elapsed_steps")


def bare_vector(task: str, env: TaskEnv) -> Candidate:
    """``SyncVectorEnv`` of the plain task with a flat observation and none of Gymnasium's wrappers."""
    return _vector(gym.vector.SyncVectorEnv([lambda: plain_env(task, env, flat=True)] * env.num_envs), env, "steps")


def _vector(vector: gym.vector.VectorEnv, env: TaskEnv, counter: str) -> Candidate:
    """Start all envs, staggered like the package's own."""
    vector.reset(seed=0)
    vector.set_attr(counter, [i * env.max_episode_steps // env.num_envs for i in range(env.num_envs)])
    low, high = vector.single_action_space.low, vector.single_action_space.high  # type: ignore[attr-defined]
    cycle = itertools.cycle([low + (high - low) * (action.numpy() + 1.0) / 2.0 for action in actions(env, 16)])
    for _ in range(20):
        vector.step(next(cycle))
    return Candidate(lambda: vector.step(next(cycle)), env.num_envs, vector.close)


def plain_env(task: str, env: TaskEnv, flat: bool) -> PlainEnv:
    """Return the task as a plain Gymnasium environment."""
    return PLAIN[task](env.physics.model, env.robot.init_qpos.numpy(), flat)


def check_same_task(task: str, env: TaskEnv, steps: int = 8) -> None:
    """Raise unless the plain task does what the package's own does: same states, observations and rewards."""
    plain, state = plain_env(task, env, flat=True), env.get_state()
    plain.reset(seed=0)
    for i in range(min(4, env.num_envs)):
        env.set_state(state)
        env.reset(env_ids=[i])
        mujoco.mj_resetData(plain.model, plain.data)
        env.physics.load(plain.data, i)
        if "goal" in env.task.variables:
            plain.goal[:] = env.task.variables["goal"][i].numpy()  # type: ignore[attr-defined]
        for action in actions(env, steps):
            _, reward, terminated, _, info = env.step(action)
            got, pay, ended, *_ = plain.step(action[i].numpy())
            seen = torch.cat([v[i] for v in info["final_observation"].values(include_nested=True, leaves_only=True)])
            apart = float(np.abs(got - seen.numpy()).max())
            if apart > 1e-4 or abs(pay - float(reward[i])) > 1e-4 or ended != bool(terminated[i]):
                raise EnvContractError(f"{task}: the plain env is not the same task: {apart=}, {pay=} {reward[i]=}")
            if ended:
                break
    env.set_state(state)
