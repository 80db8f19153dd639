"""Messages between daemons, byte by byte (docs/protocol.md). Used by mpi.py only."""

import enum
import struct

#: Tag of all messages but replies.
TAG_MESSAGE = 1
#: Replies have a tag of their own each, from here on, so that an answer finds the memory that was made for it and no
#: other. Each window of questions to one peer has its own; a tag is free again when its answer has come.
TAG_REPLY_FIRST = 16


class Kind(enum.IntEnum):
    """What a message wants."""

    FETCH = 1  #: length bytes of a partition from offset
    ASK = 2  #: a question; its text follows the header
    TELL = 3  #: a word to all; its text follows the header
    BYE = 4  #: the sender ends orderly and sends nothing more
    GATHER = 5  #: the sender's value in a collective step; its text follows the header


#: kind, reply tag, partition (GATHER: the step), length of what is wanted or of the text that follows, offset.
HEADER = struct.Struct("<IIIIQ")
