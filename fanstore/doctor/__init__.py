"""Is this node fit for FanStore? The checks of fanstore-doctor, one module per subject; versions for bug reports."""
