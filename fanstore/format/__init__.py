"""What is on disk: checksum, codec, index, manifest, tar members. Knows nothing of mounts, MPI or threads."""
