"""What each command of ``ltui`` does, a file for a command or a small group of them."""
