"""The reading side: names, the sources of bytes, the chunk broker, placement and staging. No FUSE, no MPI."""
