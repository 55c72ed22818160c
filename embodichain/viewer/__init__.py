"""The browser viewer: a 3D scene, a choice of actors, and recording of episodes (``embodichain view``)."""
