"""Selects the OpenGL backend. A broken driver may crash the process, so each backend is tried in a separate process.

The result is stored in ``MUJOCO_GL``, which MuJoCo's C library and all child processes read.
"""

import os
import signal
import subprocess
import sys

from embodichain.errors import RenderingError

FOUND_VARIABLE = "EMBODICHAIN_GL"
"""Names the backend that a parent process selected, so that its children need not try again."""

INSTALL_HINT = (
    "Install one of these system packages (Debian/Ubuntu names): libosmesa6 (draws on the CPU), or libegl1 with "
    "libgl1-mesa-dri or the GPU vendor's driver. For example: apt-get install libosmesa6"
)

_BACKENDS = {"linux": ("egl", "osmesa", "glfw"), "darwin": ("cgl", "glfw"), "win32": ("glfw",)}
_AUTOMATIC = ("", "enable", "enabled", "on", "true", "1")
_DISABLED = ("disable", "disabled", "off", "false", "0")
_ALIASES = {"glx": "glfw", "wgl": "glfw"}  # MuJoCo's names for a hidden GLFW window
_PROBE_SECONDS = 60.0
_PROBE = """
import sys, mujoco
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom type="box" size="1 1 1" rgba="1 0 0 1"/></worldbody></mujoco>')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data)
    if renderer.render()[..., 0].max() < 50:
        sys.exit("draws nothing but black")
"""

_found: str | None = None
_failure: str | None = None


def choose_backend() -> str:
    """Return a working GL backend or raise ``RenderingError``; if ``MUJOCO_GL`` is set, only that one is tried."""
    global _found, _failure
    if _failure is not None:
        raise RenderingError(_failure)
    if _found is None:
        try:
            _found = _search(_candidates())
        except RenderingError as error:
            _failure = str(error)
            raise
        os.environ["MUJOCO_GL"] = os.environ[FOUND_VARIABLE] = _found
        # Mesa renders small images faster without its helper threads (benchmarks/rendering.py).
        os.environ.setdefault("LP_NUM_THREADS", "0")
        os.environ.setdefault("EGL_LOG_LEVEL", "fatal")  # no warnings about GPUs without permission
        if _found == "osmesa":
            # The shader cache starts a thread, for which a forked child would wait forever at exit.
            os.environ.setdefault("MESA_SHADER_CACHE_DISABLE", "true")
    return _found


def _candidates() -> tuple[str, ...]:
    """Return the backends to try, best first."""
    requested = os.environ.get("MUJOCO_GL", "").lower().strip()
    known = _BACKENDS.get(sys.platform, ("glfw",))
    if requested in _DISABLED:
        raise RenderingError(
            f"rendering is switched off by MUJOCO_GL={requested}: unset the variable to draw. {INSTALL_HINT}"
        )
    if requested in _AUTOMATIC:
        loaded = os.environ.get("PYOPENGL_PLATFORM", "").lower()  # PyOpenGL supports one platform per process
        if loaded in known:
            return (loaded,)
        screen = sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
        return tuple(name for name in known if name != "glfw" or screen)
    requested = _ALIASES.get(requested, requested)
    if requested not in known:
        raise RenderingError(
            f"MUJOCO_GL={requested!r} is no backend of this system: expected one of {', '.join(known)}, or unset"
        )
    return (requested,)


def _search(candidates: tuple[str, ...]) -> str:
    """Return the first backend that renders an image."""
    inherited = os.environ.get(FOUND_VARIABLE)
    if inherited in candidates:
        return inherited
    problems = []
    for backend in candidates:
        problem = probe(backend)
        if problem is None:
            return backend
        problems.append(f"  {backend}: {problem}")
    forced = "" if len(candidates) > 1 else " (the only backend allowed by MUJOCO_GL or PYOPENGL_PLATFORM)"
    raise RenderingError(
        f"no OpenGL backend can draw on this machine{forced}:\n" + "\n".join(problems) + f"\n{INSTALL_HINT}"
    )


def probe(backend: str) -> str | None:
    """Render one small image in a separate process; return the error, or ``None``."""
    env = {k: v for k, v in os.environ.items() if k != "PYOPENGL_PLATFORM"} | {"MUJOCO_GL": backend}
    command = [sys.executable, "-P", "-c", _PROBE]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no picture within {_PROBE_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"the driver crashed ({signal.Signals(-done.returncode).name})"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if "'NoneType' object has no attribute" in lines[-1]:  # PyOpenGL's error message
        return "its library is not installed"
    return lines[-1][:200]
