"""Model files: finds, parses and compiles MJCF and URDF, and says what is wrong with a file that cannot be used."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import unquote

import mujoco
import numpy as np

from embodichain.envs.physics.mujoco_cpu import log_warnings
from embodichain.errors import AssetError, ConfigError

ASSETS = Path(__file__).parent / "assets"
_PACKAGE = "package://"
_ELEMENTS = {
    "body": "body",
    "jnt": "joint",
    "dof": "joint",
    "geom": "geom",
    "site": "site",
    "cam": "camera",
    "light": "light",
    "mesh": "mesh",
    "tendon": "tendon",
    "actuator": "actuator",
    "eq": "equality",
    "key": "key",
}
"""Elements of a model by the first word of the names of their arrays."""
_MESHES = (".stl", ".obj", ".msh")
"""Mesh files that MuJoCo reads."""
_UNREADABLE = (ElementTree.ParseError, OSError, ValueError, LookupError)
"""Errors of Python's parser: no XML, no file, or an encoding that it does not know."""
_HIDDEN_GROUP = 3
"""Group of geoms that are not drawn by default."""
_COUNTS = {"body": "nbody", "joint": "njnt", "camera": "ncam", "actuator": "nu", "equality": "neq"}


def find_file(name: str, folder: Path | None = None) -> Path:
    """Return the path of a file in a config: in a package, relative to the config, or to the working directory."""
    if name.startswith(_PACKAGE):
        package, _, inside = name.removeprefix(_PACKAGE).partition("/")
        found = importlib.util.find_spec(package) if package.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise AssetError(f"{name}: the Python package {package!r} is not installed")
        places = [Path(place) / inside for place in found.submodule_search_locations]
    else:
        given = Path(name).expanduser()
        places = [given] if given.is_absolute() else [*([folder / given] if folder else []), Path.cwd() / given]
    for place in places:
        if place.is_file():
            return place.resolve()
    if any(place.is_dir() for place in places):
        raise AssetError(f"{name} is a folder; expected a file in it, such as {name.rstrip('/')}/robot.xml")
    raise AssetError(f"no such file: {name} (looked for {', '.join(map(str, places))})")


def read_spec(path: Path) -> mujoco.MjSpec:
    """Parse an MJCF or URDF file; ``AssetError`` if it is not valid.

    Included files are next to it, or part of this package, such as ``table.xml``.
    """
    log_warnings()
    urdf = _urdf(path)
    if urdf is not None:
        return _read_urdf(path, urdf)
    folder, parts = path.parent, {}
    if folder != ASSETS:
        parts = {part.name: part.read_bytes() for part in ASSETS.glob("*.xml") if not (folder / part.name).exists()}
    try:
        return mujoco.MjSpec.from_file(str(path), include=parts)
    except (ValueError, OSError) as error:
        if "type: 'mujocoinclude'" in str(error):
            raise AssetError(
                f"{path.name} is a part that models include (<mujocoinclude>), and no model by itself; name the file "
                "that includes it"
            ) from error
        kind = "URDF" if path.suffix == ".urdf" or "URDF" in str(error) else "MJCF"
        raise AssetError(f"{path.name} is no valid {kind} model: {_explained(path, str(error))}") from error


def _urdf(path: Path) -> ElementTree.Element | None:
    """Return the root of a URDF file, ``None`` for others."""
    try:
        root = ElementTree.parse(path).getroot()
    except _UNREADABLE:  # MuJoCo's own parser accepts more
        return None
    return root if root.tag == "robot" else None


