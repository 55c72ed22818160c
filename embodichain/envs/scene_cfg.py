"""The shape of ``env.scene``: objects, goals, views and fixtures that a config places; and of cameras that observe."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from embodichain.config.classes import MISSING, Config, Fraction, NotNegative, Number, Positive, configclass
from embodichain.envs.curricula import Range
from embodichain.errors import ConfigError, nearest

Color = Literal["red", "green", "blue", "yellow"]


@configclass
class PoseRangeCfg(Config):
    """A box of positions in metres, and of headings in radians, to draw from uniformly."""

    x: Range = (0.0, 0.0)
    """Bounds of the x coordinate."""
    y: Range = (0.0, 0.0)
    """Bounds of the y coordinate."""
    z: Range = (0.0, 0.0)
    """Bounds of the z coordinate (ignored for what rests on the table)."""
    yaw: Range = (0.0, 0.0)
    """Bounds of the heading about the vertical."""


def _rotation(quat: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    if sum(value * value for value in quat) < 1e-12:
        raise ValueError("expected a rotation (w, x, y, z)")
    return quat


Rotation = Annotated[tuple[Number, Number, Number, Number], AfterValidator(_rotation)]
"""Orientation as a quaternion (w, x, y, z), of any length but 0."""
Rgba = Annotated[tuple[Fraction, ...], Field(min_length=3, max_length=4)]
ThingName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
"""Name of something in a scene."""


_LARGEST = 1000.0  # metres of something that a scene can hold


def _holdable(size: tuple[float, ...]) -> tuple[float, ...]:
    if max(size) > _LARGEST:
        raise ValueError(f"expected at most {_LARGEST:g} metres, got {list(size)}")
    return size


@configclass
class ObjectCfg(Config):
    """A thing in the scene: it lies on the table and can be moved, unless it is ``fixed``."""

    shape: Literal["box", "sphere", "cylinder", "capsule", "mesh"] = "box"
    """Its shape."""
    size: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=3), AfterValidator(_holdable)] = (0.025,)
    """In metres, as in MJCF: half lengths of a box (one: a cube); radius; radius and half length."""
    file: str | None = None
    """Mesh of the shape ``mesh`` (obj, stl, msh); it collides as its convex hull."""
    scale: Positive = 1.0
    """Factor on a mesh."""
    mass: Positive = 0.15
    """Mass in kg."""
    friction: NotNegative = 0.8
    """Sliding friction."""
    color: Color | Rgba = (0.6, 0.6, 0.62)
    """Its colour: a name, or red, green, blue and perhaps opacity from 0 to 1."""
    pose: PoseRangeCfg = PoseRangeCfg(x=(0.5, 0.5))
    """Where it starts: its middle in x and y, the height of its lowest point, and its heading."""
    quat: Rotation = (1.0, 0.0, 0.0, 0.0)
    """How it is turned before its heading: a lying cylinder has (0.7071, 0.7071, 0, 0)."""
    min_distance: NotNegative = 0.0
    """Least distance, in the plane, from the middle of everything placed before it (fixtures, objects, goals)."""
    fixed: bool = False
    """Whether nothing can move it: an obstacle."""
    collides: bool = True
    """Whether it touches anything; otherwise it is only seen."""
    observe: bool = True
    """Whether it is observed as ``<name>/pos``, ``quat``, ``linvel`` and ``offset`` from the tool."""


@configclass
class GoalCfg(Config):
    """A place, marked for the eye."""

    shape: Literal["disc", "sphere", "box"] = "sphere"
    """Shape of the mark."""
    size: Annotated[float, Field(gt=0, le=_LARGEST)] = 0.02
    """Radius, or half length, of the mark in metres."""
    color: Color | Rgba = (0.2, 0.7, 0.3, 0.6)
    """Colour of the mark."""
    pose: PoseRangeCfg = PoseRangeCfg(x=(0.5, 0.5))
    """Where it is."""
    min_distance: NotNegative = 0.0
    """Least distance, in the plane, from the middle of everything placed before it (fixtures, objects, goals)."""
    observe: bool = True
    """Whether it is observed as ``<name>/pos``."""


@configclass
class ViewCfg(Config):
    """A camera of the scene, which ``env.render`` and ``env.observations.cameras`` know by its name."""

    pos: tuple[Number, Number, Number]
    """Where it is: in the world, or in the frame of ``body``."""
    lookat: tuple[Number, Number, Number]
    """Point that it has in the middle of its image, in the same frame."""
    fovy: Annotated[float, Field(gt=0, lt=180)] = 45.0
    """Vertical field of view in degrees."""
    body: str | None = None
    """Body that carries it, such as ``robot/tool/gripper``; default: none, it stands still."""

    @model_validator(mode="after")
    def _check_direction(self) -> Self:
        if self.pos == self.lookat:
            raise ValueError(f"lookat must differ from pos, got {self.pos} for both")
        return self


@configclass
class FixtureCfg(Config):
    """Where a fixture stands, unless a reset tells."""

    pos: tuple[Number, Number, Number] = (0.7, 0.0, 0.0)
    """Where the middle of its footprint is."""
    yaw: Number = 0.0
    """Its heading in radians; at 0 its front looks along -x."""
    pose: PoseRangeCfg | None = None
    """Where it stands is drawn from here when an episode begins, instead of ``pos`` and ``yaw``."""
    min_distance: NotNegative = 0.0
    """Least distance, in the plane, from the middle of everything placed before it."""
    observe: bool = True
    """Whether it is observed as ``<name>/pos`` and so on, and its parts as ``<name>_<part>/joint`` and ``pos``."""


@configclass
class HandleCfg(Config):
    """A bar on two posts."""

    length: Positive = 0.1
    """Length of the bar in metres."""
    radius: Positive = 0.009
    """Radius of the bar."""
    standoff: Positive = 0.05
    """Distance of the bar's axis from the front."""


