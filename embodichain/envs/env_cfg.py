"""The shape of a ``gym_config.json``: everything about an environment that a user can set."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from embodichain.config.classes import Config, Count, NotNegative, Number, Positive, configclass
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
    """How far joints start from where they are meant to start."""

    position: NotNegative = 0.0
    """Largest offset of each joint position, in radians or metres."""
    velocity: NotNegative = 0.0
    """Largest initial velocity of each joint."""


@configclass
class ScaleRangeCfg(Config):
    """A factor on a nominal value, drawn uniformly."""

    scale: PositiveRange = (1.0, 1.0)
    """Bounds of the factor."""


@configclass
class EventTermCfg(Config):
    """One event: a registered function, when it happens, and its parameters; see docs/randomization.md."""

    func: str
    """Registered name, such as ``mass`` or ``push``."""
    mode: Literal["reset", "interval", "step"] | None = None
    """At the start of an episode, every few seconds, or in every step; default: as the function is meant."""
    params: dict[str, Any] = {}
    """Parameters of the function."""
    interval_range_s: PositiveRange = (5.0, 10.0)
    """Seconds of simulated time between two events of mode ``interval``."""


@configclass
class EventsCfg(Config):
    """What is drawn anew when an episode starts, and happens while it lasts; ``null`` turns one off.

    In a file, ``{"func": NAME, ...}`` under any further name is one of ``terms``.
    """

    randomize_robot: JointRangeCfg | None = None
    """Offset of the robot's joints from ``robot.init_qpos``."""
    randomize_object_pose: PoseRangeCfg | None = None
    """Where the object starts."""
    randomize_target: PoseRangeCfg | None = None
    """Where the goal is."""
    randomize_friction: ScaleRangeCfg | None = None
    """Factor on the sliding friction of the object."""
    randomize_mass: ScaleRangeCfg | None = None
    """Factor on the mass (and inertia) of the object."""
    terms: dict[str, EventTermCfg | None] = {}
    """Events by a name of one's own: registered functions."""


def _few_first(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"expected [fewest, most] steps, got {list(bounds)}")
    return bounds


_Steps = Annotated[int, Field(ge=0, le=100)]
DelaySteps = Annotated[tuple[_Steps, _Steps], AfterValidator(_few_first)]
"""Fewest and most environment steps of a delay."""


@configclass
class NoiseCfg(Config):
    """Errors of an observation; they add up."""

    std: NotNegative = 0.0
    """Standard deviation of Gaussian noise, drawn in every step."""
    uniform: Range = (0.0, 0.0)
    """Bounds of uniform noise, drawn in every step."""
    bias: Range = (0.0, 0.0)
    """Bounds of an error that is drawn for the episode, for every number of the observation."""


@configclass
class ObservationTermCfg(Config):
    """One more observation: a registered function of what the task measures."""

    func: str
    """Name of the function, see ``envs/terms.py``."""
    params: dict[str, Any] = {}
    """Its parameters."""


@configclass
class RewardTermCfg(Config):
    """One term of the reward: a registered function of what the task measures."""

    func: str
    """Name of the function, see ``envs/terms.py``."""
    weight: Number = 1.0
    """Factor in the sum."""
    params: dict[str, Any] = {}
    """Its parameters."""


def _called_apart(cameras: list[CameraCfg]) -> list[CameraCfg]:
    names = [camera.name for camera in cameras]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two cameras are called {twice[0]!r}: names must differ")
    return cameras


@configclass
class ObservationsCfg(Config):
    """What is observed beyond the task's own vectors, and how well."""

    cameras: Annotated[list[CameraCfg], AfterValidator(_called_apart)] = []
    """Cameras to render at every step, observed as ``image/<name>``."""
    noise: dict[str, NotNegative | NoiseCfg] = {}
    """Errors by observation; ``{"robot/qpos": 0.01}`` is the standard deviation of Gaussian noise."""
    delay: dict[str, DelaySteps] = {}
    """Steps by which an observation is late, drawn for the episode: ``{"image/front": [0, 2]}``."""
    terms: dict[str, ObservationTermCfg | None] = {}
    """Further observations by path, such as ``{"cube/offset": {"func": "offset", ...}}``; ``null`` leaves one out."""


