"""Does an environment keep the contract of ``VecEnv``? Plays it, and reports what is wrong and how to fix it.

::

    problems = check_env(env)                                # of any VecEnv, ours or yours; [] is what you want
    results = run_checks(env, factory=lambda n: make(n))     # all checks, with those that passed or did not apply

The environment is reset, played beyond its time limit (1000 random steps at most) and closed. With a ``factory`` that
makes it for a given ``num_envs``, the independence of ``num_envs`` is checked as well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from embodichain.envs.actions import ActionManager
from embodichain.envs.probe import (
    SEED,
    SHORT,
    Finding,
    Frame,
    NotApplicable,
    Probe,
    check_observation,
    check_vector,
    first_difference,
    frame,
    leaves,
    rows_differ,
)
from embodichain.envs.vec_env import HasExpert, VecEnv
from embodichain.errors import ActionError, EnvContractError

Check = Callable[[Probe], Iterator[Finding]]
CHECKS: dict[str, Check] = {}
"""All checks in the order they are made; each one's docstring says what it is about."""

_BASIC = ("spaces", "reset", "step")  # nothing else makes sense where one of these fails


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with an environment."""

    check: str
    expected: str
    got: str
    advice: str

    def __str__(self) -> str:
        return f"{self.check}: expected {self.expected}; got {self.got}; {self.advice}"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: nothing, problems, or the reason why it does not apply."""

    name: str
    what: str
    problems: tuple[Problem, ...] = ()
    skipped: str | None = None


def check_env(env: VecEnv, factory: Callable[[int], VecEnv] | None = None, max_steps: int = 1000) -> list[Problem]:
    """Return everything that is wrong with an environment, which is closed afterwards."""
    return [problem for result in run_checks(env, factory, max_steps) for problem in result.problems]


def run_checks(env: VecEnv, factory: Callable[[int], VecEnv] | None = None, max_steps: int = 1000) -> list[CheckResult]:
    """Make all checks and return a result for each; the environment is closed afterwards."""
    probe = Probe(env, factory, max_steps)
    results: list[CheckResult] = []
    broken: str | None = None
    for name, check in CHECKS.items():
        what = (check.__doc__ or "").strip()
        if broken is not None and name != "close":
            results.append(CheckResult(name, what, skipped=f"not tried, because {broken!r} failed"))
            continue
        results.append(_run(name, what, check, probe))
        if results[-1].problems and name in _BASIC:
            broken = name
    return results


def _run(name: str, what: str, check: Check, probe: Probe) -> CheckResult:
    found: list[Finding] = []
    error = _error_of(lambda: found.extend(check(probe)))
    if isinstance(error, NotApplicable):
        if not found:
            return CheckResult(name, what, skipped=str(error))
    elif error is not None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        got = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        found.append(Finding("no exception", got, "make it work, or raise it where the cause is"))
    return CheckResult(name, what, tuple(Problem(name, *finding) for finding in found))


def _error_of(call: Callable[[], object]) -> Exception | None:
    """Return what a call raised, if anything."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - an environment may fail in any way; that is what is reported
        return error
    return None


def _check(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


@_check("spaces")
def check_spaces(probe: Probe) -> Iterator[Finding]:
    """The attributes that every environment has, and spaces of one env."""
    env = probe.env
    for name in ("num_envs", "max_episode_steps"):
        value = getattr(env, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Finding(f"{name} is an int of at least 1", repr(value), "set it in __init__")
    device, observed = getattr(env, "device", None), getattr(env, "observation_space", None)
    if not isinstance(device, torch.device):
        yield Finding("device is a torch.device", repr(device), "torch.device('cpu'), not 'cpu'")
    if not isinstance(observed, gym.spaces.Dict):
        advice = "name the observation: Dict({'state': Box(...)})"
        yield Finding("observation_space is a gymnasium Dict", repr(observed), advice)
    yield from _action_space(env.action_space)
    manager = getattr(env, "action_manager", None)
    if not isinstance(manager, ActionManager):
        advice = "ActionManager('action', action_space, num_envs, device)"
        yield Finding("action_manager is an ActionManager", type(manager).__name__, advice)
    elif manager.space != env.action_space:
        yield Finding(f"action_manager.space is {env.action_space}", str(manager.space), "use the same space")


def _action_space(space: Any) -> Iterator[Finding]:
    if isinstance(space, gym.spaces.Discrete):
        if int(space.start) != 0:
            yield Finding("discrete actions count from 0", f"start={space.start}", "shift them inside the environment")
    elif isinstance(space, gym.spaces.Box):
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        if len(space.shape) != 1:
            yield Finding("a Box of shape (action_dim,)", f"shape {space.shape}", "flatten the action")
        if np.any(space.low[bounded] != -1.0) or np.any(space.high[bounded] != 1.0):
            yield Finding("bounds -1 and 1", str(space), "scale actions inside the environment")
    else:
        yield Finding("action_space is Box or Discrete", repr(space), "see ActionManager for what an action can be")


@_check("reset")
def check_reset(probe: Probe) -> Iterator[Finding]:
    """``reset`` returns an observation that fits its space, and the episodes' seeds."""
    result = probe.env.reset(seed=SEED)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        yield Finding("reset returns (obs, info)", type(result).__name__, "return a TensorDict and a dict")
        return
    yield from check_observation(probe.env, result[0], "obs")
    yield from _episode_seed(probe.env, result[1])


