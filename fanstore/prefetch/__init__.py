"""Fetching ahead: what will be read next, given an order, and when to fetch it.

The policy is ``fanstore.order.window``: which files to fetch now, and what was read says how far each reader is.
``statement`` makes sequences of files from what users state (``specification``: the grammar; ``orderfile``: where
programs write), ``hooked`` from what programs report. ``recogniser`` finds them from the first files that are read,
with the help of a process (``search``); ``repetition`` what is read again. ``prefetcher`` drives the policy beside the
chunk broker.
"""
