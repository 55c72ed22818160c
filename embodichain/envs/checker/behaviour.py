"""Checks of what happens over time: resets, final observations, time limits, seeds and states."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from embodichain.envs.checker.probe import (
    SEED,
    SHORT,
    Finding,
    Frame,
    NotApplicable,
    Probe,
    first_difference,
    frame,
    rows_differ,
)
from embodichain.envs.vec_env import HasExpert
from embodichain.errors import EnvContractError


def _final_key(name: str) -> str:
    return f"info[final_observation]{name.removeprefix('obs')}"


def check_final_observation(probe: Probe) -> Iterator[Finding]:
    """Rows of ``final_observation`` equal ``obs``, but for envs that are done: there it is what they reached."""
    env = probe.env
    env.reset(seed=SEED)
    for action in probe.actions(3):
        obs, _, terminated, truncated, info = env.step(action)
        if not bool((terminated | truncated).any()) and info["final_observation"] is not obs:
            yield Finding("final_observation is obs when no env is done", "another object", "do not copy it")
            break
    for t, f in enumerate(probe.long[1:], start=1):
        done = f.copies["terminated"] | f.copies["truncated"]
        for name in [key for key in f.copies if key.startswith("obs[")]:
            if bool((rows_differ(f.copies[name], f.copies[_final_key(name)]) & ~done).any()):
                got = f"after {t} steps, {_final_key(name)} differs"
                yield Finding("final_observation equals obs in envs that are not done", got, "start from a copy of obs")
                return
    if not probe.ended:
        return
    if _moves(probe) and not any(_reached_differs(probe, t, done) for t, done in probe.ended):
        got = f"it equals obs in all {sum(int(d.sum()) for _, d in probe.ended)} episodes that ended"
        advice = "keep the observation from before the reset, and reset in the same step"
        yield Finding("final_observation of a done env is what it reached, obs the start of the next", got, advice)


def _moves(probe: Probe) -> bool:
    """Whether observations change from step to step at all."""
    pairs = zip(probe.long[:-1], probe.long[1:], strict=True)
    return any(
        bool(rows_differ(a.copies[k], b.copies[k]).any()) for a, b in pairs for k in a.copies if k.startswith("obs[")
    )


def _reached_differs(probe: Probe, step: int, done: torch.Tensor) -> bool:
    f = probe.long[step].copies
    return any(bool((rows_differ(f[k], f[_final_key(k)]) & done).any()) for k in f if k.startswith("obs["))


def check_kept(probe: Probe) -> Iterator[Finding]:
    """What was returned once is never written to again."""
    for t, f in enumerate(probe.long):
        for name, value in f.returned.items():
            if bool(rows_differ(value, f.copies[name]).any()):
                got = f"{name} of step {t} was changed by later steps"
                yield Finding("returned tensors stay as they are", got, "return a clone of internal buffers")
                return


def check_time_limit(probe: Probe) -> Iterator[Finding]:
    """No episode is longer than ``max_episode_steps``, and one that gets there is truncated."""
    limit = probe.env.max_episode_steps
    reached, finding = _at_limit(probe.long, limit)
    if not reached and isinstance(probe.env, HasExpert):  # who knows the task may last longer than chance
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
            got = "terminated instead" if bool((wrong & terminated).any()) else "it goes on"
            advice = "set truncated, so that the value of the state reached is bootstrapped"
            return True, Finding(f"truncated is set at step {limit} of an episode", got, advice)
        length[terminated | truncated] = 0
    return reached, None


def check_seed(probe: Probe) -> Iterator[Finding]:
    """The same seed and actions give the same trajectory, bitwise; without a seed the streams go on."""
    where = first_difference(probe.play(SHORT), probe.play(SHORT))
    if where is not None:
        yield Finding(
            "reset(seed) and the same actions give the same", f"different: {where}", "draw from seeded streams"
        )
    probe.need_episode_seeds()
    first, second = (probe.start(None)[0].copies["info[episode_seed]"] for _ in range(2))
    if bool((first == second).any()):
        yield Finding("reset() without a seed starts new episodes", "the same episode_seed", "advance the streams")


def check_num_envs(probe: Probe) -> Iterator[Finding]:
    """Env i of a seed behaves the same whatever ``num_envs`` is."""
    if probe.factory is None:
        raise NotApplicable("no factory was given that makes the environment with another num_envs")
    probe.need_determinism()
    count = probe.env.num_envs
    with probe.factory(count + 1) as other:
        more = probe.go_on(probe.start(env=other), probe.actions(SHORT, count + 1), env=other)
    where = first_difference(probe.play(SHORT), more, slice(0, count))
    if where is not None:
        got = f"with {count} and {count + 1} envs: {where}"
        yield Finding("env i behaves the same whatever num_envs is", got, "derive each env's stream from (seed, i)")


def check_episode_seed(probe: Probe) -> Iterator[Finding]:
    """An episode that began by itself can be played again from its ``episode_seed``."""
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
    probe.go_on(again, probe.actions(probe.long_steps)[t : t + steps])
    alive = done.clone()
    for k, f in enumerate(again):
        original = probe.long[t + k].copies
        for name in (key for key in f.copies if key.startswith("obs[") or (k and key == "reward")):
            if bool((rows_differ(f.copies[name], original[name]) & alive).any()):
                got = f"{k} steps into the episode {name} differs"
                advice = "after a reset nothing may be left of the last episode, and no step may be made up"
                yield Finding("reset(seed=episode_seed) repeats the episode", got, advice)
                return
        if k:
            alive &= ~(original["terminated"] | original["truncated"])


def check_partial_reset(probe: Probe) -> Iterator[Finding]:
    """``reset(env_ids=...)`` leaves the other envs where they are."""
    env = probe.env
    if env.num_envs < 2:
        raise NotApplicable("it takes two envs to reset one of them")
    before = probe.play(3)[-1].copies
    obs, info = env.reset(env_ids=[0])
    after = frame(obs, info).copies
    if any(bool(rows_differ(value, before[name])[1:].any()) for name, value in after.items()):
        yield Finding("reset(env_ids=[0]) leaves the others", "their observation changed", "reset only env_ids")
    if not isinstance(before.get("info[episode_seed]"), torch.Tensor) or bool((before["info[episode_seed]"] < 0).all()):
        return
    if bool(rows_differ(after["info[episode_seed]"], before["info[episode_seed]"])[0]) is False:
        yield Finding(
            "reset(env_ids=[0]) starts a new episode there", "the same episode_seed", "enter the next episode"
        )


def check_state(probe: Probe) -> Iterator[Finding]:
    """``set_state(get_state())`` continues bitwise, for all envs or some."""
    env = probe.env
    if not env.supports_state:
        try:
            env.get_state()
        except EnvContractError as error:
            raise NotApplicable("supports_state is False") from error
        yield Finding(
            "get_state raises EnvContractError where supports_state is False", "a state", "set supports_state"
        )
        return
    probe.need_determinism()
    actions = probe.actions(2 * SHORT)
    probe.go_on(probe.start(), actions[:SHORT])
    state = env.get_state()
    if tuple(state.batch_size) != (env.num_envs,):
        yield Finding(f"a state of batch size [{env.num_envs}]", str(list(state.batch_size)), "one row per env")
        return
    kept = state.clone()
    expected = probe.go_on([], actions[SHORT:])
    env.set_state(state)
    where = first_difference(expected, probe.go_on([], actions[SHORT:]))
    if where is not None:
        got = f"different: {where}"
        yield Finding(
            "set_state(get_state()) continues bitwise", got, "save counters, random streams and warm starts too"
        )
    if any(
        bool(rows_differ(a, b).any()) for a, b in zip(state.values(True, True), kept.values(True, True), strict=True)
    ):
        yield Finding("a state is a copy", "later steps changed it", "clone what get_state returns")
    env.set_state(kept[:1], env_ids=[0])
    again = probe.go_on([], actions[SHORT : SHORT + 1])
    if where is None and first_difference(expected[:1], again, slice(0, 1)) is not None:
        yield Finding("set_state(state[:1], env_ids=[0]) restores env 0", "it went on otherwise", "honour env_ids")