@_check("step")
def check_step(probe: Probe) -> Iterator[Finding]:
    """``step`` returns reward, flags and info of the promised types and shapes."""
    env = probe.env
    env.reset(seed=SEED)
    for action in probe.actions(3):
        result = env.step(action)
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
            got = f"{type(result).__name__} of {len(result) if isinstance(result, tuple) else 1}"
            yield Finding("step returns (obs, reward, terminated, truncated, info)", got, "return all five")
            return
        obs, reward, terminated, truncated, info = result
        problems = [
            *check_observation(env, obs, "obs"),
            *check_vector(env, "reward", reward, torch.float32),
            *check_vector(env, "terminated", terminated, torch.bool),
            *check_vector(env, "truncated", truncated, torch.bool),
            *_info(env, info, reward),
        ]
        yield from problems
        if problems:
            return


def _info(env: VecEnv, info: dict[str, Any], reward: Any) -> Iterator[Finding]:
    if "final_observation" not in info:
        yield Finding("info has final_observation", f"keys {sorted(info)}", "give what was reached, before any reset")
    else:
        yield from check_observation(env, info["final_observation"], "info[final_observation]")
    for group in ("rewards", "metrics"):
        values = info.get(group)
        if not isinstance(values, Mapping):
            yield Finding(f"info[{group}] is a dict of tensors", repr(values), "an empty dict will do")
            continue
        for name, value in values.items():
            yield from check_vector(env, f"info[{group}][{name}]", value, None)
    yield from _episode_seed(env, info)
    parts = info.get("rewards")
    if isinstance(parts, Mapping) and parts and all(isinstance(p, Tensor) for p in (*parts.values(), reward)):
        total = torch.stack([p.double() for p in parts.values()]).sum(dim=0)
        if total.shape == reward.shape and not torch.allclose(total, reward.double(), rtol=1e-4, atol=1e-5):
            got = f"sum {total.tolist()[:3]}, reward {reward.tolist()[:3]}"
            yield Finding("info[rewards] sum to the reward", got, "report parts after weighting, and all of them")


def _episode_seed(env: VecEnv, info: dict[str, Any]) -> Iterator[Finding]:
    if "episode_seed" not in info:
        advice = "name the episode each env is in; -1 if you cannot"
        yield Finding("info has episode_seed", f"keys {sorted(info)}", advice)
    else:
        yield from check_vector(env, "info[episode_seed]", info["episode_seed"], torch.int64)


def _final_key(name: str) -> str:
    return f"info[final_observation]{name.removeprefix('obs')}"


