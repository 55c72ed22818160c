"""Learn from grey images, four stacked frames at a time, with Gymnasium's own wrappers.

embodichain train examples/agents/rl/frame_stack.json --trust frame_stack
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation


class Catch(gym.Env):
    """A ball moves down a screen and bounces off its walls; the paddle at the bottom must catch it."""

    height, width = 24, 32
    observation_space = gym.spaces.Box(0, 255, (height, width, 3), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.x, self.y = int(self.np_random.integers(2, self.width - 4)), 0
        self.speed = int(self.np_random.choice([-2, -1, 1, 2]))
        self.paddle = self.width // 2
        return self._screen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.paddle = int(np.clip(self.paddle + 3 * (int(action) - 1), 3, self.width - 4))
        if not 0 <= self.x + self.speed <= self.width - 2:
            self.speed = -self.speed
        self.x, self.y = self.x + self.speed, self.y + 2
        landed = self.y >= self.height - 4
        caught = landed and abs(self.x + 0.5 - self.paddle) <= 4
        return self._screen(), float(caught), landed, False, {"success": float(caught)}

    def _screen(self) -> np.ndarray:
        screen = np.zeros((self.height, self.width, 3), np.uint8)
        screen[self.y : self.y + 2, self.x : self.x + 2] = (255, 220, 80)
        screen[-2:, self.paddle - 3 : self.paddle + 4] = (90, 160, 255)
        return screen


def make_catch() -> gym.Env:
    """Return the game with Atari-style preprocessing: uint8 ``[4, 24, 32]``."""
    return FrameStackObservation(GrayscaleObservation(Catch()), 4)


gym.register("Catch-v0", entry_point=make_catch, max_episode_steps=20)
