"""What the benchmark scripts share: data, peers, readers, and records. Nothing in the fanstore package imports it."""