@configclass
class RewardsCfg(Config):
    """How the reward is put together."""

    mode: Literal["dense", "sparse"] = "dense"
    """``dense`` adds the weighted terms of the task; ``sparse`` is 1 in every step that ends in success, else 0."""
    weights: dict[str, Number] = {}
    """Weights of the task's reward terms that differ from its own."""
    terms: dict[str, RewardTermCfg | None] = {}
    """Further terms by name, such as ``{"reach": {"func": "near", "weight": 1.0, ...}}``; one with the name of a term
    of the task replaces it, and ``null`` leaves it out."""


@configclass
class LanguageCfg(Config):
    """Coloured goals, and the words that tell which of them is meant; the words are observed as ``instruction``."""

    colors: Annotated[tuple[Color, ...], AfterValidator(_distinct)] = ("red", "green", "blue")
    """Colours of the goals on the table."""
    phrases: Annotated[tuple[str, ...], Field(min_length=1)] = ("push the cube to the {color} target",)
    """Ways to say it, of which every episode draws one; ``{color}`` stands for the goal's colour."""
    length: Annotated[int, Field(ge=1, le=1024)] = 48
    """Bytes of the observation; shorter instructions end in zeros."""


@configclass
class VelocityCommandCfg(Config):
    """Velocities that a walking robot is told to have, in its own frame; drawn anew every few seconds."""

    forward: Range = (-0.6, 1.0)
    """Bounds of the velocity forwards, in m/s."""
    sideways: Range = (-0.4, 0.4)
    """Bounds of the velocity to the left, in m/s."""
    turning: Range = (-0.8, 0.8)
    """Bounds of the rate of turning to the left, in rad/s."""
    standing: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of commands to stand still."""
    interval: Positive = 5.0
    """Seconds between two commands; the first one is shorter, by a time that is drawn."""


@configclass
class JointTermCfg(Config):
    """Joint targets: ``qpos + scale * action`` (delta_qpos), or the action mapped to the joint limits (qpos)."""

    scale: Positive = 0.1
    """Radians per unit of action and step (delta_qpos); the most an expert asks for in one step (qpos)."""
    around: Literal["limits", "init"] = "limits"
    """What [-1, 1] means for qpos: all between the joint limits, or ``robot.init_qpos + scale * action`` (legs)."""
    clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Actions are limited to [-clip, clip]."""


@configclass
class EndEffectorTermCfg(Config):
    """Displacement of the tool per step, turned into joint targets by differential inverse kinematics."""

    scale: Positive = 0.03
    """Metres per unit of action and step."""
    rotation_scale: NotNegative = 0.0
    """Radians per unit; 0 leaves rotation out (3 actions) and holds the tool's starting orientation."""
    damping: Positive = 0.05
    """Damping of the least-squares inverse."""
    clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Actions are limited to [-clip, clip]."""


@configclass
class EffortTermCfg(Config):
    """The action goes to the motors, scaled to their control range."""

    clip: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Actions are limited to [-clip, clip]."""


@configclass
class ActionsCfg(Config):
    """How actions are understood: exactly one of these is set, and its name is the ``action_type``."""

    delta_qpos: JointTermCfg | None = None
    """Displacement of each joint."""
    qpos: JointTermCfg | None = None
    """Position of each joint, [-1, 1] spanning its limits, or a range around ``robot.init_qpos``."""
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
    """Seconds per physics step; default: the model's own. Twice as long with half the substeps is twice as fast."""
    success_threshold: Positive = 0.05
    """Distance to the goal, in metres, below which the task counts as solved; for commands, a relative error."""
    terminate_on_success: bool = True
    """Whether an episode ends as soon as the task is solved."""
    events: EventsCfg = EventsCfg()
    """What is drawn anew at the start of an episode."""
    observations: ObservationsCfg = ObservationsCfg()
    """Cameras and noise."""
    rewards: RewardsCfg = RewardsCfg()
    """Reward mode and weights."""
    actions: ActionsCfg = ActionsCfg()
    """The action term."""
    command: VelocityCommandCfg | None = None
    """Commanded velocities, for the tasks of walking robots."""
    curricula: Literal["follow", "final"] = "follow"
    """Whether ranges with a curriculum follow it, or are where it ends, as in evaluations."""
    scene: SceneCfg = SceneCfg()
    """Objects, fixtures, goals and cameras beside those of the task's scene file."""
    language: LanguageCfg | None = None
    """Goals and instructions, for the tasks that understand words."""


Axis = Literal["x", "y", "z", "-x", "-y", "-z"]
Vector3 = tuple[Number, Number, Number]


