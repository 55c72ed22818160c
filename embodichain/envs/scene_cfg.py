"""Config classes of ``env.scene`` (objects, fixtures, goals, views) and of cameras that observe."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from embodichain.config.classes import MISSING, Config, Fraction, NotNegative, Number, Positive, configclass, shorten
from embodichain.envs.curricula import Range
from embodichain.errors import ConfigError, nearest

Color = Literal["red", "green", "blue", "yellow"]


@configclass
class PoseRangeCfg(Config):
    """Ranges of positions in metres and headings in radians, sampled uniformly."""

    x: Range = (0.0, 0.0)
    """Bounds of the x coordinate."""
    y: Range = (0.0, 0.0)
    """Bounds of the y coordinate."""
    z: Range = (0.0, 0.0)
    """Bounds of the z coordinate (ignored for objects that rest on the table)."""
    yaw: Range = (0.0, 0.0)
    """Bounds of the yaw."""


def _rotation(quat: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    if sum(value * value for value in quat) < 1e-12:
        raise ValueError("expected a rotation (w, x, y, z)")
    return quat


Rotation = Annotated[tuple[Number, Number, Number, Number], AfterValidator(_rotation)]
"""Orientation as a quaternion (w, x, y, z) of any nonzero length."""
Rgba = Annotated[tuple[Fraction, ...], Field(min_length=3, max_length=4)]


def _thing_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise ValueError(f"expected a name of letters, digits and _ that begins with a letter, got {name!r}")
    return name


ThingName = Annotated[str, AfterValidator(_thing_name)]
"""Name of a thing in a scene."""


_LARGEST = 1000.0  # maximum size in metres


def _limited_size(size: tuple[float, ...]) -> tuple[float, ...]:
    if max(size) > _LARGEST:
        raise ValueError(f"expected at most {_LARGEST:g} metres, got {list(size)}")
    return size


@configclass
class ObjectCfg(Config):
    """An object on the table, which can be moved unless it is ``fixed``."""

    shape: Literal["box", "sphere", "cylinder", "capsule", "mesh"] = "box"
    """Shape of the object."""
    size: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=3), AfterValidator(_limited_size)] = (0.025,)
    """In metres, as in MJCF: box: half lengths (one number: a cube); sphere: radius; others: radius and half length."""
    file: str | None = None
    """Mesh file of the shape ``mesh`` (obj, stl, msh); it collides as its convex hull."""
    scale: Positive = 1.0
    """Scale of the mesh."""
    mass: Positive = 0.15
    """Mass in kg."""
    friction: NotNegative = 0.8
    """Sliding friction."""
    color: Color | Rgba = (0.6, 0.6, 0.62)
    """Colour: a name, or red, green, blue and optionally opacity, each from 0 to 1."""
    pose: PoseRangeCfg = PoseRangeCfg(x=(0.5, 0.5))
    """Initial pose: x and y of its centre, height of its lowest point, and yaw."""
    quat: Rotation = (1.0, 0.0, 0.0, 0.0)
    """Orientation before the yaw is applied: (0.7071, 0.7071, 0, 0) lays a cylinder on its side."""
    min_distance: NotNegative = 0.0
    """Minimum distance in the plane from the centre of everything placed before it (fixtures, objects, goals)."""
    fixed: bool = False
    """Whether it is a static obstacle."""
    collides: bool = True
    """Whether it collides; otherwise it is only visible."""
    observe: bool = True
    """Whether it is observed as ``<name>/pos``, ``quat``, ``linvel`` and ``offset`` (from the tool)."""


@configclass
class GoalCfg(Config):
    """A goal position with a visual marker."""

    shape: Literal["disc", "sphere", "box"] = "sphere"
    """Shape of the marker."""
    size: Annotated[float, Field(gt=0, le=_LARGEST)] = 0.02
    """Radius or half length of the marker, in metres."""
    color: Color | Rgba = (0.2, 0.7, 0.3, 0.6)
    """Colour of the marker."""
    pose: PoseRangeCfg = PoseRangeCfg(x=(0.5, 0.5))
    """Pose of the goal."""
    min_distance: NotNegative = 0.0
    """Minimum distance in the plane from the centre of everything placed before it (fixtures, objects, goals)."""
    observe: bool = True
    """Whether it is observed as ``<name>/pos``."""


@configclass
class ViewCfg(Config):
    """A named camera of the scene, for ``env.render`` and ``env.observations.cameras``."""

    pos: tuple[Number, Number, Number]
    """Position in the world, or in the frame of ``body``."""
    lookat: tuple[Number, Number, Number]
    """Point at the centre of the image, in the same frame."""
    fovy: Annotated[float, Field(gt=0, lt=180)] = 45.0
    """Vertical field of view in degrees."""
    body: str | None = None
    """Body to which the camera is attached, such as ``robot/tool/gripper``; default: fixed in the world."""

    @model_validator(mode="after")
    def _check_direction(self) -> Self:
        if self.pos == self.lookat:
            raise ValueError(f"lookat must differ from pos, got {self.pos} for both")
        return self


@configclass
class FixtureCfg(Config):
    """Pose of a fixture."""

    pos: tuple[Number, Number, Number] = (0.7, 0.0, 0.0)
    """Position of the centre of its footprint, in metres."""
    yaw: Number = 0.0
    """Yaw in radians; at 0 its front faces -x."""
    pose: PoseRangeCfg | None = None
    """Range from which its pose is sampled at reset, instead of ``pos`` and ``yaw``."""
    min_distance: NotNegative = 0.0
    """Minimum distance in the plane from the centre of everything placed before it."""
    observe: bool = True
    """Whether it is observed as ``<name>/pos`` and ``quat``, and its parts as ``<name>_<part>/joint`` and ``pos``."""


@configclass
class HandleCfg(Config):
    """A bar on two posts."""

    length: Positive = 0.1
    """Length of the bar in metres."""
    radius: Positive = 0.009
    """Radius of the bar."""
    standoff: Positive = 0.05
    """Distance of the bar's axis from the front, in metres."""


