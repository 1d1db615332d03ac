"""The axis `eval`: accuracy on questions that training does not see."""
