"""Builds the MuJoCo model of a task: scene, robot, objects, fixtures, goals and cameras.

``robot_adaptation.py`` adapts robot files. Once the model is compiled, ``scenes.py`` places and measures the things of
``env.scene``.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mujoco

from embodichain.envs.env_cfg import GymCfg, RobotCfg, mounted_cameras
from embodichain.envs.fixtures import COLORS, add_fixture
from embodichain.envs.model_files import ASSETS, check_finite, find_file, mesh_centre, read_spec, take_settings
from embodichain.envs.physics import Physics
from embodichain.envs.postures import base_pose
from embodichain.envs.randomization import prepare_spec
from embodichain.envs.rendering import Cameras, looking, mount_cameras
from embodichain.envs.robot_adaptation import adapted, describe
from embodichain.envs.robot_files import split_robot
from embodichain.envs.robots import Robot
from embodichain.envs.scene_cfg import CameraCfg, Color, GoalCfg, ObjectCfg, PoseRangeCfg, SceneCfg, ViewCfg
from embodichain.envs.scenes import PlacedScene, things, turned
from embodichain.envs.task import Task
from embodichain.errors import AssetError, ConfigError, nearest

_GEOM = mujoco.mjtGeom
_SHAPES = {
    "box": (_GEOM.mjGEOM_BOX, 3),
    "sphere": (_GEOM.mjGEOM_SPHERE, 1),
    "cylinder": (_GEOM.mjGEOM_CYLINDER, 2),
    "capsule": (_GEOM.mjGEOM_CAPSULE, 2),
    "disc": (_GEOM.mjGEOM_CYLINDER, 1),
    "mesh": (_GEOM.mjGEOM_MESH, 1),
}
_DISC = 0.001  # half height of a goal marker on the table, in metres
# Collision bits as in table.xml: 1 tools, 2 objects, 4 the table. Objects also collide with each other.
_OBJECT, _TOUCHES = 2, 6
_TOUCHED = 3  # what collides with a fixed object


class SceneBuilder:
    """Builds models from a task's ``scene_file``, ``robot`` and ``env.scene``."""

    @staticmethod
    def build_model(task: type[Task], cfg: GymCfg) -> mujoco.MjModel:
        """Compile the scene with the configured robot in it."""
        scene = cfg.env.scene

        def finish(spec: mujoco.MjSpec) -> None:
            add_views(spec, scene)
            prepare_spec(cfg.env.events, spec)

        model = build_model(_scene_path(task), cfg.robot, mounted_cameras(cfg), partial(furnish, cfg=scene), finish)
        if cfg.env.timestep is not None:
            model.opt.timestep = cfg.env.timestep
        return model

    @staticmethod
    def find_robot(cfg: GymCfg, physics: Physics) -> Robot:
        """Return the robot in the model."""
        return Robot(physics.model, describe(cfg.robot), physics.device)

    @staticmethod
    def place_scene(cfg: GymCfg, physics: Physics) -> PlacedScene:
        """Return the things of ``env.scene`` in the model."""
        return PlacedScene(cfg.env.scene, physics)

    @staticmethod
    def open_cameras(cfg: GymCfg, model: mujoco.MjModel, varied: bool) -> Cameras:
        """Return the cameras of the model and of the observations."""
        return Cameras(model, cfg.env.observations.cameras, varied)


def _scene_path(task: type[Task]) -> Path:
    """Return the path of a task's ``scene_file``, relative to the module of the class that defines it."""
    owner = next(base for base in task.__mro__ if "scene_file" in vars(base))
    module = getattr(sys.modules.get(owner.__module__), "__file__", None)
    beside = Path(module or ".").resolve().parent / task.scene_file
    found = next((path for path in (beside, ASSETS / task.scene_file) if path.is_file()), None)
    if found is None:
        places = f"{beside.parent}, beside its module, nor in {ASSETS}"
        raise AssetError(f"the scene {task.scene_file!r} of {task.__name__} is neither in {places}")
    return found


def build_model(
    scene: str | Path,
    robot: RobotCfg,
    cameras: Sequence[CameraCfg] = (),
    furnish: Callable[[mujoco.MjSpec], None] | None = None,
    finish: Callable[[mujoco.MjSpec], None] | None = None,
) -> mujoco.MjModel:
    """Compile a scene (a file of ``assets/``, or a path) with the robot, its tool and ``cameras``.

    ``furnish`` adds to the scene before the robot is attached, and ``finish`` afterwards.
    """
    spec = read_spec(ASSETS / scene)
    if furnish is not None:
        furnish(spec)
    add_robot(spec, robot)
    if finish is not None:
        finish(spec)
    try:
        model = mount_cameras(spec, cameras) if cameras else spec.compile()
    except ValueError as error:
        raise AssetError(
            f"{scene} with robot {robot.mjcf or robot.uid!r} and tool {robot.tool!r} does not compile: {error}"
        ) from error
    check_finite(model, str(scene))
    return model