@configclass
class DrawersCfg(FixtureCfg):
    """A cabinet with stacked drawers, ``drawer_0`` at the bottom, that slide out towards -x."""

    kind: Literal["drawer"] = "drawer"
    """Selects a cabinet with drawers."""
    drawers: Annotated[int, Field(ge=1, le=6)] = 3
    """Number of drawers."""
    size: tuple[Positive, Positive, Positive] = (0.24, 0.32, 0.11)
    """Depth and width of the cabinet, and height of one drawer, in metres."""
    travel: Positive = 0.18
    """Travel of a drawer, in metres."""
    base: NotNegative = 0.04
    """Height of the plinth below the lowest drawer, in metres."""
    handle: HandleCfg = HandleCfg()
    """The horizontal handles."""
    colors: tuple[Color, ...] = ()
    """Colours of the handles from bottom to top; the others look like metal."""
    mass: Positive = 0.6
    """Mass of one drawer in kg."""
    damping: NotNegative = 6.0
    """Damping of a drawer, in N s/m."""
    friction: NotNegative = 1.0
    """Friction of a drawer, in newtons."""


@configclass
class DoorCfg(FixtureCfg):
    """A cabinet with a hinged door, ``door``, that opens towards -x."""

    kind: Literal["door"] = "door"
    """Selects a cabinet with a door."""
    size: tuple[Positive, Positive, Positive] = (0.22, 0.32, 0.36)
    """Depth, width and height of the cabinet, in metres."""
    base: NotNegative = 0.04
    """Height of the plinth, in metres."""
    hinge: Literal["left", "right"] = "left"
    """Side of the hinges as seen from the robot: left is +y."""
    angle: Annotated[float, Field(gt=0, le=3.0)] = 1.8
    """Maximum opening angle, in radians."""
    handle: HandleCfg = HandleCfg(length=0.12)
    """The vertical handle."""
    mass: Positive = 0.8
    """Mass of the door in kg."""
    damping: NotNegative = 0.4
    """Damping of the hinge, in N m s/rad."""
    friction: NotNegative = 0.1
    """Friction of the hinge, in N m."""


@configclass
class ButtonsCfg(FixtureCfg):
    """A console with a row of spring-loaded push buttons, ``button_0`` at the left."""

    kind: Literal["button"] = "button"
    """Selects a console with buttons."""
    colors: Annotated[tuple[Color, ...], Field(min_length=1, max_length=8)] = ("red",)
    """Colours of the buttons, from left to right."""
    radius: Positive = 0.03
    """Radius of a button, in metres."""
    spacing: Positive = 0.1
    """Distance between two buttons, in metres."""
    height: Positive = 0.05
    """Height of the console, in metres."""
    travel: Positive = 0.016
    """Travel of a button, in metres."""
    stiffness: NotNegative = 400.0
    """Stiffness of the springs, in N/m."""
    damping: NotNegative = 12.0
    """Damping of a button, in N s/m."""


@configclass
class HoleCfg(FixtureCfg):
    """A block with a square vertical hole."""

    kind: Literal["hole"] = "hole"
    """Selects a block with a hole."""
    width: Positive = 0.03
    """Width of the hole, in metres."""
    depth: Positive = 0.06
    """Depth of the hole and height of the block, in metres."""
    size: Positive = 0.12
    """Width of the block, in metres."""
    friction: NotNegative = 0.2
    """Sliding friction of the walls."""


