"""Checks that an environment fulfils the ``VecEnv`` contract. ``check_env`` returns all problems and how to fix them.

``run_checks`` returns the results of all checks, including those that passed or did not apply. The environment is
reset, played beyond its time limit (1000 random steps at most) and closed. A ``factory`` that makes it for a given
``num_envs`` enables the check that envs are independent of ``num_envs``.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.envs.task_contract import author_line, beyond_limits
from embodichain.envs.task_env import TaskEnv
from embodichain.envs.trajectories import (
    SEED,
    SEEDS,
    Factory,
    Frame,
    NotApplicable,
    Play,
    first_difference,
    leaves,
    need,
    rows_apart,
    rows_differ,
)
from embodichain.envs.vec_env import ActionManager, HasExpert, VecEnv, choice_counts
from embodichain.errors import ActionError, EmbodiChainError, EnvContractError

Finding = tuple[str, str, str] | str
"""What was expected, what was found, and how to fix it; or a warning, which breaks no contract."""

_BASIC = ("spaces", "reset", "step")  # if one of these fails, the others are skipped
_AFTER = {"demonstration": "expert"}  # the second failing, the first is skipped
_STARTS = 8  # of the expert
_SEEDS_OR_NONE = f"{SEEDS} (-1 where an episode cannot be repeated)"


@dataclass(frozen=True)
class Problem:
    """One violation of the contract."""

    check: str
    expected: str
    got: str
    advice: str

    def __str__(self) -> str:
        return f"{self.check}: expected {self.expected}; got {self.got}; {self.advice}"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: passed, problems, or the reason why it does not apply."""

    name: str
    what: str
    problems: tuple[Problem, ...] = ()
    skipped: str | None = None
    warnings: tuple[str, ...] = ()
    """What keeps the contract, but is hardly meant."""


def check_env(env: VecEnv, factory: Factory | None = None, max_steps: int = 1000) -> list[Problem]:
    """Return all problems of an environment, which is closed afterwards."""
    return [problem for result in run_checks(env, factory, max_steps) for problem in result.problems]


def run_checks(env: VecEnv, factory: Factory | None = None, max_steps: int = 1000) -> list[CheckResult]:
    """Run all checks and return their results; the environment is closed afterwards."""
    play, broken = Play(env, factory, max_steps), ""
    results: list[CheckResult] = []
    for name, check in CHECKS.items():
        before = broken or next((r.name for r in results if r.problems and r.name == _AFTER.get(name)), "")
        skipped = f"not tried, because {before!r} failed" if before and name != "close" else None
        found: list[Finding] = []
        error = None if skipped else _error_of(lambda: found.extend(check(play)))  # noqa: B023 - called at once
        if isinstance(error, NotApplicable):
            skipped = None if found else str(error)
        elif error is not None:
            found.append(_raised(error))
        problems = tuple(Problem(name, *finding) for finding in found if not isinstance(finding, str))
        warnings = tuple(finding for finding in found if isinstance(finding, str))
        results.append(CheckResult(name, (check.__doc__ or "").strip(), problems, skipped, warnings))
        if problems and name in _BASIC:
            broken = name
    return results


def _raised(error: Exception) -> Finding:
    """Describe an exception with the line of the author's code that it comes from."""
    known, line = isinstance(error, EmbodiChainError), author_line(error)
    if line is None and not known:
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{last.filename}, line {last.lineno}"
    got = ". ".join([str(error), *getattr(error, "__notes__", [])])
    got = got if known else f"{type(error).__name__}: {got}"
    got += f" ({line})" if line is not None and line not in got else ""
    return "no exception", got, "correct what it says" if known else "correct that line, or what it is called with"


