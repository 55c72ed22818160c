"""What goes on behind an ``AsyncCollector``; read ``loop.py`` first.

``station`` is what collects, ``loop`` tells it when, ``places`` says where: in a thread (``thread_worker``) or in a
process (``process_worker`` here, ``child`` there, ``parcel`` between them). ``desk`` is the learner's side, ``pacing``
keeps the collector from running ahead of it. ``mail`` goes to and from environments in processes of their own, whose
other end is ``remote_env``.
"""
