"""How a program runs and ends: command line, terminal, signals, child processes, devices, memory."""
