"""The axis `reward`: rewards added to the task's own, or in its place."""
