"""Offscreen frames per second of ``PushCubeRL``'s side camera, against MuJoCo's own renderer in the same run.

    python benchmarks/rendering.py --sizes 96 224 --seconds 1 --rounds 3

Every row runs in a fresh process, on the same states; the rows are gone through ``rounds`` times, interleaved, and the
median is printed with the lowest and highest value.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mujoco
import numpy as np
import tyro

from embodichain.envs.gl_backend import choose_backend
from embodichain.envs.registration import load_gym_config
from embodichain.envs.rendering import Load, Renderer
from embodichain.envs.tasks.push_cube import PushCube

Draw = Callable[[Load, Iterable[int]], object]
_CAMERA = "side"
_LEAN_OFF = ("SHADOW", "REFLECTION", "SKYBOX", "HAZE", "FOG")


@dataclass(frozen=True)
class Args:
    """What to measure."""

    sizes: tuple[int, ...] = (96, 224)
    """Heights (and widths) of the pictures in pixels."""
    seconds: float = 1.0
    """Length of one measurement."""
    rounds: int = 3
    """Number of measurements of each row."""
    batch: int = 16
    """Number of envs drawn in one call."""


def ours(model: mujoco.MjModel, size: int, quality: str) -> Draw:
    """Draw with ``Renderer``."""
    renderer = Renderer(model, (size, size), "high" if quality == "high" else "lean")
    return lambda load, ids: renderer.render(load, list(ids), _CAMERA)


def mujocos(model: mujoco.MjModel, size: int, quality: str) -> Draw:
    """Draw with ``mujoco.Renderer``, as it comes or with what costs most turned off."""
    if quality == "lean":
        model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
    renderer, data = mujoco.Renderer(model, size, size), mujoco.MjData(model)
    out = np.empty((size, size, 3), dtype=np.uint8)
    for flag in _LEAN_OFF if quality == "lean" else ():
        renderer.scene.flags[int(getattr(mujoco.mjtRndFlag, f"mjRND_{flag}"))] = 0

    def draw(load: Load, ids: Iterable[int]) -> None:
        for env in ids:
            load(data, env)
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera=_CAMERA)
            renderer.render(out=out)

    return draw


ROWS = {
    "mujoco.Renderer, as it comes": (mujocos, "default", "0"),
    "mujoco.Renderer, lean flags": (mujocos, "lean", "0"),
    "Renderer, high": (ours, "high", "0"),
    "Renderer, lean": (ours, "lean", "0"),
    "Renderer, lean, Mesa threads": (ours, "lean", str(os.cpu_count())),
}


def measure(row: str, size: int, args: Args, threads: str, answer: multiprocessing.Queue[float]) -> None:
    """Put the frames per second of one row into the queue."""
    os.environ["LP_NUM_THREADS"] = threads
    make_draw, quality, _ = ROWS[row]
    cfg = load_gym_config("PushCubeRL")
    model = PushCube.build_model(cfg)
    home = np.asarray(cfg.robot.init_qpos)

    def load(data: mujoco.MjData, env: int) -> None:
        data.qpos[7:] = home + 0.002 * env

    draw = make_draw(model, size, quality)
    draw(load, range(2))
    frames, start = 0, time.perf_counter()
    while time.perf_counter() - start < args.seconds:
        draw(load, range(args.batch))
        frames += args.batch
    answer.put(frames / (time.perf_counter() - start))


def main() -> None:
    """Measure all rows and print them."""
    args = tyro.cli(Args)
    backend = choose_backend()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {backend}, mujoco {mujoco.__version__}"
    )
    context = multiprocessing.get_context("spawn")
    for size in args.sizes:
        rates: dict[str, list[float]] = {row: [] for row in ROWS}
        for _ in range(args.rounds):
            for row, (_, _, threads) in ROWS.items():
                answer = context.Queue()
                process = context.Process(target=measure, args=(row, size, args, threads, answer))
                process.start()
                rates[row].append(answer.get(timeout=120))
                process.join()
        for row, values in rates.items():
            print(
                f"{size}x{size}  {row:<30} {statistics.median(values):8.0f}/s  [{min(values):.0f} .. {max(values):.0f}]"
            )


if __name__ == "__main__":
    main()