def _error_of(call: Callable[[], object]) -> Exception | None:
    """Return the exception that a call raised, or ``None``."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any failure of an environment is reported
        return error
    return None


def _same(expected: str, a: list[Frame], b: list[Frame], advice: str, rows: slice = slice(None)) -> Iterator[Finding]:
    """Report where two trajectories differ that should be bitwise equal."""
    where = first_difference(a, b, rows)
    if where is not None:
        yield expected, f"different: {where}", advice


def _unchanged(play: Play, trajectory: list[Frame], expected: str, key: str | None = None) -> Iterator[Finding]:
    """Complete an interrupted trajectory (with a ``key``: with dict actions); it must be as without interruption."""
    play.extend(trajectory, ({key: x} if key else x for x in play.actions(2 * play.short)[play.short :]))
    if play.difference is None:
        advice = "leave the state as it is, or restore it"
        yield from _same(expected, play.random(2 * play.short), trajectory, advice)


def _tensor(env: VecEnv, name: str, value: Any, dtype: torch.dtype | None, *shape: int) -> Iterator[Finding]:
    """Check a tensor ``[num_envs, *shape]``; without a dtype, any is valid."""
    expected = [env.num_envs, *shape]
    if not isinstance(value, Tensor) or list(value.shape) != expected:
        got = str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
        yield f"{name} has shape {expected}", got, "return a tensor, one row per env; spaces are those of one env"
        return
    if dtype is not None and value.dtype != dtype:
        yield f"{name} is {dtype}", str(value.dtype), f"convert it: .to({dtype})"
    if value.device.type != env.device.type:
        yield f"{name} is on {env.device}", str(value.device), "make it on env.device"
    of_one_task = "[task/" in name  # a metric of one task is NaN in the envs of others
    bad = torch.nonzero(torch.isinf(value) if of_one_task else ~torch.isfinite(value))
    if bad.numel():
        got = f"env {int(bad[0, 0])} has NaN or infinity"
        yield f"{name} is finite", got, "find out which term diverges, or guard the simulation"


def _observation(env: VecEnv, obs: Any, name: str) -> Iterator[Finding]:
    """Check an observation: type, keys, shapes, dtypes, devices, values."""
    if not isinstance(obs, TensorDictBase):
        yield f"{name} is a TensorDict", type(obs).__name__, "TensorDict({...}, batch_size=[num_envs])"
        return
    if list(obs.batch_size) != [env.num_envs]:
        yield f"{name} has batch size [{env.num_envs}]", str(list(obs.batch_size)), "batch_size=[num_envs]"
    spaces, found = _flat(env.observation_space), leaves(obs)
    if spaces.keys() != found.keys():
        yield f"{name} has the keys {sorted(spaces)}", str(sorted(found)), "match observation_space"
    for key in sorted(spaces.keys() & found.keys()):
        space, value, what = spaces[key], found[key], f"{name}[{key}]"
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        problems = list(_tensor(env, what, value, dtype, *(space.shape or ())))
        yield from problems
        if isinstance(space, gym.spaces.Box) and not problems:
            low, high = (torch.as_tensor(bound, device=value.device).double() for bound in (space.low, space.high))
            slack = 1e-5 * (1.0 + value.double().abs())  # tolerates rounding
            if bool(((value < low - slack) | (value > high + slack)).any()):
                got = f"values in [{float(value.min()):.6g}, {float(value.max()):.6g}]"
                yield f"{what} lies within {space}", got, "widen the space, or clip the observation"


def _flat(space: gym.Space[Any], path: str = "") -> dict[str, gym.Space[Any]]:
    """Return the leaves of nested spaces by path."""
    if not isinstance(space, gym.spaces.Dict):
        return {path: space}
    children = ((f"{path}/{key}" if path else str(key), child) for key, child in space.spaces.items())
    return {name: leaf for key, child in children for name, leaf in _flat(child, key).items()}


def check_spaces(play: Play) -> Iterator[Finding]:
    """Required attributes exist, and spaces are those of a single env."""
    env = play.env
    for name, otherwise in (("num_envs", ""), ("max_episode_steps", ", or None where there is no time limit")):
        value = getattr(env, name, "nothing")
        if not (value is None and otherwise) and (type(value) is not int or value < 1):
            yield f"{name} is an int of at least 1{otherwise}", repr(value), "set it in __init__"
    for name, kind, advice in (
        ("device", torch.device, "torch.device('cpu'), not 'cpu'"),
        ("observation_space", gym.spaces.Dict, "name the observation: Dict({'state': Box(...)})"),
        ("action_manager", ActionManager, "ActionManager('action', action_space, num_envs, device)"),
    ):
        if not isinstance(getattr(env, name, None), kind):
            got = repr(getattr(env, name, None))
            yield f"{name} is a {kind.__module__.partition('.')[0]} {kind.__name__}", got, advice
    space: Any = env.action_space
    if isinstance(space, gym.spaces.Discrete):
        if int(space.start) != 0:
            yield "discrete actions count from 0", f"start={space.start}", "shift them inside the environment"
    elif isinstance(space, gym.spaces.Box):
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        if len(space.shape) != 1:
            yield "a Box of shape (action_dim,)", f"shape {space.shape}", "flatten the action"
        if np.any(space.low[bounded] != -1.0) or np.any(space.high[bounded] != 1.0):
            yield "bounds -1 and 1", str(space), "scale actions inside the environment"
    elif isinstance(space, gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        if len(space.shape) != 1:
            yield "choices of shape (action_dim,)", f"shape {space.shape}", "flatten the action"
        elif isinstance(space, gym.spaces.MultiDiscrete) and np.any(space.start != 0):
            yield "discrete actions count from 0", f"start={space.start}", "shift them inside the environment"
    else:
        kinds = "Box, Discrete, MultiDiscrete or MultiBinary"
        yield f"action_space is {kinds}", repr(space), "see ActionManager for what an action can be"
    if isinstance(getattr(env, "action_manager", None), ActionManager) and env.action_manager.space != space:
        yield f"action_manager.space is {space}", str(env.action_manager.space), "use the same space"


def check_reset(play: Play) -> Iterator[Finding]:
    """``reset`` returns an observation that matches its space and episode seeds; joints are within their limits."""
    result = play.env.reset(seed=SEED)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        yield "reset returns (obs, info)", type(result).__name__, "return a TensorDict and a dict"
        return
    yield from _observation(play.env, result[0], "obs")
    yield from _tensor(play.env, _SEEDS_OR_NONE, result[1].get("episode_seed"), torch.int64)
    if isinstance(play.env, TaskEnv):
        yield from beyond_limits(play.env.physics.model, play.env.physics.qpos)


def check_step(play: Play) -> Iterator[Finding]:
    """``step`` returns reward, flags and info of the documented types and shapes."""
    env = play.env
    env.reset(seed=SEED)
    for action in play.actions(3):
        result = env.step(action)
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
            got = f"{type(result).__name__} of {len(result) if isinstance(result, tuple) else 1}"
            yield "step returns (obs, reward, terminated, truncated, info)", got, "return all five"
            return
        obs, reward, terminated, truncated, info = result
        problems = [
            *_observation(env, obs, "obs"),
            *_tensor(env, "reward", reward, torch.float32),
            *_tensor(env, "terminated", terminated, torch.bool),
            *_tensor(env, "truncated", truncated, torch.bool),
            *_info(env, info, reward),
        ]
        yield from problems
        if problems:
            return


def _info(env: VecEnv, info: dict[str, Any], reward: Any) -> Iterator[Finding]:
    yield from _observation(env, info.get("final_observation"), "info[final_observation]")
    yield from _tensor(env, _SEEDS_OR_NONE, info.get("episode_seed"), torch.int64)
    values: Any = {}
    for group in ("metrics", "rewards"):
        values = info.get(group)
        if not isinstance(values, Mapping):
            yield f"info[{group}] is a dict of tensors", repr(values), "an empty dict will do"
            values = {}
        for name, value in values.items():
            yield from _tensor(env, f"info[{group}][{name}]", value, None)
    parts = list(values.values())
    if parts and all(isinstance(part, Tensor) for part in (*parts, reward)):
        total = torch.stack([part.double() for part in parts]).sum(dim=0)
        if total.shape == reward.shape and not torch.allclose(total, reward.double(), rtol=1e-4, atol=1e-5):
            got = f"sum {total.tolist()[:3]}, reward {reward.tolist()[:3]}"
            yield "info[rewards] sum to the reward", got, "report parts after weighting, and all of them"


def check_finite(play: Play) -> Iterator[Finding]:
    """Observations and rewards stay finite over whole episodes."""
    for t, frame in enumerate(play.long):
        for name, value in frame.copies.items():
            bad = torch.nonzero(~torch.isfinite(value))
            if bad.numel():
                got = f"after {t} steps, {name} of env {int(bad[0, 0])} has NaN or infinity"
                yield "observations and rewards are finite", got, "find out which term diverges, or guard it"
                return


def check_final_observation(play: Play) -> Iterator[Finding]:
    """``final_observation`` equals ``obs``, except for done envs, where it is the observation they reached."""
    if play.exact and any(not frame.final_is_obs and not bool(frame.done.any()) for frame in play.long[1:]):
        yield "final_observation is obs when no env is done", "another object", "do not copy it"
    reached_differs = changes = False
    for t, frame in enumerate(play.long[1:], start=1):
        for name in frame.observed:
            final = f"info[final_observation]{name.removeprefix('obs')}"
            differ = rows_differ(frame.copies[name], frame.copies[final])
            reached_differs |= bool((differ & frame.done).any())
            changes |= bool(rows_differ(frame.copies[name], play.long[t - 1].copies[name]).any())
            if bool((differ & ~frame.done).any()):
                expected = "final_observation equals obs in envs that are not done"
                yield expected, f"after {t} steps, {final} differs", "start from a copy of obs"
                return
    if play.ends and changes and not reached_differs:
        got = f"it equals obs in all {sum(int(play.long[t].done.sum()) for t in play.ends)} episodes that ended"
        advice = "keep the observation from before the reset, and reset in the same step"
        yield "final_observation of a done env is what it reached, obs the first of the next", got, advice


def check_kept(play: Play) -> Iterator[Finding]:
    """Returned tensors are never modified later."""
    for t, frame in enumerate(play.long):
        for name, value in frame.returned.items():
            if bool(rows_differ(value, frame.copies[name]).any()):
                got = f"{name} of step {t} was changed by later steps"
                yield "returned tensors stay as they are", got, "return a clone of internal buffers"
                return


def check_time_limit(play: Play) -> Iterator[Finding]:
    """No episode exceeds ``max_episode_steps``, and one that reaches it is truncated."""
    limit = play.env.max_episode_steps
    if limit is None:
        raise NotApplicable("there is no time limit: max_episode_steps is None")
    for played in (iter(play.long[1:]), play.expert(play.long_steps)):  # the expert's episodes may be longer
        length, reached = torch.zeros(play.env.num_envs, dtype=torch.int64, device=play.env.device), False
        for frame in played:
            length += 1
            wrong = (length >= limit) & ~frame.copies["truncated"]
            reached |= bool((length >= limit).any())
            if bool(wrong.any()):
                got = "terminated instead" if bool((wrong & frame.done).any()) else "it continues"
                advice = "set truncated, so that the value of the state reached is bootstrapped"
                yield f"truncated is set at step {limit} of an episode", got, advice
                return
            length[frame.done] = 0
        if reached:
            return
    raise NotApplicable(f"no episode lasted until max_episode_steps={limit} within {play.long_steps} steps")


def check_seed(play: Play) -> Iterator[Finding]:
    """The same seed and actions give the same trajectory (bitwise on a CPU); without a seed, the streams continue."""
    if play.difference is not None:
        yield "reset(seed) and the same actions give the same", play.difference, "draw from seeded streams"
    play.need_episode_seeds()
    first, second = (play.start(None)[0].copies[SEEDS] for _ in range(2))
    if bool((first == second).any()):
        yield "reset() without a seed starts new episodes", "the same episode_seed", "advance the streams"


def check_num_envs(play: Play) -> Iterator[Finding]:
    """Env i with a seed behaves the same for any ``num_envs``."""
    if play.factory is None:
        raise NotApplicable("no factory was given that makes the environment with another num_envs")
    play.need_determinism()
    count = play.env.num_envs
    with play.factory(count + 1) as other:
        more = Play(other, None, play.max_steps).random(play.short)
    expected, advice = "env i behaves the same whatever num_envs is", "derive each env's stream from (seed, i)"
    yield from _same(expected, play.random(play.short), more, advice, slice(0, count))


def check_episode_seed(play: Play) -> Iterator[Finding]:
    """An episode that started with an autoreset can be repeated from its ``episode_seed``."""
    play.need_episode_seeds()
    play.need_determinism()
    ends = [t for t in play.ends if t < play.long_steps]
    need(bool(ends), f"no episode ended within {play.long_steps} random steps, or only with the last one")
    original = play.long[ends[-1] :][: play.short + 1]
    seeds, alive = original[0].copies[SEEDS], original[0].done
    again = play.start(seeds)
    if bool(rows_differ(again[0].copies[SEEDS], seeds).any()):
        yield "reset(seed=tensor) starts these episodes", "other episode_seed", "take the tensor as it is"
        return
    play.extend(again, play.actions(play.long_steps)[ends[-1] :][: play.short])
    for k, (frame, was) in enumerate(zip(again, original, strict=True)):
        # Compare what was reached: the next episode depends on the streams.
        reached = [f"info[final_observation]{name.removeprefix('obs')}" for name in frame.observed]
        compare = rows_apart if k else rows_differ
        for name in [*reached, "reward"] if k else frame.observed:
            if bool((compare(frame.copies[name], was.copies[name]) & alive).any()):
                got = f"{k} steps into the episode {name} differs"
                advice = "after a reset nothing may be left of the last episode, and no step may be made up"
                yield "reset(seed=episode_seed) repeats the episode", got, advice
                return
        alive = alive & ~was.done if k else alive


def check_partial_reset(play: Play) -> Iterator[Finding]:
    """``reset(env_ids=...)`` leaves the other envs unchanged."""
    need(play.env.num_envs > 1, "it takes two envs to reset one of them")
    before = play.random(3)[-1].copies
    after = Frame(*play.env.reset(env_ids=[0])).copies
    if any(bool(rows_differ(value, before[name])[1:].any()) for name, value in after.items()):
        yield "reset(env_ids=[0]) leaves the others", "their observation changed", "reset only env_ids"
    if bool((before[SEEDS] >= 0).any()) and not bool(rows_differ(after[SEEDS], before[SEEDS])[0]):
        yield "reset(env_ids=[0]) starts a new episode there", "the same episode_seed", "enter the next episode"


def check_state(play: Play) -> Iterator[Finding]:
    """``set_state(get_state())`` continues as before (bitwise on a CPU), for all envs or some."""
    env = play.env
    if not env.supports_state:
        need(not isinstance(_error_of(env.get_state), EnvContractError), "supports_state is False")
        yield "EnvContractError from get_state where supports_state is False", "a state", "set supports_state"
        return
    play.need_determinism()
    actions = play.actions(play.short)
    play.random(play.short)
    state = env.get_state()
    if list(state.batch_size) != [env.num_envs]:
        yield f"a state of batch size [{env.num_envs}]", str(list(state.batch_size)), "one row per env"
        return
    kept, expected_steps = state.clone(), play.extend([], actions)
    env.set_state(state)
    advice = "save counters, random streams and warm starts too"
    problems = list(_same("set_state(get_state()) continues bitwise", expected_steps, play.extend([], actions), advice))
    yield from problems
    pairs = zip(state.values(True, True), kept.values(True, True), strict=True)
    if any(bool(rows_differ(a, b).any()) for a, b in pairs):
        yield "a state is a copy", "later steps changed it", "clone what get_state returns"
    env.set_state(kept[:1], env_ids=[0])
    again = play.extend([], actions[:1])
    if not problems:
        expected = "set_state(state[:1], env_ids=[0]) restores env 0"
        yield from _same(expected, expected_steps[:1], again, "honour env_ids", slice(0, 1))


def check_actions(play: Play) -> Iterator[Finding]:
    """Invalid actions raise ``ActionError`` and change nothing; a dict with the action key is accepted."""
    env, action, key = play.env, play.actions(1)[0], play.env.action_manager.action_type
    wrong: dict[str, Any] = {
        f"an action for {len(action) + 1} envs": torch.cat([action, action[:1]]),
        "a dict with another key": {f"not_{key}": action},
    }
    if env.device.type == "cpu":  # on a GPU, reading the values would synchronise at every step
        if (counts := choice_counts(env.action_space)) is not None:
            wrong["a choice that is none"] = torch.full_like(action, int(counts.max()))
        else:
            wrong["an action that is not finite"] = action.clone().index_fill_(0, torch.tensor([0]), float("nan"))
    trajectory = play.random(play.short)
    for what, value in wrong.items():
        error = _error_of(lambda: env.step(value))  # noqa: B023 - called at once
        if not isinstance(error, ActionError):
            got = "no error" if error is None else f"{type(error).__name__}: {error}"
            yield f"ActionError for {what}", got, "check it with action_manager.unwrap before anything moves"
        if error is None:
            return
    expected = f"a refused action changes nothing, and {{{key!r}: action}} is an action"
    yield from _unchanged(play, trajectory, expected, key)


def check_expert(play: Play) -> Iterator[Finding]:
    """The expert's actions are valid, and computing them leaves the state unchanged."""
    env, like = play.env, play.actions(1)[0]
    if not isinstance(env, HasExpert) or not env.has_expert:
        raise NotApplicable("the environment has no expert")
    trajectory, demo = play.random(play.short), env.create_demo_action_list()
    if not isinstance(demo, list) or not demo:
        yield "create_demo_action_list returns actions", repr(demo)[:80], "return one tensor per step"
        return
    for what, action in (("expert_action()", env.expert_action()), ("create_demo_action_list()[0]", demo[0])):
        if not isinstance(action, Tensor) or action.shape != like.shape or action.dtype != like.dtype:
            got = f"{list(action.shape)} {action.dtype}" if isinstance(action, Tensor) else type(action).__name__
            yield f"{what} is {list(like.shape)} {like.dtype}", got, "return what step takes"
        elif isinstance(env.action_space, gym.spaces.Box):
            low, high = (torch.as_tensor(x, device=env.device) for x in (env.action_space.low, env.action_space.high))
            if not bool(((action >= low) & (action <= high)).all()):  # also false for NaN
                yield f"{what} lies in the action space", f"{action.min():.4g} to {action.max():.4g}", "clip it"
    yield from _unchanged(play, trajectory, "asking the expert changes nothing")


