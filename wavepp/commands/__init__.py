"""What the commands do once their flags are read; one module a command."""
