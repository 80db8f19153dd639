"""What the daemon has done and what has happened: statistics, events, history. Pure; everybody may use it."""