def check_demonstration(play: Play) -> Iterator[Finding]:
    """The expert solves its task from every start that is tried."""
    need(isinstance(play.env, HasExpert) and play.env.has_expert, "the environment has no expert")
    if play.factory is None:
        solved = play.demonstrations()
    else:
        with play.factory(_STARTS) as env:
            solved = Play(env, None, play.max_steps).demonstrations()
    if solved is None:
        raise NotApplicable("the environment measures no success")
    count = int(solved.sum())
    if count < len(solved):
        advice = "embodichain play shows what it does" if count == 0 else "what it does not solve is streamed as well"
        yield f"the expert solved {count} of {len(solved)} starts; {advice}"


def check_close(play: Play) -> Iterator[Finding]:
    """``close`` can be called more than once."""
    play.env.close()
    error = _error_of(play.env.close)
    if error is not None:
        yield "close() twice is fine", f"{type(error).__name__}: {error}", "remember that it is closed"


CHECKS: dict[str, Callable[[Play], Iterator[Finding]]] = {
    "spaces": check_spaces,
    "reset": check_reset,
    "step": check_step,
    "finite values": check_finite,
    "final observation": check_final_observation,
    "kept results": check_kept,
    "time limit": check_time_limit,
    "seed": check_seed,
    "num_envs": check_num_envs,
    "episode seed": check_episode_seed,
    "partial reset": check_partial_reset,
    "state": check_state,
    "actions": check_actions,
    "expert": check_expert,
    "demonstration": check_demonstration,
    "close": check_close,
}
"""All checks in order; the docstring of each describes what it checks."""
