"""The axis `aqn`: schedules of noise, what puts it into the norms, and how its size follows entropy."""
