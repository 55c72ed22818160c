"""The viewer in the browser: a scene in 3D, who acts in it, and what is recorded of it (``embodichain view``)."""
