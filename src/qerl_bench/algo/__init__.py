"""The axis `algo`: advantages, token losses and loss weights; and KL penalty and importance sampling."""