@_check("final observation")
def check_final_observation(probe: Probe) -> Iterator[Finding]:
    """Rows of ``final_observation`` equal ``obs``, but for envs that are done: there it is what they reached."""
    env = probe.env
    env.reset(seed=SEED)
    for action in probe.actions(3):
        obs, _, terminated, truncated, info = env.step(action)
        if not bool((terminated | truncated).any()) and info["final_observation"] is not obs:
            yield Finding("final_observation is obs when no env is done", "another object", "do not copy it")
            break
    reached_differs = False
    for t, f in enumerate(probe.long[1:], start=1):
        done = f.copies["terminated"] | f.copies["truncated"]
        for name in f.observed:
            differ = rows_differ(f.copies[name], f.copies[_final_key(name)])
            reached_differs |= bool((differ & done).any())
            if bool((differ & ~done).any()):
                got = f"after {t} steps, {_final_key(name)} differs"
                yield Finding("final_observation equals obs in envs that are not done", got, "start from a copy of obs")
                return
    if probe.ended and not reached_differs and _changes(probe):
        got = f"it equals obs in all {sum(int(d.sum()) for _, d in probe.ended)} episodes that ended"
        advice = "keep the observation from before the reset, and reset in the same step"
        yield Finding("final_observation of a done env is what it reached, obs the first of the next", got, advice)


def _changes(probe: Probe) -> bool:
    """Whether observations change from step to step at all."""
    pairs = zip(probe.long[:-1], probe.long[1:], strict=True)
    return any(bool(rows_differ(a.copies[name], b.copies[name]).any()) for a, b in pairs for name in a.observed)


@_check("kept results")
def check_kept(probe: Probe) -> Iterator[Finding]:
    """What was returned once is never written to again."""
    for t, f in enumerate(probe.long):
        for name, value in f.returned.items():
            if bool(rows_differ(value, f.copies[name]).any()):
                got = f"{name} of step {t} was changed by later steps"
                yield Finding("returned tensors stay as they are", got, "return a clone of internal buffers")
                return


@_check("time limit")
def check_time_limit(probe: Probe) -> Iterator[Finding]:
    """No episode is longer than ``max_episode_steps``, and one that gets there is truncated."""
    limit = probe.env.max_episode_steps
    reached, finding = _at_limit(probe.long, limit)
    if not reached and isinstance(probe.env, HasExpert):  # an expert may last longer than random actions
        reached, finding = _at_limit(probe.play_expert(probe.long_steps), limit)
    if not reached:
        raise NotApplicable(f"no episode lasted until max_episode_steps={limit} within {probe.long_steps} steps")
    if finding is not None:
        yield finding


def _at_limit(trajectory: list[Frame], limit: int) -> tuple[bool, Finding | None]:
    """Return whether an episode of the trajectory reached the limit, and what was wrong there."""
    length = torch.zeros_like(trajectory[1].copies["terminated"], dtype=torch.int64)
    reached = False
    for f in trajectory[1:]:
        length += 1
        terminated, truncated = f.copies["terminated"], f.copies["truncated"]
        wrong = (length >= limit) & ~truncated
        reached |= bool((length >= limit).any())
        if bool(wrong.any()):
            got = "terminated instead" if bool((wrong & terminated).any()) else "it continues"
            advice = "set truncated, so that the value of the state reached is bootstrapped"
            return True, Finding(f"truncated is set at step {limit} of an episode", got, advice)
        length[terminated | truncated] = 0
    return reached, None


@_check("seed")
def check_seed(probe: Probe) -> Iterator[Finding]:
    """The same seed and actions give the same trajectory, bitwise; without a seed the streams continue."""
    expected = "reset(seed) and the same actions give the same"
    yield from _same(expected, probe.play(SHORT), probe.play(SHORT), "draw from seeded streams")
    probe.need_episode_seeds()
    first, second = (probe.start(None)[0].copies["info[episode_seed]"] for _ in range(2))
    if bool((first == second).any()):
        yield Finding("reset() without a seed starts new episodes", "the same episode_seed", "advance the streams")


def _same(expected: str, a: list[Frame], b: list[Frame], advice: str) -> Iterator[Finding]:
    """Report where two trajectories differ that should be the same, bitwise."""
    where = first_difference(a, b)
    if where is not None:
        yield Finding(expected, f"different: {where}", advice)


