"""Frames per second: the lean settings of this package against MuJoCo's renderer as it comes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

from benchmarks.timing import Rounds, Window, interleave

_SIZE, _ENVS, _CAMERA = 96, 16, "side"


def frames(rounds: int, window: float, patience: float) -> Rounds:
    """Draw the same states of ``PushCubeRL`` in both ways; ``RenderingError`` where nothing can be drawn.

    In a process of its own, because ``mujoco.Renderer`` takes its backend from the environment when it is imported.
    """
    from embodichain.envs.gl_backend import choose_backend

    choose_backend()
    command = [sys.executable, "-m", "benchmarks.sim_frames", str(rounds), str(window), str(patience)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    windows = {name: [Window(**one) for one in many] for name, many in found.items()}
    return Rounds(windows, min_quiet=min(5, rounds))


def measure(rounds: int, window: float, patience: float) -> Rounds:
    """Time both renderers on the same states."""
    import mujoco
    import numpy as np

    from benchmarks.sim_candidates import make_env
    from embodichain.envs.rendering import Renderer

    env = make_env("PushCubeRL", _ENVS)
    model, load = env.physics.model, env.physics.load
    with Renderer(model, (_SIZE, _SIZE), "lean") as lean:
        stock, data = mujoco.Renderer(model, _SIZE, _SIZE), mujoco.MjData(model)
        out = np.empty((_SIZE, _SIZE, 3), dtype=np.uint8)

        def draw_stock() -> None:
            for env_id in range(_ENVS):
                load(data, env_id)
                mujoco.mj_forward(model, data)
                stock.update_scene(data, camera=_CAMERA)
                stock.render(out=out)

        candidates = {"lean": lambda: lean.render(load, range(_ENVS), _CAMERA), "MuJoCo's defaults": draw_stock}
        try:
            return interleave(candidates, dict.fromkeys(candidates, _ENVS), rounds, window, patience)
        finally:
            stock.close()
            env.close()


if __name__ == "__main__":
    result = measure(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    print(json.dumps({name: [dataclasses.asdict(one) for one in many] for name, many in result.windows.items()}))
