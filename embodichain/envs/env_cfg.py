"""Config classes of ``gym_config.json``: everything about an environment that a user can set."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from embodichain.config.classes import Config, Count, Fraction, NotNegative, Number, Positive, configclass
from embodichain.envs.curricula import PositiveRange, Range
from embodichain.envs.scene_cfg import CameraCfg as CameraCfg
from embodichain.envs.scene_cfg import Color as Color
from embodichain.envs.scene_cfg import GoalCfg as GoalCfg
from embodichain.envs.scene_cfg import ObjectCfg as ObjectCfg
from embodichain.envs.scene_cfg import PoseRangeCfg as PoseRangeCfg
from embodichain.envs.scene_cfg import Rotation as Rotation
from embodichain.envs.scene_cfg import SceneCfg as SceneCfg
from embodichain.envs.scene_cfg import ViewCfg as ViewCfg


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or len(set(names)) != len(names):
        raise ValueError(f"expected at least one name, each once, got {list(names)}")
    return names


@configclass
class JointRangeCfg(Config):
    """Randomisation of the initial joint state."""

    position: NotNegative = 0.0
    """Maximum offset of each joint position, in radians or metres; joints stay within their limits."""
    velocity: NotNegative = 0.0
    """Maximum initial velocity of each joint, in rad/s or m/s."""


@configclass
class ScaleRangeCfg(Config):
    """A factor on a nominal value, sampled uniformly."""

    scale: PositiveRange = (1.0, 1.0)
    """Bounds of the factor."""


@configclass
class EventTermCfg(Config):
    """One event: a registered function, its mode and its parameters; see docs/randomization.md."""

    func: str
    """Registered name, such as ``mass`` or ``push``."""
    mode: Literal["reset", "interval", "step"] | None = None
    """At reset, at random intervals, or in every step; default: the function's own mode."""
    params: dict[str, Any] = {}
    """Parameters of the function."""
    interval_range_s: PositiveRange = (5.0, 10.0)
    """Seconds of simulated time between two events of mode ``interval``."""


@configclass
class EventsCfg(Config):
    """What is randomised at reset and during an episode; ``null`` turns an event off.

    In a file, ``{"func": NAME, ...}`` under any other name becomes one of ``terms``.
    """

    randomize_robot: JointRangeCfg | None = None
    """Offset of the robot's joints from ``robot.init_qpos``."""
    randomize_object_pose: PoseRangeCfg | None = None
    """Initial pose of the object."""
    randomize_target: PoseRangeCfg | None = None
    """Pose of the goal."""
    randomize_friction: ScaleRangeCfg | None = None
    """Factor on the sliding friction of the object."""
    randomize_mass: ScaleRangeCfg | None = None
    """Factor on the mass (and inertia) of the object."""
    demonstration_starts: Fraction | None = None
    """Fraction of episodes that start from a random state of the expert's demonstrations; none in evaluations."""
    terms: dict[str, EventTermCfg | None] = {}
    """Further events by a name of your choice, each a registered function."""


def _ordered_steps(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"expected [fewest, most] steps, got {list(bounds)}")
    return bounds


_Steps = Annotated[int, Field(ge=0, le=100)]
DelaySteps = Annotated[tuple[_Steps, _Steps], AfterValidator(_ordered_steps)]
"""Minimum and maximum delay in environment steps."""


@configclass
class NoiseCfg(Config):
    """Additive errors of an observation."""

    std: NotNegative = 0.0
    """Standard deviation of Gaussian noise, sampled in every step."""
    uniform: Range = (0.0, 0.0)
    """Bounds of uniform noise, sampled in every step."""
    bias: Range = (0.0, 0.0)
    """Bounds of a constant error, sampled per episode for every component of the observation."""


@configclass
class ObservationTermCfg(Config):
    """An additional observation: a registered function of the task's measurements."""

    func: str
    """Name of the function, see ``envs/terms.py``."""
    params: dict[str, Any] = {}
    """Parameters of the function."""


@configclass
class RewardTermCfg(Config):
    """A reward term: a registered function of the task's measurements."""

    func: str
    """Name of the function, see ``envs/terms.py``."""
    weight: Number = 1.0
    """Factor of the term in the sum."""
    params: dict[str, Any] = {}
    """Parameters of the function."""


def _unique_names(cameras: list[CameraCfg]) -> list[CameraCfg]:
    names = [camera.name for camera in cameras]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two cameras are called {twice[0]!r}: names must differ")
    return cameras


@configclass
class ObservationsCfg(Config):
    """Cameras, noise, delays and additional observations."""

    cameras: Annotated[list[CameraCfg], AfterValidator(_unique_names)] = []
    """Cameras to render at every step, observed as ``image/<name>``."""
    noise: dict[str, NotNegative | NoiseCfg] = {}
    """Errors by observation; a number, as in ``{"robot/qpos": 0.01}``, is the standard deviation of Gaussian noise."""
    delay: dict[str, DelaySteps] = {}
    """Delay of observations in steps, sampled per episode: ``{"image/front": [0, 2]}``."""
    terms: dict[str, ObservationTermCfg | None] = {}
    """Further observations by path, such as ``{"cube/offset": {"func": "offset", ...}}``; ``null`` removes one."""


