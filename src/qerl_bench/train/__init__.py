"""One step of training: batch, passes, update, and what follows a shortage of memory."""
