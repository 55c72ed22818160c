"""How much room one world's contacts and constraints can need, from the shapes in a model.

MuJoCo Warp takes its memory before the first step, and what does not fit is left out of the simulation. So the room is
sized for everything that can touch at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

_GEOM = mujoco.mjtGeom
_SMOOTH = (_GEOM.mjGEOM_SPHERE, _GEOM.mjGEOM_ELLIPSOID)
_MAX_CONTACTS = 8
"""Contacts of one pair of bodies at most: two boxes, or two meshes."""
_CONTACTS = {
    frozenset((_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_BOX)): 4,
    frozenset((_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_CYLINDER)): 4,
    frozenset((_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_CAPSULE)): 2,
    frozenset((_GEOM.mjGEOM_CAPSULE, _GEOM.mjGEOM_BOX)): 2,
    frozenset((_GEOM.mjGEOM_CAPSULE,)): 2,
}
_EQUALITY_ROWS = {mujoco.mjtEq.mjEQ_CONNECT: 3, mujoco.mjtEq.mjEQ_WELD: 6}
_MOST_ROWS = 512  # a scene of many meshes never has all of them in touch
_TYPICAL_CONTACTS = 32  # per world: the pool of contacts is shared by all worlds


@dataclass(frozen=True)
class Capacity:
    """Room to ask for: contacts in all worlds together, and constraint rows in each."""

    contacts: int
    rows: int


def capacity(model: mujoco.MjModel, num_envs: int) -> Capacity:
    """Return room for everything that can touch, reach a limit or be held together in a model."""
    contacts, rows = 0, _fixed_rows(model)
    for first in range(model.ngeom):
        for second in range(first + 1, model.ngeom):
            if _can_touch(model, first, second):
                count = _contact_count(int(model.geom_type[first]), int(model.geom_type[second]))
                dimension = max(int(model.geom_condim[first]), int(model.geom_condim[second]))
                contacts, rows = contacts + count, rows + count * _contact_rows(model, dimension)
    for pair in range(model.npair):
        contacts += _MAX_CONTACTS
        rows += _MAX_CONTACTS * _contact_rows(model, int(model.pair_dim[pair]))
    pool = max(contacts, num_envs * min(contacts, _TYPICAL_CONTACTS))
    return Capacity(max(pool, 1), int(np.clip(rows, 1, _MOST_ROWS)))


def _fixed_rows(model: mujoco.MjModel) -> int:
    """Rows of equalities, dry friction, joint and tendon limits."""
    equalities = sum(_EQUALITY_ROWS.get(mujoco.mjtEq(int(kind)), 1) for kind in model.eq_type)
    friction = np.count_nonzero(model.dof_frictionloss) + np.count_nonzero(model.tendon_frictionloss)
    limits = np.count_nonzero(model.jnt_limited) + np.count_nonzero(model.tendon_limited)
    return int(equalities + friction + limits)


def _can_touch(model: mujoco.MjModel, first: int, second: int) -> bool:
    """Apply MuJoCo's filters: collision bits, the same body, parent and child, two fixed bodies."""
    bits = (model.geom_contype[first] & model.geom_conaffinity[second]) | (
        model.geom_contype[second] & model.geom_conaffinity[first]
    )
    one, other = (int(model.body_weldid[model.geom_bodyid[geom]]) for geom in (first, second))
    if not bits or one == other:
        return False
    parents = [int(model.body_weldid[model.body_parentid[body]]) for body in (one, other)]
    related = (one != 0 and parents[1] == one) or (other != 0 and parents[0] == other)
    return not related or bool(model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_FILTERPARENT)


def _contact_count(first: int, second: int) -> int:
    kinds = frozenset((_GEOM(first), _GEOM(second)))
    if kinds & frozenset(_SMOOTH):
        return 1
    return _CONTACTS.get(kinds, _MAX_CONTACTS)


def _contact_rows(model: mujoco.MjModel, dimension: int) -> int:
    """A frictionless contact is one row; a friction pyramid has two rows per direction; a cone, one per dimension."""
    if dimension == 1 or model.opt.cone == mujoco.mjtCone.mjCONE_ELLIPTIC:
        return dimension
    return 2 * (dimension - 1)
