"""The meaning of the file system without FUSE and without MPI: name space, stores, cache, reader, statistics."""
