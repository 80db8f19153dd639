"""Names for the kinds of number that are easily mistaken for each other."""

from typing import NewType

#: Position of an entry in the index; entry 0 is the root directory.
Entry = NewType("Entry", int)
#: Inode number as the kernel sees it: entry number of the primary name, plus one (the root is 1).
Inode = NewType("Inode", int)
#: Number of a partition: its position in the manifest.
Partition = NewType("Partition", int)
#: Position of a process in the job.
Rank = NewType("Rank", int)
