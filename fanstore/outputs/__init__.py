"""The writing side: what programs write under the mount, on all nodes, and its way to ``--output``."""