def add_robot(spec: mujoco.MjSpec, robot: RobotCfg) -> None:
    """Attach the robot of a config, with all its arms, to a scene."""
    for part in split_robot(robot):
        child, _ = adapted(part)
        take_settings(child, spec)
        pos, quat = base_pose(part.cfg)
        spec.attach(child, frame=spec.worldbody.add_frame(pos=pos, quat=quat), prefix=part.prefix)


def furnish(spec: mujoco.MjSpec, cfg: SceneCfg) -> None:
    """Add the objects, fixtures and goals of ``env.scene`` to a model that is not compiled yet."""
    kinds = {"body": spec.bodies, "geom": spec.geoms, "site": spec.sites, "joint": spec.joints, "mesh": spec.meshes}
    taken = {part.name: kind for kind, parts in reversed(kinds.items()) for part in parts}
    for name, thing in things(cfg).items():
        known = next((part for part in (name, f"{name}_mesh") if part in taken), None)
        if known is not None:
            kind = taken[known]
            raise ConfigError(f"env.scene: the scene of this task has a {kind} {known!r} already; choose another name")
        if isinstance(thing, ObjectCfg):
            _add_object(spec, name, thing)
        elif isinstance(thing, GoalCfg):
            _add_goal(spec, name, thing)
        else:
            add_fixture(spec, name, thing)


def add_views(spec: mujoco.MjSpec, cfg: SceneCfg) -> None:
    """Add the cameras of ``env.scene`` to a model with all its bodies; a camera of the same name is replaced."""
    for name, view in cfg.cameras.items():
        if view is not None:
            _add_view(spec, name, view)


def _add_view(spec: mujoco.MjSpec, name: str, view: ViewCfg) -> None:
    body = spec.worldbody if view.body is None else spec.body(view.body)
    if body is None:
        bodies = [body.name for body in spec.bodies]
        raise ConfigError(
            f"env.scene.cameras.{name}.body: no such body {view.body!r}.{nearest(view.body or '', bodies)}"
        )
    old = next((camera for camera in spec.cameras if camera.name == name), None)
    if old is not None:
        spec.delete(old)
    body.add_camera(name=name, pos=list(view.pos), quat=looking(view.pos, view.lookat), fovy=view.fovy)


def _add_object(spec: mujoco.MjSpec, name: str, cfg: ObjectCfg) -> None:
    kind, numbers = _SHAPES[cfg.shape]
    size, key = list(cfg.size), f"env.scene.objects.{name}"
    if cfg.shape == "box" and len(size) == 1:
        size *= 3
    if len(size) != numbers and cfg.shape != "mesh":
        raise ConfigError(f"{key}.size: a {cfg.shape} has {numbers} numbers, got {len(size)}")
    if (cfg.file is None) == (cfg.shape == "mesh"):
        raise ConfigError(f"{key}.file: expected a file for the shape 'mesh', and for no other")
    body = spec.worldbody.add_body(name=name, mocap=cfg.fixed, pos=_middle(cfg.pose), quat=turned(cfg))
    shape: dict[str, Any] = {"type": kind, "size": [*size, 0.0, 0.0][:3]}
    if cfg.file is not None:
        spec.add_mesh(name=f"{name}_mesh", file=str(find_file(cfg.file)), scale=[cfg.scale] * 3)
        shape = {"type": kind, "meshname": f"{name}_mesh", "pos": -cfg.scale * mesh_centre(cfg.file, f"{key}.file")}
    if not cfg.fixed:
        body.add_freejoint(name=name)
    rolls = cfg.shape in ("sphere", "cylinder", "capsule")  # rolling friction brings them to rest
    bits = (0, _TOUCHED) if cfg.fixed else (_OBJECT, _TOUCHES)
    contype, conaffinity = bits if cfg.collides else (0, 0)
    body.add_geom(
        name=name,
        **shape,
        mass=cfg.mass,
        contype=contype,
        conaffinity=conaffinity,
        condim=6 if rolls else 4,
        friction=[cfg.friction, 0.01, 0.001 if rolls else 0.0005],
        rgba=_rgba(cfg.color),
    )


def _add_goal(spec: mujoco.MjSpec, name: str, cfg: GoalCfg) -> None:
    kind, _ = _SHAPES[cfg.shape]
    size = {"disc": [cfg.size, _DISC, 0.0], "sphere": [cfg.size, 0.0, 0.0], "box": [cfg.size] * 3}[cfg.shape]
    body = spec.worldbody.add_body(name=name, mocap=True, pos=_middle(cfg.pose))
    body.add_geom(name=name, type=kind, size=size, contype=0, conaffinity=0, mass=0.0, rgba=_rgba(cfg.color))


def _middle(area: PoseRangeCfg) -> list[float]:
    return [0.5 * (low + high) for low, high in (area.x, area.y, area.z)]


def _rgba(color: Color | tuple[float, ...]) -> list[float]:
    return [*color, 1.0][:4] if isinstance(color, tuple) else list(COLORS[color])