@_check("num_envs")
def check_num_envs(probe: Probe) -> Iterator[Finding]:
    """Env i of a seed behaves the same whatever ``num_envs`` is."""
    if probe.factory is None:
        raise NotApplicable("no factory was given that makes the environment with another num_envs")
    probe.need_determinism()
    count = probe.env.num_envs
    with probe.factory(count + 1) as other:
        more = probe.extend(probe.start(env=other), probe.actions(SHORT, count + 1), env=other)
    where = first_difference(probe.play(SHORT), more, slice(0, count))
    if where is not None:
        got = f"with {count} and {count + 1} envs: {where}"
        yield Finding("env i behaves the same whatever num_envs is", got, "derive each env's stream from (seed, i)")


@_check("episode seed")
def check_episode_seed(probe: Probe) -> Iterator[Finding]:
    """An episode that began by an auto-reset can be played again from its ``episode_seed``."""
    probe.need_episode_seeds()
    probe.need_determinism()
    t, done = next((pair for pair in reversed(probe.need_ends()) if pair[0] < probe.long_steps), (0, None))
    if done is None:
        raise NotApplicable("the only episodes that ended did so at the last step")
    seeds = probe.long[t].copies["info[episode_seed]"]
    again = probe.start(seeds)
    if bool(rows_differ(again[0].copies["info[episode_seed]"], seeds).any()):
        yield Finding("reset(seed=tensor) starts these episodes", "other episode_seed", "take the tensor as it is")
        return
    steps = min(SHORT, probe.long_steps - t)
    probe.extend(again, probe.actions(probe.long_steps)[t : t + steps])
    alive = done.clone()
    for k, f in enumerate(again):
        original = probe.long[t + k].copies
        for name in [*f.observed, *(["reward"] if k else [])]:
            if bool((rows_differ(f.copies[name], original[name]) & alive).any()):
                got = f"{k} steps into the episode {name} differs"
                advice = "after a reset nothing may be left of the last episode, and no step may be made up"
                yield Finding("reset(seed=episode_seed) repeats the episode", got, advice)
                return
        if k:
            alive &= ~(original["terminated"] | original["truncated"])


@_check("partial reset")
def check_partial_reset(probe: Probe) -> Iterator[Finding]:
    """``reset(env_ids=...)`` leaves the other envs where they are."""
    if probe.env.num_envs < 2:
        raise NotApplicable("it takes two envs to reset one of them")
    before = probe.play(3)[-1].copies
    after = frame(*probe.env.reset(env_ids=[0])).copies
    if any(bool(rows_differ(value, before[name])[1:].any()) for name, value in after.items()):
        yield Finding("reset(env_ids=[0]) leaves the others", "their observation changed", "reset only env_ids")
    seeds = before.get("info[episode_seed]")
    if seeds is None or bool((seeds < 0).all()):
        return
    if not bool(rows_differ(after["info[episode_seed]"], seeds)[0]):
        advice = "enter the next episode"
        yield Finding("reset(env_ids=[0]) starts a new episode there", "the same episode_seed", advice)


@_check("state")
def check_state(probe: Probe) -> Iterator[Finding]:
    """``set_state(get_state())`` continues bitwise, for all envs or some."""
    env = probe.env
    if not env.supports_state:
        try:
            env.get_state()
        except EnvContractError as error:
            raise NotApplicable("supports_state is False") from error
        expected = "get_state raises EnvContractError where supports_state is False"
        yield Finding(expected, "a state", "set supports_state")
        return
    probe.need_determinism()
    actions = probe.actions(2 * SHORT)
    probe.extend(probe.start(), actions[:SHORT])
    state = env.get_state()
    if tuple(state.batch_size) != (env.num_envs,):
        yield Finding(f"a state of batch size [{env.num_envs}]", str(list(state.batch_size)), "one row per env")
        return
    kept = state.clone()
    expected_steps = probe.extend([], actions[SHORT:])
    env.set_state(state)
    where = first_difference(expected_steps, probe.extend([], actions[SHORT:]))
    if where is not None:
        advice = "save counters, random streams and warm starts too"
        yield Finding("set_state(get_state()) continues bitwise", f"different: {where}", advice)
    pairs = zip(state.values(True, True), kept.values(True, True), strict=True)
    if any(bool(rows_differ(a, b).any()) for a, b in pairs):
        yield Finding("a state is a copy", "later steps changed it", "clone what get_state returns")
    env.set_state(kept[:1], env_ids=[0])
    again = probe.extend([], actions[SHORT : SHORT + 1])
    if where is None and first_difference(expected_steps[:1], again, slice(0, 1)) is not None:
        yield Finding("set_state(state[:1], env_ids=[0]) restores env 0", "it continued otherwise", "honour env_ids")