@configclass
class RewardsCfg(Config):
    """Composition of the reward."""

    mode: Literal["dense", "sparse"] = "dense"
    """``dense`` is the weighted sum of the task's terms; ``sparse`` is 1 in every step with success, else 0."""
    weights: dict[str, Number] = {}
    """Weights that override those of the task, by reward term."""
    terms: dict[str, RewardTermCfg | None] = {}
    """Further terms by name, such as ``{"reach": {"func": "near", "weight": 1.0, ...}}``. A term of the task with the
    same name is replaced, and ``null`` removes it."""


@configclass
class LanguageCfg(Config):
    """Coloured goals and instructions that name one of them; observed as ``instruction``."""

    colors: Annotated[tuple[Color, ...], AfterValidator(_distinct)] = ("red", "green", "blue")
    """Colours of the goals on the table."""
    phrases: Annotated[tuple[str, ...], Field(min_length=1)] = ("push the cube to the {color} target",)
    """Templates of the instruction, one of which is sampled per episode; ``{color}`` is the colour of the goal."""
    length: Annotated[int, Field(ge=1, le=1024)] = 48
    """Bytes of the observation; shorter instructions are padded with zeros."""


@configclass
class VelocityCommandCfg(Config):
    """Velocity commands for a walking robot, in its own frame; resampled at intervals."""

    forward: Range = (-0.6, 1.0)
    """Bounds of the forward velocity, in m/s."""
    sideways: Range = (-0.4, 0.4)
    """Bounds of the lateral velocity (positive to the left), in m/s."""
    turning: Range = (-0.8, 0.8)
    """Bounds of the yaw rate (positive to the left), in rad/s."""
    standing: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of commands to stand still."""
    interval: Positive = 5.0
    """Seconds between two commands; the first interval is shortened at random."""


@configclass
class JointTermCfg(Config):
    """Joint targets: ``qpos + scale * action`` (delta_qpos), or the action mapped to the joint limits (qpos)."""

    scale: Positive = 0.1
    """Radians per unit of action and step (delta_qpos); the expert's maximum displacement per step (qpos)."""
    around: Literal["limits", "init"] = "limits"
    """Range of qpos for [-1, 1]: the joint limits, or ``robot.init_qpos + scale * action`` (legs)."""
    clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Actions are clipped to [-clip, clip]."""


@configclass
class EndEffectorTermCfg(Config):
    """Displacement of the tool per step, turned into joint targets by differential inverse kinematics."""

    scale: Positive = 0.03
    """Metres per unit of action and step."""
    rotation_scale: NotNegative = 0.0
    """Radians per unit of action and step; 0 means 3 actions without rotation, holding the initial orientation."""
    damping: Positive = 0.05
    """Damping of the least-squares inverse kinematics."""
    clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Actions are clipped to [-clip, clip]."""


@configclass
class EffortTermCfg(Config):
    """Motor commands, scaled to the control range of each motor."""

    clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Actions are clipped to [-clip, clip]."""


@configclass
class ActionsCfg(Config):
    """The action space: set exactly one term, whose name is the ``action_type``."""

    delta_qpos: JointTermCfg | None = None
    """Displacement of each joint."""
    qpos: JointTermCfg | None = None
    """Position of each joint; [-1, 1] spans its limits, or a range around ``robot.init_qpos``."""
    ee_delta: EndEffectorTermCfg | None = None
    """Displacement of the tool."""
    effort: EffortTermCfg | None = None
    """Force or torque of each motor."""


@configclass
class EnvCfg(Config):
    """The task: what is randomised, observed, rewarded and controlled."""

    substeps: Annotated[int, Field(ge=1, le=1000)] = 10
    """Physics steps per environment step."""
    timestep: Annotated[float, Field(gt=0, le=0.02)] | None = None
    """Seconds per physics step; default: the model's. Twice the timestep with half the substeps is twice as fast."""
    success_threshold: Positive = 0.05
    """Distance to the goal in metres below which the task is solved; for velocity commands, a relative error."""
    terminate_on_success: bool = True
    """Whether an episode terminates as soon as the task is solved."""
    events: EventsCfg = EventsCfg()
    """Randomisation at reset and during an episode."""
    observations: ObservationsCfg = ObservationsCfg()
    """Cameras, noise, delays and additional observations."""
    rewards: RewardsCfg = RewardsCfg()
    """Reward mode, weights and terms."""
    actions: ActionsCfg = ActionsCfg()
    """The action term."""
    command: VelocityCommandCfg | None = None
    """Velocity commands, for walking robots."""
    curricula: Literal["follow", "final"] = "follow"
    """Whether ranges follow their curriculum, or stay at its end (``final``), as in evaluations."""
    scene: SceneCfg = SceneCfg()
    """Objects, fixtures, goals and cameras in addition to those of the scene file."""
    language: LanguageCfg | None = None
    """Goals and instructions, for tasks that support language."""


