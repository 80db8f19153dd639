"""The control socket of a mount: what is said over it, the daemon's end, and the end of programs that ask."""