@configclass
class DrawersCfg(FixtureCfg):
    """A cabinet with drawers above each other, ``drawer_0`` at the bottom, that slide out towards -x."""

    kind: Literal["drawer"] = "drawer"
    """Says that this is a cabinet with drawers."""
    drawers: Annotated[int, Field(ge=1, le=6)] = 3
    """How many."""
    size: tuple[Positive, Positive, Positive] = (0.24, 0.32, 0.11)
    """Depth and width of the cabinet, and height of one drawer."""
    travel: Positive = 0.18
    """How far a drawer comes out."""
    base: NotNegative = 0.04
    """Height of the plinth below the lowest drawer."""
    handle: HandleCfg = HandleCfg()
    """The handles; they are horizontal."""
    colors: tuple[Color, ...] = ()
    """Colours of the handles, from the bottom; those that are not named are of metal."""
    mass: Positive = 0.6
    """Mass of one drawer in kg."""
    damping: NotNegative = 6.0
    """Force per speed that brakes a drawer."""
    friction: NotNegative = 1.0
    """Force in newtons below which a drawer does not move."""


@configclass
class DoorCfg(FixtureCfg):
    """A cabinet with a hinged door, ``door``, that opens towards -x."""

    kind: Literal["door"] = "door"
    """Says that this is a cabinet with a door."""
    size: tuple[Positive, Positive, Positive] = (0.22, 0.32, 0.36)
    """Depth, width and height of the cabinet."""
    base: NotNegative = 0.04
    """Height of the plinth."""
    hinge: Literal["left", "right"] = "left"
    """Side of the hinges, as the robot sees it: left is +y."""
    angle: Annotated[float, Field(gt=0, le=3.0)] = 1.8
    """How far the door opens, in radians."""
    handle: HandleCfg = HandleCfg(length=0.12)
    """The handle; it is vertical."""
    mass: Positive = 0.8
    """Mass of the door in kg."""
    damping: NotNegative = 0.4
    """Torque per angular speed that brakes the door."""
    friction: NotNegative = 0.1
    """Torque in newton metres below which the door does not move."""


@configclass
class ButtonsCfg(FixtureCfg):
    """A console with push buttons in a row, ``button_0`` at the left, that are pressed down and spring back."""

    kind: Literal["button"] = "button"
    """Says that these are buttons."""
    colors: Annotated[tuple[Color, ...], Field(min_length=1, max_length=8)] = ("red",)
    """Colours of the buttons, from left to right."""
    radius: Positive = 0.03
    """Radius of a button."""
    spacing: Positive = 0.1
    """Distance of two buttons."""
    height: Positive = 0.05
    """Height of the console."""
    travel: Positive = 0.016
    """How far a button can be pressed."""
    stiffness: NotNegative = 400.0
    """Force per travel of the spring."""
    damping: NotNegative = 12.0
    """Force per speed that brakes a button."""


@configclass
class HoleCfg(FixtureCfg):
    """A block with a square, vertical hole."""

    kind: Literal["hole"] = "hole"
    """Says that this is a block with a hole."""
    width: Positive = 0.03
    """Width of the hole."""
    depth: Positive = 0.06
    """Depth of the hole, which is the height of the block."""
    size: Positive = 0.12
    """Width of the block."""
    friction: NotNegative = 0.2
    """Sliding friction of its walls."""


@configclass
class BinCfg(FixtureCfg):
    """An open box to put things into."""

    kind: Literal["bin"] = "bin"
    """Says that this is a bin."""
    size: tuple[Positive, Positive, Positive] = (0.16, 0.16, 0.06)
    """Length, width and height, outside."""
    wall: Positive = 0.008
    """Thickness of its walls and its floor."""
    color: Color | None = None
    """Colour of its walls; default: that of wood."""