def _read_urdf(path: Path, root: ElementTree.Element) -> mujoco.MjSpec:
    """Parse a URDF file with the frames of its fixed joints, such as ``tool0``, and with its visual meshes.

    MuJoCo drops both by default; what the file says in ``<mujoco><compiler>`` counts. Visual meshes that MuJoCo cannot
    read, such as Collada files, are left out; then the collision geometry is drawn.
    """
    settings = root.find("mujoco")
    settings = ElementTree.SubElement(root, "mujoco") if settings is None else settings
    compiler = settings.find("compiler")
    compiler = ElementTree.SubElement(settings, "compiler") if compiler is None else compiler
    for name in ("fusestatic", "discardvisual", "strippath"):
        compiler.set(name, compiler.get(name, "false"))
    folder = path.parent / compiler.get("meshdir", "")
    for mesh in root.iter("mesh"):
        name = mesh.get("filename", "")
        found = Path(name).name if compiler.get("strippath") == "true" else _ros_file(name, path)
        mesh.set("filename", name if found is None else str(found))
    for link in root.iter("link"):
        for visual in link.findall("visual"):
            shape = visual.find("geometry")
            drawn = None if shape is None else shape.find("mesh")
            if shape is None or (drawn is not None and not _is_mesh(folder / drawn.get("filename", ""))):
                link.remove(visual)
        for mesh in link.iter("mesh"):
            if (name := mesh.get("filename", "")).startswith(_PACKAGE):
                package = name.removeprefix(_PACKAGE).split("/")[0]
                raise AssetError(
                    f"{path.name}: there is no {name}. The ROS package {package!r} is looked for as a folder of that "
                    f"name that contains {path.name}, or is next to a folder that does; put the meshes there, or write "
                    f"their paths relative to {path.name}"
                )
    try:
        spec = mujoco.MjSpec.from_string(ElementTree.tostring(root, encoding="unicode"))
    except (ValueError, OSError) as error:
        raise AssetError(f"{path.name} is no valid URDF model: {_explained(path, str(error))}") from error
    spec.modelfiledir = str(path.parent)
    for body in spec.bodies:
        colliding = [geom for geom in body.geoms if geom.contype or geom.conaffinity]
        if len(colliding) < len(body.geoms):  # the visual geometry is drawn
            for geom in colliding:
                geom.group = _HIDDEN_GROUP
    return spec


def _is_mesh(file: Path) -> bool:
    """Return whether MuJoCo can read a mesh file, if only as a surface."""
    if not (file.suffix.lower() in _MESHES and file.is_file()):
        return False
    try:
        _mesh_model(file)
    except ValueError:
        return False
    return True


def _mesh_model(
    file: Path, inertia: mujoco.mjtMeshInertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
) -> mujoco.MjModel:
    """Return a model of one body of the shape of a mesh file; ``ValueError`` if the file cannot be that."""
    spec = mujoco.MjSpec()
    spec.add_mesh(name="mesh", file=str(file), inertia=inertia)
    spec.worldbody.add_body().add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname="mesh", mass=1.0)
    return spec.compile()


def _ros_file(name: str, file: Path) -> Path | None:
    """Return the path of a mesh that a URDF file names by ROS package or as ``file://``, ``None`` if there is none.

    A package is a folder of its name that contains the file, or that is next to a folder that does.
    """
    if name.startswith("file://"):
        return Path(unquote(name.removeprefix("file://").removeprefix("localhost")))
    if not name.startswith(_PACKAGE):
        return None
    package, _, inside = name.removeprefix(_PACKAGE).partition("/")
    for parent in file.resolve().parents:
        for folder in (parent if parent.name == package else parent / package, parent / "share" / package):
            if (folder / inside).is_file():
                return folder / inside
    return None


def read_tool(path: Path) -> mujoco.MjSpec:
    """Parse the file of a tool.

    Without a unit, angles in MJCF are in degrees. Here they are in radians if the tool has joints with ranges, and no
    angle above 2 pi: such files are parts for models in radians, and fingers of a few degrees do not exist.
    """
    spec = read_spec(path)
    hinges = [joint for joint in spec.joints if joint.type == mujoco.mjtJoint.mjJNT_HINGE]
    angles = [float(angle) for joint in hinges for angle in (*joint.range, joint.ref, joint.springref)]
    if spec.compiler.degree and any(angles) and all(abs(angle) <= 2.0 * np.pi for angle in angles):
        spec.compiler.degree = _states_or_needs_degrees(path)
    return spec


def _states_or_needs_degrees(path: Path) -> bool:
    """Return whether a file, or one that it includes, states the unit of its angles, or turns something by more than
    2 pi."""
    try:
        root = ElementTree.parse(path).getroot()
    except _UNREADABLE:
        return True
    turns = [element.get("euler", "").split() for element in root.iter()]
    turns += [element.get("axisangle", "").split()[3:] for element in root.iter()]
    included = [path.parent / part.get("file", "") for part in root.iter("include")]
    return (
        any(compiler.get("angle") for compiler in root.iter("compiler"))
        or any(abs(float(angle)) > 2.0 * np.pi for turn in turns for angle in turn)
        or any(_states_or_needs_degrees(part) for part in included if part.is_file())
    )


def take_settings(child: mujoco.MjSpec, parent: mujoco.MjSpec) -> None:
    """Give a model the options and sizes of the one to which it is attached, whose count; MuJoCo warns of others."""
    for name in ("option", "visual", "stat", "memory", "njmax", "nconmax", "nstack"):
        setattr(child, name, getattr(parent, name))


