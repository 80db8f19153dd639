"""Files of a mounted dataset as memory, for programs that FanStore does not own."""
