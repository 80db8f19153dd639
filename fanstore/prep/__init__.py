"""What fanstore-prep does: scan sources, plan partitions, pack them, write index and manifest."""