@configclass
class BinCfg(FixtureCfg):
    """An open box."""

    kind: Literal["bin"] = "bin"
    """Selects a bin."""
    size: tuple[Positive, Positive, Positive] = (0.16, 0.16, 0.06)
    """Outer length, width and height, in metres."""
    wall: Positive = 0.008
    """Thickness of walls and floor, in metres."""
    color: Color | None = None
    """Colour of the walls; default: wood."""


@configclass
class PegCfg(Config):
    """A round peg with rounded ends: a free object whose z axis is the axis of the peg."""

    kind: Literal["peg"] = "peg"
    """Selects a peg."""
    radius: Positive = 0.012
    """Radius in metres."""
    length: Positive = 0.12
    """Length from end to end, in metres."""
    mass: Positive = 0.08
    """Mass in kg."""
    color: Color = "yellow"
    """Colour of the peg."""
    pos: tuple[Number, Number, Number] = (0.5, 0.0, 0.06)
    """Position of its centre in the model, in metres."""
    pose: PoseRangeCfg | None = None
    """Range from which its initial pose is sampled: x and y of its centre, height of its lowest point, yaw."""
    min_distance: NotNegative = 0.0
    """Minimum distance in the plane from the centre of everything placed before it."""
    observe: bool = True
    """Whether it is observed as ``<name>/pos``, ``quat`` and ``offset`` (from the tool)."""


Fixture: TypeAlias = DrawersCfg | DoorCfg | ButtonsCfg | HoleCfg | BinCfg | PegCfg
_KINDS: dict[str, Any] = {cfg.kind: cfg for cfg in (DrawersCfg, DoorCfg, ButtonsCfg, HoleCfg, BinCfg, PegCfg)}


def fixture_cfg(given: Any) -> Fixture | None:
    """Return the config of a fixture of the given ``kind``; ``None`` for ``null``."""
    if given is None or type(given) in _KINDS.values():
        return given
    kinds = ", ".join(sorted(_KINDS))
    if not isinstance(given, Mapping):
        raise ValueError(f'expected a fixture {{"kind": ...}} (one of {kinds}), got {shorten(given)}')
    if "kind" not in given:
        raise ConfigError(f"kind: expected the kind of the fixture, got none. Valid: {kinds}.")
    kind = given["kind"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"kind: unknown kind of fixture {kind!r}.{nearest(str(kind), _KINDS)}")
    return _KINDS[kind].from_dict(given)


@configclass
class SceneCfg(Config):
    """Contents of the scene by name, besides the robot; ``null`` removes an entry of the task's own config."""

    objects: dict[ThingName, ObjectCfg | None] = {}
    """Objects on the table."""
    fixtures: dict[ThingName, Annotated[Fixture | None, PlainValidator(fixture_cfg)]] = {}
    """Fixtures, some of them with moving parts, such as ``{"kind": "drawer"}``: see above."""
    goals: dict[ThingName, GoalCfg | None] = {}
    """Goal positions."""
    cameras: dict[ThingName, ViewCfg | None] = {}
    """Further cameras; a camera of the same name is replaced."""

    @property
    def empty(self) -> bool:
        """Whether the scene has no entries."""
        return not (self.objects or self.fixtures or self.goals or self.cameras)


Output = Literal["rgb", "depth", "segmentation"]
OBSERVED_AS: dict[Output, str] = {"rgb": "image", "depth": "depth", "segmentation": "segmentation"}
"""Group of observations that holds an output of a camera, under the camera's name."""
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
    """A camera: one of the model (``attach``), or a free one at ``pos`` that looks at ``lookat``."""

    name: Annotated[str, AfterValidator(_plain_name)] = MISSING
    """Name of the camera, without slashes; its images are observed as ``image/<name>``."""
    outputs: Annotated[tuple[Output, ...], Field(min_length=1), AfterValidator(_distinct)] = ("rgb",)
    """Observed outputs: ``rgb`` (uint8 ``image/<name>`` ``[H, W, 3]``), ``depth`` (float32 ``depth/<name>``
    ``[H, W, 1]`` in metres along the view direction), ``segmentation`` (int32 body ids ``segmentation/<name>``
    ``[H, W, 1]``; ``env.segmentation_names`` lists their names)."""
    width: Pixels = 96
    """Width of the image in pixels."""
    height: Pixels = 96
    """Height of the image in pixels."""
    attach: str | None = None
    """Camera of the model to use; without ``pos``, the one called ``name``."""
    pos: Vector | None = None
    """Position of a free camera, in metres."""
    lookat: Vector | None = None
    """Point at the centre of a free camera's image."""
    fovy: Annotated[float, Field(gt=0, lt=180)] | None = None
    """Vertical field of view in degrees; default: the camera's own."""
    near: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Minimum depth in metres: anything nearer has this depth."""
    far: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Maximum depth in metres, also of the background: anything farther has this depth."""

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