@_check("actions")
def check_actions(probe: Probe) -> Iterator[Finding]:
    """Wrong actions raise ``ActionError`` and change nothing; a dict with the one key is an action too."""
    env, actions = probe.env, probe.actions(2 * SHORT)
    expected = probe.play(2 * SHORT)
    played, advice = probe.extend(probe.start(), actions[:SHORT]), "check it with action_manager.unwrap"
    for what, action in _wrong(env, actions[0]).items():
        error = _error_of(lambda action=action: env.step(action))  # type: ignore[misc]
        if error is None:
            yield Finding(f"ActionError for {what}", "no error", advice)
            return
        if not isinstance(error, ActionError):
            yield Finding(f"ActionError for {what}", f"{type(error).__name__}: {error}", advice)
    again = probe.extend(played, actions[SHORT:])
    if probe.nondeterminism is not None:
        return
    yield from _same("a refused action changes nothing", expected, again, "check the action before anything moves")
    probe.start()
    key = env.action_manager.action_type
    obs, *_ = env.step({key: actions[0]})
    if any(not torch.equal(value, expected[1].copies[f"obs[{name}]"]) for name, value in leaves(obs).items()):
        got = "another observation than for the tensor"
        yield Finding(f"{{{key!r}: action}} is taken as the action", got, "unwrap it")


def _wrong(env: VecEnv, action: Tensor) -> dict[str, Any]:
    wrong: dict[str, Any] = {
        f"an action for {len(action) + 1} envs": torch.cat([action, action[:1]]),
        "a dict with another key": {f"not_{env.action_manager.action_type}": action},
    }
    if env.device.type != "cpu":  # there, looking at the values would wait for the device at every step
        return wrong
    if isinstance(env.action_space, gym.spaces.Discrete):
        wrong["a choice that is none"] = torch.full_like(action, int(env.action_space.n))
    else:
        wrong["an action that is not finite"] = action.clone().index_fill_(0, torch.tensor([0]), float("nan"))
    return wrong


@_check("expert")
def check_expert(probe: Probe) -> Iterator[Finding]:
    """The expert's actions are valid, and asking for them leaves the state as it was."""
    env = probe.env
    if not isinstance(env, HasExpert):
        raise NotApplicable("the environment has no expert")
    actions = probe.actions(2 * SHORT)
    expected = probe.play(2 * SHORT)
    played = probe.extend(probe.start(), actions[:SHORT])
    demo = env.create_demo_action_list()
    if not isinstance(demo, list) or not demo:
        yield Finding("create_demo_action_list returns actions", repr(demo)[:80], "return one tensor per step")
        return
    for what, action in (("expert_action()", env.expert_action()), ("create_demo_action_list()[0]", demo[0])):
        like = actions[0]
        if not isinstance(action, Tensor) or action.shape != like.shape or action.dtype != like.dtype:
            shape = f"{list(action.shape)} {action.dtype}" if isinstance(action, Tensor) else type(action).__name__
            yield Finding(f"{what} is {list(like.shape)} {like.dtype}", shape, "return what step takes")
        elif action.is_floating_point():
            low, high = probe.action_bounds
            if not bool(((action >= low) & (action <= high)).all()):  # NaN is in no interval
                got = f"{action.min():.4g} to {action.max():.4g}"
                yield Finding(f"{what} lies in the action space", got, "clip it")
    again = probe.extend(played, actions[SHORT:])
    if probe.nondeterminism is None:
        yield from _same("asking the expert changes nothing", expected, again, "restore the state afterwards")


@_check("close")
def check_close(probe: Probe) -> Iterator[Finding]:
    """Closing twice is fine."""
    probe.env.close()
    error = _error_of(probe.env.close)
    if error is not None:
        yield Finding("close() twice is fine", f"{type(error).__name__}: {error}", "remember that it is closed")