Axis = Literal["x", "y", "z", "-x", "-y", "-z"]
Vector3 = tuple[Number, Number, Number]


@configclass
class ArmCfg(Config):
    """One arm: a robot, its tool and its initial posture. Omitted settings are inferred from the model."""

    uid: str | None = None
    """Name of a registered robot; ``mjcf`` takes precedence."""
    mjcf: str | None = None
    """MJCF file of your own robot: relative to the config or the working directory, or
    ``package://NAME/path`` inside an installed Python package."""
    joints: list[str] = []
    """Joints of the arm, from the base to the tool; other joints in between are fixed at their default positions."""
    tool: str | None = None
    """Tool mounted on the flange: the name of a registered tool, or an MJCF file."""
    flange: str | None = None
    """Site or body on which the tool is mounted."""
    tool_site: str | None = None
    """Site or body that defines the position of the tool."""
    tool_axis: Axis | None = None
    """Axis of the tool site along which the tool points."""
    gripper: list[str] | None = None
    """Joints of the fingers; an empty list means no gripper."""
    gripper_open: Literal["low", "high"] | None = None
    """End of the control range at which the gripper is open."""
    limits: dict[str, Range] = {}
    """Lower and upper limits of joints that override those of the model."""
    servos: bool | None = None
    """Whether position servos replace the joints' motors; by default, only joints without a motor get a servo."""
    servo_frequency: Annotated[float, Field(gt=0, le=200)] = 60.0
    """Stiffness of added servos as the natural frequency of the loaded joint, in rad/s."""
    gravity_compensation: bool | None = None
    """Whether gravity is compensated, as in the controllers of real arms; default: if the arm has servos."""
    walks: bool = False
    """Whether this is a walking robot with a free base: ``joints`` are those of all legs (default: all with limits),
    the ends of the legs are its feet, and it has no tool. Joints without a motor get servos."""
    fix_base: bool = False
    """Whether the free base of a robot is fixed at its pose in the model."""
    collisions: Literal["scene", "own"] = "scene"
    """``scene``: the hand collides with objects and table, the links with the table only; ``own``: as in the model."""
    init_qpos: list[Number] = []
    """Initial positions of joints and fingers; default: the model's keyframe ``home``, or its first one, else a posture
    in which the tool points down in front of the base."""
    init_tool: Vector3 | None = None
    """Initial position of the tool, pointing down, instead of ``init_qpos``."""
    pos: Vector3 | None = None
    """Position of the base, in metres."""
    yaw: Number | None = None
    """Yaw of the base, in radians."""
    quat: Rotation | None = None
    """Orientation of the base (w, x, y, z), instead of ``yaw``."""


@configclass
class RobotCfg(ArmCfg):
    """The robot, its tool and its initial posture; or several arms."""

    uid: str = "ur5"
    """Name of a registered robot; ``mjcf`` takes precedence."""
    arms: dict[str, ArmCfg] = {}
    """Several arms by name, which inherit omitted settings from here. An arm with ``uid``, ``mjcf``, ``pos``, ``yaw``
    or ``quat`` is a separate robot; the others are parts of this robot's model. An arm with another model inherits
    ``tool``, ``servos``, ``servo_frequency``, ``gravity_compensation``, ``fix_base`` and ``collisions`` only."""


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise ValueError(f"expected cpu, cuda or cuda:N, where N is the number of a GPU, got {name!r}")
    return name


@configclass
class GymCfg(Config):
    """One environment: the contents of ``gym_config.json``."""

    id: str
    """Registered name of the task, or any Gymnasium id."""
    num_envs: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Number of copies stepped together."""
    max_episode_steps: Count | None = None
    """Steps after which an episode is truncated; ``null`` keeps the limit of a Gymnasium environment."""
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    """Seed of all random streams; ``null`` draws one from the operating system."""
    device: Annotated[str, AfterValidator(_device)] = "cpu"
    """``cpu``, or ``cuda`` for batched simulation on a GPU."""
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Simulation threads on the CPU; 0 uses all available cores."""
    env: EnvCfg = EnvCfg()
    """The task's settings."""
    robot: RobotCfg = RobotCfg()
    """The robot's settings."""
    asynchronous: bool = False
    """Whether each copy of a Gymnasium environment runs in its own process."""
    native: bool = True
    """Whether Gymnasium's MuJoCo suite runs on batched physics; ``false`` uses Gymnasium's own environments."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of a Gymnasium environment (for ids that are not tasks of this package)."""


def mounted_cameras(cfg: GymCfg) -> tuple[CameraCfg, ...]:
    """Return the cameras to compile into the model: all, if it renders on a GPU or differs between envs."""
    differs = any(term is not None for term in cfg.env.events.terms.values())
    return tuple(cfg.env.observations.cameras) if differs or cfg.device != "cpu" else ()
