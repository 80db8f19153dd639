"""How the processes of one job talk to each other: alone, or over MPI."""
