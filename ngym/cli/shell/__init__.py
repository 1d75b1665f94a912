"""What all commands share: exit codes, shared options, help, completion, and walks through several commands."""