@configclass
class ArmCfg(Config):
    """One arm: a robot, what it holds and how it starts. What is left out is found out from its model."""

    uid: str | None = None
    """Name of a registered robot; ``mjcf`` goes before it."""
    mjcf: str | None = None
    """MJCF file of a robot of your own: relative to the config or the working directory, or
    ``package://NAME/path`` inside an installed Python package."""
    joints: list[str] = []
    """Joints of the arm, from the base to the tool; the other joints on the way are held where the model has them."""
    tool: str | None = None
    """What is mounted on the flange: the name of a registered tool, or an MJCF file."""
    flange: str | None = None
    """Site or body that the tool is mounted on."""
    tool_site: str | None = None
    """Site or body whose position counts as the tool's."""
    tool_axis: Axis | None = None
    """Axis of the tool site that points where the tool points."""
    gripper: list[str] | None = None
    """Joints of the fingers; an empty list means that there is no gripper."""
    gripper_open: Literal["low", "high"] | None = None
    """End of the control range at which the gripper is open."""
    limits: dict[str, Range] = {}
    """Lower and upper limits of joints, over those of the model."""
    servos: bool | None = None
    """Whether position servos take the place of the joints' motors; by default only joints without a motor get one."""
    servo_frequency: Annotated[float, Field(gt=0, le=200)] = 60.0
    """Stiffness of added servos as the natural frequency of the loaded joint, in radians per second."""
    gravity_compensation: bool | None = None
    """Whether the arm carries its own weight, as the controllers of real arms do; by default if it has servos."""
    walks: bool = False
    """Whether it is a robot with a free base that walks: ``joints`` are those of all legs (default: all that have a
    limit), the ends of its legs are its feet, and there is no tool. Joints without a motor get servos."""
    fix_base: bool = False
    """Whether a robot with a free base is bolted down where its model has it."""
    collisions: Literal["scene", "own"] = "scene"
    """``scene``: the hand touches objects and table, the links the table alone; ``own``: as the model says."""
    init_qpos: list[Number] = []
    """Positions of joints and fingers at the start of an episode; default: the model's keyframe ``home``, or its
    first one, else a posture in which the tool points down in front of the base."""
    init_tool: Vector3 | None = None
    """Where the tool starts, pointing down, instead of ``init_qpos``."""
    pos: Vector3 | None = None
    """Where the base stands, in metres."""
    yaw: Number | None = None
    """Heading of the base about the vertical, in radians."""
    quat: Rotation | None = None
    """Orientation of the base (w, x, y, z), instead of ``yaw``."""


@configclass
class RobotCfg(ArmCfg):
    """Which robot, with what in its hand, and how it starts; or several arms."""

    uid: str = "ur5"
    """Name of a registered robot; ``mjcf`` goes before it."""
    arms: dict[str, ArmCfg] = {}
    """Several arms by name, which take from here what they leave out. An arm that names ``uid``, ``mjcf``, ``pos``,
    ``yaw`` or ``quat`` is a robot of its own; others are parts of this robot's model."""


@configclass
class GymCfg(Config):
    """One environment: ``gym_config.json`` as a class."""

    id: str
    """Registered name of the task, or any Gymnasium id."""
    num_envs: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Number of copies stepped together."""
    max_episode_steps: Count | None = None
    """Length at which an episode is cut off; ``null`` leaves it to a Gymnasium environment's own limit."""
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    """Seed of all random streams; ``null`` takes one from the operating system."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d{1,3})?)$")] = "cpu"
    """``cpu``, or ``cuda`` for batched simulation on a GPU."""
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Simulation threads on the CPU; 0 takes every core this process may use."""
    env: EnvCfg = EnvCfg()
    """The task's settings."""
    robot: RobotCfg = RobotCfg()
    """The robot's settings."""
    asynchronous: bool = False
    """Whether a Gymnasium environment runs each copy in a process of its own."""
    native: bool = True
    """Whether Gymnasium's MuJoCo suite runs on batched physics; ``false`` takes Gymnasium's own environments."""
    kwargs: dict[str, Any] = {}
    """Arguments for the constructor of a Gymnasium environment (for ids that are not tasks of this package)."""


def mounted_cameras(cfg: GymCfg) -> tuple[CameraCfg, ...]:
    """Return the cameras that have to be part of the model: where it renders on a GPU, or differs from env to env."""
    differs = any(term is not None for term in cfg.env.events.terms.values())
    return tuple(cfg.env.observations.cameras) if differs or cfg.device != "cpu" else ()