def compile_spec(spec: mujoco.MjSpec, file: Path) -> mujoco.MjModel:
    """Compile the model of a file, whose numbers must be finite; meshes without volume, which MuJoCo rejects, get shell
    inertia."""
    log_warnings()
    for _ in range(len(spec.meshes) + 1):
        try:
            model = spec.compile()
        except ValueError as error:
            flat = re.search(r"mesh volume is too small: (\S+)", str(error))
            mesh = spec.mesh(flat[1]) if flat else None
            if mesh is None:
                raise AssetError(f"{file} does not compile: {_missing(spec, file, str(error))}") from error
            mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
            continue
        check_finite(model, str(file))
        return model
    raise AssetError(f"{file} does not compile: its meshes have no volume")


def mesh_centre(file: str, key: str) -> np.ndarray:
    """Return the centre of the bounding box of a mesh file, in its own frame.

    Raises ``ConfigError`` if the mesh file at ``key`` of a config cannot be the shape of a body.
    """
    try:
        model = _mesh_model(find_file(file), mujoco.mjtMeshInertia.mjMESH_INERTIA_LEGACY)
    except ValueError as error:
        reason = str(error).splitlines()[0].removeprefix("Error: ")
        raise ConfigError(f"{key}: expected a mesh (.obj, .stl or .msh), and {file} is none: {reason}") from error
    turn = np.empty(9)
    mujoco.mju_quat2Mat(turn, model.mesh_quat[0])  # MuJoCo stores vertices in the frame of the inertia
    points = model.mesh_vert @ turn.reshape(3, 3).T + model.mesh_pos[0]
    return 0.5 * (points.min(axis=0) + points.max(axis=0))


def check_finite(model: mujoco.MjModel, what: str) -> None:
    """Raise ``AssetError`` if a number of a model is NaN, or infinite and no limit; the message names its element."""
    found = []
    for field in dir(model):
        values = None if field.startswith("_") else getattr(model, field)
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            continue
        wrong = np.isnan(values) if field.endswith("range") else ~np.isfinite(values)
        if wrong.any():
            row = int(np.argwhere(wrong)[0][0])
            found.append((field.endswith("0"), field, row, values[wrong].flat[0]))  # ...0: computed from others
    if found:
        _, field, row, value = min(found)
        where = _element(model, field, row)
        raise AssetError(
            f"{what}: {where} is {value}; expected finite numbers. Correct it, or the <default> that it comes from"
        )


def _element(model: mujoco.MjModel, field: str, row: int) -> str:
    """Return the attribute and the element that a row of an array of the model belongs to."""
    first, _, attribute = field.partition("_")
    kind = _ELEMENTS.get(first)
    if kind is None or row >= int(getattr(model, _COUNTS.get(kind, f"n{kind}")) if first != "dof" else model.nv):
        return f"{field} of the model"
    index = int(model.dof_jntid[row]) if first == "dof" else row
    name = getattr(model, {"equality": "eq", "camera": "cam"}.get(kind, kind))(index).name
    return f"{attribute} of the {kind} {name!r}" if name else f"{attribute} of {kind} number {index}, without a name,"


def _explained(path: Path, error: str) -> str:
    """Return MuJoCo's error in plain words where the file is no XML."""
    if "XML parse error" in error:
        try:
            ElementTree.parse(path)
        except _UNREADABLE as problem:
            return f"it is no XML ({problem})"
    where = f" (looked in {path.parent})" if "Error opening file" in error else ""
    return error.strip().replace("\n", "; ") + where


def _missing(spec: mujoco.MjSpec, file: Path, error: str) -> str:
    """Add to MuJoCo's error where a missing mesh or texture was expected, and what to do."""
    found = re.search(r"Error opening file '(.+)'", error)
    if found is None:
        return error.strip().replace("\n", "; ")
    given = Path(found[1])
    name = given.relative_to(file.parent) if given.is_relative_to(file.parent) else given
    textures = {Path(one).name for texture in spec.textures for one in (texture.file, *texture.cubefiles) if one}
    kind, folder = ("texturedir", spec.texturedir) if name.name in textures else ("meshdir", spec.meshdir)
    place = file.parent / (name if folder and name.is_relative_to(folder) else Path(folder) / name)
    return (
        f"it needs the file {str(name)!r}, and there is no {place}. Put the file there, or correct its name or the "
        f"{kind} of <compiler>; meshes of robots are often downloaded beside the model"
    )
