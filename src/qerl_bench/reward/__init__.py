"""The axis `reward`: what is paid beside, or in place of, the task's own reward."""