@configclass
class PegCfg(Config):
    """A round peg with rounded ends: a free object whose z axis is the peg's."""

    kind: Literal["peg"] = "peg"
    """Says that this is a peg."""
    radius: Positive = 0.012
    """Radius in metres."""
    length: Positive = 0.12
    """Length from end to end."""
    mass: Positive = 0.08
    """Mass in kg."""
    color: Color = "yellow"
    """Its colour."""
    pos: tuple[Number, Number, Number] = (0.5, 0.0, 0.06)
    """Where its middle is in the model."""
    pose: PoseRangeCfg | None = None
    """Where it starts is drawn from here when an episode begins: its middle, height of its lowest point, heading."""
    min_distance: NotNegative = 0.0
    """Least distance, in the plane, from the middle of everything placed before it."""
    observe: bool = True
    """Whether it is observed as ``<name>/pos`` and so on."""


Fixture: TypeAlias = DrawersCfg | DoorCfg | ButtonsCfg | HoleCfg | BinCfg | PegCfg
_KINDS: dict[str, Any] = {cfg.kind: cfg for cfg in (DrawersCfg, DoorCfg, ButtonsCfg, HoleCfg, BinCfg, PegCfg)}


def fixture_cfg(given: Any) -> Fixture | None:
    """Return the config of a fixture, of the kind that a mapping names; ``None`` for ``null``."""
    if given is None or type(given) in _KINDS.values():
        return given
    kind = given.get("kind") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"kind: unknown kind of fixture {kind!r}.{nearest(str(kind), _KINDS)}")
    return _KINDS[kind].from_dict(given)


@configclass
class SceneCfg(Config):
    """What is in the scene beside the robot, by name; ``null`` leaves out a thing of the task's own config."""

    objects: dict[ThingName, ObjectCfg | None] = {}
    """Things that lie on the table."""
    fixtures: dict[ThingName, Annotated[Any, PlainValidator(fixture_cfg)]] = {}
    """Things that stand fast, some with parts that move, such as ``{"kind": "drawer"}``: see above."""
    goals: dict[ThingName, GoalCfg | None] = {}
    """Marked places."""
    cameras: dict[ThingName, ViewCfg | None] = {}
    """Further cameras; one of an existing name replaces it."""

    @property
    def empty(self) -> bool:
        """Whether it describes nothing."""
        return not (self.objects or self.fixtures or self.goals or self.cameras)


Output = Literal["rgb", "depth", "segmentation"]
OBSERVED_AS: dict[Output, str] = {"rgb": "image", "depth": "depth", "segmentation": "segmentation"}
"""The group of observations in which an output of a camera is found, under the camera's name."""
Pixels = Annotated[int, Field(gt=0, le=8192)]
Vector = tuple[float, float, float]


def _plain_name(name: str) -> str:
    if not name or "/" in name or name != name.strip():
        raise ValueError(f"expected a name without slashes (attach names a camera of the model), got {name!r}")
    return name


def _distinct(outputs: tuple[Output, ...]) -> tuple[Output, ...]:
    if len(set(outputs)) < len(outputs):
        raise ValueError(f"each output is given once, got {', '.join(outputs)}")
    return outputs


@configclass
class CameraCfg(Config):
    """One camera: either one of the model (``attach``) or one that stands at ``pos`` and looks at ``lookat``."""

    name: Annotated[str, AfterValidator(_plain_name)] = MISSING
    """Name of the camera, without slashes; its images are observed as ``image/<name>``."""
    outputs: Annotated[tuple[Output, ...], Field(min_length=1), AfterValidator(_distinct)] = ("rgb",)
    """What is observed: ``rgb`` (uint8 ``image/<name>`` ``[H, W, 3]``), ``depth`` (float32 metres along the view
    direction, ``depth/<name>`` ``[H, W, 1]``), ``segmentation`` (int32 ids of bodies, ``segmentation/<name>``
    ``[H, W, 1]``; ``env.segmentation_names`` has the name of each id)."""
    width: Pixels = 96
    """Width of the image in pixels."""
    height: Pixels = 96
    """Height of the image in pixels."""
    attach: str | None = None
    """Camera of the model to look through; without ``pos``, the one called ``name``."""
    pos: Vector | None = None
    """Where a free camera stands, in metres."""
    lookat: Vector | None = None
    """Point that a free camera has in the middle of its image."""
    fovy: Annotated[float, Field(gt=0, lt=180)] | None = None
    """Vertical field of view in degrees; default: the camera's own."""
    near: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Least depth in metres: what is nearer has this depth."""
    far: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Largest depth in metres: that of everything farther away, and of the background."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.near >= self.far:
            raise ValueError(f"far must be larger than near, got near {self.near} and far {self.far}")
        if (self.pos is None) != (self.lookat is None):
            raise ValueError("pos and lookat belong together: give both for a free camera, or neither")
        if self.pos is not None and self.attach is not None:
            raise ValueError("expected either attach (a camera of the model) or pos and lookat, got both")
        if self.pos is not None and self.pos == self.lookat:
            raise ValueError(f"lookat must differ from pos, got {self.pos} for both")
        return self
