"""Translates FUSE to the core, and looks after mount points."""
